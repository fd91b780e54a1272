"""The one contract for everything that builds a user's training job from a name: plan, simulate, verify, bench.

    def job():                                          # train.py; on the command line train:job, or train.py:job
        model = GPT(...)
        return {
            "model": model,                             # an nn.Module
            "optimizer": lambda params: AdamW(params),  # parameters (or groups) -> torch.optim.Optimizer
            "batch": lambda step, index: (x, y),        # micro-batch `index` of a step, whatever `loss` takes
            "loss": lambda model, batch: ...,           # -> a scalar to call backward on
        }

A missing part limits what can be asked of the job, and the error says so. A function may return a Trainer of Hugging
Face's or a LightningModule instead: `integrations.jobs` makes these parts of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ..errors import UserError, nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PARTS = ("model", "optimizer", "batch", "loss")


@dataclass(frozen=True)
class Job:
    """A built job. `optimizer`, `batch` and `loss` raise `UserError` when called where the function gave none."""

    name: str
    model: nn.Module
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    given: frozenset[str]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Make the optimizer of the model's parameters, or all of them where the function makes several."""
        made: Any = self.optimizer(self.model.parameters())
        return list(made) if isinstance(made, (list, tuple)) else [made]

    def loss_of(self, batch: Any) -> Tensor:
        """Compute the loss of a micro-batch. Raises `UserError` unless backward can start from it."""
        loss: Any = self.loss(self.model, batch)
        tensor = getattr(loss, "shape", None) is not None and getattr(loss, "requires_grad", False)
        if not tensor or loss.numel() != 1:
            shape = getattr(loss, "shape", None)
            got = type(loss).__name__ if shape is None else f"shape {tuple(shape)}, requires_grad={loss.requires_grad}"
            raise UserError(
                "the job's loss is nothing to call backward on",
                where=f"{self.name}()['loss'](model, batch)",
                expected="a scalar tensor that depends on a trainable parameter",
                got=got,
            )
        return cast("Tensor", loss)

    def need(self, *parts: str) -> None:
        """Raise `UserError` unless the function returned all of these."""
        for part in parts:
            if part not in self.given:
                _missing(self.name, part)


def find(name: str) -> Callable[[], Any]:
    """Find the function that `module:function` or `path/to/file.py:function` names.

    The current folder counts, as it does for `python -m`, and a file's own folder, as it does for `python file.py`.
    """
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise UserError(
            "a job is named module:function",
            got=repr(name),
            instead="train:job; a model by its size is plan --params 7B",
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = _load(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            "the module of the job cannot be imported",
            where=module_name,
            got=f"{type(error).__name__}: {error}",
            instead="module:function, importable from the current folder or installed, or path/to/file.py:function",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            "the module has no such function", where=module_name, got=repr(function_name),
            instead=nearest(function_name, functions),
        )  # fmt: skip
    found: Callable[[], Any] = function
    return found


def _load(path: Path) -> ModuleType:
    """Load a file as a module, once per process, under its path as a name: no installed module is shadowed."""
    name = str(path.resolve())
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        neighbours = [str(other) for other in sorted(path.parent.glob("*.py"))]
        instead = nearest(path, neighbours) if neighbours else "path/to/train.py:function"
        raise UserError("the job's file does not exist", where=str(path), instead=instead)
    if str(path.resolve().parent) not in sys.path:
        sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # it failed half-way
        raise
    return module


def build(
    job: str | Callable[[], Any], *, device: str | None = None, make: Callable[[Callable[[], Any]], Any] | None = None
) -> Job:
    """Call the function (with `device` as torch's default device, "meta" for shapes only) and check what it returns.

    make: calls a model that is a function, which has to be made with values. By default it is just called.
    """
    import torch

    from ..integrations.jobs import parts_of

    name, function = (job, find(job)) if isinstance(job, str) else (_name(job), job)
    where: AbstractContextManager[Any] = nullcontext() if device is None else torch.device(device)
    try:
        with where:
            parts = function()
            model = parts.get("model") if isinstance(parts, dict) else None
            if callable(model) and not isinstance(model, torch.nn.Module):
                parts = {**parts, "model": model() if make is None else make(model)}
    except Exception as error:
        raise UserError(
            "the job's function raised",
            where=f"{name}()" + (f" on device {device!r}" if device else "") + line_of(error),
            got=f"{type(error).__name__}: {error}",
            instead="a function without arguments that returns a dict of model, optimizer, batch and loss",
        ) from error
    if not isinstance(parts, dict):
        parts = parts_of(parts) or parts
    if not isinstance(parts, dict) or not isinstance(parts.get("model"), torch.nn.Module):
        raise UserError(
            "the job's function must return a dict with a model",
            where=f"{name}()",
            expected="{'model': nn.Module or a function that makes it, 'optimizer': ..., 'batch': ..., 'loss': ...}",
            got=type(parts).__name__ if not isinstance(parts, dict) else f"a dict of {sorted(map(str, parts))}",
        )
    for key in parts:
        if key not in PARTS:
            raise UserError(
                "the job has a part of no meaning", where=f"{name}()", got=repr(key), instead=nearest(key, PARTS)
            )
    for key in PARTS[1:]:
        if key in parts and not callable(parts[key]):
            raise UserError("a part of the job is not callable", where=f"{name}()[{key!r}]", got=repr(parts[key]))

    def part(key: str) -> Callable[..., Any]:
        given: Callable[..., Any] = parts.get(key) or (lambda *args: _missing(name, key))
        return given

    return Job(name, parts["model"], part("optimizer"), part("batch"), part("loss"), frozenset(parts))


def _name(function: Any) -> str:
    """Name a function; of `functools.partial` the one inside, of another callable its class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def line_of(error: BaseException) -> str:
    """Name the innermost line of a user's own code that the error passed: ", train.py:12 in get_batch", or ""."""
    paths = sysconfig.get_paths()
    others = [paths[each] for each in ("stdlib", "platstdlib", "purelib", "platlib")] + [str(Path(__file__).parents[1])]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.isfile(frame.filename) and not any(Path(frame.filename).is_relative_to(each) for each in others):
            return f", {frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def _missing(name: str, part: str) -> NoReturn:
    signature = {"model": "an nn.Module", "optimizer": "optimizer(params)", "batch": "batch(step, index)"}
    raise UserError(
        f"this question needs the job's {part}",
        where=f"{name}()",
        expected=f"a key {part!r}: {signature.get(part, 'loss(model, batch)')}",
        got="none",
        instead=f"return {{..., {part!r}: ...}}",
    )
