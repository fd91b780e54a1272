"""`zeroshard.world`: many ranks in one process, for notebooks and debuggers; and what only processes can do, refused."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import reference
import zeroshard
from zeroshard.comm import groups
from zeroshard.errors import PeerError, StateError, UserError

STEPS = 3


def made(stage=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage)


def step(model, optimizer, number):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def losses_and_weights(stage):
    model, optimizer, zero = made(stage)
    losses = [step(model, optimizer, number) for number in range(STEPS)]
    with zero.gathered():
        return losses, reference.weights(model)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_program_for_torchrun_runs_unchanged_with_the_same_bits(seed):
    want = ranks.run(3, losses_and_weights, 3, group="env")
    with zeroshard.world(3, seed=seed) as world:
        found = world.run(losses_and_weights, 3)
    for (losses, weights), (wanted, those) in zip(found, want, strict=True):
        assert losses == wanted
        reference.assert_same(weights, those)
    assert not dist.is_initialized() and "RANK" not in os.environ


def test_ranks_keep_what_they_have_from_one_run_to_the_next():
    """A model that one cell shards is trained by the next, with the bits of one run."""
    want = zeroshard.world(2).run(losses_and_weights, 2)
    with zeroshard.world(2) as world:
        models = world.run(made, 2)

        def once(number):
            model, optimizer, _ = models[dist.get_rank()]
            return step(model, optimizer, number)

        losses = [world.run(once, number) for number in range(STEPS)]

        def weights():
            model, _, zero = models[dist.get_rank()]
            with zero.gathered():
                return reference.weights(model)

        found = world.run(weights)
    assert [list(each) for each in zip(*losses, strict=True)] == [losses for losses, _ in want]
    for got, (_, wanted) in zip(found, want, strict=True):
        reference.assert_same(got, wanted)


def place():
    dist.init_process_group("gloo")
    group = dist.new_group([0, 2])
    total = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() != 1:
        dist.all_reduce(total, group=group)
    return os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], total.item()


def test_the_environment_is_that_of_torchrun_and_groups_are_the_programs_own():
    assert zeroshard.world(3).run(place) == [("0", "0", "3", 4.0), ("1", "1", "3", 2.0), ("2", "2", "3", 4.0)]


def fails():
    made()
    if dist.get_rank() == 1:
        raise KeyError("mine")
    dist.barrier()


def test_the_first_error_is_raised_as_it_is_and_ends_the_world():
    world = zeroshard.world(3, seed=2)
    with pytest.raises(KeyError, match="mine") as found:
        world.run(fails)
    assert found.traceback[-1].name == "fails"
    notes = getattr(found.value, "__notes__", None)
    assert notes[0] == "raised on rank 1 of 3; zeroshard.world(3, seed=2) draws this schedule again"
    assert sum(note.startswith(("then on rank 0", "then on rank 2")) for note in notes) == 2
    with pytest.raises(StateError, match="world ended .KeyError on rank 1 of 3.: make another one"):
        world.run(place)
    assert repr(world) == "zeroshard.world(3): KeyError on rank 1 of 3"


def alone():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.barrier()


def each_for_the_other():
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=[pair, None][dist.get_rank()])


@pytest.mark.parametrize("program", [alone, each_for_the_other])
def test_ranks_that_wait_for_each_other_are_named_at_once(program):
    with pytest.raises(RuntimeError) as found:
        zeroshard.world(2).run(program)
    said = "\n".join([str(found.value), *getattr(found.value, "__notes__", [])])
    assert "no rank could go on: rank 0 waits for" in said and f"in {program.__name__}" in said


def waits_for_ever():
    dist.init_process_group("gloo")
    dist.distributed_c10d._get_default_store().wait(["what nobody sets"])


def test_what_waits_without_a_limit_ends_too():
    with pytest.raises((PeerError, RuntimeError)) as found:
        zeroshard.world(2).run(waits_for_ever)
    assert "what nobody sets" in str(found.value)


def reads_early():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    work = dist.all_reduce(total, async_op=True)
    early = total.item()  # the bug: nobody has waited
    work.wait()
    return early


def test_seeds_draw_what_a_race_needs_and_draw_it_again():
    found = {seed: zeroshard.world(3, seed=seed).run(reads_early) for seed in range(12)}
    assert len({tuple(each) for each in found.values()}) > 1
    assert {seed: zeroshard.world(3, seed=seed).run(reads_early) for seed in range(12)} == found


def prints():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print("first", end=" ")
    dist.barrier()
    print(f"line of {rank}\nand another")


def test_lines_begin_with_their_rank(capsys):
    zeroshard.world(2).run(prints)
    print("the end")
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] first ",  # then it waits for the other rank, whose line begins
        "[rank 1] first line of 1",
        "[rank 1] and another",
        "[rank 0] line of 0",
        "[rank 0] and another",
        "the end",
    ]


def own_thread(collective):
    dist.init_process_group("gloo")
    told = []

    def work():
        try:
            told.append((torch.ones(2) @ torch.ones(2)).item())
            if collective:
                dist.all_reduce(torch.ones(1))
        except StateError as error:
            told.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return told


def test_a_thread_of_the_programs_own_computes_but_calls_no_collective():
    assert zeroshard.world(2).run(own_thread, False) == [[2.0], [2.0]]
    for rank, (value, error) in enumerate(zeroshard.world(2).run(own_thread, True)):
        assert value == 2.0
        assert error.startswith(f"a thread that rank {rank} of 2 has started calls torch.distributed")


def forks():
    os.fork()


def workers():
    return [*torch.utils.data.DataLoader([1, 2], num_workers=1)]


def alarms():
    signal.setitimer(signal.ITIMER_REAL, 60)


def on_an_accelerator():
    """What `shard` does for a model on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_default_backend_for_device", lambda device: "nccl")
        groups.start(zeroshard.Comm(), torch.device("cpu"))


