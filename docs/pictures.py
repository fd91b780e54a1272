"""Draw the README's pictures, in light and dark, from numbers that programs wrote. `make docs` runs it.

python docs/pictures.py             docs/pictures/*.svg from step.json and from bench/results/train.json
python docs/pictures.py --measure   step.json first: one recorded step of `zeroshard train` at every stage, four ranks
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "pictures"
MEASURED, RESULTS = FOLDER / "step.json", ROOT / "bench" / "results" / "train.json"
NAMES = ("paper", "ink", "soft", "line", "own", "peer")
THEMES = {
    "light": dict(zip(NAMES, ("#ffffff", "#1f2328", "#59636e", "#d1d9e0", "#0969da", "#afb8c1"), strict=True)),
    "dark": dict(zip(NAMES, ("#0d1117", "#e6edf3", "#9198a1", "#3d444d", "#4493f8", "#656c76"), strict=True)),
}
STAGES = {"light": ("#6e7781", "#1a7f37", "#9a6700", "#0969da"), "dark": ("#8b949e", "#3fb950", "#d29922", "#4493f8")}
PHASES = ("forward", "backward", "optimizer")
WIDTH, FONT = 860, "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
Curve = list[tuple[float, int]]


def text(x: float, y: float, words: str, colour: str, size: int = 13, **more: str) -> str:
    rest = "".join(f" {name.replace('_', '-')}='{value}'" for name, value in more.items())
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}' font-size='{size}' {FONT}{rest}>{escape(words)}</text>"


def drawing(height: int, theme: str, title: str, shapes: list[str]) -> str:
    paper = f"<rect width='{WIDTH}' height='{height}' rx='6' fill='{THEMES[theme]['paper']}'/>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img'>"
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *shapes, "</svg>", ""])


def curve_of(run: dict[str, Any]) -> Curve:
    """What rank 0 held on its device over the recorded step; each third of the axis is one phase."""
    told = run["recording"]
    rank = told["ranks"][0]
    start, stop = rank["span"]
    marks = {name: (begun, ended) for name, begun, ended in rank["phases"]}
    cuts = [start, marks["backward"][0], marks["backward"][1], stop]
    held, points = {}, []
    for at, tier, state, nbytes in rank["held"]:
        if told["tiers"][tier] != "device":
            continue
        held[state] = nbytes
        phase = max(number for number in range(3) if cuts[number] <= at or number == 0)
        within = (at - cuts[phase]) / (cuts[phase + 1] - cuts[phase])
        point = (round(phase + min(max(within, 0.0), 1.0), 4), sum(held.values()))
        if points and points[-1][0] == point[0]:
            points.pop()  # the states at the step's start, one after the other, are one point
        points.append(point)
    return [*points, (3.0, points[-1][1])]


def memory(measured: dict[str, Any], theme: str) -> str:
    """The four stages on one axis, their peaks named."""
    colours, look = STAGES[theme], THEMES[theme]
    left, right, top, bottom, height = 64, 206, 58, 44, 330
    most = max(nbytes for curve in measured["curves"].values() for _, nbytes in curve)
    wide, tall = WIDTH - left - right, height - top - bottom

    def x(at: float) -> float:
        return left + wide * at / 3

    def y(nbytes: float) -> float:
        return top + tall * (1 - nbytes / (1.05 * most))

    shapes = [
        text(left, 26, "One training step, bytes that rank 0 holds at each stage", look["ink"], 16, font_weight="600"),
        text(left, 44, measured["what"], look["soft"]),
    ]
    for mib in range(0, int(most / 1e6) + 1, 10):
        shapes.append(f"<path d='M{left} {y(mib * 1e6):.1f}H{left + wide}' stroke='{look['line']}' stroke-width='1'/>")
        shapes.append(text(left - 8, y(mib * 1e6) + 4, f"{mib} MB", look["soft"], 12, text_anchor="end"))
    for number, phase in enumerate(PHASES):
        shapes.append(text(x(number + 0.5), height - 16, phase, look["soft"], 13, text_anchor="middle"))
        if number:
            shapes.append(
                f"<path d='M{x(number):.1f} {top}V{top + tall}' stroke='{look['line']}' stroke-dasharray='3 4'/>"
            )
    labels = []
    for stage, curve in measured["curves"].items():
        colour = colours[int(stage)]
        path = f"M{x(curve[0][0]):.1f} {y(curve[0][1]):.1f}"
        path += "".join(f"H{x(at):.1f}V{y(nbytes):.1f}" for at, nbytes in curve[1:])
        shapes.append(f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='2.5' stroke-linejoin='round'/>")
        at, peak = max(curve, key=lambda point: point[1])
        shapes.append(f"<circle cx='{x(at):.1f}' cy='{y(peak):.1f}' r='4' fill='{colour}'/>")
        rest = measured["rest"][stage]
        labels.append(
            (y(curve[-1][1]), colour, f"stage {stage}: {rest / 1e6:.1f} MB at rest", f"peak {peak / 1e6:.1f} MB")
        )
    place = 0.0
    for level, colour, first, second in sorted(labels):
        place = max(level - 2, place + 40)
        shapes.append(text(left + wide + 14, place, first, colour, 13, font_weight="600"))
        shapes.append(text(left + wide + 14, place + 16, second, look["soft"], 12))
    return drawing(height, theme, "Memory of one training step at ZeRO stages 0 to 3", shapes)


def speed(results: dict[str, Any], theme: str) -> str:
    """A step's time over the limit, one bar for each back-end."""
    look = THEMES[theme]
    rows = [row for row in results["rows"] if (row["model"], row["dtype"], row["ranks"]) == ("69M", "bf16", 2)]
    rows = [row for row in rows if row["back-end"] != "limit" and "bf16 gradients" not in row["back-end"]]
    ratios = {row["back-end"]: float(row["over the limit"].split()[0]) for row in rows}
    left, top, line, longest = 232, 62, 23, max(ratios.values())
    shapes = [
        text(16, 26, "Time of a step over the same work with nothing sent (shorter is better)", look["ink"], 16,
             font_weight="600"),
        text(16, 44, f"69 M parameters, bf16, 2 ranks on two CPU cores, medians, {results['date']}", look["soft"]),
    ]  # fmt: skip
    for number, (name, ratio) in enumerate(sorted(ratios.items(), key=lambda pair: pair[1])):
        y, long = top + number * line, (WIDTH - left - 80) * ratio / longest
        own = name.startswith("zeroshard")
        weight, colour = ("600", look["own"]) if own else ("400", look["peer"])
        shapes.append(text(left - 10, y + 14, name, look["ink"], 13, text_anchor="end", font_weight=weight))
        shapes.append(f"<rect x='{left}' y='{y}' width='{long:.1f}' height='{line - 6}' rx='2' fill='{colour}'/>")
        shapes.append(text(left + long + 8, y + 14, f"{ratio:.2f}", look["ink"], 13))
    return drawing(top + len(ratios) * line + 14, theme, "Speed beside DDP, FSDP2, DeepSpeed and fairscale", shapes)


