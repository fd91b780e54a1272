"""Steps on the device of states that rest beside it: they pass through its memory, bucket by bucket.

    copied to the device     bucket b + 1
    the optimizer steps                   bucket b
    copied to where it rests                       bucket b - 1

The optimizer that the device steps is the user's own, so any tier has the bits of states on the device, and the host
computes nothing. Each state has up to three rooms in the device's memory, one for each line above. Events order the
copies and the steps: the host waits for none. When no bucket is under way the rooms' memory is given back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..device import DeviceEvent, asynchronous, blank
from ..hooks import Feature
from ..layout.limits import ROOMS
from ..layout.partition import BucketPlan
from ..layout.states import Master, master_of
from ..tiers.tier import DeviceTier, Rest, Tier

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly


class Room:
    """Memory of the device that one state of one bucket passes through."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # uint8, 1-D
        self.holder: Staged | None = None  # took it last
        self.free = DeviceEvent()  # what was in it last has left

    @property
    def used(self) -> bool:
        return self.holder is not None and self.holder.room is self


class Rooms:
    """All rooms of one rank's device, by state."""

    def __init__(self, tier: DeviceTier) -> None:
        self.tier = tier
        self.largest: dict[str, int] = {}  # bytes of a room, by state
        self._rooms: dict[str, list[Room]] = {}  # the one that was taken longest ago first

    def take(self, state: str, holder: Staged) -> Room:
        """Return a room, which the current stream may write to. It is the holder's once that has it as `room`."""
        rooms = self._rooms.setdefault(state, [])
        room = next((each for each in rooms if not each.used and each.memory.numel() >= self.largest[state]), None)
        if room is None or len(rooms) < ROOMS:
            rooms.append(room := Room(self.tier.reserve("staging", self.largest[state], torch.uint8, zeroed=False)))
        rooms.remove(room)
        rooms.append(room)
        room.holder = holder
        room.free.wait()
        return room

    def give_back(self) -> None:
        """Give all memory back if no room is used. The current stream waits until what was in the rooms has left: so a
        host that leads its device takes no more memory."""
        rooms = [room for each in self._rooms.values() for room in each]
        if not any(room.used for room in rooms):
            self._rooms.clear()
            for room in rooms:
                room.free.wait()
                self.tier.give_back("staging", room.memory)


class Staged(Rest):
    """One state of one bucket that rests beside the device, and is in a room of the device inside `here()`."""

    on_demand = gives = True

    def __init__(self, home: Rest, rooms: Rooms, state: str, bucket: int, numel: int, dtype: torch.dtype) -> None:
        """home: where it rests."""
        self.home, self.pinned = home, home.pinned
        self._rooms, self._ledger, self._state, self._bucket = rooms, rooms.tier.ledger, state, bucket
        self._numel, self._dtype, self._nbytes = numel, dtype, numel * dtype.itemsize
        self.room: Room | None = None
        self._came = DeviceEvent()
        self._depth = 0
        self._dirty = False
        rooms.largest[state] = max(rooms.largest.get(state, 0), self._nbytes)

    @property
    def tensor(self) -> Tensor:  # type: ignore[override]
        if not self._numel:
            return blank(0, self._dtype, self._rooms.tier.device)
        assert self.room is not None and self._depth, f"{self._state} of bucket {self._bucket} is not here"
        return self._view(self.room)

    def _view(self, room: Room) -> Tensor:
        return room.memory[: self._nbytes].view(self._dtype)

    @contextlib.contextmanager
    def here(self, *, changed: bool = True, fresh: bool = False) -> Iterator[Tensor]:
        if not self._numel:
            yield self.tensor
            return
        if self.room is None:
            self._fetch(fresh=fresh)
        if not self._depth:
            self._came.wait()
        self._depth += 1
        try:
            yield self.tensor
        finally:
            self._dirty |= changed
            self._depth -= 1
            if not self._depth:
                self._put_back()

    @contextlib.contextmanager
    def some(self, start: int, stop: int, *, changed: bool) -> Iterator[Tensor]:
        if self.room is not None or start == stop:
            with self.here(changed=changed) as tensor:
                yield tensor[start:stop]
            return
        part = blank(stop - start, self._dtype, self._rooms.tier.device)
        self.give(start, part)
        yield part
        if changed:  # an optimizer's first step makes its states so, one by one: their memory must not pile up
            self.take(start, part, fresh=False).finish()

    def _fetch(self, *, fresh: bool) -> None:
        room = self._rooms.take(self._state, self)
        if not fresh:
            with self._ledger.copied(self._state, self._bucket, self._nbytes):
                self._came = self.home.bring(0, self._view(room))
        self.room = room

    def _put_back(self) -> None:
        assert self.room is not None
        if self._dirty:
            with self._ledger.copied(self._state, self._bucket, self._nbytes, leaves=True):
                self.room.free = self.home.take(0, self._view(self.room), fresh=True)
            self.home.behind()
        self.room, self._dirty = None, False
        self._rooms.give_back()

    def ahead(self) -> None:
        self.home.ahead()
        if self.room is None and self._numel:
            self._fetch(fresh=False)

    def behind(self) -> None:
        if self.room is not None and not self._depth:  # fetched, and not used
            self._came.wait()
            self._put_back()
        self.home.behind()

    def bring(self, start: int, to: Tensor) -> DeviceEvent:
        return self.home.bring(start, to)

    def take(self, start: int, values: Tensor, *, fresh: bool) -> DeviceEvent:
        assert self.room is None, f"{self._state} of bucket {self._bucket} is on the device"
        return self.home.take(start, values, fresh=fresh)

    def same_as(self, tensor: Tensor) -> bool:
        return self.home.same_as(tensor)


class StagedTier(Tier):
    """Another tier, of which what rests there is used on the device."""

    on_demand = True

    def __init__(self, home: Tier, rooms: Rooms) -> None:
        self.home, self.name, self.meets = home, home.name, home.meets
        self.device, self.ledger = rooms.tier.device, home.ledger
        self._rooms = rooms

    def rest(self, state: str, bucket: int, numel: int, dtype: torch.dtype) -> Rest:
        return Staged(self.home.rest(state, bucket, numel, dtype), self._rooms, state, bucket, numel, dtype)

    def give_up(self, state: str, rests: Sequence[Rest]) -> None:
        self.home.give_up(state, [rest.home for rest in rests if isinstance(rest, Staged)])

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        with self.home.renewed():
            yield


class DeviceStepFeature(Feature):
    name = "steps of offloaded states on the device"
    page = "offload.md"

    def tiers(self, assembly: Assembly, plan: BucketPlan, at: dict[str, Tier]) -> dict[str, Tier]:
        on_accelerator = asynchronous(assembly.group.device)  # on the CPU device and host are one
        if not (on_accelerator and assembly.offload.stepped_there and plan.trainable) or at["optimizer"].on_device:
            return {}
        if not isinstance(rooms := assembly.kept.get("rooms"), Rooms):
            assembly.kept["rooms"] = rooms = Rooms(assembly.tier)
        names, formats = {state: tier.name for state, tier in at.items()}, assembly.precision.formats(plan)
        master = master_of(formats, assembly.placements, names, one_memory=False)
        staged = ("optimizer", "parameters") if master is Master.NONE else ("optimizer",)
        return {state: StagedTier(at[state], rooms) for state in staged}


FEATURE = DeviceStepFeature()
