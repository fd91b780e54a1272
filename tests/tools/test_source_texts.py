"""Every value that the five texts print in their walks, typed from the texts, is in the page's document.

Nothing here asks the planner what a text says. The page shows its document as it is (test_page.py), so it is looked up
there.
"""

from __future__ import annotations

import math

import pytest

from test_planner import IN_THE_TEXT
from zeroshard.explain import document

# Text A (and D): the parameters, the input, and what each GPU's micro-batch makes of W_q's gradient.
MATRICES = {
    "W_q": "0.12 0.34 -0.21 0.05 -0.15 0.22 0.11 -0.08 0.30 -0.10 0.18 0.27 -0.05 0.14 -0.33 0.09",
    "W_k": "0.20 -0.11 0.07 0.15 0.03 0.28 -0.14 0.10 -0.22 0.06 0.31 -0.05 0.17 -0.09 0.02 0.24",
    "W_v": "0.08 0.19 -0.12 0.25 -0.07 0.33 0.04 -0.16 0.21 -0.03 0.15 0.11 -0.14 0.08 0.26 -0.02",
    "W_vocab": """0.11 -0.05 0.18 0.03 -0.14 0.22 -0.09 0.07 -0.06 0.13 0.02 -0.17 0.08 0.04 0.20 -0.11
        0.15 -0.02 0.09 0.21 -0.08 0.12 -0.03 0.16 -0.10 0.07 -0.13 0.05 0.19 -0.06 0.14 0.01""",
}
X = "0.5 -0.3 0.8 0.1 0.2 0.7 -0.1 0.4 -0.6 0.3 0.5 -0.2"
GRADIENTS = (
    "0.023 -0.011 0.045 -0.008 -0.031 0.019 -0.007 0.014 0.012 -0.028 0.033 -0.005 -0.016 0.009 -0.021 0.038",
    "0.017 -0.025 0.031 -0.013 -0.009 0.041 -0.018 0.006 0.028 -0.014 0.022 -0.035 -0.020 0.016 -0.012 0.027",
)
AVERAGES = (
    "0.020 -0.018 0.038 -0.0105 -0.020 0.030 -0.0125 0.010 0.020 -0.021 0.0275 -0.020 -0.018 0.0125 -0.0165 0.0325"
)
UPDATED = "0.119 0.341 -0.211 0.051 -0.149 0.219 0.111 -0.081 0.299 -0.099 0.179 0.271 -0.049 0.139 -0.329 0.089"
SIZES = {"width": 4, "heads": 2, "inner": 16, "words": 8, "tokens": 3}
SHAPES = {"x1": [3, 4], "q": [3, 4], "k": [3, 4], "v": [3, 4], "scores": [2, 3, 3], "hidden": [3, 16], "fed": [3, 4],
          "logits": [3, 8], "probabilities": [3, 8]}  # fmt: skip

# Text C: GPU 0 and GPU 1.
BACKWARD = (
    {"h": "-7.0", "a": "0", "y": "0.5", "loss": "10.125", "dL/dy": "-4.5", "dL/da": "-4.5", "dL/dh": "0"},
    {"h": "1.0", "a": "1.0", "y": "1.5", "loss": "15.125", "dL/dy": "-5.5", "dL/da": "-5.5", "dL/dh": "-5.5"},
)
STEP = {  # of w1 to w4
    "gradient, rank 0": "0 0 0 -4.5", "gradient, rank 1": "-11.0 -5.5 -5.5 -5.5", "average": "-5.5 -2.75 -2.75 -5.0",
    "m": "-0.55 -0.275 -0.275 -0.5", "v": "0.03025 0.0075625 0.0075625 0.025", "m, bias corrected": "-5.5 -2.75 -2.75 -5.0",
    "v, bias corrected": "30.25 7.5625 7.5625 25", "master": "2.1 -2.9 1.1 0.6",
    "rank 0, half updated": "2.1 -2.9 1.0 0.5", "rank 1, half updated": "2.0 -3.0 1.1 0.6",
}  # fmt: skip
KEEPS = (
    {"w1": "2.1 -0.55 0.03025", "w2": "-2.9 -0.275 0.0075625"},
    {"w3": "1.1 -0.275 0.0075625", "w4": "0.6 -0.5 0.025"},
)


def floats(text: str) -> list[float]:
    return [float(word) for word in text.split()]


@pytest.fixture(scope="module")
def data():
    """What the page is given."""
    return document.built_in()


@pytest.mark.parametrize("letter", IN_THE_TEXT)
def test_every_number_of_the_tables_is_in_the_document(data, letter):
    tables = data["texts"][letter]["tables"]
    says = {line["text_says"] for table in tables for line in table["lines"] if line["text_says"]}
    told = {word.strip() for each in says for word in each.removeprefix("> ").split(",")}
    for number in IN_THE_TEXT[letter].split():
        assert number in told, number


@pytest.mark.parametrize("name", MATRICES)
def test_the_printed_parameters(data, name):
    transformer = data["transformer"]
    tensor = next(each for each in transformer["tensors"] if each["symbol"] == name)
    assert tensor["origin"] == "text"
    assert transformer["runs"]["bf16"]["master"][tensor["start"] :][: tensor["numel"]] == floats(MATRICES[name])


