"""Settings beside each other, interleaved: `python -m bench.pairs fp8`; each takes under a minute.

fp8      stage 3: weights of linear layers in 8 bits, beside 16-bit parameters stored beside their masters
split    stage 2: split masters, beside whole ones
muon     stage 3: Muon of the blocks' matrices, beside DDP's, where each rank updates all of them, and FSDP2's

Ratios are over the first of each, round by round. Columns are those of `bench.train`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import report, train

PAIRS = {
    "fp8": ("bf16", ["zeroshard 3, stored", "zeroshard 3, weights in 8 bits"]),
    "split": ("bf16", ["zeroshard 2", "zeroshard 2, split masters"]),
    "muon": ("fp32", ["DDP, Muon", "FSDP2, Muon", "zeroshard 3, Muon"]),
}


def measure(which: str, options: argparse.Namespace) -> None:
    dtype, names = PAIRS[which]
    rows = []
    for row in train.group(names, options.size, dtype == "bf16", options.ranks, options):
        losses = row.pop("losses")
        other: dict[str, Any] = {key.replace("the limit", "the first"): value for key, value in row.items()}
        rows.append({**other, "final loss": f"{losses[-1]:.6f}"})
    notes = [
        f"{options.rounds} interleaved rounds of {options.steps} timed steps: medians, least and most ratio over the "
        "first.",
        "Every rank runs where the kernel puts it." if options.free else "Every rank is bound to one core.",
        "The machine was shared with other work: compare ratios alone.",
    ]
    facts = {"rounds": options.rounds, "steps": options.steps, "bound": not options.free}
    report.write(options.out, f"pairs-{which}", facts, rows, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs", nargs="*", metavar="PAIR", default=[*PAIRS], help=", ".join(PAIRS))
    parser.add_argument("--size", choices=train.SIZES, default="10M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a back-end in a round")
    parser.add_argument("--free", action="store_true", help="ranks run on whichever cores the kernel picks")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    if unknown := {*options.pairs} - {*PAIRS}:
        parser.error(f"no such pair: {', '.join(sorted(unknown))}; one of {', '.join(PAIRS)}")
    for which in options.pairs:
        measure(which, options)


if __name__ == "__main__":
    main()
