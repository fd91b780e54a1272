"""The shape that a recorded step must have before it is used: names, numbers and lists where they belong."""

from __future__ import annotations

from typing import Any

from ..errors import UserError


class Maybe:
    """A kind of value that may be None."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


class Row:
    """A list of exactly these kinds."""

    def __init__(self, *kinds: Any) -> None:
        self.kinds = kinds


class Each:
    """A dictionary of any keys, whose values are of one kind."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


NUMBER = (int, float)
HELD = Each(int)
MOVE = Row(*[int] * 10)
RUN = {
    "title": str,
    "stage": int,
    "ranks": int,
    "placements": {"parameters": bool, "gradients": bool, "optimizer": bool},
    "numel": int,
    "facts": Each((str, *NUMBER)),
    "dtypes": [{"parameters": str, "gradients": str, "master": str, "buckets": int}],
    "layout": {
        "ranks": int,
        "align": int,
        "units": [str],
        "buckets": [
            {"unit": int, "dtype": str, "itemsize": int, "trainable": bool, "numel": int, "first": int, "last": int}
        ],
        "slots": [Row(str, [int], int)],
    },
    "groups": [{"axis": str, "buckets": int, "numel": int, "teams": [[int]], "rows": bool, "spread": bool}],
    "summary": [
        {
            "rank": int, "numel": int, "held": HELD, "predicted": Maybe(HELD), "most": HELD, "tiers": Each(HELD),
            "phases": Each({"total": int, "held": HELD}), "step": Maybe(int), "waited": Maybe(int), "peak": Maybe(int),
        }
    ],
    "recording": Maybe(
        {
            "clock": str,
            "verbs": [str],
            "tiers": [str],
            "states": [str],
            "ranks": [
                {
                    "rank": int, "span": Row(int, int), "phases": [Row(str, int, int)],
                    "units": [Row(int, int, int, int)], "moves": [MOVE],
                    "held": [Row(int, int, int, int)], "waited": int,
                    "peak": Maybe(
                        {"at": int, "total": int, "held": HELD, "rests": HELD, "where": str, "why": Each(str),
                         "unit": int, "flying": [int]}
                    ),
                }
            ],
            "note": Maybe(str),
        }
    ),
    "traffic": [{"verb": str, "calls": int, "logical": int, "sent": int, "sent_and_received": int}],
}  # fmt: skip


def check(found: Any, where: str, form: str, version: int) -> None:
    """Raise `UserError` unless `found` is {"format", "version", "run"} and the run looks like one."""
    if not isinstance(found, dict) or found.get("format") != form:
        raise UserError("this is not a recorded step", where=where, expected=f'"format": "{form}"')
    if found.get("version") != version:
        raise UserError(
            "a recorded step of another version",
            where=where,
            expected=f"version {version}",
            got=repr(found.get("version")),
            instead="the version of zeroshard that wrote it",
        )
    problem = _problem(found.get("run"), RUN, "run") or _loose_end(found["run"])
    if problem:
        raise UserError("this is not a recorded step", where=where, got=problem)


def _problem(value: Any, kind: Any, path: str) -> str | None:
    """Say what is wrong with a value and where; None if it has its kind's shape."""
    if isinstance(kind, Maybe):
        return None if value is None else _problem(value, kind.kind, path)
    if isinstance(kind, (dict, Each)):
        if not isinstance(value, dict):
            return f"{path} is no object"
        parts = [(key, kind.kind) for key in value] if isinstance(kind, Each) else list(kind.items())
        return next(
            filter(None, (_problem(value.get(key, Maybe), inner, f"{path}.{key}") for key, inner in parts)), None
        )
    if isinstance(kind, (list, Row)):
        if not isinstance(value, list):
            return f"{path} is no list"
        if isinstance(kind, Row) and len(kind.kinds) != len(value):
            return f"{path} has {len(value)} entries, not {len(kind.kinds)}"
        kinds = kind.kinds if isinstance(kind, Row) else kind * len(value)
        inside = enumerate(zip(value, kinds, strict=True))
        return next(filter(None, (_problem(one, inner, f"{path}[{at}]") for at, (one, inner) in inside)), None)
    types = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in types:
        return f"{path} is no {' or '.join(one.__name__ for one in types)}"
    return None


def _loose_end(run: dict[str, Any]) -> str | None:
    """Name an index that points at nothing, or a cut that does not add up; None if there is none."""
    layout, recording = run["layout"], run["recording"]
    units, buckets, slots = (len(layout[part]) for part in ("units", "buckets", "slots"))
    size = layout["ranks"]  # of a team; with several replicas there are as many teams
    if size < 1 or run["ranks"] % size or [one["rank"] for one in run["summary"]] != list(range(run["ranks"])):
        return "run.summary has no row for each rank"
    for at, bucket in enumerate(layout["buckets"]):
        size = bucket.get("size", layout["ranks"])
        if not all(type(bucket.get(key, 1)) is int and bucket.get(key, 1) > 0 for key in ("size", "stride", "parts")):
            return f"run.layout.buckets[{at}] is of no team"
        even = type(bucket.get("share")) is int and bucket["share"] * size == bucket["numel"]
        bounds = bucket.get("bounds", [])
        cut = _problem(bounds, Row(*[int] * (size + 1)), "") is None and bounds[-1] == bucket["numel"]
        if not (even or cut):
            return f"run.layout.buckets[{at}] is not cut into {size} shards"
        updates = bucket.get("updates", [0, bucket["numel"]])
        if _problem(updates, [int], "") or not updates or updates[-1] != bucket["numel"]:
            return f"run.layout.buckets[{at}] is not updated in parts of it"
        if _problem(bucket.get("rests", {}), Each(str), ""):
            return f"run.layout.buckets[{at}] rests in no tier"
        if not (0 <= bucket["unit"] < units and 0 <= bucket["first"] <= bucket["last"] <= slots):
            return f"run.layout.buckets[{at}] names a unit or slots that are not there"
    for at, group in enumerate(run["groups"]):
        if sorted(rank for team in group["teams"] for rank in team) != list(range(run["ranks"])):
            return f"run.groups[{at}] has not every rank in one of its teams"
    tables = () if recording is None else tuple(len(recording[part]) for part in ("verbs", "states", "tiers"))
    limits = (buckets, units, *tables)
    for number, rank in enumerate(recording["ranks"] if recording else ()):
        path = f"run.recording.ranks[{number}]"
        rows = [((m[2], m[3], m[0], m[1], 0), f"{path}.moves[{at}]") for at, m in enumerate(rank["moves"])]
        rows += [((-1, u[1], u[0], 0, 0), f"{path}.units[{at}]") for at, u in enumerate(rank["units"])]
        rows += [((-1, -1, 0, h[2], h[1]), f"{path}.held[{at}]") for at, h in enumerate(rank["held"])]
        for indices, where in rows:
            if not all(
                least <= index < most for index, most, least in zip(indices, limits, (-1, -1, 0, 0, 0), strict=True)
            ):
                return f"{where} names what is not there"
        if rank["peak"] and not all(0 <= move < len(rank["moves"]) for move in rank["peak"]["flying"]):
            return f"{path}.peak.flying names what is not there"
    return None
