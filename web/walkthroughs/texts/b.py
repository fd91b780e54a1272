"""Text B, ZeRO-1 in three layers: Buffer, DDP and Distributed Optimizer. 1.34B parameters on 4 GPUs."""

from __future__ import annotations

from fractions import Fraction

from zeroshard.layout.partition import Spec, partition
from zeroshard.layout.stage import STAGES
from zeroshard.planner import closed, traffic
from zeroshard.planner.quantities import number
from zeroshard.planner.recipes import PRESETS, Recipe
from zeroshard.policies.layout import Layout

from .arithmetic import spoiled, spoiled_here
from .lines import GIB, PAPER, Table, Text, held, line, table
from .sent_between import sent_between

OPTIMIZER = sum(PAPER.optimizer.values(), Fraction())
RANKS, NODE, COPIES = 8, 2, (1, 2, 4, 8)
SUMS = {"sums back in bf16": PAPER, "sums in fp32": PRESETS["zeroshard"]}  # as averages go back; they go on in fp32


def text() -> Text:
    return Text(
        "B",
        "A deep dive into ZeRO Stage 1, the Distributed Optimizer: zero_optim_toy",
        (
            _summary(),
            _groups(),
            _padding(),
            _replicas(),
            _in_bytes(),
            _slow_link(),
            _busiest(),
            _same_bits(),
            *_profile(),
        ),
        _corrections(),
    )


def stacked(hidden: int, layers: int) -> int:
    """Count the parameters of the text's stacked MLP."""
    return layers * (8 * hidden * hidden + 5 * hidden)


def _summary() -> Table:
    one = traffic.replicas(1, RANKS, 1, PAPER)
    passes, cut = sum(traffic.passes(STAGES[1])), held(1, RANKS, RANKS, RANKS)
    return table(
        "Optimizer state and messages, N = 8",
        [line(f"{state}, plain", "4", nbytes, "B/param") for state, nbytes in PAPER.optimizer.items()],
        [line(f"{state}, ZeRO-1", "4/N", _over(cut[state]), "B/param") for state in PAPER.optimizer],
        line("optimizer, plain", "12", OPTIMIZER, "B/param"),
        line(
            "optimizer, ZeRO-1, for any N",
            "12/N",
            _over(sum((cut[state] for state in PAPER.optimizer), Fraction())),
            "B/param",
        ),
        line("optimizer, ZeRO-1", "1.5", one.optimizer, "B/param"),
        line("all-reduce", "2", sum(traffic.passes(STAGES[0])), "passes of P"),
        line("reduce-scatter", "1", traffic.passes(STAGES[1])[0], "passes of P"),
        line("all-gather", "1", traffic.passes(STAGES[1])[1], "passes of P"),
        line("reduce-scatter + all-gather", "2", passes, "passes of P"),
        line("either, sent per rank", None, one.total, "P"),
    )


def _over(per_rank: Fraction) -> str:
    """Write bytes on one of `RANKS` ranks as those of all ranks over N."""
    return f"{number(per_rank * RANKS)}/N"


def _groups() -> Table:
    """Compare its table of buffers, one for each dtype and group of ranks, with the layout's buckets."""
    said = {
        "attention.weight": ("dense, bf16", "bf16", ""),
        "experts.weight": ("MoE, bf16", "bf16", "edp"),
        "router.weight": ("MoE, fp32", "fp32", ""),
    }
    sizes = {"bf16": 2, "fp32": 4}
    specs = [Spec(name, (8, 8), dtype, sizes[dtype], 0, True, along) for name, (_, dtype, along) in said.items()]
    cut = partition(specs, Layout(), RANKS, 2)
    buckets = [cut.find(name)[0] for name in said]
    shown = ("attention and FFN weights", "expert FFN weights", "router weights")
    return table(
        "Buffers by group of ranks and dtype",
        [
            line(what, says, f"{'MoE' if bucket.axis else 'dense'}, {bucket.dtype}")
            for what, (says, _, _), bucket in zip(shown, said.values(), buckets, strict=True)
        ],
        line("buffers", None, len(cut.buckets)),
    )


def _padding() -> Table:
    small = stacked(13, 3)
    return table(
        "Padding",
        line("hidden 13, 3 layers", None, small, "parameters"),
        [line(f"padded for {n} ranks", None, closed.share(small, n) * n, "elements") for n in (2, 3, 4)],
        line("hidden 512, 3 layers", None, stacked(512, 3), "parameters"),
    )


def _said(count: int) -> tuple[Fraction, Fraction]:
    """Return (reduction, all-gather) by the text's own formulas; for one replica it says ~P for each."""
    if count == 1:
        return Fraction(1), Fraction(1)
    return 1 + Fraction(2 * (count - 1), RANKS), 1 - Fraction(count, RANKS)


