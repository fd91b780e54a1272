"""The layout of a model's elements: names, shapes and item sizes in; slots, buckets, bounds and fragments out.

Pure arithmetic, frozen, and it checks itself. Imports neither torch nor anything distributed, so that the
planner, a checkpoint and the engine can all ask the very same object.

    bucket   a flat run of one unit's parameters of one dtype       |--slot--|--slot--....|-slot-..|pad|
    slot     one parameter's place in it, starting at a block       0        384          1024     1152
    bounds   where the ranks' shards begin and end                  0            640              1280
    fragment the part of one slot inside one shard                           |---|  |--|

No cut falls inside a *block* (`align` elements counted from a slot's start): vector kernels and norms then
work on the same runs of elements however many ranks there are, and give the same bits. A parameter may ask for larger
blocks, or for no cut at all: then it is *whole*, in a bucket of such parameters, and a rank with least work owns it. In
a stack of matrices, each matrix has such an owner.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UserError, nearest
from .balance import Piece, owners, work
from .shard_dim import Among, Elements, Strips
from .stage import Degree, Seat

if TYPE_CHECKING:
    from ..policies.layout import Layout


Named = Mapping[str, tuple[Sequence[str], tuple[int, ...]]]  # by name: all of a parameter's names, and its shape
Stacks = Mapping[str, tuple[int, ...]]  # by name: the shape of each of the matrices that a parameter's rows stack

BLOCK = 128  # elements
WHOLE = 0  # as a number of elements that no cut may part: all of them
BUCKET_MIB = 24.0  # on the CPU, where memory of more than 32 MB is given back and faulted in again
UNIT_MIB = 2.0**20  # more than any unit has
LARGE = 1 << 16  # elements that are worth a unit of their own
MANY = 32  # units under `LARGE` elements: if there are more of these, neighbours join


# What `torch.compile(module)` and torch's `checkpoint_wrapper(module)` call the module that they are around.
AROUND = "_orig_mod", "_checkpoint_wrapped_module"


def plain_name(name: str) -> str:
    """Return the name that a module or tensor of a model has without torch's wrappers around modules."""
    wrapped = any(each in name for each in AROUND)
    return ".".join(part for part in name.split(".") if part not in AROUND) if wrapped else name


def joined(names: Sequence[str], numels: Sequence[int]) -> list[list[int]]:
    """Return which units become one: neighbours in a list, if more than `MANY` units have under `LARGE` elements.

    Each unit costs a gather, a reduction and their bookkeeping, however small it is.

    names: of the units' modules, in order. numels: the elements of each. Returns runs of their numbers, in order.
    """
    small = [numel < LARGE for numel in numels]
    many = sum(small) > MANY
    runs: list[list[int]] = []
    held, parent = LARGE, ""  # elements of the last run, and the module list that it is in
    for at, (name, numel) in enumerate(zip(names, numels, strict=True)):
        inside = name.rpartition(".")[0]
        if many and small[at] and held < LARGE and inside == parent:
            runs[-1].append(at)
            held += numel
        else:
            runs.append([at])
            held, parent = numel, inside
    return runs


