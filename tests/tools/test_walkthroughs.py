"""The numbers of five published ZeRO texts, run through the engine on two ranks.

    A  "ZeRO-1: A Concrete Walkthrough"            260 parameters, stages 0 and 1
    B  "Buffer, DDP, Distributed Optimizer"        stacked MLPs, one flat padded buffer
    C  "Zero Redundancy Optimizer by hand"         four weights, stages 1 to 3, activation checkpointing
    D  "ZeRO-2: A Concrete Walkthrough"            the same 260 parameters, gradients frame by frame
    E  "ZeRO: Zero Redundancy Optimizer"           the formulas

Where a text's own arithmetic slips, the test asserts the right number and its comment quotes the text.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from walkthroughs import four_weights, transformer260
from walkthroughs.frames import backward_frames

import reference
import zeroshard
from zeroshard import Layout, Precision
from zeroshard.arithmetic.sums import average_, fold
from zeroshard.explain.stacked_mlp import StackedMLP
from zeroshard.layout.partition import Spec, partition
from zeroshard.layout.states import placements
from zeroshard.planner import predict_states

STAGES = (0, 1, 2, 3)
ONE_BYTE = 2.0**-20  # MiB: a bucket limit that gives every tensor a bucket of its own
GB, GIB = 10**9, 2**30


def specs(model: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> list[Spec]:
    return [Spec(name, tuple(p.shape), str(dtype), dtype.itemsize, 0, True) for name, p in model.named_parameters()]


def moved_since(before: dict, now: dict) -> dict:
    """Calls and bytes of gathers and reductions between two looks at `ledger().traffic`."""
    return {
        verb: {key: value - getattr(before.get(verb), key, 0) for key, value in vars(now[verb]).items()}
        for verb in ("gather", "reduce")
    }


@functools.cache
def run_once(ranks, function, *args) -> list:
    return ranks.run(2, function, *args)


# -------------------------------------------------------------------------- A and D: the transformer of 260 parameters

FLAT = Layout(bounds="model", align=1)
PER_TENSOR = Layout(bounds="model", align=1, bucket_mib=ONE_BYTE)
MODULES = ("norm1", "attention", "norm2", "feed_forward", "head")
PER_MODULE = Layout(bounds="model", align=1, units=MODULES)
LAYOUTS = {"one bucket": FLAT, "per tensor": PER_TENSOR, "per module": PER_MODULE}
BF16 = Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16, store_params=True)  # as the texts count

AVERAGES = [
    "0.020", "-0.018", "0.038", "-0.0105", "-0.020", "0.030", "-0.0125", "0.010",
    "0.020", "-0.021", "0.0275", "-0.020", "-0.018", "0.0125", "-0.0165", "0.0325",
]  # fmt: skip
AVERAGES_IN_D = [
    "0.020", "-0.018", "0.038", "-0.011", "-0.020", "0.030", "-0.013", "0.010",
    "0.020", "-0.021", "0.028", "-0.020", "-0.018", "0.013", "-0.017", "0.033",
]  # fmt: skip
UPDATED = [
    0.119, 0.341, -0.211, 0.051, -0.149, 0.219, 0.111, -0.081,
    0.299, -0.099, 0.179, 0.271, -0.049, 0.139, -0.329, 0.089,
]  # fmt: skip


def train_260(stage: int, layout: str, injected: bool, dtype: torch.dtype) -> dict:
    """Two steps on one rank. bfloat16: as the texts say, masters seeded from fp32. float64: their decimals, exactly."""
    rank = dist.get_rank()
    model = transformer260.Transformer260(torch.float32 if dtype == torch.bfloat16 else dtype)
    if injected:
        transformer260.inject(model, rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    precision = BF16 if dtype == torch.bfloat16 else Precision()
    zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision, layout=LAYOUTS[layout])
    batch = transformer260.batches(dtype)[rank]
    result = {"cuts": [bucket.bounds for bucket in zero.partition.buckets], "losses": [], "owned": {}}
    for entry in transformer260.TENSORS:
        bucket, slot = zero.partition.find(entry.name)
        result["owned"][entry.symbol] = bucket.fragment(slot, rank)
    for step in range(2):
        before = zero.ledger().traffic
        trace = model(batch.x)
        loss = torch.nn.functional.cross_entropy(trace.logits, batch.targets)
        loss.backward()
        result["losses"].append(loss.item())
        if step == 0:
            result["trace"] = {name: value.detach().clone() for name, value in trace._asdict().items()}
            result["average"] = model.attention.W_q.grad.full_tensor()
            result["own average"] = model.attention.W_q.grad.to_local()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            fragments = optimizer.param_groups[0]["params"]
            result["fragments"] = [fragment.detach().clone() for fragment in fragments]
            result["states"] = [{key: v.clone() for key, v in optimizer.state[f].items()} for f in fragments]
            with zero.gathered():
                result["weights after one step"] = reference.weights(model)
    ledger = zero.ledger()
    result["traffic of a step"] = moved_since(before, ledger.traffic)
    result["held"] = {state: nbytes for state, nbytes in ledger.held.items() if nbytes}
    result["peak"] = ledger.peak
    result["predicted"] = predict_states(zero)
    with zero.gathered():
        result["weights"] = reference.weights(model)
    return result


@pytest.fixture
def run_260(ranks):
    """Both ranks' results of `train_260`; tests that want the same run share it."""
    return lambda stage, layout="one bucket", injected=False, dtype=torch.bfloat16: run_once(
        ranks, train_260, stage, layout, injected, dtype
    )


