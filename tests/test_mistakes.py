"""The commonest mistakes of a first hour: each error says what to write, whole, and what it says works."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import traceback

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.api import _ELSEWHERE
from zeroshard.cli.main import app
from zeroshard.errors import CheckpointError, PeerError, ReleasedError, StateError, UserError
from zeroshard.integrations.common import refuse_misspelt
from zeroshard.layout.stage import seat

STAGES = (0, 1, 2, 3)


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters())


def instead(error):
    """What an error says to write instead."""
    return str(error.value).rpartition("  instead: ")[2]


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("precision", "bf16", Precision(param_dtype=torch.bfloat16)),
        ("precision", "BF16", Precision(param_dtype=torch.bfloat16)),
        ("precision", "bf16-mixed", Precision(param_dtype=torch.bfloat16)),
        ("precision", torch.bfloat16, Precision(param_dtype=torch.bfloat16)),
        ("precision", torch.float16, Precision(param_dtype=torch.float16)),
        ("precision", 16, Precision(param_dtype=torch.float16)),
        ("precision", "fp8", Precision(param_dtype=torch.bfloat16, fp8=True)),
        ("precision", torch.float32, Precision()),
        ("offload", "cpu", Offload(optimizer="cpu")),
        ("offload", True, Offload(optimizer="cpu")),
        ("offload", "nvme", Offload(optimizer="nvme", path="a folder on a local disk")),
        ("layout", 25, Layout(bucket_mib=25)),
        ("comm", "gloo", Comm(transport="gloo")),
        ("comm", "native", Comm(reduce="native")),
        ("comm", "nccl", Comm()),
    ],
)
def test_a_word_in_a_policys_place_names_the_policy_that_is_meant(name, given, meant):
    """Whole, so that it can be pasted: what stands there is that policy."""
    with pytest.raises(UserError, match=f"{name}= takes a zeroshard.{type(meant).__name__}") as error:
        zeroshard.shard(*made(), **{name: given})
    said = instead(error).removeprefix(f"{name}=")
    policy = said[: said.rindex(")") + 1] if given != "nccl" else said.partition(",")[0]
    assert eval(policy, {"zeroshard": zeroshard, "torch": torch}) == meant


@pytest.mark.parametrize("given", ["quickly", {"param_dtype": "bf16"}, Precision])
def test_what_means_no_policy_names_its_class(given):
    with pytest.raises(UserError) as error:
        zeroshard.shard(*made(), precision=given)
    assert instead(error) == "precision=zeroshard.Precision(...)"


def test_a_model_without_its_optimizer_is_refused():
    """None has to be said: an optimizer that is made afterwards would update no shards."""
    model, optimizer = made()
    with pytest.raises(UserError, match="shard takes the optimizer too") as error:
        zeroshard.shard(model, stage=3)
    assert instead(error).startswith("shard(model, optimizer, ...); or shard(model, None, ...)")
    assert zeroshard.shard(model, optimizer, stage=3).stage == 3
    assert zeroshard.shard(made()[0], None, stage=3).stage == 3


def test_model_and_optimizer_in_the_other_order_are_told_so():
    with pytest.raises(UserError, match="(?s)not a model.*got: AdamW") as error:
        zeroshard.shard(*reversed(made()))
    assert instead(error) == "shard(model, optimizer, ...), in this order"


def test_a_method_of_another_engine_names_the_plain_loops_line():
    """And is absent to whoever asks for it: hasattr, copies, notebooks."""
    zero = zeroshard.shard(*made(), stage=2)
    for name, line in _ELSEWHERE.items():
        assert not hasattr(zero, name)
        with pytest.raises(AttributeError, match=f"^Zero has no '{name}'; instead: {re.escape(line)}$"):
            getattr(zero, name)
    with pytest.raises(AttributeError, match="^Zero has no 'bananas'$"):
        _ = zero.bananas


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "xpu"])
def test_a_device_that_is_not_there_is_named_with_a_line_for_any_machine(device):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(UserError, match="there is no such device") as error:
        zeroshard.shard(*made(), device=device)
    assert f"finds no {device.partition(':')[0]} device on this machine" in str(error.value)
    name, _, line = instead(error).partition("=")
    assert (name, eval(line, {"torch": torch})) == ("device", torch.device("cpu"))


def test_a_device_beyond_the_last_one_is_named(monkeypatch):
    class Two:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 2)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Two)
    with pytest.raises(UserError, match="got: cuda:2 of 2, which count from cuda:0"):
        zeroshard.shard(*made(), device="cuda:2")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("convert", ["to", "bfloat16", "half"])
def test_a_model_converted_behind_shard_is_told_of_precision(stage, convert):
    """At stage 3 where it is converted, at the others where it is used next; and so it trains in that dtype."""
    dtype = torch.float16 if convert == "half" else torch.bfloat16
    model, optimizer = made()
    zeroshard.shard(model, optimizer, stage=stage)
    with pytest.raises((ReleasedError, StateError), match="converted or moved") as error:
        model.to(dtype) if convert == "to" else getattr(model, convert)()
        model(torch.ones(4, 8))
    said = f"shard(..., precision=Precision(param_dtype={dtype})); or model.to(...) before shard(...)"
    assert instead(error).startswith(said)
    assert f"expected: torch.float32 on cpu\n  got: {dtype} on cpu" in str(error.value)
    model, optimizer = made()
    (policy,) = re.findall(r"precision=(.*?\))\)", instead(error))
    zeroshard.shard(model, optimizer, stage=stage, precision=eval(policy, {"Precision": Precision, "torch": torch}))
    model(torch.ones(4, 8, dtype=dtype)).float().sum().backward()
    optimizer.step()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_another_memory_format_behind_shard_is_told_that_weights_lie_contiguous():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=3)
    with pytest.raises(ReleasedError, match="(?s)another memory format.*got: torch.channels_last.*weights lie contig"):
        model.to(memory_format=torch.channels_last)


def of_deepspeed(folder):
    (folder / "global_step10").mkdir()
    (folder / "latest").write_text("global_step10")
    (folder / "global_step10" / "mp_rank_00_model_states.pt").write_bytes(b"")


def of_dcp(folder):
    dcp.save({"model": made()[0].state_dict()}, checkpoint_id=folder)


def of_hugging_face(folder):
    safetensors.torch.save_file(made()[0].state_dict(), folder / "model.safetensors")


def of_torch(folder):
    torch.save(made()[0].state_dict(), folder / "pytorch_model.bin")


def of_peft(folder):
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")


class Trainer:
    """As a trainer of another package's, which refuses what it does not know."""

    def __init__(self, model, train_dataset=None):
        pass


