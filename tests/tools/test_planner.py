"""The planner: exact bytes from three numbers or from shapes, the five texts' tables, files that lie, the command."""

import contextlib
import json
import math
import re
import struct
import subprocess
import sys
import tempfile
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from walkthroughs import texts
from walkthroughs.texts import arithmetic, tiny
from walkthroughs.transformer260 import TENSORS, TEXT, W_Q_GRADIENTS

import ranks
import zeroshard
from flat import plan_of
from zeroshard import Comm, Layout, Machine, Model, Offload, Step
from zeroshard.arithmetic import sums
from zeroshard.cli.config import InputError
from zeroshard.cli.plan import show_plan
from zeroshard.cli.screen import Amount
from zeroshard.engine.weights.unit import find_units
from zeroshard.errors import UserError, one_line
from zeroshard.explain import document
from zeroshard.layout.partition import Spec, partition
from zeroshard.layout.stage import STAGES
from zeroshard.planner import closed, predict_states, quantities, recipes, shapes, states, traffic, units
from zeroshard.planner.instants import ItemSizes, instants, item_sizes, peak

GB, GIB = 10**9, 2**30
PAPER = recipes.PRESETS["paper"]


def totals(numel, ranks, recipe="paper"):
    return [stage.total for stage in zeroshard.plan(Model(numel, preset=recipe), Machine(ranks=ranks)).stages]


# -------------------------------------------------------------------------------------------------------- closed form


