"""PyTorch Lightning: `ZeroStrategy`, also by name once this module is imported. Fabric's is in `fabric`.

    import zeroshard.integrations.lightning

    trainer = lightning.Trainer(strategy="zeroshard_stage_3", devices=2)

A step runs as the module's own forward (Lightning's redirection of forwards, as for DDP), so that its weights are
gathered. A checkpoint is a folder: what `zero.save` writes, and beside it what Lightning knows of its loops, callbacks
and schedulers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from .. import api
from ..engine.weights.unit import on_meta
from ..errors import CheckpointError, StateError
from ..policies.comm import Comm
from ..policies.layout import Layout
from ..policies.offload import Offload
from ..policies.precision import Precision
from .common import FOLDER, OWN, params_of, refuse_misspelt, whole_state

REST = "lightning.ckpt"  # in a checkpoint's folder, beside FOLDER


class ZeroStrategy(DDPStrategy):
    """DDP's processes and loaders with a sharded module; `stage` and the policies are those of `zeroshard.shard`."""

    lightning_module: Any  # these are Lightning's
    model: Any
    optimizers: Any
    accelerator: Any
    precision_plugin: Any
    cluster_environment: Any
    checkpoint_io: Any

    strategy_name = "zeroshard"

    def __init__(
        self,
        stage: int = 3,
        precision: Precision | None = None,
        offload: Offload | None = None,
        layout: Layout | None = None,
        comm: Comm | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_misspelt(type(self), kwargs)
        super().__init__(**kwargs)
        if self._ddp_kwargs:
            raise TypeError(f"ZeroStrategy takes no {', '.join(self._ddp_kwargs)}: there is no DistributedDataParallel")
        self._settings: dict[str, Any] = {
            "stage": stage,
            "precision": precision,
            "offload": offload,
            "layout": layout,
            "comm": comm,
        }
        self._folder: Path | None = None  # of the checkpoint that is being loaded

    @property
    def zero(self) -> api.Zero | None:
        """The handle of the sharded module; None before a fit has set the module up."""
        found: api.Zero | None = getattr(self.lightning_module, OWN, None)
        return found

    # --- a fit begins and ends --------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Shard the module and its optimizers. Outside of a fit a whole module stays so, unless it is on meta."""
        self.accelerator.setup(trainer)
        fits, module = trainer.state.fn == TrainerFn.FITTING, self.lightning_module
        if fits and self.zero is not None:
            raise StateError(
                "this LightningModule is sharded by an earlier fit, with that fit's optimizer",
                where=type(module).__name__,
                instead="trainer.fit(another_module, ckpt_path=...), from a checkpoint of that fit",
            )
        if self.zero is None:
            if fits and self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            self.precision_plugin.convert_module(self.model)
            if not on_meta(module):
                self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits or (self.zero is None and on_meta(module)):
            self._shard()

    def _shard(self) -> None:
        module = self.lightning_module
        optimizers = [each._optimizer if isinstance(each, LightningOptimizer) else each for each in self.optimizers]
        zero = api.shard(module, optimizers, device=self.root_device, **self._settings)
        object.__setattr__(module, OWN, zero)
        # Lightning would clip what the optimizer's groups hold, which is this rank's part: it gets the parameters.
        self.precision_plugin.main_params = lambda optimizer: params_of(zero, optimizer)
        if len(optimizers) > 1:
            module.toggle_optimizer = _refuse_toggle

    def teardown(self) -> None:
        """Tear down everything else; a sharded module stays sharded, on its device."""
        if self.zero is None:
            super().teardown()
            return
        self.precision_plugin.__dict__.pop("main_params", None)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build on meta for `trainer.init_module(empty_init=True)`; `setup` gives memory, unit by unit."""
        place = torch.device("meta") if empty_init else contextlib.nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    # --- steps ------------------------------------------------------------------------------------------------------

    def _as_forward(self, name: str, context: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        with context:
            if self.zero is None:
                return getattr(module, name)(*args, **kwargs)
            return self._forward_redirection(module, module, name, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_forward("training_step", self.precision_plugin.train_step_context(), *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_forward("validation_step", self.precision_plugin.val_step_context(), *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_forward("test_step", self.precision_plugin.test_step_context(), *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_forward("predict_step", self.precision_plugin.predict_step_context(), *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run forward and backward before the step, not inside it as a closure.

        A step begins by reducing what no_sync has added up: inside it, the last micro-batch would be summed apart.
        """
        if self.zero is not None and not isinstance(optimizer, torch.optim.LBFGS):
            loss = closure()
            closure = lambda: loss  # noqa: E731
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add up gradients on this rank only, for all but the last of accumulated micro-batches."""
        with contextlib.nullcontext() if self.zero is None else self.zero.no_sync():
            yield

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing for a sharded module: `save_checkpoint` writes it."""
        return super().lightning_module_state_dict() if self.zero is None else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing for a sharded module's optimizer: `save_checkpoint` writes it."""
        return super().optimizer_state(optimizer) if self.zero is None else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder; or, for weights alone (`save_weights_only=True`), Lightning's own file with all of them."""
        zero = self.zero
        if zero is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = whole_state(zero)
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError("ZeroStrategy.save_checkpoint takes no storage_options: it does not use the CheckpointIO")
        if self.is_global_zero:
            path.unlink() if path.is_file() else None
            path.mkdir(parents=True, exist_ok=True)
        self.barrier()
        zero.save(path / FOLDER)
        if self.is_global_zero:
            beside = path / f"{REST}.new"
            torch.save(checkpoint, beside)
            os.replace(beside, path / REST)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load what Lightning itself keeps; the module and its optimizers follow in `load_model_state_dict`."""
        path = Path(self.broadcast(checkpoint_path))
        self._folder = path / FOLDER if (path / FOLDER).is_dir() else None
        if self._folder is not None:
            path = path / REST
        checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)
        if (
            self._folder is None
            and checkpoint.get("optimizer_states")
            and self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        ):
            raise CheckpointError(
                "this checkpoint's optimizer states are of another strategy, and are not read",
                where=str(path),
                expected=f"a folder that ZeroStrategy wrote, with {FOLDER} in it",
                instead="Module.load_from_checkpoint(path), and a fit of that without ckpt_path",
            )
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module, and in a fit its optimizers and random states. Collective."""
        if self._folder is None:
            with contextlib.nullcontext() if self.zero is None else self.zero.gathered():
                super().load_model_state_dict(checkpoint, strict)
            return
        if self.zero is None:
            self._shard()  # to evaluate it
        assert self.zero is not None
        self.zero.load(self._folder, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_model_state_dict` has loaded the optimizers too."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        for stage in range(4):
            name, what = f"zeroshard_stage_{stage}", f"zeroshard at stage {stage}"
            strategy_registry.register(name, cls, description=what, stage=stage)


def _refuse_toggle(optimizer: Any) -> NoReturn:
    raise StateError(
        "toggling an optimizer changes requires_grad of what its groups hold, which is not the module's parameters",
        instead="each_module.requires_grad_(False) and back, and zero_grad() of every optimizer before its backward",
    )


ZeroStrategy.register_strategies(StrategyRegistry)
