"""ZeRO, stages 0 to 3, in one file that can be read from top to bottom: slow, and what the engine must equal.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5. What each of
N ranks holds of a bucket, "own" being its part of it:

    stage     parameters    sums of gradients    optimizer states, masters
    0         all           all                  all
    1         all           all                  own
    2         all           own                  own
    3         own           own                  own

A step, with the lines that do it:

    forward    stage 3 gathers a unit before its forward and releases it after          `_Unit`, `Bucket.gather`
    backward   what autograd saved of a weight is a note; reading it gathers again      `Reference._pack`, `_unpack`
               a bucket whose gradients have all come is sent: every rank adds up its
               own part in the order of the ranks, which is that of one process         `Bucket.reduce`
    step       sums are divided by N once; the user's own optimizer updates parameters
               that are views of this rank's part                                       `Reference._before_step`
    after it   stages 1 and 2 send updated parameters to every rank                     `Bucket.publish`

It waits for every message, keeps nothing off the device, and recovers from nothing: all ranks run the same graph. The
engine has the same bits, and beside these overlap, tiers, formats, edits, checkpoints and errors.

    zero = zeroshard.reference.shard(model, optimizer, stage=3)
    loss(model).backward(); zero.clip_grad_norm_(1.0); optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .arithmetic.sums import LOW, average_
from .errors import UserError
from .layout import partition as layouts
from .layout.partition import Spec
from .policies.layout import Layout


def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, stage: int = 3, layout: Layout | None = None
) -> Reference:
    """Shard a model and its optimizer over the ranks of the default process group, in place; without one, on one rank.

    Arguments:
        model: rank 0's weights and buffers count. Parameters of 16 bits get fp32 masters and fp32 sums of gradients.
        optimizer: an elementwise one, without states yet. Its groups hold this rank's parts of parameters afterwards.
        stage: 0 to 3, above.
        layout: of it `bucket_mib`, `bounds` and `align` count. Each module of a `ModuleList` is a unit.
    """
    if stage not in range(4):
        raise UserError("there is no such stage", expected="0, 1, 2 or 3", got=stage)
    if optimizer.state:
        raise UserError("the optimizer has states already", instead="an optimizer that has not stepped")
    return Reference(model, optimizer, stage, layout or Layout())


# ------------------------------------------------------------------------------------------------------------- messages


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def broadcast(tensor: Tensor, source: int) -> None:
    """Copy one rank's tensor into every rank's."""
    if ranks() > 1:
        dist.broadcast(tensor, source)


def at_owner(tensor: Tensor, owner: int) -> list[Tensor]:
    """Return every rank's tensor on the rank that owns it, in the order of the ranks; [] on the others."""
    if ranks() == 1:
        return [tensor]
    pieces = [torch.empty_like(tensor) for _ in range(ranks())] if rank() == owner else []
    dist.gather(tensor, pieces or None, dst=owner)
    return pieces


def which_ranks_have(mine: list[bool]) -> list[list[bool]]:
    """Return every rank's list of flags, by rank."""
    flags = torch.tensor(mine, dtype=torch.uint8, device="cpu")
    told = [torch.empty_like(flags) for _ in range(ranks())]
    for source, flag in enumerate(told):
        broadcast(flag.copy_(flags), source)
    return [[bool(each) for each in flag.tolist()] for flag in told]


# ---------------------------------------------------------------------------------------------------------------- norms

BLOCK = 128  # elements


def norm_of_tensor(gradient: Tensor, order: float = 2.0, block: int = BLOCK) -> Tensor:
    """Return a tensor's norm, 0-d fp32, which is the same however the tensor is cut between blocks.

    Pad it with zeros to blocks of 128 elements; add each block's |x|^order in fp32 by halving, the first half plus the
    second, until one number is left; add the blocks' sums exactly; take the root in fp64; round to fp32. Powers of
    orders other than 1, 2 and inf are products and square roots in fp64, and a block's sum is rounded to 24 bits.
    """
    flat = gradient.detach().reshape(-1).to(torch.float32)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    rows = rows * rows if order == 2.0 else rows.abs()
    if order not in (1.0, 2.0, math.inf):
        rows = _power(rows.to(torch.float64), order)
    while rows.shape[1] > 1:
        low, high = rows.chunk(2, dim=1)
        rows = torch.maximum(low, high) if order == math.inf else low + high
    sums = rows[:, 0].tolist()
    if order == math.inf:
        total = math.nan if any(map(math.isnan, sums)) else max(sums, default=0.0)
    else:
        total = math.fsum(sums if order in (1.0, 2.0) else map(_rounded, sums))
    root = total if order in (1.0, math.inf) else math.sqrt(total) if order == 2.0 else total ** (1.0 / order)
    return torch.tensor(root, dtype=torch.float64, device="cpu").to(torch.float32)


