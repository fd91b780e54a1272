"""Every value that the five texts print in their walks, typed from the texts, is in the page and in `explain --text`.

Nothing here asks the planner what a text says. The page shows its document as it is (test_page.py), so it is looked up
there; the terminal's words are read.
"""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from test_planner import IN_THE_TEXT
from zeroshard.cli import screen, walk
from zeroshard.explain import document

WIDE = 240

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
def shown():
    """What `zeroshard explain --text` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen.console, "_width", WIDE)
        walk.walkthroughs(document.built_in(), "W_q[0,0]")
    return out.getvalue()


@pytest.fixture(scope="module")
def data():
    """What the page is given."""
    return document.built_in()


def numbers_after(shown: str, title: str, rows: int) -> list[float]:
    """The numbers of the lines that have any, from a line that begins so on."""
    lines = shown.splitlines()
    at = next(number for number, line in enumerate(lines) if line.strip().startswith(title))
    numbers = ([float(word) for word in re.findall(r"-?\d+\.\d+", line)] for line in lines[at:])
    return [number for row in [row for row in numbers if row][:rows] for number in row]


@pytest.mark.parametrize("letter", IN_THE_TEXT)
def test_every_number_of_the_tables_is_in_the_document_and_printed(data, shown, letter):
    tables = data["texts"][letter]["tables"]
    says = {line["text_says"] for table in tables for line in table["lines"] if line["text_says"]}
    told = {word.strip() for each in says for word in each.removeprefix("> ").split(",")}
    printed = shown.partition(f"Text {letter}: ")[2].partition(f"Text {chr(ord(letter) + 1)}: ")[0]
    words = {word.strip(",>") for word in printed.replace(", ", " ").split()}
    for number in IN_THE_TEXT[letter].split():
        assert number in told and number in words, number


@pytest.mark.parametrize("name", MATRICES)
def test_the_printed_parameters(data, shown, name):
    transformer = data["transformer"]
    tensor = next(each for each in transformer["tensors"] if each["symbol"] == name)
    want = floats(MATRICES[name])
    assert transformer["runs"]["bf16"]["master"][tensor["start"] :][: tensor["numel"]] == want
    title = "master" if name == "W_q" else f"{name}, as the texts print it"
    assert numbers_after(shown, title, 4) == want


def test_the_input_and_the_architecture(data, shown):
    transformer = data["transformer"]
    assert transformer["dims"] == SIZES
    assert (
        "Width d = 4, 2 heads of 2, feed_forward 16, vocabulary V = 8, T = 3 tokens, 2 ranks. norm1 -> attention"
        in shown
    )
    assert transformer["batches"][0]["x"]["values"] == floats(X)
    assert numbers_after(shown, "x             3x4", 1) == floats(X)
    for name, shape in SHAPES.items():
        assert transformer["runs"]["float64"]["forward"][0][name]["shape"] == shape
        line = next(line for line in shown.splitlines() if line.startswith(f"  {name} ") and "x" in line)
        assert line.split()[1] == "x".join(map(str, shape))
        rows = shape[0] if len(shape) > 2 else 1  # each head's first row, or the first token's
        assert len(re.findall(r"-?\d\.\d{5}", line)) == rows * shape[-1]


def test_the_gradients_of_w_q_and_what_becomes_of_them(data, shown):
    """In the decimals of the float64 run, whose numbers are the text's; the terminal has bf16's, within its eight bits."""
    exact = data["transformer"]["runs"]["float64"]
    part = slice(8, 24)
    for rank, want in enumerate(GRADIENTS):
        assert exact["gradients"][rank][part] == floats(want)
        printed = numbers_after(shown, f"gradient {'AB'[rank]}", 4)
        assert printed == pytest.approx(floats(want), rel=2**-8)
    assert exact["average"][part] == pytest.approx(floats(AVERAGES), rel=1e-12)
    assert numbers_after(shown, "average ", 4) == pytest.approx(floats(AVERAGES), abs=1e-4)  # a bf16 sum
    assert [round(value, 3) for value in exact["master_after"][part]] == floats(UPDATED)
    assert [round(value, 3) for value in numbers_after(shown, "updated", 4)] == floats(UPDATED)


def test_260_local_gradients_before_anything_is_sent(data, shown):
    """Texts A and D: both GPUs hold 260 gradient values, 520 bytes, and then reduce-scatter."""
    assert data["transformer"]["unsent"] == {"elements": 260, "gradients": 520, "beside": 0, "sent": 0}
    assert "a rank has all 260 of its own first: 520 bytes" in " ".join(shown.split())


@pytest.mark.parametrize("rank", [0, 1])
def test_the_four_weights_there_and_back(data, shown, rank):
    values, want = data["four"]["values"], BACKWARD[rank]
    assert dict(values["forward"][rank]) == {name: float(want[name]) for name in ("h", "a", "y")}
    assert values["loss"][rank] == float(want["loss"])
    assert [(f"dL/d{name}", value) for name, value in values["flow"][rank]] == [
        (name, float(want[name])) for name in ("dL/dy", "dL/da", "dL/dh")
    ]
    lines = shown.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"  rank {rank}: h "))
    for name, said in want.items():
        assert f"{name} {float(said)!r}" in f"{lines[at]} {lines[at + 1]}"


@pytest.mark.parametrize("what", STEP)
def test_the_four_weights_through_adam(data, shown, what):
    values, want = data["four"]["values"], floats(STEP[what])
    key = {"m": "exp_avg", "v": "exp_avg_sq", "m, bias corrected": "exp_avg_corrected", "average": "average",
           "v, bias corrected": "exp_avg_sq_corrected", "master": "master_after"}.get(what)  # fmt: skip
    rank = int(what.partition("rank ")[2][:1] or 0)
    found = values[key] if key else values["gradients" if what.startswith("gradient") else "half_updated"][rank]
    line = next(line for line in shown.partition("Through one step")[2].splitlines() if line.startswith(f"{what}  "))
    printed = floats(line.removeprefix(what))
    near = 1e-3 if "half" in what else 1e-6  # fp16 has no 2.1
    assert found == pytest.approx(want, rel=near) and printed == pytest.approx(want, rel=near)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_each_rank_keeps_of_the_four_weights(data, shown, rank):
    kept = data["four"]["values"]["states"][rank]
    assert [name.split(".")[1] for name, *_ in kept] == list(KEEPS[rank])
    for (_, *state), (name, want) in zip(kept, KEEPS[rank].items(), strict=True):
        assert state == pytest.approx(floats(want), rel=1e-6)
        line = next(line for line in shown.splitlines() if line.startswith(f"  rank {rank} keeps"))
        told = line.partition(f"{name}: ")[2].partition(";")[0]
        assert floats(re.sub(r"[a-z,]+", " ", told)) == pytest.approx(floats(want), rel=1e-6)
