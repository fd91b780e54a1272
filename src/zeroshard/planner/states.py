"""Model-state bytes of one rank at rest, as arithmetic on the layout: nothing here looks at a tensor that is held."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UserError
from ..events import DEVICE, HOST, NVME
from ..headroom import BUFFERS, aligned
from ..layout import Bucket, Partition, Slot
from ..stage import Placements
from .recipes import PADDING, Recipe
from .traffic import Moved, Traffic, moved, passes, widths

if TYPE_CHECKING:
    from ..api import Zero


class Stored(NamedTuple):
    """Bytes per element of what a bucket itself stores. `master` is 0 where the parameters are what is updated.

    cast: may masters on the device stand for sharded parameters, which are then not stored?
    """

    parameters: Fraction | int
    gradients: Fraction | int
    master: Fraction | int
    cast: bool = False


# What an optimizer keeps of one slot: {state: (bytes, per element?)}
Kept = Mapping[str, tuple[Fraction | int, bool]]
Resting = Sequence[Mapping[str, str]]  # for each bucket the tier of "parameters", "gradients" and "optimizer"
Tiers = dict[str, dict[str, int]]  # {tier: {state: bytes}}

KINDS = ("parameters", "gradients", "optimizer")
STAGING = "staging"
DEVICE_ALONE = dict.fromkeys(KINDS, DEVICE)


class Reserved(NamedTuple):
    """What one bucket, or an optimizer for one slot of it, reserves for a state on one rank."""

    tier: str
    kind: str
    state: str
    numel: int
    padding: int  # elements of these that no parameter fills
    itemsize: Fraction | int

    @property
    def nbytes(self) -> int:
        return math.ceil(self.numel * self.itemsize)


def reserved(
    bucket: Bucket,
    place: Placements,
    rank: int,
    sizes: Stored,
    kept: Callable[[Bucket, Slot], Kept],
    at: Mapping[str, str] = DEVICE_ALONE,
) -> Iterator[Reserved]:
    """What is reserved for each state of a bucket.

    A bucket stores its padding with each state. An optimizer sees fragments, which have none; but what it keeps in a
    file has room for the whole bucket, and what it keeps of a parameter as a whole then rests in host memory.
    """
    shard = bucket.shard_numel(rank)
    own = [bucket.fragment(slot, rank).numel for slot in bucket.slots]

    def store(kind: str, state: str, itemsize: Fraction | int) -> Reserved:
        if getattr(place, kind):
            return Reserved(at[kind], kind, state, shard, shard - sum(own), itemsize)
        return Reserved(at[kind], kind, state, bucket.numel, bucket.padding, itemsize)

    if not (sizes.cast and bucket.trainable and place.parameters and at["parameters"] == at["optimizer"] == DEVICE):
        yield store("parameters", "parameters", sizes.parameters)
    if not bucket.trainable:
        return
    yield store("gradients", "gradients", sizes.gradients)
    yield store("optimizer", "master", sizes.master)
    filed: dict[str, Fraction | int] = {}
    tier = at["optimizer"]
    for slot, fragment in zip(bucket.slots, own, strict=True):
        numel = fragment if place.optimizer else slot.numel
        if numel:  # of a rank that owns nothing of it, the optimizer has no state
            for state, (itemsize, grows) in kept(bucket, slot).items():
                if grows and tier == NVME:
                    filed[state] = itemsize
                else:
                    beside = HOST if tier == NVME else tier
                    yield Reserved(beside, "optimizer", state, numel if grows else 1, 0, itemsize)
    for state, itemsize in filed.items():
        yield store("optimizer", state, itemsize)


def states_of(
    partition: Partition,
    place: Placements,
    rank: int,
    stored: Callable[[Bucket], Stored],
    kept: Callable[[Bucket, Slot], Kept],
    *,
    resting: Resting | None = None,
    apart: bool = False,
) -> Tiers:
    """{tier: {state: bytes}} of one rank at rest: the only place where the bytes of a partition are added up.

    What rests in files is counted without the rounding to pages; their buffers are "staging", in host memory. `apart`:
    the padding's bytes are not in their states but in a row of their own, "padding".
    """
    held: Tiers = {DEVICE: {}, HOST: {}, NVME: {}}

    def add(tier: str, state: str, nbytes: Fraction | int) -> None:
        if nbytes:
            held[tier][state] = held[tier].get(state, 0) + math.ceil(nbytes)

    for bucket in partition.buckets:
        at = resting[bucket.index] if resting else DEVICE_ALONE
        for each in reserved(bucket, place, rank, stored(bucket), kept, at):
            add(each.tier, each.state, (each.numel - each.padding * apart) * each.itemsize)
            add(each.tier, PADDING, each.padding * apart * each.itemsize)
    if resting:
        files = files_of(partition, place, rank, stored, kept, resting)
        add(HOST, STAGING, sum(file.buffers for file in files.values()))
    for states in held.values():
        if PADDING in states:
            states[PADDING] = states.pop(PADDING)  # last, where it is shown
    return {tier: states for tier, states in held.items() if states}


def together(tiers: Tiers) -> dict[str, int]:
    """{state: bytes}, whichever tier they rest in; padding last."""
    states = list(dict.fromkeys(state for held in tiers.values() for state in held))
    order = {"parameters": -2, "gradients": -1, STAGING: 1, PADDING: 2}
    states.sort(key=lambda state: order.get(state, 0))
    return {state: sum(held.get(state, 0) for held in tiers.values()) for state in states}


class File(NamedTuple):
    """One file of states. slots: {bucket: bytes}, those that are not empty. largest: bytes of each of its buffers."""

    kind: str
    slots: dict[int, int]
    largest: int

    @property
    def nbytes(self) -> int:
        """On the disk."""
        return sum(map(aligned, self.slots.values()))

    @property
    def buffers(self) -> int:
        """Bytes of its buffers in host memory."""
        return min(BUFFERS, len(self.slots)) * self.largest


def files_of(
    partition: Partition,
    place: Placements,
    rank: int,
    stored: Callable[[Bucket], Stored],
    kept: Callable[[Bucket, Slot], Kept],
    resting: Resting,
) -> dict[str, File]:
    """{state: its file} of one rank, with buffers for the largest bucket that has that state from the start."""
    slots: dict[str, tuple[str, dict[int, int]]] = {}
    largest = dict.fromkeys(KINDS, 0)
    for bucket in partition.buckets:
        at, sizes = resting[bucket.index], stored(bucket)
        itemsizes = sizes.parameters, sizes.gradients, sizes.master or sizes.parameters
        for kind, itemsize in zip(KINDS, itemsizes, strict=True):
            if at[kind] == NVME and (bucket.trainable or kind == "parameters"):
                numel = bucket.shard_numel(rank) if getattr(place, kind) else bucket.numel
                largest[kind] = max(largest[kind], math.ceil(numel * itemsize))
        for each in reserved(bucket, place, rank, sizes, kept, at):
            if each.tier == NVME and each.nbytes:
                slots.setdefault(each.state, (each.kind, {}))[1][bucket.index] = each.nbytes
    return {
        state: File(kind, sizes, aligned(max(largest[kind], *sizes.values()))) for state, (kind, sizes) in slots.items()
    }


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


def recipe_tiers(
    partition: Partition,
    place: Placements,
    rank: int,
    recipe: Recipe,
    *,
    resting: Resting | None = None,
    apart: bool = True,
) -> Tiers:
    """`states_of` with the bytes of a recipe. Its gradients count for trainable buckets only, as the engine's do."""
    return states_of(partition, place, rank, *_of_recipe(recipe, resting), resting=resting, apart=apart)


