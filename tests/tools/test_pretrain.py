"""examples/pretrain.py: trains on one rank and on two, goes on from a checkpoint with equal bits, and plans what it holds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import reference

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain.py"
SMALL = [
    "--layers=1", "--width=64", "--context=16", "--micro-batches=2", "--steps=4", "--every=2", "--warm-up=2",
]  # fmt: skip
HELD = re.compile(r"([\d,]+) bytes of (\w+)")


def trained(ranks, folder, *more):
    """What rank 0 prints, and the weights at the end."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*start, EXAMPLE, *SMALL, "--out", folder, *more], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (weights,) = (folder / "weights").glob("*.safetensors")
    return done.stdout, load_file(weights)


def number(text):
    return int(text.replace(",", ""))


def test_it_is_one_file_of_fewer_than_250_lines():
    assert len(EXAMPLE.read_text().splitlines()) < 250


@pytest.mark.timeout(290)
def test_two_ranks_go_on_where_one_stopped_with_its_bits(tmp_path):
    told, whole = trained(1, tmp_path / "whole")
    assert [step for step in range(1, 5) if f"step {step}  loss " in told] == [1, 2, 3, 4]
    assert re.search(r"step 4  validation loss \d\.\d{4}\n", told) and "tokens/s  MFU" in told
    held = {state: number(nbytes) for nbytes, state in HELD.findall(told.partition("rank 0 holds ")[2])}
    planned = re.search(r"planned for a rank of 1: ([\d,]+) bytes between steps", told).group(1)
    assert sum(nbytes for state, nbytes in held.items() if state != "norms") == number(planned)
    shutil.copytree(tmp_path / "whole" / "step-0000002", tmp_path / "resumed" / "step-0000002")
    told, resumed = trained(2, tmp_path / "resumed")
    assert [step for step in range(1, 5) if f"step {step}  loss " in told] == [3, 4]
    reference.assert_same(resumed, whole)


@pytest.mark.full
@pytest.mark.timeout(290)
def test_a_folder_of_tokens_is_trained_on_in_the_order_of_its_names(tmp_path):
    """Of .npy and .bin files alike; the last twentieth of the last file is held out."""
    folder, draw = tmp_path / "tokens", np.random.default_rng(0)
    folder.mkdir()
    first, last = (draw.integers(0, 64, size, dtype=np.uint16) for size in (16 * 20 + 5, 16 * 40 + 1))
    np.save(folder / "0.npy", first)
    last.tofile(folder / "1.bin")
    (folder / "notes.txt").write_text("no tokens")
    told, _ = trained(1, tmp_path / "out", "--data", folder, "--vocab", "64")
    assert f"{20 + 37:,} sequences" in told  # (325 - 1) // 16, and (608 - 1) // 16
