"""The runs of `zeroshard verify`: the job without zeroshard, the job sharded, and their first difference.

The plain runs are `reference.accumulate` and, for 16-bit parameters, `reference.accumulate_with_masters`, in the
process that was asked; they leave losses and weights of every step in a folder. Each rank then runs `check_rank`: every
configuration in the same process, each step held against that folder. One of them leaves such a folder itself, and a
checkpoint, for ranks of other processes to run it again and to go on from.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import zeroshard
from zeroshard import device
from zeroshard.cli import reference
from zeroshard.cli.config import InputError, one_line
from zeroshard.cli.gates import Launch, Trial
from zeroshard.cli.policies import policies, precision_of
from zeroshard.cli.question import Configuration, Difference, Question
from zeroshard.errors import Error, UserError
from zeroshard.planner.job import Job, build
from zeroshard.reference import total_norm

CHECKPOINT = "checkpoint"  # of a recorded run, in its folder


class Seeded:
    """A freshly built job whose weights, batches and losses each start from a seed of their own.

    So a micro-batch draws the same dropout masks whichever process computes it, and whatever it computed before.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.losses: dict[int, Tensor] = {}  # of the running step, by the micro-batch's number
        self.where = f"{question.job}()"
        self._seed(-1, 0)
        self.job: Job = build(question.job)
        self.job.need("optimizer", "batch", "loss")
        self.model = self.job.model

    def batch(self, step: int, index: int) -> tuple[int, int, Any]:
        self.where = f"batch({step}, {index})"
        self._seed(step, index)
        return step, index, self.job.batch(step, index)

    def loss(self, model: nn.Module, batch: tuple[int, int, Any]) -> Tensor:
        step, index, content = batch
        self.where = f"loss(model, batch({step}, {index})), or its backward"
        self._seed(step, index)
        value = self.job.loss(model, content)
        self.losses[index] = value.detach().clone()
        return value

    def take_losses(self) -> dict[int, Tensor]:
        losses, self.losses = self.losses, {}
        return losses

    def _seed(self, step: int, index: int) -> None:
        seed = hash((self.question.seed, step + 1, index)) % 2**32  # of integers, so alike in every process
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)


# --- without zeroshard ----------------------------------------------------------------------------------------------


class Plain(NamedTuple):
    """Facts about the job that the plain runs found."""

    difference: Difference | None  # between two runs of the same
    buffers: tuple[str, ...]  # those that training changes
    trains: bool  # whether any parameter changed at all


def run_plain_twice(question: Question, ranks: int, folder: Path) -> Plain:
    """Record in `folder` what `ranks` ranks must arrive at; run again to see whether the job repeats itself."""
    folder.mkdir(parents=True)
    again = Comparison(folder, steps=question.steps)
    first = _run_plain(question, ranks, partial(_record, folder))
    _run_plain(question, ranks, again.look)
    return Plain(again.difference, *first)


def _run_plain(
    question: Question, ranks: int, look: Callable[[int, dict[int, Tensor], nn.Module], None]
) -> tuple[tuple[str, ...], bool]:
    seeded = Seeded(question)
    model = seeded.model
    precision = _precision(question)
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    weights = reference.weights(model)
    rounded = _Rounded(precision, [name for name, param in model.named_parameters() if param.requires_grad])

    def after_step(step: int) -> None:
        rounded.step(step)
        look(step, seeded.take_losses(), model)

    if precision.cast_inputs:
        model.register_forward_pre_hook(partial(_cast_inputs, precision.param_dtype), with_kwargs=True)
    options: dict[str, Any] = {
        "steps": question.steps,
        "clip": question.clip,
        "norm": total_norm,
        "average": True,
        "after_step": after_step,
    }
    common = (seeded.batch, seeded.loss, ranks, question.accumulate)
    try:
        low = any(precision.param(param.dtype) in reference.LOW for param in model.parameters())
        if low or precision.fp8 or question.reduce == "int8":
            linear = _linear(model) if precision.fp8 else ()
            reference.accumulate_with_masters(
                model,
                lambda params: rounded.take(_optimizer_of(seeded, params), params),
                *common,
                dtype=precision.param_dtype,
                rounded=lambda name, master: reference.in_8_bits(master) if name in linear else master,
                sent=_sent_in_codes(model) if question.reduce == "int8" else lambda name, gradient: gradient,
                **options,
            )
        else:
            trained = [param for param in model.parameters() if param.requires_grad]
            optimizer = rounded.take(_optimizer_of(seeded, model.parameters()), trained)
            reference.accumulate(model, optimizer, *common, **options)
    except Error:
        raise
    except Exception as error:
        raise UserError(
            "the job fails without zeroshard",
            where=f"{question.job}, {seeded.where}",
            got=f"{type(error).__name__}: {error}",
            instead="a job that trains in plain PyTorch",
        ) from error
    changed = [name for name, tensor in model.named_buffers() if not torch.equal(tensor, before[name])]
    after = reference.weights(model)
    trains = any(not torch.equal(tensor.to(after[name].dtype), after[name]) for name, tensor in weights.items())
    return tuple(changed), trains


