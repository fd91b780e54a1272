"""The benchmark runs, and its report has what it says."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench import io as disk
from bench import pairs

ROOT = Path(__file__).parents[2]


def bench(module, *arguments, out, name=None):
    call = [sys.executable, "-W", "ignore", "-m", f"bench.{module}", *map(str, arguments), "--out", str(out)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    name = name or module.rpartition(".")[2]
    return json.loads((out / f"{name}.json").read_text()), (out / f"{name}.md").read_text(), done.stdout


@pytest.mark.full
def test_what_is_counted_of_thousands_of_ranks_is_in_the_documents():
    program = """
from bench import scale
for what, how, text in scale.rows():
    if how == "counted":
        print(f"| {what} | {how} | " + " | ".join(text(ranks, {}) for ranks in scale.RANKS) + " |")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    told = done.stdout.splitlines()
    assert len(told) == 6 and set(told) <= set((ROOT / "docs" / "clusters.md").read_text().splitlines()), done


@pytest.mark.slow
def test_one_round_of_training(tmp_path):
    names = ["limit", "zeroshard 2"]
    case = ["--sizes", "tiny", "--dtypes", "fp32", "--ranks", 2, "--rounds", 1, "--steps", 1, "--backends", *names]
    result, text, printed = bench("train", *case, out=tmp_path)
    assert result["date"] == text[:10]
    assert [row["back-end"] for row in result["rows"]] == names
    limit, ours = result["rows"]
    assert limit["over the limit"] == "1.00 [1.00, 1.00]"
    assert limit["wire B/param"] < 0.1  # nothing but the agreements around a run
    assert 4.0 <= ours["wire B/param"] < 5.0  # 2 passes of 4 bytes, half of each sent; padding and headers
    assert (limit["against zeroshard's"], ours["against zeroshard's"]) == ("-", "-")
    assert text.count("\n| tiny | fp32 | 2 |") == 2
    assert printed == text + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("pair", pairs.PAIRS)
def test_settings_beside_each_other(tmp_path, pair):
    """Ratios are over the first. Split masters send as much; weights in 8 bits less, and Muon has the losses of DDP's."""
    result, text, _ = bench(
        "pairs", pair, "--size", "tiny", "--rounds", 1, "--steps", 1, out=tmp_path, name=f"pairs-{pair}"
    )
    first, *_ = result["rows"]
    assert first["over the first"] == "1.00 [1.00, 1.00]"
    assert [row["back-end"] for row in result["rows"]] == pairs.PAIRS[pair][1]
    sent, losses = ([row[key] for row in result["rows"]] for key in ("wire B/param", "final loss"))
    assert sent[-1] < sent[0] if pair == "fp8" else losses[-1] == losses[0]
    assert f"| tiny | {first['dtype']} | 2 | {first['back-end']} |" in text


@pytest.mark.slow
def test_one_round_of_what_a_gpu_is_asked(tmp_path):
    rows = ["plain", "stage 3", "stage 2, optimizer in host memory", "stage 3, optimizer in files"]
    case = ["--device", "cpu", "--size", "tiny", "--rounds", 1, "--steps", 1, "--folder", tmp_path, "--rows", *rows]
    result, text, _ = bench("gpu.speed", *case, out=tmp_path)
    assert [row["row"] for row in result["rows"]] == rows
    held = [row["held"] for row in result["rows"]]
    assert held[0] == "-"
    assert [[part.split()[0] for part in each.split(", ")] for each in held[1:]] == [
        ["device"],
        ["device", "host"],
        ["device", "nvme", "host"],
    ]
    assert text.count("\n| stage ") == 3


@pytest.mark.slow
def test_one_round_of_checkpoints(tmp_path):
    result, text, _ = bench(
        "checkpoint", "--mib", 96, "--ranks", 1, 2, "--rounds", 1, "--where", tmp_path, out=tmp_path
    )
    cases = [(row["ranks"], row["move"], row["way"]) for row in result["rows"]]
    moves = ["save", "load, cold", "load, hot"]
    ways = ("zeroshard", "safetensors", "safetensors, checked", "dcp")
    assert cases == [(n, move, way) for n in (1, 2) for move in moves for way in ways]
    assert result["nbytes"] == 2 * 12 * (2048**2 + 2048) + 4 * 4  # a step count for each parameter
    assert not list(tmp_path.glob("bench-*"))
    assert text.count("\n| 2 | save |") == len(ways)


