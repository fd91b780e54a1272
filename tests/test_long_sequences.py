"""examples/long_sequences.py: sequences that ranks divide, beside the same on one rank."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reference
import selection
from zeroshard.errors import CorruptionError
from zeroshard.planner.simulate import simulate

EXAMPLE = Path(__file__).parents[1] / "examples" / "long_sequences.py"


def example():
    if "long_sequences" not in sys.modules:
        spec = importlib.util.spec_from_file_location("long_sequences", EXAMPLE)
        sys.modules["long_sequences"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["long_sequences"]


def trained(sp, stage, tiles, steps=3):
    """Weights, this rank's losses, and the bytes that it holds by state."""
    model, optimizer, zero, batches = example().sharded(sp, stage, tiles)
    losses = example().train(model, optimizer, zero, batches, steps)
    held = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
    with zero.gathered():
        return reference.weights(model), losses, held


@pytest.mark.parametrize("stage", selection.STAGES)
@pytest.mark.parametrize("sp", [2, 4])
def test_ranks_with_a_tile_each_have_the_bits_of_one_rank_with_all_tiles(ranks, sp, stage):
    """Every product has the same operands, and gradients are added up in the order of the tiles, which is the ranks'."""
    want, losses, _ = ranks.run(1, trained, 1, stage, sp)[0]
    told = ranks.run(sp, trained, sp, stage, sp)
    for weights, _, _ in told:
        assert reference.first_difference(weights, want) == ""
    for step, loss in enumerate(losses):  # a mean over all tokens, in another order than that of pieces' means
        assert sum(theirs[step] for _, theirs, _ in told) / sp == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("world", "sp", "tiles", "other"),
    [
        (2, 2, 4, (1, 1, 4)),  # (p0 + p1) + (p2 + p3) is not ((p0 + p1) + p2) + p3
        (4, 4, 4, (1, 1, 1)),  # one product over all tokens adds them up in an order of its own
        (4, 4, 4, (1, 1, 0)),  # plain autograd
        (4, 2, 4, (2, 1, 4)),  # two sequences, of two ranks each
        (4, 2, 0, (2, 1, 0)),
    ],
)
def test_other_tiles_round_otherwise_and_are_near(ranks, world, sp, tiles, other):
    """Bound: of updates of at most 3e-3 each, after gradients that differ in their last bits."""
    (weights, *_), *_ = ranks.run(world, trained, sp, 3, tiles, 1)
    (want, *_), *_ = ranks.run(other[0], trained, other[1], 3, other[2], 1)
    assert max((weights[name] - value).abs().max().item() for name, value in want.items()) < 1e-4


def gradients(sp, tiles):
    model, _, _, batches = example().sharded(sp, 0, tiles)
    model(*batches(1)).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("sp", "tiles"), [(1, 4), (2, 4), (4, 4), (4, 0)])
def test_gradients_are_those_of_plain_autograd_on_one_rank(ranks, sp, tiles):
    """To the last bits of sums of 512 tokens in fp32."""
    want = ranks.run(1, gradients, 1, 0)[0]
    for found in ranks.run(sp, gradients, sp, tiles):
        for name, value in want.items():
            assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def kept(sp, tiles):
    """The bytes that forward keeps for backward on this rank, its batch and the loss among them, beside parameters."""
    model, _, _, batches = example().sharded(sp, 0, tiles)
    given = batches(1)
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if not any(isinstance(each, torch.nn.Parameter) for each in (tensor, tensor._base)):
            saved[storage.data_ptr()] = storage, storage.nbytes()  # held, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*given)
    return sum(nbytes for _, nbytes in saved.values()) + loss.untyped_storage().nbytes()


KEPT = {  # (ranks, tiles) -> bytes, as in the table of docs/meshes.md
    (1, 0): 5_029_896, (2, 0): 2_646_024, (4, 0): 1_323_016, (1, 4): 1_470_468, (2, 4): 866_308, (4, 4): 433_156,
}  # fmt: skip


@pytest.mark.parametrize(("sp", "tiles"), KEPT)
def test_a_simulation_counts_what_a_rank_keeps_and_holds(ranks, monkeypatch, sp, tiles):
    monkeypatch.setenv("SP", str(sp))
    monkeypatch.setenv("TILES", str(tiles))
    told = simulate(f"{EXAMPLE}:job", ranks=sp, stage=3)
    assert ranks.run(sp, kept, sp, tiles) == [told.activations] * sp == [KEPT[sp, tiles]] * sp
    held = ranks.run(sp, trained, sp, 3, tiles, 1)[0][2]
    held.pop("norms", None)  # the example clips, and a simulation does not
    assert held == {state: nbytes for state, nbytes in told.ledger.held.items() if nbytes}
    page = (EXAMPLE.parents[1] / "docs" / "meshes.md").read_text()
    assert f"| {KEPT[sp, tiles]:,} |" in page


def test_it_trains_from_the_command_line(tmp_path):
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE, "--steps", "20"]
    told = subprocess.run(
        [sys.executable, *run], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert told.returncode == 0, told.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", told.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0]


def replayed(sp):
    model, _, zero, batches = example().sharded(sp, 3)

    def work(*given):
        model(*given).backward()

    with pytest.raises(CorruptionError) as error:
        zero.replay(work)(*batches(1))
    return str(error.value), [each.rank for each in error.value.found]


@pytest.mark.parametrize("sp", [2, 4])
def test_a_replay_says_that_ranks_of_one_sequence_depend_on_the_rank(ranks, sp):
    """zeroshard cannot see that they compute one micro-batch together: no rank is accused, though two may agree."""
    for text, accused in ranks.run(4, replayed, sp):
        assert set(accused) == {-1}
        assert "which of them is wrong cannot be told" in text and "depends on the rank" in text
