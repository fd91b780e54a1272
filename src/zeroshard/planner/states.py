"""Model-state bytes of one rank at rest, as arithmetic on the layout: nothing here looks at a tensor that is held."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UserError
from ..layout import Bucket, Partition, Slot
from ..stage import Placements
from .closed import PADDING, Moved, Recipe, Traffic, moved, passes, widths

if TYPE_CHECKING:
    from ..api import Zero


class Stored(NamedTuple):
    """Bytes per element of what a bucket itself stores. `master` is 0 where the parameters are what is updated."""

    parameters: Fraction | int
    gradients: Fraction | int
    master: Fraction | int


# What an optimizer keeps of one slot: {state: (bytes, per element?)}
Kept = Mapping[str, tuple[Fraction | int, bool]]


def states_of(
    partition: Partition,
    place: Placements,
    rank: int,
    stored: Callable[[Bucket], Stored],
    kept: Callable[[Bucket, Slot], Kept],
    *,
    apart: bool = False,
) -> dict[str, int]:
    """{state: bytes} of one rank at rest: the only place where the bytes of a partition are added up.

    A bucket stores its padding with each state; an optimizer sees fragments, which have none. `apart`: the padding's
    bytes are not in their states but in a row of their own, "padding".
    """
    held: dict[str, int] = {}

    def add(state: str, nbytes: Fraction | int) -> None:
        if nbytes:
            held[state] = held.get(state, 0) + math.ceil(nbytes)

    for bucket in partition.buckets:
        sizes = stored(bucket)
        shard, whole = bucket.shard_numel(rank), bucket.numel
        own = [bucket.fragment(slot, rank).numel for slot in bucket.slots]

        def store(state: str, sharded: bool, nbytes: Fraction | int) -> None:
            padding = shard - sum(own) if sharded else bucket.padding  # noqa: B023  # called in this turn only
            reserved = shard if sharded else whole  # noqa: B023
            add(state, (reserved - padding if apart else reserved) * nbytes)
            if apart:
                add(PADDING, padding * nbytes)

        store("parameters", place.parameters, sizes.parameters)
        if bucket.trainable:
            store("gradients", place.gradients, sizes.gradients)
            store("master", place.optimizer, sizes.master)
            for slot, fragment in zip(bucket.slots, own, strict=True):
                numel = fragment if place.optimizer else slot.numel
                if numel:  # of a rank that owns nothing of it, the optimizer has no state
                    for state, (nbytes, grows) in kept(bucket, slot).items():
                        add(state, nbytes * numel if grows else nbytes)
    if PADDING in held:
        held[PADDING] = held.pop(PADDING)  # last, where it is shown
    return held


def snapshot(
    partition: Partition, rank: int, stored: Callable[[Bucket], Stored], kept: Callable[[Bucket, Slot], Kept]
) -> int:
    """Bytes that a save behind the training copies on one rank: of what it owns, at any stage, each value and state."""
    total: Fraction | int = 0
    for bucket in partition.buckets:
        sizes = stored(bucket)
        value = sizes.master if bucket.trainable and sizes.master else sizes.parameters
        for slot in bucket.slots:
            part = bucket.fragment(slot, rank)
            total += value * part.numel
            if bucket.trainable and part.numel:
                for nbytes, grows in kept(bucket, slot).values():
                    total += nbytes * part.numel if grows else nbytes * (part.start == 0)
    return math.ceil(total)


def recipe_states(
    partition: Partition, place: Placements, rank: int, recipe: Recipe, *, apart: bool = True
) -> dict[str, int]:
    """`states_of` with the bytes of a recipe. Its gradients count for trainable buckets only, as the engine's do."""
    return states_of(partition, place, rank, *_of_recipe(recipe), apart=apart)


def recipe_snapshot(partition: Partition, rank: int, recipe: Recipe) -> int:
    """`snapshot` with the bytes of a recipe."""
    return snapshot(partition, rank, *_of_recipe(recipe))


def _of_recipe(recipe: Recipe) -> tuple[Callable[[Bucket], Stored], Callable[[Bucket, Slot], Kept]]:
    stored = Stored(recipe.parameters, recipe.gradients, recipe.optimizer.get("master", 0))
    kept: dict[str, tuple[Fraction | int, bool]] = {
        **{state: (nbytes, True) for state, nbytes in recipe.optimizer.items() if state != "master"},
        **{state: (nbytes, False) for state, nbytes in recipe.per_tensor.items()},
    }
    return lambda bucket: stored, lambda bucket, slot: kept


