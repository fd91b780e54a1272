"""`optimizer_over="all"` and `hosts`: what is predicted, simulated and compared of states that all rows of ranks share."""

import json
from fractions import Fraction

import pytest
import torch

import selection
import zeroshard
from flat import plan_of
from test_planned_replicas import STEPS, wide
from zeroshard import Comm, Layout, Machine, Model, Step, shard
from zeroshard.cli.config import InputError
from zeroshard.cli.main import app
from zeroshard.errors import UserError
from zeroshard.layout.partition import Spec, partition
from zeroshard.layout.states import placements
from zeroshard.planner import closed, recipes, states, traffic
from zeroshard.planner.simulate import simulate

STAGES = (1, 2, 3)
LAYOUT = Layout(bucket_mib=0.003, units=())
PAPER = recipes.PRESETS["paper"]
NAMES = {"m": "exp_avg", "v": "exp_avg_sq"}


WAYS = {"all": {"spread": True}, "hosts": {"hosts": True}}


def over(way, rows):
    return Comm(hosts=rows) if way == "hosts" else Comm(replicas=rows, optimizer=way)


def real(stage, way):
    rank = torch.distributed.get_rank()
    parts = wide()
    optimizer = parts["optimizer"](parts["model"].parameters())
    zero = shard(parts["model"], optimizer, stage=stage, layout=LAYOUT, comm=over(way, 2))
    for step in range(STEPS):
        parts["loss"](parts["model"], parts["batch"](step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ledger = zero.ledger()
    return {state: n for state, n in ledger.held.items() if n}, ledger.traffic


def specs():
    return [Spec(name, tuple(param.shape), "float32", 4, 0, True) for name, param in wide()["model"].named_parameters()]


@pytest.mark.row(86)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", selection.STAGES[1:])
def test_shapes_alone_say_what_a_rank_of_all_replicas_holds_and_sends(ranks, stage, way):
    """State by state, and what it shares, gathers and reduces in three steps; the relay on average."""
    cut, place, recipe = partition(specs(), LAYOUT, 2), placements(stage, **WAYS[way]), recipes.PRESETS["fp32"]
    told = ranks.run(4, real, stage, way)
    for rank, (held, moved) in enumerate(told):
        planned = states.of_recipe(cut, place, rank, recipe, replicas=2).states()
        assert {NAMES.get(state, state): n for state, n in planned.items()} == held
        want = states.recipe_traffic(cut, place, rank, recipe, replicas=2)
        first = ["gather"] * (stage < 3) + ["share"] * (stage < 3 or way == "all")  # of which one is enough at stage 3
        for verb in ("reduce", *first):
            found = moved[verb]
            assert getattr(want, verb).times(STEPS) == (found.logical, found.sent, found.sent_and_received), verb
        assert want.share.sent
    relayed = sum(moved["relay"].sent for _, moved in told)
    assert relayed == sum(states.recipe_traffic(cut, place, r, recipe, replicas=2).relay.sent for r in range(4)) * STEPS


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(86)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", selection.STAGES[1:])
def test_a_plan_of_a_job_is_the_simulated_rank_it_shows(stage, way):
    """64 ranks in 8 replicas: the rank that holds most of all, its bytes, and what it shares in a step."""
    plan = zeroshard.plan(wide, Machine(ranks=64), stage=stage, comm=over(way, 8), layout=Layout(bucket_mib=0.003))
    (found,) = plan.stages
    comm, layout = over(way, 8), Layout(bucket_mib=0.003)
    runs = [simulate(wide, ranks=64, rank=r, stage=stage, comm=comm, layout=layout) for r in (found.rank, 0, 29, 63)]
    totals = [sum(n for state, n in run.ledger.held.items() if state in found.states) for run in runs]
    assert found.total == totals[0] == max(totals)
    shared = runs[0].ledger.traffic["share"]
    assert found.traffic.share.times(STEPS) == (shared.logical, shared.sent, shared.sent_and_received)
    relay = runs[0].ledger.traffic["relay"]
    assert found.traffic.relay.logical * STEPS == relay.logical
    third = "16/N" if way == "hosts" else "4*8/N + 12/N"
    assert found.formula == {1: "8 + 8/N", 2: "4 + 12/N", 3: third}[stage]


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_shown_holds_most_of_all_replicas(way):
    cut, recipe = partition(specs(), LAYOUT, 3), recipes.PRESETS["zeroshard"]
    for stage in STAGES:
        place = placements(stage, **WAYS[way])
        held = [sum(states.of_recipe(cut, place, r, recipe, replicas=4).states().values()) for r in range(12)]
        fullest = states.fullest_rank(states.owned(cut), place, recipe, states.updated(cut, 4))
        assert held[fullest] == max(held) > min(held)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_closed_form_of_all_replicas_is_the_layout_where_sizes_divide(stage, way):
    cut = partition([Spec("w", (96 * 64,), "bfloat16", 2, 0, True)], Layout(units=(), align=1), 8)
    place = placements(stage, **WAYS[way])
    for rank in range(32):
        held = states.of_recipe(cut, place, rank, PAPER, replicas=4).states(padding_row=True)
        assert held == closed.at_rest(96 * 64, 8, place, PAPER, 4)
        moved = states.recipe_traffic(cut, place, rank, PAPER, replicas=4)
        assert moved.total == traffic.per_step(96 * 64, 32, place, PAPER, replicas=4).total


def test_a_number_of_parameters_over_all_replicas():
    """Padding and all on every rank, and the largest model that fits is the largest."""
    place = placements(3, spread=True)
    found = zeroshard.plan(
        Model(1001, preset="paper"), Machine(ranks=12, gpu_mem="1KB"), comm=Comm(replicas=3, optimizer="all"), stage=3
    ).stages[0]
    assert found.total == 2 * 251 + (2 + 12) * 84  # ceil(1001/4) of parameters; of the others a third of that, up
    assert closed.total(found.largest, 4, place, PAPER, 3) <= 1000 < closed.total(found.largest + 1, 4, place, PAPER, 3)


@pytest.mark.parametrize(
    ("over", "backwards", "between"),
    [
        ("team", 1, Fraction(7, 8)),
        ("team", 4, Fraction(7, 2)),
        ("all", 1, Fraction(91, 128)),
        ("all", 4, Fraction(301, 128)),
        ("hosts", 1, Fraction(119, 128)),
        ("hosts", 4, Fraction(497, 128)),
    ],
)
def test_the_slow_link_of_an_optimizer_over_all(over, backwards, between):
    """Bytes per parameter between hosts of 8 at 64 ranks: 0.875, 3.5, 0.71 and 2.35, as in docs/hosts.md."""
    comm = Comm(hosts=8) if over == "hosts" else Comm(replicas=8, optimizer=over)
    model, machine = Model(64 * 10**6, preset="zeroshard"), Machine(ranks=64, gpus_per_node=8)
    plan = zeroshard.plan(model, machine, stage=3, comm=comm, step=Step(accumulate=backwards))
    (found,) = plan.stages
    assert found.links.between == found.slow_link.sent == between * 64 * 10**6
    assert plan.replicas.optimizer == Fraction(12, 8 if over == "team" else 64)
    assert found.formula == {"team": "16*8/N", "all": "2*8/N + 16/N", "hosts": "16/N"}[over]
    assert ("share" in found.traffic.json()) == (over != "team")


def test_a_node_of_several_replicas_shares_over_its_cards():
    """A ring over 8 replicas, 4 of which are in a node: two cross. Averages of parts go to four of them."""
    settings = {"params": 64 * 10**6, "preset": "paper", "ranks": 64, "stage": 1, "gpus_per_node": 32}
    team, spread = (
        plan_of(**settings, comm=Comm(replicas=8, optimizer=over)).stages[0].links for over in ("team", "all")
    )  # fmt: skip
    shard = 2 * 10**6 * 8  # bytes, of parameters and of gradients
    around, ring, parts = shard * 7 // 8, shard * 7 // 8 // 7, shard // 8 // 8
    assert spread.between - team.between == around // 4 + 4 * parts - ring
    assert spread.inside - team.inside == around + 3 * parts - 6 * ring


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stage": 0}, "whole optimizer state at stage 0"),
        ({"offload": zeroshard.Offload(parameters="shared")}, "one owner on it for each element"),
    ],
)
def test_what_cannot_be_planned_over_all_is_refused(settings, said):
    with pytest.raises(UserError, match=said):
        plan_of(**{"params": 1000, "ranks": 4, "comm": Comm(replicas=2, optimizer="all")} | settings)


