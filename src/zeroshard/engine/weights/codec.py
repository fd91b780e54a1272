"""Codecs: how a bucket's parameters at rest become the copy that modules compute with, and how its gradients travel.

    Plain   parameters rest in the dtype that modules compute with; if they have masters, each step casts these to them
    Cast    only masters rest; a gather casts this rank's shard when it sends it
    SplitOf parameters rest, and the bits of their masters that they lack: `features/split_master.py`
    E4M3    parameters rest in 8 bits, with a scale for each tile, and masters: `features/fp8_parameters.py`

    Values  gradients in the dtype in which they are added up
    Codes   8 bits, and a scale for each block: `features/int8_gradients.py`

Another format at rest or on the way is another codec. The bucket asks a codec of parameters where a gather's bytes
arrive, how to decode them, and what to do with an edit. A sum asks a codec of gradients how to encode what it sends,
and how to decode what arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...layout.partition import BucketPlan

if TYPE_CHECKING:
    from .bucket import Bucket


class Plain:
    """The codec of parameters that rest as modules compute with them."""

    resident = True  # can modules compute with the parameters at rest, if whole and on the device?
    of_masters = False  # are parameters at rest always made from masters, so that a load restores only these?
    agrees = False  # must all ranks communicate to encode? See `agree`
    alone = False  # is such a bucket stepped separately, because its masters exist only while used?
    asks = False  # must the host know whether there are edits before it copies them?

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    # --- from masters to what rests -----------------------------------------------------------------------------------

    @property
    def beside(self) -> bool:
        """True if parameters rest in addition to masters, so that a step has to cast the masters to them."""
        return self.bucket.master is not None

    def encode(self, resting: Tensor, source: Tensor) -> None:
        """Fill what rests of the parameters at construction. source: the whole bucket, in the masters' dtype."""
        resting.copy_(source[self.bucket.parameters.first : self.bucket.parameters.last])

    def look(self) -> None:
        """Read from the masters what `agree` will need, while the separate step of this bucket has them in memory."""

    def forget(self) -> None:
        """Forget what `look` took: the masters have changed since."""

    def wrote(self, stored: Tensor) -> None:
        """Take note that a step has cast the masters to these parameters, which rest."""

    @classmethod
    def agree(cls, codecs: Sequence[Plain]) -> None:
        """Encode the buckets of those `codecs` that are of this class; all ranks first agree, in one message."""

    # --- from what rests to what modules compute with -----------------------------------------------------------------

    @property
    def arriving(self) -> Tensor | None:
        """This rank's part of the gather under way, if edits are found by a digest of it; else None."""
        return None

    @property
    def opened(self) -> Tensor | None:
        """This rank's part of the open copy, if edits are found by a digest of it; else None."""
        return self.arriving

    def landing(self, *, in_use: bool) -> Tensor:
        """Return the memory to gather into. in_use: the gathered copy may be read meanwhile."""
        return self.bucket.full

    def decode(self) -> None:
        """Decode what has landed into the gathered copy."""

    def recovery_copy(self) -> Tensor:
        """Return a whole bucket, in the format that travels, with this rank's shard in it, for peers in a gather."""
        bucket = self.bucket
        if bucket.resident or not bucket.gathered.released:
            return bucket.full
        return self._own_shard(bucket.dtype)

    def _own_shard(self, dtype: torch.dtype) -> Tensor:
        bucket = self.bucket
        whole = torch.zeros(bucket.plan.numel, dtype=dtype, device=bucket.tier.device)
        first, last = bucket.parameters.owned
        bucket.parameters.copy(first, whole[first:last])
        return whole

    # --- edits --------------------------------------------------------------------------------------------------------

    def take_back(self, *, asked: bool) -> bool:
        """Copy edits of the gathered copy to what rests. Returns if there were any; see `Edits.keep`."""
        return self.bucket.edits.take_back(asked=asked)

    def before_taking_back(self) -> None:
        """Copy edits of the gathered copy to masters whose values depend on the parameters at rest."""

    def follow(self, params: Tensor, *, asked: bool) -> bool:
        """Copy edits of these parameters, which rest, to their masters. Returns if there were any."""
        return self.bucket.edits.reseed(params, asked=asked)


class Cast(Plain):
    """The codec of buckets of which masters alone rest."""

    of_masters = True

    @property
    def beside(self) -> bool:
        return False

    @property
    def arriving(self) -> Tensor | None:
        return self.bucket.mine

    def take_back(self, *, asked: bool) -> bool:
        return self.bucket.edits.take_back_to_masters(asked=asked)


class Message(Protocol):
    """The format in which each rank's contribution to a bucket's sum travels."""

    plan: BucketPlan  # in elements of what is sent
    dtype: torch.dtype  # of these

    def encode(self, values: Tensor, take: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        """Return what is sent: `values` itself, or memory made by `take(numel, dtype)`."""

    def decode(self, piece: Tensor) -> Any:
        """Return what arrived, 1-D, as numbers to add up: a tensor, or an object whose slices decode to tensors."""


class Values:
    """The format of contributions that travel in the dtype in which they are added up."""

    def __init__(self, plan: BucketPlan, dtype: torch.dtype) -> None:
        self.plan = plan
        self.dtype = dtype

    def encode(self, values: Tensor, take: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        return values

    def decode(self, piece: Tensor) -> Tensor:
        return piece