class Owned(NamedTuple):
    """What one rank has of a partition: elements of its shards, of parameters in them, and how many fragments."""

    shard: int
    numel: int
    fragments: int


def owned(partition: Partition) -> list[Owned]:
    """For every rank. Walks bounds and slots side by side: a large model has thousands of either."""
    found = [[0, 0, 0] for _ in range(partition.ranks)]
    for bucket in partition.buckets:
        first = 0  # of the slots, the first that can reach into this shard
        for rank in range(partition.ranks):
            low, high = bucket.shard(rank)
            mine = found[rank]
            mine[0] += high - low
            while first < len(bucket.slots) and bucket.slots[first].stop <= low:
                first += 1
            for slot in bucket.slots[first:]:
                if slot.start >= high:
                    break
                if numel := slot.within(low, high).numel:
                    mine[1] += numel
                    mine[2] += 1
    return [Owned(*mine) for mine in found]


def fullest_rank(ranks: Sequence[Owned], place: Placements, recipe: Recipe) -> int:
    """The rank that holds most at rest; of equals the last, where the padding lies."""
    stored = recipe.parameters * place.parameters + recipe.gradients * place.gradients
    stored += recipe.optimizer.get("master", Fraction()) * place.optimizer
    kept = sum((nbytes for state, nbytes in recipe.optimizer.items() if state != "master"), Fraction())
    each = sum(recipe.per_tensor.values())

    def held(rank: int) -> tuple[Fraction, int]:
        mine = ranks[rank]
        return stored * mine.shard + (kept * mine.numel + each * mine.fragments) * place.optimizer, rank

    return max(range(len(ranks)), key=held)


def recipe_traffic(
    partition: Partition, place: Placements, rank: int, recipe: Recipe, *, accumulate: int = 1, no_sync: bool = False
) -> Traffic:
    """Bytes that one rank moves in a step, bucket by bucket; recomputation finds its unit gathered already."""
    reductions, gathers = passes(place, accumulate=accumulate, no_sync=no_sync)
    reduced, gathered = widths(place, recipe, no_sync=no_sync)
    totals = [Moved(0, 0, 0), Moved(0, 0, 0)]
    for bucket in partition.buckets:
        own = bucket.shard_numel(rank)
        both = (
            moved(bucket.numel, own, partition.ranks, reduced)[0].times(reductions if bucket.trainable else 0),
            moved(bucket.numel, own, partition.ranks, gathered)[1].times(
                gathers if bucket.trainable or place.parameters else 0
            ),
        )
        totals = [Moved(*map(sum, zip(*pair, strict=True))) for pair in zip(totals, both, strict=True)]
    return Traffic(reductions, gathers, totals[0], totals[1], Moved(0, 0, 0))


def predict_states(zero: Zero) -> dict[str, int]:
    """Bytes per state on this rank once the optimizer has stepped, under the names that `zero.ledger().held` uses.

    Optimizer state is found by asking the optimizer itself: one step of a twin on a tiny parameter tells which of its
    states grow with the parameter and which are one number.
    """
    return states_of(zero.partition, zero.placements, zero.rank, *_of_run(zero))


def predict_snapshot(zero: Zero) -> int:
    """Bytes that `zero.save(..., asynchronous=True)` copies on this rank, buffers and extra aside."""
    return snapshot(zero.partition, zero.rank, *_of_run(zero))


