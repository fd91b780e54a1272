"""Optimizer states that rest in 16 bits: half the bytes, and the same bits at any stage, tier and number of ranks."""

import contextlib
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import emulated
import models
import ranks
import reference
import test_emulated_grid as grid
import training
import zeroshard
from zeroshard import Comm, Layout, Machine, Model, Offload, Precision
from zeroshard.arithmetic.narrow import _round_by, key_of, round_
from zeroshard.arithmetic.philox import bits16, bits16_at, philox_
from zeroshard.checkpoint.content import model_state, pieces
from zeroshard.checkpoint.manifest import Saved
from zeroshard.cli.reference import as_one, in_16_bits
from zeroshard.errors import StateError, UserError
from zeroshard.features.state_formats import elements
from zeroshard.layout.shard_dim import Among, Strips
from zeroshard.planner import predict_tiers
from zeroshard.planner.built import holding

BF16, FP32, SEED = torch.bfloat16, torch.float32, 7
BOTH = {"exp_avg": BF16, "exp_avg_sq": BF16}
ROUNDINGS = ("nearest", "stochastic")
HOST, FILES = {"optimizer": "cpu"}, dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")

# --------------------------------------------------------------------------------------------- drawn bits, and rounding

# Of the authors' own file, kat_vectors of Random123: counter, key, result.
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "result"), PUBLISHED)
def test_the_counter_generator_is_the_published_one(counter, key, result):
    words = torch.tensor([int(word, 16) for word in counter.split()])[:, None].repeat(1, 3)
    first, second = (int(word, 16) for word in key.split())
    assert philox_(words, (first, second)).tolist() == [[int(word, 16)] * 3 for word in result.split()]


def test_drawn_bits_are_those_of_an_elements_number():
    """Whatever part is drawn, in any order and with gaps; and torch's generators stand where they stood."""
    before = torch.get_rng_state()
    whole = bits16(1 << 63, 5, 0, 1000, torch.device("cpu"))
    for start, numel in ((0, 1), (7, 2), (8, 8), (13, 500), (999, 1)):
        assert bits16(1 << 63, 5, start, numel, torch.device("cpu")).equal(whole[start : start + numel])
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert bits16_at(1 << 63, 5, order).equal(whole[order])
    assert torch.get_rng_state().equal(before)
    assert whole.min() >= 0 and whole.max() < 1 << 16
    for other in (bits16(1 << 62, 5, 0, 1000, whole.device), bits16(1 << 63, 6, 0, 1000, whole.device)):
        assert (other == whole).sum() < 5


def test_the_key_tells_seed_state_and_parameter_apart():
    assert len({key_of(*each) for each in ((1, "a", "b"), (2, "a", "b"), (1, "b", "a"), (1, "a", "c"))}) == 4


@pytest.mark.parametrize("value", [1.0, 1 + 2**-8, -math.pi, 1e-40, 3.3e38, -1 - 2**-9 - 2**-20])
def test_a_number_is_rounded_away_from_zero_as_often_as_its_lower_half_says(value):
    """Of all 65,536 draws exactly that many: so the mean of all is the number itself. Others give the one before."""
    values = torch.full((1 << 16,), value)
    lower = int(values[0].view(torch.int32)) & 0xFFFF
    out = torch.empty(1 << 16, dtype=BF16)
    _round_by(out, values, torch.arange(1 << 16, dtype=torch.int32))
    away = out.float().abs() > values.abs()
    assert int(away.sum()) == lower
    assert out[~away].float().equal(values[~away]) if lower == 0 else out.unique().numel() == 2
    assert out.double().mean().item() == values[0].double().item()


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-39, 3.4028235e38, -3.4028235e38, 2.0**-133]