def on_meta():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1, device="meta"))


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout")
def by_nccl():
    dist.init_process_group("gloo")
    dist.new_group([0, 1], backend="nccl")


@pytest.mark.parametrize(
    ("program", "kind", "says"),
    [
        (
            forks,
            StateError,
            "os.fork on rank 0 of 2: ranks of zeroshard.world(...) are threads of one process, and a fork",
        ),
        (alarms, StateError, "signal.setitimer on rank 0 of 2"),
        (on_an_accelerator, UserError, "a process group with backend 'nccl' on rank 0 of 2"),
        (workers, StateError, "DataLoader(num_workers=0)"),
        (on_meta, UserError, "a message on meta: ranks of zeroshard.world(...) send through host memory"),
        (by_nccl, UserError, "a process group with backend 'nccl' on rank 0 of 2"),
    ],
)
def test_what_needs_processes_is_refused_by_name(program, kind, says):
    with pytest.raises(kind) as found:
        zeroshard.world(2).run(program)
    assert says in str(found.value)


def test_a_world_inside_a_rank_and_a_closed_one_are_refused():
    with pytest.raises(StateError, match="inside a rank"):
        zeroshard.world(2).run(lambda: zeroshard.world(2).run(place))
    with zeroshard.world(1) as world:
        pass
    with pytest.raises(StateError, match="after the world ended"):
        world.run(place)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: zeroshard.world(0), "world(ranks=0): expected an integer of at least 1"),
        (lambda: zeroshard.world("4"), "world(ranks='4')"),
        (lambda: zeroshard.world(2.0), "world(ranks=2.0)"),
        (lambda: zeroshard.world(True), "world(ranks=True)"),
        (lambda: zeroshard.world(4, seed=-1), "world(seed=-1): expected an integer of at least 0"),
        (lambda: zeroshard.world(4, seed="a"), "world(seed='a')"),
    ],
)
def test_numbers_that_are_none_are_refused(call, says):
    with pytest.raises(UserError) as found:
        call()
    assert says in str(found.value)


async def coroutine():
    raise AssertionError("it ran")


def generator():
    yield 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (None, "world.run(None): expected a function"),
        (coroutine, "world.run(coroutine): a call of it runs nothing yet"),
        (generator, "world.run(generator): a call of it runs nothing yet"),
    ],
)
def test_what_a_call_does_not_run_is_refused(function, says):
    with zeroshard.world(2) as world:
        with pytest.raises(UserError) as found:
            world.run(function)
        assert says in str(found.value)
        assert world.run(lambda function: function, function=1) == [1, 1]


def test_a_ranks_number_of_threads_ends_with_the_run():
    before = torch.get_num_threads()
    try:
        zeroshard.world(2).run(torch.set_num_threads, before + 1)
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


def test_two_runs_at_once_are_refused():
    with zeroshard.world(1) as world:
        told = []

        def other():
            try:
                zeroshard.world(1).run(place)
            except StateError as error:
                told.append(str(error))

        def waits():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

        world.run(waits)
    assert told == ["another world runs in this process: one zeroshard.world runs at a time"]


def test_what_ranks_return_is_the_programs_alone():
    with zeroshard.world(2) as world:
        models = world.run(made)
        kept = [weakref.ref(zero) for _, _, zero in models]
    del models
    gc.collect()
    assert [each() for each in kept] == [None, None]


PROGRAM = """
import torch
import torch.distributed as dist
import zeroshard

def train():
    dist.init_process_group("gloo")
    total = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() == 1:
        breakpoint()
    dist.all_reduce(total)
    return total.item()

print(zeroshard.world(2).run(train))
"""


def test_a_debugger_stops_one_rank_and_the_others_wait(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], input="p total\nnext\nc\n", cwd=tmp_path, text=True, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tensor([2.])" in done.stdout and done.stdout.rstrip().endswith("[3.0, 3.0]")
