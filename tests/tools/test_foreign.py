"""Checkpoints of DeepSpeed's, FSDP2's and torch's, imported: the bits that their own systems say they hold."""

import functools
import io
import json
import os
import pickle
import shutil
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as torch_state_dict

import models
import zeroshard
from test_checkpoint import build, digest, same, step
from test_dcp import App, quietly
from zeroshard.checkpoint.manifest import Saved
from zeroshard.errors import CheckpointError, UserError
from zeroshard.integrations.foreign import Hints
from zeroshard.integrations.importing import import_checkpoint
from zeroshard.integrations.pickles import read_metadata, read_torch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ARCHIVE = Path(__file__).parents[1] / "fixtures" / "deepspeed.tar.xz"  # by fixtures/deepspeed_checkpoints.py
CASES = ["zero0", "zero1", "zero2", "zero2-bf16", "zero3", "zero3-bf16", "zero2-universal", "zero3-universal"]


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


class Model(nn.Module):
    """That of the fixtures."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 7)
        self.frozen = nn.Linear(7, 3, bias=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("scale", torch.zeros(2))

    def forward(self, tokens):
        hidden = torch.tanh(self.inner(self.embed(tokens)))
        return self.head(self.frozen(hidden) * self.scale[0])


def fresh():
    torch.manual_seed(7)
    model = Model()
    groups = [[model.embed.weight, model.inner.weight], [model.inner.bias]]
    return model, torch.optim.AdamW([{"params": group, "lr": 0.5, "weight_decay": 0.7} for group in groups])


def loaded(path, stage, dtype):
    """(full values, full moments and steps, options, buffer, what was saved along) after a load."""
    model, optimizer = fresh()
    precision = zeroshard.Precision(param_dtype=dtype)
    zero = zeroshard.shard(model, optimizer if saved_optimizers(path) else None, stage=stage, precision=precision)
    extra = zero.load(path).extra
    zero.save(path.with_name(f"again-{stage}"))
    options = [(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
    return options, model.scale.tolist(), extra


def saved_optimizers(path):
    with Saved.open(path) as saved:
        return saved.manifest["optimizers"]


def contents(path):
    """{"name/state": the whole tensor} of a checkpoint of ours."""
    found = {}
    with Saved.open(path) as saved:
        for (name, state), parts in saved.cut.items():
            numel = parts[-1].stop
            found[f"{name}/{state}"] = saved.interval((name, state), 0, numel).view(saved.parameters[name].shape)
        for (name, state), stored in saved.whole.items():
            found[f"{name}/{state}"] = saved.read(stored)
    return found


@pytest.mark.parametrize("case", CASES)
def test_deepspeeds_own_values_arrive(ranks, deepspeed, tmp_path, case):
    """Masters, moments, steps, options, buffers, ties and client state, on three ranks; what two ranks wrote."""
    import_checkpoint(deepspeed / case, tmp_path / "ours", Hints())
    expected = load_file(deepspeed / f"{case}.safetensors")
    trained = [
        name
        for name in ("embed.weight", "inner.weight", "inner.bias")
        if f"{name}/exp_avg" in expected and case != "zero0"
    ]
    assert len(trained) == (0 if case == "zero0" else 3)
    dtype = torch.bfloat16 if "bf16" in case else None
    outcomes = ranks.run(3, loaded, tmp_path / "ours", 3, dtype)
    for path in (tmp_path / "ours", tmp_path / "again-3"):
        found = contents(path)
        for key, tensor in expected.items():
            if case != "zero0" or key.endswith("/value"):
                assert torch.equal(found[key], tensor.to(found[key].dtype)), key
                assert found[key].dtype == torch.float32 or key.startswith("frozen")
        assert [found[f"{name}/step"].item() for name in trained] == [3.0] * len(trained)
    for options, scale, extra in outcomes:
        assert scale == [1.5, 2.5] and extra["position"] == 12 and extra["global_steps"] == 3
        if trained:
            assert options == [(1e-2, 0.1, (0.9, 0.999)), (1e-2, 0.0, (0.9, 0.999))]


def goes_on(path, expected):
    """Weights one step after the load: ours, and of plain torch from the states that DeepSpeed told."""
    model, optimizer = fresh()
    zero = zeroshard.shard(model, optimizer, stage=2)
    zero.load(path)
    plain, other = fresh()
    plain.scale.copy_(model.scale)
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(expected[f"{name}/value"])
            if param.requires_grad:
                moments = {key: expected[f"{name}/{key}"].clone() for key in ("exp_avg", "exp_avg_sq")}
                other.state[param] = {"step": torch.tensor(3.0), **moments}
    for group, told in zip(other.param_groups, optimizer.param_groups, strict=True):
        group |= {"lr": told["lr"], "weight_decay": told["weight_decay"]}
    for each, kind in ((model, optimizer), (plain, other)):
        each(torch.arange(4).view(1, 4)).square().mean().backward()
        kind.step()
    with zero.gathered():
        return [torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)]


@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_training_goes_on_from_deepspeeds_states(deepspeed, tmp_path, case):
    import_checkpoint(deepspeed / case, tmp_path / "ours", Hints())
    assert goes_on(tmp_path / "ours", load_file(deepspeed / f"{case}.safetensors")) == [True] * 4


def test_what_is_missing_in_deepspeeds_folder_is_named(deepspeed, tmp_path):
    shutil.copytree(deepspeed / "zero2", tmp_path / "a")
    (tmp_path / "a/step3/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="files of ranks are missing"):
        import_checkpoint(tmp_path / "a", tmp_path / "ours", Hints())
    (tmp_path / "a/step3/zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"")
    with pytest.raises(UserError, match="split over ranks"):
        import_checkpoint(tmp_path / "a", tmp_path / "ours", Hints())
    for tag in ("../b", "..", ""):
        (tmp_path / "a/latest").write_text(tag)
        with pytest.raises(CheckpointError, match="names no folder beside it"):
            import_checkpoint(tmp_path / "a", tmp_path / "ours", Hints())
    assert not (tmp_path / "ours").exists()


# --------------------------------------------------------------------------------------------------------- FSDP2 and DCP


def fsdp2(folder):
    """Two steps under FSDP2, saved in four ways; its own values then, and its weights after one more step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = models.build("gpt", seed=5, tied=True)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(2):
        step("gpt", model, adam, number)
    quietly(dcp.save, {"app": App(model, adam), "position": 8}, checkpoint_id=folder / "sharded")
    flat = torch_state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = torch_state_dict.get_state_dict(model, adam, options=flat)
    quietly(dcp.save, {"model": weights, "optim": states}, checkpoint_id=folder / "flat")
    whole = torch_state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = torch_state_dict.get_state_dict(model, adam, options=whole)
    if torch.distributed.get_rank() == 0:
        torch.save({"model": weights, "optimizer": states}, folder / "whole.pt")
        torch.save(weights, folder / "weights.pt")
    found = {}
    for name, param in model.named_parameters():
        found[f"{name}/value"] = param.full_tensor().detach().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{key}"] = adam.state[param][key].full_tensor().clone()
    step("gpt", model, adam, 2, total=2)  # a micro-batch each: of more, each system adds in an order of its own
    return found, {name: param.full_tensor().detach() for name, param in model.named_parameters()}


