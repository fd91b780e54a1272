"""Experts divided among ranks, planned: from shapes what the engine holds and moves, and models of published shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import ranks as rank_processes
import selection
import test_experts
import zeroshard
from flat import plan_of
from zeroshard import Comm, Layout, Machine, Precision
from zeroshard.errors import UserError
from zeroshard.layout.partition import partition
from zeroshard.layout.stage import STAGES, seat_on
from zeroshard.planner import recipes, shapes, states
from zeroshard.planner.simulate import simulate

JOB = f"{Path(__file__).parents[2] / 'examples' / 'job.py'}:job"
EXPERTS = Layout(along={"*.experts.*": "edp"})
NAMES = {"m": "exp_avg", "v": "exp_avg_sq"}


def listed(model):
    """{name: shape} of all experts, as a file has them that names each."""
    found = {}
    for name, p in model.named_parameters():
        if ".experts." in name:
            start, end = name.split(".experts.")
            found |= {f"{start}.experts.{at}.{end}": list(p.shape[1:]) for at in range(test_experts.EXPERTS)}
        else:
            found[name] = list(p.shape)
    return found


def held(stage):
    precision = Precision(param_dtype=torch.bfloat16)
    model, optimizer, zero = test_experts.sharded(4, 2, stage, precision=precision)
    test_experts.train(model, optimizer, zero, 2, backwards=1, dtype=torch.bfloat16)
    before = {verb: each.sent for verb, each in zero.ledger().traffic.items()}
    test_experts.train(model, optimizer, zero, 1, backwards=1, dtype=torch.bfloat16)
    test_experts.weights(model, zero) if stage != 3 else None  # waits for what the step has sent
    after = {verb: each.sent for verb, each in zero.ledger().traffic.items()}
    kept = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
    kept = {state: kept[state] for state in ("parameters", "gradients", "master", *NAMES.values()) if state in kept}
    return kept, after["reduce"] - before["reduce"], [(b.slots, b.bounds, b.axis) for b in zero.partition.buckets]


@pytest.mark.row(97)
@pytest.mark.parametrize("stage", selection.STAGES)
@pytest.mark.parametrize("how", ["stacked", "listed"])
def test_planned_from_shapes_is_what_each_rank_holds_and_sends(ranks, tmp_path, stage, how):
    """Buckets, bounds, bytes at rest and of reductions; experts as rows, or each by its number."""
    whole = test_experts.model_of(0, 1)
    shaped = listed(whole) if how == "listed" else {n: list(p.shape) for n, p in whole.named_parameters()}
    (tmp_path / "m.json").write_text(json.dumps(shaped))
    recipe = recipes.PRESETS["zeroshard"]
    specs = shapes.read(tmp_path / "m.json").specs(2, EXPERTS.along, 2)
    cut = partition(specs, EXPERTS, 4, 2)
    totals = []
    for rank, (kept, reduced, buckets) in enumerate(ranks.run(4, held, stage)):
        along = seat_on(rank, {"edp": 2, "ep": 2}, "edp")
        planned = states.of_recipe(cut, STAGES[stage], rank, recipe, along=along).states()
        assert {NAMES.get(state, state): planned[state] for state in planned if state != "step"} == kept
        assert [(b.slots, b.bounds, b.axis) for b in cut.buckets] == buckets
        traffic = states.recipe_traffic(cut, STAGES[stage], rank, recipe, along=along)
        assert traffic.reduce.sent == reduced
        totals.append(sum(planned.values()))
    plan = zeroshard.plan(tmp_path / "m.json", Machine(ranks=4, ep=2), stage=stage, layout=EXPERTS)
    assert plan.stages[0].total == max(totals)


def mixtral(layers=32, hidden=4096, inner=14336, experts=8, words=32000):
    found = {"model.embed_tokens.weight": [words, hidden]}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        found |= {f"{block}.self_attn.{n}_proj.weight": [hidden, hidden] for n in "qo"}
        found |= {f"{block}.self_attn.{n}_proj.weight": [hidden // 4, hidden] for n in "kv"}
        found[f"{block}.block_sparse_moe.gate.weight"] = [experts, hidden]
        for at in range(experts):
            expert = f"{block}.block_sparse_moe.experts.{at}"
            found |= {f"{expert}.w1.weight": [inner, hidden], f"{expert}.w3.weight": [inner, hidden]}
            found[f"{expert}.w2.weight"] = [hidden, inner]
        found |= {f"{block}.{n}_layernorm.weight": [hidden] for n in ("input", "post_attention")}
    return found | {"model.norm.weight": [hidden], "lm_head.weight": [words, hidden]}


def deepseek():
    """671 B as published: 61 layers, of which 58 have 256 experts and one that all tokens use."""
    hidden, found = 7168, {"model.embed_tokens.weight": [129280, 7168]}
    mlp = {"gate_proj": lambda inner: [inner, hidden], "up_proj": lambda inner: [inner, hidden],
           "down_proj": lambda inner: [hidden, inner]}  # fmt: skip
    for layer in range(61):
        block = f"model.layers.{layer}"
        attention = {"q_a_proj": [1536, hidden], "q_b_proj": [24576, 1536], "kv_a_proj_with_mqa": [576, hidden],
                     "kv_b_proj": [32768, 512], "o_proj": [hidden, 16384], "q_a_layernorm": [1536],
                     "kv_a_layernorm": [512]}  # fmt: skip
        found |= {f"{block}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        if layer < 3:
            found |= {f"{block}.mlp.{name}.weight": shape(18432) for name, shape in mlp.items()}
        else:
            found[f"{block}.mlp.gate.weight"] = [256, hidden]
            for at in [f"experts.{at}" for at in range(256)] + ["shared_experts"]:
                found |= {f"{block}.mlp.{at}.{name}.weight": shape(2048) for name, shape in mlp.items()}
        found |= {f"{block}.{n}_layernorm.weight": [hidden] for n in ("input", "post_attention")}
    return found | {"model.norm.weight": [hidden], "lm_head.weight": [129280, hidden]}


MODELS = {"mixtral": (mixtral, 46_702_792_704, 8), "deepseek": (deepseek, 671_026_404_352, 64)}


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_published_shapes_at_1024_ranks(tmp_path, name):
    """At rest an expert's states lie on as many ranks as any: 1/1,024. What a step moves of experts falls to 1/EP."""
    make, numel, ep = MODELS[name]
    shaped = make()
    assert sum(map(math.prod, shaped.values())) == numel
    (tmp_path / "m.json").write_text(json.dumps(shaped))
    asked = {"shapes": tmp_path / "m.json", "ranks": 1024, "stage": 3}
    (found,) = (divided := plan_of(**asked, layout=EXPERTS, ep=ep)).stages
    experts = sum(math.prod(shape) for each, shape in shaped.items() if ".experts." in each)
    assert any(
        f"experts: {experts:,} parameters in {ep} parts, each over {1024 // ep} ranks" in n for n in divided.notes
    )
    assert found.states["master"] == pytest.approx(4 * numel / 1024, rel=0.02)
    twice = 2 * 2  # bytes of a weight, once forward and once backward
    assert found.traffic.gather.logical == pytest.approx(twice * (numel - experts + experts / ep), rel=0.01)
    assert found.traffic.reduce.logical == pytest.approx(2 * (numel - experts + experts / ep), rel=0.01)


