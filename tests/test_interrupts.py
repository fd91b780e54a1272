"""An exception or a signal anywhere leaves all ranks whole: at every wait, a step is tried again or all hear why not."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import pytest
import torch

import interrupts
import ranks as rank_processes
import reference
import test_lost_ranks
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.arithmetic.exact_norms import BlockMap
from zeroshard.arithmetic.hashing import digest
from zeroshard.comm import watch
from zeroshard.comm.collectives import Link, packed, unpacked
from zeroshard.comm.launch_log import KEPT, Stream
from zeroshard.engine.step.bucket_step import Alone
from zeroshard.engine.weights import gathered, guard
from zeroshard.engine.weights.bucket import Bucket
from zeroshard.engine.weights.gathered import Gathered
from zeroshard.errors import CheckpointError, Error, PeerError, StateError, UserError
from zeroshard.features.nvme import StateFile
from zeroshard.tiers.pool import Pool

LIMITS = {"group_timeout": 100.0, "timeout": 45.0}


# By ranks and stage the first seed, which draws the settings: of messages in 8 bits, relays, sums of the backend's,
# weights in 8 bits and split masters, cut in every way.
DRAWN = {(2, 0): 13, (2, 1): 0, (2, 2): 23, (2, 3): 4, (3, 0): 6, (3, 1): 22, (3, 2): 11, (3, 3): 7}


def found(outcomes):
    return [(seed, outcome, words if outcome == "not named" else "") for seed, outcome, words in outcomes]


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(89)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_exceptions_at_drawn_waits_change_no_bit(tmp_path, world, stage):
    """KeyboardInterrupt, MemoryError and a handler's save, at drawn waits of drawn ranks, with retries; of drawn formats
    and messages."""
    first = DRAWN[world, stage]
    outcomes = interrupts.run(world, stage, [*range(first, first + 6)], str(tmp_path), timeout=100.0)
    for _, outcome, words in outcomes:
        assert outcome.startswith(("the same bits", "named")), words
    assert sum(outcome.startswith("the same bits") for _, outcome, _ in outcomes) > 3  # most faults cost a step at most


@pytest.mark.row(89)
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_thousand_drawn_cases(tmp_path):
    for each in range(0, 2000, 25):
        world, stage = (2, 3)[each // 25 % 2], each // 50 % 4
        seeds = [*range(each, each + 25)]
        for _, outcome, words in interrupts.run(world, stage, seeds, str(tmp_path), timeout=300.0):
            assert outcome.startswith(("the same bits", "named")), words


@pytest.mark.row(65)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_equality_and_faults_hold_without_asserts_in_ranks():
    """Tests that compare outside the ranks, with their ranks under `python -O`: no promise rests on an assert."""
    here = os.path.dirname(__file__)
    tests = ["test_lost_ranks.py", "test_interrupts.py", "test_bits.py", "test_disagreement.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not full and not slow", *tests]
    done = subprocess.run(
        command, cwd=here, env=os.environ | {"RANKS_OPTIMIZED": "1"}, capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stdout[-5000:]


# --- what was found, one by one -----------------------------------------------------------------------------------------


def interrupted_at(what: str, stage: int, kind: str):
    """The weights where rank 1's first wait for `what` in step 3 is interrupted and every rank tries again."""
    rank, armed = rank_processes.rank(), False
    model, optimizer, zero = test_lost_ranks.three(stage, optimizer=torch.optim.SGD)
    wait, raised = Link._wait_in_slices, []

    def waiting(link, handle, **kwargs):
        nonlocal armed
        if armed and what in link.doing() and not kwargs.get("levelling"):
            armed = False
            if kind == "handler":
                zero.save(str(rank))
            raise (KeyboardInterrupt if kind == "Ctrl-C" else MemoryError)("only once")
        return wait(link, handle, **kwargs)

    Link._wait_in_slices = waiting
    try:
        for index in range(4):
            armed = index == 2 and rank == 1
            while True:
                try:
                    optimizer.zero_grad()
                    model(test_lost_ranks.x(index)).square().sum().backward()
                    if what == "a question":
                        zero.clip_grad_norm_(1e9, norm_type=1.0 + index % 2)  # another than is expected
                    optimizer.step()
                    break
                except (KeyboardInterrupt, MemoryError, PeerError, StateError) as error:
                    raised.append(f"{type(error).__name__}: {error}")
                    if len(raised) == 3:
                        return {}, raised
    finally:
        Link._wait_in_slices = wait
    with zero.gathered():
        return reference.weights(model), raised


