"""The same training by zeroshard as two source trees have it, interleaved: `python -m bench.trees OLD`, a work tree.

    git worktree add --detach ../old 465a0c6; python -m bench.trees ../old

Rank processes of both trees, and once more of this one, train in turn, a few steps each. Ratios are those of medians
over all rounds, to the old tree's; what the second set of this tree differs from the first by is the noise.

CPU     processor time of a rank's step, communication threads included: what a busy machine cannot hide
step    how long a step took on the slower rank
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import backends, report
from .model import GPT, SIZES, batch
from .ranks import Ranks

HERE = Path(__file__).parents[1]
STAGES = (0, 1, 2, 3)


class Held:
    """One rank of one tree."""

    def __init__(self, tree: str, backend: str, size: str, low: bool) -> None:
        import zeroshard

        assert Path(zeroshard.__file__).is_relative_to(tree), zeroshard.__file__
        self.size = SIZES[size]
        torch.manual_seed(0)
        self._train = backends.load(backend)(GPT(self.size), low=low)
        self._steps = 0

    def steps(self, count: int) -> list[tuple[float, float, float]]:
        """Of each step how long it took, processor time, and the loss."""
        done = []
        for _ in range(count):
            self._steps += 1
            tokens_BT = batch(self.size, self._steps, dist.get_rank(), dist.get_world_size())
            used, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            loss = self._train.backward(tokens_BT)
            self._train.update()
            seconds, now = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
            cpu = now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime
            done.append((seconds, cpu, loss.item()))
        return done


def measure(old: Path, stage: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each set of ranks."""
    own, trees = [*sys.path], {"old": old, "new": HERE, "new again": HERE}
    held, backend = {}, f"zeroshard {stage}" + (", shared memory" if options.transport == "shared" else "")
    for name, tree in trees.items():
        sys.path[:] = [str(tree / "src"), *own]  # a new process takes it over
        held[name] = Ranks(2, Held, str(tree), backend, options.size, options.dtype == "bf16", bound=True)
    sys.path[:] = own
    steps: dict[str, list[float]] = {name: [] for name in trees}
    cpu: dict[str, list[float]] = {name: [] for name in trees}
    losses: dict[str, list[float]] = {name: [] for name in trees}
    for ranks in held.values():
        ranks("steps", 2)  # the first has optimizers make their state
    for number in range(options.rounds):
        for at in range(len(trees)):
            name = [*trees][(number + at) % len(trees)]
            done = held[name]("steps", options.steps + 1)
            losses[name] += [loss for ranks in done for _, _, loss in ranks]
            timed = [ranks[1:] for ranks in done]  # the first finds another's data in the caches
            steps[name] += [max(each[0] for each in ranks) for ranks in zip(*timed, strict=True)]
            cpu[name] += [each[1] for ranks in timed for each in ranks]
    for ranks in held.values():
        ranks.close()
    middle = {name: (statistics.median(cpu[name]), statistics.median(steps[name])) for name in trees}
    return [
        {
            "model": options.size, "dtype": options.dtype, "ranks": 2, "stage": stage, "tree": name,
            "CPU ms": round(1e3 * middle[name][0], 1), "step ms": round(1e3 * middle[name][1], 1),
            "CPU over old": f"{middle[name][0] / middle['old'][0]:.3f}",
            "step over old": f"{middle[name][1] / middle['old'][1]:.3f}",
            "losses": "same bits" if losses[name] == losses["old"] else "others",
        }
        for name in trees
    ]  # fmt: skip


def commit(tree: Path) -> str:
    asked = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path, help="a work tree of the commit to compare with")
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--transport", choices=["gloo", "shared"], default="gloo")
    parser.add_argument("--stages", nargs="+", type=int, default=[*STAGES])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a tree in a round")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    old, rows = options.old.resolve(), []
    facts = {"old": commit(old), "new": commit(HERE), "rounds": options.rounds, "steps": options.steps}
    notes = [
        f"old: commit {facts['old']}; new: {facts['new']}.",
        f"{options.rounds} interleaved rounds of {options.steps} timed steps: ratios of medians over all of them.",
        f"{options.transport}, one thread per rank, every rank bound to one core. losses: of all steps, against the "
        "old tree's.",
    ]
    for stage in options.stages:
        rows += measure(old, stage, options)
        report.write(options.out, "trees" if options.transport == "gloo" else "trees-shared", facts, rows, notes)


if __name__ == "__main__":
    main()
