"""`shard(model, optimizer, stage=...)`: the one new line, and the `Zero` it returns."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import logging
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from . import loading, saving
from .assembly import Assembly
from .buffer import Buffer
from .checkpoint import Engine, drawing
from .comm import Comm
from .errors import StateError, UserError, nearest
from .events import Event, Ledger, Record
from .files import absolute
from .finite import Finding, Finite
from .gradient import Gradients
from .guard import Guarded, cover_constructors, refuse_inside
from .layout import Bucket, Layout, Slot
from .numerics import Precision, as_bytes, dense, digest, write_bytes
from .nvme import NvmeTier
from .optim import Binding
from .preflight import Contents, Structure, by_bucket, check_added, refuse_wrapper
from .process_group import connect
from .reduction import Reduction
from .replicas import check_replicas
from .saving import Saving
from .schedule import Schedule, in_backward
from .stage import Placements, placements
from .tier import Offload
from .undo import Before
from .unit import Managed, Unit

if TYPE_CHECKING:
    from .explain.document import Page

log = logging.getLogger("zeroshard")
Batch = TypeVar("Batch")

COMPARING = "comparing replicas"  # a meeting


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    *,
    stage: int = 3,
    precision: Precision | None = None,
    offload: Offload | None = None,
    layout: Layout | None = None,
    comm: Comm | None = None,
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], None] | None = None,
) -> Zero:
    """Shard a model and its optimizer over the ranks, in place; the training loop stays plain PyTorch.

    Arguments:
        model: any `nn.Module`, on the CPU, on `device`, or on the meta device. Rank 0's weights and buffers count.
        optimizer: a `torch.optim` object (or several, or None) over the model's parameters. Its groups, options,
            hooks, schedulers and existing state stay; its parameters become this rank's fragments.
        stage: 0 nothing sharded, 1 optimizer state, 2 also gradients, 3 also parameters (Rajbhandari et al. 2020).
        precision, offload, layout, comm: policies; see their classes.
        device: where the model computes (default: where it is; the CPU for a model on meta).
        init: initialises one module whose parameters were on meta (default: its `reset_parameters()`).

    Raises `UserError` (a ValueError) for what cannot work, `PeerError` where the ranks do not agree. With `torchrun`
    (or any process group) every rank calls it; without a launcher it runs as one rank.
    """
    refuse_inside("shard(...)")
    precision = _policy("precision", precision, Precision)
    offload = _policy("offload", offload, Offload)
    layout, comm = _policy("layout", layout, Layout), _policy("comm", comm, Comm)
    if not isinstance(model, nn.Module):
        raise UserError("not a model", expected="an nn.Module", got=type(model).__name__)
    several = optimizer is None or isinstance(optimizer, (list, tuple))
    optimizers: list[Any] = list(optimizer or ()) if several else [optimizer]  # type: ignore[arg-type]
    return Zero(model, optimizers, stage, precision, offload, layout, comm, _device(model, device), init)


def _policy(name: str, given: Any, kind: Any) -> Any:
    if given is not None and not isinstance(given, kind):
        instead = f"{name}=zeroshard.{kind.__name__}(...)"
        raise UserError(f"{name}= takes a zeroshard.{kind.__name__}", got=repr(given), instead=instead)
    return kind() if given is None else given


def _device(model: nn.Module, wanted: torch.device | str | None) -> torch.device:
    if wanted is not None:
        try:
            device = torch.device(wanted)
        except (RuntimeError, TypeError):
            device = torch.device("meta")
        if device.type == "meta":
            instead = 'device="cuda" or device="cpu"'
            raise UserError("device= is nothing to compute on", got=repr(wanted), instead=instead)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device
    found = {param.device for param in model.parameters() if not param.is_meta}
    if len(found) > 1:
        where = sorted(map(str, found))
        raise UserError("the model's parameters are on several devices", got=where, instead="shard(..., device=...)")
    return found.pop() if found else torch.device("cpu")


class Dtypes(NamedTuple):
    """What one bucket's states are held in."""

    param: torch.dtype
    grad: torch.dtype
    master: torch.dtype


