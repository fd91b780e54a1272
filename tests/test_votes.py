"""One rank fails, all ranks vote by a collective of the program's own, and try the step again: nobody waits in vain."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks as rank_processes
import reference
import world
import zeroshard
from ranks import RankFailure
from zeroshard import Comm, Precision
from zeroshard.comm import collectives
from zeroshard.comm.departed import LOOKS, Departed, next_looked_at
from zeroshard.errors import PeerError

STEPS = 4
# In processes a rank that waits for its time-out is still there when the test's own comes. In worlds that time passes at
# once, and then the collective has not completed and no further attempt can.
LIMITS = {"group_timeout": 1000.0, "timeout": 100.0}
LATE = 5.0  # seconds, virtual in worlds: longer than a waiting rank takes to look at the others


class Failed(Exception):
    pass


def late():
    collectives.time.sleep(LATE)


class Slow:
    """Takes long to be read by one rank, inside a collective that the other is through."""

    def __reduce__(self):
        return slow, ()


def slow():
    if dist.get_rank() == 1:
        time.sleep(2.0)
    return 0


def through_late(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeroshard.shard(model, optimizer, stage=stage, comm=Comm(timeout=60))
    for _ in range(2):
        dist.all_gather_object([None, None], Slow())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_is_slow_in_a_collective_of_all_is_waited_for(stage):
    """It stands in a collective that the waiting rank is through, so it waits for nobody: no rank leaves."""
    rank_processes.run(2, through_late, stage)


def agreed(worked: bool) -> bool:
    """The vote: a collective over the program's own group."""
    flag = torch.tensor([int(worked)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def batch(step: int, micro: int = 0):
    seed = 100 * step + 10 * micro + rank_processes.rank()
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(seed))


def built(stage: int, settings: dict):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **settings)


class Failures:
    """Failures of this rank at a place of drawn steps."""

    def __init__(self, where: str, plan: dict, model, optimizer) -> None:
        """plan: by step the ranks that fail, in one attempt after the other."""
        self.where, self.step = where, 0
        self.left = {step: list(them) for step, them in plan.items()}
        if where in ("forward", "Ctrl-C"):
            model[2].register_forward_pre_hook(lambda *_: self.due())
        elif where == "backward":
            model[1].register_forward_hook(lambda _, __, out: out.register_hook(lambda grad: self.due()) and None)
        elif where == "gradient":
            next(model[1].parameters()).register_hook(lambda grad: self.due())
        elif where == "step":
            optimizer.register_step_pre_hook(lambda *_: self.due())

    def due(self, where: str = ""):
        now = self.left.get(self.step) if where in ("", self.where) else None
        if now and rank_processes.rank() in now[0]:
            raise (KeyboardInterrupt if self.where == "Ctrl-C" else Failed)(f"step {self.step}")

    def passed(self):
        if self.left.get(self.step):
            self.left[self.step].pop(0)


def attempt(model, optimizer, failures, settings):
    """A step up to the vote."""
    for micro in range(1 if settings.get("optimizer_in_backward") else 2):
        loss = model(batch(failures.step, micro)).square().mean()
        failures.due("loss")
        loss.backward()
    if failures.where == "step":
        optimizer.step()


def trained(stage: int, where: str, plan: dict, settings: dict, votes=agreed):
    """(the weights, this rank's errors). votes: returns if all ranks go on to the next step, or this one by itself."""
    model, optimizer, zero = built(stage, settings)
    failures, told = Failures(where, plan, model, optimizer), []
    for failures.step in range(STEPS):
        for _ in range(6):
            worked = False
            try:
                attempt(model, optimizer, failures, settings)
                worked = True
            except (Failed, KeyboardInterrupt, PeerError) as error:
                told.append(f"{type(error).__name__}: {error}")
            failures.passed()
            if votes(worked):
                break
            optimizer.zero_grad()
        else:
            raise AssertionError(told)
        if where != "step":
            optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return reference.weights(model), told


