"""`shard(...)` itself: what it accepts, what it refuses and how, what it builds on meta, and the names that are public."""

from __future__ import annotations

import copy
import dataclasses
import io
import operator
import pickle
import subprocess
import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
import ranks
import reference
import zeroshard
from test_house import PUBLIC
from zeroshard import Comm, Layout, Machine, Model, Offload, Precision, Step
from zeroshard.errors import Error, PeerError, ReleasedError, StateError, UserError

STAGES = (0, 1, 2, 3)
SIZES = (7, 131, 37, 5)


def mlp():
    return models.build("mlp", sizes=SIZES)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps=2, rank=None, name="mlp"):
    for step in range(steps):
        models.loss(name, model, models.batch(name, step, ranks.rank() if rank is None else rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(world, make=mlp, steps=2, name="mlp"):
    model = make()
    reference.accumulate(
        model, adamw(model), partial(models.batch, name), partial(models.loss, name), world, steps=steps
    )
    return reference.weights(model)


# ---------------------------------------------------------------------------------------------------------- public names


def test_public_names_are_locked():
    """These names and these fields are what users may write; another one needs a decision note."""
    assert sorted(zeroshard.__all__) == PUBLIC
    assert sorted(zeroshard.__all__) == dir(zeroshard)
    fields = {
        kind: [(f.name, f.default) for f in dataclasses.fields(kind)]
        for kind in (Precision, Offload, Layout, Comm, Model, Machine, Step)
    }
    assert fields == {
        Precision: [
            ("param_dtype", None),
            ("reduce_dtype", None),
            ("grad_dtype", None),
            ("master_dtype", None),
            ("store_params", False),
            ("cast_inputs", False),
            ("nonfinite", "ignore"),
            ("keep", ()),
            ("split_master", False),
            ("fp8", False),
            ("scaling", "tensor"),
            ("states", dataclasses.MISSING),
            ("rounding", "nearest"),
        ],
        Offload: [
            ("parameters", "device"),
            ("gradients", "device"),
            ("optimizer", "device"),
            ("step", None),
            ("path", None),
            ("digests", True),
            ("activations", "device"),
            ("gpu_mem", None),
            ("host_mem", None),
            ("disk", None),
        ],
        Layout: [
            ("bounds", "unit"),
            ("bucket_mib", None),
            ("align", 128),
            ("units", None),
            ("ignore", ()),
            ("buffers", "broadcast"),
            ("recompute", False),
            ("along", dataclasses.MISSING),
            ("apart", False),
            ("whole", ()),
            ("matrices", dataclasses.MISSING),
        ],
        Comm: [
            ("group", None),
            ("timeout", None),
            ("reduce", "ordered"),
            ("overlap", True),
            ("prefetch", 1),
            ("release_after_forward", True),
            ("replicas", None),
            ("transport", "auto"),
            ("optimizer", "team"),
            ("hosts", None),
        ],
        Model: [
            ("params", None),
            ("shapes", None),
            ("job", None),
            ("preset", None),
            ("bytes", None),
            ("optimizer", None),
            ("units", None),
        ],
        Machine: [
            ("ranks", 1),
            ("gpu", None),
            ("gpu_mem", None),
            ("host_mem", None),
            ("disk", None),
            ("disk_read", None),
            ("disk_write", None),
            ("gpus_per_node", None),
            ("cluster", None),
            ("ep", None),
        ],
        Step: [
            ("accumulate", 1),
            ("no_sync", False),
            ("batch", None),
            ("seq", None),
            ("seconds", None),
            ("tokens", None),
        ],
    }
    public = {name for name in dir(zeroshard.Zero) if not name.startswith("_")}
    assert {"no_sync", "gathered", "clip_grad_norm_", "ledger"} <= public


@pytest.mark.parametrize("kind", [Precision, Offload, Layout, Comm, Machine, Step])
def test_policies_are_frozen(kind):
    """A policy cannot change under the engine that was built from it."""
    policy = kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, dataclasses.fields(kind)[0].name, None)
    assert policy == kind()


def test_errors_are_what_they_look_like():
    """Everything raised on purpose is a zeroshard.Error, and also the built-in kind that a user would catch."""
    assert issubclass(UserError, (Error, ValueError))
    assert issubclass(UserError, ValueError)
    for kind in (StateError, ReleasedError, PeerError):
        assert issubclass(kind, Error)
        assert issubclass(kind, RuntimeError)
    assert zeroshard.Error is Error


@pytest.mark.full
def test_importing_zeroshard_does_not_import_torch():
    """`import zeroshard` costs nothing; the first public name loads what it needs; unknown names are AttributeErrors."""
    code = (
        "import sys, zeroshard\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'import'\n"
        "dir(zeroshard), zeroshard.__version__, zeroshard.Error, zeroshard.Layout(bounds='model')\n"
        "assert 'torch' not in sys.modules, 'Layout and Error need no torch'\n"
        "try: zeroshard.shart\n"
        "except AttributeError as error: assert 'shart' in str(error)\n"
        "else: raise SystemExit('no AttributeError')\n"
        "zeroshard.shard\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------------------- wrong settings


@pytest.mark.parametrize("stage", [4, -1, 3.0, "3", None, True, (1,), "zero3"], ids=repr)
def test_only_the_four_stages_exist(stage):
    """Anything but the integers 0, 1, 2, 3 is refused with the four, and leaves the model as it was."""
    model = mlp()
    with pytest.raises(UserError, match=r"(?s)stage.*0, 1, 2 or 3") as caught:
        zeroshard.shard(model, adamw(model), stage=stage)
    assert repr(stage) in str(caught.value)
    assert not any(hasattr(parameter, "_zeroshard") for parameter in model.parameters())


SETTINGS = {
    "bounds": (lambda: Layout(bounds="modle"), "did you mean 'model'"),
    "buffers": (lambda: Layout(buffers="brodcast"), "did you mean 'broadcast'"),
    "bounds type": (lambda: Layout(bounds=3), "unit, model, tensor"),
    "reduce": (lambda: Comm(reduce="order"), "did you mean 'ordered'"),
    "bucket_mib": (lambda: Layout(bucket_mib=0), "bucket_mib"),
    "bucket_mib nan": (lambda: Layout(bucket_mib=float("nan")), "bucket_mib"),
    "bucket_mib type": (lambda: Layout(bucket_mib="24"), "bucket_mib"),
    "align": (lambda: Layout(align=96), "power of two"),
    "align type": (lambda: Layout(align=128.0), "power of two"),
    "units string": (lambda: Layout(units="blocks.*"), r"units=\['blocks.\*'\]"),
    "units class": (lambda: Layout(units=nn.Linear), "sequence"),
    "ignore string": (lambda: Layout(ignore="head"), r"ignore=\['head'\]"),
    "prefetch": (lambda: Comm(prefetch=-1), "prefetch"),
    "prefetch type": (lambda: Comm(prefetch=True), "prefetch"),
    "timeout": (lambda: Comm(timeout=0), "timeout"),
    "timeout type": (lambda: Comm(timeout="10s"), "timeout"),
    "overlap": (lambda: Comm(overlap="no"), "overlap"),
    "release": (lambda: Comm(release_after_forward=1), "release_after_forward"),
    "offload": (lambda: Offload(optimizer="nvme"), r"(?s)optimizer.*nvme"),
    "param_dtype": (lambda: Precision(param_dtype="bfloat16"), "torch.bfloat16"),
}


@pytest.mark.row(64)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_validated_at_once(name):
    """A setting that cannot work is refused where it is written, with the nearest valid name or an example."""
    make, says = SETTINGS[name]
    with pytest.raises(UserError, match=says):
        make()


def shard_mlp(**options):
    model = mlp()
    return zeroshard.shard(model, adamw(model), **options)


def parameter_of(tensor):
    module = nn.Module()
    module.odd = nn.Parameter(tensor)
    return zeroshard.shard(module, None)


def with_gradient():
    model = mlp()
    model(torch.ones(1, 7)).sum().backward()
    return zeroshard.shard(model, adamw(model))


def lazy(kind=nn.LazyLinear, **settings):
    return zeroshard.shard(nn.Sequential(nn.Linear(3, 3), kind(3), nn.Linear(3, 3)), None, **settings)


def lazy_buffer(features):
    return nn.LazyBatchNorm1d(affine=False)


CALLS = {
    "model": (lambda: zeroshard.shard("gpt", None), r"(?s)nn\.Module.*str"),
    "model class": (lambda: zeroshard.shard(nn.Linear, None), r"(?s)nn\.Module.*type"),
    "swapped": (lambda: zeroshard.shard(adamw(mlp()), mlp()), r"(?s)nn\.Module.*AdamW"),
    "precision": (lambda: shard_mlp(precision=torch.bfloat16), r"(?s)zeroshard\.Precision.*bfloat16"),
    "layout": (lambda: shard_mlp(layout="model"), r"(?s)zeroshard\.Layout.*model"),
    "comm": (lambda: shard_mlp(comm=Layout()), r"(?s)zeroshard\.Comm.*Layout"),
    "offload": (lambda: shard_mlp(offload={"optimizer": "cpu"}), r"(?s)zeroshard\.Offload"),
    "unit name": (lambda: shard_mlp(layout=Layout(units=["O"])), r"(?s)matches no module.*did you mean|one of"),
    "unit pattern": (lambda: shard_mlp(layout=Layout(units=["blocks.*"])), r"(?s)matches no module.*blocks"),
    "unit class": (lambda: shard_mlp(layout=Layout(units=[nn.LSTM])), r"(?s)matches no module.*LSTM.*Linear"),
    "unit type": (lambda: shard_mlp(layout=Layout(units=[3])), r"(?s)names, patterns, module classes or their names"),
    "unit class by name": (lambda: shard_mlp(layout=Layout(units=["Linaer"])), r"(?s)matches no module.*mean 'Linear'"),
    "ignore": (
        lambda: shard_mlp(layout=Layout(ignore=["0.wieght"])),
        r"(?s)matches no parameter.*did you mean '0\.weight'",
    ),
    "device": (lambda: shard_mlp(device="gpu"), r"(?s)device=.*'gpu'"),
    "device type": (lambda: shard_mlp(device=[0]), r"(?s)device=.*\[0\]"),
    "device meta": (lambda: shard_mlp(device="meta"), r"(?s)device=.*'meta'"),
    "gradients": (with_gradient, r"(?s)already has a gradient.*'0\.weight'.*zero_grad"),
    "complex": (lambda: parameter_of(torch.ones(2, dtype=torch.complex64)), r"(?s)'odd'.*complex64.*ignore"),
    "sparse": (lambda: parameter_of(torch.eye(2).to_sparse()), r"(?s)'odd'.*sparse.*ignore"),
    "lazy": (lazy, r"(?s)parameter '1\.weight'.*model\(a batch\), once before shard"),
    "lazy, ignored": (lambda: lazy(layout=Layout(ignore=["1.*"])), r"(?s)'1\.weight'.*once before shard"),
    "lazy buffer": (lambda: lazy(lazy_buffer), r"(?s)buffer '1\.running_mean'.*once before shard"),
    "group": (lambda: shard_mlp(comm=Comm(group="world")), r"(?s)Comm\.group.*'world'"),
}


@pytest.mark.row(64)
@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_refused(name):
    """What is not a model, a policy, a device, a group or a parameter that can be cut says so, naming what it is."""
    call, says = CALLS[name]
    with pytest.raises(UserError, match=says):
        call()


def test_units_may_be_named_by_their_class():
    """The class, and its name, choose the same modules; a pattern that is no class's name chooses by the modules' names."""
    names = []
    for wanted in (nn.Linear, "Linear", "[024]"):
        zero = shard_mlp(layout=Layout(units=[wanted]))
        names.append([unit.name for unit in zero._engine.units])
    assert names[0] == names[1] == names[2] == ["", "0", "2", "4"]


def contradictions():
    """Settings that contradict each other on two ranks."""
    with pytest.raises(UserError, match=r"(?s)shards of one size.*bounds='tensor'"):
        shard_mlp(layout=Layout(bounds="tensor"), comm=Comm(reduce="native"))
    with pytest.raises(UserError, match=r"(?s)3 axes.*mesh\["):
        shard_mlp(comm=Comm(group=init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))))
    zero = shard_mlp()
    with pytest.raises(UserError, match=r"(?s)did you mean '0\.weight'"), zero.gathered("0.wieght"):
        pass
    with pytest.raises(UserError, match=r"(?s)rank.*0 to 1.*2"), zero.gathered(write_from=2):
        pass


