"""What several ranks hold alike, compared: nobody sends it around, so nothing else would show that it differs.

    held by every rank      at stages    differs when one rank alone
    parameters              0, 1, 2      loads or edits weights
    masters                 0            does, or its optimizer draws numbers of its own
    states                  0            resumes an optimizer, or as above

Of what is sharded every replica of the model has a copy (`Comm.replicas`): the ranks of one position hold it.

One meeting compares a digest of all of it. Where these differ, digests of each tensor say which, and the first rank
that holds that sends it.
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
from ..ranks.agreement import Group
from ..stage import Degree
from ..tiers.tier import Part, present
from .content import ModelState

_CHUNK = 1 << 22  # elements that are brought from a device at a time


def check_replicas(running: ModelState, buffers: Sequence[Buffer], number: int) -> None:
    """Raise `PeerError` on every rank if several ranks hold something of these buckets differently."""
    group = running.group
    if group.ranks == 1 or any(simulated(buffer.full) for buffer in buffers):
        return
    whole = shard = 0
    try:
        found = list(_digests(running, buffers))
        whole, shard = (xxhash.xxh3_64_intdigest(repr(each).encode()) >> 1 for each in _by_holders(found))
    except TierError as error:
        group.report(error)
    told = group.poll("comparing replicas", number, whole, shard)
    size = group.team.size
    if len({each[0] for each in told}) == 1 and all(
        len({each[1] for each in told[at::size]}) == 1 for at in range(size)
    ):
        return
    everyone = group.describe(dict(_digests(running, buffers, by_tensor=True)))
    for label in dict.fromkeys(label for told in everyone for label in told):
        ranks = _holders(label, group)
        kinds = {rank: everyone[rank].get(label, _NOTHING) for rank in ranks}
        others = [rank for rank in ranks if kinds[rank] != kinds[ranks[0]]]
        if others:
            first, words = ranks[0], f"ranks {others}" if len(others) > 1 else f"rank {others[0]}"
            at = _first_difference(running, buffers, label, kinds)
            raise PeerError(
                "the ranks hold different copies of what each of them has whole",
                where=f"{label}, rank {first} and {words}"
                if len(others) > 1
                else f"{label}, ranks {first} and {others[0]}",
                expected=f"{at[first]} (rank {first})",
                got=f"{at[others[0]]} (rank {others[0]})",
                instead="make the same edits on every rank, and draw the same numbers in the optimizer; "
                "zero.gathered(write_from=0) gives all of them rank 0's weights, zero.load(...) a checkpoint",
            )


def _by_holders(found: Sequence[tuple[str, Any]]) -> tuple[list[Any], list[Any]]:
    """What every rank holds, and what the ranks of one position do."""
    sharded = [item for item in found if _position(item[0]) is not None]
    return [item for item in found if item not in sharded], sharded


def _position(label: str) -> int | None:
    """Of a shard, whose it is."""
    return int(label.split(maxsplit=2)[1]) if label.startswith("shard ") else None


def _holders(label: str, group: Group) -> list[int]:
    at = _position(label)
    return list(range(group.ranks)) if at is None else list(range(at, group.ranks, group.team.size))


def _items(
    running: ModelState, buffers: Sequence[Buffer], *, by_tensor: bool
) -> Iterator[tuple[str, Tensor | Part | Any]]:
    """(what, its content), bucket by bucket or parameter by parameter: of what other ranks hold too."""
    seat = running.group.team.seat
    prefix = {Degree.RANK: "", Degree.TEAM: f"shard {seat.position} of "}
    shared = {Degree.RANK, Degree.TEAM} if seat.replicas > 1 else {Degree.RANK}
    for buffer in buffers:
        flats = [("", buffer.parameters)] * (buffer.parameters is not buffer.master)
        flats += [] if buffer.master is None else [("master of ", buffer.master)]
        for what, flat in flats:
            if flat.degree in shared:
                parts = [(f"bucket {buffer.bucket.index}", flat.first, flat.last)]
                if by_tensor:
                    slots = [(slot, slot.within(flat.first, flat.last)) for slot in buffer.bucket.slots]
                    parts = [
                        (f"parameter {s.name!r}", s.start + p.start, s.start + p.stop) for s, p in slots if p.numel
                    ]
                for name, start, stop in parts:
                    yield prefix[flat.degree] + what + name, flat.part(start, stop)
    chosen = {buffer.bucket.index for buffer in buffers if buffer.place.optimizer in shared}
    for binding in running.bindings:
        for fragment in binding.fragments:
            if fragment.buffer.bucket.index in chosen:
                for key, value in binding.states.kept(fragment).items():
                    held = prefix[fragment.buffer.place.optimizer]
                    yield f"{held}state {key!r} of parameter {fragment.slot.name!r}", value


Kind = tuple[str, int | None, str]  # shape and dtype, or the value; of a tensor its elements and their digest
_NOTHING: Kind = ("nothing", None, "")


def _digests(running: ModelState, buffers: Sequence[Buffer], *, by_tensor: bool = False) -> Iterator[tuple[str, Any]]:
    for label, value in _items(running, buffers, by_tensor=by_tensor):
        if not isinstance(value, (Tensor, Part)):
            yield label, [repr(value), None, ""]
            continue
        nbytes = value.numel() * value.itemsize
        compared = running.group.ledger.note("compare", state=label.split()[0], logical=nbytes)
        hashed = xxhash.xxh3_128()
        with present(value) as here:
            for piece in here.detach().reshape(-1).split(_CHUNK):
                hashed.update(raw(piece.cpu()))
        ends(compared)
        yield label, [f"{tuple(value.shape)} {value.dtype}", value.numel(), hashed.hexdigest()]


def _first_difference(
    running: ModelState, buffers: Sequence[Buffer], label: str, kinds: dict[int, Any]
) -> dict[int, str]:
    """In words, what each holder has where it first differs from the first one's: an element, if they are alike but
    for that. Every rank calls it."""
    group, first = running.group, min(kinds)
    text, numel, _ = kinds[first]
    if len({kind[0] for kind in kinds.values()}) > 1 or numel is None:
        return {rank: kind[0] for rank, kind in kinds.items()}
    mine = torch.empty(numel, dtype=getattr(torch, text.rpartition("torch.")[2]), device=group.device)
    if group.rank in kinds:
        own = next(value for name, value in _items(running, buffers, by_tensor=True) if name == label)
        with present(own) as here:
            mine.copy_(here.detach().reshape(-1))
    theirs = mine.clone()
    group.broadcast(theirs, first)
    bytes_mine, bytes_theirs = (tensor.view(torch.uint8).view(numel, -1) for tensor in (mine, theirs))
    apart = (
        (bytes_mine != bytes_theirs).any(dim=1).nonzero()
        if group.rank in kinds
        else torch.empty(0, device=group.device)
    )
    places = group.describe(int(apart[0]) if apart.numel() else None)
    at = next(place for place in places if place is not None)
    return dict(enumerate(group.describe(f"element {at} is {mine[at].item()!r}")))
