"""An optimizer of your own, proven: the bits of one process at every stage, on 1 to 3 ranks, with states in each tier.

Run it by `pytest examples/test_own_optimizer.py`, after `pip install ".[testing]"` in a clone.
"""

import pytest
import torch
import torch.distributed as dist

import zeroshard
from zeroshard.testing import assert_same_bits


class AdaBelief(torch.optim.Optimizer):
    """Adam by the surprise in a gradient: its distance from what was expected (Zhuang et al., arXiv:2010.07468)."""

    elementwise = True  # zeroshard may cut its tensors, and call step for some of them at a time

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:  # a count for each parameter: the group's would run ahead where tensors come in turn
                    state["step"] = torch.zeros(())
                    state["mean"], state["surprise"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                step = state["step"].item()
                mean, surprise = state["mean"], state["surprise"]
                mean.lerp_(p.grad, 1 - b1)
                distance = p.grad - mean
                surprise.mul_(b2).addcmul_(distance, distance, value=1 - b2).add_(group["eps"])
                size = (surprise / (1 - b2**step)).sqrt_().add_(group["eps"])
                p.addcdiv_(mean, size, value=-group["lr"] / (1 - b1**step))


def built():
    torch.manual_seed(0)
    # Shards end at blocks of 128 elements: with 488 and 305 both weights are cut on two ranks, and on three.
    model = torch.nn.Sequential(torch.nn.Linear(8, 61), torch.nn.Tanh(), torch.nn.Linear(61, 5))
    return model, AdaBelief(model.parameters(), lr=1e-2)


def loss_of(model, step, rank):
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean()


def alone(ranks, steps=3):
    """The parameters of one process in plain PyTorch, which accumulates the micro-batches of all ranks."""
    model, optimizer = built()
    for step in range(steps):
        for rank in range(ranks):
            loss_of(model, step, rank).backward()
        for p in model.parameters():
            p.grad.div_(ranks)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_bits_are_those_of_one_process(stage, tier, tmp_path):
    model, optimizer = built()
    offload = zeroshard.Offload(optimizer=tier, path=str(tmp_path) if tier == "nvme" else None)
    zero = zeroshard.shard(model, optimizer, stage=stage, offload=offload)
    for step in range(3):
        loss_of(model, step, zero.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        assert_same_bits(alone(dist.get_world_size()), dict(model.named_parameters()))
