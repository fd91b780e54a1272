"""What the jobs here share: a model, micro-batches, the loop in plain PyTorch and with zeroshard, and the comparison.

A job is a file with `theirs(folder, rank)`, a loop with another engine. `python examples/referee/JOB.py FOLDER` runs
that loop, the plain loop on one rank and zeroshard's on two, and compares their logs with `zeroshard diff`.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zeroshard

RANKS = 2
MICRO = [4, 4]  # micro-batches of each step, over all ranks
ENGINES = Path(sys.prefix) / "engines"  # `make referee` installs each version into a folder of its own


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def batch(step, index):
    """Micro-batch `index` of all ranks together: rank r has those with index % RANKS == r."""
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def mse(model, step, index):
    x, y = batch(step, index)
    return F.mse_loss(model(x), y)


def even(step, index, micro):
    """The part of a micro-batch in the mean of its step."""
    return 1 / micro


class Tokens(nn.Module):
    """A language model that is as small as can be: each token predicts a label."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))


def tokens(step, index, padding=3):
    """A micro-batch of tokens; each has more padding than the last, and its labels there are -100."""
    generator = torch.Generator().manual_seed(100 * step + index)
    ids, labels = torch.randint(16, (2, 4, 12), generator=generator)
    labels[:, 12 - padding * index :] = -100
    return {"input_ids": ids, "labels": labels}


def tokens_share(step, index, micro):
    """The part of a micro-batch in the mean over all tokens of its step."""
    counts = [int((tokens(step, each)["labels"] != -100).sum()) for each in range(micro)]
    return counts[index] / sum(counts)


def token_loss(model, step, index, padding=3, smoothing=0.0):
    pair = tokens(step, index, padding)
    logits = model(pair["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, pair["labels"].flatten(), label_smoothing=smoothing)


def deepspeed_start():
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for minutes
    deepspeed.init_distributed("gloo")


def deepspeed_engine(model=None, **settings):
    import deepspeed

    deepspeed_start()
    model = build() if model is None else model
    common = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config={**common, **settings}, dist_init_required=False
    )[0]


@torch.no_grad()  # or torch 2.13 refuses how DeepSpeed 0.18.8 gathers the weights on CPUs
def deepspeed_step(engine):
    engine.step()


def loop(folder, stage=None, micro=MICRO, build=build, loss_of=mse, share=even):
    """The right loop: in plain PyTorch on one rank, or with zeroshard at a stage on each rank."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage)
    rank, ranks = (zero.rank, RANKS) if zero else (0, 1)
    with zeroshard.RunLog(folder, model, optimizer, zero=zero) as log:
        for step, count in enumerate(micro):
            for index in range(rank, count, ranks):
                loss = loss_of(model, step, index)
                (loss * share(step, index, count) * ranks).backward()  # zeroshard averages over the ranks
                log.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def run(theirs, engine, fixed=None, ranks=RANKS, stage=2, **job):
    """Run a job. engine: the version that has the bug; fixed: one that has not; stage: of zeroshard's loop."""
    if len(sys.argv) == 3:  # a rank
        theirs(Path(sys.argv[1]), int(os.environ["RANK"]))
        return dist.destroy_process_group() if dist.is_initialized() else None
    runs = Path(sys.argv[1])
    torch.set_num_threads(1)  # as on the ranks: bits depend on it
    loop(runs / "right", **job)
    zeroshard.world(RANKS).run(partial(loop, runs / "zeroshard", stage, **job))
    for name, version in {"theirs": engine, "fixed": fixed}.items():
        if version is not None:
            _ranks(runs / name, version, ranks)
            _compare(runs, name, version)
    return _compare(runs, "zeroshard", "the same job")


def _ranks(folder, version, ranks):
    """Run `theirs` on ranks of its own, with an engine's version first on the path."""
    path = os.pathsep.join([str(ENGINES / version), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "RANK": "0"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, sys.argv[0], str(folder), "rank"],
        capture_output=True, text=True, timeout=240, check=False, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{version}: {sys.argv[0]} failed\n{done.stderr[-4000:]}")


def _compare(runs, name, version):
    print(f"\n{name}: {version}", flush=True)
    subprocess.run([sys.executable, "-m", "zeroshard", "diff", "right", name], cwd=runs, check=False)