# A step at stage 3 of a model of three units, in the order that the engine keeps; lengths are chosen, not measured.
LANES = ("gathers", "this rank computes", "sums of gradients", "whole weights here", "at rest, always")
STEP = {
    "gathers": [(0, 1, "A"), (1, 2, "B"), (2, 3, "C"), (4, 5, "C"), (5, 6, "B"), (7, 8, "A")],
    "this rank computes": [
        (1, 2, "A"), (2, 3, "B"), (3, 4, "C"), (5, 7, "C"), (7, 9, "B"), (9, 11, "A"), (12.2, 13.2, "update"),
    ],
    "sums of gradients": [(7, 8.2, "C"), (9, 10.2, "B"), (11, 12.2, "A")],
    "at rest, always": [(0, 13.2, "this rank's shards: parameters, gradients, optimizer states")],
}  # fmt: skip
WHOLE = {"A": [(0, 2), (7, 11)], "B": [(1, 3), (5, 9)], "C": [(2, 4), (4, 7)]}


def step(_: None, theme: str) -> str:
    """Who computes, what is sent and which weights are whole, along one step."""
    look, left, top, line = THEMES[theme], 150, 62, 40
    unit = (WIDTH - left - 20) / 13.2
    colours = dict(zip("ABC", STAGES[theme][1:], strict=True))
    shapes = [
        text(16, 26, "One step at stage 3: three units A, B and C of a model", look["ink"], 16, font_weight="600"),
        text(16, 44, "each unit is whole only while it is needed; the next gather runs while this unit computes",
             look["soft"]),
    ]  # fmt: skip
    height = top + len(LANES) * line + 40

    def bar(lane: int, begin: float, end: float, words: str, down: float, high: float) -> None:
        x, y = left + unit * begin, top + lane * line + down
        colour = colours.get(words, look["peer"])
        shapes.append(f"<rect x='{x + 1:.1f}' y='{y:.1f}' width='{unit * (end - begin) - 2:.1f}' height='{high:.1f}' "
                      f"rx='3' fill='{colour}'/>")  # fmt: skip
        if high > 12:
            middle = x + unit * (end - begin) / 2
            shapes.append(
                text(
                    middle,
                    y + 18,
                    words,
                    look["paper" if words in colours else "ink"],
                    12,
                    text_anchor="middle",
                    font_weight="600",
                )
            )

    for begin, end, words in ((1, 4, "forward"), (5, 11, "backward"), (12.2, 13.2, "optimizer")):
        shapes.append(text(left + unit * (begin + end) / 2, height - 14, words, look["soft"], 13, text_anchor="middle"))
        for at in (begin, end):
            x = left + unit * at
            shapes.append(f"<path d='M{x:.1f} {top}V{height - 34}' stroke='{look['line']}' stroke-dasharray='3 4'/>")
    for lane, name in enumerate(LANES):
        shapes.append(text(left - 12, top + lane * line + 22, name, look["ink"], 13, text_anchor="end"))
        for begin, end, words in STEP.get(name, []):
            bar(lane, begin, end, words, 4, 27)
    for number, (unit_name, spans) in enumerate(WHOLE.items()):
        for begin, end in spans:
            bar(3, begin, end, unit_name, 4 + 10 * number, 7)
    return drawing(height, theme, "One training step at stage 3 in time", shapes)


