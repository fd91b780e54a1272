"""One recorded step of one rank, as the page shows it: what was held, what moved, and why the peak is where it is.

Everything here is JSON-able and in the words of `web/DATA.md`. Times are those of the record's clock until `together`
puts the ranks side by side and lets the first of them begin at 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from ..events import DEVICE, Event, Record
from ..layout.partition import BucketPlan, Partition
from ..layout.stage import ALONE, Seat
from ..policies.comm import Comm

MESSAGES = Comm().on_accelerators()  # of the page's own runs, which show what ranks send, whatever "auto" is here
PHASES = ("forward", "backward", "reduce", "step", "gather", "save", "export")
WORK = ("forward", "recompute", "backward")  # verbs of a unit
STANDING = ("control", "broadcast")  # every rank waits until these are through
TRAVELS = ("gather", "reduce", "relay", "share", "broadcast")
SPARE = ("copy", "control", "release")  # left out of a record that is too long, in this order
E4M3 = "float8_e4m3fn"  # the dtype in which parameters in 8 bits rest and travel
MOVES_LIMIT, HELD_LIMIT = 6_000, 6_000  # of one rank in one step

Clock = Literal["ns", "tick"]


class Told(NamedTuple):
    """One rank's record, in the times of its own clock. `held`: (time, tier, state, bytes from then on)."""

    rank: int
    events: Sequence[Event]
    held: Sequence[tuple[int, str, str, int]]


def layout_json(
    partition: Partition, units: Sequence[str], along: Seat = ALONE, sits: Seat = ALONE, *, spread: bool = False
) -> dict[str, Any]:
    """Describe the layout of a model. `units`: their names, in the order of `Bucket.unit`.

    along: any rank's seat among those that have the same rows of some buckets. sits: its seat among all. spread: does
    each of several replicas update a part of a shard?
    """
    buckets: list[dict[str, Any]] = []
    slots: list[Any] = []
    for bucket in partition.buckets:
        shares = {bucket.shard_numel(rank) for rank in range(bucket.size)}
        cuts = {"share": shares.pop()} if len(shares) == 1 else {"bounds": list(bucket.bounds)}
        stride = along.grid.stride(along.axis)
        rows = {"size": bucket.size, "stride": stride, "parts": along.parts} if bucket.axis else {}
        updates = {"updates": _updates(bucket, sits)} if spread else {}
        dtype = bucket.dtype.removeprefix("torch.")
        rests = (E4M3, 1) if bucket.fp8 else (dtype, bucket.itemsize)
        computes = {"computes": dtype} if bucket.fp8 else {}
        first = len(slots)
        slots += [[slot.name, list(slot.shape), slot.start] for slot in bucket.slots]
        buckets.append(
            {
                "unit": bucket.unit, "dtype": rests[0], "itemsize": rests[1], "trainable": bucket.trainable,
                "numel": bucket.numel, "first": first, "last": len(slots), **cuts, **rows, **updates, **computes,
            }
        )  # fmt: skip
    return {
        "ranks": partition.ranks, "align": partition.align, "units": list(units), "buckets": buckets, "slots": slots
    }  # fmt: skip


def _updates(bucket: BucketPlan, sits: Seat) -> list[int]:
    """List where each replica's part of each shard begins, and the bucket's end."""
    positions = [sits._replace(position=position) for position in range(bucket.size)]
    return [first for each in positions for first, _ in bucket.portions(each)] + [bucket.numel]


def is_phase(event: Event) -> bool:
    """Tell whether an event is a phase of the training loop, not a unit's work and not a message."""
    return event.verb in PHASES and event.unit is None and event.bucket is None and not event.logical


def last_step(events: Sequence[Event]) -> tuple[int, int] | None:
    """Find (first, last + 1) time of the last whole step: its first forward or backward to its last optimizer's end.

    None where the record holds no optimizer step.
    """
    start = end = None
    found = None
    stepped = True
    for event in filter(is_phase, events):
        if event.verb == "step":
            if start is None:
                start = event.start
            stepped = True
            if event.end:
                end = event.end
                found = start, end
        elif event.verb in ("forward", "backward") and stepped:
            start, stepped = event.start, False
    return found


def began_before(record: Record, start: int) -> bool:
    """Tell whether the record reaches back to before `start`; when it is full it forgets its oldest notes."""
    forgot = len(record.events) == record.events.maxlen
    before = any(is_phase(event) and event.verb == "step" and event.start < start for event in record.events)
    states_known = len(record.held) < (record.held.maxlen or 0) or record.held[0][0] <= start
    return (before or not forgot) and states_known