class _Rounded:
    """The optimizer's states of a plain run, rounded after each step as `Precision(states=...)` has them rest."""

    def __init__(self, precision: zeroshard.Precision, names: Sequence[str]) -> None:
        """names: of the trained parameters, in their order."""
        self._precision, self._names = precision, names
        self._states: list[
            tuple[str, Any, Tensor]
        ] = []  # a parameter's name, the optimizers' states, what these update
        self._seed = 0

    def take(self, optimizer: Any, params: Sequence[Tensor]) -> Any:
        """Follow the states of this optimizer, which updates these parameters. Returns the optimizer."""
        self._seed = torch.initial_seed()  # before a batch sets one of its own
        for each in optimizer.optimizers if isinstance(optimizer, reference.Several) else [optimizer]:
            self._states += [(name, each.state, param) for name, param in zip(self._names, params, strict=True)]
        return optimizer

    def step(self, step: int) -> None:
        drawn = step if self._precision.rounding == "stochastic" else None
        for name, states, param in self._states if self._precision.narrow_states else ():
            for key, value in states[param].items() if param in states else ():
                like = isinstance(value, Tensor) and value.shape == param.shape and value.dtype is torch.float32
                if like and self._precision.state(key) is torch.bfloat16:
                    value.copy_(reference.in_16_bits(value, self._seed, key, name, drawn))


def _sent_in_codes(model: nn.Module) -> Callable[[str, Tensor], Tensor]:
    """Return a function that rounds gradients as int8 codes do, in the order of their parameters' memory."""
    strides = {name: param.stride() for name, param in model.named_parameters()}

    def sent(name: str, gradient: Tensor) -> Tensor:
        order = sorted(range(gradient.dim()), key=lambda axis: -strides[name][axis])
        back = sorted(range(gradient.dim()), key=order.__getitem__)
        return reference.in_codes(name, gradient.permute(order)).permute(back)

    return sent


def _linear(model: nn.Module) -> set[str]:
    """Name the trained weights of linear layers but routers: those that `Precision(fp8=True)` keeps in 8 bits."""
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
    modules = dict(model.named_modules(remove_duplicate=False))

    def chosen(name: str) -> bool:
        module, _, own = name.rpartition(".")
        routes = module.rpartition(".")[2] in ("router", "gate")
        return own == "weight" and isinstance(modules[module], nn.Linear) and not routes

    trained = {id(param) for param in model.parameters() if param.requires_grad}
    return {name for of, found in names.items() if of in trained and all(map(chosen, found)) for name in found}


def _optimizer_of(seeded: Seeded, parameters: Any) -> Any:
    given = list(parameters)
    seeded.where = "optimizer(params)"
    optimizer = reference.as_one(seeded.job.optimizer(given))
    known = {id(tensor) for tensor in given}
    if any(id(tensor) not in known for group in optimizer.param_groups for tensor in group["params"]):
        raise UserError(
            "the job's optimizer updates other tensors than it was given",
            where=f"{seeded.question.job}, optimizer(params)",
            instead="make it of params only: under --precision bf16 they are fp32 masters",
        )
    return optimizer