WAITS = [
    "waiting for forward",
    "waiting for backward",
    "waiting for reduce",
    "waiting for end of backward",
    "a question",
]


@pytest.mark.row(89)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", WAITS)
@pytest.mark.parametrize("kind", ["Ctrl-C", "no memory", "handler"])
def test_one_rank_is_interrupted_while_it_waits_and_the_step_is_tried_again(ranks, what, stage, kind):
    """The others hear of it while they wait themselves; both go on with plain PyTorch's bits after one error each."""
    if what == "waiting for end of backward" and stage == 3:
        what = "waiting for choosing what to gather"
    first, second = ranks.run(2, interrupted_at, what, stage, kind, **LIMITS)
    for weights, told in (first, second):
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(4)) == "", told
    assert [error.partition(":")[0] for error in second[1]] == [
        {"Ctrl-C": "KeyboardInterrupt", "no memory": "MemoryError", "handler": "StateError"}[kind]
    ]
    if kind == "handler":
        assert "zero.save_on(signal.SIGUSR1, path=...)" in second[1][0]
    (told,) = first[1]
    assert told.startswith("PeerError: a rank was interrupted") and "rank 1: an exception ended" in told, told


def raised_in_backward(stage: int, settings: dict):
    """The weights where nothing happens, and where rank 1's second backward raises, once, behind what it has sent."""
    found = []
    for armed in (False, rank_processes.rank() == 1):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        zero = zeroshard.shard(model, optimizer, stage=stage, **settings)

        def raises(grad, last=[armed, 0]):  # noqa: B006 (what is left of this model's)
            last[1] += 1
            if last[0] and last[1] == 2:
                raise MemoryError("only once")

        model[0].register_forward_hook(lambda _, __, out, hook=raises: out.register_hook(hook) and None)
        told = []
        for index in range(3):
            while True:
                try:
                    optimizer.zero_grad()
                    model(torch.randn(3, 64, generator=torch.Generator().manual_seed(index))).square().sum().backward()
                    optimizer.step()
                    break
                except (MemoryError, PeerError) as error:
                    told.append(type(error).__name__)
        with zero.gathered():
            found.append((reference.weights(model), told))
    return found


RAISED = {
    "int8": (2, {"comm": Comm(reduce="int8")}),
    "int8, cut between tensors": (2, {"comm": Comm(reduce="int8"), "layout": Layout(bounds="tensor")}),
    "parts of sums": (4, {"comm": Comm(replicas=2, optimizer="all")}),
    "hosts": (4, {"comm": Comm(hosts=2)}),
    "int8, of copies": (4, {"comm": Comm(reduce="int8", replicas=2)}),
    "the backend's sums": (2, {"comm": Comm(reduce="native")}),
    "weights of 8 bits": (2, {"precision": Precision(param_dtype=torch.bfloat16, fp8=True, cast_inputs=True)}),
}


@pytest.mark.row(3)
@pytest.mark.parametrize("what", RAISED)
def test_an_error_in_backward_whatever_is_sent(ranks, stage, what):
    """The rank that it happened on joins what others have sent in messages of their size; all go on bit-equal."""
    world, settings = RAISED[what]
    if stage == 0 and what == "parts of sums":
        pytest.skip("every rank keeps all of them")
    outcomes = ranks.run(world, raised_in_backward, stage, settings, **LIMITS)
    for rank, ((quiet, nothing), (weights, told)) in enumerate(outcomes):
        assert (nothing, told) == ([], ["MemoryError" if rank == 1 else "PeerError"])
        assert reference.first_difference(weights, quiet) == ""