def voted(stage: int, where: str, plan: dict, settings: dict):
    """(where the bits differ from those of a run without failures, this rank's errors)."""
    want, _ = trained(stage, where, {}, settings)
    got, told = trained(stage, where, plan, settings)
    return reference.first_difference(got, want), told


def judged(outcomes, plan, why: str, kind: str = "Failed"):
    """Every rank heard of each failure once: of its own by its own error, of another's by a `PeerError` that says whose."""
    failures = [them for each in plan.values() for them in each]
    for rank, (differs, told) in enumerate(outcomes):
        assert differs == "", (rank, differs, told)
        assert len(told) == len(failures), (rank, told)
        for them, error in zip(failures, told, strict=True):
            if rank in them:
                assert error.startswith(kind), (rank, error)
            else:
                waits = "another rank waits for this one in a collective of its program's, and this one for it in"
                what = waits if why == VOTES else "another rank has left what this rank is at"
                assert error.startswith(f"PeerError: {what}"), (rank, error)
                assert any(f"rank {each}: {why}" in error for each in them), (rank, error)


VOTES = "its program waits for all ranks in torch.distributed.all_reduce"
WHY = {
    "forward": "forward ",
    "Ctrl-C": "an exception ended forward ",
    "loss": VOTES,
    "backward": "an exception ended backward ",
    "gradient": "an exception ended backward ",
    "step": VOTES,
}
ALONE = {
    "all_reduce": lambda value: dist.all_reduce(value),
    "barrier": lambda value: dist.barrier(),
    "broadcast": lambda value: dist.broadcast(value, 0),
    "scatter": lambda value: dist.scatter(value, [value, value + 1] if rank_processes.rank() == 0 else None, 0),
    "objects": lambda value: dist.broadcast_object_list([value], 0),
}


def evaluated_alone(collective: str):
    """What rank 0 is told that evaluates alone at stage 3, while the others wait for its result."""
    model, *_ = built(3, {})
    model(batch(0)).square().mean().backward()
    value, told = torch.zeros(1), ""
    try:
        if rank_processes.rank() == 0:
            with torch.no_grad():
                value[0] = model(batch(1)).mean()
    except PeerError as error:
        told = str(error)
    ALONE[collective](value)
    return told


@pytest.mark.row(3)
@pytest.mark.processes  # in a world a receiver of the program's own broadcast is not seen to wait
@pytest.mark.parametrize("collective", ALONE)
def test_a_rank_that_evaluates_alone_is_told_the_cure(ranks, collective):
    """At once, not at the end of the time-out, whichever collective the others wait for its result in."""
    told, *others = ranks.run(2, evaluated_alone, collective, **LIMITS)
    name, whom = {"objects": ("broadcast", "rank 0"), "barrier": ("barrier", "all ranks")}.get(
        collective, (collective, "all ranks" if collective == "all_reduce" else "rank 0")
    )
    assert f"rank 1: its program waits for {whom} in torch.distributed.{name}" in told
    assert "or with zero.gathered(): ... any of them calls it, without grad" in told
    assert others == [""]


ONCE = {1: [[0]]}
AGAIN = {0: [[1]], 2: [[0], [1], [1]]}


@pytest.mark.row(3)
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("where", WHY)
def test_a_vote_after_one_ranks_failure_gets_through(ranks, where, stage, transport):
    """Whatever the others wait for by then, each leaves it with an error, and the next attempt has the same bits."""
    outcomes = ranks.run(2, voted, stage, where, ONCE, {"comm": Comm(transport=transport)}, **LIMITS)
    judged(outcomes, ONCE, WHY[where], "KeyboardInterrupt" if where == "Ctrl-C" else "Failed")


@pytest.mark.row(3)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_several_votes_in_a_row(ranks, where, stage):
    """The failing rank fails again, then another one."""
    judged(ranks.run(2, voted, stage, where, AGAIN, {}, **LIMITS), AGAIN, WHY[where])


