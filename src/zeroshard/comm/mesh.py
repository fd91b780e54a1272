"""The ranks that a model is sharded over: from `Comm.group`, a process group or a mesh, to this rank's end of it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..arithmetic.sums import simulated
from ..errors import UserError
from ..events import Ledger
from ..layout.stage import Seat, seat, seat_on
from ..policies.comm import Comm, Simulated, Transport
from .agreement import Group, Progress
from .collectives import Link
from .groups import groups_of, start
from .launcher import ranks_to_join
from .process_group import ProcessGroup
from .process_team import ProcessTeam
from .transport import Team


def connect(settings: Comm, ledger: Ledger, device: torch.device, axis: str = "", tensor: Any = None) -> Group:
    """Return this rank's end of the group that `settings` names; start `torch.distributed` if it is not started.

    axis: the axis of its mesh along which some parameters are sharded; all ranks shard the other parameters then.
    tensor: the `DeviceMesh` of one axis over which tensor parallelism has cut parameters: `settings` names another axis
        of the same mesh, along which all parameters are sharded, and the ranks of both axes agree.
    Under a launcher (`RANK` and `WORLD_SIZE` set) the default process group is made here and ended at exit.
    """
    parent = settings.group
    if tensor is not None:
        return _beside(parent, tensor, settings, ledger, device)
    if isinstance(parent, Simulated):
        sits, how = _seat(parent.rank, parent.ranks, settings), _transport(settings, device)
        shares = how == "shared" or (how == "auto" and simulated(torch.empty(0, device=device)))
        place = seat_on(parent.rank, _axes(parent, settings), axis) if axis else None
        other = None if place is None else Team(ledger, device, place, shares=shares)
        return Group(Team(ledger, device, sits, shares=shares), parent.rank, parent.ranks, other)
    axes = _axes(parent, settings) if axis else {}
    if hasattr(parent, "get_group") and hasattr(parent, "ndim"):
        if parent.get_coordinate() is None:
            raise UserError(
                "this rank is not in the DeviceMesh",
                where=f"rank {dist.get_rank()}",
                got=f"{parent.mesh.tolist()}",
                instead="call shard(...) on ranks of the mesh only",
            )
        settings = settings if axis else replace(settings, replicas=_replicas_of(parent, settings))
        _check_ascending(parent)
        parent = parent.get_group() if parent.ndim == 1 else _everyone_of(parent)
    if parent is None:
        if not (dist.is_available() and dist.is_initialized()):
            if ranks_to_join(os.environ) == 1:
                return Group(Team(ledger, device, _seat(0, 1, settings)))
            start(settings, device)
        parent = dist.group.WORLD
    if parent != dist.GroupMember.NON_GROUP_MEMBER and not isinstance(parent, dist.ProcessGroup):
        raise UserError(
            "Comm.group is not a process group",
            expected="a torch.distributed process group, or a DeviceMesh of one axis or two",
            got=repr(parent),
            instead="Comm(group=torch.distributed.new_group([...]))",
        )
    if parent == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(parent) < 0:
        raise UserError(
            "this rank is not a member of the process group",
            where=f"rank {dist.get_rank()}",
            instead="call shard(...) on members of the group only",
        )
    sits = _seat(dist.get_rank(parent), dist.get_world_size(parent), settings)
    place = seat_on(dist.get_rank(parent), axes, axis) if axis else None
    if dist.get_world_size(parent) == 1:
        return Group(Team(ledger, device))
    link = Link(
        groups_of(parent, device, settings.timeout, sits, place, _transport(settings, device)), ledger, Progress()
    )
    groups, other = link.groups, None
    team = ProcessTeam(ledger, device, link, sits, (groups.gathers, groups.reductions), groups.shared[:2])
    if place is not None:
        other = ProcessTeam(ledger, device, link, place, groups.axis_streams, groups.shared[-2:])
    return ProcessGroup(team, link, other)


def _seat(rank: int, ranks: int, settings: Comm) -> Seat:
    return seat(rank, ranks, settings.rows or 1, hosts=settings.two_levels, by_part=settings.optimizer == "all")


def program() -> Any:
    """Return torch's default process group, which all models of this rank have in common; or None."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _transport(settings: Comm, device: torch.device) -> Transport:
    """Return the transport to try on a device. Refuses shared memory off the CPU."""
    if device.type != "cpu" and settings.transport == "shared":
        raise UserError(
            "memory is shared between ranks that compute on the CPU",
            got=f'transport="shared" on {device}',
            instead='Comm(transport="auto")',
        )
    return settings.wanted if device.type == "cpu" else "gloo"


