"""Run drawn cases, or one again. In tests/:

python -m world drawn --seeds 100 [--first 0]      cases of `drawn.py`; a failing one with the command to run it again
python -m world replay SEED [--events 40]          that case, and the last steps of its schedule in words
python -m world planted --seeds 1000 [--bug 3]     the same with each bug of `planted.py` in a copy of the engine
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEMORY = "/dev/shm"  # a folder whose files are in memory


def main() -> None:
    """Run the command."""
    from zeroshard.policies import comm

    comm.AUTO = "gloo"  # as in a test
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    many = verbs.add_parser("drawn")
    many.add_argument("--seeds", type=int, default=100)
    many.add_argument("--first", type=int, default=0)
    many.add_argument("--until-wrong", action="store_true", help="stop at the first case that fails")
    many.add_argument("--begins", action="store_true", help="say which seed begins, for it may end the interpreter")
    one = verbs.add_parser("replay")
    one.add_argument("seed", type=int)
    one.add_argument("--events", type=int, default=20)
    bugs = verbs.add_parser("planted")
    bugs.add_argument("--seeds", type=int, default=1000)
    bugs.add_argument("--first", type=int, default=0)
    bugs.add_argument("--bug", type=int, help="one of them, by its place in the list")
    bugs.add_argument("--rate", action="store_true", help="how many of the seeds find it, not which one does first")
    asked = parser.parse_args()
    if asked.verb == "planted":
        sys.exit(planted(asked.first, asked.seeds, asked.bug, rate=asked.rate))
    if os.access(MEMORY, os.W_OK):
        tempfile.tempdir = MEMORY  # a disk would take most of the time, by `fsync`, and show nothing more
    from ranks import RankFailure
    from world.drawn import alone

    with contextlib.suppress(RankFailure):  # where a bug was planted
        alone(0)  # imports what is imported late: all of it need not be looked at whenever garbage is collected
    gc.collect()
    gc.freeze()
    if asked.verb == "replay":
        sys.exit(replay(asked.seed, asked.events))
    sys.exit(several(asked.first, asked.seeds, until_wrong=asked.until_wrong, begins=asked.begins))


def replay(seed: int, events: int) -> int:
    """Run one case, and say what happened in it."""
    from world.drawn import find

    found = find(seed)
    last = found.ran.before or found.ran.events
    print(*last[-events:], sep="\n")
    if found.ran.before:
        print("... and so on to the end, of which the last was:", *found.ran.events[-3:], sep="\n")
    print(told(found))
    return int(found.wrong)


def several(first: int, seeds: int, *, until_wrong: bool, begins: bool) -> int:
    """Run many cases, and say how they ended."""
    from world.drawn import find

    counted: collections.Counter[tuple[str, str]] = collections.Counter()
    digests, struck, wrong, begun, worked = set(), 0, 0, time.monotonic(), time.process_time()
    cores = os.sched_getaffinity(0)
    for seed in range(first, first + seeds):
        _stay_on_one(cores)
        if begins:
            print(f"begins {seed}", file=sys.stderr, flush=True)
        try:
            found = find(seed)
        except KeyboardInterrupt:  # of who runs this: say what was drawn so far
            break
        counted[found.case.faults, found.outcome] += 1
        digests.add(found.ran.digest)
        struck += bool(found.ran.struck)
        if found.wrong:
            wrong += 1
            print(f"{told(found)}\n    again: python -m world replay {seed}    (at {_commit()})", flush=True)
            if until_wrong:
                break
    seeds, worked, begun = sum(counted.values()), time.process_time() - worked, time.monotonic() - begun
    print(
        f"{seeds} seeds, {len(digests)} schedules, {struck} struck by a fault, {wrong} wrong; {begun:.0f} s, of which "
        f"{worked:.0f} of the processor: {3600 * seeds / worked:,.0f} an hour"
    )
    for (faults, outcome), times in sorted(counted.items()):
        print(f"{times:6} {faults}: {outcome}")
    return int(wrong > 0)


def planted(first: int, seeds: int, only: int | None, *, rate: bool) -> int:
    """Put each bug into a copy of the package, and draw until it is found; rate: all seeds, and count those that find it."""
    import zeroshard
    from world.planted import BUGS

    found, chosen = 0, [(at, bug) for at, bug in enumerate(BUGS) if only in (None, at)]
    for at, bug in chosen:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "zeroshard")
            shutil.copytree(Path(zeroshard.__file__).parent, copy)
            text = (copy / bug.file).read_text()
            if text.count(bug.was) != 1:
                print(f"{at:3} its place is gone: {bug.name}: look for it in {bug.file}", flush=True)
                continue
            (copy / bug.file).write_text(text.replace(bug.was, bug.becomes))
            where = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
            begun, wrong, crashed, words = first, 0, 0, ""
            while begun < first + seeds:
                asks = ["drawn", f"--seeds={first + seeds - begun}", f"--first={begun}", "--begins"]
                done = subprocess.run(
                    [sys.executable, "-m", "world", *asks, *([] if rate else ["--until-wrong"])],
                    env=where, text=True, capture_output=True, check=False,
                )  # fmt: skip
                begun += sum(line.startswith("begins ") for line in done.stderr.splitlines())
                wrong += done.stdout.count("    again: python -m world replay ")
                words = words or done.stdout or "\n".join(done.stderr.splitlines()[-3:])
                if done.returncode in (0, 1) and "an hour" in done.stdout:
                    break
                crashed += 1
                if not rate or "begins " not in done.stderr:
                    break
        found += wrong + crashed > 0
        ends = f", {crashed} of them by the end of the interpreter" if crashed else ""
        if not wrong + crashed:
            print(f"{at:3} not found in {seeds}: {bug.name}", flush=True)
        elif rate:
            print(f"{at:3} found by {wrong + crashed} of {begun - first}{ends}: {bug.name}", flush=True)
        else:
            print(f"{at:3} found after {begun - first}{ends.replace(' 1 of them', '')}: {bug.name}", flush=True)
        shown = [line for line in words.splitlines() if wrong + crashed][: 2 if rate else 4]
        print(*(f"      {line.strip()[:200]}" for line in shown), sep="\n", end="\n" * bool(shown), flush=True)
    print(f"{found} of {len(chosen)} found")
    return int(found < len(chosen))


def told(found) -> str:
    """Say what became of a case."""
    ran = found.ran
    lines = [f"{found.case}", *(f"    {each}" for each in ran.struck), f"    {found.outcome}"]
    lines += [f"    {line}" for line in found.words.splitlines()] if found.wrong else []
    return "\n".join(
        [*lines, f"    schedule {ran.digest}: {ran.hand_overs} hand-overs, {ran.clock:.3f} virtual seconds"]
    )


def _stay_on_one(cores: set[int]) -> None:
    """Have all threads stay on one core, of these: one runs at a time, and handing on to another core is a fifth of all
    work. The system chooses it, by what else is running."""
    os.sched_setaffinity(0, cores)
    time.sleep(0.001)  # on awakening
    os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})


def _commit() -> str:
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
