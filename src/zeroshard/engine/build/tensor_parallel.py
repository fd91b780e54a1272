"""Sharding beside tensor parallelism: a plain parameter stands for this rank's part of each `DTensor`.

`parallelize_module` makes parameters `DTensor`s: a rank holds a part of each, or a copy, along one axis of a mesh. A
plain parameter with the same memory replaces each of them in the module, under its name, and in the optimizer. The rest
of zeroshard sees plain parameters. While the module's own forward runs, the `DTensor` is in place again: torch makes it
of the plain parameter, and gives that its gradient as the placements say, so that all copies of a parameter get the
same one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ...errors import UserError
from ...policies.comm import Comm
from ...policies.incompatible import refuse_beside_tensors
from ...policies.layout import Layout

Placed = tuple[nn.Parameter, Callable[..., Any]]  # a parameter, and what makes its DTensor of it


@dataclass
class TensorParallel:
    """cuts: by the id of each parameter that stands for a part of a tensor, the dimension on which that is cut."""

    axis: str = ""  # the data axis
    cuts: dict[int, int] = field(default_factory=dict)
    mesh: Any = None  # of the tensor axis
    made: Callable[[torch.Tensor, int], Any] | None = None  # makes the DTensor of a part, cut on a dimension

    def assembled(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather a tensor on all ranks of the tensor axis, each of which has a part of it, cut on dimension `dim`.

        The gather runs on the mesh's device, and the result goes to the part's device. It is torch's own collective, as
        in forwards: if a rank is lost meanwhile, the others end by the backend's time-out.
        """
        assert self.made is not None
        whole: torch.Tensor = self.made(part.detach().to(self.mesh.device_type).contiguous(), dim).full_tensor()
        return whole.to(part.device).contiguous()

    def own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a tensor, as a view."""
        size = whole.shape[dim] // self.mesh.size()
        return whole.narrow(dim, self.mesh.get_local_rank() * size, size)


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")  # importing the class takes a second


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, param) for name, param in model.named_parameters() if is_dtensor(param))


def mesh_of(model: nn.Module, comm: Comm) -> Any:
    """Return the mesh of the model's DTensors if `comm` names another axis of the same mesh; else None."""
    data = comm.group
    beside = hasattr(data, "_get_root_mesh") and data.ndim == 1 and data._get_root_mesh().ndim > 1
    meshes = [param.device_mesh for _, param in _named(model)] if beside else []
    fitting = [
        mesh
        for mesh in meshes
        if mesh.ndim == 1
        and mesh._get_root_mesh() == data._get_root_mesh()
        and mesh.mesh_dim_names != data.mesh_dim_names
    ]
    return fitting[0] if fitting else None


def check_tensors(model: nn.Module, mesh: Any, layout: Layout, comm: Comm) -> None:
    """Refuse, by name, DTensors that no plain parameter can stand for. mesh: as `mesh_of` returns it."""
    if mesh is not None:
        refuse_beside_tensors(layout, comm)
    for name, param in _named(model):
        shards = [placement for placement in param.placements if not placement.is_replicate()]
        plain = all(type(placement).__name__ == "Shard" for placement in shards)
        expected = instead = ""
        if mesh is None or param.device_mesh != mesh:
            expected = "DTensors over one axis of a mesh, and Comm.group another axis of that mesh"
            instead = (
                'mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")); parallelize_module(model, mesh["tp"], '
            )
            instead += '...); shard(..., comm=Comm(group=mesh["dp"]))'
        elif not plain:
            expected = instead = "Shard(dimension) or Replicate()"
        elif any(param.shape[placement.dim] % mesh.size() for placement in shards):
            expected = f"a size that {mesh.size()} ranks divide"
            instead = "a size that they divide, or Replicate()"
        elif param.is_meta:
            expected, instead = "values", "model.to_empty(device=...) and first values, before shard(...)"
        elif param._backward_hooks or param._post_accumulate_grad_hooks:
            expected, instead = "no hooks of its own", "register hooks after shard(...)"
        elif any(fnmatchcase(name, pattern) for pattern in layout.ignore):
            expected, instead = "a parameter that is sharded", "Layout(ignore=...) without it"
        if expected:
            raise UserError(
                "a parameter is a DTensor, cut by parallelize_module or distribute_tensor, and cannot be sharded so",
                where=f"parameter {name!r}",
                expected=expected,
                got=f"{tuple(param.shape)} as {param.placements} on {param.device_mesh}",
                instead=instead,
            )


def replace_dtensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: Any, axis: str
) -> TensorParallel:
    """Put plain parameters in the place of all DTensors. `rollback.Before` can put the DTensors back."""
    local: dict[int, Placed] = {}
    found = TensorParallel(axis, mesh=mesh)
    for _, param in _named(model):
        own = nn.Parameter(param.to_local().detach(), requires_grad=param.requires_grad)
        own.__dict__.update({key: value for key, value in param.__dict__.items() if not key.startswith("_")})
        own.grad = None if param.grad is None else param.grad.to_local()
        placed = {"device_mesh": param.device_mesh, "placements": param.placements, "run_check": False}
        local[id(param)] = own, functools.partial(type(param).from_local, **placed)
        (placement,) = param.placements
        if not placement.is_replicate() and mesh.size() > 1:
            found.cuts[id(own)] = placement.dim
            found.made = functools.partial(_made, type(param), mesh, type(placement))
    for module in model.modules():
        mine = {key: local[id(param)] for key, param in module._parameters.items() if id(param) in local}
        module._parameters.update({key: own for key, (own, _) in mine.items()})
        if mine:
            module.forward = functools.partial(_forward, module.forward, module, mine)
    for optimizer in (each for each in optimizers if isinstance(each, torch.optim.Optimizer)):
        for group in optimizer.param_groups:
            params = group["params"]
            params[:] = [local[id(param)][0] if id(param) in local else param for param in params]
        for param in [param for param in optimizer.state if id(param) in local]:
            kept = optimizer.state.pop(param)
            optimizer.state[local[id(param)][0]] = {
                key: value.to_local() if is_dtensor(value) else value for key, value in kept.items()
            }
    return found


def _made(kind: Any, mesh: Any, shard: Callable[[int], Any], part: torch.Tensor, dim: int) -> Any:
    return kind.from_local(part, device_mesh=mesh, placements=[shard(dim)], run_check=False)


def _forward(forward: Callable[..., Any], module: nn.Module, mine: dict[str, Placed], *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with its DTensors in place."""
    # A tensor that was put in place for this call (`torch.func.functional_call`) stays.
    present = {key: placed for key, placed in mine.items() if module._parameters.get(key) is placed[0]}
    try:
        module._parameters.update({key: made(own) for key, (own, made) in present.items()})
        return forward(*args, **kwargs)
    finally:
        module._parameters.update({key: own for key, (own, _) in present.items()})
