"""The recorded faults in words: what each beat of a story is. Messages are the engine's own, from the recording."""

from __future__ import annotations

from typing import Any

PLACES = {
    "forward": "in forward",
    "backward": "in backward",
    "step": "in Adam",
    "save": "in the save",
}
STATES = {"value": "weight", "exp_avg": "m", "exp_avg_sq": "v"}


def label(kind: str, facts: dict[str, Any]) -> str:
    """Name one of a kind's stories, for the button that chooses it."""
    if kind == "kill":
        return PLACES[facts["place"]]
    if kind == "flip":
        return "of the file's header" if facts["tensor"] is None else f"of {_number_of(facts)}"
    return f"{_ranks(facts['ranks'])}, stage {facts['stage']}"


def _ranks(count: int) -> str:
    return f"{count} rank" + "s" * (count != 1)


def _number_of(facts: dict[str, Any]) -> str:
    return "a weight" if facts["tensor"]["state"] == "value" else f"Adam's {STATES[facts['tensor']['state']]}"


def beat(kind: str, key: str, facts: dict[str, Any]) -> dict[str, str]:
    """Return a beat's title, one word for its chapter, and its sentences."""
    short, title, says = {"kill": _kill, "flip": _flip, "change": _change}[kind](key, facts)
    return {"short": short, "title": title, "says": says}


def _kill(key: str, facts: dict[str, Any]) -> tuple[str, str, str]:
    rank, step, place = facts["rank"], facts["step"], PLACES[facts["place"]]
    written = (
        "Its own file of the new checkpoint is written, beside the last one and under a temporary name. The others do "
        "not know it yet."
        if facts["place"] == "save"
        else ""
    )
    return {
        "works": (
            "Training", "Four ranks train, and save after every second step",
            "Each rank has a quarter of the weights, gradients and Adam's states, and one of the four micro-batches.",
        ),
        "killed": (
            "Kill", f"kill -9 on rank {rank}, {place} of step {step}",
            "The process ends between two instructions, as when the machine runs out of memory. It says nothing and "
            f"writes nothing more. {written}".strip(),
        ),
        "told": (
            "Errors", "What each other rank reports",
            "The system closes a dead rank's connections, and its peers see that at once. Each asks every other rank "
            f"what it does; the answer has to come within {facts['answers']:g} s. None of them waits for its time-out, "
            f"here {facts['timeout']:g} s: that is for a rank that is stopped and not dead.",
        ),
        "left": (
            "Files", "Nothing is half saved",
            "What a save had begun was never under a checkpoint's name, and is removed. The last checkpoint is as it "
            "was, to the last byte.",
        ),
        "resumed": (
            "Resume", "A new start loads the last checkpoint",
            "zero.load(zero.latest(\"run\")) on four ranks. The steps after that checkpoint are done again. "
            "Each loss has the bits of the run that was never stopped, and so have the weights after the last step.",
        ),
    }[key]  # fmt: skip


def _flip(key: str, facts: dict[str, Any]) -> tuple[str, str, str]:
    damaged, newest = f"run/{facts['checkpoint']}", f"run/{facts['newest']}"
    what = (
        "It lies in the file's own list of tensors, in the name of a dtype."
        if facts["tensor"] is None
        else "It is the highest bit of the exponent. It is still a valid number, and without a digest it would "
        "be loaded."
    )
    return {
        "works": (
            "Training", "Four ranks have trained and saved",
            "Each rank has written its own file. The manifest has a digest of every block of every file.",
        ),
        "flipped": ("Flip", f"A bit {label('flip', facts)} flips in {damaged}", what),
        "verified": (
            "Verify", "zeroshard ckpt verify reads every byte",
            "It needs no model and no ranks. Its exit code is 1 where anything is damaged.",
        ),
        "refused": (
            "Load", "zero.load refuses, on every rank",
            "One rank finds the wrong digest, and all raise. Each rank has checked all that it needs before any rank "
            "changes a byte: the weights in memory are as they were, compared bit by bit.",
        ),
        "passed over": (
            "Earlier one", f"zero.latest passes it over and returns {newest}",
            "It looks from the newest to the oldest, and returns the first of which every byte is right.",
        ),
        "resumed": (
            "Resume", f"The run goes on from {newest}",
            "Two steps are lost and done again. Each loss has the bits of the undisturbed run, and so have the weights "
            "after the last step. The new save has replaced the damaged checkpoint.",
        ),
    }[key]  # fmt: skip


def _change(key: str, facts: dict[str, Any]) -> tuple[str, str, str]:
    ranks, stage = facts["ranks"], facts["stage"]
    turns = facts["micro_batches"] // ranks
    kept = {
        0: "all weights, and all of Adam's m and v",
        1: "all weights, and Adam's m and v of its part",
        3: "its part of the weights, and Adam's m and v of that part",
    }[stage]
    return {
        "works": (
            "Save", "Four ranks save at stage 3",
            "Each rank writes what it owns: weights, Adam's m and v, and step counters, of its quarter of every layer.",
        ),
        "asked": (
            "Start", f"{_ranks(ranks)} at stage {stage} load{'s' * (ranks == 1)} it",
            f"At stage {stage} a rank keeps {kept}. No file is converted: the manifest says which elements of which "
            "tensor lie where.",
        ),
        "read": (
            "Read", "Which bytes each new rank reads",
            "Each rank finds the elements that it needs in the manifest, and reads these bytes into place. Before "
            "that it checks the digests of the blocks that they lie in. A block has 4 MiB, so here each is a whole "
            "file.",
        ),
        "resumed": (
            "Go on", "The losses go on",
            f"A step still has four micro-batches: {turns} on each rank, added up in the same order. The losses and "
            "the weights after the last step have the bits of the four ranks' run. That holds on 1, 2, 4, 8 ... ranks, "
            "which divide without rounding.",
        ),
    }[key]  # fmt: skip
