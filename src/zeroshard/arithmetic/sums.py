"""Every sum, average and cast of a step, in one place, so that equal bits can be argued by reading one file.

Two facts carry everything:

*The running sum in rank order.* `fold` adds the ranks' contributions one after the other, element by element, in
the accumulator's arithmetic. It depends on neither stage, bucket size nor cut, and in fp32 it is what plain
PyTorch does when one process accumulates the same micro-batches one after the other.

*Norms by exact integer sums.* They have a file of their own, `arithmetic/exact_norms.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..device import blank, chunk, divisor, equal
from ..errors import UserError, nearest
from ..layout.partition import Bucket
from ..layout.states import Formats
from ..validation import FLAG, Field, check_fields, is_patterns, one_of
from .stand_ins import twin

Nonfinite = Literal["ignore", "raise", "skip"]
Scaling = Literal["tensor", "1x128", "128x128"]
LOW = (torch.bfloat16, torch.float16)
COMPUTED = (*LOW, torch.float32)  # what modules may compute in with parameters of 8 bits


def _is_wide(given: object) -> bool:
    """Tell the dtypes that states may have."""
    return isinstance(given, torch.dtype) and given.is_floating_point and given.itemsize >= 2


def _dtype(name: str) -> Field:
    """Describe one field of `Precision` that takes a dtype."""

    def instead(given: object) -> str:
        if name == "param_dtype" and "float8" in f"{given}":
            return "Precision(param_dtype=torch.bfloat16, fp8=True), which computes in the first"
        return f"Precision({name}=torch.bfloat16)"

    return Field(_is_wide, "must be a floating dtype of 16 bits or more", instead=instead).or_none()


_FIELDS = {
    **{name: _dtype(name) for name in ("param_dtype", "reduce_dtype", "grad_dtype", "master_dtype")},
    "nonfinite": one_of(Nonfinite),
    "store_params": FLAG,
    "cast_inputs": Field(
        lambda given: type(given) is bool or given == "units",
        "is a yes, a no, or a word",
        'True, False or "units"',
        lambda given: nearest(given, ["units"]) if isinstance(given, str) else None,
    ),
    "keep": Field(
        is_patterns,
        "takes patterns of parameters that are not converted to Precision.param_dtype",
        instead=lambda given: (
            f"Precision(param_dtype=torch.bfloat16, keep={[given] if isinstance(given, str) else ['*.router.*']!r})"
        ),
    ),
    "split_master": FLAG,
    "fp8": Field(
        lambda given: type(given) is bool or is_patterns(given),
        "takes patterns of parameters that rest and travel in 8 bits, or a yes or a no",
        instead=lambda _: 'Precision(fp8=["*.mlp.*.weight"]), or Precision(fp8=True) for the weights of linear layers',
    ),
    "scaling": one_of(Scaling, "says of which part of a tensor in 8 bits each scale is"),
}


@dataclass(frozen=True)
class Precision:
    """The dtype of each state. Parameters keep their own dtype unless asked.

    param_dtype: floating parameters are converted to it (None: kept). Masters are seeded before the conversion.
    reduce_dtype: what gradients are sent as (None: the parameter's dtype; the accumulator's after `no_sync`, and with
        `Comm(reduce="native")`).
    grad_dtype: what they are accumulated in (None: float32 for 16-bit parameters, else the parameter's dtype).
        bfloat16 saves two bytes per parameter; then bits are equal over stages, but not over rank counts.
    master_dtype: what the optimizer updates (None: float32 for 16-bit parameters, else the parameter itself).
    keep: names or patterns of parameters that keep their own dtype, in all states, whatever the others are asked for,
        as a router does in fp32: `["*.router.*"]`. Their modules compute in it: give them inputs of it (`x.float()`).
    store_params: keep sharded parameters (stage 3) in their own dtype beside their masters, as the ZeRO paper counts
        them: 2 bytes per owned parameter more. Else, where both rest on the device and masters are the wider ones,
        gathers cast the masters.
    cast_inputs: convert floating inputs to `param_dtype` (needs `param_dtype`): the root module's (True), or those of
        every unit ("units"), where something between two of them may have computed in a wider dtype.
    nonfinite: what a NaN or infinity among the gradients does to a step. "ignore" is plain PyTorch; "raise" ends it in
        a `NotFiniteError`, on every rank and before any weight changes, that names rank, step, micro-batch, parameter
        and element; "skip" passes over the step on every rank, counts it in `zero.skipped`, and logs the same. Where a
        parameter was spoiled before, by an update or an edit, that one is named, and "skip" raises as well. Costs a sum
        over the own shards of the gradients and a message of one byte per step; on CUDA also a wait per reduction.
        Where replicated gradients are sent in their own dtype, also room for the contributions apart from their sums.
    split_master: beside a bfloat16 parameter rest the 17 bits that it lacks of its fp32 master: 2.125 bytes in place of
        4, and the same bits in every step. Masters are joined bucket by bucket inside the step, in which a fused AdamW
        takes three to four times as long. Where masters alone rest (stage 3, on the device) nothing is split. The
        optimizer must allow to be stepped bucket by bucket; replicated weights are edited inside `gathered()` only.
    fp8: names or patterns of parameters that rest and travel as 8-bit floats (e4m3), a byte each, with a scale for each
        tensor. True: the weights of all trained `nn.Linear`, but for routers (modules called "router" or "gate") and
        `keep`. Modules compute in `param_dtype` with the numbers that these stand for. Masters are fp32, seeded before
        anything is rounded, and rounded once, to 8 bits. Such weights are edited inside `gathered()` only.
    scaling: of which part of such a tensor each scale is: "tensor", all of it, and of stacked experts each; "128x128",
        so many rows and columns; or "1x128" of a row. Columns are the last dimension, rows all others.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    store_params: bool = False
    cast_inputs: bool | Literal["units"] = False
    nonfinite: Nonfinite = "ignore"
    keep: Sequence[str] = ()
    split_master: bool = False
    fp8: bool | Sequence[str] = False
    scaling: Scaling = "tensor"

    def __post_init__(self) -> None:
        check_fields(self, _FIELDS)
        if self.cast_inputs and self.param_dtype is None:
            raise UserError(
                "Precision.cast_inputs needs to know what to cast to",
                expected="param_dtype",
                got="None",
                instead="Precision(param_dtype=torch.bfloat16, cast_inputs=True)",
            )

        if len(self.keep) and self.param_dtype is None:
            raise UserError(
                "Precision.keep takes patterns of parameters that are not converted to Precision.param_dtype",
                got=f"keep={self.keep!r}, param_dtype={self.param_dtype}",
                instead='Precision(param_dtype=torch.bfloat16, keep=["*.router.*"])',
            )

        others = self.param_dtype not in (None, torch.bfloat16) or self.master_dtype not in (None, torch.float32)
        if self.split_master and others:
            raise UserError(
                "Precision.split_master takes apart fp32 masters of bfloat16 parameters",
                got=f"param_dtype={self.param_dtype}, master_dtype={self.master_dtype}",
                instead="Precision(param_dtype=torch.bfloat16, split_master=True)",
            )
        self._check_fp8()

    def _check_fp8(self) -> None:
        if self.scaling != "tensor" and not self.fp8:
            raise UserError(
                "Precision.scaling says of which part of a tensor in 8 bits each scale is",
                expected="fp8=True or patterns beside it",
                got=f"scaling={self.scaling!r}, fp8={self.fp8!r}",
                instead='Precision(param_dtype=torch.bfloat16, fp8=True, scaling="128x128")',
            )
        others = self.param_dtype not in (None, *COMPUTED) or self.master_dtype not in (None, torch.float32)
        if self.fp8 and (others or self.split_master):
            raise UserError(
                "Precision.fp8 rounds whole fp32 masters, for modules that compute in 16 or 32 bits",
                got=f"param_dtype={self.param_dtype}, master_dtype={self.master_dtype}, "
                f"split_master={self.split_master}",
                instead="Precision(param_dtype=torch.bfloat16, fp8=True)",
            )

    def keeps(self, names: Sequence[str]) -> bool:
        """Tell if a parameter of these names is an exception (`keep`)."""
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.keep)

    def of(self, *, kept: bool) -> Precision:
        """Return the settings of exceptions (`kept`), or of all others."""
        return Precision(store_params=self.store_params) if kept else self

    def of_bucket(self, bucket: Bucket) -> Precision:
        """Return the settings of a bucket's parameters. Those whose 8 bits rest beside their masters are stored."""
        return replace(self, store_params=True) if bucket.fp8 else self.of(kept=bucket.kept)

    def formats(self, bucket: Bucket) -> Formats[torch.dtype]:
        """Return the formats of a bucket's states."""
        own = self.of_bucket(bucket)
        param: torch.dtype = getattr(torch, bucket.dtype.removeprefix("torch."))
        rest = torch.uint8 if bucket.fp8 else param
        return Formats(param, rest, own.grad(param), own.master(param), own.casts(param), own.splits(param))

    def param(self, own: torch.dtype) -> torch.dtype:
        return self.param_dtype if self.param_dtype is not None and own.is_floating_point else own

    def grad(self, param: torch.dtype) -> torch.dtype:
        return self.grad_dtype or (torch.float32 if param in LOW else param)

    def reduce(self, param: torch.dtype) -> torch.dtype:
        return self.reduce_dtype or param

    def master(self, param: torch.dtype) -> torch.dtype:
        return self.master_dtype or (torch.float32 if param in LOW else param)

    def casts(self, param: torch.dtype) -> bool:
        """Tell if gathers may cast sharded parameters from their masters: not if parameters are to be stored, or if
        they can be more exact than masters."""
        wider = {torch.float32: LOW, torch.float64: (*LOW, torch.float32)}
        return param in wider.get(self.master(param), ()) and not self.store_params

    def splits(self, param: torch.dtype) -> bool:
        """Tell if the master beside such a parameter rests as the bits that the parameter lacks (`split_master`)."""
        return self.split_master and (param, self.master(param)) == (torch.bfloat16, torch.float32)


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

    A fold over some pieces is where one over more may start, and no sum is taken in another order for it:
    fold(fold(a, x), y) is fold(a, x ++ y), if what is between them is not rounded and not divided.
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
    """Tell if a sum of such pieces is the same again after it was divided by `ranks` and multiplied by it.

    Dividing by a power of two only moves the exponent, as long as there is room below: 16-bit numbers and their sums
    are multiples of 2^-133 at least, and fp32 goes down to 2^-149. Their own subnormals would lose bits.
    """
    return piece in LOW and total not in LOW and ranks & (ranks - 1) == 0 and ranks <= 1 << 16


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a 0-d bool on the tensors' device: are all their elements finite? Of one dtype, not all of them empty."""
    largest = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], torch.inf)  # NaN counts as larger
    return torch.stack(largest).isfinite().all()


