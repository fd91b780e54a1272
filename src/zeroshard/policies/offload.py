"""`Offload`: which tier each state rests in, state by state. Imports no torch, so that plans can be made anywhere.

ZeRO-Offload (Ren et al. 2021) and ZeRO-Infinity (Rajbhandari et al. 2021) are rows of this table:

    Offload(optimizer="cpu", gradients="cpu")                            ZeRO-Offload
    Offload(optimizer="nvme", gradients="cpu", parameters="nvme", ...)   ZeRO-Infinity

`Offload("auto")` is none of them until `shard` has chosen one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import UserError, check_local, nearest
from ..events import DEVICE, HOST, NVME, SHARED
from ..layout.partition import BucketPlan
from ..layout.stage import STATES
from ..validation import FLAG, Field, check_fields, one_of
from .comm import Comm

NAMES = {"device": DEVICE, "cpu": HOST, "nvme": NVME, "shared": SHARED}  # as users write them
AUTO = "auto"
BUDGETS = ("gpu_mem", "host_mem", "disk")  # within which `shard` chooses

Where = str | float | Mapping[str, float]


_FIELDS = {
    "path": Field(
        lambda given: isinstance(given, (str, os.PathLike)),
        "is a folder",
        instead=lambda _: 'Offload(..., path="/scratch")',
    ).or_none(),
    **{name: Field(lambda given: isinstance(given, str), 'is a size such as "24GB"').or_none() for name in BUDGETS},
    "digests": FLAG,
    "step": one_of(Literal["host", "device"], "names a processor").or_none(),
    "activations": one_of(Literal["device", "cpu", "nvme"], "names a tier"),
}


@dataclass(frozen=True)
class Offload:
    """The tier that each state rests in: "device", "cpu" (host memory) or "nvme" (files).

    parameters: the shards at stage 3; at stages 0-2 every rank's copy. Brought to the device unit by unit.
    gradients: the accumulators.
    optimizer: its states, and masters where there are any. Each of the three may also be a number, the fraction of the
        bytes that rests in host memory (the rest stays on the device), or fractions by tier:
        `optimizer={"nvme": 0.5, "cpu": 0.3}`. Buckets are not split, so fractions are approximate.
    step: the processor that steps states that rest beside an accelerator. "device": they cross the bus, bucket by
        bucket, and have the bits of states on the device. "host": where they rest, so that only gradients and masters
        cross the bus. None is "device", and "host" for split masters, which `shard` then says. On the CPU both are one.
    path: where files go (needed for "nvme"): a folder on a local disk, not on tmpfs. Each rank makes a folder of its
        own in it, and removes it at the end; what killed runs have left goes at the next start.
    activations: what forward saves for backward, "cpu" or "nvme" as a whole: it goes out behind each unit's forward and
        comes back before its backward. What the last unit saved stays, and what is smaller than 1 KiB.
    digests: check every block of every file that is read against a digest kept in memory (16 bytes per 4 MiB), so that
        what another program has written there is an error and not a state.

    `parameters="shared"`, at stages 1 to 3 on the CPU: one copy for all ranks of a host, in memory that they share.
        Each rank writes the elements that it updates; until then only the rank that edits one sees the edit, as in a
        copy of its own.

    gpu_mem, host_mem, disk: with `parameters="auto"`, what one rank's states may take, as `zeroshard.plan` takes it.
        None is read from the machine: three quarters of what is free of the device's memory, because activations take
        the rest, and a rank's part of what is free of the host's and of the disk of `path`.

    `parameters="auto"`: `shard` chooses, for all states, the fastest that fits, by the planner's search, and says what
        to write in its place. Without `path` none rest in files. All ranks choose by the smallest. The other fields are
        not given beside it, but for `step`.

    Changes no bits: any choice gives the same ones. Only `step="host"` beside a GPU gives those of the CPU's AdamW, the
        same at every stage. `zeroshard plan` says what a choice costs in time.

    Raises `UserError` for a tier that a state cannot have, and for files without `path`; `TierError`, in a step, where
    a file cannot be read or written.

    Examples:
        >>> offload = zeroshard.Offload(optimizer="nvme", gradients="cpu", path="scratch")
        >>> zero = zeroshard.shard(model, optimizer, offload=offload)
    """

    parameters: Where = "device"
    gradients: Where = "device"
    optimizer: Where = "device"
    step: Literal["host", "device"] | None = None
    path: str | os.PathLike[str] | None = None
    digests: bool = True
    activations: str = "device"
    gpu_mem: str | None = None
    host_mem: str | None = None
    disk: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, _FIELDS)
        if self._is_automatic():
            return
        for state in STATES:
            fractions(state, getattr(self, state))
        elsewhere = [state for state in STATES if SHARED in self.tiers(state)]
        if elsewhere and (elsewhere != ["parameters"] or not self.once):
            raise UserError(
                "one copy for all ranks of a host is for parameters, and for all of them",
                got=f"Offload({elsewhere[0]}={getattr(self, elsewhere[0])!r})",
                instead='Offload(parameters="shared")',
            )
        on_disk = [state for state in STATES if NVME in self.tiers(state)] + ["activations"] * self.saved_in_files
        if on_disk and self.path is None:
            raise UserError(
                f'Offload.{on_disk[0]} is "nvme", which needs a folder', expected="path=", got="None",
                instead='Offload(..., path="/scratch")',
            )  # fmt: skip
        if self.path is not None:
            check_local(self.path)
        if not on_disk and (self.path is not None or not self.digests):
            given = "path" if self.path is not None else "digests"
            raise UserError(
                f'Offload.{given} is for files, and nothing rests in "nvme"', got=repr(getattr(self, given)),
                instead='Offload(optimizer="nvme", path="/scratch")',
            )  # fmt: skip

    def _is_automatic(self) -> bool:
        """Check the fields of an automatic `Offload`, and that any other has no budgets. Return if it is automatic."""
        others = {
            "gradients": "device",
            "optimizer": "device",
            "activations": "device",
            "digests": True,
        }
        given = [name for name, usual in others.items() if getattr(self, name) != usual]
        if self.automatic and given:
            raise UserError(
                'Offload("auto") chooses where all states rest', got=f"{given[0]}={getattr(self, given[0])!r}",
                instead='Offload("auto", gpu_mem=..., host_mem=..., path=...)',
            )  # fmt: skip
        for name in BUDGETS:
            if getattr(self, name) is not None and (not self.automatic or (name == "disk" and self.path is None)):
                raise UserError(
                    f"Offload.{name} is a budget by which shard chooses", got=repr(getattr(self, name)),
                    instead=f'Offload("auto", {name}=...{", path=..." * (name == "disk")})',
                )  # fmt: skip
        if self.automatic and self.path is not None:
            check_local(self.path)
        return self.automatic

    @property
    def automatic(self) -> bool:
        """True until `shard` has chosen where states rest; till then all count as on the device."""
        return self.parameters == AUTO

    @property
    def leaves(self) -> bool:
        """True if some of an optimizer's states rest off the device."""
        return self.tiers("optimizer") != {DEVICE: 1.0}

    @property
    def stepped_there(self) -> bool:
        """True if an optimizer's states come to the device for each step; False where nobody has chosen."""
        return self.step == "device" and self.leaves

    def stepping(self, *, accelerator: bool, split: bool) -> Offload:
        """Return this with the processor that steps, where two could. split: are masters split, which step where they
        rest?"""
        if self.step is not None or not (accelerator and self.leaves):
            return self
        return replace(self, step="host" if split else "device")

    @property
    def in_files(self) -> bool:
        """True if some state rests in files."""
        return self.saved_in_files or any(NVME in self.tiers(state) for state in STATES)

    @property
    def saved_in_files(self) -> bool:
        """True if activations rest in files, beside those of states."""
        return self.activations == "nvme"

    @property
    def once(self) -> bool:
        """True if one copy of the parameters serves all ranks of a host."""
        return self.tiers("parameters") == {SHARED: 1.0}

    def reached_by(self, comm: Comm) -> Comm:
        """Return `comm` with the transport through which ranks reach the states that rest."""
        return replace(comm, transport="shared") if self.once else comm

    def tiers(self, state: str) -> dict[str, float]:
        """Return {tier: fraction of the state's bytes}; fractions add up to 1."""
        return {DEVICE: 1.0} if self.automatic else fractions(state, getattr(self, state))

    def buckets(self, buckets: Sequence[BucketPlan]) -> list[dict[str, str]]:
        """Return for each bucket the tier of each state."""
        by_state = {
            state: self._assign(state, [b.numel if b.trainable or state == "parameters" else 0 for b in buckets])
            for state in STATES
        }
        return [{state: by_state[state][at] for state in STATES} for at in range(len(buckets))]

    def _assign(self, state: str, sizes: Sequence[int]) -> list[str]:
        """Assign each bucket to the tier that lacks most of its fraction, so that tiers alternate."""
        wanted, placed = self.tiers(state), dict.fromkeys(self.tiers(state), 0)
        chosen, seen = [], 0
        for size in sizes:
            seen += size
            tier = max(wanted, key=lambda tier: wanted[tier] * seen - placed[tier])  # called in this turn
            placed[tier] += size
            chosen.append(tier)
        return chosen


