"""Every sum, average and cast of a step, in one place, so that equal bits can be argued by reading one file.

Two facts carry everything:

*The running sum in rank order.* `fold` adds the ranks' contributions one after the other, element by element, in
the accumulator's arithmetic. It depends on neither stage, bucket size nor cut, and in fp32 it is what plain
PyTorch does when one process accumulates the same micro-batches one after the other.

*Norms by exact integer sums.* They have a file of their own, `arithmetic/exact_norms.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..device import blank, chunk, divisor, equal
from .kernel_dispatch import twin

LOW = (torch.bfloat16, torch.float16)


def simulated(tensor: Tensor) -> bool:
    """Tell if a tensor has a shape but no values: nothing is computed with it, and any two have the same bits."""
    return isinstance(tensor, FakeTensor)


def running_dtype(total: torch.dtype) -> torch.dtype:
    """Return the dtype that a sum is taken in: fp32 for 16-bit accumulators, else their own."""
    return torch.float32 if total in LOW else total


@twin
def fold(total: Tensor, pieces: Sequence[Tensor], *, start: Tensor | None, times: int = 1, over: int = 1) -> None:
    """total = ((start * times + pieces[0]) + pieces[1] + ...) / over; without a start, from pieces[0] on.

    All are 1-D and of one length; `start` and any piece may lie where `total` does (only its first use is read).
    16-bit accumulators are summed in fp32 and rounded once per call.

    A fold over some pieces may be the start of a fold over more, and the order of summation stays the same:
    fold(fold(a, x), y) is fold(a, x ++ y), if the result between them is neither rounded nor divided.
    """
    dtype = running_dtype(total.dtype)
    in_place = total.dtype == dtype and not any(piece.data_ptr() == total.data_ptr() for piece in pieces)
    first, more = (pieces[0], pieces[1:]) if start is None else (start, pieces)
    casts, step = [_cast_first(piece, total) for piece in more], chunk(total)
    rows, length = 2 - in_place - (True not in casts), min(step, total.numel())
    scratch = blank(rows * length, dtype, total.device).view(rows, length)
    for at in range(0, total.numel(), step):
        part = total[at : at + step]
        running = part if in_place else scratch[0, : part.numel()]
        if first is not total or not in_place:
            running.copy_(first[at : at + step])
        if times > 1 and start is not None:
            running.mul_(times)
        for piece, cast in zip(more, casts, strict=True):
            addend = piece[at : at + step]
            running.add_(scratch[-1, : part.numel()].copy_(addend) if cast else addend)
        average_(running, over)
        if not in_place:
            part.copy_(running)


def _cast_first(piece: Tensor, total: Tensor) -> bool:
    """Tell if a piece is cast in a step of its own before it is added.

    A device casts 16 bits inside the addition, which gives the same bits; the CPU takes longer for that than for both
    steps. A piece wider than the sum would be added in its own dtype.
    """
    return piece.dtype != running_dtype(total.dtype) and (total.is_cpu or piece.dtype not in LOW)


def divides_exactly(total: torch.dtype, piece: torch.dtype, ranks: int) -> bool:
    """Tell if dividing a sum of such pieces by `ranks`, and multiplying it by `ranks`, gives the same sum again.

    Dividing by a power of two only moves the exponent, as long as there is room below: 16-bit numbers and their sums
    are multiples of 2^-133 at least, and fp32 goes down to 2^-149. Their own subnormals would lose bits.
    """
    return piece in LOW and total not in LOW and ranks & (ranks - 1) == 0 and ranks <= 1 << 16


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a 0-d bool on the tensors' device: are all elements finite? They have one dtype; not all are empty."""
    largest = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], torch.inf)  # NaN counts as larger
    return torch.stack(largest).isfinite().all()


def average_(total: Tensor, ranks: int) -> None:
    """Divide by `ranks`, truly: times 1/3 is not division by 3. For a power of two, multiply: times a half is division
    by 2, at a third of its cost."""
    if ranks & (ranks - 1) == 0:
        total.mul_(1 / ranks) if ranks > 1 else None
        return
    wide = total.to(running_dtype(total.dtype))  # a 16-bit dtype may not represent `ranks`
    wide.div_(divisor(ranks, wide))
    if wide is not total:
        total.copy_(wide)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit equality (so NaN equals itself and -0 differs from 0)."""
    if simulated(a):
        return True
    a, b = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    if a.storage_offset() % 8 or b.storage_offset() % 8:
        return equal(a, b)
    wide = a.numel() // 8 * 8  # by eight bytes at a time, torch compares several times faster
    if not equal(a[:wide].view(torch.int64), b[:wide].view(torch.int64)):
        return False
    return wide == a.numel() or equal(a[wide:], b[wide:])


def unrepeated(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a view that shows each element in memory once. like: choose the places to show by this tensor's strides.

    An expanded tensor shows one element at many places, and torch refuses to write to it as it is.
    """
    like = tensor if like is None else like
    return tensor[tuple(slice(None) if stride else slice(1) for stride in like.stride())]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a dense tensor's bytes, 1-D uint8, with lazy conjugation and negation applied."""
    flat = unrepeated(tensor).resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def write_bytes(tensor: Tensor, content: Tensor, *, counted: bool = True) -> None:
    """Write bytes from `as_bytes` of another tensor into a dense one, unless it has them: autograd counts writes.

    counted: False for a write that autograd does not count. On a device none is: the comparison would wait, so the
        tensor is written in any case.
    """
    content = content.clone()
    if not tensor.is_cpu or not same_bits(content, as_bytes(tensor)):
        place = unrepeated(tensor if tensor.is_cpu and counted else tensor.data)
        place.copy_(content.view(tensor.dtype).view(place.shape))


def dense(tensor: Tensor) -> bool:
    """Tell if a tensor is one run of numbers in memory, and not made of several tensors."""
    own = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ or simulated(tensor)
    return own and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def parts(tensor: Tensor) -> list[Tensor] | None:
    """Return the dense tensors that a tensor is made of; None if torch does not tell."""
    if dense(tensor):
        return [tensor]
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.is_nested:
        inner = [tensor.values(), tensor._nested_tensor_size()]
    else:
        inner = [getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ())]
    found = [parts(each) for each in inner]
    return [each for several in found for each in several or ()] if found and None not in found else None


def reseed_(master: Tensor, param: Tensor, *, asked: bool = True) -> bool:
    """Copy edits of a parameter to its master: the elements whose bits differ from the cast of the master.

    Returns if anything changed. Both are 1-D, of one length. If not `asked`, a device copies too, but the result is
    False in any case: the host would have to wait for the answer.
    """
    if simulated(master):
        return False
    silent = not (asked or master.is_cpu)
    changed = False
    bits = torch.int16 if param.itemsize == 2 else torch.int32 if param.itemsize == 4 else torch.int64
    step = chunk(param)
    scratch = blank(min(step, param.numel()), param.dtype, param.device)
    for at in range(0, master.numel(), step):
        own, seen = master[at : at + step], param[at : at + step]
        cast = scratch[: own.numel()].copy_(own)
        if silent or not same_bits(cast, seen):
            changed = not silent
            wide = blank(own.numel(), own.dtype, own.device).copy_(seen)
            torch.where(cast.view(bits) != seen.view(bits), wide, own, out=own)
    return changed
