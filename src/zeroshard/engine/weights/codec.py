"""Codecs: how what rests of a bucket's parameters becomes what modules compute with, and how its gradients travel.

    Plain   parameters as modules compute with them; where they have masters, each step casts these to them
    Cast    masters alone: a gather casts this rank's shard as it leaves
    SplitOf parameters, and beside them the bits that they lack of their masters: `features/split_master.py`
    E4M3    8 bits, and a scale for each tile, beside masters: `features/fp8_parameters.py`

    Values  gradients as they are added up
    Codes   8 bits, and a scale for each block: `features/int8_gradients.py`

A format that rests or travels in another way is a codec of its own. The bucket asks the first kind where a gather's
bytes arrive, what they stand for, and what to do with an edit; a sum asks the second what to send, and what arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...layout.partition import Bucket

if TYPE_CHECKING:
    from .buffer import Buffer


class Plain:
    """The codec of parameters that rest as modules compute with them."""

    resident = True  # can what rests whole in the device's memory be what modules compute with?
    of_masters = False  # is what rests always made of the masters, so that nothing else need be loaded?
    agrees = False  # does encoding take an answer of all ranks, see `agree`?
    alone = False  # is such a bucket stepped apart from others, since its masters are made for the moment?
    asks = False  # must the host know whether there are edits before it copies them?

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    # --- from masters to what rests -----------------------------------------------------------------------------------

    @property
    def beside(self) -> bool:
        """True if parameters rest beside their masters, so that a step has to cast these back."""
        return self.buffer.master is not None

    def encode(self, resting: Tensor, source: Tensor) -> None:
        """Fill what rests of the parameters at construction. source: the whole bucket, in the masters' dtype."""
        resting.copy_(source[self.buffer.parameters.first : self.buffer.parameters.last])

    def look(self) -> None:
        """Take from the masters what `agree` will ask, while a step of this bucket alone has them in memory."""

    def forget(self) -> None:
        """Forget what `look` took: the masters have changed since."""

    def wrote(self, stored: Tensor) -> None:
        """Take note that a step has cast the masters to these parameters, which rest."""

    @classmethod
    def agree(cls, codecs: Sequence[Plain]) -> None:
        """Encode those buckets of `codecs` that have this one, with an answer of all ranks, in one message."""

    # --- from what rests to what modules compute with -----------------------------------------------------------------

    @property
    def arriving(self) -> Tensor | None:
        """This rank's part of a gather that is under way, if its digest will tell edits; else None."""
        return None

    @property
    def opened(self) -> Tensor | None:
        """This rank's part of the open copy, if its digest will tell edits; else None."""
        return self.arriving

    def landing(self, *, in_use: bool) -> Tensor:
        """Return the memory to gather into. in_use: the gathered copy may be read meanwhile."""
        return self.buffer.full

    def decode(self) -> None:
        """Make the gathered copy of what has landed."""

    def recovery_copy(self) -> Tensor:
        """Return a whole bucket with this rank's shard in it, as it travels, so that ranks in a gather get this."""
        buffer = self.buffer
        if buffer.resident or not buffer.gathered.released:
            return buffer.full
        return self._own_shard(buffer.dtype)

    def _own_shard(self, dtype: torch.dtype) -> Tensor:
        buffer = self.buffer
        whole = torch.zeros(buffer.bucket.numel, dtype=dtype, device=buffer.tier.device)
        first, last = buffer.parameters.owned
        buffer.parameters.copy(first, whole[first:last])
        return whole

    # --- edits --------------------------------------------------------------------------------------------------------

    def take_back(self, *, asked: bool) -> bool:
        """Copy edits of the gathered copy to what rests. Returns if there were any; see `Edits.keep`."""
        return self.buffer.edits.take_back(asked=asked)

    def before_taking_back(self) -> None:
        """Copy edits of the gathered copy to masters that what rests is needed for."""

    def follow(self, params: Tensor, *, asked: bool) -> bool:
        """Copy edits of these parameters, which rest, to their masters. Returns if there were any."""
        return self.buffer.edits.reseed(params, asked=asked)


class Cast(Plain):
    """The codec of buckets of which masters alone rest."""

    of_masters = True

    @property
    def beside(self) -> bool:
        return False

    @property
    def arriving(self) -> Tensor | None:
        return self.buffer.mine

    def take_back(self, *, asked: bool) -> bool:
        return self.buffer.edits.take_back_to_masters(asked=asked)


class Message(Protocol):
    """The format in which each rank's contribution to a bucket's sum travels."""

    bucket: Bucket  # in elements of what is sent
    dtype: torch.dtype  # of these

    def encode(self, values: Tensor, take: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        """Return what is sent: `values`, or memory that `take` made (of so many elements, in a dtype)."""

    def decode(self, piece: Tensor) -> Any:
        """Return what arrived, 1-D, as numbers to add up: a tensor, or what its slices decode to."""


class Values:
    """The format of contributions that travel as they are added up."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        self.bucket = bucket
        self.dtype = dtype

    def encode(self, values: Tensor, take: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        return values

    def decode(self, piece: Tensor) -> Tensor:
        return piece