def fractions(state: str, where: Where) -> dict[str, float]:
    """Return a field of `Offload` as {tier: fraction}. Raises `UserError` for a value that is no such thing."""
    if isinstance(where, str):
        where = {where: 1.0}
    elif isinstance(where, (int, float)) and not isinstance(where, bool):
        where = {"cpu": float(where)}
    if not isinstance(where, Mapping) or not all(type(part) in (int, float) for part in where.values()):
        raise UserError(
            f"Offload.{state} names a tier, or fractions", got=repr(where),
            expected='"device", "cpu", "nvme", a number from 0 to 1, or {tier: fraction}',
            instead='Offload(optimizer="cpu")',
        )  # fmt: skip
    for tier in where:
        if tier not in NAMES:
            raise UserError(f"Offload.{state} names no tier", got=repr(tier), instead=nearest(tier, NAMES))
    rest = 1.0 - sum(where.values())
    if not all(0 <= part <= 1 for part in where.values()) or rest < -1e-9 or (rest > 1e-9 and "device" in where):
        raise UserError(
            f"Offload.{state} has fractions that do not add up", got=repr(dict(where)),
            expected="none below 0 and at most 1 together; what is missing stays on the device",
        )  # fmt: skip
    found = {NAMES[tier]: float(part) for tier, part in where.items() if part > 0}
    return {**found, DEVICE: rest} if rest > 1e-9 else found
