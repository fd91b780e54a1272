"""The emulated backend of torch.distributed: gloo's results, NCCL's rules, and the engine over it."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import emulated
import ranks
import reference
import verbs
from test_emulated import DTYPES, STAGES, plain, sharded
from zeroshard.comm.abort import AtOnce, prepare


def each_verb(device):
    """What every collective gives."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), []

    def of(*values, dtype=torch.float32):
        return torch.tensor([float(value) for value in values], dtype=dtype, device=device)

    def tell(*tensors):
        found.append([tensor.tolist() for tensor in tensors])

    dist.broadcast(x := of(rank + 1, 2 * rank), 1)
    tell(x)
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        dist.all_reduce(x := of(rank + 1, 0.5), getattr(dist.ReduceOp, op))
        tell(x)
    dist.all_reduce(x := of(1.0, 2.0**-9, dtype=torch.bfloat16))
    tell(x)
    dist.reduce(x := of(rank + 1), 0)
    tell(*[x] * (rank == 0))
    dist.all_gather(them := [of(0, 0) for _ in range(world)], of(rank, -rank))
    tell(*them)
    verbs.all_gather_single(x := of(*[0] * 2 * world), of(rank, -rank))
    tell(x)
    verbs.reduce_scatter_single(x := of(0), of(*[rank + at for at in range(world)]))
    tell(x)
    sends, receives = ([(a + b) % 3 for b in range(world)] for a in (rank, rank))
    rows = [10 * rank + at for at in range(world) for _ in range(sends[at])]
    dist.all_to_all_single(x := of(*[0] * sum(receives)), of(*rows), receives, sends)
    tell(x)
    dist.gather(of(rank), them := [of(0) for _ in range(world)] * (rank == 0) or None, 0)
    tell(*them or ())
    dist.scatter(x := of(0), [of(at) for at in range(world)] if rank == 1 else None, 1)
    tell(x)
    x = of(7 * rank)
    if rank < 2:
        (dist.send if rank else dist.recv)(x, 1 - rank)
    tell(x)
    dist.barrier()
    return found


@pytest.mark.parametrize("ranks_", [2, 3])
def test_every_collective_gives_what_gloo_gives(ranks_):
    assert emulated.run(ranks_, each_verb, "emu", seed=ranks_) == ranks.run(ranks_, each_verb, "cpu")


# --- NCCL's rules --------------------------------------------------------------------------------------------------------


def tensors_of_the_host(composite):
    if composite:
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [2.0, 2.0]
    else:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(2))
    dist.all_reduce(x := torch.ones(2, device="emu"))
    assert x.tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="must be contiguous"):
        dist.broadcast(torch.ones(2, 2, device="emu").t()[0:1, :].t(), 0)


@pytest.mark.parametrize("group", ["emuccl", "cpu:gloo,emu:emuccl"])
def test_tensors_of_the_host_are_refused_unless_the_group_has_a_backend_for_them(group):
    emulated.run(2, tensors_of_the_host, group != "emuccl", group=group)


def waits_of_the_stream():
    """A wait returns at once on a rank that is ahead; its kernels are in order behind what has not come."""
    if dist.get_rank() == 0:
        work = dist.all_reduce(x := torch.ones(2, device="emu"), async_op=True)
        work.wait()
        y = x + 1
        assert not work.is_completed()
        dist.broadcast(torch.zeros(1), 0)  # by gloo: only now the other one launches
        while not work.is_completed():
            time.sleep(0.001)
        return y.tolist()
    dist.broadcast(torch.zeros(1), 0)
    dist.all_reduce(x := torch.ones(2, device="emu"))
    return (x + 1).tolist()


def connected(body):
    """Run it once all have connected: a first collective blocks the host."""
    dist.all_reduce(torch.ones(1, device="emu"))
    torch.emu.synchronize()
    dist.broadcast(torch.zeros(1), 0)  # by gloo
    return body()


def test_a_wait_is_the_streams_and_not_the_hosts():
    assert emulated.run(2, connected, waits_of_the_stream) == [[3.0, 3.0]] * 2


def times_out():
    """A wait with a time-out, of a rank that others come late to."""
    if dist.get_rank() == 1:
        time.sleep(0.6)
    work = dist.broadcast(torch.ones(2, device="emu"), 1, async_op=True)
    if dist.get_rank() == 1:
        return work.wait()
    with pytest.raises(
        dist.DistBackendError, match=r"was aborted on rank 0: broadcast, number 2, ran for more than 0.2"
    ):
        work.wait(timedelta(seconds=0.2))
    with pytest.raises(dist.DistBackendError, match="was aborted"):
        dist.broadcast(torch.ones(2, device="emu"), 1)
    assert work.is_completed() and not work.is_success()
    return True


def test_a_wait_that_runs_out_of_time_aborts_the_communicator():
    assert emulated.run(2, connected, times_out) == [True, True]


def differ():
    """Rank 0's is through before the other one comes to its own: both are told."""
    dist.broadcast(torch.ones(3 + dist.get_rank(), device="emu"), 0)
    while True:
        torch.emu.synchronize()
        time.sleep(0.01)


def test_ranks_in_different_collectives_are_told_of_both():
    for outcome in emulated.run(2, differ, expect_errors=True):
        assert outcome.type == "DeviceError"
        assert "ranks are in different collectives, number 1 of communicator '0'" in outcome.message
        assert "('broadcast', 'float32', 3, 0)" in outcome.message
        assert "('broadcast', 'float32', 4, 0)" in outcome.message


