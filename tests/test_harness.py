"""The harness itself: a hang, a crash and an exception on any rank fail the test in time, and nothing leaks on."""

import gc
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import models
import ranks
import reference
from ranks import alive, until

pytestmark = pytest.mark.full  # what the product claims is tested by others

# --------------------------------------------------------------------------------- what the ranks run in these tests


def total(value=1.0):
    tensor = torch.full((3,), value)
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor[0].item()


def identity():
    return os.getpid(), ranks.rank(), ranks.world(), dist.get_rank(), dist.get_world_size()


def without_group():
    return dist.is_initialized(), ranks.rank(), ranks.world()


def from_environment():
    dist.init_process_group("gloo")
    return dist.get_rank(), total(), os.environ["LOCAL_RANK"]


def hang_in_python(culprit):
    while ranks.rank() == culprit:
        time.sleep(0.01)


def hang_in_collective(culprit):
    if ranks.rank() != culprit:
        dist.all_reduce(torch.ones(1))


def hang_stopped(culprit):
    if ranks.rank() == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)


def die(culprit, how):
    total()
    if ranks.rank() == culprit:
        print("last words", flush=True)
        os._exit(7) if how == "exit" else os.kill(os.getpid(), getattr(signal, how))
    return total()


class TeachingError(ValueError):
    """Not picklable: its constructor wants more than a message."""

    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")


def fail(culprits):
    if ranks.rank() in culprits:
        raise TeachingError("wrong", f"rank {ranks.rank()}")
    return "fine"


def compare(left, right):
    assert left == right


def change_everything():
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    os.environ["ZEROSHARD_LEAK"] = "1"
    os.chdir("/")


def global_state():
    return (
        torch.rand(1).item(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        os.environ.get("ZEROSHARD_LEAK"),
        os.getcwd(),
        os.environ["OMP_NUM_THREADS"],
        gc.isenabled(),
    )


def subgroups():
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    return len(groups)


def unpicklable():
    return lambda: None


def echo(value):
    return value


# -------------------------------------------------------------------------------------------------------- it works


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_values_come_back_in_rank_order(world):
    """Every rank has its rank, its world and a working gloo group of that size."""
    result = ranks.run(world, identity)
    assert [each[1:] for each in result] == [(rank, world, rank, world) for rank in range(world)]
    assert ranks.run(world, total, value=2.0) == [2.0 * world] * world


def test_workers_are_reused_across_runs_and_world_sizes():
    """The first ranks of a larger world are the processes of a smaller one, in every order of runs."""
    first = ranks.pids(4)
    for world in (2, 4, 1, 3, 2):
        assert [each[0] for each in ranks.run(world, identity)] == first[:world]


def test_one_rank_without_a_group_and_ranks_under_torchruns_environment():
    """group=False makes no process group; group="env" leaves making it to the code, as torchrun does."""
    assert ranks.run(1, without_group, group=False) == [(False, 0, 1)]
    for _ in range(2):
        assert ranks.run(3, from_environment, group="env") == [(rank, 3.0, str(rank)) for rank in range(3)]
    assert ranks.run(1, without_group, group=False) == [(False, 0, 1)]


def test_tensors_travel_bit_for_bit():
    """NaN, -0.0, bf16, ties and 8 MiB arrive as they left, in both directions."""
    value = {
        "odd": torch.tensor([math.nan, -0.0, math.inf]),
        "low": torch.randn(5).bfloat16(),
        "big": torch.rand(2**21),
    }
    for back in ranks.run(2, echo, value):
        assert all(torch.equal(reference.bits(back[name]), reference.bits(tensor)) for name, tensor in value.items())


def test_a_run_leaves_no_global_state_behind():
    """Seed, dtype, determinism, threads, grad mode, environment and directory start afresh in the same process."""
    before, pids = ranks.run(2, global_state), ranks.pids(2)
    ranks.run(2, change_everything)
    assert ranks.run(2, global_state) == before
    assert ranks.pids(2) == pids
    assert before[0] == before[1]


def test_subgroups_end_with_their_run():
    """Groups that a run made and forgot neither hang nor confuse the next run of another size."""
    for world in (2, 4, 3):
        assert ranks.run(world, subgroups) == [3] * world


# ------------------------------------------------------------------------------------------------- it fails, in time


def test_an_exception_carries_the_remote_traceback_of_every_rank_that_failed():
    """RankFailure names the ranks that raised, with type, message and traceback; others "returned"."""
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(3, fail, (0, 2))
    assert sorted(caught.value.failures) == [0, 2]
    text = str(caught.value)
    assert "fail failed on rank 0, 2 of 3" in text
    assert "rank 0: TeachingError: wrong at rank 0" in text
    assert "rank 1: returned" in text
    assert 'raise TeachingError("wrong"' in text
    assert ranks.run(3, total) == [3.0] * 3


def test_asserts_in_a_rank_show_both_sides():
    """pytest's rewriting reaches the code that ranks run."""
    with pytest.raises(ranks.RankFailure, match="assert 3 == 4"):
        ranks.run(1, compare, 3, 4)


def test_expected_errors_come_back_as_records():
    """expect_errors: values and Raised records side by side; base classes can be asked for by name."""
    fine, raised = ranks.run(2, fail, (1,), expect_errors=True)
    assert fine == "fine"
    assert (raised.type, raised.message) == ("TeachingError", "wrong at rank 1")
    assert raised.isa("ValueError")
    assert not raised.isa("OSError")


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(("how", "text"), [("exit", "exit code 7"), ("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV")])
def test_a_crash_is_named_and_its_worker_replaced(culprit, how, text):
    """os._exit, kill -9 and a segmentation fault end in seconds, name rank, cause, pid and last output."""
    before = ranks.pids(2)
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, die, culprit, how)
    died = caught.value.failures[culprit]
    assert died.type == "Died"
    assert text in died.message
    assert f"pid {before[culprit]}" in died.message
    assert "last words" in died.traceback
    assert not set(ranks.pids(2)) & set(before)
    assert ranks.run(2, total) == [2.0, 2.0]


