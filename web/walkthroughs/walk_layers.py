"""Buffer, buckets, shards and masters: a stacked MLP at stage 1 on two ranks, looked at where the flat buffer is cut.

`capture` runs on each rank; `assemble` puts the ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import zeroshard
from zeroshard.explain.document import numbers
from zeroshard.explain.recording import MESSAGES, Told, layout_json, one_step, together
from zeroshard.explain.stacked_mlp import StackedMLP
from zeroshard.layout.stage import STAGES
from zeroshard.planner import closed, traffic
from zeroshard.planner.quantities import number, plain
from zeroshard.planner.recipes import PRESETS, Recipe
from zeroshard.policies.layout import Layout
from zeroshard.policies.precision import Precision

from .observe import Observer, ticking
from .texts import b as text_b
from .walk260 import one_of

HIDDEN, DEPTH = 13, 3  # 4,251 parameters, which 2 does not divide
BF16 = Precision(param_dtype=torch.bfloat16)
ONE_BUFFER = Layout(align=1, units=())
AROUND = 8  # elements shown on either side of the cut
PAPER = PRESETS["paper"]
RANKS, REPLICAS = 8, (1, 2, 4, 8)  # of the table of replicas


def model() -> StackedMLP:
    torch.manual_seed(0)
    return StackedMLP(HIDDEN, DEPTH)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1000 * step + rank)).bfloat16()


def capture() -> dict[str, Any]:
    """Make both runs of this rank. Collective, on two ranks."""
    return {"path": observed_step(), "overlap": overlapped()}


def observed_step() -> dict[str, Any]:
    """Run one step through one flat buffer; return the elements around the cut after each operation on it."""
    with ticking():
        rank = torch.distributed.get_rank()
        stack = model()
        local: dict[str, Tensor] = {}
        for name, parameter in stack.named_parameters():
            parameter.register_hook(lambda gradient, name=name: local.__setitem__(name, gradient.detach().clone()))
        optimizer = torch.optim.Adam(stack.parameters(), lr=1e-3)
        zero = zeroshard.shard(stack, optimizer, stage=1, precision=BF16, comm=MESSAGES, layout=ONE_BUFFER)
        (plan,), (bucket,) = zero.partition.buckets, zero._engine.buckets
        low, high = plan.shard(rank)
        middle = plan.bounds[1]
        first, last = middle - AROUND, middle + AROUND
        mine = slice(max(first, low) - low, min(last, high) - low)
        found: dict[str, Any] = {"start": max(first, low), "parameters": numbers(bucket.full[first:last])}
        gradients = zero._engine.gradients.accumulators[0].sum
        assert bucket.master is not None
        found["master"] = numbers(bucket.master.tensor[mine])
        observer = Observer(zero)
        zero.record()

        stack(batch(0, rank)).sum().backward()
        flat = torch.cat([local[slot.name].reshape(-1) for slot in plan.slots])
        found["local"] = numbers(flat[first:last])
        # The engine has divided it as it landed, which loses nothing at two ranks.
        found["sum"] = numbers(gradients.own[mine] * zero.world_size)
        # `look` notes the whole buffer, of which only the elements around the cut are used.
        with observer.watching_gathers():
            optimizer.step()
        found["average"] = numbers(gradients.own[mine])
        found["new master"] = numbers(bucket.master.tensor[mine])
        found["stepped"] = observer.seen["stepped"]["parameters"][first:last]
        observer.land()
        found["gathered"] = numbers(bucket.full[first:last])
        return {
            "found": found,
            "window": [first, last],
            "padding": plan.padding,
            "layout": layout_json(zero.partition, [unit.name for unit in zero._engine.units]),
        }


def overlapped() -> dict[str, Any]:
    """Record from the second backward to the end of the next forward, a bucket per layer: messages and work overlap."""
    with ticking():
        rank = torch.distributed.get_rank()
        stack = model()
        optimizer = torch.optim.Adam(stack.parameters(), lr=1e-3)
        zero = zeroshard.shard(stack, optimizer, stage=1, precision=BF16, comm=MESSAGES, layout=Layout(align=1))
        stack(batch(0, rank)).sum().backward()  # a first step, after which Adam has m and v
        optimizer.step()
        optimizer.zero_grad()
        observer = Observer(zero)
        zero.record()
        loss = stack(batch(1, rank)).sum()
        observer.look("backward")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stack(batch(2, rank))
        observer.look("end")
        units = [unit.name for unit in zero._engine.units]
        record = zero._engine.ledger.record
        assert record is not None
        span = observer.moments[0][1], observer.moments[-1][1]
        step = one_step(Told(rank, zero.events(), list(record.held)), span)
        return {"step": step, "units": units, "layout": layout_json(zero.partition, units)}


# ------------------------------------------------------------------------------------------------ of both ranks


def assemble(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the `ThreeLayers` document from what `capture` returned on each rank."""
    paths = [rank["path"] for rank in ranks]
    layout = one_of([path["layout"] for path in paths], "layouts")
    (bucket,) = layout["buckets"]
    first, last = paths[0]["window"]
    middle = first + AROUND
    name, shape, start = next(slot for slot in reversed(layout["slots"]) if slot[2] < middle)
    numel = torch.Size(shape).numel()
    whole = bucket["numel"] - paths[0]["padding"]
    overlap = [rank["overlap"] for rank in ranks]
    sizes = one_of([one["numel"] for one in overlap[0]["layout"]["buckets"]], "buckets")
    count = len(overlap[0]["layout"]["buckets"])
    copies = [traffic.replicas(1, RANKS, count, PAPER) for count in REPLICAS]
    return {
        "title": "Buffer, buckets, shards and masters",
        "ranks": len(ranks),
        "hidden": HIDDEN,
        "depth": DEPTH,
        "numel": whole,
        "padded": {str(count): closed.share(whole, count) * count for count in (2, 3, 4)},
        "flat": layout,
        "cut": {
            "name": name,
            "element": middle - start,
            "fragments": [[0, 0, middle - start], [1, middle - start, numel]],
        },
        "window": [first, last],
        "path": _path([path["found"] for path in paths], first),
        "overlap": {
            "layout": overlap[0]["layout"],
            "recording": together([one["step"] for one in overlap], overlap[0]["units"], clock="tick"),
            "note": "This is the second step: Adam has m and v. Ticks say what came before what, not how long it took. "
            "Reductions are sent while backward goes on. Gathers start after the step, and the next forward waits for "
            f"them layer by layer. Here the model is not one buffer but {count} of {sizes:,} elements, one for each "
            f"block: {2 * count * sizes:,} bytes of bf16 parameters, and {4 * count * sizes:,} of gradients. Backward "
            "makes them in bf16, and the rank adds them up in fp32.",
        },
        "replicas": {"ranks": RANKS, "rows": [_row(each) for each in copies]},
        "corrections": _corrections(whole),
    }  # fmt: skip