def test_the_flat_vector_of_260_and_its_owners():
    """Tensors start where A lists them; GPU-0 owns 0-129, GPU-1 130-259; W1 is cut 50/14."""
    laid_out = partition(specs(transformer260.Transformer260()), FLAT, 2)
    (bucket,) = laid_out.buckets
    starts = {entry.symbol: laid_out.find(entry.name)[1].start for entry in transformer260.TENSORS}
    assert starts == {
        "gamma1": 0, "beta1": 4, "W_q": 8, "W_k": 24, "W_v": 40, "W_o": 56, "gamma2": 72, "beta2": 76,
        "W1": 80, "b1": 144, "W2": 160, "b2": 224, "W_vocab": 228,
    }  # fmt: skip
    assert (bucket.numel, bucket.bounds, bucket.padding) == (260, (0, 130, 260), 0)
    assert laid_out.cut_tensors() == ["feed_forward.W1"]
    # A itemises GPU-0's slice as "W1 (first 2 rows), 32 elements" and GPU-1's as "rows 3-4, 32 elements": that is 112
    # and 148 elements. The cut falls after 3 rows and 2 elements of the fourth, as D has it.
    w1 = laid_out.find("feed_forward.W1")[1]
    assert [bucket.fragment(w1, rank) for rank in (0, 1)] == [(0, 50), (50, 64)]
    assert divmod(50, 16) == (3, 2)
    assert 8 + 4 * 16 + 8 + 32 == 112
    assert 32 + 16 + 64 + 4 + 32 == 148


def test_which_values_the_texts_give():
    """Every value that no text prints is marked; the rest of the tensors are the printed ones."""
    origins = {entry.symbol: entry.origin for entry in transformer260.TENSORS}
    assert [symbol for symbol, origin in origins.items() if origin == "text"] == ["W_q", "W_k", "W_v", "W_vocab"]
    assert [symbol for symbol, origin in origins.items() if origin == "seed"] == ["W_o", "W1", "b1", "W2", "b2"]
    batch_a, batch_b = transformer260.batches()
    assert (batch_a.x_origin, batch_a.targets_origin) == ("text", "seed")
    assert (batch_b.x_origin, batch_b.targets_origin) == ("seed", "seed")
    model = transformer260.Transformer260()
    assert model.attention.W_q[0].tolist() == torch.tensor([0.12, 0.34, -0.21, 0.05]).tolist()
    assert sum(parameter.numel() for parameter in model.parameters()) == 260