def joined_name(names: Sequence[str]) -> str:
    """Return the name of a unit of these modules."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


class Spec(NamedTuple):
    """The facts of one parameter that the layout needs. `unit` indexes the list of units."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    unit: int
    trainable: bool
    axis: str = ""  # the axis that it is sharded along, where that is not all ranks
    kept: bool = False  # an exception of `Precision.keep`
    block: int = 1  # elements, counted from its start, that no cut may part; or `WHOLE`
    cut: int | None = None  # the dimension that tensor parallelism has cut it on
    fp8: bool = False  # does it rest and travel in 8 bits?
    matrix: tuple[int, ...] = ()  # the shape of each of the matrices that its rows stack; (): it is one tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Slot(NamedTuple):
    """One parameter's place in its bucket: elements [start, start + numel)."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    cut: int | None = None  # the dimension that tensor parallelism has cut it on
    matrix: tuple[int, ...] = ()  # the shape of each of the matrices that its rows stack; (): it is one tensor

    @property
    def together(self) -> tuple[int, ...]:
        """The shape that an optimizer of whole tensors updates at once: a matrix's, or the slot's."""
        return self.matrix or self.shape

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def within(self, start: int, stop: int) -> Elements:
        """Return the part of this slot inside bucket elements [start, stop); an empty one has start == stop."""
        low = min(max(start, self.start), self.stop)
        high = max(low, min(stop, self.stop))
        return Elements(low - self.start, high - self.start)

    def slice_of(self, start: int, stop: int) -> slice:
        """Return the same part as indices into a tensor of bucket elements [start, stop)."""
        part = self.within(start, stop)
        return slice(self.start + part.start - start, self.start + part.stop - start) if part.numel else slice(0, 0)

    def among(self, sits: Seat) -> Among:
        """Return where the part that a rank's team has of this slot lies in the whole tensor; other teams may have
        other parts."""
        shape, cut = sits.whole(self.shape, self.cut or 0), self.cut or 0
        return Among(shape, sits.part * self.numel, Strips.of(shape, cut, sits.parts))


@dataclass(frozen=True)
class BucketKey:
    """The facts in which all parameters of a bucket are equal. `unit` indexes the list of units."""

    unit: int
    dtype: str
    itemsize: int
    trainable: bool  # at construction
    axis: str = ""  # the axis whose ranks are its team
    kept: bool = False  # of exceptions of `Precision.keep`
    block: int = 1  # elements of a slot that no cut parts; or `WHOLE`
    fp8: bool = False  # do its parameters rest and travel in 8 bits? `dtype` is what modules compute with

    @property
    def whole(self) -> bool:
        """True if no slot of it is ever cut."""
        return self.block == WHOLE


@dataclass(frozen=True, kw_only=True)
class BucketPlan(BucketKey):
    """The plan of one bucket: a flat run of parameters with one key.

    bounds has one more entry than a team has ranks: position r's shard is elements [bounds[r], bounds[r + 1]).
    """

    index: int
    slots: tuple[Slot, ...]
    numel: int
    bounds: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks in its team."""
        return len(self.bounds) - 1

    def shard(self, position: int) -> tuple[int, int]:
        """Return the first and last + 1 element of a position's shard."""
        return self.bounds[position], self.bounds[position + 1]

    def held(self, seat: Seat, degree: Degree) -> tuple[int, int]:
        """Return the first and last + 1 element that a rank holds of a state with this placement."""
        if degree is Degree.RANK:
            return 0, self.numel
        first, last = self.shard(seat.position)
        if degree is Degree.TEAM:
            return first, last
        return seat.own(self.portions(seat))

    def portions(self, seat: Seat) -> list[tuple[int, int]]:
        """Return each replica's part of a position's shard, as its first and last + 1 element."""
        first, last = self.shard(seat.position)
        return [*itertools.pairwise(self._around_blocks(cut, first, last) for cut in seat.cuts(first, last))]

    def _around_blocks(self, cut: int, first: int, last: int) -> int:
        """Return where the part of a shard begins that should begin at element `cut`: never inside a slot's block."""
        if not first < cut < last:
            return cut
        at = slot_at([slot.start for slot in self.slots], cut)
        slot, *after = self.slots[at : at + 2]
        if cut < slot.stop:
            return max(first, cut - (cut - slot.start) % (self.block or slot.numel))
        # Blocks go on into the padding behind a slot, up to the next one's start.
        return min(last, after[0].start) if after else last

    def shard_numel(self, position: int) -> int:
        return self.bounds[position + 1] - self.bounds[position]

    def fragment(self, slot: Slot, position: int) -> Elements:
        """Return the part of `slot` that `position` owns (possibly empty)."""
        return slot.within(*self.shard(position))

    def cuts(self, slot: Slot) -> bool:
        """Tell if a slot lies on several ranks."""
        return any(slot.start < cut < slot.stop for cut in self.bounds)

    @property
    def padding(self) -> int:
        """The number of elements that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)


@dataclass(frozen=True)
class Partition:
    """The whole model laid out over the ranks of a team. Refuses to exist if anything overlaps or is left out."""

    ranks: int
    align: int
    buckets: tuple[BucketPlan, ...]

    def __post_init__(self) -> None:
        for bucket in self.buckets:
            assert bucket.axis or bucket.size == self.ranks
            assert bucket.bounds[0] == 0 and bucket.bounds[-1] == bucket.numel
            assert list(bucket.bounds) == sorted(bucket.bounds), bucket
            end = 0
            for slot in bucket.slots:
                assert slot.start >= end and slot.start % self.align == 0 and slot.stop <= bucket.numel, slot
                end = slot.stop
                cuts = bucket.bounds[bisect_right(bucket.bounds, slot.start) : bisect_left(bucket.bounds, slot.stop)]
                step = math.gcd(*([cut - slot.start for cut in cuts] if slot.start else cuts))  # divides all of them
                assert step % self.align == 0, (slot, cuts)
                assert not cuts or (bucket.block and step % bucket.block == 0), (slot, cuts)

    @property
    def even(self) -> bool:
        """True if in each bucket all shards are of one size."""
        return all(len({bucket.shard_numel(at) for at in range(bucket.size)}) <= 1 for bucket in self.buckets)

    def find(self, name: str) -> tuple[BucketPlan, Slot]:
        """Return the bucket and slot of a parameter. Raises `UserError` for a name it does not know."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.name == name:
                    return bucket, slot
        raise UserError(
            "no such parameter in the layout",
            got=repr(name),
            instead=nearest(name, [s.name for b in self.buckets for s in b.slots]),
        )

    def cut_tensors(self) -> list[str]:
        """List the names of parameters that lie on more than one rank."""
        return [slot.name for bucket in self.buckets for slot in bucket.slots if bucket.cuts(slot)]


