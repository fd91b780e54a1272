"""Fused AdamW for bfloat16 parameters: fp32 masters are stepped and written back. For libraries that have none."""

from __future__ import annotations

from typing import Any

import torch


class MasterAdamW(torch.optim.Optimizer):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.params = [param for group in self.param_groups for param in group["params"]]
        self.masters = [torch.nn.Parameter(param.detach().float()) for param in self.params]
        self.inner = torch.optim.AdamW(self.masters, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = param.grad.float()
        self.inner.step()
        self.inner.zero_grad()
        torch._foreach_copy_(self.params, self.masters)


def adamw(params: Any, *, low: bool, lr: float) -> torch.optim.Optimizer:
    return MasterAdamW(params, lr=lr) if low else torch.optim.AdamW(params, lr=lr, fused=True)
