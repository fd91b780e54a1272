"""How `Offload("auto")` is chosen: by the search that `zeroshard plan` prints.

All ranks tell each other what memory there is, take the smallest, and search alike: with the stage, the formats and the
layout that the program has given, so that only tiers are chosen, and no choice changes a bit of what the tiers compute.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..device import asynchronous, hardware
from ..engine.build.supported_optimizers import check_by_bucket
from ..errors import UserError
from ..events import DEVICE
from ..layout.stage import STATES
from ..policies.offload import BUDGETS, Offload
from . import formats, from_shapes, line, transformer
from .asked import Asked
from .disk import ASSUMED
from .fitting import PARTS, Machines, Need, Numbers, Search, Way, allowed, places, steps
from .quantities import budget, size
from .recipes import Recipe

if TYPE_CHECKING:
    import torch

    from ..engine.build.assembly import Assembly

log = logging.getLogger("zeroshard")

FILLED = 0.75  # of the device's free memory, for states; activations take the rest
CGROUP = Path("/sys/fs/cgroup")


# ---------------------------------------------------------------------------------------------------- what there is


def budgets(assembly: Assembly) -> dict[str, Any]:
    """Return what this rank may take in each tier, in bytes: as it is given, or read from the machine.

    "host" and "disk" that are read are of all ranks of the machine. Raises `UserError` where nothing tells.
    """
    asked, device = assembly.offload, assembly.group.device
    given = {name: None if (size := getattr(asked, name)) is None else budget(size, name) for name in BUDGETS}
    there = free_on_device(assembly) if given["gpu_mem"] is None else None
    if given["gpu_mem"] is None and there is None:
        raise UserError(
            "a device of this kind does not tell how much of its memory is free",
            where=f'Offload("auto"), {device.type}',
            instead='Offload("auto", gpu_mem="24GB")',
        )
    disk = None if asked.path is None or given["disk"] else shutil.disk_usage(asked.path).free
    return {"machine": socket.gethostname(), "given": given, "device": there, "host": free_in_host(), "disk": disk}


def free_on_device(assembly: Assembly) -> int | None:
    """Return the bytes that states may take of a device's memory, with those of the model that are there already."""
    device = assembly.group.device
    if device.type == "cpu" or (free := hardware(device)["free"]) is None:
        return None
    mine = sum(r.param.nbytes for r in assembly.managed if r.param.device.type == device.type)
    return int(FILLED * (free + mine))


