"""The settings that do not go together: one table, read by `shard`, the planner and the guide. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UserError
from ..events import DEVICE
from ..layout.partition import BLOCK

if TYPE_CHECKING:
    from ..layout.stage import Seat
    from .comm import Comm
    from .layout import Layout
    from .offload import Offload
    from .precision import Precision


class Settings(NamedTuple):
    """The settings that do not go with some other setting; each default goes with all."""

    stage: int = 3
    replicas: int = 1
    summed: int = 1  # of these, how many have gradients of their own: 1 beside tensor parallelism
    in_backward: bool = False
    bounds: str = "unit"
    align: int = BLOCK
    along: bool = False  # are some parameters along an axis?
    apart: bool = False
    reduce: str = "ordered"
    transport: str = "auto"
    over: str = "team"  # Comm.optimizer
    hosts: int = 1
    reduce_dtype: Any = None
    nonfinite: str = "ignore"
    split_master: bool = False
    fp8: Any = False
    narrow: bool = False  # Precision.states, or parameters that are rounded at random
    recompute: Any = False
    once: bool = False  # Offload(parameters="shared")
    gradients: Any = "device"  # Offload.gradients
    activations: str = "device"  # Offload.activations
    files: bool = False  # does anything rest in files?
    stepped_there: bool = False  # Offload(step="device"), with an optimizer that rests elsewhere
    automatic: bool = False  # Offload("auto")
    accumulate: int = 1  # backwards per step, as plans ask
    no_sync: bool = False
    replay: bool = False
    tensor_parallel: bool = False

    def seated(self, seat: Seat) -> Settings:
        """Return these settings with the replicas of a mesh."""
        return self._replace(replicas=seat.replicas, summed=seat.summed)

    @property
    def spread(self) -> bool:
        """Tell whether `Comm(optimizer="all")` cuts the optimizer's states between several replicas."""
        return self.over == "all" and self.replicas > 1

    @property
    def placed(self) -> dict[str, bool]:
        """The settings that change a stage's placements: see `resting.placements`."""
        return {"spread": self.spread, "hosts": self.hosts > 1, "once": self.once, "in_backward": self.in_backward}

    @property
    def told(self) -> dict[str, Any]:
        """The facts that ranks compare beside the policies, by the name of the argument."""
        return {"stage": self.stage, "optimizer_in_backward": self.in_backward}

    @property
    def placing(self) -> Settings:
        """The settings that say where states are placed: if two of them do not go together, nothing can be built."""
        return Settings(
            self.stage, self.replicas, transport=self.transport, over=self.over, hosts=self.hosts, once=self.once
        )


def settings(
    stage: int, precision: Precision | None, layout: Layout, comm: Comm, offload: Offload | None, **others: Any
) -> Settings:
    """Collect the settings that may not go together from the four policies; None is a default policy, without torch.

    others: fields of `Settings` that no policy has.
    """
    if precision is not None:
        names = ("reduce_dtype", "nonfinite", "split_master", "fp8")
        others |= {name: getattr(precision, name) for name in names}
        others["narrow"] = precision.narrow or bool(precision.states)  # whose names are looked at
    if offload is not None:
        others |= {"once": offload.once, "gradients": gradients_of(offload), "files": offload.in_files}
        others |= {"activations": offload.activations, "automatic": offload.automatic}
        others |= {"stepped_there": offload.stepped_there}
    return Settings(
        stage=stage,
        bounds=layout.bounds,
        align=layout.base,
        along=bool(layout.along),
        apart=layout.apart,
        recompute=layout.recompute,
        reduce=comm.reduce,
        transport=comm.transport,
        over=comm.optimizer,
        hosts=comm.hosts or 1,
        **others,
    )


def gradients_of(offload: Offload) -> Any:
    """Return where gradients rest, as the user wrote it; "device" for every spelling that puts all of them there."""
    return DEVICE if offload.tiers("gradients") == {DEVICE: 1.0} else offload.gradients


class Refusal(NamedTuple):
    """Two settings that do not go together."""

    sides: tuple[str, str]  # as a user writes them; {name} stands for a field of `Settings`
    when: Callable[[Settings], object]
    what: str
    instead: str
    expected: str | None = None


