"""Rows of tests/trust-table.md that belong to no other file: noise, poison, programs of all kinds."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import models
import ranks as rank_processes
import reference
import test_lost_ranks
import zeroshard
from zeroshard import Comm, Layout, Precision
from zeroshard.comm.collectives import Link
from zeroshard.comm.reduce_pipeline import Scratch
from zeroshard.comm.watch import GONE, Watch, _ask
from zeroshard.engine.gradients.reduction import Reduction
from zeroshard.engine.weights.bucket import Bucket
from zeroshard.errors import Error, StateError


def train(stage: int, steps: int = 4, **options):
    """Weights after some steps of a small GPT, each rank on its own batches, and the norms along the way."""
    rank = rank_processes.rank()
    model = models.build("gpt", hidden=12, layers=2, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=stage, **options)
    norms = []
    for step in range(steps):
        models.loss("gpt", model, models.batch("gpt", step, rank)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return reference.weights(model), norms, zero


# --- schedulers while steps are skipped -----------------------------------------------------------------------------------


def rates(stage: int | None, always: bool):
    """Learning rates and weights of 8 steps, every third of which overflows under a GradScaler."""
    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage)
    seen = []
    for index in range(8):
        loss = model(torch.ones(2, 5)).square().sum() * (torch.inf if index % 3 == 1 else 1)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if always or scaler.get_scale() >= before:
            scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
    if zero is None:
        return seen, reference.weights(model)
    with zero.gathered():
        return seen, reference.weights(model)


@pytest.mark.row(15)
@pytest.mark.parametrize("always", [True, False], ids=["every iteration", "steps that were taken"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_schedule_goes_on_over_skipped_steps_as_the_loop_says(ranks, always, stage):
    """Both conventions: the learning rates and the weights of plain PyTorch."""
    wanted, weights = rates(None, always)
    for seen, got in ranks.run(2, rates, stage, always):
        assert seen == wanted and reference.first_difference(got, weights) == ""


# --- poison ---------------------------------------------------------------------------------------------------------------


def padding(bucket: Bucket):
    mask = torch.ones(bucket.plan.numel, dtype=torch.bool)
    for slot in bucket.plan.slots:
        mask[slot.start : slot.stop] = False
    return mask


def poisoned(stage: int, bounds: str, path: str):
    """The same training with NaN in all padding, and in all memory that is handed out for reductions."""
    clean, norms, _ = train(stage, layout=Layout(bounds=bounds))
    take, begin = Scratch.take, Reduction.begin

    def take_poison(self, numel, dtype):
        return take(self, numel, dtype).fill_(torch.nan)

    def poison(self, kept, *, local):
        for contribution in self.contributions.values():
            bucket = contribution.bucket
            mask, (first, last) = padding(bucket), bucket.owned
            low, high = bucket.updated
            for tensor, which in (
                (bucket.target, mask[low:high]),
                (bucket.parameters.of(low, high), mask[low:high]),
                (contribution.accumulator.sum.own, mask[first:last]),
            ):
                tensor[which] = torch.nan
        return begin(self, kept, local=local)

    Scratch.take, Reduction.begin = take_poison, poison
    try:
        spoiled, others, zero = train(stage, layout=Layout(bounds=bounds), precision=Precision(nonfinite="raise"))
        zero.save(path)
        zero.load(path)
        with zero.gathered():
            loaded = reference.weights(zero.model)
    finally:
        Scratch.take, Reduction.begin = take, begin
    held = sum(int(padding(bucket).sum()) for bucket in zero._engine.buckets)
    return reference.first_difference(spoiled, clean), reference.first_difference(loaded, clean), others == norms, held


@pytest.mark.row(17)
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("bounds", ["unit", pytest.param("model", marks=pytest.mark.slow)])
def test_poisoned_padding_is_never_seen(ranks, tmp_path, stage, bounds):
    """NaN in the padding of parameters, sums and buffers: no norm, update, check for NaN or checkpoint shows it."""
    for trained, loaded, norms, held in ranks.run(2, poisoned, stage, bounds, str(tmp_path / "ckpt")):
        assert (trained, loaded, norms) == ("", "", True) and held > 0


# --- noise ----------------------------------------------------------------------------------------------------------------


def delayed(stage: int, seeds: range, comm: Comm):
    """How many of the seeds give other bits, with a random pause before every asynchronous operation."""
    wanted, norms, _ = train(stage)
    launch, other = Link.launch, 0
    try:
        for seed in seeds:
            noise = random.Random(1000 * seed + rank_processes.rank())

            def late(self, *args, noise=noise, **kwargs):
                time.sleep(noise.random() * 0.004 * (noise.random() < 0.3))
                return launch(self, *args, **kwargs)

            Link.launch = late
            got, others, _ = train(stage, layout=Layout(bucket_mib=0.002), comm=comm)
            other += reference.first_difference(got, wanted) != "" or others != norms
    finally:
        Link.launch = launch
    return other


@pytest.mark.full
@pytest.mark.row(31)
@pytest.mark.parametrize("stage", [1, 3])
def test_random_delays_change_no_bit(ranks, stage):
    assert ranks.run(2, delayed, stage, range(2), Comm(prefetch=2)) == [0, 0]


@pytest.mark.row(31)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("comm", [Comm(), Comm(prefetch=3), Comm(overlap=False)], ids=["", "prefetch 3", "no overlap"])
def test_fifty_seeds_of_random_delays_change_no_bit(ranks, stage, world, comm):
    assert ranks.run(world, delayed, stage, range(50), comm, timeout=850) == [0] * world


def twice(stage: int, steps: int):
    return reference.first_difference(train(stage, steps)[0], train(stage, steps)[0])


@pytest.mark.row(33)
def test_the_same_run_twice_has_the_same_bits(ranks, stage):
    assert ranks.run(2, twice, stage, 8) == ["", ""]


# --- threads, forks, and process groups that end --------------------------------------------------------------------------


def on_another_thread(stage: int):
    wanted = train(stage)[0]
    got = []
    thread = threading.Thread(target=lambda: got.append(train(stage)[0]))
    thread.start()
    thread.join()
    return reference.first_difference(got[0], wanted)


@pytest.mark.row(60)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_thread_of_ones_own_trains_the_same_bits(ranks, stage):
    assert ranks.run(2, on_another_thread, stage) == ["", ""]


class Branches(nn.Module):
    """Two blocks, each on a thread of its own: at once, or one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.at_once = False

    def forward(self, x):
        if not self.at_once:
            with ThreadPoolExecutor(1) as one:
                return sum(one.map(lambda block: block(x), self.blocks))
        inside, over = threading.Event(), threading.Event()
        hook = self.blocks[0].register_forward_pre_hook(lambda *_: (inside.set(), over.wait(30))[0])
        with ThreadPoolExecutor(2) as two:
            first = two.submit(self.blocks[0], x)
            inside.wait(30)
            second = two.submit(self.blocks[1], x)
            second.exception()
            over.set()
            hook.remove()
            return first.result() + second.result()


