"""The resting states of a bucket: their placements, how the master rests, and a row for each, with its tier and bytes.

The engine builds by these rows and the planner counts by them. Imports neither torch nor anything distributed.

    parameters   of every bucket, unless gathers cast them from masters
    gradients    of a trained one
    master       of a trained one, if the optimizer updates another format than rests, or in another memory
    average      of what the optimizer updates, if one is kept
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..errors import UserError
from ..events import DEVICE, HOST, NVME, SHARED
from .partition import BucketPlan
from .stage import STAGES, STATES, Degree, Placements, Seat


class Format(Protocol):
    """A dtype, or what else knows the bytes of an element."""

    @property
    def itemsize(self) -> Fraction | int: ...


F = TypeVar("F", bound=Format)
TIERS = (DEVICE, HOST, NVME, SHARED)
Sizes = dict[str, int]  # bytes of each kind of states
SPLIT_BITS = 17  # of a split master's element, beside its parameter: 16 for half a number, and one for ties


def placements(
    stage: int, *, spread: bool = False, once: bool = False, in_backward: bool = False, hosts: bool = False
) -> Placements:
    """Return a stage's row of the table, changed as the settings ask.

    Raises `UserError` for a stage other than 0, 1, 2, 3, and for settings that the stage does not allow.

    spread: shard what an optimizer updates and keeps over the ranks of all replicas, and gradients, if sharded at all.
    once: keep one copy of the parameters on each host, whole for every rank; each rank writes what it updates.
    in_backward: shard gradients as optimizer states, since each lives only for the update of a rank's own elements.
    hosts: shard all that the stage shards over the ranks of all hosts.
    """
    if type(stage) is not int or stage not in STAGES:
        raise UserError("no such ZeRO stage", expected="0, 1, 2 or 3", got=repr(stage), instead="shard(..., stage=3)")
    row = STAGES[stage]
    assert row.optimizer or not (spread or once), "policies/incompatible.py has refused it"
    row = row._replace(parameters=Degree.RANK) if once else row
    row = row._replace(gradients=row.optimizer) if in_backward else row
    if hosts:
        return Placements(*(degree and Degree.ALL for degree in row))
    return row._replace(optimizer=Degree.ALL, gradients=row.gradients and Degree.ALL) if spread else row


@dataclass(frozen=True)
class Formats(Generic[F]):
    """The formats of one bucket's states.

    computed: by modules. parameters: at rest and on their way. master: updated by the optimizer.
    casts: can masters alone stand for sharded parameters?
    splits: can the bits that a parameter lacks stand for its master?
    """

    computed: F
    parameters: F
    gradients: F
    master: F
    casts: bool = False
    splits: bool = False

    def of(self, kind: str) -> F:
        """Return the widest format of a kind of states, but for what an optimizer keeps."""
        return {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.master}[kind]


class Master(enum.Enum):
    """The way in which the master of a bucket rests."""

    NONE = "the optimizer updates the parameters as they rest"
    ALONE = "gathers cast it, and no parameters rest"
    BESIDE = "a step casts it to the parameters that rest as well"
    SPLIT = "the bits that the parameters lack rest beside them"


class Row(NamedTuple):
    """One state of a bucket. numel: the state's number of elements, if it is not the bucket's."""

    state: str
    kind: str
    itemsize: Fraction | int
    degree: Degree
    tier: str
    numel: int | None = None

    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many elements."""
        return math.ceil(numel * self.itemsize)


class Resting(NamedTuple):
    """The states of a bucket that rest, but for those that an optimizer keeps."""

    formats: Formats[Any]
    master: Master
    rows: list[Row]

    def largest(
        self, bucket: BucketPlan, seat: Seat, placements: Placements, at: Mapping[str, str], tier: str
    ) -> Sizes:
        """Return {kind: bytes} of the largest state that a rank can have of the bucket in a tier, kind by kind, but for
        what an optimizer keeps."""
        found = {}
        for kind in STATES if bucket.trainable else STATES[:1]:  # frozen parameters have nothing else
            if at[kind] == tier:
                first, last = bucket.held(seat, getattr(placements, kind))
                found[kind] = math.ceil((last - first) * self.formats.of(kind).itemsize)
        return found


def master_of(formats: Formats[F], placements: Placements, at: Mapping[str, str], *, one_memory: bool) -> Master:
    """Tell how the master of a trained bucket rests.

    at: the tier of each kind of states. one_memory: is the device's memory the host's, as on a CPU? If not,
    parameters that are updated in another memory than they rest in have a master, whatever the format.
    """
    apart = (at["parameters"] in (DEVICE, SHARED)) != (at["optimizer"] == DEVICE) and not one_memory
    if formats.master == formats.parameters and not apart:
        return Master.NONE
    # Off the device a copy stays beside the masters: each gather brings fewer bytes, which counts more than room.
    if formats.casts and placements.together and at["parameters"] == at["optimizer"] == DEVICE:
        return Master.ALONE
    return Master.SPLIT if formats.splits else Master.BESIDE


def masters(formats: Formats[F], placements: Placements) -> dict[tuple[str, str], Master]:
    """Tell how the master of a trained bucket rests on a GPU, by the tiers of its parameters and of the optimizer."""
    return {
        (here, there): master_of(formats, placements, {"parameters": here, "optimizer": there}, one_memory=False)
        for here in TIERS
        for there in TIERS
    }


def resting(
    bucket: BucketPlan,
    formats: Formats[F],
    placements: Placements,
    at: Mapping[str, str],
    *,
    one_memory: bool,
    accumulated: bool = True,
    averaged: bool = False,
    scales: int = 0,
) -> Resting:
    """Return what rests of a bucket. at, one_memory: as in `master_of`.

    accumulated: do gradients rest, or are they used as they come? averaged: is a moving average kept? scales: the bytes
    of the scales of all the bucket's tensors, which every rank has.
    """
    trained = bucket.trainable
    master = master_of(formats, placements, at, one_memory=one_memory) if trained else Master.NONE
    rows: list[Row] = []

    def rests(kind: str, state: str, itemsize: Fraction | int) -> None:
        rows.append(Row(state, kind, itemsize, getattr(placements, kind), at[kind]))

    if master is not Master.ALONE:
        rests("parameters", "parameters", formats.parameters.itemsize)
    if scales:
        rows.append(Row("scales", "parameters", 1, Degree.RANK, DEVICE, scales))
    if trained and accumulated:
        rests("gradients", "gradients", formats.gradients.itemsize)
    if master is not Master.NONE:
        split = master is Master.SPLIT
        rests("optimizer", "master", Fraction(SPLIT_BITS, 8) if split else formats.master.itemsize)
    if trained and averaged:
        rests("optimizer", "average", formats.master.itemsize)
    return Resting(formats, master, rows)
