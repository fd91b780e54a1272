"""examples/three_layers.py, plain torch, beside the engine at stage 1: the same bits, the same bytes."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ranks
import zeroshard
from zeroshard import Layout, Precision

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "three_layers.py"
ACCUMULATE, STEPS = 2, 3
SMALL, LARGE = 600, 1400  # elements of a bucket: each matrix has more than the first


def three_layers():
    if "three_layers" not in sys.modules:
        spec = importlib.util.spec_from_file_location("three_layers", EXAMPLE)
        sys.modules["three_layers"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["three_layers"]


def by_hand(bucket):
    """The example's own loop; what it holds; which parts of its tensors this rank owns, group by group."""
    ddp, optimizer = three_layers().train(STEPS, ACCUMULATE, bucket)
    weights = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
    buffers = [group.param_buffer for group in ddp.groups]
    cuts = [
        (
            [(each.numel, each.padded_numel) for each in buffer.buckets],
            [each.stop - each.start for each in buffer.fragments],
        )
        for buffer in buffers
    ]
    return weights, optimizer.nbytes(), cuts


def by_the_engine(bucket):
    """The same model and micro-batches through `shard`."""
    example = three_layers()
    torch.manual_seed(0)
    model = example.ToyModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    layout = Layout(units=["layers.1.experts"], align=1, bucket_mib=2 * bucket / 2**20)
    precision = Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16, keep=["*.router.*"])
    zero = zeroshard.shard(model, optimizer, stage=1, precision=precision, layout=layout)
    for step in range(STEPS):
        for turn in range(ACCUMULATE):
            with contextlib.nullcontext() if turn == ACCUMULATE - 1 else zero.no_sync():
                model(example.batch(step, turn * ranks.world() + ranks.rank())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    held = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
    return weights, held, [bucket.numel for bucket in zero.partition.buckets]


@pytest.mark.parametrize("bucket", [SMALL, LARGE])
def test_the_three_layers_have_the_engines_bits_and_bytes(bucket):
    plain, sharded = ranks.run(2, by_hand, bucket), ranks.run(2, by_the_engine, bucket)
    for (weights, held, groups), (want, bytes_of_states, buckets) in zip(plain, sharded, strict=True):
        assert list(weights) == list(want)
        assert all(torch.equal(weights[name], want[name]) for name in want)
        assert held == bytes_of_states
        # The engine's buckets are in the order of their first parameters, whatever their dtype.
        assert sorted(padded for of_kind, _ in groups for _, padded in of_kind) == sorted(buckets)
    assert all(torch.equal(plain[0][0][name], plain[1][0][name]) for name in plain[0][0])
    assert not torch.equal(plain[0][0]["layers.0.fc1.weight"], three_layers().ToyModel().layers[0].fc1.weight)


# As text B's listing has them, but for `reduce_scatter` and `all_gather`, which its prose names otherwise.
NAMES = """padded_numel shard_numel _local_shard _data _views get_views reduce_scatter all_gather param_buffer grad_buffer
    main_grad _init_buffers sync_grads sync_params reduce_scatter_grads allgather_params get_grad_shard get_param_shard
    write_param_shard shard_main_param shard_fp32 adam step MLP ToyModel Buffer DistributedDataParallel DistributedOptimizer"""


@pytest.mark.parametrize("name", NAMES.split())
def test_the_example_has_the_texts_names(name):
    assert re.search(rf"\b{name}\b", EXAMPLE.read_text())


def test_what_the_three_layers_are_cut_into():
    """Buffers by kind and dtype, several buckets, padding, and tensors of which each rank owns a part."""
    (_, _, first), (_, _, second) = ranks.run(2, by_hand, LARGE)
    assert [len(buckets) > 1 for buckets, _ in first] == [True, False, True]  # dense layers, the fp32 router, experts
    assert any(padded > numel for buckets, _ in first for numel, padded in buckets)
    cuts = []
    for (buckets, mine), (_, theirs) in zip(first, second, strict=True):
        owned = list(zip(mine, theirs, strict=True))
        assert sum(map(sum, owned)) == sum(numel for numel, _ in buckets)
        assert any(a and b for a, b in owned)
        cuts += owned
    assert any(not a for a, _ in cuts) and any(not b for _, b in cuts)


@pytest.mark.full
def test_the_example_is_plain_torch_and_runs():
    assert "zeroshard" not in {line.split()[1].split(".")[0] for line in EXAMPLE.read_text().splitlines()
                               if line.startswith(("import ", "from "))}  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    *steps, first, second = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in steps] == ["step 0", "step 1", "step 2"]
    assert [line.partition(" holds {'parameters': ")[0] for line in (first, second)] == ["rank 0", "rank 1"]
    assert "Warning" not in done.stderr