def interrupted_beside_a_save(folder: str):
    """Ctrl-C on rank 1 while a save goes on behind the training, of which rank 0's thread has sent nothing yet."""
    rank, (model, optimizer, zero) = rank_processes.rank(), test_lost_ranks.three(1, optimizer=torch.optim.SGD)
    test_lost_ranks.step(model, optimizer, 0)
    wait, launch, levelled, told = Link._wait_in_slices, Link.launch, threading.Event(), []

    def launching(link, *args):
        if link.behind and rank == 0:
            levelled.wait(20.0)
        return launch(link, *args)

    def waiting(link, handle, **kwargs):
        if rank == 1 and not told and "waiting for reduce" in link.doing() and not kwargs.get("levelling"):
            raise KeyboardInterrupt
        return wait(link, handle, **kwargs)

    Link.launch, Link._wait_in_slices = launching, waiting
    try:
        saved = zero.save(f"{folder}/beside", asynchronous=True)
        while True:
            try:
                test_lost_ranks.step(model, optimizer, 1)
                break
            except (KeyboardInterrupt, PeerError) as error:
                told.append(type(error).__name__)
                optimizer.zero_grad()
        levelled.set()
        saved.wait()
    finally:
        Link.launch, Link._wait_in_slices = launch, wait
    with zero.gathered():
        return reference.weights(model), told


@pytest.mark.row(89)
def test_a_save_behind_the_training_goes_on_beside_an_interrupt(ranks, tmp_path):
    """Nobody joins in a thread's place what that has not launched yet: gloo would abort the process."""
    first, second = ranks.run(2, interrupted_beside_a_save, str(tmp_path), **LIMITS)
    assert (first[1], second[1]) == (["PeerError"], ["KeyboardInterrupt"])
    for weights, _ in (first, second):
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(2)) == ""
    assert (tmp_path / "beside" / "manifest.json").is_file()


def interrupted_in_a_step(stage: int, folder: str):
    """Ctrl-C on rank 1 while others update: what both hear each time, and the weights after a load."""
    rank, (model, optimizer, zero) = rank_processes.rank(), test_lost_ranks.three(stage, optimizer=torch.optim.SGD)
    test_lost_ranks.step(model, optimizer, 0)
    zero.save(f"{folder}/one")
    wait, told, armed = Link._wait_in_slices, [], rank == 1

    def waiting(link, handle, **kwargs):
        nonlocal armed
        wait(link, handle, **kwargs)
        if armed and "waiting for step" in link.doing():
            armed = False
            raise KeyboardInterrupt

    Link._wait_in_slices = waiting
    try:
        while not (told and "zero.load(" in told[-1]) and len(told) < 9:
            try:
                test_lost_ranks.step(model, optimizer, 1)
            except (KeyboardInterrupt, PeerError) as error:
                told.append(f"{type(error).__name__}: {error}")
    finally:
        Link._wait_in_slices = wait
    zero.load(f"{folder}/one")
    for index in (1, 2, 3):
        test_lost_ranks.step(model, optimizer, index)
    with zero.gathered():
        return reference.weights(model), told


@pytest.mark.row(90)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_only_some_ranks_finished_is_named_until_a_load(ranks, tmp_path, stage):
    for weights, told in ranks.run(2, interrupted_in_a_step, stage, str(tmp_path), **LIMITS):
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(4)) == ""
        assert "PeerError" in told[-1] and "zero.load(...) the last checkpoint" in told[-1], told


def load_interrupted(stage: int, folder: str):
    """Ctrl-C on rank 1 in the middle of a load, and what a step says after it."""
    rank, (model, optimizer, zero) = rank_processes.rank(), test_lost_ranks.three(stage, optimizer=torch.optim.SGD)
    zero.save(f"{folder}/zero")
    test_lost_ranks.step(model, optimizer, 0)
    told, renew = [], zeroshard.checkpoint.loading.renew

    def renewing(*args):
        renew(*args)
        raise KeyboardInterrupt

    try:
        if rank == 1:
            zeroshard.checkpoint.loading.renew = renewing
        zero.load(f"{folder}/zero")
    except (KeyboardInterrupt, PeerError) as error:
        told.append(type(error).__name__)
    finally:
        zeroshard.checkpoint.loading.renew = renew
    for _ in range(2):
        try:
            test_lost_ranks.step(model, optimizer, 0)
        except PeerError as error:
            told.append(str(error))
    zero.load(f"{folder}/zero")
    for index in range(4):
        test_lost_ranks.step(model, optimizer, index)
    with zero.gathered():
        return reference.weights(model), told


@pytest.mark.row(90)
def test_a_load_that_ended_in_its_middle_is_named_until_the_next(ranks, tmp_path):
    for weights, told in ranks.run(2, load_interrupted, 3, str(tmp_path), **LIMITS):
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(4)) == ""
        assert "a load did not get to its end" in told[-1], told