@pytest.mark.row(64)
def test_contradictory_settings_are_refused():
    """A native reduction of unequal shards, a mesh of three dimensions, names and ranks that do not exist."""
    ranks.run(2, contradictions)


# ----------------------------------------------------------------------------------------------- ranks that do not agree


class Pair(nn.Module):
    """Two layers, registered in this or the other order."""

    def __init__(self, names=("first", "second"), shape=(7, 5), dtype=torch.float32, tied=False, buffer=(2,)) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(*shape, dtype=dtype))
        if tied:
            getattr(self, names[1]).bias = getattr(self, names[0]).bias
        self.register_buffer("table", torch.zeros(buffer))


class Renamed(torch.optim.AdamW):
    """The same algorithm under another name; says that it is elementwise."""

    elementwise = True


def build(odd, kind):
    """What rank `odd` builds differently: (model, optimizers, options of shard)."""
    model = {
        "name": partial(Pair, names=("first", "zweite")),
        "shape": partial(Pair, shape=(7, 6)),
        "dtype": partial(Pair, dtype=torch.float64),
        "order": partial(Pair, names=("second", "first")),
        "tie": partial(Pair, tied=True),
        "buffer": partial(Pair, buffer=(3,)),
        "more": partial(Pair, names=("first", "second", "third")),
        "fewer": partial(Pair, names=("first",)),
    }.get(kind if odd else "", Pair)()
    if odd and kind == "trainability":
        model.second.weight.requires_grad_(False)
    lr = 0.02 if odd and kind == "lr" else 0.01
    options = {"betas": (0.9, 0.9)} if odd and kind == "betas" else {}
    parameters = list(model.parameters())
    if odd and kind == "groups":
        optimizers = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=lr)
    elif odd and kind == "parameters":
        optimizers = torch.optim.AdamW(parameters[1:], lr=lr)
    elif odd and kind == "class":
        optimizers = Renamed(parameters, lr=lr)
    elif odd and kind == "optimizers":
        optimizers = [torch.optim.AdamW(parameters[:1], lr=lr), torch.optim.AdamW(parameters[1:], lr=lr)]
    else:
        optimizers = torch.optim.AdamW(parameters, lr=lr, **options)
    shard_options = {
        "stage": {"stage": 2},
        "precision": {"precision": Precision(param_dtype=torch.bfloat16)},
        "layout": {"layout": Layout(bucket_mib=1.0)},
        "units": {"layout": Layout(units=["first"])},
        "comm": {"comm": Comm(prefetch=2)},
    }.get(kind if odd else "", {})
    if odd and kind == "gradient":
        model.first.weight.grad = torch.ones(5, 7)
    if kind == "order":
        optimizers = None  # whose groups would name the parameters, and differ first
    if odd and kind == "refused optimizer":
        optimizers = torch.optim.SparseAdam(parameters)
    if odd and kind == "no such unit":
        shard_options = {"layout": Layout(units=["nothing"])}
    return model, optimizers, shard_options