def matching(names: Mapping[str, Sequence[str]], patterns: Iterable[str], setting: str) -> set[str]:
    """Return the parameters that a setting's patterns name. names: all names of each.

    Raises `UserError` for a pattern that names none.
    """
    found: set[str] = set()
    for pattern in patterns:
        hits = {name for name, others in names.items() if fnmatch.filter(others, pattern)}
        if not hits:
            known = [each for others in names.values() for each in others]
            raise UserError(f"{setting} matches no parameter", got=repr(pattern), instead=nearest(pattern, known[:40]))
        found |= hits
    return found


def together(parameters: Named, layout: Layout, stacks: Stacks) -> dict[str, int]:
    """Return, for each parameter that a layout's patterns name, how many elements no cut may part, or `WHOLE`.

    parameters: {name: (all of its names, shape)}. Raises `UserError` for patterns that match nothing, contradict
    each other, or ask for more than a tensor has.
    """
    names = {name: others for name, (others, _) in parameters.items()}
    found = dict.fromkeys(matching(names, layout.whole, "Layout.whole"), WHOLE)
    for pattern, block in layout.blocks.items():
        for name in matching(names, [pattern], "Layout.align"):
            if found.get(name) == WHOLE:
                raise UserError(
                    "a parameter is never cut, and cut between blocks",
                    where=f"parameter {name!r}",
                    got=f"Layout(whole={list(layout.whole)}, align={dict(layout.blocks)})",
                    instead="patterns that leave it out of one of the two",
                )
            if block > math.prod(parameters[name][1]):
                raise UserError(
                    "a block is larger than the tensor",
                    where=f"parameter {name!r}, Layout(align={{{pattern!r}: {block}}})",
                    expected=f"at most {math.prod(parameters[name][1])} elements",
                    got=block,
                    instead=f"a pattern that leaves it out, or Layout(whole=[{name!r}])",
                )
            found[name] = math.lcm(found.get(name, 1), block)
    for name, matrix in stacks.items():
        if name in found:
            raise UserError(
                "a parameter is a stack of matrices, and another setting says where it may be cut",
                where=f"parameter {name!r}",
                got=f"Layout(matrices={dict(layout.matrices)}, whole={list(layout.whole)}, align={layout.align})",
                instead="patterns that leave it out of the other",
            )
        numel = math.prod(matrix)
        found[name] = WHOLE if numel == math.prod(parameters[name][1]) else numel
    return found


