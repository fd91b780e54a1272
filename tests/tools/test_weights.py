"""`zeroshard.load`: each rank reads its own parts of a folder of weights, into a model that has no memory yet."""

import inspect
import json

import pytest
import torch
from safetensors.torch import save_file, save_model

import models
import reference
import zeroshard
from test_checkpoint import build, digest, same, step
from test_memory import live as live_storages
from test_memory import since
from zeroshard import Precision
from zeroshard.errors import CheckpointError
from zeroshard.integrations import weights


def folder_of(model, path, files=1):
    """As Hugging Face writes one: tied tensors once, an index where there are several files."""
    path.mkdir()
    if files == 1:
        save_model(model, str(path / "model.safetensors"))
        return
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    tensors |= {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    names = sorted(tensors)
    listed = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: tensors[name] for name in names[number::files]}, str(path / file), {"format": "pt"})
        listed |= dict.fromkeys(names[number::files], file)
    (path / weights.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def on_meta(case, **options):
    with torch.device("meta"):
        return models.build(case, seed=77, **options)


def loads(case, options, path, stage, dtype):
    model = on_meta(case, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = Precision(param_dtype=dtype, cast_inputs=False) if dtype else None
    zero = zeroshard.load(model, path, optimizer, stage=stage, precision=precision)
    with zero.gathered():
        found = reference.weights(model), {name: tensor.clone() for name, tensor in model.named_buffers()}
    masters = digest(model, optimizer, zero)[1]
    step(case, model, optimizer, 0)
    return *found, masters


@pytest.mark.parametrize(("world", "stage", "files"), [(1, 3, 1), (2, 3, 3), (3, 1, 2), (2, 0, 1), (4, 2, 3)])
@pytest.mark.parametrize("case", ["gpt", "degenerate", "integers"])
def test_any_ranks_and_stage(ranks, tmp_path, case, world, stage, files):
    options = {"tied": True} if case == "gpt" else {}
    model = models.build(case, seed=11, **options)
    folder_of(model, tmp_path / "a", files)
    for mine, buffers, _ in ranks.run(world, loads, case, options, tmp_path / "a", stage, None):
        assert reference.first_difference(mine, reference.weights(model)) == ""
        assert all(torch.equal(tensor, buffers[name]) for name, tensor in model.named_buffers())


def test_masters_keep_what_the_folder_has(ranks, tmp_path):
    """bf16 parameters from an fp32 folder: masters are the folder's bits, parameters their rounding."""
    model = models.build("gpt", seed=11, tied=True)
    folder_of(model, tmp_path / "a")
    outcomes = ranks.run(2, loads, "gpt", {"tied": True}, tmp_path / "a", 3, torch.bfloat16)
    for name, tensor in reference.weights(model).items():
        assert torch.equal(outcomes[0][0][name].float(), tensor.bfloat16().float())
        parts = sorted(
            (start, part) for _, _, pieces in outcomes for (n, state, start), part in pieces.items()
            if n == name and state == "value"
        )  # fmt: skip
        if parts:
            assert torch.equal(torch.cat([part for _, part in parts]), tensor.reshape(-1))


def from_checkpoint(path):
    model, optimizer, zero = build("gpt", 3)
    for number in range(2):
        step("gpt", model, optimizer, number)
    zero.save(path)
    other = on_meta("gpt", tied=True)
    made = torch.optim.AdamW(other.parameters(), lr=5.0)
    again = zeroshard.load(other, path, made, stage=1)
    alone = on_meta("gpt", tied=True)
    without = zeroshard.load(alone, path)
    with without.gathered():
        mine = reference.weights(alone)
    return digest(model, optimizer, zero), digest(other, made, again), mine


def test_a_checkpoint_is_a_folder_too(ranks, tmp_path):
    """With its optimizer's states and options where an optimizer is given, weights alone where not."""
    outcomes = ranks.run(2, from_checkpoint, tmp_path / "a")
    same([second for _, second, _ in outcomes], [first for first, _, _ in outcomes])
    assert reference.first_difference(outcomes[0][2], outcomes[0][0][0]) == ""


def in_backward(path, early):
    """Two steps from a checkpoint that `zeroshard.load` reads."""
    model, optimizer, zero = build("gpt", 3)
    step("gpt", model, optimizer, 0, total=2)
    zero.save(path)
    other = on_meta("gpt", tied=True)
    made = torch.optim.AdamW(other.parameters(), lr=5.0)
    again = zeroshard.load(other, path, made, stage=2, optimizer_in_backward=early)
    for number in (1, 2):
        step("gpt", other, made, number, total=2)  # one backward a step
    return digest(other, made, again), again.ledger().peak["gradients"]


def test_the_optimizer_may_step_in_backward(ranks, tmp_path):
    early, late = (ranks.run(2, in_backward, tmp_path / str(each), each) for each in (True, False))
    same([found for found, _ in early], [found for found, _ in late])
    assert all(one < other for (_, one), (_, other) in zip(early, late, strict=True))  # bytes of gradients at most


def test_load_takes_what_shard_takes():
    shard, load = (inspect.signature(each).parameters for each in (zeroshard.shard, zeroshard.load))
    assert [name for name in shard if name not in load] == []
    assert all(load[name].default == shard[name].default for name in shard if name != "optimizer")


def own_memory(path):
    read = []
    interval = weights.Weights.interval
    weights.Weights.interval = lambda self, name, start, stop: (
        read.append(stop - start),
        interval(self, name, start, stop),
    )[1]
    try:
        before = live_storages()
        model = on_meta("gpt", hidden=64, layers=4).requires_grad_(False)  # no memory for gradients
        zero = zeroshard.load(model, path)
        held, peak = since(before), zero.ledger().phases["init"].total
    finally:
        weights.Weights.interval = interval
    units = [sum(b.numel * 4 for b in zero.partition.buckets if b.unit == u) for u in range(len(zero._engine.units))]
    own = sum(bucket.parameters.tensor.numel() * 4 for bucket in zero._engine.buckets)
    return sum(read), sum(p.numel() for p in model.parameters()), held, own, peak, max(units)


def test_a_rank_reads_and_holds_only_its_own(ranks, tmp_path):
    folder_of(models.build("gpt", hidden=64, layers=4), tmp_path / "a")
    outcomes = ranks.run(2, own_memory, tmp_path / "a")
    assert sum(read for read, *_ in outcomes) == outcomes[0][1]  # every element once, by one rank
    for read, numel, held, own, peak, unit in outcomes:
        assert read <= numel * 0.6
        assert own <= held <= own + 4096 and peak <= own + 2 * unit


class Rotary(torch.nn.Module):
    """A buffer that is not saved, as in rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("angles", torch.empty(4), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.angles


def test_what_the_folder_does_not_have(tmp_path):
    """Buffers that are not saved come from `init`; missing, extra and misshapen tensors are told all at once."""
    model = Rotary()
    folder_of(model, tmp_path / "a")
    with torch.device("meta"):
        first, second, third = Rotary(), Rotary(), torch.nn.Linear(4, 4)
    with pytest.raises(CheckpointError, match="buffer that is not saved"):
        zeroshard.load(first, tmp_path / "a")
    zeroshard.load(second, tmp_path / "a", init=lambda module: torch.nn.init.constant_(module.angles, 3.0))
    assert torch.equal(second(torch.ones(1, 4)), model.linear(torch.ones(1, 4)) * 3)
    with pytest.raises(CheckpointError) as error:
        zeroshard.load(third, tmp_path / "a")
    assert str(error.value).count("\n    ") == 4 and "'weight' is not in the folder" in str(error.value)
    zero = zeroshard.load(third, tmp_path / "a", strict=False)  # reset_parameters
    with zero.gathered():
        assert third.weight.abs().sum() > 0
    narrow = torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 4)})
    with pytest.raises(CheckpointError, match=r"shape \(4, 3\), in the folder \(4, 4\)"):
        zeroshard.load(narrow, tmp_path / "a")


BAD = {
    "empty": lambda path: None,
    "pickle": lambda path: torch.save({}, path / "pytorch_model.bin"),
    "junk": lambda path: (path / "model.safetensors").write_bytes(b"junk"),
    "index": lambda path: (path / weights.INDEX).write_text("{"),
    "outside": lambda path: (path / weights.INDEX).write_text('{"weight_map": {"w": "../x.safetensors"}}'),
    "absolute": lambda path: (path / weights.INDEX).write_text('{"weight_map": {"w": "/etc/x.safetensors"}}'),
    "missing": lambda path: (path / weights.INDEX).write_text('{"weight_map": {"w": "x.safetensors"}}'),
    "promised": lambda path: (
        save_file({"a": torch.ones(1)}, str(path / "x.safetensors")),
        (path / weights.INDEX).write_text('{"weight_map": {"a": "x.safetensors", "w": "x.safetensors"}}'),
    ),
}


def refuses(path, bad_on):
    torch.distributed.is_initialized()
    zero_rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    model = on_meta("mlp")
    with pytest.raises(CheckpointError) as error:
        zeroshard.load(model, path / "bad" if zero_rank == bad_on else path / "good")
    return str(error.value)


@pytest.mark.parametrize("how", BAD)
def test_what_is_no_folder_of_weights(ranks, tmp_path, how):
    """Refused on every rank, also where one alone sees it."""
    folder_of(models.build("mlp"), tmp_path / "good")
    (tmp_path / "bad").mkdir()
    BAD[how](tmp_path / "bad")
    first, second = ranks.run(2, refuses, tmp_path, 1)
    assert "rank 1" in first and "rank 1" in second
