"""Each claim on every case of a pairwise array of settings: see `claims`."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest

import ranks
import reference
import zeroshard
from claims import features, plain, removed, scenario
from zeroshard import Machine, Model, Step
from zeroshard.checkpoint.manifest import Saved
from zeroshard.planner import predict_tiers
from zeroshard.planner.simulate import simulate

NIGHTLY = (1, 2)  # seeds of the arrays of `make slow`
CASES = features.drawn(0)
MORE = [case for seed in NIGHTLY for case in features.drawn(seed)]
FEW = features.covering(CASES)  # those of `make test`: each choice of each setting once


def params(cases, few=FEW):
    """Cases as parameters: `make full` has those that `make test` leaves out."""
    found = [pytest.param(case, marks=[pytest.mark.full] * (case not in few)) for case in CASES if case in cases]
    return found + [pytest.param(case, marks=pytest.mark.slow) for case in dict.fromkeys(cases) if case not in CASES]


every = pytest.mark.parametrize("case", params([*CASES, *MORE]), ids=str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("claims")


@functools.cache
def outcome(case, folder):
    """What each rank saw, once for all claims. It loads what the first case of its model saved."""
    source = next(each for each in CASES if each.model == case.model)
    if source != case:
        outcome(source, folder)
    return ranks.run(
        case.ranks, scenario.run, case, folder / str(case), folder / str(source) / "saved", timeout=120
    ), plain.numbers(source)  # fmt: skip


@functools.cache
def wanted(how):
    """The same in plain PyTorch: after the first steps, after the one that is repeated, and after an edit and another."""
    trained = plain.go_on(None, how, scenario.STEPS, 0, clips=False)
    repeated = plain.go_on(trained, how, 1, scenario.STEPS, clips=how.clips)
    edited = plain.edited(repeated, how, scenario.edit)
    return trained, repeated, plain.go_on(edited, how, 1, scenario.STEPS + 1, clips=how.clips)


@pytest.mark.row(31, 32, 34, 85, 102, 103, 104, 105, 106)
@every
def test_bits_are_those_of_plain_pytorch(case, folder):
    """Losses of each rank and weights, `==`."""
    trained, *_ = wanted(plain.numbers(case))
    for rank, found in enumerate(outcome(case, folder)[0]):
        reference.assert_same(found.trained, trained.weights)
        assert found.losses == [loss for step in trained.losses for loss in step[rank :: case.ranks]]


@every
def test_a_step_that_one_rank_left_is_repeated_with_the_same_bits(case, folder):
    """The last rank raises in backward, the others are told; then all take the step, and its norm is the definition's."""
    _, repeated, _ = wanted(plain.numbers(case))
    for rank, found in enumerate(outcome(case, folder)[0]):
        assert found.errors == ([] if case.early else ["ArithmeticError" if rank == case.ranks - 1 else "PeerError"])
        assert [found.norm] == list(repeated.norms or [0.0])
        reference.assert_same(found.repeated, repeated.weights)


@pytest.mark.row(85, 103, 104)
@every
def test_an_edit_becomes_the_masters(case, folder):
    """Inside gathered(), of one matrix; the next step begins from it, and from all other masters as they were."""
    *_, edited = wanted(plain.numbers(case))
    for found in outcome(case, folder)[0]:
        reference.assert_same(found.edited, edited.weights)


@pytest.mark.row(87, 102, 104)
@every
def test_a_checkpoint_holds_the_masters_and_moments_of_plain_pytorch(case, folder):
    """Of every element, whoever wrote it: in fp32, whatever rests or is computed with."""
    outcome(case, folder)
    trained, *_ = wanted(plain.numbers(case))
    with Saved.open(folder / str(case) / "saved") as saved:
        found = {key: saved.interval(key, 0, parts[-1].stop) for key, parts in saved.cut.items()}
    reference.assert_same(
        {f"{state} of {name}": tensor.float() for (name, state), tensor in found.items()}, plain.content(trained)
    )


@pytest.mark.row(87, 102, 104, 105)
@every
def test_a_checkpoint_loads_into_any_other_case(case, folder):
    """Written by other ranks, at another stage, in other tiers, formats and cuts. Training goes on with the bits of plain
    PyTorch, in this case's format."""
    found, source = outcome(case, folder)
    trained, how = wanted(source)[0], plain.numbers(case)
    want = [plain.go_on(trained, how, steps, scenario.STEPS, clips=how.clips).weights for steps in (0, 1)]
    for each in found:
        for mine, theirs in zip(each.loaded, want, strict=True):
            reference.assert_same(mine, theirs)