class Ours(Trainer):
    def __init__(self, *args, stage=3, **kwargs):
        refuse_misspelt(type(self), kwargs)
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(("given", "meant"), [({"stge": 1}, "stage=1"), ({"train_datset": [1]}, "train_dataset=[1]")])
def test_an_argument_that_is_nearly_a_trainers_is_asked_about(given, meant):
    """By whichever class it is taken; one that is like none is the trainer's to refuse."""
    with pytest.raises(UserError, match="Ours takes no such argument") as error:
        Ours(None, **given)
    assert instead(error) == f"did you mean {meant}?"
    with pytest.raises(TypeError, match="bananas"):
        Ours(None, bananas=1)
    Ours(None, stage=1, train_dataset=[1])


@pytest.mark.parametrize(("ranks", "said"), [(1, "2 ranks, or a multiple of that; or replicas=1"), (3, "one of 1, 3")])
def test_replicas_that_do_not_divide_the_ranks_name_what_does(ranks, said):
    with pytest.raises(UserError, match="replicas must divide the ranks") as error:
        seat(0, ranks, 2)
    assert instead(error) == said


FOLDERS = {
    "a checkpoint of DeepSpeed": (of_deepspeed, "zeroshard ckpt import {} imported, and then zero.load('imported')"),
    "a checkpoint of torch.distributed.checkpoint": (
        of_dcp,
        "zeroshard ckpt import {0} imported, and then zero.load('imported'); or, of what "
        'dcp.save({{"app": zero}}) wrote, dcp.load({{"app": zero}}, checkpoint_id=\'{0}\')',
    ),
    "weights as Hugging Face writes them": (
        of_hugging_face, "zeroshard.load(model, '{}', optimizer, ...) in the place of shard(...)",
    ),
    "a folder of torch.save's files": (
        of_torch, "zeroshard ckpt import {}/pytorch_model.bin imported, and then zero.load('imported')",
    ),
    "an adapter of PEFT": (of_peft, "PeftModel.from_pretrained(model, '{}', is_trainable=True) before shard(...)"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed")  # DCP says that one process saves alone
@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_of_another_system_is_named_with_what_reads_it(what, tmp_path):
    """By `load`, and by `latest`, which would else find nothing and let a run begin anew. And that reads it."""
    fill, said = FOLDERS[what]
    fill(tmp_path)
    zero = zeroshard.shard(*made(), stage=3)
    with pytest.raises(CheckpointError, match=f"{what}, and no checkpoint of zeroshard") as error:
        zero.load(tmp_path)
    assert instead(error) == said.format(tmp_path)
    with pytest.raises(CheckpointError, match="zero.latest.*looks into a folder") as error:
        zero.latest(tmp_path)
    assert instead(error) == said.format(tmp_path) and f"{what}\n" in str(error.value)
    want = made()[0].state_dict()
    if "zeroshard.load" in said:
        model, optimizer = made()
        zero = zeroshard.load(model, tmp_path, optimizer)
    elif fill in (of_dcp, of_torch):
        _, _, _, source, *_ = said.format(tmp_path).split()
        app(["ckpt", "import", source, str(tmp_path / "imported")], standalone_mode=False)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        zero = zeroshard.shard(model, None)
        zero.load(tmp_path / "imported")
        with pytest.raises(CheckpointError, match=f"{what}, and no weights that can be read part by part"):
            zeroshard.load(made()[0], tmp_path)
    else:
        return
    with zero.gathered():
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in want.items())


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_latest_warns_of_another_systems_run_and_refuses_a_checkpoint(tmp_path):
    """A folder that may yet get checkpoints answers None; exported weights in it are no run."""
    zero = zeroshard.shard(*made(), stage=3)
    assert zero.latest(tmp_path) is None and zero.latest(tmp_path / "nowhere") is None
    zero.export(tmp_path / "weights")
    assert zero.latest(tmp_path) is None
    of_dcp(tmp_path / "step-3")
    with pytest.warns(
        UserWarning, match=r"finds no checkpoint of zeroshard, but in 'step-3': this is a checkpoint of t"
    ):
        assert zero.latest(tmp_path) is None
    zero.save(tmp_path / "step-4")
    assert zero.latest(tmp_path) == tmp_path / "step-4"
    with pytest.raises(CheckpointError, match="this is a checkpoint itself") as error:
        zero.latest(tmp_path / "step-4")
    assert instead(error) == f"zero.load('{tmp_path}/step-4'); or zero.latest('{tmp_path}')"
    with pytest.raises(CheckpointError, match="no complete checkpoint here") as error:
        zero.load(tmp_path)
    assert instead(error).endswith(f"zero.load(zero.latest('{tmp_path}'))")


def looks(folder):
    zero = zeroshard.shard(*made(), stage=2)
    try:
        zero.latest(folder)
    except CheckpointError as error:
        return str(error)


def test_every_rank_hears_that_latest_looks_at_another_systems_checkpoint(ranks, tmp_path):
    of_deepspeed(tmp_path)
    told = ranks.run(2, looks, str(tmp_path))
    assert told[0] == told[1] and "this is a checkpoint of DeepSpeed" in told[0]


def runs_out(stage):
    """What rank 0 hears that has fewer batches and saves, and what rank 1 hears in its next forward."""
    model, optimizer = made()
    zero = zeroshard.shard(model, optimizer, stage=stage)
    try:
        for _ in range(1 + zero.rank):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        zero.save("never")
    except PeerError as error:
        return str(error), traceback.format_exception(error)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_runs_out_of_batches_is_told_of_join_and_not_of_the_engines_lines(ranks, stage):
    for said, lines in ranks.run(2, runs_out, stage):
        assert "instead: as many batches on every rank, or for batch in zero.join(loader): ...;" in said
        shown = "".join(lines)
        assert shown.count("\n") <= 24 and "zeroshard/ranks" not in shown and shown.count("Traceback") == 1


def learns_nothing(stage):
    """What ranks hear where rank 1's loss has no graph through the model, of which only rank 0 has a backward."""
    model, optimizer = made()
    zero = zeroshard.shard(model, optimizer, stage=stage)
    loss = model(torch.ones(4, 8)).sum()
    try:
        (torch.zeros((), requires_grad=True) if zero.rank else loss).backward()
        optimizer.step()
    except PeerError as error:
        return str(error)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_whose_loss_has_no_graph_is_told_so(ranks, stage):
    for said in ranks.run(2, learns_nothing, stage):
        assert "rank 0 is at backward 1; rank 1 is at step 1" in said
        assert (
            "instead: a loss with a graph through the model, and its backward, on every rank: 0 * output.sum()" in said
        )


def walks_its_model(stage):
    """What an optimizer hears that reads the gradients of a model that it holds."""

    class Holding(torch.optim.Optimizer):
        elementwise = True

        def __init__(self, model):
            super().__init__(model.parameters(), {})
            self.model = model

        @torch.no_grad()
        def step(self, closure=None):
            for param in self.model.parameters():
                param.sub_(param.grad * 0.1)

    model, _ = made()
    optimizer = Holding(model)
    zeroshard.shard(model, optimizer, stage=stage)
    model(torch.ones(4, 8)).sum().backward()
    try:
        optimizer.step()
    except zeroshard.Error as error:
        return str(error)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_walks_its_model_is_told_of_its_groups(stage):
    assert "in an optimizer's own step() walk self.param_groups, where these are" in walks_its_model(stage)


def program(source, tmp_path, *words, ranks=2):
    """What a program of so many ranks prints on each, a line at a time, from torchrun's own output apart."""
    (tmp_path / "train.py").write_text(textwrap.dedent(source))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}"]
    done = subprocess.run(
        [*launcher, "train.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    return [
        [line.removeprefix(f"[rank{rank}]: ") for line in done.stderr.splitlines() if line.startswith(f"[rank{rank}]")]
        for rank in range(ranks)
    ]


BEGIN = """
    import os, sys
    import torch, zeroshard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=2)
"""
DIES = (
    BEGIN
    + """
    def place(name):
        if name == sys.argv[1] and zero.rank == 0:
            os._exit(9)

    for step in range(2):
        place("forward")
        loss = model(torch.ones(2, 8)).sum()
        place("backward")
        loss.backward()
        place("clip")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        place("step")
        optimizer.step()
        optimizer.zero_grad()
        place("save")
        zero.save("saved")
        place("gathered")
        with zero.gathered():
            pass
"""
)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("place", ["forward", "backward", "clip", "step", "save", "gathered"])
def test_a_lost_rank_is_one_fact_on_one_screen(place, tmp_path):
    """Of 24 lines: one traceback, with the program's line and none of the engine's waits, and no words of gloo's."""
    dead, said = program(DIES, tmp_path, place)
    assert dead == [] and len(said) <= 24
    text = "\n".join(said)
    assert text.count("Traceback") == 1 and "gloo" not in text and "zeroshard/ranks" not in text
    assert "train.py" in said[1]
    (fact,) = [line for line in said if "PeerError" in line]
    assert fact == "zeroshard.errors.PeerError: a collective did not complete: rank 0 is gone: its process has ended"


UNEQUAL = (
    BEGIN
    + """
    loader = [torch.ones(2, 8)] * (2 + zero.rank)
    for x in zero.join(loader) if sys.argv[1] == "joined" else loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if sys.argv[1] != "ends":
        zero.save("saved")
    if sys.argv[1] == "joined":
        sys.exit("joined")
"""
)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("then", ["ends", "saves", "joined"])
def test_loaders_of_unequal_length_are_told_of_join(then, tmp_path):
    """Whether the rank with fewer batches ends or goes on to what all do together; and so they train."""
    short, longer = program(UNEQUAL, tmp_path, then)
    told = [line for line in (*short, *longer) if line.startswith("  instead: ")]
    assert len(told) == {"ends": 1, "saves": 2, "joined": 0}[then]
    assert all("for batch in zero.join(loader): ..." in line for line in told)
