"""What would end or corrupt a job on GPUs, played on the emulated accelerator: late ranks, host tensors, lost peers."""

from __future__ import annotations

import atexit
import gc
import os
import random
import re
import signal
import sys
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

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
from zeroshard.comm import abort, agreement, collectives, groups, launch_log, watch
from zeroshard.comm.collectives import Link
from zeroshard.comm.process_group import ProcessGroup
from zeroshard.errors import PeerError
from zeroshard.layout import mesh

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


def one_is_late_to_a_broadcast(stage):
    """By more than a slice of a wait: to what rank 0's states are sent by, whose receivers wait without a bucket."""
    broadcast, late = agreement.Group.broadcast, []

    def after_a_slow_kernel(group, tensor, *given, **settings):
        if tensor.device.type == "emu":
            a_slow_kernel()
            late.append(tensor.numel())
        return broadcast(group, tensor, *given, **settings)

    agreement.Group.broadcast = after_a_slow_kernel
    model = build().to("emu")
    optimizer = adam(model.parameters())
    loss(model, batch(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    zero = zeroshard.shard(model, optimizer, stage=stage)
    step(model, optimizer, 1)
    with zero.gathered():
        return len(late), {name: each.cpu() for name, each in reference.weights(model).items()}


def test_a_device_that_is_late_to_a_broadcast_ends_no_communicator():
    """A time-out for the wait would abort the group at its end."""
    (first, want), (second, got) = emulated.run(2, one_is_late_to_a_broadcast, 1, group="emuccl")
    assert first == second > 4
    reference.assert_same(got, want)


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
    return mine.isfinite().all().item(), zeroshard.arithmetic.hashing.digest(mine.numpy().tobytes())


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


def backends():
    """Of each group of data by use: where what it moves may lie."""
    _, _, zero = sharded(3)
    own = zero._engine.group._groups
    return {
        each.use: sorted(device.type for device in stream.group._device_types)
        for each, stream in zip(own._wanted, own.streams, strict=True)
        if each.use not in groups.CONTROL
    }


@pytest.mark.parametrize("group", ["emuccl", "cpu:gloo,emu:emuccl"])
def test_groups_of_data_have_the_devices_backend_and_no_other(group):
    """Of the program's group, which may have two, only that one: connections of gloo's would lie idle."""
    want = {"gather": ["emu"], "reduce": ["emu"]}
    assert emulated.run(2, backends, group=group) == [want, want]


def control_connects():
    """For each group of the host's: its members, and if making it connected this rank to all of them."""
    mesh.LONGEST_AXIS, made, found = 2, groups._new_group, []

    def sockets():
        names = os.listdir("/proc/self/fd")
        return sum(os.path.realpath(f"/proc/self/fd/{name}").rpartition("/")[2].startswith("socket:") for name in names)

    def making(**options):
        before = sockets()
        group = made(**options)
        if options["backend"] == "gloo":
            found.append((group.size(), sockets() - before >= group.size() - 1))
        return group

    groups._new_group = making
    model, optimizer, zero = sharded(3)
    step(model, optimizer, 0)
    assert_plain(model, zero, 1)
    return found


def test_the_control_group_of_all_ranks_is_not_connected_at_once():
    """Beyond one axis of a grid, here of two ranks, it would hold a connection of each rank to each."""
    assert emulated.run(4, control_connects) == [[(4, False), (2, True), (2, True)]] * 4


def channels():
    """Channels of each group of data by use, and what two models say of the device's memory."""
    from emulated import emuccl

    said, most = [], 1 << 36
    torch.emu.mem_get_info = lambda device=None: (most - sum(emuccl.taken.values()), most)
    groups.log = SimpleNamespace(info=lambda words, *facts: said.append(words % facts), warning=groups.log.warning)
    _, _, zero = sharded(3)
    sharded(3)
    own = zero._engine.group._groups
    asked = [(each.use, own.streams[at].group.asked) for at, each in enumerate(own._wanted) if at in own.queues]
    return [(use, None if each is None else each.max_ctas) for use, each in asked], said


def test_an_exchange_has_few_channels_and_its_memory_is_told_once():
    """Of the emulated backend's 32, at 14 MiB for each peer."""
    first, *others = emulated.run(3, channels)
    want, took = [("gather", None), ("reduce", 16)], 2 * 16 * 14 * 2**20
    told = f"rank 0 has connected its 2 groups of emuccl: they took {took} bytes of emu:0, of which {2**36 - took} are free"
    assert first == (want, [told])
    assert others == [(want, [])] * 2


def one_is_slow_to_connect():
    said, connect = [], groups.Groups._connect
    watch.LONG = 0.1
    groups.log = SimpleNamespace(info=groups.log.info, warning=lambda words, *facts: said.append(words % facts))

    def connecting(own, made):
        if ranks.rank() == 1:
            time.sleep(2.0)
        connect(own, made)

    groups.Groups._connect = connecting
    sharded(3)
    return said


def test_a_rank_says_how_far_connecting_is():
    """With NCCL the first exchange of hundreds of ranks may take minutes."""
    said, _ = emulated.run(2, one_is_slow_to_connect)
    assert re.fullmatch(
        r"rank 0 connects ranks in shard\(...\) since \d+ s: emuccl group 1 of 2 \(gather, 2 ranks\) since \d+ s",
        said[0],
    )


def devices_that_differ():
    rank = ranks.rank()
    torch.emu.get_device_name = lambda device=None: f"emu {rank}"
    with pytest.raises(PeerError, match="where: device: name"):
        sharded(3)
    return rank


def test_ranks_on_devices_of_two_kinds_are_refused():
    """They round otherwise, so the weights would be those of neither."""
    assert emulated.run(2, devices_that_differ) == [0, 1]


def connected_at(replicas, over="team"):
    """How many communicators this rank has beside the program's own; they must be those of before the first backward."""
    from emulated.emuccl import _all

    dist.all_reduce(torch.ones(1, device="emu"))
    own = len(_all)
    model, optimizer, zero = sharded(3, comm=rows(replicas, over))
    dist.barrier()
    before = sorted(_all)
    for number in range(2):
        step(model, optimizer, number)
    with zero.gathered():
        pass
    assert before == sorted(_all)
    return len(before) - own


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "replicas", "over", "communicators"),
    [
        (2, 1, "team", [2, 2]),  # gathers and reductions
        (2, 2, "team", [3, 3]),  # a pair, all copies, all ranks: a team of one gathers nothing
        (4, 2, "team", [5] * 4),
        (3, 3, "team", [3, 4, 3]),  # the one between two others is in two pairs
        (4, 2, "all", [6] * 4),  # and one in which parts of earlier sums come together
        (4, 2, "hosts", [7] * 4),  # and one in which those of shards do
    ],
)
def test_no_group_is_connected_within_a_backward(world, replicas, over, communicators):
    """All were by `shard()`: a first collective blocks the host until all members come to theirs. And how many are."""
    assert emulated.run(world, connected_at, replicas, over, group_timeout=10) == communicators


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


