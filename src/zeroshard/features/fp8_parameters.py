"""The codec of an fp8 bucket, whose parameters rest and travel in 8 bits.

    masters, fp32            each step computes the scales from these, and then the 1-byte parameters
    parameters, 1 byte       the shard, or the whole bucket: rest beside the masters at every stage; a gather moves them
    scales, 1 byte per tile  the same on every rank of a team
    gathered, 16 or 32 bits  what modules compute with; the bytes land at the end of this memory and are decoded there

Nothing else in the engine knows this format: such parameters are gathered for use at every stage, like parameters that
rest in other tiers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..arithmetic import fp8
from ..arithmetic.sums import same_bits, simulated
from ..engine.weights.bucket import Bucket, publish
from ..engine.weights.codec import Plain
from ..engine.weights.gathered import alias
from ..engine.weights.unit import Managed, Unit, matching
from ..errors import StateError, TierError, UserError
from ..events import ends
from ..hooks import Feature
from ..layout.partition import BucketPlan
from ..policies.precision import COMPUTED, Precision

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly

ROUTERS = ("router", "gate")  # modules that choose experts by numbers close to each other


def chosen(managed: list[Managed], precision: Precision) -> set[str]:
    """Return the names of parameters that `Precision.fp8` names. Raises `UserError` if one cannot rest in 8 bits."""
    if precision.fp8 is True:
        found = {
            record.name
            for record in managed
            if record.param.requires_grad
            and not precision.keeps(record.names)
            and all(isinstance(module, nn.Linear) and name == "weight" for module, name in record.owners)
            and not any(name.split(".")[-2:-1] == [router] for name in record.names for router in ROUTERS)
        }
        if not found:
            raise UserError(
                "there is no weight of a linear layer that is trained, to rest in 8 bits",
                got="Precision(fp8=True)",
                instead='Precision(fp8=["*.experts.*"]), with patterns of the parameters that are meant',
            )
    else:
        found = matching(managed, precision.fp8 or (), "Precision.fp8")
    for record in (record for record in managed if record.name in found):
        dtype = precision.param(record.param.dtype)
        if not record.param.requires_grad or precision.keeps(record.names) or dtype not in COMPUTED:
            raise UserError(
                "a parameter can only rest in 8 bits beside fp32 masters, for a module that computes in 16 or 32 bits",
                where=f"parameter {record.name!r}, Precision(fp8=...)",
                expected="a trained parameter that Precision.keep does not name, in bfloat16, float16 or float32",
                got="one that Precision.keep names"
                if precision.keeps(record.names)
                else f"requires_grad={record.param.requires_grad}, {dtype}",
                instead="patterns that leave it out",
            )
    return found


class Tiled(NamedTuple):
    """The part of one slot within a range of bucket elements: its place in the range, and the scales of its tiles."""

    where: slice
    tiles: fp8.TileGrid
    first: int  # where it begins in the tensor
    scales: Tensor  # fp32, of all the tensor's tiles
    held: slice  # which of the bucket's scales these are


class E4M3(Plain):
    """The codec of one bucket on one rank, whose parameters rest as `fp8` says."""

    resident = False
    of_masters = True
    agrees = True

    def __init__(self, bucket: Bucket, *, scaling: str) -> None:
        super().__init__(bucket)
        self.grids = fp8.grids(bucket.plan, scaling)
        ends_at = [*itertools.accumulate((tiles.number for tiles in self.grids), initial=0)]
        self._held = [slice(*pair) for pair in itertools.pairwise(ends_at)]  # of each slot, which scales are its own
        self.scales = bucket.tier.reserve("scales", ends_at[-1], fp8.BYTE)
        self._seen: Tensor | None = None  # scales that a step computed from masters that have left memory since
        self._arriving: Tensor | None = None  # the bytes that a gather brings
        self._apart = False  # do these bytes have memory of their own?
        seat = bucket.team.seat
        # If tensor parallelism has cut a tensor, its one scale is for all parts; any other scale is for one part.
        self._joined = scaling == "tensor" and bucket.plan.slots[0].cut is not None
        self._place, self._places = (0, 1) if self._joined else (seat.part, seat.parts)

    # --- from masters to bytes --------------------------------------------------------------------------------------

    @property
    def beside(self) -> bool:
        """False: a step cannot cast masters back by itself, as that needs all ranks. See `agree`."""
        return False

    def _parts(self, first: int, last: int, scales: Tensor | None = None) -> Iterator[Tiled]:
        """Yield the part of each slot that is among elements [first, last). scales: those of this bucket, as they
        rest."""
        stood = fp8.as_fp32(self.scales if scales is None else scales)
        for slot, tiles, held in zip(self.bucket.plan.slots, self.grids, self._held, strict=True):
            inside = slot.within(first, last)
            if inside.numel:
                yield Tiled(slot.slice_of(first, last), tiles, inside.start, stood[held], held)

    def _scales(self, masters: Tensor, first: int, last: int) -> Tensor:
        found = torch.ones(len(self.scales), dtype=fp8.BYTE, device=masters.device)
        for part in self._parts(first, last):
            found[part.held] = fp8.scales_of(masters[part.where], part.tiles, part.first)
        return found

    def _quantise(self, raw: Tensor, masters: Tensor, first: int, last: int) -> None:
        for part in self._parts(first, last, self.scales.to(masters.device)):
            fp8.quantise_(raw[part.where], masters[part.where], part.scales, part.tiles, part.first)

    def encode(self, resting: Tensor, source: Tensor) -> None:
        scales = self._scales(source, 0, self.bucket.plan.numel)
        self.scales.copy_(self.bucket.group.maximum(scales) if self._joined else scales)
        first, last = self.bucket.parameters.first, self.bucket.parameters.last
        self._quantise(resting, source[first:last], first, last)
        self.bucket.gathered.current = False  # unrounded values, released at once

    def look(self) -> None:
        self._seen = self._scales(self.bucket.target, *self.bucket.updated)

    def forget(self) -> None:
        self._seen = None

    @classmethod
    @torch.no_grad()
    def agree(cls, codecs: Sequence[Plain]) -> None:
        """Quantise buckets again from their masters.

        Sends one small message for all tensors: a byte for each scale, and for experts for each scale of every team.
        """
        found = [codec for codec in codecs if isinstance(codec, cls)]
        asked = [codec.asked_of_all() for codec in found]
        agreed = found[0].bucket.group.maximum(torch.cat(asked)).split([len(each) for each in asked])
        for codec, scales in zip(found, agreed, strict=True):
            codec.requantise(scales.view(codec._places, -1)[codec._place])

    def asked_of_all(self) -> Tensor:
        """Return what this rank sends: its scales; where teams hold parts, at its team's place, and zeros elsewhere."""
        mine = self.scales_here().to(self.scales.device)
        if self._places == 1:
            return mine
        asked = mine.new_zeros(self._places, len(mine))
        asked[self._place] = mine
        return asked.view(-1)

    def scales_here(self) -> Tensor:
        """Return the scales that this rank's masters ask for."""
        if self._seen is not None:
            return self._seen
        try:
            with self.bucket.updating.here(changed=False):
                return self._scales(self.bucket.target, *self.bucket.updated)
        except TierError as error:  # the others wait for an answer, and will hear of it
            self.bucket.group.report(error)
            return self.scales

    def requantise(self, scales: Tensor) -> None:
        """Quantise this rank's masters to new bytes, with the scales that all ranks agreed on."""
        bucket = self.bucket
        bucket.land()
        self.scales.copy_(scales)
        first, last = bucket.updated
        copied = bucket.tier.ledger.note("copy", state="master", bucket=bucket.plan.index, logical=last - first)
        alone = bucket.placements.together  # all that rests here is written
        try:
            with bucket.updating.here(changed=False), bucket.parameters.here(fresh=alone) as resting:
                if alone:
                    resting.zero_()  # padding too
                self._quantise(bucket.parameters.of(first, last), bucket.target, first, last)
        except TierError as error:
            bucket.group.report(error)
        bucket.updating.behind()
        bucket.parameters.behind()
        self.forget()
        ends(copied)

    # --- from bytes to what modules compute with --------------------------------------------------------------------

    def landing(self, *, in_use: bool) -> Tensor:
        """Return the end of the gathered copy's memory to gather into; other memory if that copy may still be read."""
        self._apart = in_use
        if in_use:
            self._arriving = self.bucket.tier.reserve("gather", self.bucket.plan.numel, fp8.BYTE, zeroed=False)
        else:
            self._arriving = self.bucket.full.view(fp8.BYTE)[-self.bucket.plan.numel :]
        return self._arriving

    def decode(self) -> None:
        if self._arriving is None:
            return
        bucket, raw, self._arriving = self.bucket, self._arriving, None
        # An interrupt may leave some bytes decoded and the others overwritten: then the bucket is to be gathered again.
        current, bucket.gathered.current = bucket.gathered.current, False
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._dequantise(alias(bucket.full), raw)
                bucket.users.filled()
        finally:
            if self._apart:
                bucket.tier.give_back("gather", raw)
        bucket.gathered.current = current
        if bucket.edits.reachable:
            bucket.edits.agree(bucket.mine)

    def _dequantise(self, full: Tensor, raw: Tensor) -> None:
        end = 0
        for part in self._parts(0, self.bucket.plan.numel):
            full[end : part.where.start] = 0  # padding, which ranks compare
            fp8.dequantise_(full[part.where], raw[part.where], part.scales, part.tiles)
            end = part.where.stop
        full[end:] = 0

    @property
    def opened(self) -> Tensor | None:
        return self.bucket.mine

    def recovery_copy(self) -> Tensor:
        return self._own_shard(fp8.BYTE)

    # --- edits ------------------------------------------------------------------------------------------------------

    def edited(self) -> bool:
        """Tell if the gathered copy of this rank's shard differs from the bytes that rest."""
        bucket = self.bucket
        if simulated(bucket.full) or not (bucket.ready and bucket.edits.reachable):
            return False
        bucket.land()
        bucket.rebind()
        mine, parameters = bucket.mine, bucket.parameters
        if bucket.edits.untouched(mine):
            return False
        with parameters.here(changed=False) as resting:
            return not all(
                same_bits(numbers.to(mine.device), mine[part.where][where])
                for part in self._parts(parameters.first, parameters.last, self.scales.to(resting.device))
                for where, numbers in self._numbers(resting, part)
            )

    def _numbers(self, resting: Tensor, part: Tiled) -> Iterator[tuple[slice, Tensor]]:
        return fp8.dequantised(resting[part.where], part.scales, part.tiles, self.bucket.dtype, part.first)

    def take_back(self, *, asked: bool) -> bool:
        """Report an edit: one rank alone cannot follow it, since all ranks share the scales. Returns False."""
        bucket = self.bucket
        if self.reported(self.edited):
            first, last = bucket.plan.slots[0].name, bucket.plan.slots[-1].name
            bucket.group.report(
                StateError(
                    "weights that rest in 8 bits were edited outside gathered(), or used inside it after an edit",
                    where=f"rank {bucket.group.rank}, among parameters {first!r} to {last!r}",
                    instead="with zero.gathered(): edit   (on every rank), and leave it before the next forward or "
                    "step. The edit is lost. Or leave them out of Precision(fp8=...), and edits count anywhere",
                )
            )
            bucket.edits.agree(bucket.mine)
        return False

    def reported(self, look: Callable[[], bool | None]) -> bool:
        """Return what `look` returns; on a `TierError` report it to all ranks, which are about to meet, and return
        False."""
        try:
            return bool(look())
        except TierError as error:
            self.bucket.group.report(error)
            return False

    def take_edits(self) -> None:
        """Copy edits of the gathered copy to the masters that this rank updates."""
        bucket = self.bucket
        first, last = bucket.updated
        seen, bits = bucket.full[first:last], torch.int16 if bucket.dtype.itemsize == 2 else torch.int32
        with bucket.updating.here(), bucket.parameters.here(changed=False):
            resting, target = bucket.parameters.of(first, last), bucket.target
            for part in self._parts(first, last, self.scales.to(resting.device)):
                for where, found in self._numbers(resting, part):
                    own, now = target[part.where][where], seen[part.where][where].to(target.device)
                    numbers = found.to(target.device)
                    torch.where(numbers.view(bits) != now.view(bits), now.to(own.dtype), own, out=own)