def test_what_cannot_be_planned_is_refused(tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(listed(test_experts.model_of(0, 1))))
    asked = {"shapes": tmp_path / "m.json", "ranks": 8}
    for settings, says in (
        ({"layout": EXPERTS}, "belong together"),
        ({"ep": 2}, "belong together"),
        ({"layout": EXPERTS, "ep": 3}, "must divide the ranks"),
        ({"layout": EXPERTS, "ep": 8}, "cannot be divided among so many ranks"),
        ({"layout": Layout(along={"*.expert.*": "edp"}), "ep": 2}, "matches no parameter"),
        ({"layout": Layout(along={"*.experts.*": "ep"}), "ep": 2}, "whose ranks have the same rows"),
        ({"layout": EXPERTS, "ep": 2, "comm": Comm(replicas=2)}, "replicas: not planned for experts"),
        ({"layout": EXPERTS, "ep": 2, "gpus_per_node": 2}, "gpus_per_node: not planned for experts"),
    ):
        with pytest.raises(UserError, match=says):
            plan_of(**asked, **settings)
    with pytest.raises(UserError, match="params: not planned for experts"):
        zeroshard.plan(7e9, Machine(ep=1), layout=Layout(along={"*": "edp"}))


@pytest.mark.full
def test_a_job_is_planned_as_it_is_simulated(capsys):
    plan = zeroshard.plan(test_experts.divided, Machine(ranks=64, ep=2), stage=3, layout=EXPERTS)
    run = simulate(test_experts.divided, ranks=64, rank=plan.stages[0].rank, layout=Layout(along=test_experts.ALONG),
                   mesh={"edp": 32, "ep": 2})  # fmt: skip
    assert plan.stages[0].total == sum(n for s, n in run.ledger.held.items() if s != "norms")


@pytest.mark.full
def test_the_commands_take_them(tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(listed(test_experts.model_of(0, 1))))
    both = ["--ranks", "8", "--stage", "3", "--experts", "*.experts.*", "--ep", "2"]
    done = rank_processes.command("plan", "--shapes", tmp_path / "m.json", *both, "--json")
    assert done.returncode == 0 and "in 2 parts, each over 4 ranks" in done.stdout, done.stderr
    both[-3] = "*.weight"  # of a job's model any part may be said to be one of several
    done = rank_processes.command("simulate", JOB, *both, "--json", timeout=120)
    assert done.returncode == 0, done.stderr
    done = rank_processes.command("simulate", JOB, *both[:-2], timeout=120)
    assert done.returncode == 2 and "belong together" in done.stderr