def _about(count: int, says: Fraction) -> str:
    """Write a figure as the text does: ~P for one replica, exactly for several."""
    return f"{'~' if count == 1 else ''}{number(says)}"


def _replicas() -> Table:
    by_k = {count: traffic.replicas(1, RANKS, count, PAPER) for count in COPIES}
    said = {count: _said(count) for count in COPIES}
    return table(
        "K replicas of the optimizer, N = 8, in P elements sent per rank",
        [line(f"K = {count}: optimizer", None, k.optimizer, "B/param") for count, k in by_k.items()],
        [
            line(f"K = {count}: reduction", _about(count, says), k.total - k.gather_inside, "P", exact=count > 1)
            for (count, k), (says, _) in zip(by_k.items(), said.values(), strict=True)
        ],
        [
            line(f"K = {count}: all-gather", _about(count, says), k.gather_inside, "P", exact=count > 1)
            for (count, k), (_, says) in zip(by_k.items(), said.values(), strict=True)
        ],
        [line(f"K = {count}: total", "~2" if count == 1 else "> 2", k.total, "P") for count, k in by_k.items()],
        [
            line(f"K = {count}: total of its own formulas", "> 2", sum(both, Fraction()), "P")
            for count, both in said.items() if count > 1
        ],
    )  # fmt: skip


def as_sent(count: int, recipe: Recipe) -> Fraction:
    """Count the bytes per parameter that a rank sends in a step at stage 1, on average, as this engine sends."""
    return Fraction(_moved(count, recipe).total.sent, RANKS**2)


def _moved(count: int, recipe: Recipe) -> traffic.Traffic:
    return traffic.per_step(RANKS**2, RANKS, STAGES[1], recipe, replicas=count)


def _in_bytes() -> Table:
    return table(
        "The same in bytes, as this engine sends with bf16 weights",
        [
            line(f"K = {count}, {how}", None, as_sent(count, recipe), "B/param")
            for how, recipe in SUMS.items()
            for count in COPIES
        ],
    )


def busiest(count: int, node: int, recipe: Recipe, *, gloo: bool) -> Fraction:
    """Count the bytes per parameter that the busiest card sends to other nodes, in a step at stage 1."""
    return max(sent_between(_moved(count, recipe), RANKS, node, count, gloo=gloo)) / RANKS**2


def _busiest() -> Table:
    def less(recipe: Recipe, *, gloo: bool) -> Fraction:
        return 100 * (1 - busiest(4, NODE, recipe, gloo=gloo) / busiest(1, NODE, recipe, gloo=gloo))

    return table(
        "The slow link on the card that sends most; below zero it sends more",
        [
            line(
                f"K = {count}, {backend}, {how}", None, busiest(count, NODE, recipe, gloo=backend == "gloo"), "B/param"
            )
            for backend in ("gloo", "NCCL")
            for count, how, recipe in ((1, "any sums", PAPER), *((4, *each) for each in SUMS.items()))
        ],
        [
            line(f"less: {backend}, {how}", None, less(recipe, gloo=backend == "gloo"), "%")
            for backend in ("gloo", "NCCL")
            for how, recipe in SUMS.items()
        ],
    )


def _slow_link() -> Table:
    one, four = (traffic.replicas(1, RANKS, count, PAPER) for count in (1, 4))
    with_four, with_one = (_moved(count, PAPER) for count in (4, 1))
    ours = traffic.slow_link(RANKS, 4, with_four, with_one, NODE)
    unit = RANKS**2 * PAPER.parameters
    gathers = four.gather_inside if RANKS // 4 > NODE else Fraction()  # which a node's ranks have among themselves
    return table(
        "The slow link, N = 8, nodes of two, K = 4 beside K = 1",
        line("K = 1, ring: reduction", "~1", one.reduce_inside, "P"),
        line("K = 1, ring: parameters", "~1", one.gather_inside, "P"),
        line("K = 1, ring: total", "~2", one.total, "P"),
        line("K = 4: what a rank holds after the reduce-scatter", "0.5", Fraction(4, RANKS), "P"),
        line("K = 4, ring: reduction", "0.75", four.reduce_between, "P"),
        line("K = 4, ring: parameters", "0", gathers, "P"),
        line("K = 4, ring: total", "0.75", four.reduce_between + gathers, "P"),
        line("K = 1, this engine over NCCL, a card on average", None, ours.with_one / unit, "P"),
        line("K = 4, this engine over NCCL, a card on average", None, ours.sent / unit, "P"),
        line("K = 1, this engine over gloo, a card on average", None, ours.with_one_gloo / unit, "P"),
        line("K = 4, this engine over gloo, a card on average", None, ours.sent_gloo / unit, "P"),
        line("less: this engine, NCCL, a card per rank", "62.5", 100 * ours.saved, "%"),
        line("less: this engine, gloo, a card per rank", "62.5", 100 * ours.saved_gloo, "%"),
        line("less: rings alone, a card per rank", "62.5", 100 * four.saved_per_rank, "%"),
        line("less: rings alone, a card per node", "62.5", 100 * four.saved_per_node, "%"),
    )


