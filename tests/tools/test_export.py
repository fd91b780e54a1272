"""Weights for other programs: the same files from a checkpoint and from a running model, in bounded memory."""

import contextlib
import errno
import json
import os
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch.utils._python_dispatch import TorchDispatchMode

import models
import test_experts
import zeroshard
from test_checkpoint import build, step
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.checkpoint.manifest import Saved
from zeroshard.cli.reference import in_8_bits
from zeroshard.errors import CheckpointError, UserError
from zeroshard.integrations import export
from zeroshard.integrations.export import Wanted, export_saved


def from_checkpoint(path, out, *, file_nbytes=5 * 10**9, dtype=None, overwrite=False):
    with Saved.open(path) as saved:
        return export_saved(saved, out, Wanted(file_nbytes, dtype, overwrite))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def after_steps(case, stage, options, steps=2):
    model, optimizer, zero = build(case, stage, **options)
    for number in range(steps):
        step(case, model, optimizer, number)
    return model, zero


def saves_and_exports(case, path, stage, options, wanted):
    model, zero = after_steps(case, stage, options)
    zero.save(path / "checkpoint")
    zero.export(path / "live", **wanted)
    with zero.gathered():
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return state, zero.ledger().held.get("gather", 0)


GRID = {
    "tied, several files": ("gpt", 3, 3, {}, {"file_nbytes": 5000}),
    "masters of bf16 parameters": ("gpt", 2, 3, {"dtype": torch.bfloat16, "bounds": "model"}, {}),
    "bf16 parameters in fp32": ("gpt", 1, 3, {"dtype": torch.bfloat16}, {"dtype": torch.float32}),
    "fp32 parameters in bf16": ("gpt", 3, 0, {}, {"dtype": torch.bfloat16, "file_nbytes": 1 << 16}),
    "sizes that do not divide": ("degenerate", 4, 3, {"bucket_mib": 0.002}, {"file_nbytes": 1}),
    "frozen and not": ("lora", 2, 1, {"bounds": "tensor"}, {}),
    "buffers": ("batchnorm", 2, 3, {}, {"dtype": torch.float16}),
}


@pytest.mark.parametrize("name", GRID)
def test_a_running_model_and_its_checkpoint_give_the_same_files(ranks, tmp_path, name):
    """Byte for byte; and what is in them is `model.state_dict()`, in the dtype that was asked for."""
    case, world, stage, options, wanted = GRID[name]
    outcomes = ranks.run(world, saves_and_exports, case, tmp_path, stage, options, wanted)
    from_checkpoint(tmp_path / "checkpoint", tmp_path / "saved", **wanted)
    live = contents(tmp_path / "live")
    assert live == contents(tmp_path / "saved")
    assert {held for _, held in outcomes} == {0} or stage == 3  # what the gathers took is given back
    state = outcomes[0][0]
    found, removed = {}, {}
    for file in (file for file in live if file.endswith(".safetensors")):
        with safe_open(tmp_path / "live" / file, "pt") as opened:
            removed |= opened.metadata()
        found |= load_file(tmp_path / "live" / file)
    assert removed.pop("format") == "pt" and removed.pop("made_by") == "zeroshard"
    for tied, kept in removed.items():
        found[tied] = found[kept]
    assert found.keys() == state.keys()
    for key, tensor in state.items():
        dtype = wanted.get("dtype") if tensor.is_floating_point() and "dtype" in wanted else tensor.dtype
        assert found[key].dtype == dtype
        if not (options.get("dtype") and dtype == torch.float32):
            assert torch.equal(found[key], tensor.to(dtype)), key
        else:  # the masters: what the parameters were rounded from
            assert torch.equal(found[key].to(tensor.dtype), tensor), key
    if options.get("dtype") and wanted.get("dtype") == torch.float32:
        assert any(not torch.equal(found[key], tensor.float()) for key, tensor in state.items())
    if "model.safetensors" in live:
        assert len(live) == 1
    else:
        index = json.loads(live["model.safetensors.index.json"])
        assert index["metadata"]["total_size"] == sum(t.nbytes for key, t in found.items() if key not in removed)
        assert sorted(index["weight_map"]) == sorted(found.keys() - removed.keys())
        for key, file in index["weight_map"].items():
            with safe_open(tmp_path / "live" / file, "pt") as opened:
                assert key in opened.keys()  # noqa: SIM118


