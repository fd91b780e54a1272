"""One rank of any number, without the others and without memory: the engine itself, on tensors that have no values.

`FakeTensorMode` gives every tensor a shape, a dtype and a device but no memory; `comm.Simulated` stands for the process
group. Everything else is the engine a run uses: the same layout, hooks, script, buffers and ledger. So it proves sizes,
the order of things and the ledger, never numbers. The arithmetic of the optimizer is left out (its scalars would need
values); its states are what it makes itself when asked with a tiny parameter.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, shape_wrapper

from ..api import Zero, shard
from ..arithmetic.sums import LOW, divides_exactly
from ..errors import Error, UserError
from ..events import DEVICE, Event, Ledger
from ..policies.comm import Comm, Simulated
from ..policies.incompatible import Settings, refuse
from ..policies.layout import Layout
from ..policies.offload import Offload
from ..policies.precision import Precision
from .from_number import RANKS_LIMIT
from .job import Job, build, find, line_of
from .optimizers import asked_with, probe
from .overheads import Facts
from .quantities import whole

BACKWARDS_LIMIT = 1 << 10  # of a step: they run one by one
STEPS, RECORDED = 3, 2  # the first negotiates its gathers; a timeline needs a step with one before it


@dataclass(frozen=True)
class Simulation:
    """A rank's simulated training: what it would hold and move.

    ledger: held at rest, and the most held in each phase, in bytes. events: of the last `RECORDED` steps, in the order
    they happened; "compute" events carry floating-point operations in `logical`. flops: of one step. activations: bytes
    that forward keeps for backward, beside the engine's own. working: the most that is alive at once of what
    operators made, activations included, in forward or backward (within eight operators of the truth, never less).
    tokens: entries of the largest integer tensor of two or more dimensions in a micro-batch, times the micro-batches
    of a step (0 where a batch has none). steps: how many optimizers step in one. away: bytes of
    activations in each tier off the device as forward ends.
    """

    job: str
    stage: int
    rank: int
    ranks: int
    zero: Zero
    ledger: Ledger
    events: list[Event]
    flops: int
    activations: int
    tokens: int
    working: int
    steps: int
    away: dict[str, int]


def simulate(
    job: str | Callable[[], dict[str, Any]],
    *,
    ranks: int,
    rank: int = 0,
    stage: int = 3,
    accumulate: int = 1,
    precision: Precision | None = None,
    layout: Layout | None = None,
    comm: Comm | None = None,
    offload: Offload | None = None,
    no_sync: bool = False,
    mesh: Mapping[str, int] | None = None,
    optimizer_in_backward: bool = False,
) -> Simulation:
    """Run three steps of `module:function` (or of a function that returns a job's parts) as rank `rank` of `ranks`.

    offload: no file is made, whatever rests there. no_sync: all backwards of a step but the last are added up on the
    rank. mesh: {"edp": 64, "ep": 16}, the axes that stand for a `DeviceMesh`,
    for `Layout(along=...)`; the job makes one rank's rows. optimizer_in_backward: as `shard`'s.
    Raises `UserError` for what cannot be built, or needs values (`.item()`) to run.
    """
    axes = _axes(ranks, rank, accumulate, mesh)
    refuse(Settings(in_backward=optimizer_in_backward, accumulate=accumulate, no_sync=no_sync))
    if isinstance(job, str):
        find(job)  # imported outside the mode: what the module makes has values
    with without_values() as mode:
        built = build(job, make=lambda function: _emptied(mode, function))
        built.need("optimizer", "batch", "loss")
        optimizers = built.optimizers()
        for each in optimizers:
            leave_out_arithmetic(each)
        zero = shard(
            built.model,
            optimizers,
            stage=stage,
            precision=precision,
            offload=offload,
            layout=layout,
            comm=dataclasses.replace(comm or Comm(), group=Simulated(rank, ranks, axes)),
            optimizer_in_backward=optimizer_in_backward,
        )
        counted = Counter(zero)
        for step in range(STEPS):
            if step == STEPS - RECORDED:
                zero.record(1 << 20)
            indices = [a * ranks + rank for a in range(accumulate)]
            batches = (_drawn(built, mode, step, index) for index in indices)
            _train(built, zero, optimizers, counted, step, batches, len(indices) - 1 if no_sync else 0)
        return Simulation(
            built.name,
            stage,
            rank,
            ranks,
            zero,
            zero.ledger(),
            zero.events(),
            counted.flops,
            counted.activations,
            counted.tokens,
            counted.working,
            len(optimizers),
            counted.away,
        )


def _axes(ranks: int, rank: int, accumulate: int, mesh: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """Check these numbers and return the mesh's axes; () without a mesh."""
    for name, value, least in (("ranks", ranks, 1), ("accumulate", accumulate, 1), ("rank", rank, 0)):
        if type(value) is not int or value < least:
            raise UserError(f"{name} is a number of at least {least}", got=repr(value))
    whole("ranks", ranks, RANKS_LIMIT)
    whole("accumulate", accumulate, BACKWARDS_LIMIT)
    if rank >= ranks:
        raise UserError("no such rank", expected=f"0 to {ranks - 1}", got=rank)
    axes = tuple((mesh or {}).items())
    if axes and math.prod(length for _, length in axes) != ranks:
        raise UserError("the axes of a mesh multiply to its ranks", expected=ranks, got=dict(axes))
    return axes


def _train(
    job: Job, zero: Zero, optimizers: list[Any], counted: Counter, step: int, batches: Iterator[Any], local: int
) -> None:
    """Run a step whose first `local` backwards are added up on the rank."""
    counted.flops = counted.tokens = 0
    try:
        for number, batch in enumerate(batches):
            counted.tokens += _tokens(batch)
            with counted, zero.no_sync() if number < local else nullcontext():
                loss = job.loss_of(batch)
                counted.activations = counted.kept()
                counted.away = {
                    tier: held["activations"]
                    for tier, held in zero.ledger().tiers.items()
                    if tier != DEVICE and held.get("activations")
                }
                loss.backward()
                counted.kept()
            del loss
    except Error:
        raise
    except Exception as error:
        where = f"{job.name}, step {step}" + line_of(error)
        if not _wants_values(error):
            raise UserError(
                "the job fails under simulation", where=where, got=_first_line(error),
                instead="a job that trains, on tensors of shapes alone",
            ) from error  # fmt: skip
        raise UserError(
            "this job needs values to run, and a simulation has none", where=where, got=_first_line(error),
            instead="a loss and a model without .item() and without branches on values",
        ) from error  # fmt: skip
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _drawn(job: Job, mode: FakeTensorMode, step: int, index: int) -> Any:
    """Draw a micro-batch with values, since programs cut their data by random numbers; return it without."""
    elsewhere = torch.empty(0).device.type != "cpu"  # the default device, which may not be here
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step << 32 | index)
            with nullcontext() if elsewhere else unset_fake_temporarily(), _FakeElsewhere(mode):
                batch = job.batch(step, index)
    except Error:
        raise
    except Exception as error:
        instead = None
        if _wants_values(error):
            instead = (
                "data read by numpy, or where its module is imported: tensors made in the job's function have no values"
            )
        raise UserError(
            "the job's batch raised", where=f"{job.name}()['batch']({step}, {index})" + line_of(error),
            got=_first_line(error), instead=instead,
        ) from error  # fmt: skip
    return _fake(mode, batch)


