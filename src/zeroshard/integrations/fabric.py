"""Lightning Fabric: `ZeroFabricStrategy`, also by name once this module is imported.

    import zeroshard.integrations.fabric

    fabric = lightning.Fabric(strategy="zeroshard_stage_3", devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

A checkpoint is a folder: what `zero.save` writes of each sharded module with its optimizers, and the rest beside it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn

from .. import api
from ..errors import StateError, UserError
from ..policies.comm import Comm
from ..policies.layout import Layout
from ..policies.offload import Offload
from ..policies.precision import Precision
from .common import FOLDER, OWN, params_of, refuse_misspelt, whole_state

REST = "fabric.ckpt"  # in a checkpoint's folder, beside one folder of zero.save for each module
_TOGETHER = "model, optimizer = fabric.setup(model, optimizer)"


class ZeroFabricStrategy(DDPStrategy):
    """DDP's processes and loaders with sharded modules; `stage` and the policies are those of `zeroshard.shard`."""

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
            names = ", ".join(self._ddp_kwargs)
            raise TypeError(f"ZeroFabricStrategy takes no {names}: there is no DistributedDataParallel")
        self._settings: dict[str, Any] = {"stage": stage, "precision": precision, "offload": offload, "layout": layout}
        self._settings["comm"] = comm
        self._whole: list[nn.Module] = []  # set up without an optimizer
        self._backward_sync_control = _NoSync()

    # --- setting up -------------------------------------------------------------------------------------------------

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        object.__setattr__(module, OWN, api.shard(module, optimizers, device=self.root_device, **self._settings))
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Leave a module without an optimizer whole, for evaluation."""
        self._whole.append(module)
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        raise UserError("an optimizer is set up with its module", got=type(optimizer).__name__, instead=_TOGETHER)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward; refuse gradients of a module that was set up alone, which no rank would average."""
        super().backward(tensor, module, *args, **kwargs)
        for each in self._whole:
            if any(param.grad is not None for param in each.parameters()):
                raise StateError(
                    "a module that was set up without an optimizer has gradients, and is not sharded",
                    where=f"module {type(each).__name__}",
                    instead=_TOGETHER,
                )

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.precision.unscale_gradients(optimizer)
        params = params_of(_zero(module), optimizer)
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        self.precision.unscale_gradients(optimizer)
        torch.nn.utils.clip_grad_value_(params_of(_zero(module), optimizer), clip_val)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return all weights; a sharded module's on the CPU of rank 0 alone. Collective."""
        zero = getattr(module, OWN, None)
        found: dict[str, Any] = super().get_module_state_dict(module) if zero is None else whole_state(zero)
        return found

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        zero = getattr(module, OWN, None)
        with contextlib.nullcontext() if zero is None else zero.gathered():
            super().load_module_state_dict(module, state_dict, strict)

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """Write a folder, on all ranks; or Fabric's own file if the state has no sharded module."""
        zeros, rest = _parted(state)
        if not zeros:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if storage_options is not None or not set(filter or ()) <= set(rest):
            raise TypeError("ZeroFabricStrategy takes neither storage_options nor filters of sharded modules")
        path = Path(self.broadcast(path))
        rest = self._convert_stateful_objects_in_state(rest, filter=filter or {})
        if self.is_global_zero:
            path.unlink() if path.is_file() else None
            path.mkdir(parents=True, exist_ok=True)
        self.barrier()
        for name, zero in zeros.items():
            zero.save(path / f"{FOLDER}-{name}")
        if self.is_global_zero:
            torch.save(rest, path / f"{REST}.new")
            os.replace(path / f"{REST}.new", path / REST)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None) -> Any:
        """Load what `save_checkpoint` wrote into modules at any stage on any number of ranks."""
        path = Path(self.broadcast(path))
        if not path.is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        zeros, rest = _parted(state or {})
        remainder = super().load_checkpoint(path / REST, rest, strict, weights_only)
        if state:
            state.update(rest)
        for name, zero in zeros.items():
            zero.load(path / f"{FOLDER}-{name}", strict=strict)
        return remainder

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        for stage in range(4):
            name, what = f"zeroshard_stage_{stage}", f"zeroshard at stage {stage}"
            strategy_registry.register(name, cls, description=what, stage=stage)


class _NoSync(_BackwardSyncControl):
    """`fabric.no_backward_sync(model)`: gradients add up on this rank only."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return _zero(module).no_sync() if enabled else contextlib.nullcontext()


def _zero(module: nn.Module) -> api.Zero:
    zero: api.Zero | None = getattr(module, OWN, None)
    if zero is None:
        raise StateError("this module is not sharded", where=f"module {type(module).__name__}", instead=_TOGETHER)
    return zero


def _parted(state: Mapping[str, Any]) -> tuple[dict[str, api.Zero], dict[str, Any]]:
    """Split a state into its sharded modules' handles, and all but these modules and their optimizers."""
    zeros = {name: getattr(value, OWN) for name, value in state.items() if hasattr(value, OWN)}
    bound = {id(optimizer) for zero in zeros.values() for optimizer, _, _ in zero._engine.optimizer_members()}
    return zeros, {name: value for name, value in state.items() if name not in zeros and id(value) not in bound}


ZeroFabricStrategy.register_strategies(STRATEGY_REGISTRY)
