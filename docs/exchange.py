"""Draw README's moving picture: a recorded step at stage 3, in which two ranks exchange halves. `make docs` runs it.

python docs/exchange.py   docs/pictures/exchange-*.svg from the walkthroughs that ship, which programs wrote
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pictures import FOLDER, ROOT, THEMES, WIDTH, drawing, text

WALKTHROUGHS = ROOT / "src" / "zeroshard" / "explain" / "walkthroughs.json"
STAGE, RANKS = 3, 2
STILL = ("gather", "attention", "forward")  # the beat that a reader sees who wants no motion
SECONDS = 0.8  # of a beat
INKS = {  # as the page has them: web/src/app.css
    "light": {"parameters": "#2b83c4", "gradients": "#dd6a1c", "optimizer": "#10a37a", "room": "#eef1f4"},
    "dark": {"parameters": "#58a9e6", "gradients": "#f08a48", "optimizer": "#35c79a", "room": "#1f252d"},
}
STRIPS = ("parameters", "gradients", "optimizer")
LEFT, RIGHT, GAP, TALL, LINE, TOP, APART, HEIGHT = 104, 18, 5, 14, 18, 96, 96, 300


class Beat(NamedTuple):
    """One thing that every rank does, when rank 0 does it. What it holds and has sent is by rank."""

    kind: str
    unit: str
    phase: str
    buckets: tuple[int, ...]
    holds: tuple[int, ...]
    sent: tuple[int, ...]
    now: int  # bytes that rank 0 sends in it
    at: int


def recorded() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the layout and the recording of the second step at stage 3, with each layer cut in two."""
    steps = json.loads(WALKTHROUGHS.read_text())["walkthroughs"]["transformer"]["played"]
    (step,) = [each for each in steps if (each["cut"], each["ranks"], each["step"]) == ("layers", RANKS, 2)]
    return step["layout"], step["stages"][STAGE]["recording"]


def marks(rank: dict[str, Any], verbs: list[str], units: list[str]) -> list[tuple[int, str, str, str, tuple[int, ...]]]:
    """List what one rank did: (when, kind, unit, phase, buckets), in order."""
    begun = {name: start for name, start, _ in rank["phases"]}
    phase = {True: "backward", False: "forward"}
    owning = {move[3] for move in rank["moves"] if move[2] >= 0}
    gathers, found = [], []
    for verb, _, bucket, unit, _, _, _, start, end, _ in rank["moves"]:
        kind = verbs[verb]
        if bucket < 0 or kind not in ("gather", "reduce", "release"):
            continue
        if kind == "gather":
            gathers.append((unit, start, end))
        at = end if kind == "release" else start
        found.append((at, kind, units[unit], phase[at >= begun["backward"]], (bucket,)))
    for verb, unit, start, end in rank["units"]:
        if unit in owning:
            own = [came for of, left, came in gathers if of == unit and start <= left and came < end]
            found.append((max([start, *own]), "compute", units[unit], verbs[verb], ()))
    found.append((max(end for name, _, end in rank["phases"] if name == "step"), "adam", "", "step", ()))
    return sorted(found)


def beats(layout: dict[str, Any], recording: dict[str, Any]) -> list[Beat]:
    """All that the ranks do in the step, in rank 0's order; each does the same."""
    by_rank = [
        {each[1:]: each[0] for each in marks(rank, recording["verbs"], layout["units"])} for rank in recording["ranks"]
    ]
    found, sent = [], [0] * RANKS
    for key in by_rank[0]:
        kind, unit, phase, buckets = key
        holds, now = [], []
        for at, rank in zip((times[key] for times in by_rank), recording["ranks"], strict=True):
            held = {state: nbytes for when, _, state, nbytes in rank["held"] if when <= at}
            holds.append(sum(held.values()))
            now.append(
                sum(move[5] for move in rank["moves"] if move[7] == at and move[2] in buckets) * (kind != "release")
            )
        sent = [before + more for before, more in zip(sent, now, strict=True)]
        found.append(Beat(kind, unit, phase, buckets, tuple(holds), tuple(sent), now[0], by_rank[0][key]))
    return found


def caption(beat: Beat) -> str:
    words = {
        "gather": f"{beat.unit} is needed next: each rank sends its half to the other, {beat.now} bytes",
        "compute": f"{beat.phase}: {beat.unit}, with all its weights, on each rank's own data",
        "release": f"{beat.unit} is done: the half that came is released",
        "reduce": f"gradients of {beat.unit}: each rank sends the half that it does not own, {beat.now} bytes",
        "adam": "Adam: each rank updates its own halves, and nobody keeps the rest",
    }
    return words[beat.kind]


