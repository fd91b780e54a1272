"""What a program costs an accelerator, by who asks for it: budgets that a test can assert without a GPU."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Counts:
    """Each by (site, what): a site is "file:function" of the program's innermost frame."""

    launches: Counter[tuple[str, str]] = field(default_factory=Counter)  # kernels and collectives, by their name
    drains: Counter[tuple[str, str]] = field(default_factory=Counter)  # waits of the host for the device, by what asks
    allocations: Counter[tuple[str, str]] = field(default_factory=Counter)
    nbytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # allocated, copied, and sent by collectives

    def copy(self) -> Counts:
        return Counts(*(Counter(each) for each in self._all()))

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self._all(), before._all(), strict=True)))

    def _all(self) -> tuple[Counter[tuple[str, str]], ...]:
        return self.launches, self.drains, self.allocations, self.nbytes

    @staticmethod
    def by_site(counter: Counter[tuple[str, str]]) -> dict[str, int]:
        """Without what was launched or asked: the most first."""
        found: Counter[str] = Counter()
        for (site, _), number in counter.items():
            found[site] += number
        return dict(found.most_common())

    def __str__(self) -> str:
        lines = []
        for name in ("launches", "drains", "allocations", "nbytes"):
            counter = getattr(self, name)
            lines.append(f"{name} {counter.total():,}")
            lines += [f"    {number:10,}  {site}" for site, number in self.by_site(counter).items()]
        return "\n".join(lines)


total = Counts()  # of this process


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """What is asked of the device inside; complete once the block has ended."""
    found, before = Counts(), total.copy()
    yield found
    done = total.since(before)
    found.launches, found.drains, found.allocations, found.nbytes = done._all()