DIFFERENCES = {
    "name": r"parameter 'second\.weight'",
    "shape": r"parameter 'first\.weight'.*\(5, 7\).*rank 0.*\(6, 7\)",
    "dtype": r"parameter 'first\.weight'.*float32.*rank 0.*float64",
    "order": r"in different orders.*first\.weight.*rank 0.*second\.weight.*rank 1",
    "tie": r"parameter 'first\.bias'.*second\.bias",
    "buffer": r"buffer 'table'.*\(2,\).*rank 0.*\(3,\)",
    "more": r"parameter 'third\.weight'.*nothing of that name.*rank 0",
    "fewer": r"parameter 'second\.weight'.*nothing of that name.*rank",
    "trainability": r"parameter 'second\.weight'.*requires_grad=True.*rank 0.*requires_grad=False",
    "lr": r"AdamW\) group 0 lr.*0\.01.*rank 0.*0\.02",
    "betas": r"AdamW\) group 0 betas.*0\.999.*rank 0.*\(0\.9, 0\.9\)",
    "groups": r"optimizer 0 \(AdamW\) group 0 parameters.*rank 0",
    "parameters": r"optimizer 0 \(AdamW\) group 0 parameters.*rank 0",
    "class": r"optimizer 0 \((AdamW|Renamed)\)",
    "optimizers": r"optimizer 0 \(AdamW\) group 0 parameters",
    "stage": r"stage.*3 \(rank 0\).*2 \(rank",
    "precision": r"precision.*rank 0.*bfloat16",
    "layout": r"layout.*bucket_mib=24\.0.*rank 0.*bucket_mib=1\.0",
    "units": r"layout.*units=None.*rank 0.*first",
    "comm": r"comm.*prefetch=1.*rank 0.*prefetch=2",
    "threads": r"threads.*1 \(rank 0\).*2 \(rank",
    "gradient": r"already has a gradient.*'first\.weight'",
    "refused optimizer": r"SparseAdam",
    "no such unit": r"matches no module.*nothing",
}