def _fake(mode: FakeTensorMode, made: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each if isinstance(each, FakeTensor) else mode.from_tensor(each), made)


def _emptied(mode: FakeTensorMode, make: Callable[[], Any]) -> Any:
    """Make a model with values, as one whose weights are quantized has to be, and take these from it."""
    with unset_fake_temporarily():
        model = make()
    found: dict[int, Any] = {}

    def emptied(value: Any) -> Any:
        """Return a tensor without values, or a copy of an object that has such tensors."""
        if id(value) not in found:
            inner = getattr(value, "__dict__", {})
            holds = any(isinstance(each, Tensor) or id(each) in found for each in inner.values())
            made: Any
            if isinstance(value, Tensor):
                found[id(value)] = made = mode.from_tensor(value.detach().as_subclass(Tensor))
                if isinstance(value, nn.Parameter):
                    found[id(value)] = made = nn.Parameter(made, value.requires_grad)
            elif holds:
                found[id(value)] = made = copy.copy(value)
            else:
                return value
            for name, each in inner.items():  # such as the scales of what is quantized
                setattr(made, name, emptied(each))
            kept.append(value)
        return found[id(value)]

    kept: list[Any] = []  # or another object may come to the place of one that is gone
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            table.update({name: emptied(each) for name, each in table.items() if each is not None})
    return model


class _FakeElsewhere(TorchFunctionMode):
    """A mode in which tensors have values on the CPU alone: other devices may not be here, or have no room."""

    of_zeroshard = True  # it sees the engine's operations too: `engine/weights/modes.py`

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)]
        given = kwargs.get("device", args[1] if func is Tensor.to and len(args) > 1 else None)
        if isinstance(given, (str, int)):
            named.append(torch.device(given))
        if func not in (Tensor.cuda, Tensor.pin_memory) and all(device.type == "cpu" for device in named):
            return func(*args, **kwargs)
        with self.mode:
            return func(*_fake(self.mode, args), **_fake(self.mode, kwargs))