def one_step_more(path):
    model, optimizer, zero = build("gpt", 3)
    zero.load(path)
    step("gpt", model, optimizer, 2, total=2)
    with zero.gathered():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.full
def test_fsdp2s_own_values_arrive_and_training_goes_on(ranks, tmp_path):
    """Sharded, with flattened states, and whole; the next step has FSDP2's bits on two ranks."""
    (found, after), _ = ranks.run(2, fsdp2, tmp_path)
    assert len(found) > 30
    for source in ("sharded", "flat", "whole.pt"):
        target = tmp_path / "ours" / source
        told = import_checkpoint(tmp_path / source, target, Hints())
        ours = contents(target)
        assert {key for key in ours if not key.endswith("/step")} == set(found)
        assert all(torch.equal(ours[key], tensor) for key, tensor in found.items())
        assert {ours[key].item() for key in ours if key.endswith("/step")} == {2.0}
        assert told.extra == ({"position": 8} if source == "sharded" else {})
    for outcome in ranks.run(2, one_step_more, tmp_path / "ours" / "sharded"):
        assert [name for name, tensor in after.items() if not torch.equal(outcome[name], tensor)] == []
    states = [
        ranks.run(count, digest_after_load, tmp_path / "ours" / source)
        for count, source in ((1, "flat"), (3, "whole.pt"))
    ]
    same(*states)