def sums(story: list[Beat], recording: dict[str, Any]) -> dict[int, int]:
    """Return, by bucket, the first beat in which its gradients are added up: a reduction takes some beats."""
    reduce = recording["verbs"].index("reduce")
    ends = {move[2]: move[8] for move in recording["ranks"][0]["moves"] if move[0] == reduce}
    return {bucket: next(n for n, beat in enumerate(story) if beat.at >= end) for bucket, end in ends.items()}


def whole(story: list[Beat], bucket: int, added: int) -> Iterator[tuple[str, int, int]]:
    """Yield (state, first beat, beat after the last) of weights and gradients that both ranks have all of, a while."""
    gathered: int | None = None
    for number, beat in enumerate(story):
        if beat.kind == "gather" and bucket in beat.buckets:
            gathered = number + 1
        if beat.kind == "release" and bucket in beat.buckets and gathered is not None:
            yield "parameters", gathered, number
            gathered = None
        if beat.kind == "reduce" and bucket in beat.buckets:
            computed = max(at for at in range(number) if story[at][:3] == ("compute", beat.unit, "backward"))
            yield "gradients", computed, added


class Scene:
    """Where everything is: elements from left to right, with room between units; ranks and their strips downwards."""

    def __init__(self, layout: dict[str, Any], theme: str) -> None:
        self.buckets, self.units = layout["buckets"], layout["units"]
        numel = sum(bucket["numel"] for bucket in self.buckets)
        self.each = (WIDTH - LEFT - RIGHT - GAP * (len(self.buckets) - 1)) / numel
        self.inks = INKS[theme]

    def x(self, bucket: int, element: int) -> float:
        before = sum(each["numel"] for each in self.buckets[:bucket])
        return LEFT + self.each * (before + element) + GAP * bucket

    def y(self, rank: int, state: str) -> float:
        return TOP + rank * APART + LINE * STRIPS.index(state)

    def box(self, rank: int, state: str, bucket: int, start: int, stop: int, more: str = "", room: bool = False) -> str:
        left, right = self.x(bucket, start), self.x(bucket, stop)
        colour = self.inks["room" if room else state]
        return (f"<rect x='{left:.1f}' y='{self.y(rank, state)}' width='{right - left:.1f}' height='{TALL}' "
                f"fill='{colour}'{more}/>")  # fmt: skip

    def half(self, bucket: int, rank: int) -> tuple[int, int]:
        share = self.buckets[bucket]["share"]
        return rank * share, (rank + 1) * share


def rests(scene: Scene, look: dict[str, str]) -> list[str]:
    """What stands all the time: names, room for all, and each rank's own halves of weights and optimizer state."""
    shapes = []
    for bucket, each in enumerate(scene.buckets):
        name, wide = scene.units[each["unit"]], scene.x(bucket, each["numel"]) - scene.x(bucket, 0)
        if wide > 7 * len(name):
            middle = scene.x(bucket, 0) + wide / 2
            shapes.append(text(middle, TOP - 22, name, look["soft"], 12, text_anchor="middle"))
    for rank in range(RANKS):
        for state in STRIPS:
            shapes.append(text(LEFT - 10, scene.y(rank, state) + 11, state, look["soft"], 12, text_anchor="end"))
            for bucket, each in enumerate(scene.buckets):
                shapes.append(scene.box(rank, state, bucket, 0, each["numel"], room=True))
                if state != "gradients":
                    shapes.append(scene.box(rank, state, bucket, *scene.half(bucket, rank)))
        shapes.append(text(16, TOP + rank * APART - 6, f"rank {rank}", look["ink"], 13, font_weight="600"))
    return shapes


def passes(scene: Scene, story: list[Beat], added: dict[int, int]) -> tuple[list[str], list[str]]:
    """(shapes, keyframes) of what comes and goes between beats: gathered halves, gradients, and their sums."""
    shapes, frames = [], []
    last, still = len(story), next(at for at, beat in enumerate(story) if beat[:3] == STILL)

    def during(first: int, stop: int, inside: list[str]) -> None:
        name = f"s{len(frames)}"
        frames.append(shown(name, first, stop, last))
        seen = " style='opacity:1'" if first <= still < stop else ""
        shapes.append(f"<g class='b {name}'{seen}>{''.join(inside)}</g>")

    for bucket, each in enumerate(scene.buckets):
        for state, first, stop in whole(story, bucket, added[bucket]):
            faint = " opacity='.4'"
            during(first, stop, [scene.box(rank, state, bucket, 0, each["numel"], faint) for rank in range(RANKS)])
        own = [scene.box(rank, "gradients", bucket, *scene.half(bucket, rank)) for rank in range(RANKS)]
        during(added[bucket], last, own)
    return shapes, frames