# --- preemption -----------------------------------------------------------------------------------------------------------


def preempted(stage: int, where: str, folder: str):
    """A signal to rank 1 alone in the middle of step 3; how often all ranks saved, and after which step."""
    rank, (model, optimizer, zero) = rank_processes.rank(), test_lost_ranks.three(stage, optimizer=torch.optim.SGD)
    saves, done = [], 0

    def extra():
        saves.append(done)
        return {"done": done}

    before = signal.getsignal(signal.SIGUSR2)
    zero.save_on(signal.SIGUSR2, f"{folder}/now", extra)
    if rank == 1:
        test_lost_ranks.arm(
            where, model, optimizer, lambda: os.kill(os.getpid(), signal.SIGUSR2) if done == 2 else None
        )
    for done in range(5):
        test_lost_ranks.step(model, optimizer, done)
    assert signal.getsignal(signal.SIGUSR2) is before
    assert zero.signalled is signal.SIGUSR2
    with zero.gathered():
        return reference.weights(model), saves


def resumed(stage: int, folder: str):
    model, optimizer, zero = test_lost_ranks.three(stage, optimizer=torch.optim.SGD)
    for index in range(zero.load(f"{folder}/now").extra["done"], 5):
        test_lost_ranks.step(model, optimizer, index)
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(91)
@pytest.mark.parametrize("where", ["forward", "backward", "reduce", "step"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_signal_to_one_rank_makes_all_save_once_at_a_steps_end(ranks, tmp_path, where, stage):
    """Wherever it arrives; the training goes on as if it had not been, and what was saved goes on bit-equal."""
    for weights, saves in ranks.run(2, preempted, stage, where, str(tmp_path), **LIMITS):
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(5)) == ""
        assert saves in ([3], [4])  # after the step in whose row it was, or after the next
    (after,) = ranks.run(1, resumed, 3 - stage, str(tmp_path), group=False)
    assert reference.first_difference(after, test_lost_ranks.plain_steps(5)) == ""


NO_USE = {
    "no number": ("USR1", "a", None, None),
    "yes": (True, "a", None, None),
    "too large": (1000, "a", None, None),
    "without a name": (signal.SIGRTMIN + 1, "a", None, None),
    "SIGKILL": (signal.SIGKILL, "a", None, None),
    "extra": (signal.SIGUSR1, "a", {"done": 1}, None),
    "an address": (signal.SIGUSR1, "s3://bucket/run", None, None),
    "no path": (signal.SIGUSR1, 5, None, None),
    "keep": (signal.SIGUSR1, "a", None, 0),
    "extra of nothing": (signal.SIGUSR1, None, dict, None),
    "keep of nothing": (signal.SIGUSR1, None, None, 3),
}


@pytest.mark.row(91)
@pytest.mark.parametrize("why", NO_USE)
def test_what_no_save_could_use_is_refused_when_save_on_is_called(why):
    """And not when the machine is taken away."""
    number, path, extra, keep = NO_USE[why]
    zero, before = zeroshard.shard(torch.nn.Linear(2, 2), None), signal.getsignal(signal.SIGUSR1)
    with pytest.raises(UserError):
        zero.save_on(number, path, extra, keep=keep)
    assert signal.getsignal(signal.SIGUSR1) is before and zero._engine.on_signal == {}


def preempted_anew(folder: str):
    """Two signals with a path each; then one is armed again, and nothing comes. What was saved, and when."""
    rank, (model, optimizer, zero) = rank_processes.rank(), test_lost_ranks.three(1, optimizer=torch.optim.SGD)
    saves = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        zero.save_on(number, f"{folder}/{number.name}", lambda number=number: saves.append(number.name) or {})
    for step in range(6):
        if (rank, step) == (1, 1):
            os.kill(os.getpid(), signal.SIGUSR1)
        if step == 4:
            assert zero.signalled is signal.SIGUSR1
            zero.save_on(signal.SIGUSR1, f"{folder}/again", lambda: saves.append("again") or {})
        if step == 3:  # a penalty, say: no place for a save
            with zero.gathered():
                test_lost_ranks.step(model, optimizer, step)
        else:
            test_lost_ranks.step(model, optimizer, step)
    return saves, sorted(os.listdir(folder))


@pytest.mark.row(91)
def test_each_signal_saves_at_its_own_path_and_only_when_it_came(ranks, tmp_path):
    assert ranks.run(2, preempted_anew, str(tmp_path), **LIMITS) == [(["SIGUSR1"], ["SIGUSR1"])] * 2


TRAIN = ["zeroshard", "train", "--data", os.path.abspath(__file__), "--batch", "2", "--steps", "80"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing ends."""
    out = tmp_path_factory.mktemp("whole") / "run"
    command = [sys.executable, "-m", *TRAIN, "--ranks", "2", "--out", str(out)]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=300)
    return out


@pytest.mark.heavy
@pytest.mark.row(91)
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("starts", "number"),
    [
        ("zeroshard", "SIGTERM"),
        pytest.param("zeroshard", "SIGUSR1", marks=pytest.mark.slow),
        ("torchrun", "SIGTERM"),
    ],
)
def test_train_saves_on_sigterm_and_resumes_bit_equal(tmp_path, whole, starts, number):
    """Whoever started its two ranks is told to end in their middle: they say what they saved, `--resume` ends alike."""
    number = signal.Signals[number]
    if starts == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        train = [sys.executable, *torchrun, "-m", *TRAIN, "--out"]
    else:
        train = [sys.executable, "-m", *TRAIN, "--ranks", "2", "--out"]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1"}
    part, metrics = tmp_path / "part", tmp_path / "part" / "metrics.jsonl"
    launcher = subprocess.Popen([*train, str(part)], env=surroundings, stdout=subprocess.PIPE, text=True)
    try:
        rank_processes.until(lambda: metrics.exists() and '"step": 20' in metrics.read_text(), 120.0)
        launcher.send_signal(number)
        said, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == {"zeroshard": 130, "torchrun": 1}[starts]
    assert f"{number.name}: saved {part}/checkpoints/step-000000" in said, said
    resume = [sys.executable, "-m", "zeroshard", "train", "--resume", str(part)]
    subprocess.run(resume, env=surroundings, check=True, capture_output=True, timeout=300)
    first, second = ((run / "model.safetensors").read_bytes() for run in (whole, part))
    assert first == second


@pytest.mark.row(91)
@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_train_that_is_told_to_end_while_it_starts_ends_with_the_same_code(tmp_path, number):
    """There is nothing to save yet; a script that looks for exit code 130 has the job run again all the same."""
    train = [
        sys.executable,
        "-m",
        "zeroshard",
        "train",
        "--data",
        os.path.abspath(__file__),
        "--out",
        str(tmp_path / "run"),
    ]
    started = subprocess.Popen(train, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        for line in started.stdout:
            if "starting" in line:  # torch is not loaded yet
                started.send_signal(number)
        started.wait(60)
    finally:
        started.kill()
        started.stdout.close()
    assert started.returncode == 130
    assert not (tmp_path / "run" / "checkpoints").exists()


# --- memory -----------------------------------------------------------------------------------------------------------


def out_of_memory(stage: int):
    """A gather for which rank 1 finds no memory, in the forward of step 3, once; all try again."""
    rank, (model, optimizer, zero) = rank_processes.rank(), test_lost_ranks.three(stage, optimizer=torch.optim.SGD)
    gather, armed, told = Bucket.gather, False, []

    def fails(self, **kwargs):
        nonlocal armed
        if armed:
            armed = False
            raise MemoryError("no memory for 4096 bytes")
        return gather(self, **kwargs)

    Bucket.gather = fails
    try:
        for index in range(4):
            armed = index == 2 and rank == 1
            while True:
                try:
                    test_lost_ranks.step(model, optimizer, index)
                    break
                except (MemoryError, PeerError) as error:
                    told.append(f"{type(error).__name__}: {error}")
                    if len(told) == 3:
                        return told
    finally:
        Bucket.gather = gather
    with zero.gathered():
        return reference.weights(model), told


@pytest.mark.row(59)
def test_no_memory_for_a_gather_is_tried_again(ranks):
    for weights, _ in ranks.run(2, out_of_memory, 3, **LIMITS):
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(4)) == ""


def half_launched():
    """Rank 1 finds no memory for the second broadcast of a gather; all try again. What it holds before and after."""
    rank, (model, optimizer, zero) = rank_processes.rank(), test_lost_ranks.three(3, optimizer=torch.optim.SGD)
    launch, launched, held = Link.launch, None, []

    def fails(link, stream, *args):
        nonlocal launched
        if launched is not None and stream is link.groups.gathers:
            launched += 1
            if launched == 2:
                raise MemoryError("no memory for 64 bytes")
        return launch(link, stream, *args)

    Link.launch = fails
    try:
        for index in range(4):
            launched = 0 if index == 2 and rank == 1 else None
            while True:
                try:
                    test_lost_ranks.step(model, optimizer, index)
                    break
                except (MemoryError, PeerError):
                    continue
            held.append({state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes})
    finally:
        Link.launch = launch
    with zero.gathered():
        return reference.weights(model), held


@pytest.mark.row(59)
def test_memory_that_an_interrupted_gather_took_serves_the_next(ranks):
    """It is counted once, and none of its addresses is remembered for another tensor's."""
    for weights, held in ranks.run(2, half_launched, **LIMITS):
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(4)) == ""
        assert held[1] == held[2] == held[3]


def half_pointed(at: int, folder: str):
    """An interrupt ends rank 1's call number `at` of a step that makes parameters point somewhere, after the first of
    them, and all try again: weights after four steps, and how many calls there were."""
    rank, (model, optimizer, zero) = rank_processes.rank(), test_lost_ranks.three(3, optimizer=torch.optim.SGD)
    point, calls = Gathered._point, itertools.count()

    def interrupted(gathered, tensors):
        if next(calls) == at:
            with torch._C.DisableTorchFunctionSubclass():
                gathered.params[0].data = tensors[0]
            raise KeyboardInterrupt
        point(gathered, tensors)

    for index in range(4):
        if (index, rank) == (2, 1):
            Gathered._point = interrupted
        while True:
            try:
                test_lost_ranks.step(model, optimizer, index)
                zero.save(folder)  # which asks where the parameters' data are
                break
            except (KeyboardInterrupt, PeerError):
                continue
    Gathered._point = point
    with zero.gathered():
        return reference.weights(model), next(calls)


@pytest.mark.row(59)
@pytest.mark.parametrize("at", range(6))
def test_parameters_point_into_their_memory_again_after_an_interrupt(ranks, at, tmp_path):
    """Where some did and others did not, the others' data were refused as the user's. As a gather and a release begin."""
    told = ranks.run(2, half_pointed, at, str(tmp_path), **LIMITS)
    assert told[1][1] > at
    for weights, _ in told:
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(4)) == ""