def _same_bits() -> Table:
    return table(
        "N x (g/N) = g in bf16 sums: of 128 values of g those that differ",
        [line(f"N = {ranks}", "0", spoiled(ranks)) for ranks in (2, 3, 4, 8)],
        [line(f"N = {ranks}, added in fp32 and divided once", None, spoiled_here(ranks)) for ranks in (3, 8)],
    )


def _profile() -> tuple[Table, ...]:
    numel = stacked(4096, 10)
    base, cut = held(0, numel, 4, GIB), held(1, numel, 4, GIB)
    unit = Fraction(numel, GIB)
    baseline = base["total"] - base["gradients"]  # the text's column has no gradients
    in_step = cut["total"] + 4 * unit / 4
    copied = cut["total"] + 2 * unit

    def saved(now: Fraction, before: Fraction) -> Fraction:
        return 100 * (1 - now / before)

    kept = tuple(PAPER.optimizer)
    at_rest = table(
        "10 layers of width 4096 on 4 ranks",
        line("parameters", None, numel),
        line("parameters, in billions", "1.34", Fraction(numel, 10**9)),
        line("baseline: bf16 parameters", "2.50", base["parameters"], "GiB"),
        [line(f"baseline: {state}", "5.00", base[state], "GiB") for state in kept],
        line("baseline: optimizer state", "15.00", sum(base[state] for state in kept), "GiB"),
        line("baseline: total", "17.50", baseline, "GiB"),
        line("ZeRO-1: bf16 parameters", "2.50", cut["parameters"], "GiB"),
        line("ZeRO-1: gradient buffer", "2.50", cut["gradients"], "GiB"),
        [line(f"ZeRO-1: {state}", "1.25", cut[state], "GiB") for state in kept],
        line("ZeRO-1: optimizer state", "3.75", sum(cut[state] for state in kept), "GiB"),
        line("ZeRO-1: total", "8.75", cut["total"], "GiB"),
        line("saved at rest", "50", saved(cut["total"], baseline), "%"),
        line("optimizer state saved", "75", saved(Fraction(1), Fraction(4)), "%"),
    )
    explained = table(
        "What explains its net saving of 42.7 %",
        line("in the step: with the shard's fp32 gradient", None, in_step, "GiB"),
        line("saved in the step", "42.7", saved(in_step, baseline), "%"),
        line("peak: param.grad and buffer both alive", None, copied, "GiB"),
        line("baseline with its gradients", None, base["total"], "GiB"),
        line("saved at that peak", "42.7", saved(copied, base["total"]), "%"),
        line("saved at rest, baseline's gradients counted", None, saved(cut["total"], base["total"]), "%"),
    )
    return at_rest, explained, _in_8_bits(), _saved(numel)


def _in_8_bits() -> Table:
    """Count the same profile's bytes in this engine with `Precision(param_dtype=torch.bfloat16, fp8=True)`."""
    weights, biases, tensors = 10 * 8 * 4096**2, 10 * 5 * 4096, 10 * 2
    rest = weights + biases * PAPER.parameters
    beside = PAPER.gradients + OPTIMIZER / 4
    return table(
        "The same with weights in 8 bits, as here",
        line("weights, a byte each", None, Fraction(weights, GIB), "GiB"),
        line("biases, bf16", None, biases * PAPER.parameters, "B"),
        line("scales, a byte for each weight tensor", None, tensors, "B"),
        line("ZeRO-1: parameters", None, rest / GIB, "GiB"),
        line("ZeRO-1: total", None, (rest + tensors + beside * (weights + biases)) / GIB, "GiB"),
        line("all-gather after the step, of all ranks' parts", None, rest / GIB, "GiB"),
    )


def _saved(numel: int) -> Table:
    return table(
        "A checkpoint of it",
        line("master, m and v in files, once", None, numel * PAPER.saved / GIB, "GiB"),
        line("written by each of 4 ranks", None, numel * PAPER.saved / 4 / GIB, "GiB"),
    )


def bytes_by_k(recipe: Recipe) -> str:
    *first, last = (number(as_sent(count, recipe)) for count in COPIES)
    return f"{', '.join(first)} and {last}"