def rows(count, over):
    return Comm(hosts=count) if over == "hosts" else Comm(replicas=count, optimizer=over)


def relayed(replicas, stage, over):
    """The host waits for all that its device has at every allocation, as it may do for memory and to load kernels."""
    model, optimizer, zero = sharded(3 if over == "hosts" else stage, comm=rows(replicas, over))
    for number in range(2):
        step(model, optimizer, number)
    assert_plain(model, zero)


@pytest.mark.parametrize("over", ["team", "all", "hosts"])
@pytest.mark.parametrize(
    ("world", "replicas"),
    [(2, 2), pytest.param(3, 3, marks=pytest.mark.full), pytest.param(4, 2, marks=pytest.mark.full)],
)
def test_no_device_waits_for_a_sum_that_is_sent_only_once_its_host_is_back(world, replicas, over):
    """Posted with the reduction, a receive would wait for a replica that meets this host first: a deadlock."""
    emulated.run(world, relayed, replicas, 2, over, syncs_every=1, patience=8.0)


def relayed_twice(stage):
    """Weights after steps of two backwards, of which the second goes on from parts of the first's sum."""
    found = []
    for over in ("team", "all", "hosts"):
        model, optimizer, zero = sharded(stage, comm=rows(2, over))
        for number in range(2):
            loss(model, batch(number + 2, ranks.rank())).backward()
            step(model, optimizer, number)
        with zero.gathered():
            found.append(reference.weights(model))
    for other in found[1:]:
        reference.assert_same(found[0], other)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_parts_of_a_sum_come_together_on_a_device(stage):
    emulated.run(2, relayed_twice, stage, syncs_every=1, patience=8.0)


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