def recipe_states(
    partition: Partition, place: Placements, rank: int, recipe: Recipe, *, apart: bool = True
) -> dict[str, int]:
    """{state: bytes} with the bytes of a recipe."""
    return together(recipe_tiers(partition, place, rank, recipe, apart=apart))


def recipe_files(
    partition: Partition, place: Placements, rank: int, recipe: Recipe, resting: Resting
) -> dict[str, File]:
    """`files_of` with the bytes of a recipe."""
    return files_of(partition, place, rank, *_of_recipe(recipe, resting), resting)


def recipe_rounding(partition: Partition, place: Placements, rank: int, recipe: Recipe, resting: Resting) -> int:
    """Bytes by which whole pages of pinned memory exceed what rests there; what an optimizer makes is not pinned."""
    stored, kept = _of_recipe(recipe, resting)
    return sum(
        aligned(each.nbytes) - each.nbytes
        for bucket in partition.buckets
        for each in reserved(bucket, place, rank, stored(bucket), kept, resting[bucket.index])
        if each.tier == HOST and each.state in ("parameters", "gradients", "master")
    )


def recipe_snapshot(partition: Partition, rank: int, recipe: Recipe) -> int:
    """`snapshot` with the bytes of a recipe."""
    return snapshot(partition, rank, *_of_recipe(recipe, None))


