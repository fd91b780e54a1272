"""Costs of a step on a device and its host beside bytes: kernels that are launched, and waits for them. No torch.

Counts and no times: `machines` says what each takes. They follow what the engine does today, verb by verb, and
tests/tools/test_overheads.py holds them equal to what an emulated accelerator counts: a change that lowers the engine's
launches lowers these. Meetings of all ranks are not counted here: the engine records each as an event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Overhead:
    """launches: kernels and collectives. drains: how often the host waits until all has run that was queued."""

    launches: int = 0
    drains: int = 0

    def __add__(self, other: Overhead) -> Overhead:
        return Overhead(self.launches + other.launches, self.drains + other.drains)

    def times(self, count: int) -> Overhead:
        return Overhead(self.launches * count, self.drains * count)


NONE = Overhead()
TAKEN = 4  # kernels that take edits into a master: a cast, a comparison, a cast back, a choice


def total(parts: Iterable[Overhead]) -> Overhead:
    return sum(parts, NONE)


@dataclass(frozen=True)
class Facts:
    """Facts about one bucket on one rank that these counts depend on.

    slots: parameters in it. ranks: how many shard it in each of the replicas. replica: this rank's. sharded: do its
    parameters rest in shards? cast: have they another dtype than what the optimizer updates? in_place: is the sum of
    gradients where this rank's own are put together? narrow: is the sum in 16 bits? divided: as it lands?
    native: does the backend add? by_part: has each replica a part only of the average? two_levels: has a gather
    two?
    """

    slots: int
    ranks: int = 1
    replicas: int = 1
    replica: int = 0
    sharded: bool = False
    cast: bool = False
    in_place: bool = False
    narrow: bool = False
    divided: bool = False
    native: bool = False
    by_part: bool = False
    two_levels: bool = False

    @property
    def last(self) -> bool:
        return self.replica == self.replicas - 1


def gathered(of: Facts) -> Overhead:
    """Count a gather's collectives. A cast or copy before them is an event of its own, `copied`."""
    return Overhead((of.ranks > 1) + of.two_levels)


def copied() -> Overhead:
    return Overhead(1)


def released() -> Overhead:
    """Count filling the placeholder, without values, that released parameters show."""
    return Overhead(1)


def sent(of: Facts) -> Overhead:
    """Count a reduction until it is sent: each gradient is copied into the message, and a collective sends it."""
    return Overhead(of.slots + (of.ranks > 1))


def folded(of: Facts, *, again: bool) -> Overhead:
    """Count the adding of all contributions. again: to what an earlier backward of this step has left."""
    begun = again or of.replica > 0
    adds = (1 if of.native else of.ranks) - (not begun)
    copies = 1 + ((of.in_place and not again) or of.narrow)
    undone = int(again and of.divided and of.ranks * of.replicas > 1 and (of.replica == 0 or of.by_part))
    return Overhead(copies + adds + undone) + (averaged(of) if of.divided and of.last else NONE)


def averaged(of: Facts) -> Overhead:
    """Count the division by the ranks: a product for a power of two, else by a number put on the device first."""
    ranks = of.ranks * of.replicas
    if ranks & (ranks - 1) == 0:
        return Overhead(int(ranks > 1))
    return Overhead(2 + 2 * of.narrow)


def handed_on(of: Facts, *, again: bool) -> Overhead:
    """Count a relay between replicas: the running sum comes and goes on, and the average comes or goes back. again: as
    in `folded`; then parts come together first."""
    return Overhead((of.replicas > 1) * (3 - (of.replica == 0) - of.last + (again and of.by_part)))


def looked_at(of: Facts) -> Overhead:
    """Count taking a forward's edits of weights before these are released: done even if there are none."""
    return Overhead(TAKEN if of.cast else 1) if of.sharded else NONE


def stepped(of: Facts) -> Overhead:
    """Count the kernels before the optimizer's own. The copy of masters to parameters after it is `copied`."""
    seeded = Overhead(TAKEN) if of.cast and not of.sharded else NONE
    return seeded + Overhead(int(of.narrow)) + (NONE if of.divided else averaged(of))


def clipped(of: Facts) -> Overhead:
    """Count at most a bucket's part in a norm, and the product with the factor, of all its gradients at once.

    Where no tensor ends inside a block of 128 elements it takes fewer.
    """
    return Overhead(16) + (NONE if of.divided else averaged(of))


CLIP = Overhead(44)  # once for all buckets: bins are made, added up over the ranks, and made one number


def step(of: Facts, *, gathers: int, reductions: int, forwards: int) -> Overhead:
    """Count a bucket's step of so many gathers, reductions, and forwards that use it, recomputed ones included."""
    reduces = total(
        sent(of) + folded(of, again=number > 0) + handed_on(of, again=number > 0) for number in range(reductions)
    )
    around = copied() + released() if of.sharded else NONE
    back = copied() if of.cast and not of.sharded else NONE  # masters to parameters, before their gather
    return (gathered(of) + around).times(gathers) + reduces + looked_at(of).times(forwards) + back + stepped(of)
