"""What the host does on an accelerator: kernels it launches and numbers it waits for, counted on tensors on "meta".

These have no values, and take the branches of a device on a machine that has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
import verbs
import zeroshard
from zeroshard import Comm, device
from zeroshard.arithmetic import exact_norms, fp8, int8, split_bits, sums
from zeroshard.checkpoint import saving
from zeroshard.comm import groups, replicate_axis
from zeroshard.comm.abort import AtOnce, prepare
from zeroshard.comm.agreement import Group, Progress
from zeroshard.comm.collectives import SLICE, Link
from zeroshard.comm.groups import backend_for
from zeroshard.comm.replicate_axis import Column
from zeroshard.comm.transport import Team
from zeroshard.engine.build import preflight
from zeroshard.engine.gradients.contribution import ContributionState
from zeroshard.engine.gradients.gradient import Gradients
from zeroshard.engine.gradients.sums import Sent
from zeroshard.errors import PeerError, UserError
from zeroshard.events import Ledger
from zeroshard.features.replica_chain import Relay
from zeroshard.hooks import features, first
from zeroshard.layout.partition import Spec, partition
from zeroshard.layout.stage import seat
from zeroshard.policies.layout import Layout

VIEWS = {"slice", "view", "_unsafe_view", "unbind", "detach", "alias", "as_strided", "select", "unsqueeze"}
WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero"}


class Launches(TorchDispatchMode):
    """Counts the kernels that are launched inside."""

    def __init__(self):
        super().__init__()
        self.kernels = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        masks = [at for at in args[1] if at is not None and at.dtype == torch.bool] if name == "index" else []
        if name not in VIEWS and not name.startswith("empty"):
            self.kernels["a boolean index" if masks else name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches():
    with Launches() as found:
        yield found.kernels


def meta(numel, dtype=torch.float32):
    return torch.empty(numel, dtype=dtype, device="meta")


def test_the_host_waits_for_a_devices_numbers_in_one_counted_place():
    tensor = torch.ones(3)
    before = Counter(device.asked)
    assert device.ask(tensor) is tensor and device.equal(tensor, tensor)
    with FakeTensorMode():
        assert device.ask(torch.empty(3, device="cuda")).is_cpu
    assert device.asked - before == {"test_device.test_the_host_waits_for_a_devices_numbers_in_one_counted_place": 1}


def test_a_number_on_a_device_is_not_looked_at():
    """Gradients may be scaled by one that differs on the ranks, and nobody says so: that would wait for the device."""
    book = Gradients(Group(Team(Ledger(), torch.device("cpu"))), None)
    before = Counter(device.asked)
    with FakeTensorMode():
        number = torch.ones((), device="cuda")
        book.note_edit("mul_", number)
    book.note_edit("mul_", torch.tensor(0.5))
    assert device.asked == before and book.edits == ["mul_ 0.5"]


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pieces", [2, 8])
def test_a_sum_on_a_device_launches_one_kernel_for_each_contribution(launches, sent, pieces):
    """Of any length up to 16 M elements: 16 bits are cast inside the addition."""
    total = meta(3_000_000)
    sums.fold(total, [meta(3_000_000, sent) for _ in range(pieces)], start=None)
    assert launches == {"copy_": 2, "add_": pieces - 1}  # back as well: all that is on meta might be one tensor


def test_a_norm_on_a_device_waits_for_nothing_and_does_not_split_its_shard(launches):
    spans = [(0, 0, 1_000_003), (1, 1_000_064, 2_000_001)]
    blocks = exact_norms.BlockMap(2_000_128, 128, spans, torch.device("meta"))
    launches.clear()
    exact_norms.block_sums(meta(2_000_128), blocks, 1, 2.0)
    assert not launches["a boolean index"] and not WAITS & launches.keys()
    assert launches["add"] == 7  # halvings of 128


def chunked():
    """What is made by everything that handles a few elements at a time, on 600,000 elements."""
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(600_000, generator=generator) for _ in range(3)]
    wide = values[0].clone()
    sums.fold(wide, [values[1].bfloat16(), values[2].bfloat16()], start=wide, times=3, over=3)
    master, seen = values[1].clone(), values[1].bfloat16()
    seen[77::5000] = 2.0
    sums.reseed_(master, seen)
    lower, ties = torch.empty(600_000, dtype=torch.int16), torch.empty(75_000, dtype=torch.uint8)
    split_bits.split_(values[2], lower, ties)
    joined = torch.empty(600_000)
    split_bits.join_(joined, values[2].bfloat16(), lower, ties)
    blocks = exact_norms.BlockMap(599_936, 128, [(0, 0, 300_001), (1, 300_032, 599_900)], torch.device("cpu"))
    squares = exact_norms.block_sums(values[0][:599_936], blocks, 3, 2.0)
    tiles = fp8.grid((600, 1000), "128x128")
    scales, raw, numbers = (
        fp8.scales_of(values[0], tiles),
        torch.empty(600_000, dtype=torch.uint8),
        torch.empty(600_000),
    )
    fp8.quantise_(raw, values[0], fp8.as_fp32(scales), tiles)
    fp8.dequantise_(numbers, raw, fp8.as_fp32(scales), tiles)
    (bucket,) = partition([Spec("w", (4687, 128), "float32", 4, 0, True)], Layout(bucket_mib=64), 1).buckets
    message = torch.empty(int8.nbytes(bucket.numel), dtype=torch.uint8)
    int8.encode_(message, values[0][: bucket.numel].clone(), bucket)
    return [wide, master, lower, ties, joined, squares, scales, raw, numbers, message]


def test_how_many_elements_are_handled_at_a_time_changes_no_bit(monkeypatch):
    want = chunked()
    monkeypatch.setattr(device, "CHUNK", device._AT_ONCE)
    assert all(map(sums.same_bits, chunked(), want))


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float16])
def test_a_cast_inside_an_addition_has_the_bits_of_one_before_it(monkeypatch, sent):
    """What a device does, on every number of 16 bits."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(sent)
    start = torch.randn(every.numel(), generator=torch.Generator().manual_seed(3))
    want, got = start.clone(), start.clone()
    sums.fold(want, [every], start=want)
    monkeypatch.setattr(sums, "_cast_first", lambda piece, total: False)
    sums.fold(got, [every], start=got)
    assert sums.same_bits(got, want)


