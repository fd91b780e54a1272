"""`shard(model, optimizer, stage=...)`: the one new line, and the `Zero` it returns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from .checkpoint import loading, saving
from .checkpoint.content import model_state
from .checkpoint.files import absolute
from .checkpoint.meeting import Meeting
from .checkpoint.on_signal import save_on
from .checkpoint.saving import Saving
from .comm.all_or_none import first_writes
from .device import chosen, lacking, warn_of_idle
from .engine.build.supported_optimizers import unwrapped
from .engine.engine import COMPARING, Engine
from .engine.weights.guard import refuse_copy
from .engine.weights.modes import refuse_inside, unseen
from .errors import StateError, UserError, nearest, without_own_lines
from .events import Event, Ledger, Record
from .hooks import absent, features, first
from .layout.stage import Placements
from .policies.comm import Comm, Simulated
from .policies.layout import Layout
from .policies.offload import Offload
from .policies.precision import Precision
from .rng import drawing
from .validation import check_flag

if TYPE_CHECKING:
    from .explain.document import Page
    from .features.batches import Batches
    from .features.moving_average import MovingAverage
    from .features.nonfinite import Finding
    from .features.replay import Replay
    from .integrations.streaming import WeightStream

log = logging.getLogger("zeroshard")
ANY_MACHINE = 'device=torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")'
# By policy: values that other libraries take for such a policy, and what to write here instead.
_BF16, _FP16 = "Precision(param_dtype=torch.bfloat16)", "Precision(param_dtype=torch.float16)"
_CPU, _NVME = 'Offload(optimizer="cpu")', 'Offload(optimizer="nvme", path="a folder on a local disk")'
_MEANT: Mapping[type, Mapping[str, str]] = {
    Precision: {
        **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "bf16-true", "mixed", "true"), _BF16),
        **dict.fromkeys(("fp16", "float16", "half", "16", "16-mixed", "16-true"), _FP16),
        **dict.fromkeys(("fp32", "float32", "float", "32", "32-true"), "Precision()"),
        **dict.fromkeys(("fp8", "float8", "8"), "Precision(param_dtype=torch.bfloat16, fp8=True)"),
    },
    Offload: {
        **dict.fromkeys(("cpu", "host", "ram", "true"), f"{_CPU}, which also takes parameters= and gradients="),
        **dict.fromkeys(("nvme", "disk", "ssd", "files"), f"{_NVME}, which also takes parameters= and gradients="),
    },
    Comm: {
        **{each: f'Comm(reduce="{each}")' for each in ("ordered", "native", "int8")},
        **{each: f'Comm(transport="{each}")' for each in ("auto", "gloo", "shared")},
        "nccl": "Comm(), with device= on GPUs: what is there goes over NCCL",
    },
}
# By method of other libraries' engines and wrappers: what a plain loop has in its place.
_ELSEWHERE: Mapping[str, str] = {
    "backward": "loss.backward()",
    "step": "optimizer.step()",
    "zero_grad": "optimizer.zero_grad()",
    "parameters": "model.parameters(); model is the nn.Module that shard(...) was given",
    "train": "model.train(), of the nn.Module that shard(...) was given",
    "eval": "model.eval(), of the nn.Module that shard(...) was given",
    "module": "zero.model, the nn.Module that shard(...) was given",
    "forward": "model(...), of the nn.Module that shard(...) was given",
    "save_checkpoint": "zero.save(folder)",
    "load_checkpoint": "zero.load(folder)",
    "save_pretrained": "zero.export(folder)",
    "save_16bit_model": "zero.export(folder)",
}
Batch = TypeVar("Batch")
Method = TypeVar("Method", bound=Callable[..., Any])


class _Unsaid:
    def __repr__(self) -> str:
        return "<the model's optimizer, or None>"


_UNSAID: Any = _Unsaid()


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = _UNSAID,
    *,
    stage: int = 3,
    precision: Precision | None = None,
    offload: Offload | None = None,
    layout: Layout | None = None,
    comm: Comm | None = None,
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], None] | None = None,
    optimizer_in_backward: bool = False,
) -> Zero:
    """Shard a model and its optimizer over the ranks, in place; the training loop stays plain PyTorch.

    Arguments:
        model: any `nn.Module`, on the CPU, on `device`, or on the meta device. Rank 0's weights and buffers count; of
            what is on meta there, those of the first rank that has any.
        optimizer: a `torch.optim` object (or several) over the model's parameters. Its groups, options, hooks,
            schedulers and existing state stay; its parameters become this rank's fragments. None says that there is
            none: it has to be said, since an optimizer that is made afterwards would update no shards.
        stage: 0 nothing sharded, 1 optimizer state, 2 also gradients, 3 also parameters (Rajbhandari et al. 2020).
        precision: which dtype each state has; see `Precision`.
        offload: where each state rests; see `Offload`.
        layout: how parameters are grouped and cut; see `Layout`.
        comm: how ranks talk; see `Comm`.
        device: where the model computes (default: where it is; the CPU for a model on meta). "cuda" is the device that
            the program chose by `torch.cuda.set_device`, else `LOCAL_RANK`'s, which becomes current. On machines with
            or without one: `torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")`.
        init: initialises one module whose parameters were on meta (default: its `reset_parameters()`, then its model's
            `_init_weights(module)` where there is one, as in Hugging Face's models).
        optimizer_in_backward: each bucket is stepped inside `backward()` as its reduction lands, and its gradients'
            memory is given back: a rank holds one bucket's gradients instead of its whole shard. The same bits; no
            clipping, no scaling, one backward per step, which `optimizer.step()` then ends.

    Raises `UserError` (a ValueError) for what cannot work, `PeerError` where the ranks do not agree. With `torchrun`
    (or any process group) every rank calls it; without a launcher it runs as one rank.

    Examples:
        >>> zero = zeroshard.shard(model, optimizer, stage=3)
        >>> model(batch).square().mean().backward()
        >>> optimizer.step()
    """
    refuse_inside("shard(...)")
    precision = _policy("precision", precision, Precision)
    offload = _policy("offload", offload, Offload)
    layout, comm = _policy("layout", layout, Layout), _policy("comm", comm, Comm)
    if not isinstance(model, nn.Module):
        instead = "shard(nn.ModuleList(models), ...) for several models"
        if isinstance(optimizer, nn.Module):
            instead = "shard(model, optimizer, ...), in this order"
        raise UserError("not a model", expected="an nn.Module", got=type(model).__name__, instead=instead)
    if optimizer is _UNSAID:
        raise UserError(
            "shard takes the optimizer too, since its states are sharded with the model",
            got="no optimizer",
            instead="shard(model, optimizer, ...); or shard(model, None, ...) for a model that is not trained",
        )
    several = optimizer is None or isinstance(optimizer, (list, tuple))
    given: list[Any] = list(optimizer or ()) if several else [optimizer]  # type: ignore[arg-type]
    optimizers = list(map(unwrapped, given))
    chosen, device = device is not None, _device(model, device)
    if not (chosen or device.type != "cpu" or isinstance(comm.group, Simulated)):
        warn_of_idle()
    check_flag("optimizer_in_backward", optimizer_in_backward)
    policies = precision, offload, layout, comm
    with torch.inference_mode(False):  # what is made here is trained
        made = Engine(model, optimizers, stage, *policies, device, init, Meeting(), in_backward=optimizer_in_backward)
        return Zero(made)


def _policy(name: str, given: Any, kind: Any) -> Any:
    if given is not None and not isinstance(given, kind):
        raise UserError(
            f"{name}= takes a zeroshard.{kind.__name__}",
            got=repr(given),
            instead=f"{name}=zeroshard.{_meant(given, kind)}",
        )
    return kind() if given is None else given


def _meant(given: Any, kind: type) -> str:
    """Return, as code, the policy that is meant by another value."""
    if kind is Layout and isinstance(given, (int, float)) and not isinstance(given, bool):
        return f"Layout(bucket_mib={given})"
    if kind is Comm and type(given).__name__ in ("ProcessGroup", "DeviceMesh"):
        return "Comm(group=...) of this " + type(given).__name__
    word = str(given).removeprefix("torch.").lower() if isinstance(given, (str, bool, int, torch.dtype)) else ""
    return _MEANT.get(kind, {}).get(word, f"{kind.__name__}(...)")


def _device(model: nn.Module, wanted: torch.device | str | None) -> torch.device:
    if wanted is not None:
        try:
            device = torch.device(wanted)
        except (RuntimeError, TypeError):
            device = torch.device("meta")
        if device.type == "meta":
            raise UserError("device= is nothing to compute on", got=repr(wanted), instead=ANY_MACHINE)
        if lacks := lacking(device):
            raise UserError("there is no such device", where=f"device={wanted!r}", got=lacks, instead=ANY_MACHINE)
        return chosen(device)
    found = {param.device for param in model.parameters() if not param.is_meta}
    if len(found) > 1:
        where = sorted(map(str, found))
        raise UserError("the model's parameters are on several devices", got=where, instead="shard(..., device=...)")
    return found.pop() if found else torch.device("cpu")


class Owner(NamedTuple):
    """Elements [start, stop) of a parameter, counted flat, in the memory of one rank."""

    rank: int
    start: int
    stop: int
    tier: str


def _meeting(method: Method) -> Method:
    """Decorate a method in which ranks meet more than once: all of it counts as one meeting (`Group.as_one`)."""

    @functools.wraps(method)
    def called(self: Zero, *args: Any, **kwargs: Any) -> Any:
        self._engine.refuse_within()
        with self._engine.group.as_one(), unseen():
            return method(self, *args, **kwargs)

    return cast(Method, without_own_lines(called))


class Zero:
    """The handle of a sharded model that `shard` returns, for everything besides the plain training loop.

    `model` is the model, `stage` its stage, `rank` and `world_size` count the ranks that have data of their own.
    After `unshard` every call raises `StateError`. A collective call, which every rank makes, raises `PeerError` where
    a rank is gone, has raised, or calls something else.

    in a step          no_sync, join, batches, clip_grad_norm_, gathered, average, replay, generating, micro_batch_rng
    checkpoints        save, save_on, signalled, load, latest, state_dict, load_state_dict, export, stream
    at the end         unshard
    to look at a run   ledger, metrics, record, events, trace, explain, owners, skipped, nonfinite, check_replicas

    Examples:
        >>> zero = zeroshard.shard(model, optimizer)
        >>> zero.stage, zero.world_size
        (3, 1)
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.model = engine.model
        self.stage, self.placements, self.partition = engine.stage, engine.placements, engine.partition
        self.rank, self.world_size = engine.group.team.seat.source, engine.group.sources
        seat = engine.group.team.seat
        self.replicas, self.hosts = (1, seat.replicas) if seat.hosts else (seat.summed, 1)
        self._handlers: dict[int, Any] = {}  # of signals, from before `save_on`
        self._metered = time.perf_counter()  # when `metrics` was told of tokens

    @property
    def seed(self) -> int:
        """The seed of all random numbers of `micro_batch_rng`: agreed on by the ranks, or the loaded checkpoint's.

        Examples:
            >>> zero.seed == torch.initial_seed()
            True
        """
        return self._engine.seed

    def __repr__(self) -> str:
        numel = sum(record.param.numel() for record in self._engine.managed)
        return f"Zero(stage={self.stage}, rank={self.rank}, world_size={self.world_size}, parameters={numel})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(protocol)

    if not TYPE_CHECKING:  # a type checker is to say that there is no such attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Name what stands in the place of a method that engines of other libraries have."""
            instead = _ELSEWHERE.get(name)
            raise AttributeError(
                f"Zero has no {name!r}" + (f"; instead: {instead}" if instead else ""), name=name, obj=self
            )

    # --- what users call --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up backwards inside on this rank only; the next backward outside (or the next step) sends the sum.

        Saves one pass of the gradients per backward, at every stage. Stages 0 and 1 add up where their gradients rest,
        and hold nothing more for it; 2 and 3 take a full-size sum in the accumulation dtype
        (`Precision.grad_dtype`) until then, and so does `Offload(gradients=...)`. Same bits at all stages; not the
        same as without it, nor at another number of ranks, of which `load` warns.

        Examples:
            >>> with zero.no_sync():
            ...     model(batch).square().mean().backward()
            >>> model(batch).square().mean().backward()  # sends the sum of both
        """
        with self._engine.schedule.backward.holding_back():
            yield

    def join(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this rank's batches, then the last of them until no rank has one left: for loaders of uneven length.

        batches: this rank's, as many as it has. Forward, backward, clip, step and schedule as always, on every rank.

        A repeated batch counts for nothing: the gradients of its backward are dropped, so that this rank's part is
        zero; gradients are still divided by `world_size`, as by default in DDP's `join`. The program must leave out its
        loss. Buffers are those of the first rank that still has a batch. Raises `StateError`, on every rank, where one
        has no batch at all. Collective, a small message per batch.

        Examples:
            >>> for batch in zero.join(loader):
            ...     model(batch).square().mean().backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        return self._engine.join(batches)

    @_meeting
    def batches(
        self,
        dataset: Any,
        *,
        per_step: int,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        reseed: bool = True,
        **loader: Any,
    ) -> Batches:
        """Give each rank its micro-batches of each step, so that a step has the same bits at any number of ranks.

        Do not divide the loss: gradients are divided once, by the number of micro-batches of the step, whether
        `per_step` can be divided by the number of ranks or not.

        dataset: with len() and [index].
        per_step: micro-batches of a step, on all ranks together.
        size: samples of a micro-batch.
        seed: draws the order of samples, another one in each epoch.
        shuffle: False keeps the samples in the dataset's order.
        drop_last: leave out the last step of an epoch if its samples are fewer; else it has fewer micro-batches.
        reseed: draw random numbers in each micro-batch from `seed` and its place alone, as `micro_batch_rng` does: then
            dropout does not depend on the number of ranks.
        loader: of torch's DataLoader: num_workers, collate_fn, pin_memory, ...

        Iterating yields the steps that are left of an epoch. `save` and `load` hold the place, for any number of ranks.
        Raises `UserError` for a dataset or settings whose bits would depend on the number of ranks, `StateError` for a
        loop that does not make one backward for each micro-batch. Collective.

        Examples:
            >>> for step in zero.batches(torch.randn(24, 8), per_step=2, size=4):
            ...     for batch in step:
            ...         model(batch).square().mean().backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        settings = {"per_step": per_step, "size": size, "seed": seed, "shuffle": shuffle}
        settings |= {"drop_last": drop_last, "reseed": reseed}
        made = first(each.batches(self._engine, dataset, settings, loader) for each in features())
        if made is None:
            raise absent("features.batches")
        return made

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip all gradients by their global norm. Returns the norm before clipping, the same on every rank.

        max_norm: the most that the norm is after it.
        norm_type: the order of the norm: any above 0, or infinity.
        error_if_nonfinite: raise a `RuntimeError` where the norm is NaN or infinite.

        Exactly `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`, which works as well. Raises `UserError` for
        another order. Collective.

        Examples:
            >>> model(batch).square().mean().backward()
            >>> norm = zero.clip_grad_norm_(1.0)
        """
        params = [record.param for record in self._engine.managed]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def gathered(
        self, *what: nn.Module | str, write_from: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Gather full parameters for the `with` block, on every rank.

        what: modules, or names or patterns of parameters; none given: all parameters.
        write_from: the rank whose edits are taken. None: all ranks make the same ones.

        Edits made inside count, at every stage. Any rank may call the model alone inside, without grad, if it needs no
        other parameters. Raises `UserError` for a name or rank that is none, `StateError` inside backward. Collective:
        every rank enters and leaves.

        Examples:
            >>> with zero.gathered("weight", write_from=0), torch.no_grad():
            ...     _ = model.weight.mul_(0.5)
        """
        return self._engine.gathered(*what, write_from=write_from)

    @_meeting
    def average(self, decay: float) -> MovingAverage:
        """Make an exponential moving average of the weights, sharded and resting as the optimizer's states: 4 bytes for
        each of a rank's masters.

        decay: the weight of the average so far in each update, from 0 to less than 1.

        `.update()` after each `optimizer.step()`; the first takes the weights as they are. `with .swapped():` the
        model's weights are the averages, to evaluate or `export`. `save` and `load` hold it: make it before `load`.
        One per model: a second one raises `StateError`. Raises `UserError` for a decay that is none. Collective.

        Examples:
            >>> average = zero.average(0.999)
            >>> average.update()  # after each optimizer.step()
            >>> with average.swapped():
            ...     loss = model(batch).square().mean()
        """
        engine = self._engine
        if engine.moving is not None:
            instead = "the object that zero.average(...) returned, whose decay may be set"
            raise StateError("this model has an average already", got=f"decay={engine.moving.decay}", instead=instead)
        engine.schedule.recover()
        engine.moving = average = first(each.average(decay, engine) for each in features())
        if average is None:
            raise absent("features.moving_average")
        return average

    def replay(self, work: Callable[..., Any], *, every: int = 1000) -> Replay:
        """Compute one micro-batch in `every` on another rank too, and name the rank whose bits differ from others'.

        work: computes forward and backward of one micro-batch, from its arguments, the model and random numbers alone:
            what differs between ranks besides, such as `zero.rank`, must not come into it. Its arguments travel: dicts,
            lists and tuples of tensors, numbers and text.
        every: the first call is replayed, and each so many after it, on all ranks. A replay costs a forward and a
            backward; nothing of it stays: the run has the same bits with it and without it.

        Returns a function that calls `work` and returns what it does, or raises `CorruptionError` on every rank: from
        three ranks on it names the one. Raises `UserError` for arguments that cannot travel. Every rank makes the same
        calls.

        Examples:
            >>> step = zero.replay(forward_backward, every=1000)
            >>> for batch in loader:
            ...     loss = step(batch)  # forward and backward; clip and step after it as always
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        made = first(each.replay(self._engine, work, every) for each in features())
        if made is None:
            raise absent("features.replay")
        return made

    def generating(self) -> contextlib.AbstractContextManager[None]:
        """Let ranks make different numbers of forwards without grad inside, as for texts of different lengths.

        Every rank enters the block. A rank that leaves it takes part in the forwards of the others, which need its part
        of the weights, until no rank makes one more. Each forward costs one exchange of a few bytes between all ranks.
        The numbers are those of the same forwards without the block. The forwards call no collectives of these ranks.

        Raises `StateError` for a forward in grad mode inside, and with `Layout(buffers="always")`; on the other ranks
        `PeerError` if one leaves the block by an exception.

        Examples:
            >>> with zero.generating(), torch.no_grad():
            ...     for token in range(3 + zero.rank):
            ...         output = model(batch)
        """
        made = first(each.generating(self._engine) for each in features())
        if made is None:
            raise absent("features.generation")
        return made

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @_meeting
    def save(
        self,
        path: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool = False,
        keep: int | None = None,
    ) -> Saving:
        """Write a checkpoint folder at `path`: parameters or masters, optimizer states, buffers, random states.

        path: the folder to make.
        extra: what else a resumed run needs, as numbers, text, lists, dicts, tensors, or objects with `state_dict()`
            (schedulers, scalers). Rank 0's counts.
        asynchronous: copy what this rank owns to host memory (`zeroshard plan` says how much) and write it behind the
            training. `.wait()` on what is returned waits for it, and so do the next save or load, also those of another
            model, and the program's end. At most one is under way in a program.
        keep: once this one is complete, remove the oldest checkpoints in the same folder until so many are left.

        All but `extra` must be the same on every rank, which is compared before anything is done.

        Gradients are not saved. Every rank writes what it owns; nothing is gathered. The folder appears by one rename
        once all of it is on the disk; what was at `path` stays until then. Raises `CheckpointError` on every rank if
        one cannot write, at `wait` if it is asynchronous; `PeerError` if ranks hold different copies. Collective.

        Examples:
            >>> saving = zero.save("run/step-10", {"step": 10}, keep=3)
        """
        self._engine.meet_for_checkpoint("saving")
        with self._engine.ledger.during("save"):
            state, ledger = model_state(self._engine), self._engine.ledger
            return saving.save(state, path, extra, asynchronous=asynchronous, keep=keep, ledger=ledger)

    def save_on(
        self,
        signal: int,
        path: str | os.PathLike[str] | None,
        extra: Callable[[], Mapping[str, Any]] | None = None,
        *,
        keep: int | None = None,
    ) -> None:
        """Save at `path`, once, when any rank gets this signal: on all ranks, before the first forward after a step.

        signal: its number.
        path: where to save. None only notes the signal, for a loop that looks at `signalled` after a step and saves by
            itself.
        extra: called then; what it returns is saved along.
        keep: as in `save`.

        The handler sets a flag, and the message with which the next step begins tells all ranks: a signal to one rank
        is enough, whatever the program is doing. Then the previous handlers are restored. The program goes on; to end
        it, look at `signalled`. For several signals call it several times. Raises `UserError` for a signal that no
        program can handle, and outside of the main thread. Every rank calls it.

        Examples:
            >>> zero.save_on(signal.SIGTERM, "run/preempted", lambda: {"step": 10})
        """
        save_on(self, signal, path, extra, keep)

    @property
    def signalled(self) -> Signals | None:
        """The signal given to `save_on` that some rank got: the same on every rank, from a step on.

        Examples:
            >>> zero.save_on(signal.SIGTERM, None)
            >>> zero.signalled is None
            True
        """
        return Signals(self._engine.group.signalled) if self._engine.group.signalled else None

    @_meeting
    def load(self, path: str | os.PathLike[str], *, strict: bool = True) -> loading.Loaded:
        """Load what `save` wrote, into any ranks, stage, bounds and precision; `extra` is in the `Loaded` it returns.

        path: the checkpoint's folder.
        strict: False passes over what does not fit, and lists it in the answer's `.skipped`.

        Every rank reads and checks everything it needs first; only if all could, anything is changed. Gradients are
        cleared. Raises `CheckpointError` on every rank where the files are damaged or do not fit. Collective.

        Examples:
            >>> saving = zero.save("run/step-10", {"step": 10})
            >>> zero.load("run/step-10").extra
            {'step': 10}
        """
        with contextlib.ExitStack() as renewed:
            for tier in self._engine.tiers.values():
                renewed.enter_context(tier.renewed())
            self._engine.meet_for_checkpoint("loading")
            engine = model_state(self._engine)
            loaded = loading.load(engine, path, strict=strict)
        self._engine.seed, self._engine.position = engine.seed, None if self._engine.batches else loaded.batches
        self._engine.loaded()
        loading.warn_of_order(engine, path)
        return loaded

    @_meeting
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's pieces for `torch.distributed.checkpoint`: `dcp.save({"app": zero}, checkpoint_id=...)`.

        With the keys of torch's `get_state_dict(model, optimizer)`, so that FSDP2 and plain tensors load it. Random
        states and extras are not in it, and DCP's metadata is a pickle: `save` has neither fault. Raises `UserError`
        for states that DCP cannot hold: in files, of blocks, of fused weights as several matrices. Collective.

        Examples:
            >>> metadata = dcp.save({"app": zero}, checkpoint_id="dcp")
        """
        from .integrations import dcp

        self._engine.meet_for_checkpoint("saving")
        return dcp.state_dict(model_state(self._engine))

    @_meeting
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a `state_dict()` that DCP has read into, as `dcp.load({"app": zero}, checkpoint_id=...)` does.

        state_dict: what `state_dict()` returned, with the values read.

        Gradients are cleared. Raises `CheckpointError` on every rank, and changes nothing, if one cannot. Collective.

        Examples:
            >>> metadata = dcp.save({"app": zero}, checkpoint_id="dcp")
            >>> dcp.load({"app": zero}, checkpoint_id="dcp")
        """
        from .integrations import dcp

        self._engine.meet_for_checkpoint("loading")
        dcp.load_state_dict(model_state(self._engine), state_dict)
        self._engine.loaded()

    @_meeting
    def export(
        self, folder: str | Path, *, file_nbytes: int = 5 * 10**9, dtype: Any = None, overwrite: bool = False
    ) -> None:
        """Write the weights for other programs: a folder of safetensors files as Hugging Face's tools write it.

        folder: the folder to make.
        file_nbytes: the most bytes of tensors in one file (a larger tensor gets one of its own).
        dtype: of all floating-point tensors, cast from the masters where there are any; None: each one's own.
        overwrite: replace a folder that is not an export. An earlier export is replaced in any case.

        Writes all that `model.state_dict()` names; tied parameters under their first name, others in file metadata.
        A model's `config` that can write itself (Hugging Face's) is written as config.json. Of a `PeftModel` the active
        adapter alone is written, for `PeftModel.from_pretrained`. Gathers one bucket at a time; rank 0 writes. The
        folder appears by one rename. Raises `CheckpointError` on every rank where it cannot be written, `UserError` for
        another folder at its place. Collective.

        Examples:
            >>> zero.export("weights", dtype=torch.bfloat16)
        """
        from .integrations import export

        self._engine.meet_for_checkpoint("exporting")
        with self._engine.ledger.during("export"):
            export.export(model_state(self._engine), folder, file_nbytes=file_nbytes, dtype=dtype, overwrite=overwrite)

    @_meeting
    def stream(self, *, dtype: torch.dtype | None = None) -> WeightStream:
        """Give the weights to another program in this process, whole and by name, on every rank.

        dtype: of all floating-point tensors, cast from the masters where there are any; None: each one's own.

        The names are those of `model.state_dict()`; a tied parameter comes under its first. Buffers are rank 0's. The
        returned object's `tensors` has each name's shape, dtype and ties, in the order of the loop, before anything is
        gathered. Iterate again after any later step. One bucket is alive at a time, counted in the ledger as "gather"
        in the phase "export". A tensor's memory is taken back when the loop goes on, so copy what you keep, in the
        stream that is current there.

        Every rank iterates; one that leaves its loop early gathers the rest for the others. A value that the dtype
        cannot hold raises `UserError` on every rank, and a step inside the loop raises `StateError`. Collective.

        Examples:
            >>> for name, tensor in zero.stream(dtype=torch.bfloat16):
            ...     served[name] = tensor.clone()
        """
        from .integrations.streaming import WeightStream

        return WeightStream(self, dtype)

    @_meeting
    def unshard(self) -> None:
        """Make the model and its optimizers plain again, in place: whole parameters and states, on every rank.

        Parameters have the dtype that they had before `shard`, from the masters where there are any. Hooks of the
        engine go, those of the program stay; gradients are cleared, an average is given up, this handle refuses
        calls. Train on as in plain PyTorch, or `shard` again, at another stage. Holds all of it beside the shards
        for a moment. Call it after a step. Raises `UserError`, and changes nothing, for parameters that tensor
        parallelism has cut and for states that are made of several tensors. Collective.

        Examples:
            >>> zero.unshard()
            >>> zero = zeroshard.shard(model, optimizer, stage=1)
        """
        from .integrations import unshard

        unshard.unshard(self)

    @_meeting
    def check_replicas(self) -> None:
        """Raise `PeerError`, on every rank, if ranks hold different copies of what each of them holds whole.

        Parameters at stages 0-2, masters and optimizer states at stage 0: it names the parameter, the ranks, and the
        first element. Costs a pass over these bytes and a small message. `save` and `export` do it in any case. Call it
        after a step. Collective.

        Examples:
            >>> zero.check_replicas()
        """
        self._engine.meet_for_checkpoint(COMPARING)

    @_meeting
    def latest(self, folder: str | os.PathLike[str]) -> Path | None:
        """Find the newest complete checkpoint in `folder`, for `load`; None if there is none, or no folder.

        folder: where checkpoints lie side by side.

        It reads and checks every byte, and trusts no pointer that could be stale: damaged ones are passed over with a
        warning. Collective; every rank checks a share. Raises `CheckpointError` where the folder itself is a checkpoint
        of zeroshard or another system; warns where another system's are in it, and none of zeroshard's.

        Examples:
            >>> saving = zero.save("run/step-10")
            >>> zero.latest("run").name
            'step-10'
        """
        self._engine.meet_for_checkpoint("loading", weights=False)  # the disk where masters rest may have failed
        return loading.latest(self._engine.group, folder)

    def micro_batch_rng(self, step: int, index: int) -> contextlib.AbstractContextManager[None]:
        """Make random numbers inside (Python's, NumPy's, torch's) depend on the run's seed, `step` and `index` alone.

        step: which step this is, from 0.
        index: which of the step's micro-batches this is, counted over all ranks: `a * zero.world_size + zero.rank` in
            the rank's a-th backward.

        So dropout is the same at any number of ranks. The seed is `zero.seed`: rank 0's `torch.initial_seed()` when the
        model was sharded, or the one saved in the checkpoint that was loaded. Raises `UserError` for numbers below 0.

        Examples:
            >>> with zero.micro_batch_rng(step=0, index=zero.rank):
            ...     loss = model(batch).square().mean()
        """
        return drawing(self.seed, step, index, self._engine.group.device)

    def ledger(self) -> Ledger:
        """Return a snapshot of the bytes that this rank holds now and held at most, by state, tier and phase, and of
        the bytes it moved, by verb.

        Examples:
            >>> zero.ledger().held["parameters"]  # two blocks of 128 elements in fp32: 8 x 8 weights, and their bias
            1024
        """
        for binding in self._engine.bindings:
            binding.states.count()
        return self._engine.ledger.snapshot()

    def metrics(self, tokens: int | None = None) -> dict[str, float]:
        """Return this rank's numbers, flat, for a tracker: `wandb.log(zero.metrics(tokens=...))`.

        tokens: how many (or samples, of this rank or of all) were trained on since the last call with this argument, or
            since `shard`. Adds tokens per second.

        Bytes held by tier and state, the most in each phase, bytes moved by verb, the seconds waited for other ranks,
        steps and skipped steps, so far. All names begin with "zeroshard/". Asks no other rank.

        Examples:
            >>> zero.metrics(tokens=2048)["zeroshard/steps"]
            0.0
        """
        from .integrations import metrics

        rate = None
        if tokens is not None:
            since, self._metered = self._metered, time.perf_counter()
            rate = tokens / (self._metered - since)
        return metrics.flat(self.ledger(), self._engine.group.progress.steps, self.skipped, rate)

    def owners(self, name: str, state: str = "optimizer") -> list[Owner]:
        """List which rank holds which flat range of a parameter's state, in rank order.

        name: of the parameter, as in `model.named_parameters()`.
        state: "parameters", "gradients" or "optimizer".

        A sharded state has one range for each rank that owns a part, in each replica; a replicated one has the whole
        range for every rank. For a parameter along an axis, of which every rank has some rows, ranges count in the
        whole tensor. For one that tensor parallelism has cut they come part by part, and ranks are those of the whole
        mesh. Empty for gradients and optimizer state of a parameter in a frozen bucket. Raises `UserError` for a name
        or state that there is not.

        Examples:
            >>> zero.owners("weight")
            [Owner(rank=0, start=0, stop=64, tier='device')]
        """
        record = next((record for record in self._engine.managed if name in record.names), None)
        if record is None:
            names = [name for record in self._engine.managed for name in record.names]
            raise UserError("no such parameter", got=repr(name), instead=nearest(name, names))
        if state not in Placements._fields:
            raise UserError("no such state", got=repr(state), instead=nearest(state, Placements._fields))
        plan, slot = self.partition.find(record.name)
        if state != "parameters" and self._engine.gradients.of_bucket(plan.index) is None:
            return []
        tier = self._engine.resting[plan.index][state]
        degree, found = getattr(self.placements, state), []
        for rank, sits in enumerate(self._engine.group.team_of(plan).seat.everyones()):
            part, first = slot.within(*plan.held(sits, degree)), sits.part * slot.numel
            if part.numel or not degree:
                found.append(Owner(rank, first + part.start, first + part.stop, tier))
        return found

    @property
    def skipped(self) -> int:
        """The number of optimizer steps passed over so far because a gradient was not finite: by
        `Precision(nonfinite="skip")`, or by a `GradScaler`. The same on every rank.

        Examples:
            >>> zero.skipped
            0
        """
        return sum(each.skipped for each in self._engine.reduction.subscribers)

    @property
    def nonfinite(self) -> Finding | None:
        """The last NaN or infinity that `Precision(nonfinite=...)` found, the same on every rank.

        Examples:
            >>> zero.nonfinite is None
            True
        """
        found = (each.last for each in self._engine.reduction.subscribers)
        return next((finding for finding in found if finding is not None), None)

    # --- what happened ----------------------------------------------------------------------------------------------

    def record(self, limit: int = 1 << 16) -> None:
        """Record events from now on, and the changes of what is held.

        limit: how many of each are kept, the last ones. 0 stops and forgets.

        Raises `UserError` for a limit that is no number from 0.

        Examples:
            >>> zero.record()  # before the steps of interest
        """
        if type(limit) is not int or limit < 0:
            raise UserError("record() keeps a number of events", got=repr(limit), instead="zero.record(65536)")
        self._engine.ledger.record = Record(limit, self._engine.ledger.tiers) if limit else None

    def events(self) -> list[Event]:
        """Return the events that this rank recorded, oldest first; collectives carry the name of their bucket's unit.

        Raises `StateError` if `record` was not called.

        Examples:
            >>> zero.record()
            >>> model(batch).square().mean().backward()
            >>> sorted({event.verb for event in zero.events() if event.bucket is not None})
            ['copy', 'gather', 'reduce', 'release']
        """
        if self._engine.ledger.record is None:
            raise StateError("nothing was recorded", instead="zero.record() before the steps of interest")
        units = [self._engine.units[plan.unit].name for plan in self.partition.buckets]
        events = list(self._engine.ledger.record.events)
        return [e if e.bucket is None else dataclasses.replace(e, unit=units[e.bucket]) for e in events]

    @_meeting
    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what all ranks recorded as one Chrome trace, for ui.perfetto.dev.

        path: the file that rank 0 writes.

        Raises `StateError` where a rank has not called `record`, `UserError` if the file cannot be written. Collective.

        Examples:
            >>> zero.record()
            >>> model(batch).square().mean().backward()
            >>> zero.trace("trace.json")
        """
        from .integrations import chrome_trace

        self._engine.group.same("zero.trace(...)", lambda: {"path": absolute(path).name})
        path, record = absolute(path), self._engine.ledger.record
        facts = None if record is None else chrome_trace.facts(record, self.events())
        ranks = self._engine.group.describe(facts, "writing a trace")
        silent = [rank for rank, told in enumerate(ranks) if told is None]
        if silent:
            raise StateError(
                "nothing was recorded", where=f"ranks {silent}", instead="zero.record() on every rank, before the steps"
            )
        first_writes(self._engine.group, path, lambda: chrome_trace.write(path, ranks))

    @_meeting
    def explain(
        self, path: str | os.PathLike[str] | None = None, *, metrics: Sequence[Mapping[str, float]] | None = None
    ) -> Page:
        """Make one HTML page on this run, and on ZeRO: who holds what, the last recorded step, predicted and held.

        path: the file that rank 0 writes; None: none, a notebook shows what is returned.
        metrics: {"step": 1, "loss": 2.5, "grad_norm": ...} of each step, for the curves.

        Call `record()` before the steps of interest, on every rank; the last whole one is shown. The page opens without
        a network. Raises `StateError` where no whole step was recorded, `UserError` for metrics that are no numbers.
        Collective.

        Examples:
            >>> zero.record()
            >>> for batch in loader:
            ...     model(batch).square().mean().backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            >>> page = zero.explain("page.html")
        """
        from .explain import run

        self._engine.group.same("zero.explain(...)", lambda: {"path": None if path is None else absolute(path).name})
        return run.explain(self, None if path is None else absolute(path), metrics)
