"""`Layout`: how parameters are grouped into units and buckets, and cut between ranks. Imports no torch."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import UserError
from ..layout.partition import BLOCK, BUCKET_MIB, UNIT_MIB
from ..validation import FLAG, Field, check_fields, number, one_of

Bounds = Literal["unit", "model", "tensor"]


Buffers = Literal["broadcast", "always", "local"]


def _sequence(name: str) -> Field:
    """Describe one field of `Layout` that takes a sequence of names, patterns or classes."""
    return Field(
        lambda given: not isinstance(given, (str, type)),
        "takes a sequence",
        instead=lambda given: f"Layout({name}=[{given!r}])",
    )


_FIELDS = {
    "bounds": one_of(Bounds),
    "buffers": one_of(Buffers),
    "bucket_mib": number(0, sys.float_info.max, "must be a positive number of MiB", "Layout(bucket_mib=24)").or_none(),
    **{name: _sequence(name) for name in ("units", "ignore", "recompute", "whole")},
    "apart": FLAG,
}


@dataclass(frozen=True)
class Layout:
    """The settings by which parameters are grouped into units and buckets, and cut between ranks.

    bounds: where shards are cut. "unit": every bucket evenly, at block boundaries, padded. "model": the whole
        model is one flat vector, cut evenly (the ZeRO paper). "tensor": no tensor is ever cut; the flat model is
        cut at the tensor boundary nearest to i*P/N.
    bucket_mib: the most parameter bytes (MiB) one collective moves; a larger single tensor gets a bucket of its own.
        None: 24 on the CPU. On an accelerator all parameters of a unit that can share a bucket do, however many: each
        collective and each kernel there has a price of its own, and few bytes are not worth it.
    align: elements per block. 128 keeps fused kernels bit-exact under any cut; 1 cuts anywhere. Its bits are the
        same at every stage and number of ranks, but norms add up blocks of that size, so they and a clip may differ in
        the last bit from those of 128. With 1, fused kernels and updates in 16 bits are refused; a tensor with pairs
        in its last dimension still begins at an even element. {name pattern: elements} for parameters with blocks of
        their own, such as rows; a tensor's last block may be short.
    units: which submodules are gathered together: module names, name patterns ("blocks.*"), module classes or the
        names of these ("LlamaDecoderLayer").
        None finds them: the children of the outermost `ModuleList`s, and of a `Sequential` or `ModuleDict` that has no
        `ModuleList` inside, and large leaves. If more than 32 of these have fewer than 65,536 elements, neighbours in a
        list join until they have as many, except with `recompute`.
    ignore: parameter names or patterns that zeroshard leaves entirely alone (not sharded, not averaged).
    recompute: units whose forward keeps nothing for backward but its inputs, and runs again there, as by
        `torch.utils.checkpoint` without re-entering: all but the root (True), or by name or pattern. Uncompiled.
    along: {name pattern: axis} of parameters of which a rank holds some rows, such as experts: `{"*.experts.*": "edp"}`
        with `Comm(group=mesh)`. The ranks along that axis of the mesh hold the same rows, and shard them among
        themselves; the other ranks hold the other rows, in order. All other parameters are sharded over all ranks.
    apart: gradients of parameters in `along` come source by source (`zeroshard.apart`) and are added up in the order
        of all ranks, so that the number of groups changes no bit. Sends the bytes of these gradients once per group.
    whole: parameter names or patterns that are never cut, while the others are. Their owners are balanced by work, the
        longest first. What an optimizer needs whole (Muon, Adafactor, a class with `whole = True`) is so in any case.
    matrices: {name pattern: how many equal matrices the rows of a parameter stack}: `{"*.qkv.weight": 3}`; "first" for
        [E, a, b], one matrix for each index of the first dimension. An optimizer gets each as a parameter of its own
        and has a state of each, no matrix is cut, and each may have another owner. For parameters along an
        axis, or cut by tensor parallelism, the number counts the matrices in the rows that a rank has.
    buffers: "broadcast" sends rank 0's buffers to all before each training forward; "always" before every forward, so
        that ranks that evaluate have the same ones, as with DDP (every rank calls every forward then); "local" never,
        at `shard` neither: each rank keeps its own, of any size, also in checkpoints.

    Raises `UserError` for a field that it cannot read, or that needs another one.

    Examples:
        >>> zero = zeroshard.shard(model, optimizer, layout=zeroshard.Layout(bucket_mib=8, recompute=True))
    """

    bounds: Bounds = "unit"
    bucket_mib: float | None = None
    align: int | Mapping[str, int] = 128
    units: Sequence[str | type] | None = None
    ignore: Sequence[str] = ()
    buffers: Buffers = "broadcast"
    recompute: bool | Sequence[str] = False
    along: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    whole: Sequence[str] = ()
    matrices: Mapping[str, int | Literal["first"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, _FIELDS)
        if type(self.base) is not int or self.base < 1 or self.base & (self.base - 1):
            raise UserError(
                "Layout.align must be a power of two",
                expected="1, 2, 4, ..., or name patterns and the elements of their blocks",
                got=repr(self.align),
                instead="Layout(align=128)",
            )
        for pattern, block in self.blocks.items():
            if not isinstance(pattern, str) or type(block) is not int or block < 1:
                raise UserError(
                    "Layout.align takes name patterns, and for each the elements of a block",
                    got=repr(self.align),
                    instead='Layout(align={"*.weight": 256})',
                )
        _check_matrices(self.matrices)
        axes = [*self.along.values()] if isinstance(self.along, Mapping) else [None]
        if len(set(map(repr, axes))) > 1 or not all(isinstance(axis, str) and axis for axis in axes):
            raise UserError(
                "Layout.along takes name patterns, and one axis of the mesh for all of them",
                got=repr(self.along),
                instead='Layout(along={"*.experts.*": "edp"})',
            )

        if self.apart and not self.along:
            raise UserError(
                "Layout.apart is for parameters along an axis, and there are none",
                got=f"apart={self.apart!r}, along={self.along!r}",
                instead='Layout(along={"*.experts.*": "edp"}, apart=True)',
            )

    def on(self, *, accelerator: bool) -> Layout:
        """Return this layout with the size of buckets for the kind of device, if none was given."""
        size = UNIT_MIB if accelerator else BUCKET_MIB
        return replace(self, bucket_mib=size) if self.bucket_mib is None else self

    @property
    def base(self) -> int:
        """The elements of a block, for parameters to which `align` gives no other size."""
        return BLOCK if isinstance(self.align, Mapping) else self.align

    @property
    def blocks(self) -> Mapping[str, int]:
        """The elements of a block of some parameters, by name pattern."""
        return self.align if isinstance(self.align, Mapping) else {}

    @property
    def axis(self) -> str:
        """The axis that some parameters are sharded along; "" if there are none."""
        return next(iter(self.along.values()), "")

    def recomputes(self, unit: str) -> bool:
        """Tell if backward runs this unit's forward again. Never the root's (""), which all others run in."""
        patterns = ("*" * self.recompute,) if isinstance(self.recompute, bool) else self.recompute
        return bool(unit) and any(fnmatch.fnmatchcase(unit, pattern) for pattern in patterns)


def _check_matrices(matrices: Any) -> None:
    numbers = [*matrices.values()] if isinstance(matrices, Mapping) else [None]
    if not all(each == "first" or (type(each) is int and each > 0) for each in numbers):
        raise UserError(
            "Layout.matrices takes name patterns, and for each how many matrices a parameter's rows stack",
            expected='a number from 1, or "first" for one matrix for each index of the first of three dimensions',
            got=repr(matrices),
            instead='Layout(matrices={"*.qkv.weight": 3})',
        )
