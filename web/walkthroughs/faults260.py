"""Faults of the 260 parameters, caused and recorded: a rank that is killed, a bit that flips, another number of ranks.

Each story is a run of the real engine on `zeroshard.worlds`: ranks are threads of this process, one of which runs at a
time, so a recording holds no chance and no clock. SIGKILL ends a rank there as it ends a process: it says nothing, and
its connections are closed. A test kills real processes and compares what the others say.

    record()    all stories, as `web/DATA.md` has them
    train()     the run that each story interrupts, moves or goes on with
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import zeroshard
from zeroshard.checkpoint import files, saving
from zeroshard.checkpoint.staging import LEFTOVER
from zeroshard.cli import checkpoints
from zeroshard.comm import watch
from zeroshard.errors import Error
from zeroshard.explain.document import numbers
from zeroshard.explain.recording import MESSAGES
from zeroshard.worlds.output import by_rank
from zeroshard.worlds.rank import Rank
from zeroshard.worlds.schedule import Schedule, here
from zeroshard.worlds.world import World

from . import transformer260, words_of_faults
from .observe import ticking
from .run260 import BY_LAYER

RANKS, STAGE = 4, 3
STEPS, EVERY = 6, 2  # a checkpoint after every second step
MICRO_BATCHES = 4  # of a step, on however many ranks
LEARNING_RATE = 1e-2
VICTIM, LAST_STEP = 1, 4  # the rank that is killed, and the step in which it is
COMM = replace(MESSAGES, timeout=60.0)  # seconds, after which a rank that is stopped, and not dead, counts as lost
PLACES = ("forward", "backward", "step", "save")  # where it is killed
MOVED = ((2, 3), (2, 1), (1, 0))  # ranks and stage that load what `RANKS` ranks have saved at `STAGE`
FLIPPED = {"weight": "value", "moment": "exp_avg"}  # the state whose bit flips; beside them a bit of a file's header
DAMAGED = f"step-{LAST_STEP}", "rank00001.safetensors", "feed_forward.W1"  # the checkpoint, its file, the parameter


class Trained:
    """One rank's run: losses[step][turn] of the steps that it has done, and at the end all weights, or an error."""

    def __init__(self) -> None:
        self.losses: list[list[float]] = []
        self.weights: list[float] = []
        self.error = ""


Started = tuple[transformer260.Transformer260, torch.optim.Optimizer, zeroshard.Zero]
Arm = Callable[[Started, int], None]


def start(stage: int) -> Started:
    model = transformer260.Transformer260()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, comm=COMM, layout=BY_LAYER)


def train(started: Started, folder: Path, steps: Sequence[int], arm: Arm, trained: Trained) -> None:
    """Train and save on this rank until the last step or the first error. arm: called before each step."""
    model, optimizer, zero = started
    turns = MICRO_BATCHES // zero.world_size
    batches = transformer260.batches(torch.float32, MICRO_BATCHES)
    try:
        for step in steps:
            arm(started, step)
            losses = []
            for turn in range(turns):
                loss = transformer260.loss(model, batches[turn * zero.world_size + zero.rank])
                (loss / turns).backward()
                losses += numbers(loss)
            optimizer.step()
            optimizer.zero_grad()
            trained.losses.append(losses)
            if step % EVERY == 0:
                zero.save(folder / f"step-{step}")
        trained.weights = weights_of(started)
    except Error as error:
        trained.error = f"{type(error).__name__}: {error}"


def weights_of(started: Started) -> list[float]:
    model, _, zero = started
    with zero.gathered():
        return [value for parameter in model.parameters() for value in numbers(parameter)]


def unarmed(started: Started, step: int) -> None:
    pass


def on_ranks(ranks: int, call: Callable[[Rank], None]) -> None:
    """Call it on each rank of a world, until each has ended or was killed. Raises what a rank raised."""
    world = World(ranks)
    for rank in world.ranks:
        rank.launched()
    try:
        with by_rank():
            world.perform(call)
        for task in world.schedule.raised:
            assert task.error is not None
            raise task.error
    finally:
        world.close()