def _of_run(zero: Zero) -> tuple[Callable[[Bucket], Stored], Callable[[Bucket, Slot], Kept]]:
    def stored(bucket: Bucket) -> Stored:
        dtypes = zero.dtypes(bucket)
        master = dtypes.master.itemsize if dtypes.master != dtypes.param else 0
        return Stored(dtypes.param.itemsize, dtypes.grad.itemsize, master)

    members: dict[tuple[int, str], int] = {}
    groups: list[tuple[Any, dict[str, Any]]] = []
    for optimizer, group, places in zero.optimizer_members():
        groups.append((optimizer, group))
        members.update({(bucket.index, slot.name): len(groups) - 1 for bucket, slot in places})
    probed: dict[tuple[int, Any, int], dict[str, Asked]] = {}

    def kept(bucket: Bucket, slot: Slot) -> Kept:
        if (bucket.index, slot.name) not in members:
            return {}
        number = members[bucket.index, slot.name]
        optimizer, group = groups[number]
        key = number, zero.dtypes(bucket).master, len(slot.shape) if takes_whole_tensors(optimizer) else 1
        if key not in probed:
            probed[key] = probe(optimizer, group, key[1], key[2])
        return {state: each.kept(slot.shape) for state, each in probed[key].items()}

    return stored, kept


class Asked(NamedTuple):
    """One state of an optimizer as it showed itself. sides: None where it is like the parameter; else its shape, with
    -1 - i in place of the parameter's dimension i."""

    dtype: Any
    sides: tuple[int, ...] | None

    def shape(self, of: tuple[int, ...]) -> tuple[int, ...]:
        return of if self.sides is None else tuple(of[-1 - side] if side < 0 else side for side in self.sides)

    def kept(self, of: tuple[int, ...]) -> tuple[int, bool]:
        """(bytes, per element?) for a parameter of that shape."""
        if self.sides is None:
            return self.dtype.itemsize, True
        return self.dtype.itemsize * math.prod(self.shape(of)), False


PRIMES = (2, 3, 5, 7, 11, 13, 17)  # sizes that a state's shape gives away


def takes_whole_tensors(optimizer: Any) -> bool:
    """Does an optimizer of torch look at a tensor's shape? Then it is asked with a tensor of as many dimensions."""
    return any(base.__name__ in ("Adafactor", "Muon") for base in type(optimizer).__mro__)


def probe(optimizer: Any, group: dict[str, Any], dtype: Any, dimensions: int = 1, kind: Any = None) -> dict[str, Asked]:
    """{state: what it is} after one step of a twin with the user's class (or `kind`), options and a tiny parameter.

    The optimizer itself is not touched. Raises `UserError` where it cannot step on such a parameter.
    """
    import torch

    shape = PRIMES[:dimensions]
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = torch.ones_like(param)
        kind = type(optimizer) if kind is None else kind
        twin = object.__new__(kind)
        twin.__dict__.update(optimizer.__dict__)
        twin.state, twin.param_groups = collections.defaultdict(dict), [{**group, "params": [param]}]
        twin._optimizer_step_pre_hooks = collections.OrderedDict()
        twin._optimizer_step_post_hooks = collections.OrderedDict()
        try:
            kind.step(twin)  # not twin.step: a scheduler has bound that of the optimizer itself
        except Exception as error:
            raise UserError(
                "the optimizer could not be asked what it keeps",
                where=f"{kind.__name__}.step() on a parameter of shape {shape}",
                got=f"{type(error).__name__}: {error}",
                instead="an optimizer that steps without a closure",
            ) from error
    found = {}
    for key, value in twin.state[param].items():
        if isinstance(value, torch.Tensor):
            like = tuple(value.shape) == shape and key != "step"
            sides = tuple(-1 - shape.index(side) if side in shape else side for side in value.shape)
            found[key] = Asked(value.dtype, None if like else sides)
    return found


def of_torch(name: str) -> tuple[dict[str, int], dict[str, int]] | None:
    """({state: bytes per element}, {state: bytes per tensor}) of a `torch.optim` class, named in any case, in fp32.

    None where torch has no such class.
    """
    import torch

    kinds: dict[str, Any] = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kind = kinds.get(name.lower().removeprefix("torch.optim."))
    if kind is None:
        return None
    dimensions = 2 if kind.__name__ in ("Adafactor", "Muon") else 1
    optimizer = kind([torch.nn.Parameter(torch.zeros(PRIMES[:dimensions]))])
    asked = probe(optimizer, optimizer.param_groups[0], torch.float32, dimensions)
    each = {state: found.dtype.itemsize for state, found in asked.items() if found.sides is None}
    if any(found.sides for found in asked.values()):
        raise UserError(
            "this optimizer's states depend on the shapes of the tensors", got=kind.__name__, instead="plan train:job"
        )
    return each, {state: found.dtype.itemsize for state, found in asked.items() if found.sides == ()}
