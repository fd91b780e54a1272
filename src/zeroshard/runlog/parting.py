"""The first difference of two runs, and of what kind it is.

A gradient is a weighted sum of what each micro-batch adds. Where one run's log has these parts, the other run's
gradient is solved for the weights: all of them 1/2 is a division too many, some of them 0 are micro-batches that are
missing, all of them 1 leaves rounding. An update is solved in the same way for the other run's update and the weights.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from ..errors import UserError
from .read import Run, Step, Told, places, ulps_between
from .traced import Traced, first_call

LOOK = {  # by kind, where to look for the cause
    "replicas": "weights loaded or drawn on one rank alone; a gradient that is not averaged; a step on some ranks",
    "start": "seeds, the checkpoint, weights that only one rank has",
    "same data": "a DistributedSampler, or a part of the data by rank; a seed by rank where data are drawn",
    "order": "which rank gets which micro-batch: zero.batches, or a sampler's order",
    "data": "seeds, shuffling, dropout, accumulation times ranks; zero.micro_batch_rng draws the same at any of these",
    "no gradient": "requires_grad, an optimizer that does not have them, find_unused_parameters",
    "kernel": "a processor with other instructions, another build, threads; random numbers that it draws",
    "losses": "what log.backward(loss) is given: before a division, or after it",
    "gradients": "a part of the model that computes otherwise: a kernel, a mask, dropout",
    "clipping": "clip_grad_norm_, its max_norm, and a GradScaler's unscale_",
    "weights of micro-batches": "a loss divided by its own number of tokens, or by the wrong number of micro-batches",
    "factor": "a sum where an average is meant, or a division too many: of the loss, or by the ranks",
    "accumulation": "zero_grad() inside the loop of accumulation, or a gradient that is overwritten",
    "a rank": "no_sync() on one rank, a backward that it does not run, a sum of which it is not a part",
    "micro-batches": "a backward that does not run, or whose gradient is dropped",
    "a cast": "autocast, a reduction in 16 bits, gradients or weights kept in them without masters",
    "no_sync": "no_sync(), FSDP2's set_requires_gradient_sync(False), for all backwards of a step but the last: "
    "without it every backward sends its sum, and rounds it",
    "order of a sum": "another number of ranks, an all-reduce of the backend's own, other buckets or kernels",
    "learning rate": "lr, its schedule, or an update that runs twice",
    "weight decay": "weight_decay, and which parameters have it",
    "rounding": "fused, foreach or a loop; a processor of another kind",
    "update": "the optimizer's options or states: betas, eps, a step that is not the same",
}
NEAR = 1e-3  # relative: closer numbers differ by rounding, in 32 bits and in 16


class Parting(NamedTuple):
    """The place where two runs part, or two ranks of one, and why."""

    kind: str  # one word or two, the same for the same mistake
    step: int
    what: str  # "weights", "losses", "gradients"
    says: str
    look: str
    name: str | None = None  # of the first tensor that differs
    names: int = 0  # tensors that differ
    element: int | None = None  # flat, among those that are logged
    values: tuple[float, float] | None = None
    ulps: int | None = None
    traced: Traced | None = None  # the first call of a module that differs, if calls were logged


def part(a: Run, b: Run) -> Parting | None:
    """Return the first difference; None where there is none. Raises `UserError` for logs of two models."""
    if a.first.shapes != b.first.shapes:
        mine, theirs = a.first.shapes.items(), b.first.shapes.items()
        odd = sorted({name for name, _ in mine ^ theirs})[:3]
        raise UserError("these are the logs of two models", where=f"{a.folder} and {b.folder}", got=odd)
    if a.first.samples != b.first.samples:
        raise UserError(
            "these logs have other elements of each tensor", expected=a.first.samples, got=b.first.samples,
            instead="the same RunLog(..., samples=...) in both runs",
        )  # fmt: skip
    for number in range(min(len(a.first.steps), len(b.first.steps))):
        for run in (a, b):
            if (found := _replicas(run, number)) is not None:
                return found
        one, two = a.first.steps[number], b.first.steps[number]
        if _differing(one.weights, two.weights):
            return _weights(a, b, number)
        if _differing(one.gradients, two.gradients) or _losses(a, number) != _losses(b, number):
            found = _batches(a, b, number) or _gradients(a, b, number) or _logged(a, b, number)
            if found is not None:  # else losses are no numbers, in both
                return _computed(a, b, number, found)
    return None


def step_by_step(a: Run, b: Run) -> list[dict[str, int]]:
    """Count what differs in each step of both runs: tensors of weights, as it begins, losses, tensors of gradients.

    After the last step there may be the weights alone, which it has made.
    """
    found = []
    for number, (one, two) in enumerate(zip(a.first.steps, b.first.steps, strict=False)):
        told = {"weights": len(_differing(one.weights, two.weights))}
        if one.gradients is not None and two.gradients is not None:
            pairs = zip_longest(_losses(a, number), _losses(b, number))
            told["losses"] = sum(not (x == y or (x != x and y != y)) for x, y in pairs)
            told["gradients"] = len(_differing(one.gradients, two.gradients))
        found.append(told)
    return found


def _computed(a: Run, b: Run, number: int, found: Parting) -> Parting:
    """Add the first call that differs; where a module computes otherwise, that is the kind."""
    traced = first_call(a, b, number)
    if traced is None or not traced.alike:
        return found._replace(traced=traced)
    same = "inputs and weights" if traced.direction == "forward" else "outputs' gradients and weights"
    says = f"the {traced.place} has the same {same} in both runs, and its output differs"
    return found._replace(kind="kernel", says=says, look=LOOK["kernel"], traced=traced)


# --- what differs -----------------------------------------------------------------------------------------------------


def _differing(one: Mapping[str, Told] | None, two: Mapping[str, Told] | None) -> list[str]:
    if one is None or two is None:  # a run that ended in this step
        return []
    # By digest and dtype: elements that are no numbers do not equal themselves.
    mine, theirs = ({name: told[:2] for name, told in each.items()} for each in (one, two))
    return [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]


def _replicas(run: Run, number: int) -> Parting | None:
    own = run.first.steps[number].weights
    for log in run.logs[1:]:
        theirs = log.steps[number].weights if number < len(log.steps) else None
        if names := _differing(own, theirs):
            says = f"in {run.folder} the weights of rank {log.rank} are not those of rank 0"
            return _Teller(run, number, "weights", names, own or {}, theirs or {}).say("replicas", says)
    return None


class _Teller(NamedTuple):
    """Tensors that differ, to be pointed at whatever the kind."""

    run: Run
    step: int
    what: str
    names: Sequence[str]
    one: Mapping[str, Told]
    two: Mapping[str, Told]

    def say(self, kind: str, says: str) -> Parting:
        """Point at the first logged element that differs, of the first such tensor."""
        told = kind, self.step, self.what, says, LOOK[kind]
        for name in self.names:
            mine, theirs = self.one.get(name), self.two.get(name)
            if mine is None or theirs is None:
                continue
            for at, (x, y) in enumerate(zip(mine.samples, theirs.samples, strict=False)):
                if x != y and not (math.isnan(x) and math.isnan(y)):
                    log = self.run.first
                    element = places(math.prod(log.shapes[name]), log.samples)[at]
                    ulps = ulps_between(x, y, mine.dtype) if mine.dtype == theirs.dtype else None
                    return Parting(*told, name, len(self.names), element, (x, y), ulps)
        return Parting(*told, self.names[0], len(self.names))


# --- of what kind -----------------------------------------------------------------------------------------------------


def _logged(a: Run, b: Run, number: int) -> Parting | None:
    """Tell of losses that differ where all gradients are equal."""
    for x, y in zip(_losses(a, number), _losses(b, number), strict=False):
        if x != y and not (math.isnan(x) and math.isnan(y)):
            says = "the gradients are equal, and the logged losses are not"
            return Parting("losses", number, "losses", says, LOOK["losses"], values=(x, y))
    return None


def _losses(run: Run, number: int) -> list[float]:
    """Return the losses of a step in the order of its micro-batches: rank by rank, backward by backward."""
    steps = [log.steps[number] for log in run.logs if number < len(log.steps)]
    most = max((len(step.backwards) for step in steps), default=0)
    return [step.backwards[k].loss for k in range(most) for step in steps if k < len(step.backwards)]


def _batches(a: Run, b: Run, number: int) -> Parting | None:
    """Tell if the runs have had other micro-batches, with the same weights."""
    mine, theirs = _losses(a, number), _losses(b, number)
    if mine == theirs or not mine or not theirs or not all(map(math.isfinite, mine + theirs)):
        return None

    def say(kind: str, says: str, values: tuple[float, float] | None = None) -> Parting:
        return Parting(kind, number, "losses", says, LOOK[kind], values=values)

    for run, losses, other in ((b, theirs, mine), (a, mine, theirs)):
        turns = [losses[at : at + len(run.logs)] for at in range(0, len(losses), len(run.logs))]
        alike = len(run.logs) > 1 and all(len(set(turn)) == 1 for turn in turns)
        if alike and len(set(other)) > len(set(losses)):
            return say("same data", f"in {run.folder} all ranks have the same micro-batches")
    if len(mine) == len(theirs):
        values = next((x, y) for x, y in zip(mine, theirs, strict=True) if x != y)
        if sorted(mine) == sorted(theirs):
            return say("order", "the same micro-batches in another order, so sums round otherwise", values)
        ratios = [y / x if x else math.inf for x, y in zip(mine, theirs, strict=True)]
        if _near(max(ratios), min(ratios)):
            return None  # rounding, or a loss that is divided: the gradients say more
        return say("data", "the same weights give other losses: other data, or other random numbers", values)
    if set(mine) <= set(theirs) or set(theirs) <= set(mine):
        return None  # one has fewer: the gradients say which
    return say("data", f"{len(mine)} and {len(theirs)} micro-batches, and not the same ones")


class _Part(NamedTuple):
    """A micro-batch's addition to the gradients, or that of all ranks in one turn."""

    name: str
    turn: int
    added: Mapping[str, Sequence[float]]


