"""The start of a run of `zeroshard train`: as one of torchrun's ranks, as the only rank, or by starting ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zeroshard.cli import launch
from zeroshard.cli.config import PLACED, Launch, RunConfig

if TYPE_CHECKING:
    from zeroshard.cli.data import Corpus


def run_training(config: RunConfig, place: Launch | None) -> int:
    """Run a training; return its exit code. Ranks that are started come back here as torchrun's."""
    from zeroshard.cli.data import make_writable, read_corpus  # numpy, which `plan` does not wait for

    if place is None:
        launch.check_ranks(config.ranks)
        if any((config.offload_path, *(getattr(config, f"offload_{what}") for what in PLACED))):
            _ = config.offload  # a refusal leaves no folder behind
    corpus = read_corpus(config.data, context=config.shape.context)
    if place is None or place.rank == 0:
        make_writable(config.out)
    if launch.LAUNCHER not in os.environ and (place is None or place.rank == 0):
        show_header(config, corpus)  # before torch is loaded, which takes seconds
    if place is None and config.ranks > 1:
        return launch.start_ranks(config.command(), config.ranks)

    launch.end_at_once_when_told(launched=place is not None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; see start_ranks
    from zeroshard.cli.train import train as train_rank

    return train_rank(config, place or Launch(rank=0, ranks=1, local_rank=0, local_ranks=1), corpus)


def run_beside(config: RunConfig) -> int:
    """Run a training in ranks of their own, even if there is only one; return the exit code."""
    from zeroshard.cli.data import make_writable, read_corpus

    launch.check_ranks(config.ranks)
    corpus = read_corpus(config.data, context=config.shape.context)
    make_writable(config.out)
    show_header(config, corpus)
    return launch.start_ranks(config.command(), config.ranks)


def show_header(config: RunConfig, corpus: Corpus) -> None:
    """Print what will be run, before anything slow is loaded."""
    from zeroshard.cli import screen

    shape = config.shape
    tokens = config.batch * config.accumulate * config.ranks * shape.context
    screen.opening(
        f"Stage {config.stage}, {screen.ranks_text(config.ranks)}"
        + f" in {config.replicas} replicas" * (config.replicas > 1)
        + f", of {config.hosts} hosts" * (config.hosts > 1)
        + ", the optimizer over all" * (config.replicas > 1 and config.optimizer_over == "all")
        + f", {config.precision}"
        + f", {config.grad_dtype} gradients" * (config.grad_dtype != "fp32")
        + ", gradients sent in 8 bits" * (config.reduce == "int8"),
        {
            "model": f"{config.size}: {shape.blocks} blocks of {shape.hidden}, {shape.numel:,} parameters",
            "data": f"{corpus.files:,} files, {len(corpus.text):,} bytes, sha256 {corpus.sha256[:12]}",
            "steps": f"{config.steps:,} of {tokens:,} bytes",
            "out": config.out,
        },
    )
    screen.say(f"  [dim]starting {screen.ranks_text(config.ranks)} ...[/dim]")