@pytest.mark.row(59)
def test_no_memory_to_spread_what_a_step_updated_is_named_on_both(ranks):
    first, second = ranks.run(2, out_of_memory, 1, **LIMITS)
    assert second[0] == "MemoryError: no memory for 4096 bytes"
    for told in (first, second):
        assert "did not get to its end" in told[-1] or "a rank was interrupted" in told[-1], told


# --- what the system itself runs out of -----------------------------------------------------------------------------------


def large(stage: int):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage)


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limited(stage: int, limit: bool):
    """`ulimit -v` on rank 1 leaves no room from step 3 on, for one try; what each rank hears, and the weights' digest."""
    model, optimizer, zero = large(stage)
    before, told = resource.getrlimit(resource.RLIMIT_AS), []
    generator = torch.Generator().manual_seed(rank_processes.rank())
    for index in range(4):
        x = torch.randn(10240 if index == 2 else 64, 1024, generator=generator)  # 40 MiB: malloc keeps nothing as large
        if limit and index == 2 and rank_processes.rank() == 1:
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + (1 << 20), before[1]))
        while True:
            try:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                break
            except (MemoryError, RuntimeError, OSError) as error:
                resource.setrlimit(resource.RLIMIT_AS, before)
                told.append(f"{type(error).__name__}: {error}")
                if len(told) == 4:
                    return told, None
    with zero.gathered():
        return told, digest(b"".join(bytes(p.detach().view(-1).view(torch.uint8).numpy()) for p in model.parameters()))