# ------------------------------------------------------------------------------------------------------ drawn settings

PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(param_dtype=torch.bfloat16),
    "split": Precision(param_dtype=torch.bfloat16, split_master=True),
    "8 bits": Precision(param_dtype=torch.bfloat16, fp8=["*.mlp.*.weight"]),
}
OFFLOADS = {
    "device": {},
    "one copy": {"parameters": "shared"},
    "host": {"optimizer": "cpu"},
    "halves": {"optimizer": 0.5, "parameters": "cpu", "gradients": "cpu"},
    "files": {"optimizer": "nvme", "parameters": "nvme"},
}


def drawn(seed):
    """Settings that go together, and what is asked of the export."""
    draw = random.Random(seed)
    while True:
        job = {
            "world": draw.choice([1, 2, 2, 3, 4, 4]),
            "stage": draw.randrange(4),
            "precision": draw.choice(list(PRECISIONS)),
            "offload": draw.choice([*OFFLOADS, "one copy", "one copy"]),
            "bounds": draw.choice(["unit", "model", "tensor"]),
            "mesh": draw.choice(["one team", "replicas", *["optimizer over all"] * 3, "experts"]),
            "frozen": draw.random() < 0.3,
            "then": draw.choice(["", "swapped", "fragments edited"]),
            "dtype": draw.choice([None, None, torch.float32, torch.bfloat16, torch.float64]),
            "file_nbytes": draw.choice([3000, 5 * 10**9]),
        }
        world, stage, precision, offload, bounds, mesh, frozen, then, *_ = job.values()
        refused = [
            mesh in ("replicas", "optimizer over all") and world not in (2, 4),
            mesh == "optimizer over all" and (stage == 0 or bounds == "tensor" or precision == "split"),
            mesh == "experts" and (world != 4 or precision == "8 bits"),
            offload == "one copy" and (world == 1 or stage == 0 or precision in ("split", "8 bits")),
            offload == "one copy" and mesh in ("experts", "optimizer over all"),
            precision == "split" and stage == 3 and offload == "device",
            precision == "8 bits" and frozen,
            then == "fragments edited" and (precision in ("split", "8 bits") or offload == "files"),
        ]
        if not any(refused):
            return job


def sharded_as(job, path):
    dtype = PRECISIONS[job["precision"]].param_dtype or torch.float32
    layout = {"bounds": job["bounds"], "bucket_mib": 0.004}
    settings = {
        "stage": job["stage"],
        "precision": PRECISIONS[job["precision"]],
        "offload": Offload(**OFFLOADS[job["offload"]], path=str(path) if job["offload"] == "files" else None),
    }
    if job["mesh"] == "experts":
        model, optimizer, zero = test_experts.sharded(4, 2, layout=layout, **settings)
        return zero, optimizer, lambda number: test_experts.loss_of(model, number, zero.rank, dtype)
    model = models.build("gpt", hidden=24, tied=True, frozen=("blocks.0",) if job["frozen"] else ())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    spread = "all" if job["mesh"] == "optimizer over all" else "team"
    settings["comm"] = Comm(replicas=1 if job["mesh"] == "one team" else 2, optimizer=spread)
    zero = zeroshard.shard(model, optimizer, layout=Layout(**layout), **settings)
    return zero, optimizer, lambda number: models.loss("gpt", model, models.batch("gpt", number, zero.rank))