def disagreements(odd):
    """{kind: (error class, message)} on this rank; rank `odd` builds something else each time."""
    found = {}
    for kind in DIFFERENCES:
        mine = ranks.rank() == odd
        torch.set_num_threads(2 if mine and kind == "threads" else 1)
        model, optimizers, options = build(mine, kind)
        try:
            zeroshard.shard(model, optimizers, **options)
        except Error as error:
            found[kind] = (type(error).__name__, str(error))
    torch.set_num_threads(1)
    model, optimizers, _ = build(False, "")
    zeroshard.shard(model, optimizers)  # and the group is still good
    return found


@pytest.mark.row(7, 9)
def test_ranks_that_disagree_are_refused_on_every_rank():
    """Names, shapes, dtypes, order, trainability, ties, buffers, settings, hyper-parameters, thread counts, or an error
    of one rank alone: every rank raises, and names the first difference and the rank that differs."""
    import re

    outcomes = ranks.run(3, disagreements, 1)
    for rank, found in enumerate(outcomes):
        for kind, says in DIFFERENCES.items():
            assert kind in found, (rank, kind, "was not refused")
            error, text = found[kind]
            alone = kind in ("gradient", "refused optimizer", "no such unit") and rank == 1
            assert error == ("UserError" if alone else "PeerError"), (rank, kind, text)
            assert re.search(says, text, re.DOTALL), (rank, kind, text)
            assert alone or "rank 1" in text, (rank, kind, text)


def rank_0_counts():
    found = []
    for stage in STAGES:
        torch.manual_seed(ranks.rank())
        model = models.MODELS["batchnorm"]()
        model.register_buffer("odd", torch.full((3, 2), float(ranks.rank())).t())  # not contiguous
        zero = zeroshard.shard(model, None, stage=stage)
        with zero.gathered():
            weights = reference.weights(model)
        found.append(weights | {name: buffer.clone() for name, buffer in model.named_buffers()})
    return found


@pytest.mark.row(8)
def test_rank_0s_weights_and_buffers_count():
    """Ranks that initialised differently all start from rank 0's weights and buffers, bit for bit, at every stage."""
    torch.manual_seed(0)
    model = models.MODELS["batchnorm"]()
    want = reference.weights(model) | dict(model.named_buffers()) | {"odd": torch.zeros(2, 3)}
    for found in ranks.run(3, rank_0_counts):
        for each in found:
            reference.assert_same(each, want)


