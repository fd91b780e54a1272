"""`zeroshard ckpt`: what is in a checkpoint, whether every byte is right, in what two differ; exit codes and JSON."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import zeroshard
from test_checkpoint import build, step
from test_export import Largest, contents
from zeroshard.checkpoint import staging as workplace
from zeroshard.checkpoint.manifest import Saved
from zeroshard.cli import difference
from zeroshard.integrations.export import Wanted, export_saved


def saves(case, path, stage, options, steps=2, extra=None):
    model, optimizer, zero = build(case, stage, **options)
    for number in range(steps):
        step(case, model, optimizer, number)
    zero.save(path, extra={"position": steps, **(extra or {})})


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


# -------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_says_what_is_in_it_and_what_wrote_it(ranks, tmp_path, command):
    extra = {"note": "x", "limit": math.inf, "pair": (1, torch.ones(2, 3)), "none": []}
    ranks.run(2, saves, "gpt", tmp_path / "a", 2, {"dtype": torch.bfloat16}, 2, extra)
    code, out, _ = command("ckpt", "inspect", tmp_path / "a", "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found) == {
        "path", "version", "saved", "ranks", "stage", "seed", "torch", "python", "threads", "numel", "nbytes", "files",
        "parameters", "buffers", "optimizers", "extra",
    }  # fmt: skip
    assert (found["ranks"], found["stage"], found["torch"]) == (2, 2, torch.__version__)
    assert found["nbytes"] == sum((tmp_path / "a" / name).stat().st_size for name in found["files"])
    model, _optimizer, _zero = build("gpt", 0)
    shapes = {name: list(param.shape) for name, param in model.named_parameters()}
    parameters = {each["name"]: each for each in found["parameters"]}
    assert {name: each["shape"] for name, each in parameters.items()} == shapes
    assert found["numel"] == sum(map(math.prod, shapes.values()))
    (tied,) = (each for each in found["parameters"] if len(each["names"]) == 2)
    count = math.prod(tied["shape"])
    assert tied["dtype"] == "BF16"
    assert tied["states"]["value"] == {"shape": tied["shape"], "dtype": "F32", "nbytes": 4 * count}
    assert tied["states"]["exp_avg"] == tied["states"]["value"]
    assert tied["states"]["step"] == {"shape": [], "dtype": "F32", "nbytes": 4}
    assert found["optimizers"][0]["class"] == "AdamW"
    assert found["optimizers"][0]["groups"][0]["options"]["lr"] == 1e-2
    assert {each["name"]: each["value"] for each in found["extra"]} == {
        "extra": {"map": 5}, "extra.position": 2, "extra.note": "x", "extra.limit": "inf", "extra.pair": {"tuple": 2},
        "extra.pair.0": 1, "extra.pair.1": {"shape": [2, 3], "dtype": "F32", "nbytes": 24}, "extra.none": {"list": 0},
    }  # fmt: skip
    code, out, _ = command("ckpt", "inspect", tmp_path / "a")
    assert code == 0
    assert "by 2 ranks at stage 2" in out and f"{found['numel']:,} parameters in {len(shapes)} tensors" in out
    out = command("ckpt", "inspect", tmp_path / "a", tied["name"])[1]
    assert re.search(rf"{' = '.join(tied['names'])} .* BF16 +F32 +F32 +F32 +F32, one", out)


def deep(path, blocks=9):
    """Save a model of 38 parameters and 9 buffers, most of them in equal blocks, without a step."""
    block = [
        torch.nn.ModuleDict({"attn": torch.nn.Linear(4, 4), "norm": torch.nn.BatchNorm1d(4)}) for _ in range(blocks)
    ]
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(2, 4), "blocks": torch.nn.ModuleList(block)})
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    zero.save(path)


def rows(shown, title):
    """The cells of one table of a command's output."""
    return [line.split() for line in shown.partition(f"{title}\n")[2].partition("\n\n")[0].splitlines()[1:]]