def test_random_states_of_a_device_are_those_of_the_models_own_index(monkeypatch):
    asked = []

    class Module:
        @staticmethod
        def get_rng_state(device):
            asked.append(device)
            return torch.tensor([1, 2], dtype=torch.uint8)

        @staticmethod
        def set_rng_state(state, device):
            asked.append((state.tolist(), device))

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    from zeroshard.rng import parsed_rng, restore_rng, rng_states

    third = torch.device("cuda", 3)
    states = rng_states(third)
    assert states["cuda"] == "0102" and "cuda" not in rng_states(torch.device("cpu"))
    restore_rng(parsed_rng(states, third), third)
    assert asked == [third, third, ([1, 2], third)]
    with pytest.raises(ValueError, match="random number generator of cuda:3"):
        parsed_rng(states | {"cuda": "010203"}, third)
    assert parsed_rng(states, torch.device("cpu")).device is None


class Accelerator:
    """What torch says of two kinds of GPU."""

    def __init__(self, name):
        self.name = name

    def get_device_name(self, device):
        return self.name

    def get_device_capability(self, device):
        return 9, 0


def test_ranks_on_devices_that_compute_otherwise_are_refused(monkeypatch):
    """And told in what they differ: kind, versions, flags. A checkpoint says what wrote it."""
    told, cuda = [], torch.device("cuda", 1)
    for name, override in (("H100", "1"), ("H100", "0"), ("A100", "1")):
        monkeypatch.setattr(torch, "get_device_module", lambda device, name=name: Accelerator(name))
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
        told.append(
            {f"device: {what}": said for what, said in device.describe(cuda).items()} | {"problem": None, "seed": 1}
        )
    assert told[0]["device: capability"] == "(9, 0)" and preflight.agree([told[0], told[0]], None) == 1
    for other, words in ((1, "NVIDIA_TF32_OVERRIDE\n  expected: 1"), (2, "name\n  expected: H100")):
        with pytest.raises(PeerError, match=f"where: device: {words}"):
            preflight.agree([told[0], told[other]], None)
    assert device.describe(torch.device("cpu")) == {}


