"""Every combination on the emulated accelerator: the bits of plain PyTorch in whatever order kernels and messages run.

Plain PyTorch computes on the device, and steps where the states rest: the device's AdamW is made to round otherwise
than the CPU's, as that of every GPU does, so a state that the wrong processor steps is found. So is an average by a
Python number, which CUDA multiplies by its rounded reciprocal.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import emulated
import models
import norms
import ranks
import reference
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision

WIDTH, BLOCKS, STEPS, BACKWARDS = 9, 3, 2, 2
STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
TIERS = {
    "none": {},
    "optimizer": {"optimizer": "cpu", "gradients": "cpu"},
    "host": dict.fromkeys(("parameters", "gradients", "optimizer"), "cpu"),
    "nvme": dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme"),
}
OFFLOADS = {name: {**tiers, "step": "host"} if tiers else {} for name, tiers in TIERS.items()}  # test_device_step.py


class Blocks(nn.Module):
    """A unit for each block, and two weights of the root's own, in sizes that need padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = self.first(x.to(self.gain.dtype))
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.gain
        return x


def build():
    torch.manual_seed(0)
    return Blocks().to("emu:0")


def adam(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


class OnTheHost:
    """An optimizer in host memory: gradients go there, what it has updated comes back."""

    def __init__(self, params) -> None:
        self.params = list(params)
        self.copies = [each.detach().cpu().requires_grad_() for each in self.params]
        self.optimizer = adam(self.copies)

    def step(self):
        for own, copy in zip(self.params, self.copies, strict=True):
            copy.grad = None if own.grad is None else own.grad.cpu()
        self.optimizer.step()
        for own, copy in zip(self.params, self.copies, strict=True):
            own.data.copy_(copy.detach())

    def zero_grad(self):
        for own in self.params:
            own.grad = None


def batch(step, index):
    return models.batch("grid", step, index)[0].to("emu:0")


def loss(model, x):
    return model(x).float().square().sum()


def norm(gradients, order):
    return norms.total([each.cpu() for each in gradients], order).to(gradients[0].device)


def plain(dtype, world, offload):
    """Losses, norms and weights of plain PyTorch, of which the optimizer is where the states rest."""
    model, make = build(), OnTheHost if offload else adam
    settings = {"world": world, "steps": STEPS, "backwards": BACKWARDS, "clip": 0.5, "norm": norm}
    if dtype is None:
        return reference.accumulate(model, make(model.parameters()), batch, loss, **settings), reference.weights(model)
    history, _ = reference.accumulate_with_masters(model, make, batch, loss, dtype=dtype, **settings)
    return history, reference.weights(model)


def made(stage, dtype, recompute, replicas, bucket_mib=0.0005, offload=None):
    model = build()
    optimizer = adam(model.parameters())
    zero = zeroshard.shard(
        model,
        optimizer,
        stage=stage,
        precision=Precision(param_dtype=dtype),
        layout=Layout(bucket_mib=bucket_mib, recompute=recompute),
        comm=Comm(hosts=2) if replicas == "hosts" else Comm(replicas=replicas),
        offload=offload,
    )
    return model, optimizer, zero


def history_and_weights(model, optimizer, zero):
    history = reference.loop(
        model, optimizer, batch, loss, ranks.rank(), ranks.world(), BACKWARDS, steps=STEPS, clip=0.5
    )
    with zero.gathered():
        return history, reference.weights(model)


def assert_same(got, want, case=None):
    """Losses, of which a rank has its own, norms and weights."""
    reference.assert_same(got[1], want[1])
    assert got[0].losses == [each[ranks.rank() :: ranks.world()] for each in want[0].losses], case
    assert [each.item() for each in got[0].norms] == [each.item() for each in want[0].norms], case


def equal(dtype, replicas, offload, cases, orders, folder):
    """Stages, with recomputation and without, each in as many drawn orders."""
    from emulated.device import device
    from emulated.kernels import DIVISIONS
    from emulated.streams import Order

    device().rounds_otherwise |= {"_fused_adamw_", DIVISIONS}
    rank, files = ranks.rank(), folder if "nvme" in OFFLOADS[offload].values() else None
    want = plain(DTYPES[dtype], ranks.world(), OFFLOADS[offload])
    for seed in orders:
        for stage, recompute in cases:
            device().synchronize()
            device().machine.order = Order(1000 * seed + 100 * stage + 10 * recompute + rank)
            tiers = Offload(**OFFLOADS[offload], path=files)
            assert_same(history_and_weights(*made(stage, DTYPES[dtype], recompute, replicas, offload=tiers)), want)


RANKS = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (4, "hosts")]  # ranks and replicas, or two hosts
EVERY = [*product(STAGES, (False, True))]
ORDERS = 20
FIRST = {  # of `make test`
    ((2, 1), "bf16", "optimizer"): [(2, True)],
    ((2, 1), "bf16", "none"): [(0, False)],
    ((3, 1), "fp32", "none"): [(1, False)],
    ((1, 1), "fp32", "nvme"): [(3, True), (0, False)],
    ((4, "hosts"), "bf16", "none"): [(3, False)],
}
CASES = [
    pytest.param(*each, FIRST[each], range(1), id=f"{each[0][0]}-{each[0][1]}-{each[1]}-{each[2]}-a-few")
    for each in FIRST
] + [
    pytest.param(*each, EVERY, orders, id=f"{each[0][0]}-{each[0][1]}-{each[1]}-{each[2]}-{name}", marks=mark)
    for name, orders, mark in (("all", range(1), pytest.mark.full), ("orders", range(1, ORDERS), pytest.mark.slow))
    for each in product(RANKS, DTYPES, OFFLOADS)
]


