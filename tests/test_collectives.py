"""How many collectives a step takes, and how many bytes: against the formulas, and against the wire."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import struct
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bench.train import connections, sent_by
from torch import nn
from walkthroughs.texts.sent_between import sent_between

import zeroshard
from zeroshard import Comm, Layout, Precision
from zeroshard.layout.stage import STAGES
from zeroshard.planner import recipes
from zeroshard.planner.traffic import in_trees, per_step

BLOCKS, WIDTH = 4, 96
PARAMETERS = BLOCKS * WIDTH * WIDTH  # divides by 128 x 12: nothing is padded


class Wide(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def received_by_tcp() -> dict[int, int]:
    """Bytes that each of this process's TCP sockets has taken in so far, from the kernel (`tcpi_bytes_received`)."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    found[os.fstat(sock.fileno()).st_ino] = struct.unpack_from("Q", info, 128)[0]
        except OSError:
            continue
    return found


def settle(model, stage: int) -> None:
    """Wait for what the last step sent: at stages 1 and 2 it is still on its way behind the next forward."""
    if stage != 3:
        for param in model.parameters():
            param.sum()


def traffic(stage: int, backwards: int, no_sync: bool, precision: Precision, width: int, comm: Comm, steps: int = 2):
    """What the last step moved, per verb, and what went over TCP meanwhile."""
    torch.manual_seed(0)
    model = Wide(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision, comm=comm)
    # An input that requires grad makes backward need every weight, the first block's included.
    x = torch.ones(2, width, requires_grad=True, dtype=precision.param_dtype)
    for step in range(steps):
        if step == steps - 1:
            settle(model, stage)
            torch.distributed.barrier()
            before, wire = zero.ledger().traffic, received_by_tcp()
        for number in range(backwards):
            if no_sync and number < backwards - 1:
                with zero.no_sync():
                    model(x).float().sum().backward()
            else:
                model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    settle(model, stage)
    torch.distributed.barrier()
    time.sleep(0.1)
    # A socket of an earlier test may have gone meanwhile.
    wire = sum(nbytes - wire.get(inode, 0) for inode, nbytes in received_by_tcp().items())
    after = zero.ledger().traffic
    moved = {
        verb: tuple(
            getattr(now, field) - getattr(before.get(verb, type(now)()), field)
            for field in ("calls", "logical", "sent", "sent_and_received")
        )
        for verb, now in after.items()
    }
    return moved, wire


@pytest.mark.row(30)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("no_sync", [False, True], ids=["", "no_sync"])
@pytest.mark.parametrize(
    ("world", "backwards"),
    [(2, 1), (2, 3), (3, 3), (4, 3)],
    ids=["ranks2-A=1", "ranks2-A=3", "ranks3-A=3", "ranks4-A=3"],
)
def test_calls_and_bytes_of_a_step(ranks, world, stage, backwards, no_sync, dtype):
    """A+1 passes of the parameters at stages 0-2 (2 under no_sync), 3A at stage 3 (2A+1): calls and bytes, exactly.

    A pass of P elements sends (N-1)/N of them per rank. Sums travel in the gradients' dtype, or in the accumulator's
    after no_sync; stage 0 gathers averages, in the accumulator's.
    """
    reductions = 1 if no_sync else backwards
    gathers = 2 * backwards if stage == 3 else 1
    narrow = 4 if dtype is None else 2
    reduce_size = 4 if no_sync and backwards > 1 else narrow
    gather_size = 4 if stage == 0 else narrow
    for moved, _ in ranks.run(world, traffic, stage, backwards, no_sync, Precision(param_dtype=dtype), WIDTH, Comm()):
        for verb, passes, size in (("reduce", reductions, reduce_size), ("gather", gathers, gather_size)):
            logical = passes * PARAMETERS * size
            sent = logical * (world - 1) // world
            assert moved[verb] == (passes * BLOCKS, logical, sent, 2 * sent), verb
        # Agreeing: a forward 1 (2 with a script of gathers), a backward 2, a step 1; a row of nine integers each,
        # to every other rank.
        exchanges = backwards * (4 if stage == 3 else 3) + 1
        assert moved["control"] == (
            exchanges,
            exchanges * 72,
            exchanges * 72 * (world - 1),
            exchanges * 144 * (world - 1),
        )
        assert "broadcast" not in moved or moved["broadcast"][0] == 0


