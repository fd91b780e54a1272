"""The page's document: every number in it is the run's, and whatever a run is called or holds, the page stays whole."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bench import golden
from torch import nn
from walkthroughs import build, four_weights, transformer260, walk_layers, walk_tiers
from walkthroughs.transformer260 import TENSORS

import zeroshard
from zeroshard import Comm, Precision
from zeroshard.cli import explain as explain_command
from zeroshard.cli.config import InputError
from zeroshard.errors import UserError
from zeroshard.explain import document, reading, recording, run, shape
from zeroshard.layout.stage import STAGES
from zeroshard.planner import predict_states

WEB = Path(__file__).parents[2] / "web"
DIGEST = r"\b[0-9a-f]{32}\b"
PLACEHOLDER = f"<!doctype html><title>t</title>{document.PLACE}<script>start()</script>"


@functools.cache
def captured(ranks) -> list:
    """What both ranks of the walkthroughs tell, run anew on this machine's kernels."""
    return ranks.run(2, build.capture)


@functools.cache
def rebuilt(ranks) -> dict:
    """The document, run anew."""
    return build.assemble(
        captured(ranks), ranks.run(build.PROFILED, build.profiled), ranks.run(build.WIDEST, build.widest)
    )


@functools.cache
def packaged() -> dict:
    return document.built_in()


@pytest.fixture
def walkthroughs(ranks):
    return rebuilt(ranks)["walkthroughs"]


@pytest.fixture
def transformer(walkthroughs):
    return walkthroughs["transformer"]


@pytest.fixture
def template(monkeypatch):
    """A page of two scripts: the document's and one more."""
    packed = document._packed
    monkeypatch.setattr(document, "_packed", lambda name: PLACEHOLDER if name == "page.html" else packed(name))


@pytest.fixture
def kernels():
    """The kernels that the walkthroughs ran on."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


# ------------------------------------------------------------------------------------------------ the walkthroughs


def test_the_walkthroughs_are_what_the_engine_does(ranks):
    """Run anew on two ranks, the packaged document comes out: byte by byte on the same torch and kind of processor."""
    again, stored = rebuilt(ranks), build.TARGET.read_text(encoding="utf-8")
    if again["walkthroughs"]["made"] == packaged()["made"]:
        assert build.written(again) == stored
    else:
        assert_close(again, json.loads(stored), "")


def assert_close(got, want, path: str) -> None:
    """The same but for what another processor's kernels round differently: bf16 keeps eight bits."""
    if isinstance(want, dict):
        assert list(got) == list(want), path
        for key in want:
            if (path, key) not in {(".walkthroughs", "made"), (".walkthroughs.overview", "equality")}:
                assert_close(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, list):
        assert len(got) == len(want), path
        for at, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_close(one, other, f"{path}[{at}]")
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=2**-7, abs=2**-12), path
    elif isinstance(want, str):  # a checkpoint's digests are of its last bits too
        assert re.sub(DIGEST, "", got) == re.sub(DIGEST, "", want), path
    else:
        assert got == want, path


def test_closeness_notices_what_matters():
    stored = json.loads(build.TARGET.read_text(encoding="utf-8"))
    assert_close(stored, json.loads(json.dumps(stored)), "")
    other = json.loads(json.dumps(stored))
    other["walkthroughs"]["transformer"]["stages"][2]["held"][1]["gradients"] += 1
    with pytest.raises(AssertionError):
        assert_close(stored, other, "")


@pytest.mark.slow
def test_the_builds_own_ranks_write_the_same(ranks, tmp_path, monkeypatch):
    """`python -m walkthroughs.build` starts its own ranks; what they capture is what these captured."""
    monkeypatch.setattr(build, "TARGET", tmp_path / "walkthroughs.json")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(WEB), os.environ.get("PYTHONPATH", "")]))
    assert build.main() == 0
    assert (tmp_path / "walkthroughs.json").read_text(encoding="utf-8") == build.written(rebuilt(ranks))


def test_what_the_build_writes_reads_back():
    value = {"a": [1, 2.5, None, "x"], "b": {"c": [[1, 2], [3] * 90], "d": "é" * 200}, "e": [], "f": {}}
    assert json.loads(build.written(value)) == value


def flat_parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def plain_gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    """Autograd's gradients of both micro-batches, flat, with the texts' tables in place of W_q's."""
    found = []
    for rank, batch in enumerate(transformer260.batches(dtype)):
        model = transformer260.Transformer260(dtype)
        transformer260.loss(model, batch).backward()
        model.attention.W_q.grad.copy_(torch.tensor(transformer260.W_Q_GRADIENTS[rank], dtype=torch.float64))
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return found


@pytest.mark.parametrize(
    ("name", "sent", "held"), [("bf16", torch.bfloat16, torch.float32), ("float64", torch.float64, torch.float64)]
)
def test_values_of_the_260_equal_plain_torch(transformer, kernels, name, sent, held):
    """Forward, gradients, sum, average, m, v, masters and copies: plain PyTorch in one process, bit by bit."""
    values = transformer["runs"][name]
    for rank, batch in enumerate(transformer260.batches(sent)):
        trace = transformer260.Transformer260(sent)(batch.x)
        for what, tensor in trace._asdict().items():
            assert values["forward"][rank][what] == document.matrix(tensor), what
        assert values["forward"][rank]["loss"] == nn.functional.cross_entropy(trace.logits, batch.targets).item()
    a, b = plain_gradients(sent)
    assert values["gradients"] == [document.numbers(a), document.numbers(b)]
    total = (a.float() + b.float()).to(sent) if sent is torch.bfloat16 else a + b
    average = total / 2
    assert values["sum"] == document.numbers(total)
    assert values["average"] == document.numbers(average)

    masters = nn.Parameter(flat_parameters(transformer260.Transformer260(held)))
    assert values["master"] == document.numbers(masters)
    assert values["parameters"] == document.numbers(masters.to(sent))
    optimizer = torch.optim.Adam([masters], lr=transformer["optimizer"]["lr"])
    masters.grad = average.to(held)
    optimizer.step()
    state = optimizer.state[masters]
    assert values["exp_avg"] == document.numbers(state["exp_avg"])
    assert values["exp_avg_sq"] == document.numbers(state["exp_avg_sq"])
    assert values["master_after"] == document.numbers(masters)
    assert values["parameters_after"] == document.numbers(masters.to(sent))
    changed = {
        at
        for at, (old, new) in enumerate(zip(values["parameters"], values["parameters_after"], strict=True))
        if old != new
    }
    if name == "bf16":
        assert set(transformer["unchanged"]) == set(range(260)) - changed


def test_the_numbers_that_the_texts_trace(transformer):
    """W_q[0,0] in decimals: 0.020, m 0.002, v 4e-7, 0.12 -> 0.119; its bf16 copy is 0.119140625."""
    exact, bf16 = transformer["runs"]["float64"], transformer["runs"]["bf16"]
    first = next(tensor["start"] for tensor in transformer["tensors"] if tensor["symbol"] == "W_q")
    assert round(exact["average"][first], 15) == 0.020
    assert round(exact["exp_avg"][first], 15) == 0.002
    assert round(exact["exp_avg_sq"][first], 18) == 4e-7
    assert f"{exact['master_after'][first]:.11f}" == "0.11900000050"
    assert (bf16["master"][first], f"{bf16['master_after'][first]:.6f}") == (0.12, "0.119000")
    assert bf16["parameters_after"][first] == 0.119140625
    settings = transformer["optimizer"]
    m_hat = exact["exp_avg"][first] / (1 - settings["beta1"])
    v_hat = exact["exp_avg_sq"][first] / (1 - settings["beta2"])
    step = settings["lr"] * m_hat / (math.sqrt(v_hat) + settings["eps"])
    assert exact["master"][first] - step == pytest.approx(exact["master_after"][first], abs=1e-17)  # one rounding