@pytest.mark.heavy
@pytest.mark.row(34)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world_size", "dtype", "offload", "cases", "orders"), CASES)
def test_every_combination_has_the_bits_of_plain_torch_on_the_device(
    world_size, dtype, offload, cases, orders, tmp_path
):
    """Stages 0 to 3, ranks and replicas, dtypes, recomputation and tiers, in 20 drawn orders of late kernels."""
    world, replicas = world_size
    emulated.run(world, equal, dtype, replicas, offload, cases, orders, str(tmp_path), elsewhere=True, timeout=1100)


# --- the optimizer in backward ---------------------------------------------------------------------------------------


def in_backward(stages):
    """Weights after three steps that backward makes, beside those of steps after it."""
    from emulated.device import device
    from emulated.streams import Order

    for stage in stages:
        found = []
        for early in (True, False):
            device().synchronize()
            device().machine.order = Order(10 * stage + early)
            model = build()
            optimizer = adam(model.parameters())
            layout = Layout(bucket_mib=0.0005)
            zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout, optimizer_in_backward=early)
            for step in range(3):
                loss(model, batch(step, ranks.rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
            with zero.gathered():
                found.append(reference.weights(model))
        reference.assert_same(*found)


def test_the_optimizer_in_backward_has_the_bits_of_a_step_after_it():
    emulated.run(2, in_backward, (0, 3), elsewhere=True)


# --- random numbers of a device that is not the current one -----------------------------------------------------------


def drawing(folder):
    """Weights with recomputation and without, of a model that drops out; what is drawn after a save, and after its
    load."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(3))).to("emu:0")
        optimizer = adam(model.parameters())
        zero = zeroshard.shard(model, optimizer, layout=Layout(recompute=recompute))
        torch.emu.set_rng_state(torch.Generator().manual_seed(ranks.rank()).get_state(), "emu:0")
        for _ in range(2):
            model(torch.ones(4, 16, device="emu:0")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            found.append(reference.weights(model))
    reference.assert_same(*found)
    zero.save(folder)
    want = torch.rand(4, device="emu:0").tolist()
    torch.rand(4, device="emu:0")
    zero.load(folder)
    assert torch.rand(4, device="emu:0").tolist() == want


def test_random_numbers_are_those_of_the_models_device(tmp_path):
    emulated.run(2, drawing, str(tmp_path / "saved"), elsewhere=True)


# --- the size of buckets ----------------------------------------------------------------------------------------------

SIZES = {None: BLOCKS + 1, 1e-6: 2 * BLOCKS + 3}  # MiB, and buckets: one for each unit, or for each parameter


def in_buckets(dtype, replicas, recompute):
    """Trainings with buckets of either size, each in an order of kernels of its own, beside plain torch's one process."""
    from emulated.device import device
    from emulated.streams import Order

    rank, world = ranks.rank(), ranks.world()
    want = plain(DTYPES[dtype], world, {})
    for seed, (stage, size) in enumerate(product(STAGES, SIZES)):
        device().synchronize()
        device().machine.order = Order(100 * seed + rank)
        model, optimizer, zero = made(stage, DTYPES[dtype], recompute, replicas, size)
        assert len(zero.partition.buckets) == SIZES[size]
        assert_same(history_and_weights(model, optimizer, zero), want, (stage, size))


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(34)
@pytest.mark.parametrize(
    ("world_size", "dtype", "recompute"),
    [*product([(2, 1), (3, 1), (4, 2), (4, "hosts")], DTYPES, (False, True))],
    ids=str,
)
def test_buckets_by_unit_have_the_bits_of_small_ones_and_of_plain_torch(world_size, dtype, recompute):
    """An accelerator's buckets, which are all of a unit, and those of a given size, as on CPUs; at every stage."""
    world, replicas = world_size
    emulated.run(world, in_buckets, dtype, replicas, recompute, timeout=180)