def _path(found: Sequence[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []

    def step(name: str, says: str, dtype: str, of: str, *, own: bool) -> None:
        for rank, values in enumerate(found):
            start = values["start"] if own else first
            steps.append(
                {"step": name, "says": says, "dtype": dtype, "rank": rank, "start": start, "values": values[of]}
            )

    step(
        "parameters",
        "Every rank has the whole buffer of parameters; they are views into it.",
        "bfloat16",
        "parameters",
        own=False,
    )
    step("master", "Of its own shard a rank has an fp32 master, taken before rounding.", "float32", "master", own=True)
    step(
        "gradients", "Backward has filled the buffer of gradients with this rank's own.", "bfloat16", "local", own=False
    )
    step(
        "sum",
        "Reduce-scatter: each rank has the sum over the ranks of its own shard, added up in fp32.",
        "float32",
        "sum",
        own=True,
    )
    step("average", "Divided by the number of ranks, once.", "float32", "average", own=True)
    step(
        "new master", "Adam has updated the shard. It knows nothing of other ranks.", "float32", "new master", own=True
    )
    step(
        "written back",
        "Cast and written into the own shard of the buffer: the other shard is still old.",
        "bfloat16",
        "stepped",
        own=False,
    )
    gathered = one_of([values["gathered"] for values in found], "gathered parameters")
    steps.append({
        "step": "gathered", "says": "All-gather: every rank has the whole new buffer.", "dtype": "bfloat16",
        "rank": None, "start": first, "values": gathered,
    })  # fmt: skip
    return steps


def _row(copies: traffic.Replicas) -> dict[str, Any]:
    saved = {key: plain(getattr(copies, key)) for key in ("saved_per_rank", "saved_per_node")}
    slow = _slow(copies.replicas)
    saved |= {"saved_nccl": plain(slow.saved), "saved_gloo": plain(slow.saved_gloo)}
    for key, recipe in {"": PAPER, "_fp32": PRESETS["zeroshard"]}.items():
        saved[f"bytes{key}"] = plain(text_b.as_sent(copies.replicas, recipe))
        for backend in ("gloo", "nccl"):
            saved[f"busiest_{backend}{key}"] = plain(_busiest(copies.replicas, recipe, gloo=backend == "gloo"))
    return {**copies.json(), **saved}


def _busiest(count: int, recipe: Recipe, *, gloo: bool) -> Fraction:
    """Return how much less the busiest card sends than with one replica, with one replica on each node."""
    one, many = (text_b.busiest(each, RANKS // count, recipe, gloo=gloo) for each in (1, count))
    return 1 - many / one if one else Fraction()


def _slow(count: int) -> traffic.SlowLink:
    """Compare `count` replicas with one over a slow link, as this engine sends, with one replica on each node."""
    with_count, with_one = (traffic.per_step(RANKS**2, RANKS, STAGES[1], PAPER, replicas=each) for each in (count, 1))
    return traffic.slow_link(RANKS, count, with_count, with_one, RANKS // count)


def _less(recipe: Recipe, *, gloo: bool) -> str:
    return f"{float(100 * _busiest(4, recipe, gloo=gloo)):.1f} %"


def _changed(ranks: int) -> int:
    """Count bf16's values from 1 to 2 that the ranks' gradients of a bf16 loss divided by `ranks` do not add up to."""
    g = (1 + torch.arange(128) / 128).bfloat16()
    weights = torch.zeros_like(g, requires_grad=True)
    (part,) = torch.autograd.grad((weights * g).sum() / ranks, weights)
    total = torch.zeros_like(g)
    for _ in range(ranks):
        total += part
    return int((total != g).sum())


def _corrections(numel: int) -> list[dict[str, str]]:
    def note(at: str, says: str, right: str) -> dict[str, str]:
        return {"text": "B", "at": at, "says": says, "right": right}

    one, four = (traffic.replicas(1, RANKS, count, PAPER) for count in (1, 4))
    large = 10 * (8 * 4096**2 + 5 * 4096)
    gib = Fraction(large, 2**30)
    base = 14 * gib  # parameters and optimizer state, without gradients, as the text's column has it
    cut = (2 + 2 + Fraction(12, 4)) * gib
    in_step, copied = cut + gib, cut + 2 * gib  # with the shard's fp32 gradient; with param.grad beside the buffer

    def percent(now: Fraction, before: Fraction) -> str:
        return f"{float(100 * (1 - now / before)):.4g} %"

    padded = closed.share(numel, 2) * 2
    return [
        note("buffer", "Direct operations on uniform slices without padding",
             f"Uniform slices need padding where N does not divide: {numel:,} parameters take {padded:,} elements on 2 "
             "ranks. The text's own code pads too."),
        note("buffer", "MoE, fp32: router weights",
             "A router is replicated over the ranks that share experts, so its gradients belong to the dense group."),
        note("buffer", "main_grad.copy_(param.grad)",
             "It overwrites, so a second micro-batch replaces the first. And a parameter that got no gradient keeps "
             "the last step's, which is reduced once more."),
        note("buffer", "reduce_scatter_tensor(self._local_shard, self._data); loss = output.sum() / world_size",
             "What lies in the buffer outside a rank's shard means nothing afterwards. The sum is right only because "
             "the loss is divided already: an average would divide once more."),
        note("buffer", "The verification criterion is atol=0, rtol=0: bit-exact equality",
             f"N times g/N is g in bf16 sums at N = 2 and 4. At N = 3 it is another number for {_changed(3)} of the "
             f"128 values of g between 1 and 2, at N = 8 for {_changed(8)}: the divided loss is bf16, so backward "
             "multiplies by a rounded 1/N, and the sum rounds again. Here gradients are added in fp32, in rank order, "
             "and divided once: that is g at every N."),
        note("buffer", "FP8: fp8 \N{RIGHTWARDS ARROW} fp32 \N{RIGHTWARDS ARROW} optimizer \N{RIGHTWARDS ARROW} fp32 "
             "\N{RIGHTWARDS ARROW} fp8, in separate buffers",
             "So it is here, with Precision(fp8=True), but for the first arrow: masters stay fp32 from step to step, "
             "and none is made from 8 bits. A step rounds once, and a gather sends a byte of each weight."),
        note("replicas", "Total: > 2P; strictly increases with redundancy",
             f"Reduction P[(1-K/N) + 2(K-1)/N] and all-gather P(1-K/N) add up to 2(N-1)/N P elements for every "
             f"K: {number(one.total)}P here. On a ring they only change place. In bytes, as this engine sends 16-bit "
             "weights, it grows: running sums go on in fp32, so that K changes no bit. For K = 1, 2, 4 and 8 a rank "
             f"sends {text_b.bytes_by_k(PAPER)} bytes per parameter where averages come back in bf16, "
             f"{text_b.bytes_by_k(PRESETS['zeroshard'])} with the default, sums in fp32. Memory grows: 12K/N bytes per "
             "parameter."),
        note("replicas", "Slow-link traffic drops by ~62.5%",
             f"That compares with a rounded 2P. As this engine sends it is {float(100 * _slow(4).saved_gloo):.1f} % "
             f"over gloo, whose gathers are broadcasts in trees, and {float(100 * _slow(4).saved):.1f} % over NCCL, by "
             "formula: its gathers are rings whose crossings a node's cards share. On the card that sends most it is "
             f"{_less(PAPER, gloo=True)} over gloo and {_less(PAPER, gloo=False)} over NCCL; with the default, sums in "
             f"fp32, {_less(PRESETS['zeroshard'], gloo=True)} and {_less(PRESETS['zeroshard'], gloo=False)}; below "
             "zero it sends more. Every rank has a network card of "
             "its own, a reduction goes from each rank straight to each owner, and between replicas running sums are "
             "handed on in fp32, so that K changes no bit. Were every collective a ring, which carries "
             f"{number(one.total)}P, it would be {float(100 * four.saved_per_rank):.1f} % with a card per rank, and "
             f"{float(100 * four.saved_per_node):.1f} % with one per node."),
        note("profile", "Theoretical saving: 50%. Net saving is ~42.7%",
             f"The gradient buffer is inside the {float(cut):.2f} GiB already, where the saving is "
             f"{percent(cut, base)}. With the shard's fp32 gradient in the step it is {percent(in_step, base)}; with "
             "param.grad and buffer both alive, against a baseline with its gradients, "
             f"{percent(copied, base + 2 * gib)}. Neither is 42.7."),
    ]  # fmt: skip