def _parts(run: Run, number: int) -> list[_Part]:
    steps = [log.steps[number] for log in run.logs if number < len(log.steps)]
    found = []
    for turn in range(min(len(step.backwards) for step in steps)):
        added = [step.backwards[turn].added for step in steps]
        if all(each == added[0] for each in added):  # averaged already, or one rank
            found.append(_Part(f"backward {turn}", turn, added[0]))
        else:
            found += [_Part(f"backward {turn} of rank {rank}", turn, each) for rank, each in enumerate(added)]
    return found


def _gradients(a: Run, b: Run, number: int) -> Parting | None:
    one, two = a.first.steps[number].gradients, b.first.steps[number].gradients
    if one is None or two is None or not (names := _differing(one, two)):
        return None
    teller = _Teller(a, number, "gradients", names, one, two)
    if absent := [name for name in names if (name in one) != (name in two)]:
        run = b if absent[0] in one else a
        return teller.say("no gradient", f"in {run.folder} {len(absent)} have no gradient: {', '.join(absent[:3])}")
    if (scaled := _scaled(a, b, number)) is not None:
        return teller.say("clipping", f"gradients are scaled between backward and step: {scaled}")
    # The run whose parts are more says, if it can, what the other's gradient is made of.
    parts = [(run, other, _parts(run, number)) for run, other in ((a, b), (b, a))]
    for told, other, found in sorted(parts, key=lambda each: -len(each[2])):
        mine, theirs = told.first.steps[number].gradients or {}, other.first.steps[number].gradients or {}
        own, own_off = _solved([each.added for each in found], mine, mine)
        weights, off = _solved([each.added for each in found], theirs, mine)
        if own_off < 10 * NEAR and off < 10 * NEAR and all(abs(each) > NEAR for each in own):
            ratios = [w / o for w, o in zip(weights, own, strict=True)]
            return teller.say(*_weighed(ratios, found, told, other) or _rounding(a, b, number, one, two))
    (ratio,), off = _solved([{name: each.samples for name, each in one.items()}], two, one)
    if off < 10 * NEAR:
        return teller.say(*_weighed([ratio], [_Part("all", 0, {})], a, b) or _rounding(a, b, number, one, two))
    return teller.say("gradients", "the gradients differ by more than weights of micro-batches")