def test_a_checkpoint_says_what_device_wrote_it(monkeypatch, tmp_path):
    model = nn.Linear(2, 2)
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=0)
    for number, said in enumerate(({}, {"name": "H100"})):
        monkeypatch.setattr(saving, "describe", lambda device, said=said: said)
        zero.save(tmp_path / f"{number}")
        assert json.loads((tmp_path / f"{number}" / "manifest.json").read_text())["manifest"].get("device", {}) == said
        zero.load(tmp_path / f"{number}")


# --- collectives in a device's queue ----------------------------------------------------------------------------------


class Handle:
    """A collective of NCCL's: a wait with a time-out that runs out aborts the whole group."""

    def __init__(self, asked=3):
        self.left, self.waits = asked, []

    def is_completed(self):
        self.left -= 1
        return self.left < 0

    def wait(self, *timeout):
        self.waits.append(timeout)
        return True


def link():
    """One of a rank whose data moves in a device's queue."""
    found, groups = (
        Link.__new__(Link),
        SimpleNamespace(call=None, levelling=[], queued=True, loss=None, levellings=0, ends=False),
    )
    groups.gathers = SimpleNamespace(levels=None)
    groups.watch, groups.limit = SimpleNamespace(alarm={}, called=0, ask=dict, tell=lambda culprits: None), 60.0
    groups.aborted = []
    groups.abort = lambda: groups.aborted.append(found.lost)
    found.groups, found.ledger, found.progress, found.process, found.rank = groups, Ledger(), Progress(), os.getpid(), 0
    found.behind, found.saves, found._weak = False, False, None
    return found


@pytest.mark.parametrize("bucket", [None, 3], ids=["a broadcast", "a bucket"])
@pytest.mark.parametrize("queued", [True, False])
def test_a_collective_in_a_devices_queue_is_never_given_a_time_out(bucket, queued):
    handle = Handle()
    link().wait("a verb", bucket, handle, queued=queued)
    assert handle.waits == ([()] if queued else [(SLICE,)])
    assert handle.left == (-1 if queued and bucket is None else 3)  # polled, where what comes is needed here


def test_a_rank_that_waits_for_a_queue_hears_that_another_is_lost():
    waiting, handle = link(), Handle(asked=10**9)
    waiting.groups.watch.alarm[1] = "is gone: its process has ended"
    with pytest.raises(PeerError, match="rank 1 is gone"):
        waiting.wait("a broadcast", None, handle, queued=True)
    assert not handle.waits and waiting.groups.aborted == [True]  # before it asks the others


def test_a_collective_in_a_devices_queue_is_given_up_at_our_own_time_out():
    """NCCL's comes later, and ends the program."""
    waiting, handle = link(), Handle(asked=10**9)
    waiting.groups.limit = 0.0
    with pytest.raises(PeerError, match="did not complete"):
        waiting.wait("a broadcast", None, handle, queued=True)
    options = {"timeout": timedelta(seconds=7)}
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_new_group", lambda **options: made.append(options["timeout"].total_seconds()))
        for use in ("gather", "control"):
            groups.Wanted(use, "nccl", [0, 1]).made([0, 1], options, queued=use not in groups.CONTROL)
    assert made == [67.0, 7.0]


def hears_of_a_loss():
    """Rank 1 tells of one, while rank 0 is nowhere near a wait."""
    model = nn.Linear(3, 3)
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=3)
    own, ended = zero._engine.group._groups, []
    if ranks.rank() == 1:
        own.watch.tell({1: "is lost"})
        return own.aborted
    together = threading.Barrier(2)

    def abort(name):
        together.wait(10)  # as CUDA's waits for the other communicator's kernels
        ended.append(name)

    for name, stream in (("gathers", own.gathers), ("reductions", own.reductions)):
        stream.queued, stream.group = True, SimpleNamespace(abort=partial(abort, name))
    prepare(2)
    own.queues = [own.streams.index(stream) for stream in (own.gathers, own.reductions)]
    heard = {"token": own.watch.address[2], "alarm": {1: "is lost"}}
    hears = [threading.Thread(target=own.watch.hear, args=(heard,)) for _ in range(2)]
    for each in hears:
        each.start()
    for each in hears:
        each.join()
    return sorted(ended)


