"""Parameters that rest and travel in 8 bits: one rounding, from fp32 masters, and the same bits everywhere."""

import dataclasses
import itertools
import math

import hypothesis
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies
from safetensors.torch import load_file
from torch import nn

import models
import ranks
import reference
import test_offload
import training
import zeroshard
from zeroshard import Comm, Offload, Precision
from zeroshard.arithmetic import fp8
from zeroshard.cli.reference import in_8_bits
from zeroshard.device import CHUNK
from zeroshard.errors import PeerError, StateError, TierError, UserError
from zeroshard.planner import predict_states

FP8 = Precision(fp8=True)
LINEAR = ("qkv.weight", "proj.weight", "mlp.0.weight", "mlp.2.weight", "head.weight")
ALL = torch.arange(256, dtype=torch.uint8)


# ------------------------------------------------------------------------------------------------------------ numbers


def through(values, scale=None):
    """What 8 bits keep of a tensor; and its scale."""
    tiles = fp8.grid(values.shape, "tensor")
    scale = fp8.as_fp32(fp8.scales_of(values, tiles)) if scale is None else scale.view(1)
    raw, back = torch.empty(values.numel(), dtype=torch.uint8), torch.empty_like(values)
    fp8.quantise_(raw, values, scale, tiles)
    fp8.dequantise_(back, raw, scale, tiles)
    return back, scale[0]


@hypothesis.given(strategies.floats(width=32, min_value=0, allow_nan=False, allow_infinity=False))
def test_a_scale_is_the_least_at_which_the_largest_number_fits(most):
    """448 times it is not below the largest magnitude, and 448 times half of it is; but no scale is a subnormal."""
    scale = float(through(torch.tensor([-most, most / 2]))[1])
    assert math.log2(scale).is_integer() and most <= 448 * scale
    assert most > 448 * scale / 2 or scale == 2.0**-126


def test_every_number_of_8_bits_comes_back_at_every_scale():
    numbers = ALL.view(torch.float8_e4m3fn).float()
    numbers = numbers[~numbers.isnan()]
    for exponent in (-126, -20, 0, 5, 119):
        scale = torch.tensor(2.0**exponent)
        assert torch.equal(through(numbers * scale, scale)[0], numbers * scale)


def test_a_number_is_rounded_once_to_the_nearest_and_ties_to_even():
    """Against a search among all 253 numbers; of random ones some would round otherwise by way of bfloat16."""
    torch.manual_seed(0)
    numbers = ALL[:127].view(torch.float8_e4m3fn).double()  # from 0 to 448, which is 0x7E
    numbers = numbers[~numbers.isnan()]
    ties = (numbers[1:] + numbers[:-1]).float() / 2
    values = torch.cat([torch.randn(20000), ties / 2**9, torch.tensor([3.5])])
    back, scale = through(values)
    away = (values.double().abs()[:, None] / scale - numbers).abs()
    nearest = away.min(1, keepdim=True).values == away
    even = torch.arange(numbers.numel()) % 2 == 0
    chosen = torch.where(nearest.sum(1) > 1, (nearest & even).int().argmax(1), nearest.int().argmax(1))
    assert (nearest.sum(1) > 1).any()
    assert torch.equal(back.double().abs(), numbers[chosen] * scale)
    assert torch.equal(back, in_8_bits(values))
    assert (through(values.bfloat16().float(), scale)[0] != back).float().mean() > 0.02


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
def test_of_a_tensor_with_a_number_that_is_none_all_is_nan(bad):
    values = torch.tensor([1.0, bad, 0.0])
    assert through(values)[0].isnan().all() and in_8_bits(values).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, CHUNK - 1, 2 * CHUNK + 777])