def digest_after_load(path):
    model, optimizer, zero = build("gpt", 1)
    zero.load(path)
    return digest(model, optimizer, zero)


def test_a_file_of_weights_with_its_ties(tmp_path):
    model = models.build("gpt", seed=5, tied=True)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    found = import_checkpoint(tmp_path / "weights.pt", tmp_path / "ours", Hints())
    assert found.groups == [] and len(found.aliases) == 1
    other = models.build("gpt", seed=6, tied=True)
    zero = zeroshard.shard(other, None)
    zero.load(tmp_path / "ours")
    with zero.gathered():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_plain_optimizers_numbers(tmp_path):
    """Of one group they are the model's order; of several nobody can know."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    adam = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.randn(5, 3)).square().sum().backward()
    adam.step()
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="numbers its parameters.*\n.*6 parameters"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", Hints())
    found = import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", Hints(buffers=["*.running_*"]))
    assert sorted(found.buffers) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"] and found.extra == {
        "epoch": 3
    }
    ours = contents(tmp_path / "ours")
    for name, param in model.named_parameters():
        assert torch.equal(ours[f"{name}/exp_avg_sq"], adam.state[param]["exp_avg_sq"])
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(other.parameters())
    zeroshard.shard(other, optimizer).load(tmp_path / "ours")
    assert optimizer.param_groups[0]["lr"] == 0.25


@functools.cache
def kinds_of_tensors():
    """By name, whatever torch.load takes as a tensor with weights_only=True; and what keeps it out of a checkpoint."""
    warnings.simplefilter("ignore")  # of torch, that some of these are new; pytest restores the filters
    table, wave = torch.arange(12.0).view(3, 4), torch.tensor([1 + 2j, 3 - 4j])
    plain = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool]
    eighth = [torch.float8_e4m3fn, torch.float8_e5m2]
    other = [torch.uint16, torch.uint64, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e8m0fnu]
    found = {str(dtype): (torch.ones(2, 3).to(dtype), "") for dtype in plain + eighth}
    found |= {str(dtype): (torch.ones(2).to(dtype), str(dtype)) for dtype in other}
    return found | {
        "scalar": (torch.tensor(1.5), ""),
        "empty": (torch.empty(0, 3), ""),
        "transposed": (table.t(), ""),
        "strided": (table[1:, ::2], ""),
        "expanded": (torch.ones(1).expand(5), ""),
        "complex": (wave, ""),
        "conjugate": (wave.conj(), ""),
        "negative": (wave.conj().imag, ""),
        "parameter": (nn.Parameter(torch.ones(2)), ""),
        "buffer": (nn.Buffer(torch.ones(2)), ""),
        "many dimensions": (torch.ones([1] * 64), ""),
        "sparse": (table.to_sparse(), "torch.sparse_coo"),
        "rows": (table.to_sparse_csr(), "torch.sparse_csr"),
        "blocks": (table.to_sparse_bsr((1, 2)), "torch.sparse_bsr"),
        "quantised": (torch.quantize_per_tensor(table, 0.1, 0, torch.qint8), "torch.qint8"),
        "meta": (torch.empty(3, device="meta"), "a tensor on meta"),
        "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        "jagged": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "a nested tensor"),
    }


def everything(path):
    """{name: tensor} of a checkpoint of ours, buffers too, and its extra."""
    from zeroshard.checkpoint.manifest import unplain

    with Saved.open(path) as saved:
        found = {name: saved.read(stored) for name, stored in saved.buffers.items()}
        found |= {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in saved.parameters.items()}
        extra = unplain(saved.manifest["extra"], {key: saved.read(stored) for key, stored in saved.extra.items()})
    for key, tensor in contents(path).items():
        if key.endswith("/value"):
            found[key.removesuffix("/value")] = tensor
    return found, extra


def equal(one, other):
    return one.dtype == other.dtype and torch.equal(
        torch.view_as_real(one.resolve_conj()) if one.is_complex() else one.float(),
        torch.view_as_real(other.resolve_conj()) if other.is_complex() else other.float(),
    )


@pytest.mark.parametrize("kind", kinds_of_tensors())
def test_any_tensor_of_a_file_arrives_or_is_named(tmp_path, kind):
    """As a weight it arrives bit for bit or is refused; as anything else it arrives or is left out with a note."""
    tensor, odd = kinds_of_tensors()[kind]
    torch.save({"w": torch.ones(2), "x": tensor, "y": tensor}, tmp_path / "a.pt")
    torch.save({"model": {"w": torch.ones(2)}, "more": {"deep": [tensor, 1]}}, tmp_path / "b.pt")
    found = import_checkpoint(tmp_path / "b.pt", tmp_path / "extra", Hints())
    _, extra = everything(tmp_path / "extra")
    if odd:
        with pytest.raises(CheckpointError, match=rf"cannot be saved\n  where: x\n(?s:.*){odd}"):
            import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", Hints())
        assert extra == {} and len(found.notes) == 1 and "more.deep is left out" in found.notes[0]
        return
    import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", Hints())
    ours, _ = everything(tmp_path / "ours")
    assert equal(ours["x"], tensor) and (tensor.is_floating_point() or equal(ours["y"], tensor))
    assert equal(extra["more.deep"][0], tensor) and extra["more.deep"][1] == 1


def with_optimizer(state, *groups):
    groups = groups or ({"lr": 0.1, "params": [0]},)
    return {"model": {"w": torch.ones(2, 2)}, "optimizer": {"state": state, "param_groups": list(groups)}}


def moments(**more):
    return {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)} | more}


ITSELF: dict = {"model": {"w": torch.ones(2)}}
ITSELF["self"] = ITSELF
WAVE = torch.tensor([1 + 2j, 3 - 4j])
ARRIVE = {  # what a file holds, and where a file of tensors and states has them
    "conjugates of one memory": ({"a": WAVE, "b": WAVE.conj()}, {"a": WAVE, "b": WAVE.conj()}),
    "integers of one memory": ({"w": torch.ones(2), "a.i": (at := torch.arange(3)), "b.i": at}, {"a.i": at, "b.i": at}),
    "extra state": ({"w": torch.ones(2), "n._extra_state": {"a": torch.zeros(1)}}, {"w": torch.ones(2)}),
    "extra state, bare": ({"model": {"w": torch.ones(2), "_extra_state": None}}, {"w": torch.ones(2)}),
    "no momentum yet": (with_optimizer({0: {"momentum_buffer": None}}, {"lr": 0.1, "momentum": 0.9, "params": [0]}), {}),
    "an option without end": (with_optimizer(moments(), {"lr": float("inf"), "params": [0]}), {}),
    "no amsgrad": (with_optimizer(moments(max_exp_avg_sq=None)), {}),
    "groups by number": ({**(whole := with_optimizer(moments())), "optimizer": {"state": moments(), "param_groups": {0: {"lr": 0.1, "params": {0: 0}}}}}, {}),
    "a list in itself": ({"model": {"w": torch.ones(2)}, "more": (loop := [])}, {"w": torch.ones(2)}),
}  # fmt: skip
loop.append(loop)
NAMED = {
    "a number as a name": ({"model": {0: torch.ones(2)}}, "name is no text"),
    "two kinds of names": ({"model": {1.5: torch.ones(2), "1.5": torch.ones(2)}}, "name is no text"),
    "a tuple as a name": ({"model": {("a", 1): torch.ones(2)}}, "name is no text"),
    "a number beside tensors": ({"w": torch.ones(2), "n": 3}, "a dict of nothing but tensors"),
    "itself": (ITSELF, "no file of state dicts(?s:.*)RecursionError"),
    "no groups": ({**whole, "optimizer": {"state": {}, "param_groups": None}}, "groups are not as torch"),
    "groups of numbers": (with_optimizer({}, 3), "groups are not as torch"),
    "no parameters": (with_optimizer({}, {"lr": 0.1}), "parameters are not as torch"),
    "parameters of lists": (with_optimizer({}, {"params": [["w"]]}), "parameters are not as torch"),
    "a name too many": (with_optimizer({}, {"params": [0], "param_names": ["w", "v"]}), "not a name for each"),
    "names that are none": (with_optimizer({}, {"params": [0], "param_names": 5}), "names of parameters are not"),
    "states in a list": (with_optimizer([moments()[0]]), "states are not as torch"),
    "no states": (with_optimizer({0: None}), "states are not as torch"),
    "a state in a list": (with_optimizer(moments(past=[1, 2])), "'past' of parameter 'w'"),
    "a complex state": (with_optimizer(moments(x=1j)), "neither a tensor nor a number"),
    "a large state": (with_optimizer(moments(x=10**400)), "neither a tensor nor a number"),
    "a sparse state": (with_optimizer(moments(exp_avg=torch.ones(2, 2).to_sparse())), "exp_avg/w(?s:.*)sparse_coo"),
    "a state of a number": (with_optimizer({0: {0: torch.ones(2)}}, {"params": [0], "momentum": 0.9}), "of which class|no text"),
    "an option of two": (with_optimizer(moments(), {"lr": torch.ones(2), "params": [0]}), "option 'lr'"),
    "an option that is a set": (with_optimizer(moments(), {"betas": {1, 2}, "params": [0]}), "option 'betas'"),
    "an option of no name": (with_optimizer(moments(), {5: 6, "params": [0]}), "a name that is no text"),
    "flat, and something else": ({"model": {"w": torch.ones(2)}, "optim": {"param_groups.w.lr": 0.1, 3: 4}}, "neither a state nor an option"),
}  # fmt: skip


@pytest.mark.parametrize("what", [*ARRIVE, *NAMED])
def test_any_content_of_a_file_arrives_or_is_named(tmp_path, what):
    content, expected = {**ARRIVE, **NAMED}[what]
    torch.save(content, tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=True)  # which takes all of it
    if isinstance(expected, str):
        with pytest.raises((CheckpointError, UserError), match=expected):
            import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", Hints())
        assert sorted(os.listdir(tmp_path)) == ["a.pt"]
        return
    import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", Hints())
    ours, _ = everything(tmp_path / "ours")
    assert all(equal(ours[name], tensor) for name, tensor in expected.items())


def test_numbers_and_lists_in_a_folder_of_dcp(tmp_path):
    """DCP makes text of the numbers of parameters, and numbers of a list's places."""
    odd = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    more = {"seen": [torch.arange(3), 1], "odd": [odd, 2], "last": torch.ones(1)}
    content = with_optimizer(moments()) | {"more": more}
    quietly(dcp.save, content, checkpoint_id=tmp_path / "a", no_dist=True)
    found = import_checkpoint(tmp_path / "a", tmp_path / "ours", Hints())
    ours, (_, extra) = contents(tmp_path / "ours"), everything(tmp_path / "ours")
    assert all(torch.equal(ours[f"w/{key}"], tensor) for key, tensor in moments()[0].items())
    assert torch.equal(extra["more.seen"][0], torch.arange(3)) and extra["more.seen"][1] == 1
    assert extra["more.last"].item() == 1 and "more.odd" not in extra
    assert [note for note in found.notes if "more.odd is left out" in note and "qint8" in note]


