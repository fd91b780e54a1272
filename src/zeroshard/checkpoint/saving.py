"""Saving: every rank writes what it owns beside the target; rank 0 adds the manifest and publishes all, or none saves.

While the training stands still a rank takes a snapshot: views of what it owns or, for a save that runs while training
goes on, copies in host memory. Everything after that works on the snapshot, through a control group of its own.
"""

from __future__ import annotations

import atexit
import math
import os
import platform
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm.agreement import Group
from ..comm.all_or_none import Together, problem_of
from ..comm.mesh import program
from ..device import describe
from ..errors import CheckpointError, UserError
from ..events import HOST, Ledger
from ..rng import rng_states
from ..tiers.tier import Part, present
from ..validation import check_flag
from . import parts
from .content import (
    ModelState,
    agreed_kinds,
    ignored_digests,
    local_buffers,
    options,
    persistent,
    pieces,
    told_buffers,
    told_kinds,
    values,
    writable,
)
from .files import absolute, make_room, publish, remove, write_manifest, write_tensors
from .manifest import FORMAT, IN_PARTS, LOCAL, NARROW, UNCUT, VERSION, check_loads, finite, orders, plain, siblings
from .staging import discard, owner, place_beside, release_signals, temporary

SNAPSHOT = "snapshot"  # in the ledger: what a save behind the training holds


class Saving:
    """A checkpoint, complete at `path`, or being written there by a thread while training goes on."""

    # At most one is under way in a program, whichever model it is of: they share a control group, and the memory.
    # Here are those whose result `wait` has not returned or raised yet.
    _untold: ClassVar[list[Saving]] = []

    def __init__(self, path: Path, work: Callable[[], None], *, asynchronous: bool) -> None:
        self.path = path
        self._work: Callable[[], None] | None = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"saving {path.name}") if asynchronous else None
        if self._thread is None:
            work()
        else:
            self._program = _here()
            atexit.register(self._report)
            Saving._untold.append(self)
            self._thread.start()  # not a daemon: before it exits the interpreter waits for it

    @property
    def done(self) -> bool:
        """True once `wait` would return at once: nothing is being written any more."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its path.

        Raises `CheckpointError` on every rank if it could not be saved. If `wait` is not called, the next `save` or
        `load` waits, of this model or another; else the end of the program prints the error.
        """
        if self._thread is not None and self._thread.ident is not None:  # else it could not be started
            self._thread.join()
            release_signals()
        atexit.unregister(self._report)
        if self in Saving._untold:
            Saving._untold.remove(self)
        if self._error is not None:
            raise self._error
        return self.path

    @classmethod
    def untold(cls) -> list[Saving]:
        """List the saves of this program that were not waited for."""
        here = _here()  # where threads run several programs, each has saves of its own
        return [each for each in cls._untold if each._program in (None, here) or each._program() is None]

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work()
        except Exception as error:
            self._error = error
        self._work = None  # and with it the snapshot

    def _report(self) -> None:
        if self._error is not None:
            print(f"zeroshard: a checkpoint was lost. {self._error}", file=sys.stderr)


def _here() -> weakref.ref[Any] | None:
    common = program()
    return None if common is None else weakref.ref(common)  # a save that is not waited for must not keep it alive


def wait_for_saves() -> None:
    """Wait for every save that this rank runs behind the training. Raises the error of one that failed."""
    for saving in Saving.untold():
        saving.wait()


def wait_for_all_saves(group: Group) -> None:
    """Wait, on all ranks, for saves behind the training, and raise on all of them if one was lost."""
    lost = "a checkpoint that other ranks were saving was lost"
    with Together(group, lambda told: CheckpointError(lost, got="; ".join(told)), own=True):
        wait_for_saves()