def test_bytes_are_read_where_they_came_to_lie(dtype, numel):
    """In the last of the memory that is written from its front."""
    raw, scale = torch.arange(numel).mul(37).to(torch.uint8), torch.tensor(0.25)
    full = torch.zeros(numel, dtype=dtype)
    end = full.view(torch.uint8)[-numel:]
    end.copy_(raw)
    fp8.dequantise_(full, end, scale.view(1), fp8.grid([numel], "tensor"))
    want = (raw.view(torch.float8_e4m3fn).float() * scale).to(dtype)
    assert torch.equal(full.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-30, 1.0, 2.0**119])
def test_a_byte_looked_up_has_the_bits_of_torchs_cast(dtype, scale):
    """Also where the dtype has no such number, or only a subnormal one."""
    got, scale = torch.empty(256, dtype=dtype), torch.tensor(scale)
    one = scale.view(1), fp8.grid([256], "tensor")
    fp8.dequantise_(got, ALL, *one)
    want = (ALL.view(torch.float8_e4m3fn).to(torch.float32) * scale).to(dtype)
    reference.assert_same({"numbers": got}, {"numbers": want})
    assert all(torch.equal(reference.bits(n), reference.bits(got)) for _, n in fp8.dequantised(ALL, *one, dtype))


SHAPES = [(300, 260), (128, 128), (5, 7), (1, 300), (300,), (2, 130, 129), (3000, 200)]


def tiled(master, scaling):
    """In plain words: each tile by itself."""
    if scaling == "tensor":
        return in_8_bits(master)
    tall, wide = map(int, scaling.split("x"))
    rows = master.reshape(-1, master.shape[-1])
    out = torch.empty_like(rows)
    for row, column in itertools.product(range(0, rows.shape[0], tall), range(0, rows.shape[1], wide)):
        where = slice(row, row + tall), slice(column, column + wide)
        out[where] = in_8_bits(rows[where])
    return out.view(master.shape)


