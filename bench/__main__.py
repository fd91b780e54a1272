"""`python -m bench`: training beside the peers, many tensors, checkpoints; `--quick`: a look at the first."""

import sys

from . import checkpoint, tensors, train

train.main()
if "--quick" not in sys.argv:
    tensors.main()
    checkpoint.main()