def elsewhere(at: Mapping[str, str]) -> bool:
    """Is what the optimizer updates not where the parameters are? Then it has a master also in the same dtype."""
    return (at["parameters"] == DEVICE) != (at["optimizer"] == DEVICE)


def _of_recipe(
    recipe: Recipe, resting: Resting | None
) -> tuple[Callable[[Bucket], Stored], Callable[[Bucket, Slot], Kept]]:
    """On a GPU, which recipes are for."""
    master = recipe.optimizer.get("master", Fraction())
    kept: dict[str, tuple[Fraction | int, bool]] = {
        **{state: (nbytes, True) for state, nbytes in recipe.optimizer.items() if state != "master"},
        **{state: (nbytes, False) for state, nbytes in recipe.per_tensor.items()},
    }

    def stored(bucket: Bucket) -> Stored:
        copied = resting is not None and elsewhere(resting[bucket.index])
        return Stored(recipe.parameters, recipe.gradients, master or recipe.parameters * copied, bool(recipe.cast))

    return stored, lambda bucket, slot: kept


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
    stored = recipe.parameters * (1 - recipe.cast) * place.parameters + recipe.gradients * place.gradients
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


def predict_tiers(zero: Zero) -> Tiers:
    """{tier: {state: bytes}} on this rank once the optimizer has stepped, as `zero.ledger().tiers` has them.

    Optimizer state is found by asking the optimizer itself: one step of a twin on a tiny parameter tells which of its
    states grow with the parameter and which are one number.
    """
    return states_of(zero.partition, zero.placements, zero.rank, *_of_run(zero), resting=zero._resting)


def predict_states(zero: Zero) -> dict[str, int]:
    """The same in all tiers together, as `zero.ledger().held` has them."""
    return together(predict_tiers(zero))


def predict_files(zero: Zero) -> dict[str, File]:
    """{state: its file} on this rank."""
    return files_of(zero.partition, zero.placements, zero.rank, *_of_run(zero), zero._resting)


def predict_snapshot(zero: Zero) -> int:
    """Bytes that `zero.save(..., asynchronous=True)` copies on this rank, buffers and extra aside."""
    return snapshot(zero.partition, zero.rank, *_of_run(zero))


def _of_run(zero: Zero) -> tuple[Callable[[Bucket], Stored], Callable[[Bucket, Slot], Kept]]:
    from ..fragment import file_name

    def stored(bucket: Bucket) -> Stored:
        dtypes = zero.dtypes(bucket)
        copied = zero._device.type != "cpu" and elsewhere(zero._resting[bucket.index])
        master = dtypes.master.itemsize if dtypes.master != dtypes.param or copied else 0
        return Stored(dtypes.param.itemsize, dtypes.grad.itemsize, master, zero._precision.casts(dtypes.param))

    members: dict[tuple[int, str], int] = {}
    groups: list[tuple[Any, dict[str, Any]]] = []
    numbers: dict[int, int] = {}  # by the optimizer's id
    for optimizer, group, places in zero.optimizer_members():
        numbers.setdefault(id(optimizer), len(numbers))
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
        found = {state: each.kept(slot.shape) for state, each in probed[key].items()}
        number = numbers[id(optimizer)]
        if zero._resting[bucket.index]["optimizer"] == NVME:
            return {file_name(state, number) if each[1] else state: each for state, each in found.items()}
        return found

    return stored, kept


class Asked(NamedTuple):
    """One state of an optimizer as it showed itself. sides: None where it is like the parameter; else its shape, with
    -1 - i in place of the parameter's dimension i."""

    dtype: Any
    sides: tuple[int, ...] | None

    def shape(self, of: tuple[int, ...]) -> tuple[int, ...]:
        sized = of or (1,)
        return of if self.sides is None else tuple(sized[-1 - side] if side < 0 else side for side in self.sides)

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

    shape = PRIMES[: max(dimensions, 1)]  # as fragments have at least one
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
            like = tuple(value.shape) == shape
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
