"""`Offload.activations`: what a unit's forward saves for backward rests in host memory or files until then.

    forward    a unit saves tensors           they stay on the device while it runs
               the next unit saves its first  the previous unit's tensors are copied out in the background
    backward   a saved tensor is unpacked     all that its unit saved comes back; the unit before it begins to

`guard.SavedTensors` saves tensors, and calls `keep` for every tensor that is not a weight. A *segment* is what one unit
saves without interruption: a unit that runs other units inside has several. Whole storages move, each once, however
many saved tensors lie in them. The last segment of a forward stays on the device, because backward begins with it,
until another forward begins.

These stay on the device too: storages smaller than `SMALL`; inputs of the outermost forward, parameters and buffers,
whose memory is held elsewhere anyway; and what a forward inside backward saves, because backward needs it at once.
Tensors that other saved-tensor hooks take, such as activation checkpointing's, are left to those hooks.

If the model computes on the CPU, activations are in host memory already: with "cpu" they stay in place and count as
host memory, as the other states do there.

As in plain PyTorch, unpacking raises an error if a tensor was edited in place after it was saved: an empty tensor that
shares its version counter is kept to tell.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..arithmetic.sums import simulated
from ..device import TO_THE_DEVICE, DeviceEvent, asynchronous, behind, event, streams
from ..engine.gradients.backward import backward_is_running
from ..engine.gradients.subscriber import Subscriber
from ..engine.weights.forward import Forward, Frame
from ..engine.weights.guard import SavedItself, SavedNote, check_version
from ..engine.weights.modes import outside
from ..errors import UserError
from ..events import HOST, NVME
from ..hooks import Feature, features, first
from ..tiers.tier import DeviceTier, Rest, Tier

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly
    from ..engine.engine import Engine

STATE, STAGED = "activations", "staged activations"  # STAGED: in the rooms of their files
SMALL = 1 << 10  # bytes; to move less than this saves nothing
GOING = 1  # segments that are being copied out; their device memory is kept until they have arrived


_numbers = itertools.count()  # of storages that were kept


class Kept:
    """One storage in which saved tensors lie. `flat` is all of it, 1-D bytes, while that is on the device."""

    def __init__(self, flat: Tensor, owner: Segment, version: Tensor | None) -> None:
        self.flat: Tensor | None = flat
        self.nbytes = flat.numel()
        self.address = StorageWeakRef(flat.untyped_storage())  # while this exists, no other storage gets the address
        self.owner = owner  # the segment with which it moves
        self.start = -1  # its first byte in the owner's `rest`; -1: it has not gone out
        self.came: DeviceEvent | None = None  # event: it is back on the device; None: it is not, or never left
        self.notes = self.unused = 0  # saved tensors in it; how many of them were not unpacked since it came back
        self._version, self._sent = version, 0
        self.number = next(_numbers)

    def went(self, start: int, *, stays: bool = False) -> None:
        """Note where the storage rests. stays: it stays in place."""
        self.start, self.flat = start, self.flat if stays else None
        self._sent = 0 if self._version is None else self._version._version

    def has(self, tensor: Tensor) -> bool:
        """Tell if the bytes that are kept, or will be, are those that a tensor in this storage has now."""
        return self.start < 0 or self._version is None or tensor._version == self._version._version == self._sent


class Segment:
    """The storages of the tensors that one run of a unit's forward saved, and where the storages that it owns rest."""

    def __init__(self, number: int = 0, unit: int = 0, forward: int = 0) -> None:
        self.number = number
        self.unit = unit
        self.forward = forward
        self.rest: Rest | None = None
        self.reached = False  # has the running backward come to it?
        self._needs: dict[int, weakref.ref[Kept]] = {}  # by number; a storage may be saved often

    def add(self, kept: Kept) -> None:
        self._needs[kept.number] = weakref.ref(kept)

    def needs(self) -> list[Kept]:
        """Return the storages that some graph still needs, each once."""
        return [kept for each in self._needs.values() if (kept := each()) is not None]


class SavedActivation(NamedTuple):
    """What autograd keeps in place of a saved tensor: where its storage rests, and its layout in that."""

    keeper: Activations
    kept: Kept
    segment: Segment
    dtype: torch.dtype
    offset: Any
    size: torch.Size
    stride: tuple[int, ...]
    saved: Tensor  # an empty tensor with its version counter; the tensor itself if it stays in place
    version: int

    @outside
    def restore(self) -> Tensor:
        check_version(self.saved, self.version, self.dtype, self.size)
        flat = self.keeper.brought(self.kept, self.segment)
        with torch.no_grad():
            whole = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
            return whole.as_strided(self.size, self.stride, self.offset)


