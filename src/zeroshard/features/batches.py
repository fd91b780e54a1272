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
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..engine.gradients.reduction import Reduction
from ..engine.gradients.subscriber import Subscriber
from ..engine.weights.guard import weak
from ..errors import StateError, UserError
from ..hooks import Feature
from ..rng import drawing

if TYPE_CHECKING:
    from ..engine.engine import Engine

_SAME = "seed", "per_step", "size", "shuffle", "drop_last", "reseed", "samples"  # what a resumed run shares
_OURS = {"batch_size", "sampler", "batch_sampler", "shuffle", "drop_last", "generator", "in_order"}  # of DataLoader
_LOOP = "for batch in step: loss(batch).backward(), and then optimizer.step(); optimizer.zero_grad()"


class Batches:
    """The micro-batches of a run: iterating yields the epoch's remaining steps; a step yields this rank's part.

    epoch, step: the place of the run: how many epochs are over, and how many steps of this epoch are. A step is over
        once an optimizer has made it, or the next one is asked for. `zero.save` and `load` hold the place.
    """

    def __init__(
        self,
        reduction: Reduction,
        boundary: Callable[[], None],
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
        """boundary: is called where all ranks are between two steps."""
        _check_arguments(dataset, per_step, size, seed, loader)
        _check_sums(reduction)
        self.reduction, self.boundary, self.dataset = reduction, boundary, dataset
        self.rank, self.ranks = reduction.group.team.seat.source, reduction.group.sources
        same = seed, per_step, size, bool(shuffle), bool(drop_last), bool(reseed), len(dataset)
        self.settings, self.loader = dict(zip(_SAME, same, strict=True)), loader
        self.epoch = self._step = 0
        self._pending: int | None = None  # steps that optimizers had made when a step's last micro-batch was used
        self._loaded = 0  # how often another place was loaded
        self._owner: object = None  # the step that gives out micro-batches now; the fields below are its state
        self.used: int | None = None  # the micro-batch that the program computes with
        self.within, self.silent, self.backwards = 0, False, 0  # size of its step; is it dropped?; backwards with it
        self.first = False  # is it of the first round?
        self.retired = ""  # why it gives out nothing any more
        self._check_steps()

    @property
    def step(self) -> int:
        made = self._pending is not None and self.reduction.group.progress.steps > self._pending
        return self._step + made

    def pass_over(self) -> None:
        """Take note that a step whose micro-batches were all used is over without an update of the weights."""
        if self._pending is not None:
            self._pending = -1

    def _check_steps(self) -> None:
        """Refuse an epoch without a step, and, with experts, a round in which some ranks have no micro-batch."""
        per_step, size, samples = (self.settings[name] for name in ("per_step", "size", "samples"))
        if not len(self):
            raise UserError(
                "the samples are not enough for one step", expected=f"{per_step * size:,} or more",
                got=f"{samples:,}", instead="drop_last=False, or fewer micro-batches per step",
            )  # fmt: skip
        counts = {self.micro_batches(step) for step in (0, len(self) - 1)}
        if any(each.plan.axis for each in self.reduction.gradients.accumulators) and any(
            n % self.ranks for n in counts
        ):
            raise UserError(
                "experts that ranks divide get tokens of all ranks, and in a last round some would have none",
                got=f"steps of {' and '.join(map(str, sorted(counts)))} micro-batches on {self.ranks} ranks",
                instead="per_step= that the number of ranks divides, and drop_last=True",
            )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        samples, whole = self.settings["samples"], self.settings["per_step"] * self.settings["size"]
        return samples // whole if self.settings["drop_last"] else -(-samples // whole)

    def micro_batches(self, step: int) -> int:
        """Return how many micro-batches a step of an epoch has: `per_step`, but for the last one."""
        size, most = self.settings["size"], self.settings["per_step"]
        return min(-(-(self.settings["samples"] - step * most * size) // size), most)

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps that are left of the epoch; then the next epoch begins."""
        self._end(self.step)  # whatever an exception left of a step is done again
        loaded, given, fetched = -1, None, iter(())
        while True:
            if loaded != self._loaded:
                loaded, given, fetched = self._loaded, None, self._fetched()
            if given == self._step and self._pending is None:
                raise StateError(
                    "a step begins before all micro-batches of the last one were used", expected=_LOOP,
                    where=self.place(),
                )  # fmt: skip
            self._end(self._step + (self._pending is not None))
            if self._step >= len(self):
                break
            self._check()
            self.boundary()
            if loaded == self._loaded:
                given = self._step
                yield Step(self, fetched)
        self.epoch, self._step = self.epoch + 1, 0

    def _fetched(self) -> Iterator[Any]:
        workers = torch.Generator().manual_seed(self._drawn("workers", self.epoch, self._step))
        return iter(DataLoader(self.dataset, batch_sampler=self._lists(), generator=workers, **self.loader))

    def _end(self, step: int) -> None:
        """Go between two steps. step: how many of the epoch are over."""
        self._step, self._pending, self._owner = step, None, None
        self.used, self.reduction.silent = None, False

    def _check(self) -> None:
        if self.retired:
            raise StateError(
                f"these batches give out nothing any more: {self.retired}", where=self.place(),
                instead="the steps of the last zero.batches(...), one of a model at a time; a loader of your own to "
                "evaluate with",
            )  # fmt: skip

    def give_out(self, fetched: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's micro-batches of a step."""
        if self._owner is not None:
            raise StateError(
                "the micro-batches of one step are given out a second time", where=self.place(), expected=_LOOP
            )
        self._owner = mine = object()
        loaded, count = self._loaded, self.micro_batches(self._step)
        device, step = self.reduction.group.device, self.epoch * len(self) + self._step
        for first in range(0, count, self.ranks):
            used = (first + self.rank) % count
            with self._drawing(step, used, device):
                batch = next(fetched)
            self._check()
            self.used, self.within, self.backwards, self.first = used, count, 0, not first
            self.reduction.silent = self.silent = first + self.rank >= count
            try:
                with self._drawing(step, used, device):  # seed again: with workers the dataset draws elsewhere
                    yield batch
            finally:
                if self._owner is mine:  # else a generator that outlived its loop ends late
                    self.used, self.reduction.silent = None, False
            if self._owner is not mine or loaded != self._loaded:
                raise StateError(
                    "a step goes on after another one began, or a load", where=self.place(), expected=_LOOP
                )
            if self.backwards != 1:
                raise StateError(
                    "a micro-batch is for one backward, before the next one is asked for", where=self.place(),
                    expected=_LOOP, got=f"{self.backwards} backwards with micro-batch {used}",
                )  # fmt: skip
        self._pending = self.reduction.group.progress.steps

    def _drawing(self, step: int, used: int, device: torch.device) -> contextlib.AbstractContextManager[None]:
        seed = self.settings["seed"]
        return drawing(seed, step, used, device) if self.settings["reseed"] else contextlib.nullcontext()

    def _lists(self) -> Iterator[list[int]]:
        """Yield the numbers of the samples of each micro-batch of this rank, to the end of the epoch."""
        size, most, samples = self.settings["size"], self.settings["per_step"], self.settings["samples"]
        order: Tensor | range = range(samples)
        if self.settings["shuffle"]:
            drawn = torch.Generator().manual_seed(self._drawn("order", self.epoch))
            order = torch.randperm(samples, generator=drawn)
        for step in range(self._step, len(self)):
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
        """Continue at the place of a saved run. Raises `UserError` if that run had other data or another order."""
        if found := self.differences(told):
            raise UserError(
                "the checkpoint is of a run over other micro-batches", got="; ".join(found),
                instead="the settings of that run; or zero.batches(...) first, and zero.load(..., strict=False)",
            )  # fmt: skip
        self._end(told["step"])
        self.epoch, self._loaded = told["epoch"], self._loaded + 1

    def differences(self, told: dict[str, int] | None) -> list[str]:
        """Say which settings of another place differ from these."""
        if told is None:
            return ["zero.batches(...) gives out micro-batches, and none did in the run that was saved"]
        mine, said = self.state_dict(), "zero.batches({0}=) is {1}, saved was {2}"
        return [said.format(name, mine[name], told[name]) for name in _SAME if mine[name] != told[name]]


def _check_arguments(dataset: Any, per_step: object, size: object, seed: object, loader: dict[str, Any]) -> None:
    for name, value, least in (("per_step", per_step, 1), ("size", size, 1), ("seed", seed, 0)):
        if type(value) is not int or not least <= value < 1 << 48:
            raise UserError(f"zero.batches({name}=) is a whole number from {least} up", got=repr(value))
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            "zero.batches(...) gives every rank its samples by their numbers", got=type(dataset).__name__,
            expected="a dataset with len() and [index]", instead="write what a stream yields into such a dataset",
        )  # fmt: skip
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise UserError(
            "zero.batches(...) gives every rank its samples by their numbers, and a dict has them by name",
            got=f"{type(dataset).__name__} with {[*dataset][:5]}",
            instead="torch.utils.data.TensorDataset(*data.values()), or a dict for each sample: "
            "[dict(zip(data, row)) for row in zip(*data.values())]",
        )  # fmt: skip
    if wrong := sorted(_OURS & loader.keys()):
        raise UserError(
            "zero.batches(...) says itself which samples a micro-batch has", got=f"{'=, '.join(wrong)}=",
            instead="per_step=, size=, seed=, shuffle=, drop_last=; all else goes to torch's DataLoader",
        )  # fmt: skip


def _check_sums(reduction: Reduction) -> None:
    """Refuse sums whose rounding or order would depend on the number of ranks."""
    narrow = sorted({f"{each.sum.dtype}" for each in reduction.gradients.accumulators if each.sum.dtype.itemsize < 4})
    if narrow or reduction.settings.reduce == "native":
        raise UserError(
            "the bits of a step would depend on the number of ranks, which zero.batches(...) is to prevent",
            got="sums in " + narrow[0] if narrow else 'Comm(reduce="native"), which adds in an order of its own',
            instead="Precision(grad_dtype=torch.float32), whose sums are not rounded from round to round" if narrow
            else 'Comm(reduce="ordered")',
        )  # fmt: skip


class Step:
    """One step's micro-batches of this rank, to iterate once."""

    def __init__(self, batches: Batches, fetched: Iterator[Any]) -> None:
        self._batches, self._fetched = batches, fetched

    def __iter__(self) -> Iterator[Any]:
        # Only the loop holds this iterator: it ends at once when the loop is left, by `break` or an exception.
        return self._batches.give_out(self._fetched)


class Divided(Subscriber):
    """The subscriber of `Batches`: divides the sums of a step by its number of micro-batches."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def words(self, *, local: bool) -> str:
        """Say the place, which all ranks compare; report what would make the bits depend on the number of ranks."""
        batches, reduction = self.batches, self.batches.reduction
        inside, what, instead = batches.used is not None, "", "leave it out"
        if not inside:
            if any(each.filled and each.divisor != batches.ranks for each in reduction.gradients.accumulators):
                kept = reduction.kept()  # gradients that the program has not cleared
                entries = [each for each in reduction.gradients.entries if each.number in kept]
                if any(entry.accumulator.divisor != batches.ranks for entry in entries):
                    what = "a backward after the loop over a step's micro-batches would be divided as one of them"
        elif local:
            what = "no_sync() adds up each rank's micro-batches first, in another order on more ranks"
        elif batches.backwards:
            what = "a second backward with one micro-batch: more ranks would add it up in another order"
            instead = "one backward, of the sum of both losses"
        elif reduction.silent != batches.silent:
            what = "zero.join(...) inside the loop over a step's micro-batches"
        elif batches.first and reduction.kept():
            what = "gradients of another step are there, and this one's would be added to them"
            instead = "optimizer.zero_grad() before the step"
        if what:
            reduction.group.report(StateError(what, where=batches.place(), expected=_LOOP, instead=instead))
        return "" if not inside else f"micro-batches of step {batches._step} of epoch {batches.epoch}"

    def prepare(self) -> None:
        batches = self.batches
        inside = batches.used is not None
        batches.reduction.divisor = batches.within if inside else batches.ranks
        batches.backwards += inside

    def judge(self, overflow: bool) -> None:
        if overflow:
            self.batches.pass_over()


class BatchesFeature(Feature):
    name = "batches for any number of ranks"
    page = "guide.md#data-at-any-number-of-ranks"

    def batches(self, engine: Engine, dataset: Any, settings: dict[str, Any], loader: dict[str, Any]) -> Batches:
        made: list[Batches] = []
        before: Batches | None = engine.batches

        def make() -> dict[str, Any]:
            made.append(Batches(engine.reduction, weak(engine.boundary), dataset, **settings, loader=loader))
            place = engine.position  # of a checkpoint that was loaded before
            if before is not None and not before.differences(mine := made[0].state_dict()):
                place = mine | {"epoch": before.epoch, "step": before.step}  # made anew for an epoch, say
            if place is not None:
                made[0].load_state_dict(place)
            return {**settings, "place": made[0].state_dict()}

        engine.schedule.recover()
        engine.group.same("zero.batches(...)", make)
        if before is not None:
            before.retired = "zero.batches(...) was called again"
        subscribers, engine.batches, engine.position = engine.reduction.subscribers, made[0], None
        subscribers[:] = [*(each for each in subscribers if not isinstance(each, Divided)), Divided(made[0])]
        return made[0]


FEATURE = BatchesFeature()