# ---------------------------------------------------------------------------------------------------------- process groups


def in_group(make, want, stages=STAGES):
    """Train inside what `make` gives; the ranks outside are refused. Returns what differs."""
    comm, members = make()
    for stage in stages:
        model = mlp()
        optimizer = adamw(model)
        if ranks.rank() not in members:
            with pytest.raises(UserError, match=rf"(?s)not a member.*rank {ranks.rank()}"):
                zeroshard.shard(model, optimizer, stage=stage, comm=comm)
            continue
        zero = zeroshard.shard(model, optimizer, stage=stage, comm=comm)
        assert (zero.rank, zero.world_size) == (members.index(ranks.rank()), len(members))
        train(model, optimizer, rank=zero.rank)
        with zero.gathered():
            reference.assert_same(reference.weights(model), want)


def default_group():
    return Comm(), [0, 1, 2]


def world_group():
    return Comm(group=dist.group.WORLD, timeout=20.0), [0, 1, 2]


def subgroup():
    return Comm(group=dist.new_group([0, 2])), [0, 2]


def alone():
    groups = [dist.new_group([rank]) for rank in range(3)]
    return Comm(group=groups[ranks.rank()]), [ranks.rank()]


def mesh():
    return Comm(group=init_device_mesh("cpu", (3,))), [0, 1, 2]


GROUPS = {"default": default_group, "world": world_group, "subgroup": subgroup, "alone": alone, "mesh": mesh}


@pytest.mark.row(62)
@pytest.mark.parametrize("name", GROUPS)
def test_groups(name, stage):
    """The default group, a group or a 1-D DeviceMesh passed in, a subgroup of the ranks, a group of one: the weights of
    plain PyTorch at that many ranks; ranks outside are refused."""
    want = plain({"subgroup": 2, "alone": 1}.get(name, 3))
    ranks.run(3, in_group, GROUPS[name], want, stages=(stage,))


def of_a_mesh(want):
    """Two groups of two ranks side by side, each over its own data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    in_group(lambda: (Comm(group=mesh["shard"]), [2 * (ranks.rank() // 2), 2 * (ranks.rank() // 2) + 1]), want)


def test_one_dimension_of_a_mesh():
    """`Comm(group=mesh["shard"])` shards over one dimension of a larger mesh."""
    ranks.run(4, of_a_mesh, plain(2))


def launched(want):
    """Nobody has initialised torch.distributed: zeroshard does, where a launcher says that there are several ranks."""
    assert not dist.is_initialized()
    for stage in STAGES:
        model = mlp()
        optimizer = adamw(model)
        zero = zeroshard.shard(model, optimizer, stage=stage, comm=Comm(timeout=20.0))
        assert (zero.rank, zero.world_size) == (ranks.rank(), ranks.world())
        train(model, optimizer)
        with zero.gathered():
            reference.assert_same(reference.weights(model), want)
    return dist.is_initialized() and dist.get_backend()


@pytest.mark.parametrize("world", [1, 2, 3], ids=lambda world: f"ranks{world}")
def test_under_torchrun(world):
    """With torchrun's environment and no process group, shard makes one (gloo on the CPU); one rank needs none."""
    assert ranks.run(world, launched, plain(world), group="env") == ["gloo" if world > 1 else False] * world


def test_without_a_launcher():
    """One process, no environment: one rank walks the same lines, and torch.distributed stays untouched."""
    assert ranks.run(1, launched, plain(1), group=False) == [False]


# ------------------------------------------------------------------------------------------------------------------- meta


class Grown(nn.Module):
    """A bare parameter without a `reset_parameters` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(7))
        self.linear = nn.Linear(7, 5)

    def forward(self, x):
        return self.linear(x * self.gain)


def fill(module):
    """An `init=` for anything."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.1)


META = {
    "gpt": (lambda: models.MODELS["gpt"](hidden=12, layers=2, positions=False), None),
    "gpt tied": (lambda: models.MODELS["gpt"](hidden=12, layers=2, positions=False, tied=True), None),
    "gpt filled": (lambda: models.MODELS["gpt"](hidden=12, layers=2, tied=True), fill),
    "batchnorm": (lambda: models.MODELS["mlp"]().extend([nn.BatchNorm1d(5)]), None),
    "aliased": (lambda: models.MODELS["aliased"](), None),
    "lstm": (lambda: models.MODELS["lstm"](), None),
    "half meta": (lambda: nn.Sequential(nn.Linear(7, 7), models.MODELS["mlp"]()), None),
}