def test_inspect_shows_many_tensors_as_a_tree_and_those_of_a_prefix(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deep("saved")
    what, code_out = "Parameters and what the optimizer keeps", command("ckpt", "inspect", "saved")
    assert code_out[0] == 0
    assert [row for row in rows(code_out[1], what) if len(row) == 4] == [
        ["blocks.*", "36", "252", "1,008"],
        ["blocks.*.attn", "18", "180", "720"],
        ["blocks.*.attn.bias", "9", "36", "144"],
        ["blocks.*.attn.weight", "9", "144", "576"],
        ["blocks.*.norm", "18", "72", "288"],
        ["blocks.*.norm.bias", "9", "36", "144"],
        ["blocks.*.norm.weight", "9", "36", "144"],
        ["embed", "2", "12", "48"],
        ["embed.bias", "1", "4", "16"],
        ["embed.weight", "1", "8", "32"],
    ]
    assert ["blocks.*.norm.num_batches_tracked", "9", "9", "72"] in rows(code_out[1], "Buffers")
    for prefix, names in {
        "embed": ["embed.bias", "embed.weight"],
        "blocks.1.attn.": ["blocks.1.attn.bias", "blocks.1.attn.weight"],
        "blocks.*.norm.bias": [f"blocks.{number}.norm.bias" for number in range(9)],
    }.items():
        code, out, _ = command("ckpt", "inspect", "saved", prefix)
        assert (code, [row[0] for row in rows(out, what)]) == (0, names)
        assert "Optimizer 0" not in out
        found = json.loads(command("ckpt", "inspect", "saved", prefix, "--json")[1])
        assert ([each["name"] for each in found["parameters"]], found["prefix"]) == (names, prefix)
    code, out, error = command("ckpt", "inspect", "saved", "block")
    assert (code, out) == (2, "")
    assert error.startswith("zeroshard: saved: no tensor's name begins with 'block'; instead: blocks.*, ")
    code, _, error = command("ckpt", "inspect", ".", "embed")
    assert (code, error.partition(": ")[2]) == (
        2, ".: a folder of checkpoints, and 'embed' is about one; instead: one of saved\n"
    )  # fmt: skip


def test_inspect_lists_a_folder_of_checkpoints(tmp_path, command):
    for name in ("b", "a", "c", "d"):
        saves("gpt", tmp_path / name, 3, {}, steps=0)
    (tmp_path / "c" / "rank00000.safetensors").write_bytes(b"short")
    (tmp_path / "d" / "manifest.json").unlink()
    machine, _, *rest = workplace.owner().split("-")
    parent = os.getppid()
    mine = f"{machine}-{parent}-{workplace._started(parent)}-{rest[-1]}"
    dead = "-".join((machine, str(1 << 30), *rest))
    for owner in (mine, dead):
        workplace.place_beside(tmp_path / "e", owner).mkdir()
    (tmp_path / "notes").mkdir()
    code, out, _ = command("ckpt", "inspect", tmp_path, "--json")
    found = json.loads(out)["checkpoints"]
    assert code == 0
    assert [(row["name"], row["state"]) for row in found] == [
        ("b", "complete"), ("a", "complete"), *sorted([(f".e.saving-{mine}", "saving"), (f".e.saving-{dead}", "leftover")]),
        ("c", "damaged"), ("d", "damaged"),
    ]  # fmt: skip
    assert "5 bytes" in found[4]["problem"] and "manifest.json" in found[5]["problem"]
    code, out, _ = command("ckpt", "inspect", tmp_path)
    assert code == 0 and [line.split()[:2] for line in out.splitlines() if "  complete  " in line] == [
        ["b", "complete"], ["a", "complete"],
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- verify


def test_verify_reads_every_byte_and_names_the_block(tmp_path, command):
    model = torch.nn.Linear(3 << 20, 1, bias=False)  # 12 MiB: four blocks with the header
    zero = zeroshard.shard(model, None, stage=3)
    zero.save(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    code, out, _ = command("ckpt", "verify", tmp_path / "a", tmp_path / "b")
    nbytes = (tmp_path / "a" / "rank00000.safetensors").stat().st_size
    assert (code, out.count(f": 1 file, {nbytes:,} bytes, 4 blocks: every byte is as written\n")) == (0, 2)
    for at in (5 << 20, 5 << 20 | 7, nbytes - 1):
        flip(tmp_path / "b" / "rank00000.safetensors", at)
    code, out, _ = command("ckpt", "verify", tmp_path / "a", tmp_path / "b")
    assert (code, out.count("\n")) == (1, 3)
    assert "rank00000.safetensors, block 1 (bytes 4194304 to 8388607): digest " in out
    assert f"rank00000.safetensors, block 3 (bytes {12 << 20} to {nbytes - 1}): digest " in out
    code, out, _ = command("ckpt", "verify", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(out)
    assert (code, found["complete"]) == (1, False)
    a, b = found["checkpoints"]
    assert a == {
        "path": str(tmp_path / "a"), "files": {"rank00000.safetensors": nbytes}, "nbytes": nbytes, "blocks": 4, "problems": [],
    }  # fmt: skip
    assert [(each["file"], each["block"]) for each in b["problems"]] == [
        ("rank00000.safetensors", 1), ("rank00000.safetensors", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["manifest", "missing", "longer", "no manifest"])
def test_verify_says_what_is_wrong_beside_blocks(tmp_path, command, what):
    saves("gpt", tmp_path / "a", 3, {}, steps=0)
    file, manifest = tmp_path / "a" / "rank00000.safetensors", tmp_path / "a" / "manifest.json"
    if what == "manifest":
        flip(manifest, 200)
    elif what == "missing":
        file.unlink()
    elif what == "longer":
        file.write_bytes(file.read_bytes() + b"x")
    else:
        manifest.unlink()
    code, out, _ = command("ckpt", "verify", tmp_path / "a")
    assert code == 1 and out.count("\n") == 1
    assert ("manifest.json" if "manifest" in what else "rank00000.safetensors") in out


# ----------------------------------------------------------------------------------------------------------------- diff


@pytest.mark.full
def test_the_same_training_at_other_ranks_differs_in_nothing(ranks, tmp_path, command):
    ranks.run(2, saves, "gpt", tmp_path / "a", 3, {})
    ranks.run(4, saves, "gpt", tmp_path / "b", 1, {"bounds": "model", "bucket_mib": 0.002})
    code, out, _ = command("ckpt", "diff", tmp_path / "a", tmp_path / "b")
    assert (code, "equal, bit for bit" in out) == (0, True)
    code, out, _ = command("ckpt", "diff", tmp_path / "a", tmp_path / "b", "--json")
    assert code == 0 and json.loads(out) == {
        "a": str(tmp_path / "a"), "b": str(tmp_path / "b"), "equal": True, "differences": [],
    }  # fmt: skip


def test_diff_counts_elements_and_the_largest_distance(tmp_path, command):
    """Exact bits: equal NaNs are equal, zeros of two signs are not; what is not finite has no distance."""

    def save(name, edits, lr=1e-3, **extra):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        with torch.no_grad():
            model[0].weight.copy_(torch.arange(16.0).view(4, 4))
            model[0].bias.copy_(torch.tensor([math.nan, 0.0, math.inf, 1.0]))
            for at, value in edits.items():
                model[0].weight.view(-1)[at] = value
            if edits:
                model[0].bias.copy_(torch.tensor([math.nan, -0.0, 2.0, 1.5]))
                model[1].running_mean[1] = 3
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        zeroshard.shard(model, optimizer, stage=3).save(tmp_path / name, extra=extra)

    save("a", {}, table=torch.arange(3), note="x", count=1)
    save("b", {0: 0.5, 7: 4.0}, lr=1e-2, table=torch.tensor([0, 5, 2]), note="x", count=1.0)
    code, out, _ = command("ckpt", "diff", tmp_path / "a", tmp_path / "b", "--json")
    rows = json.loads(out)["differences"]
    assert code == 1
    keys = ("what", "name", "a", "b", "differing", "numel", "largest", "not_finite")
    assert [tuple(row) for row in rows] == [keys] * len(rows)
    assert [tuple(row.values()) for row in rows if row["what"] != "seed"] == [
        ("parameter", "0.bias", "F32", "F32", 3, 4, 0.5, 1),
        ("parameter", "0.weight", "F32", "F32", 2, 16, 3.0, 0),
        ("buffer", "1.running_mean", "F32", "F32", 1, 4, 3.0, 0),
        ("optimizer", "optimizer 0, group 0: lr", 1e-3, 1e-2, None, None, None, None),
        ("extra", "extra.count", 1, 1.0, None, None, None, None),
        ("extra", "extra.table", "I64", "I64", 1, 3, 4.0, 0),
    ]
    code, out, _ = command("ckpt", "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and "6 differences" in out and re.search(r"parameter  0\.weight +F32 +F32 +2 +16 +3 +0", out)


def test_diff_of_other_models_and_optimizers(tmp_path, command):
    def save(name, sizes, momentum, dtype):
        model = torch.nn.Sequential(*(torch.nn.Linear(size, 2, bias=False) for size in sizes)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
        zero = zeroshard.shard(model, optimizer, stage=3)
        sum(layer(torch.ones(1, size, dtype=dtype)).sum() for layer, size in zip(model, sizes, strict=True)).backward()
        optimizer.step()
        zero.save(tmp_path / name)

    torch.manual_seed(0)
    save("a", (3, 4, 5), 0.5, torch.float64)
    save("b", (3, 5), 0.0, torch.float32)
    code, out, _ = command("ckpt", "diff", tmp_path / "a", tmp_path / "b", "--json")
    rows = [tuple(row.values())[:4] for row in json.loads(out)["differences"]]
    assert code == 1
    assert rows[:5] == [
        ("parameter", "0.weight", "2 x 3 F64", "2 x 3 F32"),
        ("parameter", "0.weight", "F64", "F32"),
        ("state", "0.weight momentum_buffer", "a number per element, F64", None),
        ("parameter", "1.weight", "2 x 4 F64", "2 x 5 F32"),
        ("parameter", "2.weight", "2 x 5 F64", None),
    ]
    assert ("optimizer", "optimizer 0, group 0: momentum", 0.5, 0.0) in rows


def test_diff_holds_no_whole_tensor(tmp_path):
    model = torch.nn.Linear(10 << 20, 1, bias=False)
    zero = zeroshard.shard(model, None, stage=3)
    zero.save(tmp_path / "a")
    with torch.no_grad(), zero.gathered():
        model.weight += 1
    zero.save(tmp_path / "b")
    with Saved.open(tmp_path / "a") as a, Saved.open(tmp_path / "b") as b, Largest() as largest:
        (row,) = difference.compare(a, b)
    assert (row.differing, row.numel) == (10 << 20, 10 << 20)
    assert largest.nbytes == 4 << 20


# --------------------------------------------------------------------------------------------------------------- export


def test_export_writes_what_the_library_does(tmp_path, command):
    saves("gpt", tmp_path / "a", 3, {})
    words = ["ckpt", "export", tmp_path / "a", tmp_path / "out", "--dtype", "bf16", "--file-size", "8KB"]
    code, out, _ = command(*words, "--json")
    with Saved.open(tmp_path / "a") as saved:
        files = export_saved(saved, tmp_path / "wanted", Wanted(8000, torch.bfloat16, False))
        tensors = len(saved.parameters) + len(saved.buffers)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted") and len(files) > 1
    told = {"path": str(tmp_path / "a"), "out": str(tmp_path / "out"), "tensors": tensors, "files": dict(files)}
    assert (code, json.loads(out)) == (0, told)
    code, out, _ = command(*words)
    assert code == 0 and out.count(" bytes\n") == len(files)
    (tmp_path / "out" / "mine").write_text("")
    code, _, said = command(*words)
    assert code == 2 and "an export would replace what is no export" in said
    assert command(*words, "--overwrite")[0] == 0 and not (tmp_path / "out" / "mine").exists()
    flip(tmp_path / "a" / "rank00000.safetensors", 20)
    code, _, said = command(*words)
    assert code == 1 and "rank00000.safetensors" in said and said.count("\n") == 1


@pytest.mark.parametrize("words", ["inspect {}", "verify {}", "diff {} {}", "export {} out"])
def test_what_is_no_checkpoint_is_one_line_and_exit_code_2(tmp_path, command, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    for name, says in {
        "none": "no such folder", "file": "no such folder", "empty": "it has no manifest.json",
        "run": f"did you mean {tmp_path}/run/checkpoints?",
    }.items():  # fmt: skip
        code, out, said = command("ckpt", *words.replace("{}", str(tmp_path / name)).split())
        assert (code, out, said.count("\n")) == (2, "", 1)
        assert said.startswith(f"zeroshard: {tmp_path / name}: ") and says in said
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "run"]


def test_bad_options_are_one_line_and_exit_code_2(command):
    for words, says in {
        "--dtype fp8": "'fp8' is not one of 'fp64', 'fp32', 'bf16', 'fp16'",
        "--file-size 5": "--file-size: ",
    }.items():
        code, out, said = command("ckpt", "export", "a", "b", *words.split())
        assert (code, out, said.count("\n")) == (2, "", 1) and says in said


# ------------------------------------------------------------------------------------------------------------- the page


@pytest.mark.filterwarnings("ignore:torch.distributed")  # of its section on DCP
def test_the_page_shows_what_the_commands_print(tmp_path, monkeypatch, capsys, command):
    """docs/checkpoints.md, its snippets and then its blocks; `…` stands for what differs from run to run."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for snippet in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(snippet, "checkpoints.md", "exec"), scope)
    capsys.readouterr()  # what a snippet prints
    blocks = re.findall(r"^```console\n\$ zeroshard (.*)\n((?:.|\n)*?)^```$", page, re.MULTILINE)
    assert [words.split()[1] for words, _ in blocks] == ["inspect", "inspect", "verify", "diff", "export"]
    for words, shown in blocks:
        code, out, _ = command(*words.split())
        assert code == (1 if " diff " in words else 0)
        printed = "\n".join(line.rstrip() for line in out.strip("\n").splitlines())
        pattern = re.sub(r"\\?…", "(.|\n)*", re.escape(shown.strip("\n")))
        assert re.fullmatch(re.sub(r"(\\ )+", " +", pattern), re.sub("^ +", " ", printed, flags=re.MULTILINE)), words
