"""Experts that are modules in a list, saved by so many groups of ranks and loaded by another number of them.

A rank of EP has E/EP modules in its list, named 0, 1, ...: module i of the ranks of ep coordinate p is expert
p * E/EP + i. So a name stands for one expert of each coordinate, and its parts lie one after the other. At another EP
the same experts have other names and places: this module maps the places in a checkpoint to the running model's
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import CheckpointError
from ..layout.shard_dim import ONE_STRIP
from .manifest import AVERAGE, VALUE, Parameter, Saved, Stored, numel

Stem = tuple[str, str]  # the text before a number in a name, and after it


class Here(NamedTuple):
    """A parameter along an axis, as the running model has it: its shape with all parts, and how many these are."""

    shape: tuple[int, ...]
    parts: int


def relist(saved: Saved, running: Mapping[str, Here]) -> None:
    """Rename saved lists of experts to the names of `running`, if another number of groups has saved them."""
    theirs, mine = _lists(saved.parameters), _lists(running)
    for stem in mine.keys() & theirs.keys():
        here, there = [running[name] for name in mine[stem]], [saved.parameters[name] for name in theirs[stem]]
        if len(here) != len(there) and _same_experts(here, there):
            _rename(saved, theirs[stem], mine[stem], here[0])


def _lists(names: Iterable[str]) -> dict[Stem, list[str]]:
    """Return lists of names that differ by one number alone, if these numbers are 0, 1, ...; in that order."""
    found: dict[Stem, dict[int, str]] = {}
    for name in names:
        words = name.split(".")
        for at, word in enumerate(words):
            if word.isdecimal() and word == str(int(word)):
                stem = ".".join(words[:at]), ".".join(words[at + 1 :])
                found.setdefault(stem, {})[int(word)] = name
    return {
        stem: [numbered[at] for at in range(len(numbered))]
        for stem, numbered in found.items()
        if numbered.keys() == set(range(len(numbered)))
    }


def _same_experts(here: Sequence[Here], there: Sequence[Parameter]) -> bool:
    """Tell if there are as many experts of one shape on both sides."""
    one, other = here[0], there[0]
    alike = all(each == one for each in here) and all(
        (each.shape, each.dtype, each.strips, len(each.names)) == (other.shape, other.dtype, ONE_STRIP, 1)
        for each in there
    )
    if not (alike and one.shape and other.shape and one.shape[1:] == other.shape[1:]):
        return False
    rows = one.shape[0] // one.parts
    return rows > 0 and other.shape[0] % rows == 0 and len(here) * one.shape[0] == len(there) * other.shape[0]


def _rename(saved: Saved, theirs: Sequence[str], mine: Sequence[str], here: Here) -> None:
    saved.everything()
    each, entry = numel(here.shape) // here.parts, saved.parameters[theirs[0]]
    cut: dict[tuple[str, str], list[Stored]] = {}
    beside: dict[str, dict[tuple[str, str], Any]] = {"whole": {}, "values": {}, "grains": {}, "computed": {}}
    for number, name in enumerate(mine):
        experts = [part * len(mine) + number for part in range(here.parts)]
        olds = [theirs[expert % len(theirs)] for expert in experts]
        for state in _states(saved, olds, name):
            keys = [(old, state) for old in olds]
            if keys[0] in saved.cut:
                grain = saved.grains.get(keys[0], 1)
                cut[name, state] = _moved(saved, keys, [expert // len(theirs) for expert in experts], each, grain)
                beside["grains"] |= {(name, state): grain} if grain > 1 else {}
                beside["computed"] |= {(name, state): saved.computed[keys[0]]} if keys[0] in saved.computed else {}
            else:
                kept = "whole" if keys[0] in saved.whole else "values"
                beside[kept][name, state] = getattr(saved, kept)[keys[0]]
    dtypes = {(name, state): parts[0].dtype for (name, state), parts in cut.items()}
    for table in (saved.cut, saved.dtypes, saved.whole, saved.values, saved.grains, saved.computed):
        for key in [key for key in table if key[0] in theirs]:
            del table[key]
    for old in theirs:
        del saved.parameters[old]
        saved.states.pop(old, None)
    saved.cut |= cut
    saved.dtypes |= dtypes
    saved.whole |= beside["whole"]
    saved.values |= beside["values"]
    saved.grains |= beside["grains"]
    saved.computed |= beside["computed"]
    for name in mine:
        saved.parameters[name] = Parameter(here.shape, entry.dtype, [name])
        if states := [state for state in _kept(saved, name) if state not in (VALUE, AVERAGE)]:
            saved.states[name] = states
    told = [_regrouped(saved, optimizer, set(theirs), mine) for optimizer in saved.manifest["optimizers"]]
    saved.manifest = {**saved.manifest, "optimizers": told}


def _states(saved: Saved, olds: Sequence[str], name: str) -> list[str]:
    """List the states saved of experts that are one parameter here. Raises `CheckpointError` if these differ between
    them in kind, or in the value of a state that the parameter has as a whole."""
    found = [{state: _as_a_whole(saved, (old, state)) for state in _kept(saved, old)} for old in olds]
    for one, other in pairwise(found):
        if one != other:
            raise CheckpointError(
                "experts that are one parameter here have different steps, and it has one state for all of them",
                where=f"parameter {name!r}, of saved {', '.join(map(repr, dict.fromkeys(olds)))}",
                got="; ".join(dict.fromkeys(str(each) for each in (one, other))),
                instead="the number of expert groups that saved it",
            )
    return list(found[0])


def _kept(saved: Saved, name: str) -> list[str]:
    return [state for table in (saved.cut, saved.whole, saved.values) for of, state in table if of == name]


def _as_a_whole(saved: Saved, key: tuple[str, str]) -> Any:
    """Return what must be equal among experts in a state: its content if it belongs to a whole parameter, else dtype
    and block size."""
    if key in saved.cut:
        return str(saved.dtypes[key]), saved.grains.get(key, 1)
    if key in saved.values:
        return saved.values[key]
    tensor: Tensor = saved.read(saved.whole[key])
    return str(tensor.dtype), tensor.tolist()


def _moved(saved: Saved, keys: Sequence[tuple[str, str]], parts: Sequence[int], each: int, grain: int) -> list[Stored]:
    """Return where these parts of these parameters' state are stored, renumbered to lie one after the other.

    each: elements of an expert.
    """
    if each % grain:
        raise CheckpointError(
            "a block of an optimizer's state reaches from one expert into the next, and these are apart here",
            where=f"state {keys[0][1]!r} of {keys[0][0]!r}", expected=f"a multiple of {grain} elements", got=each,
            instead="the number of expert groups that saved it",
        )  # fmt: skip
    size, found = each // grain, list[Stored]()
    for number, (key, part) in enumerate(zip(keys, parts, strict=True)):
        for stored in saved.cut[key]:
            low, high = max(stored.start, part * size), min(stored.stop, (part + 1) * size)
            if low < high:
                offset = stored.offset + (low - stored.start) * stored.dtype.itemsize
                shift = (number - part) * size
                found.append(
                    Stored(low + shift, high + shift, (high - low,), stored.dtype, stored.file, offset)
                )  # fmt: skip
    return found


def _regrouped(saved: Saved, told: dict[str, Any], theirs: set[str], mine: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's entry with its groups renamed. Raises `CheckpointError` if a list is in several groups."""
    groups = []
    for group in told["groups"]:
        held = theirs.intersection(group["parameters"])
        if held and held != theirs:
            raise CheckpointError(
                "experts of one list were saved in several groups of an optimizer, and have other names here",
                where=str(saved.folder), got=sorted(held)[:3], instead="the number of expert groups that saved it",
            )  # fmt: skip
        names = [name for name in group["parameters"] if name not in held] + list(mine if held else ())
        groups.append({**group, "parameters": names})
    return {**told, "groups": groups}