class Activations(Subscriber):
    """The book of all that one sharded model's forwards have saved on one rank.

    Graphs refer to it: it must not keep the engine alive.
    """

    def __init__(self, engine: Engine, rests: Tier) -> None:
        self.rests = rests
        self.device: DeviceTier = engine.tier
        self.ledger = engine.ledger
        self.in_place = rests.name == HOST and not asynchronous(engine.device)
        self._engine = weakref.ref(engine)
        self._forward: weakref.ref[Forward] = weakref.ref(engine.schedule.forward)
        self._outermost: Any = lambda: None  # weak reference to the frame of the running forward
        self._saving: Any = lambda: None  # and to the frame of the unit that saved last
        self._open = Segment()
        self._numbers = itertools.count(1)
        self._forwards = 0
        self._segments: dict[int, weakref.ref[Segment]] = {}  # segments of graphs that still exist, oldest first
        self._storages: dict[int, weakref.ref[Kept]] = {}  # by address
        self._others: set[int] = set()  # addresses of storages that live elsewhere
        self._going: list[tuple[DeviceEvent, list[Tensor]]] = []  # per copy: the event that ends it, and what it reads
        self._reached: list[weakref.ref[Segment]] = []
        self._here: dict[int, tuple[weakref.ref[Kept], Tensor, int]] = {}  # copies that came back, their idle use count
        self._taken: list[tuple[Tensor, int]] = []  # copies given up to autograd, with the same count
        self._rests: dict[int, tuple[weakref.ref[Segment], int, Rest]] = {}  # room in use, by its segment's number
        self._idle: dict[int, list[Rest]] = {}  # free room, by its size in bytes
        self._asked: set[int] = set()  # sizes of room that the running forward asked for
        self._leave_out: Callable[[Tensor], None] | None = None  # set by a simulation
        self._empty = torch.empty(0, device=engine.device)

    # --- forward ----------------------------------------------------------------------------------------------------

    def keep(self, tensor: Tensor) -> SavedNote:
        """Keep a tensor that autograd saves and that is not one of the weights that are released."""
        forward = self._forward()
        frames = forward.frames if forward is not None else ()
        if not frames or frames[-1].again or backward_is_running():
            return SavedItself.of(tensor)
        if frames[0] is not self._outermost():
            self._begin(frames[0])
        if not self._moves(tensor):
            return SavedItself.of(tensor)
        if frames[-1] is not self._saving():
            self._close()
            self._start(frames[-1])
        fake = simulated(tensor)
        saved = tensor.detach()
        version = 0 if fake else saved._version
        if not (self.in_place or fake):
            saved.data = self._empty
        kept = self._kept(tensor, None if fake else saved)
        kept.notes += 1
        form = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        return SavedActivation(self, kept, self._open, *form, self._empty if fake else saved, version)

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor and not simulated(tensor):
            return False
        if (
            tensor.layout is not torch.strided
            or tensor.device != self.device.device
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= SMALL and storage._cdata not in self._others

    def _kept(self, tensor: Tensor, version: Tensor | None) -> Kept:
        address = tensor.untyped_storage()._cdata
        found = self._storages.get(address, lambda: None)()
        if found is None or not found.has(tensor):
            numel = tensor.untyped_storage().nbytes() // tensor.itemsize
            with torch.no_grad():
                flat = tensor.detach().as_strided((numel,), (1,), 0).view(torch.uint8)
            found = Kept(flat, self._open, version)
            self._storages[address] = weakref.ref(found)
            self._open.add(found)
        elif found.owner is not self._open:
            self._open.add(found)
        return found

    def _begin(self, frame: Frame) -> None:
        """Begin an outermost forward. First give back what a backward through only parts of a graph has left."""
        self.ended()
        self._close()
        self._tidy()
        self._outermost, self._saving = weakref.ref(frame), lambda: None
        self._forwards += 1
        engine = self._engine()
        assert engine is not None
        resident = [bucket.full for bucket in engine.buckets if bucket.resident]
        plain = [param for param in engine.model.parameters() if not hasattr(param, "_zeroshard")]
        inputs = [tensor for each in frame.inputs or () if (tensor := each()) is not None]
        if self._leave_out is not None:
            for each in inputs:
                self._leave_out(each)
        others = [*resident, *plain, *engine.model.buffers(), *inputs]
        self._others = {each.untyped_storage()._cdata for each in others if each.layout is torch.strided}

    def _start(self, frame: Frame) -> None:
        self._saving = weakref.ref(frame)
        self._open = Segment(next(self._numbers), frame.unit.index, self._forwards)
        self._segments[self._open.number] = weakref.ref(self._open)

    def _close(self) -> None:
        """Copy out the segment that was saved last, because the program has come to another one."""
        segment, self._open, self._saving = self._open, Segment(), lambda: None  # if it cannot go, it stays
        leaving = [kept for kept in segment.needs() if kept.owner is segment and kept.start < 0]
        if not leaving:
            return
        if self.in_place:
            for kept in leaving:
                kept.went(0, stays=True)
                if kept.flat is not None and self._leave_out is not None:
                    self._leave_out(kept.flat)
                self.ledger.hold_while(kept, STATE, kept.nbytes, HOST)
            return
        segment.rest = rest = self._room(segment, sum(kept.nbytes for kept in leaving))
        flats = [kept.flat for kept in leaving if kept.flat is not None]
        starts = [*itertools.accumulate((kept.nbytes for kept in leaving), initial=0)]
        through = rest.take_each([*zip(starts, flats, strict=False)])
        for start, kept in zip(starts, leaving, strict=False):
            kept.went(start)
        rest.behind()
        self._going.append((through, flats))
        self._leave(GOING if streams(self.device.device) else 0)

    def _leave(self, most: int) -> None:
        while len(self._going) > most:
            through, flats = self._going.pop(0)
            through.wait()  # memory that the current stream takes next may be the segment's
            flats.clear()

    # --- room -------------------------------------------------------------------------------------------------------

    def _room(self, segment: Segment, nbytes: int) -> Rest:
        self._free_rooms()
        self._asked.add(nbytes)
        idle = self._idle.get(nbytes)
        rest = idle.pop(0) if idle else self.rests.rest(STATE, segment.number, nbytes, torch.uint8)
        self._rests[segment.number] = weakref.ref(segment), nbytes, rest
        return rest

    def _free_rooms(self) -> None:
        for number, (segment, nbytes, rest) in [*self._rests.items()]:
            if segment() is None:
                del self._rests[number]
                self._idle.setdefault(nbytes, []).append(rest)

    def _tidy(self) -> None:
        """Forget graphs that are gone, and give up room that the last forward had no use for."""
        self._free_rooms()
        self._segments = {number: each for number, each in self._segments.items() if each() is not None}
        self._storages = {address: each for address, each in self._storages.items() if each() is not None}
        if not self._rests:
            with self.rests.renewed():  # what failed before has lost no state: the next forward may try again
                pass
            unused = [nbytes for nbytes in self._idle if nbytes not in self._asked]
            self.rests.give_up(STATE, [rest for nbytes in unused for rest in self._idle.pop(nbytes)])
        self._asked.clear()

    # --- backward ---------------------------------------------------------------------------------------------------

    def brought(self, kept: Kept, segment: Segment) -> Tensor:
        """Return the bytes of a storage on the device, where they stay until all tensors saved in it were unpacked."""
        self._give_back()
        if not (segment.reached or self.in_place):
            self._leave(0)
            segment.reached = True
            self._reached.append(weakref.ref(segment))
            self._bring(segment.needs())
            self._ahead(segment)
        if kept.flat is None:
            self._bring([kept])
        flat = kept.flat
        assert flat is not None
        if kept.came is not None:
            kept.came.wait()
            kept.unused -= 1
            if not kept.unused:
                self._take(kept)
        return flat

    def _ahead(self, segment: Segment) -> None:
        """Begin to bring back the segments saved before this one, up to the first of another unit below the root."""
        for number in reversed([number for number in self._segments if number < segment.number]):
            earlier = self._segments[number]()
            if earlier is None:
                continue
            if earlier.forward != segment.forward:
                return
            needs = earlier.needs()
            if self.rests.on_demand:
                for owner in {kept.owner.number: kept.owner for kept in needs if kept.flat is None}.values():
                    if owner.rest is not None:
                        owner.rest.ahead()
            else:
                self._bring(needs)
            if earlier.unit not in (segment.unit, 0):
                return

    def _bring(self, needed: Sequence[Kept]) -> None:
        """Begin to copy to the device the storages that are not there."""
        coming = [kept for kept in needed if kept.flat is None]
        if not coming:
            return
        by_owner: dict[int, list[Kept]] = {}
        try:
            for kept in coming:
                kept.flat = self.device.reserve(STATE, kept.nbytes, torch.uint8, zeroed=False)
                kept.unused, kept.came = kept.notes, DeviceEvent()
                self._here[kept.number] = weakref.ref(kept), kept.flat, _uses(kept.flat)
                by_owner.setdefault(kept.owner.number, []).append(kept)
            with behind(TO_THE_DEVICE, self.device.device):
                for those in by_owner.values():
                    rest = those[0].owner.rest
                    assert rest is not None
                    rest.give_each([(kept.start, kept.flat) for kept in those if kept.flat is not None])
                came = event(self.device.device)
            for kept in coming:
                kept.came = came
        except BaseException:
            self._wait_for_copies()
            for kept in coming:
                self._take(kept)
            raise

    def _take(self, kept: Kept) -> None:
        """Give up a storage's copy on the device; its memory is free once no graph uses a part of it."""
        found = self._here.pop(kept.number, None)
        if found is not None:
            self._taken.append(found[1:])
        kept.flat = kept.came = None

    def _give_back(self) -> None:
        taken, self._taken = self._taken, []
        while taken:
            flat, uses = taken.pop()
            if _uses(flat) > uses:
                self._taken.append((flat, uses))
            else:
                self.device.give_back(STATE, flat)

    def ended(self) -> None:
        """Give back the copies that backward brought and did not use."""
        if self._here:
            self._wait_for_copies()
        for reference, flat, uses in [*self._here.values()]:
            if (kept := reference()) is not None:
                self._take(kept)
            else:
                self._taken.append((flat, uses))
        self._here.clear()
        for each in self._reached:
            if (segment := each()) is not None:
                segment.reached = False
        self._reached.clear()
        self._give_back()

    def _wait_for_copies(self) -> None:
        """Let the current stream wait for copies to the device: memory may be taken again before they are through."""
        with behind(TO_THE_DEVICE, self.device.device):
            came = event(self.device.device)
        came.wait()

    def abandon(self) -> None:
        self.ended()

    def uncounted(self, wrap: Callable[..., Any], leave_out: Callable[[Tensor], None]) -> None:
        self._close, self._bring, self._ahead = map(wrap, (self._close, self._bring, self._ahead))  # type: ignore
        self._leave_out = leave_out


def _uses(flat: Tensor) -> int:
    return torch._C._storage_Use_Count(flat.untyped_storage()._cdata)


def _inputs(args: Any, kwargs: Any) -> list[weakref.ref[Tensor]]:
    """Refer to the tensors of a call weakly: else they would live as long as its forward."""
    return [weakref.ref(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]


class ActivationsFeature(Feature):
    name = "activations in tiers"
    page = "offload.md#activations-in-host-memory-or-files"

    def tier(self, name: str, assembly: Assembly, largest: dict[str, int], nbytes: int) -> Tier | None:
        # Files of their own: a disk that is full of activations says nothing about states.
        if name != STATE:
            return None
        made: Any = first(each.tier(NVME, assembly, {STATE: 0}, 0) for each in features())
        made.counted_as = STAGED  # only a forward tells their size; the sizes of rooms for states are known before
        return made  # type: ignore[no-any-return]

    def subscriber(self, engine: Engine) -> Activations | None:
        if engine.offload.activations == "device":
            return None
        if len(engine.units) == 1:
            raise UserError(
                "activations go out unit by unit, and the model is one unit",
                got=f"Offload(activations={engine.offload.activations!r})",
                expected="units inside the model, of which backward needs one after the other",
                instead='Layout(units=["blocks.*"]), with names of the model\'s own modules',
            )
        moved = Activations(engine, engine.tiers[STATE if engine.offload.activations == "nvme" else HOST])
        engine.schedule.saved.default, engine.schedule.saved.inputs = outside(moved.keep), _inputs
        engine.schedule.saves = True
        return moved


FEATURE = ActivationsFeature()