@pytest.mark.parametrize(
    ("numel", "ranks", "wanted"),
    [
        ("260", 2, [4160, 2600, 2340, 2080]),
        ("7e9", 8, [112 * GB, 385 * GB // 10, 2625 * GB // 100, 14 * GB]),
        ("7.5e9", 64, [120 * GB, 31_406_250_000, 16_640_625_000, 1_875_000_000]),
    ],
)
def test_the_published_totals(numel, ranks, wanted):
    """To the byte, at all four stages."""
    assert totals(numel, ranks) == wanted


FORMULAS = {
    "paper": (16, ["16", "4 + 12/N", "2 + 14/N", "16/N"]),
    "zeroshard": (18, ["18", "6 + 12/N", "2 + 16/N", "16/N"]),
    "zeroshard-bf16-grads": (16, ["16", "4 + 12/N", "2 + 14/N", "14/N"]),
    "fp32": (16, ["16", "8 + 8/N", "4 + 12/N", "16/N"]),
    "deepspeed": (18, ["18", "6 + 12/N", "2 + 16/N", "18/N"]),
    "megatron-bf16": (18, ["18", "6 + 12/N", "2 + 16/N", "18/N"]),
    "megatron-fp16": (20, ["20", "4 + 16/N", "2 + 18/N", "20/N"]),
}


@pytest.mark.parametrize("preset", recipes.PRESETS)
def test_presets(preset):
    """Every preset by its total and its formula at every stage."""
    found = recipes.PRESETS[preset]
    assert (found.total, [found.formula(place) for place in STAGES.values()]) == FORMULAS[preset]


@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [
        ("adamw", 12), ("sgd", 4), ("sgd-momentum", 8), ("muon", 8), ("adam-8bit", 6 + Fraction(1, 32)),
        ("adamw-24bit-master", 3), ("pure-bf16", 4),
    ],
)  # fmt: skip
def test_optimizers(optimizer, kept):
    """Bytes per parameter of optimizer state, the master among them."""
    assert sum(recipes.recipe("paper", optimizer=optimizer).optimizer.values()) == kept
    assert "master" not in recipes.recipe("fp32", optimizer=optimizer).optimizer


def test_a_formula_of_ones_own():
    plan = zeroshard.plan(Model(1000, bytes="parameters=2,gradients=2,master=4,m=1,v=1,scales=1/32"), Machine(ranks=4))
    assert plan.recipe.total == 10 + Fraction(1, 32)
    assert dict(plan.stages[3].states) == {
        "parameters": 500, "gradients": 500, "master": 1000, "m": 250, "v": 250, "scales": 8,
    }  # fmt: skip


def test_padding_is_a_row_of_its_own():
    """4,251 parameters on 2 ranks: each reserves 2,126; the last holds 2,125 and one element of padding."""
    held = closed.at_rest(4251, 2, STAGES[3], PAPER)
    assert held == {"parameters": 4250, "gradients": 4250, "master": 8500, "m": 8500, "v": 8500, "padding": 16}
    assert closed.at_rest(4251, 3, STAGES[3], PAPER).get("padding") is None


@given(
    numel=st.integers(1, 10**13),
    ranks=st.integers(1, 5000),
    stage=st.sampled_from([0, 1, 2, 3]),
    preset=st.sampled_from(list(recipes.PRESETS)),
)
def test_every_byte_is_reserved_once(numel, ranks, stage, preset):
    """Over the ranks, a sharded state takes its bytes per parameter times the padded vector, and no rank another sum."""
    recipe, place = recipes.PRESETS[preset], STAGES[stage]
    reserved = math.ceil(numel / Fraction(ranks))
    want = sum(nbytes * (reserved if sharded else numel) for _, nbytes, sharded in recipe.states(place))
    assert closed.total(numel, ranks, place, recipe) == want
    assert 0 <= reserved * ranks - numel < ranks


@given(
    limit=st.integers(0, 10**14),
    ranks=st.one_of(st.integers(1, 300), st.integers(1 << 19, 1 << 24), st.just(1 << 60)),
    stage=st.sampled_from([0, 1, 2, 3]),
)
@example(limit=80 << 30, ranks=1 << 20, stage=3)
@example(limit=80 << 40, ranks=1 << 24, stage=3)
def test_the_largest_that_fits_is_the_largest(limit, ranks, stage):
    """Also where the answer is more than a double counts, which the page's own search may not pass."""
    recipe = recipes.recipe("paper", optimizer="adam-8bit")
    most = closed.largest(ranks, STAGES[stage], recipe, limit)
    assert closed.total(most, ranks, STAGES[stage], recipe) <= limit or most == 0
    assert closed.total(most + 1, ranks, STAGES[stage], recipe) > limit


# ------------------------------------------------------------------------------------------------------------ traffic


@pytest.mark.parametrize(
    ("accumulate", "no_sync", "passes"),
    [(1, False, [2, 2, 2, 3]), (4, False, [5, 5, 5, 12]), (4, True, [2, 2, 2, 9]), (1, True, [2, 2, 2, 3])],
)
def test_passes(accumulate, no_sync, passes):
    """A+1, or 2 under no_sync; 3A, or 2A+1."""
    plan = zeroshard.plan(
        Model(260, preset="paper"), Machine(ranks=2), step=Step(accumulate=accumulate, no_sync=no_sync)
    )
    assert [stage.traffic.passes for stage in plan.stages] == passes
    assert [stage.traffic.total for stage in plan.stages] == [(520 * n, 260 * n, 520 * n) for n in passes]


def test_what_travels_is_in_its_own_dtype():
    """bf16 gradients are sent as bf16 and added up in fp32: so after no_sync, and in stage 0's gather, they are fp32."""
    plain = zeroshard.plan(Model(1024, preset="zeroshard"), Machine(ranks=4)).stages
    assert [(s.traffic.reduce.logical, s.traffic.gather.logical) for s in plain] == [
        (2048, 4096), (2048, 2048), (2048, 2048), (2048, 4096),
    ]  # fmt: skip
    added = zeroshard.plan(Model(1024, preset="zeroshard"), Machine(ranks=4), step=Step(no_sync=True)).stages
    assert [s.traffic.reduce.logical for s in added] == [4096] * 4


def test_recomputation_is_counted_apart():
    """Four weights, layer 1 gathered once more: 10 gathered + 4 reduced elements, 3.5 times the parameters."""
    moved = traffic.per_step(4, 2, STAGES[3], PAPER, recompute=2)
    assert (moved.gather.logical, moved.recompute.logical, moved.reduce.logical) == (16, 4, 8)
    assert moved.total.logical == 3.5 * 4 * 2
    assert moved.total.sent == moved.total.logical // 2


@given(ranks=st.integers(1, 512), data=st.data())
def test_replicas_move_the_bytes_to_another_place(ranks, data):
    """The total is 2(N-1)/N P for every K; the optimizer's memory is 12K/N."""
    count = data.draw(st.sampled_from([k for k in range(1, ranks + 1) if ranks % k == 0]))
    found = traffic.replicas(1000, ranks, count, PAPER)
    assert found.total == Fraction(2 * (ranks - 1), ranks) * 1000
    assert found.optimizer == Fraction(12 * count, ranks)
    assert found.reduce_inside + found.reduce_between == 1000 * (
        1 - Fraction(count, ranks) + 2 * Fraction(count - 1, ranks)
    )


def test_the_slow_link_both_ways():
    found = zeroshard.plan(Model(8000, preset="paper"), Machine(ranks=8), comm=Comm(replicas=4)).replicas
    assert (found.reduce_between, found.gather_inside, found.optimizer) == (6000, 4000, 6)
    assert (found.saved_per_rank, found.saved_per_node) == (Fraction(4, 7), Fraction(1, 7))


@pytest.mark.parametrize(
    ("copies", "node", "sent", "with_one", "gloo"),
    [(4, None, 18e9, 19e9, 25e9), (4, 2, 18e9, 19e9, 25e9), (4, 4, 6e9, 11.5e9, 18.5e9), (4, 8, 0, 0, 0),
     (2, None, 6e9, 11.5e9, 18.5e9), (8, 2, 18e9, 19e9, 25e9), (1, 2, 19e9, 19e9, 25e9), (1, 8, 0, 0, 0)],
)  # fmt: skip
def test_one_answer_about_the_slow_link(copies, node, sent, with_one, gloo):
    """What one GPU sends between nodes, as the engine sends it, beside one replica: nothing saved where nothing changes.

    Sums are handed on in fp32 and averages come back in bf16: (K-1)/K * 6 bytes per element of the shard.
    """
    plan = zeroshard.plan(
        Model(8e9, preset="paper"), Machine(ranks=8, gpus_per_node=node), stage=1, comm=Comm(replicas=copies)
    )
    link = plan.stages[0].slow_link
    sent_gloo = {(4, 4): 10e9, (8, 2): 26e9, (1, 2): gloo}.get((copies, node), sent)  # averages go back in a tree
    assert link == (node or 8 // copies, sent, with_one, sent_gloo, gloo)
    assert link.saved_gloo == (1 - Fraction(int(sent_gloo), int(gloo)) if gloo else 0)
    assert link.saved == (1 - Fraction(int(sent), int(with_one)) if with_one else 0)
    assert plan.json()["stages"][0]["slow_link"]["saved"] == float(link.saved)
    if node:
        assert plan.stages[0].links.between == sent and plan.stages[0].links_gloo.between == sent_gloo


def test_one_replica_saves_nothing():
    """Whatever a link is assumed to be; without nodes there is no link between them to ask about."""
    plan = zeroshard.plan(Model(8e9, preset="paper"), Machine(ranks=8), stage=1, comm=Comm(replicas=1))
    assert (plan.replicas.saved_per_rank, plan.replicas.saved_per_node, plan.stages[0].slow_link) == (0, 0, None)
    assert not any(key.startswith("saved") for key in plan.json()["replicas"])


def test_replicas_are_an_option():
    shown = run("--params", "8B", "--preset", "paper", "--ranks", 8, "--stage", 1, "--replicas", 4).stdout
    assert re.search(r"1 +NCCL +18,000,000,000 +19,000,000,000 +5\.3 %", shown)


def test_replicas_change_what_is_reduced_gathered_and_on_each_link():
    """10^9 bf16 parameters on 8 ranks in nodes of 2: as many elements are sent in all, the running sums of them in fp32."""
    found = {}
    for copies in (1, 2, 4, 8):
        stage = zeroshard.plan(
            Model(1e9, preset="paper"), Machine(ranks=8, gpus_per_node=2), stage=1, comm=Comm(replicas=copies)
        ).stages[0]
        moved = stage.traffic
        found[copies] = (moved.reduce.sent, moved.gather.sent, moved.relay.sent, *stage.links)
        elements = traffic.replicas(10**9, 8, copies, PAPER)
        assert moved.reduce.sent == 2 * elements.reduce_inside
        assert (moved.gather.sent, moved.relay.sent) == (2 * elements.gather_inside, 3 * elements.reduce_between)
        assert moved.total.sent == sum(found[copies][:3])
    # K = 4: a replica is a node. The ring of its gather (1) and its exchange (1) stay inside, what is handed on does not.
    # K = 8: 3 of 7 hops leave a node.
    assert found == {
        1: (1.75e9, 1.75e9, 0, 2e9, 2.375e9), 2: (1.5e9, 1.5e9, 0.75e9, 2e9, 2.5e9),
        4: (1e9, 1e9, 2.25e9, 2e9, 2.25e9), 8: (0, 0, 5.25e9, 3e9, 2.25e9),
    }  # fmt: skip
    assert zeroshard.plan(
        Model(1e9, preset="paper"), Machine(ranks=8, gpus_per_node=8), stage=1, comm=Comm(replicas=4)
    ).stages[0].links == (
        4.25e9,
        0,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_hold_what_a_smaller_run_holds(stage):
    """A number and shapes alike, at every stage: N ranks in K replicas, and N/K ranks; at rest, gathered and reduced."""
    shapes = {"blocks.0.w": [300, 40], "blocks.0.b": [40], "blocks.1.w": [40, 300], "head": [17, 40]}
    small, more = {"ranks": 3, "stage": stage}, {"ranks": 12, "stage": stage, "comm": Comm(replicas=4)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shapes.json"
        path.write_text(json.dumps(shapes))
        for what in ({"params": 10**7 + 1, "units": 3}, {"shapes": path}):
            (one,), (four,) = (plan_of(**what, **ranks).stages for ranks in (small, more))
            assert four.states == one.states
            assert (four.traffic.gather, four.traffic.reduce) == (one.traffic.gather, one.traffic.reduce)
            assert four.rank == one.rank + 9
            assert four.formula == one.formula.replace("/N", "*4/N")
            assert 3 * four.snapshot <= one.snapshot < 6 * four.snapshot  # step counters, of who has the first element
            assert four.peak > one.peak  # by running sums


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GiB", 80 * GIB), ("80GB", 80 * GB), ("24576MiB", 24 * GIB), ("0.5 TB", 500 * GB), ("1KiB", 1024)],
)
def test_budgets(text, nbytes):
    assert quantities.budget(text) == nbytes


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("80", "80GiB, or 80GB"), ("80G", "80GiB, or 80GB"), ("80gb", "80GB, or 80GiB"), ("24576mib", "24576MiB, or 24576MB"),
     ("80 parsecs", "80GiB, or 80GB"), ("-80GiB", "80GiB"), ("", "80GiB"), ("0GiB", "80GiB"), ("inf", "80GiB")],
)  # fmt: skip
def test_a_budget_without_a_unit_is_refused(text, nearest):
    with pytest.raises(UserError, match=f"(?s)budget of memory.*{re.escape(nearest)}") as caught:
        quantities.budget(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["0", "0.0", "0B", "80", "0.5", "1048575", "1048576", "85899345920", "9" * 40, "0GiB", "80 parsecs", "-1"]
)
def test_what_a_refused_budget_suggests_is_none_refused(text):
    with pytest.raises(UserError) as caught:
        quantities.budget(text)
    suggested = re.search(r"instead: ([^,\n]+)(?:, or (\S+))?", str(caught.value))
    assert all(quantities.budget(one) > 0 for one in suggested.groups() if one)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("7G", "7B"), ("7BB", "7B"), ("seven", "7B"), ("-3", "7B"), ("2.5", "7B"), ("0B", "7B"), ("1.2345678901B", "7B"),
        ("nan", "7e9"), ("inf", "7e9"), ("1e999999999", "7e9"), ("1e999", "7e9"), ("1e24", "7e9"), ("", "7e9"),
    ],
)  # fmt: skip
def test_a_count_is_a_positive_whole_number(text, nearest):
    with pytest.raises(UserError, match=f"params: a positive whole number is wanted(.|\n)*{nearest}") as caught:
        zeroshard.plan(Model(text, preset="paper"))
    assert repr(text) in str(caught.value)
    with pytest.raises(UserError, match="tokens: a positive"):
        quantities.count(text, "tokens")


@pytest.mark.parametrize(
    ("text", "count"),
    [(7e9, 7 * GB), ("7e9", 7 * GB), ("7_000_000_000", 7 * GB), (260, 260), ("7B", 7 * GB), (" 7 b ", 7 * GB),
     ("1.34B", 1_340_000_000), ("350M", 350_000_000), ("0.5K", 500), ("2.5E3", 2500), ("1T", 1000 * GB)],
)  # fmt: skip
def test_counts(text, count):
    """As people write them; K, M, B and T are powers of a thousand."""
    assert quantities.count(text) == count == zeroshard.plan(Model(text, preset="paper")).parameters


