"""zeroshard's definition of gradient norms, on plain tensors: see `zeroshard.reference`."""

from zeroshard.reference import BLOCK, norm_of_tensor, total_norm

of_tensor, total = norm_of_tensor, total_norm

__all__ = ["BLOCK", "of_tensor", "total"]
