"""Units as the engine would find them, read off the names of parameters.

They are the members of the outermost numbered lists ("model.layers.3"), outside them every subtree of `layout.LARGE`
elements or more, and the rest in the root.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..layout import LARGE

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


def _units(parameters: Mapping[str, Shape]) -> list[_Node]:
    """Return the root, then the other units in the order of their names."""
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
    return [root, *_chosen(root)]


def units_of(parameters: Mapping[str, Shape]) -> dict[str, int]:
    """Return {parameter: number of its unit}; the root is 0."""
    units: dict[str, int] = {}
    for number, node in enumerate(_units(parameters)):
        units.update(dict.fromkeys(node.names, number))
    return units


def unit_names(parameters: Mapping[str, Shape]) -> list[str]:
    """Return "the root", then the units' paths, in the order of their numbers."""
    return [node.path or "the root" for node in _units(parameters)]


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