def average_(total: Tensor, ranks: int) -> None:
    """Divide once, and truly: times 1/3 is not division by 3. Times a half is division by 2, at a third of its cost."""
    if ranks & (ranks - 1) == 0:
        total.mul_(1 / ranks) if ranks > 1 else None
        return
    wide = total.to(running_dtype(total.dtype))  # 16 bits may not have such a number of ranks
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
    """Return a view that has each element in memory once. like: take the elements at the places that these have there.

    An expanded tensor shows one element at many places, and torch refuses to write to it as it is.
    """
    like = tensor if like is None else like
    return tensor[tuple(slice(None) if stride else slice(1) for stride in like.stride())]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a dense tensor's bytes, 1-D uint8, conjugated and negated as it shows."""
    flat = unrepeated(tensor).resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def write_bytes(tensor: Tensor, content: Tensor) -> None:
    """Write bytes from `as_bytes` of another tensor into a dense one, unless it has them: autograd counts writes.

    On a device the comparison would wait, so it is written in any case, and the write is not counted.
    """
    content = content.clone()
    if not tensor.is_cpu or not same_bits(content, as_bytes(tensor)):
        place = unrepeated(tensor if tensor.is_cpu else tensor.data)
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
    """Copy edits of a parameter to its master: elements whose bits are not the cast of the master's.

    Returns if anything changed. Both are 1-D, of one length. If not `asked`, a device does the same but False tells
    nothing: the host would have to wait for the answer.
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