@pytest.mark.parametrize("comm", [Comm(overlap=False), Comm(prefetch=3)], ids=["no overlap", "prefetch 3"])
def test_overlap_and_prefetch_move_the_same(ranks, comm, stage):
    """How early something is launched changes neither counts nor bytes."""
    want = ranks.run(2, traffic, stage, 2, False, Precision(), WIDTH, Comm())
    got = ranks.run(2, traffic, stage, 2, False, Precision(), WIDTH, comm)
    assert [moved for moved, _ in got] == [moved for moved, _ in want]


def test_keeping_weights_for_backward_saves_a_pass(ranks):
    """`release_after_forward=False` at stage 3: one gather per step and block instead of two."""
    for moved, _ in ranks.run(2, traffic, 3, 1, False, Precision(), WIDTH, Comm(release_after_forward=False)):
        assert moved["gather"][0] == BLOCKS and moved["reduce"][0] == BLOCKS


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_on_the_wire(ranks, world, stage):
    """What the kernel counted on all ranks' TCP sockets is what the ledgers say was sent, within 2 %.

    Headers of gloo's messages and the control collectives are the difference.
    """
    width = 768
    results = ranks.run(
        world, traffic, stage, 1, False, Precision(param_dtype=torch.bfloat16), width, Comm(), timeout=100
    )
    sent = sum(moved[verb][2] for moved, _ in results for verb in ("gather", "reduce"))
    received = sum(wire for _, wire in results)
    assert sent == (3 if stage == 3 else 3 if stage == 0 else 2) * BLOCKS * width * width * 2 * (world - 1)
    assert sent <= received <= 1.02 * sent


def native(stage: int, reduce: str):
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=Comm(reduce=reduce))
    for step in range(3):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + zero.rank))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return model.blocks[1].weight.detach().clone(), getattr(zero.ledger().traffic.get("reduce"), "calls", 0)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_native_reduction(ranks, world, stage):
    """The backend's own reduce-scatter: the same number of reductions; sums that differ by rounding at most."""
    for (want, calls), (got, native_calls) in zip(
        ranks.run(world, native, stage, "ordered"), ranks.run(world, native, stage, "native"), strict=True
    ):
        assert calls == native_calls
        # The order of summation is the backend's: fp32 rounding of sums of at most three terms.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def uneven():
    model = Wide()
    with pytest.raises(ValueError, match="native|ordered"):
        zeroshard.shard(model, None, layout=Layout(bounds="tensor"), comm=Comm(reduce="native"))
    return True


def test_native_reduction_needs_even_shards(ranks):
    """Refused by name where tensors are not cut and shards differ."""
    assert ranks.run(3, uneven) == [True] * 3