def pictures() -> dict[str, str]:
    """{file name: content} of all of them."""
    measured, results = (json.loads(path.read_text()) for path in (MEASURED, RESULTS))
    return {
        f"{name}-{theme}.svg": draw(numbers, theme)
        for theme in THEMES
        for name, draw, numbers in (("memory", memory, measured), ("speed", speed, results), ("step", step, None))
    }


def measure() -> None:
    curves, rest = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for stage in range(4):
            words = [
                "train",
                "--ranks",
                "4",
                "--size",
                "deep",
                "--steps",
                "4",
                "--transport",
                "gloo",
                "--stage",
                f"{stage}",
            ]
            words += ["--out", f"{folder}/{stage}"]
            subprocess.run([sys.executable, "-m", "zeroshard", *words], check=True)
            run = json.loads(Path(folder, str(stage), "explain.json").read_text())["run"]
            curves[str(stage)] = curve_of(run)
            rest[str(stage)] = sum(run["summary"][0]["predicted"].values())
    what = f"a GPT of {run['numel']:,} fp32 parameters, AdamW, 4 ranks (zeroshard train --size deep)"
    MEASURED.write_text(json.dumps({"what": what, "rest": rest, "curves": curves}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        measure()
    for name, content in pictures().items():
        (FOLDER / name).write_text(content)