def branches(stage, layout=None):
    """The weights after a step whose first forward computes two blocks at once, and what that forward is told."""
    torch.manual_seed(0)
    model, told = Branches(), ""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage, layout=layout)
    if zero is not None:
        model.at_once = True
        with pytest.raises(StateError) as error:
            model(torch.ones(2, 7))
        told, model.at_once = f"{error.value}", False
    for step in range(2):
        model(torch.full((2, 7), step + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered() if zero is not None else contextlib.nullcontext():
        return told, reference.weights(model)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full), 3])
def test_two_threads_inside_one_forward_are_refused_and_one_after_the_other_is_not(stage):
    (_, want), *_ = rank_processes.run(1, branches, None)
    for told, got in rank_processes.run(2, branches, stage):
        assert "two threads compute parts of one forward at once" in told
        assert "units 'blocks.0' and 'blocks.1'" in told
        reference.assert_same(got, want)


def two_threads(stage: int, where: str):
    """What each of two threads is told where one begins to evaluate in the middle of the other's step, or the other way
    round; and the weights after the step was tried again."""
    model, optimizer, zero = test_lost_ranks.three(stage, optimizer=torch.optim.SGD)
    told, ready, over = {}, threading.Event(), threading.Event()

    def tries(act):
        try:
            act()
        except StateError as error:
            told[threading.current_thread().name] = f"{error}"

    @torch.no_grad()
    def evaluates():
        tries(lambda: model(test_lost_ranks.x(9)))

    thread, armed = threading.Thread(target=evaluates, name="other"), True

    def begins(*_):
        nonlocal armed
        if armed:
            armed = False
            thread.start()
            thread.join()

    def waits(*_):
        if threading.current_thread() is thread:
            ready.set()
            over.wait(30)

    test_lost_ranks.step(model, optimizer, 0)
    if where == "forward":
        hook = model[0].register_forward_pre_hook(begins)
    elif where == "backward":
        hook = model[1].register_forward_hook(
            lambda _, __, out: out.requires_grad and out.register_hook(begins) and None
        )
    elif where == "step":
        hook, module, sgd = None, sys.modules["torch.optim.sgd"], sys.modules["torch.optim.sgd"].sgd
        module.sgd = lambda *args, **kwargs: (begins(), sgd(*args, **kwargs))
    else:
        hook = model[0].register_forward_pre_hook(waits)
        thread.start()
        ready.wait(30)
    tries(lambda: test_lost_ranks.step(model, optimizer, 1))
    over.set()
    thread.join()
    if hook is not None:
        hook.remove()
    if where == "step":
        module.sgd = sgd
        tries(lambda: test_lost_ranks.step(model, optimizer, 2))
        test_lost_ranks.step(model, optimizer, 2)
    else:
        test_lost_ranks.step(model, optimizer, 1)
        test_lost_ranks.step(model, optimizer, 2)
    with zero.gathered():
        return told, reference.weights(model)