def one_step(told: Told, span: tuple[int, int]) -> dict[str, Any]:
    """Return what happened within `span` on one rank: a `RankRecording` whose verbs, states and units are names."""
    start, stop = span
    within = [event for event in told.events if event.start < stop and (event.end or stop) > start]
    phases = [[e.verb, max(e.start, start), min(e.end or stop, stop)] for e in within if is_phase(e)]
    units = [[e.verb, e.unit, e.start, min(e.end or stop, stop)] for e in within if e.unit is not None and works(e)]
    moves = [_move(event, stop) for event in within if not is_phase(event) and not works(event)]
    held = _held_within(told.held, span)
    waited = sum(move[-1] for move, event in zip(moves, _moving(within), strict=True) if 0 < event.end <= stop)
    peak = peak_of(held, span, phases, units, moves)
    return {
        "rank": told.rank, "span": [start, stop], "phases": phases, "units": units, "moves": moves, "held": held,
        "peak": peak, "waited": waited,
    }  # fmt: skip


def works(event: Event) -> bool:
    return event.verb in WORK and event.bucket is None and event.unit is not None


def _moving(events: Sequence[Event]) -> Iterator[Event]:
    return (event for event in events if not is_phase(event) and not works(event))


def _move(event: Event, stop: int) -> list[Any]:
    end = event.end or stop
    waited = end - event.start if event.verb in STANDING else event.waited
    return [
        event.verb, event.state, -1 if event.bucket is None else event.bucket, event.unit, event.logical, event.sent,
        event.received, event.start, end, waited,
    ]  # fmt: skip


def _held_within(changes: Sequence[tuple[int, str, str, int]], span: tuple[int, int]) -> list[list[Any]]:
    """List the changes within the span, after what was held when it began."""
    before: dict[tuple[str, str], int] = {}
    inside: list[list[Any]] = []
    for at, tier, state, nbytes in changes:
        if at <= span[0]:
            before[tier, state] = nbytes
        elif at <= span[1]:
            inside.append([at, tier, state, nbytes])
    return [[span[0], *place, nbytes] for place, nbytes in before.items() if nbytes] + inside


def totals(held: Sequence[Sequence[Any]], tier: str = DEVICE) -> Iterator[tuple[int, int, int, dict[str, int]]]:
    """Yield (from, until, total, bytes by state) between a tier's changes; the dictionary is the same one, updated."""
    now: dict[str, int] = {}
    own = [(at, state, nbytes) for at, of, state, nbytes in held if of == tier]
    for number, (at, state, nbytes) in enumerate(own):
        now[state] = nbytes
        following = own[number + 1][0] if number + 1 < len(own) else at
        if following > at or number + 1 == len(own):
            yield at, following, sum(now.values()), now


def peak_of(
    held: Sequence[Sequence[Any]],
    span: tuple[int, int],
    phases: Sequence[Sequence[Any]],
    units: Sequence[Sequence[Any]],
    moves: Sequence[Sequence[Any]],
) -> dict[str, Any] | None:
    """Find the first moment at which the device held most, what it held, and what ran then; None without a record."""
    if not held:
        return None
    at, until, total, states = span[0], span[1], 0, dict[str, int]()
    for begins, ends, nbytes, now in totals(held):
        if nbytes > total:
            at, until, total, states = begins, ends, nbytes, {state: n for state, n in now.items() if n}
    # A message's memory is reserved at this moment and the message begins right after it, before the next change.
    after = max(until, at + 1)
    flying = [
        number for number, move in enumerate(moves) if move[0] in TRAVELS and move[7] < after and move[8] > at
    ]  # fmt: skip
    unit = next((u[1] for u in reversed(units) if u[2] <= at < u[3]), None)
    rests = {state: nbytes for state, nbytes in _least(held).items() if nbytes}
    passing = [state for state, nbytes in states.items() if nbytes > rests.get(state, 0)]
    here, ahead = _gathered(moves, at, after, states.get("gather", 0) - rests.get("gather", 0))
    reasons = {
        "gather": f"full weights of {_names(here)}" if here else "weights being gathered",
        "prefetch": f"weights sent ahead of their use: {_names(ahead)}" if ahead else "weights sent ahead of their use",
        "reduce": _reduced(held, moves, at, after, states.get("reduce", 0), rests.get("reduce", 0)),
        "staging": "buffers between the device and where a state rests",
        "staged activations": "buffers of the file in which activations rest",
        "norms": "the map from elements to parameters, for the norm of gradients",
        "upcast": "gradients in the masters' dtype",
        "cast": "masters that the host has stepped, and their cast",
    }
    return {
        "at": at, "total": total, "held": states, "rests": rests,
        "where": _where(at, phases) + (f", at {unit or 'the root'}" if unit is not None else ""),
        "why": {state: reasons.get(state, "made in this step") for state in passing}, "unit": unit, "flying": flying,
    }  # fmt: skip