def out_of_blocks():
    """What the memory of buckets says where the system gives none."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + (1 << 20), before[1]))
    try:
        Pool().take(1 << 26, torch.float32)
    except MemoryError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.row(92)
def test_memory_of_buckets_that_the_system_refuses_is_a_memory_error(ranks):
    (said,) = ranks.run(1, out_of_blocks, group=False)
    assert said.startswith("the system has no 268,435,456 bytes for weights or gradients")


@pytest.mark.row(92)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_address_space_without_room_is_an_error_and_the_step_is_tried_again(ranks, stage):
    """What the system refuses: rank 1 says what it could not allocate, rank 0 hears of it, both go on bit-equal."""
    (_, want), _ = ranks.run(2, limited, stage, False, **LIMITS)
    (first, got), (second, other) = ranks.run(2, limited, stage, True, **LIMITS)
    assert got == other == want
    assert first and first[0].startswith("PeerError: ") and "rank 1: " in first[0], first
    assert "allocate memory" in second[0].lower(), second


def saved_while_full(folder: str):
    """A save for which there is no room, and one after some was made."""
    model, optimizer, zero = test_lost_ranks.three(3, optimizer=torch.optim.SGD)
    test_lost_ranks.step(model, optimizer, 0)
    filler, told = Path(folder, "filler"), ""
    if zero.rank == 0:
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    try:
        zero.save(f"{folder}/one")
    except CheckpointError as error:
        told = str(error)
    if zero.rank == 0:
        filler.unlink()
    test_lost_ranks.step(model, optimizer, 1)
    zero.save(f"{folder}/now", extra={"done": 2})
    return told, sorted(each.name for each in Path(folder).iterdir())


@pytest.mark.row(92)
@pytest.mark.slow
def test_a_disk_that_fills_and_drains(ranks, tmp_path):
    """Both ranks hear that there is no room, nothing is left of that save, and the next is complete."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        for told, left in ranks.run(2, saved_while_full, str(tmp_path), **LIMITS):
            assert "No space left on device" in told, told
            assert left == ["now"]
        (after,) = ranks.run(1, resumed, 0, str(tmp_path), group=False)
        assert reference.first_difference(after, test_lost_ranks.plain_steps(5)) == ""
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