@pytest.mark.parametrize(("stage", "nbytes"), [(0, 4160), (1, 2600), (2, 2340), (3, 2080)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_state_bytes_of_the_260(run_260, stage, nbytes, layout):
    """4,160, 2,600, 2,340 and 2,080 bytes per rank, predicted and held; step counters are a row of their own."""
    place = placements(stage)
    for rank, result in enumerate(run_260(stage, layout)):
        assert result["held"] == result["predicted"]
        held = dict(result["held"])
        # One 4-byte counter per tensor with an element here: nine on GPU-0 and five on GPU-1 (both have some of W1).
        assert held.pop("step") == 4 * ([9, 5][rank] if place.optimizer else 13)
        assert held == {
            "parameters": 260 if place.parameters else 520,
            "gradients": 260 if place.gradients else 520,
            "master": 520 if place.optimizer else 1040,
            "exp_avg": 520 if place.optimizer else 1040,
            "exp_avg_sq": 520 if place.optimizer else 1040,
        }
        assert sum(held.values()) == nbytes
        # D's "peak gradient memory" of what is kept: never more than the shard where gradients are sharded.
        assert result["peak"]["gradients"] == held["gradients"]
        assert result["owned"]["W1"] == [(0, 50), (50, 64)][rank]
        if layout == "one bucket":
            assert result["cuts"] == [(0, 130, 260)]
    assert 1 - Fraction(2600, 4160) == Fraction(375, 1000)
    assert 1 - Fraction(2340, 4160) == Fraction(4375, 10000)  # D rounds it to 43.8%


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_of_the_260_moves_520_bytes_each_way(run_260, stage):
    """One reduce-scatter and one all-gather of 520 logical bytes at stages 0-2, a second gather at stage 3."""
    for result in run_260(stage):
        # A calls the 520 + 520 of its all-reduce "send + receive"; per rank and pass a ring sends (N-1)/N of the 520.
        once = {"calls": 1, "logical": 520, "sent": 260, "sent_and_received": 520, "shared": 0}
        twice = {key: 2 * value for key, value in once.items()}
        assert result["traffic of a step"] == {"reduce": once, "gather": twice if stage == 3 else once}
    for result in run_260(stage, "per tensor"):
        moved = result["traffic of a step"]["reduce"]
        assert (moved["calls"], moved["logical"]) == (13, 520)


@pytest.mark.parametrize("injected", [False, True], ids=["computed", "injected"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_the_260_have_equal_bits_at_all_stages(run_260, injected, dtype):
    """Two Adam steps: the same losses, weights, masters and moments at stages 0-3, however reductions are cut up."""
    want = run_260(0, injected=injected, dtype=dtype)
    runs = [run_260(stage, injected=injected, dtype=dtype) for stage in (1, 2, 3)]
    if dtype == torch.bfloat16 and not injected:
        runs += [run_260(stage, layout) for stage in STAGES for layout in ("per tensor", "per module")]
    for run in runs:
        for rank in (0, 1):
            assert run[rank]["losses"] == want[rank]["losses"]
            reference.assert_same(run[rank]["weights"], want[0]["weights"])
        masters = torch.cat([part.flatten() for result in run for part in result["fragments"]])
        if masters.numel() == 260:  # replicated states are all there twice
            assert torch.equal(masters, torch.cat([part.flatten() for part in want[0]["fragments"]]))


def test_the_260_equal_one_process(run_260):
    """In float64 the sharded run is plain PyTorch that adds up micro-batches A and B and divides once."""
    model = transformer260.Transformer260(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = transformer260.batches(torch.float64)
    reference.accumulate(model, optimizer, lambda step, index: batches[index], transformer260.loss, world=2, steps=2)
    for result in run_260(3, dtype=torch.float64):
        reference.assert_same(result["weights"], reference.weights(model))


def test_forward_values_of_the_260(run_260):
    """A's trace of GPU-0 with its deviation, LayerNorm and Q corrected."""
    result = run_260(3, dtype=torch.float64)[0]
    trace = {name: value[0].tolist() for name, value in result["trace"].items()}
    assert trace["mu"] == pytest.approx([0.275], abs=1e-15)  # exact in decimals; 1e-15 is float64 rounding
    # The numbers below are given to four or five decimals, hence half a unit of the last one.
    # A: "sigma = sqrt(var) = 0.398", which is neither the population deviation nor the sample's (0.47871).
    assert trace["sigma"] == pytest.approx([0.41458], abs=5e-6)
    # A: "x1[0] = [0.565, -1.445, 1.319, -0.439]", with its own sigma (its last would then be -0.440).
    assert trace["x1"] == pytest.approx([0.5427, -1.3870, 1.2663, -0.4221], abs=5.1e-5)
    # A: "Q[0] = [0.703, -0.319, ...]", with its own x1 (which gives 0.7022).
    assert trace["q"] == pytest.approx([0.6742, -0.3063, 0.1007, 0.4420], abs=5e-5)
    theirs = torch.tensor([0.565, -1.445, 1.319, -0.439], dtype=torch.float64)
    w_q = torch.tensor(transformer260.TEXT["W_q"], dtype=torch.float64)
    assert (theirs @ w_q)[0].item() == pytest.approx(0.7022, abs=5e-5)
    # bf16 rounds x and mu by up to 2^-9 before 0.41 divides them, and the three results after that (below 1.4) again.
    rough = run_260(3)[0]["trace"]["x1"][0].tolist()
    assert rough == pytest.approx(trace["x1"], abs=2 * 2**-9 / 0.41 + 3 * 2**-9 * 1.4)


@pytest.mark.parametrize("stage", STAGES)
def test_injected_averages(run_260, stage):
    """(gA + gB) / 2 is A's table, all 16 entries, on GPU-0 only."""
    want = [float(value) for value in AVERAGES]
    for rank, result in enumerate(run_260(stage, injected=True, dtype=torch.float64)):
        # Exact in decimals; in float64 the two entries, their sum and its half round by at most 2^-56 each.
        assert result["average"].flatten().tolist() == pytest.approx(want, abs=2**-54)
        assert result["own average"].numel() == (16 if rank == 0 else 0)
    for result in run_260(stage, injected=True):
        # As sent: entries and their sum rounded to bfloat16 (2^-9 relative, on up to 0.065).
        assert result["average"].double().flatten().tolist() == pytest.approx(want, abs=1e-4)
    halves_up = [Decimal(value).quantize(Decimal("0.001"), ROUND_HALF_UP) for value in AVERAGES]
    assert halves_up == [Decimal(value) for value in AVERAGES_IN_D]


@pytest.mark.parametrize("stage", STAGES)
def test_injected_adam_step_in_exact_decimals(run_260, stage):
    """m 0.002, v 4e-7, 0.12 -> 0.11900000050 for W_q[0,0], and all 16 entries, in float64."""
    result = run_260(stage, injected=True, dtype=torch.float64)[0]
    w_q, state = result["fragments"][2].flatten(), result["states"][2]  # gamma1, beta1, W_q
    # rel 1e-14: some ten float64 operations.
    assert state["exp_avg"].flatten()[0].item() == pytest.approx(0.002, rel=1e-14)
    assert state["exp_avg_sq"].flatten()[0].item() == pytest.approx(4e-7, rel=1e-12)  # 1 - 0.999 loses three digits
    assert w_q[0].item() == pytest.approx(0.12 - 0.001 * 0.02 / (0.02 + 1e-8), abs=1e-15)
    assert f"{w_q[0].item():.11f}" == "0.11900000050"
    # A rounds to three decimals. Epsilon moves an entry by at most 0.001 * 1e-8 / 0.01, 0.01 the smallest average.
    assert w_q.tolist() == pytest.approx(UPDATED, abs=1.01e-9)
    before = torch.tensor(transformer260.TEXT["W_q"], dtype=torch.float64).flatten()
    signs = torch.tensor([float(value) for value in AVERAGES], dtype=torch.float64).sign()
    assert w_q.tolist() == pytest.approx((before - 0.001 * signs).tolist(), abs=1.01e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_injected_adam_step_in_mixed_precision(run_260, stage):
    """fp32 masters reach the same values, and the bf16 copy of 0.119 is 0.119140625; no update is lost to rounding."""
    results = run_260(stage, injected=True)
    master = results[0]["fragments"][2].flatten()
    assert master.dtype == torch.float32
    # Below 0.35 neighbouring fp32 numbers are 2^-25 apart. That averages are bf16 does not matter: Adam's first step is
    # lr * sign.
    assert master.tolist() == pytest.approx(UPDATED, abs=2**-25)
    for result in results:
        copy = result["weights after one step"]["attention.W_q"].flatten()
        assert copy[0].item() == 0.119140625
        assert torch.equal(copy, master.bfloat16())
        assert (copy != torch.tensor(transformer260.TEXT["W_q"]).flatten().bfloat16()).all()


def master_seeded_from_the_copy() -> list[float]:
    model = transformer260.Transformer260(torch.bfloat16)
    transformer260.inject(model, dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    precision = Precision(grad_dtype=torch.bfloat16)
    zeroshard.shard(model, optimizer, stage=2, precision=precision, layout=FLAT)
    transformer260.loss(model, transformer260.batches(torch.bfloat16)[dist.get_rank()]).backward()
    optimizer.step()
    return optimizer.param_groups[0]["params"][2].flatten().tolist()


def test_masters_are_seeded_from_fp32(ranks, run_260):
    """Only a model that arrives in bf16 has masters seeded from the copy: then W_q[0,0] becomes 0.119117."""
    rounded = ranks.run(2, master_seeded_from_the_copy)[0]
    assert rounded[0] == pytest.approx(0.1201171875 - 0.001, abs=2**-26)  # two fp32 roundings near 0.12
    assert f"{rounded[0]:.6f}" == "0.119117"
    assert f"{run_260(2, injected=True)[0]['fragments'][2].flatten()[0].item():.6f}" == "0.119000"


def test_gradients_held_frame_by_frame(run_four):
    """D's two columns for GPU-0, and the transient peaks that it leaves out."""
    laid_out = partition(specs(transformer260.Transformer260()), FLAT, 2)
    symbols = {entry.name: entry.symbol for entry in transformer260.TENSORS}
    singly = [backward_frames(laid_out, rank) for rank in (0, 1)]
    assert {symbols[frame.names[0]]: (frame.kept, frame.whole) for frame in singly[0]} == {
        "W_vocab": (0, 32), "b2": (0, 36), "W2": (0, 100), "b1": (0, 116), "W1": (50, 180), "beta2": (54, 184),
        "gamma2": (58, 188), "W_o": (74, 204), "W_v": (90, 220), "W_k": (106, 236), "W_q": (122, 252),
        "beta1": (126, 256), "gamma1": (130, 260),
    }  # fmt: skip
    # D: "peak gradient memory: ~130 values". At rest, yes; GPU-1 keeps 116 of its own when W1's 64 arrive.
    assert [frames[-1].kept for frames in singly] == [130, 130]
    assert [max(frame.transient for frame in frames) for frames in singly] == [130, 180]
    modules = [[name for name in symbols if name.startswith(module)] for module in MODULES]
    by_module = [backward_frames(laid_out, rank, modules) for rank in (0, 1)]
    assert [max(frame.transient for frame in frames) for frames in by_module] == [148, 194]
    assert [frames[-1].whole for frames in by_module] == [260, 260]
    # The same whether the layout has one bucket or thirteen.
    assert backward_frames(partition(specs(transformer260.Transformer260()), PER_TENSOR, 2), 1) == singly[1]


# --------------------------------------------------------------------------------------------- C: four weights by hand

OWNERS = Layout(bounds="tensor", align=1, units=["layer1", "layer2"])
FP16 = Precision(param_dtype=torch.float16, grad_dtype=torch.float16, store_params=True)


def train_four(stage: int, dtype: torch.dtype, checkpointing: str) -> dict:
    """One step on one rank, and the forward after it."""
    rank = dist.get_rank()
    by_layout = checkpointing == "layout"  # the engine's own word for "layers"
    model = four_weights.FourWeights("none" if by_layout else checkpointing)
    if dtype == torch.float64:
        model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=four_weights.LEARNING_RATE)
    local, gathers = {}, []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: local.__setitem__(name, gradient.item()))
    precision = Precision() if dtype == torch.float64 else FP16
    zero = zeroshard.shard(
        model, optimizer, stage=stage, precision=precision, layout=replace(OWNERS, recompute=by_layout)
    )

    def spy(gather, layer, **how):
        gathers.append(layer)
        return gather(**how)

    for bucket in zero._engine.buckets:
        bucket.gather = functools.partial(spy, bucket.gather, bucket.plan.slots[0].name.split(".")[0])
    sample = four_weights.SAMPLES[rank]
    start = zero.ledger().traffic
    places = {name: zero.partition.find(name) for name in four_weights.WEIGHTS}
    result = {"owned": [name for name, (bucket, slot) in places.items() if bucket.fragment(slot, rank).numel]}
    loss = four_weights.loss(model, sample, dtype)
    result["forward"], result["loss"] = list(model.seen), loss.item()
    result["gathers in forward"] = list(gathers)
    model.seen.clear()
    gathers.clear()
    loss.backward()
    result["recomputed"], result["local"] = list(model.seen), local
    result["gathers in backward"] = list(gathers)
    gathers.clear()
    result["own averages"] = {name: p.grad.to_local().tolist() for name, p in model.named_parameters()}
    result["peak"], result["reduce held"] = zero.ledger().peak, zero.ledger().held["reduce"]
    optimizer.step()
    optimizer.zero_grad()
    result["gathers in step"] = list(gathers)
    ledger = zero.ledger()
    result["traffic"] = moved_since(start, ledger.traffic)
    fragments = list(optimizer.param_groups[0]["params"])
    result["masters"] = [fragment.item() for fragment in fragments]
    result["m"] = [optimizer.state[fragment]["exp_avg"].item() for fragment in fragments]
    result["v"] = [optimizer.state[fragment]["exp_avg_sq"].item() for fragment in fragments]
    result["held"] = {state: nbytes for state, nbytes in ledger.held.items() if nbytes}
    result["predicted"] = predict_states(zero)
    with zero.gathered():
        result["weights"] = [parameter.item() for parameter in model.parameters()]
    result["loss after"] = four_weights.loss(model, sample, dtype).item()
    return result


@pytest.fixture
def run_four(ranks):
    """Both ranks' results of `train_four`; tests that want the same run share it."""
    return lambda stage, dtype=torch.float16, checkpointing="whole": run_once(
        ranks, train_four, stage, dtype, checkpointing
    )


HAND_STAGES = (1, 2, 3)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=["fp16", "fp64"])


@pytest.mark.parametrize("stage", HAND_STAGES)
@DTYPES
def test_four_weights_to_the_averages(run_four, stage, dtype):
    """h, a, y, the losses, both ranks' gradients and their averages at their owners: all exact in either dtype."""
    gpu0, gpu1 = run_four(stage, dtype)
    assert gpu0["forward"] == [("h", -7.0), ("a", 0.0), ("y", 0.5)]
    assert gpu1["forward"] == [("h", 1.0), ("a", 1.0), ("y", 1.5)]
    assert (gpu0["loss"], gpu1["loss"]) == (10.125, 15.125)
    assert (gpu0["loss"] + gpu1["loss"]) / 2 == 12.625
    names = list(four_weights.WEIGHTS)
    assert [gpu0["local"][name] for name in names] == [0.0, 0.0, 0.0, -4.5]
    assert [gpu1["local"][name] for name in names] == [-11.0, -5.5, -5.5, -5.5]
    # Whole layers have owners: reduce-scatter is a reduction to one rank, and nobody else has anything of the average.
    assert gpu0["owned"] == ["layer1.w1", "layer1.w2"]
    assert gpu1["owned"] == ["layer2.w3", "layer2.w4"]
    assert list(gpu0["own averages"].values()) == [[-5.5], [-2.75], [], []]
    assert list(gpu1["own averages"].values()) == [[], [], [-2.75], [-5.0]]


@pytest.mark.parametrize("stage", HAND_STAGES)
@DTYPES
def test_four_weights_through_adam(run_four, stage, dtype):
    """m, v and w' at their owners, the weights that the next forward sees, and its losses."""
    results = run_four(stage, dtype)
    # Masters and moments are fp32 beside fp16 weights: a few roundings of 2^-24. In float64 there is only epsilon left,
    # 1e-8 / 2.75 of a step of 0.1.
    exact = {"rel": 3e-7} if dtype == torch.float16 else {"rel": 1e-9}
    for key, want in {
        "m": [-0.55, -0.275, -0.275, -0.5],
        "v": [0.03025, 0.0075625, 0.0075625, 0.025],
        "masters": [2.1, -2.9, 1.1, 0.6],
    }.items():
        assert [value for result in results for value in result[key]] == pytest.approx(want, **exact)
    losses = [result["loss after"] for result in results]
    if dtype == torch.float64:
        for result in results:
            assert result["weights"] == pytest.approx([2.1, -2.9, 1.1, 0.6], rel=1e-9)
        assert losses == pytest.approx([9.68, 12.35045], rel=1e-8)  # weights off by 4e-10
        assert f"{losses[1]:.3f} {sum(losses) / 2:.3f}" == "12.350 11.015"
        return
    for result in results:
        # The article writes "w1'_fp16 = 2.1" and so on; these are the fp16 numbers next to them.
        assert result["weights"] == [2.099609375, -2.900390625, 1.099609375, 0.60009765625]
    # fp16 numbers near 10 are 2^-7 apart, and five operations round on the way to the loss.
    assert losses == pytest.approx([9.68, 12.35045], abs=5 * 2**-8)
    masters = torch.tensor([value for result in results for value in result["masters"]])
    assert masters.bfloat16().tolist() == [2.09375, -2.90625, 1.1015625, 0.6015625]


@DTYPES
@pytest.mark.parametrize("checkpointing", ["none", "layers", "layout", "whole"])
def test_four_weights_have_equal_bits_at_all_stages(run_four, dtype, checkpointing):
    """Stages 0 to 3, with and without checkpointing: the same numbers."""
    for rank, want in enumerate(run_four(2, dtype)):
        for stage in STAGES:
            got = run_four(stage, dtype, checkpointing)[rank]
            for key in ("forward", "loss", "local", "weights", "loss after"):
                assert got[key] == want[key], (key, stage)
            if stage:
                for key in ("own averages", "m", "v", "masters"):
                    assert got[key] == want[key], (key, stage)


def test_four_weights_recompute_what_was_discarded(run_four):
    """`a` is recomputed where the whole net is one segment and kept where each layer is: the article says both."""
    for stage in HAND_STAGES:
        gpu0, gpu1 = run_four(stage)
        assert gpu0["recomputed"] == [("h", -7.0), ("a", 0.0)]
        assert gpu1["recomputed"] == [("h", 1.0), ("a", 1.0)]
        # Per layer only h is recomputed: ReLU's own output is a, which is there already.
        assert run_four(stage, checkpointing="layers")[1]["recomputed"] == [("h", 1.0)]
        assert run_four(stage, checkpointing="none")[1]["recomputed"] == []


@pytest.mark.parametrize(("stage", "nbytes"), [(0, 64), (1, 40), (2, 36), (3, 32)])
def test_four_weights_bytes(run_four, stage, nbytes):
    """16, 4+12/2, 2+14/2 and 16/2 bytes per weight; optimizer state 12 per owned one; gradients freed once reduced."""
    place = placements(stage)
    for result in run_four(stage):
        held = dict(result["held"])
        assert held == result["predicted"]
        assert held.pop("step") == 4 * (2 if place.optimizer else 4)
        assert sum(held.values()) == nbytes
        assert held["master"] + held["exp_avg"] + held["exp_avg_sq"] == 12 * (2 if place.optimizer else 4)
        assert result["peak"]["gradients"] == (4 if place.gradients else 8)
        assert result["reduce held"] == 0


@pytest.mark.parametrize(
    ("checkpointing", "backward", "passes"),
    [
        ("none", ["layer2"], "2.5"),
        ("layers", ["layer2", "layer1"], "3"),
        ("layout", ["layer2", "layer1"], "3"),
        ("whole", ["layer1", "layer2"], "3"),
    ],
)
def test_four_weights_gathers_at_stage_3(run_four, checkpointing, backward, passes):
    """Each layer is gathered once in forward and at most once in backward; nothing is gathered after the step.

    The article gathers layer 1 three times and layer 2 twice, 10 elements and 4 reduced ones: 3.5 times the model.
    Its third gather of layer 1 finds a use for no weight: the gradients of w1 and w2 need x, not w. Here recomputation
    and backward share a gather, so that checkpointing costs 3; without it layer 1 is not gathered in backward at all.
    """
    for rank, result in enumerate(run_four(3, checkpointing=checkpointing)):
        assert result["gathers in forward"] == ["layer1", "layer2"]
        assert result["gathers in backward"] == backward
        assert result["gathers in step"] == []
        gathers = ["layer1", "layer2", *backward]
        own, nbytes = gathers.count(f"layer{rank + 1}"), 4 * len(gathers)
        # A layer has two weights of two bytes. A gather of a whole layer is a broadcast by its owner; a reduction goes
        # to the owner alone.
        assert result["traffic"] == {
            "gather": {
                "calls": len(gathers),
                "logical": nbytes,
                "sent": 4 * own,
                "sent_and_received": nbytes,
                "shared": 0,
            },
            "reduce": {"calls": 2, "logical": 8, "sent": 4, "sent_and_received": 8, "shared": 0},
        }
        elements = (result["traffic"]["gather"]["logical"] + result["traffic"]["reduce"]["logical"]) // 2
        assert Fraction(elements, 4) == Fraction(passes)
    assert Fraction(10 + 4, 4) == Fraction("3.5")


@pytest.mark.parametrize("stage", [1, 2])
def test_four_weights_gather_after_the_step_at_stages_1_and_2(run_four, stage):
    """Every owner broadcasts its updated layer once; checkpointing costs no bytes."""
    for result in run_four(stage):
        assert result["gathers in forward"] == result["gathers in backward"] == []
        assert result["gathers in step"] == ["layer1", "layer2"]
        assert result["traffic"] == {
            verb: {"calls": 2, "logical": 8, "sent": 4, "sent_and_received": 8, "shared": 0}
            for verb in ("gather", "reduce")
        }


def test_when_a_tiny_update_is_lost():
    """lr 0.001 times gradient 1e-5: zero in fp16, and lost in fp32 too unless the weight is below 0.25."""
    assert torch.tensor(1e-3 * 1e-5, dtype=torch.float16).item() == 0.0
    # The article: "In FP32 ... you can add 0.00000001 to an existing weight and the value will actually change."
    weights = torch.tensor([0.1, 0.2499, 0.25, 0.5, 1.0, 2.0, -3.0])
    assert (weights + 1e-8 != weights).tolist() == [True, True, False, False, False, False, False]


# ------------------------------------------------------ B: one flat padded buffer, sharded optimizer, exact comparison

BF16_FP32 = Precision(param_dtype=torch.bfloat16)  # gradients are accumulated in fp32, as the engine does unless asked
ONE_BUFFER = Layout(align=1, units=())  # the whole model is one unit and one bucket, padded to a multiple of the ranks
HIDDEN, DEPTH, STEPS = 13, 3, 4


def stacked(seed: int = 0) -> StackedMLP:
    torch.manual_seed(seed)
    return StackedMLP(HIDDEN, DEPTH)


def batch_of(step: int, index: int) -> torch.Tensor:
    return torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1000 * step + index)).bfloat16()


def summed(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The article's loss, before its division by the number of ranks (the engine averages)."""
    return model(batch).sum()


def adam(params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


@pytest.mark.parametrize(("world", "padded"), [(2, 4252), (3, 4251), (4, 4252)])
def test_padding_of_the_flat_buffer(world, padded):
    """4,251 parameters are padded to 4,252 for 2 and 4 ranks. B: "uniform slices without padding"; its code pads."""
    (bucket,) = partition(specs(stacked()), ONE_BUFFER, world).buckets
    assert sum(slot.numel for slot in bucket.slots) == 4251
    assert (bucket.numel, bucket.padding) == (padded, padded - 4251)
    assert {bucket.shard_numel(rank) for rank in range(world)} == {padded // world}


def test_sizes_of_the_larger_stacks():
    """hidden 512 x 3 and 4096 x 10, counted on models without memory."""
    with torch.device("meta"):
        small, large = StackedMLP(512, 3), StackedMLP(4096, 10)
    assert sum(p.numel() for p in small.parameters()) == 6_299_136
    assert sum(p.numel() for p in large.parameters()) == 1_342_382_080


def buffer_operations() -> dict:
    """One step at stage 1, looking into the buffer at every operation that the article lists."""
    rank = dist.get_rank()
    model, names = stacked(), [name for name, _ in stacked().named_parameters()]
    optimizer = adam(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=1, precision=BF16_FP32, layout=ONE_BUFFER)
    (plan,), (bucket,) = zero.partition.buckets, zero._engine.buckets
    start = bucket.full.data_ptr()

    def are_views() -> bool:
        return [p.data_ptr() for p in model.parameters()] == [start + slot.start * 2 for slot in plan.slots]

    result = {
        "padding at rest": bucket.full[4251:].tolist(),
        "views": are_views(),
        "gaps": [b.start - a.stop for a, b in zip(plan.slots, plan.slots[1:], strict=False)],
        "shard is a view": bucket.parameters.of(*bucket.updated).data_ptr() == start + rank * 2126 * 2
        and bucket.target.numel() == 2126,
        "flat before": bucket.full.clone(),
        "master before": bucket.master.tensor.clone(),
        "cut": zero.partition.cut_tensors(),
    }
    summed(model, batch_of(0, rank)).backward()
    # get_grad_shard(param): this rank's elements of each parameter's average, end to end
    result["gradient shards"] = {name: p.grad.to_local() for name, p in zip(names, model.parameters(), strict=True)}
    gather = zero._engine.group.team.gather

    def spy(full, *where):
        result["flat before the gather"] = full.clone()
        return gather(full, *where)

    zero._engine.group.team.gather = spy
    optimizer.step()
    result["fragments"] = torch.cat([fragment.detach().view(-1) for fragment in optimizer.param_groups[0]["params"]])
    result["master after"] = bucket.master.tensor.clone()
    bucket.land()
    result["flat after"] = bucket.full.clone()
    result["still views"] = are_views()
    return result


def test_buffer_operations(ranks):
    """Flatten, pad, shard views, reduce-scatter, fragments of a cut tensor, write-back and all-gather, on two ranks."""
    results = ranks.run(2, buffer_operations)
    model = stacked()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()] + [torch.zeros(1)])
    sums = torch.zeros(4252)
    for rank in (0, 1):
        one = stacked().bfloat16()
        summed(one, batch_of(0, rank)).backward()
        sums[:4251] += torch.cat([p.grad.float().flatten() for p in one.parameters()])
    shards = [slice(0, 2126), slice(2126, 4252)]
    for rank, result in enumerate(results):
        own, other = shards[rank], shards[1 - rank]
        assert [result["views"], result["shard is a view"], result["still views"]] == [True, True, True]  # zero-copy
        assert result["gaps"] == [0] * 11
        assert result["padding at rest"] == [0.0]
        assert torch.equal(result["flat before"], flat.bfloat16())
        assert torch.equal(result["master before"], flat[own])  # .clone().float() of the article, from before rounding
        # Reduce-scatter: each rank has the average of its slice and of nothing else; the cut goes through a bias.
        assert result["cut"] == ["layers.1.fc1.bias"]
        assert result["gradient shards"]["layers.1.fc1.bias"].numel() == [33, 19][rank]
        reduced = torch.cat(list(result["gradient shards"].values()))
        assert torch.equal(reduced, (sums / 2)[own][: reduced.numel()])
        assert reduced.numel() == [2126, 2125][rank]
        # The optimizer's fragments are the master, written back into the own slice; the rest is old until gathered.
        assert torch.equal(result["fragments"], result["master after"][: reduced.numel()])
        assert torch.equal(result["flat before the gather"][own], result["master after"].bfloat16())
        assert torch.equal(result["flat before the gather"][other], result["flat before"][other])
        moved = result["master after"] != result["master before"]
        assert torch.equal(moved[: reduced.numel()], reduced != 0)
        masters = torch.cat([result["master after"] for result in results])
        assert torch.equal(result["flat after"], masters.bfloat16())
        assert result["flat after"][-1].item() == 0.0


def train_stacked(stage: int, same: bool, backwards: int) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = stacked(rank)  # rank 0's weights count
    optimizer = adam(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage, precision=BF16_FP32, layout=ONE_BUFFER)
    batches = (lambda step, index: batch_of(step, 0)) if same else batch_of
    reference.loop(model, optimizer, batches, summed, rank, world, backwards, steps=STEPS)
    with zero.gathered():
        return reference.weights(model)


@functools.cache
def one_process(world: int, backwards: int) -> dict:
    model = stacked()
    reference.accumulate_with_masters(model, adam, batch_of, summed, world, backwards, steps=STEPS)
    return reference.weights(model)


@pytest.mark.parametrize(("count", "stage"), [(2, 1), (2, 3), (3, 1), (4, 1)])
def test_identical_micro_batches_equal_one_process(ranks, count, stage):
    """B's test with atol = rtol = 0: N ranks on one micro-batch give the weights of one process on it."""
    for weights in ranks.run(count, train_stacked, stage, True, 1):
        reference.assert_same(weights, one_process(1, 1))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ordered_sum_equals_plain_accumulation(ranks, count):
    """Different micro-batches: the weights of one process that accumulates all of them in order, at every N.

    With two backwards before a step: the listed code copies into main_grad and would forget the first.
    """
    for weights in ranks.run(count, train_stacked, 1, False, 2):
        reference.assert_same(weights, one_process(count, 2))


class Skipping(StackedMLP):
    def forward(self, x: torch.Tensor, layers: int = DEPTH) -> torch.Tensor:
        for layer in self.layers[:layers]:
            x = x + layer(x)
        return x


def skip_the_last_layer() -> list:
    """Two steps; in the second nobody has a gradient for the last layer."""
    torch.manual_seed(0)
    model = Skipping(HIDDEN, DEPTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=1, precision=BF16_FP32, layout=ONE_BUFFER)
    weights = []
    for step in range(2):
        model(batch_of(step, dist.get_rank()), DEPTH - step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with zero.gathered():
            weights.append(reference.weights(model))
    return weights


def test_no_stale_gradient_is_reduced(ranks):
    """In the listed code a parameter without gradient keeps last step's in the buffer, and is stepped with it."""
    for first, second in ranks.run(2, skip_the_last_layer):
        for name in first:
            unchanged = torch.equal(first[name], second[name])
            assert unchanged is name.startswith("layers.2."), name


def test_what_identical_gradients_sum_to():
    """N * (g / N) = g in bf16 sums at N = 2 and 4 but not 3 and 8; the ordered fp32 sum gives g at every N."""
    g = torch.randn(256).bfloat16()
    wrong = {}
    for count in (2, 3, 4, 8):
        total = torch.zeros(256, dtype=torch.bfloat16)
        for _ in range(count):
            total += g / count
        wrong[count] = int((total != g).sum())
    assert wrong[2] == wrong[4] == 0
    assert wrong[3] > 0
    assert wrong[8] > 64  # more than a quarter: sums of 3, 5, 6 and 7 eighths need more than bf16's eight bits
    for count in range(1, 17):
        total = torch.empty(256)
        fold(total, [g] * count, start=None)
        average_(total, count)
        assert torch.equal(total, g.float()), count


# ------------------------------------------------------------------- the formulas and tables, from the table of stages


def nbytes_per_parameter(stage: int, count: int) -> dict[str, Fraction]:
    """bf16 parameters and gradients; fp32 masters, m and v: the paper's 2 + 2 + 4 + 4 + 4."""
    place = placements(stage)
    share = {True: Fraction(1, count), False: Fraction(1)}
    optimizer = dict.fromkeys(("master", "m", "v"), 4 * share[place.optimizer])
    return {"parameters": 2 * share[place.parameters], "gradients": 2 * share[place.gradients], **optimizer}


@pytest.mark.parametrize("count", [1, 2, 8, 64, 1000])
def test_bytes_per_parameter(count):
    """16, 4 + 12/N, 2 + 14/N and 16/N."""
    got = [sum(nbytes_per_parameter(stage, count).values()) for stage in STAGES]
    assert got == [16, 4 + Fraction(12, count), 2 + Fraction(14, count), Fraction(16, count)]


def test_savings_that_the_texts_quote():
    """A: 5.5 bytes at N = 8 (65.6%), 4.2 at 64 (73.8%). E's "4x" and "8x" at 64 are limits; only its 64x is exact."""
    at = {count: [sum(nbytes_per_parameter(stage, count).values()) for stage in STAGES] for count in (8, 64)}
    assert (at[8][1], 1 - at[8][1] / 16) == (Fraction("5.5"), Fraction("0.65625"))
    assert at[64][1] == Fraction("4.1875")
    assert round(float(1 - at[64][1] / 16), 4) == 0.7383
    assert [round(float(16 / at[64][stage]), 2) for stage in (1, 2)] == [3.82, 7.21]
    assert 16 / at[64][3] == 64


def test_tables_in_gigabytes():
    """GB of 10^9 bytes per GPU: 7B on 8 (A, D), 7.5B on 64 (C), 10B on 8 (E)."""

    def table(parameters: int, stage: int, count: int) -> list[float]:
        rows = [float(parameters * each / GB) for each in nbytes_per_parameter(stage, count).values()]
        return [*rows, sum(rows)]

    assert table(7 * GB, 0, 8) == [14, 14, 28, 28, 28, 112]
    assert table(7 * GB, 1, 8) == [14, 14, 3.5, 3.5, 3.5, 38.5]
    assert table(7 * GB, 2, 8) == [14, 1.75, 3.5, 3.5, 3.5, 26.25]
    assert 1 - 26.25 / 112 == 0.765625  # D rounds it to 76.6%
    # C rounds these to 31.4, 16.6 and 1.9.
    totals = [round(table(15 * GB // 2, stage, 64)[-1], 3) for stage in STAGES]
    assert totals == [120, 31.406, 16.641, 1.875]
    assert (table(10 * GB, 0, 8)[0], table(10 * GB, 3, 8)[0]) == (20, 2.5)


def test_table_of_the_ten_layer_model():
    """B's profile, H = 4096 on 4 ranks, is in GiB: 17.50 and 8.75, half of it saved."""
    with torch.device("meta"):
        laid_out = partition(specs(StackedMLP(4096, 10)), Layout(bounds="model", align=1), 4)
    total = sum(bucket.numel for bucket in laid_out.buckets)
    shard = sum(bucket.shard_numel(0) for bucket in laid_out.buckets)
    assert (total, shard * 4) == (1_342_382_080, total)

    def gib(*rows: int) -> float:
        return round(sum(rows) / GIB, 2)

    assert (gib(2 * total), gib(4 * total), gib(4 * shard)) == (2.50, 5.00, 1.25)
    baseline, sharded = 14 * total, 4 * total + 12 * shard  # the article leaves the baseline's gradients out
    assert (gib(baseline), gib(sharded)) == (17.50, 8.75)
    assert Fraction(sharded, baseline) == Fraction(1, 2)
    # "Net saving is ~42.7%" follows from no row: the gradient buffer is already in the 8.75. What comes near it:
    assert 1 - Fraction(sharded + 4 * shard, baseline) == Fraction(3, 7)  # 42.86%: with the shard's fp32 gradient
    assert 1 - Fraction(sharded + 2 * total, 16 * total) == Fraction(7, 16)  # 43.75%: with param.grad beside the buffer
    assert 1 - Fraction(sharded, 16 * total) == Fraction(9, 16)  # 56.25%: at rest, the baseline's gradients counted
    assert sharded == total * sum(nbytes_per_parameter(1, 4).values())
