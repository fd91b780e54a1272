"""Programs that users copy train on the accelerator of a machine that has one, and on the CPU of one that has none.

Each is run as it is, alone, on the CPU and where torch finds the emulated device, in a process each.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import emulated
import ranks

ROOT = Path(__file__).parents[2]
LIMIT = 180  # seconds a program may take before it counts as hung
CHOICE = 'torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")\n'
# Runs a program, and then says where its model rests and what it came to. The emulated device computes with the CPU's
# kernels, but has no fused attention of its own.
RUN = """
import hashlib, os, runpy, sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
if sys.argv.pop(1) == "emu":
    from emulated.install import install
    install(0)
torch.manual_seed(0)
with sdpa_kernel(SDPBackend.MATH):
    scope = runpy.run_path(sys.argv.pop(1), run_name="__main__")
zero, model = scope["zero"], scope["model"]
with zero.gathered():
    print("rests on", *sorted({each.device.type for each in model.parameters()}))
    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
os._exit(0)  # as a process with a device in Python has to end
"""


def snippets(page, wanted):
    """The Python of a page that has this in it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.DOTALL)
    return next(code for code in blocks if wanted in code)


PROGRAMS = {
    "README.md": snippets("README.md", "for step in range(30)"),
    "docs/README.md": snippets("docs/README.md", "zeroshard.shard"),
    "docs/your-gpu.md": snippets("docs/your-gpu.md", "zeroshard.shard"),
    "docs/tutorial.md": snippets("docs/tutorial.md", "zero.latest("),
    "examples/train_gpt.py --steps 2": None,
    "examples/generate.py": None,
    "examples/pretrain.py --layers 1 --width 64 --context 16 --steps 2 --every 2 --fp32 --out run": None,
}


def ran(kind, words, tmp_path):
    """What the program prints, and what is said of it."""
    folder = tmp_path / kind
    folder.mkdir()
    name, *rest = words.split()
    if PROGRAMS[words] is not None:
        (folder / "train.py").write_text(PROGRAMS[words])
    program = folder / "train.py" if PROGRAMS[words] is not None else ROOT / name
    places = f"{ROOT / 'tests'}:{os.pathsep.join(sys.path)}"
    done = subprocess.run(
        [sys.executable, "-c", RUN, kind, program, *rest],
        cwd=folder, env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "idle" not in done.stderr
    *printed, where, digest = done.stdout.splitlines()
    assert where == f"rests on {kind}"
    own = r"[\d,]+ (?=bytes)|[\d,]+ tokens/s  MFU [\d.]+%"  # a device has larger buckets, and another speed
    return [re.sub(own, "...", line) for line in printed], digest


@pytest.mark.heavy
@pytest.mark.parametrize("words", [
    pytest.param(words, marks=pytest.mark.full if "/" in words else ()) for words in PROGRAMS
])  # fmt: skip
def test_a_program_trains_where_the_accelerator_is(words, tmp_path):
    """With the CPU's bits on both, as both compute with the CPU's kernels; and it says so in one line that all share."""
    program = PROGRAMS[words] or (ROOT / words.split()[0]).read_text()
    assert program.count(f"device = {CHOICE}") == 1 and "cuda" not in program
    on_cpu, of_cpu = ran("cpu", words, tmp_path)
    assert ran("emu", words, tmp_path) == (on_cpu, of_cpu)


def test_every_example_that_shards_says_where():
    """In the same words; trainers choose by themselves, and a test of an optimizer runs where its model is."""
    chosen = {path.name for path in (ROOT / "examples").glob("*.py") if CHOICE in path.read_text()}
    sharding = {path.name for path in (ROOT / "examples").glob("*.py") if "zeroshard.shard(" in path.read_text()}
    assert chosen >= sharding - {"ray_train.py", "test_own_optimizer.py"}
    assert "device=device" in (ROOT / "examples" / "ray_train.py").read_text()


def first_screen(port):
    """What the README's program prints on this rank, which torchrun seems to have started, and where its model rests."""
    rank, world = f"{ranks.rank()}", f"{ranks.world()}"
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(compile(PROGRAMS["README.md"], "README.md", "exec"), scope := {"__name__": "__main__"})
    return told.getvalue(), {each.device.type for each in scope["model"].parameters()}


@pytest.mark.full
def test_two_ranks_train_on_a_device_each_and_print_what_the_first_screen_shows():
    """Over the device's own backend, which `shard` connects: nothing else of the program says where it runs."""
    (shown,) = re.findall(r"^```\n(step .*?)^```$", (ROOT / "README.md").read_text(), re.M | re.DOTALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (told, where), (nothing, there) = emulated.run(2, first_screen, port, seed=0, group=None)
    assert (told, nothing, where, there) == (shown, "", {"emu"}, {"emu"})