def _cast_inputs(dtype: torch.dtype | None, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast floating-point inputs of the plain model, as `Precision(cast_inputs=True)` does."""
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, (args, kwargs)
    )


def _precision(question: Question) -> zeroshard.Precision:
    return precision_of(question.precision) or zeroshard.Precision()


# --- with zeroshard -------------------------------------------------------------------------------------------------


def check_rank(folder: Path, rank: int, ranks: int) -> None:
    """Run one rank's part of the launch that lies in `folder`; rank 0 writes a line of results for each trial."""
    device.take_own(rank, ranks)
    launch = Launch.load(folder)
    for number, (name, trial) in enumerate(launch.trials):
        question, refused, difference = Question.load(folder / name), "", None
        try:
            difference = _tried(question, trial, folder / name / trial.against, launch.half, (rank, ranks))
        except InputError as error:
            if not trial.may_refuse:
                raise
            refused = one_line(error.__cause__ or error)
        if rank == 0:
            with (folder / launch.results).open("a", encoding="utf-8") as file:
                found = None if difference is None else difference._asdict()
                file.write(json.dumps({"number": number, "difference": found, "refused": refused}) + "\n")


def _tried(question: Question, trial: Trial, target: Path, half: int, place: tuple[int, int]) -> Difference | None:
    one = trial.configuration
    if trial.kind in ("reference", "record"):
        if place[0] == 0:
            target.mkdir(exist_ok=True)
            for old in target.iterdir():  # of the plain run, whose buffers ranks do not have
                old.unlink()
        _run(question, one, place, partial(_record_ranks, target, half if trial.kind == "record" else 0))
        return None
    begun = target / CHECKPOINT if trial.kind == "resumed" else None
    return _compare(question, one, target, place, half if begun else 0, begun)


def _compare(
    question: Question,
    configuration: Configuration,
    target: Path,
    place: tuple[int, int],
    first_step: int = 0,
    begun: Path | None = None,
) -> Difference | None:
    """Run once with a look at all weights after every step, and once without if messages overlap.

    Gathering the weights waits for whatever is still under way, so an error that only overlap shows could hide.
    """
    found = None
    for every_step in (True, False) if configuration.overlap else (True,):
        comparison = Comparison(target, steps=question.steps, rank=place[0], every_step=every_step)
        _run(question, configuration, place, comparison.look_sharded, first_step, begun)
        found = found or first_of(_from_all_ranks(comparison.difference))
    return found


def _run(
    question: Question,
    configuration: Configuration,
    place: tuple[int, int],
    look: Callable[[int, dict[int, Tensor], zeroshard.Zero], None],
    first_step: int = 0,
    begun: Path | None = None,
) -> None:
    """Run the user's loop on a rank, sharded as the configuration says; from a checkpoint, at its step, if `begun`."""
    seeded = Seeded(question)
    model = seeded.model
    of_this = {
        "bucket_mib": _bucket_mib(configuration.bucket, model, _precision(question)),
        "overlap": configuration.overlap,
        **configuration.rows,
        "optimizer_in_backward": question.optimizer_in_backward and configuration != question.baseline,
    }
    try:
        optimizer = seeded.job.optimizer(model.parameters())
        zero = zeroshard.shard(
            model,
            optimizer,
            stage=configuration.stage,
            offload=_offload(question, configuration.tier),
            **policies({**vars(question), **of_this}),
        )
        if begun:
            zero.load(begun)
    except UserError as error:
        raise InputError(f"{configuration}: {error}") from error  # the ranks have agreed on it: one of them says so
    reference.loop(
        model,
        reference.as_one(optimizer),
        seeded.batch,
        seeded.loss,
        *place,
        configuration.accumulate,
        steps=question.steps - first_step,
        first_step=first_step,
        clip=question.clip,
        average=True,
        after_step=lambda step: look(step, seeded.take_losses(), zero),
    )


def _offload(question: Question, tier: str) -> zeroshard.Offload:
    path = question.offload_path if tier == "nvme" else None
    gradients = "device" if question.optimizer_in_backward else tier
    return zeroshard.Offload(parameters=tier, gradients=gradients, optimizer=tier, path=path)


def _bucket_mib(bucket: str, model: nn.Module, precision: zeroshard.Precision) -> float:
    """Return a bucket's MiB. `small` is the median tensor's size: larger ones get a bucket each, smaller ones share."""
    if bucket != "small":
        return float(bucket)
    nbytes = sorted(param.numel() * precision.param(param.dtype).itemsize for param in model.parameters())
    return max(1, nbytes[len(nbytes) // 2]) / 2**20 if nbytes else 1.0


def _from_all_ranks(mine: Any) -> list[Any]:
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


# --- the comparison -------------------------------------------------------------------------------------------------


def _record(folder: Path, step: int, losses: dict[int, Tensor], model: nn.Module) -> None:
    weights = {name: param.detach().cpu().contiguous() for name, param in model.named_parameters()}
    torch.save({"losses": losses, "weights": weights}, folder / f"{step}.pt")


def _record_ranks(folder: Path, half: int, step: int, losses: dict[int, Tensor], zero: zeroshard.Zero) -> None:
    """Record a step of a sharded run: rank 0 writes all ranks' losses and its weights. After step `half`, save too."""
    if step + 1 == half:
        zero.save(folder / CHECKPOINT)
    everybody = {index: loss for some in _from_all_ranks(losses) for index, loss in some.items()}
    with zero.gathered():
        if zero.rank == 0:
            _record(folder, step, everybody, zero.model)


class Comparison:
    """A comparison of each step with the recorded one, and the first difference that this process sees."""

    def __init__(self, folder: Path, *, steps: int, rank: int = 0, every_step: bool = True) -> None:
        self.difference: Difference | None = None
        self._folder, self._steps, self._rank, self._every_step = folder, steps, rank, every_step

    def look_sharded(self, step: int, losses: dict[int, Tensor], zero: zeroshard.Zero) -> None:
        want = self._recorded(step)
        self._look_at_losses(step, losses, want)
        if self._every_step or step == self._steps - 1:
            with zero.gathered():  # collective: also on a rank that has its difference
                self._look_at_weights(step, zero.model, want, partial(_owner, zero))

    def look(self, step: int, losses: dict[int, Tensor], model: nn.Module) -> None:
        want = self._recorded(step)
        self._look_at_losses(step, losses, want)
        self._look_at_weights(step, model, want, lambda name, element: 0)

    def _recorded(self, step: int) -> dict[str, Any]:
        # Mapped, not read: a rank that compares its losses only takes no memory for the weights.
        recorded: dict[str, Any] = torch.load(self._folder / f"{step}.pt", mmap=True, weights_only=True)
        return recorded

    def _look_at_losses(self, step: int, losses: dict[int, Tensor], want: dict[str, Any]) -> None:
        for index, loss in losses.items():
            if self.difference is None and (at := reference.first_unequal(loss, want["losses"][index])):
                self.difference = Difference(step + 1, index, f"loss of micro-batch {index}", self._rank, None, *at[1:])

    def _look_at_weights(
        self, step: int, model: nn.Module, want: dict[str, Any], owner: Callable[[str, int], int]
    ) -> None:
        if self.difference is not None:
            return
        order = itertools.count(len(want["losses"]))
        for name, param in model.named_parameters():
            number = next(order)
            if at := reference.first_unequal(param, want["weights"][name]):
                self.difference = Difference(
                    step + 1, number, name, self._rank, at[0], *at[1:], owner=owner(name, at[0])
                )
                return


def _owner(zero: zeroshard.Zero, name: str, element: int) -> int:
    """Find the rank whose shard holds the element: it summed the gradients there. With replicas, in the first."""
    bucket, slot = zero.partition.find(name)
    spans = [bucket.shard(position) for position in range(zero.partition.ranks)]
    return next(rank for rank, (first, last) in enumerate(spans) if first <= slot.start + element < last)


def first_of(differences: list[Difference | None]) -> Difference | None:
    """Find the earliest difference. Where all ranks' copies differ equally, name the element's owner as its rank."""
    found = [difference for difference in differences if difference is not None]
    if not found:
        return None
    first = min(found, key=lambda difference: (difference.step, difference.order))
    alike = [each for each in found if each._replace(rank=first.rank) == first]
    if len(alike) == len(differences) and first.owner is not None:
        return first._replace(rank=first.owner)
    return first