@pytest.mark.row(58)
def test_what_fits_and_what_would():
    """7B on 8 ranks: 24 GiB hold stage 3 only; of stage 1 alone, stage 3 is the nearest change."""
    plan = zeroshard.plan(Model("7e9", preset="paper"), Machine(ranks=8, gpu_mem="24GiB"))
    assert [stage.fits for stage in plan.stages] == [False, False, False, True]
    assert [stage.largest for stage in plan.stages] == [1_610_612_736, 4_685_418_867, 6_871_947_672, 12_884_901_888]
    assert plan.fitting.best.way.stage == 3


# -------------------------------------------------------------------------------------------------------------- texts


def lines(letter):
    return {(table.title, line.what): line for table in texts.text(letter).tables for line in table.lines}


DIFFER = {
    "A": ["of which Adam stores", "GPU-0: W1", "GPU-0: sum of these rows", "GPU-1: W1", "GPU-1: sum of these rows", "sigma", "x1[0]", "Q[0]",
          "W_q after, row 0, bf16 copy on both GPUs", "W_q after, row 3, bf16 copy on both GPUs"],
    "B": ["router weights", *(f"K = {k}: reduction" for k in (2, 4, 8)), *(f"K = {k}: total" for k in (2, 4, 8)),
          "K = 2: total of its own formulas", "less: this engine, NCCL, a card per rank", "less: this engine, gloo, a card per rank",
          "less: rings alone, a card per rank", "less: rings alone, a card per node", "N = 3", "N = 8", "saved in the step",
          "saved at that peak"],
    "C": ["fp16 parameters after", "GPU 0, half updated", "GPU 1, half updated",
          *(f"fp32: {w} + 1e-8" for w in (0.25, 0.5, 1, -3, 2)), "all-gather, sent per rank"],
    "D": ["ZeRO-2, GPU-1: peak, tensor by tensor", "ZeRO-2, GPU-0: peak, module by module",
          "ZeRO-2, GPU-1: peak, module by module", "stage 2: gradients and their buffers at the peak",
          "stage 2: saved at the peak"],
    "E": ["stage 1: reduction", "stage 2: reduction"],
}  # fmt: skip


SLOW = "The slow link, N = 8, nodes of two, K = 4 beside K = 1"


@pytest.mark.parametrize("letter", DIFFER)
def test_the_texts(letter):
    """Every number of a text's tables is reproduced, but for these, and each of those has its correction."""
    found = texts.text(letter)
    assert [line.what for table in found.tables for line in table.lines if not line.agrees] == DIFFER[letter]
    assert found.corrections
    assert sum(line.says is not None for table in found.tables for line in table.lines) >= 7


@pytest.mark.parametrize(
    ("letter", "table", "line", "value"),
    [
        ("A", "Who owns what: elements", "GPU-0: W1", 50),
        ("A", "Who owns what: elements", "GPU-1: sum of these rows", 130),
        ("A", "The formula", "N = 64", Fraction(67, 16)),
        ("A", "7B parameters on 8 GPUs", "stage 1: saved", Fraction(65625, 1000)),
        ("B", "10 layers of width 4096 on 4 ranks", "parameters", 1_342_382_080),
        ("B", "10 layers of width 4096 on 4 ranks", "saved at rest", 50),
        ("B", "What explains its net saving of 42.7 %", "saved in the step", Fraction(300, 7)),
        ("B", "What explains its net saving of 42.7 %", "saved at that peak", Fraction(175, 4)),
        (
            "B",
            "What explains its net saving of 42.7 %",
            "saved at rest, baseline's gradients counted",
            Fraction(225, 4),
        ),
        (
            "B",
            SLOW,
            "less: this engine, NCCL, a card per rank",
            Fraction(100, 19),
        ),
        ("B", SLOW, "less: rings alone, a card per rank", Fraction(400, 7)),
        ("B", SLOW, "less: rings alone, a card per node", Fraction(100, 7)),
        ("B", "K replicas of the optimizer, N = 8, in P elements sent per rank", "K = 2: total of its own formulas", 2),
        ("B", "K replicas of the optimizer, N = 8, in P elements sent per rank", "K = 1: all-gather", Fraction(7, 8)),
        ("C", "One step of Adam", "fp16 parameters after", (2.099609375, -2.900390625, 1.099609375, 0.60009765625)),
        ("D", "Bytes in the first backward, reduced module by module as here", "stage 1: peak", 1820),
        ("D", "Bytes in the first backward, reduced module by module as here", "stage 2: peak", 2080),
        ("E", "10B parameters on 8 GPUs", "stage 2: total at rest", Fraction(75, 2)),
        ("B", "Padding", "padded for 4 ranks", 4252),
        ("C", "7.5B parameters on 64 GPUs, and bytes per parameter", "stage 3: total", Fraction(1875, 1000)),
        ("C", "Messages per step, in parameters", "stage 3: total, as the text gathers", Fraction(7, 2)),
        ("C", "Bytes in the first backward, reduced layer by layer as here", "stage 1: peak", 28),
        ("C", "Bytes in the first backward, reduced layer by layer as here", "stage 2: peak", 32),
        ("D", "260 parameters on 2 GPUs", "stage 3: total", 2080),
        ("D", "Gradient elements held in backward", "ZeRO-2, GPU-1: peak, tensor by tensor", 180),
        ("D", "Gradient elements held in backward", "ZeRO-2, GPU-1: peak, module by module", 194),
        ("D", "Messages per step", "ZeRO-2: total, logical", 1040),
        ("D", "7B parameters on 8 GPUs", "stage 2: total", Fraction(2625, 100)),
        ("E", "64 GPUs", "stage 2: reduction", Fraction(512, 71)),
        ("E", "64 GPUs", "stage 2: its limit", 8),
        ("E", "Messages per step", "stage 3, beside standard data parallelism", Fraction(3, 2)),
        ("E", "10B parameters on 8 GPUs", "stage 3: parameters", Fraction(5, 2)),
    ],
)
def test_recomputed_values(letter, table, line, value):
    assert lines(letter)[table, line].value == value


# Typed from the texts, number by number, tables and prose alike.
IN_THE_TEXT = {
    "A": """260 37.5 4 16 8 64 32 2 3 75 4160 112 148 130 1560 2600 520 1040 0.275 0.398 0.565 -1.445 1.319 -0.439 0.703 -0.319
        0.020 -0.018 0.038 -0.0105 -0.020 0.030 -0.0125 0.010 -0.021 0.0275 0.0125 -0.0165 0.0325 0.002 0.0000004 0.02 0.0004
        0.119 0.341 -0.211 0.051 -0.149 0.219 0.111 -0.081 0.299 -0.099 0.179 0.271 -0.049 0.139 -0.329 0.089
        14.0 28.0 112.0 3.5 38.5 65.6 5.5 4.2 73.8 12""",
    "B": "dense bf16 MoE fp32 4 4/N 12/N 0 12 1.5 2 1 ~1 ~2 2.50 5.00 17.50 1.25 8.75 15.00 3.75 1.34 50 75 42.7 62.5 0.75 0.5 1.25 1.75 2.75",
    "C": """120 31.4 16.6 1.9 2 12 -7.0 0 0.5 10.125 -4.5 1.0 1.5 15.125 -5.5 -11.0 -2.75 -5.0 -0.55 -0.275 -0.5 0.03025
        0.0075625 0.025 30.25 7.5625 25 2.1 -2.9 1.1 0.6 2.0 -3.0""",
    "D": """260 43.8 4 16 2 8 3 64 32 50 14 130 4160 2600 2340 520 0.020 -0.018 0.038 -0.011 -0.020 0.030 -0.013 0.010 -0.021 0.028
        0.013 -0.017 0.033 0.002 0.0000004 0.02 0.0004 0.119 0.1191 1040 14.0 28.0 112.0 3.5 38.5 1.75 26.25 65.6 76.6 12.25""",
    "E": "16 12 75 4.2 4 2.2 8 0.25 64 2 3 1.5 20 2.5",
}


@pytest.mark.parametrize("letter", IN_THE_TEXT)
def test_no_number_of_a_text_is_missing(letter):
    """Each has a line that says it beside what it is, or should be."""
    said = [line.says for line in lines(letter).values() if line.says is not None]
    told = {word.strip() for says in said for word in says.removeprefix("> ").split(",")}
    assert [number for number in IN_THE_TEXT[letter].split() if number not in told] == []