def exports(job, path):
    """What `gathered()` shows on this rank where the weights were exported, and saved."""
    zero, optimizer, loss = sharded_as(job, path)
    average = zero.average(0.5)
    for number in range(2):
        loss(number).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    if job["then"] == "fragments edited":
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"]:
                param.mul_(0.75)
    if job["then"] != "swapped":  # there a save is refused
        zero.save(path / "checkpoint")
    with average.swapped() if job["then"] == "swapped" else contextlib.nullcontext():
        zero.export(path / "live", dtype=job["dtype"], file_nbytes=job["file_nbytes"])
        zero.export(path / "masters", dtype=torch.float32)
        with zero.gathered():
            return {name: tensor.detach().clone() for name, tensor in zero.model.named_parameters()}


def weights_in(folder):
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


FIRST = 2  # seed of `make test`: one copy for all ranks


def marked(seed):
    return [] if seed == FIRST else [pytest.mark.full] if seed < 20 else [pytest.mark.slow]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=marked(seed)) for seed in range(60)])
def test_an_export_of_drawn_settings_is_what_gathered_shows(ranks, tmp_path, seed):
    """To the bit, on every rank; and byte for byte what comes from a checkpoint of the same moment."""
    job, path = drawn(seed), tmp_path / str(seed)
    path.mkdir()
    shown = ranks.run(job["world"], exports, job, path)
    live, masters = weights_in(path / "live"), weights_in(path / "masters")
    for name, exported in live.items():
        master = masters[name]
        parts = shown[: len(exported) // len(shown[0][name])]  # of experts two groups of ranks have the half each
        for rank in range(0, job["world"], len(parts)):
            seen = torch.cat([each[name] for each in shown[rank : rank + len(parts)]])
            in_8 = job["precision"] == "8 bits" and re.search(r"\.mlp\..*weight", name)
            assert torch.equal((in_8_bits(master) if in_8 else master).to(seen.dtype), seen), (name, rank, job)
        assert torch.equal(exported, master.to(job["dtype"] or seen.dtype)), (name, job)
    assert {name for each in shown for name in each} == set(live)
    if job["then"] != "swapped":
        from_checkpoint(path / "checkpoint", path / "saved", dtype=job["dtype"], file_nbytes=job["file_nbytes"])
        assert contents(path / "saved") == contents(path / "live"), job


def test_load_model_takes_it(tmp_path):
    model, zero = after_steps("gpt", 3, {})
    zero.export(tmp_path / "out")
    other = models.build("gpt", seed=7, tied=True)
    assert load_model(other, tmp_path / "out" / "model.safetensors") == (set(), [])
    with zero.gathered():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_files_are_filled_in_the_order_of_blocks_up_to_their_bytes(tmp_path):
    """blocks.2 before blocks.10; a tensor larger than a file gets its own; all of a file aligned."""
    kinds = {f"blocks.{at}": export.Kind((3,), torch.bfloat16, [f"blocks.{at}"]) for at in (10, 2, 1)}
    kinds |= {"z": export.Kind((9,), torch.float32, ["z"]), "a": export.Kind((1,), torch.float64, ["a"])}
    weights = export.Weights(tmp_path, kinds, 14)
    weights.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00003.safetensors",
        "blocks.1": "model-00001-of-00003.safetensors",
        "blocks.2": "model-00002-of-00003.safetensors",
        "blocks.10": "model-00002-of-00003.safetensors",
        "z": "model-00003-of-00003.safetensors",
    }
    assert load_file(tmp_path / "model-00001-of-00003.safetensors").keys() == {"a", "blocks.1"}


# ------------------------------------------------------------------------------------------------------ what it replaces


def test_only_an_export_is_replaced(tmp_path):
    _model, zero = after_steps("gpt", 2, {}, steps=0)
    out = tmp_path / "out"
    zero.export(out, file_nbytes=5000)
    zero.export(out)
    assert os.listdir(out) == ["model.safetensors"]  # no file of the earlier export is left
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"would replace what is no export(.|\n)*tokenizer.json"):
        zero.export(out)
    assert sorted(os.listdir(out)) == ["model.safetensors", "tokenizer.json"]
    zero.export(out, overwrite=True)
    assert os.listdir(out) == ["model.safetensors"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="would replace what is no export"):
        zero.export(tmp_path / "file", overwrite=True)
    zero.save(tmp_path / "checkpoint")
    with pytest.raises(UserError, match=r"would replace what is no export(.|\n)*manifest.json"):
        from_checkpoint(tmp_path / "checkpoint", tmp_path / "checkpoint")
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "file", "out"]


