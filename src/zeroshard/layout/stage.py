"""The ZeRO stages as data: over which axes of the mesh of ranks each of the three model states is sharded.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.
Nothing else in the package knows what a stage is; other code asks for the placement of the state that it handles.

Ranks form a mesh of two axes, `replicate` and `shard`, as a `DeviceMesh` for FSDP2's hybrid sharding does. The ranks
along the shard axis are a *team*: they split a bucket among themselves. Each team is one *replica* of the model. With
one replica, the usual case, the team is all ranks.

Some parameters, such as experts, have the same rows on the ranks along one axis, and other rows on all other ranks.
They have teams of their own *along* that axis: each team shards its rows, one *part* of the whole tensor. With tensor
parallelism all teams lie along the data axis. A team shards its part of each tensor that is cut. Of a tensor that is
not cut, every team has a copy, with the same gradients: its replicas are *mirrored*.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import UserError, nearest
from .mesh import Grid


class Degree(enum.IntEnum):
    """The placement of a state on each axis of the mesh: over how many ranks one copy of it is spread.

    degree    replicate axis    shard axis    what a rank holds
    RANK      replicated        replicated    all of it
    TEAM      replicated        sharded       its shard, as one rank of every team does
    ALL       sharded           sharded       its part of the shard, as no other rank does
    """

    RANK = 0
    TEAM = 1
    ALL = 2


class Placements(NamedTuple):
    """The degree of each model state. A degree is true where the state is sharded."""

    parameters: Degree
    gradients: Degree
    optimizer: Degree

    @property
    def together(self) -> bool:
        """True if parameters are sharded just as optimizer states: then masters can rest without the parameters."""
        return bool(self.parameters) and self.parameters is self.optimizer

    @property
    def owned(self) -> Degree:
        """The placement of sums: at every stage a rank has these elements' average, as no other rank of its team."""
        return max(Degree.TEAM, self.optimizer)

    @property
    def by_part(self) -> bool:
        """True if each replica has only a part of the average of its shard."""
        return self.owned > Degree.TEAM

    @property
    def two_levels(self) -> bool:
        """True if each rank has only a part of its shard, so that a gather takes two collectives."""
        return self.parameters is Degree.ALL

    def sharded(self) -> dict[str, bool]:
        """Return for each state if it is sharded at all."""
        return {state: bool(degree) for state, degree in self._asdict().items()}


STATES = Placements._fields  # the model states
STAGES = {
    0: Placements(parameters=Degree.RANK, gradients=Degree.RANK, optimizer=Degree.RANK),
    1: Placements(parameters=Degree.RANK, gradients=Degree.RANK, optimizer=Degree.TEAM),
    2: Placements(parameters=Degree.RANK, gradients=Degree.TEAM, optimizer=Degree.TEAM),
    3: Placements(parameters=Degree.TEAM, gradients=Degree.TEAM, optimizer=Degree.TEAM),
}
SAVED = Degree.ALL  # what a rank writes to a checkpoint: every element once


class Seat(NamedTuple):
    """The coordinates of one rank in a mesh. Its team is the ranks on its line along `axis`."""

    position: int = 0  # on the shard axis
    size: int = 1  # of that axis: the ranks of a team
    replica: int = 0  # on the replicate axis
    replicas: int = 1  # the length of that
    part: int = 0  # which rows of a tensor along an axis the team has
    parts: int = 1  # how many teams have rows of it
    by_part: bool = False  # does each replica keep only a part of what it adds up?
    hosts: bool = False  # are replicas hosts, which have one copy of the model together?
    mirrored: bool = False  # do all replicas compute the same, so that their gradients are not added up?
    grid: Grid = Grid()
    axis: str = "shard"

    @property
    def sole(self) -> bool:
        """Tell if no other team has a rank that owns the same elements of a sharded state."""
        return self.replicas == 1

    @property
    def waiting(self) -> int:
        """The number of sums that may be under way behind the next one: each replica waits for those before it."""
        return self.replicas

    def cuts(self, first: int, last: int) -> list[int]:
        """Return the bounds of the replicas' portions of these elements, with both ends."""
        return [first + (last - first) * number // self.replicas for number in range(self.replicas + 1)]

    def own(self, portions: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return this replica's portion of a shard."""
        return portions[self.replica]

    @property
    def summed(self) -> int:
        """The number of replicas whose gradients are added up."""
        return 1 if self.mirrored else self.replicas

    @property
    def sources(self) -> int:
        """The number of ranks whose gradients are added up, of parameters that are not along an axis."""
        return self.size * self.summed

    @property
    def source(self) -> int:
        """The number of this rank among the `sources`."""
        return self.position + self.size * (0 if self.mirrored else self.replica)

    def members(self, rank: int) -> range:
        """Return the ranks of this team, in order of position; `rank` is the one that has these coordinates."""
        return self.grid.line(rank, self.axis)

    def everyones(self) -> list[Seat]:
        """Return the seat of each rank in its team of this kind, in rank order."""
        found: dict[int, Seat] = {}
        for number, team in enumerate(self.teams()):
            of = self._replace(part=number) if self.parts > 1 else self._replace(replica=number)
            found |= {rank: of._replace(position=position) for position, rank in enumerate(team)}
        return [found[rank] for rank in sorted(found)]

    def teams(self) -> list[range]:
        """Return the members of every team of this kind, in the order of their parts, or replicas."""
        return self.grid.lines(self.axis)

    def position_of(self, rank: int) -> int:
        """Return the position of any rank in its own team."""
        return self.grid.coordinate(rank, self.axis)

    def whole(self, shape: tuple[int, ...], cut: int = 0) -> tuple[int, ...]:
        """Return the shape of the whole tensor, of which the team has a part of this shape, cut on dimension `cut`."""
        return shape if self.parts == 1 else (*shape[:cut], shape[cut] * self.parts, *shape[cut + 1 :])


ALONE = Seat()


def seat(rank: int, ranks: int, replicas: int = 1, *, hosts: bool = False, by_part: bool = False) -> Seat:
    """Return a rank's seat in a mesh of replicas, or hosts. Raises `UserError` if these do not divide the ranks."""
    if replicas < 1 or ranks % replicas:
        divisors = [str(count) for count in range(1, ranks + 1) if ranks % count == 0]
        name = "hosts" if hosts else "replicas"
        more = f"{max(replicas, 1)} ranks, or a multiple of that; or {name}=1"
        raise UserError(
            f"{name} must divide the ranks",
            got=f"{name}={replicas}, ranks={ranks}",
            instead=f"one of {', '.join(divisors[:12])}" if ranks > 1 else more,
        )
    size, by_part = ranks // replicas, replicas > 1 and (by_part or hosts)
    grid = Grid((("replicate", replicas), ("shard", size)))
    return Seat(rank % size, size, rank // size, replicas, by_part=by_part, hosts=hosts, grid=grid)


def seat_on(rank: int, axes: Mapping[str, int], name: str) -> Seat:
    """Return a rank's seat among the ranks that differ from it on one axis only.

    axes: the lengths of the mesh's axes by name, the slowest first. Raises `UserError` if none has this name.
    """
    if name not in axes:
        raise UserError("the DeviceMesh has no axis of that name", got=repr(name), instead=nearest(name, list(axes)))
    grid = Grid(tuple(axes.items()))
    size, stride = grid.length(name), grid.stride(name)
    part = rank // (stride * size) * stride + rank % stride  # the number of its line
    return Seat(grid.coordinate(rank, name), size, part=part, parts=grid.ranks // size, grid=grid, axis=name)
