"""Give out the same micro-batches of a step at any number of ranks, and keep the place of a run in its data.

    micro-batch    0    1    2    3    4    5    6    7     of one step, per_step=8
    of 3 ranks     0    1    2    0    1    2    0    1     computes it, in rounds of one backward each

A round is added up in rank order, onto the sum of the rounds before it: on any number of ranks the gradients of a step
are the left fold over its micro-batches, divided once, by how many they are. A rank that has none left in the last
round computes one that another rank has too, and adds nothing, as in `Zero.join`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .device import random_states_kept
from .engine.reduction import Reduction
from .engine.subscriber import Subscriber
from .errors import StateError, UserError
from .features import Feature

_SAME = "seed", "per_step", "size", "shuffle", "samples"  # where a run goes on
_OURS = {"batch_size", "sampler", "batch_sampler", "shuffle", "drop_last", "generator"}  # arguments of DataLoader
_LOOP = "for batch in step: loss(batch).backward(), and then optimizer.step(); optimizer.zero_grad()"


class Batches:
    """The micro-batches of a run: iterating yields the steps that are left of an epoch, and a step this rank's part.

    epoch, step: the place of the run: epochs that are over and, of this one, steps that are. `zero.save` and `load`
    hold it.
    """

    def __init__(
        self,
        reduction: Reduction,
        dataset: Any,
        *,
        per_step: int,
        size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        reseed: bool,
        loader: dict[str, Any],
    ) -> None:
        for name, value, least in (("per_step", per_step, 1), ("size", size, 1), ("seed", seed, 0)):
            if type(value) is not int or not least <= value < 1 << 48:
                raise UserError(f"zero.batches({name}=) is a whole number from {least} up", got=repr(value))
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(
                "zero.batches(...) gives every rank its samples by their numbers", got=type(dataset).__name__,
                expected="a dataset with len() and [index]", instead="write what a stream yields into such a dataset",
            )  # fmt: skip
        if wrong := sorted(_OURS & loader.keys()):
            raise UserError(
                "zero.batches(...) says itself which samples a micro-batch has", got=f"{'=, '.join(wrong)}=",
                instead="per_step=, size=, seed=, shuffle=, drop_last=; all else goes to torch's DataLoader",
            )  # fmt: skip
        narrow = sorted(
            {f"{each.sum.dtype}" for each in reduction.gradients.accumulators if each.sum.dtype.itemsize < 4}
        )
        if narrow or reduction.settings.reduce == "native":
            raise UserError(
                "the bits of a step would depend on the number of ranks, which zero.batches(...) is to prevent",
                got="sums in " + narrow[0] if narrow else 'Comm(reduce="native"), which adds in an order of its own',
                instead="Precision(grad_dtype=torch.float32), whose sums are not rounded from round to round" if narrow
                else 'Comm(reduce="ordered")',
            )  # fmt: skip
        self.reduction, self.dataset = reduction, dataset
        self.rank, self.ranks = reduction.group.team.seat.source, reduction.group.sources
        self.settings = dict(zip(_SAME, (seed, per_step, size, bool(shuffle), len(dataset)), strict=True))
        self.drop_last, self.reseed, self.loader = drop_last, reseed, loader
        self.epoch = self.step = 0
        self.within = 0  # micro-batches of the step that is being added up; 0: between two
        self.used: int | None = None  # the micro-batch that the program computes with
        if not len(self):
            raise UserError(
                "the samples are not enough for one step", expected=f"{per_step * size:,} or more",
                got=f"{len(dataset):,}", instead="drop_last=False, or fewer micro-batches per step",
            )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        samples, whole = self.settings["samples"], self.settings["per_step"] * self.settings["size"]
        return samples // whole if self.drop_last else -(-samples // whole)

    def micro_batches(self, step: int) -> int:
        """Return how many micro-batches a step of an epoch has: `per_step`, but for the last one."""
        size, most = self.settings["size"], self.settings["per_step"]
        return min(-(-(self.settings["samples"] - step * most * size) // size), most)

    def __iter__(self) -> Iterator[Iterator[Any]]:
        """Yield the steps that are left of the epoch; then the next epoch begins."""
        self.within, self.reduction.silent = 0, False  # whatever an exception left of a step is done again
        workers = torch.Generator().manual_seed(self._drawn("workers", self.epoch, self.step))
        sampler = _Lists(self._lists)
        fetched = iter(DataLoader(self.dataset, batch_sampler=sampler, generator=workers, **self.loader))
        given = -1
        while self.step < len(self):
            if given == self.step:
                raise StateError(
                    "a step begins before all micro-batches of the last one were used", expected=_LOOP,
                    where=self.place(),
                )  # fmt: skip
            given = self.step
            yield self._micro(fetched)
        self.epoch, self.step = self.epoch + 1, 0

    def _micro(self, fetched: Iterator[Any]) -> Iterator[Any]:
        self.within = count = self.micro_batches(self.step)
        with random_states_kept(self.reduction.group.device) if self.reseed else contextlib.nullcontext():
            try:
                for first in range(0, count, self.ranks):
                    batch = next(fetched)
                    self.used = (first + self.rank) % count
                    self.reduction.silent = first + self.rank >= count
                    if self.reseed:
                        torch.manual_seed(self._drawn("micro-batch", self.epoch, self.step, self.used))
                    yield batch
                self.step, self.within = self.step + 1, 0
            finally:
                self.used, self.reduction.silent = None, False

    def _lists(self) -> Iterator[list[int]]:
        """Yield the numbers of the samples of each micro-batch of this rank, to the end of the epoch."""
        size, most, samples = self.settings["size"], self.settings["per_step"], self.settings["samples"]
        order: Tensor | range = range(samples)
        if self.settings["shuffle"]:
            drawn = torch.Generator().manual_seed(self._drawn("order", self.epoch))
            order = torch.randperm(samples, generator=drawn)
        for step in range(self.step, len(self)):
            count = self.micro_batches(step)
            for first in range(0, count, self.ranks):
                start = (step * most + (first + self.rank) % count) * size
                yield [int(number) for number in order[start : start + size]]

    def _drawn(self, *what: object) -> int:
        """Draw a seed of 63 bits for something, from the run's own."""
        told = repr((self.settings["seed"], *what)).encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") >> 1

    def place(self) -> str:
        """Return the place of the run, in words."""
        return f"rank {self.reduction.group.rank}, step {self.step + 1} of epoch {self.epoch + 1}"

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Return the place of the run, and the settings that it is a place in."""
        return {**{name: int(value) for name, value in self.settings.items()}, "epoch": self.epoch, "step": self.step}

    def load_state_dict(self, told: dict[str, int]) -> None:
        """Go on where a run was. Raises `UserError` if that had other data, or another order of it."""
        if found := self.differences(told):
            raise UserError(
                "the checkpoint is of a run over other micro-batches", got="; ".join(found),
                instead="the settings of that run; or zero.batches(...) first, and zero.load(..., strict=False)",
            )  # fmt: skip
        self.epoch, self.step, self.within = told["epoch"], told["step"], 0

    def differences(self, told: dict[str, int]) -> list[str]:
        """Say which settings of another place differ from these."""
        mine, said = self.state_dict(), "zero.batches({0}=) is {1}, saved was {2}"
        return [said.format(name, mine[name], told[name]) for name in _SAME if mine[name] != told[name]]


class _Lists:
    """An iterable that begins anew each time, as DataLoader takes it."""

    def __init__(self, lists: Callable[[], Iterator[list[int]]]) -> None:
        self._lists = lists

    def __iter__(self) -> Iterator[list[int]]:
        return self._lists()


class Divided(Subscriber):
    """The part of batches in backwards: sums of a step are divided by its micro-batches."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def words(self, *, local: bool) -> str:
        """Say the divisor, which all ranks compare; report what would make the bits depend on the number of ranks."""
        within, reduction = self.batches.within, self.batches.reduction
        if self.batches.used is None:
            return ""
        what, instead = "", "optimizer.zero_grad() before the step"
        if local:
            what = "no_sync() adds up each rank's micro-batches first, in another order on more ranks"
            instead = "leave it out"
        elif {each.divisor for each in reduction.gradients.accumulators if each.filled} - {within}:
            kept = reduction.kept()  # of those that the program has not cleared
            if any(each.accumulator.divisor != within for each in reduction.gradients.entries if each.number in kept):
                what = "gradients of another step are there, and would be divided by the micro-batches of this one"
        if what:
            reduction.group.report(StateError(what, where=self.batches.place(), expected=_LOOP, instead=instead))
        return f"a part of {within} micro-batches"

    def prepare(self) -> None:
        self.batches.reduction.divisor = self.batches.within or self.batches.ranks

    def between_steps(self, what: str) -> None:
        if self.batches.within and what != "loading":
            raise StateError(
                f"{what} between two micro-batches of a step, whose gradients would be lost",
                where=self.batches.place(),
                instead="after the loop over the step's micro-batches, and optimizer.step()",
            )


class _Manifest(Feature):
    name = "batches for any number of ranks"
    page = "guide.md#data-at-any-number-of-ranks"

    def batches(self, engine: Any, dataset: Any, settings: dict[str, Any], loader: dict[str, Any]) -> Batches:
        made: list[Batches] = []

        def make() -> dict[str, Any]:
            made.append(Batches(engine.reduction, dataset, **settings, loader=loader))
            if engine.position is not None:  # loaded before
                made[0].load_state_dict(engine.position)
            return {**settings, "place": made[0].state_dict()}

        engine.schedule.recover()
        engine.group.same("zero.batches(...)", make)
        subscribers, engine.batches = engine.reduction.subscribers, made[0]
        subscribers[:] = [*(each for each in subscribers if not isinstance(each, Divided)), Divided(made[0])]
        return made[0]


FEATURE = _Manifest()
