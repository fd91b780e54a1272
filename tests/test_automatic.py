"""`Offload("auto")`: all ranks choose the same tiers, by the smallest of what they have, and hold no more than that."""

from __future__ import annotations

import logging
import re
from functools import partial

import pytest
import torch
from torch import nn

import emulated
import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import UserError
from zeroshard.planner import choosing

MB = 10**6


class Blocks(nn.Module):
    """0.9 M parameters in twelve blocks; the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 384), nn.Tanh(), nn.Linear(384, 96)) for _ in range(12))
        self.blocks[0].requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def trained(offload, stage, device="cpu", optimizer=torch.optim.AdamW, **policies):
    """The weights after two steps, what was chosen, the most on the device, and what was said."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zeroshard").addHandler(handler)
    torch.manual_seed(0)
    model = Blocks().to(device)
    try:
        made = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        zero = zeroshard.shard(model, made, stage=stage, offload=offload, **policies)
    finally:
        logging.getLogger("zeroshard").removeHandler(handler)
    for step in range(2):
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step)).to(device)
        model(x).square().mean().backward()
        made.step()
        made.zero_grad()
    held = {tier: sum(held.values()) for tier, held in zero.ledger().tiers.items()}
    peak = max(phase.total for phase in zero.ledger().phases.values())
    with zero.gathered():
        weights = {name: each.cpu() for name, each in reference.weights(model).items()}
        return weights, zero._engine.offload, peak, held, [each for each in said if "auto" in each]


def unequal(stage, sizes, **policies):
    """On ranks that have not the same memory."""
    size = sizes[rank_processes.rank()]
    return trained(Offload("auto", gpu_mem=size, host_mem="100MB"), stage, **policies)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("least", ["40MB", "7MB", "2.5MB"])
def test_all_ranks_choose_alike_by_the_smallest_and_stay_within_it(ranks, stage, least):
    want = ranks.run(2, trained, Offload(), stage)[0][0]
    found = ranks.run(2, unequal, stage, ["50MB", least])
    chosen = {repr(offload) for _, offload, *_ in found}
    assert len(chosen) == 1
    assert (Offload() == found[0][1]) is (least == "40MB")
    for weights, _, peak, held, _ in found:
        reference.assert_same(weights, want)
        assert peak <= float(least.removesuffix("MB")) * MB
        assert held.get("host", 0) <= 100 * MB
    said = found[0][-1][0]  # on rank 0
    assert eval(re.search(r"offload=(.*)", said)[1], {"zeroshard": zeroshard}) == found[0][1]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_on_a_device_what_is_chosen_fits(stage):
    """What leaves it passes through pinned memory, which is the host's."""
    offload = Offload("auto", gpu_mem="6MB", host_mem="40MB")
    for _, chosen, peak, held, _ in emulated.run(2, trained, offload, stage, "emu", seed=1):
        assert chosen.tiers("optimizer").get("host", 0) > 0
        assert peak <= 6 * MB and held["host"] <= 40 * MB


def test_files_take_what_host_memory_does_not(tmp_path):
    offload = Offload("auto", gpu_mem="4MB", host_mem="4MB", disk="1GB", path=tmp_path)
    _, chosen, peak, held, _ = trained(offload, 3)
    assert chosen.path == tmp_path and held["nvme"] > 0
    assert peak <= 4 * MB and held["host"] <= 4 * MB
    with pytest.raises(UserError, match="no choice of tiers fits"):
        trained(Offload("auto", gpu_mem="4MB", host_mem="4MB"), 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"param_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "split_master": True},
        {"param_dtype": torch.bfloat16, "states": {"*": torch.bfloat16}},
    ],
)
def test_formats_count(settings):
    how = {"precision": Precision(cast_inputs=True, **settings)}
    for size in ("12MB", "6MB"):
        _, chosen, peak, *_ = trained(Offload("auto", gpu_mem=size, host_mem="100MB"), 3, **how)
        assert peak <= int(size[:-2]) * MB
    assert chosen != Offload()