@pytest.mark.parametrize("draw", range(0, 1 << 16, 4369))
def test_what_16_bits_have_stays_whatever_is_drawn(draw):
    """All 65,536 of them, NaN as a NaN."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    out = torch.empty_like(every)
    _round_by(out, every.float(), torch.full((1 << 16,), draw, dtype=torch.int32))
    number = ~every.isnan()
    assert out[number].view(torch.int16).equal(every[number].view(torch.int16)) and out[~number].isnan().all()


@pytest.mark.parametrize("payload", [0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000])
def test_a_nan_stays_one_whatever_its_bits(payload):
    value = torch.tensor([payload, 0x3F800000], dtype=torch.int32).view(FP32)
    for draw in (0, 0xFFFF):
        out = torch.empty(2, dtype=BF16)
        _round_by(out, value, torch.full((2,), draw, dtype=torch.int32))
        assert out.isnan().tolist() == [True, False]


@pytest.mark.parametrize("step", [0, 3, 1 << 33])
def test_rounding_is_the_independent_references(step):
    """On numbers of all sizes, in pieces, and by scattered element numbers."""
    generator = torch.Generator().manual_seed(step % 97)
    wide = torch.randn(3000, generator=generator) * 10.0 ** torch.randint(-44, 38, (3000,), generator=generator)
    values = torch.cat([torch.tensor(SPECIAL), wide])
    want = in_16_bits(values, SEED, "exp_avg", "a.weight", step)
    key, out = key_of(SEED, "exp_avg", "a.weight"), torch.empty(values.numel(), dtype=BF16)
    for start, stop in ((0, 5), (5, 1200), (1200, values.numel())):
        round_(out[start:stop], values[start:stop], key, step, start)
    reference.assert_same({"": out.float()}, {"": want})
    order = torch.randperm(values.numel(), generator=generator)
    round_(out, values[order], key, step, order)
    reference.assert_same({"": out.float()}, {"": want[order]})
    nearest = in_16_bits(values, SEED, "exp_avg", "a.weight", None)
    assert not nearest.equal(want)


@pytest.mark.parametrize(("shape", "cut"), [((6, 4), 0), ((6, 4), 1), ((2, 4, 3), 1), ((2, 3, 8), 2)])
@pytest.mark.parametrize("parts", [1, 2])
def test_an_elements_number_is_its_place_in_the_whole_tensor(shape, cut, parts):
    """On whichever dimension tensor parallelism cuts it."""
    whole = torch.arange(math.prod(shape)).view(shape)
    for part, mine in enumerate(whole.chunk(parts, cut)):
        flat = mine.reshape(-1)
        among = Among(shape, part * flat.numel(), Strips.of(shape, cut, parts))
        for start, stop in ((0, flat.numel()), (1, 5), (3, 3)):
            found = elements(among, start, stop, torch.device("cpu"))
            numbers = found if isinstance(found, torch.Tensor) else torch.arange(found, found + stop - start)
            assert numbers.equal(flat[start:stop])


# ------------------------------------------------------------------------------------------------------ in the engine


def sgd(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def muon(params):
    matrices, others = ([p for p in params if (p.dim() == 2) is two] for two in (True, False))
    return [torch.optim.Muon(matrices, lr=1e-2), sgd(others)]


MADE = {"AdamW": training.ADAMW, "SGD": sgd, "Muon": muon}
NAMES = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",), "Muon": ("momentum_buffer",)}
STEPS = 3


def built(kind):
    torch.manual_seed(SEED)
    model = models.build("mlp")
    made = MADE[kind]([*model.parameters()])
    return model, made if isinstance(made, list) else [made]


def batches(step, index):
    return models.batch("mlp", step, index)


def loss(model, batch):
    return models.loss("mlp", model, batch)


def plain(kind, rounding, world):
    """Weights and states of plain PyTorch, which rounds its states after each step."""
    model, optimizers = built(kind)
    names = {param: name for name, param in model.named_parameters()}

    def rounded(step):
        for param, state in (each for optimizer in optimizers for each in optimizer.state.items()):
            for key in NAMES[kind]:
                drawn = step if rounding == "stochastic" else None
                state[key].copy_(in_16_bits(state[key], SEED, key, names[param], drawn))

    reference.accumulate(
        model, as_one(optimizers), batches, loss, world, steps=STEPS, after_step=rounded
    )  # fmt: skip
    return reference.weights(model)


def sharded(kind, rounding, stage, **settings):
    model, optimizers = built(kind)
    precision = Precision(states={"*": BF16}, rounding=rounding)
    zero = zeroshard.shard(
        model, optimizers, stage=stage, precision=precision, **{"layout": training.SMALL} | settings
    )  # fmt: skip
    return model, optimizers, zero


def trained(model, optimizers, zero, first=0, steps=STEPS):
    one = as_one(optimizers)
    reference.loop(model, one, batches, loss, ranks.rank(), ranks.world(), steps=steps, first_step=first)
    with zero.gathered():
        return reference.weights(model)


def equal(kind, rounding, stages, cases, folder):
    want = plain(kind, rounding, ranks.world())
    for stage in stages:
        for case in cases:
            offload = Offload(**case, path=folder if "nvme" in case.values() else None)
            reference.assert_same(trained(*sharded(kind, rounding, stage, offload=offload)), want)


@pytest.mark.row(111)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_stage_tier_and_number_of_ranks_has_the_bits_of_plain_pytorch(world, kind, rounding, tmp_path):
    """Of plain PyTorch that rounds its states after each step; elements that no step changes stay as they are."""
    ranks.run(world, equal, kind, rounding, range(4), [{}, HOST, FILES], str(tmp_path), timeout=120)


def in_backward(folder):
    want = plain("AdamW", "stochastic", ranks.world())
    for stage in range(4):
        found = trained(*sharded("AdamW", "stochastic", stage, optimizer_in_backward=True))
        reference.assert_same(found, want)
    for comm in (Comm(replicas=2), Comm(replicas=2, optimizer="all"), Comm(hosts=2)):
        reference.assert_same(trained(*sharded("AdamW", "stochastic", 2, comm=comm)), want)


@pytest.mark.row(111)
def test_replicas_hosts_and_the_optimizer_in_backward_have_these_bits(tmp_path):
    ranks.run(4, in_backward, str(tmp_path), timeout=120)


def staged(rounding, folder):
    """On an emulated accelerator: weights with states on the device, and beside it and stepped there."""
    found = []
    for tiers in ({}, HOST, {"optimizer": "nvme"}, {**HOST, "step": "host"}):
        model = grid.build()
        torch.manual_seed(SEED)
        optimizer = grid.adam(model.parameters())
        zero = zeroshard.shard(
            model, optimizer, stage=3, layout=Layout(bucket_mib=0.0005),
            precision=Precision(param_dtype=BF16, states=BOTH, rounding=rounding),
            offload=Offload(**tiers, path=folder if "nvme" in tiers.values() else None),
        )  # fmt: skip
        weights = grid.history_and_weights(model, optimizer, zero)[1]
        found.append({name: weight.cpu() for name, weight in weights.items()})
        states = {state: nbytes for held in zero.ledger().tiers.values() for state, nbytes in held.items() if nbytes}
        assert states["exp_avg"] * 2 == states["exp_avg_sq"] * 2 == states["master"]
        assert "decoded" not in states
    return found


@pytest.mark.row(111)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_device_that_steps_states_beside_it_has_these_bits(rounding, tmp_path):
    """Two bytes of each state cross the bus, and not four; the host's step has the same bits on this device."""
    for found in emulated.run(2, staged, rounding, str(tmp_path), timeout=250):
        for each in found[1:]:
            reference.assert_same(each, found[0])


