"""What the tests of trainers share: Accelerate's, the Trainer's, Lightning's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LIMIT = 150  # seconds of a run: each rank imports the trainer first


def run_example(name, folder, *arguments):
    """On two ranks, as torchrun starts them; under 40 lines. Returns what it printed."""
    example = Path(__file__).parents[1] / "examples" / f"{name}.py"
    assert len([line for line in example.read_text().splitlines() if not line.startswith("# ")]) < 40
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(example),
        *arguments,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
    return done.stdout


def same_at_all_stages(name, folder):
    """The losses that an example prints at stages 1 to 3."""
    found = [re.findall(r"'?loss'?:? '?[0-9.]+", run_example(name, folder, str(stage))) for stage in (1, 2, 3)]
    assert found[0] == found[1] == found[2] != []


def fresh():
    """Accelerate's state is the process's: each run starts anew."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerate.utils.set_seed(3)