@pytest.mark.row(60)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward", "step", "the other's forward"])
def test_two_threads_at_once_are_both_told(ranks, stage, where, world):
    """Neither computes on with weights that the other moves; the step is tried again, with the bits of a clean one."""
    for told, weights in ranks.run(world, two_threads, stage, where):
        assert sorted(told) == ["MainThread", "other"], told
        assert all("two threads use one sharded model at the same time" in said for said in told.values()), told
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(3)) == ""


def forked(stage: int):
    """A child forked in mid-training, as a data loader's worker is, which ends without touching anything."""
    wanted = train(stage)[0]
    rank = rank_processes.rank()
    model = models.build("gpt", hidden=12, layers=2, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for step in range(4):
        if (pid := os.fork()) == 0:
            os._exit(0)
        models.loss("gpt", model, models.batch("gpt", step, rank)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert os.waitpid(pid, 0)[1] == 0
    with zero.gathered():
        return reference.first_difference(reference.weights(model), wanted)


@pytest.mark.row(60)
def test_forks_in_mid_training(ranks):
    assert ranks.run(2, forked, 3) == ["", ""]


def in_a_child(what: str, stage: int) -> tuple[str, str]:
    """What a forked child is told that uses the model, and whether its parent trains on as if nothing had been."""
    wanted = train(stage)[0]
    rank = rank_processes.rank()
    model = models.build("gpt", hidden=12, layers=2, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    uses = {
        "forward": lambda: model(models.batch("gpt", 0, rank)[0]),
        "no_grad": lambda: torch.no_grad()(model)(models.batch("gpt", 0, rank)[0]),
        "gathered": lambda: zero.gathered().__enter__(),
        "step": optimizer.step,
        "save": lambda: zero.save("never"),
        "clip": lambda: zero.clip_grad_norm_(1.0),
    }
    told = ""
    for step in range(4):
        models.loss("gpt", model, models.batch("gpt", step, rank)).backward()
        if step == 1:
            read, write = os.pipe()
            if (pid := os.fork()) == 0:
                try:
                    uses[what]()
                except BaseException as error:
                    os.write(write, f"{type(error).__name__}: {error}".encode())
                os._exit(0)
            os.close(write)
            assert os.waitpid(pid, 0)[1] == 0
            told = os.read(read, 9999).decode()
            os.close(read)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return told, reference.first_difference(reference.weights(model), wanted)


@pytest.mark.row(79)
@pytest.mark.parametrize("what", ["forward", "no_grad", "gathered", "step", "save", "clip"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_forked_child_is_told_at_once_that_it_is_no_rank(ranks, what, world):
    """It would wait for ranks that answer its parent; the parent never notices."""
    for stage in (1, 3):
        for told, difference in ranks.run(world, in_a_child, what, stage, group_timeout=100.0, timeout=30.0):
            assert told.startswith("StateError: a forked child cannot use its parent's sharded model"), told
            assert difference == ""


def loaded_by_workers(stage: int):
    """Batches that forked workers of a data loader make."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeroshard.shard(model, optimizer, stage=stage)
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return "trained"


@pytest.mark.row(79)
def test_data_loaders_that_fork_work(ranks):
    assert ranks.run(2, loaded_by_workers, 3) == ["trained"] * 2


WATCHED = """
import json, os, sys, time
from zeroshard.comm.watch import Watch
watch = Watch(0, "127.0.0.1", lambda: {"doing": "well", "waits": False, "failed": False})
if (child := os.fork()) == 0:
    del watch  # as a child does that drops the model
    time.sleep(600)
print(json.dumps([watch.address, child]), flush=True)
time.sleep(600)
"""


@pytest.mark.row(60)
def test_a_forked_child_neither_ends_its_parents_watch_nor_outlives_it():
    """A data loader's worker that stays when its parent is killed does not make the parent look merely silent."""
    asking = Watch(1, "127.0.0.1", dict)
    parent = subprocess.Popen([sys.executable, "-c", WATCHED], stdout=subprocess.PIPE)
    place, child = json.loads(parent.stdout.readline())
    try:
        asking.peers = dict(enumerate([tuple(place), asking.address]))
        assert asking.ask()[0].doing == "well"
        parent.kill()
        parent.wait()
        assert asking.ask()[0].silence == GONE
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()
        asking.close()


@pytest.mark.row(77)
def test_who_tells_of_a_lost_rank_and_ends_is_not_called_lost_itself():
    """Rank 0 tells rank 1 that rank 2 is gone, and ends while rank 1 asks it the same."""
    asking = Watch(1, "127.0.0.1", lambda: {"doing": "", "waits": True, "failed": False})
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = gone.getsockname()

    def tells():
        asked, _ = teller.accept()
        with asked:
            _ask({1: asking.address}, {"alarm": {"2": GONE}})

    with socket.create_server(("127.0.0.1", 0)) as teller:
        asking.peers = {0: (*teller.getsockname(), ""), 1: asking.address, 2: (*nobody, "")}
        thread = threading.Thread(target=tells)
        thread.start()
        assert asking.blame() == {2: GONE}
        thread.join()
    asking.close()


def test_what_ranks_have_left_is_forgotten_after_two_levellings():
    """A run of many exceptions keeps no more of them than one of two."""
    watch, other = Watch(0, "127.0.0.1", dict), Watch(1, "127.0.0.1", dict)
    try:
        other.peers = {0: watch.address}
        for number in range(1, 8):
            other.say_left(number, {2: f"an exception ended step {number}"})
            other.say_left(number, {3: "said second"})  # which is not taken
        want = {number: {2: f"an exception ended step {number}"} for number in (6, 7)}
        assert other.left == want and watch.left == want
    finally:
        watch.close()
        other.close()


CROWD = """
import json, resource, sys
from zeroshard.comm.watch import Watch, _ask
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))  # as most are started
if len(sys.argv) == 1:
    watch = Watch(0, "127.0.0.1", lambda: {"doing": "well", "waits": False, "failed": False})
    print(json.dumps(watch.address), flush=True)
    sys.stdin.read()
else:
    place = tuple(json.loads(sys.argv[1]))
    answers = _ask({rank: place for rank in range(4096)}, {}).values()
    print(len(answers), sorted({answer.silence or answer.doing for answer in answers}))
"""


@pytest.mark.row(2)
def test_a_rank_that_thousands_ask_at_once_is_not_called_silent():
    """All ranks may find at the same moment that a collective did not complete, and each may have 1,024 files open."""
    answering = subprocess.Popen(
        [sys.executable, "-c", CROWD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    command = [sys.executable, "-c", CROWD, answering.stdout.readline()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    answering.communicate(timeout=30)
    assert done.stdout == "4096 ['well']\n", done


def beside_ddp(stage: int):
    """`shard` beside DistributedDataParallel, in every order: what is said."""
    ddp = torch.nn.parallel.DistributedDataParallel

    def attempt(order):
        model = models.build("mlp")
        outer = ddp(model) if order != "after" else model
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            zeroshard.shard(outer if order == "around" else model, optimizer, stage=stage)
            outer = ddp(model) if order == "after" else outer
            outer(models.batch("mlp", 0, 0)[0]).sum().backward()
        except Error as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return [attempt(order) for order in ("around", "inside", "after")]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ddp_around_the_model_is_refused(ranks, stage):
    """Both would take the gradients: without the refusal nothing trains, and nothing says so."""
    for around, inside, after in ranks.run(2, beside_ddp, stage, timeout=30.0):
        assert "DistributedDataParallel and zeroshard would both reduce the gradients" in around
        assert "DistributedDataParallel and zeroshard would both reduce the gradients" in inside
        expected = "ReleasedError" if stage == 3 else "DistributedDataParallel and zeroshard would both"
        assert expected in after  # DDP reads the weights when it is made


def beside_fully_shard():
    from torch.distributed.fsdp import fully_shard  # takes a second to import

    model = models.build("mlp")
    fully_shard(model)
    try:
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except Error as error:
        return str(error)
    return "nothing"


def test_fully_shard_before_is_refused(ranks):
    for said in ranks.run(2, beside_fully_shard, timeout=60.0):
        assert "fully_shard and zeroshard would both reduce the gradients" in said and "the model itself" in said


def beside_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = models.build("mlp")
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    try:
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except Error as error:
        return str(error)
    return "nothing"


def test_tensor_parallel_parameters_are_refused_as_what_they_are(ranks):
    for said in ranks.run(2, beside_tensor_parallel, timeout=60.0):
        assert "a parameter is a DTensor, cut by parallelize_module" in said and "'0.weight'" in said
        assert "fully_shard" not in said


def destroyed(stage: int):
    model = models.build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeroshard.shard(model, optimizer, stage=stage)
    models.loss("mlp", model, models.batch("mlp", 0, 0)).backward()
    optimizer.step()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    try:
        models.loss("mlp", model, models.batch("mlp", 1, 0)).backward()
    except Error as error:
        return str(error)
    return "no error"


@pytest.mark.row(62)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_process_group_destroyed_too_early_is_an_error_that_says_so(ranks, stage):
    for said in ranks.run(2, destroyed, stage, timeout=30.0):
        assert "the process group is gone" in said and "destroy_process_group" in said, said


# --- other ways to run a model --------------------------------------------------------------------------------------------


def functional(stage: int):
    model = models.build("mlp")
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    x = models.batch("mlp", 0, 0)[0]
    wanted = models.build("mlp")(x)
    outcomes = []
    with zero.gathered():
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    for call in (
        lambda: torch.func.functional_call(model, weights, (x,)),
        lambda: torch.nn.DataParallel(model)(x),
        lambda: torch.nn.utils.parametrizations.weight_norm(
            next(m for m in model.modules() if isinstance(m, nn.Linear))
        ),
    ):
        try:
            out = call()
            outcomes.append(bool(torch.equal(out, wanted)) if isinstance(out, torch.Tensor) else model(x) is None)
        except (Error, StateError) as error:
            outcomes.append(str(error).splitlines()[0])
    return outcomes


@pytest.mark.row(63)
@pytest.mark.parametrize("stage", [1, 3])
def test_functional_calls_data_parallel_and_parametrizations(ranks, stage):
    """The right values, or a refusal by name: never other values."""
    for outcomes in ranks.run(2, functional, stage):
        assert all(outcome is True or isinstance(outcome, str) for outcome in outcomes), outcomes


OPTIMISED = """
import sys, warnings
import torch, zeroshard
from zeroshard import Comm, Layout, Precision
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
zero = zeroshard.shard(model, optimizer, stage=3)
for index in range(3):
    loss = model(torch.arange(6) % (index + 3)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
zero.save(sys.argv[1])
zero.load(sys.argv[1])
with zero.gathered():
    print([param.double().sum().item() for param in model.parameters()])
linear = model[1]
for wrong in (
    lambda: linear.weight + 1, lambda: model.state_dict(), lambda: Comm(reduce="orderd"), lambda: Layout(bounds="units"),
    lambda: Precision(grad_dtype=torch.int32), lambda: zeroshard.shard(model, None), lambda: optimizer.state_dict(),
    lambda: zero.owners("1.weigth"), lambda: zero.load(sys.argv[1] + "-not"), lambda: zeroshard.shard(model, None, stage=4),
):
    try:
        wrong()
        print("nothing")
    except zeroshard.Error as error:
        print(type(error).__name__, error)
model(torch.arange(6)).square().mean().backward()
old = linear.weight.grad
optimizer.step()
optimizer.zero_grad()
model(torch.arange(6)).square().mean().backward()
try:
    old.mul_(0)
    print("nothing")
except zeroshard.Error as error:
    print(type(error).__name__, error)
setattr(model, "1", torch.nn.Linear(8, 8))
try:
    model(torch.arange(6))
except zeroshard.Error as error:
    print(type(error).__name__, error)
"""


@pytest.mark.row(65)
@pytest.mark.slow
def test_python_o_warnings_as_errors_and_deterministic_algorithms(tmp_path):
    """The same bits and the same refusals, word for word: no check is an `assert`, nothing warns."""
    said = []
    for flags in ([], ["-O", "-W", "error"]):
        command = [sys.executable, *flags, "-c", OPTIMISED, str(tmp_path / "ckpt")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] and "nothing" not in said[0].splitlines() and said[0].count("Error") >= 12