def _power(x: Tensor, order: float) -> Tensor:
    """Compute x^order by products and square roots: one of each for every binary digit of the order."""
    result, at = torch.ones_like(x), x
    for digit in reversed(f"{int(order):b}"):
        result, at = result * at if digit == "1" else result, at * at
    at, fraction = x, order % 1.0
    while fraction:
        at, fraction = at.sqrt(), 2 * fraction
        result, fraction = (result * at, fraction - 1) if fraction >= 1 else (result, fraction)
    return result


def _rounded(number: float) -> float:
    """Round to 24 bits."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 2**24), exponent - 24) if math.isfinite(number) else number


def total_norm(gradients: Iterable[Tensor], order: float = 2.0, block: int = BLOCK) -> Tensor:
    """Compute the global norm, as a `norm` for `accumulate`.

    Each gradient's own is one number wherever it is taken. The norm of these is taken where the first gradient is, as
    torch's clipping does: a GPU adds them up in another order than the CPU.
    """
    gradients = [*gradients]
    norms = torch.stack([norm_of_tensor(gradient, order, block) for gradient in gradients])
    total: Tensor = torch.linalg.vector_norm(norms.to(gradients[0].device), order)
    return total


# -------------------------------------------------------------------------------------------------------------- buckets


class Bucket:
    """Parameters of one unit and dtype that move together: a flat tensor, of which each rank owns a part."""

    def __init__(self, plan: layouts.BucketPlan, params: dict[str, nn.Parameter], stage: int) -> None:
        self.plan, self.stage = plan, stage
        self.params = [params[slot.name] for slot in plan.slots]
        self.bounds = list(zip(plan.bounds, plan.bounds[1:], strict=False))  # of each rank's part
        self.own = (0, plan.numel) if stage == 0 else self.bounds[rank()]  # what this rank updates
        kind = self.params[0]
        self.full: Tensor | None = kind.new_zeros(plan.numel, requires_grad=False)  # None while released
        for slot, param in zip(plan.slots, self.params, strict=True):
            self.full[slot.start : slot.stop] = param.detach().reshape(-1)
        broadcast(self.full, 0)
        self.shard = self.full[slice(*self.own)].clone() if stage == 3 else None
        low = kind.dtype in LOW and plan.trainable
        self.master = self.full[slice(*self.own)].to(torch.float32) if low else None
        self.sums: Tensor | None = None  # of gradients, of all elements at stages 0 and 1, else of this rank's own
        self.summed = [False] * len(self.params)  # which parameters had a gradient since the last step, on any rank
        self.coming = 0  # gradients that have come in the running backward
        self._show()

    @property
    def updated(self) -> Tensor:
        """This rank's own part, as the optimizer updates it: the master, or the parameters themselves."""
        if self.master is not None:
            return self.master
        if self.shard is not None:
            return self.shard
        assert self.full is not None
        return self.full[slice(*self.own)]

    def _show(self) -> None:
        """Make parameters views of the flat tensor; while that is released, of one NaN in their shape."""
        for slot, param in zip(self.plan.slots, self.params, strict=True):
            if self.full is None:
                param.data = param.new_full((1,), torch.nan, requires_grad=False).expand(slot.shape)
            else:
                param.data = self.full[slot.start : slot.stop].view(slot.shape)

    def gather(self) -> Tensor:
        """Stage 3: put the flat tensor together, each part broadcast by the rank that owns it."""
        if self.full is None:
            assert self.shard is not None
            self.full = self.shard.new_empty(self.plan.numel)
            self.full[slice(*self.own)] = self.shard
            self._from_owners(self.full)
            self._show()
        return self.full

    def release(self) -> None:
        if self.stage == 3:
            self.full = None
            self._show()

    def _from_owners(self, flat: Tensor) -> None:
        for owner, (start, stop) in enumerate(self.bounds):
            broadcast(flat[start:stop], owner)

    # --- gradients --------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Add the gradients of one backward to the sums: at each owner, in the order of the ranks."""
        mine = [param.grad is not None for param in self.params]
        has = which_ranks_have(mine)
        flat = self.params[0].new_zeros(self.plan.numel, requires_grad=False)
        for slot, param in zip(self.plan.slots, self.params, strict=True):
            if param.grad is not None:
                flat[slot.start : slot.stop] = param.grad.reshape(-1)
                param.grad = None
        if self.sums is None:
            wide = torch.float32 if flat.dtype in LOW else flat.dtype
            self.sums = flat.new_zeros(self.plan.numel if self.stage < 2 else self.own[1] - self.own[0], dtype=wide)
        before = list(self.summed)
        for owner, (start, stop) in enumerate(self.bounds):
            pieces = at_owner(flat[start:stop], owner)
            if rank() == owner:
                mine_of_sums = self.sums[start:stop] if self.stage < 2 else self.sums
                self.summed = list(before)
                for source, piece in enumerate(pieces):
                    self._add(mine_of_sums, piece, has[source], start, stop)
        self.summed = [was or any(flags) for was, flags in zip(before, zip(*has, strict=True), strict=True)]
        if self.stage < 2:
            self._from_owners(self.sums)

    def _add(self, sums: Tensor, piece: Tensor, has: list[bool], start: int, stop: int) -> None:
        """Add one rank's piece, elements [start, stop) of the bucket: the first gradient of a parameter is copied, as
        autograd does, since 0 + -0 is 0; one that a rank does not have is left out."""
        for number, slot in enumerate(self.plan.slots):
            first, last = max(slot.start, start), min(slot.stop, stop)
            if has[number] and first < last:
                here = slice(first - start, last - start)
                if self.summed[number]:
                    sums[here] += piece[here].to(sums.dtype)
                else:
                    sums[here] = piece[here].to(sums.dtype)
            self.summed[number] |= has[number]

    def mine(self, flat: Tensor) -> Tensor:
        """Return this rank's own part of what may be all of the bucket."""
        return flat[slice(*self.own)] if flat.numel() == self.plan.numel else flat

    def whole(self, own: Tensor) -> Tensor:
        """Put something together of which each rank has its own part."""
        flat = own.new_empty(self.plan.numel)
        flat[slice(*self.own)] = own
        self._from_owners(flat)
        return flat

    # --- after a step -----------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Bring what the optimizer updated to where forward reads it, rounded to the parameters' dtype."""
        if self.shard is not None:
            self.shard.copy_(self.updated)
            return
        assert self.full is not None
        self.full[slice(*self.own)] = self.updated.to(self.full.dtype)
        if self.stage > 0:
            self._from_owners(self.full)


