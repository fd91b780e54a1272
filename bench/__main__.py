"""`python -m bench`: training beside the peers, tensors, checkpoints, offload, settings; `--quick`: the first two."""

import sys

from . import checkpoint, offload, pairs, tensors, train

train.main()
tensors.main()
if "--quick" not in sys.argv:
    checkpoint.main()
    offload.main()
    pairs.main()