def test_another_programs_weights_are_not_replaced(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _model, zero = after_steps("gpt", 0, {}, steps=0)
    with pytest.raises(CheckpointError, match="would replace what is no export"):
        zero.export(tmp_path)


def test_what_cannot_be_asked_is_refused_with_a_reason(tmp_path):
    _model, zero = after_steps("gpt", 0, {}, steps=0)
    with pytest.raises(UserError, match="file_nbytes counts bytes"):
        zero.export(tmp_path / "out", file_nbytes="5GB")
    for dtype in (torch.int8, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(UserError, match="floating-point numbers"):
            zero.export(tmp_path / "out", dtype=dtype)


def test_numbers_of_other_kinds_are_exported_as_they_are(tmp_path):
    """Complex ones, and eight bits that mean something only with a scale; the same from a checkpoint."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("turns", torch.tensor([1 + 2j, 3 - 4j]))
    model.register_buffer("eighths", torch.tensor([0.5, 448]).to(torch.float8_e4m3fn))
    zero = zeroshard.shard(model, None)
    zero.export(tmp_path / "out", dtype=torch.bfloat16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["turns"], model.turns) and found["weight"].dtype == torch.bfloat16
    assert found["eighths"].dtype == torch.float8_e4m3fn and found["eighths"].float().tolist() == [0.5, 448.0]
    zero.save(tmp_path / "saved")
    with Saved.open(tmp_path / "saved") as saved:
        export_saved(saved, tmp_path / "again", Wanted(5 * 10**9, torch.bfloat16, overwrite=False))
    files_of = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert files_of[0] == files_of[1]


# ------------------------------------------------------------------------------------------------------------- failures


def fails_to_export(path, rank, what):
    model, zero = after_steps("gpt", 3, {}, steps=0)
    real = export._write
    calls = []

    def full(*args):
        calls.append(args)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    if what == "too large":
        with zero.gathered():
            model.head.weight.data[-1, -1] = 1e6  # the last rank's
    try:
        if what == "disk" and zero.rank == rank:
            export._write = full
        zero.export(path / "out", dtype=torch.float16 if what == "too large" else None)
    except CheckpointError as error:
        return f"{error}", sorted(os.listdir(path))
    finally:
        export._write = real
    return "", []


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("disk", "rank 0: OSError: .* No space left"),
        ("too large", r"got: rank 2: a value is too large(.|\n)*got: 1000000.0"),
    ],
)
def test_a_failure_on_one_rank_raises_alike_on_all_and_leaves_nothing(ranks, tmp_path, what, says):
    outcomes = ranks.run(3, fails_to_export, tmp_path, 0, what)
    assert len(set(map(str, outcomes))) == 1
    message, left = outcomes[0]
    assert "the weights were not exported" in message and left == []
    assert re.search(says, message)


def exports_differently(path):
    _model, zero = after_steps("gpt", 3, {}, steps=0)
    try:
        zero.export(path / "out", dtype=torch.bfloat16 if zero.rank else None)
    except zeroshard.Error as error:
        return type(error).__name__
    return ""


def test_ranks_that_ask_for_different_things_are_told(ranks, tmp_path):
    assert ranks.run(2, exports_differently, tmp_path) == ["PeerError", "PeerError"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    _model, zero = after_steps("gpt", 0, {}, steps=0)
    zero.save(tmp_path / "a")
    file = tmp_path / "a" / "rank00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="block 0"):
        from_checkpoint(tmp_path / "a", tmp_path / "out")
    assert os.listdir(tmp_path) == ["a"]


# --------------------------------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


def test_no_whole_tensor_is_held_while_a_checkpoint_is_exported(tmp_path):
    """A parameter of 40 MiB: nothing larger than a block is ever made of it, whatever it is cast to."""
    model = torch.nn.Linear(10 << 20, 1, bias=False)
    zeroshard.shard(model, None, stage=3).save(tmp_path / "a")
    with Largest() as largest:
        from_checkpoint(tmp_path / "a", tmp_path / "out", dtype=torch.float64)
    assert largest.nbytes == 2 * (4 << 20)  # the cast one
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 80 << 20


@pytest.mark.slow
def test_a_gigabyte_is_exported_under_300_megabytes(tmp_path):
    """Above an interpreter that has imported torch and what exports; both ends in processes of their own."""
    program = """
        import sys, torch, zeroshard
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(16)))
        zeroshard.shard(model, None, stage=3).save(sys.argv[1])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), tmp_path / "a"], check=True)
    program = """
        import sys
        from pathlib import Path
        from zeroshard.integrations.export import Wanted, export_saved
        from zeroshard.checkpoint.manifest import Saved

        def most():
            return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))

        before = most()
        with Saved.open(Path(sys.argv[1])) as saved:
            files = export_saved(saved, Path(sys.argv[2]), Wanted(300_000_000, None, False))
        print(most() - before, sum(nbytes for _, nbytes in files), len(files))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), tmp_path / "a", tmp_path / "out"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    took, nbytes, files = map(int, done.stdout.split())
    assert nbytes > 1 << 30 and files == 4
    assert took < 300e6


# ---------------------------------------------------------------------------------------------------------- its readers


class Config:
    """What Hugging Face's configurations can do."""

    def to_json_file(self, path):
        Path(path).write_text('{"hidden": 3}')