def test_who_owns_what_of_the_260(transformer):
    """13 tensors end to end, cut in the middle: 50 and 14 elements of W1."""
    ends = list(itertools.accumulate(math.prod(entry.shape) for entry in TENSORS))
    assert [tensor["start"] for tensor in transformer["tensors"]] == [0, *ends[:-1]]
    assert transformer["cuts"] == [0, 130, 260]
    for tensor in transformer["tensors"]:
        elements = range(tensor["start"], tensor["start"] + tensor["numel"])
        want = [
            [rank, mine[0] - tensor["start"], mine[-1] + 1 - tensor["start"]]
            for rank in (0, 1)
            if (mine := [element for element in elements if element // 130 == rank])
        ]
        assert tensor["owners"] == want
    assert next(t["owners"] for t in transformer["tensors"] if t["symbol"] == "W1") == [[0, 0, 50], [1, 50, 64]]


@pytest.mark.parametrize(
    ("flat", "symbol", "at", "rank"),
    [(8, "W_q", (0, 0), 0), (3, "gamma1", (3,), 0), (259, "W_vocab", (3, 7), 1), (129, "W1", (3, 1), 0),
     (130, "W1", (3, 2), 1)],
)  # fmt: skip
def test_where_an_element_is_in_the_flat_vector(flat, symbol, at, rank):
    """A tensor's start, and its rows one after the other; and who updates it."""
    tensor = next(each for each in packaged()["transformer"]["tensors"] if each["symbol"] == symbol)
    offset = at[0] if len(at) == 1 else at[0] * tensor["shape"][1] + at[1]
    assert tensor["start"] + offset == flat
    assert [owner for owner, start, stop in tensor["owners"] if start <= offset < stop] == [rank]


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_and_messages_of_the_260(transformer, stage):
    """At rest, moment by moment and in the messages: counted here from 260 elements and the table of stages."""
    found, place = transformer["stages"][stage], STAGES[stage]
    share = {state: 130 if cut else 260 for state, cut in place._asdict().items()}
    tensors = [9, 5] if place.optimizer else [13, 13]
    for rank in (0, 1):
        want = {"parameters": 2 * share["parameters"], "gradients": 2 * share["gradients"]}
        want |= dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), 4 * share["optimizer"]) | {"step": 4 * tensors[rank]}
        assert found["held"][rank] == found["predicted"][rank] == want
        assert sum(want.values()) - want["step"] == found["nbytes"]
        before = {state: want[state] for state in ("parameters", "gradients", "master")}
        for moment in found["moments"]:
            updated = moment["key"] in ("stepped", "gathered parameters", "rest")
            assert moment["ranks"][rank]["held"] == (want if updated else before), moment["key"]
            peak = moment["ranks"][rank]["peak"]
            assert peak["total"] == sum(peak["held"].values()) >= sum(moment["ranks"][rank]["held"].values())
        moved = {row["verb"]: row for row in found["traffic"][rank]}
        # Stage 3 gathers for forward and for backward; backward does not need the first layer norm's eight again.
        gathered = 520 + 504 if place.parameters else 520
        assert (moved["reduce"]["logical"], moved["gather"]["logical"]) == (520, gathered)
        assert moved["reduce"]["sent"] == 260
        # Rank 0 owns all of what is not gathered again, so it sends that much less.
        assert moved["gather"]["sent"] == (260 + 260 - 16 * (rank == 0) if place.parameters else 260)
        again = recording.traffic_of(_named(found["recording"], rank), 0)
        assert again == found["traffic"][rank]
    assert found["nbytes"] == [4160, 2600, 2340, 2080][stage]
    assert found["saved"] == 1 - found["nbytes"] / 4160
    timing = [row for row in transformer["timing"] if row["stage"] == stage]
    for verb in ("gather", "reduce"):
        rows = [row for row in timing if row["verb"] == verb]
        want = next(row for row in found["traffic"][0] if row["verb"] == verb)
        for column in ("calls", "logical", "sent"):
            assert sum(row[column] for row in rows) == want[column]
    # What the corrections of texts A and D say of stages 0 and 1: nothing waits for the end of backward.
    assert {row["phase"] for row in timing if row["verb"] == "reduce"} == {"backward"}


PLAYED = [("layers", 2, 2), ("layers", 2, 1), ("model", 2, 2)]
PLAYED += [(cut, ranks, 2) for ranks in (4, 8) for cut in ("layers", "model")]


