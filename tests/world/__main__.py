"""Run drawn cases, or one again. In tests/:

python -m world drawn --seeds 100 [--first 0]      cases of `drawn.py`; a failing one with the command to run it again
python -m world replay SEED [--events 40]          that case, and the last steps of its schedule in words
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import time


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    many = verbs.add_parser("drawn")
    many.add_argument("--seeds", type=int, default=100)
    many.add_argument("--first", type=int, default=0)
    one = verbs.add_parser("replay")
    one.add_argument("seed", type=int)
    one.add_argument("--events", type=int, default=20)
    asked = parser.parse_args()
    sys.exit(replay(asked.seed, asked.events) if asked.verb == "replay" else several(asked.first, asked.seeds))


def replay(seed: int, events: int) -> int:
    """Run one case, and say what happened in it."""
    from world.drawn import find

    found = find(seed)
    print(*found.ran.events[-events:], sep="\n")
    print(told(found))
    return int(found.wrong)


def several(first: int, seeds: int) -> int:
    """Run many cases, and say how they ended."""
    from world.drawn import find

    counted: collections.Counter[tuple[str, str]] = collections.Counter()
    digests, struck, wrong, begun = set(), 0, 0, time.monotonic()
    for seed in range(first, first + seeds):
        found = find(seed)
        counted[found.case.faults, found.outcome] += 1
        digests.add(found.ran.digest)
        struck += bool(found.ran.struck)
        if found.wrong:
            wrong += 1
            print(f"{told(found)}\n    again: python -m world replay {seed}    (at {_commit()})", flush=True)
    print(
        f"{seeds} seeds, {len(digests)} schedules, {struck} struck by a fault, {wrong} wrong; {time.monotonic() - begun:.0f} s"
    )
    for (faults, outcome), times in sorted(counted.items()):
        print(f"{times:6} {faults}: {outcome}")
    return int(wrong > 0)


def told(found) -> str:
    """Say what became of a case."""
    ran = found.ran
    lines = [f"{found.case}", *(f"    {each}" for each in ran.struck), f"    {found.outcome}"]
    lines += [f"    {line}" for line in found.words.splitlines()] if found.wrong else []
    return "\n".join(
        [*lines, f"    schedule {ran.digest}: {ran.hand_overs} hand-overs, {ran.clock:.3f} virtual seconds"]
    )


def _commit() -> str:
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
