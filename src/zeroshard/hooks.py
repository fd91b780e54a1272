"""The features that can be taken out: a file each, with a manifest that says where it hooks in.

    verb       hook         the feature answers with
    shard      axes         axes of the mesh that some parameters are sharded along
               chosen       parameters that its codec is for
               check        refusals of what a model and its optimizers may not have
               budgets, offload  the tiers that are chosen by what there is
               rejoins      showing an optimizer whole matrices of which ranks have parts
               ready        anything to be done once the engine stands
    gather     codec        how parameters rest, and become what modules compute with
               masters      how their masters rest
               tier, tiers  where states rest
               check_edits  edits that it could not follow
               editing      making ready for edits inside gathered()
               leaving      edits to follow as all ranks leave gathered()
    sum        groups       process groups of its own
               column       the ranks that have the same elements in other teams
               message      how contributions travel
               delivery     how a sum reaches where it rests
               division     whose parts of a gradient are sent one by one
    backward   subscriber   one that hears of each bucket's sum, of steps, checkpoints and loads
    Zero       average, met zero.average(), and what ranks compare of it
               batches      zero.batches()
               replay       zero.replay()
               generating   zero.generating()

No file of the core imports a feature's. Without that file all else works, and what asks for it is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .comm.agreement import Group
    from .comm.groups import Wanted
    from .comm.reduce_pipeline import Scratch
    from .comm.replicate_axis import Column
    from .comm.transport import Team, Work
    from .engine.build.assembly import Assembly
    from .engine.engine import Engine
    from .engine.gradients.accumulator import Accumulator
    from .engine.gradients.contribution import Division
    from .engine.gradients.subscriber import Subscriber
    from .engine.gradients.sums import Delivery
    from .engine.weights.bucket import Bucket
    from .engine.weights.codec import Message, Plain
    from .engine.weights.unit import Managed, Unit
    from .features.batches import Batches
    from .features.moving_average import MovingAverage
    from .features.replay import Replay
    from .layout.partition import BucketPlan
    from .layout.stage import Seat
    from .policies.incompatible import Settings
    from .policies.layout import Layout
    from .policies.offload import Offload
    from .policies.precision import Precision
    from .tiers.tier import Rest, Tier

T = TypeVar("T")

# By file: how a program asks for it, in words, and a test of settings for that.
FILES: dict[str, tuple[str, Callable[[Settings], object]]] = {
    "features.nonfinite": ("Precision(nonfinite=...)", lambda s: s.nonfinite != "ignore"),
    "kernels.fused": ("ZEROSHARD_KERNELS=1", lambda s: os.environ.get("ZEROSHARD_KERNELS") == "1"),
    "kernels.warm_up": ("", lambda s: False),
    "features.activations": ("Offload(activations=...)", lambda s: s.activations != "device"),
    "features.recompute": ("Layout(recompute=...)", lambda s: s.recompute),
    "features.fp8_parameters": ("Precision(fp8=...)", lambda s: s.fp8),
    "features.split_master": ("Precision(split_master=True)", lambda s: s.split_master),
    "features.int8_gradients": ('Comm(reduce="int8")', lambda s: s.reduce == "int8"),
    "features.replica_chain": ("Comm(replicas=...)", lambda s: s.summed > 1),
    "features.two_level": ("Comm(hosts=...)", lambda s: s.hosts > 1),
    "features.nvme": ("Offload(...) to nvme", lambda s: s.files),
    "features.device_step": ('Offload(step="device")', lambda s: s.stepped_there),
    "features.state_formats": ("Precision(states=...)", lambda s: s.narrow),
    "features.automatic_offload": ('Offload("auto")', lambda s: s.automatic),
    "features.shared_parameters": ("Offload(parameters='shared')", lambda s: s.once),
    "features.experts": ("Layout(along=...)", lambda s: s.along),
    "features.muon_tensor_parallel": ("", lambda s: False),
    "features.per_source_gradients": ("Layout(apart=True)", lambda s: s.apart),
    "features.moving_average": ("zero.average(...)", lambda s: False),
    "features.batches": ("zero.batches(...)", lambda s: False),
    "features.replay": ("zero.replay(...)", lambda s: False),
    "features.generation": ("zero.generating(...)", lambda s: False),
    "features.optimizer_in_backward": ("optimizer_in_backward=True", lambda s: s.in_backward),
}


class Feature:
    """A feature's manifest: name, page, and hooks. A hook that it does not override answers nothing."""

    name = ""  # as documents call it
    page = ""  # its page, below docs/
    kernels = ""  # the file in kernels/ with its arithmetic as device kernels

    def check(self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse, by `UserError`, what cannot go with this feature; `assembly` has the model's parameters laid out."""

    def budgets(self, assembly: Assembly) -> dict[str, Any] | None:
        """Return the resources of this rank's machine, to tell all ranks, if `offload` chooses by them."""

    def offload(
        self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer], told: Sequence[dict[str, Any]]
    ) -> Offload | None:
        """Return where states rest, if the settings leave it to this feature. told: the `budgets` of all ranks."""

    def rejoins(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Tell if an optimizer of whole tensors may have parameters that tensor parallelism has cut."""

    def chosen(self, managed: list[Managed], precision: Precision) -> set[str] | None:
        """Return the names of parameters that settings give to this feature's `codec`."""

    def axes(self, managed: Sequence[Managed], layout: Layout) -> dict[str, str] | None:
        """Return, by name, the axis of each parameter that one axis of the mesh shards, and not all ranks."""

    def ready(self, engine: Engine) -> None:
        """Do what is left once a model's engine stands."""

    def codec(self, assembly: Assembly, plan: BucketPlan) -> Callable[[Bucket], Plain] | None:
        """Return what makes the codec of a bucket's parameters, if they are this feature's."""

    def masters(self, bucket: Bucket, values: Tensor) -> tuple[Plain, Rest] | None:
        """Return the codec of parameters whose masters this feature stores, and the rest of the masters `values`."""

    def tiers(self, assembly: Assembly, plan: BucketPlan, at: dict[str, Tier]) -> dict[str, Tier]:
        """Return, by state, the tiers in place of some that a bucket's states have so far, `at`."""
        return {}

    def average(self, decay: float, engine: Engine) -> MovingAverage | None:
        """Make a moving average of an engine's weights."""

    def batches(self, engine: Engine, dataset: Any, settings: dict[str, Any], loader: dict[str, Any]) -> Batches | None:
        """Make the batches of an engine's run. loader: arguments of torch's `DataLoader`."""

    def replay(self, engine: Engine, work: Callable[..., Any], every: int) -> Replay | None:
        """Make a function of an engine's micro-batches, of whose calls one in `every` is computed on two ranks."""

    def generating(self, engine: Engine) -> contextlib.AbstractContextManager[None] | None:
        """Make a block of forwards without grad of which ranks make different numbers."""

    def met(self, what: str, marks: Sequence[int]) -> None:
        """Look at all ranks' `Subscriber.mark` as they meet for a checkpoint. Raises on every rank."""

    def check_edits(self, buckets: Sequence[Bucket], group: Group) -> None:
        """Report, before all ranks meet, edits of weights that it cannot follow."""

    def editing(self, units: Sequence[Unit]) -> contextlib.AbstractContextManager[None]:
        """Make ready for edits inside gathered()."""
        return contextlib.nullcontext()

    def tier(self, name: str, assembly: Assembly, largest: dict[str, int], nbytes: int) -> Tier | None:
        """Return this feature's tier, if it has this name. largest: by state, its largest shard; nbytes: of all."""

    def leaving(self, units: Sequence[Unit], write_from: int | None) -> set[int]:
        """Follow edits as all ranks leave gathered(), and return the indices of the buckets that it has seen to."""
        return set()

    def message(self, plan: BucketPlan, settings: Settings) -> Message | None:
        """Return the format in which contributions to a bucket's sum travel, if they travel in this feature's."""

    def division(self, bucket: Bucket, settings: Settings) -> Division | None:
        """Return how a bucket's gradients are split by source, if they are."""

    def delivery(self, team: Team) -> Callable[[Accumulator, Scratch[Tensor]], Delivery] | None:
        """Return what makes the delivery of each sum, if this feature delivers them."""

    def groups(self, sits: Seat, ranks: int, backend: str) -> list[Wanted]:
        """List the process groups that this feature needs of a rank with this seat, besides every engine's."""
        return []

    def column(self, team: Team) -> Column | None:
        """Make this rank's end of the column of ranks with the same elements in other teams, if it sums over it."""

    def gathers(self, team: Team) -> Callable[[Team, Tensor, BucketPlan, str], Work] | None:
        """Return what gathers buckets if each rank has only a part of its shard, in place of `Team.gather`."""

    def subscriber(self, engine: Engine) -> Subscriber | None:
        """Return what takes part in the backwards of an engine, if this feature does."""


@functools.cache
def features() -> tuple[Feature, ...]:
    """Load the manifests of all features that are here, in the order of `FILES`."""
    return tuple(importlib.import_module(f"{__package__}.{name}").FEATURE for name in FILES if present(name))


@functools.cache
def answering(hook: str) -> tuple[Feature, ...]:
    """List the features that have a hook of this name of their own."""
    return tuple(each for each in features() if getattr(type(each), hook) is not getattr(Feature, hook))


def present(name: str) -> bool:
    """Tell if a feature's file is here. name: of `FILES`."""
    return importlib.util.find_spec(f"{__package__}.{name}") is not None


def check_present(settings: Settings) -> None:
    """Refuse settings that ask for a feature whose file is not here."""
    for name, (_, asks) in FILES.items():
        if asks(settings) and not present(name):
            raise absent(name)


def absent(name: str) -> UserError:
    """Make the error for what asks for a feature whose file is not here."""
    return UserError(
        "this build of zeroshard is without a feature that the settings ask for",
        expected=f"zeroshard/{name.replace('.', '/')}.py",
        got=FILES[name][0],
        instead="leave it out, or install zeroshard as it is published",
    )


def first(answers: Iterable[T | None]) -> T | None:
    """Return the first of the features' answers to a hook that is not None; else None."""
    return next((answer for answer in answers if answer is not None), None)


@contextlib.contextmanager
def editing(units: Sequence[Unit]) -> Iterator[None]:
    """Make all features ready for edits inside gathered()."""
    with contextlib.ExitStack() as stack:
        for feature in features():
            stack.enter_context(feature.editing(units))
        yield