@pytest.mark.parametrize("kind", [name for name, kind in vars(torch.optim).items() if isinstance(kind, type)])
def test_any_class_of_optimizers_can_be_named(tmp_path, kind):
    torch.save(whole, tmp_path / "a.pt")
    if kind == "Optimizer":
        with pytest.raises(UserError, match="no such class"):
            import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", Hints(optimizer=kind))
    else:
        import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", Hints(optimizer=kind))
        assert saved_optimizers(tmp_path / "ours")[0]["class"] == kind


# -------------------------------------------------------------------------------------------------------------- forgeries


class Runs:
    """What a pickle calls as it is read."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_forged_metadata_is_refused_and_does_not_run(tmp_path, protocol):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": Runs(tmp_path / "ran")}, protocol=protocol))
    with pytest.raises(CheckpointError, match=r"more than data.*\n.*\n.*\n?.*mkdir"):
        import_checkpoint(tmp_path, tmp_path / "ours", Hints())
    assert not (tmp_path / "ran").exists() and not (tmp_path / "ours").exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists()  # by those who trust it


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch", "load"), ("torch.serialization", "load"), ("builtins", "eval"), ("torch.distributed.checkpoint.metadata", "os.system"), ("torch", "Size.__init__"), ("torch.distributed.checkpoint.metadata", "STATE_DICT_TYPE")],
)  # fmt: skip
def test_no_other_name_comes_out_of_a_metadata(tmp_path, module, name):
    content = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)) + b"\x93."
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="more than data"):
        read_metadata(tmp_path / ".metadata")


def test_a_forged_file_of_tensors_is_refused_and_does_not_run(deepspeed, tmp_path):
    shutil.copytree(deepspeed / "zero2", tmp_path / "a")
    file = tmp_path / "a/step3/mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    torch.save({**content, "client": Runs(tmp_path / "ran")}, file)
    with pytest.raises(CheckpointError, match=r"more than data(?s:.*)mkdir"):
        import_checkpoint(tmp_path / "a", tmp_path / "ours", Hints())
    assert not (tmp_path / "ran").exists()
    torch.save(Runs(tmp_path / "ran"), buffer := io.BytesIO())
    with pytest.raises(CheckpointError, match=r"more than data(?s:.*)mkdir"):
        read_torch(buffer.getvalue(), file)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="more than data"):
        import_checkpoint(tmp_path / "a", tmp_path / "ours", Hints())
    assert not (tmp_path / "ran").exists()


def test_a_part_that_is_missing_or_outside_of_its_folder_is_refused(tmp_path):
    quietly(dcp.save, {"model": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    (part,) = (tmp_path / "a").glob("*.distcp")
    part.rename(tmp_path / "part")
    with pytest.raises(CheckpointError, match="cannot be read(?s:.*)value/a(?s:.*)FileNotFoundError"):
        import_checkpoint(tmp_path / "a", tmp_path / "ours", Hints())
    (tmp_path / "part").rename(part)
    metadata = pickle.loads((tmp_path / "a/.metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../b/secret.distcp"
    (tmp_path / "a/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        import_checkpoint(tmp_path / "a", tmp_path / "ours", Hints())


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command(deepspeed, tmp_path, command):
    code, out, _ = command("ckpt", "import", deepspeed / "zero3", tmp_path / "ours", "--json")
    told = json.loads(out)
    assert (code, told["parameters"], told["with_states"], told["buffers"]) == (0, 4, 3, ["scale"])
    assert (
        told["tied"] == {"embed.weight": ["head.weight"]}
        and told["source"] == "DeepSpeed 0.19.8, ZeRO stage 3 of 2 ranks"
    )
    assert command("ckpt", "verify", tmp_path / "ours")[0] == 0
    assert command("ckpt", "inspect", tmp_path / "ours")[0] == 0
    code, _, said = command("ckpt", "import", tmp_path / "ours", tmp_path / "b")
    assert code == 2 and "no checkpoint that is known here" in said
    code, _, said = command("ckpt", "import", tmp_path / "none", tmp_path / "b")
    assert code == 2 and "no such file or folder" in said
    code, _, said = command("ckpt", "import", deepspeed / "zero3", tmp_path / "b", "--tied", "head")
    assert code == 2 and "ALIAS=NAME" in said
    code, _, said = command("ckpt", "import", deepspeed / "zero3", tmp_path / "b", "--optimizer", "AdamWW")
    assert code == 2 and "did you mean 'AdamW'" in said and not (tmp_path / "b").exists()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").write_text("x")
    code, _, said = command("ckpt", "import", deepspeed / "zero3", tmp_path / "c")
    assert code == 1 and "would remove what zeroshard did not write" in said