def shown(name: str, first: int, stop: int, last: int) -> str:
    """Keyframes of what is there from one beat until another."""
    begins = f"0%{{opacity:{int(first == 0)}}}" + (f"{100 * first / last:.2f}%{{opacity:1}}" if first else "")
    return f"@keyframes {name}{{{begins}{100 * stop / last:.2f}%{{opacity:0}}}}.{name}{{animation-name:{name}}}"


def plays(scene: Scene, story: list[Beat], look: dict[str, str]) -> tuple[list[str], list[str]]:
    """(shapes, keyframes) of each beat: its words, each rank's bytes, the unit at work, and halves on their way."""
    shapes, frames, last = [], [], len(story)
    for number, beat in enumerate(story):
        inside = [text(LEFT, HEIGHT - 16, caption(beat), look["ink"], 14, font_weight="600")]
        for rank, (holds, sent) in enumerate(zip(beat.holds, beat.sent, strict=True)):
            words = f"holds {holds:,} bytes, has sent {sent:,}"
            inside.append(text(LEFT, TOP + rank * APART - 6, words, look["soft"], 12))
        if beat.kind == "compute":
            for bucket, each in enumerate(scene.buckets):
                if scene.units[each["unit"]] == beat.unit:
                    left, right = scene.x(bucket, 0) - 2, scene.x(bucket, each["numel"]) + 2
                    line = f"height='{3 * LINE}' fill='none' stroke='{look['own']}' stroke-width='2' rx='3'"
                    inside += [
                        f"<rect x='{left:.1f}' y='{scene.y(rank, STRIPS[0]) - 2}' width='{right - left:.1f}' {line}/>"
                        for rank in range(RANKS)
                    ]
        if beat.kind in ("gather", "reduce"):
            state = "parameters" if beat.kind == "gather" else "gradients"
            for rank, bucket in ((rank, bucket) for rank in range(RANKS) for bucket in beat.buckets):
                owner, down = (rank if beat.kind == "gather" else 1 - rank), APART * (1 - 2 * rank)
                edge = f" class='f m{number}' style='--d:{down}px;--h:{down * 0.45:.0f}px' stroke='{look['ink']}'"
                inside.append(scene.box(rank, state, bucket, *scene.half(bucket, owner), edge))
            begin, end = 100 * number / last, 100 * (number + 0.85) / last
            frames.append(f"@keyframes m{number}{{0%,{begin:.2f}%{{transform:none}}{end:.2f}%,to{{transform:translateY("
                          f"var(--d))}}}}.m{number}{{animation-name:m{number}}}")  # fmt: skip
        frames.append(shown(f"b{number}", number, number + 1, last))
        seen = " style='opacity:1'" if beat[:3] == STILL else ""
        shapes.append(f"<g class='b b{number}'{seen}>{''.join(inside)}</g>")
    return shapes, frames


def exchange(theme: str) -> str:
    """The whole step, over and over."""
    layout, recording = recorded()
    story, scene, look = beats(layout, recording), Scene(layout, theme), THEMES[theme]
    (came, between), (words, within) = passes(scene, story, sums(story, recording)), plays(scene, story, look)
    long = f"{SECONDS * len(story):.1f}s"
    style = (f".b{{opacity:0;animation:{long} step-end infinite}}.f{{transform:translateY(var(--h));"
             f"animation:{long} linear infinite}}{''.join([*between, *within])}"
             "@media(prefers-reduced-motion:reduce){.b,.f{animation:none}}")  # fmt: skip
    numel = sum(bucket["numel"] for bucket in layout["buckets"])
    shapes = [
        f"<style>{style}</style>",
        text(16, 26, "One step at stage 3: each rank keeps half of every layer, and borrows the other half",
             look["ink"], 16, font_weight="600"),
        text(16, 44, f"{numel} parameters in {len(layout['buckets'])} layers on {RANKS} ranks, as recorded; "
             "zeroshard explain plays it with every number", look["soft"]),
        *rests(scene, look), *came, *words,
    ]  # fmt: skip
    return drawing(HEIGHT, theme, "Two ranks exchange halves of each layer, in a step of ZeRO stage 3", shapes)


def pictures() -> dict[str, str]:
    """{file name: content} in both themes."""
    return {f"exchange-{theme}.svg": exchange(theme) for theme in THEMES}


if __name__ == "__main__":
    for name, content in pictures().items():
        Path(FOLDER, name).write_text(content)
