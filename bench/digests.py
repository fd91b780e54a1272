"""What the digests of `Offload` cost: `python -m bench.digests --where FOLDER`.

One process and two models of equal layers, bf16 with masters, optimizer states in files, the only difference their
digests. They are stepped in turn, now the one first and now the other: what else the machine does falls on both.

the step alone   `optimizer.step()`, until the last byte is written: the most that digests can cost
a whole step     also a forward and a backward, of so few tokens that the files still are most of it
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from zeroshard import Offload

from . import report
from .offload import NVME, WIDTH, Model, _timed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help=f"of {WIDTH}^2 parameters each")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=256, help="of a whole step")
    parser.add_argument("--where", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a local disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.where, prefix="bench-") as here:
        models = [
            Model(options.layers, Offload(optimizer="nvme", path=here, digests=digests), low=True)
            for digests in (False, True)
        ]
        _compare("the step alone", [model.step for model in models], options.rounds)
        tokens = torch.randn(options.tokens, WIDTH, dtype=torch.bfloat16)

        def whole(model: Model) -> None:
            model.zero.model(tokens).float().square().mean().backward()
            model.step()
            model.optimizer.zero_grad()

        _compare("a whole step", [lambda model=model: whole(model) for model in models], options.rounds)
    print(f"{NVME * options.layers * WIDTH * WIDTH:,} bytes a step, {options.tokens} tokens, {options.rounds} rounds")


def _compare(what: str, ways: list, rounds: int) -> None:
    taken: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds + 1):
        for at in (0, 1) if number % 2 else (1, 0):
            found = _timed(ways[at])
            if number:  # the first is the warm-up
                taken[at].append(found)
    for at, clock in enumerate(("seconds", "processor seconds")):
        ratios = [on[at] / off[at] for off, on in zip(*taken, strict=True)]
        off, on = (sum(each[at] for each in way) for way in taken)
        print(f"{what}, {clock}: {report.spread(ratios)} with digests over without, by round; {on / off:.3f} of all")


if __name__ == "__main__":
    main()