def buffers_once(stage: int):
    class WithBuffer(Wide):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(3))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    model = WithBuffer()
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    before = zero.ledger().traffic["broadcast"]
    model(torch.ones(2, WIDTH)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    after = zero.ledger().traffic["broadcast"]
    return after.calls - before.calls, after.logical - before.logical


def test_buffers_travel_in_one_broadcast(ranks, stage):
    """One collective per training forward for all buffers, none for evaluation."""
    assert ranks.run(2, buffers_once, stage) == [(1, 3 * 4 + 8)] * 2


def policies():
    """Scheduling policies: of gloo's loops that sharding a model starts; of all others, before and after; the thread's."""

    def of_loops():
        found = {}
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if (thread / "comm").read_text() == "gloo_tcp_loop\n":
                    found[int(thread.name)] = os.sched_getscheduler(int(thread.name))
        return found

    gc.collect()  # groups of earlier tests in this process: their loops may still be there, and end at any time
    earlier = of_loops()
    own = torch.distributed.new_group()
    torch.distributed.barrier(own)
    before = of_loops()
    model = nn.Linear(2, 2)
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    after = of_loops()
    users = [after[thread] for thread in before.keys() - earlier.keys()]
    unchanged = all(after.get(thread, policy) == policy for thread, policy in before.items())
    return users, [after[thread] for thread in after.keys() - before.keys()], unchanged, os.sched_getscheduler(0)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_gloos_loops_are_batch_work_and_nothing_else_is(ranks):
    """Those of the engine's three process groups; the loop of a group of the user's stays as it was."""
    named = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # 2.11 does not say which threads they are
    for users, engines, unchanged, thread in ranks.run(2, policies):
        assert users == [os.SCHED_OTHER] or not (users or named)
        assert engines == [os.SCHED_BATCH] * 3 * len(users)
        assert unchanged
        assert thread == os.SCHED_OTHER


def by_peer(act):
    """Bytes that this rank sends to each other rank in the second of two calls, as the kernel says of its connections."""
    rank, world, seen = dist.get_rank(), dist.get_world_size(), []
    for _ in range(2):
        act()
        dist.barrier()
        sent = {}
        for connection in connections():
            with contextlib.suppress(OSError), connection:  # one without a peer only listens
                sent[connection.getsockname()[1], connection.getpeername()[1]] = sent_by(connection)
        seen.append(sent)
        dist.barrier()
    told = [None] * world
    dist.all_gather_object(told, list(seen[1]))  # pairs: Linux gives one port to connections of several ranks
    peers = {(own, peer): other for other, pairs in enumerate(told) for peer, own in pairs}
    found = [0] * world
    for ends, nbytes in seen[1].items():
        if ends in peers and peers[ends] != rank:
            found[peers[ends]] += nbytes - seen[0].get(ends, 0)
    return found


def crossed():
    """How often this rank sends a shard to each other rank in one gather."""
    model = nn.Linear(960, 960, bias=False)
    zeroshard.shard(model, None, stage=3)

    @torch.no_grad()
    def gather():
        model(torch.zeros(1, 960))

    return [nbytes // (4 * 960 * 960 // dist.get_world_size()) for nbytes in by_peer(gather)]


def stepped(replicas, grad_dtype):
    """Bytes that this rank sends to each other rank in a step at stage 1 with bf16 weights."""
    torch.manual_seed(0)
    model = Wide(768)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = Precision(param_dtype=torch.bfloat16, grad_dtype=grad_dtype, cast_inputs=True)
    comm = Comm(replicas=replicas, transport="gloo")
    zeroshard.shard(model, optimizer, stage=1, precision=precision, comm=comm)

    def step():
        model(torch.ones(2, 768)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        settle(model, 1)

    return by_peer(step)


@pytest.mark.processes
@pytest.mark.parametrize("recipe", [pytest.param("paper", marks=pytest.mark.full), "zeroshard"])
@pytest.mark.parametrize(
    "replicas", [pytest.param(1, marks=pytest.mark.full), 2, 4, pytest.param(8, marks=pytest.mark.full)]
)
def test_the_card_that_sends_most_over_gloo_is_the_one_that_is_planned(ranks, replicas, recipe):
    """Nodes of two: every rank sends to other nodes what the planner says, but for 2 % of headers and agreements."""
    numel = BLOCKS * 768 * 768
    preset = recipes.PRESETS[recipe]
    moved = per_step(numel, 8, STAGES[1], preset, replicas=replicas)
    planned = sent_between(moved, 8, 2, replicas, gloo=True)
    sent = ranks.run(8, stepped, replicas, torch.bfloat16 if recipe == "paper" else None, timeout=100)
    for rank, (row, want) in enumerate(zip(sent, planned, strict=True)):
        found = sum(nbytes for other, nbytes in enumerate(row) if other // 2 != rank // 2)
        assert want <= found <= want + 0.02 * 2 * numel


@pytest.mark.processes
@pytest.mark.parametrize("world", [4, pytest.param(6, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)])
def test_gathers_over_gloo_are_the_trees_that_are_planned(ranks, world):
    """Whole shards that the kernel has sent from each rank to each other: for any size of node what the planner says."""
    sent = ranks.run(world, crossed)
    for near in (near for near in range(1, world + 1) if world % near == 0):
        crossing = sum(
            count for one, row in enumerate(sent) for other, count in enumerate(row) if one // near != other // near
        )
        assert crossing == world * in_trees(world, near)
    assert sum(map(sum, sent)) == world * (world - 1)
