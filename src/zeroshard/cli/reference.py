"""The training that zeroshard must equal, in plain PyTorch and without a line of zeroshard.

One process runs the micro-batches `a * world + rank` one after the other (a counts the backwards of a step), lets torch
add the gradients up in `p.grad`, divides once by the number of ranks, clips, and steps. `accumulate` does that for
parameters of one dtype, `accumulate_with_masters` for low-precision parameters with fp32 masters and fp32 sums, and
`loop` is the same loop as a user writes it, to be run on each rank of a sharded model.

Norms are zeroshard's by definition and nothing else of it: `zeroshard.reference` has it.

A batch function takes (step, index). A norm function takes (gradients, norm_type).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from ..device import divisor
from ..reference import BLOCK

Batches = Callable[[int, int], Any]
Loss = Callable[[nn.Module, Any], Tensor]
Norm = Callable[[list[Tensor], float], Tensor]
LOW = (torch.bfloat16, torch.float16)


@dataclass
class History:
    """A run's record beside the weights: losses[step][index] (`loop`: this rank's own), norms[step] if it clipped."""

    losses: list[list[float]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)


class Several:
    """Several optimizers that step together, for loops written for one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def as_one(made: Any) -> Any:
    """Return an optimizer as it is, a list or tuple of them as one."""
    return Several(made) if isinstance(made, (list, tuple)) else made