def micro_batch_again(stage: int, where: str):
    """The weights where only the micro-batch is tried again in which rank 0 fails, without zero_grad; and the errors."""
    found = []
    for plan in ({}, {1: [[0], [0]]}):
        model, optimizer, zero = built(stage, {})
        failures, told = Failures("", plan, model, optimizer), []
        model[2].register_forward_pre_hook(lambda *_, failures=failures: failures.due("forward"))
        for failures.step in range(3):
            for micro in range(3):
                worked = False
                while not worked:
                    failures.where = where if micro == 1 else "later"
                    try:
                        loss = model(batch(failures.step, micro)).square().mean()
                        failures.due("loss")
                        loss.backward()
                        worked = True
                    except (Failed, PeerError) as error:
                        told.append(f"{type(error).__name__}: {error}")
                    if micro == 1:
                        failures.passed()
                    worked = agreed(worked)
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            found.append((reference.weights(model), told))
    (want, _), (got, told) = found
    return reference.first_difference(got, want), told


@pytest.mark.row(3)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("where", ["forward", "loss"])
def test_gradients_of_earlier_micro_batches_outlast_a_vote(ranks, where, stage):
    """What failed has touched no gradient: none is dropped, and no rank hears of more than the failures."""
    outcomes = ranks.run(2, micro_batch_again, stage, where, **LIMITS)
    judged(outcomes, {1: [[0], [0]]}, WHY[where])


SETTINGS = {
    "replicas": {"comm": Comm(replicas=2)},
    "replicas, all": {"comm": Comm(replicas=2, optimizer="all", transport="gloo")},
    "hosts": {"comm": Comm(hosts=2)},
    "messages": {"comm": Comm(transport="gloo")},
    "memory": {},
    "bf16": {"precision": Precision(param_dtype=torch.bfloat16, cast_inputs=True)},
    "in backward": {"optimizer_in_backward": True},
}


@pytest.mark.row(3)
@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_votes_of_four_ranks(ranks, where, what, stage):
    """Two of four fail at once, then one: in replicas, between hosts, by messages and through memory."""
    plan = {0: [[3]], 2: [[0, 2]]}
    if what == "in backward" and where == "backward":
        pytest.skip("what a backward had updated when it failed is named until a load")
    judged(ranks.run(4, voted, stage, where, plan, SETTINGS[what], **LIMITS), plan, WHY[where])


@pytest.mark.row(3)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("seed", range(8))
def test_a_vote_gets_through_in_any_order(seed, where):
    """Who goes on and when a message lands are drawn."""
    plan = {1: [[seed % 3]], 2: [[0, 1], [2]]}
    ran = world.run(3, voted, seed % 4, where, plan, {}, seed=seed)
    for rank, (differs, told) in enumerate(ran):
        assert differs == "" and len(told) == 3, (rank, differs, told)


def one_is_late_to_the_vote(stage: int):
    """Ranks 0 and 1 fail in the loss; rank 1 comes to the vote when rank 2 has left on account of rank 0."""

    def votes(worked):
        if not worked and rank_processes.rank() == 1 and not came:
            came.append(late())
        return agreed(worked)

    came: list = []
    want, _ = trained(stage, "loss", {}, {})
    got, told = trained(stage, "loss", {1: [[0, 1]]}, {}, votes)
    return reference.first_difference(got, want), [each.partition(":")[0] for each in told]


@pytest.mark.row(3)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_of_which_nobody_knew_that_it_had_left(ranks, stage):
    """It hears so at its next call, behind the vote, when the others have begun to recover: they leave that, and vote."""
    for differs, told in ranks.run(3, one_is_late_to_the_vote, stage, **LIMITS):
        assert differs == "" and 1 <= len(told) <= 3 and {*told} <= {"Failed", "PeerError"}, (differs, told)


# --- races: the failing rank comes by itself just then -------------------------------------------------------------------


def impatient(stage: int, where: str, plan: dict, after: float):
    """No vote: the failing rank tries again after a while, when others may just have left, or not yet."""

    def votes(worked):
        collectives.time.sleep(0.0 if worked else after)
        return worked

    want, _ = trained(stage, where, {}, {})
    got, told = trained(stage, where, plan, {}, votes)
    return reference.first_difference(got, want), told