def _on_any_rank(codecs: list[E4M3], mine: list[bool]) -> list[E4M3]:
    """Return the codecs for which some rank says yes. Raises on every rank if one has reported an error."""
    if not codecs:
        return []
    group = codecs[0].bucket.group
    *flags, failed = group.flags(bytes([*mine, group.failed is not None]))
    if failed:
        group.fail()
    return [codec for codec, flag in zip(codecs, flags, strict=True) if flag]


@torch.no_grad()
def follow_edits(found: list[E4M3], write_from: int | None) -> None:
    """Apply edits to masters, scales and bytes as all ranks leave gathered(): the owners' edits, or one rank's.

    Afterwards the gathered copy is decoded from the bytes: an edit, too, is rounded to 8 bits.
    """
    for bucket in (codec.bucket for codec in found) if write_from is not None else ():
        assert write_from is not None
        bucket.rebind()
        bucket.group.give_all(bucket.full, bucket.plan, write_from)
        if not bucket.placements.optimizer:  # its bytes may be equal on all ranks where masters are not
            bucket.updating.give_all(write_from)
    codecs = _on_any_rank(found, [codec.reported(codec.edited) for codec in found])
    edited = [codec.bucket for codec in codecs]
    if edited:
        edited[0].group.torn = "gathered() was left with edits of which only some had reached the masters"
    for codec, bucket in zip(codecs, edited, strict=True):
        if not bucket.placements.optimizer:  # every rank updates everything: take each element from its owner
            bucket.team.gather(alias(bucket.full), bucket.plan, "parameters").wait()
        codec.reported(codec.take_edits)
    _on_any_rank(codecs, [False] * len(codecs))
    publish(edited, overlap=False, outside=True)
    for bucket in edited:
        bucket.gather().wait()
        bucket.land()


class Fp8ParametersFeature(Feature):
    name = "parameters in 8 bits"
    page = "precision.md#parameters-in-8-bits"
    kernels = "fused_fp8"

    def chosen(self, managed: list[Managed], precision: Precision) -> set[str]:
        return chosen(managed, precision)

    def codec(self, assembly: Assembly, plan: BucketPlan) -> Callable[[Bucket], Plain] | None:
        return functools.partial(E4M3, scaling=assembly.precision.scaling) if plan.fp8 else None

    def leaving(self, units: Sequence[Unit], write_from: int | None) -> set[int]:
        codecs = [bucket.codec for unit in units for bucket in unit.buckets]
        found = [codec for codec in codecs if isinstance(codec, E4M3)]
        if found:
            follow_edits(found, write_from)
        return {codec.bucket.plan.index for codec in found}


FEATURE = Fp8ParametersFeature()