def test_a_rank_that_hears_of_a_loss_ends_what_its_device_waits_for():
    """All groups of data at once, though the program's thread may be inside a wait for the device; and once, though two
    threads hear of it."""
    assert ranks.run(2, hears_of_a_loss) == [["gathers", "reductions"], False]


def at_a_programs_end():
    """As in Python 3.12, which starts no thread behind the program's last line."""
    prepare(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: 1 / 0)
        together, through = threading.Barrier(2), []
        AtOnce(dict.fromkeys(range(2), lambda: through.append(together.wait(10)))).wait(60)
    return sorted(through)


def test_an_interrupt_or_an_exception_leaves_no_call_out(caplog):
    """Half of the aborts of communicators would wait for the other half for ever."""
    through = []

    def slow():
        time.sleep(0.3)
        through.append("through")

    def slow_while_interrupted():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        slow()

    def interrupt(*_):
        raise KeyboardInterrupt

    prepare(2)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            AtOnce({1: slow_while_interrupted, 2: slow}).wait(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert through == ["through"] * 2
    failed = AtOnce({1: lambda: 1 / 0, 2: slow})
    failed.wait(60)
    assert not failed.late and "ZeroDivisionError" in caplog.text
    slowly = AtOnce({1: slow, 2: slow})
    slowly.wait(0.1)
    assert slowly.late == [1, 2]
    slowly.wait(60)  # both threads are still there
    assert not slowly.late


def test_two_that_make_the_same_call_wait_for_one():
    """Else the second one's would take threads that the first one's other calls need."""
    prepare(2)
    waits, made = threading.Event(), []

    def call():
        made.append(waits.wait(10))

    first = AtOnce({1: call})
    second = AtOnce({1: call, 2: waits.set})
    for each in (first, second):
        each.wait(10)
        assert not each.late
    assert made == [True]


def test_aborts_at_a_programs_end_start_no_thread():
    assert ranks.run(1, at_a_programs_end) == [[0, 1]]


@pytest.mark.parametrize(
    ("config", "kind", "backend"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cuda:nccl", "cpu", "gloo"),  # which has none for it: the usual one
        ("cpu:gloo", "xpu", "xccl"),
        ("cpu:gloo,cuda:gloo", "cuda", "gloo"),
    ],
)
def test_data_moves_by_the_backend_of_its_device(monkeypatch, config, kind, backend):
    """Also of groups that have one for each kind of device."""
    monkeypatch.setattr(dist, "get_backend_config", lambda parent: config)
    assert backend_for(torch.device(kind), None) == backend


def test_a_device_that_no_backend_is_known_for_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda parent: "cpu:gloo")
    with pytest.raises(UserError, match=r"device mtia, a process group of cpu:gloo"):
        backend_for(torch.device("mtia"), None)


def tensors_of_the_host():
    """A rank's groups for data refuse them, as NCCL does: they go through the group for control."""
    model = nn.Linear(3, 3)
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=1)
    group, groups = zero._engine.group, zero._engine.group._groups
    group.device, control, data = torch.device("meta"), groups.control.count, groups.broadcasts.count
    sent = torch.full((4,), float(ranks.rank()))
    group.broadcast(sent, 1)
    return sent.tolist(), groups.control.count - control, groups.broadcasts.count - data


def test_tensors_of_the_host_are_broadcast_beside_those_of_a_device():
    """Random states from which models on meta are made, and an optimizer's states beside offloaded weights."""
    assert ranks.run(2, tensors_of_the_host) == [([1.0] * 4, 1, 0)] * 2


# --- division ---------------------------------------------------------------------------------------------------------