@pytest.mark.row(3)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_comes_again_when_others_leave(seed, where, stage):
    """Both ways all ranks come to the same state, after named errors."""
    after = 0.55 + 0.02 * seed
    for differs, told in world.run(2, impatient, stage, where, ONCE, after, seed=seed):
        assert differs == "" and 1 <= len(told) <= 3, (differs, told)
        assert all(each.startswith(("Failed: ", "PeerError: ")) for each in told), told


# --- what ends no wait --------------------------------------------------------------------------------------------------


class Inside(nn.Module):
    """A module that catches an exception of its own, and is late."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if self.training and rank_processes.rank() == 0:
            with contextlib.suppress(Failed):
                self.fails()
        return self.inner(x)

    def fails(self):
        try:
            raise Failed
        finally:
            late()


def caught_inside(stage: int):
    model = nn.Sequential(nn.Linear(16, 16), Inside(nn.Sequential(nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeroshard.shard(model, optimizer, stage=stage)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alike(stage: int, where: str):
    """All ranks raise, and rank 0 is late with what it does then."""
    everyone = [*range(rank_processes.world())]
    model, optimizer, _ = built(stage, {})
    failures, told = Failures(where, {1: [everyone]}, model, optimizer), []
    for failures.step in range(3):
        while True:
            try:
                attempt(model, optimizer, failures, {})
                break
            except (Failed, PeerError) as error:
                told.append(f"{type(error).__name__}: {error}")
                optimizer.zero_grad()
                failures.passed()
                if rank_processes.rank() == 0:
                    late()
        optimizer.step()
        optimizer.zero_grad()
    return told


def skipped(stage: int):
    """An evaluation on rank 0 raises behind its last block, is skipped, and rank 0 is late for the next."""
    model, optimizer, _ = built(stage, {})
    failures = Failures("", {1: [[0]]}, model, optimizer)
    model[3].register_forward_hook(lambda *_: failures.due())
    model.eval()
    for failures.step in range(3):
        with contextlib.suppress(Failed), torch.no_grad():
            model(batch(failures.step))
            continue
        late()


def second_view(stage: int):
    """The second of two forwards raises on rank 0, which goes on, late, with the first one's backward."""
    model, optimizer, _ = built(stage, {})
    failures = Failures("", {1: [[0]]}, model, optimizer)
    for failures.step in range(3):
        losses = [model(batch(failures.step)).square().mean()]
        with contextlib.suppress(Failed):
            losses.append(model(batch(failures.step, 1)).square().mean())
            failures.due()
        if failures.step == 1 and rank_processes.rank() == 0:
            late()
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()


def second_forward(stage: int):
    """The same, where the exception leaves the second forward itself, in a hook behind its last block."""
    model, optimizer, _ = built(stage, {})
    failures, views = Failures("", {1: [[0]]}, model, optimizer), []
    model[3].register_forward_hook(lambda *_: failures.due() if views else None)
    for failures.step in range(3):
        views.clear()
        losses = [model(batch(failures.step)).square().mean()]
        views.append("the second")
        with contextlib.suppress(Failed):
            losses.append(model(batch(failures.step, 1)).square().mean())
        if failures.step == 1 and rank_processes.rank() == 0:
            late()
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()


def goes_on_with(other: bool, stage: int, where: str):
    """All ranks raise in one model and go on with another, rank 0 late; the first one stays as it was left.

    other: is the second model there before? Else it is sharded afterwards.
    """
    model, optimizer, _ = built(stage, {})
    second = built(stage, {}) if other else None
    failures = Failures(where, {0: [[*range(rank_processes.world())]]}, model, optimizer)
    failures.step = 0
    with pytest.raises(Failed):
        attempt(model, optimizer, failures, {})
    if rank_processes.rank() == 0:
        late()
    second = second or built(stage, {})
    for step in range(2):
        loss = second[0](batch(step)).square().mean()
        if rank_processes.rank() == 0:
            late()
        loss.backward()
        second[1].step()
        second[1].zero_grad()


