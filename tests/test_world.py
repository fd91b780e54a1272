"""Worlds: ranks as threads of this process give the bits of ranks that are processes, and show what these hide."""

import contextlib
import inspect
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import verbs
import zeroshard
from ranks import RankFailure
from selection import STAGES
from world import Odds, Ran, jobs
from world import drawn as drawn_jobs
from world import run as run_in_world
from world.planted import BUGS
from world.training import earlier
from zeroshard.comm import launch_log, process_group
from zeroshard.comm.process_team import ProcessTeam
from zeroshard.tiers import tier
from zeroshard.worlds import signals


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_world_gives_the_bits_of_processes(stage, world, tmp_path):
    """Dropout from the global generator, clipping, a save behind the training, a load, and a step more."""
    real = ranks.run(world, jobs.train, stage, str(tmp_path / "real"))
    assert len(set(real)) == 1
    assert run_in_world(world, jobs.train, stage, str(tmp_path / "strict"), strict=True) == real
    assert run_in_world(world, jobs.train, stage, str(tmp_path / "drawn"), seed=stage) == real


def everything():
    """Every verb of torch.distributed's, of which each rank adds up what it has got."""
    rank, ranks_ = dist.get_rank(), dist.get_world_size()
    own = torch.arange(4, dtype=torch.float32) + 10 * rank
    found = {}

    def some(*shape):
        return torch.zeros(*shape)

    dist.all_reduce(total := own.clone())
    dist.all_reduce(most := own.clone(), op=dist.ReduceOp.MAX)
    dist.broadcast(first := own.clone(), 1)
    dist.all_gather(every := [some(4) for _ in range(ranks_)], own)
    dist.reduce(at_one := own.clone(), 1)
    pieces = [own[:1] + each for each in range(ranks_)]
    came = [some(1) for _ in range(ranks_)]
    if hasattr(dist, "all_gather_single"):  # before that, gloo has none
        dist.all_to_all(came, pieces)
    dist.all_to_all_single(single := some(ranks_), torch.cat(pieces))
    dist.scatter(part := some(1), pieces if rank == 0 else None, 0)
    dist.gather(own, gathered := [some(4) for _ in range(ranks_)] if rank == 0 else None, 0)
    dist.reduce_scatter(summed := some(1), pieces)
    objects = [None] * ranks_
    dist.all_gather_object(objects, {"rank": rank})
    if rank == 0:
        dist.send(own, 1, tag=3)
    if rank == 1:
        dist.recv(message := some(4), 0, tag=3)
        found["message"] = message.tolist()
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        dist.all_reduce(two := own.clone(), group=group)
        found["two"] = two.tolist()
    dist.barrier()
    tensors = {"total": total, "most": most, "first": first, "every": torch.cat(every), "came": torch.cat(came),
               "single": single, "part": part, "summed": summed, "objects": objects}  # fmt: skip
    tensors |= {"at one": at_one} if rank == 1 else {}
    tensors |= {"gathered": torch.cat(gathered)} if rank == 0 else {}
    return found | {name: each.tolist() if isinstance(each, torch.Tensor) else each for name, each in tensors.items()}


def test_the_users_own_torch_distributed_works_inside():
    real = ranks.run(3, everything)
    assert run_in_world(3, everything) == real
    assert run_in_world(3, everything, seed=1, strict=True) == real
    assert not dist.is_initialized()


def drawn():
    own = random.random(), float(numpy.random.random()), float(torch.rand(())), random.gauss(0, 1)
    dist.barrier()
    return own, (random.random(), float(numpy.random.random()), float(torch.rand(())), random.gauss(0, 1))


def test_each_rank_has_random_numbers_of_its_own_and_leaves_ours_alone():
    ranks.reset_global_state(5)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    found = run_in_world(3, drawn)
    assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def waits_for_each_other():
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(2), group=None if rank else pair)


def test_ranks_that_wait_for_each_other_are_found_and_explained():
    with pytest.raises(RankFailure) as found:
        run_in_world(3, waits_for_each_other)
    said = str(found.value)
    assert "no rank could go on" in said
    assert "rank 0 waits for all_reduce 1 of group" in said and "to which ranks [1] have not come" in said
    assert "rank 1 waits for all_reduce 1 of group 0, to which ranks [0, 2] have not come" in said
    assert "in waits_for_each_other" in said and "rank 2 has returned" in said


