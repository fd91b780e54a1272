"""One recorded step of one rank, as the page shows it: what was held, what moved, and why the peak is where it is.

Everything here is JSON-able and in the words of `web/DATA.md`. Times are those of the record's clock until `together`
puts the ranks side by side and lets the first of them begin at 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..events import Event, Record
from ..layout import Partition

PHASES = ("forward", "backward", "reduce", "step", "gather", "save", "export")
WORK = ("forward", "recompute", "backward")  # what a unit does
STANDING = ("control", "broadcast")  # nobody goes on before these are through
TRAVELS = ("gather", "reduce", "broadcast")
SPARE = ("copy", "control", "release")  # what a record that is too long does without, in this order
MOVES_LIMIT, HELD_LIMIT = 6_000, 6_000  # of one rank in one step

Clock = Literal["ns", "tick"]


class Told(NamedTuple):
    """What one rank recorded, in its own times. `held`: (time, state, bytes from then on)."""

    rank: int
    events: Sequence[Event]
    held: Sequence[tuple[int, str, int]]


def layout_json(partition: Partition, units: Sequence[str]) -> dict[str, Any]:
    """The layout of a model. `units`: their names, in the order of `Bucket.unit`."""
    buckets: list[dict[str, Any]] = []
    slots: list[Any] = []
    for bucket in partition.buckets:
        shares = {bucket.shard_numel(rank) for rank in range(partition.ranks)}
        cuts = {"share": shares.pop()} if len(shares) == 1 else {"bounds": list(bucket.bounds)}
        first = len(slots)
        slots += [[slot.name, list(slot.shape), slot.start] for slot in bucket.slots]
        buckets.append(
            {
                "unit": bucket.unit, "dtype": bucket.dtype.removeprefix("torch."), "itemsize": bucket.itemsize,
                "trainable": bucket.trainable, "numel": bucket.numel, "first": first, "last": len(slots), **cuts,
            }
        )  # fmt: skip
    return {
        "ranks": partition.ranks, "align": partition.align, "units": list(units), "buckets": buckets, "slots": slots
    }  # fmt: skip


def is_phase(event: Event) -> bool:
    """What the loop does, beside what a unit does and what moves."""
    return event.verb in PHASES and event.unit is None and event.bucket is None and not event.logical


def last_step(events: Sequence[Event]) -> tuple[int, int] | None:
    """(first, last + 1) time of the last whole step: from its first forward or backward to its last optimizer's end.

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
    """Does the record reach back to the step that starts then? It forgets the oldest of what is more than it keeps."""
    forgot = len(record.events) == record.events.maxlen
    before = any(is_phase(event) and event.verb == "step" and event.start < start for event in record.events)
    states_known = len(record.held) < (record.held.maxlen or 0) or record.held[0][0] <= start
    return (before or not forgot) and states_known


def one_step(told: Told, span: tuple[int, int]) -> dict[str, Any]:
    """What happened within `span` on one rank: a `RankRecording` whose verbs, states and units are names."""
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


def _held_within(changes: Sequence[tuple[int, str, int]], span: tuple[int, int]) -> list[list[Any]]:
    """The changes within the span, after what was held when it began."""
    before: dict[str, int] = {}
    inside: list[list[Any]] = []
    for at, state, nbytes in changes:
        if at <= span[0]:
            before[state] = nbytes
        elif at <= span[1]:
            inside.append([at, state, nbytes])
    return [[span[0], state, nbytes] for state, nbytes in before.items() if nbytes] + inside


def totals(held: Sequence[Sequence[Any]]) -> Iterator[tuple[int, int, int, dict[str, int]]]:
    """(from, until, total, bytes by state) between changes; the dictionary is one that goes on changing."""
    now: dict[str, int] = {}
    for number, (at, state, nbytes) in enumerate(held):
        now[state] = nbytes
        following = held[number + 1][0] if number + 1 < len(held) else at
        if following > at or number + 1 == len(held):
            yield at, following, sum(now.values()), now


def peak_of(
    held: Sequence[Sequence[Any]],
    span: tuple[int, int],
    phases: Sequence[Sequence[Any]],
    units: Sequence[Sequence[Any]],
    moves: Sequence[Sequence[Any]],
) -> dict[str, Any] | None:
    """The first moment at which most was held, what it was made of, and what was going on; None without a record."""
    most: tuple[int, int, int, dict[str, int]] | None = None
    for at, until, total, now in totals(held):
        if most is None or total > most[2]:
            most = at, until, total, {state: nbytes for state, nbytes in now.items() if nbytes}
    if most is None:
        return None
    at, until, total, states = most
    least = _least(held)
    phase = next((p[0] for p in reversed(phases) if p[1] <= at < p[2]), "between")
    unit = next((u[1] for u in reversed(units) if u[2] <= at < u[3]), None)
    # What is being reserved at this moment begins to move right after it, before anything else is held.
    flying = [
        number
        for number, move in enumerate(moves)
        if move[0] in TRAVELS and move[7] < max(until, at + 1) and move[8] > at
    ]
    gathered = _gathered(moves, at, until)
    return {
        "at": at, "total": total, "held": states, "phase": phase, "unit": unit, "flying": flying,
        "says": _why(states, least, phase, unit, gathered, [moves[number] for number in flying]),
    }  # fmt: skip


