"""Whole tensors of parameters that an engine has cut: `DTensor`s, gradients of zeroshard's, DeepSpeed's ZeRO."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor


def whole(tensor: Any) -> Tensor:
    """Return all of a tensor that ranks have parts of: a `DTensor`, or a gradient of zeroshard's. Collective."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def shape(param: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter, of which DeepSpeed's stage 3 leaves none in place."""
    return tuple(getattr(param, "ds_shape", param.shape))


def hidden(param: Any) -> bool:
    """Tell if DeepSpeed keeps the parameter's gradient to itself, as it does at ZeRO stages 1 to 3."""
    return hasattr(param, "_hp_mapping") or hasattr(param, "ds_id")


def gradient(param: Any) -> Tensor | None:
    """Return the whole gradient that a step is about to use; None where there is none. Collective."""
    if hidden(param):
        from deepspeed.utils import safe_get_full_grad

        return cast("Tensor | None", safe_get_full_grad(param))
    return None if param.grad is None else whole(param.grad)


def weight(param: Any) -> Tensor:
    """Return the whole parameter. Of one that DeepSpeed's stage 3 has cut, the master in fp32. Collective."""
    if hasattr(param, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return cast("Tensor", safe_get_full_fp32_param(param)).detach()
    return whole(param.detach())