IN_BACKWARD = "with the optimizer in backward gradients are used as they come, and nothing is added up"
REFUSALS = (
    Refusal(
        ("stage=0", 'Comm(optimizer="all")'),
        lambda s: s.spread and s.stage == 0,
        "every rank holds the whole optimizer state at stage 0, so it cannot be spread over all of them",
        "stage=1, 2 or 3",
    ),
    Refusal(
        ("stage=0", 'Offload(parameters="shared")'),
        lambda s: s.once and s.stage == 0,
        "one copy of the parameters for all ranks of a host needs one owner on it for each element",
        "stage=1, or Offload()",
        "stage 1, 2 or 3, whose optimizer states are sharded among the ranks of a replica",
    ),
    Refusal(
        ('Comm(optimizer="all")', 'Offload(parameters="shared")'),
        lambda s: s.once and s.spread,
        "one copy of the parameters for all ranks of a host needs one owner on it for each element",
        'Comm(optimizer="team"), or Offload()',
        "optimizer states that are sharded among the ranks of a replica",
    ),
    Refusal(
        ("Comm(hosts={hosts})", 'Offload(parameters="shared")'),
        lambda s: s.once and s.hosts > 1,
        "one copy of the parameters for all ranks of a host needs one owner on it for each element",
        "Comm(replicas={hosts}), or Offload()",
        "optimizer states that are sharded among the ranks of a host",
    ),
    Refusal(
        ('Comm(transport="gloo")', 'Offload(parameters="shared")'),
        lambda s: s.once and s.transport == "gloo",
        "one copy of the parameters for all ranks of a host lies in memory that they share",
        'Comm(transport="shared"), or Offload()',
    ),
    Refusal(
        ('Comm(optimizer="all")', 'Layout(bounds="tensor")'),
        lambda s: s.over == "all" and s.bounds == "tensor",
        "what an optimizer updates of a shard is cut between the replicas, and no tensor is to be cut",
        'Comm(optimizer="team"), or Layout(whole=[...]) for what must not be cut',
    ),
    Refusal(
        ("Comm(hosts={hosts})", 'Layout(bounds="tensor")'),
        lambda s: s.hosts > 1 and s.bounds == "tensor",
        "a shard is cut between the hosts, and no tensor is to be cut",
        "Comm(), or Layout(whole=[...]) for what must not be cut",
    ),
    Refusal(
        ('Comm(optimizer="all")', "Precision(split_master=True)"),
        lambda s: s.spread and s.split_master,
        "split masters lie beside the parameters that they are halves of, and other ranks have some of these",
        'Comm(optimizer="team"), or whole masters',
    ),
    Refusal(
        ("Precision(split_master=True)", 'Offload(step="device")'),
        lambda s: s.split_master and s.stepped_there,
        "split masters are joined with their parameters where they rest, and are stepped there",
        'Offload(step="host"), or no split_master',
    ),
    Refusal(
        ("Precision(split_master=True)", 'Offload(parameters="shared")'),
        lambda s: s.split_master and s.once,
        "split masters lie beside parameters of this rank's own, and all ranks of a host have one copy of these",
        "Precision(), with whole masters",
    ),
    Refusal(
        ('Comm(reduce="native")', "Layout(apart=True)"),
        lambda s: s.reduce == "native" and s.apart,
        "the backend's reduce-scatter adds up gradients in an order of its own, whatever comes apart",
        'Comm(reduce="ordered")',
    ),
    Refusal(
        ('Comm(reduce="int8")', "Precision(reduce_dtype={reduce_dtype})"),
        lambda s: s.reduce == "int8" and s.reduce_dtype is not None,
        "Precision.reduce_dtype and Comm.reduce both say what gradients are sent as",
        "one of them",
    ),
    Refusal(
        ('Comm(reduce="int8")', "Layout(align={align})"),
        lambda s: s.reduce == "int8" and s.align % BLOCK,
        f"gradients of 8 bits have a scale for each {BLOCK} elements of a parameter, and no cut may fall inside",
        f"Layout(align={BLOCK}), the default",
    ),
    Refusal(
        ("optimizer_in_backward=True", "Precision(nonfinite={nonfinite!r})"),
        lambda s: s.in_backward and s.nonfinite != "ignore",
        "Precision.nonfinite looks at all gradients before a step, and in backward they are used one by one",
        "one of the two",
    ),
    Refusal(
        ("optimizer_in_backward=True", "Offload(gradients={gradients!r})"),
        lambda s: s.in_backward and s.gradients != "device",
        "with the optimizer in backward gradients rest nowhere",
        "one of the two",
    ),
    Refusal(
        ("Precision(fp8={fp8})", 'Offload(parameters="shared")'),
        lambda s: s.fp8 and s.once,
        "parameters in 8 bits rest on each rank, and all ranks shard them",
        "one of the two",
    ),
    Refusal(
        ("optimizer_in_backward=True", 'Offload(parameters="shared")'),
        lambda s: s.in_backward and s.once,
        "with the optimizer in backward parameters are read by others while a rank updates them",
        "one of the two",
    ),
    Refusal(
        ("optimizer_in_backward=True", "Step(accumulate={accumulate})"),
        lambda s: s.in_backward and s.accumulate > 1,
        IN_BACKWARD,
        "Step(accumulate=1)",
    ),
    Refusal(
        ("optimizer_in_backward=True", "Step(no_sync=True)"),
        lambda s: s.in_backward and s.no_sync,
        IN_BACKWARD,
        "one of the two",
    ),
    Refusal(
        ("zero.replay(...)", "optimizer_in_backward=True"),
        lambda s: s.replay and s.in_backward,
        "a micro-batch is computed again with the weights that it was computed with, and they are updated in backward",
        "one of the two",
    ),
    Refusal(
        ("zero.replay(...)", "Layout(along=...)"),
        lambda s: s.replay and s.along,
        "other ranks have other rows of these parameters, and cannot compute a rank's micro-batch by themselves",
        "one of the two",
    ),
    Refusal(
        ("zero.replay(...)", "tensor parallelism"),
        lambda s: s.replay and s.tensor_parallel,
        "ranks that share one micro-batch cannot compute another's by themselves",
        "one of the two",
    ),
)


