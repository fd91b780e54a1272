"""Activations that leave an emulated accelerator: copies behind the program, in drawn orders, and memory that is late."""

from __future__ import annotations

import pytest
import torch

import emulated
import ranks
import reference
import training
from emulated.device import device
from emulated.streams import Order
from zeroshard import Layout, Offload

STAGES = (0, 1, 2, 3)
GPT = {"hidden": 16, "layers": 3}


def trained(stage, recompute, offload):
    settings = {"options": GPT, "device": "emu", "layout": Layout(bucket_mib=0.01, recompute=recompute)}
    return training.trained(stage, steps=2, backwards=2, offload=offload, **settings)


def equal(tier, folder, cases, orders):
    """Each case in as many drawn orders, beside one that keeps its activations; a tier's bytes."""
    found = {}
    for stage, recompute in cases:
        want = trained(stage, recompute, None)
        for seed in orders:
            torch.emu.synchronize()
            device().machine.order = Order(1000 * seed + 10 * stage + ranks.rank())
            got = trained(stage, recompute, Offload(activations=tier, path=folder if tier == "nvme" else None))
            assert got[0] == want[0]
            reference.assert_same(got[1], want[1])
            found[stage, recompute] = got[2]["host" if tier == "cpu" else "nvme"]["activations"]
            assert "activations" not in got[2]["device"]
    return found


EVERY = [(stage, recompute) for stage in STAGES for recompute in (False, True)]


@pytest.mark.heavy
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize(
    ("world", "cases", "orders"),
    [
        pytest.param(1, [(3, False)], range(1), id="one"),
        pytest.param(1, [(3, False), (0, True)], range(1, 3), id="a-few", marks=pytest.mark.full),
        pytest.param(2, EVERY, range(2), id="every-stage", marks=pytest.mark.full),
        pytest.param(1, EVERY, range(2, 20), id="18-orders", marks=pytest.mark.slow),
    ],
)
def test_activations_that_leave_the_device_come_back_with_the_same_bits(world, cases, orders, tier, tmp_path):
    """No use of memory races with a copy, whatever the order in which kernels and copies run."""
    for found in emulated.run(world, equal, tier, str(tmp_path), cases, orders, timeout=280):
        assert all(nbytes for nbytes in found.values())
