"""`zeroshard demo`: the same training at stage 3, at stage 0, and resumed on other ranks, compared bit by bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape

from zeroshard.cli import explain, launch, screen
from zeroshard.cli.check import MEASURED, Check, compare, show
from zeroshard.cli.compared import journal
from zeroshard.cli.config import SIZES, InputError, Launch, RunConfig
from zeroshard.cli.resume import CHECKPOINTS
from zeroshard.cli.start import run_beside
from zeroshard.cli.working import Working
from zeroshard.layout.stage import STAGES

# Beginnings of single lines: a model of this size cannot count the blanks of an indented block.
PROMPTS = ("def ", "class ", "import ", "from ", "if ", "for ", "return ", "raise ", "self.", "# ")
LINE_NBYTES = 76


def demo(*, steps: int, ranks: int, seed: int, out: str, verbose: bool) -> int:
    if Launch.from_environment():
        raise InputError("demo starts its own ranks; run it without torchrun")
    runs = {stage: Path(out) / f"stage{stage}" for stage in (3, 0)}
    stopped = steps - max(1, steps // 10)  # 0 where there is nothing to go on with
    sharded = RunConfig(
        out=str(runs[3]),
        data=(),
        stage=3,
        ranks=ranks,
        steps=steps,
        batch=16,
        accumulate=1,
        precision="fp32",
        size="tiny",
        lr=SIZES["tiny"].lr,
        seed=seed,
        device="cpu",
        report=verbose,
        save_every=stopped,
        keep=2,
        resume="",
    )
    configs = [sharded, replace(sharded, out=str(runs[0]), stage=0, report=False, save_every=0)]
    if stopped:
        # Sums over ranks are divided once, so two numbers of ranks give the same bits where both are powers of two.
        fewer = ranks // 2 if ranks > 1 and ranks & (ranks - 1) == 0 else ranks
        checkpoint = runs[3] / CHECKPOINTS / f"step-{stopped:08d}"
        again = replace(
            sharded, out=str(Path(out) / "resumed"), stage=1, ranks=fewer, accumulate=ranks // fewer, report=False,
            save_every=0, resume=str(checkpoint),
        )  # fmt: skip
        configs.append(again)
    for config in configs:
        if code := run_beside(config):
            return code
    verdict = {"memory": _memory(runs[3], runs[0]), "bits": same_bits(runs[3], runs[0], "stages 3 and 0")}
    if stopped:
        one, other = screen.ranks_text(ranks), screen.ranks_text(fewer)
        where = f"from step {stopped}, saved on {one} at stage 3, on {other} at stage 1"
        verdict["resumed"] = same_bits(runs[3], Path(again.out), where, stopped)
    rows = compare(Check(job="zeroshard.cli.model:demo_job", ranks=ranks, stages=tuple(STAGES)))
    if isinstance(rows, int):
        return rows
    verdict["planned"] = _planned(rows)
    with Working(("sampling a text, and writing the page", None)):
        lines = _sample(runs[3], seed, PROMPTS if verbose else PROMPTS[:1])
        page = explain.write((runs[3], runs[0]))
    if verbose:
        _show_all(rows, lines)
    verdict["writes"] = Verdict(equal=True, words=lines[0])
    verdict["page"] = Verdict(equal=True, words=str(page))
    screen.say("")
    for name, (equal, words) in verdict.items():
        colour = "green" if equal else "bold red"
        screen.say(f"  [{colour}]{name:<7}[/{colour}] {escape(words)}", 10)
    screen.say("")
    return 0 if all(equal for equal, _ in verdict.values()) else launch.FAILED


def _show_all(rows: list[dict[str, Any]], lines: Sequence[str]) -> None:
    screen.say("\n[bold]What the planner says of this model, beside a run at every stage[/bold]")
    show(rows)
    screen.say("\n[bold]What the model writes, a line after each beginning[/bold]\n")
    for line in lines:
        screen.console.print(f"  {line}", markup=False, style="cyan", soft_wrap=True)


class Verdict(NamedTuple):
    """One line at the end of the demo."""

    equal: bool
    words: str


def _memory(sharded: Path, plain: Path) -> Verdict:
    held = [_held_by_rank_0(run) for run in (sharded, plain)]
    words = f"rank 0 holds {held[0]:,} bytes of model state at stage 3, {held[1]:,} at stage 0"
    return Verdict(equal=True, words=f"{words}: {held[1] / held[0]:.2f} times")


def _planned(rows: list[dict[str, Any]]) -> Verdict:
    counted = [row for row in rows if row["what"] not in MEASURED]
    off = [row for row in counted if row["difference"]]
    if not off:
        return Verdict(
            equal=True, words=f"{len(counted)} predictions, at rest and at every peak of 4 stages: held to the byte"
        )
    first = f"stage {off[0]['stage']}, rank {off[0]['rank']}, {off[0]['what']}: {off[0]['difference']:+,} bytes"
    return Verdict(equal=False, words=f"{len(off)} of {len(counted)} predictions differ, the first at {first}")


def same_bits(one: Path, other: Path, which: str, start: int = 0) -> Verdict:
    """Compare two runs, told of as `which`: the weights, and losses and gradient norms after step `start`."""
    journals = [journal(run)[start:] for run in (one, other)]
    digests = [hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest() for run in (one, other)]
    first = next((at for at, (a, b) in enumerate(zip(*journals, strict=True)) if a != b), None)
    count = len(journals[0])
    if first is None and digests[0] == digests[1]:
        equal = f"{screen.many(count, 'loss', 'es')}, {screen.many(count, 'gradient norm')}, all weights equal"
        return Verdict(equal=True, words=f"{which}: {equal} (sha256 {digests[0][:16]})")
    weights = "equal" if digests[0] == digests[1] else "different"
    losses = "equal" if first is None else f"at step {start + first + 1} {journals[0][first]} and {journals[1][first]}"
    return Verdict(equal=False, words=f"{which}: weights {weights}; losses and norms {losses}")


def _held_by_rank_0(run: Path) -> int:
    rank_0 = json.loads((run / "ledger.json").read_text(encoding="utf-8"))["ranks"][0]
    return sum(rank_0["held"][state] for state in rank_0["predicted"])


def _sample(run: Path, seed: int, prompts: Sequence[str]) -> list[str]:
    """Sample text from the saved weights in the plain model, without zeroshard: the file is all that it takes."""
    import torch
    from safetensors.torch import load_file

    from zeroshard.cli.model import GPT, complete_line

    model = GPT(SIZES["tiny"])
    model.load_state_dict(load_file(run / "model.safetensors"))
    generator = torch.Generator().manual_seed(seed)
    return [complete_line(model, prompt, most=LINE_NBYTES, temperature=0.6, generator=generator) for prompt in prompts]