def refuse(given: Settings) -> None:
    """Raise `UserError` for the first two of these settings that do not go together."""
    for row in REFUSALS:
        if row.when(given):
            got = ", ".join(row.sides).format(**given._asdict())
            instead = row.instead.format(**given._asdict())
            raise UserError(row.what, expected=row.expected, got=got, instead=instead)


def table() -> str:
    """Write the refusals as a table, for docs/errors.md."""
    unknown: dict[str, _Any] = defaultdict(_Any)
    rows = [
        (*(f"`{side.format_map(unknown)}`" for side in row.sides), row.what, row.instead.format_map(unknown))
        for row in REFUSALS
    ]
    head = ("this", "does not go with", "because", "write instead")
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * 4, *rows)) + "\n"


class _Any:
    """A value that a table leaves open."""

    def __repr__(self) -> str:
        return "..."


def refuse_beside_tensors(layout: Layout, comm: Comm) -> None:
    """Refuse settings of the program that do not go with tensor parallelism."""
    if layout.along or comm.rows not in (None, 1) or comm.optimizer != "team":
        raise UserError(
            "parameters along an axis, replicas, and hosts, are not supported beside tensor parallelism",
            got=f"along={dict(layout.along)}, replicas={comm.replicas}, hosts={comm.hosts}, "
            f"optimizer={comm.optimizer!r}, and DTensors",
            instead='Layout() without along=, Comm(group=mesh["dp"]) without replicas=, hosts= and optimizer=',
        )


def rejoined_in_backward(optimizer: str, name: str) -> UserError:
    """Make the error for an optimizer of whole tensors that is to update in backward, beside tensor parallelism."""
    return UserError(
        "an optimizer of whole tensors gathers them on the tensor axis, on which backward sends too: in backward ranks "
        "could do so in different orders",
        where=f"{optimizer}, parameter {name!r} is cut by tensor parallelism",
        got="optimizer_in_backward=True",
        instead="leave it out",
    )