@pytest.mark.parametrize(
    ("letter", "named"),
    [
        ("A", ["0.41458", "[0.5427, -1.3870, 1.2663, -0.4221]", "[0.6742, -0.3063, 0.1007, 0.4420]", "0.119140625", "0.119117", "0.341796875", "-0.328125",
               "here stage 1 reduces during backward", "12 of the 16", "Only stage 3 cuts parameters",
               "Cited, not computed: ZeRO-1 is not DeepSpeed's default"]),
        ("B", ["main_grad.copy_", "grad is None", "in place", "loss / world_size", "At N = 3 and N = 8", "for 42 and 60 of",
               "zero_grad(set_to_none=True), not in optimizer.step()", "5.3 % over NCCL", "28.0 % over gloo", "52.0 % and 36.8 %", "57.1 %", "14.3 %", "2P exactly",
               "as text E's 2 Psi does", "fp8=True", "strategies is empty"]),
        ("C", ["GPU 0 receives the averages of w1 and w2", "2.099609375, -2.900390625, 1.099609375 and 0.60009765625", "only below 0.25", "3.5 Psi", "takes 3 Psi with it", "peaks at 32"]),
        ("D", ["2,080 bytes, is above stage 1's, 1,820", "180 for a moment", "(A+1) Psi", "11.79 GB", "the one in backward",
               "here stage 1 reduces during backward", "Standard all-reduce, after backward"]),
        ("E", ["37.5 GB per GPU at stage 2", "2.62 GB without activations", "reads 22.5 GB from its files and writes 20 GB", "Cited, not computed: a single DGX-2", "3.82x",
               "names Rabe, O."]),
    ],
)  # fmt: skip
def test_a_correction_names_what_is_wrong(letter, named):
    corrections = texts.text(letter).corrections
    assert [words for words in named if sum(words in correction for correction in corrections) != 1] == []


def test_elements_stay_and_bytes_grow_with_replicas():
    """What the slow link carries on the card that sends most, by both recipes, is what the corrections say of it."""
    found = lines("B")
    in_bytes = "The same in bytes, as this engine sends with bf16 weights"
    assert [found[in_bytes, f"K = {k}, sums back in bf16"].value for k in (1, 2, 4, 8)] == [3.5, 3.75, 4.25, 5.25]
    assert [found[in_bytes, f"K = {k}, sums in fp32"].value for k in (1, 2, 4, 8)] == [3.5, 4, 5, 7]
    most = "The slow link on the card that sends most; below zero it sends more"
    less = {what: line.value for (table, what), line in found.items() if table == most and what.startswith("less")}
    assert {what.removeprefix("less: "): f"{float(value):.1f}" for what, value in less.items()} == {
        "gloo, sums back in bf16": "7.7", "gloo, sums in fp32": "-23.1",
        "NCCL, sums back in bf16": "-26.3", "NCCL, sums in fp32": "-68.4",
    }  # fmt: skip
    corrections = " ".join(texts.text("B").corrections)
    assert (
        "it sends 7.7 % less; with the default, sums in fp32, 23.1 % more. Over NCCL it sends 26.3 % more, or 68.4 %"
        in corrections
    )
    assert (
        "3.5, 3.75, 4.25 and 5.25 bytes per parameter where averages come back in bf16, 3.5, 4, 5 and 7" in corrections
    )
    assert "nothing increases" not in corrections


def test_numbers_in_corrections_are_computed_ones():
    """Those that no line shows."""
    mu, sigma, x1, q = tiny.forward()
    squares = sum(float(x - mu) ** 2 for x in tiny.X[0])
    assert [f"{value:.5f}" for value in (sigma, (squares / 3) ** 0.5)] == ["0.41458", "0.47871"]
    assert [f"{value:.4f}" for value in (*x1, *q)] == [
        "0.5427", "-1.3870", "1.2663", "-0.4221", "0.6742", "-0.3063", "0.1007", "0.4420",
    ]  # fmt: skip
    theirs = (0.565, -1.445, 1.319, -0.439)
    assert f"{(0.1 - 0.275) / 0.398:.3f}" == "-0.440"
    assert f"{sum(x * float(w[0]) for x, w in zip(theirs, tiny.W_Q, strict=True)):.4f}" == "0.7022"
    assert 80 - lines("E")["10B parameters on 8 GPUs", "stage 1: total at rest"].value == 25


@given(value=st.floats(-65000, 65000, width=32, allow_subnormal=False))
def test_numbers_of_few_bits_are_torchs(value):
    for ours, dtype in (
        (arithmetic.bf16, torch.bfloat16),
        (arithmetic.fp16, torch.float16),
        (arithmetic.fp32, torch.float32),
    ):
        assert ours(value) == torch.tensor(value, dtype=torch.float32).to(dtype).item()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_parts_that_do_not_add_up_are_counted_as_by_torch(ranks):
    """Of 128 values of g in bf16, those that `ranks` gradients of a bf16 loss over `ranks` do not add up to."""
    g = (1 + torch.arange(128) / 128).bfloat16()
    weights = torch.zeros_like(g, requires_grad=True)
    ((weights * g).sum() / ranks).backward()
    total = torch.zeros_like(g)
    for _ in range(ranks):
        total += weights.grad
    assert arithmetic.spoiled(ranks) == int((total != g).sum())
    average = torch.zeros(128)
    sums.fold(average, [g] * ranks, start=None, over=ranks)  # as the engine adds and divides
    assert arithmetic.spoiled_here(ranks) == int((average != g).sum()) == 0


def test_the_texts_walks_are_those_that_are_explained():
    """The same weights, inputs and gradients as the engine trains with on the page."""
    assert [[[float(x) for x in row] for row in part] for part in tiny.GRADIENTS] == list(W_Q_GRADIENTS)
    for ours, name in ((tiny.W_Q, "W_q"), (tiny.X, "x")):
        assert [[float(x) for x in row] for row in ours] == TEXT[name]


def test_the_texts_model_is_the_one_that_is_explained():
    assert [(entry.symbol, entry.shape) for entry in TENSORS] == list(tiny.TENSORS_260)


# ------------------------------------------------------------------------------------------------------------- shapes