class Reciprocals(TorchDispatchMode):
    """Divides as CUDA's kernel does: by a number of Python's it multiplies by the reciprocal, which is rounded."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("aten::div") and not isinstance(args[1], torch.Tensor):
            reciprocal = torch.tensor(1.0) / torch.tensor(float(args[1]))
            multiply = torch.ops.aten.mul_ if func._schema.name.endswith("_") else torch.ops.aten.mul
            return multiply.Tensor(args[0], reciprocal)
        return func(*args, **(kwargs or {}))


def test_such_a_device_divides_otherwise():
    values = torch.arange(1.0, 100.0)
    with Reciprocals():
        wrong = values / 3
    assert not torch.equal(wrong, values / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 7, 8, 24, 127, 1000])
def test_an_average_is_a_true_division_on_every_device(dtype, ranks):
    """With 16 bits too, which have no 1,000 ... 1,023 but one in four."""
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(ranks)).to(dtype)
    want, got = (
        (values.to(torch.float64) / ranks).to(torch.promote_types(dtype, torch.float32)).to(dtype),
        values.clone(),
    )
    with Reciprocals():
        sums.average_(got, ranks)
    assert sums.same_bits(got, want)


def test_codes_of_8_bits_are_the_same_on_every_device():
    (bucket,) = partition([Spec("w", (300, 128), "float32", 4, 0, True)], Layout(bucket_mib=64), 1).buckets
    values = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(1))
    want, got = (torch.empty(int8.nbytes(bucket.numel), dtype=torch.uint8) for _ in range(2))
    int8.encode_(want, values.clone(), bucket)
    with Reciprocals():
        int8.encode_(got, values.clone(), bucket)
    assert sums.same_bits(got, want)


class Second(Column):
    """The second of three replicas: what it launches."""

    def __init__(self, team):
        super().__init__(team)
        self.launched = []

    def hand_on(self, running, source):
        return self.launched.append(f"on from {source}") or []

    def hand_back(self, average):
        return self.launched.append("back") or []


@pytest.mark.parametrize("queued", [True, False])
def test_a_replica_takes_a_sum_when_it_is_ready_for_it(queued):
    """On a device, where a receive that waits takes processors of it; and what comes back once this part is sent."""
    team, (bucket,) = (
        Team(Ledger(), torch.device("cpu"), seat(1, 3, 3)),
        partition([Spec("w", (64,), "float32", 4, 0, True)], Layout(), 1).buckets,
    )
    team.queued, team.column = queued, (end := Second(team))
    relay = Relay(team, bucket, torch.zeros(bucket.numel), torch.zeros(bucket.numel))
    assert end.launched == ([] if queued else ["on from 0", "back"])
    arrived, sent = (
        [],
        Sent(
            SimpleNamespace(state=ContributionState.SENT),
            SimpleNamespace(done=lambda: bool(arrived)),
            None,
            relay,
            device.DeviceEvent(),
        ),
    )
    assert not sent.here() and end.launched == ([] if queued else ["on from 0", "back"])
    arrived.append(True)
    assert sent.here() and sent.here() and end.launched == (["on from 0"] if queued else ["on from 0", "back"])
    relay.send()
    assert end.launched == (["on from 0", "on from 1", "back"] if queued else ["on from 0", "back", "on from 1"])
    relay.send()
    assert len(end.launched) == 3


def trained_by_replicas(replicas, queued):
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = Comm(replicas=replicas)
    zero = zeroshard.shard(model, optimizer, stage=3, comm=settings, layout=Layout(bucket_mib=0.001))
    zero._engine.group.team.queued, losses = queued, []
    for step in range(3):
        loss = model(torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + zero.rank))).square().mean()
        loss.backward()
        losses.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("world", "replicas"), [(3, 3), (4, 2)])
def test_replicas_have_the_same_bits_whenever_they_take_a_sum(world, replicas):
    want = ranks.run(world, trained_by_replicas, replicas, False)
    assert ranks.run(world, trained_by_replicas, replicas, True) == want


# --- connections of the host -------------------------------------------------------------------------------------------


def sockets():
    """Of this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def connections(lazy):
    before, options = sockets(), {"ranks": [*range(ranks.world())], "use_local_synchronization": True}
    group = groups._new_group(lazy=lazy, backend="gloo", **options)
    made = sockets() - before
    dist.barrier()  # none sends before all have counted: that connects to ranks that are behind
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [float(ranks.world())] * 3 and groups._LAZY not in os.environ
    return made


def test_the_group_of_all_ranks_connects_two_of_them_where_they_send_something():
    """Else each holds a connection to each: gloo cannot make those of more than a thousand ranks."""
    world = 6
    assert min(ranks.run(world, connections, False)) >= world - 1
    assert max(ranks.run(world, connections, True)) <= 2


def test_a_thousand_ranks_agree_over_few_connections():
    """Beside NCCL: along the axes of the grid each to each, and lazily all."""
    found = [each for each in groups._wanted(0, 1024, seat(0, 1024, 1), None, "nccl") if each.backend == "gloo"]
    assert [(each.use, len(each.members), each.lazy) for each in found] == [
        ("control", 1024, True),
        *[("axis", length, False) for length in (8, 8, 8, 2)],
    ]
    assert sum(each.sockets for each in found) == 63


