"""A Trainer of Hugging Face's or a LightningModule as a job: for `verify`, `plan` and whatever else asks for one.

The kind of what a job's function returned is told by its methods, so that neither library is imported here. The model,
optimizer, loss and collation are the trainer's own; its loop is not run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..errors import UserError

DRAWN = 64  # batches of a data set that has no length, of which micro-batches are drawn


def parts_of(made: Any) -> dict[str, Any] | None:
    """Return the parts of a job from what its function made; None for anything else.

    made: a Trainer; or a LightningModule, alone or with its loader or data module behind it.
    """
    if all(hasattr(made, name) for name in ("compute_loss", "create_optimizer", "train_dataset", "args")):
        return _of_trainer(made)
    module, *rest = made if isinstance(made, (tuple, list)) and made else (made,)
    if all(hasattr(module, name) for name in ("training_step", "configure_optimizers")):
        return _of_module(module, *rest)
    return None


def _of_trainer(trainer: Any) -> dict[str, Any]:
    if trainer.train_dataset is None:
        raise UserError(
            "this Trainer has nothing to train on", got="train_dataset=None", instead="Trainer(train_dataset=...)"
        )
    model, sharded = trainer.model, getattr(trainer, "zero", None)
    if sharded is not None:
        raise UserError("this Trainer has trained already", instead="a function that makes a new one")
    loader = torch.utils.data.DataLoader(
        _columns(trainer), batch_size=trainer.args.per_device_train_batch_size, collate_fn=trainer.data_collator
    )
    model.train()

    def loss(model: nn.Module, batch: Any) -> Any:
        return trainer.compute_loss(model, trainer._prepare_inputs(batch))

    return {
        "model": model,
        "optimizer": _again(model, trainer.create_optimizer()),
        "batch": _batches(loader),
        "loss": loss,
    }


def _columns(trainer: Any) -> Any:
    """Return the data without the columns that the model does not take, as the Trainer removes them."""
    data = trainer.train_dataset
    return trainer._remove_unused_columns(data, "training") if hasattr(data, "column_names") else data


def _of_module(module: Any, data: Any = None) -> dict[str, Any]:
    if hasattr(data, "train_dataloader"):
        data.prepare_data(), data.setup("fit")
        loader = data.train_dataloader()
    else:
        loader = module.train_dataloader() if data is None else data
    if hasattr(module, "configure_model"):
        module.configure_model()
    made = module.configure_optimizers()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (list, tuple)):  # and schedulers
        made = list(made[0])
    if isinstance(made, dict):
        made = made["optimizer"]
    several = list(made) if isinstance(made, (list, tuple)) else [made]
    if len(several) != 1 or not isinstance(several[0], torch.optim.Optimizer):
        raise UserError(
            "a job from a LightningModule has one optimizer",
            where=f"{type(module).__name__}.configure_optimizers",
            got=repr(several)[:200],
            instead="one; or a function that returns a dict of model, optimizer, batch and loss",
        )
    module.train()

    def loss(module: nn.Module, batch: Any) -> Any:
        """Run `training_step` as the module's own forward, so that its weights are gathered, as Lightning does."""
        own = module.forward

        def forward(*inputs: Any) -> Any:
            module.forward = own  # calls of itself inside the step are the model's forward again
            return module.training_step(*inputs)  # type: ignore[operator]

        module.forward = forward
        try:
            value = module(batch, 0)
        finally:
            del module.forward
        return value["loss"] if isinstance(value, dict) else value

    return {"model": module, "optimizer": _again(module, several[0]), "batch": _batches(loader), "loss": loss}


def _again(model: nn.Module, made: torch.optim.Optimizer) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes the same optimizer of other tensors in the model's order, such as masters."""
    numbers = {id(param): number for number, param in enumerate(p for p in model.parameters() if p.requires_grad)}
    if unknown := [param for group in made.param_groups for param in group["params"] if id(param) not in numbers]:
        raise UserError(
            "an optimizer has a parameter that is frozen, or not the model's", where=type(made).__name__,
            got=f"{len(unknown)} of them", instead="parameters of the model that require gradients",
        )  # fmt: skip
    groups = [{**group, "params": [numbers[id(param)] for param in group["params"]]} for group in made.param_groups]

    def again(params: Any) -> torch.optim.Optimizer:
        given = [param for param in params if param.requires_grad]
        chosen = [{**group, "params": [given[number] for number in group["params"]]} for group in groups]
        return type(made)(chosen, **{key: value for key, value in made.defaults.items() if key in _accepted(made)})

    return again


def _accepted(made: torch.optim.Optimizer) -> set[str]:
    code = type(made).__init__.__code__
    return set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


def _batches(loader: Any) -> Callable[[int, int], Any]:
    """Return a function that draws micro-batches at random; its caller seeds torch's generator by step and number."""
    data: Any = getattr(loader, "dataset", None)
    size: Any = getattr(loader, "batch_size", None)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and size and len(data):
        return lambda step, index: loader.collate_fn([data[row] for row in torch.randint(len(data), (size,)).tolist()])
    with unset_fake_temporarily():  # a planned model has no values, but its data is read
        drawn = list(itertools.islice(iter(loader), DRAWN))
    if not drawn:
        raise UserError("the data set of a job is empty", got=type(data).__name__)
    return lambda step, index: drawn[int(torch.randint(len(drawn), ()))]