class Unknown(torch.optim.SGD):
    elementwise = True


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda: Offload("auto", optimizer="cpu"), "chooses where all states rest"),
        (lambda: Offload("auto", activations="cpu"), "chooses where all states rest"),
        (lambda: Offload(optimizer="cpu", gpu_mem="4GB"), "gpu_mem is a budget by which shard chooses"),
        (lambda: Offload("auto", disk="1TB"), r"(?s)disk is a budget.*path=\.\.\."),
        (lambda: Offload("auto", gpu_mem=4), "is a size"),
        (lambda: Offload(optimizer="auto"), "names no tier"),
        (lambda: trained(Offload("auto", gpu_mem="4", host_mem="1GB"), 3), "gpu_mem: a budget of memory is a number and"),
        (lambda: trained(Offload("auto"), 3), '(?s)does not tell how much.*gpu_mem="24GB"'),
        (lambda: trained(Offload("auto", gpu_mem="1GB"), 3, optimizer=Unknown), "(?s)does not know the states.*Unknown"),
        (lambda: zeroshard.plan("7B", offload=Offload("auto")), "(?s)a plan lists what fits.*gpu_mem"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_refused_in_words(how, said):
    with pytest.raises(UserError, match=said):
        how()


def refused_on_one_rank(stage):
    size = "50MB" if rank_processes.rank() else "nonsense"
    return trained(Offload("auto", gpu_mem=size, host_mem="1GB"), stage)


def test_a_rank_that_cannot_tell_ends_all(ranks):
    for error in ranks.run(2, refused_on_one_rank, 3, expect_errors=True):
        assert "gpu_mem: a budget of memory is a number and a unit" in f"{error}"


def test_a_machines_ranks_share_what_is_read_of_it():
    """Host memory and disks are a machine's, a device's memory and budgets that are given a rank's."""
    given = {"gpu_mem": None, "host_mem": None, "disk": None}
    here = {"machine": "a", "given": given, "device": 30, "host": 101, "disk": 60}
    there = {"machine": "b", "given": given, "device": 20, "host": 45, "disk": None}
    assert choosing.smallest([here, here]) == (30, 50, 30)
    assert choosing.smallest([here, here, there]) == (20, 45, 0)
    told = {**here, "given": {**given, "host_mem": 70}}
    assert choosing.smallest([told, told]) == (30, 70, 30)


def test_what_is_free_is_read(monkeypatch, tmp_path):
    """Of the device three quarters, with the model's own parameters there; of the host what its container may take."""
    monkeypatch.setattr(choosing, "CGROUP", tmp_path)
    whole = choosing.free_in_host()
    assert 10**8 < whole < 1 << 50
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert choosing.free_in_host() == 2 * 10**6
    (tmp_path / "memory.max").write_text("max\n")
    assert choosing.free_in_host() > 10**8


def with_free(free):
    """Sharded on a device that tells how much of it is free."""
    choosing.hardware = lambda device: {"free": free}
    return trained(Offload("auto", host_mem="40MB"), 3, "emu")


def test_a_device_that_tells_is_filled_to_three_quarters():
    """3.6 MB of parameters are there already: a quarter less than 6.4 and these is 7.5 MB."""
    _, chosen, peak, *_ = emulated.run(1, with_free, int(6.4 * MB), seed=1)[0]
    assert chosen != Offload() and peak <= 7.5 * MB
    _, chosen, *_ = emulated.run(1, with_free, 64 * MB, seed=1)[0]
    assert chosen == Offload()


@pytest.mark.full
@pytest.mark.parametrize("bounds", ["unit", "model", "tensor"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_other_settings_are_counted_as_they_are(ranks, bounds, early, replicas):
    how = {"layout": Layout(bounds=bounds), "optimizer_in_backward": early}
    how |= {"comm": Comm(replicas=replicas)} if replicas > 1 else {}
    stage, size = (3, 6) if bounds == "unit" else (1, 12)  # one bucket is all of the model
    for _, chosen, peak, held, _ in ranks.run(4, partial(unequal, **how), stage, [f"{size}MB"] * 4):
        assert peak <= size * MB and held.get("host", 0) <= 100 * MB, chosen
