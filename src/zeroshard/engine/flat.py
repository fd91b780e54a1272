"""One state of one bucket on one rank.

Parameters, masters, gradients and optimizer states are all this:

    a Flat is   some elements of a bucket    the rank's shard, or all of them: the placement
                in a number format           its dtype
                resting in a tier            the device, host memory, or a file
                of a team of ranks           those that hold the other shards, or copies

    verb        what it does                                                     moves over
    here        brings the elements to memory, and puts back what was changed    the tier
    of          a view of some of the elements, inside here()                    nothing
    part        the same elements, wherever they rest                            nothing
    spread      every owner's elements go to all ranks, in place                 the team

Indices are the bucket's own everywhere: nobody needs to know where a Flat begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..events import DEVICE
from ..layout import Bucket, Slot
from ..ranks.transport import Team, Work
from ..tiers.tier import Part, Rest, Tier


class Flat:
    """The elements [first, last) of a bucket that rest on this rank as one of its states."""

    def __init__(
        self, bucket: Bucket, team: Team, rest: Rest, dtype: torch.dtype, *, sharded: bool, state: str = ""
    ) -> None:
        self.bucket = bucket
        self.team = team
        self.rest = rest
        self.dtype = dtype
        self.sharded = sharded
        self.state = state  # what the ledger calls it
        self.first, self.last = bucket.held(team.position, sharded=sharded)

    @classmethod
    def reserve(cls, state: str, bucket: Bucket, team: Team, tier: Tier, dtype: torch.dtype, *, sharded: bool) -> Flat:
        """Zeros in a tier."""
        first, last = bucket.held(team.position, sharded=sharded)
        rest = tier.rest(state, bucket.index, last - first, dtype)
        return cls(bucket, team, rest, dtype, sharded=sharded, state=state)

    # --- which elements ---------------------------------------------------------------------------------------------

    @property
    def tensor(self) -> Tensor:
        """All elements that rest here, 1-D; inside here()."""
        return self.rest.tensor

    def of(self, first: int, last: int) -> Tensor:
        """Bucket elements [first, last), 1-D; inside here()."""
        return self.rest.tensor[first - self.first : last - self.first]

    @property
    def own(self) -> Tensor:
        """This rank's shard, 1-D; inside here()."""
        return self.rest.tensor if self.sharded else self.of(*self.bucket.shard(self.team.position))

    def fragment(self, slot: Slot) -> Tensor:
        """The part of a slot that lies in this rank's shard, 1-D, possibly empty; inside here()."""
        return self.own[slot.slice_of(*self.bucket.shard(self.team.position))]

    def part(self, first: int, last: int) -> Part:
        """Bucket elements [first, last), wherever they rest."""
        return Part(self.rest, first - self.first, last - self.first, (last - first,), self.dtype)

    # --- where they rest --------------------------------------------------------------------------------------------

    @property
    def away(self) -> bool:
        """Does it take `here()` to make `tensor` what it should be?"""
        return self.rest.away

    @property
    def on_device(self) -> bool:
        return self.rest.tier == DEVICE

    @contextlib.contextmanager
    def here(self, *, changed: bool = True, fresh: bool = False) -> Iterator[Tensor]:
        """Inside, `tensor` is in memory; afterwards what was `changed` in it is kept. May nest.

        fresh: all of it will be written, so what rests need not be brought.
        """
        with self.rest.here(changed=changed, fresh=fresh) as tensor:
            yield tensor

    def ahead(self) -> None:
        """Begin to bring it to memory, for somebody who will soon ask."""
        self.rest.ahead()

    def behind(self) -> None:
        """Begin to put back what was changed: nobody will ask soon."""
        self.rest.behind()

    # --- between ranks ----------------------------------------------------------------------------------------------

    def spread(self, device: torch.device, *, kept: bool = True) -> Work:
        """Every owner's elements go to all ranks that hold a copy. What rests off the device is through on return.

        kept: what arrives is to stay there.
        """
        if self.on_device:
            return self.team.gather(self.tensor, self.bucket, self.state)
        with self.here(changed=kept) as whole:
            moved = whole.to(device)  # itself, where host and device are one
            self.team.gather(moved, self.bucket, self.state).wait()
            if moved is not whole:
                whole.copy_(moved)
        return Work()
