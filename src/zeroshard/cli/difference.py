"""`zeroshard ckpt diff`: the differences of two checkpoints, bit for bit, however sharded; a block at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from rich.markup import escape
from torch import Tensor

from zeroshard.checkpoint.dtypes import DTYPES
from zeroshard.checkpoint.files import BLOCK
from zeroshard.checkpoint.manifest import VALUE, Saved, Stored, by_number, numel
from zeroshard.cli import launch, screen
from zeroshard.cli.checkpoints import leaves, open_checkpoint
from zeroshard.cli.working import Working

SHOWN = 40  # rows of the table; --json has all
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Row(NamedTuple):
    """One difference. a, b: the two sides in words, None on a side that lacks it.

    For tensors whose elements were compared: how many differ, of how many; the largest distance of two finite ones; and
    how many pairs have no distance, because one or both are not finite.
    """

    what: str  # parameter, state, buffer, optimizer, extra, seed
    name: str
    a: Any = None
    b: Any = None
    differing: int | None = None
    numel: int | None = None
    largest: float | None = None
    not_finite: int | None = None


def diff(path: str, other: str, *, as_json: bool) -> int:
    """Print the differences; return exit code 0 where there are none, else 1."""
    with ExitStack() as stack:
        stack.enter_context(Working(("comparing checkpoints", None), lines=not as_json))
        a, b = (stack.enter_context(open_checkpoint(each)) for each in (path, other))
        rows = list(compare(a, b))
        compared = sum(numel(told.shape) for told in a.parameters.values())
    if as_json:
        told = {"a": path, "b": other, "equal": not rows, "differences": [row._asdict() for row in rows]}
        print(json.dumps(told, indent=2))
    elif rows:
        _show(path, other, rows)
    else:
        screen.say(
            f"[bold green]equal, bit for bit:[/bold green] {compared:,} parameters, what optimizers keep of them, "
            f"buffers, options, and what was saved along"
        )
    return launch.FAILED if rows else 0


def compare(a: Saved, b: Saved) -> Iterator[Row]:
    """Yield every difference but what wrote the checkpoints and when, and each rank's random states."""
    if a.manifest["seed"] != b.manifest["seed"]:
        yield Row("seed", "seed", a.manifest["seed"], b.manifest["seed"])
    for name in sorted({*a.parameters, *b.parameters}, key=by_number):
        mine, theirs = a.parameters.get(name), b.parameters.get(name)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            yield Row("parameter", name, mine and _words(mine), theirs and _words(theirs))
            continue
        if mine.dtype != theirs.dtype:
            yield Row("parameter", name, _words(mine), _words(theirs))
        if sorted(mine.names) != sorted(theirs.names):
            yield Row("parameter", name, " = ".join(mine.names), " = ".join(theirs.names))
        for state in dict.fromkeys([VALUE, *a.states.get(name, ()), *b.states.get(name, ())]):
            yield from _states(a, b, name, state)
    for name in dict.fromkeys([*a.buffers, *b.buffers]):
        yield from _tensors("buffer", name, a, a.buffers.get(name), b, b.buffers.get(name))
    for name in dict.fromkeys([*a.differing, *b.differing]):  # the others' than rank 0's
        for rank in range(1, max(len(a.differing.get(name, ())), len(b.differing.get(name, ())))):
            here, there = (each.buffer(name, rank) if rank < each.manifest["ranks"] else None for each in (a, b))
            if here is not None or there is not None:
                yield from _tensors("buffer", f"{name} of rank {rank}", a, here, b, there)
    yield from _named("optimizer", dict(_options(a)), dict(_options(b)))
    yield from _named("extra", dict(leaves(a)), dict(leaves(b)))
    for name in a.extra.keys() & b.extra.keys():
        yield from _tensors("extra", name, a, a.extra[name], b, b.extra[name])


def _words(tensor: Any) -> str:
    return f"{' x '.join(map(str, tensor.shape)) or 'one'} {DTYPES[tensor.dtype]}"