def free_in_host() -> int:
    """Return the bytes of this machine's memory that a program could have now, or its container's."""
    with open("/proc/meminfo", encoding="ascii") as file:
        told = dict(line.split(":") for line in file)
    free = int(told["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (int((CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container's; "max"
        return free
    return min(free, max(limit - used, 0))


def smallest(told: Sequence[dict[str, Any]]) -> Need:
    """Return what every rank has. told: the `budgets` of each."""
    beside = {each["machine"]: sum(other["machine"] == each["machine"] for other in told) for each in told}

    def least(name: str, read: str, shared: bool) -> int:
        def of(each: dict[str, Any]) -> int:
            given = each["given"][name]
            return int(given if given is not None else (each[read] or 0) // (beside[each["machine"]] if shared else 1))

        return min(map(of, told))

    return Need(least("gpu_mem", "device", False), least("host_mem", "host", True), least("disk", "disk", True))


# ------------------------------------------------------------------------------------------------------- the choice


def chosen(assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer], told: Sequence[dict[str, Any]]) -> Offload:
    """Return the fastest `Offload` that fits, and say it on rank 0. Raises `UserError`, the same on every rank."""
    most, path = smallest(told), assembly.offload.path
    search, numbers = searched(assembly, optimizers, most)
    fits = search.fastest([numbers], 1)
    if not fits:
        least = min((search.need(way) for way in search.whole([numbers])), key=lambda need: need.device)
        raise UserError(
            "no choice of tiers fits this model at this stage",
            where='Offload("auto")',
            expected=_words(most),
            got=f"at least {_words(least)} where no state stays on the device",
            instead="a budget that is larger, path= for files, a higher stage, or `zeroshard plan` for what else helps",
        )
    (fit,) = fits
    found = fit.way.offload or Offload()
    found = replace(found, path=path) if found.in_files else found
    if assembly.group.rank == 0:
        said = line.policy("Offload", line.changed(found)).on_one_line()
        log.warning(
            'Offload("auto") chose %s, of %s: a rank holds %s. To keep it: %s',
            f"{fit.way}".partition(", ")[2],
            _words(most),
            _words(fit.need),
            said,
        )
    return found


def _words(need: Need) -> str:
    filed = f", {size(need.files)} in files" if need.files else ""
    return f"{size(need.device)} on the device, {size(need.host)} in host memory{filed}"


def searched(assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer], most: Need) -> tuple[Fixed, Numbers]:
    """Return the search of one stage and layout, and the formats of states, as the model's parameters have them."""
    recipe = recipe_of(assembly, optimizers)
    specs, layout, comm = assembly.specs, assembly.layout, assembly.comm
    numel = sum(spec.numel for spec in specs)
    body = transformer.of(numel, max(len(assembly.units) - 1, 1))
    asked = Asked(
        ranks=assembly.group.ranks, stages=(assembly.stage,), recipe=recipe, layout=layout, comm=comm,
        precision=assembly.precision, gpu_mem=most.device, host_mem=most.host,
        disk=replace(ASSUMED, size=most.files) if most.files else None,
        accelerator=asynchronous(assembly.group.device),
    )  # fmt: skip
    several = {unit.index for unit in assembly.units if unit.joined}
    laid = from_shapes.LaidOut(lambda _: specs, [unit.name or "the root" for unit in assembly.units], body, several)
    machine = Machines(asked, numel, body, laid.planned, most, transformer.BATCH * transformer.SEQ)
    return Fixed(machine, assembly, moves=_moves(optimizers)), Numbers("", recipe, {})


def recipe_of(assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> Recipe:
    """Return the bytes per parameter of a model's formats and its optimizer's states. Raises `UserError` for a model
    or optimizers of which no recipe is known."""
    trained = [record.dtype for record in assembly.managed if record.param.requires_grad]
    recipe = formats.of_model(
        trained, [type(each).__name__ for each in optimizers], assembly.precision, assembly.comm,
        along=bool(assembly.asked.along), who='Offload("auto")',
        instead="Offload(...) by hand; zeroshard plan MODULE:FUNCTION counts what any program holds",
    )  # fmt: skip
    return replace(recipe, in_backward=assembly.asked.in_backward)


class Fixed(Search):
    """A search whose ways differ in their tiers alone."""

    def __init__(self, machine: Machines, assembly: Assembly, *, moves: bool) -> None:
        """moves: may the optimizer's states leave the device?"""
        super().__init__(machine)
        self._moves, self._stage, self._early = moves, assembly.stage, assembly.asked.in_backward
        self._host = assembly.offload.step == "host"
        # Where all shards are equal one rank stands for all. Else ranks have unequal parts of buckets, each of which is
        # in one tier, and each rank counts.
        group, even = assembly.group, assembly.partition.even
        self._ranks = range(0 if even else group.ranks if assembly.asked.spread else group.team.size)
        self._needs: dict[str, Need] = {}

    def need(self, way: Way) -> Need:
        if not self._ranks:
            return super().need(way)
        if (key := repr(way.at)) not in self._needs:
            asked = way.asked(self.of.base, self.of.unit_nbytes)
            plans = [self.of.planned(way.stage, asked, bytes_alone=True, rank=rank) for rank in self._ranks]
            each = [(plan.most, plan.host + plan.pinned, plan.files) for plan in plans]
            self._needs[key] = Need(*map(max, zip(*each, strict=True)))
        return self._needs[key]

    def ways(self, numbers: list[Numbers]) -> Iterator[tuple[Way, tuple[str, ...]]]:
        filed = self.of.most.files > 0
        for each, (tiers, mix) in itertools.product(numbers, places(early=self._early, filed=filed)):
            able = steps(self.of.base, each, mix)  # "device" comes first, which has the bits of states there
            way = Way(self._stage, each, tiers, self._early, step=able[-1 if self._host else 0])
            stays = mix == (DEVICE,) and all(tiers[kind] == {DEVICE: PARTS} for kind in STATES[:2])
            if (self._moves or stays) and allowed(way, self.of.base):
                yield way, mix

    def whole(self, numbers: list[Numbers]) -> Iterator[Way]:
        """Yield the ways that have each kind of state in one tier, the optimizer's off the device if it may leave."""
        for way, mix in self.ways(numbers):
            if (
                len(mix) == 1
                and (mix != (DEVICE,) or not self._moves)
                and all(len(each) == 1 for each in way.at.values())
            ):
                yield way._replace(at={**way.at, "optimizer": {mix[0]: PARTS}})


def _moves(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    try:
        check_by_bucket(optimizers)
    except UserError:
        return False
    return True
