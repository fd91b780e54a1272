"""Steps of states in host memory beside an emulated accelerator: what host operations touch, and edits that the device
tells."""

from __future__ import annotations

import pytest
import torch

import emulated
import ranks
import reference
import zeroshard
from emulated.host import Touched
from test_emulated_grid import adam, batch, build, loss
from test_emulated_offload import TIERS, backward, sharded
from zeroshard import Layout, Offload, Precision

ADAMW = 28  # bytes an element: parameter, gradient and two moments read, all but the gradient written
EQUAL = 4  # weights and the masters' cast, read to compare them


def touched(stage, dtype, tiers, step, edits):
    """Bytes that the host's operations touch in a third step, by the file, and an element of what AdamW updates."""
    model, optimizer, zero = sharded(stage, dtype, Offload(**tiers, step=step))
    for number in range(3):
        with Touched() as found:
            backward(model, number)
            if edits:
                with torch.no_grad():
                    model[1][0].weight.data[0] = number  # which no version counter shows
            optimizer.step()
        optimizer.zero_grad()
    fused = sum(nbytes for (_, name), nbytes in found.nbytes.items() if name == "_fused_adamw_")
    assert fused or step == "device"
    numel = fused / ADAMW or sum(bucket.shard_numel(zero.rank) for bucket in zero.partition.buckets)
    by_file = {}
    for (site, name), nbytes in found.nbytes.items():
        if not site.startswith(("test_", "comm/")) and name != "empty":  # the batch, and words between ranks
            by_file[site.partition(":")[0]] = by_file.get(site.partition(":")[0], 0) + nbytes / numel
    return by_file


def each(cases):
    return [touched(*case) for case in cases]


def test_a_step_on_the_host_touches_so_many_bytes():
    """AdamW's, no more: the device casts masters, and tells which bucket somebody edited, which alone is compared."""
    low, step = torch.bfloat16, "engine/step/bucket_step.py"
    cases = [
        (1, low, TIERS["gradients and optimizer"], "host", False),
        (3, low, TIERS["optimizer"], "host", False),
        (3, low, TIERS["host"], "host", False),
        (1, low, TIERS["gradients and optimizer"], "host", True),
    ]
    (sums, optimizer, every, edited), _ = emulated.run(2, each, cases, seed=1)  # the second rank's are padding, mostly
    assert sums == optimizer == every == {step: ADAMW}
    assert edited.pop("device.py") == EQUAL / 4  # of one bucket of four
    edited.pop("arithmetic/sums.py")
    assert edited == sums


def test_a_step_on_the_device_touches_none():
    """Sums that rest in host memory come as they are, and the device divides them."""
    everything = TIERS["host"]
    cases = [
        (1, torch.bfloat16, TIERS["gradients and optimizer"], "device", False),
        (2, torch.float32, TIERS["gradients and optimizer"], "device", False),
        (3, torch.bfloat16, everything, "device", False),
    ]
    for found in emulated.run(2, each, cases, seed=1):
        assert found == [{}, {}, {}]


def trained_by_adam(stage, dtype, offload):
    model = build()
    optimizer = adam(model.parameters())
    zero = zeroshard.shard(
        model, optimizer, stage=stage, precision=Precision(param_dtype=dtype), layout=Layout(bucket_mib=0.0005),
        offload=offload,
    )  # fmt: skip
    return model, optimizer, zero


def added_to(stage, dtype):
    """Weights after steps after which gradients stay and are added to, beside those of states on the device."""
    found = []
    for where in (Offload(gradients="cpu", optimizer="cpu", step="device"), Offload(gradients="cpu"), None):
        model, optimizer, zero = trained_by_adam(stage, dtype, where)
        for step in range(5):
            loss(model, batch(step, ranks.rank())).backward()
            if step == 3:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            if step == 2:
                optimizer.zero_grad()
        with zero.gathered():
            found.append({name: each.clone() for name, each in reference.weights(model).items()})
        torch.emu.synchronize()
    for got in found[:-1]:
        reference.assert_same(got, found[-1])


@pytest.mark.heavy
@pytest.mark.parametrize("stage", [2, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_sums_that_a_step_has_used_are_added_to_as_on_the_device(stage, dtype):
    """Of three ranks: what is divided by three and multiplied again is another number."""
    emulated.run(3, added_to, stage, dtype, seed=stage)


def inside(model, zero):
    with zero.gathered(), torch.no_grad():
        model.first.weight[:2] = 0.25


def behind_torch(model, zero):
    with zero.gathered():
        model.blocks[1].weight.data[0].neg_()


def in_forward(model, zero):
    @torch.no_grad()
    def edit(module, _):
        module.weight[0] = 0.5
        handle.remove()

    handle = model.blocks[2].register_forward_pre_hook(edit)


def twice(model, zero):
    """Edited and put back: the last word counts."""
    with zero.gathered(), torch.no_grad():
        kept = model.first.weight.clone()
        model.first.weight.fill_(3)
    with zero.gathered(), torch.no_grad():
        model.first.weight.copy_(kept)


def before_the_step(model):
    model.blocks[0].weight.data[1] = -0.125


EDITS = (inside, behind_torch, in_forward, twice)


def edited(stage, dtype, tiers, folder):
    """Weights after steps between which somebody edits, beside those of states on the device."""
    found = []
    for where in (Offload(**tiers, path=folder if "nvme" in tiers.values() else None), None):
        model, optimizer, zero = trained_by_adam(stage, dtype, where)
        for step in range(2 * len(EDITS) + 1):
            if step % 2:
                EDITS[step // 2](model, zero)
            for at in range(2):
                loss(model, batch(2 * step + at, ranks.rank())).backward()
            if step % 2 and stage < 3 and "parameters" not in tiers:
                before_the_step(model)
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            found.append({name: each.clone() for name, each in reference.weights(model).items()})
        torch.emu.synchronize()  # pinned memory goes with the engine, and the device may still copy to it
    reference.assert_same(*found)


FIRST = [("gradients and optimizer", 1, torch.bfloat16), ("host", 3, torch.bfloat16), ("optimizer", 3, torch.bfloat16)]
ALL = [
    pytest.param(name, stage, dtype, marks=pytest.mark.full)
    for name in TIERS
    for stage in range(4)
    for dtype in (torch.bfloat16, None)
    if (name, stage, dtype) not in FIRST
]


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "stage", "dtype"), [*FIRST, *ALL])
def test_edits_are_followed_as_with_states_on_the_device(name, stage, dtype, tmp_path):
    emulated.run(2, edited, stage, dtype, TIERS[name], str(tmp_path), seed=stage)