@pytest.mark.parametrize("stage", STAGES)
def test_the_steps_that_play_beside_the_texts_own(transformer, stage):
    """Bytes at rest and messages by counting elements: each module's part rounded up, or 260 cut into such parts."""
    modules, place = [8, 64, 8, 148, 32], STAGES[stage]
    assert [(each["cut"], each["ranks"], each["step"]) for each in transformer["played"]] == PLAYED
    for each, (cut, ranks, step) in zip(transformer["played"], PLAYED, strict=True):
        found, padded = each["stages"][stage], sum(-(-numel // ranks) * ranks for numel in modules)
        for rank in range(ranks):
            own, whole = padded // ranks, padded
            real = sum(min(part := -(-numel // ranks), max(numel - rank * part, 0)) for numel in modules)
            if cut == "model":
                part = -(-260 // ranks)
                own, whole = min(part, 260 - rank * part), 260
                real = own
            share = {state: own if sharded else whole for state, sharded in place._asdict().items()}
            want = {"parameters": 2 * share["parameters"], "gradients": 2 * share["gradients"]}
            want["master"] = 4 * share["optimizer"]
            # Adam never sees the padding.
            want |= dict.fromkeys(("exp_avg", "exp_avg_sq"), 4 * (real if place.optimizer else 260))
            held = found["held"][rank]
            assert held == found["predicted"][rank] == want | {"step": held["step"]}, (cut, ranks)
            begins = {found["recording"]["states"][of]: n for at, _, of, n in _held_first(found, rank) if n}
            assert {state: begins.get(state, 0) for state in ("exp_avg", "exp_avg_sq")} == {
                state: want[state] if step == 2 else 0 for state in ("exp_avg", "exp_avg_sq")
            }
            reduced = next(row for row in found["traffic"][rank] if row["verb"] == "reduce")
            assert (reduced["logical"], reduced["sent"]) == (2 * whole, 2 * (whole - own))


def _held_first(found: dict, rank: int) -> list:
    recorded = found["recording"]["ranks"][rank]
    return [change for change in recorded["held"] if change[0] <= recorded["span"][0]]


@pytest.mark.parametrize("stage", STAGES)
def test_what_the_steps_after_the_first_hold(transformer, stage):
    """In backward m, v and step counters come on top; stage 3 gathers ahead, too. Adam gets fp32 gradients."""
    found = transformer["stages"][stage]
    backward = next(moment for moment in found["moments"] if moment["key"] == "backward")
    for rank, later in enumerate(found["later"]):
        rest = found["held"][rank]
        first, made = backward["ranks"][rank]["peak"], sum(rest[state] for state in ("exp_avg", "exp_avg_sq", "step"))
        assert later["backward"]["total"] == sum(later["backward"]["held"].values())
        if stage < 3:
            assert later["backward"]["total"] == first["total"] + made
        else:
            assert later["backward"]["total"] > first["total"] + made
            assert later["backward"]["held"]["prefetch"] and "prefetch" not in first["held"]
        assert later["step"]["total"] == sum(rest.values()) + later["step"]["held"].get("upcast", 0)
    peaks = [
        next(moment for moment in transformer["stages"][of]["moments"] if moment["key"] == "backward") for of in (1, 2)
    ]
    for rank in (0, 1):
        one, two = (moment["ranks"][rank]["peak"]["total"] for moment in peaks)
        assert one < two and "In this tiny model stage 2 holds more" in peaks[1]["says"]


def _named(found: dict, rank: int) -> list:
    """A rank's moves with the names of verbs and states."""
    moves = found["ranks"][rank]["moves"]
    return [[found["verbs"][move[0]], found["states"][move[1]], *move[2:]] for move in moves]


@pytest.mark.parametrize("stage", [1, 2])
def test_the_moment_between_adam_and_the_gather(transformer, stage):
    """Each rank has new parameters in its own half and old ones in the other, until they are gathered."""
    moments = {moment["key"]: moment for moment in transformer["stages"][stage]["moments"]}
    order = ["start", "forward", "backward", "stepped", "gathered parameters", "rest"]
    assert list(moments) == order
    sides = [side["parameters"] for side in moments["stepped"]["ranks"]]
    assert sides == [[[0, 130, "new"], [130, 260, "old"]], [[0, 130, "old"], [130, 260, "new"]]]
    for key in order:
        if key != "stepped":
            version = "new" if key in ("gathered parameters", "rest") else "old"
            assert [side["parameters"] for side in moments[key]["ranks"]] == [[[0, 260, version]]] * 2


def test_a_document_that_lies_is_refused(transformer):
    """The intervals of a moment are compared with the tensors that were there."""
    from walkthroughs import walk260

    values = transformer["runs"]["bf16"]
    seen = {"parameters": list(values["parameters"]), "gradients": []}
    moment = {"parameters": [[0, 260, "old"]], "gradients": []}
    walk260._check(moment, seen, [(0, 130)], values, 0, 1)
    seen["parameters"][200] += 1
    with pytest.raises(AssertionError, match=r"stage 1, rank 0: parameters \[0, 260\) are not 'old'"):
        walk260._check(moment, seen, [(0, 130)], values, 0, 1)


def test_gradients_frame_by_frame(transformer):
    """Held, transient and kept elements on both ranks, counted here one element at a time."""
    groups = {
        "tensor": [[tensor["symbol"]] for tensor in transformer["tensors"]],
        "module": [[t["symbol"] for t in run] for _, run in itertools.groupby(transformer["tensors"], key=_module)],
    }
    spans = {t["symbol"]: range(t["start"], t["start"] + t["numel"]) for t in transformer["tensors"]}
    for how, found in transformer["backward"].items():
        assert [frame["symbols"] for frame in found["frames"]] == groups[how][::-1]
        for rank in (0, 1):
            whole, kept = set(), set()
            for frame in found["frames"]:
                own = {element for symbol in frame["symbols"] for element in spans[symbol]}
                whole |= own
                transient = len(kept | own)
                kept |= {element for element in own if element // 130 == rank}
                got = frame["ranks"][rank]
                assert (got["whole"], got["transient"], got["kept"]) == (len(whole), transient, len(kept))
                assert got["engine"]["gradients"] == 260  # bytes: the shard's accumulator, reserved all the time
                assert got["engine"]["reduce"] >= 2 * len(own)  # and at least what is on its way
    assert transformer["backward"]["tensor"]["peak"]["transient"] == [130, 180]
    assert transformer["backward"]["module"]["peak"]["transient"] == [148, 194]


def _module(tensor: dict) -> str:
    return tensor["name"].split(".")[0]


def test_the_stages_equal_plain_torch(walkthroughs, transformer):
    equality = walkthroughs["overview"]["equality"]
    assert [stage["weights"] for stage in equality["stages"]] == [equality["plain"]] * 4
    assert all(stage["equal"] for stage in equality["stages"])
    assert transformer["plain"] == {"steps": 2, "equal": True, "max_difference": 0.0}


def test_the_four_weights(walkthroughs):
    """Text C's numbers, and the fp16 values that are really there."""
    found = walkthroughs["four"]
    values = found["values"]
    assert values["gradients"] == [[0.0, 0.0, 0.0, -4.5], [-11.0, -5.5, -5.5, -5.5]]
    average = [(a + b) / 2 for a, b in zip(*values["gradients"], strict=True)]
    assert values["average"] == average == [-5.5, -2.75, -2.75, -5.0]
    masters = [nn.Parameter(torch.tensor(weight)) for weight in four_weights.WEIGHTS.values()]
    optimizer = torch.optim.Adam(masters, lr=four_weights.LEARNING_RATE)
    for master, gradient in zip(masters, average, strict=True):
        master.grad = torch.tensor(gradient)
    optimizer.step()
    states = [optimizer.state[master] for master in masters]
    assert values["master_after"] == document.numbers(torch.stack(masters)) == [2.1, -2.9, 1.1, 0.6]
    assert values["exp_avg"] == document.numbers(torch.stack([state["exp_avg"] for state in states]))
    assert values["exp_avg_sq"] == document.numbers(torch.stack([state["exp_avg_sq"] for state in states]))
    copies = torch.stack(masters).detach()
    assert values["parameters_after"] == document.numbers(copies.half())
    assert values["parameters_after"] == [2.099609375, -2.900390625, 1.099609375, 0.60009765625]
    assert values["bf16_after"] == document.numbers(copies.bfloat16()) == [2.09375, -2.90625, 1.1015625, 0.6015625]
    assert values["loss"] == [10.125, 15.125]
    for rank, (sample, loss) in enumerate(
        zip(four_weights.SAMPLES, (9.671875, 12.3671875), strict=True)
    ):  # in fp16 all along
        w1, w2, w3, w4 = copies.half()
        x1, x2 = torch.tensor(sample.x).half()
        y = w3 * torch.relu(w1 * x1 + w2 * x2) + w4
        assert values["loss_after"][rank] == (0.5 * (y - sample.t) ** 2).item() == loss
    assert values["forward"] == [[["h", -7.0], ["a", 0.0], ["y", 0.5]], [["h", 1.0], ["a", 1.0], ["y", 1.5]]]
    assert [stage["nbytes"] for stage in found["stages"]] == [64, 40, 36, 32]
    assert [(way["gathered_elements"], way["reduced_elements"]) for way in found["checkpointing"]] == [
        (6, 4), (8, 4), (8, 4)
    ]  # fmt: skip
    assert found["decimals"]["loss_after"] == pytest.approx([9.68, 12.35045], rel=1e-6)  # epsilon against 2.75 or more
    ways = {way["how"]: (way["gathered"], way["elements"], way["passes"]) for way in found["checkpointing"]}
    assert ways == {
        "none": (["layer1", "layer2", "layer2"], 10, 2.5),
        "layers": (["layer1", "layer2", "layer2", "layer1"], 12, 3.0),
        "whole": (["layer1", "layer2", "layer1", "layer2"], 12, 3.0),
    }
    assert [one["fp32_changes"] for one in found["tiny"]["weights"]] == [
        abs(one["weight"]) < 0.25 for one in found["tiny"]["weights"]
    ]
    for step in found["memory"]:  # forgotten: every step is Adam's first, lr against the gradient's sign
        for gradient, update in zip(step["gradient"], step["forgotten"], strict=True):
            assert update == pytest.approx(-0.1 * math.copysign(1, gradient), rel=1e-8)  # epsilon against 2.6 or more
    assert found["memory"][0]["kept"] == found["memory"][0]["forgotten"]
    assert found["memory"][1]["kept"] != found["memory"][1]["forgotten"]


def test_the_four_weights_say_what_their_collectives_are(walkthroughs):
    story = walkthroughs["four"]["stages"][3]["story"]
    for rank, lines in enumerate(story):
        assert {line["truth"] for line in lines if line["verb"] == "gather"} == {
            "broadcast by rank 0", "broadcast by rank 1"
        }  # fmt: skip
        assert [line["truth"] for line in lines if line["verb"] == "reduce"] == [
            "reduction to rank 1", "reduction to rank 0"
        ]  # fmt: skip
        sent = [line["sent"] for line in lines if line["verb"] == "reduce"]
        assert sent == [[4, 0], [0, 4]][rank]


@pytest.mark.parametrize("stage", STAGES)
def test_the_four_weights_in_the_order_of_their_arithmetic(walkthroughs, stage):
    """dL/dw3 = -4.5 a: no gradient of layer2 before a is there again, none of layer1 before its weights; then Adam."""
    for rank, lines in enumerate(walkthroughs["four"]["stages"][stage]["story"]):
        told = [(line["verb"], line["unit"]) for line in lines if line["verb"] not in ("gather", "reduce", "release")]
        assert told[:3] == [("forward", ""), ("forward", "layer1"), ("forward", "layer2")]
        assert told[3:8] == [
            ("reach", "layer2"), ("recompute", "layer1"), ("recompute", "layer2"), ("backward", "layer2"),
            ("backward", "layer1"),
        ]  # fmt: skip
        assert told[8:] == [("step", unit) for unit in ("layer1", "layer2") if not stage or unit == f"layer{rank + 1}"]
        order = [(line["verb"], line["state"]) for line in lines if line["phase"] == "step"]
        adam = [at for at, (verb, _) in enumerate(order) if verb == "step"]
        assert all(at < min(adam) for at, what in enumerate(order) if what == ("gather", "gradients"))
        assert all(at > max(adam) for at, what in enumerate(order) if what == ("gather", "parameters"))


def test_the_flat_buffer(kernels, walkthroughs):
    """What stands around the cut, step by step, equals plain PyTorch on both micro-batches."""
    found = walkthroughs["layers"]
    first, last = found["window"]
    flats = []
    for rank in (0, 1):
        model = walk_layers.model().bfloat16()
        model(walk_layers.batch(0, rank)).sum().backward()
        flats.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    masters = nn.Parameter(flat_parameters(walk_layers.model()))
    before = masters.detach().clone()
    average = (flats[0].float() + flats[1].float()) / 2
    optimizer = torch.optim.Adam([masters], lr=1e-3)
    masters.grad = average.clone()
    optimizer.step()
    after = masters.detach()
    mixed = [torch.cat([after[:2126], before[2126:]]), torch.cat([before[:2126], after[2126:]])]
    want = {
        "parameters": [before.bfloat16()] * 2, "master": [before] * 2, "gradients": flats,
        "sum": [flats[0].float() + flats[1].float()] * 2, "average": [average] * 2, "new master": [after] * 2,
        "written back": [both.bfloat16() for both in mixed], "gathered": [after.bfloat16()] * 2,
    }  # fmt: skip
    assert list(dict.fromkeys(step["step"] for step in found["path"])) == list(want)
    for step in found["path"]:
        tensor = want[step["step"]][step["rank"] or 0]
        stop = step["start"] + len(step["values"])
        assert first <= step["start"] < stop <= last
        assert step["values"] == document.numbers(tensor[step["start"] : stop]), step["step"]
    for rank in found["overlap"]["recording"]["ranks"]:  # of a step that Adam has m and v in
        assert rank["peak"]["where"].startswith("in backward") and "exp_avg" in rank["peak"]["rests"]
    assert found["cut"] == {"name": "layers.1.fc1.bias", "element": 33, "fragments": [[0, 0, 33], [1, 33, 52]]}
    assert (found["numel"], found["padded"]) == (4251, {"2": 4252, "3": 4251, "4": 4252})


def test_the_profile_is_held_as_planned(walkthroughs):
    """10 layers of 4,096 on four ranks: 8.75 GiB and counters, where the text's tables have 8.75; an eighth of it held."""
    profile = walkthroughs["layers"]["profile"]
    whole, scaled = profile["whole"], profile["scaled"]
    assert whole["parameters"] == 1_342_382_080
    rest = whole["predicted"][0]["rest"]
    assert sum(rest.values()) == 7 * 1_342_382_080 + 4 * 40  # 2 + 2 + 12/4 bytes each, and Adam's counters
    assert {state: f"{nbytes / 2**30:.2f}" for state, nbytes in rest.items()} == {
        "parameters": "2.50", "gradients": "2.50", "master": "1.25", "exp_avg": "1.25", "exp_avg_sq": "1.25",
        "step": "0.00",
    }  # fmt: skip
    assert {key: f"{nbytes / 2**30:.2f}" for key, nbytes in whole["baseline"].items()} == {
        "rest": "17.50", "peak": "20.00"
    }  # fmt: skip
    assert whole["saved"]["rest"] == scaled["saved"]["rest"] == 0.5
    assert whole["saved"]["peak"] == pytest.approx(0.55, abs=5e-5)
    assert scaled["held"] == scaled["predicted"] and len(scaled["held"]) == 4
    assert set(scaled["held"][0]["peaks"]) == {"forward", "backward", "step"}


def test_the_closed_forms(walkthroughs):
    """K replicas, bytes per parameter and tiers, by the formulas themselves."""
    rows = walkthroughs["layers"]["replicas"]["rows"]
    for row in rows:
        k = row["replicas"]
        assert row["optimizer"] == 12 * k / 8
        assert row["reduce_inside"] == row["gather_inside"] == 1 - k / 8
        assert row["reduce_between"] == 2 * (k - 1) / 8
        assert row["total"] == 1.75
        assert row["bytes"] == 3.5 + (k - 1) * 0.25 and row["bytes_fp32"] == 3.5 + (k - 1) * 0.5
        # A card's part of a ring over all, and of an exchange with the ranks of other nodes; with K groups, running sums
        # in fp32 one way and 16-bit averages back: one and a half times what a ring in 16 bits has.
        node = 8 // k
        alone = 7 / 8 / node + (8 - node) / 8
        assert row["saved_nccl"] == pytest.approx(1 - 1.5 * row["reduce_between"] / alone if k > 1 else 0)
        trees = {2: 4 / 8 + 5.25 / 8, 4: 6 / 8 + 6.5 / 8, 8: 7 / 8 + 7 / 8}.get(k)  # gathers, of which each tree has 7
        assert row["saved_gloo"] == pytest.approx(1 - 1.5 * row["reduce_between"] / trees if k > 1 else 0)
    formulas = [lambda n: 16, lambda n: 4 + 12 / n, lambda n: 2 + 14 / n, lambda n: 16 / n]
    for stage, formula in zip(walkthroughs["overview"]["stages"], formulas, strict=True):
        for one in stage["at"]:
            assert one["bytes_per_parameter"] == formula(one["ranks"])
            assert one["times"] == pytest.approx(16 / formula(one["ranks"]), rel=1e-15)  # fractions there, floats here
        assert stage["passes"] == [2, 2, 2, 3][stage["stage"]]
        assert stage["counted"]["passes"] == [2, 2, 2, 1544 / 520][stage["stage"]]
    for tier in walkthroughs["overview"]["tiers"]:
        total = sum(sum(tier[place].values()) for place in ("device", "host", "nvme"))
        assert total == 10**10 * formulas[tier["stage"]](8)
    offload, infinity = (
        next(t for t in walkthroughs["overview"]["tiers"] if t["name"] == name)
        for name in ("ZeRO-Offload", "ZeRO-Infinity")
    )
    assert (list(offload["device"]), infinity["device"], list(infinity["nvme"])) == (
        ["parameters"],
        {},
        ["master", "m", "v"],
    )


@pytest.mark.full
def test_the_runs_of_four_ranks_have_two_replicas_and_experts_on_two(walkthroughs):
    """Teams, and bytes at rest as predicted; running sums pass between replicas alone."""
    replicas, experts = (each["run"] for each in walkthroughs["runs"][:2])
    assert [group["teams"] for group in replicas["groups"]] == [[[0, 1], [2, 3]]]
    assert [group["teams"] for group in experts["groups"]] == [[[0, 1, 2, 3]], [[0, 2], [1, 3]]]
    for page in (replicas, experts):
        assert shape._problem(page, shape.RUN, "run") is None
        assert page["recording"]["clock"] == "tick" and len(page["recording"]["ranks"]) == 4
        assert all(rank["held"] == rank["predicted"] for rank in page["summary"])
    assert {line["verb"] for line in replicas["traffic"]} - {line["verb"] for line in experts["traffic"]} == {"relay"}
    kinds = {(each["dtype"], each.get("parts", 1)) for each in experts["layout"]["buckets"]}
    assert kinds == {("bfloat16", 1), ("bfloat16", 2), ("float32", 1)}  # dense, experts, the router


def moved(told: dict, rank: int) -> dict:
    """{(verb, state): bytes that a rank moved in the step without a message}."""
    found: dict = {}
    for verb, state, _, _, logical, *_ in told["recording"]["ranks"][rank]["moves"]:
        named = told["recording"]["verbs"][verb], told["recording"]["states"][state]
        if named[0] in ("read", "write", "copy"):
            found[named] = found.get(named, 0) + logical
    return found


@pytest.mark.parametrize("name", ["offload", "infinity", "fp8"])
def test_what_moves_between_tiers_is_the_ledgers(ranks, walkthroughs, name):
    """Each state's moves are as many bytes as rest of it, tier by tier; those of files are what the ledger counted."""
    told = next(each["run"] for each in walkthroughs["runs"] if each["name"] == name)
    names, states = told["recording"]["tiers"], told["recording"]["states"]
    assert shape._problem(told, shape.RUN, "run") is None
    for rank, shown in enumerate(told["recording"]["ranks"]):
        rests, found = told["summary"][rank]["tiers"], moved(told, rank)
        counted = captured(ranks)[rank]["tiers"][name]["moved"]
        for verb in ("read", "write"):
            assert sum(nbytes for (each, _), nbytes in found.items() if each == verb) == counted[verb]
        for edge in shown["span"]:  # each tier's bytes as the record has them, before the step and after it
            held = {}
            for at, tier, state, nbytes in shown["held"]:
                if at <= edge:
                    held.setdefault(names[tier], {})[states[state]] = nbytes
            assert {tier: {s: n for s, n in of.items() if n} for tier, of in held.items() if any(of.values())} == rests
        if name == "offload":
            assert set(rests) == {"device", "host"} and set(rests["device"]) == {"parameters"}
            assert found == {
                ("copy", "gradients"): rests["host"]["gradients"],
                ("copy", "master"): rests["device"]["parameters"] // 2,
            }
        elif name == "infinity":
            assert set(rests) == {"host", "nvme"} and set(rests["host"]) == {"gradients", "staging", "step"}
            for state, nbytes in rests["nvme"].items():
                assert found["write", state] == nbytes
                assert state == "parameters" or found["read", state] == nbytes
            assert found["copy", "gradients"] == rests["host"]["gradients"]
            assert found["copy", "master"] == rests["nvme"]["parameters"] < found["read", "parameters"]
        else:
            matrices = [bucket for bucket in told["layout"]["buckets"] if "computes" in bucket]
            assert set(rests) == {"device"}
            assert rests["device"]["scales"] == sum(bucket["last"] - bucket["first"] for bucket in matrices) == 7
            assert rests["device"]["parameters"] == sum(b["share"] * b["itemsize"] for b in told["layout"]["buckets"])
            assert {bucket["itemsize"] for bucket in matrices} == {1}
    where = {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}
    tiers = {"offload": {**where, "optimizer": "host"}, "infinity": where, "fp8": {}}[name]
    tiers = {state: tier for state, tier in tiers.items() if (name, state) != ("offload", "parameters")}
    assert all(bucket.get("rests", {}) == tiers for bucket in told["layout"]["buckets"])


def test_a_record_that_differs_from_the_ledger_is_no_walkthrough(ranks):
    found = json.loads(json.dumps([rank["tiers"] for rank in captured(ranks)]))
    assert [each["name"] for each in walk_tiers.assemble(found)] == ["offload", "infinity", "fp8"]
    found[1]["infinity"]["moved"]["read"] += 1
    with pytest.raises(AssertionError, match="rank 1: files moved"):
        walk_tiers.assemble(found)


def test_an_error_in_a_transfer_is_not_lost():
    """What stands in for a file's threads keeps it for whoever waits."""
    assert walk_tiers.Here().submit(lambda: None).exception() is None
    with pytest.raises(ZeroDivisionError):
        walk_tiers.Here().submit(lambda: 1 // 0).result()


@pytest.mark.full
def test_corrections_are_the_runs_numbers(walkthroughs, transformer):
    """What a note calls right stands in the document; the text's own statement does not."""
    rights = {(note["text"], note["at"]): note["right"] for note in transformer["corrections"]}
    trace = transformer["runs"]["float64"]["forward"][0]
    notes = [note for note in transformer["corrections"] if note["at"] == "forward"]
    assert notes[0]["right"] == f"The population's deviation is {trace['sigma']['values'][0]:.5f}."
    assert [note["right"][9 - 1 * (note is notes[2]) :] for note in notes[1:]] == [
        ", ".join(f"{value:.4f}" for value in trace[what]["values"][:4]) + "]" for what in ("x1", "q")
    ]
    assert "50 elements (three rows and 2 of the fourth) are rank 0's, 14 are rank 1's" in rights["A", "ownership"]
    assert "add up to 112 and 148, not 130 and 130" in rights["A", "ownership"]
    stage3 = [note["right"] for note in walkthroughs["four"]["corrections"] if note["at"] == "stage 3"]
    assert "28 bytes at stage 1, 32 at stage 2" in stage3[1] and "36 against 40 bytes" in stage3[1]
    (cards,) = (note["right"] for note in walkthroughs["overview"]["corrections"] if note["at"] == "stages")
    assert "55 GB at stage 1 and 37.5 GB at stage 2" in cards
    for part in ("transformer", "four", "layers", "overview"):
        for note in walkthroughs[part]["corrections"]:
            assert note["text"] in "ABCDE"
            assert note["says"] and note["right"] != note["says"]


# ---------------------------------------------------------------------------------------------------- a run of yours


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def explained(bf16: bool) -> list[dict]:
    """At every stage: the document of a run on this rank, beside what the run itself says."""
    found = []
    for stage in STAGES:
        torch.manual_seed(0)
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        precision = Precision(param_dtype=torch.bfloat16, cast_inputs=True) if bf16 else Precision()
        zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision)
        metrics = []
        for step in range(4):
            if step == 2:
                zero.record()
            loss = model(torch.full((4, 24), 0.1 * (step + zero.rank))).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics.append({"step": step, "loss": loss.item()})
        events, held = zero.events(), list(zero._engine.ledger.record.held)
        page = zero.explain(metrics=metrics)
        ledger = zero.ledger()
        found.append(
            {
                "run": page.document["run"],
                "events": [[e.verb, e.state, e.bucket, e.unit, e.logical, e.sent, e.received, e.start, e.end, e.waited] for e in events],
                "changes": held,
                "held": {state: n for state, n in ledger.held.items() if n},
                "predicted": predict_states(zero),
                "phases": {phase: peak.total for phase, peak in ledger.phases.items()},
                "owners": {name: zero.owners(name) for name, _ in model.named_parameters()},
                "losses": [row["loss"] for row in metrics],
            }
        )  # fmt: skip
    return found


def exchanged(folder, transport):
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=3, comm=Comm(transport=transport))
    zero.record()
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.record_step(zero, folder)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "how"),
    [("shared", "gloo, data through shared memory"), ("gloo", "gloo")],
)
def test_what_was_exchanged_is_told_and_how(ranks, tmp_path, transport, how):
    """Through shared memory a run sends nothing, and yet its messages are there."""
    ranks.run(2, exchanged, tmp_path, transport)
    told = reading.read(tmp_path)
    rows = {row["verb"]: row for row in told["traffic"]}
    for verb in ("gather", "reduce"):
        row = rows[verb]
        assert row["calls"] > 0 and row["logical"] > 0
        assert bool(row["sent"]) == bool(row["sent_and_received"]) == (transport == "gloo")
    assert told["facts"]["backend"] == how


@pytest.mark.parametrize(("scaling", "part"), [("tensor", "tensor"), ("128x128", "tile of 128x128")])
def test_a_run_in_8_bits_says_so(scaling, part):
    """Weights rest and travel in a byte each, biases in two; both are computed with in bf16."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    precision = Precision(param_dtype=torch.bfloat16, fp8=True, scaling=scaling)
    zero = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=3, precision=precision)
    page = zero.explain().document["run"]
    buckets = page["layout"]["buckets"]
    kinds = [(each["dtype"], each["itemsize"], each.get("computes")) for each in buckets]
    assert kinds == [("float8_e4m3fn", 1, "bfloat16"), ("bfloat16", 2, None)] * 2
    weights, biases = (row["parameters"] for row in page["dtypes"])
    assert weights == f"float8_e4m3fn: a byte each, and one for the scale of each {part}; computes in bfloat16"
    assert biases == "bfloat16"
    held = page["summary"][0]["held"]
    assert (held["parameters"], held["scales"]) == (sum(b["numel"] for b in buckets if b["itemsize"] == 1), 2)


@functools.cache
def explain_runs(ranks, world: int) -> list:
    return ranks.run(world, explained, world == 2)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_equals_its_ledger_events_and_layout(ranks, world, stage):
    """On every rank: held, predicted, owners, messages, what was held over the step and its peak."""
    told = [rank[stage] for rank in explain_runs(ranks, world)]
    page = told[0]["run"]
    assert all(rank["run"]["summary"] == page["summary"] for rank in told)
    assert shape._problem(page, shape.RUN, "run") is None
    assert (page["stage"], page["ranks"], page["numel"]) == (stage, world, 3 * (24 * 24 + 24) + 24 * 5 + 5)
    assert page["curves"]["columns"] == ["step", "loss"]
    assert [row[1] for row in page["curves"]["rows"]] == told[0]["losses"]
    layout = page["layout"]
    for rank, mine in enumerate(told):
        summary, shown = page["summary"][rank], page["recording"]["ranks"][rank]
        assert summary["held"] == mine["held"]
        assert summary["tiers"] == {"device": mine["held"]}
        assert summary["predicted"] == mine["predicted"]
        assert {phase: most["total"] for phase, most in summary["phases"].items()} == mine["phases"]
        assert summary["numel"] == sum(stop - start for _, start, stop in _owned(layout, rank))
        for name, start, stop in _owned(layout, rank):
            if STAGES[stage].optimizer:
                assert (rank, start, stop) in {owner[:3] for owner in mine["owners"][name]}
        # The step that is shown: from the first forward after the last but one step to the end of the last.
        starts = [e[7] for e in mine["events"] if e[0] == "forward" and e[3] is None and e[4] == 0]
        ends = [e[8] for e in mine["events"] if e[0] == "step"]
        first, last = starts[-1], ends[-1]
        origin = shown["span"][0] - first
        assert shown["span"][1] - origin == last
        moved = [e for e in mine["events"] if (e[2] is not None or e[0] in ("control", "broadcast"))]
        moved = [e for e in moved if e[7] < last and (e[8] or last) > first]
        assert len(moved) == len(shown["moves"])
        for event, move in zip(moved, _named(page["recording"], rank), strict=True):
            unit = -1 if event[3] is None else layout["units"].index(event[3])
            bucket = -1 if event[2] is None else event[2]
            assert move[:7] == [event[0], event[1], bucket, unit, *event[4:7]]
            assert (move[7] - origin, move[8] - origin) == (event[7], event[8] or last)
            assert 0 <= move[9] <= move[8] - move[7]
        assert shown["waited"] == summary["waited"]
        own = [move for move in shown["moves"] if move[7] >= shown["span"][0]]
        for row in page["traffic"] if rank == 0 else ():
            ours = [move for move in own if page["recording"]["verbs"][move[0]] == row["verb"]]
            assert (row["calls"], row["logical"]) == (len(ours), sum(move[4] for move in ours))
            assert (row["sent"], row["sent_and_received"]) == (sum(m[5] for m in ours), sum(m[5] + m[6] for m in ours))
        _check_held(mine, shown, page["recording"], first, last, origin)


def _owned(layout: dict, rank: int) -> list:
    """(name, start, stop) of what the rank owns of each tensor, from the document's layout alone."""
    found = []
    for bucket in layout["buckets"]:
        bounds = bucket.get("bounds") or [bucket["share"] * r for r in range(layout["ranks"] + 1)]
        low, high = bounds[rank], bounds[rank + 1]
        for name, shape_, start in layout["slots"][bucket["first"] : bucket["last"]]:
            first, last = max(low, start), min(high, start + math.prod(shape_))
            if first < last:
                found.append((name, first - start, last - start))
    return found


def _check_held(mine: dict, shown: dict, page: dict, first: int, last: int, origin: int) -> None:
    now: dict = {}
    totals, before = [], {}
    for at, _, state, nbytes in mine["changes"]:
        now[state] = nbytes
        if at <= first:
            before = dict(now)
        elif at <= last:
            totals.append((at, sum(now.values())))
    got: dict = {}
    assert page["tiers"] == ["device"]
    for at, _, state, nbytes in shown["held"]:
        got[page["states"][state]] = nbytes
        if at == shown["span"][0]:
            assert before[page["states"][state]] == nbytes
        else:
            assert (at - origin, sum(got.values())) in totals
    most = max([sum(before.values()), *(total for _, total in totals)])
    assert shown["peak"]["total"] == sum(shown["peak"]["held"].values()) == most


def test_the_peak_is_explained(ranks):
    """At stage 3 on two ranks: in which phase, what rests, and why the rest is there."""
    page = explain_runs(ranks, 2)[0][3]["run"]
    for shown in page["recording"]["ranks"]:
        peak = shown["peak"]
        phases = [name for name, start, end in shown["phases"] if start <= peak["at"] < end]
        assert peak["where"].startswith(f"in {phases[-1]}")
        assert all(nbytes <= peak["held"][state] for state, nbytes in peak["rests"].items())
        passing = {state for state, nbytes in peak["held"].items() if nbytes > peak["rests"].get(state, 0)}
        assert set(peak["why"]) == passing <= {"gather", "prefetch", "reduce"}
        assert any(words.startswith(("full weights of ", "gradients ")) for words in peak["why"].values())


def step_of(held: list, moves: list = ()) -> dict:
    """The peak of a step from 0 to 30: forward 0 to 10, backward 12 to 20, step 24 to 30."""
    phases = [["forward", 0, 10], ["backward", 12, 20], ["step", 24, 30]]
    units = [["forward", "blocks.0", 2, 6], ["backward", "", 13, 15]]
    return recording.peak_of(held, (0, 30), phases, units, moves)


def test_the_peak_says_where_it_is():
    """By phase and unit; between phases by both of them."""
    rests = [0, "device", "parameters", 5]
    for at, words in {
        1: "in forward", 3: "in forward, at blocks.0", 11: "between forward and backward", 14: "in backward, at the root",
        22: "between backward and step", 30: "after step",
    }.items():  # fmt: skip
        peak = step_of([rests, [at, "device", "gather", 7]])
        assert (peak["where"], peak["total"], peak["rests"]) == (words, 12, {"parameters": 5})
    assert step_of([]) is None


def test_what_is_gathered_is_told_from_what_is_on_its_way():
    """A gather that has ended is here, one that has not is ahead of its use, one released is gone."""
    moves = [["gather", "parameters", bucket, f"blocks.{bucket}", 4, 2, 2, bucket, end, 0] for bucket, end in
             enumerate((1, 3, 9, 9))]  # fmt: skip
    moves.append(["release", "parameters", 0, "blocks.0", 0, 0, 0, 4, 4, 0])
    held = [
        [0, "device", "parameters", 5],
        [5, "device", "gather", 4],
        [5, "device", "prefetch", 8],
        [6, "device", "gather", 0],
    ]
    peak = step_of(held, moves)
    assert peak["why"] == {
        "gather": "full weights of blocks.1", "prefetch": "weights sent ahead of their use: blocks.2, blocks.3"
    }  # fmt: skip
    assert peak["flying"] == [2, 3]


def test_what_is_being_gathered_for_use_is_full_weights():
    """A gather that was not sent ahead is what its bytes are from their reservation on, before it has begun."""
    held = [[0, "device", "parameters", 5], [3, "device", "gather", 4], [8, "device", "gather", 0]]
    peak = step_of(held, [["gather", "parameters", 0, "blocks.0", 4, 2, 2, 4, 5, 0]])
    assert (peak["at"], peak["why"]) == (3, {"gather": "full weights of blocks.0"})


REDUCTIONS = [["reduce", "gradients", bucket, f"blocks.{bucket}", 8, 4, 4, start, end, 0]
              for bucket, start, end in ((2, 2, 5), (1, 4, 12), (0, 6, 14))]  # fmt: skip


@pytest.mark.parametrize(
    ("bytes_of_reduce", "moves", "says"),
    [
        # Three, each with its own contribution (8) and room for the other rank's (4): the first is done, and still there.
        ([12, 24, 36], 3, "gradients of blocks.1, blocks.0 on their way; buffers of blocks.2, kept for reuse"),
        ([12, 24], 2, "gradients of blocks.2, blocks.1 on their way"),
        ([12, 24, 30], 3, "gradients of blocks.1, blocks.0 on their way; other buffers, kept for reuse or being filled"),
        ([12, 20], 1, "gradients of blocks.2 on their way; the next being put together"),
        # Contributions that lie in the accumulator itself.
        ([4, 8, 12], 3, "gradients of blocks.1, blocks.0 on their way; buffers of blocks.2, kept for reuse"),
        ([12], 0, "gradients being put together"),
    ],
)  # fmt: skip
def test_a_reduction_that_is_done_keeps_its_buffers(bytes_of_reduce, moves, says):
    held = [[0, "device", "parameters", 5]]
    held += [[1 + 2 * at, "device", "reduce", nbytes] for at, nbytes in enumerate(bytes_of_reduce)]
    peak = step_of([*held, [15, "device", "reduce", 0]], REDUCTIONS[:moves])
    assert peak["why"] == {"reduce": says}


def test_the_bytes_of_a_peak_are_those_of_the_units_it_names(transformer):
    """In backward at stage 2 the five modules' 520 bytes and the other rank's 260; at stage 3 forward the widest."""
    stages = transformer["stages"]
    for stage in stages[:2]:  # whose contributions lie in the accumulator: the other rank's 260 alone
        peak = next(m for m in stage["moments"] if m["key"] == "backward")["ranks"][0]["peak"]
        assert peak["held"]["reduce"] == 260
        assert {unit for unit in MODULES_260 if unit in peak["why"]["reduce"]} == MODULES_260
    backward, forward = (
        {m["key"]: m for m in stages[n]["moments"]}[key] for n, key in ((2, "backward"), (3, "forward"))
    )
    for rank in (0, 1):
        peak = backward["ranks"][rank]["peak"]
        assert peak["held"]["reduce"] == 780
        assert peak["why"]["reduce"].startswith("gradients of ")
        assert {unit for unit in MODULES_260 if unit in peak["why"]["reduce"]} == MODULES_260
        peak = forward["ranks"][rank]["peak"]
        assert (peak["held"]["gather"], peak["why"]) == (148 * 2, {"gather": "full weights of feed_forward"})


MODULES_260 = {"norm1", "attention", "norm2", "feed_forward", "head"}


def test_the_peak_is_the_devices():
    """What rests in host memory and files counts there, whatever it comes to."""
    held = [[0, "device", "parameters", 5], [0, "host", "exp_avg", 90], [3, "device", "gather", 4], [4, "host", "staging", 50],
            [8, "device", "gather", 0]]  # fmt: skip
    assert (step_of(held)["at"], step_of(held)["held"]) == (3, {"parameters": 5, "gather": 4})
    assert [total for _, _, total, _ in recording.totals(held, "host")] == [90, 140]
    assert step_of(held[1:2])["total"] == 0


def half_recorded() -> str:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer)
    unrecorded = zero.explain().document["run"]
    assert unrecorded["recording"] is None and unrecorded["traffic"] == []
    if zero.rank == 0:
        zero.record()
    with pytest.raises(zeroshard.Error) as caught:
        zero.explain()
    return str(caught.value)


def test_all_ranks_record_or_none(ranks):
    for said in ranks.run(2, half_recorded):
        assert "some ranks have recorded and others have not" in said and "ranks [1]" in said


def test_a_record_that_forgot_the_step_says_so():
    """Of a ring that is too small the page shows what is left, with a note."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=3)
    for limit, complete in ((1 << 16, True), (20, False)):
        zero.record(limit)
        for _ in range(2):
            model(torch.ones(2, 24)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        note = run.gather(zero)["recording"]["note"]
        assert (note is None) is complete
        assert complete or "the record was too short for the whole step" in note


def test_metrics_are_numbers():
    model = Small()
    zero = zeroshard.shard(model, None)
    with pytest.raises(UserError, match="row 1, 'loss': Tensor"):
        zero.explain(metrics=[{"step": 1, "loss": 0.5}, {"step": 2, "loss": torch.ones(())}])


def test_explain_writes_one_file(ranks, tmp_path, template):
    """On one rank, in this process: the page holds the document, and nothing is left beside it."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=2)
    zero.record()
    model(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    page = zero.explain(tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text == page.html()
    assert json.loads(Scripts(text).contents[0]) == json.loads(json.dumps(page.document))
    assert page.document["walkthroughs"] == packaged()
    inside = page._repr_html_()
    assert inside.startswith('<iframe srcdoc="') and inside.count('"') == 4  # all others are escaped


class Scripts(HTMLParser):
    """The contents of a page's script elements, and the tags it has, as a browser would split them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.contents: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "script":
            self.contents.append("")

    def handle_data(self, data):
        if self.contents and self.lasttag == "script":
            self.contents[-1] += data


HOSTILE = [
    "</script><script>alert(1)</script>", "<!--<script>", "-->", "<img src=x onerror=alert(1)>", "\u2028\u2029", "&lt;",
    "a\"b'c\\", "null", document.PLACE,
]  # fmt: skip


def test_no_name_gets_out_of_the_document(template):
    """Whatever parameters are called, the page has the elements of its template and the names come back as they are."""
    fixture = json.loads((WEB / "fixtures" / "hostile.json").read_text(encoding="utf-8"))
    told = fixture["run"]
    told["layout"]["slots"] = [[name, [2, 2], 0] for name in HOSTILE]
    page = document.Page(document.document(walkthroughs=None, run=told))
    scripts = Scripts(page.html())
    assert scripts.tags == Scripts(PLACEHOLDER).tags
    assert len(scripts.contents) == 2
    assert not set("<>&\u2028\u2029") & set(scripts.contents[0])
    assert [slot[0] for slot in json.loads(scripts.contents[0])["run"]["layout"]["slots"]] == HOSTILE
    assert "</script>" in "".join(fixture["run"]["layout"]["units"])


def test_a_template_without_its_place_is_refused(monkeypatch):
    monkeypatch.setattr(document, "_packed", lambda name: "<html></html>")
    with pytest.raises(zeroshard.Error, match="no place for the document"):
        document.Page({"walkthroughs": None, "run": None}).html()
    monkeypatch.undo()
    with pytest.raises(zeroshard.Error, match="a file of the package is missing"):
        document._packed("nothing.html")


def test_numbers_keep_their_bits():
    """fp32 in the fewest digits that read back as the same fp32 number; 16 bits exactly; JSON has no NaN."""
    bits = torch.randint(-(2**31), 2**31 - 1, (2000,), generator=torch.Generator().manual_seed(0)).int()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor = bits.view(torch.float32).to(dtype) if dtype != torch.float16 else bits.view(torch.float16)
        back = json.loads(json.dumps(document.numbers(tensor), allow_nan=False))
        finite = tensor.isfinite()
        again = torch.tensor([float(value) for value in back], dtype=torch.float64).to(dtype)
        assert torch.equal(again[finite], tensor[finite])
        assert [value for value, good in zip(back, finite.tolist(), strict=True) if not good] == [
            "nan" if value != value else "inf" if value > 0 else "-inf" for value in tensor[~finite].tolist()
        ]
    assert document.numbers(torch.tensor([0.119, 0.1])) == [0.119, 0.1]


# ------------------------------------------------------------------------------------------------------------- size


def long_step(count: int) -> dict:
    """One rank's step of `count` messages of each kind and twice as many changes of what is held."""
    draw = random.Random(1)
    moves, held = [], [[0, "device", "parameters", 1000]]
    for number in range(count):
        for verb in ("gather", "reduce", "copy", "control", "release"):
            start = 10 * number + len(moves) % 5
            moves.append([verb, "parameters", number, "unit", draw.randrange(1, 10**6), 1, 1, start, start + 3, 1])
        held.append([10 * number + 1, "device", "gather", draw.randrange(10**6)])
        held.append([10 * number + 6, "device" if number % 2 else "host", "reduce", draw.randrange(10**6)])
    span = 0, 10 * count
    peak = recording.peak_of(held, span, [], [], moves)
    return {
        "rank": 0,
        "span": list(span),
        "phases": [],
        "units": [],
        "moves": moves,
        "held": held,
        "peak": peak,
        "waited": 0,
    }


def test_a_long_record_is_kept_small():
    """Fewer messages and changes, the peak among them, and a note of what went."""
    step = long_step(4000)
    full = json.loads(json.dumps(step))
    notes = recording.shorten(step)
    assert len(step["moves"]) == recording.MOVES_LIMIT
    assert {move[0] for move in step["moves"]} == {"gather", "reduce"}
    least = min(move[4] for move in step["moves"])
    assert sum(move[4] > least for move in full["moves"] if move[0] in ("gather", "reduce")) < recording.MOVES_LIMIT
    assert len(step["held"]) <= recording.HELD_LIMIT
    for tier in ("device", "host"):
        most = max(total for _, _, total, _ in recording.totals(full["held"], tier))
        assert max(total for _, _, total, _ in recording.totals(step["held"], tier)) == most
    assert [change[0] for change in step["held"]] == sorted(change[0] for change in step["held"])
    for number in step["peak"]["flying"]:
        assert step["moves"][number] in [full["moves"][at] for at in full["peak"]["flying"]]
    assert [note.split(" are")[0] for note in notes] == [
        "14,000 of 20,000 messages and copies of a rank",
        f"{8001 - len(step['held']):,} of 8,001 changes of what a rank held",
    ]
    whole = recording.together([step], ["unit"], clock="ns", notes=notes)
    assert len(json.dumps(whole, separators=(",", ":"))) < 700_000
    short = long_step(100)
    assert recording.shorten(short) == [] and len(short["moves"]) == 500


def test_a_run_of_1000_tensors_stays_small():
    """A page's data for four ranks: 340 bytes per tensor, recorded step included."""
    path = WEB / "fixtures" / "run-1000.json"
    found = json.loads(path.read_text(encoding="utf-8"))["run"]
    assert (len(found["layout"]["slots"]), found["ranks"], len(found["recording"]["ranks"])) == (1000, 4, 4)
    assert shape._problem(found, shape.RUN, "run") is None
    assert path.stat().st_size < 360_000


def test_of_many_ranks_those_that_matter_are_shown():
    summary = [
        {"rank": rank, "peak": 5 + (rank == 70), "waited": 10 - (rank == 90) + (rank == 33)} for rank in range(100)
    ]
    assert run._shown(summary) == [0, 70, 33, 90, 1, 2, 3, 4]
    assert run._shown(summary[:1]) == [0]


def test_curves_of_a_long_run():
    """2,000 rows at most, the first and the last among them; what is no finite number is left out."""
    rows = [{"step": step, "loss": math.nan if step == 3 else 1 / step, "name": "x"} for step in range(1, 9001)]
    found = reading.curves(rows)
    assert found["columns"] == ["step", "loss"]
    steps = [row[0] for row in found["rows"]]
    assert (len(steps), steps[0], steps[-1], found["note"]) == (2000, 1, 9000, "2,000 of 9,000 steps")
    assert steps == sorted(set(steps))
    assert reading.curves(rows[:4])["rows"][2:] == [[3, None], [4, 0.25]]
    assert reading.curves([]) is None and reading.curves([{"name": "x"}]) is None


def test_the_last_whole_step_is_found():
    """From the first forward (or backward) after a step to the end of the last optimizer's."""
    event = zeroshard.events.Event

    def phase(verb: str, start: int, end: int) -> object:
        return event(verb, "", None, None, 0, 0, 0, start, end)

    first = [phase("forward", 1, 2), phase("backward", 3, 4), phase("step", 5, 6), phase("step", 7, 8)]
    second = [phase("forward", 11, 12), phase("forward", 13, 14), phase("backward", 15, 16), phase("step", 17, 18)]
    assert recording.last_step([]) is None
    assert recording.last_step(first[:2]) is None
    assert recording.last_step(first) == (1, 8)
    assert recording.last_step(first + second) == (11, 18)
    assert recording.last_step(first + second[:3]) == (1, 8)
    assert recording.last_step(first + second[:3] + [phase("step", 17, 0)]) == (1, 8)  # it runs still


# ------------------------------------------------------------------------------------------------- in a run's folder


def trained_by_the_command(folder: str) -> None:
    from zeroshard.cli import train
    from zeroshard.cli.config import SIZES, Launch, RunConfig
    from zeroshard.cli.data import read_corpus

    config = RunConfig(
        out=folder, data=(__file__,), stage=2, ranks=2, steps=4, batch=1, accumulate=1, precision="fp32", size="tiny",
        lr=1e-3, seed=0, device="cpu", report=False, save_every=0, keep=1, resume="",
    )  # fmt: skip
    rank = dist.get_rank()
    corpus = read_corpus(config.data, context=SIZES["tiny"].context)
    train.train(config, Launch(rank=rank, ranks=2, local_rank=rank, local_ranks=2), corpus)


def test_train_leaves_what_explain_reads(ranks, tmp_path, template, capsys):
    """A recorded step of every rank and the curves, as a page and as its document."""
    from zeroshard.cli.explain import explain

    ranks.run(2, trained_by_the_command, str(tmp_path))
    found = reading.read(tmp_path)
    assert (found["stage"], found["ranks"], len(found["recording"]["ranks"])) == (2, 2, 2)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found["curves"]["rows"] == [list(row.values()) for row in metrics]
    explain((str(tmp_path),), out=None, browse=False)
    assert str(tmp_path / "zero.html") in capsys.readouterr().out.replace("\n", "")
    page = json.loads(Scripts((tmp_path / "zero.html").read_text(encoding="utf-8")).contents[0])
    assert page["run"] == found and page["walkthroughs"] == packaged()
    explain((str(tmp_path),), out=None, browse=False, as_json=True)
    assert json.loads(capsys.readouterr().out) == page
    held = [entry["held"] for entry in json.loads((tmp_path / "ledger.json").read_text())["ranks"]]
    for one, shown in zip(found["summary"], found["recording"]["ranks"], strict=True):
        assert one["rank"] == shown["rank"]
        assert {state: nbytes for state, nbytes in held[one["rank"]].items() if nbytes} == one["held"]
        peak = shown["peak"]
        assert peak["where"] and peak["total"] == sum(peak["held"].values()) == one["peak"]
        assert {*peak["why"]} == {s for s, nbytes in peak["held"].items() if nbytes > peak["rests"].get(s, 0)} != set()


def folder_with(tmp_path: Path, change) -> Path:
    told = json.loads((WEB / "fixtures" / "run.json").read_text(encoding="utf-8"))["run"]
    found = {"format": reading.FORMAT, "version": reading.VERSION, "run": {**told, "curves": None}}
    text = change(found)
    (tmp_path / reading.RECORDED).write_text(text if isinstance(text, str) else json.dumps(found))
    return tmp_path


def test_a_recorded_step_reads_back(tmp_path):
    folder = folder_with(tmp_path, lambda found: None)
    (folder / reading.METRICS).write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')  # killed while it wrote
    assert reading.read(folder)["curves"] == {"columns": ["step", "loss"], "rows": [[1, 2.5]], "note": None}
    (folder / reading.METRICS).write_text('{"step": 1, "lo\n{"step": 2, "loss": 2.5}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 1"):
        reading.read(folder)


FORGED = {
    "no json": (lambda found: "{", "not a recorded step"),
    "a NaN": (lambda found: '{"format": NaN}', "NaN is not a number"),
    "another format": (lambda found: found.update(format="x"), "zeroshard-run"),
    "a later version": (lambda found: found.update(version=99), "another version"),
    "no run": (lambda found: found.update(run=[]), "run is no object"),
    "a name": (lambda found: found["run"]["layout"]["slots"][3].__setitem__(0, 7), r"run.layout.slots\[3\]\[0\] is no str"),
    "a short row": (lambda found: found["run"]["recording"]["ranks"][0]["moves"][2].pop(), r"moves\[2\] has 9 entries, not 10"),
    "bytes in words": (lambda found: found["run"]["summary"][0]["held"].update(x="1"), r"summary\[0\].held.x is no int"),
    "truth for a number": (lambda found: found["run"].update(numel=True), "run.numel is no int"),
    "a rank too few": (lambda found: found["run"]["summary"].pop(), "no row for each rank"),
    "uneven shards": (lambda found: found["run"]["layout"]["buckets"][1].update(share=1), r"buckets\[1\] is not cut into 2 shards"),
    "a team of none": (lambda found: found["run"]["layout"]["buckets"][1].update(size=0), r"buckets\[1\] is of no team"),
    "parts of nothing": (lambda found: found["run"]["layout"]["buckets"][1].update(updates=[0, 1]), r"buckets\[1\] is not updated"),
    "no tier": (lambda found: found["run"]["layout"]["buckets"][1].update(rests=["host"]), r"buckets\[1\] rests in no tier"),
    "a rank in no team": (
        lambda found: found["run"]["groups"].append(
            {"axis": "", "buckets": 1, "numel": 1, "teams": [[0]], "rows": False, "spread": False}
        ),
        r"groups\[0\] has not every rank",
    ),
    "a unit that is not": (lambda found: found["run"]["layout"]["buckets"][1].update(unit=99), r"buckets\[1\] names a unit"),
    "a verb that is not": (lambda found: found["run"]["recording"]["ranks"][1]["moves"][5].__setitem__(0, 99), r"ranks\[1\].moves\[5\] names"),
    "a state that is not": (lambda found: found["run"]["recording"]["ranks"][0]["held"][1].__setitem__(2, -1), r"held\[1\] names"),
    "a tier that is not": (lambda found: found["run"]["recording"]["ranks"][0]["held"][1].__setitem__(1, 1), r"held\[1\] names"),
    "a move that is not": (lambda found: found["run"]["recording"]["ranks"][0]["peak"]["flying"].append(9999), "flying names"),
    "a missing part": (lambda found: found["run"].pop("facts"), "run.facts is no object"),
}  # fmt: skip


@pytest.mark.parametrize("how", FORGED)
def test_what_is_no_recorded_step_is_refused(tmp_path, how):
    change, says = FORGED[how]
    with pytest.raises(UserError, match=says):
        reading.read(folder_with(tmp_path, change))


def test_a_folder_without_a_recorded_step(tmp_path):
    with pytest.raises(UserError, match="there is no recorded step to explain"):
        reading.read(tmp_path)


# -------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("folder", ["A", "e"])
def test_a_texts_letter_is_no_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"checks text {folder.upper()}"):
        explain_command.explain((folder,), out=None, browse=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"runs": (), "as_json": True, "out": "x.html"}, "--json prints here"),
        ({"runs": (), "as_json": True, "browse": True}, "--json prints here"),
        ({"runs": ("nowhere",)}, "there is no recorded step to explain; where: nowhere/explain.json"),
    ],
)
def test_what_the_command_refuses(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=says):
        explain_command.explain(**{"out": None, "browse": False, **words})
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------- the calculator


@pytest.mark.full
def test_the_calculators_questions_have_the_planners_answers():
    """web/fixtures/plan-golden.json and planner.json are what `python -m bench.golden` writes."""
    stored = json.loads((WEB / "fixtures" / "plan-golden.json").read_text(encoding="utf-8"))
    assert [case["asked"] for case in stored["cases"]] == golden.questions()
    for case in stored["cases"]:
        assert golden.answer(case["asked"]) == case["plan"], case["asked"]
    assert json.loads((WEB / "fixtures" / "planner.json").read_text(encoding="utf-8")) == golden.tables()