def partition(specs: Iterable[Spec], layout: Layout, ranks: int, on_axis: int = 1) -> Partition:
    """Lay the parameters out over the `ranks` ranks of a team, in the order given.

    on_axis: the number of ranks in a team along an axis, for the parameters that have one.
    """
    specs = list(specs)
    owner: dict[Piece, int] = {}
    for other, trainable in itertools.product((False, True), repeat=2):
        alike = [spec for spec in specs if (bool(spec.axis), spec.trainable) == (other, trainable)]
        pieces = {piece: load for spec in alike for piece, load in _pieces(spec, layout).items()}
        owner |= owners(pieces, on_axis if other else ranks)
    packed = [_pack(key, run, layout, owner) for key, run in _runs(specs, layout)]
    even = {"unit": _even_bounds, "model": _model_bounds, "tensor": _tensor_bounds}[layout.bounds]
    bounds: dict[int, tuple[int, ...]] = {}
    kinds = [(bool(p.key.axis), p.key.block, bool(p.owners)) for p in packed]
    for other, block, owned in dict.fromkeys(kinds):
        members = [i for i, kind in enumerate(kinds) if kind == (other, block, owned)]
        cut = (_owned_bounds if block == WHOLE else _dealt_bounds) if owned else even
        cuts = cut([packed[i] for i in members], block, on_axis if other else ranks)
        bounds |= zip(members, cuts, strict=True)
    return Partition(
        ranks,
        layout.base,
        tuple(
            BucketPlan(**vars(p.key), index=at, slots=p.slots, numel=bounds[at][-1], bounds=bounds[at])
            for at, p in enumerate(packed)
        ),
    )


