"""What a `GradScaler` asks for: unscaled gradients, and one overflow verdict for all ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...arithmetic.sums import finite
from ...device import ask

if TYPE_CHECKING:
    from .gradient import Gradients

unscale_ = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_


def unscale(book: Gradients, grads: Sequence[Any], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale a list of sharded gradients.

    A scaler calls once per dtype that it sees, and ranks may see different dtypes. So the first call with a new
    `found_inf` settles the verdict for all parameters that the optimizer updates.
    """
    if found_inf is not book.judged:
        with book.asking():
            mine = [entry for entry in book.entries if entry.updater == grads[0]._entry.updater]
            having = book.having(mine)
            verdict = _finite(book, [entry for entry in mine if entry.number in having])
            agreed = torch.tensor([0 if verdict else 1], dtype=torch.uint8, device="cpu")
            book.group.maximum(agreed)
            book.judged = found_inf
        found_inf.clamp_(min=float(agreed))
        book.keeper.judge(bool(agreed))
    book.note_edit("unscale", inv_scale)

    def unscale_all(together: list[Any]) -> None:
        fragments = [fragment for fragment in (grad.editable() for grad in together) if fragment.numel()]
        for fragment in fragments[:1]:  # both tensors must be on the device where the accumulator rests
            unscale_(fragments, found_inf.to(fragment.device), inv_scale.to(fragment.device))

    for accumulator, together in by_accumulator((grad._entry, grad) for grad in grads):
        book.hold(accumulator, functools.partial(unscale_all, together))


def by_accumulator(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, list[Any]]]:
    """Group pairs (entry, value) by the sum that the entry adds to. Return [(accumulator, its entries' values)]."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    for entry, each in pairs:
        found.setdefault(id(entry.accumulator), (entry.accumulator, []))[1].append(each)
    return [*found.values()]


def _finite(book: Gradients, entries: Sequence[Any]) -> bool:
    """Tell if all of this rank's elements of these gradients are finite: one question to the device for all."""
    found: dict[torch.device, list[Tensor]] = {}

    def look_at(together: list[Any]) -> None:
        fragments = [entry.accumulator.fragment(entry.position) for entry in together]
        if any(fragment.numel() for fragment in fragments):
            found.setdefault(fragments[0].device, []).append(finite(fragments))

    for accumulator, together in by_accumulator((entry, entry) for entry in entries):
        book.hold(accumulator, functools.partial(look_at, together), changed=False)
    return book.group.failed is None and all(bool(ask(torch.stack(flags).all())) for flags in found.values())