class Through:
    """A handle of a collective that is through as soon as it is launched."""

    def is_completed(self):
        return True


def interrupted(*_):
    raise KeyboardInterrupt


def test_what_an_interrupt_kept_from_being_counted_is_counted_later(monkeypatch):
    """The map for norms was kept and never counted, where it ended the count of its bytes. Found by a seed."""
    told = []
    for ends in (False, True):
        model = torch.nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = zeroshard.shard(model, optimizer, stage=2)
        model(torch.ones(2, 16)).sum().backward()
        if ends:
            monkeypatch.setattr(BlockMap, "nbytes", property(interrupted))
            with pytest.raises(KeyboardInterrupt):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            monkeypatch.undo()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        told.append(zero.ledger().held["norms"])
    assert told[0] == told[1] > 0


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_hears_that_its_weights_are_of_no_step(stage, caplog):
    """It goes on with them, as in plain PyTorch, where nobody says so. A step that had written nothing is no news."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))

    class Ends(torch.optim.SGD):
        after = None  # never, while `shard` tries it

        def step(self):
            for count, param in enumerate(param for group in self.param_groups for param in group["params"]):
                if count == self.after:
                    raise KeyboardInterrupt
                param.data.add_(1)
                torch.autograd.graph.increment_version(param)

    Ends.elementwise = True
    optimizer = Ends(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for after in (0, 1):
        optimizer.after = after
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        caplog.clear()
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        assert ("an exception ended step 1 while it updated the weights" in caplog.text) == (after > 0)
    assert zero.world_size == 1


def test_a_collective_that_is_through_and_pruned_before_its_launch_returns():
    """In a handler of a signal, say."""

    class Pruned(deque):
        def extend(self, flights):
            super().extend(flights)
            stream.prune()

    stream, handle = Stream(None, [0]), Through()
    stream._flights = Pruned()
    assert stream.launch(("broadcast",), lambda _: handle, 0) is handle
    assert (stream.count, stream.last) == (1, [("broadcast",)])


def test_what_is_through_may_be_pruned_inside_a_pruning():
    """As above; what is still under way stays, and nothing is counted twice."""

    class Nested(Through):
        def is_completed(self):
            self.asked = getattr(self, "asked", 0) + 1
            if self.asked == 1:
                stream.prune()
            return True

    class UnderWay:
        def is_completed(self):
            return False

    stream, last = Stream(None, [0]), UnderWay()
    flights = [(1, ("a",), [Nested()], 0), (2, ("b",), [Through()], 1), (3, ("c",), [last], 2)]
    stream._flights.extend(flights)
    stream.prune()
    assert (stream.count, stream.last, stream.under_way) == (3, [("a",), ("b",), ("c",)], [last])


def test_what_a_rank_posts_for_a_levelling_fits_into_one_answer_also_among_a_thousand_ranks():
    """Of eight replicas and an axis of experts, with as many collectives remembered in each stream as ever are."""
    kinds = [("broadcast", 1, at % 400, "parameters", 8 * 7_340_033, at * 917_505, (at + 1) * 917_505, at % 128)
             for at in range(KEPT)]  # fmt: skip
    streams = [[10**6 + at, kinds, [*range(1024)]] for at in range(12)]
    told = {"why": "", "streams": streams, "engines": {1: {"numbers": {"forward": 10**6}, "edits": ""}}}
    assert len(packed(told)) < watch._LONGEST / 2
    assert unpacked(packed(told))["streams"][0][1][:2] == [list(kinds[0]), list(kinds[1])]


# --- between two parameters, or two lines ---------------------------------------------------------------------------------


def layers(stage, **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **settings)


def steps(model, optimizer, count=2, first=0):
    losses = []
    for step in range(first, first + count):
        loss = model(torch.full((3, 5), step + 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["flip", "unflip"])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_interrupt_between_two_parameters_leaves_none_readable_that_is_released(monkeypatch, stage, name):
    """Opening and closing go parameter by parameter. An evaluation is interrupted at each of them, and training goes on."""
    model, optimizer, _ = layers(stage)
    want = steps(model, optimizer, 3)
    plain, struck = getattr(gathered, name), []
    for at in range(12):
        model, optimizer, zero = layers(stage)
        got, left = steps(model, optimizer, 1), itertools.count()

        def strikes(param, at=at, left=left):
            if next(left) == at:
                struck.append(at)
                raise KeyboardInterrupt
            plain(param)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(gathered, name, strikes)
            model(torch.ones(3, 5))
        for bucket in zero._engine.buckets:
            assert not bucket.gathered.released or all(isinstance(each, guard.Guarded) for each in bucket.params)
        assert got + steps(model, optimizer, first=1) == want
    assert len(struck) > 4 or (stage, name) == (1, "flip")  # nothing is closed there in a forward


def test_an_interrupt_that_loses_a_files_buffer_leaves_none_counted(monkeypatch, tmp_path):
    def staged(interrupted):
        model, optimizer, zero = layers(
            1, layout=Layout(bucket_mib=0.00001), offload=Offload(optimizer="nvme", path=str(tmp_path))
        )
        made = StateFile._make
        with monkeypatch.context() as patch:

            def makes(file, room):
                made(file, room)
                patch.setattr(StateFile, "_make", made)
                raise KeyboardInterrupt

            if interrupted:
                patch.setattr(StateFile, "_make", makes)
                with pytest.raises(KeyboardInterrupt):
                    steps(model, optimizer, 1)
                optimizer.zero_grad()
        with contextlib.suppress(StateError):  # the step was torn
            steps(model, optimizer, 1)
        return zero.ledger().held["staging"]

    assert staged(True) == staged(False)


def interrupted_while_it_updates(folder, early):
    """What each rank hears, one step of three of which is interrupted in its second bucket."""
    settings = {"precision": Precision(param_dtype=torch.bfloat16, cast_inputs=True), "optimizer_in_backward": early}
    offload = Offload(optimizer="nvme", path=folder)
    model, optimizer, _ = layers(1, layout=Layout(bucket_mib=0.00001), offload=offload, **settings)
    writes, left, told = Alone.write_back, itertools.count(), []

    def strikes(alone, bucket):
        if rank_processes.rank() == 0 and next(left) == 1:
            raise KeyboardInterrupt
        writes(alone, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Alone, "write_back", strikes)
        for _ in range(3):
            try:
                steps(model, optimizer, 1)
            except (KeyboardInterrupt, Error) as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.mark.processes
@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_an_interrupt_tore_is_not_called_an_edit(tmp_path, early):
    """Of states in files, whose fragments nobody can write to between steps: the step itself had."""
    for told in rank_processes.run(2, interrupted_while_it_updates, str(tmp_path), early, **LIMITS):
        assert any("an exception ended step 1 while it updated the weights" in each for each in told), told
        assert not any("was edited" in each for each in told), told