@pytest.mark.parametrize("scaling", ["tensor", "128x128", "1x128"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tile_is_scaled_by_its_own_largest_number_however_a_tensor_is_cut(shape, scaling):
    """Three ranks, cut anywhere: a scale is the largest that one of them asks for. What is read lies in the same memory."""
    torch.manual_seed(0)
    master = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    tiles, flat = fp8.grid(shape, scaling), master.view(-1)
    cuts = [0, flat.numel() // 3, flat.numel() * 2 // 3 + 1, flat.numel()]
    asked = [fp8.scales_of(flat[a:b], tiles, a) for a, b in itertools.pairwise(cuts)]
    assert torch.stack(asked).amax(0).tolist() == fp8.scales_of(flat, tiles).tolist()
    scales, full = fp8.as_fp32(torch.stack(asked).amax(0)), torch.empty(flat.numel(), dtype=torch.bfloat16)
    raw = full.view(torch.uint8)[-flat.numel() :]
    for a, b in itertools.pairwise(cuts):
        fp8.quantise_(raw[a:b], flat[a:b], scales, tiles, a)
    part = torch.cat([n for _, n in fp8.dequantised(raw[cuts[1] : cuts[2]], scales, tiles, torch.float32, cuts[1])])
    fp8.dequantise_(full, raw, scales, tiles)
    want = tiled(master, scaling).view(-1)
    assert torch.equal(part, want[cuts[1] : cuts[2]]) and torch.equal(full, want.bfloat16())
    across = {"tensor": 1, "128x128": -(-shape[-1] // 128), "1x128": -(-shape[-1] // 128)}[scaling]
    rows = flat.numel() // shape[-1]
    assert len(scales) == across * {"tensor": 1, "128x128": -(-rows // 128), "1x128": rows}[scaling]


# ------------------------------------------------------------------------------------------------ bits: also test_claims


def linear(name):
    return name.endswith(LINEAR)


def start(stage, precision=FP8, offload=None):
    states = Offload() if offload is None else test_offload.offload(**offload)
    return training.sharded(stage, precision=precision, offload=states)


def steps(model, optimizer, zero, numbers, **how):
    for number in numbers:
        training.step(model, optimizer, zero, number, **how)


def all_trained(stages, precision):
    return [training.trained(stage, precision=precision)[1] for stage in stages]


@pytest.mark.full
@pytest.mark.row(104)
def test_sums_of_16_bits_are_equal_over_stages():
    precision = dataclasses.replace(FP8, grad_dtype=torch.bfloat16)
    for runs in ranks.run(4, all_trained, (1, 2, 3), precision, timeout=120):
        for got in runs:
            reference.assert_same(got, runs[0])


# ------------------------------------------------------------------------------------------------------- which, and bytes


def resting(zero):
    return {slot.name for bucket in zero.partition.buckets if bucket.fp8 for slot in bucket.slots}


def test_the_weights_of_linear_layers_rest_in_8_bits_and_nothing_else():
    model, _, zero = start(3)
    assert resting(zero) == {name for name, _ in model.named_parameters() if linear(name)}
    zero = start(3, Precision(fp8=["blocks.0.*.weight", "head.weight"], keep=(), param_dtype=torch.float32))[2]
    assert resting(zero) == {n for n in dict(zero.model.named_parameters()) if n.startswith(("blocks.0.", "head."))} & {
        n for n in dict(zero.model.named_parameters()) if n.endswith("weight") and ".norm" not in n
    } | {"blocks.0.norm1.weight", "blocks.0.norm2.weight"}


def test_routers_frozen_and_kept_weights_stay_as_they_are():
    model = nn.ModuleDict({n: nn.Linear(8, 8) for n in ("up", "gate", "router", "kept", "frozen", "tied")})
    model["embed"] = nn.Embedding(8, 8)
    model["embed"].weight = model["tied"].weight
    model["frozen"].requires_grad_(False)
    zero = zeroshard.shard(
        model, None, stage=3, precision=Precision(param_dtype=torch.float32, fp8=True, keep=["kept.*"])
    )
    assert resting(zero) == {"up.weight"}


def counted(stage, scaling="tensor"):
    model, optimizer, zero = start(stage, dataclasses.replace(FP8, scaling=scaling))
    steps(model, optimizer, zero, range(2))
    before = zero.ledger().traffic["gather"].logical
    steps(model, optimizer, zero, range(2, 3), every=zero.world_size)
    held = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
    buckets = {kind: [b for b in zero.partition.buckets if b.fp8 == kind] for kind in (True, False)}
    return held, zero.ledger().traffic["gather"].logical - before, buckets, predict_states(zero)


@pytest.mark.row(104)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_byte_moves_and_rests_of_each_element(stage):
    """And one more of each tensor, on every rank. What the planner says is what is held, to the byte."""
    for held, gathered, buckets, said in ranks.run(2, counted, stage, timeout=60):
        low, high = (sum(bucket.numel for bucket in buckets[kind]) for kind in (True, False))
        tensors = sum(len(bucket.slots) for bucket in buckets[True])
        shards = 2 if stage == 3 else 1
        assert held["scales"] == tensors == 9
        assert held["parameters"] == (low + 4 * high) // shards
        assert held["master"] == 4 * low // (2 if stage else 1)
        assert said == {state: held[state] for state in said} and set(held) - set(said) <= {"norms", "staging"}
        # Stage 3: forward and backward; 1 and 2: after the step. Stage 0 sends averages of gradients.
        passes = {0: 0, 1: 1, 2: 1, 3: 2}[stage]  # of parameters
        assert gathered == (passes * (low + 4 * high) if stage else 4 * (low + high))


# ------------------------------------------------------------------------------------------------------------- edits


def edit(stage, world, write_from=None, offload=None):
    """Weights as they are after an edit inside gathered(), which differs by rank; and after a step."""
    model, optimizer, zero = start(stage, offload=offload)
    steps(model, optimizer, zero, range(1))
    weight = model.blocks[0].qkv.weight
    with zero.gathered(write_from=write_from), torch.no_grad():
        before = reference.weights(model)
        weight[:, 3] = 2.0 + (zero.rank if write_from is not None else 0)
        weight[5, 5] = 100.0
    with zero.gathered():
        after = reference.weights(model)
    masters = {}
    for bucket in zero._engine.buckets:
        with bucket.updating.here(changed=False):
            masters[str(bucket.plan.index)] = bucket.target.clone()
    steps(model, optimizer, zero, range(1, 2))
    with zero.gathered():
        return before, after, reference.weights(model)


@pytest.mark.row(104)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("write_from", [None, 1], ids=["by-all", "by-one"])
def test_an_edit_inside_gathered_becomes_the_masters_and_is_rounded(stage, write_from):
    """The new largest number of the tensor is a new scale for all of it. What was not edited keeps its masters."""
    runs = ranks.run(2, edit, stage, 2, write_from, timeout=60)
    for before, after, later in runs:
        reference.assert_same(after, runs[0][1])
        reference.assert_same(later, runs[0][2])
        name = "blocks.0.qkv.weight"
        reference.assert_same(
            {n: t for n, t in after.items() if n != name}, {n: t for n, t in before.items() if n != name}
        )
        want = after[name]
        assert want[5, 5] == 96.0  # of 88, 96 and 104 at a scale of 1/4 two are as near: the even one
        assert (want[:5, 3] == 2.0 + (write_from or 0)).all() and not torch.equal(later[name], want)
        assert len(want.unique()) <= 255 and (want * 4).frac().abs().sum() != 0


@pytest.mark.row(104)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_edit_of_one_rank_goes_to_masters_in_files(stage, tmp_path):
    fields = {"path": str(tmp_path), "optimizer": "nvme"}
    want = ranks.run(2, edit, stage, 2, 1, timeout=60)
    for found, memory in zip(ranks.run(2, edit, stage, 2, 1, fields, timeout=60), want, strict=True):
        for mine, theirs in zip(found, memory, strict=True):
            reference.assert_same(mine, theirs)


def edit_beside_a_fault(stage, path):
    """Rank 1 cannot read its files when gathered() is left: what each rank hears, and whether nobody waits for long."""
    model, optimizer, zero = start(stage, offload={"path": path, **test_offload.ON_DISK})
    steps(model, optimizer, zero, range(1))
    undo = None
    try:
        with zero.gathered(), torch.no_grad():
            model.blocks[0].qkv.weight[:, 3] = 2.0
            if zero.rank == 1:
                undo = test_offload.failing("preadv", zero)
    except (TierError, PeerError) as error:
        return type(error).__name__, str(error)
    finally:
        if undo is not None:
            undo()


@pytest.mark.processes
@pytest.mark.row(104)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_edit_that_one_rank_cannot_follow_is_an_error_on_every_rank(stage, tmp_path):
    """At once: no rank goes on to wait for the one whose files are damaged."""
    first, second = ranks.run(2, edit_beside_a_fault, stage, str(tmp_path), timeout=60)
    assert (first[0], second[0]) == ("PeerError", "TierError")
    assert "Input/output error" in first[1] and "rank 1" in first[1]


def interrupted_landing():
    """Bytes of gathers in the ledger, before and after a landing beside weights that somebody reads is left half done."""
    model, optimizer, zero = start(3)
    steps(model, optimizer, zero, range(1))
    bucket = next(bucket for bucket in zero._engine.buckets if bucket.plan.fp8)
    with zero.gathered():
        before = zero.ledger().held["gather"]
        bucket.gather()
        apart, dequantise = zero.ledger().held["gather"] - before, bucket.codec._dequantise
        bucket.codec._dequantise = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            bucket.land()
        bucket.codec._dequantise = dequantise
        left = zero.ledger().held["gather"] - before
        bucket.gather()
        bucket.land()
    return apart == bucket.plan.numel, left


def test_a_landing_that_is_interrupted_gives_its_memory_back():
    assert ranks.run(1, interrupted_landing, timeout=60) == [(True, 0)]


def edited_outside(stage, how):
    model, optimizer, zero = start(stage)
    steps(model, optimizer, zero, range(1))
    told = []
    if how == "in forward":
        model.blocks[0].qkv.register_forward_pre_hook(lambda module, args: (module.weight.data.mul_(2.0), None)[1])
    try:
        if how == "in forward":
            steps(model, optimizer, zero, range(1, 3))
        else:
            with zero.gathered():
                if zero.rank == 1:
                    with torch.no_grad():
                        model.blocks[1].proj.weight[20, 3] = 1.0
                steps(model, optimizer, zero, range(1, 2))
    except (StateError, PeerError) as error:
        told.append(str(error))
    return told


@pytest.mark.row(104)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", ["in forward", "before a forward in gathered()"])
def test_an_edit_that_scales_cannot_follow_is_named_on_every_rank(stage, how):
    for told in ranks.run(2, edited_outside, stage, how, timeout=60):
        assert len(told) == 1 and "outside gathered()" in told[0] and "Precision(fp8=...)" in told[0]


def fragments_edited(stage):
    """Twice the masters, by the optimizer's own groups, on every rank."""
    model, optimizer, zero = start(stage)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.mul_(2.0)
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_edit_of_the_optimizers_parts_is_rounded_on_every_rank(stage):
    want = {
        name: in_8_bits(tensor.detach() * 2) if linear(name) else tensor.detach() * 2
        for name, tensor in models.build("gpt", **training.GPT).named_parameters()
    }
    for got in ranks.run(2, fragments_edited, stage, timeout=60):
        reference.assert_same(got, want)


def averaged(stage):
    model, optimizer, zero = start(stage)
    average = zero.average(0.5)
    for number in range(3):
        steps(model, optimizer, zero, [number])
        average.update()
    with average.swapped(), zero.gathered():
        mean = reference.weights(model)
    with zero.gathered():
        return mean, reference.weights(model)


@pytest.mark.full
def test_a_moving_average_is_of_masters_and_is_rounded_where_it_is_swapped_in():
    runs = [ranks.run(world, averaged, stage, timeout=60)[0] for world, stage in ((1, 0), (2, 1), (2, 3))]
    for mean, weights in runs:
        reference.assert_same(mean, runs[0][0])
        reference.assert_same(weights, runs[0][1])
    assert all(
        torch.equal(in_8_bits(mean[n]), mean[n]) and not torch.equal(mean[n], weights[n]) for n in mean if linear(n)
    )


def poisoned(stage):
    """An infinite master, then a step that skips what is no number."""
    model, optimizer, zero = start(stage, dataclasses.replace(FP8, nonfinite="raise"))
    with zero.gathered(), torch.no_grad():
        model.blocks[0].proj.weight[3, 3] = math.inf
    with zero.gathered():
        found = {name for name, tensor in reference.weights(model).items() if tensor.isnan().any()}
    try:
        steps(model, optimizer, zero, range(1), clip=None)
    except StateError as error:
        return found, str(error)
    except zeroshard.Error as error:
        return found, str(error)


def test_an_infinite_master_makes_a_tensor_of_nan_and_is_named():
    """8 bits know no infinity: as the largest number it would go unnoticed."""
    for found, told in ranks.run(2, poisoned, 3, timeout=60):
        assert found == {"blocks.0.proj.weight"} and "blocks.0.proj.weight" in told


# -------------------------------------------------------------------------------------------------------- checkpoints


def saved(folder, stage, precision):
    model, optimizer, zero = start(stage, precision)
    steps(model, optimizer, zero, range(2))
    zero.save(f"{folder}/saved")
    zero.export(f"{folder}/export")
    steps(model, optimizer, zero, range(2, 4))
    zero.save(f"{folder}/later")


def loaded(folder, stage, precision, after=()):
    model, optimizer, zero = start(stage, precision)
    zero.load(f"{folder}/saved")
    steps(model, optimizer, zero, after)
    zero.save(f"{folder}/again")
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(104)
@pytest.mark.parametrize("way", ["from-8-bits", "to-8-bits"])
def test_files_hold_fp32_masters_so_any_format_loads_into_any_other(way, tmp_path):
    """What is loaded and saved again are the same files; what modules compute with is rounded, or is not."""
    formats = [FP8, Precision()] if way == "from-8-bits" else [Precision(), FP8]
    ranks.run(2, saved, str(tmp_path), 3, formats[0], timeout=60)
    got = ranks.run(2, loaded, str(tmp_path), 1, formats[1], timeout=60)[0]
    done = ranks.command("ckpt", "diff", str(tmp_path / "saved"), str(tmp_path / "again"))
    assert done.returncode == 0, done.stdout + done.stderr
    exported = load_file(tmp_path / "export" / "model.safetensors")  # masters too, and not what 8 bits keep of them
    for name, tensor in got.items():
        rounds = linear(name) and way == "to-8-bits"
        assert torch.equal(tensor, in_8_bits(exported[name]) if rounds else exported[name]), name


def through_dcp(folder, stage):
    """Saved by torch's own checkpoints and loaded into a model of other weights."""
    model, optimizer, zero = start(1)
    steps(model, optimizer, zero, range(2))
    dcp.save({"app": zero}, checkpoint_id=folder)
    with zero.gathered():
        want = reference.weights(model)
    other, optimizer, zero = start(stage)
    dcp.load({"app": zero}, checkpoint_id=folder)
    with zero.gathered():
        reference.assert_same(reference.weights(other), want)


def test_torchs_checkpoints_hold_masters_too(tmp_path):
    ranks.run(2, through_dcp, str(tmp_path / "dcp"), 3, timeout=60)


# ---------------------------------------------------------------------------------------------------------- refused


def shard(precision, model=None, **settings):
    model = models.build("mlp") if model is None else model
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision=precision, **settings)


def frozen():
    model = models.build("mlp")
    next(model.parameters()).requires_grad_(False)
    return model


REFUSED = {
    "scaling": (lambda: Precision(fp8=True, scaling="block"), "(?s)each scale is.*'block'.*1x128, 128x128"),
    "nothing to scale": (lambda: Precision(scaling="1x128"), "(?s)each scale is.*fp8=False"),
    "a word": (lambda: Precision(fp8="yes"), "takes patterns"),
    "as the dtype": (lambda: Precision(param_dtype=torch.float8_e4m3fn), r"fp8=True\), which computes in the first"),
    "fp64": (lambda: Precision(param_dtype=torch.float64, fp8=True), "compute in 16 or 32 bits"),
    "bf16 masters": (lambda: Precision(master_dtype=torch.bfloat16, fp8=True), "fp32 masters"),
    "split masters": (lambda: Precision(param_dtype=torch.bfloat16, fp8=True, split_master=True), "whole fp32 masters"),
    "no such": (lambda: shard(Precision(fp8=["*.wieght"])), "(?s)fp8 matches no parameter.*wieght"),
    "none": (lambda: shard(FP8, nn.Sequential(nn.LayerNorm(4))), "no weight of a linear layer"),
    "frozen": (lambda: shard(Precision(fp8=["*weight"]), frozen()), "(?s)0.weight.*requires_grad=False"),
    "kept": (lambda: shard(Precision(param_dtype=torch.float32, fp8=["*"], keep=["0.*"])), "(?s)one that Precision.keep"),
    "own fp64": (lambda: shard(Precision(fp8=True), models.build("mlp").double()), "(?s)0.weight.*float64"),
    "one copy": (
        lambda: shard(FP8, stage=1, offload=Offload(parameters="shared"), comm=Comm(transport="shared")),
        "(?s)each rank.*shared",
    ),
    "own 8 bits": (
        lambda: shard(Precision(), nn.Sequential(nn.Linear(4, 4)).to(torch.float8_e4m3fn)), "(?s)fewer than 16.*fp8=True"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_rest_in_8_bits_is_refused(name):
    make, says = REFUSED[name]
    with pytest.raises(UserError, match=says):
        make()
