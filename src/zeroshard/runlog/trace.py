"""A trace of a model's modules for its `RunLog`: digests of what each call gets and gives, and of gradients.

Entries lie in the order in which calls end, so a module comes before the one that called it. Digests of inputs are made
before the call, which may change them in place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..errors import UserError

FORWARD, BACKWARD = "forward", "backward"
Describe = Callable[[Tensor], list[Any]]  # a tensor's digest first


def check_traced(model: nn.Module) -> None:
    """Refuse a compiled model."""
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        raise UserError(
            "the modules of a compiled model do not run one by one", got="trace=True, and torch.compile",
            instead="RunLog(..., trace=True) of the model that was compiled, run without it",
        )  # fmt: skip


class Trace:
    """Hooks on every module of a model, and the entries that they have made since `take`.

    An entry is [direction, module, class, call, output, digests of inputs, outputs]. call: of the module, from 0 in
    each step. That of a backward has one output, the gradient of that one of the module's.
    """

    def __init__(self, model: nn.Module, describe: Describe, wrapped: re.Pattern[str]) -> None:
        self._describe = describe
        self._entries: list[list[Any]] = []
        self._open: list[tuple[nn.Module, list[str]]] = []
        self._calls: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []
        for name, module in model.named_modules():
            clean = wrapped.sub("", f".{name}.").strip(".")
            self._hooks.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._ends(clean), with_kwargs=True))

    def take(self) -> list[list[Any]]:
        """Return the entries so far, and forget them."""
        entries, self._entries, self._open = self._entries, [], []
        return entries

    def end(self) -> None:
        """Watch no call any more."""
        for hook in self._hooks:
            hook.remove()

    def next_step(self) -> None:
        """Count calls from 0 again."""
        self._calls.clear()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open.append((module, [self._told(each)[0] for each in _tensors((args, kwargs))]))

    def _ends(self, name: str) -> Callable[..., None]:
        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs: list[str] = []
            while self._open:  # a call that raised has left its own
                opened, inputs = self._open.pop()
                if opened is module:
                    break
            place = name, type(module).__name__, self._calls[name]
            self._calls[name] += 1
            tensors = _tensors(output)
            self._entries.append([FORWARD, *place, 0, inputs, [self._told(each) for each in tensors]])
            for at, tensor in enumerate(tensors):
                if tensor.requires_grad and not tensor.is_leaf:  # a parameter would keep a hook of each step
                    tensor.register_hook(partial(self._back, (*place, at)))

        return end

    def _back(self, place: tuple[str, str, int, int], gradient: Tensor) -> None:
        self._entries.append([BACKWARD, *place, [], [self._told(gradient)]])

    @torch.no_grad()
    def _told(self, tensor: Tensor) -> list[Any]:
        tensor = tensor.detach()
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return self._describe(torch.view_as_real(local) if local.is_complex() else local)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