def _scaled(a: Run, b: Run, number: int) -> str | None:
    """Tell by what gradients are scaled between backward and step, if not by the same in both runs."""
    scales, words = [], []
    for run in (a, b):
        parts, step = _parts(run, number), run.first.steps[number].gradients or {}
        if not parts or len(parts) > len(run.first.steps[number].backwards):
            return None  # summed over ranks after the last backward: a factor may be that of the sum
        added = {name: [part.added[name] for part in parts if name in part.added] for name in step}
        total = {name: [*map(math.fsum, zip(*each, strict=True))] for name, each in added.items()}
        (scale,), off = _solved([total], step, step)
        if off > 10 * NEAR:
            return None
        norm = math.sqrt(math.fsum(each.norm**2 for each in step.values()))
        scales.append(scale)
        words.append(f"by {scale:.4g} in {run.folder}, where the norm is then {norm:.4g}")
    return None if _near(*scales) else "; ".join(words)


def _weighed(ratios: Sequence[float], parts: Sequence[_Part], told: Run, other: Run) -> tuple[str, str] | None:
    """Name how micro-batches count in the other run, where they count once in this one."""
    missing = [part for part, ratio in zip(parts, ratios, strict=True) if abs(ratio) < 10 * NEAR]
    rest = [ratio for ratio in ratios if abs(ratio) >= 10 * NEAR]
    factor = math.fsum(rest) / len(rest) if rest else 0.0
    if not all(_near(ratio, factor) for ratio in rest):
        words = ", ".join(f"{part.name} {ratio:.4g}" for part, ratio in zip(parts, ratios, strict=True))
        return "weights of micro-batches", f"they count otherwise in {other.folder}: {words} times"
    if missing:
        return _missing(missing, parts, factor, told, other)
    if _near(factor, 1):
        return None
    numbers = {len(told.logs): "the ranks", len(other.logs): "the ranks", len(parts): "the micro-batches"}
    whole = max(factor, 1 / factor)
    name = next((f": {word}, {n}" for n, word in numbers.items() if n > 1 and _near(whole, n)), "")
    return "factor", f"gradients in {other.folder} are {factor:.6g} times those in {told.folder}{name}"