def _beside(data: Any, tensor: Any, settings: Comm, ledger: Ledger, device: torch.device) -> Group:
    """Return this rank's end of the ranks of two axes of one mesh: the data's, and tensor parallelism's."""
    root, names = data._get_root_mesh(), {*data.mesh_dim_names, *tensor.mesh_dim_names}
    mesh = root[tuple(name for name in root.mesh_dim_names if name in names)]
    _check_ascending(mesh)
    parent = _everyone_of(mesh)
    rank = dist.get_rank(parent)
    place = seat_on(rank, dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)), data.mesh_dim_names[0])
    # A tensor that tensor parallelism does not cut has a copy in each team: its parts are replicas.
    sits = place._replace(part=0, parts=1, replica=place.part, replicas=place.parts, mirrored=place.parts > 1)
    if dist.get_world_size(parent) == 1:
        return Group(Team(ledger, device))
    transport = _transport(settings, device)
    link = Link(groups_of(parent, device, settings.timeout, sits, transport=transport), ledger, Progress())
    groups = link.groups
    both = [
        ProcessTeam(ledger, device, link, each, (groups.gathers, groups.reductions), groups.shared)
        for each in (sits, place)
    ]
    return ProcessGroup(both[0], link, both[1])


def _axes(mesh: Any, settings: Comm) -> dict[str, int]:
    """Return names and lengths of the axes of a mesh, or of a simulated one, for parameters along one of them."""
    named = isinstance(mesh, Simulated) and mesh.axes
    if not named and not getattr(mesh, "mesh_dim_names", None):
        raise UserError(
            "Layout.along names an axis of a mesh, and Comm.group is no mesh whose axes have names",
            got=repr(mesh),
            instead='Comm(group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")))',
        )
    if settings.rows not in (None, 1):
        raise UserError(
            "Layout.along beside several replicas, or hosts, is not supported",
            got=f"replicas={settings.replicas}, hosts={settings.hosts}",
            instead="Layout(along=...) alone: all ranks shard the other parameters then",
        )
    return dict(mesh.axes) if named else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def _replicas_of(mesh: Any, settings: Comm) -> int:
    """Return the replicas of a `DeviceMesh`: its first axis replicates and its second shards, as with FSDP2; a mesh of
    one axis shards."""
    if mesh.ndim > 2:
        raise UserError(
            "a DeviceMesh of more than two axes cannot be sharded over",
            expected="one axis, which shards, or two, of which the first replicates",
            got=f"{mesh.ndim} axes {mesh.mesh_dim_names}",
            instead='Comm(group=mesh["replicate", "shard"])',
        )
    replicas = int(mesh.size(0)) if mesh.ndim == 2 else 1
    if settings.two_levels and replicas > 1:
        raise UserError(
            "the first axis of a DeviceMesh replicates, and ranks on several hosts shard one copy of the model",
            got=f"hosts={settings.hosts} and a mesh {tuple(mesh.shape)}",
            instead=f"Comm(hosts={settings.hosts}) and a mesh of one axis, or none; or Comm(group=mesh)",
        )
    if settings.replicas not in (None, replicas):
        raise UserError(
            "Comm.replicas contradicts the DeviceMesh",
            expected=f"replicas={replicas}, the length of its first axis",
            got=f"replicas={settings.replicas}",
            instead="Comm(group=mesh)",
        )
    return replicas


def _check_ascending(mesh: Any) -> None:
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise UserError(
            "the ranks of a DeviceMesh must ascend, row by row",
            got=f"{mesh.mesh.tolist()}",
            instead=f"torch.distributed.device_mesh.init_device_mesh(..., {tuple(mesh.shape)})",
        )


def _everyone_of(mesh: Any) -> Any:
    """Return the process group of all ranks of a mesh of several axes."""
    if mesh.mesh.numel() == dist.get_world_size():
        return dist.group.WORLD
    if not mesh.mesh_dim_names:
        raise UserError(
            "a DeviceMesh of several axes that covers some ranks only has no group of them all, without names",
            got=f"{mesh.mesh.tolist()} of {dist.get_world_size()} ranks",
            instead='DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))',
        )
    return mesh._flatten().get_group()