def _states(a: Saved, b: Saved, name: str, state: str) -> Iterator[Row]:
    key = name, state
    what, name = ("parameter", name) if state == VALUE else ("state", f"{name} {state}")
    if key in a.cut and key in b.cut:
        mine, theirs = DTYPES[a.dtypes[key]], DTYPES[b.dtypes[key]]
        found = _count(_intervals(a, b, key))
        if found.differing or mine != theirs:
            yield Row(what, name, mine, theirs, *found)
    elif key in a.whole and key in b.whole:
        yield from _tensors(what, name, a, a.whole[key], b, b.whole[key])
    elif repr(_kind(a, key)) != repr(_kind(b, key)):
        yield Row(what, name, _kind(a, key), _kind(b, key))


def _kind(saved: Saved, key: tuple[str, str]) -> Any:
    """Describe one side of a state whose two sides are of different kinds; None where it has none."""
    if key in saved.cut:
        grain = saved.grains.get(key, 1)
        return f"a number per {'element' if grain == 1 else f'{grain} elements'}, {DTYPES[saved.dtypes[key]]}"
    return _words(saved.whole[key]) if key in saved.whole else saved.values.get(key)


def _intervals(a: Saved, b: Saved, key: tuple[str, str]) -> Iterator[tuple[Tensor, Tensor]]:
    count, each = a.cut[key][-1].stop, BLOCK // 8
    for start in range(0, count, each):
        stop = min(start + each, count)
        yield a.interval(key, start, stop), b.interval(key, start, stop)


def _tensors(what: str, name: str, a: Saved, mine: Stored | None, b: Saved, theirs: Stored | None) -> Iterator[Row]:
    if mine is None or theirs is None or (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        yield Row(what, name, mine and _words(mine), theirs and _words(theirs))
        return
    found = _count((x, y) for (_, x), (_, y) in zip(a.blocks(mine), b.blocks(theirs), strict=True))
    if found.differing:
        yield Row(what, name, DTYPES[mine.dtype], DTYPES[theirs.dtype], *found)


class Found(NamedTuple):
    differing: int
    numel: int
    largest: float | None
    not_finite: int


def _count(pairs: Iterator[tuple[Tensor, Tensor]]) -> Found:
    differing = count = not_finite = 0
    largest: float | None = None
    for x, y in pairs:
        count += x.numel()
        if x.dtype == y.dtype:
            other = x.view(BITS[x.itemsize]) != y.view(BITS[y.itemsize])
        else:
            other = (x.double() != y.double()) & ~(x.isnan() & y.isnan())
        if number := int(other.sum()):
            differing += number
            wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
            distance = (x[other].to(wide) - y[other].to(wide)).abs()
            finite = distance[distance.isfinite()]
            not_finite += number - finite.numel()
            if finite.numel():
                largest = max(largest or 0.0, float(finite.max()))
    return Found(differing, count, largest, not_finite)


def _options(saved: Saved) -> Iterator[tuple[str, Any]]:
    for number, told in enumerate(saved.manifest["optimizers"]):
        yield f"optimizer {number}", told["class"]
        for at, group in enumerate(told["groups"]):
            yield f"optimizer {number}, group {at}: parameters", sorted(group["parameters"])
            for key, value in group["options"].items():
                yield f"optimizer {number}, group {at}: {key}", value


def _named(what: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Row]:
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b or repr(a[name]) != repr(b[name]):  # repr: 1 is not 1.0, nor -0.0 0.0
            yield Row(what, name, a.get(name), b.get(name))


def _show(path: str, other: str, rows: list[Row]) -> None:
    table = screen.new_table("Differences", "what", "name", "a", "b", "differing", "of", "largest", "not finite")
    for row in rows[:SHOWN]:
        numbers = [row.differing, row.numel, row.largest, row.not_finite]
        cells = [
            "" if number is None else f"{number:,}" if type(number) is int else f"{number:.6g}" for number in numbers
        ]
        name, *sides = (escape(screen.shown(each)) for each in (row.name, _side(row.a), _side(row.b)))
        table.add_row(row.what, name, *sides, *cells)
    screen.opening(
        f"[red]{len(rows)} difference{'s' * (len(rows) != 1)}[/red]",
        {"a": escape(screen.shown(path)), "b": escape(screen.shown(other))},
    )
    screen.wide(table)
    if len(rows) > SHOWN:
        screen.say(f"  [dim]and {len(rows) - SHOWN} more in --json[/dim]")


def _side(side: Any) -> str:
    text = "nothing" if side is None else str(side)
    return text if len(text) <= 60 else text[:57] + "..."
