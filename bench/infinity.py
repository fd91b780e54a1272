"""A model whose states do not fit: all of them in files, under a hard limit on the process's memory.

    python -m bench.infinity DIR [--blocks 20 --hidden 2048 --steps 2 --limit-gib 4]

The limit is RLIMIT_DATA, what `ulimit -d` sets: the kernel refuses private memory beyond it (files that are mapped,
such as torch's libraries, do not count). First a smaller twin is trained under it twice, in memory and from files,
losses and norms compared; then the model itself, from files alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from bench.model import GPT, Size
from torch import nn
from torch.nn import functional as F

import zeroshard
from zeroshard import Layout, Offload, Precision

GIB = 1 << 30
TWIN = Size(blocks=4, hidden=256, heads=4, vocabulary=2048, sequences=1)


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    if isinstance(module, GPT):
        module.places.normal_(std=0.02)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    else:
        module.weight.normal_(std=0.02)
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()


def status(field: str) -> int:
    """Bytes of one line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


def train(size: Size, offload: Offload | None, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    began = time.monotonic()
    zero = zeroshard.shard(
        model, optimizer, stage=3, precision=Precision(param_dtype=torch.bfloat16), offload=offload,
        layout=Layout(bucket_mib=24), init=initialise, device="cpu",
    )  # fmt: skip
    told: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "losses": [], "norms": []}
    told["shard_s"] = time.monotonic() - began
    generator = torch.Generator().manual_seed(1)
    seconds = []
    for _ in range(steps):
        tokens = torch.randint(size.vocabulary, (size.sequences, size.tokens + 1), generator=generator)
        began = time.monotonic()
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        told["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.monotonic() - began)
        told["losses"].append(loss.item())
        print(f"  step {len(seconds)}: loss {told['losses'][-1]:.4f}, {seconds[-1]:.1f} s", flush=True)
    ledger = zero.ledger()
    told["step_s"] = seconds
    told["tiers"] = {tier: {state: n for state, n in held.items() if n} for tier, held in ledger.tiers.items()}
    told["moved"] = {verb: ledger.traffic[verb].logical for verb in ("read", "write") if verb in ledger.traffic}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, default=4.0)
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (int(asked.limit_gib * GIB),) * 2)
    files = Offload(parameters="nvme", gradients="nvme", optimizer="nvme", path=asked.folder)
    in_memory, from_files = train(TWIN, None, 3), train(TWIN, files, 3)
    same = all(in_memory[key] == from_files[key] for key in ("losses", "norms"))
    print(f"the twin of {in_memory['parameters']:,} parameters: equal losses and norms: {same}", flush=True)
    assert same
    size = Size(asked.blocks, asked.hidden, asked.hidden // 128, 8192, sequences=1)
    told = train(size, files, asked.steps)
    needs = 18 * told["parameters"]
    told |= {
        "date": date.today().isoformat(),
        "limit": f"RLIMIT_DATA {asked.limit_gib} GiB",
        "in_memory_needs": needs,
        "peak_process_memory": status("VmHWM"),
        "peak_private_memory_now": status("VmData"),
        "threads": torch.get_num_threads(),
    }
    out = Path(__file__).parent / "results" / "infinity.json"
    out.write_text(json.dumps(told, indent=1) + "\n")
    held, moved = sum(told["tiers"]["nvme"].values()), told["moved"]
    print(f"{told['parameters']:,} parameters need {needs / GIB:.1f} GiB of states; {held / GIB:.1f} GiB lay in files")
    print(f"under {told['limit']} this process held {told['peak_process_memory'] / GIB:.2f} GiB at most")
    print(f"{moved['read'] / GIB:.1f} GiB were read and {moved['write'] / GIB:.1f} GiB written")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
