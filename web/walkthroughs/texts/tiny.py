"""The transformer of 260 parameters of texts A and D, as far as they print it, and what follows from that."""

from __future__ import annotations

import math
from fractions import Fraction

from zeroshard.layout.partition import Partition, Spec, partition
from zeroshard.policies.layout import Layout

from .arithmetic import Adam, adam
from .lines import Line, line, row

# In the texts' flat order.
TENSORS_260 = (
    ("gamma1", (4,)), ("beta1", (4,)), ("W_q", (4, 4)), ("W_k", (4, 4)), ("W_v", (4, 4)), ("W_o", (4, 4)),
    ("gamma2", (4,)), ("beta2", (4,)), ("W1", (4, 16)), ("b1", (16,)), ("W2", (16, 4)), ("b2", (4,)),
    ("W_vocab", (4, 8)),
)  # fmt: skip
MODULES_260 = (
    ("gamma1", "beta1"), ("W_q", "W_k", "W_v", "W_o"), ("gamma2", "beta2"), ("W1", "b1", "W2", "b2"), ("W_vocab",),
)  # fmt: skip
SAID_NUMEL = ("4", "4", "16", "16", "16", "16", "4", "4", "64", "16", "64", "4", "32")

HEADS = 2

Matrix = tuple[tuple[Fraction, ...], ...]


def _matrix(text: str) -> Matrix:
    return tuple(tuple(map(Fraction, words.split())) for words in text.split(";"))


W_Q = _matrix("0.12 0.34 -0.21 0.05; -0.15 0.22 0.11 -0.08; 0.30 -0.10 0.18 0.27; -0.05 0.14 -0.33 0.09")
X = _matrix("0.5 -0.3 0.8 0.1; 0.2 0.7 -0.1 0.4; -0.6 0.3 0.5 -0.2")
GRADIENTS = (  # of W_q, on each GPU
    _matrix(
        "0.023 -0.011 0.045 -0.008; -0.031 0.019 -0.007 0.014; 0.012 -0.028 0.033 -0.005; -0.016 0.009 -0.021 0.038"
    ),
    _matrix(
        "0.017 -0.025 0.031 -0.013; -0.009 0.041 -0.018 0.006; 0.028 -0.014 0.022 -0.035; -0.020 0.016 -0.012 0.027"
    ),
)
AVERAGES: Matrix = tuple(
    tuple((a + b) / 2 for a, b in zip(*rows, strict=True)) for rows in zip(*GRADIENTS, strict=True)
)
LEARNING_RATE = Fraction("0.001")


def cut_260(align: int = 1, modules: bool = False) -> Partition:
    """Cut the 260 parameters, as one flat vector, evenly for two ranks. modules: is each module a unit?"""
    unit = {name: number + 1 for number, names in enumerate(MODULES_260) for name in names} if modules else {}
    specs = [Spec(name, shape, "bfloat16", 2, unit.get(name, 0), True) for name, shape in TENSORS_260]
    return partition(specs, Layout(bounds="model", align=align), 2)


def own(cut: Partition, rank: int, *names: str) -> Fraction:
    """Count the elements of those tensors that a rank owns."""
    places = [cut.find(name) for name in names]
    return Fraction(sum(bucket.fragment(slot, rank).numel for bucket, slot in places))


def forward() -> tuple[Fraction, float, list[float], list[float]]:
    """Compute (mu, sigma, x1, Q) of the first token on GPU-0."""
    mu = sum(X[0], Fraction()) / len(X[0])
    sigma = math.sqrt(sum(float(x - mu) ** 2 for x in X[0]) / len(X[0]))
    x1 = [float(x - mu) / sigma for x in X[0]]
    q = [sum(x * float(weights[column]) for x, weights in zip(x1, W_Q, strict=True)) for column in range(4)]
    return mu, sigma, x1, q


def model_lines() -> list[Line]:
    """List the model's sizes, which both texts have."""
    shapes = dict(TENSORS_260)
    (width, inner), (_, words), tokens = shapes["W1"], shapes["W_vocab"], len(X)
    return [
        line("hidden dimension d", "4", width),
        line("heads", "2", HEADS),
        line("of each head, d_k", "2", Fraction(width, HEADS)),
        line("FFN inner", "16", inner),
        line("vocabulary V", "8", words),
        line("tokens T", "3", tokens),
        line("GPUs", "2", len(GRADIENTS)),
    ]


def shape_lines() -> list[Line]:
    """List the shapes, tokens by columns, of what each matrix makes of its input."""
    shapes, tokens = dict(TENSORS_260), len(X)
    made = (("x", "3, 4", len(X[0])), ("Q = x1 W_q", "3, 4", shapes["W_q"][1]), ("x2 W1", "3, 16", shapes["W1"][1]),
            ("FFN, after W2", "3, 4", shapes["W2"][1]),
            ("logits, and their softmax", "3, 8", shapes["W_vocab"][1]))  # fmt: skip
    return [row(f"shape of {name}", said, [tokens, columns]) for name, said, columns in made]


def numel_lines() -> list[Line]:
    """List the elements of all parameters, which both texts have."""
    return [
        *(
            line(name, said, math.prod(shape))
            for (name, shape), said in zip(TENSORS_260, SAID_NUMEL, strict=True)
        ),
        line("total", "260", sum(math.prod(shape) for _, shape in TENSORS_260)),
    ]  # fmt: skip


def average_lines(says: tuple[str, ...]) -> list[Line]:
    return [
        row(f"average of both GPUs, row {number}", said, values)
        for number, (said, values) in enumerate(zip(says, AVERAGES, strict=True))
    ]


def first() -> Adam:
    """Compute the step of W_q[0,0]."""
    return adam(W_Q[0][0], AVERAGES[0][0], LEARNING_RATE)


def adam_lines() -> list[Line]:
    step = first()
    return [
        line("W_q[0,0]: m", "0.002", step.m),
        line("W_q[0,0]: v", "0.0000004", step.v),
        line("W_q[0,0]: m, bias corrected", "0.02", step.m_hat),
        line("W_q[0,0]: v, bias corrected", "0.0004", step.v_hat),
        line("W_q[0,0] after", "0.119", step.weight),
    ]


def updated() -> Matrix:
    """Compute the masters of W_q after the step."""
    return tuple(
        tuple(adam(w, g, LEARNING_RATE).weight for w, g in zip(weights, gradients, strict=True))
        for weights, gradients in zip(W_Q, AVERAGES, strict=True)
    )