@pytest.mark.row(86, 102, 104, 106)
@every
def test_what_rests_in_each_tier_is_predicted_to_the_byte(case, folder):
    for found in outcome(case, folder)[0]:
        assert_at_rest(case, found.ledger.held, found.predicted)


@pytest.mark.row(102, 104)
@pytest.mark.parametrize("case", params([case for case in CASES if case.on_disk]), ids=str)
def test_what_files_move_in_a_step_is_predicted_to_the_byte(case, folder):
    for found in outcome(case, folder)[0]:
        predicted, counted = found.files
        assert predicted == counted


@pytest.mark.heavy
@pytest.mark.row(86, 104, 105)
@pytest.mark.parametrize("case", params(CASES, {case for case in FEW if case.ranks < 3}), ids=str)  # 2 seconds each
def test_a_simulated_rank_is_the_real_one_to_the_byte(case, folder, tmp_path):
    """At rest, at each peak and by each verb; it makes no file."""
    rank = len(str(case)) % case.ranks
    found = outcome(case, folder)[0][rank].ledger
    told = simulate(
        lambda: scenario.job_of(case),
        ranks=case.ranks,
        rank=rank,
        accumulate=case.micro,
        **case.settings(tmp_path / "none"),
    )
    assert not (tmp_path / "none").exists()
    simulated = scenario.told(told.zero, predict_tiers(told.zero))
    assert_at_rest(case, found.held, simulated.held)
    assert (found.peaks, found.moved) == (simulated.peaks, simulated.moved)


@pytest.mark.row(86)
@pytest.mark.parametrize("case", params([case for case in CASES if case.of_shapes]), ids=str)
def test_names_and_shapes_alone_say_what_each_tier_holds(case, folder, tmp_path):
    """Of the rank that holds most: the plan counts what is padded apart."""
    shapes = {name: [*weight.shape] for name, weight in scenario.job_of(case)["model"].named_parameters()}
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    settings, preset = case.settings(folder), {"fp32": "fp32", "bf16": "zeroshard"}[case.format]
    layout = dataclasses.replace(settings["layout"], recompute=False)  # which changes nothing that rests
    comm = dataclasses.replace(settings["comm"], release_after_forward=True, reduce="ordered")
    (planned,) = zeroshard.plan(
        Model(shapes=tmp_path / "shapes.json", preset=preset), Machine(ranks=case.ranks), stage=case.stage,
        step=Step(accumulate=case.micro), layout=layout, comm=comm, offload=settings["offload"],
        optimizer_in_backward=case.early,
    ).stages  # fmt: skip
    held = outcome(case, folder)[0][planned.rank].ledger.held
    assert {tier: sum(found.values()) for tier, found in planned.tiers.items()} == {
        tier: sum(found.values()) for tier, found in held.items()
    }
    for tier, found in planned.tiers.items():
        for state, name in {"m": "exp_avg", "v": "exp_avg_sq", "step": "step"}.items():
            if tier != "nvme":
                assert found.get(state, 0) == held[tier].get(name, 0)


@pytest.mark.parametrize(
    ("test", "claim", "choices"),
    [
        (f"{file}.{test}", claim, choices)
        for file, tests in removed.REMOVED.items()
        for test, claims in tests.items()
        for claim, *choices in claims
    ],
)
def test_the_choices_of_a_test_that_is_gone_meet_in_a_case(test, claim, choices):
    """Of the claim that is made in its place."""
    assert callable(globals()[claim])
    cases = [case for case in CASES if case.on_disk or claim != removed.FILES]
    assert any({*choices} <= {*dataclasses.astuple(case)} for case in cases), test


def assert_at_rest(case, held, planned):
    """What is held is what is planned. Of sums in files a rank that updates a bucket less needs a buffer less, which
    the plan counts: at stages 0 and 1, where shards are unequal."""
    if (
        case.rests in ("parts", "files", "files-unchecked")
        and case.stage < 2
        and case.cut in ("one-vector", "no-tensor", "no-matrix")
    ):
        held, planned = ({**each, "host": dict(each["host"])} for each in (held, planned))
        assert held["host"].pop("staging") <= planned["host"].pop("staging")
    assert held == planned