def on_meta(name, precision):
    """Per stage: the weights and buffers right after shard, and after two steps."""
    make, init = META[name]
    found = []
    for stage in STAGES:
        with torch.device("meta"):
            model = make()
        if name == "half meta":
            torch.manual_seed(5)
            model[0] = nn.Linear(7, 7)
        optimizer = adamw(model)
        held = [id(parameter) for parameter in model.parameters()]
        names = dict(model.named_parameters(remove_duplicate=False))
        tied = {n for n, p in names.items() if sum(q is p for q in names.values()) > 1}
        torch.manual_seed(11 + 100 * ranks.rank())  # rank 0's seed counts
        zero = zeroshard.shard(model, optimizer, stage=stage, init=init, precision=precision)
        after = dict(model.named_parameters(remove_duplicate=False))
        assert [id(parameter) for parameter in model.parameters()] == held
        assert {n for n, p in after.items() if sum(q is p for q in after.values()) > 1} == tied
        with zero.gathered():
            first = reference.weights(model) | {n: b.clone() for n, b in model.named_buffers()}
            generator = torch.rand(3)
        if name != "batchnorm":
            batches = next((each for each in ("gpt", "lstm") if each in name), "mlp")
            train(model, optimizer, rank=0, name=batches)
        with zero.gathered():
            found.append((first, reference.weights(model), generator))
        zeroshard_gone(zero)
    return found


def zeroshard_gone(zero):
    assert not any(parameter.is_meta for parameter in zero.model.parameters())
    assert not any(buffer.is_meta for buffer in zero.model.buffers())


@pytest.mark.heavy
@pytest.mark.parametrize("name", META)
def test_a_model_on_meta_has_the_same_bits_everywhere(name):
    """Same seed, same initial bits at 1, 2 and 3 ranks and at every stage, and the same after two steps on the same
    data; ties and the optimizer that was built on meta stay; ranks end with equal generators."""
    runs = [found for world in (1, 2, 3) for found in ranks.run(world, on_meta, name, None)]
    first, trained, generator = runs[0][0]
    assert any(bool((weight != 0).any()) for weight in first.values())
    for run in runs:
        for initial, _, drawn in run:
            reference.assert_same(initial, first)
            assert torch.equal(drawn, generator)
    for run in runs:
        for _, weights, _ in run[1:]:
            reference.assert_same(weights, run[0][1])
    if name != "batchnorm":
        reference.assert_same(runs[1][0][1], trained)  # two ranks average what one rank computes: exactly the same


def test_a_model_on_meta_in_bf16():
    """Masters come from the fp32 initial values, at every rank count and stage."""
    runs = [r for world in (1, 2) for r in ranks.run(world, on_meta_bf16)]
    for run in runs:
        for weights in run:
            reference.assert_same(weights, runs[0][0])


def on_meta_bf16():
    found = []
    for stage in STAGES:
        with torch.device("meta"):
            model = models.MODELS["mlp"](SIZES)
        optimizer = adamw(model)
        torch.manual_seed(3)
        zero = zeroshard.shard(
            model, optimizer, stage=stage, precision=Precision(param_dtype=torch.bfloat16, cast_inputs=True)
        )
        assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {torch.float32}
        train(model, optimizer, rank=0)
        with zero.gathered():
            found.append(reference.weights(model))
    return found


# Which tensors of a model a rank has, by their number; the others are on meta there.
HAVING = {
    "rank 0 all": lambda rank, at: rank == 0,
    "rank 1 all": lambda rank, at: rank == 1,
    "all but the last rank": lambda rank, at: rank < ranks.world() - 1,
    "in turn": lambda rank, at: at % ranks.world() == rank,
    "some nobody": lambda rank, at: rank == 0 and at > 1,
}


def whole_of(make, rank):
    torch.manual_seed(rank)
    return make()


def tensors_of(model):
    return [*model.parameters(), *model.buffers()]


def lacking(make, rank, has):
    """A model with that rank's values of what it has, and the rest on meta."""
    whole = whole_of(make, rank)
    with torch.device("meta"):
        model = make()
    at = {id(tensor): number for number, tensor in enumerate(tensors_of(whole))}
    for module, its in zip(model.modules(), whole.modules(), strict=True):
        for name, real in (*its._parameters.items(), *its._buffers.items()):
            if real is not None and has(rank, at[id(real)]):
                setattr(module, name, real)
    return model


def given(name, pattern, precision):
    """Per stage whether each tensor has the values of the first rank that had any; and all weights, after a step."""
    (make, init), has, found = META[name], HAVING[pattern], []
    wholes = [tensors_of(whole_of(make, rank)) for rank in range(ranks.world())]
    batches = next((each for each in ("gpt", "lstm") if each in name), "mlp")
    for stage in STAGES:
        model = lacking(make, ranks.rank(), has)
        optimizer, held = adamw(model), tensors_of(model)
        torch.manual_seed(11 + ranks.rank())
        zero = zeroshard.shard(model, optimizer, stage=stage, init=init, precision=precision)
        zeroshard_gone(zero)
        assert all(map(operator.is_, model.parameters(), held))
        with zero.gathered():
            for at, tensor in enumerate(tensors_of(model)):
                giver = next((rank for rank in range(ranks.world()) if has(rank, at)), None)
                if giver is not None:
                    assert torch.equal(tensor, wholes[giver][at].to(tensor.dtype)), (stage, at, giver)
            first = {str(at): tensor.detach().clone() for at, tensor in enumerate(tensors_of(model))}
        if name != "batchnorm":
            train(model, optimizer, steps=1, rank=0, name=batches)
        with zero.gathered():
            found.append(first | reference.weights(model))
    return found


