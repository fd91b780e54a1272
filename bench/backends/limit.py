"""What every back-end would take if ranks never talked: forward, backward, and AdamW on 1/N of each parameter.

It trains nothing sensible. Its losses are not to be compared.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model import LEARNING_RATE, loss_of
from . import Trainer


def build(model: nn.Module, *, low: bool) -> Trainer:
    if low:
        model.to(torch.bfloat16)
    own = [
        (param, param.detach().view(-1)[: -(-param.numel() // dist.get_world_size())]) for param in model.parameters()
    ]
    fragments = [nn.Parameter(part.float() if low else part) for _, part in own]
    optimizer = torch.optim.AdamW(fragments, lr=LEARNING_RATE, fused=True)

    def backward(tokens_BT: Tensor) -> Tensor:
        loss = loss_of(model, tokens_BT)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def update() -> None:
        for (param, part), fragment in zip(own, fragments, strict=True):
            fragment.grad = param.grad.view(-1)[: part.numel()].float()
        optimizer.step()
        if low:
            torch._foreach_copy_([part for _, part in own], fragments)
        optimizer.zero_grad()
        model.zero_grad()

    return Trainer(backward, update)
