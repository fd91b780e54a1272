"""Train on what the model generates: a generator in the same process takes the weights after each step.

torchrun --nproc-per-node 2 examples/generate.py
"""

import torch
from torch import nn

import zeroshard

TOKENS, LENGTH, GOAL = 16, 8, 3  # it is rewarded for each GOAL that it writes


def build():
    return nn.Sequential(nn.Embedding(TOKENS, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, TOKENS))


device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)
model, generator = build(), build().requires_grad_(requires_grad=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
zero = zeroshard.shard(model, optimizer, stage=3, device=device)
generator.to(device)  # behind shard, which has chosen this rank's own
weights, theirs = zero.stream(dtype=torch.float32), generator.state_dict()  # an inference engine: load_weights(...)
draws = torch.Generator().manual_seed(zero.rank)

for step in range(20):
    for name, tensor in weights:  # whole, one bucket at a time; names and shapes are in weights.tensors
        theirs[name].copy_(tensor)
    text = torch.zeros(64, 1, dtype=torch.int64, device=device)
    for _ in range(LENGTH):
        choice = torch.multinomial(generator(text[:, -1]).softmax(1).cpu(), 1, generator=draws)
        text = torch.cat([text, choice.to(device)], 1)
    reward = (text[:, 1:] == GOAL).float()
    logits = model(text[:, :-1]).log_softmax(2).gather(2, text[:, 1:, None])[..., 0]
    (-(reward - reward.mean()) * logits).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if zero.rank == 0:
        print(f"step {step}: reward {reward.mean():.3f}")