@pytest.mark.row(8)
@pytest.mark.parametrize("name", ["gpt tied", "batchnorm", "lstm"])
@pytest.mark.parametrize("pattern", HAVING)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_ranks_on_meta_get_the_values_of_those_that_have_them(name, pattern, dtype):
    """One rank holds the weights and the others wait, or several have some: parameters and buffers are those of the
    first rank that has them, at every stage; what nobody has is initialised alike. Objects, ties and optimizers stay."""
    precision = Precision(param_dtype=dtype, cast_inputs=dtype is not None)
    first, *others = [each for run in ranks.run(3, given, name, pattern, precision) for each in run]
    for other in others:
        reference.assert_same(other, first)


class Said(nn.Module):
    """A model with a say in its modules' first values, as Hugging Face's have it; one of them has none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.grown, self.norm = nn.Linear(7, 7), Grown(), nn.LayerNorm(5)
        self.inner = Quiet()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, Grown)):
            for parameter in module.parameters(recurse=False):
                nn.init.constant_(parameter, 0.5)


class Quiet(nn.Module):
    """A model inside it, with a say of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)
            nn.init.zeros_(module.bias)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_models_own_say_in_first_values_counts(stage):
    """What it says nothing of is as its modules have it; `init=` comes before all of it."""
    for init, want in ((None, {"linear": 0.5, "grown": 0.5, "norm": 1.0, "inner": 0.25}), (zeros, {})):
        with torch.device("meta"):
            model = Said()
        zero = zeroshard.shard(model, None, stage=stage, init=init)
        with zero.gathered():
            for name, parameter in model.named_parameters():
                value = 0.0 if name in ("norm.bias", "inner.linear.bias") else want.get(name.split(".")[0], 0.0)
                assert (parameter == value).all(), name


def zeros(module):
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def test_what_cannot_initialise_itself_is_refused():
    """A module with bare parameters on meta and no `reset_parameters` is named, with `init=`; nothing has changed yet,
    so the same model can be sharded with it."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 7), Grown())
    optimizer = adamw(model)
    with pytest.raises(UserError, match=r"(?s)module '1' \(Grown\).*reset_parameters.*init="):
        zeroshard.shard(model, optimizer)
    assert all(parameter.is_meta for parameter in model.parameters())
    zero = zeroshard.shard(model, optimizer, init=fill)
    models.loss("mlp", model, models.batch("mlp", 0, 0)).backward()
    optimizer.step()
    assert zero.stage == 3


class Peak(TorchDispatchMode):
    """Bytes of all storages made inside that are alive, after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                ref = StorageWeakRef(leaf.untyped_storage())
                self.refs.setdefault(ref.cdata, ref)
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        self.refs = {key: ref for key, ref in self.refs.items() if not ref.expired()}
        total = 0
        for ref in self.refs.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            total += 0 if storage is None else storage.nbytes()
        return total


WIDTH, LAYERS = 96, 12
UNIT = 4 * (WIDTH * WIDTH + WIDTH)
SMALL = 8192  # bytes: headers, facts, the generator's state


def peaks(precision, first="meta"):
    """(peak, at rest, unit as it came, unit as gathered) in bytes on this rank, all counted by walking live storages.

    first: where rank 0 has the model.
    """
    with torch.device("meta" if ranks.rank() else first):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Peak() as counted:
        zero = zeroshard.shard(model, optimizer, precision=precision)
    ledger = zero.ledger()
    states = sum(ledger.held.get(state, 0) for state in ("parameters", "gradients", "master"))
    with suppress(AssertionError):  # gloo's thread lets go of what it has sent a little after the wait for it returns
        ranks.until(lambda: counted.now() - states <= SMALL, 5.0)
    return counted.peak, counted.now(), states, ledger.peak["gather"]