def _wants_values(error: Exception) -> bool:
    return isinstance(error, DataDependentOutputException) or "data-dependent" in str(error).lower()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _tokens(batch: Any) -> int:
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return max(
        (leaf.numel() for leaf in leaves if leaf.dtype in (torch.int64, torch.int32) and leaf.dim() > 1), default=0
    )


class _OneMode(FakeTensorMode):
    """A mode that `copy.deepcopy` of its tensors keeps: a view of a tensor in a copied one has no storage of ours."""

    def __deepcopy__(self, _: Any) -> _OneMode:
        return self


@contextmanager
def without_values() -> Iterator[FakeTensorMode]:
    """Make tensors without memory inside."""
    # `module.to(dtype)` swaps tensors without values as whole objects, and refuses where something holds them weakly.
    swap = torch.utils.swap_tensors
    torch.utils.swap_tensors = _become
    try:
        with warnings.catch_warnings(), _OneMode(allow_non_fake_inputs=True) as mode:
            # A module copied by deepcopy looks at its tensors' addresses, which here say nothing and harm nothing.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor", category=UserWarning)
            yield mode
    finally:
        torch.utils.swap_tensors = swap


def _become(tensor: Any, other: Any) -> None:
    try:
        tensor.data = other.data
    except RuntimeError:  # from the meta device to another
        torch._C._swap_tensor_impl(tensor, other)
    tensor.fake_device = other.fake_device


def leave_out_arithmetic(optimizer: torch.optim.Optimizer) -> None:
    """Replace an optimizer's `step`: it only makes the states that the real one makes, and calls a closure it gets."""
    plain = type(optimizer)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not self.state[param]:
                    shape = asked_with(self, tuple(param.shape))
                    for key, asked in probe(self, group, param.dtype, shape, plain).items():
                        shape = asked.shape(tuple(param.shape))
                        self.state[param][key] = torch.zeros(shape, dtype=asked.dtype, device=param.device)
        return loss

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)  # as Optimizer.__init__ does to a class's own step
    hooked.hooked = True
    body = {"step": hooked, "__module__": plain.__module__}
    optimizer.__class__ = type(plain.__name__, (plain,), body)


def facts(zero: Zero) -> dict[int, Facts]:
    """Return {index of a trained bucket: what decides how many kernels it takes, and how often the host waits}."""
    found, native = {}, zero._engine.comm.reduce == "native"
    for plan in (each for each in zero.partition.buckets if each.trainable):
        bucket, dtypes = zero._engine.buckets[plan.index], zero._engine.formats(plan)
        sits, placed = bucket.team.seat, bucket.placements
        found[plan.index] = Facts(
            len(plan.slots), sits.size, sits.replicas, sits.replica, bool(placed.parameters),
            cast=dtypes.master != dtypes.computed, narrow=dtypes.gradients in LOW, native=native,
            in_place=not placed.gradients and bucket.grad_dtype == bucket.reduce_dtype and sits.summed == 1
            and (sits.size == 1 or bucket.team.arriving < sits.size),
            by_part=placed.by_part, two_levels=placed.two_levels,
            divided=divides_exactly(bucket.grad_dtype, bucket.reduce_dtype, zero._engine.group.sources),
        )  # fmt: skip
    return found


PASSING = (
    "gather",
    "prefetch",
    "reduce",
    "staging",
    "lent",
    "activations",
    "staged activations",
)  # states that come and go within a step


def moments(run: Simulation) -> list[tuple[str, dict[str, int]]]:
    """List (name, bytes by state) of the parts of a step, in their order: what the device held when that was most.

    Parts: "init", then "forward of blocks.3", "backward of blocks.3", "reduce" (the end of backward) and "step" of the
    last recorded step.
    """
    record = run.zero._engine.ledger.record
    assert record is not None
    steps = [event for event in run.events if event.verb == "step"]
    began = steps[-1 - run.steps].end
    parts = [
        event
        for event in run.events
        if event.start > began and event.verb in ("forward", "recompute", "backward", "reduce", "step")
        if event.unit is not None or (event.verb in ("reduce", "step") and not event.logical)
    ]
    changes, held, at = [change for change in record.held if change[1] == DEVICE], {}, 0
    found: list[tuple[str, dict[str, int]]] = [("init", run.ledger.phases["init"].held)]
    for event in sorted(parts, key=lambda event: event.start):
        while at < len(changes) and changes[at][0] <= event.start:
            held[changes[at][2]] = changes[at][3]
            at += 1
        most, now, ahead = dict(held), dict(held), at
        while ahead < len(changes) and changes[ahead][0] <= event.end:
            now[changes[ahead][2]] = changes[ahead][3]
            ahead += 1
            if sum(now.values()) > sum(most.values()):
                most = dict(now)
        name = event.verb if event.unit is None else f"{event.verb} of {event.unit or 'the root'}"
        found.append((name, {state: nbytes for state, nbytes in most.items() if nbytes}))
    return found