# ---------------------------------------------------------------------------------------- parameters without masters

DRAWN = {"param_dtype": BF16, "master_dtype": BF16, "rounding": "stochastic", "cast_inputs": True}


def plain_parameters(states, world, steps=STEPS):
    """Weights of plain PyTorch that steps in fp32, and rounds parameters and states at random after each step."""
    model, _ = built("AdamW")
    model.register_forward_pre_hook(lambda _, given: tuple(each.to(BF16) for each in given))
    names, made, turns = [name for name, _ in model.named_parameters()], [], {}

    def rounded(name, master):
        turns[name] = turns.get(name, -1) + 1
        step = turns[name] - 1 if turns[name] else None  # as it is made, to nearest
        return master.copy_(in_16_bits(master, SEED, "parameter", name, step))

    def after(step):
        for name, kept in zip(names, made[0].state.values(), strict=True):
            for key in BOTH if states else ():
                kept[key].copy_(in_16_bits(kept[key], SEED, key, name, step))

    def make(masters):
        made.append(training.ADAMW(masters))
        return made[0]

    reference.accumulate_with_masters(
        model, make, batches, loss, world, dtype=BF16, steps=steps, rounded=rounded, after_step=after
    )  # fmt: skip
    return reference.weights(model)


def sharded_parameters(states, stage, **settings):
    model, optimizers = built("AdamW")
    precision = Precision(**DRAWN, states=states)
    zero = zeroshard.shard(model, optimizers, stage=stage, precision=precision, **{"layout": training.SMALL} | settings)
    return model, optimizers, zero