def test_meta_never_takes_more_than_its_shards_and_one_unit():
    """Peak memory while a model on meta is sharded at stage 3 is what rests afterwards plus one unit (twice over where
    the unit is converted: once as it is initialised and once as it is computed with), of twelve. Beside them gloo's
    thread may still hold what one rank sent of the unit before, half of it: when it lets go is the machine's affair."""
    largest = 4 * 2 * (-(-(WIDTH * WIDTH + 128) // 256) * 128)  # a unit in fp32, its padding at 2 ranks included
    for peak, rest, states, gathered in ranks.run(2, peaks, None):
        assert rest - states <= SMALL
        assert UNIT <= gathered <= largest
        assert peak <= rest + largest + largest // 2 + SMALL, f"peak {peak}, at rest {rest}, one unit {largest}"
        assert peak < UNIT * LAYERS * 1.3  # the whole model alone would be LAYERS units, beside gradients
    for peak, rest, states, _ in ranks.run(2, peaks, Precision(param_dtype=torch.bfloat16)):
        assert rest - states <= SMALL
        assert peak <= rest + 2 * largest + SMALL, f"peak {peak}, at rest {rest}, one unit {largest}"
    peak, rest, states, gathered = ranks.run(2, peaks, None, "cpu")[1]  # which waits for rank 0's
    assert rest - states <= SMALL
    assert UNIT <= gathered <= largest
    assert peak <= rest + largest + largest // 2 + SMALL, f"peak {peak}, at rest {rest}, one unit {largest}"


def ignored_on_meta():
    """A parameter that nobody sends."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 5))
    model[1].to("meta" if ranks.rank() == 1 else "cpu")
    with pytest.raises(PeerError, match=r"(?s)no rank sends it.*'1\.bias'.*values on rank 0, none on rank 1"):
        zeroshard.shard(model, None, layout=Layout(ignore=["1.bias"]))
    assert zeroshard.shard(model, None).stage == 3


def test_what_is_not_sharded_and_on_meta_on_some_ranks_is_refused():
    """On every rank, before anything has changed: without the setting the same model is sharded."""
    ranks.run(3, ignored_on_meta)


# ------------------------------------------------------------------------------------------------------------------ device


def test_device_may_be_said():
    """`device="cpu"` is where a CPU model is anyway; a model partly on meta goes where it is told."""
    model = mlp()
    optimizer = adamw(model)
    zero = zeroshard.shard(model, optimizer, device="cpu")
    train(model, optimizer, rank=0)
    with zero.gathered():
        reference.assert_same(reference.weights(model), plain(1))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cpu", "meta", "stepped"])
def test_a_model_goes_onto_another_device(kind):
    """A CPU model, a model on meta, and one whose optimizer has stepped on the CPU are sharded onto the GPU: parameters,
    buffers, masters and state live there, and training goes on."""
    for stage in STAGES:
        with torch.device("meta" if kind == "meta" else "cpu"):
            model = nn.Sequential(models.MODELS["mlp"](SIZES), nn.BatchNorm1d(5))
        for fused in (False, True):
            twin = copy.deepcopy(model)
            optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01, fused=fused)
            if kind == "stepped":
                twin(torch.ones(3, 7)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            zeroshard.shard(twin, optimizer, stage=stage, device="cuda")
            twin(torch.ones(3, 7, device="cuda")).square().sum().backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            optimizer.step()
            tensors = [*twin.parameters(), *twin.buffers(), *optimizer.param_groups[0]["params"]]
            tensors += [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
            assert {tensor.device.type for tensor in tensors} == {"cuda"}


# ------------------------------------------------------------------------------------------------- once, and not copied


@pytest.mark.row(62)
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_is_sharded_once(stage):
    """Sharding again, sharding a part, or sharding something around it is refused; the first engine goes on."""
    model = nn.Sequential(models.build("mlp"))
    optimizer = adamw(model)
    zeroshard.shard(model, optimizer, stage=stage)
    for what in (model, model[0], nn.Sequential(model, nn.Linear(5, 5))):
        with pytest.raises(UserError, match=r"(?s)sharded already.*zero.unshard\(\) makes model and optimizer plain"):
            zeroshard.shard(what, None)
    train(model, optimizer, rank=0)


@pytest.mark.row(63)
@pytest.mark.parametrize("stage", STAGES)
def test_a_sharded_model_is_not_copied_or_pickled(stage):
    """deepcopy, pickle and torch.save of model or engine are refused with the remedy, before and after a step; the
    model goes on."""
    model = mlp()
    optimizer = adamw(model)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for _ in range(2):
        for what in (model, zero):
            for copying in (copy.deepcopy, pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
                with pytest.raises(StateError, match="instead: "):
                    copying(what)
        train(model, optimizer, rank=0, steps=1)


def test_existing_gradients_are_refused_once_cleared_accepted():
    """A parameter that already has a gradient is named; after zero_grad the same call works."""
    model = mlp()
    optimizer = adamw(model)
    model(torch.ones(1, 7)).sum().backward()
    with pytest.raises(UserError, match=r"(?s)'0\.weight'.*zero_grad"):
        zeroshard.shard(model, optimizer)
    optimizer.zero_grad()
    zeroshard.shard(model, optimizer)
    train(model, optimizer, rank=0)


@pytest.mark.row(19)
def test_an_empty_model():
    """A model without parameters, or with frozen ones only, is sharded without ado."""
    for model in (nn.Sequential(nn.Tanh()), mlp().requires_grad_(False)):
        for stage in STAGES:
            twin = copy.deepcopy(model)
            zero = zeroshard.shard(twin, None, stage=stage)
            with torch.no_grad():
                assert torch.equal(twin(torch.ones(2, 7)), model(torch.ones(2, 7)))
            assert zero.world_size == 1


class Warming:
    """A schedule around an optimizer, as of Noam, which is no optimizer itself."""

    def __init__(self, optimizer):
        self.inner = optimizer


def test_a_wrapper_that_is_no_optimizer_hears_of_the_optimizer_inside(stage):
    model = mlp()
    with pytest.raises(UserError, match=r"(?s)not an optimizer.*Warming.*shard\(model, wrapper\.inner\)"):
        zeroshard.shard(model, Warming(adamw(model)), stage=stage)