class Fragment(NamedTuple):
    """A parameter for the optimizer: elements [start, stop) of a slot, which are this rank's."""

    param: nn.Parameter
    bucket: Bucket
    number: int  # of its slot
    start: int
    stop: int

    def of(self, own: Tensor) -> Tensor:
        """Return its elements of something that has this rank's own part of the bucket."""
        first = self.bucket.plan.slots[self.number].start - self.bucket.own[0]
        return own[first + self.start : first + self.stop]


class Note(NamedTuple):
    """What autograd keeps of a weight: where it is."""

    bucket: Bucket
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Reference:
    """A sharded model on this rank."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, layout: Layout) -> None:
        self.model, self.optimizer, self.stage = model, optimizer, stage
        params = dict(model.named_parameters())  # each once, tied ones under their first name
        units, of_module = _units(model)
        owner = {id(param): of_module[id(module)] for module in reversed([*model.modules()])
                 for param in module._parameters.values() if param is not None}  # fmt: skip
        specs = [
            Spec(name, tuple(p.shape), str(p.dtype), p.itemsize, owner[id(p)], p.requires_grad)
            for name, p in params.items()
        ]
        laid_out = layouts.partition(specs, layout, ranks())
        self.buckets = [Bucket(plan, params, stage) for plan in laid_out.buckets]
        self.bucket_of = {id(param): bucket for bucket in self.buckets for param in bucket.params}
        self.ended = True  # is no backward running?
        self.averaged = False  # are the sums divided?
        for module in units:
            _Unit(self, module, of_module)
        model.register_forward_pre_hook(self._send_buffers)
        for bucket in self.buckets:
            for param in bucket.params:
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(functools.partial(self._came, bucket))
        self.fragments: list[Fragment] = []
        self._bind_optimizer()
        for bucket in self.buckets:
            bucket.release()

    # --- forward ----------------------------------------------------------------------------------------------------

    def _send_buffers(self, module: nn.Module, args: Any) -> None:
        """Rank 0's buffers are everybody's, as batch norm counts them on its micro-batches."""
        if module.training:
            for buffer in module.buffers():
                broadcast(buffer, 0)

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which autograd saves notes instead of weights."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        for bucket in self.buckets if self.stage == 3 else ():
            full = bucket.full
            if full is not None and tensor.untyped_storage().data_ptr() == full.untyped_storage().data_ptr():
                return Note(bucket, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        return tensor

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Note):
            return saved.bucket.gather().as_strided(saved.size, saved.stride, saved.offset)
        tensor: Tensor = saved
        return tensor

    # --- backward ---------------------------------------------------------------------------------------------------

    def _came(self, bucket: Bucket, param: nn.Parameter) -> None:
        """A parameter's gradient has come: stages 2 and 3 send a bucket as soon as it has all of them."""
        if self.ended:
            self.ended = False
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        bucket.coming += 1
        if self.stage >= 2 and bucket.coming == len(bucket.params):
            self._reduce(bucket)

    def _end(self) -> None:
        """At the end of a backward, send what has not been sent: buckets of which some parameters were not used."""
        self.ended = True
        for bucket in self.buckets:
            if bucket.coming and (self.stage < 2 or bucket.coming < len(bucket.params)):
                self._reduce(bucket)
            bucket.coming = 0
            bucket.release()

    def _reduce(self, bucket: Bucket) -> None:
        assert not self.averaged, "optimizer.zero_grad() after each step"
        bucket.reduce()
        bucket.release()

    # --- the optimizer ----------------------------------------------------------------------------------------------

    def _bind_optimizer(self) -> None:
        """Put this rank's parts in place of parameters in the optimizer's groups."""
        for group in self.optimizer.param_groups:
            kept: list[nn.Parameter] = []
            for param in group["params"]:
                bucket = self.bucket_of[id(param)]
                number = next(at for at, each in enumerate(bucket.params) if each is param)
                slot, (first, last) = bucket.plan.slots[number], bucket.own
                start, stop = max(first - slot.start, 0), min(last - slot.start, slot.numel)
                if start < stop:
                    part = bucket.updated[slot.start + start - first : slot.start + stop - first]
                    kept.append(nn.Parameter(part, requires_grad=param.requires_grad))
                    self.fragments.append(Fragment(kept[-1], bucket, number, start, stop))
            group["params"] = kept or [nn.Parameter(group["params"][0].new_empty(0, requires_grad=False))]
        self.optimizer.register_step_pre_hook(self._before_step)
        self.optimizer.register_step_post_hook(self._after_step)
        self.optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def _average(self) -> None:
        """Divide the sums by the number of ranks, once."""
        for bucket in self.buckets:
            if bucket.sums is not None and not self.averaged:
                average_(bucket.sums, ranks())
        self.averaged = True

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        self._average()
        for each in self.fragments:
            sums = each.bucket.sums
            has = sums is not None and each.bucket.summed[each.number]
            each.param.grad = each.of(each.bucket.mine(sums)) if has and sums is not None else None

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for bucket in self.buckets:
            if bucket.plan.trainable:
                bucket.publish()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self.averaged = False
        for bucket in self.buckets:
            bucket.sums, bucket.summed = None, [False] * len(bucket.params)
        for each in self.fragments:
            each.param.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm together is no larger; return what it was. As torch's own, with norms
        that are the same however parameters are cut (`norm_of_tensor`). Collective."""
        self._average()
        gradients = []
        for bucket in self.buckets:
            if bucket.sums is not None:
                flat = bucket.whole(bucket.mine(bucket.sums)) if self.stage >= 2 else bucket.sums
                slots = zip(bucket.plan.slots, bucket.summed, strict=True)
                gradients += [(slot.name, flat[slot.start : slot.stop]) for slot, has in slots if has]
        order = {name: at for at, (name, _) in enumerate(self.model.named_parameters())}
        gradients.sort(key=lambda each: order[each[0]])
        norm = total_norm([gradient for _, gradient in gradients])
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for bucket in self.buckets:
            if bucket.sums is not None:
                bucket.sums.mul_(scale)
        return norm

    # --- whole ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all parameters whole inside the block, to be read. Collective."""
        for bucket in self.buckets:
            bucket.gather()
        yield
        for bucket in self.buckets:
            bucket.release()

    @torch.no_grad()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write masters and optimizer states, whole and by name, as rank 0's file. Collective."""
        found: dict[str, Any] = {"weights": {}, "states": {}}
        for bucket in self.buckets:
            self._collect(bucket, bucket.updated, found["weights"])
        for bucket in (each for each in self.buckets if each.plan.trainable):
            for state in self._states_of(bucket):
                own = bucket.updated.new_zeros(bucket.own[1] - bucket.own[0], dtype=torch.float32)
                for each in (each for each in self.fragments if each.bucket is bucket):
                    each.of(own).copy_(self.optimizer.state[each.param][state].expand(each.stop - each.start))
                self._collect(bucket, own, found["states"].setdefault(state, {}))
        if rank() == 0:
            torch.save(found, path)
        if ranks() > 1:
            dist.barrier()

    def _collect(self, bucket: Bucket, own: Tensor, into: dict[str, Tensor]) -> None:
        flat = bucket.whole(own)
        for slot in bucket.plan.slots:
            into[slot.name] = flat[slot.start : slot.stop].clone()

    def _states_of(self, bucket: Bucket) -> list[str]:
        """Return the names of tensors that the optimizer keeps of a bucket's parameters, on any rank."""
        states = [self.optimizer.state[each.param] for each in self.fragments if each.bucket is bucket]
        mine = sorted({key for state in states for key, value in state.items() if isinstance(value, Tensor)})
        told: list[Any] = [None] * ranks()
        if ranks() == 1:
            return mine
        dist.all_gather_object(told, mine)
        return sorted(set().union(*told))

    @torch.no_grad()
    def load(self, path: str | os.PathLike[str]) -> None:
        """Load what `save` has written, at any stage and on any number of ranks. Collective."""
        found = torch.load(path, weights_only=True)
        for bucket in self.buckets:
            flat = bucket.updated.new_zeros(bucket.plan.numel)
            for slot in bucket.plan.slots:
                flat[slot.start : slot.stop] = found["weights"][slot.name]
            bucket.updated.copy_(flat[slice(*bucket.own)])
            bucket.publish()
        for each in self.fragments:
            name = each.bucket.plan.slots[each.number].name
            for state, values in found["states"].items():
                if name in values:
                    whole = values[name][each.start : each.stop]
                    self.optimizer.state[each.param][state] = whole[0].clone() if state == "step" else whole.clone()