def leaves_one_alone():
    model = nn.Linear(4, 4)
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    if dist.get_rank() == 0:
        model(torch.ones(1, 4))
    return zero


def test_a_rank_that_does_not_come_to_a_forward_is_named():
    with pytest.raises(RankFailure) as found:
        run_in_world(2, leaves_one_alone, group_timeout=100.0)
    assert "no rank could go on: rank 0 waits" in str(found.value) and "in leaves_one_alone" in str(found.value)
    assert "PeerError" in str(found.value) and "rank 1 did not come" in str(found.value)


def too_early():
    rank = dist.get_rank()
    everyone = torch.zeros(2)
    work = verbs.all_gather_single(everyone, torch.ones(1) + rank, async_op=True)
    early = everyone.tolist()
    work.wait()
    return early, everyone.tolist()


def changed():
    own = torch.ones(3)
    work = verbs.all_gather_single(torch.zeros(6), own, async_op=True)
    own.add_(1)
    work.wait()


def given_back():
    own = torch.ones(3)
    work = verbs.all_gather_single(torch.zeros(6), own, async_op=True)
    own.untyped_storage().resize_(0)
    work.wait()


def test_what_has_not_landed_is_nan_and_what_is_under_way_is_checked():
    for early, late in run_in_world(2, too_early, strict=True):
        assert all(each != each for each in early) and late == [1.0, 2.0]
    with pytest.raises(
        RankFailure, match="memory of all_gather 1 of group 0 on rank 0 was changed while it was under way"
    ):
        run_in_world(2, changed, strict=True)
    with pytest.raises(RankFailure, match="memory of all_gather 1 of group 0 on rank 0 was given back while"):
        run_in_world(2, given_back)


def test_an_engine_that_does_not_wait_for_its_gradients_is_found(monkeypatch):
    """The planted bug: a reduction is folded before it has landed."""
    right = run_in_world(2, jobs.train, 3, steps=1)
    wait = ProcessTeam.wait
    monkeypatch.setattr(
        ProcessTeam, "wait", lambda team, verb, *what: None if verb == "reduce" else wait(team, verb, *what)
    )

    def found(seed):
        try:
            return run_in_world(2, jobs.train, 3, steps=1, seed=seed) != right
        except RankFailure:
            return True

    assert any(found(seed) for seed in range(10))


def test_a_seed_draws_the_same_schedule_again_and_other_seeds_draw_others():
    def digest(seed):
        ran = Ran()
        assert len(set(run_in_world(2, jobs.train, 3, steps=1, seed=seed, ran=ran))) == 1
        return ran.digest

    first = [digest(seed) for seed in range(2)]
    assert len(set(first)) == 2
    assert [digest(seed) for seed in range(2)] == first


def test_a_rank_that_ends_is_named_by_the_others():
    ran = Ran()
    odds = Odds(end=0.02)
    found = run_in_world(2, jobs.train, 3, seed=3, odds=odds, ran=ran, expect_errors=True)
    assert len(ran.struck) == 1 and "ends where it" in ran.struck[0]
    dead = int(ran.struck[0].split()[1])
    assert found[dead].type == "Died"
    assert found[1 - dead].type == "PeerError" and f"rank {dead} is gone" in found[1 - dead].message