def _corrections() -> tuple[str, ...]:
    return (
        "Its GB are GiB: 2.50 is 1,342,382,080 x 2 / 2^30; in GB (10^9) it is 2.68.",
        "Uniform slices do need padding: its own code pads to a multiple of the ranks.",
        "MoE, fp32, router weights: the text has a buffer of their own for them. A router is replicated over the ranks "
        "that share experts, so its gradients belong to the dense group.",
        "~P and ~2P count passes, as text E's 2 Psi does, and both are right as that. Sent per rank is 2(N-1)/N P: "
        "1.75P on a ring of 8. Where a conclusion is drawn from the difference, below, 2 does not stand for 1.75.",
        "K > 1: P + 2P/N (K-1) mixes a rounded reduce-scatter with an exact all-reduce. The reduction is "
        "P[(1-K/N) + 2(K-1)/N], and with the all-gather's (1-K/N)P the total is 2(N-1)/N P elements for every K: "
        "on a ring they only change place. In bytes, as this engine sends 16-bit weights, it grows: running sums go on "
        f"in fp32, so that K changes no bit. For K = 1, 2, 4 and 8 a rank sends {bytes_by_k(PAPER)} bytes per "
        f"parameter where averages come back in bf16, {bytes_by_k(SUMS['sums in fp32'])} with the default, sums in "
        "fp32. Memory grows: 12K/N bytes per parameter. At K = 2 its own formulas, P + P/4 and 3P/4, add up to 2P "
        "exactly, which is not more than 2P.",
        "Slow link: 62.5 % compares 6P/8 with a rounded 2P. As this engine sends it is 28.0 % over gloo, which the "
        "kernel's counters show but for headers, and 5.3 % over NCCL, by formula: every rank has a network card of its "
        "own; gloo gathers by broadcasts in trees, NCCL in rings over all ranks, whose crossings a node's two cards "
        "share; a reduction goes from each rank straight to each owner; between replicas running sums are handed on in "
        "fp32, so that K changes no bit. In 16 bits they would make it 52.0 % and 36.8 %. The "
        "card that sends most is the one that a step waits for. With K = 4 over gloo it sends 7.7 % less; with the "
        "default, sums in fp32, 23.1 % more. Over NCCL it sends 26.3 % more, or 68.4 %. Were every collective a "
        "ring, it would be 57.1 % where each rank has a card and all of a rank's 1.75P crosses the slow link, 14.3 % "
        "where a node has one card (its 2 ranks send 0.75P each, against one ring's 1.75P).",
        "The fp32 masters are seeded from the bf16 buffer. Here they begin as the weights from before rounding: from "
        "the bf16 copy the first steps would differ, as in text A.",
        "FP8 parameters, fp8 -> fp32 -> optimizer -> fp32 -> fp8, in buffers of their own: so they are here, with "
        "Precision(param_dtype=torch.bfloat16, fp8=True), but for the first arrow. Masters stay fp32 from step to "
        "step, so none is made from 8 bits: a step rounds once, fp32 -> fp8, and a gather sends one byte of each "
        "weight, which is read as bf16.",
        "Distributed checkpoints: its list of strategies is empty. Here each rank writes the shards that it has, all "
        "ranks at the same time, and any number of ranks reads them at any stage.",
        "The dp-cp group is whatever group of ranks shards: Comm(group=...). It may be K replicas, or have experts; "
        "both together are refused: experts are sums of fewer ranks, and would need a relay of their own.",
        "The baseline frees param.grad in zero_grad(set_to_none=True), not in optimizer.step(), which leaves it as it "
        "is.",
        "42.7 %: its gradient buffer is inside 8.75 already, where the saving is 50 %. The shard's fp32 gradient "
        "in the step gives 42.86 %, a copy of param.grad beside the buffer 43.75 %; neither is 42.7.",
        "Bit-exact equality, atol = rtol = 0: in bf16 sums N times g/N is g at N = 2 and 4. At N = 3 and N = 8 it is "
        f"another number for {spoiled(3)} and {spoiled(8)} of the 128 values of g from 1 to 2: the divided loss is "
        "bf16, so backward multiplies by a rounded 1/N, and the sum rounds again. Here ranks' gradients are added in "
        "fp32, in rank order, and divided once: that is g at every N.",
        "The listing: main_grad.copy_(param.grad) overwrites, so a second micro-batch replaces the first.",
        "The listing: a parameter whose grad is None keeps the last step's in the buffer, which is reduced once more.",
        "The listing: after the reduce-scatter in place, what lies outside the rank's shard means nothing.",
        "The listing: loss / world_size goes with a sum; an averaging reduction would divide once more.",
    )