class Owner(NamedTuple):
    """Elements [start, stop) of a parameter, counted flat, in the memory of one rank."""

    rank: int
    start: int
    stop: int
    tier: str


class Zero:
    """A sharded model: what `shard` returns, and where everything beside the plain loop is asked for."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        stage: int,
        precision: Precision,
        offload: Offload,
        layout: Layout,
        comm: Comm,
        device: torch.device,
        init: Callable[[nn.Module], None] | None,
    ) -> None:
        self.placements = placements(stage)
        if any(hasattr(tensor, "_zeroshard") for tensor in model.parameters()):
            raise UserError("this model, or a part of it, is sharded already", instead="shard it once, as a whole")
        self.stage = stage
        self.model = model
        self._precision, self._layout, self._comm, self._device = precision, layout, comm, device
        self._offload = offload
        self._ledger = Ledger()
        self._ledger.begin("init")
        self._group = connect(comm, self._ledger, device)
        self.rank, self.world_size = self._group.rank, self._group.ranks
        parts = Assembly(model, stage, precision, offload, self._group)
        before: Before | None = None
        try:
            parts.plan(optimizers, layout, comm)
            before = Before(model, optimizers)
            self._assemble(parts, before, optimizers, init)
            self._ledger.end("init")
            self._group.meet("construction", 1)  # all or none
        except BaseException as error:
            if not parts.told:
                self._group.give_up(error)
            if before is not None:
                before.restore()
            raise

    def _assemble(
        self,
        parts: Assembly,
        before: Before,
        optimizers: list[torch.optim.Optimizer],
        init: Callable[[nn.Module], None] | None,
    ) -> None:
        """Change the model and the optimizers; what fails in here is undone."""
        model, comm, precision = self.model, self._comm, self._precision
        parts.reserve()
        parts.build(init, before)
        self.partition, self.seed = parts.partition, parts.seed
        self._managed, self._units, self._buffers = parts.managed, parts.units, parts.buffers
        self._tier, self._tiers, self._resting = parts.tier, parts.tiers, parts.resting
        self._checkpoints = 0
        self._saving: Saving | None = None
        self._gradients = Gradients(self._group)
        self._finite = Finite(self._group, precision.nonfinite)
        self._gradients.on_verdict = self._finite.judge
        self._reduction = Reduction(self._gradients, self._group, self._tier, comm, self._finite)
        self._gradients.settle = self._reduction.settle
        for buffer in self._buffers:
            if buffer.bucket.trainable:
                self._reduction.add(self._gradients.add(buffer), self._units[buffer.bucket.unit])
        self._schedule = Schedule(
            self._units, self._gradients, self._reduction, parts.saved, self._group, comm, precision
        )
        self._schedule.before_forward, self._schedule.alike = self._before_forward, self._alike
        self._schedule.notice, self._schedule.publish = self._notice_fragments, self._publish
        self._schedule.sends_always = self._layout.buffers == "always"
        self._schedule.hook_gradients()
        self._gradients.recover = self._schedule.recover
        whole = not self.placements.optimizer or not self.partition.cut_tensors()
        parts_of_a_step = self._buffers, self._gradients, self._schedule, self._finite
        self._bindings = [
            Binding(each, number, *parts_of_a_step, whole=whole, by_bucket=by_bucket(each))
            for number, each in enumerate(optimizers)
        ]
        for binding in self._bindings:
            binding.before_step = self._notice_edits
            binding.check_added = functools.partial(check_added, model, self._buffers, self._bindings)
        self._structure = Structure(model)
        self._sending: dict[str, Tensor] = {}  # buffers, before a forward that trains
        self._source = 0  # the rank whose buffers count
        self._joined = 0  # batches that `join` has given
        self._content = Contents()  # of buffers that are made of several tensors
        self._now: dict[str, Any] = {}  # what `_alike` has found, and what of it was alike when it last met the others
        self._found: dict[str, Any] = {}
        self._known = self._traits()
        for unit in self._units:
            unit.module.__dict__["__reduce_ex__"] = _refuse_copy  # what deepcopy, pickle and torch.save ask first
        if self._schedule.releases:
            cover_constructors()
        if self.placements.parameters:
            for unit in self._units:
                unit.module.register_state_dict_pre_hook(_refuse_state_dict)
                unit.module.register_load_state_dict_pre_hook(_refuse_load)
        elif self.placements.optimizer:
            refuse = weakref.WeakMethod(self._refuse_mixture)
            for unit in self._units:
                unit.module.register_state_dict_pre_hook(functools.partial(_call_if_alive, refuse))
        for binding in self._bindings:
            binding.states.count()
        # The hooks hold the engine weakly; the model keeps it alive.
        object.__setattr__(model, "_zeroshard_engine", self)

    def __repr__(self) -> str:
        numel = sum(record.param.numel() for record in self._managed)
        return f"Zero(stage={self.stage}, rank={self.rank}, world_size={self.world_size}, parameters={numel})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy(protocol)

    # --- before each forward and step -------------------------------------------------------------------------------

    def _before_forward(self, training: bool) -> None:
        around = nn.parallel.DistributedDataParallel._active_ddp_module
        if around is not None:
            refuse_wrapper(type(around).__name__, "around the sharded model")
        self._found |= self._now
        self._notice_edits_of_structure(called=True)
        if training:
            self._broadcast_buffers()

    def _alike(self, training: bool) -> tuple[int, Callable[[], str]]:
        """A digest of what every rank must have alike in a forward; in words, what of it is not as it was."""
        if self.world_size == 1:
            return 0, str
        with torch._C.DisableTorchFunctionSubclass():
            now: dict[str, Any] = {"frozen": [each.name for each in self._managed if not each.param.requires_grad]}
        named = self.model.named_buffers() if training and self._layout.buffers != "local" else ()
        self._sending = {}
        for name, tensor in named:
            if not dense(tensor):
                now[name] = self._content.of(tensor)
            elif tensor.numel() and not tensor.is_meta:
                self._sending[name] = tensor
                now[name] = tuple(tensor.shape), tensor.dtype
        self._now, found = now, self._found
        return zlib.crc32(repr(now).encode()), lambda: str({key: now[key] for key in now if now[key] != found.get(key)})

    def _notice_edits(self) -> None:
        """Of the model, and of the optimizers' groups."""
        self._notice_edits_of_structure()
        for binding in self._bindings:
            binding.follow_groups()

    def _notice_edits_of_structure(self, *, called: bool = False) -> None:
        """Modules and parameters replaced or converted since `shard` are refused; frozen and unfrozen ones followed.

        called: by a forward.
        """
        name = self._structure.difference(called=called)
        if name is not None:
            raise StateError(
                "a parameter or module of a sharded model was replaced, removed or added",
                where=repr(name),
                instead="edit weights in place, inside `with zero.gathered():`, or change the model before shard(...); "
                "torch.func.functional_call takes tensors that are no nn.Parameter",
            )
        now = self._traits()
        if now == self._known:
            return
        for record, (dtype, device, trainable), (_, _, was) in zip(self._managed, now, self._known, strict=True):
            own = record.param._zeroshard.buffer.dtype  # type: ignore[attr-defined]
            if dtype is not own or device != self._device:
                raise StateError(
                    "a sharded parameter was converted or moved",
                    where=f"parameter {record.name!r}",
                    expected=f"{own} on {self._device}",
                    got=f"{dtype} on {device}",
                    instead="shard(..., precision=Precision(param_dtype=...), device=...)",
                )
            if trainable and not was:
                self._unfreeze(record)
        self._known = now

    def _notice_fragments(self, *, replaced: bool = False) -> bool:
        noticed = [binding.notice(replaced=replaced) for binding in self._bindings]  # all of them look
        return any(noticed)

    def _publish(self) -> None:
        """What fragments were edited to, on any rank, becomes the weights of every rank, as after a step."""
        mine = set().union(*(binding.edited for binding in self._bindings))
        edited = self._group.flags(bytes(buffer.bucket.index in mine for buffer in self._buffers))
        if any(unit.pinned for unit in self._units):
            raise StateError(
                "an optimizer's part of the parameters was edited inside gathered(), where the parameters are edited",
                instead="edit it before or after gathered(): optimizer.eval() and the like too",
            )
        for binding in self._bindings:
            binding.edited.clear()
        published = [buffer for buffer, flag in zip(self._buffers, edited, strict=True) if flag]
        for buffer in published:
            buffer.changed()
            buffer.gathered.current &= buffer.resident
            buffer.spread(overlap=self._comm.overlap)
        self._compare([buffer for buffer in published if not buffer.place.optimizer])

    def _refuse_mixture(self, module: nn.Module, *_: Any) -> None:
        """Before a state_dict, which asks no other rank."""
        if self._notice_fragments(replaced=True):
            raise StateError(
                "an optimizer's part of the weights was edited: state_dict() would hold edited and older weights",
                where=f"module {type(module).__name__}, rank {self.rank}",
                instead="with zero.gathered(): model.state_dict()   (on every rank)",
            )

    def _traits(self) -> list[tuple[torch.dtype, torch.device, bool]]:
        """Of every parameter what may not change, and whether it is trained."""
        params = [record.param for record in self._managed]
        with torch._C.DisableTorchFunctionSubclass():
            return [(param.dtype, param.device, param.requires_grad) for param in params]

    def _unfreeze(self, record: Managed) -> None:
        """A bucket that was frozen at construction becomes trainable as a whole: see docs/decisions/unfreezing.md."""
        buffer: Buffer = record.param._zeroshard.buffer  # type: ignore[attr-defined]
        if self._gradients.of_bucket(buffer.bucket.index) is None:
            buffer.reserve_gradients()
            buffer.reserve_master()
            self._reduction.add(self._gradients.add(buffer), self._units[buffer.bucket.unit])
            for binding in self._bindings:
                binding.retarget(buffer)
        self._schedule.hook_gradients()
        for binding in self._bindings:
            binding.adopt()

    def _broadcast_buffers(self) -> None:
        """Rank 0's to all (in `join` those of a rank that has a batch). Equal ones are not written, so autograd's
        versions stay."""
        sending, self._sending = self._sending, {}
        if not sending:
            return
        with torch.inference_mode(False), torch.no_grad():
            own = [as_bytes(tensor) for tensor in sending.values()]
            raw = torch.cat(own)
            self._group.broadcast(raw, self._source)
            for tensor, theirs in zip(sending.values(), raw.split([each.numel() for each in own]), strict=True):
                write_bytes(tensor, theirs)

    # --- what users call --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up on this rank only; the next backward outside (or the next step) sends the sum.

        At every stage. Costs one full-size gradient buffer in the accumulation dtype (`Precision.grad_dtype`) until
        then, and saves one pass of the gradients per backward. Same bits at all stages; not the same as without it.
        """
        before, self._schedule.local = self._schedule.local, True
        try:
            yield
        finally:
            self._schedule.local = before

    def join(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's batches, then the last of them again until no rank has one left: for loaders of uneven length.

        for batch in zero.join(loader): forward, backward, clip, step and schedule as always, on all ranks alike.

        A batch that is given again counts for nothing. What its backward leaves of gradients is dropped, so that this
        rank's part is zero; gradients are still divided by `world_size`, as by default in DDP's `join`. Its loss is the
        program's to leave out. Buffers are those of the first rank that still has a batch. At least one batch on every
        rank. Collective, a small message per batch.
        """
        none: Any = object()
        last, iterator = none, iter(batches)
        try:
            while True:
                batch = next(iterator, none)
                last = last if batch is none else batch
                self._joined += 1
                self._schedule.recover()
                told = self._group.poll("joining", self._joined, batch is not none, last is not none)
                having = [rank for rank, (has, _) in enumerate(told) if has]
                if not having:
                    self._alike(True)
                    self._broadcast_buffers()
                    return
                if empty := [f"rank {rank}" for rank, (_, had) in enumerate(told) if not had]:
                    raise StateError(
                        "a rank has no batch at all, so it cannot take part in what the others do with theirs",
                        where=", ".join(empty),
                        expected="one batch or more on every rank",
                        instead="divide the data so that every rank has some",
                    )
                self._source, self._reduction.silent = having[0], batch is none
                yield last
                self._reduction.silent = False
        finally:
            self._source, self._reduction.silent = 0, False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip all gradients by their global norm (any order above 0, or inf); returns it, the same on every rank.

        Exactly `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`, which works as well.
        """
        params = [record.param for record in self._managed]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @contextlib.contextmanager
    def gathered(self, *what: nn.Module | str, write_from: int | None = None) -> Iterator[None]:
        """Full parameters inside the `with`, on every rank: of the given modules or names (patterns), else of all.

        Edits made inside count, at every stage: make them on all ranks alike, or name the one rank whose edits to
        take with `write_from`. Collective: every rank enters and leaves.
        """
        if write_from is not None and not (type(write_from) is int and 0 <= write_from < self.world_size):
            last = self.world_size - 1
            raise UserError("write_from names a rank", expected=f"0 to {last}", got=repr(write_from))
        if in_backward():
            instead = "touch the parameter, or gather before backward"
            raise StateError("gathered() inside backward cannot be answered", instead=instead)
        units = self._units_of(what)
        self._schedule.recover()
        which = zlib.crc32(repr([unit.index for unit in units]).encode())
        self._schedule.meet("gathered()", len(units), which, -1 if write_from is None else write_from)
        self._ledger.begin("gather")
        for unit in units:
            unit.land()
        try:
            with self._schedule.pin(units):
                try:
                    yield
                finally:
                    self._leave_gathered(units, write_from)
        finally:
            self._ledger.end("gather")
            if not self._schedule.script.active:
                for unit in units:
                    unit.release()

    @torch.no_grad()
    def _leave_gathered(self, units: list[Unit], write_from: int | None) -> None:
        self._notice_fragments(replaced=True)
        with self._schedule.telling():
            told = self._group.poll("leaving gathered()", len(units), 0 if write_from is not None else _digest(units))
        if self.rank == 0 and len(set(told)) > 1:
            log.warning(
                "the ranks leave gathered() with different weights: of each element its owner's counts, a mixture. "
                "Make the same edits on every rank, or say whose count: zero.gathered(write_from=0)"
            )
        for buffer in (buffer for unit in units for buffer in unit.buffers):
            buffer.rebind()
            if write_from is not None:
                self._group.broadcast(buffer.full, write_from)
            buffer.follow_edits()
            if write_from is not None and buffer.master is not None and not buffer.place.optimizer:
                with buffer.master.here() as master:  # casts of it may agree where masters do not
                    sent = master.to(self._device)
                    self._group.broadcast(sent, write_from)
                    master.copy_(sent)
            if not buffer.place.parameters and write_from is None:
                # Whatever each rank did to its copy, the owner's edit of every element is the one that counts.
                buffer.publish().wait()

    def _units_of(self, what: Sequence[nn.Module | str]) -> list[Unit]:
        if not what:
            return list(self._units)
        index = {id(record.param): record.unit for record in self._managed}
        names = {name: record.unit for record in self._managed for name in record.names}
        modules = dict(self.model.named_modules())
        found: set[int] = set()
        for item in what:
            if isinstance(item, str):
                hits = {unit for name, unit in names.items() if fnmatch.fnmatchcase(name, item)}
                if item in modules:
                    hits |= {index[id(param)] for param in modules[item].parameters() if id(param) in index}
                if not hits:
                    instead = nearest(item, [*names, *modules])
                    raise UserError("no parameter or module of that name", got=repr(item), instead=instead)
                found |= hits
            elif isinstance(item, nn.Module):
                found |= {index[id(param)] for param in item.parameters() if id(param) in index}
            elif isinstance(item, nn.Parameter) and id(item) in index:
                found.add(index[id(item)])
            else:
                instead = 'zero.gathered(model.head), or zero.gathered("head.weight")'
                raise UserError("gathered() takes modules and names", got=type(item).__name__, instead=instead)
        return [self._units[unit] for unit in sorted(found)]

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool = False,
        keep: int | None = None,
    ) -> Saving:
        """Write a checkpoint folder at `path`: parameters or masters, optimizer states, buffers, random states.

        extra: what else a resumed run needs, as numbers, text, lists, dicts, tensors, or objects with `state_dict()`
            (schedulers, scalers). Rank 0's counts.
        asynchronous: copy what this rank owns to host memory (`zeroshard plan` says how much) and write it behind the
            training. `.wait()` on what is returned waits for it, and so do the next save or load, and the program's
            end. At most one is under way.
        keep: once this one is complete, remove the oldest checkpoints in the same folder until so many are left.

        Gradients are not saved. Every rank writes what it owns; nothing is gathered. The folder appears by one rename
        once all of it is on the disk; what was at `path` stays until then. Raises `CheckpointError` on every rank if
        one cannot write, at `wait` where it is asynchronous. Collective.
        """
        self._meet_for_checkpoint("saving")
        with self._ledger.during("save"):
            self._saving = saving.save(
                self._engine(), path, extra, asynchronous=asynchronous, keep=keep, ledger=self._ledger
            )
        return self._saving

    def load(self, path: str | os.PathLike[str], *, strict: bool = True) -> loading.Loaded:
        """Load what `save` wrote, into whatever ranks, stage, bounds and precision; returns what was in `extra`.

        Every rank reads and checks everything it needs first; only if all could, anything is changed. `strict=False`
        passes over what does not fit and says so in `.skipped`. Gradients are cleared. Raises `CheckpointError` on
        every rank. Collective.
        """
        with contextlib.ExitStack() as renewed:
            for tier in (tier for tier in self._tiers.values() if isinstance(tier, NvmeTier)):
                renewed.enter_context(tier.renewed())
            self._meet_for_checkpoint("loading")
            engine = self._engine()
            loaded = loading.load(engine, path, strict=strict)
        self.seed = engine.seed
        self._forget_old_weights()
        return loaded

    def state_dict(self) -> dict[str, Any]:
        """This rank's pieces for `torch.distributed.checkpoint`: `dcp.save({"app": zero}, checkpoint_id=...)`.

        With the keys of torch's `get_state_dict(model, optimizer)`, so that FSDP2 and plain tensors load it. Random
        states and extras are not in it, and DCP's metadata is a pickle: `save` has neither fault. Collective.
        """
        from .integrations import dcp

        self._meet_for_checkpoint("saving")
        return dcp.state_dict(self._engine())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a `state_dict()` that DCP has read into, as `dcp.load({"app": zero}, checkpoint_id=...)` does.

        Gradients are cleared. Raises `CheckpointError` on every rank, and changes nothing, if one cannot. Collective.
        """
        from .integrations import dcp

        self._meet_for_checkpoint("loading")
        dcp.load_state_dict(self._engine(), state_dict)
        self._forget_old_weights()

    def _forget_old_weights(self) -> None:
        self._gradients.hide(self._gradients.entries)
        for unit in self._units:
            unit.release()

    def export(
        self, folder: str | Path, *, file_nbytes: int = 5 * 10**9, dtype: Any = None, overwrite: bool = False
    ) -> None:
        """Write the weights for other programs: a folder of safetensors files as Hugging Face's tools write it.

        file_nbytes: the most bytes of tensors in one file (a larger tensor gets one of its own).
        dtype: of all floating-point tensors, cast from the masters where there are any; None: each one's own.
        overwrite: replace a folder that is not an export. An earlier export is replaced in any case.

        All that `model.state_dict()` names; of a tied parameter the first name, with the others in the file's metadata.
        A model's `config` that can write itself (Hugging Face's) is written as config.json. Gathers one bucket at a
        time; rank 0 writes. The folder appears by one rename. Raises `CheckpointError` on every rank. Collective.
        """
        from .integrations import export

        wanted = export.Wanted(file_nbytes, dtype, overwrite)
        self._meet_for_checkpoint("exporting")
        with self._ledger.during("export"):
            export.export(self._engine(), folder, wanted)

    def check_replicas(self) -> None:
        """Raise `PeerError`, on every rank, if ranks hold different copies of what each of them holds whole.

        Parameters at stages 0-2, masters and optimizer states at stage 0: it names the parameter, the ranks, and the
        first element. Costs a pass over these bytes and a small message. `save` and `export` do it in any case. After a
        step. Collective.
        """
        self._meet_for_checkpoint(COMPARING)

    def latest(self, folder: str | os.PathLike[str]) -> Path | None:
        """The newest complete checkpoint in `folder`, for `load`; None if there is none.

        Found by reading and checking every byte, never by a pointer that could be stale: damaged ones are passed over
        with a warning. Collective; every rank checks a share.
        """
        self._meet_for_checkpoint("loading")
        return loading.latest(self._group, absolute(folder))

    def micro_batch_rng(self, step: int, index: int) -> contextlib.AbstractContextManager[None]:
        """Inside, random numbers (Python's, NumPy's, torch's) depend on the run's seed, `step` and `index` alone.

        index: which of the step's micro-batches this is, counted over all ranks: `a * zero.world_size + zero.rank` in
        the rank's a-th backward. So dropout is the same at any number of ranks. The seed is `zero.seed`: rank 0's
        `torch.initial_seed()` when the model was sharded, or the one saved in the checkpoint that was loaded.
        """
        return drawing(self.seed, step, index)

    def _meet_for_checkpoint(self, what: str) -> None:
        self._schedule.recover()
        if in_backward() or self._schedule.script.active or any(unit.pinned for unit in self._units):
            raise StateError(f"{what} inside forward, backward or gathered()", instead="after step")
        self._notice_edits()
        self._schedule.meet(what, self._checkpoints + 1)
        self._checkpoints += 1
        if self._saving is not None and not self._saving.reported and what != COMPARING:
            self._saving.wait()
        for buffer in self._buffers:
            buffer.land()
            buffer.rebind()
            if buffer.resident or buffer.ready:
                buffer.follow_edits()
        if what != "loading":
            self._compare(self._buffers)

    def _compare(self, buffers: list[Buffer]) -> None:
        with self._ledger.during("compare"):
            check_replicas(self._engine(), buffers, self._checkpoints)

    def _engine(self) -> Engine:
        return Engine(self.model, self._managed, self._buffers, self._bindings, self._group, self.stage, self.seed)

    def dtypes(self, bucket: Bucket) -> Dtypes:
        """What a bucket's parameters, gradients, and masters are held in."""
        buffer = self._buffers[bucket.index]
        return Dtypes(buffer.dtype, buffer.grad_dtype, buffer.master_dtype)

    def optimizer_members(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], list[tuple[Bucket, Slot]]]]:
        """(optimizer, group, the parameters it updates on whichever rank), for every group of every optimizer."""
        for binding in self._bindings:
            for group in binding.optimizer.param_groups:
                places = [member.place for member in binding.members if member.group is group]
                yield binding.optimizer, group, [(p.buffer.bucket, p.buffer.bucket.slots[p.position]) for p in places]

    def ledger(self) -> Ledger:
        """Bytes this rank holds now and held at most, by state, tier and phase, and bytes moved by verb: a snapshot."""
        for binding in self._bindings:
            binding.states.count()
        return self._ledger.snapshot()

    def owners(self, name: str, state: str = "optimizer") -> list[Owner]:
        """Which rank holds which flat range of a parameter's "parameters", "gradients" or "optimizer" state.

        Ranges in rank order; where the state is replicated every rank holds the whole. Empty for gradients and
        optimizer state of a parameter in a frozen bucket.
        """
        record = next((record for record in self._managed if name in record.names), None)
        if record is None:
            names = [name for record in self._managed for name in record.names]
            raise UserError("no such parameter", got=repr(name), instead=nearest(name, names))
        if state not in Placements._fields:
            raise UserError("no such state", got=repr(state), instead=nearest(state, Placements._fields))
        bucket, slot = self.partition.find(record.name)
        if state != "parameters" and self._gradients.of_bucket(bucket.index) is None:
            return []
        tier = self._resting[bucket.index][state]
        if not getattr(self.placements, state):
            return [Owner(rank, 0, slot.numel, tier) for rank in range(self.world_size)]
        parts = [bucket.fragment(slot, rank) for rank in range(self.world_size)]
        return [Owner(rank, *part, tier) for rank, part in enumerate(parts) if part.numel]

    @property
    def skipped(self) -> int:
        """How many optimizer steps were passed over so far because a gradient was not finite: by
        `Precision(nonfinite="skip")`, or by a `GradScaler`. The same on every rank."""
        return self._finite.skipped

    @property
    def nonfinite(self) -> Finding | None:
        """The last NaN or infinity that `Precision(nonfinite=...)` found, the same on every rank."""
        return self._finite.last

    # --- what happened ----------------------------------------------------------------------------------------------

    def record(self, limit: int = 1 << 16) -> None:
        """Record events from now on, and the changes of what is held: the last `limit` of each. 0 stops and forgets."""
        if type(limit) is not int or limit < 0:
            raise UserError("record() keeps a number of events", got=repr(limit), instead="zero.record(65536)")
        self._ledger.record = Record(limit, self._ledger.tiers) if limit else None

    def events(self) -> list[Event]:
        """What this rank recorded, oldest first; collectives carry the name of their bucket's unit."""
        if self._ledger.record is None:
            raise StateError("nothing was recorded", instead="zero.record() before the steps of interest")
        units = [self._units[bucket.unit].name for bucket in self.partition.buckets]
        events = list(self._ledger.record.events)
        return [e if e.bucket is None else dataclasses.replace(e, unit=units[e.bucket]) for e in events]

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what all ranks recorded as one Chrome trace, for ui.perfetto.dev. Collective; rank 0 writes."""
        from .integrations import chrome_trace

        path, record = absolute(path), self._ledger.record
        facts = None if record is None else chrome_trace.facts(record, self.events())
        ranks = self._group.describe(facts, "writing a trace")
        silent = [rank for rank, told in enumerate(ranks) if told is None]
        if silent:
            raise StateError(
                "nothing was recorded", where=f"ranks {silent}", instead="zero.record() on every rank, before the steps"
            )
        self._group.first_writes(path, lambda: chrome_trace.write(path, ranks))

    def explain(
        self, path: str | os.PathLike[str] | None = None, *, metrics: Sequence[Mapping[str, float]] | None = None
    ) -> Page:
        """One HTML page about this run, and about ZeRO: who holds what, the last recorded step, predicted and held.

        path: the file that rank 0 writes; None: none, a notebook shows what is returned. metrics: {"step": 1, "loss":
        2.5, "grad_norm": ...} of each step, for the curves. `record()` before the steps of interest, on every rank; the
        last whole one is shown. Opens without a network. Collective.
        """
        from .explain import run

        return run.explain(self, None if path is None else absolute(path), metrics)


def _digest(units: list[Unit]) -> int:
    found = [digest(buffer.full) for unit in units for buffer in unit.buffers]
    return zlib.crc32(repr(found).encode())


def _refuse_copy(protocol: Any) -> NoReturn:
    raise StateError(
        "a sharded model cannot be copied or pickled",
        instead="copy it before shard(...), or, for its weights alone, with zero.gathered(): model.state_dict()",
    )


def _call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    call = method()
    if call is not None:
        call(*args)


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _refuse(module, "state_dict() of a sharded model would hold nothing", "model.state_dict()")


def _refuse_load(module: nn.Module, *_: Any) -> None:
    _refuse(module, "load_state_dict() into a sharded model would change nothing", "model.load_state_dict(state)")


def _refuse(module: nn.Module, what: str, call: str) -> None:
    if any(isinstance(param, Guarded) for param in module.parameters()):
        instead = f"with zero.gathered(): {call}   (on every rank)"
        raise StateError(what, where=f"module {type(module).__name__}", instead=instead)