def another_model(stage: int):
    goes_on_with(True, stage, "forward")
    goes_on_with(True, stage, "backward")


def a_new_model(stage: int):
    goes_on_with(False, stage, "forward")
    goes_on_with(False, stage, "backward")


@pytest.mark.row(3)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("program", [caught_inside, skipped, second_view, second_forward, another_model, a_new_model])
def test_an_exception_that_one_rank_goes_on_from_ends_no_wait(ranks, program, stage):
    """However late that rank is: nothing is raised on any rank."""
    ranks.run(2, program, stage, **LIMITS)


@pytest.mark.row(4)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("where", ["forward", "loss", "backward", "step"])
@pytest.mark.parametrize("number", [2, 3])
def test_an_exception_that_all_ranks_raise_stays_each_ranks_own(ranks, where, stage, number):
    """However late one of them is for the next attempt."""
    assert ranks.run(number, alike, stage, where, **LIMITS) == [["Failed: step 1"]] * number


# --- the fact itself ----------------------------------------------------------------------------------------------------


def test_what_a_rank_has_left_keeps_it_from_what_it_has_not_launched():
    forward, votes = Departed(forward="forward 3 raised", counts=[5, 7]), Departed(stands_in="it votes", counts=[5, 7])
    is_open = Departed(open="an exception ended backward 3", counts=[5, 7])
    assert is_open.keeps(0, 6, backward=False) == "an exception ended backward 3"
    assert is_open.keeps(0, 5, backward=True) == is_open.keeps(1, 7, backward=True) == ""
    assert is_open.keeps(2, 1, backward=False) != ""  # a stream that it has not made yet
    assert forward.keeps(1, 8, backward=False) == "" and forward.keeps(1, 8, backward=True) == "forward 3 raised"
    assert votes.keeps(1, 8, backward=False) == "it votes" and votes.keeps(1, 7, backward=True) == ""
    assert Departed(forward="f", stands_in="v").keeps(0, 1, backward=False) == "f, and v"
    assert Departed(counts=[5, 7]).keeps(1, 8, backward=True) == ""


@pytest.mark.parametrize("number", [2, 3, LOOKS, LOOKS + 1, LOOKS + 2, 1000])
def test_a_waiting_rank_looks_at_all_others_in_turn(number):
    """At a few at a time; and each rank is looked at by as many, first of all."""
    members = [*range(10, 10 + number)]
    first = [next_looked_at(members, own, 0) for own in members]
    assert all(len(each) == len({*each}) == min(LOOKS, number - 1) for each in first)
    assert {sum(rank in each for each in first) for rank in members} == {min(LOOKS, number - 1)}
    turns = -(-(number - 1) // LOOKS)
    looked = {rank for turn in range(turns) for rank in next_looked_at(members, members[-1], turn)}
    assert looked == {*members[:-1]}


class Routed(nn.Module):
    """It sums a count over all ranks, and then uses one of its layers, on each rank another."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        expert = self.experts[rank_processes.rank()]
        count = torch.ones(1)
        if rank_processes.rank() == 0:  # a gather before the collective, here only
            x = expert(x)
        dist.all_reduce(count)
        return (x if rank_processes.rank() == 0 else expert(x)) * count


def routed(units: list[str]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Routed())
    layout = zeroshard.Layout(units=units)
    comm = zeroshard.Comm(timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeroshard.shard(model, optimizer, stage=3, layout=layout, comm=comm)
    for _ in range(3):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()


def test_a_collective_inside_a_forward_that_uses_other_units_is_told_the_cure(ranks):
    """The unit of the module that calls it: its weights are gathered before its forward begins."""
    said = (
        r"another rank waits for this one in a collective(?s:.)*Layout\(units=\[...\]\) with the module that calls it"
    )
    with pytest.raises(RankFailure, match=said):
        ranks.run(2, routed, ["1.experts.*"], **LIMITS)
    ranks.run(2, routed, ["1"], **LIMITS)
