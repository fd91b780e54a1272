"""Changes that would make a model fit: a higher stage, 16-bit gradients, more ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..stage import STAGES
from .recipes import Recipe


class Change(NamedTuple):
    """One thing to do differently, and the bytes per rank it would lead to."""

    what: str
    nbytes: int
    fits: bool

    def json(self) -> dict[str, object]:
        return self._asdict()


Total = Callable[[int, int, Recipe], int]  # (stage, ranks, recipe) -> bytes per rank


def changes(
    stage: int, ranks: int, recipe: Recipe, limit: int, nbytes_of: Total, most_ranks: int, replicas: int = 1
) -> list[Change]:
    """List the changes that could make a model fit `limit` bytes: each higher stage, 16-bit gradients, more ranks.

    If none of them fits alone, the highest stage with 16-bit gradients follows, and then with more ranks. More ranks
    means the smallest power of two that fits, up to `most_ranks` in all; with replicas, a power of two in each.
    """
    tried = [_change(f"stage {higher}", nbytes_of(higher, ranks, recipe), limit) for higher in STAGES if higher > stage]
    thin = _thin(recipe)
    if thin is not None:
        tried.append(_change("bf16 gradients", nbytes_of(stage, ranks, thin), limit))
    tried += _more_ranks(stage, ranks, recipe, limit, nbytes_of, most_ranks, replicas, "")
    if any(change.fits for change in tried):
        return tried
    last, words = max(STAGES), []
    if last != stage:
        words.append(f"stage {last}")
    if thin is not None:
        words.append("bf16 gradients")
    if words:
        both = " and ".join(words)
        if len(words) > 1:  # one alone has been tried
            tried.append(_change(both, nbytes_of(last, ranks, thin or recipe), limit))
        if not tried[-1].fits:
            tried += _more_ranks(last, ranks, thin or recipe, limit, nbytes_of, most_ranks, replicas, f"{both} and ")
    return tried


def _change(what: str, nbytes: int, limit: int) -> Change:
    return Change(what, nbytes, nbytes <= limit)


def _thin(recipe: Recipe) -> Recipe | None:
    """Return the recipe with gradients added up in the parameters' 16 bits; None where they are no wider."""
    if not recipe.parameters == 2 < recipe.gradients:
        return None
    eighths = recipe.in_8_bits and replace(recipe.in_8_bits, gradients=recipe.parameters)
    name = f"{recipe.name}, bf16 gradients"
    return replace(recipe, name=name, gradients=recipe.parameters, in_8_bits=eighths)


def _more_ranks(
    stage: int, ranks: int, recipe: Recipe, limit: int, nbytes_of: Total, most_ranks: int, replicas: int, before: str
) -> list[Change]:
    more = replicas << (ranks // replicas).bit_length()
    while more <= most_ranks:
        change = _change(f"{before}{more} ranks", nbytes_of(stage, more, recipe), limit)
        if change.fits:
            return [change]
        more *= 2
    return []
