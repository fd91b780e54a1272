"""Hugging Face Accelerate: `ZeroAccelerator`, an `Accelerator` that shards what it prepares.

    accelerator = ZeroAccelerator(stage=3, gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Accelerate has no place to plug another kind of training in: `prepare` asks for one of its own. So this is a subclass.
It lets Accelerate do all but the wrapping by DDP, and shards the model and its optimizer once both are prepared.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from .. import api
from ..engine.build.supported_optimizers import unwrapped
from ..engine.weights.unit import on_meta
from ..errors import StateError, UserError
from ..policies.comm import Comm
from ..policies.layout import Layout
from ..policies.offload import Offload
from ..policies.precision import Precision
from .common import FOLDER, OWN, refuse_misspelt, whole_state
from .weights import load

_OTHERS = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}


class ZeroAccelerator(Accelerator):
    """An `Accelerator` whose models are sharded; `stage` and the policies are those of `zeroshard.shard`."""

    _models: list[Any]
    _optimizers: list[Any]

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
        """weights: a folder as `zeroshard.load` takes it, to fill a model on meta: each rank reads its own parts."""
        refuse_misspelt(type(self), kwargs)
        super().__init__(*args, **kwargs)
        if self.ddp_handler is not None:
            raise UserError(
                "there is no DistributedDataParallel that could take these arguments",
                got="kwargs_handlers=[DistributedDataParallelKwargs(...)]",
                instead="layout=Layout(bucket_mib=...), comm=Comm(...)",
            )
        settings = {"stage": stage, "precision": precision, "offload": offload, "layout": layout, "comm": comm}
        self._begin({**settings, "weights": weights})

    @classmethod
    def of(cls, accelerator: Accelerator, **settings: Any) -> ZeroAccelerator:
        """Make one of an `Accelerator` that has prepared nothing yet, as a trainer builds it."""
        accelerator.__class__ = cls
        accelerator._begin(settings)
        made: ZeroAccelerator = accelerator
        return made

    def _begin(self, settings: dict[str, Any]) -> None:
        self._settings = {**settings}
        self._weights = self._settings.pop("weights", None)
        if self.distributed_type in _OTHERS or self.parallelism_config is not None:
            got = "a ParallelismConfig" if self.parallelism_config is not None else self.distributed_type.value
            raise UserError(
                "Accelerate is configured to distribute the model by something else",
                expected="plain data parallelism: as many processes as ranks, and none of its plugins",
                got=got,
                instead="ZeroAccelerator(stage=...) with no fsdp_plugin, deepspeed_plugin or parallelism_config, and "
                "no ACCELERATE_USE_FSDP or ACCELERATE_USE_DEEPSPEED in the environment",
            )
        if self.mixed_precision == "fp8":
            raise UserError(
                "Accelerate's fp8 replaces layers, and that was not tried with sharded ones",
                got='mixed_precision="fp8"', instead='mixed_precision="bf16"',
            )  # fmt: skip

    # --- what is sharded --------------------------------------------------------------------------------------------

    @property
    def zero(self) -> api.Zero:
        """The `Zero` of the one sharded model; of several ask `zero_of(model)`."""
        found = [zero for zero in map(self.zero_of, self._models) if zero is not None]
        if len(found) != 1:
            raise StateError(
                "there is no one sharded model", expected="1", got=len(found),
                instead="accelerator.prepare(model, optimizer) first; of several accelerator.zero_of(model)",
            )  # fmt: skip
        return found[0]

    def zero_of(self, model: nn.Module) -> api.Zero | None:
        """Return the handle of a sharded model; None while it is not sharded."""
        found: api.Zero | None = getattr(self.unwrap_model(model, keep_torch_compile=False), OWN, None)
        return found

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model without DDP around it; `prepare` shards it once an optimizer of it is prepared too."""
        if on_meta(model):
            device_placement = False  # shard moves it, unit by unit
        made: nn.Module = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        return made

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare everything, and shard each model that now has optimizers. Both may come in one call or in several."""
        prepared = super().prepare(*args, device_placement=device_placement)
        for wrapped in self._models:
            model = self.unwrap_model(wrapped, keep_torch_compile=False)
            own = {id(param) for param in model.parameters()}
            optimizers = [
                optimizer
                for optimizer in map(unwrapped, self._optimizers)
                if any(id(param) in own for group in optimizer.param_groups for param in group["params"])
            ]
            if optimizers and self.zero_of(model) is None:
                setattr(model, OWN, self._sharded(model, optimizers))
        return prepared

    def _sharded(self, model: nn.Module, optimizers: list[Any]) -> api.Zero:
        settings = {**self._settings, "device": self.device if on_meta(model) else None}
        if self._weights is None:
            return api.shard(model, optimizers, **settings)
        if any(self.zero_of(wrapped) is not None for wrapped in self._models):
            raise UserError(
                "a folder of weights is for one model, and there is another sharded one",
                got=f"weights={self._weights!r}", instead="an accelerator for each model, or weights=None",
            )  # fmt: skip
        return load(model, self._weights, optimizers, **settings)

    # --- training ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Add up gradients on this rank only. `accumulate` enters it for all but the last micro-batch."""
        zero = self.zero_of(model)
        with contextlib.nullcontext() if zero is None else zero.no_sync():
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward; refuse gradients of a model whose optimizer was not prepared, which no rank would average."""
        if loss.is_meta:
            raise StateError(
                "the loss is on meta: the model was prepared without an optimizer, and holds nothing",
                instead="model, optimizer = accelerator.prepare(model, optimizer)",
            )  # fmt: skip
        super().backward(loss, **kwargs)
        for model in self._models:
            if self.zero_of(model) is None and any(param.grad is not None for param in model.parameters()):
                raise StateError(
                    "a prepared model has gradients, and is not sharded: none of its optimizers was prepared",
                    where=f"model {type(self.unwrap_model(model)).__name__}",
                    instead="model, optimizer = accelerator.prepare(model, optimizer)",
                )

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing where loaders are even, as Accelerate's are by default; refuse uneven ones."""
        if not (self.even_batches if even_batches is None else even_batches):
            raise UserError(
                "join_uneven_inputs is for DistributedDataParallel",
                got="even_batches=False",
                instead="for batch in accelerator.zero.join(loader): ...",
            )
        yield

    # --- weights and checkpoints ------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights, on the CPU of rank 0; on the other ranks nothing, as with FSDP. Collective."""
        zero = self.zero_of(model)
        return super().get_state_dict(model, unwrap) if zero is None else whole_state(zero)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> Any:
        """Save the state, with sharded models and their optimizers in folders that `zero.save` writes. Collective."""
        with self._hidden() as sharded:
            where = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        for folder, zero in _folders(where, sharded):
            zero.save(folder)
        return where

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """Load what `save_state` wrote, on any number of ranks and at any stage. Collective."""
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            saved = (Path(self.project_dir) / "checkpoints").iterdir()
            input_dir = max(saved, key=lambda path: int(re.findall(r"\d+", path.name)[-1]))
        with self._hidden() as sharded:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        for folder, zero in _folders(Path(input_dir).expanduser(), sharded):
            zero.load(folder)

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[list[api.Zero]]:
        """Hide sharded models and their optimizers from Accelerate inside; yield the `Zero` of each."""
        models, optimizers = self._models, self._optimizers
        zeros = [zero for zero in map(self.zero_of, models) if zero is not None]
        bound = {id(optimizer) for zero in zeros for optimizer, _, _ in zero._engine.optimizer_members()}
        self._models = [model for model in models if self.zero_of(model) is None]
        self._optimizers = [optimizer for optimizer in optimizers if id(unwrapped(optimizer)) not in bound]
        try:
            yield zeros
        finally:
            self._models, self._optimizers = models, optimizers

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> NoReturn:
        """Refuse a hook that would be given whole weights to save."""
        _refuse_hook("register_save_state_pre_hook")

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> NoReturn:
        """Refuse a hook that would be given whole weights to load."""
        _refuse_hook("register_load_state_pre_hook")


def _refuse_hook(name: str) -> NoReturn:
    raise UserError(
        f"{name}: such a hook is given whole weights, to save or load them itself",
        instead="accelerator.register_for_checkpointing(what), or accelerator.get_state_dict(model) on every rank",
    )


def _folders(where: Any, zeros: list[api.Zero]) -> Iterator[tuple[Path, api.Zero]]:
    """Yield each model's folder and handle: zeroshard for the first, zeroshard_1 for the second, and so on."""
    for number, zero in enumerate(zeros):
        yield Path(where) / (f"{FOLDER}_{number}" if number else FOLDER), zero