class _Unit:
    """The hooks of a module whose weights are gathered together: before and after its forward."""

    def __init__(self, zero: Reference, module: nn.Module, of_module: dict[int, int]) -> None:
        own = [each for each in module.modules() if of_module[id(each)] == of_module[id(module)]]
        used = {id(param) for each in own for param in each._parameters.values() if param is not None}
        self.zero = zero
        self.buckets = [bucket for bucket in zero.buckets if used & set(map(id, bucket.params))]
        self.open: list[tuple[Any, list[Bucket]]] = []
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after, always_call=True)

    def before(self, module: nn.Module, args: Any) -> None:
        gathered = [bucket for bucket in self.buckets if bucket.full is None]  # others are open for who opened them
        for bucket in gathered:
            bucket.gather()
        saving = self.zero.saving()
        saving.__enter__()
        self.open.append((saving, gathered))

    def after(self, module: nn.Module, args: Any, outputs: Any) -> None:
        saving, gathered = self.open.pop()
        saving.__exit__(None, None, None)
        for bucket in gathered:
            bucket.release()


def _units(model: nn.Module) -> tuple[list[nn.Module], dict[int, int]]:
    """Return the units, the model itself first, and the number of the unit of each module, by its id."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    units = [model, *dict.fromkeys(child for each in lists for child in each)]
    of_module: dict[int, int] = {}

    def walk(module: nn.Module, unit: int) -> None:
        unit = units.index(module) if module in units else unit
        of_module.setdefault(id(module), unit)
        for child in module.children():
            walk(child, unit)

    walk(model, 0)
    return units, of_module