@pytest.mark.full
def test_pytest_runs_ranks_in_worlds_where_it_is_asked_to(tmp_path):
    """A test as it is, `--worlds` and without: two processes, or threads of one."""
    (tmp_path / "test_it.py").write_text(
        "import os\n"
        "import ranks\n\n"
        "def place():\n"
        "    return os.getpid(), ranks.rank(), ranks.world()\n\n"
        "def test_it():\n"
        "    (first, *at), (second, *other) = ranks.run(2, place)\n"
        "    assert (at, other) == ([0, 2], [1, 2])\n"
        "    print('one process' if first == second == os.getpid() else 'three')\n"
    )
    here = str(Path(__file__).parent)
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        "-p",
        "conftest",
        f"--rootdir={tmp_path}",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    for option, said in ((["--worlds"], "one process"), ([], "three")):
        done = subprocess.run(
            [*words, "test_it.py", *option], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout and ("1 in worlds, 0 in processes" in done.stdout) == bool(option)


def again(seed, hashes="0"):
    """What the command says that runs a seed again, in another process."""
    done = subprocess.run(
        [sys.executable, "-m", "world", "replay", f"{seed}"], cwd=Path(__file__).parent, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hashes},
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def first(kind):
    """The first seed that draws faults of this kind."""
    return next(seed for seed in range(1000) if drawn_jobs.Case.of(seed).faults == kind)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("kind", ["interrupts", "disk"])
def test_a_seed_is_run_again_by_a_command(kind):
    """In other processes, with other hash seeds, and here, after other tests: the same faults at the same places, and the
    same schedule."""
    seed = first(kind)
    told = again(seed, "1")
    assert told == again(seed, "2")
    found = drawn_jobs.find(seed)
    assert found.ran.struck and all(words in told for words in found.ran.struck)
    assert f"schedule {found.ran.digest}: {found.ran.hand_overs} hand-overs" in told


@contextlib.contextmanager
def entered(counts):
    counts["held"] += 1
    try:
        yield len(counts)
    finally:
        counts["held"] -= 1  # at the end of a yield: a signal would be seen in what is tried
        counts["ended"] += 1  # nothing is called in the line before
    print(end="")


def held(counts):
    with entered(counts) as number:
        number += 1  # no signal between what enters and what is inside
        number += 2
        print(end="")
        number += 3  # after a call
    print(end="")  # the `with` was left by a call
    for each in range(2):
        number += each  # a loop goes back to it, once


def test_interrupts_come_where_the_interpreter_looks_for_signals():
    """Not before the line that a `finally` begins with, nor between two lines that call nothing."""
    came, lines = set(), {}
    for each in (entered.__wrapped__, held):
        code, first = inspect.getsourcelines(each)
        lines |= {first + at: line.strip() for at, line in enumerate(code)}

    def call(frame, event, _):
        code, since = frame.f_code, frame.f_lasti

        def line(frame, event, _):
            nonlocal since
            if event == "line":
                if signals.can_come(code, since, frame.f_lasti):
                    came.add(lines[frame.f_lineno])
                since = frame.f_lasti
            return line

        return line if code in (entered.__wrapped__.__code__, held.__code__) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        held({"held": 0, "ended": 0})
    finally:
        sys.settrace(before)
    assert came == {
        'counts["held"] += 1',
        "with entered(counts) as number:",
        "number += 3  # after a call",
        'print(end="")  # the `with` was left by a call',
        "for each in range(2):",
        "number += each  # a loop goes back to it, once",
    }


def test_weights_are_gathered_again_whose_release_an_interrupt_ended(monkeypatch):
    """Parameters pointed at the placeholder while their bucket had its memory still: no step and no load went on."""
    model = nn.Linear(4, 4)
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    bucket = zero._engine.buckets[0].gathered

    def interrupted(*_):
        raise KeyboardInterrupt

    bucket.take_memory(ahead=False)
    with monkeypatch.context() as patch:
        patch.setattr(tier.DeviceTier, "give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bucket.give_back_memory()
    bucket.take_memory(ahead=False)
    with torch._C.DisableTorchFunctionSubclass():
        assert [each.data_ptr() for each in bucket.params] == [view.data_ptr() for view in bucket.views]
        assert bucket.params[0].data_ptr() == bucket.full.data_ptr()


def test_states_are_counted_whose_count_an_interrupt_ended(monkeypatch):
    """What told that they need no new count was noted before they were counted."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=1)
    states, ledger = zero._engine.bindings[0].states, zero._engine.group.ledger

    hold = ledger.hold

    def interrupted(state, *rest):
        if state == "exp_avg":
            raise KeyboardInterrupt
        hold(state, *rest)

    model(torch.ones(1, 4)).sum().backward()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ledger, "hold", interrupted)
        optimizer.step()
    assert not ledger.held["exp_avg"]
    states.count(changed=True)
    assert ledger.held["exp_avg"] == 20 * 4


def in_different_collectives():
    if dist.get_rank():
        dist.broadcast(torch.ones(3), src=0)
    else:
        dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))


@pytest.mark.parametrize("seed", [None, *range(10)])
def test_ranks_in_different_collectives_end_by_an_error(seed):
    """What cannot land fails: its error ended the thread that chose who goes on, and nobody went on."""
    with pytest.raises(RankFailure, match="do all ranks call the same.* rank 0 gives 12 bytes, broadcast 1 of"):
        run_in_world(2, in_different_collectives, seed=seed)


def asks_for_another_thing(folder):
    model = nn.Linear(4, 4)
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    with pytest.raises(zeroshard.errors.PeerError) as found:
        zero.latest(folder) if dist.get_rank() else zero.load(f"{folder}/1")
    return str(found.value), zero.latest(folder)


def test_ranks_that_load_and_look_for_a_checkpoint_at_once_are_told_so(tmp_path):
    """It was a KeyError, as a drawn schedule showed in which a program tried again after two interrupts."""
    for words, latest in run_in_world(2, asks_for_another_thing, str(tmp_path)):
        assert "the ranks are not doing the same thing" in words and latest is None
        assert "rank 0 is at telling the others of zero.load(...)" in words
        assert "rank 1 is at telling the others of zero.latest(...)" in words


def models_end():
    for _ in range(3):
        earlier()


@pytest.mark.full
def test_a_seed_that_fails_fails_again(monkeypatch):
    """A race that was in the engine once: at the end of a model its streams were pruned, wherever the collector found it.

    No place is named where it is to run: it does inside any copy of a container.
    """
    let_go = process_group.let_go
    monkeypatch.setattr(process_group, "let_go", lambda each, engine: (let_go(each, engine), launch_log.prune(each)))

    def failure(seed):
        ran = Ran()
        try:
            run_in_world(2, models_end, seed=seed, odds=Odds(inside=0.02), ran=ran)
        except RankFailure as found:
            return f"{found}", ran
        return "", ran

    seed = next(seed for seed in range(200) if "deque mutated" in failure(seed)[0])
    before = failure(seed)[1].before
    assert "collects garbage inside a copy in a tuple" in "".join(before)
    assert "raises RuntimeError: deque mutated during iteration" in before[-1]
    assert len({failure(seed)[1].digest for _ in range(4)}) == 1
    assert all("deque mutated" in failure(seed)[0] for _ in range(4))


def test_a_rank_that_pauses_is_waited_for_and_one_that_pauses_for_too_long_is_named():
    ran = Ran()
    odds = Odds(pause=0.05, pauses=(20,), most=1)
    run_in_world(2, jobs.train, 1, seed=1, odds=odds, ran=ran, group_timeout=30.0)
    assert len(ran.struck) == 1 and "20 virtual seconds" in ran.struck[0] and ran.clock > 20
    odds = Odds(pause=0.05, pauses=(300,), most=1)
    found = run_in_world(2, jobs.train, 1, seed=1, odds=odds, ran=ran, group_timeout=30.0, expect_errors=True)
    assert len(ran.struck) == 1
    assert all(each.type in ("PeerError", "DistStoreError", "RuntimeError") for each in found), found


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("kind", drawn_jobs.FAULTS)
def test_drawn_jobs_keep_what_is_claimed(kind):
    """Three of each kind: half a minute of the processor in all. `make drawn` runs others each time."""
    seeds = [seed for seed in range(200) if drawn_jobs.Case.of(seed).faults == kind]
    for seed in seeds[:3]:
        found = drawn_jobs.find(seed)
        assert not found.wrong, f"python -m world replay {seed}: {found.outcome}: {found.words}"


def test_bugs_to_plant_have_a_place():
    """They are changes of the source as it is, which is measured with them by `python -m world planted`."""
    package = Path(zeroshard.__file__).parent
    assert [bug.name for bug in BUGS if (package / bug.file).read_text().count(bug.was) != 1] == []
