"""`python -m bench`: training beside the peers, many tensors, checkpoints, offload; `--quick`: a look at the first."""

import sys

from . import checkpoint, offload, tensors, train

train.main()
if "--quick" not in sys.argv:
    tensors.main()
    checkpoint.main()
    offload.main()
