"""One state of one bucket on one rank.

Parameters, masters, gradients and optimizer states are all this:

    a Flat is   some elements of a bucket    all of them, a shard or a part of one: its degree (`layout/stage.py`)
                in a number format           its dtype; at rest it may be encoded (`features/split_master.py`)
                resting in a tier            the device, host memory, or a file
                of a team of ranks           those that hold the other shards, or copies

    verb         what it does                                                     moves over
    here         brings the elements to memory, and puts back what was changed    the tier
    of           a view of some of the elements, inside here()                    nothing
    part         the same elements, wherever they rest                            nothing
    redistribute sends every owner's elements to all ranks of the team            the tier and the team
    share        sends every replica's part of a shard to all replicas            the tier and the replicas

Indices are the bucket's own everywhere: no caller needs to know where a Flat begins.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ...comm.agreement import Group
from ...comm.transport import Work
from ...device import TO_THE_DEVICE, DeviceEvent, behind, event, streams
from ...errors import TierError
from ...layout.partition import BucketPlan
from ...layout.stage import Degree
from ...tiers.tier import Part, Rest, Tier


class Flat:
    """The elements [first, last) of a bucket that rest on this rank as one of its states."""

    by_part = False  # does each replica maintain only a part of its shard?

    def __init__(
        self, plan: BucketPlan, group: Group, rest: Rest, dtype: torch.dtype, degree: Degree, state: str = ""
    ) -> None:
        self.plan = plan
        self.group = group
        self.team = group.team_of(plan)
        self.rest = rest
        self.dtype = dtype
        self.degree = degree
        self.state = state  # what the ledger calls it
        self.first, self.last = plan.held(self.team.seat, degree)
        self.owned = plan.held(self.team.seat, max(degree, Degree.TEAM))  # the part that this rank maintains

    @classmethod
    def reserve(
        cls, state: str, plan: BucketPlan, group: Group, tier: Tier, dtype: torch.dtype, degree: Degree
    ) -> Flat:
        """Make a Flat of zeros in a tier."""
        flat = cls(plan, group, None, dtype, degree, state)  # type: ignore[arg-type]
        # Reserve last: if an interrupt came after this, a file would keep counted room for a state that nobody has.
        flat.rest = tier.rest(state, plan.index, flat.last - flat.first, dtype)
        return flat

    # --- which elements ---------------------------------------------------------------------------------------------

    @property
    def tensor(self) -> Tensor:
        """All elements that rest here, 1-D; inside here()."""
        return self.rest.tensor

    def of(self, first: int, last: int) -> Tensor:
        """Return bucket elements [first, last), 1-D; inside here()."""
        return self.rest.tensor[first - self.first : last - self.first]

    @property
    def own(self) -> Tensor:
        """The elements that this rank maintains (`owned`), 1-D; inside here()."""
        return self.of(*self.owned)

    def part(self, first: int, last: int) -> Part:
        """Return bucket elements [first, last), wherever they rest."""
        return Part(self.rest, first - self.first, last - self.first, (last - first,), self.dtype)

    # --- where they rest --------------------------------------------------------------------------------------------

    @property
    def on_demand(self) -> bool:
        """True if `tensor` is valid only inside `here()`."""
        return self.rest.on_demand

    @property
    def on_device(self) -> bool:
        """True if `tensor` is always in the device's memory."""
        return self.rest.on_device and not self.rest.on_demand

    @property
    def pinned(self) -> bool:
        """Tell if it is in pinned memory, which the device copies asynchronously."""
        return self.rest.pinned

    def here(self, *, changed: bool = True, fresh: bool = False) -> contextlib.AbstractContextManager[Tensor]:
        """Bring `tensor` to memory for the block; afterwards what was `changed` in it is kept. May nest.

        fresh: all of it will be written, so what rests need not be brought.
        """
        return self.rest.here(changed=changed, fresh=fresh)

    def ahead(self) -> None:
        """Begin to bring it to memory, because it will soon be used."""
        self.rest.ahead()

    def behind(self) -> None:
        """Begin to put back what was changed, because it will not be used soon."""
        self.rest.behind()

    # --- between ranks ----------------------------------------------------------------------------------------------

    def redistribute(self, to: Tensor | None = None, *, kept: bool = True) -> Work:
        """Send every owner's elements to all ranks of the team: the whole bucket into `to`, or to where it rests.

        to: 1-D, on the device; elements travel in its dtype. It is filled once the work was waited for. A bucket that
            every rank has whole is copied to `to` and not sent.
        kept: without `to`, keep what arrives where it rests. If that is off the device, all is there on return.

        A rank that cannot copy its part to `to` reports the error and still takes part, because others wait for it.
        """
        if to is not None:
            here = self.degree is Degree.RANK
            first, last = (0, self.plan.numel) if here else self.owned
            aside = streams(to.device) and not self.on_device  # on a side stream: computation does not wait for it
            with behind(TO_THE_DEVICE, to.device) if aside else contextlib.nullcontext():
                self.copy(first, to[first:last])
                work = Work() if here else self.send(to)
                return work.after(event(to.device)) if aside else work
        if self.rest.on_device:  # a `Passing` rest too: the caller is inside its here()
            return self.rest.gather(self.team, self.plan, self.state)
        if streams(self.team.device) and not self.on_demand:
            moved = torch.empty(self.plan.numel, dtype=self.dtype, device=self.team.device)
            self.give(moved[slice(*self.owned)])
            self.team.gather(moved, self.plan, self.state).wait()
            self.rest.take(0, moved, fresh=True).wait()
            return Work()
        with self.here(changed=kept) as whole:
            moved = whole.to(self.team.device)  # itself, where host and device are one
            self.team.gather(moved, self.plan, self.state).wait()
            if moved is not whole:
                whole.copy_(moved)
        return Work()

    def send(self, whole: Tensor) -> Work:
        """Send what is owned, which lies in `whole` on the device, to all ranks of the team."""
        if self.by_part:
            self._complete(whole[slice(*self.plan.shard(self.team.position))])
        elif self.degree is Degree.ALL:
            assert self.team.by_levels is not None  # set by the feature of two levels
            return self.team.by_levels(self.team, whole, self.plan, self.state)
        return self.team.gather(whole, self.plan, self.state)

    @torch.no_grad()
    def give_all(self, source: int) -> None:
        """Copy rank `source`'s elements to all ranks, of a state that every rank has whole."""
        with self.here() as own:
            sent = own.to(self.team.device)
            self.group.give_all(sent, self.plan, source)
            own.copy_(sent)

    @torch.no_grad()
    def share(self, updated: Degree) -> None:
        """Send this replica's updated part of the shard to the other replicas, if each has updated a part (ALL)."""
        if updated is not Degree.ALL or self.degree is Degree.ALL:
            return
        with self.here():
            own = self.own
            moved = own.to(self.team.device)  # itself, where host and device are one
            self._complete(moved)
            if moved is not own:
                own.copy_(moved)

    def _complete(self, shard: Tensor) -> None:
        self.team.column.share(shard, self.plan, self.state).wait()

    def settle(self) -> None:
        """Where all ranks read one memory, publish what owners wrote, and drop this rank's other writes."""
        if self.rest.lands_at_once:
            self.redistribute().wait()

    def take(self, values: Tensor, *, fresh: bool) -> DeviceEvent:
        """Replace the owned elements by values from the device, which must not change until the event that it returns.

        fresh: other elements at rest here may be lost.
        """
        with self.copied(values.nbytes, leaves=True):
            return self.rest.take(self.owned[0] - self.first, values, fresh=fresh)

    def give(self, to: Tensor) -> None:
        """Fill `to`, of the device, with what is owned, in the order of the current stream."""
        with self.copied(to.nbytes):
            self.rest.give(self.owned[0] - self.first, to)

    def copied(self, nbytes: int, *, leaves: bool = False) -> contextlib.AbstractContextManager[None]:
        """Note a copy that runs inside the block: see `Ledger.copied`."""
        return self.team.ledger.copied(self.state, self.plan.index, nbytes, leaves=leaves)

    def copy(self, first: int, to: Tensor) -> None:
        """Copy elements from bucket element `first` on to `to`, in its dtype and on its device.

        On a `TierError` it is reported, and `to` is filled with NaN.
        """
        try:
            # A device that reads pinned memory waits for its own writes there; the host need not.
            with contextlib.nullcontext() if self.rest.gives else self.here(changed=False), self.copied(to.nbytes):
                self.rest.give(first - self.first, to)
        except TierError as error:
            self.group.report(error)
            to.view(torch.uint8).fill_(0xFF)  # NaN in any format
