"""One rank of `zeroshard train`: a plain PyTorch loop with one line more, and the journal it keeps."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

import zeroshard
from zeroshard.cli import launch as launching
from zeroshard.cli import processor, screen
from zeroshard.cli.config import Device, InputError, Launch, RunConfig, one_line
from zeroshard.cli.data import RUN_FILES, Corpus, holds_run
from zeroshard.cli.model import GPT
from zeroshard.cli.policies import comm_of, precision_of
from zeroshard.cli.resume import CHECKPOINTS, MANIFEST, run_of
from zeroshard.errors import CheckpointError
from zeroshard.explain.run import record_step
from zeroshard.planner import predict_states

CLIP = 1.0
RECORDED = 2  # steps are recorded, the later is explained: the first gathers before the order is known
EXCHANGE_EVERY = 10  # steps between two exchanges of losses; the ranks run on without each other's in between


def train(config: RunConfig, launch: Launch, corpus: Corpus) -> int:
    """Train on one rank; return the exit code, `INTERRUPTED` where a signal made it save before its last step."""
    device = _pick_device(config.device, launch)
    torch.manual_seed(config.seed)
    model = GPT(config.shape)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    zero = zeroshard.shard(
        model, optimizer, stage=config.stage, precision=precision_of(config.precision, config.grad_dtype),
        offload=config.offload, device=device,
        layout=zeroshard.Layout(recompute=config.recompute),
        comm=comm_of(vars(config)),
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(config.steps))

    _agree_on(corpus)
    start = _resume(config, zero, scheduler, corpus) if config.resume else 0
    if zero.rank == 0:
        _open_run(config, corpus, device, start)
    for number in launching.PREEMPTING:  # SLURM's, Kubernetes', a spot machine's: there is time to save
        zero.save_on(number, None)
    launching.leave_to_handlers(launching.PREEMPTING)
    explained = min(start + RECORDED, config.steps - 1)
    with Journal(config, zero, start) as journal:
        for step in range(start, config.steps):
            if step == max(start, explained - 1):
                zero.record()
            losses = [
                _backward(config, zero, corpus, device, step, index=turn * zero.world_size + zero.rank)
                for turn in range(config.accumulate)
            ]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            journal.add(losses, norm, float(scheduler.get_last_lr()[0]))
            scheduler.step()
            optimizer.zero_grad()
            if step == explained:
                record_step(zero, Path(config.out))
                zero.record(0)
            if zero.signalled and step + 1 < config.steps:
                journal.flush()
                saved = _save(config, zero, scheduler, corpus, step + 1)
                if zero.rank == 0:
                    screen.say(
                        f"\n{zero.signalled.name}: saved {saved} after step {step + 1} of {config.steps}; "
                        f"zeroshard train --resume {config.out} goes on"
                    )
                    sys.stdout.flush()
                return launching.INTERRUPTED
            if config.save_every and (step + 1) % config.save_every == 0 and step + 1 < config.steps:
                journal.flush()  # so that the curve reaches as far as the checkpoint
                _save(config, zero, scheduler, corpus, step + 1)
    # Before the weights are gathered for saving: the peaks are to be those of training.
    ranks = _gather_objects({"predicted": predict_states(zero), **asdict(zero.ledger())})
    saved = _save(config, zero, scheduler, corpus, config.steps)
    with zero.gathered():  # collective, so on every rank
        if zero.rank == 0:
            _save_weights(model, Path(config.out))
    if zero.rank == 0:
        _close_run(config, ranks, start, saved)
    return 0


def _backward(
    config: RunConfig, zero: zeroshard.Zero, corpus: Corpus, device: torch.device, step: int, index: int
) -> torch.Tensor:
    """Run forward and backward of the step's micro-batch `index`, counted over all ranks; return its loss."""
    windows = corpus.micro_batch(
        seed=config.seed, step=step, index=index, sequences=config.batch, context=config.shape.context
    )
    tokens_BT = torch.from_numpy(windows).to(device)
    loss: torch.Tensor = zero.model(tokens_BT[:, :-1], tokens_BT[:, 1:])
    (loss / config.accumulate).backward()
    return loss.detach()