def in_order(ranks: Sequence[Trained]) -> list[list[float]]:
    """Return each step's losses by micro-batch, of the steps that all ranks have done."""
    return [
        [step[index % len(ranks)][index // len(ranks)] for index in range(MICRO_BATCHES)]
        for step in zip(*(rank.losses for rank in ranks), strict=False)
    ]


class Recorder:
    """Runs in one folder, and what every story is compared with: the run that nothing disturbs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole = self.run("whole", RANKS, STAGE, range(1, STEPS + 1))
        self.losses = in_order(self.whole)
        saved = self.run("saved", RANKS, STAGE, range(1, LAST_STEP + 1))
        self.saved: dict[str, Any] = {
            "ranks": RANKS,
            "first": 1,
            "losses": in_order(saved),
        }  # what is loaded, with a bit flipped or not

    def run(
        self, name: str, ranks: int, stage: int, steps: Sequence[int], arm: Arm = unarmed, loads: str = ""
    ) -> list[Trained]:
        """Train on so many ranks; from a checkpoint, if `loads` says which."""
        found = [Trained() for _ in range(ranks)]

        def call(rank: Rank) -> None:
            started = start(stage)
            if loads:
                started[2].load(self.folder / name / loads)
            train(started, self.folder / name, steps, arm, found[rank.number])

        on_ranks(ranks, call)
        return found

    def copied(self, name: str) -> list[dict[str, Any]]:
        """Begin another run with the checkpoints of `saved`, and list them."""
        shutil.copytree(self.folder / "saved", self.folder / name)
        return self.listed(name)

    def said(self, text: str) -> str:
        """Return a message without the place of the folder on this machine."""
        for name in self.folder.iterdir():
            text = text.replace(f"{name}{os.sep}", "run/")
        return text

    def listed(self, name: str) -> list[dict[str, Any]]:
        """List the checkpoints of a run and their files. `beside`: under a temporary name, so it is no checkpoint."""
        found = []
        for folder in sorted((self.folder / name).iterdir()):
            beside = LEFTOVER.fullmatch(folder.name) is not None
            sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("rank*"))}
            shown = f"{folder.name.partition('.saving')[0]}.saving-…" if beside else folder.name
            manifest = (folder / files.MANIFEST).exists()  # whose size differs between versions of Python
            found.append({"name": shown, "beside": beside, "files": sizes, "manifest": manifest})
        return found

    def verified(self, name: str, checkpoint: str) -> dict[str, Any]:
        """Run `zeroshard ckpt verify`; return what it prints and its exit code."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = checkpoints.verify([str(self.folder / name / checkpoint)], as_json=False)
        text = self.said(out.getvalue().strip())
        return {"who": f"zeroshard ckpt verify run/{checkpoint}", "ranks": [], "code": code, "text": text}

    def goes_on(self, ranks: Sequence[Trained], first: int) -> dict[str, Any]:
        """Describe a run from step `first` to the end, which must be that of the undisturbed run, bit by bit."""
        losses = in_order(ranks)
        assert losses == self.losses[first - 1 :], f"{losses} are not {self.losses[first - 1 :]}"
        assert all(rank.weights == self.whole[0].weights for rank in ranks)
        return {"ranks": len(ranks), "first": first, "losses": losses}

    # ------------------------------------------------------------------------------------------------ a rank is killed

    def killed(self, place: str) -> dict[str, Any]:
        """Kill a rank in the middle of a step, and go on from the last checkpoint with as many ranks."""
        name, beside, schedules = f"killed-{place}", list[dict[str, Any]](), list[tuple[Schedule, float]]()

        def die() -> None:
            task = here()
            assert task is not None
            schedules.append((task.schedule, task.schedule.clock))
            beside[:] = self.listed(name)
            os.kill(os.getpid(), signal.SIGKILL)

        there: list[dict[str, Any]] = []
        with _dying_in(place, die, lambda: there.extend(self.listed(name))) as arm:
            found = self.run(name, RANKS, STAGE, range(1, STEPS + 1), arm)
        ((schedule, clock),) = schedules
        assert schedule.clock - clock < watch.ANSWERS  # of virtual time, which passes where all ranks wait
        others = [rank for rank in range(RANKS) if rank != VICTIM]
        assert not found[VICTIM].error and not found[VICTIM].weights
        before, left = in_order(found), self.listed(name)
        last = left[-1]["name"]
        assert [each["name"] for each in left] == [f"step-{EVERY}"] and not left[0]["beside"]
        first = EVERY + 1
        again = self.goes_on(self.run(name, RANKS, STAGE, range(first, STEPS + 1), loads=last), first)
        states = ["gone" if rank == VICTIM else "works" for rank in range(RANKS)]
        told = [{"who": "", "ranks": [rank], "text": self.said(found[rank].error)} for rank in others]
        beats: list[dict[str, Any]] = [
            {"key": "works", "states": ["works"] * RANKS, "shown": [LAST_STEP - 1, 0], "files": there},
            {"key": "killed", "states": states, "shown": [len(before), 0], "files": beside},
            {"key": "told", "states": [each.replace("works", "raised") for each in states],
             "shown": [len(before), 0], "said": told, "files": left},
            {"key": "left", "states": [], "shown": [len(before), 0], "files": left,
             "said": [self.verified(name, last)]},
            {"key": "resumed", "states": ["works"] * RANKS, "shown": [len(before), len(again["losses"])],
             "files": self.listed(name)},
        ]  # fmt: skip
        lines = [{"ranks": RANKS, "first": 1, "losses": before}, again]
        facts = {"rank": VICTIM, "step": LAST_STEP, "place": place, "timeout": COMM.timeout, "answers": watch.ANSWERS}
        return worded("kill", place, lines, beats, facts)

    # ----------------------------------------------------------------------------------------------- a bit has flipped

    def flipped(self, what: str) -> dict[str, Any]:
        """Flip a bit of the last checkpoint: what `verify` and `load` say, and the run from the one before it."""
        name, checkpoint = f"flipped-{what}", DAMAGED[0]
        sound, lines = self.copied(name), [self.saved]
        bit = flip(self.folder / name / checkpoint, FLIPPED.get(what))
        verified = self.verified(name, checkpoint)
        found = [Trained() for _ in range(RANKS)]
        said: list[dict[str, Any]] = [{} for _ in range(RANKS)]

        def call(rank: Rank) -> None:
            started = start(STAGE)
            zero, told, fresh = started[2], said[rank.number], weights_of(started)
            try:
                zero.load(self.folder / name / checkpoint)
            except Error as error:
                told["error"] = self.said(f"{type(error).__name__}: {error}")
            told["unchanged"] = weights_of(started) == fresh
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                newest = zero.latest(self.folder / name)
            told["warned"] = [self.said(str(vars(each)["message"])) for each in caught]
            assert newest is not None
            told["newest"] = newest.name
            zero.load(newest)
            train(started, self.folder / name, range(EVERY + 1, STEPS + 1), unarmed, found[rank.number])

        on_ranks(RANKS, call)
        assert all(told["unchanged"] and told["newest"] == f"step-{EVERY}" for told in said), said
        lines.append(self.goes_on(found, EVERY + 1))
        done, marked = [LAST_STEP, 0], {"flip": {"checkpoint": checkpoint, **bit}, "files": sound}
        errors = [{"who": "", "ranks": [rank], "text": told["error"]} for rank, told in enumerate(said)]
        warned = [{"who": "", "ranks": [rank], "text": w} for rank, told in enumerate(said) for w in told["warned"]]
        beats: list[dict[str, Any]] = [
            {"key": "works", "states": ["works"] * RANKS, "shown": done, "files": sound},
            {"key": "flipped", "states": [], "shown": done, **marked},
            {"key": "verified", "states": [], "shown": done, **marked, "said": [verified]},
            {"key": "refused", "states": ["raised"] * RANKS, "shown": done, **marked, "said": by_text(errors)},
            {"key": "passed over", "states": ["works"] * RANKS, "shown": done, **marked, "said": warned},
            {"key": "resumed", "states": ["works"] * RANKS, "shown": [LAST_STEP, len(lines[1]["losses"])],
             "files": self.listed(name)},
        ]  # fmt: skip
        return worded("flip", what, lines, beats, {"checkpoint": checkpoint, "newest": said[0]["newest"], **bit})

    # ----------------------------------------------------------------------------------------- another number of ranks

    def moved(self, ranks: int, stage: int) -> dict[str, Any]:
        """Load what `RANKS` ranks have saved on another number of ranks, at another stage, and go on."""
        name, last = f"moved-{ranks}-{stage}", f"step-{LAST_STEP}"
        saved, lines = self.copied(name), [self.saved]
        with watching_reads(self.folder / name / last, ranks) as reads:
            after = self.run(name, ranks, stage, range(LAST_STEP + 1, STEPS + 1), loads=last)
        lines.append(self.goes_on(after, LAST_STEP + 1))
        done, facts = [LAST_STEP, 0], {"ranks": ranks, "stage": stage, "micro_batches": MICRO_BATCHES}
        beats: list[dict[str, Any]] = [
            {"key": "works", "states": ["works"] * RANKS, "shown": done, "files": saved},
            {"key": "asked", "states": ["works"] * ranks, "shown": done, "files": saved},
            {"key": "read", "states": ["works"] * ranks, "shown": done, "files": saved, "reads": reads},
            {"key": "resumed", "states": ["works"] * ranks, "shown": [LAST_STEP, len(lines[1]["losses"])],
             "files": self.listed(name)},
        ]  # fmt: skip
        return worded("change", f"{ranks}-{stage}", lines, beats, facts)


def worded(
    kind: str, name: str, lines: list[dict[str, Any]], beats: list[dict[str, Any]], facts: dict[str, Any]
) -> dict[str, Any]:
    """Give each beat of a story its title and sentence."""
    beats = [{**words_of_faults.beat(kind, each["key"], facts), **each} for each in beats]
    return {"kind": kind, "name": name, "label": words_of_faults.label(kind, facts), "lines": lines, "beats": beats}


def by_text(said: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put ranks that say the same together."""
    found: dict[str, dict[str, Any]] = {}
    for each in said:
        found.setdefault(each["text"], {**each, "ranks": []})["ranks"] += each["ranks"]
    return list(found.values())


@contextlib.contextmanager
def _dying_in(place: str, die: Callable[[], None], before: Callable[[], None]) -> Iterator[Arm]:
    """Yield what arms the victim before its last step, and calls `before`: it dies in the middle of `place`."""
    armed, write = [False], saving._write_own

    def hooked(module: Any, given: Any, fed: transformer260.Fed) -> None:
        fed.out.register_hook(lambda gradient: die())

    def arm(started: Started, step: int) -> None:
        model, optimizer, zero = started
        if zero.rank != VICTIM or step != LAST_STEP:
            return
        before()
        if place == "forward":
            model.attention.register_forward_pre_hook(lambda *_: die())
        elif place == "backward":
            model.feed_forward.register_forward_hook(
                lambda _, __, fed: (fed.out.register_hook(lambda _: die()), None)[1]
            )
        elif place == "step":
            optimizer.register_step_post_hook(lambda *_: die())
        else:
            armed[0] = True

    def writing(group: Any, snapshot: Any, beside: Path) -> dict[str, Any]:
        own = write(group, snapshot, beside)
        if armed[0] and group.rank == VICTIM:  # its file is there, and no other rank knows
            die()
        return own

    saving._write_own = writing
    try:
        yield arm
    finally:
        saving._write_own = write


def flip(folder: Path, state: str | None) -> dict[str, Any]:
    """Flip one bit of a checkpoint, of an fp32 number of `state` or of a file's header, and return where and what."""
    _, name, parameter = DAMAGED
    data = bytearray((folder / name).read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    found: dict[str, Any] = {"file": name, "nbytes": len(data), "tensor": None, "was": None, "becomes": None}
    if state is None:
        at, bit = 8 + data[8 : 8 + size].index(b"F32"), 0
    else:
        with checkpoints.open_checkpoint(str(folder)) as saved:
            (entry,) = [
                each for each in saved.manifest["fragments"] if (each[0], each[1], each[-1]) == (parameter, state, name)
            ]
        first, at, bit = entry[2], entry[6] + 3, 6  # the last byte of a number has its sign and most of its exponent
        found["tensor"] = {"name": parameter, "state": state, "element": first}
        found["was"] = numbers(torch.frombuffer(data[at - 3 : at + 1], dtype=torch.float32))[0]
    before = data[at]
    data[at] ^= 1 << bit
    if state is not None:
        found["becomes"] = numbers(torch.frombuffer(data[at - 3 : at + 1], dtype=torch.float32))[0]
    (folder / name).write_bytes(data)
    return found | {"at": at, "bit": bit, "bytes": [before, data[at]]}


@contextlib.contextmanager
def watching_reads(folder: Path, ranks: int) -> Iterator[list[dict[str, Any]]]:
    """Yield one entry for each rank that loads inside: the intervals of each file that it reads into place.

    The engine's own calls are watched, as `observe` does for gathers.
    """
    found: list[dict[str, Any]] = []
    calls: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    plain = files.Reader.read

    def read(self: files.Reader, name: str, offset: int, into: memoryview, *, later: bool = False) -> None:
        task = here()
        assert task is not None and self.folder == folder
        if into.nbytes:
            calls[task.rank.number].append((name, offset, offset + into.nbytes))
        plain(self, name, offset, into, later=later)

    files.Reader.read = read  # type: ignore[method-assign]
    try:
        yield found
    finally:
        files.Reader.read = plain  # type: ignore[method-assign]
    with checkpoints.open_checkpoint(str(folder)) as saved:
        sizes = {name: facts["nbytes"] for name, facts in saved.files.items()}
        fragments = [
            (each[-1], each[6], each[6] + 4 * (each[3] - each[2] if each[3] is not None else 1), each[1])
            for each in saved.manifest["fragments"]
        ]
    for mine in calls:
        parts = sorted(set(mine))
        states: dict[str, int] = {}
        for name, start, stop in parts:
            for file, first, last, state in fragments:
                if file == name and first < stop and start < last:
                    states[state] = states.get(state, 0) + min(stop, last) - max(start, first)
        found.append({"files": {name: merged(parts, name) for name in sizes}, "states": states})


def merged(parts: Sequence[tuple[str, int, int]], name: str) -> list[list[int]]:
    """Return the intervals of one file, with those that touch as one."""
    found: list[list[int]] = []
    for _, start, stop in (each for each in parts if each[0] == name):
        if found and start <= found[-1][1]:
            found[-1][1] = max(stop, found[-1][1])
        else:
            found.append([start, stop])
    return found


def record() -> dict[str, Any]:
    """Cause every fault and return the stories, JSON-able. Runs in this process, in some seconds."""
    with ticking(), tempfile.TemporaryDirectory(prefix="zeroshard-faults-") as folder:
        recorder = Recorder(Path(folder))
        stories = [recorder.killed(place) for place in PLACES]
        stories += [recorder.flipped(what) for what in (*FLIPPED, "header")]
        stories += [recorder.moved(*each) for each in MOVED]
    return {
        "ranks": RANKS, "stage": STAGE, "steps": STEPS, "every": EVERY, "micro_batches": MICRO_BATCHES,
        "losses": recorder.losses, "stories": stories,
    }  # fmt: skip
