"""The failure of a run on ranks, as the test sees it."""

from __future__ import annotations

from typing import Any, NamedTuple

NO_FAILURES = "Skipped", "XFailed"  # what pytest.skip and pytest.xfail raise: of all ranks, or of none


class Raised(NamedTuple):
    """One rank's failure. `type` is the exception's class name, or Died (the process ended) or Hung (it never did)."""

    type: str
    message: str
    traceback: str = ""
    bases: tuple[str, ...] = ()  # the class names of the exception's whole tree, itself included

    def isa(self, name: str) -> bool:
        return name in self.bases


class RankFailure(AssertionError):
    """Raised in the test when any rank failed; `.outcomes[rank]` is a `Raised` or the value that the rank returned."""

    def __init__(self, headline: str, outcomes: list[Any]) -> None:
        super().__init__(headline)
        self.outcomes = outcomes

    @property
    def failures(self) -> dict[int, Raised]:
        return {rank: outcome for rank, outcome in enumerate(self.outcomes) if isinstance(outcome, Raised)}

    def __str__(self) -> str:
        parts = [self.args[0]]
        for rank, outcome in enumerate(self.outcomes):
            if isinstance(outcome, Raised):
                parts.append(f"---- rank {rank}: {outcome.type}: {outcome.message}\n{outcome.traceback}".rstrip())
            else:
                parts.append(f"---- rank {rank}: returned")
        return "\n".join(parts)