CONFIGS = {
    "Llama-2-7B": (6_738_415_616, {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False,
    }),
    "Llama-3-8B": (8_030_261_248, {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    "Mistral-7B-v0.1": (7_241_732_096, {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    "Qwen2-7B": (7_615_616_512, {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "architectures": ["Qwen2ForCausalLM"],
    }),
    "GPT-2": (124_439_808, {
        "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "n_inner": None,
    }),
}  # fmt: skip


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def safetensors(path, tensors, *, header=None, data=None):
    """A file by the format's own description: 8 bytes of length, JSON, tensors."""
    table, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * {**shapes.FLOATS, **shapes.OTHERS}[dtype] // 8
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(table).encode() if header is None else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end if data is None else data))
    return path


@pytest.mark.parametrize("model", CONFIGS)
def test_hugging_face_configs(tmp_path, model):
    """Parameter counts of published models, from config.json alone."""
    numel, config = CONFIGS[model]
    write(tmp_path / "config.json", config)
    found = shapes.read(tmp_path)
    assert found.numel == numel
    assert found.ties == ({"lm_head.weight": "transformer.wte.weight"} if model == "GPT-2" else {})
    blocks = config.get("num_hidden_layers", config.get("n_layer"))
    names = units.unit_names(found.parameters)
    assert len([name for name in names if re.search(r"\.\d+$", name)]) == blocks


def test_a_head_tied_or_not(tmp_path):
    for tied in (True, False):
        write(tmp_path / "config.json", {**CONFIGS["Llama-2-7B"][1], "tie_word_embeddings": tied})
        assert shapes.read(tmp_path).numel == CONFIGS["Llama-2-7B"][0] - tied * 32000 * 4096
    write(tmp_path / "config.json", {**CONFIGS["Llama-2-7B"][1], "attention_bias": True, "mlp_bias": True})
    assert shapes.read(tmp_path).numel == CONFIGS["Llama-2-7B"][0] + 32 * (4 * 4096 + 2 * 11008 + 4096)


def test_files_of_shapes(tmp_path):
    """Listed plainly, listed with dtypes, in one safetensors file, in two, and in two with an index: one model."""
    want = {"a.weight": (3, 5), "blocks.0.w": (7,), "blocks.1.w": (7,)}
    plain = write(tmp_path / "plain.json", {name: list(shape) for name, shape in want.items()})
    typed = write(tmp_path / "typed.json", {
        **{name: {"shape": shape, "dtype": "torch.bfloat16"} for name, shape in want.items()},
        "counter": {"shape": [], "dtype": "I64"},
    })  # fmt: skip
    one = safetensors(tmp_path / "one.safetensors", {name: ("BF16", shape) for name, shape in want.items()})
    folder = tmp_path / "folder"
    folder.mkdir()
    safetensors(folder / "x-1.safetensors", {"a.weight": ("F32", (3, 5)), "blocks.0.w": ("F32", (7,))})
    safetensors(folder / "x-2.safetensors", {"blocks.1.w": ("F32", (7,)), "h.0.attn.bias": ("F32", (1, 1, 4, 4))})
    for path in (plain, typed, one, folder):
        assert dict(shapes.read(path).parameters) == want
    assert shapes.read(typed).left_out == {"counter": "I64 is not a floating dtype"}
    assert shapes.read(folder).left_out == {"h.0.attn.bias": "a buffer"}
    index = {"weight_map": {"blocks.1.w": "x-2.safetensors", "a.weight": "x-1.safetensors"}}
    write(folder / "model.safetensors.index.json", index)
    assert list(shapes.read(folder).parameters) == ["blocks.1.w", "a.weight"]


def test_files_written_by_the_library(tmp_path):
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    want = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert dict(shapes.read(tmp_path).parameters) == want


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BAD_HEADERS = {
    "not JSON": b"{",
    "a list": b"[]",
    "not UTF-8": b'{"\xff": 1}',
    "deep": b"[" * 200_000,
    "twice": b'{"a": 1, "a": 2}',
    "no offsets": json.dumps({"a": {"dtype": "F32", "shape": [2]}}).encode(),
    "unknown dtype": json.dumps({"a": entry("F99")}).encode(),
    "dtype is a list": json.dumps({"a": entry(["F32"])}).encode(),
    "negative length": json.dumps({"a": entry(shape=(-2,))}).encode(),
    "yes as a length": json.dumps({"a": entry(shape=(True, 2))}).encode(),
    "shape is text": json.dumps({"a": {**entry(), "shape": "2"}}).encode(),
    "endless": json.dumps({"a": entry(shape=(2**40, 2**40))}).encode(),
    "wrong offsets": json.dumps({"a": entry(offsets=(0, 4))}).encode(),
    "a gap": json.dumps({"a": entry(offsets=(4, 12))}).encode(),
    "an overlap": json.dumps({"a": entry(), "b": entry(offsets=(4, 12))}).encode(),
    "cut off": json.dumps({"a": entry(shape=(4,), offsets=(0, 16))}).encode(),
    "an escape in a name": json.dumps({"a\x1b[31m": entry()}).encode(),
    "a long name": json.dumps({"a." * 5000: entry()}).encode(),
    "nothing in it": b"{}",
}


@pytest.mark.parametrize("damage", BAD_HEADERS)
def test_a_damaged_safetensors_file_is_one_error_that_names_it(tmp_path, damage):
    path = safetensors(
        tmp_path / "m.safetensors", {}, header=BAD_HEADERS[damage], data=0 if damage == "nothing in it" else 8
    )
    with pytest.raises(UserError, match="m.safetensors"):
        shapes.read(path)


@given(cut=st.integers(0, 200), flips=st.lists(st.tuples(st.integers(0, 199), st.integers(1, 255)), max_size=3))
@settings(max_examples=200, deadline=None)
def test_no_damage_raises_anything_else(tmp_path_factory, cut, flips):
    """Cut anywhere, any byte changed: shapes, or a `UserError`."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    safetensors(path, {"a.w": ("F32", (2, 3)), "b": ("BF16", (5,))})
    data = bytearray(path.read_bytes())
    for at, change in flips:
        data[at % len(data)] ^= change
    path.write_bytes(data[: len(data) - cut % len(data)])
    with contextlib.suppress(UserError):
        assert shapes.read(path).numel > 0


@pytest.mark.parametrize("length", [0, 1, 2**63, 10**9])
def test_a_header_longer_than_its_file_is_not_read(tmp_path, length):
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(UserError, match="header inside the file"):
        shapes.read(path)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    {
        "unknown": ("config.json", {"model_type": "bert"}, "model_type.*'bert'.*llama, mistral, qwen2, gpt2"),
        "near": ("config.json", {"model_type": "lama"}, "did you mean 'llama'"),
        "none": ("config.json", {}, "model_type"),
        "head": ("config.json", {**CONFIGS["GPT-2"][1], "architectures": ["GPT2ForTokenClassification"]}, "GPT2LMHeadModel"),
        "quantized": ("config.json", {**CONFIGS["Llama-2-7B"][1], "quantization_config": {"bits": 4}}, "quantization_config"),
        "missing": ("config.json", {"model_type": "llama", "vocab_size": 10}, "hidden_size: a positive whole number"),
        "text": ("config.json", {**CONFIGS["GPT-2"][1], "n_embd": "768"}, "n_embd: a positive whole number.*'768'"),
        "layers": ("config.json", {**CONFIGS["GPT-2"][1], "n_layer": 10**9}, "n_layer: at most"),
        "tied": ("config.json", {**CONFIGS["GPT-2"][1], "tie_word_embeddings": "no"}, "true or false"),
        "list": ("a.json", [1], "a JSON object"),
        "shape": ("a.json", {"w": 3}, "a list of whole numbers.*3 for 'w'"),
        "huge": ("a.json", {"w": [2**61]}, "at most"),
        "empty": ("a.json", {}, "no parameters in it"),
        "integers": ("a.json", {"w": {"shape": [3], "dtype": "torch.int64"}}, "no parameters in it"),
    }.values(),
)  # fmt: skip
def test_a_json_file_that_says_nothing_useful(tmp_path, name, value, says):
    path = write(tmp_path / name, value)
    with pytest.raises(UserError, match=f"(?s){says}") as caught:
        shapes.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {"a": "../m.safetensors"}}, "beside it"),
        ({"weight_map": {"a": "/etc/passwd"}}, "beside it"),
        ({"weight_map": {"a": 3}}, "weight_map"),
        ({}, "weight_map"),
        ({"weight_map": {"a": "none.safetensors"}}, "missing"),
        ({"weight_map": {"b": "m.safetensors"}}, "no such tensor"),
    ],
)
def test_an_index_that_lies(tmp_path, index, says):
    safetensors(tmp_path / "m.safetensors", {"a": ("F32", (2,))})
    write(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(UserError, match=says):
        shapes.read(tmp_path)


def test_what_is_not_there(tmp_path):
    write(tmp_path / "model.json", {"w": [3]})
    with pytest.raises(UserError, match=r"did you mean .*model\.json"):
        shapes.read(tmp_path / "modle.json")
    with pytest.raises(UserError, match="does not exist"):
        shapes.read(tmp_path / "none" / "model.json")
    with pytest.raises(UserError, match=r"no shapes(.|\n)*got: model\.json"):
        shapes.read(tmp_path)


class Blocks(nn.Module):
    """Lists inside lists, large and small leaves, a Sequential head."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(units.LARGE // width, width)
        self.small = nn.Linear(width, 3)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(
            nn.ModuleDict(
                {"experts": nn.ModuleList(nn.Linear(width, width) for _ in range(2)), "norm": nn.LayerNorm(width)}
            )
            for _ in range(3)
        )
        self.body.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


@pytest.mark.parametrize(
    "model", [Blocks(16), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), nn.Linear(3, 4), nn.Linear(300, 300)]
)
def test_units_are_those_the_engine_finds(model):
    """Read off the names alone."""
    names = units.unit_names({name: tuple(param.shape) for name, param in model.named_parameters()})
    assert ["" if name == "the root" else name for name in names] == [name for name, _ in find_units(model, Layout())]


# ------------------------------------------------------------------------------------------------- states of a layout


@st.composite
def cuts(draw, *, divides=False):
    ranks = draw(st.integers(1, 7))
    align = draw(st.sampled_from([1, 4, 128]))
    bounds = draw(st.sampled_from(["unit", "model", "tensor"] if not divides else ["unit", "model"]))
    numels = draw(st.lists(st.integers(0 if not divides else 1, 300), min_size=1, max_size=12))
    factor = align * ranks if divides else 1
    specs = [Spec(f"p{i}", (numel * factor,), "float16", 2, i // 3, True) for i, numel in enumerate(numels)]
    return partition(specs, Layout(bounds=bounds, align=align, bucket_mib=draw(st.sampled_from([0.0005, 24.0]))), ranks)


@given(cut=cuts(), stage=st.sampled_from([0, 1, 2, 3]), preset=st.sampled_from(["paper", "zeroshard", "fp32"]))
@settings(deadline=None)
def test_over_the_ranks_shards_are_the_model_and_named_padding(cut, stage, preset):
    """Sum over ranks of each state == parameters x bytes, and of all rows == buckets x bytes + optimizer's fragments."""
    recipe, place = recipes.PRESETS[preset], STAGES[stage]
    numel = sum(slot.numel for bucket in cut.buckets for slot in bucket.slots)
    padding = sum(bucket.padding for bucket in cut.buckets)
    held = [states.of_recipe(cut, place, rank, recipe).states(padding_row=True) for rank in range(cut.ranks)]
    lumped = [states.of_recipe(cut, place, rank, recipe).states() for rank in range(cut.ranks)]
    stored = Fraction(0)  # of padding, over all ranks
    for state, nbytes, sharded in recipe.states(place):
        copies = 1 if sharded else cut.ranks
        assert sum(rows.get(state, 0) for rows in held) == copies * numel * nbytes
        if state in ("parameters", "gradients", "master"):
            stored += copies * padding * nbytes
            assert sum(rows.get(state, 0) for rows in lumped) == copies * (numel + padding) * nbytes
    assert sum(rows.get("padding", 0) for rows in held) == stored
    assert [sum(rows.values()) for rows in held] == [sum(rows.values()) for rows in lumped]


@given(cut=cuts(divides=True), stage=st.sampled_from([0, 1, 2, 3]))
@settings(deadline=None)
def test_the_closed_form_is_the_layout_where_sizes_divide(cut, stage):
    """State by state, on every rank; so is the traffic."""
    numel = sum(bucket.numel for bucket in cut.buckets)
    even = all(bucket.shard_numel(0) * cut.ranks == bucket.numel for bucket in cut.buckets)
    for rank in range(cut.ranks):
        assert states.of_recipe(cut, STAGES[stage], rank, PAPER).states(padding_row=True) == closed.at_rest(
            numel, cut.ranks, STAGES[stage], PAPER
        )
        moved = states.recipe_traffic(cut, STAGES[stage], rank, PAPER)
        want = traffic.per_step(numel, cut.ranks, STAGES[stage], PAPER)
        assert (moved.total == want.total) if even else (moved.total.logical == want.total.logical)


TIERS = [
    {"optimizer": "cpu"},
    {"parameters": "cpu"},
    {"parameters": "cpu", "optimizer": "cpu"},
    {"parameters": "shared"},
    {"parameters": "shared", "optimizer": "cpu"},
]


@pytest.mark.parametrize("tiers", TIERS, ids=lambda each: ",".join(map("=".join, each.items())))
@pytest.mark.parametrize("preset", ["fp32", "zeroshard", "paper"])
def test_a_number_rests_where_shapes_do(tmp_path, preset, tiers):
    """Of parameters that a host has once the closed form counted an fp32 master on the device, and none in the host."""
    path = write(tmp_path / "m.json", {"a": [1024, 1024], "b": [1024, 1024]})
    asked = {"ranks": 4, "preset": preset, "offload": Offload(**tiers)}
    for of_number, of_shapes in zip(
        plan_of(params=2 << 20, **asked).stages,
        plan_of(shapes=path, **asked).stages,
        strict=True,
    ):
        for held in of_shapes.tiers.values():
            held.pop("step", None)  # a counter of each tensor
        assert of_number.tiers == of_shapes.tiers


def held_by_the_engine(stage, bounds):
    model = Blocks(16)
    optimizer = torch.optim.AdamW(model.parameters())
    precision = zeroshard.Precision(param_dtype=torch.bfloat16)
    zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision, layout=Layout(bounds=bounds))
    return predict_states(zero), [(bucket.unit, bucket.slots, bucket.bounds) for bucket in zero.partition.buckets]


@pytest.mark.row(58)
@pytest.mark.parametrize(("stage", "bounds"), [(0, "unit"), (1, "model"), (2, "tensor"), (3, "unit"), (3, "model")])
def test_planned_from_shapes_is_what_the_engine_holds(ranks, tmp_path, stage, bounds):
    """Names and shapes alone give its buckets, bounds and bytes, on each of three ranks."""
    path = write(tmp_path / "m.json", {name: list(param.shape) for name, param in Blocks(16).named_parameters()})
    cut = partition(shapes.read(path).specs(2), Layout(bounds=bounds), 3)
    names = {"m": "exp_avg", "v": "exp_avg_sq"}
    seen = ranks.run(3, held_by_the_engine, stage, bounds)
    for rank, (held, buckets) in enumerate(seen):
        planned = states.of_recipe(cut, STAGES[stage], rank, recipes.PRESETS["zeroshard"]).states()
        assert {names.get(state, state): nbytes for state, nbytes in planned.items()} == held
        assert [(bucket.unit, bucket.slots, bucket.bounds) for bucket in cut.buckets] == buckets
    plan = zeroshard.plan(path, Machine(ranks=3), stage=stage, layout=Layout(bounds=bounds))
    assert plan.stages[0].total == max(sum(held.values()) for held, _ in seen)


def moved_by_the_engine(stage, accumulate, no_sync):
    """Bytes of the second of two steps, and the layout they moved on."""
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    precision = zeroshard.Precision(param_dtype=torch.bfloat16)
    zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision)
    for _ in range(2):
        before = zero.ledger().traffic
        for backward in range(accumulate):
            local = no_sync and backward < accumulate - 1
            with zero.no_sync() if local else contextlib.nullcontext():
                # With a gradient of its own, or autograd would not need the first layer's weights in backward.
                x = torch.ones(2, 20, dtype=torch.bfloat16, requires_grad=True)
                model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        list(map(torch.Tensor.sum, model.parameters())) if stage != 3 else None  # wait for what the step sent
    after = zero.ledger().traffic
    columns = ("logical", "sent", "sent_and_received")
    moved = {
        verb: tuple(getattr(after[verb], c) - getattr(before[verb], c) for c in columns)
        for verb in ("reduce", "gather")
    }
    return moved, zero.partition


@pytest.mark.parametrize(("accumulate", "no_sync"), [(1, False), (3, False), (3, True)])
def test_planned_traffic_is_what_the_engine_moves(ranks, stage, accumulate, no_sync):
    """Logical, sent, sent + received, of reductions and of gathers, on both ranks."""
    for rank, (moved, cut) in enumerate(ranks.run(2, moved_by_the_engine, stage, accumulate, no_sync)):
        recipe = recipes.PRESETS["zeroshard"]
        want = states.recipe_traffic(cut, STAGES[stage], rank, recipe, accumulate=accumulate, no_sync=no_sync)
        assert moved == {"reduce": want.reduce, "gather": want.gather}


@given(cut=cuts(), stage=st.sampled_from([0, 1, 2, 3]))
@settings(deadline=None)
def test_the_rank_shown_holds_most(cut, stage):
    recipe, place = recipes.PRESETS["zeroshard"], STAGES[stage]
    held = [
        sum(states.of_recipe(cut, place, rank, recipe).states(padding_row=True).values()) for rank in range(cut.ranks)
    ]
    owned = states.owned(cut)
    assert held[states.fullest_rank(owned, place, recipe)] == max(held)
    for rank, mine in enumerate(owned):
        fragments = [bucket.fragment(slot, rank).numel for bucket in cut.buckets for slot in bucket.slots]
        shard = sum(bucket.shard_numel(rank) for bucket in cut.buckets)
        assert mine == (shard, sum(fragments), sum(numel > 0 for numel in fragments))


def test_a_large_model_on_many_ranks(tmp_path):
    """8B on 1,024 ranks: the layout's own padding, three parameters of which some ranks hold nothing."""
    write(tmp_path / "config.json", CONFIGS["Llama-3-8B"][1])
    plan = zeroshard.plan(tmp_path, Machine(ranks=1024, gpu_mem="80GiB"))
    last = plan.stages[3]
    assert plan.recipe.name == "zeroshard"
    # Cut at blocks of 128 elements in each of 227 buckets: at most so much more than an even share.
    assert 0 <= last.states["master"] - 4 * 8_030_261_248 / 1024 <= 227 * 128 * 4
    assert "parameters" not in last.states  # a gather casts the masters
    assert last.peak == last.total + max(instant.total for instant in last.instants)
    assert [stage.fits for stage in plan.stages] == [False, True, True, True]


# ----------------------------------------------------------------------------------------------------------- instants


def wide(layers=8, numel=1024, ranks=2):
    specs = [Spec(f"blocks.{i}.w", (numel,), "bfloat16", 2, i + 1, True) for i in range(layers)]
    return partition([Spec("norm", (128,), "bfloat16", 2, 0, True), *specs], Layout(), ranks)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathered_at_each_instant(prefetch):
    """Forward: root, unit and prefetched; backward also the one just left. Ends are shorter."""
    found = instants(wide(), STAGES[3], item_sizes(recipes.PRESETS["zeroshard"]), 0, prefetch=prefetch)
    gathered = {instant.name: instant.nbytes.get("gather") for instant in found}
    assert gathered["forward of unit 3"] == 2 * (256 + 1024 * (1 + prefetch))
    assert gathered["forward of unit 8"] == 2 * (256 + 1024)
    assert gathered["backward of unit 5"] == 2 * (256 + 1024 * (2 + prefetch))
    assert gathered["step"] is gathered["gather"] is None
    names = [instant.name for instant in found]
    assert names[0] == "init"
    assert names[9:13] == ["backward of unit 8", "reduce of bucket 8", "backward of unit 7", "reduce of bucket 7"]
    assert names[-3:] == ["reduce of bucket 0", "step", "gather"]


def test_reductions_under_way():
    """A contribution, and the other rank's to the own shard, for the bucket and two before it, as they are sent."""
    found = {i.name: i.nbytes for i in instants(wide(), STAGES[2], item_sizes(recipes.PRESETS["zeroshard"]), 0)}
    assert found["reduce of bucket 8"] == {"reduce": 2 * (1024 + 512)}
    assert found["reduce of bucket 4"] == {"reduce": 3 * 2 * (1024 + 512)}
    for rank in range(4):  # only the first and last leave their own contribution where it is; all have the same room
        among = instants(wide(ranks=4), STAGES[2], item_sizes(recipes.PRESETS["zeroshard"]), rank)
        assert {i.name: i.nbytes for i in among}["reduce of bucket 8"] == {"reduce": 2 * (1024 + 1024)}
    assert "upcast" not in found["step"]  # fp32 gradients meet fp32 masters
    thin = instants(wide(), STAGES[2], item_sizes(recipes.PRESETS["zeroshard-bf16-grads"]), 0)
    assert thin[-2].nbytes == {"upcast": 4 * 512}  # bucket by bucket


@pytest.mark.parametrize(("stage", "beside"), [(1, 0), (2, 1)])
def test_no_sync_adds_up_in_full_size_gradients_and_else_holds_them_all(stage, beside):
    cut = wide()
    found = instants(cut, STAGES[stage], item_sizes(recipes.PRESETS["zeroshard"]), 0, accumulate=2, no_sync=True)
    numel = sum(bucket.numel for bucket in cut.buckets)
    assert {i.name: i.nbytes for i in found}["reduce of bucket 8"] == {"reduce": 4 * (beside * numel + 512)}
    alone = instants(cut, STAGES[stage], item_sizes(recipes.PRESETS["zeroshard"]), 0, no_sync=True)
    assert alone == instants(
        cut, STAGES[stage], item_sizes(recipes.PRESETS["zeroshard"]), 0
    )  # one backward: nothing to add


def test_the_peak_is_the_worst_instant():
    cut = wide()
    rest = states.of_recipe(cut, STAGES[3], 0, recipes.PRESETS["zeroshard"]).states(padding_row=True)
    found = instants(cut, STAGES[3], item_sizes(recipes.PRESETS["zeroshard"]), 0)
    nbytes, name = peak(rest, found)
    assert nbytes == sum(rest.values()) + max(instant.total for instant in found)
    assert name.startswith("backward of unit")


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_of_the_engine_passes_as_much(stage, no_sync):
    """The ledger's own peaks of gathered weights and gradients under way."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96, bias=False), nn.Tanh()) for _ in range(6)))
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=stage, comm=Comm(prefetch=1))
    zero.record()
    for _ in range(3):
        with zero.no_sync() if no_sync else contextlib.nullcontext():
            model(torch.ones(2, 96, requires_grad=True)).sum().backward()
        model(torch.ones(2, 96, requires_grad=True)).sum().backward()
        model.zero_grad()
    found = instants(zero.partition, STAGES[stage], ItemSizes(4, 4, 4, 4), 0, accumulate=2, no_sync=no_sync)
    gathered, most = {}, 0
    for _, _, state, nbytes in zero._engine.ledger.record.held:
        gathered[state] = nbytes
        most = max(most, gathered.get("gather", 0) + gathered.get("prefetch", 0))
    assert most == max(instant.nbytes.get("gather", 0) for instant in found)
    assert zero.ledger().peak.get("reduce", 0) == max(instant.nbytes.get("reduce", 0) for instant in found)


# -------------------------------------------------------------------------------------------------------- the command


run = partial(ranks.command, "plan", "--full", COLUMNS="90", TERM="dumb")


def test_the_command():
    assert "recipe zeroshard: 2 parameters + 4 gradients" in run("--params", "7e9").stdout
    done = run("--params", "7e9", "--preset", "paper", "--ranks", 8, "--gpu-mem", "80GiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "paper: 2 parameters + 2 gradients + 4 master + 4 m + 4 v = 16 bytes per parameter" in done.stdout
    for cell in ("112.00  104.31", "38.50   35.86", "26.25   24.45", "14.00   13.04"):
        assert cell in done.stdout
    assert "Into 85.90 GB (80.00 GiB) per rank" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 90


def integers(value):
    """Every leaf of a table of bytes."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in integers(inner)]
    return [leaf for inner in value for leaf in integers(inner)] if isinstance(value, list) else [value]


def test_bytes_are_shown_to_the_last_digit_on_demand():
    """Also where the terminal is narrower than the table."""
    assert (
        f"{123456789012345678 * 16:,}"
        not in run("--params", "123456789012345678", "--preset", "paper", "--ranks", 7).stdout
    )
    done = run("--params", "123456789012345678", "--preset", "paper", "--ranks", 7, "--exact")
    assert f"{123456789012345678 * 16:,}" in done.stdout
    assert "\u2026" not in done.stdout


@pytest.mark.parametrize(
    ("largest", "nbytes", "shown"),
    [
        (112 * 10**9, 38_500_000_000, ("GB", "38.50", "35.86")),
        (112 * 10**9, 4, ("GB", "< 0.01", "0.00")),
        (5 * 10**6, 5_341_276, ("MB", "5.34", "5.09")),
        (4160, 4160, ("KB", "4.16", "4.06")),
        (999, 999, ("bytes", "999", "0.00")),
        (0, 38_500_000_000, ("bytes", "38,500,000,000", "35.86")),
    ],
)
def test_the_unit_is_that_of_the_largest(largest, nbytes, shown):
    amount = Amount(largest)
    assert (amount.unit, *amount.both(nbytes)) == shown


def test_json_has_whole_bytes(tmp_path):
    path = write(tmp_path / "m.json", {"layers.0.w": [77], "layers.1.w": [1000, 3], "head": [5]})
    done = run("--shapes", path, "--ranks", 3, "--gpu-mem", "1MiB", "--optimizer", "adam-8bit", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer == zeroshard.plan(Model(shapes=path, optimizer="adam-8bit"), Machine(ranks=3, gpu_mem="1MiB")).json()
    assert [stage["stage"] for stage in answer["stages"]] == [0, 1, 2, 3]
    for stage in answer["stages"]:
        assert sum(stage["states"].values()) == stage["total"]
        nbytes = [
            stage["states"],
            stage["total"],
            stage["peak"],
            stage["traffic"],
            [i["nbytes"] for i in stage["instants"]],
        ]
        assert all(type(number) is int for number in integers(nbytes))


def test_no_torch_in_it(tmp_path):
    """Neither the closed form nor shapes load torch or numpy; nor do the texts, which compute beside the engine."""
    path = write(tmp_path / "m.json", {"layers.0.w": [77]})
    for words in (["--params", "7e9"], ["--shapes", str(path)], None):
        code = (
            f"import sys; sys.argv = ['zeroshard', 'plan', *{words!r}]\n"
            "from zeroshard.cli.main import main\n"
            "try: main()\n"
            "except SystemExit as end: assert not end.code, end.code\n"
            if words
            else f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'web')!r})\n"
            "from walkthroughs.texts import text\n"
            "assert all(text(letter).json() for letter in 'ABCDE')\n"
        ) + ("assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, ranks.untimed(done.stderr)) == (0, "")


@pytest.mark.row(58, 64)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "one of --params, --shapes and MODULE:FUNCTION; got: none"),
        ({"params": 7, "shapes": "x"}, "got: --params and --shapes"),
        ({"job": "train:job"}, "cannot be imported; where: train"),
        ({"params": 7, "preset": "papr"}, "did you mean 'paper'?"),
        ({"params": 7, "preset": "paper", "bytes": "parameters=2,gradients=2"}, "one of the two"),
        ({"params": 7, "optimizer": "adamw8"}, "did you mean 'adamw'?"),
        ({"params": 7, "bytes": "parameters=2,gradients=2", "optimizer": "muon"}, "one of the two"),
        ({"params": 7, "bytes": "parameters=2,gradients=x"}, "got: 'gradients=x'; instead: parameters=2,gradients=2"),
        ({"params": 7, "bytes": "parameters=2"}, "instead: gradients=2,parameters=2"),
        ({"params": 7, "bytes": "parameters=0,gradients=2"}, "more than no bytes"),
        ({"params": 7, "bytes": "parameters=2,gradients=-2"}, "got: 'gradients=-2'"),
        ({"params": 7, "bytes": "parameters=2,gradients=2,m=1/0"}, "got: 'm=1/0'"),
        ({"params": 7, "ranks": 0}, "--ranks must be a whole number of at least 1; got: 0; instead: --ranks 1"),
        ({"params": 7, "ranks": -8}, "got: -8"),
        ({"params": 7, "ranks": 2.0}, "got: 2.0"),
        ({"params": 7, "ranks": 10**9}, "--ranks must be at most"),
        ({"params": 7, "stage": 4}, "expected: 0, 1, 2 or 3; got: 4"),
        ({"params": 7, "stage": True}, "got: True"),
        ({"params": 7, "accumulate": 0}, "--accumulate must be"),
        ({"params": 7, "gpu_mem": "80"}, "instead: 80GiB, or 80GB"),
        ({"params": 7, "ranks": 8, "replicas": 3}, "instead: one of 1, 2, 4, 8"),
        ({"params": 7, "align": 1}, "--align: a number of parameters has no layout"),
        ({"shapes": "/", "bounds": "modle"}, "did you mean 'model'?"),
        ({"shapes": "/", "bucket_mib": 0.0}, "--bucket-mib must be a positive number"),
        ({"shapes": "/", "align": 3}, "--align must be a power of two"),
        ({"shapes": "/", "matrices": "*.qkv"}, "--matrices takes PATTERN=NUMBER or PATTERN=first"),
        ({"shapes": "/", "matrices": "*.qkv=0"}, "instead: --matrices *.qkv.weight=3"),
        ({"shapes": "docs/shapes/gpt2", "matrices": "*.wte.weight=3"}, "parameter 'transformer.wte.weight', --matrices *.wte.weight=3"),
    ],
)  # fmt: skip
def test_what_is_refused(given, says):
    """One line, with what to write instead."""
    with pytest.raises(InputError) as caught:
        show_plan(as_json=False, **given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.row(58, 64)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "plan takes one of"),
        ("train:job", "No module named 'train'"),
        ("--params 7G", "--params: a positive whole number is wanted; got: '7G'; instead: 7B"),
        ("--params 7B --host-mem 80", "--host-mem: a budget of memory is a number and a unit"),
        ("--params -3", "got: '-3'"),
        ("--shapes none.json", "no such file or folder of shapes; where: none.json"),
        ("--params 7 --ranks many", "Invalid value for '--ranks'"),
        ("--parms 7", "No such option: --parms"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, says):
    done = run(*words.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr


@pytest.mark.parametrize("letter", DIFFER)
def test_the_page_has_a_text_beside_its_recomputation(letter):
    """To the last digit, and with what differs; test_page.py sees the page show it."""
    packed = document.built_in()["texts"][letter]
    assert packed == json.loads(json.dumps(texts.text(letter).json()))
    told = [line for table in packed["tables"] for line in table["lines"]]
    assert [line["what"] for line in told if not line["agrees"]] == DIFFER[letter]


@pytest.mark.full
def test_the_page_shows_what_the_commands_print():
    """docs/planning.md and its neighbours, block by block."""
    pages = (Path(__file__).parents[2] / "docs" / name for name in ("planning.md", "offload.md"))
    page = "".join(path.read_text() for path in pages)
    blocks = re.findall(r"^```console\n\$ zeroshard plan (.*)\n((?:.|\n)*?)^```$", page, re.MULTILINE)
    assert len(blocks) == 3
    for words, shown in blocks:
        done = ranks.command("plan", *words.split(), TERM="dumb", cwd=Path(__file__).parents[2] / "docs", COLUMNS="132")
        printed = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
        assert printed == shown.splitlines(), words


def test_peaks_of_equal_units():
    """7 B parameters in 32 blocks on 8 ranks: stage 3 adds two gathered blocks and the messages of three reductions."""
    assert zeroshard.plan(Model(7e9, preset="paper"), Machine(ranks=8)).stages[3].peak is None
    found = zeroshard.plan(Model(7e9, preset="zeroshard", units=32), Machine(ranks=8), stage=3).stages[0]
    block, message = 7_000_000_000 // 32 * 2, 24 * 2**20
    forward = next(i for i in found.instants if i.name == "forward of units.3")
    assert forward.nbytes["gather"] == 2 * block + 2 * (-block % 2048)
    assert found.peak_at.startswith(("backward of units.", "reduce of bucket"))
    passing = max(found.instants, key=lambda instant: instant.total).nbytes
    assert 3 * block <= passing["gather"] < 3 * block + 2**16
    assert 3 * 2 * message <= passing["reduce"] <= 6 * block
    assert found.peak == found.total + sum(passing.values())
    with pytest.raises(UserError, match="units stand for shapes"):
        zeroshard.plan(Model(shapes="x.json", units=3))


def test_replicas_cost_memory():
    """K copies: each is cut among N/K ranks, and that is what has to fit. More ranks are more in each."""
    for copies, totals in ((1, (112e9, 38.5e9, 26.25e9, 14e9)), (2, (112e9, 49e9, 38.5e9, 28e9)), (8, (112e9,) * 4)):
        for found, total in zip(
            zeroshard.plan(
                Model(7e9, preset="paper"), Machine(ranks=8, gpu_mem="40GB"), comm=Comm(replicas=copies)
            ).stages,
            totals,
            strict=True,
        ):
            assert found.total == total
            assert found.fits is (found.most <= 40e9)
    for what in ({"params": 7}, {"shapes": "x.json"}):
        with pytest.raises(UserError, match="replicas must divide the ranks"):
            plan_of(**what, ranks=8, comm=Comm(replicas=3))


def test_a_bare_number_of_bytes_is_answered_in_gib():
    with pytest.raises(UserError, match="instead: 80GiB"):
        zeroshard.plan(Model(7e9, preset="paper"), Machine(gpu_mem=str(80 * 2**30)))


@pytest.mark.parametrize("preset", ["zeroshard", "paper"])
def test_the_readme_quotes_both_ways_to_count(preset):
    """The README's rows of the 7 B model are what the closed form says, in GB and GiB."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    totals = [stage.total for stage in zeroshard.plan(Model(7e9, preset=preset), Machine(ranks=8)).stages]
    cells = [f"{total / 1e9:g} GB ({total / 2**30:.1f} GiB)" for total in totals]
    assert f" | {' | '.join(cells)} |" in readme


def test_errors_on_one_line():
    assert one_line(UserError("no", got="x", instead="y")) == "no; got: x; instead: y"


def test_a_notebook_shows_a_plan_as_a_table():
    html = zeroshard.plan(Model("7e9", preset="paper"), Machine(ranks=8, gpu_mem="80GiB"))._repr_html_()
    rows = [re.findall("<t[hd]>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", html)]
    assert rows[0][0] == "bytes per rank at rest"
    assert [row[-2:] for row in rows[1:]] == [
        ["112,000,000,000", "too much"], ["38,500,000,000", "fits"], ["26,250,000,000", "fits"], ["14,000,000,000", "fits"]
    ]  # fmt: skip
    assert [sum(int(cell.replace(",", "")) for cell in row[1:-2]) for row in rows[1:]] == [
        int(row[-2].replace(",", "")) for row in rows[1:]
    ]