def _save(config: RunConfig, zero: zeroshard.Zero, scheduler: LRScheduler, corpus: Corpus, step: int) -> Path:
    """Save a checkpoint after `step`, which is also the position in the data: micro-batches are a function of it."""
    data = [str(Path(path).absolute()) for path in config.data]
    files = str(Path(config.offload_path).absolute()) if config.offload_path else ""
    run = {**asdict(config), "data": data, "offload_path": files, "sha256": corpus.sha256, "step": step}
    path = Path(config.out) / CHECKPOINTS / f"step-{step:08d}"
    zero.save(path, extra={"run": run, "scheduler": scheduler}, keep=config.keep)
    return path


def _resume(config: RunConfig, zero: zeroshard.Zero, scheduler: LRScheduler, corpus: Corpus) -> int:
    """Load the checkpoint to resume from; return how many steps are done."""
    given = Path(config.resume)
    path = given if (given / MANIFEST).exists() else zero.latest(given / CHECKPOINTS)
    if path is None:
        raise InputError(f"--resume {given}: no complete checkpoint in {given / CHECKPOINTS}")
    try:
        extra = zero.load(path).extra
    except CheckpointError as error:
        raise InputError(f"--resume {path}: {one_line(error)}") from error
    run = extra["run"]
    if run["sha256"] != corpus.sha256:
        raise InputError(
            f"--resume {path}: the data is not the run's (sha256 {corpus.sha256[:12]}, expected {run['sha256'][:12]}); "
            f"give the same files, in the same order, by --data"
        )
    if run["step"] >= config.steps:
        raise InputError(
            f"--resume {path}: all {config.steps} steps are done; for more give --steps, above {run['step']}"
        )
    scheduler.load_state_dict(extra["scheduler"])
    before, now = run["ranks"] * run["accumulate"], config.ranks * config.accumulate
    if zero.rank == 0:
        screen.say(f"\nresumed from {path}, saved on {screen.ranks_text(run['ranks'])}")
        if before != now:
            screen.say(
                f"{now} micro-batches a step, {before} before: the losses are not those of a run that never stopped"
            )
        if run["steps"] != config.steps:
            screen.say(
                f"{config.steps} steps, {run['steps']} before: the learning rate goes on as in a run of {config.steps}"
            )
    return int(run["step"])


def warmup_then_cosine(steps: int) -> Callable[[int], float]:
    """Return the learning rate's factor by step: up over a tenth of the run, then down a half cosine to a tenth."""
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    return factor


class Step(NamedTuple):
    losses: Tensor  # 1D, one per micro-batch of this rank
    norm: Tensor
    lr: float
    seconds: float


class Journal:
    """`metrics.jsonl` and the live line. Rank 0 writes; all ranks exchange their losses every few steps."""

    def __init__(self, config: RunConfig, zero: zeroshard.Zero, done: int) -> None:
        self._config, self._zero = config, zero
        self._tokens = config.batch * config.accumulate * zero.world_size * config.shape.context
        self._done = done
        self._waiting: list[Step] = []
        self._open = ExitStack()

    def __enter__(self) -> Journal:
        if self._zero.rank == 0:
            path = Path(self._config.out) / "metrics.jsonl"
            self._file = self._open.enter_context(path.open("a", encoding="utf-8", buffering=1))
            self._live = self._open.enter_context(screen.Live(self._config.steps))
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def add(self, losses: list[Tensor], norm: Tensor, lr: float) -> None:
        now = time.perf_counter()
        self._waiting.append(Step(torch.stack(losses), norm, lr, now - self._clock))
        self._clock = now
        if len(self._waiting) == EXCHANGE_EVERY or self._done + len(self._waiting) == self._config.steps:
            self.flush()

    def flush(self) -> None:
        """Exchange and write the waiting steps. Collective."""
        if self._waiting:
            per_rank = _gather(torch.stack([step.losses for step in self._waiting]).float())
            if self._zero.rank == 0:
                self._write(torch.cat(per_rank, dim=1).tolist())
            self._done += len(self._waiting)
            self._waiting.clear()

    def _write(self, micro_batches: list[list[float]]) -> None:
        # fsum rounds once, so that a mean depends neither on the order nor on the number of ranks.
        means = [math.fsum(losses) / len(losses) for losses in micro_batches]
        for number, (step, loss) in enumerate(zip(self._waiting, means, strict=True), start=self._done + 1):
            speed = round(self._tokens / step.seconds)
            line = {"step": number, "loss": loss, "grad_norm": step.norm.item(), "lr": step.lr, "tokens_per_s": speed}
            self._file.write(json.dumps(line) + "\n")
        self._live.show(
            self._done + len(means),
            loss=means[-1],  # that step's own, as in metrics.jsonl: a mean would depend on how many steps waited
            tokens_per_s=self._tokens * len(means) / math.fsum(step.seconds for step in self._waiting),
            held_nbytes=sum(self._zero.ledger().held.values()),
        )