def _missing(missing: Sequence[_Part], parts: Sequence[_Part], factor: float, told: Run, other: Run) -> tuple[str, str]:
    rest = "" if _near(factor, 1) else f"; all others count {factor:.4g} times"
    last, gone = parts[-1].turn, {part.turn for part in missing}
    if last and missing == [part for part in parts if part.turn != last]:
        return "accumulation", f"only the last backward counts in {other.folder}{rest}"
    names = f"{', '.join(part.name for part in missing[:4])}{rest}"
    ranks = {turn % len(other.logs) for turn in gone}  # as a sampler gives them out in turn
    if len(told.logs) == 1 < len(other.logs) and len(ranks) == 1:
        return "a rank", f"the micro-batches of rank {ranks.pop()} are missing in {other.folder}: {names}"
    return "micro-batches", f"missing in {other.folder}: {names}"


def _rounding(a: Run, b: Run, number: int, one: Mapping[str, Told], two: Mapping[str, Told]) -> tuple[str, str]:
    finite = [all(math.isfinite(told.norm) for told in each.values()) for each in (one, two)]
    if finite[0] != finite[1]:
        return "gradients", f"infinite, or no number, in {(b if finite[0] else a).folder} alone"
    low = _narrow(one), _narrow(two)
    if any(low) and not all(low):
        return "a cast", f"gradients in {(a if low[0] else b).folder} have been rounded to {low[0] or low[1]}"
    if (once := [_once(run, number) for run in (a, b)]) in ([True, False], [False, True]):
        late, early = (a, b) if once[0] else (b, a)
        return "no_sync", f"ranks add up after each backward in {early.folder}, and once a step in {late.folder}"
    return "order of a sum", "the same gradients, added up in another order"


