"""`python -m bench`: training beside the peers, then checkpoints; `python -m bench --quick`: a look at the first."""

import sys

from . import checkpoint, train

train.main()
if "--quick" not in sys.argv:
    checkpoint.main()
