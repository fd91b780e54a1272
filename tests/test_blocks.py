"""States of 8 bits with a scale for each block: cut between blocks, equal bits, saved and loaded at any number of ranks."""

from __future__ import annotations

import json

import pytest
import torch

import models
import ranks
import training
import zeroshard
from test_checkpoint import joined, same
from test_optimizer import check
from test_whole import digest, held
from zeroshard import Layout, Offload
from zeroshard.errors import CheckpointError, UserError
from zeroshard.planner.built import predict_tiers
from zeroshard.planner.simulate import simulate

SIZES = (7, 256, 12, 5)  # 1,792 and 3,072 elements are multiples of 256; 12, 5 and 60 are not


class Adam8(torch.optim.Optimizer):
    """A user's own: Adam whose moments are codes of 8 bits, with a scale for each 256 elements, and a table of codes."""

    block = 256

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"step": torch.tensor(0.0), "table": torch.linspace(0, 1, 16) ** 2}
                    for name in ("m", "v"):
                        state[name] = torch.full_like(param, 128, dtype=torch.uint8)
                        state[f"{name}_scale"] = torch.zeros(-(-param.numel() // 256))
                state["step"] += 1
                moments = {}
                for name, value, rate in (("m", param.grad, 0.9), ("v", param.grad.square(), 0.99)):
                    old = unpacked(state[name], state[f"{name}_scale"])
                    moments[name] = old.lerp(value.reshape(-1), 1 - rate)
                    pack(moments[name], state[name], state[f"{name}_scale"])
                update = (moments["m"] / (moments["v"].clamp(min=0).sqrt() + 1e-8)).clamp(-5, 5)
                param.sub_(update.view_as(param) * state["table"][-1], alpha=group["lr"])


def unpacked(codes, scales):
    flat = codes.reshape(-1).float() - 128
    return flat * scales.repeat_interleave(256)[: flat.numel()] / 127


def pack(values, codes, scales):
    for at, block in enumerate(values.split(256)):
        scales[at] = block.abs().max()
        codes.view(-1)[256 * at : 256 * at + block.numel()] = (block / scales[at].clamp(min=1e-20) * 127).round() + 128


def trained_in_blocks(engine, layout, precision=None):
    model = models.build("mlp", sizes=SIZES)
    optimizer = Adam8(model.parameters())
    engine.shard(model, optimizer, layout=layout, precision=precision)
    engine.train(model, optimizer, range(3))
    return model


@pytest.mark.parametrize(
    ("world", "how"),
    [
        *(
            pytest.param(world, {}, marks=[pytest.mark.full] * (world in (1, 4)), id=f"{world}")
            for world in (1, 2, 3, 4)
        ),
        pytest.param(3, {"bounds": "model", "align": 1}, marks=pytest.mark.full, id="3-bounds-of-the-model"),
    ],
)
def test_states_of_blocks_equal_plain_torch(world, how):
    """At stages 0-3 on 1 to 4 ranks, whatever the bounds: no block is cut, so each has the scale it has anywhere."""
    check(
        trained_in_blocks,
        Layout(**how) if how else None,
        stages=(1, 3) if how else (0, 1, 2, 3),
        world=world,
        state=False,
    )


# --------------------------------------------------------------------------------------------------------- checkpoints


def steps(stage, layout, path, numbers, load=None, offload=None, sizes=SIZES):
    """Four micro-batches a step, however many ranks there are."""
    model = models.build("mlp", sizes=sizes)
    optimizer = Adam8(model.parameters())
    settings = None if offload is None else Offload(optimizer="nvme", path=offload)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout, offload=settings)
    if load is not None:
        assert zero.load(load).skipped == []
    each = 4 // ranks.world()
    for number in numbers:
        for turn in range(each):
            (
                models.loss("mlp", model, models.batch("mlp", number, turn * ranks.world() + ranks.rank())) / each
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.save(path)
    assert held(zero) == predict_tiers(zero)
    return None if offload else digest(model, zero)


@pytest.mark.full
def test_checkpoints_of_blocks_load_at_any_ranks_and_stage(tmp_path):
    """Codes, scales and tables: four ranks, then two with the states in files, then one: the bits of never stopping."""
    straight = ranks.run(4, steps, 3, None, tmp_path / "straight", range(4))
    ranks.run(4, steps, 2, None, tmp_path / "a", range(1))
    ranks.run(2, steps, 3, Layout(bounds="model"), tmp_path / "b", range(1, 2), tmp_path / "a", str(tmp_path))
    ranks.run(3, steps, 0, None, tmp_path / "c", range(0), tmp_path / "b")
    resumed = ranks.run(1, steps, 1, Layout(whole=["*"]), tmp_path / "d", range(2, 4), tmp_path / "c")
    same(resumed, straight)
    found = joined(straight)
    assert found["2.weight", "m"].dtype == torch.uint8 and found["2.weight", "m"].numel() == 3072
    assert [found[name, "v_scale"].numel() for name in ("0.weight", "2.weight", "4.weight")] == [7, 12, 1]
    assert found["2.weight", "table"].numel() == 16
    manifest = json.loads((tmp_path / "straight" / "manifest.json").read_text())
    manifest = manifest.get("manifest", manifest)
    assert ["2.weight", "m_scale", 256] in manifest["grains"]


def test_a_manifest_that_lies_of_blocks_is_refused(tmp_path):
    from zeroshard.checkpoint.manifest import check_loads

    steps(0, None, tmp_path / "saved", range(1))
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    manifest = manifest.get("manifest", manifest)
    check_loads(tmp_path, manifest)
    for grains in (
        [["2.weight", "m_scale", 128]],
        [["2.weight", "m_scale", 1]],
        [["2.weight", "value", 2]],
        [[1, 2, 3]],
        7,
    ):
        with pytest.raises(CheckpointError):
            check_loads(tmp_path, {**manifest, "grains": grains})


# ------------------------------------------------------------------------------------------------------------- planner


def of_blocks():
    return training.job("mlp", Adam8, sizes=SIZES)


def what_is_held(stage):
    model = models.build("mlp", sizes=SIZES)
    optimizer = Adam8(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage)
    predicted = predict_tiers(zero)
    models.loss("mlp", model, models.batch("mlp", 0, ranks.rank())).backward()
    optimizer.step()
    optimizer.zero_grad()
    return held(zero), predicted


@pytest.mark.full
def test_codes_and_scales_are_planned_to_the_byte():
    """What a built engine predicts, and what a simulated rank holds, is what is held: scales of short blocks too."""
    for stage in (0, 1, 3):
        for rank, (ledger, predicted) in enumerate(ranks.run(3, what_is_held, stage)):
            assert ledger == predicted
            run = simulate(of_blocks, ranks=3, rank=rank, stage=stage)
            assert {state: n for state, n in run.ledger.held.items() if n} == ledger["device"]
    plan = zeroshard.plan(of_blocks, stage=0).stages[0]
    assert (plan.states["m"], plan.states["m_scale"]) == (5197, 4 * (7 + 1 + 12 + 1 + 1 + 1))


def dcp():
    model = models.build("mlp", sizes=SIZES)
    with pytest.raises(UserError, match=r"no place for states with one number for a block(?s:.*)zero\.save"):
        zeroshard.shard(model, Adam8(model.parameters())).state_dict()


def test_dcp_refuses_states_of_blocks_by_name():
    ranks.run(2, dcp)