def _once(run: Run, number: int) -> bool | None:
    """Tell if ranks add up once in a step of several backwards; None where there is no such choice."""
    steps = [log.steps[number].backwards for log in run.logs if number < len(log.steps)]
    turns = [[step[turn].added for step in steps] for turn in range(min(map(len, steps)))]
    if len(run.logs) == 1 or len(turns) < 2 or not any(each for added in turns for each in added):  # as DeepSpeed's are
        return None
    return any(not each or each != added[0] for added in turns[:-1] for each in added)


def _narrow(tensors: Mapping[str, Told]) -> str | None:
    """Return the 16-bit dtype that all logged elements fit into exactly."""
    values = [value for each in tensors.values() for value in each.samples if math.isfinite(value) and value]
    if values and all(_bfloat16(value) for value in values):
        return "bfloat16"
    if values and all(
        abs(value) < 65520 and struct.unpack("<e", struct.pack("<e", value))[0] == value for value in values
    ):
        return "float16"
    return None


def _bfloat16(value: float) -> bool:
    bits = struct.pack("<f", value)
    return struct.unpack("<f", bits)[0] == value and bits[:2] == b"\0\0"


def _weights(a: Run, b: Run, number: int) -> Parting:
    one, two = a.first.steps[number].weights or {}, b.first.steps[number].weights or {}
    say = _Teller(a, number, "weights", _differing(one, two), one, two).say
    if number == 0:
        return say("start", "the runs begin with other weights")
    before, now = ([_samples(run.first.steps[at]) for run in (a, b)] for at in (number - 1, number))
    mine, theirs = (
        {name: [y - x for x, y in zip(was[name], values, strict=True)] for name, values in then.items()}
        for was, then in zip(before, now, strict=True)
    )
    like = {name: told._replace(samples=mine[name]) for name, told in one.items()}
    target = {name: told._replace(samples=theirs[name]) for name, told in two.items()}
    (factor, decay), off = _solved([mine, before[0]], target, like)
    (plain,), alone = _solved([mine], target, like)
    equal = "the gradients are equal, and"
    if off > 10 * NEAR:
        return say("update", f"{equal} the updates are not")
    if alone < 10 * NEAR and not _near(plain, 1):
        return say("learning rate", f"{equal} updates in {b.folder} are {plain:.6g} times those in {a.folder}")
    if alone > 10 * NEAR or abs(decay) > NEAR * abs(factor):
        return say("weight decay", f"{equal} {b.folder} adds {decay:.4g} times the weights in its update")
    low = _narrow(one), _narrow(two)
    if any(low) and not all(low):
        return say("a cast", f"weights in {(a if low[0] else b).folder} are rounded to {low[0] or low[1]}")
    return say("rounding", f"{equal} the same update is rounded otherwise")


def _samples(step: Step) -> dict[str, list[float]]:
    return {name: told.samples for name, told in (step.weights or {}).items()}


def _near(x: float, y: float) -> bool:
    return abs(x - y) <= NEAR * max(abs(x), abs(y))


def _solved(
    columns: Sequence[Mapping[str, Sequence[float]]], target: Mapping[str, Told], like: Mapping[str, Told]
) -> tuple[list[float], float]:
    """Solve for the weights with which columns add up to a target, by least squares; how much of it is left over.

    like: tensors by whose size each one's elements are scaled, so that none outweighs the others.
    """
    import numpy

    if not columns:
        return [], math.inf
    rows: list[list[float]] = []
    wanted: list[float] = []
    for name, told in target.items():
        size = max((abs(value) for value in like[name].samples), default=0.0) if name in like else 0.0
        parts = [column.get(name) or [0.0] * len(told.samples) for column in columns]
        if size and math.isfinite(size) and all(map(math.isfinite, told.samples)):
            rows += [[value / size for value in each] for each in zip(*parts, strict=True)]
            wanted += [value / size for value in told.samples]
    if not rows:
        return [0.0] * len(columns), math.inf
    matrix, vector = numpy.array(rows), numpy.array(wanted)
    weights = numpy.linalg.lstsq(matrix, vector, rcond=None)[0]
    length = float(numpy.linalg.norm(vector))
    left = float(numpy.linalg.norm(matrix @ weights - vector))
    return [float(each) for each in weights], left / length if length else left