def test_the_input_and_what_the_texts_leave_out(data):
    """They print the input of GPU-0 alone, and no targets."""
    first, second = data["transformer"]["batches"]
    assert first["x"] == {"shape": [3, 4], "values": floats(X)}
    assert (first["x_origin"], second["x_origin"]) == ("text", "seed")
    assert first["targets_origin"] == second["targets_origin"] == "seed"


def test_the_architecture(data):
    """Its sizes, and how values flow: norm1, attention, + x, norm2, feed_forward, +, head, softmax, cross-entropy."""
    transformer = data["transformer"]
    assert (transformer["dims"], transformer["ranks"]) == (SIZES, 2)
    assert transformer["layout"]["units"] == ["", "norm1", "attention", "norm2", "feed_forward", "head"]
    for batch, forward in zip(transformer["batches"], transformer["runs"]["float64"]["forward"], strict=True):
        for name, shape in SHAPES.items():
            assert forward[name]["shape"] == shape and len(forward[name]["values"]) == math.prod(shape)
        value = {"x": batch["x"]["values"], **{name: forward[name]["values"] for name in forward if name != "loss"}}
        for result, parts in {"middle": ("x", "attended"), "last": ("middle", "fed")}.items():
            assert value[result] == pytest.approx(
                [a + b for a, b in zip(*map(value.get, parts), strict=True)], rel=1e-12
            )
        for name, of in {"x1": "x", "x2": "middle"}.items():  # gamma is 1 and beta 0
            for at in range(0, 12, 4):
                row = value[of][at : at + 4]
                sigma = math.sqrt(sum((each - sum(row) / 4) ** 2 for each in row) / 4)
                want = [(each - sum(row) / 4) / sigma for each in row]
                assert value[name][at : at + 4] == pytest.approx(want, rel=1e-3)  # an epsilon is under the root
        logits, losses = value["logits"], []
        for token, target in enumerate(batch["targets"]):
            powers = [math.exp(each) for each in logits[8 * token :][:8]]
            softmax = [each / sum(powers) for each in powers]
            assert value["probabilities"][8 * token :][:8] == pytest.approx(softmax, rel=1e-12)
            losses.append(-math.log(softmax[target]))
        assert forward["loss"] == pytest.approx(sum(losses) / 3, rel=1e-12)


def test_the_gradients_of_w_q_and_what_becomes_of_them(data):
    """In the decimals of the float64 run, whose numbers are the text's; the bf16 run has them within its eight bits."""
    exact, bf16 = (data["transformer"]["runs"][name] for name in ("float64", "bf16"))
    part = slice(8, 24)
    for rank, want in enumerate(GRADIENTS):
        assert exact["gradients"][rank][part] == floats(want)
        assert bf16["gradients"][rank][part] == pytest.approx(floats(want), rel=2**-8)
    assert exact["average"][part] == pytest.approx(floats(AVERAGES), rel=1e-12)
    assert bf16["dtype"]["gradients"] == "bfloat16"
    assert bf16["average"][part] == pytest.approx(floats(AVERAGES), abs=1e-4)  # of a bf16 sum
    for run in (exact, bf16):
        assert [round(value, 3) for value in run["master_after"][part]] == floats(UPDATED)


def test_260_local_gradients_before_anything_is_sent(data):
    """Texts A and D: both GPUs hold 260 gradient values, 520 bytes, and then reduce-scatter."""
    transformer = data["transformer"]
    assert transformer["unsent"] == {"elements": 260, "gradients": 520, "beside": 0, "sent": 0}
    (said,) = (each for each in transformer["corrections"] if "a rank has all 260 of its own first" in each["right"])
    assert "a rank has all 260 of its own first: 520 bytes" in said["right"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_four_weights_there_and_back(data, rank):
    values, want = data["four"]["values"], BACKWARD[rank]
    assert dict(values["forward"][rank]) == {name: float(want[name]) for name in ("h", "a", "y")}
    assert values["loss"][rank] == float(want["loss"])
    assert [(f"dL/d{name}", value) for name, value in values["flow"][rank]] == [
        (name, float(want[name])) for name in ("dL/dy", "dL/da", "dL/dh")
    ]


@pytest.mark.parametrize("what", STEP)
def test_the_four_weights_through_adam(data, what):
    values, want = data["four"]["values"], floats(STEP[what])
    key = {"m": "exp_avg", "v": "exp_avg_sq", "m, bias corrected": "exp_avg_corrected", "average": "average",
           "v, bias corrected": "exp_avg_sq_corrected", "master": "master_after"}.get(what)  # fmt: skip
    rank = int(what.partition("rank ")[2][:1] or 0)
    found = values[key] if key else values["gradients" if what.startswith("gradient") else "half_updated"][rank]
    assert found == pytest.approx(want, rel=1e-3 if "half" in what else 1e-6)  # fp16 has no 2.1


@pytest.mark.parametrize("rank", [0, 1])
def test_what_each_rank_keeps_of_the_four_weights(data, rank):
    kept = data["four"]["values"]["states"][rank]
    assert [name.split(".")[1] for name, *_ in kept] == list(KEEPS[rank])
    for (_, *state), want in zip(kept, KEEPS[rank].values(), strict=True):
        assert state == pytest.approx(floats(want), rel=1e-6)