def test_a_crash_may_be_expected():
    """With expect_errors the surviving rank's own error comes back, for tests of fault handling."""
    alive, died = ranks.run(2, die, 1, "SIGKILL", expect_errors=True)
    assert died.type == "Died"
    assert alive.isa("RuntimeError")


@pytest.mark.parametrize("expect_errors", [False, True])
@pytest.mark.parametrize("hang", [hang_in_python, hang_stopped])
def test_a_hang_fails_with_the_stack_of_the_rank_that_hung(hang, expect_errors):
    """A run over its time limit is killed by pid and fails, even where errors are expected."""
    before = ranks.pids(2)
    with pytest.raises(ranks.RankFailure, match="hung on rank 1 of 2") as caught:
        ranks.run(2, hang, 1, timeout=3.0, expect_errors=expect_errors)
    hung = caught.value.failures[1]
    assert hung.type == "Hung"
    assert ("in hang_in_python" in hung.traceback) == (hang is hang_in_python)  # a stopped process says nothing
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert ranks.run(2, total) == [2.0, 2.0]


@pytest.mark.full
def test_a_hang_in_a_collective_shows_where():
    """Stuck inside C++ without the interpreter lock: the stack is still there."""
    with pytest.raises(ranks.RankFailure, match="hung on rank 0 of 2") as caught:
        ranks.run(2, hang_in_collective, 1, timeout=4.0, group_timeout=30.0)
    assert "in hang_in_collective" in caught.value.failures[0].traceback


@pytest.mark.full
def test_a_lonely_collective_raises_at_the_groups_time_out():
    """The group's own time-out is the one asked for: gloo raises long before the run counts as hung."""
    with pytest.raises(ranks.RankFailure, match="all_reduce") as caught:
        ranks.run(2, hang_in_collective, 1, group_timeout=4.0)
    assert caught.value.failures.keys() == {0}


def test_other_ranks_do_not_keep_a_failure_waiting():
    """One rank raised, the other waits for it in a collective of 8 s: the failure is reported after the grace."""
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, raise_or_wait, 1)
    assert caught.value.failures[1].type == "ZeroDivisionError"
    assert "in raise_or_wait" in caught.value.failures[0].traceback


def raise_or_wait(culprit):
    if ranks.rank() == culprit:
        _ = 1 / 0
    dist.all_reduce(torch.ones(1))


def test_a_value_that_cannot_travel_fails_its_rank():
    """A result that pickle refuses is that rank's failure, not a hang; so is a function that has no name."""
    with pytest.raises(ranks.RankFailure, match="pickle"):
        ranks.run(2, unpicklable)
    with pytest.raises(Exception, match="pickle"):
        ranks.run(2, lambda: None)
    assert ranks.run(2, partial(total, value=3.0)) == [6.0, 6.0]


def test_a_worker_that_dies_while_idle_is_replaced():
    """A death between runs costs nothing but a fork."""
    before = ranks.pids(2)
    os.kill(before[1], signal.SIGKILL)
    ranks.until(lambda: not ranks.alive(before[1]))
    assert ranks.run(2, total) == [2.0, 2.0]
    assert ranks.pids(2)[0] == before[0]
    assert ranks.pids(2)[1] != before[1]