def equal_parameters(states, folder):
    want = plain_parameters(states, ranks.world())
    for stage in range(4):
        for case in ({}, HOST, FILES):
            offload = Offload(**case, path=folder if "nvme" in case.values() else None)
            found = sharded_parameters(states, stage, offload=offload)
            reference.assert_same(trained(*found), want)
            tiers = {tier: {s: n for s, n in held.items() if n} for tier, held in found[2].ledger().tiers.items()}
            assert {tier: held for tier, held in tiers.items() if held} == predict_tiers(found[2])
            assert "master" not in found[2].ledger().held
        reference.assert_same(trained(*sharded_parameters(states, stage, optimizer_in_backward=True)), want)
    for comm in [Comm(replicas=2), Comm(replicas=2, optimizer="all"), Comm(hosts=2)] * (ranks.world() == 4):
        reference.assert_same(trained(*sharded_parameters(states, 3, comm=comm)), want)


@pytest.mark.row(111)
@pytest.mark.parametrize("states", [{}, {"*": BF16}], ids=["fp32-states", "bf16-states"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_parameters_without_masters_are_rounded_at_random_with_these_bits(world, states, tmp_path):
    """At any stage and tier, with replicas and hosts, and in backward; planned to the byte, and no master rests."""
    ranks.run(world, equal_parameters, states, str(tmp_path), timeout=120)


def staged_parameters(folder):
    """On an emulated accelerator, whose parameters and optimizer states rest in different memories."""
    found = []
    for tiers in ({}, HOST, dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme"), {**HOST, "step": "host"}):
        model = grid.build()
        torch.manual_seed(SEED)
        optimizer = grid.adam(model.parameters())
        zero = zeroshard.shard(
            model, optimizer, stage=2, layout=Layout(bucket_mib=0.0005), precision=Precision(**DRAWN, states=BOTH),
            offload=Offload(**tiers, path=folder if "nvme" in tiers.values() else None),
        )  # fmt: skip
        weights = grid.history_and_weights(model, optimizer, zero)[1]
        found.append({name: weight.cpu() for name, weight in weights.items()})
    return found


@pytest.mark.row(111)
def test_a_device_and_its_host_round_parameters_alike(tmp_path):
    for found in emulated.run(2, staged_parameters, str(tmp_path), timeout=250):
        for each in found[1:]:
            reference.assert_same(each, found[0])


def test_small_updates_of_parameters_are_not_lost():
    """1/4096 less in each of 64 steps: rounded to nearest, 1.0 stays; at random, the mean of all follows."""
    moved = {}
    for rounding in ROUNDINGS:
        torch.manual_seed(SEED)
        model = nn.Linear(64, 64, bias=False).to(BF16)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-12)
        zero = zeroshard.shard(model, optimizer, precision=Precision(master_dtype=BF16, rounding=rounding))
        for _ in range(64):
            model(torch.eye(64, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            moved[rounding] = 1 - model.weight.float().mean().item()
    assert moved["nearest"] == 0
    # Random: the mean of 4,096 elements, of which each draws 64 times, is within a few percent of what all of them lose.
    assert abs(moved["stochastic"] - 64 / 4096) < 64 / 4096 * 0.05


class Interrupted(torch.optim.AdamW):
    """Raises once it has stepped, the first time."""

    elementwise = True
    raised = True

    def step(self, closure=None):
        super().step(closure)
        if not self.raised:
            self.raised = True
            raise ArithmeticError("after the step")


@pytest.mark.parametrize("states", [{}, {"exp_avg": BF16}, {"*": BF16}], ids=["fp32-states", "one", "bf16-states"])
def test_a_step_that_raised_leaves_weights_and_states_as_far_as_each_other(states):
    """As one of plain PyTorch's that raises after its last update, which is done."""
    found = []
    for raises in (False, True):
        torch.manual_seed(SEED)
        model = nn.Linear(8, 8).to(BF16)
        optimizer = Interrupted(model.parameters(), lr=0.1)
        zero = zeroshard.shard(model, optimizer, stage=2, precision=Precision(**DRAWN, states=states))
        optimizer.raised = not raises
        model(torch.ones(2, 8, dtype=BF16)).float().square().sum().backward()
        with pytest.raises(ArithmeticError) if raises else contextlib.nullcontext():
            optimizer.step()
        zero.unshard()
        kept = [value for state in optimizer.state.values() for value in state.values()]
        found.append([*model.parameters(), *kept])
    assert len(found[0]) == 8 and all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_what_is_unfrozen_is_saved_as_computed_with_in_fp32_and_loads_as_the_rest(tmp_path):
    torch.manual_seed(SEED)
    for number, how in enumerate((DRAWN, {"param_dtype": BF16, "master_dtype": BF16})):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(BF16)
        model[1].requires_grad_(requires_grad=bool(number))
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zeroshard.shard(model, optimizer, precision=Precision(**how))
        if number:
            zero.load(tmp_path / "saved")
            assert {v.dtype for s in optimizer.state.values() for k, v in s.items() if k != "step"} == {BF16}
        model[1].requires_grad_()
        model(torch.ones(2, 8, dtype=BF16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not number:
            zero.save(tmp_path / "saved")
            told = json.loads((tmp_path / "saved" / "manifest.json").read_text())["manifest"]
            assert {each[0] for each in told["narrow"]} == {name for name, _ in model.named_parameters()}


def half_of_parameters(folder, states, stage, case, first, path):
    offload = Offload(**case, path=folder if "nvme" in case.values() else None)
    found = sharded_parameters(states, stage, offload=offload)
    if first:
        trained(*found, steps=2)
        found[2].save(path)
    else:
        torch.manual_seed(99)
        found[2].load(path)
    return trained(*found, 2, 2)


@pytest.mark.row(111)
@pytest.mark.parametrize("states", [{}, {"*": BF16}], ids=["fp32-states", "bf16-states"])
def test_a_run_of_parameters_without_masters_goes_on_at_any_stage_and_tier(states, tmp_path):
    """Its checkpoint has the 16 bits, and says that they are computed with in fp32."""
    path = str(tmp_path / "saved")
    want = ranks.run(2, half_of_parameters, str(tmp_path), states, 1, FILES, True, path)[0]
    for stage, case in ((3, {}), (0, HOST)):
        for got in ranks.run(2, half_of_parameters, str(tmp_path), states, stage, case, False, path):
            reference.assert_same(got, want)
    told = json.loads((tmp_path / "saved" / "manifest.json").read_text())["manifest"]
    assert {each[4] for each in told["fragments"] if each[1] == "value"} == {"BF16"}
    assert {each[2] for each in told["narrow"] if each[1] == "value"} == {"F32"}


@pytest.mark.row(111)
def test_parameters_with_and_without_masters_load_into_each_other(tmp_path, caplog):
    """Masters are rounded to nearest even, which the log says; the states of both are fp32."""
    caplog.set_level("INFO", logger="zeroshard")
    whole, drawn = Precision(param_dtype=BF16, cast_inputs=True), Precision(**DRAWN)
    held = {}
    for number, precision in enumerate((whole, drawn, whole)):
        model, optimizers = built("AdamW")
        zero = zeroshard.shard(model, optimizers, stage=2, precision=precision)
        if number:
            zero.load(tmp_path / f"{number - 1}")
        trained(model, optimizers, zero, steps=0 if number else 2)
        zero.save(tmp_path / f"{number}")
        with Saved.open(tmp_path / f"{number}") as opened:
            held[number] = {key: opened.interval(key, 0, parts[-1].stop) for key, parts in opened.cut.items()}
        assert caplog.text.count("rounded to nearest even: parameters to torch.bfloat16") == (number > 0)
    for (name, state), value in held[0].items():
        want = value.to(BF16) if state == "value" else value
        reference.assert_same({name: held[1][name, state]}, {name: want})
        reference.assert_same({name: held[2][name, state]}, {name: want.float()})


# ------------------------------------------------------------------------------------------------ held, saved and loaded


def peaks(states):
    model, optimizers = built("AdamW")
    zero = zeroshard.shard(model, optimizers, stage=2, precision=Precision(states=states), layout=training.SMALL)
    trained(model, optimizers, zero)
    held = {
        tier: {s: n for s, n in each.items() if n} for tier, each in zero.ledger().tiers.items() if any(each.values())
    }
    assert held == predict_tiers(zero)
    own = [  # where a rank has padding alone, its optimizer has no states
        bucket.updated[1] - bucket.updated[0]
        for bucket in zero._engine.buckets
        if any(slot.within(*bucket.updated).numel for slot in bucket.plan.slots)
    ]
    return held["device"], zero.ledger().phases["step"].total, own


@pytest.mark.row(111)
@pytest.mark.parametrize("world", [1, 3])
def test_half_the_bytes_rest_and_one_bucket_is_decoded_at_a_time(world):
    """Two bytes an element with the bucket's padding; in a step, four for each state of the largest bucket on top."""
    for held, peak, own in ranks.run(world, peaks, BOTH):
        assert held["exp_avg"] == held["exp_avg_sq"] == 2 * sum(own)
        assert peak == sum(held.values()) + 2 * 4 * max(own)


@pytest.mark.row(111)
def test_a_state_that_is_not_named_stays_as_it_was():
    (one,) = ranks.run(1, peaks, {"exp_avg_sq": BF16})
    held, peak, own = one
    assert (held["exp_avg"], held["exp_avg_sq"]) == (4 * sum(own), 2 * sum(own))
    assert peak == sum(held.values()) + 4 * max(own)


def saved(folder, stage, states, rounding, case):
    model, optimizers = built("AdamW")
    torch.manual_seed(SEED + 1 if ranks.rank() else SEED)
    offload = Offload(**case, path=folder if "nvme" in case.values() else None)
    precision = Precision(states=states, rounding=rounding)
    zero = zeroshard.shard(model, optimizers, stage=stage, precision=precision, offload=offload)
    return model, optimizers, zero


def first_half(folder, *settings):
    model, optimizers, zero = saved(folder, *settings)
    trained(model, optimizers, zero, steps=2)
    zero.save(f"{folder}/saved")
    return trained(model, optimizers, zero, 2, 2)


def second_half(folder, *settings):
    model, optimizers, zero = saved(folder, *settings)
    torch.manual_seed(99)  # the checkpoint's seed counts
    zero.load(f"{folder}/saved")
    zero.save(f"{folder}/again")
    return trained(model, optimizers, zero, 2, 2)


def moments(folder):
    with Saved.open(Path(folder)) as opened:
        return {
            f"{name} {state}": opened.interval((name, state), 0, parts[-1].stop)
            for (name, state), parts in opened.cut.items()
            if state != "value"
        }


@pytest.mark.row(111)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 0, {}), (2, 3, FILES)), ((1, 3, HOST), (1, 1, {})), ((4, 2, FILES), (4, 0, {}))],
    ids=["to-files", "to-device", "from-files"],
)
def test_a_run_goes_on_at_any_stage_and_tier(before, after, rounding, tmp_path):
    """The checkpoint has the 16 bits, and where bits are drawn the number of steps; another rank's seed counts nothing."""
    (world, *here), (_, *there) = before, after
    want = ranks.run(world, first_half, str(tmp_path), here[0], BOTH, rounding, here[1])[0]
    for got in ranks.run(world, second_half, str(tmp_path), there[0], BOTH, rounding, there[1]):
        reference.assert_same(got, want)
    told = json.loads((tmp_path / "saved" / "manifest.json").read_text())["manifest"]
    assert told["version"] == 5 and ("steps" in told["optimizers"][0]) is (rounding == "stochastic")
    assert {each[4] for each in told["fragments"] if each[1] in BOTH and each[2] is not None} == {"BF16"}
    assert {tensor.dtype for tensor in moments(tmp_path / "saved").values()} == {BF16}
    reference.assert_same(moments(tmp_path / "again"), moments(tmp_path / "saved"))


@pytest.mark.row(111)
def test_a_checkpoint_of_either_format_loads_into_the_other_and_says_what_it_rounds(tmp_path, caplog):
    """fp32 states are rounded to nearest even; those of 16 bits are fp32 numbers, whichever optimizer has not stepped."""
    caplog.set_level("INFO", logger="zeroshard")
    ranks.run(2, first_half, str(tmp_path), 2, {}, "nearest", {})
    wide = moments(tmp_path / "saved")
    second_half(str(tmp_path), 1, BOTH, "stochastic", {})
    assert caplog.text.count("rounded to nearest even: exp_avg to torch.bfloat16, exp_avg_sq to torch.bfloat16") == 1
    narrow = moments(tmp_path / "again")
    reference.assert_same(narrow, {key: value.to(BF16) for key, value in wide.items()})

    caplog.clear()
    (tmp_path / "saved").rename(tmp_path / "wide"), (tmp_path / "again").rename(tmp_path / "saved")
    second_half(str(tmp_path), 3, {}, "nearest", {})
    assert "rounded" not in caplog.text
    reference.assert_same(moments(tmp_path / "again"), {key: value.float() for key, value in narrow.items()})
    assert json.loads((tmp_path / "again" / "manifest.json").read_text())["manifest"]["version"] == 1


def kept(folder):
    """Replicas that compare what they hold, and a save behind the training: bytes of its copies, counted and predicted."""
    model, optimizers, zero = sharded("AdamW", "stochastic", 2, comm=Comm(replicas=2))
    trained(model, optimizers, zero)
    zero.check_replicas()
    zero.save(f"{folder}/behind", asynchronous=True).wait()
    own = sum(piece.tensor.numel() * piece.tensor.itemsize for piece in pieces(model_state(zero._engine)))
    return own, holding(zero).snapshot(), moments(f"{folder}/behind")


def test_replicas_hold_the_same_and_a_save_behind_the_training_has_16_bits(tmp_path):
    for copied, predicted, found in ranks.run(2, kept, str(tmp_path)):
        assert copied == predicted
        assert {each.dtype for each in found.values()} == {BF16}


def test_states_from_before_shard_are_rounded_and_unshard_gives_fp32_back():
    model, (optimizer,) = built("AdamW")
    loss(model, batches(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    want = {name: optimizer.state[param]["exp_avg"].to(BF16).float() for name, param in model.named_parameters()}
    zero = zeroshard.shard(model, optimizer, stage=2, precision=Precision(states=BOTH, rounding="stochastic"))
    zero.unshard()
    reference.assert_same({n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}, want)


def test_states_of_parameters_that_keep_their_dtype_are_left_alone():
    """`keep` says so of all states."""
    model, optimizers = built("AdamW")
    kept = next(name for name, _ in model.named_parameters())
    precision = Precision(param_dtype=BF16, cast_inputs=True, keep=[kept], states=BOTH)
    zero = zeroshard.shard(model, optimizers, stage=2, precision=precision)
    narrow = {
        slot.name: bucket.tiers["optimizer"].on_demand for bucket in zero._engine.buckets for slot in bucket.plan.slots
    }
    assert narrow == {name: name != kept for name, _ in model.named_parameters()}


def test_what_is_unfrozen_later_rests_in_16_bits_too():
    model, optimizers = built("AdamW")
    first = next(model.parameters())
    first.requires_grad_(False)
    zero = zeroshard.shard(model, optimizers, stage=3, precision=Precision(states=BOTH))
    trained(model, optimizers, zero)
    before = zero.ledger().held["exp_avg"]
    first.requires_grad_(True)
    trained(model, optimizers, zero, STEPS)
    bucket = first._zeroshard.bucket
    assert zero.ledger().held["exp_avg"] == before + 2 * (bucket.updated[1] - bucket.updated[0])


# ------------------------------------------------------------------------------------------------- planned, and refused


def planned_job():
    return training.job("mlp")


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_plan_of_a_job_counts_16_bits(rounding):
    precision = Precision(states=BOTH, rounding=rounding)
    plans = [
        zeroshard.plan(planned_job, Machine(ranks=2), stage=2, precision=each, layout=training.SMALL).stages[0]
        for each in (Precision(), precision)
    ]
    wide, narrow = (sum(plan.states[state] for state in BOTH) for plan in plans)
    assert 2 * narrow >= wide > narrow  # the optimizer's own fp32 states have no padding


def with_momentum():
    return {**training.job("mlp"), "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)}


def test_a_plan_of_a_job_asks_its_own_optimizer_for_the_names_of_states():
    precision = Precision(states={"momentum_buffer": BF16})
    (plan,) = zeroshard.plan(with_momentum, Machine(ranks=2), stage=2, precision=precision).stages
    assert plan.states["momentum_buffer"]


def refused(precision, optimizer=training.ADAMW, **settings):
    model = models.build("mlp")
    made = None if optimizer is None else optimizer(model.parameters())
    return zeroshard.shard(model, made, stage=2, precision=precision, **settings)


def stepped(act):
    model, (optimizer,) = built("AdamW")
    zero = zeroshard.shard(model, optimizer, stage=2, precision=Precision(states=BOTH))
    loss(model, batches(0, 0)).backward()
    return act(zero, optimizer)


class Strange(torch.optim.AdamW):
    """Needs a closure."""

    elementwise = True

    def step(self, closure):
        return super().step(closure)


ALL = Precision(states={"*": BF16})
DRAWN_PARAMETERS = Precision(param_dtype=BF16, master_dtype=BF16, rounding="stochastic")
REFUSED = {
    "no table": (lambda: Precision(states=BF16), 'Precision(states={"exp_avg": torch.bfloat16'),
    "a format": (lambda: Precision(states={"exp_avg": torch.float16}), "torch.bfloat16 or torch.float32"),
    "8 bits": (lambda: Precision(states={"exp_avg": torch.int8}), "Precision.states['exp_avg']"),
    "a word": (lambda: Precision(states={"exp_avg": "bf16"}), "Precision(states={'exp_avg': torch.bfloat16})"),
    "a rounding": (lambda: Precision(states=BOTH, rounding="up"), "Precision.rounding"),
    "nothing to round": (lambda: Precision(rounding="stochastic"), "none is"),
    "fp32 alone": (lambda: Precision(states={"*": FP32}, rounding="stochastic"), "none is"),
    "a name": (lambda: refused(Precision(states={"exp_avgs": BF16})), "['exp_avg', 'exp_avg_sq']"),
    "a count": (lambda: refused(Precision(states={"step": BF16})), "'step', which is torch.float32 of shape ()"),
    "rows and columns": (
        lambda: refused(Precision(states={"row_var": BF16}), torch.optim.Adafactor), "torch.float32 of shape (5, 1)",
    ),
    "no states": (lambda: refused(ALL, torch.optim.SGD), "where: SGD"),
    "no optimizer": (lambda: refused(ALL, None), "no optimizer"),
    "all at once": (lambda: refused(ALL, torch.optim.LBFGS), "LBFGS"),
    "a closure": (lambda: refused(ALL, Strange), "could not be asked which states it keeps"),
    "16-bit masters": (
        lambda: refused(Precision(param_dtype=BF16, master_dtype=BF16, states=BOTH)), "updates in float32",
    ),
    "shapes": (
        lambda: zeroshard.plan(Model(params="1B"), Machine(ranks=2), precision=DRAWN_PARAMETERS),
        "Precision.master_dtype: for jobs only",
    ),
    "auto": (
        lambda: refused(DRAWN_PARAMETERS, offload=Offload("auto", gpu_mem="1GB", host_mem="1GB")),
        'Offload("auto") counts parameters in the dtype in which they are updated',
    ),
    "beside keep": (
        lambda: refused(Precision(param_dtype=BF16, states=BOTH, keep=["*.bias"]), offload=Offload("auto", gpu_mem="1GB", host_mem="1GB")),
        "in the same formats",
    ),
    "fp32 parameters": (
        lambda: refused(Precision(master_dtype=BF16, rounding="stochastic")), "rounded at random only where",
    ),
    "a name in fp32": (lambda: refused(Precision(states={"exp_avgs": FP32})), "['exp_avg', 'exp_avg_sq']"),
    "an average": (lambda: refused(DRAWN_PARAMETERS).average(0.99), "an average moves by less"),
    "DCP": (lambda: stepped(lambda zero, _: zero.state_dict()), "in 16 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_rest_in_16_bits_is_refused_by_name(name):
    make, says = REFUSED[name]
    with pytest.raises(UserError) as raised:
        make()
    assert says in str(raised.value) and "instead" in str(raised.value)


def test_a_compiled_step_is_refused():
    def act(zero, optimizer):
        torch.compile(optimizer.step, backend="eager")()

    with pytest.raises(StateError, match="stepped one after the other"):
        stepped(act)