def accumulate(
    model: nn.Module,
    optimizer: Any,
    batches: Batches,
    loss: Loss,
    world: int = 1,
    backwards: int = 1,
    *,
    steps: int = 1,
    first_step: int = 0,
    clip: float | None = None,
    norm: Norm = torch.nn.utils.get_total_norm,
    norm_type: float = 2.0,
    average: bool = False,
    before_step: Callable[[int], None] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> History:
    """Train `steps` steps. `average` divides each loss by `backwards`; the callbacks see final gradients, then weights.

    A number of backwards that differs per step is a `backwards` callable: step -> int.
    """
    history = History()
    for step in range(first_step, first_step + steps):
        history.losses.append(_add_up(model, batches, loss, step, world, backwards, average))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for gradient in gradients:
            gradient.div_(divisor(world, gradient))
        if clip is not None:
            history.norms.append(clip_(gradients, clip, norm, norm_type))
        if before_step:
            before_step(step)
        optimizer.step()
        optimizer.zero_grad()
        if after_step:
            after_step(step)
    return history


def accumulate_with_masters(
    model: nn.Module,
    make_optimizer: Callable[[list[Tensor]], Any],
    batches: Batches,
    loss: Loss,
    world: int = 1,
    backwards: int = 1,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    steps: int = 1,
    clip: float | None = None,
    norm: Norm = torch.nn.utils.get_total_norm,
    norm_type: float = 2.0,
    average: bool = False,
    after_step: Callable[[int], None] | None = None,
    rounded: Callable[[str, Tensor], Tensor] = lambda name, master: master,
    sent: Callable[[str, Tensor], Tensor] = lambda name, gradient: gradient,
) -> tuple[History, dict[str, Tensor]]:
    """Train in `dtype`: each backward's gradient is added in fp32, fp32 masters step, parameters are their cast.

    Casts the model in place (floating parameters of other dtypes too; buffers stay) and returns the masters by name.
    With `dtype=None` each parameter keeps its own, and those of 32 bits and more are their own masters' equals.
    rounded: rounds a master, by name, before it is cast to its parameter, such as `in_8_bits`. sent: rounds a gradient,
    by name, as messages do, such as `in_codes`.
    """
    names = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    masters = {}
    for name, parameter in names.items():
        low = dtype or parameter.dtype
        own = parameter.detach().to(torch.float32 if low in LOW else low, copy=True)
        masters[name] = own.requires_grad_(parameter.requires_grad)  # optimizers are made of those that require it
        parameter.data = rounded(name, own.detach()).to(low, copy=True)
    trained = [name for name, parameter in names.items() if parameter.requires_grad]
    optimizer = make_optimizer([masters[name] for name in trained])
    history = History()
    for step in range(steps):
        sums: dict[str, Tensor] = {}
        losses = []
        for index in range(backwards * world):
            value = loss(model, batches(step, index))
            losses.append(value.item())
            (value / backwards if average and backwards != 1 else value).backward()
            for name in trained:
                if (gradient := names[name].grad) is not None:
                    gradient = sent(name, gradient.to(masters[name].dtype))
                    sums[name] = sums[name] + gradient if name in sums else gradient
                    names[name].grad = None
        history.losses.append(losses)
        for name in trained:
            masters[name].grad = sums[name].div_(divisor(world, sums[name])) if name in sums else None
        gradients = [sums[name] for name in trained if name in sums]
        if clip is not None:
            history.norms.append(clip_(gradients, clip, norm, norm_type))
        optimizer.step()
        for name in trained:
            names[name].data.copy_(rounded(name, masters[name].detach()))
        if after_step:
            after_step(step)
    return history, masters


def in_8_bits(master: Tensor) -> Tensor:
    """Round to the nearest numbers of 8 bits, at a scale that the largest one fits, as `Precision(fp8=...)` does."""
    most = float(master.abs().max())
    if not math.isfinite(most):
        return torch.full_like(master, math.nan)
    mantissa, exponent = math.frexp(most)
    scale = 2.0 ** max(exponent - 9 + (mantissa > 0.875), -126)  # 448, the largest, is 0.875 * 2^9
    return (master / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale


def in_codes(name: str, gradient: Tensor) -> Tensor:
    """Round a gradient to codes of 8 bits with a scale for each 128 elements, as `Comm(reduce="int8")` sends it.

    An element is rounded up where its remainder and 16 bits of a hash, and a half, come to 2^16 or more.
    """
    flat = gradient.detach().reshape(-1).to(torch.float32)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    finite = rows.isfinite()
    rows = torch.where(finite, rows, 0.0)
    largest = rows.abs().amax(1)
    whole = torch.full_like(largest, 127.0)  # a number of Python would be a reciprocal on CUDA: another bit
    scales = (largest / whole).clamp(min=2.0**-126)[:, None]
    block = _hash(_hash(torch.arange(len(rows), device=rows.device)) ^ zlib.crc32(name.encode())) ^ _hash(
        _unsigned(largest) % 2**23
    )
    drawn = _hash(_unsigned(rows / scales) ^ block[:, None] ^ _hash(torch.arange(BLOCK, device=rows.device))) % 2**16
    codes = (rows / scales + (drawn + 0.5) / 2**16).floor().clamp(-127, 127)
    return torch.where(finite, codes * scales, math.nan).view(-1)[: flat.numel()].view_as(gradient).to(gradient.dtype)


def in_16_bits(values: Tensor, seed: int, state: str, name: str, step: int | None) -> Tensor:
    """Round one state of a parameter to numbers of bfloat16, as `Precision(states=...)` does.

    step: the number of the optimizer's step, from 0, whose random bits round up or down; None: round to nearest even.
    """
    if step is None:
        return values.to(torch.bfloat16).to(values.dtype)
    flat = values.detach().reshape(-1)
    bits, drawn = _unsigned(flat), _drawn(flat.numel(), f"{seed} {state} {name}", step)
    upper = bits // 2**16 + (bits % 2**16 + drawn >= 2**16)
    signed = upper * 2**16 - (upper >= 2**15) * 2**32
    rounded = signed.to(torch.int32).view(torch.float32)
    return torch.where(flat.isfinite(), rounded, flat).view_as(values)


def _drawn(numel: int, what: str, step: int) -> Tensor:
    """Return 16 random bits for each of so many elements: Philox 4x32-10 (Salmon et al. 2011), eight from a counter."""
    key = xxhash.xxh3_128_intdigest(what.encode()) >> 64
    element = torch.arange(numel)
    block = element // 8
    words = [block % 2**32, block // 2**32, torch.full_like(block, step % 2**32), torch.full_like(block, step >> 32)]
    for turn in range(10):
        (high_a, low_a), (high_b, low_b) = _product(words[0], 0xD2511F53), _product(words[2], 0xCD9E8D57)
        keys = (key + turn * 0x9E3779B9) % 2**32, ((key >> 32) + turn * 0xBB67AE85) % 2**32
        words = [high_b ^ words[1] ^ keys[0], low_b, high_a ^ words[3] ^ keys[1], low_a]
    word = torch.stack(words)[element % 8 // 2, element]
    return torch.where(element % 2 == 0, word % 2**16, word // 2**16)


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits of the product of numbers of 32 bits."""
    lower = factor % 2**16 * word
    upper = factor // 2**16 * word + lower // 2**16
    return upper // 2**16, upper % 2**16 * 2**16 + lower % 2**16


def _unsigned(values: Tensor) -> Tensor:
    return values.view(torch.int32).to(torch.int64) % 2**32


def _hash(number: Tensor) -> Tensor:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number = (number ^ number >> shift) * factor % 2**32
    return number ^ number >> 16


def loop(
    model: nn.Module,
    optimizer: Any,
    batches: Batches,
    loss: Loss,
    rank: int = 0,
    world: int = 1,
    backwards: int = 1,
    *,
    steps: int = 1,
    first_step: int = 0,
    clip: float | None = None,
    clip_: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_,
    norm_type: float = 2.0,
    average: bool = False,
    before_step: Callable[[int], None] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> History:
    """Run the plain loop of one rank, as a user writes it: nothing in it knows that the model is sharded."""
    history = History()
    for step in range(first_step, first_step + steps):
        losses = []
        for a in range(_count(backwards, step)):
            value = loss(model, batches(step, a * world + rank))
            (value / _count(backwards, step) if average else value).backward()
            losses.append(value.item())
        history.losses.append(losses)
        if clip is not None:
            history.norms.append(torch.as_tensor(clip_(model.parameters(), clip, norm_type)).detach().clone())
        if before_step:
            before_step(step)
        optimizer.step()
        optimizer.zero_grad()
        if after_step:
            after_step(step)
    return history


def clip_(
    gradients: list[Tensor], limit: float, norm: Norm = torch.nn.utils.get_total_norm, norm_type: float = 2.0
) -> Tensor:
    """Clip as torch's clip_grad_norm_ with the norm taken by `norm`: scale by limit / (norm + 1e-6), never up."""
    total = norm(gradients, norm_type)
    scale = torch.clamp(limit / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return total.detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy all parameters, each name of a tied one included."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


def bits(tensor: Tensor) -> Tensor:
    """View a tensor as integers, so that == tells -0.0 from 0.0 and a NaN equals itself."""
    tensor = tensor.detach().contiguous().reshape(-1)
    return (
        tensor
        if tensor.dtype == torch.bool
        else tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    )


def first_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> str:
    """Return one line on the first difference; empty if the names are the same and `first_unequal` finds nothing."""
    if got.keys() != want.keys():
        return f"names differ: {sorted(got.keys() ^ want.keys())}"
    for name, tensor in want.items():
        if found := first_unequal(got[name], tensor):
            at, have, should, count = found
            return f"{name}: {count}, first at {at}: {have} instead of {should}"
    return ""


def first_unequal(got: Tensor, want: Tensor) -> tuple[int, str, str, str] | None:
    """Find the first unequal element: (index, both values, how many differ). NaN equals NaN, -0.0 is not 0.0."""
    got, want = got.detach().cpu(), want.detach().cpu()
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return 0, f"{got.dtype} {tuple(got.shape)}", f"{want.dtype} {tuple(want.shape)}", "another kind of tensor"
    wrong = bits(got) != bits(want)
    wrong &= ~((got != got) & (want != want)).reshape(-1)
    if not wrong.any():
        return None
    at = int(wrong.nonzero()[0])
    mine, theirs = (repr(tensor.reshape(-1)[at].item()) for tensor in (got, want))
    return at, mine, theirs, f"{int(wrong.sum())} of {wrong.numel()} elements differ"


def _count(backwards: Any, step: int) -> int:
    return int(backwards(step) if callable(backwards) else backwards)


def _add_up(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    step: int,
    world: int,
    backwards: Any,
    average: bool,
) -> list[float]:
    """Run all micro-batches of one step; autograd adds their gradients up in p.grad, in this order."""
    count = _count(backwards, step)
    losses = []
    for index in _order(count, world):
        value = loss(model, batches(step, index))
        (value / count if average and count != 1 else value).backward()
        losses.append(value.item())
    return losses


def _order(backwards: int, world: int) -> Iterable[int]:
    return (a * world + rank for a in range(backwards) for rank in range(world))