def test_a_models_configuration_is_written_along(tmp_path):
    model = torch.nn.Linear(3, 3)
    model.config = Config()
    zero = zeroshard.shard(model, None, stage=1)
    zero.export(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"architectures": ["Linear"], "hidden": 3}
    zero.export(tmp_path / "out")  # over its own
    zero.save(tmp_path / "a")
    with pytest.raises(UserError, match=r"config.json"):  # which an export from files alone could not write anew
        from_checkpoint(tmp_path / "a", tmp_path / "out")


def test_transformers_takes_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    zero = zeroshard.shard(model, None, stage=3)
    with zero.gathered():
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for file_nbytes in (5 * 10**9, 5000):
        zero.export(tmp_path / "out", file_nbytes=file_nbytes)
        loaded, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values()), info
        found = loaded.state_dict()
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight


@pytest.mark.row(71)
@pytest.mark.parametrize("name", ["__metadata__", "half \ud800"])
@pytest.mark.parametrize("buffer", [False, True], ids=["parameter", "buffer"])
def test_a_name_that_safetensors_cannot_hold_is_refused_before_anything_is_written(tmp_path, name, buffer):
    """By an export of a model and of its checkpoint; a checkpoint holds any name."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer(name, torch.ones(2)) if buffer else model.register_parameter(
        name, torch.nn.Parameter(torch.ones(2))
    )
    zero = zeroshard.shard(model, None, stage=1)
    zero.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="cannot hold a tensor of this name"):
        zero.export(tmp_path / "out")
    with Saved.open(tmp_path / "saved") as saved, pytest.raises(UserError, match="cannot hold a tensor of this name"):
        export_saved(saved, tmp_path / "out", Wanted(1 << 30, None, overwrite=False))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    zero.load(tmp_path / "saved")


@pytest.mark.row(71)
def test_a_tie_whose_name_is_that_of_an_exports_own_mark_is_refused(tmp_path):
    model, tied = torch.nn.Module(), torch.nn.Parameter(torch.ones(2))
    model.register_parameter("a", tied)
    model.register_parameter("made_by", tied)
    zero = zeroshard.shard(model, None, stage=1)
    with pytest.raises(CheckpointError, match="cannot hold a tensor of this name"):
        zero.export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
