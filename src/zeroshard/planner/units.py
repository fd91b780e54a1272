"""Units as the engine would find them, read off the names of parameters.

They are the members of the outermost numbered lists ("model.layers.3"), outside them every subtree of `layout.LARGE`
elements or more, and the rest in the root. Many small ones join (`layout.joined`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..layout.partition import LARGE, joined, joined_name

Shape = tuple[int, ...]


class _Node:
    """A module as far as parameter names tell."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.children: dict[str, _Node] = {}
        self.names: list[str] = []  # of all parameters below
        self.numel = 0

    @property
    def listed(self) -> bool:
        """Are all children numbered, as a list's are?"""
        return bool(self.children) and all(name.isdecimal() for name in self.children)

    @property
    def holds_lists(self) -> bool:
        return any(child.listed or child.holds_lists for child in self.children.values())


def _units(parameters: Mapping[str, Shape]) -> list[tuple[_Node, ...]]:
    """Return the root, then the modules of the other units in the order of their names."""
    root = _Node("")
    for name, shape in parameters.items():
        node, numel = root, math.prod(shape)
        path = [root]
        for part in name.split(".")[:-1]:
            node = node.children.setdefault(part, _Node(f"{node.path}.{part}".lstrip(".")))
            path.append(node)
        for node in path:
            node.names.append(name)
            node.numel += numel
    found = _chosen(root)
    runs = joined([node.path for node in found], [node.numel for node in found])
    return [(root,), *(tuple(found[number] for number in run) for run in runs)]


def units_of(parameters: Mapping[str, Shape]) -> dict[str, int]:
    """Return {parameter: number of its unit}; the root is 0."""
    units: dict[str, int] = {}
    for number, nodes in enumerate(_units(parameters)):
        units.update((name, number) for node in nodes for name in node.names)
    return units


def units_of_several(parameters: Mapping[str, Shape]) -> set[int]:
    """Return the numbers of the units of several modules."""
    return {number for number, nodes in enumerate(_units(parameters)) if len(nodes) > 1}


def unit_names(parameters: Mapping[str, Shape]) -> list[str]:
    """Return "the root", then the units' paths, in the order of their numbers."""
    return [joined_name([node.path for node in nodes]) or "the root" for nodes in _units(parameters)]


def layers(parameters: Mapping[str, Shape]) -> tuple[int | None, int]:
    """Return (members of the longest outermost list, as a transformer's layers are, and the vocabulary).

    None where there is no list. The vocabulary is the longest side of a matrix outside of lists; 0 without one.
    """
    lists: dict[str, int] = {}
    beside: list[Shape] = []
    for node in (each for nodes in _units(parameters) for each in nodes):
        name, _, number = node.path.rpartition(".")
        if node.path and number.isdecimal():
            lists[name] = lists.get(name, 0) + 1
        elif node.path:
            beside += [parameters[each] for each in node.names]
    inside = tuple(f"{name}." for name in lists if name)
    beside += [shape for name, shape in parameters.items() if not name.startswith(inside)]
    matrices = [max(shape) for shape in beside if len(shape) == 2]
    return max(lists.values(), default=None), max(matrices, default=0)


def _chosen(node: _Node) -> list[_Node]:
    chosen: list[_Node] = []
    for child in node.children.values():
        if node.listed:
            chosen.append(child)
        elif child.listed or child.holds_lists:
            chosen += _chosen(child)
        elif child.numel >= LARGE:
            chosen.append(child)
    return chosen