def _gather(tensor: Tensor) -> list[Tensor]:
    if not dist.is_initialized():
        return [tensor]
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return everyone


def _gather_objects(mine: Any) -> list[Any]:
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _pick_device(wanted: Device, launch: Launch) -> torch.device:
    gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and gpus < launch.local_ranks):
        return torch.device("cpu")
    if gpus < launch.local_ranks:
        raise InputError(
            f"--device cuda: {launch.local_ranks} ranks on this machine need a GPU each, and torch sees {gpus}; "
            f"write --device cpu, or start fewer ranks"
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def _agree_on(corpus: Corpus) -> None:
    for rank, digest in enumerate(digests := _gather_objects(corpus.sha256)):
        if digest != digests[0]:
            raise InputError(
                f"rank {rank} read other data than rank 0 (sha256 {digest[:12]}, expected {digests[0][:12]}): "
                f"give every machine the same files, by --data"
            )


def _open_run(config: RunConfig, corpus: Corpus, device: torch.device, start: int) -> None:
    facts = {
        "zeroshard": zeroshard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    record = {"config": config.record(), "data": corpus.record(), **facts}
    out, curve = Path(config.out), _curve(config, start)
    run = run_of(config.resume) if config.resume else None
    if run is not None and run.exists() and out.exists() and run.samefile(out):
        for name in ("ledger.json", "explain.json", "model.safetensors"):
            (out / name).unlink(missing_ok=True)  # these are the earlier part's, and not the whole run's
    elif holds_run(out):
        screen.say(f"\nthe earlier run in {out} is now in {_set_aside(out)}")
    (out / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / "metrics.jsonl").write_text(curve, encoding="utf-8")
    screen.say(
        f"  [dim]started[/dim] on {device.type}, torch {torch.__version__}" + f", from step {start} on" * bool(start)
    )
    if slow := processor.slow(config.precision, device.type):
        screen.say(f"  [yellow]{slow}[/yellow]")


def _set_aside(out: Path) -> Path:
    """Move an earlier run's files, so that they are neither lost nor taken for this one's."""
    aside = next(path for number in itertools.count(1) if not os.path.lexists(path := out / f"earlier-{number}"))
    aside.mkdir()
    for name in RUN_FILES:
        if os.path.lexists(out / name):
            os.rename(out / name, aside / name)
    return aside


def _curve(config: RunConfig, start: int) -> str:
    """Return the lines of the resumed run's metrics up to its checkpoint; steps after it are done again."""
    run = run_of(config.resume) if start else None
    lines = []
    if run is not None and (run / "metrics.jsonl").exists():
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] > start:
                    break
            except ValueError:  # the run was killed while it wrote
                break
            lines.append(line + "\n")
    return "".join(lines)


def _save_weights(model: GPT, out: Path) -> None:
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    # Under another name first: a run that is interrupted now leaves no half of a file under this one.
    save_file(weights, out / "model.safetensors.part")
    os.replace(out / "model.safetensors.part", out / "model.safetensors")


def _close_run(config: RunConfig, ranks: list[Any], start: int, saved: Path) -> None:
    out, steps = Path(config.out), config.steps - start
    (out / "ledger.json").write_text(json.dumps({"ranks": ranks}, indent=2) + "\n", encoding="utf-8")
    if config.report:
        screen.ledger(ranks, steps)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[start:]]
    tokens = config.batch * config.accumulate * config.ranks * config.shape.context
    per_second = statistics.median(line["tokens_per_s"] for line in lines)
    screen.closing(
        ranks, steps,
        losses=[line["loss"] for line in lines],
        speed=(tokens / per_second, per_second),
        weights=out / "model.safetensors", checkpoint=saved, run=out,
    )  # fmt: skip