def lost_beside_the_programs_own(models):
    """A loss is summed up in the program's own group, and then a rank is gone. models: over groups of their own."""
    groups.ABORTING = 1.0
    made = [sharded(3, comm=Comm(timeout=5 + each)) for each in range(models)]
    for model, optimizer, _ in made:
        step(model, optimizer, 0)
    total = torch.ones(1, device="emu")
    dist.all_reduce(total)  # connects the ranks
    torch.emu.synchronize()
    if ranks.rank() == 1:
        os._exit(3)
    dist.all_reduce(total, async_op=True)
    for model, optimizer, zero in made:
        with pytest.raises(PeerError, match="rank 1"):
            step(model, optimizer, 1)
            zero.clip_grad_norm_(1.0)
    torch.emu.synchronize()
    return "named"


@pytest.mark.parametrize("models", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_collective_of_the_programs_own_keeps_nobody_from_naming_a_lost_rank(models):
    """An abort waits for all that the device runs, and so for the program's sum too, which only its own abort ends."""
    left, gone = emulated.run(2, lost_beside_the_programs_own, models, patience=15.0, expect_errors=True)
    assert left == "named", left.message + left.traceback
    assert gone.type == "Died"


def interrupted_while_it_aborts():
    """The program's own collective keeps the device busy: Ctrl-C comes while this rank's aborts wait for that."""
    groups.ABORTING = 1.0
    model, optimizer, zero = sharded(3)
    step(model, optimizer, 0)
    total = torch.ones(1, device="emu")
    dist.all_reduce(total)  # connects the ranks
    torch.emu.synchronize()
    if ranks.rank() == 0:
        dist.all_reduce(total, async_op=True)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            zero._engine.group._groups.abort()
        torch.emu.synchronize()
    dist.broadcast(torch.zeros(1), 0)  # by gloo


def test_an_interrupt_of_aborts_leaves_nothing_on_the_device():
    """Not even the collectives that are aborted only after a while."""
    emulated.run(2, interrupted_while_it_aborts, patience=5.0)


class Tripped(Exception):
    pass


def started(store):
    """Let `shard()` make the process group, as under torchrun. Where what it has asked for at the program's end goes."""
    rank, world, at_end = ranks.rank(), ranks.world(), []
    os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{world}", LOCAL_RANK=f"{rank}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # not asked: they meet in a file
    place = {"store": dist.FileStore(store, world), "rank": rank, "world_size": world}
    dist.init_process_group = partial(dist.init_process_group, **place)
    atexit.register = lambda call, *args: at_end.append(partial(call, *args)) or call
    return at_end


def ended(at_end, error):
    """The program's end, by an exception or None: how often the host waits for its device there."""
    if error is not None:
        sys.last_value = error
    with emulated.counted() as counts:
        for call in reversed(at_end):
            call()
    assert not dist.is_initialized()
    return counts.drains.total()


def left(how, store):
    """Rank 1 ends in the second step: "dies" in a forward, or behind the step's last meeting, before it launches
    what the other one's device waits for; or an exception "raises" in a forward, and is its end."""
    at_end, armed, launch = started(store), [], Link.launch

    def trip():
        if armed and how == "dies in a forward":
            os._exit(3)
        if armed and how == "raises in a forward":
            raise Tripped

    def launching(link, stream, *args):
        if armed and how == "dies behind a step" and stream.queued:
            os._exit(3)
        return launch(link, stream, *args)

    Link.launch = launching
    model, optimizer, zero = sharded(1 if how == "dies behind a step" else 3, trip, comm=Comm(timeout=20))
    step(model, optimizer, 0)
    torch.emu.synchronize()
    try:
        if how == "dies behind a step":
            loss(model, batch(1, ranks.rank())).backward()
            torch.emu.synchronize()
        armed += [True] * (ranks.rank() == 1)
        if how == "dies behind a step":
            optimizer.step()
            return ended(at_end, None)
        step(model, optimizer, 1)
        zero.clip_grad_norm_(1.0)
    except (Tripped, PeerError) as error:
        return ended(at_end, error)
    raise AssertionError("the step went on without a rank")


@pytest.mark.parametrize(
    "how",
    [
        "dies behind a step",
        *(pytest.param(f"{how} in a forward", marks=pytest.mark.full) for how in ("dies", "raises")),
    ],
)
def test_no_exit_flushes_what_a_lost_rank_leaves(how, tmp_path):
    """`destroy_process_group` would wait for it until NCCL's watchdog ends the process: here, a found deadlock."""
    found = emulated.run(2, left, how, str(tmp_path / "store"), group=None, patience=8.0, expect_errors=True)
    assert found[0] == 0, getattr(found[0], "traceback", found[0])
    assert found[1] == 0 if how.startswith("raises") else found[1].type == "Died", found[1]


def left_beside_the_programs_own(store):
    """An exception ends both, while the device of one waits in three groups of the program's own. Behind a program's last
    line Python 3.12 starts no threads."""
    groups.ABORTING = 1.0
    at_end = started(store)
    dist.init_process_group("cpu:gloo,emu:emuccl", timeout=timedelta(seconds=20))
    own = [dist.group.WORLD, *(dist.new_group(backend="emuccl") for _ in range(2))]
    model, optimizer, _ = sharded(3, comm=Comm(timeout=20))
    step(model, optimizer, 0)
    sums = [torch.ones(1, device="emu") for _ in own]
    for total, group in zip(sums, own, strict=True):
        dist.all_reduce(total, group=group)
    torch.emu.synchronize()
    if ranks.rank() == 0:
        for total, group in zip(sums, own, strict=True):
            dist.all_reduce(total, group=group, async_op=True)
    dist.broadcast(torch.zeros(1), 0)  # by gloo

    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threading.Thread.start = start
    sys.last_value = Tripped()
    for call in reversed(at_end):
        call()
    torch.emu.synchronize()
    return "through"


def test_an_exit_by_an_exception_ends_the_programs_own_collectives_too(tmp_path):
    """A thread for each of them was started before."""
    arguments = str(tmp_path / "store")
    found = emulated.run(2, left_beside_the_programs_own, arguments, group=None, patience=15.0)
    assert found == ["through"] * 2


def stays(store):
    """Both end by themselves, while their devices still work."""
    at_end = started(store)
    model, optimizer, _ = sharded(1)
    step(model, optimizer, 0)
    a_slow_kernel()
    step(model, optimizer, 1)
    return ended(at_end, None)


def test_an_exit_without_a_loss_lets_the_device_get_through(tmp_path):
    """Nothing is aborted: the program's own group, and those of data, are flushed."""
    assert all(waits > 0 for waits in emulated.run(2, stays, str(tmp_path / "store"), group=None, patience=8.0))


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


@pytest.mark.parametrize("asks", [False, pytest.param(True, marks=pytest.mark.full)], ids=["runs-ahead", "asks"])
def test_data_of_a_rank_that_stood_in_never_becomes_weights(asks):
    """The others ran ahead, with gathers of which it had no part, or their hosts wait for these; all try again, with the
    bits of plain torch."""
    ahead, tripped = emulated.run(2, tries_again, 3, asks, patience=8.0)
    assert (ahead[0], tripped[0]) == ("PeerError", "Tripped")


KINDS = {"Ctrl-C": KeyboardInterrupt, "no memory": torch.OutOfMemoryError}


class Strikes:
    """An exception before or after a launch of this rank's, of what the device's queue has. Counts what recovery takes."""

    def __init__(self):
        self.seen, self.at, self.kind, self.after, self.allocated = 0, 0, KeyboardInterrupt, False, 0
        launch, level = Link.launch, Link.level

        def launching(link, stream, *args):
            self.seen += stream.queued
            strikes = stream.queued and self.seen == self.at
            if strikes and not self.after:
                raise self.kind
            handle = launch(link, stream, *args)
            if strikes:
                raise self.kind
            return handle

        def levelling(link, why):
            with emulated.counted() as counts:
                told = level(link, why)
            self.allocated += counts.allocations.total()
            return told

        Link.launch, Link.level = launching, levelling
        self.level = level.__code__


def beside_another_model():
    """A rank is taken out of a forward, when the other one's device has come to what another model gathers."""
    groups.ABORTING = 1.0
    strikes, errors = Strikes(), []
    model, optimizer, zero = sharded(3)
    other, stepper, kept = sharded(3, comm=Comm(timeout=20))
    for each in ((model, optimizer), (other, stepper)):
        step(*each, 0)
    total = torch.ones(1, device="emu")
    torch.emu.synchronize()
    if ranks.rank() == 0:
        dist.all_reduce(total, group=kept._engine.group._groups.gathers.group, async_op=True)
    strikes.seen, strikes.at = 0, 3 * ranks.rank()
    while True:
        try:
            optimizer.zero_grad()
            value = loss(model, batch(1, ranks.rank()))
            value.item()
            value.backward()
            optimizer.step()
            break
        except (KeyboardInterrupt, PeerError) as error:
            errors.append(type(error).__name__)
    assert_plain(model, zero)
    with pytest.raises(PeerError) as caught:
        stepper.step()
    return errors, str(caught.value)


@pytest.mark.row(89)
def test_a_model_whose_collectives_end_with_anothers_is_lost_on_all_ranks():
    """What it gathers may be anything then: it steps and saves no more."""
    (ahead, first), (struck, second) = emulated.run(2, beside_another_model, patience=8.0)
    assert (ahead, struck) == (["PeerError"], ["KeyboardInterrupt"])
    for told in (first, second):
        assert "rank 0 aborted them with those of other groups on its device" in told, told


class Again:
    """Ctrl-C at one line of the levelling that follows, of these files."""

    FILES = tuple(each.__file__ for each in (collectives, abort, groups, watch, launch_log))

    def __init__(self, line, level):
        self.left, self.begun, self.level = line, False, level

    def trace(self, frame, event, argument):
        self.begun |= frame.f_code is self.level
        if not self.begun or frame.f_code.co_filename not in self.FILES:
            return None if self.begun else self.trace
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.trace


def struck(stage, cases, asks):
    """Second steps that a rank is taken out of at a launch, and tried again. asks: all hosts wait for their devices,
    "inside": inside the forward.
    cases: the rank, the launch, by what, after it?, and the line of the levelling at which it is taken out of that."""
    strikes, found = Strikes(), []
    for whom, at, kind, after, line in cases:
        model, optimizer, zero = sharded(stage, torch.emu.synchronize if asks == "inside" else lambda: None)
        step(model, optimizer, 0)
        mine, errors, stepped = ranks.rank() == whom, [], False
        strikes.seen, strikes.at, strikes.kind, strikes.after = 0, at * mine, KINDS[kind], after
        again = Again(line, strikes.level)
        while True:
            try:
                sys.settrace(again.trace if mine and line else None)
                if not stepped:
                    optimizer.zero_grad()
                    value = loss(model, batch(1, ranks.rank()))
                    if asks is True:
                        value.item()
                    value.backward()
                    if asks is True:
                        torch.emu.synchronize()
                    optimizer.step()
                    stepped, strikes.at = True, 0
                assert_plain(model, zero)
                break
            except (*KINDS.values(), PeerError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                if "zero.load(" in errors[-1] or len(errors) > 5:
                    break
            finally:
                sys.settrace(None)
        found.append(errors)
    return found, strikes.allocated


def check_struck(world, stage, cases, asks=True, **options):
    """Who was taken out of a step has its own errors, and the others one for each; and then plain torch's bits, or the
    same word on all ranks that weights are of no step: of a rank that had begun to update them."""
    found = emulated.run(world, struck, stage, cases, asks, patience=10.0, **options)
    assert [allocated for _, allocated in found] == [0] * world
    for case, *told in zip(cases, *(errors for errors, _ in found), strict=True):
        torn = [errors[-1:] and "zero.load(" in errors[-1] for errors in told]
        assert all(torn) or not any(torn), (case, told)
        for rank, errors in enumerate(told):
            first = KINDS[case[2]].__name__ if rank == case[0] else "PeerError"
            assert len(errors) <= 4 and all(each.startswith(first) for each in errors[:1]), (case, told)
    return found


def without_an_abort(kept=False):
    """A rank is taken out of a forward, and no group of data is aborted."""
    if not kept:
        groups.Groups._abort = lambda self: None
    try:
        return struck(3, [(1, 3, "Ctrl-C", False, 0)], True)
    except RuntimeError as error:
        os._exit(7 if "nothing has run for 3 s" in str(error) else 8)  # the other one waits for this rank


def aborting_one_after_the_other():
    """A rank is taken out of a forward, and each group is aborted when the one before is."""

    def in_turn(calls):
        for call in reversed(calls.values()):
            call()
        return SimpleNamespace(wait=lambda limit: None, late=[])

    groups.AtOnce = in_turn
    return without_an_abort(kept=True)


@pytest.mark.full
def test_aborts_one_after_the_other_wait_for_ever():
    """Each for the kernels of the next communicator, as on the first GPU that this ran on."""
    waits, _ = emulated.run(2, aborting_one_after_the_other, patience=3.0, expect_errors=True)
    assert waits.type == "Died" and "exit code 7 " in waits.message, waits


@pytest.mark.full
def test_without_an_abort_a_host_and_its_device_wait_for_ever():
    """The next test would find it: a deadlock of a host that waits for its device."""
    waits, _ = emulated.run(2, without_an_abort, patience=3.0, expect_errors=True)
    assert waits.type == "Died" and "exit code 7 " in waits.message, waits


@pytest.mark.heavy
@pytest.mark.row(59)
@pytest.mark.row(89)
@pytest.mark.parametrize(
    ("world", "stage"),
    [(2, 3), *(pytest.param(*each, marks=pytest.mark.full) for each in [(2, 0), (2, 1), (2, 2), (3, 1), (3, 3)])],
)
def test_a_rank_whose_host_waits_for_its_device_hears_of_an_interrupt(world, stage):
    """What nobody will launch is aborted on all ranks, without memory of the device, and the step is tried again."""
    in_forward, in_backward, there = (3, 12, 9) if stage == 3 else (3, 5, 4)  # without parts all of these in backward
    cases = [
        (1, in_forward, "Ctrl-C", False, 0),
        (1, in_backward, "no memory", True, 0),
        (0, there, "Ctrl-C", True, 60),  # and once more, where what is under way is ended
    ]
    found = check_struck(world, stage, cases)
    for errors, _ in found:
        assert all(errors) and "zero.load(" not in str(errors)
    told = found[0][0][0][0]
    assert told.startswith("PeerError: a rank was interrupted: all ranks have ended the same collectives"), told
    assert "rank 1: an exception ended" in told, told


def ends_with_a_gather_ahead():
    """All ranks leave the second step's forward: rank 1 before it launches a gather that rank 0 has launched ahead of
    use, and still holds."""
    strikes, armed, errors = Strikes(), [], []

    def trip():
        if armed:
            armed.clear()
            raise Tripped

    model, optimizer, zero = sharded(3, trip)
    step(model, optimizer, 0)
    armed += [True] * (ranks.rank() == 0)
    strikes.seen, strikes.at = 0, 3 * ranks.rank()  # after a buffer and the first block
    while True:
        try:
            optimizer.zero_grad()
            loss(model, batch(1, ranks.rank())).backward()
            optimizer.step()
            break
        except (Tripped, KeyboardInterrupt, PeerError) as error:
            errors.append(type(error).__name__)
    assert_plain(model, zero)
    return errors


def test_what_was_gathered_ahead_and_cut_off_is_gathered_anew():
    """An abort leaves any numbers there, and no forward of this rank's was to release them."""
    found = emulated.run(2, ends_with_a_gather_ahead, patience=8.0)
    assert [errors[0] for errors in found] == ["Tripped", "KeyboardInterrupt"]


def test_a_host_that_waits_inside_a_forward_is_called_out_of_it():
    """It waits behind a gather that the interrupted rank has not launched, and looks at nothing."""
    cases = [(1, at, "Ctrl-C", False, 0) for at in (1, 2, 3)]
    for errors, _ in check_struck(2, 3, cases, asks="inside"):
        assert all(errors) and "zero.load(" not in str(errors)


def one_has_forgotten_a_model(stage):
    """Python collects a model that was dropped on all ranks, on one of them in the middle of a levelling."""
    gc.disable()
    old = sharded(stage)
    step(*old[:2], 0)
    model, optimizer, zero = sharded(stage)
    step(model, optimizer, 0)
    gone = weakref.ref(old[0])
    del old
    assert gone() is not None
    strikes, levelled = Strikes(), ProcessGroup.levelled
    strikes.at = 3 * ranks.rank()

    def collecting(group, *args):
        if ranks.rank() == 1:
            gc.collect()
        levelled(group, *args)

    ProcessGroup.levelled = collecting
    told = []
    while len(told) < 5:
        try:
            step(model, optimizer, 1)
            break
        except (KeyboardInterrupt, PeerError) as error:
            told.append(type(error).__name__)
        torch.emu.synchronize()  # what was launched has ended
    assert_plain(model, zero)
    gc.collect()
    assert gone() is None
    return told


def test_a_model_that_one_rank_has_forgotten_is_sent_by_none():
    """After an interrupt all send anew what owners have updated: of models that live on all ranks, to the end of that."""
    found = emulated.run(2, one_has_forgotten_a_model, 2, patience=8.0)
    assert found == [["PeerError"], ["KeyboardInterrupt"]]


@pytest.mark.row(89)
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_interrupts_at_drawn_launches_change_no_bit(world, stage, seed):
    """Of drawn ranks, before and after, where hosts wait and where they run ahead; half of them interrupted again at a
    line of the levelling."""
    draw = random.Random(f"{world} {stage} {seed}")
    lines = [0, 0, *range(1, 250)]
    cases = [
        (draw.randrange(world), draw.randrange(1, 22), draw.choice([*KINDS]), draw.random() < 0.5,
         draw.choice(lines) * (draw.random() < 0.5))
        for _ in range(10)
    ]  # fmt: skip
    check_struck(world, stage, cases, draw.random() < 0.5, seed=seed, timeout=600)


# --- what gets through by itself --------------------------------------------------------------------------------------

ALL = [0, 1]


@pytest.mark.parametrize(
    ("told", "limits"),
    [
        ([[(3, ALL, [(3, 0)])], [(2, ALL, [])]], [2]),
        # Rank 0's device comes to the sum only after a gather that rank 1 has not launched,
        ([[(2, ALL, [(2, 0)]), (1, ALL, [(1, 1)])], [(1, ALL, []), (1, ALL, [(1, 0)])]], [1, 0]),
        # or before it,
        ([[(2, ALL, [(2, 1)]), (1, ALL, [(1, 0)])], [(1, ALL, []), (1, ALL, [(1, 0)])]], [1, 1]),
        # and what rank 1's comes to after that sum is not through either.
        (
            [
                [(2, ALL, [(2, 0)]), (1, ALL, [(1, 1)]), (1, ALL, [])],
                [(1, ALL, []), (1, ALL, [(1, 0)]), (1, ALL, [(1, 1)])],
            ],
            [1, 0, 0],
        ),
        ([[(4, ALL, [(4, 7)])], [(4, ALL, [(3, 1), (4, 2)])]], [4]),
    ],
)
def test_what_gets_through_by_itself_is_what_no_device_waits_for_in_vain(told, limits):
    assert [abort.complete(told)[place, (0, 1)] for place in range(len(limits))] == limits


# --- a vote ---------------------------------------------------------------------------------------------------------------


class Failed(Exception):
    pass


def votes_by_the_device(stage, where):
    """Rank 1 fails once in the second step; all vote over the program's own group in the device's queue, and try again."""
    failing, told = [ranks.rank() == 1], []

    def fails(*_):
        if number == 1 and failing[0]:
            failing[0] = False
            raise Failed

    model, optimizer, zero = sharded(stage, trip=lambda: fails() if where == "forward" else None)
    if where == "backward":
        model.blocks[1].register_forward_hook(lambda _, __, out: out.register_hook(fails) and None)
    for number in range(2):
        for _ in range(4):
            worked = False
            try:
                loss(model, batch(number, ranks.rank())).backward()
                worked = True
            except (Failed, PeerError) as error:
                told.append(f"{type(error).__name__}: {error}")
            flag = torch.tensor([int(worked)], dtype=torch.int32).to("emu")
            dist.all_reduce(flag, dist.ReduceOp.SUM)
            if flag.item() == ranks.world():
                break
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    assert_plain(model, zero)
    return told


@pytest.mark.row(3)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_vote_in_the_devices_queue_gets_through(where, stage):
    """What the others have in that queue for the failed rank ends, so that their votes do; then all have plain bits."""
    others, failed = emulated.run(2, votes_by_the_device, stage, where, patience=8.0, group_timeout=1000.0)
    assert [each.partition(":")[0] for each in failed] == ["Failed"]
    (heard,) = others
    assert heard.startswith("PeerError: another rank has left what this rank is at"), heard
    assert {"forward": "rank 1: forward 2 raised Failed", "backward": "rank 1: an exception ended backward 2"}[
        where
    ] in heard
