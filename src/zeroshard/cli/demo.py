"""`zeroshard demo`: the same training at stage 3, at stage 0, and resumed on other ranks, compared bit by bit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from zeroshard.cli import explain, launch, screen
from zeroshard.cli.check import Check, check
from zeroshard.cli.compared import journal
from zeroshard.cli.config import SIZES, InputError, Launch, RunConfig
from zeroshard.cli.resume import CHECKPOINTS
from zeroshard.cli.start import run_beside
from zeroshard.stage import STAGES

# Beginnings of single lines: a model of this size cannot count the blanks of an indented block.
PROMPTS = ("def ", "class ", "import ", "from ", "if ", "for ", "return ", "raise ", "self.", "# ")
LINE_NBYTES = 76


def demo(*, steps: int, ranks: int, seed: int, out: str) -> int:
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
        report=True,
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
    screen.console.print()
    code = compare(runs[3], runs[0])
    if stopped:
        screen.say(
            f"\nFrom the checkpoint of step {stopped}, saved on {screen.ranks_text(ranks)} at stage 3, resumed on "
            f"{screen.ranks_text(fewer)} at stage 1, beside the run that went straight on:"
        )
        code = same_bits(runs[3], Path(again.out), stopped) or code
    screen.say("\n[bold]What the planner says of this model, beside a run at every stage[/bold]")
    planned = check(Check(job="zeroshard.cli.model:demo_job", ranks=ranks, stages=tuple(STAGES)))
    if planned not in (0, launch.FAILED):
        return planned
    code = code or planned
    screen.say("\n[bold]What the model writes, a line after each beginning[/bold]\n")
    for line in _sample(runs[3], seed):
        screen.console.print(f"  {line}", markup=False, style="cyan", soft_wrap=True)
    screen.say(f"\nBoth runs compared, and ZeRO number by number: {explain.write((runs[3], runs[0]))}\n")
    return code


def compare(sharded: Path, plain: Path) -> int:
    """Return exit code 0 where both runs have the same weights, losses and gradient norms, bit for bit, else 1."""
    held = [_held_by_rank_0(run) for run in (sharded, plain)]
    times = held[1] / held[0]
    screen.say(f"Rank 0 holds {held[1]:,} bytes of model state at stage 0, {times:.2f} times as many as at stage 3.")
    return same_bits(sharded, plain)


def same_bits(one: Path, other: Path, start: int = 0) -> int:
    """Return exit code 0 where the weights are the same, and losses and norms after step `start`, else 1."""
    journals = [journal(run)[start:] for run in (one, other)]
    digests = [hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest() for run in (one, other)]
    first = next((at for at, (a, b) in enumerate(zip(*journals, strict=True)) if a != b), None)
    count = len(journals[0])
    if first is None and digests[0] == digests[1]:
        equal = f"{count} losses, {count} gradient norms, all weights (sha256 {digests[0][:16]})"
        screen.say(f"[bold green]The bits are equal:[/bold green] {equal}.")
        return 0
    weights = "equal" if digests[0] == digests[1] else "different"
    losses = "equal" if first is None else f"at step {start + first + 1} {journals[0][first]} and {journals[1][first]}"
    screen.say(f"[bold red]The bits differ:[/bold red] weights {weights}; losses and norms {losses}.")
    return 1


def _held_by_rank_0(run: Path) -> int:
    rank_0 = json.loads((run / "ledger.json").read_text(encoding="utf-8"))["ranks"][0]
    return sum(rank_0["held"][state] for state in rank_0["predicted"])


def _sample(run: Path, seed: int) -> list[str]:
    """Sample text from the saved weights in the plain model, without zeroshard: the file is all that it takes."""
    import torch
    from safetensors.torch import load_file

    from zeroshard.cli.model import GPT, complete_line

    model = GPT(SIZES["tiny"])
    model.load_state_dict(load_file(run / "model.safetensors"))
    generator = torch.Generator().manual_seed(seed)
    return [complete_line(model, prompt, most=LINE_NBYTES, temperature=0.6, generator=generator) for prompt in PROMPTS]
