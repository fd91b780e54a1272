"""The faults that the page causes: what is recorded of them is what real processes do, and holds nothing of a machine."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from walkthroughs import faults260
from walkthroughs.faults260 import EVERY, LAST_STEP, PLACES, RANKS, STAGE, STEPS, VICTIM, Trained

from zeroshard.checkpoint.files import MANIFEST
from zeroshard.errors import PeerError
from zeroshard.explain import document

PATIENT = {"group": "env", "timeout": 60.0, "expect_errors": True}


@pytest.fixture(scope="module")
def recorded():
    return document.built_in()["faults"]


def beats(recorded, kind, name):
    (story,) = (each for each in recorded["stories"] if (each["kind"], each["name"]) == (kind, name))
    return {beat["key"]: beat for beat in story["beats"]}


def killed(place: str, folder: str) -> tuple[list[list[float]], str]:
    """One rank of the recorded run: a real process, which `SIGKILL` ends if it is the victim."""
    trained, die = Trained(), lambda: os.kill(os.getpid(), signal.SIGKILL)
    with faults260._dying_in(place, die, lambda: None) as arm:
        faults260.train(faults260.start(STAGE), Path(folder), range(1, STEPS + 1), arm, trained)
    return trained.losses, trained.error


@pytest.mark.processes
@pytest.mark.parametrize("place", [*PLACES[:1], *(pytest.param(each, marks=pytest.mark.full) for each in PLACES[1:])])
def test_real_processes_say_what_is_recorded(ranks, recorded, tmp_path, place):
    """kill -9 of a process: the others name it as in the recording, in the same step, and leave the same folders."""
    outcomes = ranks.run(RANKS, killed, place, str(tmp_path), **PATIENT)
    assert outcomes[VICTIM].type == "Died" and "SIGKILL" in outcomes[VICTIM].message
    told = beats(recorded, "kill", place)["told"]
    assert told["states"] == ["gone" if rank == VICTIM else "raised" for rank in range(RANKS)]
    for said in told["said"]:
        (rank,) = said["ranks"]
        losses, error = outcomes[rank]
        assert error.splitlines()[0] == said["text"].splitlines()[0]
        assert error.startswith(f"{PeerError.__name__}: a collective did not complete: rank {VICTIM} is gone")
        where = f"  where: rank {rank}: step "
        assert error.splitlines()[1].startswith(where) and said["text"].splitlines()[1].startswith(where)
        assert len(losses) in (LAST_STEP - 1, LAST_STEP)
    left = {name: (tmp_path / name / MANIFEST).exists() for name in os.listdir(tmp_path)}
    assert left == {each["name"]: each["manifest"] for each in told["files"]} == {f"step-{EVERY}": True}


def test_a_recording_holds_nothing_of_the_machine(recorded):
    """No place on a disk, no number of a process and no time; and little of everything."""
    text = document.embedded(recorded)
    assert len(text) < 100_000
    assert not re.search(r"/(tmp|home|root|dev|work)/|zeroshard-faults|[0-9]{4}-[0-9]{2}-[0-9]{2}", text)
    names = {each["name"] for story in recorded["stories"] for beat in story["beats"] for each in beat["files"]}
    assert names == {"step-2", "step-4", "step-6", ".step-4.saving-…"}


def test_each_story_ends_as_the_run_that_was_never_stopped(recorded):
    """The losses of all micro-batches, bit by bit, from the checkpoint that was loaded to the last step."""
    for story in recorded["stories"]:
        before, after = story["lines"]
        assert before["losses"] == recorded["losses"][: len(before["losses"])]
        assert after["losses"] == recorded["losses"][after["first"] - 1 :]
        assert all(len(step) == recorded["micro_batches"] for step in after["losses"])


@pytest.mark.parametrize("what", [*faults260.FLIPPED, "header"])
def test_a_flipped_bit_is_found_by_all_that_read_it(recorded, what):
    """`ckpt verify` names the file and exits with 1, all ranks refuse to load it, and the one before it is found."""
    found = beats(recorded, "flip", what)
    flip = found["flipped"]["flip"]
    assert flip["bytes"][0] ^ flip["bytes"][1] == 1 << flip["bit"] and 0 <= flip["at"] < flip["nbytes"]
    (verified,), (refused,), (warned,) = (found[key]["said"] for key in ("verified", "refused", "passed over"))
    assert verified["code"] == 1 and f"damaged: {flip['file']}" in verified["text"]
    assert refused["ranks"] == [*range(RANKS)] and "nothing was changed" in refused["text"]
    for said in (refused, warned):
        assert f"run/{flip['checkpoint']}/{flip['file']}" in said["text"]


@pytest.mark.parametrize(("ranks_of", "stage"), faults260.MOVED)
def test_new_ranks_read_what_they_keep_and_nothing_twice(recorded, ranks_of, stage):
    """Bytes of each state, over all ranks: once where it is sharded, once for each rank where it is not."""
    reads = beats(recorded, "change", f"{ranks_of}-{stage}")["read"]["reads"]
    assert len(reads) == ranks_of
    whole = 4 * 260
    for state, sharded in (("value", stage == 3), ("exp_avg", stage > 0), ("exp_avg_sq", stage > 0)):
        assert sum(read["states"][state] for read in reads) == whole * (1 if sharded else ranks_of)
    for read in reads:
        spans = [span for file in read["files"].values() for span in file]
        assert sum(stop - start for start, stop in spans) == sum(read["states"].values())