def _recurrent(x: tuple[int, ...], w_in: tuple[int, ...], w_hidden: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Count operations of a recurrent layer, which multiplies each step of each sequence by both matrices."""
    return 2 * x[0] * x[1] * (w_in[0] * w_in[1] + w_hidden[0] * w_hidden[1])


def _flops() -> dict[Any, Any]:
    """Return torch's table of floating-point operations, with operators that have other names on the CPU."""
    aten, table = torch.ops.aten, dict(flop_registry)
    table[aten._scaled_dot_product_flash_attention_for_cpu] = table[aten._scaled_dot_product_flash_attention]
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    table[backward] = table[aten._scaled_dot_product_flash_attention_backward]
    table[aten.mkldnn_rnn_layer] = shape_wrapper(_recurrent)
    table[aten.mkldnn_rnn_layer_backward] = shape_wrapper(lambda *args, **more: 2 * _recurrent(*args, **more))
    return table


_FLOPS = _flops()


class Counter(TorchDispatchMode):
    """A counter of floating-point operations, and of the bytes of what is computed and still alive."""

    of_zeroshard = True  # it sees the engine's operations too: `engine/weights/modes.py`

    def __init__(self, zero: Zero) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = zero._engine.ledger
        self.flops = 0
        self.activations = self.working = self._since = self._made_since = self._alive = 0
        self.tokens = 0
        self.away: dict[str, int] = {}
        self._made: dict[int, Any] = {}
        states = [flat for b in zero._engine.buckets for flat in (b.parameters, b.master, b.gradients)]
        resting = [flat.tensor for flat in states if flat is not None and not flat.on_demand]
        engine = [*(b.full for b in zero._engine.buckets), *resting]
        self._known: dict[
            int, Any
        ] = {}  # held weakly, or another storage may be made at the address of one that is gone
        for tensor in (*engine, *zero.model.buffers()):
            self._know(tensor)
        self._leave_out(zero._engine.tier)
        self._aside = False  # does a feature take memory that the ledger counts?
        for each in zero._engine.reduction.subscribers:
            each.uncounted(self._without, self._out)

    def _know(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage)

    def _leave_out(self, tier: Any) -> None:
        """Leave what the engine reserves in a tier while it runs out of the count: the ledger counts it."""
        reserve, give_back = tier.reserve, tier.give_back

        def known(*args: Any, **options: Any) -> Tensor:
            made_since = self._made_since
            tensor: Tensor = reserve(*args, **options)
            if self._made.pop(tensor.untyped_storage()._cdata, None) is not None:
                self._made_since = min(self._made_since, made_since)
            self._know(tensor)
            return tensor

        def forgotten(state: str, tensor: Tensor) -> None:
            self._known.pop(tensor.untyped_storage()._cdata, None)
            give_back(state, tensor)

        tier.reserve, tier.give_back = known, forgotten

    def _out(self, tensor: Tensor) -> None:
        self._made.pop(tensor.untyped_storage()._cdata, None)
        self._know(tensor)

    def _without(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            before, self._aside = self._aside, True
            try:
                return call(*args)
            finally:
                self._aside = before

        return called

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._aside:
            return out
        count = _FLOPS.get(func._overloadpacket)
        if count is not None:
            flops = int(count(*args, **(kwargs or {}), out_val=out))
            self.flops += flops
            self.ledger.note("compute", logical=flops)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._made and storage._cdata not in self._known:
                    self._made[storage._cdata] = StorageWeakRef(storage)
                    self._made_since += storage.nbytes()
        self._since += 1
        if self._since == 8:
            self.kept()
        return out

    def kept(self) -> int:
        """Return the bytes of what was made inside and is still alive; bring `working` up to date."""
        total, last = 0, self._made_since
        self._since = self._made_since = 0
        for key, ref in list(self._made.items()):
            if ref.expired():
                del self._made[key]
            else:
                total += torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes()
        # Some of what was made since the last look may be gone again: the most that can have been alive counts.
        self.working = max(self.working, total, min(self._alive + last, total + last))
        self._alive = total
        return total
