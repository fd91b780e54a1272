"""The tables of five published texts on ZeRO, each number beside the one that the closed form gives.

    A  "ZeRO-1: A Concrete Walkthrough"                    260 parameters on 2 GPUs, 7B on 8
    B  ZeRO-1 as Buffer, DDP and Distributed Optimizer     K optimizer instances, a profile of 1.34B on 4
    C  an article that implements ZeRO by hand             four weights, 7.5B on 64
    D  "ZeRO-2: A Concrete Walkthrough"                    260 parameters on 2 GPUs, 7B on 8
    E  an overview of the stages, Offload and Infinity     bytes per parameter, 64 GPUs

Where a text differs from arithmetic, its line says so, and a correction below says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from ..errors import UserError, nearest
from ..explain.frames import backward_frames
from ..layout import Layout, Partition, Spec, partition
from ..stage import STAGES
from . import closed, traffic
from .quantities import number, plain
from .recipes import PRESETS
from .traffic import Moved

PAPER = PRESETS["paper"]
GB, GIB = 10**9, 2**30

# The model of texts A and D, in their flat order.
TENSORS_260 = (
    ("gamma1", (4,)), ("beta1", (4,)), ("W_q", (4, 4)), ("W_k", (4, 4)), ("W_v", (4, 4)), ("W_o", (4, 4)),
    ("gamma2", (4,)), ("beta2", (4,)), ("W1", (4, 16)), ("b1", (16,)), ("W2", (16, 4)), ("b2", (4,)),
    ("W_vocab", (4, 8)),
)  # fmt: skip
MODULES_260 = (
    ("gamma1", "beta1"), ("W_q", "W_k", "W_v", "W_o"), ("gamma2", "beta2"), ("W1", "b1", "W2", "b2"), ("W_vocab",),
)  # fmt: skip


class Line(NamedTuple):
    """One number. `says` is the text's own, None where it gives none; `agrees` after rounding to its digits.

    exact: rounding is no excuse, because the text draws a conclusion from the number.
    """

    what: str
    says: str | None
    value: Fraction | str  # a string where it is a formula
    unit: str = ""
    exact: bool = False

    @property
    def shown(self) -> str:
        if isinstance(self.value, str):
            return self.value
        return f"{int(self.value):,}" if self.value == int(self.value) else number(self.value)

    @property
    def agrees(self) -> bool:
        if self.says is None:
            return True
        if isinstance(self.value, str):
            return self.says == self.value
        says = Decimal(self.says.replace(",", ""))
        if self.exact:
            return self.value == Fraction(says)
        scale = 10 ** max(-int(says.as_tuple().exponent), 0)
        return Fraction(math.floor(self.value * scale + Fraction(1, 2)), scale) == Fraction(says)

    def json(self) -> dict[str, object]:
        value = self.value if isinstance(self.value, str) else plain(self.value)
        return {"what": self.what, "text_says": self.says, "value": value, "unit": self.unit, "agrees": self.agrees}


class Table(NamedTuple):
    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Text:
    letter: str
    title: str
    tables: tuple[Table, ...]
    corrections: tuple[str, ...]

    def json(self) -> dict[str, object]:
        return {
            "text": self.letter,
            "title": self.title,
            "recipe": PAPER.name,
            "tables": [{"title": table.title, "lines": [line.json() for line in table.lines]} for table in self.tables],
            "corrections": list(self.corrections),
        }


def text(letter: str) -> Text:
    """One of the five. Raises `UserError` for any other letter."""
    makers = {"A": _a, "B": _b, "C": _c, "D": _d, "E": _e}
    if str(letter).upper() not in makers:
        raise UserError("no such source text", got=repr(letter), instead=nearest(letter, makers))
    return makers[str(letter).upper()]()


# -------------------------------------------------------------------------------------------------------------- pieces


def _table(title: str, *lines: Line | Iterable[Line]) -> Table:
    flat = [one for line in lines for one in ([line] if isinstance(line, Line) else line)]
    return Table(title, tuple(flat))


def _line(what: str, says: str | None, value: Fraction | int | str, unit: str = "", *, exact: bool = False) -> Line:
    return Line(what, says, value if isinstance(value, str) else Fraction(value), unit, exact)


def _held(stage: int, numel: int, ranks: int, unit: int = 1) -> dict[str, Fraction]:
    rows = closed.at_rest(numel, ranks, STAGES[stage], PAPER)
    return {
        **{state: Fraction(nbytes, unit) for state, nbytes in rows.items()},
        "total": Fraction(sum(rows.values()), unit),
    }


def _saving(stage: int, numel: int, ranks: int) -> Fraction:
    return 100 * (1 - _held(stage, numel, ranks)["total"] / _held(0, numel, ranks)["total"])


def _stage_table(stage: int, numel: int, ranks: int, says: dict[str, str], unit: tuple[str, int]) -> list[Line]:
    held = _held(stage, numel, ranks, unit[1])
    return [_line(f"stage {stage}: {state}", says.get(state), nbytes, unit[0]) for state, nbytes in held.items()]


def _cut_260() -> Partition:
    specs = [Spec(name, shape, "bfloat16", 2, 0, True) for name, shape in TENSORS_260]
    return partition(specs, Layout(bounds="model", align=1), 2)


def _own(cut: Partition, rank: int, *names: str) -> Fraction:
    places = [cut.find(name) for name in names]
    return Fraction(sum(bucket.fragment(slot, rank).numel for bucket, slot in places))


def _logical(stage: int, numel: int, ranks: int) -> tuple[Moved, Moved]:
    moved = traffic.per_step(numel, ranks, STAGES[stage], PAPER)
    return moved.reduce, moved.gather


def _messages(name: str, stage: int, says: tuple[str, str, str]) -> list[Line]:
    reduce, gather = _logical(stage, 260, 2)
    total = Moved(*map(sum, zip(reduce, gather, strict=True)))
    return [
        _line(f"{name}: reduce-scatter, logical", says[0], reduce.logical, "B"),
        _line(f"{name}: all-gather, logical", says[1], gather.logical, "B"),
        _line(f"{name}: total, logical", says[2], total.logical, "B"),
        _line(f"{name}: total, sent per rank", None, total.sent, "B"),
        _line(f"{name}: total, sent + received", None, total.sent_and_received, "B"),
    ]


FULL_7B = {"parameters": "14.0", "gradients": "14.0", "master": "28.0", "m": "28.0", "v": "28.0", "total": "112.0"}
CUT_7B = {**FULL_7B, "master": "3.5", "m": "3.5", "v": "3.5"}
RING = "Every pass sends (N-1)/N of its bytes per rank: 2 Psi is 2(N-1)/N Psi on a ring, 3 Psi is 3(N-1)/N Psi."


# --------------------------------------------------------------------------------------------------------------- texts


def _a() -> Text:
    cut = _cut_260()
    return Text(
        "A",
        "ZeRO-1: A Concrete Walkthrough",
        (
            _table(
                "Bytes per parameter",
                _line("parameter", "2", PAPER.parameters, "B"),
                _line("gradient", "2", PAPER.gradients, "B"),
                [_line(state, "4", nbytes, "B") for state, nbytes in PAPER.optimizer.items()],
                _line("total", "16", PAPER.total, "B"),
                _line("of which optimizer", "75", 100 * sum(PAPER.optimizer.values(), Fraction()) / PAPER.total, "%"),
            ),
            _table(
                "260 parameters on 2 GPUs",
                _line("stage 0: total", "4160", _held(0, 260, 2)["total"], "B"),
                _stage_table(1, 260, 2, {**dict.fromkeys(_held(1, 260, 2), "520"), "total": "2600"}, ("B", 1)),
                _line("stage 1: optimizer slice", "1560", 130 * sum(PAPER.optimizer.values(), Fraction()), "B"),
                _line("stage 1: saved", "37.5", _saving(1, 260, 2), "%"),
            ),
            _table(
                "Who owns what: elements",
                _line("GPU-0: gamma1, beta1", "8", _own(cut, 0, "gamma1", "beta1")),
                [_line(f"GPU-0: {name}", "16", _own(cut, 0, name)) for name in ("W_q", "W_k", "W_v", "W_o")],
                _line("GPU-0: gamma2, beta2", "8", _own(cut, 0, "gamma2", "beta2")),
                _line("GPU-0: W1", "32", _own(cut, 0, "W1")),
                _line("GPU-0: sum of these rows", "112", _own(cut, 0, *(name for name, _ in TENSORS_260))),
                _line("GPU-1: W1", "32", _own(cut, 1, "W1")),
                [
                    _line(f"GPU-1: {name}", says, _own(cut, 1, name))
                    for name, says in (("b1", "16"), ("W2", "64"), ("b2", "4"), ("W_vocab", "32"))
                ],
                _line("GPU-1: sum of these rows", "148", _own(cut, 1, *(name for name, _ in TENSORS_260))),
            ),
            _table(
                "Messages per step",
                _messages("all-reduce", 0, ("520", "520", "1040")),
                _messages("ZeRO-1", 1, ("520", "520", "1040")),
            ),
            _table(
                "7B parameters on 8 GPUs",
                _stage_table(0, 7 * GB, 8, FULL_7B, ("GB", GB)),
                _stage_table(1, 7 * GB, 8, {**CUT_7B, "total": "38.5"}, ("GB", GB)),
                _line("stage 1: saved", "65.6", _saving(1, 7 * GB, 8), "%"),
            ),
            _table(
                "The formula",
                _line("stage 1, bytes per parameter", "4 + 12/N", PAPER.formula(STAGES[1])),
                _line("N = 8", "5.5", _held(1, 8, 8, 8)["total"], "B"),
                _line("N = 64", "4.2", _held(1, 64, 64, 64)["total"], "B"),
                _line("N = 64: saved", "73.8", _saving(1, 64, 64), "%"),
            ),
        ),
        (
            "Owners: the text's rows sum to 112 and 148, its cut is at 130. It falls inside W1, at flat index 50: 50 "
            "elements (three rows and two elements of the fourth) are GPU-0's, 14 are GPU-1's.",
            "Messages: 1,040 bytes as send 520 + receive 520 and as reduce-scatter 520 + all-gather 520 are equal only "
            "because N = 2. Sent per rank is 2(N-1)/N of 520: 520 bytes here.",
            "ZeRO-1 is not DeepSpeed's default: its configuration's default is stage 0, disabled.",
        ),
    )


def _b() -> Text:
    def stacked(hidden: int, layers: int) -> int:
        return layers * (8 * hidden * hidden + 5 * hidden)

    small, numel = stacked(13, 3), stacked(4096, 10)
    base, cut = _held(0, numel, 4, GIB), _held(1, numel, 4, GIB)
    unit = Fraction(numel, GIB)
    baseline = base["total"] - base["gradients"]  # the text's column has no gradients
    in_step = cut["total"] + 4 * unit / 4
    copied = cut["total"] + 2 * unit
    with_grads = base["total"]
    by_k = {count: traffic.replicas(1, 8, count, PAPER) for count in (1, 2, 4, 8)}
    one, four = by_k[1], by_k[4]

    def saved(now: Fraction, before: Fraction) -> Fraction:
        return 100 * (1 - now / before)

    return Text(
        "B",
        "ZeRO-1 as Buffer, DDP and Distributed Optimizer",
        (
            _table(
                "Optimizer state and messages, N = 8",
                _line("optimizer, plain", "12", sum(PAPER.optimizer.values(), Fraction()), "B/param"),
                _line("optimizer, ZeRO-1", "1.5", one.optimizer, "B/param"),
                _line("all-reduce", "2", one.total, "P sent per rank", exact=True),
                _line("reduce-scatter + all-gather", "2", one.total, "P sent per rank", exact=True),
            ),
            _table(
                "Padding",
                _line("hidden 13, 3 layers", None, small, "parameters"),
                [_line(f"padded for {n} ranks", None, closed.share(small, n) * n, "elements") for n in (2, 3, 4)],
                _line("hidden 512, 3 layers", None, stacked(512, 3), "parameters"),
            ),
            _table(
                "K optimizer instances, N = 8, in P sent per rank",
                [_line(f"K = {count}: optimizer", None, k.optimizer, "B/param") for count, k in by_k.items()],
                [
                    _line(
                        f"K = {count}: reduction",
                        number(1 + Fraction(2 * (count - 1), 8)),
                        k.reduce_inside + k.reduce_between,
                        "P",
                        exact=True,
                    )
                    for count, k in by_k.items()
                ],
                [
                    _line(f"K = {count}: all-gather", number(1 - Fraction(count, 8)), k.gather_inside, "P")
                    for count, k in by_k.items()
                ],
                [_line(f"K = {count}: total", None, k.total, "P") for count, k in by_k.items()],
            ),
            _table(
                "The slow link, N = 8, nodes of two",
                _line("K = 1", "2", one.total, "P", exact=True),
                _line("K = 4", "0.75", four.reduce_between, "P"),
                _line("less, a card per rank", "62.5", 100 * four.saved_per_rank, "%"),
                _line("less, a card per node", "62.5", 100 * four.saved_per_node, "%"),
            ),
            _table(
                "10 layers of width 4096 on 4 ranks",
                _line("parameters", None, numel),
                _line("baseline: bf16 parameters", "2.50", base["parameters"], "GiB"),
                [_line(f"baseline: {state}", "5.00", base[state], "GiB") for state in PAPER.optimizer],
                _line("baseline: total", "17.50", baseline, "GiB"),
                _line("ZeRO-1: bf16 parameters", "2.50", cut["parameters"], "GiB"),
                _line("ZeRO-1: gradient buffer", "2.50", cut["gradients"], "GiB"),
                [_line(f"ZeRO-1: {state}", "1.25", cut[state], "GiB") for state in PAPER.optimizer],
                _line("ZeRO-1: total", "8.75", cut["total"], "GiB"),
                _line("saved at rest", "50", saved(cut["total"], baseline), "%"),
                _line("optimizer state saved", "75", saved(Fraction(1), Fraction(4)), "%"),
            ),
            _table(
                "What explains its net saving of 42.7 %",
                _line("in the step: with the shard's fp32 gradient", None, in_step, "GiB"),
                _line("saved in the step", "42.7", saved(in_step, baseline), "%"),
                _line("peak: param.grad and buffer both alive", None, copied, "GiB"),
                _line("baseline with its gradients", None, with_grads, "GiB"),
                _line("saved at that peak", "42.7", saved(copied, with_grads), "%"),
                _line("saved at rest, baseline's gradients counted", None, saved(cut["total"], with_grads), "%"),
            ),
        ),
        (
            "Its GB are GiB: 2.50 is 1,342,382,080 x 2 / 2^30; in GB (10^9) it is 2.68.",
            "Uniform slices do need padding: its own code pads to a multiple of the ranks.",
            "~2P is 2(N-1)/N P = 1.75P on a ring of 8.",
            "K > 1: P + 2P/N (K-1) mixes a rounded reduce-scatter with an exact all-reduce. The reduction is "
            "P[(1-K/N) + 2(K-1)/N], and with the all-gather's (1-K/N)P the total is 2(N-1)/N P for every K: nothing "
            "increases on a ring, the bytes change place. Memory grows: 12K/N bytes per parameter.",
            "Slow link: 62.5 % compares with 2P; the ring's 1.75P gives 57.1 % where every rank has its own card, and "
            "14.3 % where a node has one (2 ranks send 0.75P each, against 1.75P).",
            "42.7 %: its gradient buffer is inside 8.75 already, where the saving is 50 %. The shard's fp32 gradient "
            "in the step gives 42.86 %, a copy of param.grad beside the buffer 43.75 %; neither is 42.7.",
        ),
    )


def _c() -> Text:
    numel = 75 * GB // 10
    says = ("120", "31.4", "16.6", "1.9")
    specs = [Spec(name, (1,), "float32", 4, 0, True) for name in ("w1", "w2", "w3", "w4")]
    cut = partition(specs, Layout(bounds="tensor", align=1), 2)
    # Layer 1 is gathered for forward, for recomputation and for backward; layer 2 for forward and backward.
    moved = traffic.per_step(4, 2, STAGES[3], PAPER, recompute=2)
    width = PAPER.parameters
    gathered = (moved.gather.logical + moved.recompute.logical) / width
    return Text(
        "C",
        "Stages 1 to 3 by hand, with four weights",
        (
            _table(
                "7.5B parameters on 64 GPUs",
                [
                    _line(f"stage {stage}: total", said, _held(stage, numel, 64, GB)["total"], "GB")
                    for stage, said in zip(STAGES, says, strict=True)
                ],
            ),
            _table(
                "Optimizer state of Adam",
                _line("master, m and v", "12", sum(PAPER.optimizer.values(), Fraction()), "B/param"),
            ),
            _table(
                "Four weights on 2 GPUs, a layer each",
                _line("GPU 0 owns w1, w2", "2", Fraction(cut.buckets[0].shard_numel(0)), "elements"),
                _line("GPU 1 owns w3, w4", "2", Fraction(cut.buckets[0].shard_numel(1)), "elements"),
            ),
            _table(
                "Messages per step, in parameters",
                _line("reduce-scatter, sent per rank", "(N-1)/N * #params", "(N-1)/N * #params"),
                _line("all-gather, sent per rank", "#params", "(N-1)/N * #params"),
                _line("stage 3: gathered, logical", None, gathered, "elements of 4"),
                _line("stage 3: of these, for recomputation", None, moved.recompute.logical / width, "elements of 4"),
                _line("stage 3: reduced, logical", None, moved.reduce.logical / width, "elements of 4"),
                _line("stage 3: total", None, moved.total.logical / width / 4, "Psi"),
            ),
        ),
        (
            "The all-gather costs (N-1)/N of the parameters per rank, as the reduce-scatter does.",
            "With its activation checkpointing stage 3 gathers layer 1 three times and layer 2 twice: 10 gathered and "
            "4 reduced elements, 3.5 Psi. The usual 3 Psi counts no recomputation.",
            "With whole layers as shards its reduce-scatter is a reduction to the owner, its all-gather a broadcast.",
        ),
    )


def _d() -> Text:
    cut = _cut_260()
    peaks = {
        how: [max(frame.transient for frame in backward_frames(cut, rank, groups)) for rank in (0, 1)]
        for how, groups in (("tensor by tensor", None), ("module by module", MODULES_260))
    }
    end = {"parameters": "520", "gradients": "260", "master": "520", "m": "520", "v": "520", "total": "2340"}
    stages_1_2 = {1: traffic.passes(STAGES[1], accumulate=4), 2: traffic.passes(STAGES[2], accumulate=4)}
    return Text(
        "D",
        "ZeRO-2: A Concrete Walkthrough with Actual Numbers",
        (
            _table(
                "260 parameters on 2 GPUs",
                [
                    _line(f"stage {stage}: total", said, _held(stage, 260, 2)["total"], "B")
                    for stage, said in zip(STAGES, ("4160", "2600", "2340", None), strict=True)
                ],
                _line("stage 2: saved", "43.8", _saving(2, 260, 2), "%"),
                _line("stage 1: gradients", "520", _held(1, 260, 2)["gradients"], "B"),
                _stage_table(2, 260, 2, end, ("B", 1)),
            ),
            _table(
                "Who owns what: elements",
                _line("GPU-0: W1", "50", _own(cut, 0, "W1")),
                _line("GPU-1: W1", "14", _own(cut, 1, "W1")),
                [_line(f"GPU-{rank}: all", "130", cut.buckets[0].shard_numel(rank)) for rank in (0, 1)],
            ),
            _table(
                "Gradient elements held in backward",
                _line("ZeRO-1: peak", "260", 260),
                [_line(f"ZeRO-2, GPU-{rank}: at rest", "130", cut.buckets[0].shard_numel(rank)) for rank in (0, 1)],
                [
                    _line(f"ZeRO-2, GPU-{rank}: peak, {how}", "130", most[rank])
                    for how, most in peaks.items()
                    for rank in (0, 1)
                ],
            ),
            _table(
                "Messages per step",
                _messages("all-reduce", 0, ("520", "520", "1040")),
                _messages("ZeRO-1", 1, ("520", "520", "1040")),
                _messages("ZeRO-2", 2, ("520", "520", "1040")),
                [
                    _line(f"stage {stage}, 4 micro-batches: passes", None, sum(both))
                    for stage, both in stages_1_2.items()
                ],
                _line("the same under no_sync", None, sum(traffic.passes(STAGES[2], accumulate=4, no_sync=True))),
            ),
            _table(
                "7B parameters on 8 GPUs",
                _stage_table(0, 7 * GB, 8, FULL_7B, ("GB", GB)),
                _stage_table(1, 7 * GB, 8, {**CUT_7B, "total": "38.5"}, ("GB", GB)),
                _line("stage 1: saved", "65.6", _saving(1, 7 * GB, 8), "%"),
                _stage_table(2, 7 * GB, 8, {**CUT_7B, "gradients": "1.75", "total": "26.25"}, ("GB", GB)),
                _line("stage 2: saved", "76.6", _saving(2, 7 * GB, 8), "%"),
                _line(
                    "stage 2: gradients saved", "12.25",
                    _held(0, 7 * GB, 8, GB)["gradients"] - _held(2, 7 * GB, 8, GB)["gradients"], "GB",
                ),
                _stage_table(3, 7 * GB, 8, {}, ("GB", GB)),
            ),
            _table(
                "Formulas, bytes per parameter",
                _line("stage 1", "4 + 12/N", PAPER.formula(STAGES[1])),
                _line("stage 2", "2 + 14/N", PAPER.formula(STAGES[2])),
            ),
        ),
        (
            "Peak of ~130 gradients is at rest. Reduced tensor by tensor, GPU-1 holds 180 for a moment (116 of its own "
            "and W1's 64); module by module it is 148 and 194.",
            "Volumes are identical for one micro-batch. With A of them, stage 2 as DeepSpeed does it reduces each: "
            "(A+1) Psi against 2 Psi for its stage 1. Here stages 0 to 2 take A+1 passes, or 2 under no_sync(), whose "
            "price is a full-size gradient buffer. So always using stage 2 is not free.",
        ),
    )  # fmt: skip


def _e() -> Text:
    per_parameter = {stage: _held(stage, 64, 64, 64)["total"] for stage in STAGES}
    sends = {stage: traffic.per_step(64, 64, STAGES[stage], PAPER) for stage in STAGES}
    return Text(
        "E",
        "ZeRO: Zero Redundancy Optimizer, an overview",
        (
            _table(
                "Bytes per parameter",
                [
                    _line(f"stage {stage}", said, PAPER.formula(STAGES[stage]))
                    for stage, said in zip(STAGES, ("16", "4 + 12/N", "2 + 14/N", "16/N"), strict=True)
                ],
            ),
            _table(
                "64 GPUs",
                [
                    _line(f"stage {stage}", said, per_parameter[stage], "B/param")
                    for stage, said in ((1, "4.2"), (2, "2.2"), (3, "0.25"))
                ],
                [
                    _line(f"stage {stage}: reduction", said, per_parameter[0] / per_parameter[stage], "x", exact=True)
                    for stage, said in ((1, "4"), (2, "8"), (3, "64"))
                ],
                [_line(f"stage {stage}: its limit", None, limit, "x") for stage, limit in ((1, 4), (2, 8))],
            ),
            _table(
                "Messages per step",
                [
                    _line(f"stage {stage}: passes of Psi", said, int(sends[stage].passes))
                    for stage, said in zip(STAGES, ("2", "2", "2", "3"), strict=True)
                ],
                [
                    _line(
                        f"stage {stage}: sent per rank, 64 GPUs", None, Fraction(sends[stage].total.sent, 64 * 2), "Psi"
                    )
                    for stage in STAGES
                ],
            ),
            _table(
                "10B parameters",
                _line("fp16 parameters", "20", _held(0, 10 * GB, 8, GB)["parameters"], "GB"),
                _line("stage 3 on 8 GPUs", "2.5", _held(3, 10 * GB, 8, GB)["parameters"], "GB"),
            ),
        ),
        (
            "At 64 GPUs the reductions are 3.82x and 7.21x; 4x and 8x are the limits for N to infinity. Only 64x is "
            "exact.",
            RING,
            "Flat slices [i Psi/N, (i+1) Psi/N) need padding where N does not divide Psi.",
            "A single DGX-2 node does not hold tens of trillions of parameters: ZeRO-Infinity's authors report 1T on "
            "one node and 32T on 32 nodes (512 GPUs).",
        ),
    )