def _where(at: int, phases: Sequence[Sequence[Any]]) -> str:
    """Name the phase at a time: `in backward`, or `between backward and step`."""
    inside = [phase for phase in phases if phase[1] <= at < phase[2]]
    if inside:
        return f"in {inside[-1][0]}"
    before = max((phase for phase in phases if phase[2] <= at), key=lambda phase: phase[2], default=None)
    after = min((phase for phase in phases if phase[1] > at), key=lambda phase: phase[1], default=None)
    if before and after:
        return f"between {before[0]} and {after[0]}"
    return f"after {before[0]}" if before else f"before {after[0]}" if after else "in the step"


def _least(held: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Return the bytes of each state that are there all the time."""
    least: dict[str, int] = {}
    for _, _, _, now in totals(held):
        least = {state: min(nbytes, least.get(state, nbytes)) for state, nbytes in now.items()} if not least else {
            state: min(nbytes, now.get(state, 0)) for state, nbytes in least.items()
        }  # fmt: skip
    return least


def _gathered(moves: Sequence[Sequence[Any]], at: int, after: int, nbytes: int) -> tuple[list[str], list[str]]:
    """Return the units whose full weights make up the `nbytes` of "gather", and those sent ahead of their use.

    Units are used in the order of their gathers, so the first of them are in use, as far as these bytes reach.
    """
    found: dict[int, tuple[str, int]] = {}
    for verb, state, bucket, unit, logical, *_, start, _, _ in moves:
        if verb in ("gather", "broadcast") and state == "parameters" and start < after:
            found[bucket] = unit, logical
        elif verb == "release" and start <= at:
            found.pop(bucket, None)
    here: list[str] = []
    ahead: list[str] = []
    for unit, logical in found.values():
        (here if logical <= nbytes else ahead).append(unit)
        nbytes -= logical if logical <= nbytes else 0
    return list(dict.fromkeys(here)), list(dict.fromkeys(ahead))


def _reduced(
    held: Sequence[Sequence[Any]], moves: Sequence[Sequence[Any]], at: int, after: int, nbytes: int, rests: int
) -> str:
    """Say whose gradients the reductions' buffers hold. Those of a finished reduction are kept for reuse."""
    levels = [(when, now) for when, tier, state, now in held if tier == DEVICE and state == "reduce" and when <= at]
    since = max((when for when, now in levels if now <= rests), default=None)
    begun = [m for m in moves if m[0] == "reduce" and (since is None or m[7] > since) and m[7] < after]
    if not begun:
        return "gradients being put together"
    # Contributions have buffers beside the accumulator if the first reduction had room for all of it.
    taken = [(when, now - rests) for when, now in levels if since is None or when > since]
    first = next((m for m in begun if taken and m[7] > taken[0][0]), begun[0])
    apart = max((now for when, now in taken if when < first[7]), default=nbytes - rests) >= first[4]

    def needs(found: Sequence[Sequence[Any]]) -> int:
        return sum(move[6] + apart * move[4] for move in found)

    handing = [m for m in moves if m[0] == "relay" and m[7] < after and m[8] > at]
    flying, done = [m for m in begun if m[8] > at], [m for m in begun if m[8] <= at]
    words = [f"gradients of {_names([*dict.fromkeys(m[3] for m in flying)])} on their way"] if flying else []
    if handing:
        words.append(
            f"running sums of {_names([*dict.fromkeys(m[3] for m in handing)])} on their way through the replicas"
        )
    left = nbytes - rests - needs(flying) - sum(move[4] for move in handing)
    if left > 0 and left == needs(done):
        # the rest is exactly the size of the finished ones' buffers
        words.append(f"buffers of {_names([*dict.fromkeys(m[3] for m in done)])}, kept for reuse")
    elif left > 0:
        words.append("other buffers, kept for reuse or being filled" if done else "the next being put together")
    return "; ".join(words) or "gradients being put together"


def _names(units: Sequence[str]) -> str:
    shown = [unit or "the root" for unit in units[:3]]
    return ", ".join(shown) + (f" and {len(units) - 3} more" if len(units) > 3 else "")


# ------------------------------------------------------------------------------------------------------ kept small


def shorten(recording: dict[str, Any]) -> list[str]:
    """Shorten one rank's recording in place to a size that a page scrolls through; return in words what went."""
    notes = []
    moves = recording["moves"]
    if len(moves) > MOVES_LIMIT:
        keep = list(range(len(moves)))
        for verb in SPARE:
            if len(keep) > MOVES_LIMIT:
                keep = [number for number in keep if moves[number][0] != verb]
        keep = sorted(sorted(keep, key=lambda number: -moves[number][4])[:MOVES_LIMIT])
        place = {old: new for new, old in enumerate(keep)}
        recording["moves"] = [moves[number] for number in keep]
        recording["peak"]["flying"] = [place[number] for number in recording["peak"]["flying"] if number in place]
        notes.append(f"{len(moves) - len(keep):,} of {len(moves):,} messages and copies of a rank are left out")
    if len(recording["held"]) > HELD_LIMIT:
        before = len(recording["held"])
        recording["held"] = thinned(recording["held"], HELD_LIMIT)
        notes.append(f"{before - len(recording['held']):,} of {before:,} changes of what a rank held are left out")
    return notes


def thinned(held: Sequence[Sequence[Any]], limit: int) -> list[list[Any]]:
    """Leave out changes: of each stretch of time each tier's fullest moment stays, so its highest of all does too."""
    places = len({(tier, state) for _, tier, state, _ in held})
    stretches = max(1, limit // (2 * places))
    first, last = held[0][0], held[-1][0]
    width = max(1, -(-(last - first + 1) // stretches))
    kept: list[list[Any]] = []
    for tier in dict.fromkeys(change[1] for change in held):
        fullest: dict[int, tuple[int, int, dict[str, int]]] = {}
        for at, _, total, now in totals(held, tier):
            stretch = (at - first) // width
            if stretch not in fullest or total > fullest[stretch][1]:
                fullest[stretch] = at, total, dict(now)
        before: dict[str, int] = {}
        for at, _, now in fullest.values():
            kept += [[at, tier, state, nbytes] for state, nbytes in now.items() if nbytes != before.get(state, 0)]
            before = now
    return sorted(kept, key=lambda change: change[0])


# ------------------------------------------------------------------------------------------------------ all ranks


def together(
    ranks: Sequence[dict[str, Any]], units: Sequence[str], *, clock: Clock, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Make a `Recording` of several ranks' steps: names become indices, and the first rank begins at 0."""
    index = {name: number for number, name in enumerate(units)}
    verbs = _table(move[0] for rank in ranks for move in itertools.chain(rank["moves"], rank["units"]))
    tiers = _table(change[1] for rank in ranks for change in rank["held"])
    states = _table(
        itertools.chain(
            (change[2] for rank in ranks for change in rank["held"]),
            (move[1] for rank in ranks for move in rank["moves"]),
        )
    )
    # Clocks of different processes begin anywhere; `shift` brings them together.
    shift = {rank["rank"]: rank.get("shift", 0) for rank in ranks}
    origin = min((rank["span"][0] + shift[rank["rank"]] for rank in ranks), default=0)

    def place(name: str | None) -> int:
        return -1 if name is None else index.get(name, -1)

    def of_one(rank: dict[str, Any]) -> dict[str, Any]:
        since = origin - shift[rank["rank"]]
        peak = rank["peak"]
        return {
            "rank": rank["rank"],
            "span": [at - since for at in rank["span"]],
            "phases": [[name, start - since, end - since] for name, start, end in rank["phases"]],
            "units": [[verbs[verb], place(unit), at - since, end - since] for verb, unit, at, end in rank["units"]],
            "moves": [
                [verbs[verb], states[state], bucket, place(unit), *nbytes, start - since, end - since,
                 waited if clock == "ns" else 0]
                for verb, state, bucket, unit, *nbytes, start, end, waited in rank["moves"]
            ],
            "held": [[at - since, tiers[tier], states[state], nbytes] for at, tier, state, nbytes in rank["held"]],
            "peak": None if peak is None else {**peak, "at": peak["at"] - since, "unit": place(peak["unit"])},
            "waited": rank["waited"] if clock == "ns" else 0,
        }  # fmt: skip

    return {
        "clock": clock, "verbs": list(verbs), "tiers": list(tiers), "states": list(states),
        "ranks": [of_one(rank) for rank in ranks], "note": "; ".join(dict.fromkeys(notes)) or None,
    }  # fmt: skip


def _table(names: Iterator[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def traffic_of(moves: Sequence[Sequence[Any]], start: int) -> list[dict[str, Any]]:
    """Add up what one rank's step moved, by verb, agreements included; only `moves` that began at `start` or later."""
    sums: dict[str, dict[str, Any]] = {}
    for verb, _, _, _, logical, sent, received, began, *_ in moves:
        if began >= start and verb in (*TRAVELS, "control"):
            row = sums.setdefault(verb, {"verb": verb, "calls": 0, "logical": 0, "sent": 0, "sent_and_received": 0})
            for key, nbytes in (("calls", 1), ("logical", logical), ("sent", sent)):
                row[key] += nbytes
            row["sent_and_received"] += sent + received
    return list(sums.values())
