"""Run the steps, or one: python -m bench.gpu [--device cuda|emu|cpu] [--step N ...] [--ranks N] [--out FOLDER]"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import bundle
from .place import ENVIRONMENT, GROUPS, ROOT, Place
from .record import FAILED, PASSED, SKIPPED, UNDER_WAY, Record
from .steps import STEPS, Step

TAIL = 4000  # characters of a step's output that its file keeps


def main() -> int:
    parser = argparse.ArgumentParser(description="What a machine with GPUs is asked in its first hour.")
    parser.add_argument("--device", choices=GROUPS, default="cuda", help="emu and cpu rehearse it with small models")
    parser.add_argument("--step", type=int, nargs="+", choices=range(len(STEPS)), help="only these")
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="N", help="N ranks share fewer GPUs, where several meet"
    )
    parser.add_argument("--out", type=Path, help="default: gpu-results, and of a rehearsal gpu-results/emu")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # this process is the step's own
    options = parser.parse_args()
    place = Place.of(options.device)
    out = options.out or Path("gpu-results", *([] if place.full else [place.kind]))
    shared = Place.of(options.device, options.ranks)
    if options.inside:
        step = STEPS[options.step[0]]
        return inside(step, place if step.least == 1 else shared, out)
    if not place.count:
        parser.exit(2, "torch sees no CUDA device here: make gpu DEVICE=emu rehearses the steps\n")
    out.mkdir(parents=True, exist_ok=True)
    if options.step is None:
        for path in out.glob("[0-9][0-9]-*"):  # of an earlier run, whose tar stays
            path.unlink()
    for step in STEPS if options.step is None else [STEPS[number] for number in options.step]:
        told = one(step, place if step.least == 1 else shared, out)
        print(f"{step.number:>2} {step.name:<12} {told['verdict']}, {told['seconds']} s", flush=True)
    print(bundle.write(out))
    return int(any(each["verdict"] not in (PASSED, SKIPPED) for each in bundle.results(out)))


def inside(step: Step, place: Place, out: Path) -> int:
    record = Record(out / step.file, place, **_facts(step))
    step.load()(record)
    record.write()
    return 0


def one(step: Step, place: Place, out: Path) -> dict[str, Any]:
    """Run a step in a process of its own, and see to it that its file says how that ended."""
    path = out / step.file
    path.unlink(missing_ok=True)
    if place.count < step.least:
        record = Record(path, place, **_facts(step))
        record.skip(step.name, f"it takes {step.least} devices, and there is {place.count}")
        record.write()
        return json.loads(path.read_text())
    limit, begun = 2 * 60 * step.minutes, time.monotonic()
    log = out / f"{step.file.removesuffix('.json')}.log"
    words = ["-W", "ignore", "-m", "bench.gpu", "--inside", "--device", place.kind, "--step", str(step.number)]
    words += ["--ranks", str(place.count)] if place.share else []
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *words, "--out", str(out.absolute())],
            cwd=ROOT, env={**ENVIRONMENT, **os.environ}, start_new_session=True,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            ended = f"exit code {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {limit} s"
        finally:
            _end(process)
    told = _read(path) or {
        **_facts(step),
        **place.facts,
        "rows": [],
    }
    if told.get("verdict", UNDER_WAY) == UNDER_WAY:  # it was killed, or an exception left it
        told |= {"verdict": FAILED, "seconds": round(time.monotonic() - begun, 1)}
        told |= {"ended": ended, "output": log.read_text(errors="replace")[-TAIL:]}
        path.write_text(json.dumps(told, indent=2) + "\n")
    return told


def _end(process: subprocess.Popen[bytes]) -> None:
    """All of it: its ranks end with it, whatever they are at."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        told: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return told


def _facts(step: Step) -> dict[str, Any]:
    return {"step": step.number, "name": step.name, "asks": step.asks, "decides": step.decides}


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # so that a step that is under way ends too
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
