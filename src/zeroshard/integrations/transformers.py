"""Hugging Face's Trainer: `ZeroTrainer`, and the mixin that makes one of any trainer built on it, TRL's too.

    trainer = ZeroTrainer(model, args, train_dataset=..., stage=3)

    class Trainer(ZeroTrainerMixin, trl.SFTTrainer): ...

The Trainer calls Accelerate for all that is distributed, so most of it is `ZeroAccelerator`. This file changes where
the Trainer reads or writes whole weights and optimizer states by itself. A checkpoint holds what the plain Trainer's
does, but for `optimizer.pt`: instead there is a folder of `zero.save`, which any number of ranks at any stage goes on
from.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from ..api import Zero
from ..engine.weights.unit import on_meta
from ..errors import CheckpointError, StateError, UserError
from ..policies.comm import Comm
from ..policies.layout import Layout
from ..policies.offload import Offload
from ..policies.precision import Precision
from .accelerate import ZeroAccelerator
from .common import FOLDER, refuse_misspelt, whole_state

_SCHEDULER = "scheduler.pt"  # as the Trainer names it


class ZeroTrainerMixin:
    """Put it in front of a trainer class; `stage` and the policies are those of `zeroshard.shard`.

    weights: a folder as `zeroshard.load` takes it, to fill a model on meta: each rank reads its own parts.
    """

    model: Any  # these are the trainer's
    args: Any
    accelerator: Any
    lr_scheduler: Any
    _save: Any
    push_to_hub: Any

    def __init__(
        self,
        *args: Any,
        stage: int = 3,
        precision: Precision | None = None,
        offload: Offload | None = None,
        layout: Layout | None = None,
        comm: Comm | None = None,
        weights: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_misspelt(type(self), kwargs)
        settings = {"stage": stage, "precision": precision, "offload": offload, "layout": layout, "comm": comm}
        self._zero_settings = {**settings, "weights": weights}  # the trainer's __init__ builds the accelerator
        super().__init__(*args, **kwargs)

    @property
    def zero(self) -> Zero | None:
        """The handle of the sharded model; None until `train()` has begun."""
        found: Zero | None = self.accelerator.zero_of(self.model)
        return found

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's accelerator, as a `ZeroAccelerator`; refuse arguments that mean nothing to it."""
        args = self.args
        instead = {
            "auto_find_batch_size": "a smaller per_device_train_batch_size; zeroshard plan says what fits",
            "ddp_bucket_cap_mb": f"{type(self).__name__}(..., layout=Layout(bucket_mib=...))",
            "ddp_broadcast_buffers": f'{type(self).__name__}(..., layout=Layout(buffers="local"))',
        }
        for name, remedy in instead.items():
            if getattr(args, name) is not None and (name != "auto_find_batch_size" or args.auto_find_batch_size):
                raise UserError(
                    "this argument means nothing to a sharded model",
                    got=f"{name}={getattr(args, name)}",
                    instead=remedy,
                )
        if args.n_gpu > 1:
            raise UserError(
                "one process with several devices would be DataParallel", got=f"{args.n_gpu} devices",
                instead=f"torchrun --nproc-per-node {args.n_gpu} train.py",
            )  # fmt: skip
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = ZeroAccelerator.of(self.accelerator, **self._zero_settings)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not on_meta(model):  # else it is `train` that gives each rank its part
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the Trainer does, a model that has values."""
        self._check_filled("evaluate")
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def _check_filled(self, call: str) -> None:
        if self.zero is None and on_meta(self.model):
            raise StateError(
                f"{call}() before train(): the model is on meta, and train() fills it", where=type(self.model).__name__,
                instead="train() first, with eval_on_start=True to evaluate it as it begins",
            )  # fmt: skip

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save whole weights as the Trainer does. Rank 0 writes; every rank calls it."""
        zero, args = self.zero, self.args
        self._check_filled("save_model")
        if zero is None:
            return super().save_model(output_dir, _internal_call)  # type: ignore[misc,no-any-return]
        state = whole_state(zero)
        if args.should_save:
            self._save(output_dir or args.output_dir, state_dict=state)
        if args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=args.hub_revision)
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        zero = self.zero
        if zero is None:
            return super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc,no-any-return]
        os.makedirs(output_dir, exist_ok=True)
        zero.save(Path(output_dir) / FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))
        return None

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        # Rank 0 removes checkpoints next, and the newest too where `train()` is called again.
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not (Path(resume_from_checkpoint) / FOLDER).is_dir():  # which has the weights, too
            if on_meta(self.model if model is None else model):
                raise CheckpointError(
                    "a model on meta cannot take whole weights",
                    where=str(resume_from_checkpoint), expected=f"a folder named {FOLDER}",
                    instead=f"weights={str(resume_from_checkpoint)!r}, and train() without resume_from_checkpoint",
                )  # fmt: skip
            with self._gathered():
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        zero = self.zero
        if checkpoint is None or zero is None:
            return super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc,no-any-return]
        folder = Path(checkpoint) / FOLDER
        if folder.is_dir():
            zero.load(folder)
            state = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
            self.lr_scheduler.load_state_dict(state)
        elif any(Path(checkpoint).glob("optimizer*")):
            raise CheckpointError(
                "this checkpoint's optimizer state is of a Trainer that does not shard, and is not read",
                where=str(checkpoint),
                expected=f"a folder named {FOLDER}",
                instead="train() without resume_from_checkpoint, of a model loaded from there (a fresh optimizer)",
            )
        return None

    def _load_best_model(self) -> None:
        with self._gathered():
            super()._load_best_model()  # type: ignore[misc]

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        zero = self.zero
        return contextlib.nullcontext() if zero is None else zero.gathered()


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """`transformers.Trainer` with a sharded model: `ZeroTrainer(model, args, train_dataset=..., stage=3)`."""
