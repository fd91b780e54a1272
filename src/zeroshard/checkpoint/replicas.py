"""A comparison of copies that several ranks hold: they are never sent, so nothing else would show that copies differ.

    held by every rank      at stages    differs if one rank alone
    parameters              0, 1, 2      loads or edits weights
    masters                 0            does that, or its optimizer draws random numbers of its own
    states                  0            resumes an optimizer, or as above

Every replica of the model (`Comm.replicas`) has a copy of what is sharded: the ranks of one position hold the same.
Only the ranks of an axis hold its rows of the parameters along it (`Layout.along`). With tensor parallelism each rank
of the tensor axis has a copy of what is not cut; what is cut is held like such rows.

One collective compares a digest of all of it. If these differ, digests of each tensor say which one does, and the
first rank that holds it sends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..arithmetic.digests import raw
from ..arithmetic.sums import simulated
from ..comm.agreement import Group
from ..engine.weights.bucket import Bucket
from ..errors import PeerError, TierError
from ..events import ends
from ..layout.stage import Degree
from ..tiers.tier import Part, present
from .content import ModelState

_CHUNK = 1 << 22  # elements that are brought from a device at a time


def check_replicas(running: ModelState, buckets: Sequence[Bucket], number: int) -> None:
    """Raise `PeerError` on every rank if several ranks hold something of these buckets differently."""
    group = running.group
    if group.ranks == 1 or any(simulated(bucket.full) for bucket in buckets):
        return
    digests = dict.fromkeys(("", *_WORDS), 0)
    try:
        found = list(_digests(running, buckets))
        for kind in digests:
            of_kind = [item for item in found if _kind(item[0]) == kind]
            digests[kind] = xxhash.xxh3_64_intdigest(repr(of_kind).encode()) >> 1
    except TierError as error:
        group.report(error)
    told = group.poll("comparing replicas", number, *digests.values())
    if len(told) == 1 or all(
        len({told[rank][at] for rank in holders}) == 1
        for at, kind in enumerate(digests)
        for holders in _all_holders(kind, group)
    ):
        return
    everyone = group.describe(dict(_digests(running, buckets, by_tensor=True)))
    for label in dict.fromkeys(label for told in everyone for label in told):
        ranks = _holders(label, group)
        kinds = {rank: everyone[rank].get(label, _NOTHING) for rank in ranks}
        others = [rank for rank in ranks if kinds[rank] != kinds[ranks[0]]]
        if others:
            first, words = ranks[0], f"ranks {others}" if len(others) > 1 else f"rank {others[0]}"
            at = _first_difference(running, buckets, label, kinds)
            raise PeerError(
                "the ranks hold different copies of what each of them has whole",
                where=f"{label}, rank {first} and {words}"
                if len(others) > 1
                else f"{label}, ranks {first} and {others[0]}",
                expected=f"{at[first]} (rank {first})",
                got=f"{at[others[0]]} (rank {others[0]})",
                instead=_OF_STATES if label.startswith("state ") else _OF_WEIGHTS,
            )


_OF_WEIGHTS = (
    "make the same edits on every rank; zero.gathered(write_from=0) gives all of them rank 0's weights, "
    "zero.load(...) a checkpoint"
)
_OF_STATES = (
    "draw the same numbers in the optimizer on every rank, and return the same loss from a closure, as "
    "torch.distributed.all_reduce makes it; zero.load(...) a checkpoint"
)
_WORDS = ("shard", "part")  # first words of labels of what only some ranks hold: those of a position, of an axis


def _kind(label: str) -> str:
    word = label.partition(" ")[0]
    return word if word in _WORDS else ""


def _all_holders(kind: str, group: Group) -> list[list[int]]:
    """Return the sets of ranks that must hold the same of this kind, by number of the shard or part."""
    ranks, seat = range(group.ranks), group.team.seat
    if kind == "shard":
        return [[rank for rank in ranks if seat.position_of(rank) == at] for at in range(seat.size)]
    return [[*team] for team in group.axis_team.seat.teams()] if kind == "part" else [[*ranks]]


def _holders(label: str, group: Group) -> list[int]:
    kind = _kind(label)
    return _all_holders(kind, group)[int(label.split(maxsplit=2)[1]) if kind else 0]


def _items(
    running: ModelState, buckets: Sequence[Bucket], *, by_tensor: bool
) -> Iterator[tuple[str, Tensor | Part | Any]]:
    """Yield (label, content) of all that other ranks hold too, bucket by bucket or parameter by parameter."""
    seat, rows = running.group.team.seat, running.group.axis_team.seat

    def shared(bucket: Bucket, degree: Degree) -> bool:
        return degree is Degree.RANK or (degree is Degree.TEAM and not bucket.team.seat.sole)

    def held(bucket: Bucket, degree: Degree) -> str:
        if degree is Degree.TEAM:
            return f"shard {seat.position} of "
        return f"part {rows.part} of " if bucket.plan.axis else ""

    for bucket in buckets:
        flats = [("", bucket.parameters)] * (bucket.parameters is not bucket.master)
        flats += [] if bucket.master is None else [("master of ", bucket.master)]
        for what, flat in flats:
            if shared(bucket, flat.degree):
                parts = [(f"bucket {bucket.plan.index}", flat.first, flat.last)]
                if by_tensor:
                    slots = [(slot, slot.within(flat.first, flat.last)) for slot in bucket.plan.slots]
                    parts = [
                        (f"parameter {s.name!r}", s.start + p.start, s.start + p.stop) for s, p in slots if p.numel
                    ]
                for name, start, stop in parts:
                    yield held(bucket, flat.degree) + what + name, flat.part(start, stop)
    chosen = {bucket.plan.index for bucket in buckets if shared(bucket, bucket.placements.optimizer)}
    for binding in running.bindings:
        for fragment in binding.fragments:
            if fragment.bucket.plan.index in chosen:
                for key, value in binding.states.kept(fragment).items():
                    of = held(fragment.bucket, fragment.bucket.placements.optimizer)
                    at = f" from element {fragment.elements.start}" if fragment.slot.matrix else ""
                    yield f"{of}state {key!r} of parameter {fragment.slot.name!r}{at}", value


Kind = tuple[str, int | None, str]  # shape and dtype, or a value's repr; a tensor's number of elements, and digest
_NOTHING: Kind = ("nothing", None, "")


def _digests(running: ModelState, buckets: Sequence[Bucket], *, by_tensor: bool = False) -> Iterator[tuple[str, Any]]:
    for label, value in _items(running, buckets, by_tensor=by_tensor):
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
    running: ModelState, buckets: Sequence[Bucket], label: str, kinds: dict[int, Any]
) -> dict[int, str]:
    """Describe, for each holder, the first element that differs, or the kind of the tensor if that differs.

    All ranks call it.
    """
    group, first = running.group, min(kinds)
    text, numel, _ = kinds[first]
    if len({kind[0] for kind in kinds.values()}) > 1 or numel is None:
        return {rank: kind[0] for rank, kind in kinds.items()}
    mine = torch.empty(numel, dtype=getattr(torch, text.rpartition("torch.")[2]), device=group.device)
    if group.rank in kinds:
        own = next(value for name, value in _items(running, buckets, by_tensor=True) if name == label)
        with present(own) as here:
            mine.copy_(here.detach().reshape(-1))
    theirs = mine.clone()
    group.broadcast(theirs, first)
    bytes_mine, bytes_theirs = (tensor.view(torch.uint8).view(numel, -1) for tensor in (mine, theirs))
    differing = (
        (bytes_mine != bytes_theirs).any(dim=1).nonzero()
        if group.rank in kinds
        else torch.empty(0, device=group.device)
    )
    places = group.describe(int(differing[0]) if differing.numel() else None)
    at = next(place for place in places if place is not None)
    return dict(enumerate(group.describe(f"element {at} is {mine[at].item()!r}")))
