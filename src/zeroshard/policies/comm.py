"""The settings of communication between ranks, and the stand-in for a process group in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..errors import UserError
from ..layout.limits import PREFETCH
from ..layout.stage import Seat
from ..validation import FLAG, check_fields, count, number, one_of

Reduce = Literal["ordered", "native", "int8"]
Transport = Literal["auto", "gloo", "shared"]
AUTO: Transport = (
    "auto"  # what "auto" tries on the CPU: shared memory where ranks have it; tests of messages say "gloo"
)
Over = Literal["team", "all"]


_FIELDS = {
    "reduce": one_of(Reduce),
    "transport": one_of(Transport),
    "optimizer": one_of(Over, "says over which ranks its states are sharded"),
    "replicas": count(
        1, "counts copies of the model", "Comm(replicas=2)", "1, 2, ..., a divisor of the number of ranks"
    ).or_none(),
    "hosts": count(
        1, "counts the hosts that ranks are on", "Comm(hosts=2)", "1, 2, ..., a divisor of the number of ranks"
    ).or_none(),
    "overlap": FLAG,
    "release_after_forward": FLAG,
    "prefetch": count(0, "counts units", "Comm(prefetch=1)"),
    "timeout": number(0, 10**9, "is a positive number of seconds, up to a billion", "Comm(timeout=600)").or_none(),
}


@dataclass(frozen=True)
class Comm:
    """The settings of communication between ranks.

    group: the process group to shard over (None: all ranks; one process alone needs none). A `DeviceMesh` of one axis
        is taken as its group; of two the first replicates and the second shards, as with FSDP2. With
        `Layout(along=...)` it has any axes, with names: all of its ranks shard, and some parameters along one of them.
        Where tensor parallelism has cut parameters over another axis of a mesh, `mesh["dp"]`: all shard along that.
    timeout: seconds after which a silent peer is an error (None: the process group's own, which is 30
        minutes by default; a dead one is an error at once in any case).
    reduce: "ordered" sums gradients in rank order (same bits at every stage and bucket size); "native" uses the
        backend's reduce-scatter, whose order is its own business, and needs equal shards. It adds in the dtype that is
        sent: by default the accumulator's, so gradients of 16 bits travel as 4 bytes, twice those of "ordered".
        `Precision(reduce_dtype=torch.bfloat16)` sends 2, and rounds at every rank on the way. "int8" sends gradients as
        codes of 8 bits with a scale for each 128, and sums what these stand for in rank order: the bits differ from
        those without it, and are again the same at every stage, bucket size, tier and overlap.
    overlap: gathers and reductions run behind compute. Off, each is waited for where it is launched (a reduction only
        for a moment, so that ranks that drop different layers do not wait for each other): same bits.
    prefetch: how many units ahead of use are gathered.
    release_after_forward: False keeps sharded parameters gathered until backward has used them.
    replicas: how many copies of the sharded model there are (None: one, or as many as the mesh says). Of N ranks each
        N/replicas that follow one another shard among themselves: r = replica * (N/replicas) + position. Gathers stay
        inside a replica, where links are fast; gradients are summed over all ranks, in the same order for any number
        of replicas, so that it never changes a bit. Costs as many times the memory of what is sharded.
    transport: how gathers and reductions on the CPU go from rank to rank. "gloo": by messages. "shared": ranks of one
        host read each other's memory, and nothing is sent; same bits. All ranks that shard together must be on one host
        then. "auto": "shared" where they are, and "gloo" elsewhere; with `hosts` or another `reduce`, "gloo".
    optimizer: over which ranks optimizer states and masters are sharded, at stages 1 to 3 with several replicas:
        "team", inside each replica, or "all", so that each rank updates a part that no other does, and the ranks of one
        position in all replicas send each other their updates. From stage 2 on gradients are sharded in the same way.
        The same bits, and no copies of gradients and optimizer state.
    hosts: the number of hosts. Each has equally many ranks, which follow one another (None: not given, and ranks send
        each other messages directly). All ranks shard one copy of the model. A gather brings together the parts of a
        shard between hosts, and the shards inside each host; a sum goes through the hosts as it does through replicas.
        The same bits; between hosts, with n ranks on each, about 1/n of the bytes that one copy sends without `hosts`.

    Raises `UserError` for fields that do not go together.

    Examples:
        >>> zero = zeroshard.shard(model, optimizer, comm=zeroshard.Comm(timeout=120, prefetch=2))
    """

    group: Any = None
    timeout: float | None = None
    reduce: Reduce = "ordered"
    overlap: bool = True
    prefetch: int = PREFETCH
    release_after_forward: bool = True
    replicas: int | None = None
    transport: Transport = "auto"
    optimizer: Over = "team"
    hosts: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, _FIELDS)
        if self.two_levels and self.replicas not in (None, 1):
            raise UserError(
                "ranks on several hosts shard one copy of the model, or each host has one of its own",
                got=f"hosts={self.hosts}, replicas={self.replicas}",
                instead=f"Comm(hosts={self.hosts}), or Comm(replicas={self.replicas})",
            )
        if self.transport == "shared" and self.reduce == "int8":
            raise UserError(
                "Comm.reduce makes messages smaller, and with shared memory none are sent",
                got='reduce="int8", transport="shared"',
                instead='Comm(transport="shared"), whose sums nothing rounds, or Comm(reduce="int8")',
            )
        if self.transport == "shared" and self.reduce == "native":
            raise UserError(
                "Comm.reduce is the backend's, and with shared memory no backend reduces",
                got='reduce="native", transport="shared"',
                instead='Comm(transport="shared"), which sums gradients in rank order',
            )
        if self.prefetch and not self.overlap:
            # Without overlap a prefetch would only hold memory longer; the pair is not a contradiction worth an error.
            object.__setattr__(self, "prefetch", 0)

    @property
    def rows(self) -> int | None:
        """The rows of the mesh of ranks: as many as replicas, or hosts. None: as a `DeviceMesh` says."""
        return self.hosts if self.two_levels or self.replicas is None else self.replicas

    @property
    def two_levels(self) -> bool:
        """True if several rows together have one copy of the model: the rows are hosts."""
        return (self.hosts or 1) > 1

    @property
    def wanted(self) -> Transport:
        """The transport to try on the CPU. "auto": shared memory if the ranks turn out to have it, else messages."""
        if self.transport != "auto":
            return self.transport
        return AUTO if self.reduce == "ordered" and not self.two_levels else "gloo"

    def on_accelerators(self) -> Comm:
        """Return these settings as accelerators take them: "auto" is messages there."""
        return replace(self, transport="gloo") if self.transport == "auto" else self


class Simulated(NamedTuple):
    """A stand-in for a process group in `Comm.group`: rank `rank` of `ranks` that exist only in arithmetic."""

    rank: int
    ranks: int
    axes: tuple[tuple[str, int], ...] = ()  # of its mesh: names and lengths


def mesh_told(sits: Seat) -> str:
    """Return the words in which ranks compare their replicas as they come together."""
    return f"has replicas={sits.summed}" + " that each keep a part" * sits.by_part + ", as hosts" * sits.hosts
