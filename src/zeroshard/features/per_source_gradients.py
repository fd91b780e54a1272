"""Gradients of experts, one per source rank of the tokens, so that they can be added up in the order of all ranks.

Where experts are divided among ranks, an expert sees tokens of several ranks in one backward. One product over all
these tokens adds up in an order that depends on how many ranks divide the experts. With `apart`, each rank's tokens
have a product and a gradient of their own: however experts are divided, the same gradients are added up in the same
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.gradients.contribution import Division
from ..engine.weights.bucket import Bucket, Place
from ..errors import StateError, UserError
from ..hooks import Feature
from ..policies.incompatible import Settings


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, sources: int) -> Tensor:
        ctx.weight = weight
        return weight.expand(sources, *weight.shape)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        place: Place | None = getattr(ctx.weight, "_zeroshard", None)
        if place is not None:
            place.apart = grads if place.apart is None else place.apart + grads
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad
        return total, None


def apart(weight: Tensor, sources: int) -> Tensor:
    """Return a parameter once per source of tokens, [sources, *shape]: `[s]` is for what rank s of a group sent.

    weight: the parameter, [rows, ...].
    sources: how many ranks of the group send tokens.

    With `Layout(along=..., apart=True)` the sources' gradients are added up in the order of all ranks; in a plain
    process, or without that setting, in the order of the sources. Takes no memory in forward; in backward, that of the
    gradients. Raises `UserError` for a number of sources that is none.

    Examples:
        >>> zeroshard.apart(model.weight, 2).shape
        torch.Size([2, 8, 8])
    """
    if type(sources) is not int or sources < 1:
        raise UserError(
            "a parameter comes apart into as many as there are sources", expected="a number from 1", got=repr(sources),
            instead='zeroshard.apart(weight, mesh["ep"].size())',
        )  # fmt: skip
    expanded: Tensor = _Apart.apply(weight, sources)  # type: ignore[no-untyped-call]
    return expanded


class Apart(Division):
    """The division of the gradients of one bucket, whose parameters the model has called `apart` for."""

    def forget(self, param: Any) -> None:
        param._zeroshard.apart = None

    def parts(self, param: Any, grad: Tensor) -> Sequence[Tensor]:
        place: Place = param._zeroshard
        found, place.apart = place.apart, None
        if found is None or len(found) != self.sources:
            raise StateError(
                "a gradient did not come source by source, as Layout(apart=True) has promised",
                where=f"parameter {place.name!r}",
                expected=f"those of {self.sources} sources, one for each group",
                got="their sum" if found is None else f"those of {len(found)}",
                instead=f"zeroshard.apart(parameter, {self.sources}) in the model's forward, for the parameter",
            )
        return found.unbind(0)


class PerSourceGradientsFeature(Feature):
    name = "gradients source by source"
    page = "meshes.md"

    def division(self, bucket: Bucket, settings: Settings) -> Apart | None:
        sources = bucket.team.seat.parts
        return Apart(sources) if settings.apart and sources > 1 else None


FEATURE = PerSourceGradientsFeature()
