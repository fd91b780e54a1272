"""A record of a model and its optimizers before `shard`, which restores them if it cannot be completed.

Everything is noted at the start, whether or not it will be changed: the tables and attributes of every module and
optimizer, the groups and states, and the class, hooks and data of every parameter. So nothing here depends on what
assembling does.

The old data are held until sharding is done, unless a replicated copy with the same bits takes their place. Then
`restore` gives the parameter the copy's values, so that a model does not take its memory twice.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...arithmetic.sums import dense, same_bits, unrepeated
from ..weights.gathered import point

_TABLES = (dict, OrderedDict, defaultdict)
_OURS = f"{Path(__file__).parents[2]}/"


class _Fields:
    """The attributes of an object, and the contents of those that are tables."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.tables = [fields, *(value for value in fields.values() if type(value) in _TABLES)]
        self.contents = [dict(table) for table in self.tables]

    def restore(self) -> None:
        for table, content in zip(self.tables, self.contents, strict=True):
            table.clear()
            table.update(content)


class _Leaf:
    """One parameter or buffer: its class, attributes, hooks, shape and data."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.kind = type(tensor)
        self.fields = dict(tensor.__dict__)
        self.hooks: dict[Any, Any] | None = tensor._post_accumulate_grad_hooks
        self.hooked = None if self.hooks is None else dict(self.hooks)
        self.meta = tensor.is_meta
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.trainable = tensor.requires_grad
        self.data: Tensor | None = None if self.meta else tensor.data

    def restore(self) -> None:
        tensor: Any = self.tensor
        tensor.__class__ = self.kind
        if tensor._post_accumulate_grad_hooks is not None:
            tensor._post_accumulate_grad_hooks.clear()  # the table itself is known to C++
        tensor._post_accumulate_grad_hooks = None
        if self.meta:
            if not tensor.is_meta:
                old: Any = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
                torch.utils.swap_tensors(
                    tensor, nn.Parameter(old, self.trainable) if isinstance(tensor, nn.Parameter) else old
                )
                tensor.__class__ = self.kind
        elif self.data is not None:
            point(tensor, self.data)
        else:  # what took its place has the same bits
            old = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=tensor.device)
            unrepeated(old).copy_(unrepeated(tensor.data, old))
            tensor.data = old
        if self.hooks is not None and self.hooked is not None:
            self.hooks.update(self.hooked)
            tensor._post_accumulate_grad_hooks = self.hooks
        tensor.__dict__.clear()
        tensor.__dict__.update(self.fields)


class Before:
    """The model and its optimizers as they were before `shard`, for `restore` to bring back."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        modules = list(model.modules())
        self._fields = [_Fields(each.__dict__) for each in (*modules, *optimizers)]
        self._recurrent: list[Any] = []  # RNNs with meta parameters: a tensor with a weak reference cannot be swapped
        for module, fields in zip(modules, self._fields, strict=False):
            if isinstance(module, nn.RNNBase) and any(param.is_meta for param in module.parameters()):
                self._recurrent.append(module)
                fields.contents[0]["_flat_weight_refs"] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self._fields += [_Fields(group)]
                self._lists += [(value, list(value)) for value in group.values() if type(value) is list]
            self._fields += [_Fields(state) for state in optimizer.state.values() if type(state) in _TABLES]
        tensors = {id(each): each for each in (*model.parameters(), *model.buffers()) if dense(each)}
        with torch._C.DisableTorchFunctionSubclass():
            self._leaves = {key: _Leaf(each) for key, each in tensors.items()}
        self._written: list[tuple[Tensor, Tensor]] = []
        self._generator = torch.get_rng_state()

    def keep(self, tensor: Tensor) -> None:
        """Keep a copy of a buffer that is about to be written to."""
        self._written.append((tensor, tensor.clone()))

    def replaced(self, param: nn.Parameter) -> None:
        """Drop a parameter's old data if the parameter lies elsewhere now, with the same bits.

        Old data on another device are held: they are no second copy there, and to compare would copy the new data back.
        """
        leaf = self._leaves.get(id(param))  # None for a parameter that stands in for a DTensor
        if leaf is None or (data := leaf.data) is None or data.device != param.device or data.dtype != param.dtype:
            return
        if same_bits(data, param.data):
            leaf.data = None

    @torch.no_grad()
    def restore(self, error: BaseException) -> None:
        """Restore all that was noted. error: what ended the sharding."""
        if any(leaf.meta and not leaf.tensor.is_meta for leaf in self._leaves.values()):
            _let_go(error)
        with torch._C.DisableTorchFunctionSubclass():
            for module in self._recurrent:
                module._flat_weight_refs = []
            for tensor, content in self._written:
                tensor.copy_(content)
            for leaf in self._leaves.values():
                leaf.restore()
            for fields in self._fields:
                fields.restore()
            for values, before in self._lists:
                values[:] = before
            for module in self._recurrent:
                module._init_flat_weights()
            torch.set_rng_state(self._generator)


def _let_go(error: BaseException) -> None:
    """Clear our own frames that an exception has left: a tensor of which they hold a view cannot be swapped."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(_OURS):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