def connects(replicas):
    """What is called to connect the ranks of so many replicas."""
    model, called = nn.Linear(3, 3), []
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=3, comm=Comm(replicas=replicas))
    own = zero._engine.group._groups
    wanted = groups._wanted(ranks.rank(), 2, own.seat, None, "gloo")
    own.queues = [at for at, each in enumerate(wanted) if each.use not in groups.CONTROL]
    own._connecting = torch.zeros(2 * groups.CONNECTING, dtype=torch.uint8)
    uses = {id(stream.group): each.use for each, stream in zip(wanted, own.streams, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        for verb in (verbs.NAMES["all_gather_single"], "all_to_all_single", "broadcast", "all_reduce"):
            call = getattr(dist, verb)

            def calls(tensor, *args, group, verb=verb, call=call):
                called.append((uses[id(group)], verb, tensor.numel() * tensor.itemsize))
                call(tensor, *args, group=group)

            patch.setattr(dist, verb, calls)
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        warned = []
        patch.setattr(replicate_axis.log, "warning", lambda *said: warned.append(said))
        team = zero._engine.group.team
        team.queued, _ = True, vars(team).pop("column", None)
        assert (first(each.column(team) for each in features()) is None) == (replicas == 1)
        own._connect([own.streams[at].group for at in own.queues])
    assert len(warned) == (replicas > 1 and ranks.rank() == 0)
    return called


def test_groups_in_a_devices_queue_are_connected_in_one_order_before_they_are_used():
    """By what each of them will carry, small and large; then all ranks meet. Not a group of one rank, such as a team of one."""
    large, end = 4 << 20, ("control", "all_reduce", 4)
    gathers = [("gather", verb) for verb in (verbs.NAMES["all_gather_single"], "broadcast")]
    reductions = [("reduce", "all_to_all_single", n) for n in (2, large)]
    both = [(*each, n) for n in (2, large) for each in (*gathers, ("gather", "all_reduce"))] + reductions
    pair = [(use, "broadcast", n) for use in ("pair", "copies") for n in (2, large)]
    everyone = [("broadcast", verb, n) for n in (2, large) for verb in ("broadcast", "all_reduce")]
    assert ranks.run(2, connects, 1) == [[*both, end]] * 2
    assert ranks.run(2, connects, 2) == [[*everyone, *pair, end]] * 2


def bound_where_groups_are_made(part):
    """The device that torch would split new groups by, where the first ranks of the program shard, or all."""
    found, make, group = [], dist.new_group, dist.new_group([0, 1]) if part else dist.group.WORLD

    def makes(**options):
        found.append(dist.group.WORLD.bound_device_id)
        return make(**options)

    dist.group.WORLD.bound_device_id, dist.new_group = torch.device("cuda", 0), makes
    if not part or ranks.rank() < 2:
        model = nn.Linear(3, 3)
        zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=3, comm=Comm(group=group))
    dist.new_group, bound, dist.group.WORLD.bound_device_id = make, dist.group.WORLD.bound_device_id, None
    return found, bound


def bound_by_backend():
    """The device that torch would split a new group by, for a backend and whether other ranks make no group."""
    found, own = {}, torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.group.WORLD, "bound_device_id", own)
        for backend, alone in (("gloo", False), ("nccl", False), ("nccl", True)):
            patch.setattr(dist, "new_group", lambda **options: dist.group.WORLD.bound_device_id)
            found[backend, alone] = groups._new_group(backend=backend, alone=alone)
            assert dist.group.WORLD.bound_device_id == own
    return found


def test_ranks_that_shard_among_themselves_split_nothing_from_all():
    """Which all would have to take part in: those that do not shard never come. Nor is a group of gloo ever split."""
    own = torch.device("cuda", 0)
    assert ranks.run(3, bound_where_groups_are_made, True) == [([None] * 3, own)] * 2 + [([], own)]
    assert ranks.run(2, bound_where_groups_are_made, False) == [([None] * 3, own)] * 2
    assert ranks.run(1, bound_by_backend) == [{("gloo", False): None, ("nccl", False): own, ("nccl", True): None}]