def test_no_tensor_is_cut_between_replicas(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"w": [8, 8]}))
    with pytest.raises(UserError, match="no tensor is to be cut"):
        zeroshard.plan(path, Machine(ranks=4), comm=Comm(replicas=2, optimizer="all"), layout=Layout(bounds="tensor"))


def test_stage_0_is_left_out_and_one_replica_is_all_ranks():
    two, one, team = (
        zeroshard.plan(Model(1000, preset="paper"), Machine(ranks=4), comm=comm)
        for comm in (Comm(replicas=2, optimizer="all"), Comm(replicas=1, optimizer="all"), Comm(replicas=1))
    )
    assert [stage.stage for stage in two.stages] == [1, 2, 3]
    assert one == team == zeroshard.plan(Model(1000, preset="paper"), Machine(ranks=4), comm=Comm(hosts=1))
    assert [
        stage.stage
        for stage in zeroshard.plan(Model(1000, preset="paper"), Machine(ranks=4), comm=Comm(hosts=2)).stages
    ] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "way", [["--replicas", "2", "--optimizer-over", "all"], ["--hosts", "2"]], ids=["all", "hosts"]
)
def test_commands_name_it_alike(capsys, way):
    for command in (["plan", "--params", "1e6", "--stage", "3"], ["simulate", f"{__file__}:wide"]):
        with pytest.raises(SystemExit) as ended:
            app([*command, "--ranks", "4", *way, "--json"])
        assert ended.value.code == 0
        told = json.loads(capsys.readouterr().out)
        found = told["stages"][0] if command[0] == "plan" else told["simulated"][0]
        assert found["traffic"]["share"]["sent"] > 0


def test_a_check_refuses_stage_0_as_a_plan_does():
    command = ["plan", f"{__file__}:wide", "--check", "--stage", "0", "--ranks", "4", "--replicas", "2"]
    with pytest.raises(UserError, match="every rank holds the whole optimizer state at stage 0"):
        app([*command, "--optimizer-over", "all"])


@pytest.mark.parametrize(
    ("options", "got"),
    [
        (["--stage", "0"], "got: --stage 0, --optimizer-over all; instead: --stage 1, 2 or 3"),
        (["--bounds", "tensor"], "got: --optimizer-over all, --bounds tensor; instead: --optimizer-over team"),
    ],
    ids=["stage 0", "tensors"],
)
def test_a_command_says_it_in_its_own_options(options, got):
    command = ["plan", "--params", "1e6", "--ranks", "4", "--replicas", "2", "--optimizer-over", "all"]
    with pytest.raises(InputError) as refused:
        app([*command, *options])
    assert got in str(refused.value)