def _pieces(spec: Spec, layout: Layout) -> dict[Piece, tuple[int, int]]:
    """Return {piece: (work, elements)} for the pieces that have an owner each: a whole parameter, or each uncut run of
    its matrices; {} if the parameter is cut otherwise."""
    block, together = _block(spec, layout), spec.matrix or spec.shape
    if block != WHOLE and (not spec.matrix or layout.bounds == "tensor"):
        return {}
    size, matrix = block or max(spec.numel, 1), max(math.prod(together), 1)
    runs = [min(size, spec.numel - start) for start in range(0, spec.numel, size)] or [0]
    return {(spec.name, at): (work(together) * (numel // matrix), numel) for at, numel in enumerate(runs)}


class _Packed(NamedTuple):
    key: BucketKey
    slots: tuple[Slot, ...]
    owners: tuple[int, ...]  # of slots that are never cut; of a stack's runs, in order
    numel: int


def _block(spec: Spec, layout: Layout) -> int:
    """Return how many elements of a parameter no cut may part: whole blocks, both its own and `align`'s; or `WHOLE`."""
    if layout.bounds == "tensor" and spec.block != WHOLE:
        return layout.base
    block = math.lcm(layout.base, spec.block)
    return WHOLE if spec.block > 1 and block >= spec.numel else block


def _runs(specs: Iterable[Spec], layout: Layout) -> list[tuple[BucketKey, list[Spec]]]:
    """Group parameters that share a bucket: those of one `BucketKey`, in order, up to the size limit."""
    limit = (layout.bucket_mib or BUCKET_MIB) * 2**20
    open_runs: dict[tuple[BucketKey, bool], tuple[list[Spec], float]] = {}
    runs: list[tuple[BucketKey, list[Spec]]] = []
    for spec in specs:
        block = _block(spec, layout)
        key = BucketKey(spec.unit, spec.dtype, spec.itemsize, spec.trainable, spec.axis, spec.kept, block, spec.fp8)
        nbytes = spec.numel * spec.itemsize
        run, filled = open_runs.get(alike := (key, bool(_pieces(spec, layout))), ([], math.inf))
        if filled + nbytes > limit:
            run, filled = [], 0.0
            runs.append((key, run))
        run.append(spec)
        open_runs[alike] = (run, filled + nbytes)
    return sorted(runs, key=lambda pair: pair[0].unit)


def _pack(key: BucketKey, run: list[Spec], layout: Layout, owner: Mapping[Piece, int]) -> _Packed:
    slots: list[Slot] = []
    end = 0
    if key.whole:  # by owner, so that shards are contiguous
        run = sorted(run, key=lambda spec: owner[spec.name, 0])
    for spec in run:
        if spec.shape[-1:] == (2,) and end % 2:
            end += key.block or layout.base  # torch.view_as_complex takes pairs only if they begin at an even element
        slots.append(Slot(spec.name, spec.shape, end, spec.numel, spec.cut, spec.matrix))
        end += _round_up(spec.numel, key.block or layout.base)
    # A stack's runs stay in order, so their owners are sorted instead: each rank gets as many equal runs as dealt.
    return _Packed(key, tuple(slots), tuple(sorted(owner[each] for s in run for each in _pieces(s, layout))), end)


def _owned_bounds(packed: list[_Packed], _block: int, ranks: int) -> list[tuple[int, ...]]:
    return [
        (
            *(
                min((s.start for s, at in zip(p.slots, p.owners, strict=True) if at >= rank), default=p.numel)
                for rank in range(ranks)
            ),
            p.numel,
        )
        for p in packed
    ]


def _dealt_bounds(packed: list[_Packed], block: int, ranks: int) -> list[tuple[int, ...]]:
    """Cut stacks of matrices where the owner changes from one run of `block` elements to the next."""
    return [tuple(block * bisect_left(p.owners, rank) for rank in range(ranks + 1)) for p in packed]


def _even_bounds(packed: list[_Packed], align: int, ranks: int) -> list[tuple[int, ...]]:
    sizes = [_round_up(-(-p.numel // ranks), align) for p in packed]
    return [tuple(range(0, size * ranks + 1, size)) if size else (0,) * (ranks + 1) for size in sizes]


def _model_bounds(packed: list[_Packed], align: int, ranks: int) -> list[tuple[int, ...]]:
    def cuts(total: int, _edges: list[int]) -> list[int]:
        share = _round_up(-(-total // ranks), align)
        return [min(rank * share, total) for rank in range(ranks + 1)]

    return _flat_bounds(packed, cuts)


def _tensor_bounds(packed: list[_Packed], align: int, ranks: int) -> list[tuple[int, ...]]:
    def cuts(total: int, edges: list[int]) -> list[int]:
        def nearest_edge(at: float) -> int:
            return min(edges, key=lambda edge: (abs(edge - at), edge))

        return [0, *(nearest_edge(rank * total / ranks) for rank in range(1, ranks)), total]

    return _flat_bounds(packed, cuts)


def _flat_bounds(packed: list[_Packed], cuts: Callable[[int, list[int]], list[int]]) -> list[tuple[int, ...]]:
    """Return buckets' bounds from cuts in one flat vector per (dtype, trainable): all of its buckets end to end."""
    bounds: dict[int, tuple[int, ...]] = {}
    for key in dict.fromkeys((p.key.dtype, p.key.trainable) for p in packed):
        members = [i for i, p in enumerate(packed) if (p.key.dtype, p.key.trainable) == key]
        starts, total = [], 0
        for i in members:
            starts.append(total)
            total += packed[i].numel
        edges = [start + slot.start for i, start in zip(members, starts, strict=True) for slot in packed[i].slots] + [
            total
        ]
        where = cuts(total, edges)
        for i, start in zip(members, starts, strict=True):
            bounds[i] = tuple(min(max(cut - start, 0), packed[i].numel) for cut in where)
    return [bounds[i] for i in range(len(packed))]


def _round_up(numel: int, align: int) -> int:
    return -(-numel // align) * align


def slot_at(starts: Sequence[int], element: int) -> int:
    """Return the index of the slot that holds a bucket element, or else of the last one before it.

    starts: where each slot begins, in order.
    """
    return max(bisect_right(starts, element) - 1, 0)