def test_a_program_that_starts_here_tells_torch_of_its_device(monkeypatch):
    told = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: told.update(options, backend=backend))
    monkeypatch.setattr(groups.atexit, "register", lambda function: None)
    monkeypatch.setattr(groups, "find_master", lambda environment: None)
    for where, want in (("cuda:3", ("nccl", torch.device("cuda", 3))), ("cpu", ("gloo", None))):
        groups.start(Comm(timeout=9.0), torch.device(where))
        assert (told["backend"], told["device_id"], told["timeout"].total_seconds()) == (*want, 9.0)


# --- after an interrupt ------------------------------------------------------------------------------------------------


class Interrupt(Exception):
    pass


def interrupted_as_it_publishes(stage):
    """Rank 1 is interrupted before it sends what it has edited, and rank 0 waits for that. All weights, read later."""
    torch.manual_seed(5)
    model, told, launch = nn.Linear(6, 6), [], Link.launch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(align=1), comm=Comm(transport="gloo"))

    def interrupted(link, stream, what, *call):
        if what[0] == "broadcast" and "parameters" in what:
            Link.launch = launch
            raise Interrupt
        return launch(link, stream, what, *call)

    try:
        with zero.gathered(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
            if ranks.rank() == 1:
                Link.launch = interrupted
    except (Interrupt, PeerError) as error:
        told.append(type(error).__name__)
    with zero.gathered():
        return told, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2])
def test_what_a_rank_sends_that_stands_in_is_its_own(stage):
    """Where every rank keeps all weights, they are not gathered anew: the others would compute with zeros."""
    torch.manual_seed(5)
    want = [(2 * parameter).tolist() for parameter in nn.Linear(6, 6).parameters()]
    assert ranks.run(2, interrupted_as_it_publishes, stage) == [(["PeerError"], want), (["Interrupt"], want)]


@pytest.mark.parametrize(
    ("chosen", "local", "given", "want"),
    [
        (0, "2", "cuda", 2),
        (3, "2", "cuda", 3),
        (0, None, "cuda", 0),
        (0, "9", "cuda", 0),
        (0, "2", "cuda:1", 1),
        (0, "x", "cuda", 0),
    ],
)
def test_a_device_without_an_index_is_that_of_the_local_rank(monkeypatch, chosen, local, given, want):
    """Unless the program has chosen one, or sees fewer devices; it is the program's current one then."""
    now = [chosen]
    module = SimpleNamespace(
        current_device=lambda: now[0], device_count=lambda: 4, set_device=lambda index: now.__setitem__(0, index)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    here = device.current(torch.device(given))
    assert here.index == (chosen if given == "cuda" else want) and now == [chosen]  # a question changes nothing
    assert device.chosen(torch.device(given)) == torch.device("cuda", want)
    assert given != "cuda" or now == [want]


@pytest.mark.parametrize("asked", [None, "cpu"])
def test_idle_devices_are_told_of_once(monkeypatch, caplog, asked):
    """Where a model on the CPU is sharded without `device=`, and an accelerator is there."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    device.warn_of_idle.cache_clear()
    for _ in range(2):
        zeroshard.shard(torch.nn.Linear(2, 2), None, device=asked)
    device.warn_of_idle.cache_clear()
    assert [record.getMessage() for record in caplog.records if "idle" in record.getMessage()] == [
        'the model is on the CPU and trains there, and cuda is idle: shard(..., device="cuda"), then batch.to("cuda")'
    ] * (asked is None)


@pytest.mark.parametrize(
    ("rank", "ranks", "own", "host"), [(0, 2, 0, ""), (1, 2, 1, ""), (3, 4, 1, "rank 3"), (2, 3, 0, "rank 2")]
)
def test_local_ranks_take_turns_on_fewer_devices(monkeypatch, rank, ranks, own, host):
    """Two ranks on one device are hosts of their own to NCCL, which refuses them else; the first device is current."""
    now = [0]
    module = SimpleNamespace(set_device=lambda device: now.__setitem__(0, device.index))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(device, "accelerators", lambda: [torch.device("cuda", at) for at in range(2)])
    monkeypatch.setenv("NCCL_HOSTID", "")
    device.take_own(rank, ranks)
    assert (now[0], os.environ["NCCL_HOSTID"]) == (own, host)