def save(
    running: ModelState,
    path: str | os.PathLike[str],
    extra: Mapping[str, Any] | None,
    *,
    asynchronous: bool,
    keep: int | None,
    ledger: Ledger,
) -> Saving:
    """Write a checkpoint at `path`, or leave everything as it is and raise on every rank."""
    group = running.group
    group.same("zero.save(...)", lambda: asked(path, extra, asynchronous=asynchronous, keep=keep))
    target, writers = absolute(path), group.for_saves(behind=asynchronous)
    everyone = _together(group, target, lambda: [told_kinds(running), told_buffers(running)])
    running.kinds = agreed_kinds([kinds for kinds, _ in everyone])
    differing = local_buffers([buffers for _, buffers in everyone])
    with _attempt(group, target) as attempt:
        snapshot = _snapshot(running, extra, differing, copied=asynchronous)
        attempt.answer = {"owner": owner(), "at": str(target), "ignored": ignored_digests(running)}
    told = attempt.answers
    ignored = [each["ignored"] for each in told]
    if differing := [name for name in ignored[0] | ignored[-1] if len({each.get(name) for each in ignored}) > 1]:
        raise CheckpointError(
            "a parameter that Layout.ignore leaves alone differs between ranks, and a checkpoint holds it once",
            where=differing[0], expected="the same bits on all ranks", got="other ones",
            instead="average its gradients over the ranks before each step, or do not ignore it",
        )  # fmt: skip
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in snapshot.tensors.values())
    beside, places = place_beside(target, told[0]["owner"]), [each["at"] for each in told]

    def work() -> None:
        try:
            _write(writers, snapshot, beside, target, places, keep)
        finally:
            if asynchronous:
                ledger.hold(SNAPSHOT, -nbytes, HOST)

    if group.rank == 0:
        temporary(beside)  # here and not in a thread, which cannot handle signals
    if asynchronous:
        ledger.hold(SNAPSHOT, nbytes, HOST)
    return Saving(target, work, asynchronous=asynchronous)


def asked(path: object, extra: object, *, asynchronous: object, keep: object) -> dict[str, Any]:
    """Return the arguments of `save` that must be equal on all ranks. Raises `UserError` for values it cannot take."""
    check_flag("asynchronous", asynchronous)
    if extra is not None and not isinstance(extra, Mapping):
        raise UserError("extra= is saved by its keys", expected="a dict", got=repr(extra)[:100], instead="extra={...}")
    if keep is not None and not (type(keep) is int and keep >= 1):
        raise UserError("keep= counts checkpoints, the new one too", got=repr(keep), instead="keep=3")
    # The last part of the path: what is before it may be called otherwise on another host.
    return {"path": absolute(path).name, "asynchronous": asynchronous, "keep": keep}


def check_signal(number: object) -> None:
    """Refuse what is no signal, or none that a program can handle."""
    known = [each for each in signal.Signals if each not in (signal.SIGKILL, signal.SIGSTOP)]
    if type(number) not in (int, signal.Signals) or number not in known:
        instead = "signal.SIGUSR1"
        raise UserError("this is no signal that a program can handle", got=repr(number), instead=instead)


@dataclass
class Snapshot:
    """This rank's tensors to write, and manifest entries: of these tensors (`own`); of `buffers`, which rank 0 alone
    saves except those that differ between ranks (`differing`); of what else rank 0 saves (`extras`); and of the model
    as a whole (`head`)."""

    tensors: dict[str, Tensor | Part]
    own: dict[str, Any]
    buffers: dict[str, list[Any]]
    differing: Sequence[str]
    extras: list[list[Any]]
    head: dict[str, Any]
    offsets: dict[str, int] = field(default_factory=dict)  # once written: where each tensor's bytes begin


def _snapshot(
    running: ModelState, extra: Mapping[str, Any] | None, differing: Sequence[str], *, copied: bool
) -> Snapshot:
    tensors: dict[str, Tensor | Part] = {}
    fragments, grains, narrow = [], [], []
    for piece in pieces(running):
        dtype = writable(f"{piece.state} of parameter {piece.parameter!r}", piece.tensor)
        key = _add(tensors, f"{piece.state}/{piece.parameter}", piece.tensor)
        fragments.append([*piece[:4], dtype, list(piece.tensor.shape), key])
        if piece.grain > 1:
            grains.append([piece.parameter, piece.state, piece.grain])
        if piece.computed and piece.start == 0:  # by one rank
            narrow.append([piece.parameter, piece.state, piece.computed])
    saved_along: dict[str, Tensor] = {}
    told = plain("extra", dict(extra or {}), saved_along)
    buffers, extras = {}, []
    first = running.group.rank == 0
    for name, tensor in persistent(running.model):
        if first or name in differing:
            dtype, key = writable(f"buffer {name!r}", tensor), _add(tensors, f"buffer/{name}", tensor.detach())
            buffers[name] = [list(tensor.shape), dtype, key]
    if first:
        for name, tensor in saved_along.items():
            dtype, key = writable(name, tensor), _add(tensors, f"extra/{name}", tensor)
            extras.append([name, list(tensor.shape), dtype, key])
    if copied:
        tensors = {key: _copy(tensor) for key, tensor in tensors.items()}
    own = {
        "fragments": fragments,
        "grains": grains,
        "narrow": narrow,
        "values": list(values(running)),
        "rng": rng_states(running.group.device),
    }
    return Snapshot(tensors, own, buffers, differing, extras, _head(running, told))


