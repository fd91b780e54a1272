"""What every rank holds whole, compared: nobody sends it around, so nothing else would show that it differs.

    replicated    at stages    differs when one rank alone
    parameters    0, 1, 2      loads or edits weights
    masters       0            does, or its optimizer draws numbers of its own
    states        0            resumes an optimizer, or as above

One meeting compares a digest of all of it. Where these differ, digests of each tensor say which, and rank 0 sends that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..digests import raw
from ..engine.buffer import Buffer
from ..errors import PeerError, TierError
from ..events import ends
from ..numerics import simulated
from ..tiers.tier import Part, present
from .content import ModelState

_CHUNK = 1 << 22  # elements that are brought from a device at a time


def check_replicas(running: ModelState, buffers: Sequence[Buffer], number: int) -> None:
    """Raise `PeerError` on every rank if ranks hold something of these buckets, of which each has all, differently."""
    group = running.group
    if group.ranks == 1 or any(simulated(buffer.full) for buffer in buffers):
        return
    whole = 0
    try:
        whole = xxhash.xxh3_64_intdigest(repr(list(_digests(running, buffers))).encode()) >> 1
    except TierError as error:
        group.report(error)
    if len(set(group.poll("comparing replicas", number, whole))) == 1:
        return
    everyone = group.describe(dict(_digests(running, buffers, by_tensor=True)))
    for label in dict.fromkeys(label for told in everyone for label in told):
        kinds = [told.get(label, "nothing") for told in everyone]
        others = [rank for rank, kind in enumerate(kinds) if kind != kinds[0]]
        if others:
            at = _first_difference(running, buffers, label, kinds)
            raise PeerError(
                "the ranks hold different copies of what each of them has whole",
                where=f"{label}, rank 0 and ranks {others}" if len(others) > 1 else f"{label}, ranks 0 and {others[0]}",
                expected=f"{at[0]} (rank 0)",
                got=f"{at[others[0]]} (rank {others[0]})",
                instead="make the same edits on every rank, and draw the same numbers in the optimizer; "
                "zero.gathered(write_from=0) gives all of them rank 0's weights, zero.load(...) a checkpoint",
            )


def _items(
    running: ModelState, buffers: Sequence[Buffer], *, by_tensor: bool
) -> Iterator[tuple[str, Tensor | Part | Any]]:
    """(what, its content), bucket by bucket or parameter by parameter."""
    for buffer in buffers:
        whole = [("", buffer.parameters)] * (not buffer.place.parameters)
        if buffer.master is not None and not buffer.place.optimizer:
            whole.append(("master of ", buffer.master))
        for what, flat in whole:
            numel = buffer.bucket.numel
            parts = [(f"parameter {slot.name!r}", slot.start, slot.stop) for slot in buffer.bucket.slots]
            for name, start, stop in parts if by_tensor else [(f"bucket {buffer.bucket.index}", 0, numel)]:
                yield what + name, flat.part(start, stop)
    chosen = {buffer.bucket.index for buffer in buffers if not buffer.place.optimizer}
    for binding in running.bindings:
        for fragment in binding.fragments:
            if fragment.buffer.bucket.index in chosen:
                for key, value in binding.states.kept(fragment).items():
                    yield f"state {key!r} of parameter {fragment.slot.name!r}", value


def _digests(running: ModelState, buffers: Sequence[Buffer], *, by_tensor: bool = False) -> Iterator[tuple[str, str]]:
    for label, value in _items(running, buffers, by_tensor=by_tensor):
        if not isinstance(value, (Tensor, Part)):
            yield label, repr(value)
            continue
        nbytes = value.numel() * value.itemsize
        compared = running.group.ledger.note("compare", state=label.split()[0], logical=nbytes)
        hashed = xxhash.xxh3_128()
        with present(value) as here:
            for piece in here.detach().reshape(-1).split(_CHUNK):
                hashed.update(raw(piece.cpu()))
        ends(compared)
        yield label, f"{tuple(value.shape)} {value.dtype} {hashed.hexdigest()}"


def _first_difference(running: ModelState, buffers: Sequence[Buffer], label: str, kinds: Sequence[str]) -> list[str]:
    """In words, what each rank has where it first differs from rank 0's: an element, if they are alike but for that."""
    if len({kind.rpartition(" ")[0] for kind in kinds}) > 1 or not kinds[0].startswith("("):
        return list(kinds)
    own = next(value for name, value in _items(running, buffers, by_tensor=True) if name == label)
    with present(own) as here:
        mine = here.detach().reshape(-1).to(running.group.device, copy=True)
    first = mine.clone()
    running.group.broadcast(first)
    bytes_mine, bytes_first = (tensor.view(torch.uint8).view(mine.numel(), -1) for tensor in (mine, first))
    apart = (bytes_mine != bytes_first).any(dim=1).nonzero()
    places = running.group.describe(int(apart[0]) if apart.numel() else None)
    at = next(place for place in places if place is not None)
    told: list[str] = running.group.describe(f"element {at} is {mine[at].item()!r}")
    return told
