"""`python -m bench`: training beside the peers, tensors, checkpoints, offload, settings; `--quick`: the first alone."""

import sys

from . import checkpoint, offload, pairs, tensors, train

train.main()
if "--quick" not in sys.argv:
    tensors.main()
    checkpoint.main()
    offload.main()
    pairs.main()