def _add(tensors: dict[str, Tensor | Part], key: str, tensor: Tensor | Part) -> str:
    """Add a tensor under `key`, made unique: state "a/b" of parameter "c" and "a" of "b/c" would share one. Returns it.

    These names serve people who look into the file; the manifest finds tensors by offset.
    """
    while key in tensors:
        key += "'"
    tensors[key] = tensor
    return key


def _copy(tensor: Tensor | Part) -> Tensor:
    with present(tensor) as here:
        return torch.empty_like(here, device="cpu").copy_(here)


def _head(running: ModelState, extra: Any) -> dict[str, Any]:
    cut = {record.name: running.strips(record.name) for record in running.records}
    return {
        "format": FORMAT,
        "version": VERSION if any(strips.parts > 1 for strips in cut.values()) else UNCUT,
        "saved": time.time_ns(),
        "ranks": running.group.ranks,
        "stage": running.stage,
        "seed": running.seed,
        "no_sync": running.no_sync,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **({"device": device} if (device := describe(running.group.device)) else {}),
        "parameters": {
            r.name: {"shape": list(running.shape(r)), "dtype": writable(r.name, r.param), "names": r.names}
            | ({"strips": list(cut[r.name])} if cut[r.name].parts > 1 else {})
            for r in running.records
        },
        "optimizers": finite([options(running, binding) for binding in running.bindings]),
        "average": running.moving and {"decay": running.moving.decay, "updates": running.moving.updates},
        **({} if running.place is None else {"batches": running.place}),
        "extra": extra,
    }


# --- from here on without the model, perhaps on a thread ------------------------------------------------------------


def _write(
    group: Group, snapshot: Snapshot, beside: Path, target: Path, places: Sequence[str], keep: int | None
) -> None:
    """Write, agree, publish, agree. Whatever fails on a rank is told to all before any of them raises."""
    first = group.rank == 0
    try:
        _together(group, target, lambda: make_room(beside, target) if first else None)
        _together(group, Path(places[0]), lambda: _check_seen(group, beside, places))
        everyone = _together(group, target, lambda: _write_own(group, snapshot, beside))
        _together(group, target, lambda: _publish(snapshot, everyone, beside, target) if first else None)
    except BaseException as error:  # Ctrl-C too: nothing half written stays
        if first:
            discard(beside)
        if isinstance(error, CheckpointError):  # else a peer is gone, and would not answer
            group.describe(None)  # no rank raises while anything of it is left
        raise
    if keep is not None and first:
        _forget(target, keep)
    group.describe(None)  # no rank goes on while older ones are still being removed


def _together(group: Group, target: Path, act: Callable[[], Any]) -> list[Any]:
    """Call `act`, and return every rank's answer; if it failed on one, raise on all."""
    with _attempt(group, target) as attempt:
        attempt.answer = act()
    return attempt.answers


def _attempt(group: Group, target: Path) -> Together:
    def wrong(told: list[str]) -> CheckpointError:
        return CheckpointError(
            "the checkpoint was not saved; the one before it and the training are as they were",
            where=str(target), got="; ".join(told), instead="fix that, or name another folder, and save again",
        )  # fmt: skip

    def said(error: Exception) -> str:
        if isinstance(error, OSError):
            return f"{error.strerror or error}: {error.filename or target}"
        return problem_of(error)

    return Together(group, wrong, said=said)


def _check_seen(group: Group, beside: Path, places: Sequence[str]) -> None:
    """Raise `CheckpointError` if this rank does not see the folder that rank 0 has made for all."""
    if not beside.is_dir():
        raise CheckpointError(
            "this rank does not see the folder that rank 0 saves in", expected=f"{places[0]}, which is rank 0's",
            got=places[group.rank], instead="an absolute path, on a file system that all ranks have mounted",
        )  # fmt: skip