def waits_for_a_member():
    rank = dist.get_rank()
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="connecting '0': ranks 1 did not come within 1 s"):
            dist.all_reduce(torch.ones(1, device="emu"))
    return rank


def test_the_first_collective_blocks_the_host_until_all_members_come():
    assert emulated.run(2, waits_for_a_member, group="emuccl", group_timeout=1.0) == [0, 1]


def posted_receives(how):
    """Receives are posted of a rank that first waits for this one's host, which waits for its device."""
    groups = [dist.new_group(backend="emuccl") for _ in range(2)]
    x = [torch.ones(1, device="emu") for _ in groups]
    for group, each in zip(groups, x, strict=True):
        dist.broadcast(each, 0, group=group)
    torch.emu.synchronize()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 1)  # by gloo
    works = [dist.broadcast(each, 0, group=group, async_op=True) for group, each in zip(groups, x, strict=True)]
    told = ""
    if dist.get_rank() == 1:
        y = torch.zeros(1, device="emu")
        with pytest.raises(RuntimeError, match="nothing has run for 1 s") as caught:
            torch.emu.empty_cache() if how == "free" else y.cpu()
        told = str(caught.value)
        dist.send(torch.zeros(1), 0)
    for work in works:
        work.wait()
    return told


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        ("slots", {"slots": 2}, "2 messages under way leave no room for kernels: slots=2"),
        ("free", {}, "not through, the first under way: broadcast, launched at"),
    ],
)
def test_receives_that_keep_the_device_from_what_they_wait_for_are_a_found_deadlock(how, options, said):
    """As kernels that spin on all multiprocessors, or an allocator's free that waits for the whole device."""
    _, told = emulated.run(2, posted_receives, how, style="messages first", patience=1.0, **options)
    assert said in told
    assert "  rank 0 of '0':\n" not in told  # which no collective has connected
    assert "rank 0 of" in told and "posted_receives" in told.rpartition("rank 0 of")[2]  # where its host is


def aborted():
    work = dist.all_reduce(torch.ones(2, device="emu"), async_op=True) if dist.get_rank() else None
    group = dist.group.WORLD
    if work is not None:
        group.abort()
        assert work.is_completed() and "aborted the group" in str(work.exception())
        torch.emu.synchronize()  # which nothing keeps any more
        with pytest.raises(dist.DistBackendError, match="it was aborted"):
            dist.all_reduce(torch.ones(2, device="emu"))


def test_an_abort_ends_what_is_under_way():
    emulated.run(2, connected, aborted)


def aborted_with_another(at_the_same_time):
    """Two groups, in which one rank alone has launched something."""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    tensors = [torch.ones(2, device="emu") for _ in groups]
    for group, tensor in zip(groups, tensors, strict=True):
        dist.all_reduce(tensor, group=group)
    torch.emu.synchronize()
    if dist.get_rank() == 0:
        return
    for group, tensor in zip(groups, tensors, strict=True):
        dist.all_reduce(tensor, group=group, async_op=True)
    prepare(2)
    if at_the_same_time:
        AtOnce({id(group): group.abort for group in groups}).wait(60)
    else:
        groups[0].abort()  # waits for the other one's kernel
    torch.emu.synchronize()


def test_communicators_are_aborted_at_once():
    emulated.run(2, aborted_with_another, True)


def test_an_abort_waits_for_all_that_the_device_runs():
    """As ncclCommAbort does where it frees memory: of two communicators that are aborted in turn neither ends."""
    _, hangs = emulated.run(2, aborted_with_another, False, patience=2.0, expect_errors=True)
    assert hangs.type == "Deadlock" and hangs.message.startswith("nothing has run for 2 s"), hangs


def freed_as_by_cuda():
    with emulated.counted() as counts:
        x = torch.ones(2, device="emu") + torch.ones(2, device="emu")
    assert {what: number for (_, what), number in counts.drains.items()} == {"allocation": 3}
    return x.tolist()


def test_allocations_can_be_made_to_wait_for_the_device():
    assert emulated.run(1, freed_as_by_cuda, syncs_every=1) == [[2.0, 2.0]]


# --- the engine ------------------------------------------------------------------------------------------------------------


def equal_on_ranks(stage, dtype):
    """Also losses: those of this rank are among plain torch's."""
    rank, world = ranks.rank(), ranks.world()
    with sdpa_kernel(SDPBackend.MATH):
        want, weights = plain("cpu", DTYPES[dtype], world)
    got, own = sharded("emu", DTYPES[dtype], stage, stage % 2 == 1, rank, world)
    reference.assert_same(own, weights)
    assert got.losses == [losses[rank::world] for losses in want.losses]


FIRST = {(3, 2, "bf16"), (1, 2, "fp32")}
CASES = [
    pytest.param(*case, seed, marks=[pytest.mark.full] * (case not in FIRST or seed > 0))
    for case in [(stage, world, dtype) for stage in STAGES for world in (2, 3) for dtype in DTYPES]
    for seed in range(3)
]


@pytest.mark.heavy
@pytest.mark.parametrize(("stage", "world_size", "dtype", "seed"), CASES)
def test_every_stage_on_ranks_has_the_bits_of_plain_torch(stage, world_size, dtype, seed):
    """Kernels and messages run late, in drawn orders, and no two uses of memory are without one. Also recomputed."""
    emulated.run(world_size, equal_on_ranks, stage, dtype, seed=10 * seed + stage, timeout=120)
