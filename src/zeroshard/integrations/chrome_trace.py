"""The record of a run as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per rank. Its first track holds what the rank computes: phases, and in them the units; slices nest. What
travels meanwhile (gathers, reductions, agreements) overlaps, so it is drawn as asynchronous slices, and what is held as
a counter of all states for each tier.

Times count from where torch's profiler (Kineto) counts from, so that both files lie on one axis.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any

from ..checkpoint.staging import put
from ..events import Event, Record

BASE = (
    7_889_238 * 10**9
)  # nanoseconds: Kineto counts from the last whole multiple, three months of the Gregorian calendar
MADE_BY = '"made_by": "zeroshard"'  # tells a trace, which may be replaced, from other files


def facts(record: Record, events: Sequence[Event]) -> dict[str, Any]:
    """Return one rank's part of the trace, JSON-able; times in nanoseconds of the wall clock, which machines share."""
    wall = time.time_ns() - time.perf_counter_ns()
    now = time.perf_counter_ns()
    return {
        "events": [
            [e.verb, e.state, e.unit, e.bucket, e.logical, e.sent, e.received, wall + e.start, wall + (e.end or now)]
            for e in events
        ],
        "held": [[wall + at, tier, state, nbytes] for at, tier, state, nbytes in record.held],
    }


def chrome(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the trace of all ranks' facts, in rank order. Its times are microseconds since `baseTimeNanoseconds`."""
    first = min((event[7] for rank in ranks for event in rank["events"]), default=0)
    origin = first // BASE * BASE
    out: list[dict[str, Any]] = []
    for rank, told in enumerate(ranks):
        out.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "computes"}})
        for number, (verb, state, unit, bucket, logical, sent, received, start, end) in enumerate(told["events"]):
            place = "" if unit is None else f" {unit or 'root'}"
            common = {"name": f"{verb}{place}", "cat": verb, "pid": rank, "tid": 0, "ts": (start - origin) / 1000}
            if not logical:
                out.append(common | {"ph": "X", "dur": (end - start) / 1000})
                continue
            args = {"state": state, "bucket": bucket, "logical": logical, "sent": sent, "received": received}
            if verb == "release":
                out.append(common | {"ph": "i", "s": "t", "args": args})
                continue
            common["id"] = f"{rank}.{number}"
            out.append(common | {"ph": "b", "args": args})
            out.append(common | {"ph": "e", "ts": (end - origin) / 1000})
        held: dict[str, dict[str, int]] = {}
        for at, tier, state, nbytes in told["held"]:
            held.setdefault(tier, {})[state] = nbytes
            if at >= first:
                counter = {"ph": "C", "name": f"bytes held, {tier}", "pid": rank, "ts": (at - origin) / 1000}
                out.append(counter | {"args": dict(held[tier])})
    about = {"otherData": {"made_by": "zeroshard"}, "baseTimeNanoseconds": origin, "displayTimeUnit": "ms"}
    return about | {"traceEvents": out}


def write(path: str | os.PathLike[str], ranks: Sequence[dict[str, Any]]) -> None:
    """Write the trace beside `path` and put it there by one rename. Only an earlier trace is replaced."""
    put(path, json.dumps(chrome(ranks)), MADE_BY)