@pytest.mark.slow
def test_every_backend_that_is_installed_trains_the_same(tmp_path):
    case = ["--sizes", "tiny", "--dtypes", "fp32", "--ranks", 2, "--rounds", 1, "--steps", 1]
    result, _, _ = bench("train", *case, out=tmp_path)
    for row in result["rows"][1:]:
        told = row["against zeroshard's"]
        # DeepSpeed divides before it adds; fairscale's losses drift
        allowed = {"Deep": 1e-5, "fair": 1e-2}.get(row["back-end"][:4], 0.0)
        assert told == "same bits" or abs(float(told)) < allowed, row


@pytest.mark.slow
def test_one_round_of_two_trees(tmp_path):
    """Of this one and itself."""
    case = [ROOT, "--size", "tiny", "--stages", 3, "--rounds", 1, "--steps", 1]
    result, text, _ = bench("trees", *case, out=tmp_path)
    assert [row["tree"] for row in result["rows"]] == ["old", "new", "new again"]
    assert {row["losses"] for row in result["rows"]} == {"same bits"}
    assert result["old"] == result["new"]
    assert text.count("\n| tiny | fp32 | 2 | 3 |") == 3


@pytest.mark.slow
def test_one_round_of_tensors(tmp_path):
    result, _, _ = bench("tensors", "--counts", 100, 200, "--rounds", 1, out=tmp_path)
    assert [row["tensors"] for row in result["rows"]] == [100, 200]
    plot = (tmp_path / "tensors.svg").read_text()
    assert plot.count("<polyline") == 7
    ElementTree.fromstring(plot)
    clipped = json.loads((tmp_path / "tensors-clipped.json").read_text())
    assert (clipped["clipped"], [[*row] for row in clipped["rows"]]) == (True, [[*row] for row in result["rows"]])
    assert {"plain", "stage 0", "stage 3", "DDP", "FSDP2"} < {*result["rows"][0]}


def test_a_disk_is_measured_by_the_engines_own_files(tmp_path):
    """And by the calls alone, in whole slots; nothing is left on the disk."""
    setup = disk.Setup(str(tmp_path), 1 << 20, 1 << 16, 2, direct=True, rounds=2)
    assert (setup.slot, setup.slots) == (1 << 18, 4)
    rates, _ = disk.measure(setup)
    assert {way: {pattern: len(each) for pattern, each in found.items()} for way, found in rates.items()} == {
        way: {"read": 2, "write": 2, "both": 2} for way in ("engine", "calls")
    }
    assert min(rate for found in rates.values() for each in found.values() for rate in each) > 0
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    for wrong in ({"nbytes": 4 << 16}, {"block": 1000}):
        with pytest.raises(SystemExit, match="must be"):
            disk.Setup(**{"folder": "", "nbytes": 1 << 20, "block": 1 << 17, "depth": 2, "direct": True, **wrong})


@pytest.mark.slow
def test_the_line_of_a_disk_is_of_its_medians(tmp_path):
    result, text, _ = bench("io", tmp_path, "--size", "8MiB", "--block", "64KiB", "--rounds", 1, out=tmp_path / "out")
    (read,), (write,), _ = result["rates"]["engine"].values()
    assert f"zeroshard plan --disk-read {read / 1e9:.3g} --disk-write {write / 1e9:.3g}" in text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_one_round_of_offload(tmp_path):
    """Every way is there, a step moves 24 bytes per parameter, and nothing is left on the disk."""
    case = ["--layers", 5, "--rounds", 1, "--threads", 1, "--where", tmp_path]
    result, text, printed = bench("offload", *case, out=tmp_path)
    ways = [row["way"] for row in result["rows"] if row["where"] == "files"]
    assert ways[:3] == ["step, states in files", "its files alone", "its arithmetic alone"]
    assert "the calls alone" in ways
    found = result["files"]
    assert found["numel"] == 5 * 2048**2
    assert found["bytes"] == 24 * found["numel"]
    theirs = result["memory"]["1"]["step / DeepSpeedCPUAdam"]
    assert ("beside DeepSpeedCPUAdam: not installed" in text) == (theirs is None)
    assert not list(tmp_path.glob("bench-*"))
    assert text in printed


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[], ["--stops"]], ids=["killed", "stopped"])
def test_rounds_of_the_soak_over_shared_memory(tmp_path, stops):
    """A round in which nobody names the rank, or that leaves a descriptor or a process, ends it with 1."""
    call = [sys.executable, "-W", "ignore", "-m", "bench.soak_shared", "--rounds", "3", *stops]
    done = subprocess.run([*call, "--out", f"{tmp_path}/soak.json"], cwd=ROOT, timeout=200, check=False)
    told = json.loads((tmp_path / "soak.json").read_text())
    assert (done.returncode, told["rounds"], told["violations"]) == (0, 3, [])