@pytest.mark.full
def test_an_interruption_while_workers_start_leaves_no_confusion(monkeypatch):
    """Ctrl-C or a time-out between a question to the nursery and its answer: the next run starts from nothing."""
    ranks.shutdown()
    send = socket.send_fds

    def send_and_be_interrupted(*args):
        send(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "send_fds", send_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(2, total)
    monkeypatch.undo()
    assert ranks.run(2, total) == [2.0, 2.0]
    assert [each[0] for each in ranks.run(2, identity)] == ranks.pids(2)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("idle", [True, False])
def test_a_nursery_that_dies_is_replaced(idle):
    """Its workers die with it, in the middle of a run or between runs; the next run starts afresh."""
    before, nursery = ranks.pids(2), ranks.pool._pool._nursery.pid
    if idle:
        os.kill(nursery, signal.SIGKILL)
        until(lambda: not any(alive(pid) for pid in before))
    else:
        threading.Timer(0.3, os.kill, (nursery, signal.SIGKILL)).start()
        with pytest.raises(ranks.RankFailure, match="Died"):
            ranks.run(2, time.sleep, 100)
    assert ranks.run(2, total) == [2.0, 2.0]
    assert not set(ranks.pids(2)) & set(before)


@pytest.mark.parametrize(
    "words", [("plan", "--params", "7e9"), ("plan", "--parms", "7"), ("plan", "--help")], ids=" ".join
)
def test_a_command_is_what_a_cold_process_would_be(tmp_path, words):
    """The same exit code, output and errors, in the folder and the environment that were asked for."""
    cold = subprocess.run(
        [sys.executable, "-m", "zeroshard", *words], cwd=tmp_path, env=os.environ | {"COLUMNS": "70"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    warm = ranks.command(*words, cwd=tmp_path, COLUMNS="70")
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, ranks.untimed(cold.stderr))


def test_a_command_finds_its_folder_and_neither_rank_nor_earlier_command(tmp_path, monkeypatch):
    """A job beside it, no place among ranks, nothing that another command imported or set."""
    monkeypatch.setenv("RANK", "1")
    for turn in range(2):
        (tmp_path / "train.py").write_text(  # longer each time: Python tells old bytecode by second and size
            f"import os\nraise ValueError({turn}, os.getcwd(), os.environ.pop('RANK', None))" + "\n" * turn
        )
        done = ranks.command("plan", "train:job", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"ValueError: ({turn}, '{tmp_path}', None)" in done.stderr
    assert "torchrun" in ranks.command("plan", "train:job", "--check", cwd=tmp_path, RANK="0", WORLD_SIZE="2").stderr


def test_a_command_that_does_not_end_is_ended(tmp_path):
    """It fails with what it had printed, and the next one starts as ever."""
    with pytest.raises(AssertionError, match=r"ran for 1 s"):
        ranks.command("train", "--steps", 10**6, "--out", tmp_path, timeout=1)
    assert ranks.command("train", "--steps", 0).returncode == 2


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("sig", ["SIGKILL", "SIGTERM"])
def test_workers_end_with_the_process_that_started_them(sig, tmp_path):
    """Kill the parent in the middle of a run whose ranks hang: within seconds none of its processes is left."""
    (tmp_path / "napping.py").write_text(
        "import time\ndef nap(path):\n    open(path, 'w').close()\n    time.sleep(1000)\n"
    )
    code = textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{os.path.dirname(os.path.abspath(__file__))!r}, {str(tmp_path)!r}]
        import napping, ranks
        print(*ranks.pids(2), ranks.pool._pool._nursery.pid, flush=True)
        ranks.run(2, napping.nap, {str(tmp_path / "started")!r})
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    until(lambda: (tmp_path / "started").exists())
    parent.send_signal(getattr(signal, sig))
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(alive(pid) for pid in pids))


# ------------------------------------------------------------------------------------------ the models and reference


@pytest.mark.parametrize("name", models.names())
def test_models_are_the_same_every_time_and_train(name):
    """Building twice gives the same bits, two steps change a weight and keep all finite, and a rerun repeats them."""
    runs = []
    for _ in range(2):
        torch.rand(1)  # the global generator has no say
        model = models.build(name)
        before = reference.weights(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        history = reference.accumulate(
            model,
            optimizer,
            partial(models.batch, name),
            partial(models.loss, name),
            world=2,
            backwards=2,
            steps=2,
            clip=1.0,
        )
        runs.append((before, reference.weights(model)))
        assert all(math.isfinite(value) for losses in history.losses for value in losses)
    assert not reference.first_difference(*[before for before, _ in runs])
    assert not reference.first_difference(*[after for _, after in runs])
    assert reference.first_difference(*runs[0])


@pytest.mark.parametrize(
    "options",
    [
        {"hidden": 12, "tied": True},
        {"tied": "linear", "positions": False},
        {"frozen": ("embed", "position", "blocks.0"), "checkpoint": "reentrant"},
        {"checkpoint": "nonreentrant", "bias": False},
    ],
    ids=str,
)
def test_the_gpt_options_train(options):
    """Each option runs, frozen parts get no gradient, and what is tied is one parameter."""
    model = models.build("gpt", **options)
    models.loss("gpt", model, models.batch("gpt", 0, 0)).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (not name.startswith(options.get("frozen", ("none",)))), name
    assert (len(dict(model.named_parameters(remove_duplicate=False))) > len(dict(model.named_parameters()))) == (
        options.get("tied") is True
    )


@pytest.mark.parametrize("mode", ["reentrant", "nonreentrant"])
def test_activation_checkpointing_does_not_change_the_reference(mode):
    """The reference's own bits are the same with recomputation, so one reference serves all three."""
    assert not reference.first_difference(_trained("gpt", checkpoint=mode), _trained("gpt"))


def test_the_reference_adds_in_rank_order_and_divides_once():
    """accumulate equals the definition written out by hand: ((g0 + g1) + g2) / 3, for two backwards per rank too."""
    for backwards in (1, 2):
        model = models.build("mlp")
        seen = {}
        reference.accumulate(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            partial(models.batch, "mlp"),
            partial(models.loss, "mlp"),
            world=3,
            backwards=backwards,
            before_step=lambda _, model=model, seen=seen: seen.update(
                {n: p.grad.clone() for n, p in model.named_parameters()}
            ),
        )
        model = models.build("mlp")
        by_hand = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for index in range(3 * backwards):
            value = models.loss("mlp", model, models.batch("mlp", 0, index))
            for name, gradient in zip(by_hand, torch.autograd.grad(value, list(model.parameters())), strict=True):
                by_hand[name] = by_hand[name] + gradient
        reference.assert_same(seen, {name: gradient / 3 for name, gradient in by_hand.items()})


def test_fewer_ranks_with_more_micro_batches_are_the_same_reference():
    """4 x 1, 2 x 2 and 1 x 4 micro-batches give the same bits, in fp32 and in bf16 with fp32 masters."""
    runs = [_trained("gpt", world=world, backwards=4 // world) for world in (4, 2, 1)]
    for run in runs[1:]:
        reference.assert_same(run, runs[0])
    runs = []
    for world in (4, 2, 1):
        model = models.build("gpt")
        _, masters = reference.accumulate_with_masters(
            model, partial(torch.optim.AdamW, lr=1e-2), partial(models.batch, "gpt"), partial(models.loss, "gpt"),
            world=world, backwards=4 // world, steps=3, clip=0.5, average=True,
        )  # fmt: skip
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        runs.append(masters)
    for run in runs[1:]:
        reference.assert_same(run, runs[0])


def test_one_rank_of_the_users_loop_is_the_reference():
    """`loop` at one rank and `accumulate` at world 1 are the same training."""
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = reference.loop(
        model,
        optimizer,
        partial(models.batch, "gpt"),
        partial(models.loss, "gpt"),
        backwards=2,
        steps=3,
        clip=0.5,
        average=True,
    )
    reference.assert_same(reference.weights(model), _trained("gpt", world=1, backwards=2))
    assert len(history.norms) == 3


def test_a_difference_is_found_and_named():
    """first_difference sees one flipped bit, a dtype, a name; NaN equals NaN."""
    want = {"w": torch.tensor([1.0, math.nan, 3.0])}
    assert reference.first_difference({"w": want["w"].clone()}, want) == ""
    got = {"w": torch.tensor([1.0, math.nan, 3.0000002])}
    assert "w: 1 of 3 elements differ, first at 2" in reference.first_difference(got, want)
    assert "float64" in reference.first_difference({"w": want["w"].double()}, want)
    assert "names differ: ['v', 'w']" in reference.first_difference({"v": want["w"]}, want)


def _trained(name, *, world=2, backwards=2, **options):
    model = models.build(name, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference.accumulate(
        model, optimizer, partial(models.batch, name), partial(models.loss, name),
        world=world, backwards=backwards, steps=3, clip=0.5, average=True,
    )  # fmt: skip
    return reference.weights(model)