def _write_own(group: Group, snapshot: Snapshot, beside: Path) -> dict[str, Any]:
    """Write this rank's file, and return its part of the manifest, each tensor's key replaced by its offset.

    With more than `INLINE` ranks that part is a file too, and the manifest gets only what is returned.
    """
    name = f"rank{group.rank:05d}.safetensors"
    try:
        written = write_tensors(beside / name, snapshot.tensors)
    except OSError as error:
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in snapshot.tensors.values())
        raise OSError(error.errno, f"{error.strerror} ({nbytes:,} bytes to write)", str(beside / name)) from error
    snapshot.offsets, own = written.offsets, snapshot.own
    fragments = [[*entry, written.offsets[key], name] for *entry, key in own["fragments"]]
    if group.ranks <= parts.INLINE:
        facts = {"nbytes": written.nbytes, "digests": written.digests}
        return {
            **own,
            "file": name,
            "facts": facts,
            "fragments": fragments,
            "differing": _buffers(snapshot, name, differing=True),
        }
    whole = [entry for entry in fragments if entry[2] is None]
    cut = [entry for entry in fragments if entry[2] is not None]
    grains = {tuple(key): grain for *key, grain in own["grains"]}
    sizes = {key: math.prod(entry["shape"]) for key, entry in snapshot.head["parameters"].items()}
    begun = {(parameter, state): dtype for parameter, state, start, _, dtype, *_ in cut if start == 0}
    ended = [each[:2] for each in cut if each[3] * grains.get(tuple(each[:2]), 1) >= sizes[each[0]]]
    rows = [[parameter, state, start, stop, offset] for parameter, state, start, stop, _, _, offset, _ in cut]
    part = {"nbytes": written.nbytes, "digests": written.digests, "rng": own["rng"], "fragments": rows}
    return {
        "file": name,
        "facts": {"nbytes": written.nbytes, "part": parts.write_part(beside, name, part)},
        "begun": [[*key, dtype] for key, dtype in begun.items()],  # each by one rank: the owner of its first element
        "ended": ended,
        "fragments": whole,
        "grains": [grain for grain in own["grains"] if tuple(grain[:2]) in begun],
        "narrow": own["narrow"],
        "values": own["values"],
        "differing": _buffers(snapshot, name, differing=True),
    }


def _buffers(snapshot: Snapshot, file: str, *, differing: bool) -> dict[str, Any]:
    """Return the manifest's entries of the buffers in a rank's file: of those that differ between ranks, or of the
    others."""
    return {
        name: {"file": file, "shape": shape, "dtype": dtype, "offset": snapshot.offsets[key]}
        for name, (shape, dtype, key) in snapshot.buffers.items()
        if (name in snapshot.differing) is differing
    }


def _of_first(snapshot: Snapshot) -> dict[str, Any]:
    """Return the manifest's entries of what rank 0 alone saves: module buffers, and tensors in `extra`."""
    name = "rank00000.safetensors"
    extras = [[*entry, snapshot.offsets[key]] for *entry, key in snapshot.extras]
    return {"buffers": _buffers(snapshot, name, differing=False), "extra_tensors": extras, "extra_file": name}


def _publish(snapshot: Snapshot, everyone: Sequence[dict[str, Any]], beside: Path, target: Path) -> None:
    manifest = {
        **snapshot.head,
        **_of_first(snapshot),
        "number": 1 + max((number for number, *_ in orders(target.parent, say=False)), default=0),
        "fragments": [fragment for own in everyone for fragment in own["fragments"]],
        "grains": (grains := [grain for own in everyone for grain in own["grains"]]),
        "version": VERSION if grains else snapshot.head["version"],
        "values": [value for own in everyone for value in own["values"]],
        "files": {own["file"]: own["facts"] for own in everyone},
    }
    if len(everyone) > parts.INLINE:
        last = {tuple(key): rank for rank, own in enumerate(everyone) for key in own["ended"]}
        cut = [[*entry, rank, last[tuple(entry[:2])]] for rank, own in enumerate(everyone) for entry in own["begun"]]
        manifest |= {"version": IN_PARTS, "cut": cut}
    else:
        manifest["rng"] = [own["rng"] for own in everyone]
    if snapshot.differing:
        each = {name: [own["differing"].get(name) for own in everyone] for name in snapshot.differing}
        manifest |= {"version": LOCAL, "local_buffers": each}
    if narrow := [entry for own in everyone for entry in own["narrow"]]:
        manifest |= {"version": NARROW, "narrow": narrow}
    check_loads(target, manifest)
    write_manifest(beside, manifest)
    publish(beside, target)


def _forget(target: Path, keep: int) -> None:
    """Remove the oldest complete checkpoints beside this one until `keep` are left, this one among them."""
    try:
        for path in [path for path in siblings(target.parent) if path != target][max(0, keep - 1) :]:
            if found := remove(path):
                warnings.warn(
                    f"zeroshard leaves the older checkpoint {path}: it holds {found[:5]}, which no save wrote",
                    stacklevel=2,
                )
    except OSError as error:
        warnings.warn(f"zeroshard saved {target}, but could not remove an older checkpoint: {error}", stacklevel=2)
