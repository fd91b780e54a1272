"""A master that rests as the bits that its bfloat16 parameter lacks, and is joined with it for as long as it is used.

    master, fp32         seeeeeeeemmmmmmm llllllllllllllll         4 bytes, in memory inside `here()`
    parameter, bfloat16  seeeeeeeemmmmmmm, rounded                 rests anyway
    planes                                llllllllllllllll t       2.125 bytes: all lower halves, then all bits for ties

`arithmetic/split_bits.py` says why that is enough. The rest of the engine treats it as a state that has to
be brought to memory, as one in a file has: it may rest in any tier itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arithmetic.split_bits import join_, split_
from ..comm.agreement import Group
from ..device import ask, blank
from ..engine.build.supported_optimizers import check_by_bucket
from ..engine.weights.codec import Plain
from ..engine.weights.flat import Flat
from ..errors import StateError, UserError
from ..events import DEVICE, HOST
from ..hooks import Feature
from ..layout.partition import Partition
from ..layout.stage import Placements
from ..layout.states import SPLIT_BITS, Master, master_of
from ..policies.offload import Offload
from ..policies.precision import Precision
from ..tiers.tier import DeviceTier, Rest, Tier

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly
    from ..engine.weights.bucket import Bucket
    from ..engine.weights.unit import Unit

log = logging.getLogger("zeroshard")

JOINED = "joined"  # in the ledger: a bucket's masters inside `here()`, and `Split.before`


def split_nbytes(numel: int) -> int:
    """Return the bytes of so many elements of a split master at rest."""
    return -(-numel * SPLIT_BITS // 8)


class Split(Rest):
    """The masters of bucket elements [first, last), beside parameters that are their cast."""

    on_demand = True

    def __init__(self, parameters: Flat, first: int, last: int, tier: Tier, device: DeviceTier) -> None:
        self.parameters = parameters
        self.first, self.numel = first, last - first
        self.on_device = tier.on_device
        self.planes = tier.rest("master", parameters.plan.index, split_nbytes(self.numel), torch.uint8)
        self.device = device  # reserves temporary memory
        self.before: Tensor | None = None  # a copy of the parameters that the planes belong to, while edits are allowed
        self._home = tier.device
        self._joined: Tensor | None = None
        self._dirty = False

    # --- the parameters beside it -----------------------------------------------------------------------------------

    def keep(self) -> bool:
        """Keep a copy of the parameters, which may be edited from now on. Returns False if it was kept already."""
        if self.before is not None:
            return False
        with self.parameters.here(changed=False):
            self.before = self.parameters.of(self.first, self.first + self.numel).clone()
        self.device.ledger.hold(JOINED, self.before.numel() * self.before.itemsize, self._counted(self.parameters.rest))
        return True

    def forget_kept(self) -> None:
        assert self.before is not None
        nbytes = self.before.numel() * self.before.itemsize
        self.device.ledger.hold(JOINED, -nbytes, self._counted(self.parameters.rest))
        self.before = None

    @staticmethod
    def _counted(rest: Rest) -> str:
        return DEVICE if rest.on_device else HOST

    def _beside(self, start: int, stop: int) -> Tensor:
        if self.before is not None:
            return self.before[start:stop]
        return self.parameters.of(self.first + start, self.first + stop)

    # --- brought to memory ------------------------------------------------------------------------------------------

    @property
    def tensor(self) -> Tensor:  # type: ignore[override]
        if self._joined is None:
            raise AssertionError(f"the master of bucket {self.parameters.plan.index} is not joined")
        return self._joined

    @contextlib.contextmanager
    def here(self, *, changed: bool = True, fresh: bool = False) -> Iterator[Tensor]:
        """Join the master for the block, and split it again if it was changed.

        After an exception it is not split: a change that the parameters do not follow is dropped.
        """
        if self._joined is not None:
            yield self._joined
            self._dirty |= changed
            return
        with self._memory(0, self.numel, fresh=fresh) as self._joined:
            self._dirty = changed
            try:
                yield self._joined
                if self._dirty:
                    self._split(0, self._joined, 0, self.numel)
            finally:
                self._joined = None

    @contextlib.contextmanager
    def some(self, start: int, stop: int, *, changed: bool) -> Iterator[Tensor]:
        if self._joined is not None:
            yield self._joined[start:stop]
            self._dirty |= changed
            return
        if start == stop:  # a parameter of which this rank has no elements
            yield torch.empty(0, dtype=torch.float32, device=self._home)
            return
        first, last = start // 8 * 8, min(-(-stop // 8) * 8, self.numel)  # a byte has the ties of eight elements
        with self._memory(first, last) as joined:
            yield joined[start - first : stop - first]
            if changed:
                self._split(first, joined, start, stop)

    @contextlib.contextmanager
    def _memory(self, first: int, last: int, *, fresh: bool = False) -> Iterator[Tensor]:
        """Join elements [first, last) in temporary memory for the block, with parameters and planes present too."""
        numel = last - first
        with self.parameters.here(changed=False), self.planes.here(changed=False):
            if self.on_device:
                joined = self.device.reserve(JOINED, numel, torch.float32, zeroed=False)
            else:
                joined = blank(numel, torch.float32, self._home)
                self.device.ledger.hold(JOINED, numel * 4, HOST)  # not before there is memory
            try:
                if not fresh:
                    join_(joined, self._beside(first, last).to(self._home), *self._planes(first, last))
                yield joined
            finally:
                if self.on_device:
                    self.device.give_back(JOINED, joined)
                else:
                    self.device.ledger.hold(JOINED, -numel * 4, HOST)

    def _planes(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return lower halves and ties of elements [first, last), inside here() of the planes."""
        lower, ties = self.planes.tensor[: 2 * self.numel].view(torch.int16), self.planes.tensor[2 * self.numel :]
        return lower[first:last], ties[first // 8 : -(-last // 8)]

    def _split(self, first: int, master: Tensor, start: int, stop: int) -> None:
        """Split elements from `first` on. Only those from `start` to `stop` changed: the rest of a shared byte
        stays."""
        before, after = (1 << start - first) - 1, 0xFF << (stop - first) % 8 & 0xFF if (stop - first) % 8 else 0
        with self.planes.here(changed=True):
            lower, ties = self._planes(first, first + master.numel())
            ends = ties[:1].clone(), ties[-1:].clone()
            split_(master, lower, ties)
            for byte, was, kept in ((ties[:1], ends[0], before), (ties[-1:], ends[1], after)):
                byte.bitwise_and_(0xFF ^ kept).bitwise_or_(was & kept)

    def seed(self, master: Tensor) -> None:
        """Split the first master, of which the parameters are the cast, at construction."""
        with self.planes.here(fresh=True):
            split_(master.to(self._home, torch.float32), *self._planes(0, self.numel))

    def ahead(self) -> None:
        self.parameters.ahead()
        self.planes.ahead()

    def behind(self) -> None:
        self.planes.behind()
        self.parameters.behind()


class SplitOf(Plain):
    """The codec of parameters whose masters rest as the bits that they lack.

    After a parameter is edited the lower half of its master is meaningless, and only the parameters from before tell
    which elements were edited: `keep` copies them inside `gathered()`.
    """

    alone = True
    asks = True  # ask the host for edits first: without any, joined masters need not be split again

    def __init__(self, bucket: Bucket, masters: Tensor) -> None:
        """masters: the first, of which the parameters are the cast."""
        super().__init__(bucket)
        self.rest = Split(bucket.parameters, *bucket.updated, bucket.tiers["optimizer"], bucket.tier)
        self.rest.seed(masters)
        self.rest.behind()

    def wrote(self, stored: Tensor) -> None:
        if self.rest.before is not None:
            self.rest.before.copy_(stored)

    def before_taking_back(self) -> None:
        # While the lower halves' own parameters still rest.
        super().follow(self.bucket.full[slice(*self.bucket.updated)], asked=True)

    def follow(self, params: Tensor, *, asked: bool) -> bool:
        if self.rest.before is None or not super().follow(params, asked=True):
            return False
        self.rest.before.copy_(params)
        return True

    @property
    def follows(self) -> bool:
        return self.rest.before is not None

    def keep(self) -> bool:
        return self.rest.keep()

    def forget_kept(self) -> None:
        self.rest.forget_kept()


def _divides_masters(precision: Precision, partition: Partition, placements: Placements, offload: Offload) -> bool:
    """Tell if masters are split: not where masters alone rest, which is logged. Raises if there are no masters."""
    if not precision.split_master:
        return False
    found = {
        master_of(formats, placements, at, one_memory=True)
        for plan, at in zip(partition.buckets, offload.buckets(partition.buckets), strict=True)
        if plan.trainable and (formats := precision.formats(plan)).splits
    }
    if not found:
        raise UserError(
            "there are no masters to split: no bfloat16 parameter is trained",
            expected="a bfloat16 parameter that rests beside its fp32 master",
            got="Precision(split_master=True)",
            instead="Precision(param_dtype=torch.bfloat16, split_master=True)",
        )
    if found == {Master.ALONE}:
        log.info("split_master=True splits nothing: masters alone rest of sharded parameters on the device")
    return Master.SPLIT in found


def _lost(bucket: Bucket) -> bool | Tensor:
    """Tell if parameters that rest were edited where their masters could not follow. On a device the answer stays
    there."""
    if not (bucket.resident and isinstance(bucket.codec, SplitOf)) or bucket.codec.follows:
        return False
    bucket.land()
    bucket.rebind()
    return bucket.edits.differ(bucket.parameters.of(*bucket.updated))


def _report_lost_edits(buckets: Sequence[Bucket], group: Group) -> None:
    """Report, before all ranks meet, replicated weights that were edited where split masters could not follow.

    After a weight is edited the lower half of its master is meaningless, and only the weights from before tell which
    elements were edited. A copy of these exists only inside `gathered()`.
    """
    found = [_lost(bucket) for bucket in buckets]
    answers = [each for each in found if isinstance(each, Tensor)]
    if not (any(each is True for each in found) or (answers and ask(torch.stack(answers).any()))):
        return
    for bucket, lost in zip(buckets, found, strict=True):
        if lost is True or (isinstance(lost, Tensor) and ask(lost)):
            names = [slot.name for slot in bucket.plan.slots]
            group.report(
                StateError(
                    "weights were edited outside gathered(), where split masters cannot follow",
                    where=f"rank {group.rank}, among parameters {names[0]!r} to {names[-1]!r}",
                    instead="with zero.gathered(): edit   (on every rank); now zero.load(...) a checkpoint. Or shard "
                    "without Precision(split_master=True), which follows edits anywhere",
                )
            )
            return


class SplitMasterFeature(Feature):
    name = "split masters"
    page = "decisions/split-masters.md"
    kernels = "fused_split"

    def check(self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        halves = _divides_masters(assembly.precision, assembly.partition, assembly.placements, assembly.offload)
        check_by_bucket(optimizers if halves else ())

    def masters(self, bucket: Bucket, values: Tensor) -> tuple[Plain, Rest] | None:
        if bucket.masters is not Master.SPLIT:
            return None
        made = SplitOf(bucket, values)
        return made, made.rest

    def check_edits(self, buckets: Sequence[Bucket], group: Group) -> None:
        _report_lost_edits(buckets, group)

    @contextlib.contextmanager
    def editing(self, units: Sequence[Unit]) -> Iterator[None]:
        """Allow edits of these units' replicated weights inside, though their masters are split."""
        codecs = [bucket.codec for unit in units for bucket in unit.buckets if bucket.resident]
        kept = [codec for codec in codecs if isinstance(codec, SplitOf) and codec.keep()]
        try:
            yield
        finally:
            for codec in kept:
                codec.forget_kept()


FEATURE = SplitMasterFeature()
