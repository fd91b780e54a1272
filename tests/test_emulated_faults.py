"""What would end or corrupt a job on GPUs, played on the emulated accelerator: late ranks, host tensors, lost peers."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import emulated
import ranks
import reference
import zeroshard
from emulated.device import device
from zeroshard import Comm, Layout, Offload
from zeroshard.errors import PeerError

WIDTH, BLOCKS = 8, 5


class Blocks(nn.Module):
    """Blocks of one bucket each, and a buffer, as rotary embeddings have. trip: called between two blocks."""

    def __init__(self, trip=lambda: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.trip = trip

    def reset_parameters(self):
        nn.init.constant_(self.scale, 1.0)

    def forward(self, x):
        for at, block in enumerate(self.blocks):
            if at == 1:
                self.trip()
            x = torch.tanh(block(x * self.scale))
        return x


def build(trip=lambda: None):
    torch.manual_seed(0)
    return Blocks(trip)


def batch(step, index):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + index))


def adam(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def loss(model, x):
    return model(x.to(model.scale.device)).square().sum()


def plain(world, steps=2):
    """The weights after plain accumulation on the CPU."""
    model = build()
    reference.accumulate(model, adam(model.parameters()), batch, loss, world, steps=steps)
    return reference.weights(model)


def sharded(stage, trip=lambda: None, **settings):
    model = build(trip).to("emu")
    optimizer = adam(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=0.001), **settings)
    return model, optimizer, zero


def step(model, optimizer, number):
    loss(model, batch(number, ranks.rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_plain(model, zero, steps=2):
    with zero.gathered():
        reference.assert_same(reference.weights(model), plain(ranks.world(), steps))


# --- ranks that come late, and tensors of the host -------------------------------------------------------------------


def a_slow_kernel():
    """On the rank whose buffers the other one waits for: what it sends starts after that, as all that it computes."""
    if ranks.rank() == 0:
        device().launch("a slow kernel", partial(time.sleep, 0.5))


def one_device_is_late(stage):
    """By more than a slice of a wait: at shard(), and at what is sent before a forward."""
    a_slow_kernel()
    model, optimizer, zero = sharded(stage)
    for number in range(2):
        a_slow_kernel()
        step(model, optimizer, number)
    a_slow_kernel()
    assert_plain(model, zero)


@pytest.mark.parametrize("group", ["emuccl", "cpu:gloo,emu:emuccl"])
def test_a_device_that_is_late_ends_no_communicator(group):
    """No wait of a broadcast has a time-out: at its end the group would be aborted, also one of two backends."""
    emulated.run(2, one_device_is_late, 3, group=group)


def gathers():
    model, optimizer, zero = sharded(3)
    step(model, optimizer, 0)
    with emulated.counted() as counts:
        step(model, optimizer, 1)
    assert_plain(model, zero)
    return {name: number for (_, name), number in counts.launches.items() if name in ("all_gather_single", "broadcast")}


@pytest.mark.parametrize("group", ["emuccl", "cpu:gloo,emu:emuccl"])
def test_a_bucket_is_gathered_by_one_collective(group):
    """Each in forward and again in backward, but for the last, which may still be there; one buffer is sent."""
    found = emulated.run(2, gathers, group=group)
    assert found[0] == found[1]
    assert found[0]["broadcast"] == 1 and 2 * BLOCKS - 1 <= found[0]["all_gather_single"] <= 2 * BLOCKS


def on_meta():
    with torch.device("meta"):
        model = Blocks()
    zero = zeroshard.shard(model, adam(model.parameters()), stage=3, device="emu")
    with zero.gathered():
        (mine,) = [torch.cat([each.detach().reshape(-1) for each in model.parameters()]).cpu()]
    return mine.isfinite().all().item(), zeroshard.digests.digest(mine.numpy().tobytes())


def test_a_model_on_meta_is_made_alike_where_groups_take_no_tensors_of_the_host():
    first, second = emulated.run(2, on_meta, group="emuccl")
    assert first == second and first[0]


def stepped_before(stage):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(ranks.world()):
        loss(model, batch(0, index)).backward()
    for parameter in model.parameters():
        parameter.grad.div_(ranks.world())
    optimizer.step()
    optimizer.zero_grad()
    zero = zeroshard.shard(model, optimizer, stage=stage, offload=Offload(optimizer="cpu"), device="emu")
    step(model, optimizer, 1)
    with zero.gathered():
        return {name: each.cpu() for name, each in model.named_parameters()}


def test_an_optimizer_that_rests_in_host_memory_is_cut_after_a_step():
    found = emulated.run(2, stepped_before, 3, group="emuccl")
    for name, each in found[0].items():
        assert torch.equal(each, found[1][name])


# --- how groups are made ---------------------------------------------------------------------------------------------


def connected_at():
    from emulated.emuccl import _all

    model, optimizer, zero = sharded(3, comm=Comm(replicas=2))
    dist.barrier()
    before = sorted(_all)
    for number in range(2):
        step(model, optimizer, number)
    with zero.gathered():
        pass
    return before == sorted(_all), len(before)


@pytest.mark.full
def test_no_group_is_connected_within_a_backward():
    """All were by `shard()`: a first collective blocks the host until all members come to theirs."""
    assert all(alike for alike, _ in emulated.run(4, connected_at, group_timeout=10))


def only_some_shard(store):
    rank = ranks.rank()
    dist.init_process_group(
        "cpu:gloo,emu:emuccl",
        store=dist.FileStore(store, 3),
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=5),
        device_id=torch.device("emu", 0),
    )
    team = dist.new_group([0, 1], backend="cpu:gloo,emu:emuccl")
    if rank < 2:
        model = build().to("emu")
        optimizer = adam(model.parameters())
        zeroshard.shard(model, optimizer, stage=3, comm=Comm(group=team))
        step(model, optimizer, 0)
    return rank


def test_a_subgroup_shards_where_groups_are_split_from_the_worlds(tmp_path):
    """The other ranks never come to a split."""
    assert emulated.run(3, only_some_shard, str(tmp_path / "store"), group=None) == [0, 1, 2]


# --- sums on their way through replicas -------------------------------------------------------------------------------


def relayed(replicas, stage):
    """The host waits for all that its device has at every allocation, as it may do for memory and to load kernels."""
    model, optimizer, zero = sharded(stage, comm=Comm(replicas=replicas))
    for number in range(2):
        step(model, optimizer, number)
    assert_plain(model, zero)


@pytest.mark.parametrize(
    ("world", "replicas"),
    [(2, 2), pytest.param(3, 3, marks=pytest.mark.full), pytest.param(4, 2, marks=pytest.mark.full)],
)
def test_no_device_waits_for_a_sum_that_is_sent_only_once_its_host_is_back(world, replicas):
    """Posted with the reduction, a receive would wait for a replica that meets this host first: a deadlock."""
    emulated.run(world, relayed, replicas, 2, syncs_every=1, patience=8.0)


# --- ranks that are lost, and interrupts ------------------------------------------------------------------------------


def one_is_lost():
    model, optimizer, zero = sharded(3, comm=Comm(timeout=5))
    step(model, optimizer, 0)
    torch.emu.synchronize()
    if ranks.rank() == 1:
        os._exit(3)
    with pytest.raises(PeerError, match="rank 1"):
        step(model, optimizer, 1)
        torch.emu.synchronize()
        zero.clip_grad_norm_(1.0)
    torch.emu.synchronize()  # what was launched has ended: nothing waits for the rank that is gone
    return "named"


def test_what_waits_for_a_lost_rank_on_the_device_is_ended():
    left, gone = emulated.run(2, one_is_lost, patience=8.0, expect_errors=True)
    assert left == "named", left.message + left.traceback
    assert gone.type == "Died"


class Tripped(Exception):
    pass


def tries_again(stage, asks):
    """An exception of one rank's model, in the second step's forward. asks: the others' hosts ask for their loss."""
    armed = []

    def trip():
        if armed:
            armed.clear()
            raise Tripped

    model, optimizer, zero = sharded(stage, trip)
    step(model, optimizer, 0)
    if ranks.rank() == 1:
        armed.append(True)
    failures = []
    for _ in range(4):
        try:
            optimizer.zero_grad()
            value = loss(model, batch(1, ranks.rank()))
            if asks:
                value.item()
            value.backward()
            optimizer.step()
            break
        except (Tripped, PeerError) as error:
            failures.append(type(error).__name__)
    assert_plain(model, zero)
    return failures


@pytest.mark.parametrize("asks", [False, True], ids=["runs-ahead", "asks"])
def test_data_of_a_rank_that_stood_in_never_becomes_weights(asks):
    """The others ran ahead, with gathers of which it had no part, or their hosts wait for these; all try again, with the
    bits of plain torch."""
    ahead, tripped = emulated.run(2, tries_again, 3, asks, patience=8.0)
    assert (ahead[0], tripped[0]) == ("PeerError", "Tripped")