def _least(held: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Bytes of each state that are there all the time."""
    least: dict[str, int] = {}
    for _, _, _, now in totals(held):
        least = {state: min(nbytes, least.get(state, nbytes)) for state, nbytes in now.items()} if not least else {
            state: min(nbytes, now.get(state, 0)) for state, nbytes in least.items()
        }  # fmt: skip
    return least


def _gathered(moves: Sequence[Sequence[Any]], at: int, until: int) -> list[str]:
    """Units whose gathered weights are here then, as far as the record tells."""
    here: dict[int, str] = {}
    for verb, state, bucket, unit, *_, start, _, _ in moves:
        if verb == "gather" and state == "parameters" and start < max(until, at + 1):
            here[bucket] = unit
        elif verb == "release" and start <= at:
            here.pop(bucket, None)
    return list(dict.fromkeys(here.values()))


def _why(
    states: Mapping[str, int],
    least: Mapping[str, int],
    phase: str,
    unit: str | None,
    gathered: Sequence[str],
    flying: Sequence[Sequence[Any]],
) -> list[str]:
    place = f" at {unit or 'the root'}" if unit is not None else ""
    says = [f"Most is held in {phase}{place}: {sum(states.values()):,} bytes."]
    rests = {state: nbytes for state, nbytes in least.items() if nbytes}
    if rests:
        parts = ", ".join(f"{state} {nbytes:,}" for state, nbytes in rests.items())
        says.append(f"{sum(rests.values()):,} of them are there all the time: {parts}.")
    passing = {state: n - least.get(state, 0) for state, n in states.items() if n > least.get(state, 0)}
    for state, nbytes in sorted(passing.items(), key=lambda item: -item[1]):
        says.append(f"{nbytes:,} pass through as {state}{_as_what(state, gathered, flying)}.")
    return says


def _as_what(state: str, gathered: Sequence[str], flying: Sequence[Sequence[Any]]) -> str:
    if state in ("gather", "prefetch") and gathered:
        ahead = ", or ahead of its use" if state == "prefetch" else ""
        return f": full weights of {_names(gathered)}{ahead}"
    if state == "reduce":
        under_way = list(dict.fromkeys(move[3] for move in flying if move[0] == "reduce"))
        return f": gradients on their way, {_names(under_way)}" if under_way else ": gradients being put together"
    return ""


def _names(units: Sequence[str]) -> str:
    shown = [unit or "the root" for unit in units[:3]]
    return ", ".join(shown) + (f" and {len(units) - 3} more" if len(units) > 3 else "")


# ------------------------------------------------------------------------------------------------------ kept small


def shorten(recording: dict[str, Any]) -> list[str]:
    """Bring one rank's recording down to a size that a page scrolls through; says what went."""
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
    """Fewer changes. Of each stretch of time the fullest moment stays, and so does the highest of all."""
    states = len({state for _, state, _ in held})
    stretches = max(1, limit // (2 * states))
    first, last = held[0][0], held[-1][0]
    width = max(1, -(-(last - first + 1) // stretches))
    fullest: dict[int, tuple[int, int, dict[str, int]]] = {}
    for at, _, total, now in totals(held):
        stretch = (at - first) // width
        if stretch not in fullest or total > fullest[stretch][1]:
            fullest[stretch] = at, total, dict(now)
    kept: list[list[Any]] = []
    before: dict[str, int] = {}
    for at, _, now in fullest.values():
        kept += [[at, state, nbytes] for state, nbytes in now.items() if nbytes != before.get(state, 0)]
        before = now
    return kept


# ------------------------------------------------------------------------------------------------------ all ranks


def together(
    ranks: Sequence[dict[str, Any]], units: Sequence[str], *, clock: Clock, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """A `Recording` of several ranks' steps: names become indices, and the first rank begins at 0."""
    index = {name: number for number, name in enumerate(units)}
    verbs = _table(move[0] for rank in ranks for move in itertools.chain(rank["moves"], rank["units"]))
    states = _table(
        itertools.chain(
            (change[1] for rank in ranks for change in rank["held"]),
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
            "held": [[at - since, states[state], nbytes] for at, state, nbytes in rank["held"]],
            "peak": None if peak is None else {**peak, "at": peak["at"] - since, "unit": place(peak["unit"])},
            "waited": rank["waited"] if clock == "ns" else 0,
        }  # fmt: skip

    return {
        "clock": clock, "verbs": list(verbs), "states": list(states), "ranks": [of_one(rank) for rank in ranks],
        "note": "; ".join(dict.fromkeys(notes)) or None,
    }  # fmt: skip


def _table(names: Iterator[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def traffic_of(moves: Sequence[Sequence[Any]], start: int) -> list[dict[str, Any]]:
    """What one rank's step moved, by verb; of `moves` only those that began in it, and agreements too."""
    sums: dict[str, dict[str, Any]] = {}
    for verb, _, _, _, logical, sent, received, began, *_ in moves:
        if began >= start and verb in (*TRAVELS, "control"):
            row = sums.setdefault(verb, {"verb": verb, "calls": 0, "logical": 0, "sent": 0, "sent_and_received": 0})
            for key, nbytes in (("calls", 1), ("logical", logical), ("sent", sent)):
                row[key] += nbytes
            row["sent_and_received"] += sent + received
    return list(sums.values())
