"""Which parameters an optimizer updates, and in which of its groups, however the program edits the groups.

Groups hold fragments, and a rank has fragments of only some parameters. A parameter without a fragment here goes where
the fragments of its group go: a group that is popped and put back, copied or moved takes all of its parameters along.
To divide a group's fragments among groups is refused, because each rank would divide the parameters differently. If
each rank has all of every parameter (stage 0), each parameter goes where its fragment goes.

torch keeps the states of parameters that leave an optimizer. So a parameter that leaves keeps its fragments, and comes
back with them: if the program adds the model's own parameter, or the fragments that the group held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..weights.bucket import Place
from .fragment import Fragment, Member

Group = dict[str, Any]


@dataclass
class Together:
    """Parameters that were in one group when it was last looked at. group: None once they have left the optimizer."""

    group: Group | None
    places: list[Place] = field(default_factory=list)
    fragments: list[Fragment] = field(default_factory=list)  # of these, on this rank

    def of(self, place: Place) -> list[Fragment]:
        return [each for each in self.fragments if _at(each) == _at(place)]

    def groups(self, holder: dict[int, Group]) -> list[Group]:
        """Return the groups that hold some of its fragments now. holder: the group that holds a parameter, by id."""
        found = [holder[id(each.param)] for each in self.fragments if id(each.param) in holder]
        return list({id(group): group for group in found}.values())

    def is_divided(self, holder: dict[int, Group]) -> bool:
        """Tell if its fragments are in several groups, or some in none. Those of frozen parameters may be in none."""
        parts = [each.param for each in self.fragments if each.param.numel()]  # empty ones may be in none
        left_out = any(id(param) not in holder and param.requires_grad for param in parts)
        return len(groups := self.groups(holder)) > 1 or bool(groups and left_out)

    @property
    def cut(self) -> bool:
        return any(place.bucket.placements.optimizer for place in self.places)


class Membership:
    """All that one optimizer updates, and what has left it."""

    def __init__(self) -> None:
        self._all: list[Together] = []
        self.frozen: set[tuple[int, int]] = set()  # bucket and position of parameters frozen since they were added

    def __iter__(self) -> Iterator[Together]:
        return iter(self._all)

    @property
    def members(self) -> list[Member]:
        return [Member(place, each.group) for each in self._all if each.group is not None for place in each.places]

    @property
    def fragments(self) -> list[Fragment]:
        """Return the fragments in the optimizer's groups, and those of parameters that were left out as frozen."""
        return [fragment for each in self._all if each.group is not None for fragment in each.fragments]

    def freeze(self, trained: Mapping[tuple[int, int], bool]) -> None:
        """Have fragments require gradients as their parameters do. trained: by bucket and position, if it changed."""
        self.frozen |= {at for at, wanted in trained.items() if not wanted}
        for each in self._all:
            for fragment in each.fragments:
                if (wanted := trained.get(_at(fragment))) is not None:
                    fragment.param.requires_grad_(wanted)

    def add(self, place: Place, fragments: Sequence[Fragment], group: Group) -> None:
        """Add a parameter to a group."""
        self.frozen.discard(_at(place))
        into = next((each for each in self._all if each.group is group), None)
        if into is None:
            self._all.append(into := Together(group))
        into.places.append(place)
        into.fragments += fragments

    def take(self, place: Place) -> list[Fragment]:
        """Take a parameter out, wherever it is; return its fragments, if it had any."""
        for each in self._all:
            if place in each.places:
                found = each.of(place)
                each.places.remove(place)
                gone = set(map(id, found))
                each.fragments = [fragment for fragment in each.fragments if id(fragment) not in gone]
                return found
        return []

    def divided(self, groups: Sequence[Group]) -> tuple[Together, list[Group]] | None:
        """Return sharded parameters of one group that was divided, and the groups of their fragments now; else None."""
        holder = _holder(groups)
        return next(((each, each.groups(holder)) for each in self._all if each.cut and each.is_divided(holder)), None)

    def follow(self, groups: Sequence[Group]) -> None:
        """Follow edits of an optimizer's groups that have not divided sharded parameters."""
        holder, numbers = _holder(groups), set(map(id, groups))
        for each in list(self._all):
            if not each.cut and each.is_divided(holder):
                for place in list(each.places):
                    one = Together(each.group, [place], self.take(place))
                    one.group = next(iter(one.groups(holder)), None)
                    self._all.append(one)
                continue
            found = each.groups(holder)
            stays = each.group if id(each.group) in numbers else None
            if stays and any(hasattr(param, "_zeroshard") for param in stays["params"]):
                stays = None  # the program put whole parameters in place of its fragments
            each.group = found[0] if found else stays
        self._all = [each for each in self._all if each.places]


def _at(of: Fragment | Place) -> tuple[int, int]:
    """Return a parameter's bucket, and its position there."""
    return of.bucket.plan.index, of.position


def _holder(groups: Sequence[Group]) -> dict[int, Group]:
    return {id(param): group for group in groups for param in group["params"]}
