"""Released means safe: what is not there cannot be read by accident, and what is edited counts or is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import pickle
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import reference
import zeroshard
from zeroshard import Layout, Precision
from zeroshard.errors import ReleasedError, StateError

NAMES = r"(?s)'blocks\.0\.weight'.*zero\.gathered"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def two(stage: int = 3, **options):
    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **options)


def step(model, optimizer, index: int = 0) -> None:
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(index))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- reading ----------------------------------------------------------------------------------------------------------

TOUCHES = {
    "arithmetic": lambda p: p + 1,
    "reduction": lambda p: p.sum(),
    "function": lambda p: F.linear(torch.ones(1, 7), p),
    "index": lambda p: p[0],
    "view": lambda p: p.view(-1),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "in a list": lambda p: torch.cat([torch.ones(1, 7), p]),
    "foreach": lambda p: torch._foreach_norm([p]),
    "out": lambda p: torch.add(torch.ones(7, 7), 1, out=p),
    "in place": lambda p: p.mul_(2),
    "compare": lambda p: p == 1,
    "iterate": list,
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: np.asarray(p),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "dlpack method": lambda p: p.__dlpack__(),
    "dlpack function": lambda p: torch.utils.dlpack.to_dlpack(p),
    "from_dlpack": lambda p: torch.from_dlpack(p),
    "memoryview": lambda p: memoryview(p.numpy()),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "to": lambda p: p.to(torch.float64),
    "set data": lambda p: setattr(p, "data", torch.ones(7, 7)),
    "item": lambda p: p.item(),
    "is_shared": lambda p: p.share_memory_(),
    "torch.tensor": lambda p: torch.tensor(p),
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
}


def touch(name: str):
    model, optimizer, zero = two()
    parameter = model.blocks[0].weight
    with pytest.raises(ReleasedError, match=NAMES):
        TOUCHES[name](parameter)
    step(model, optimizer)  # nothing was harmed
    with zero.gathered():
        assert parameter.shape == (7, 7) and parameter.isfinite().all()
    with pytest.raises(ReleasedError, match=NAMES):
        TOUCHES[name](parameter)
    return zero.ledger().held["gather"]


@pytest.mark.row(22)
@pytest.mark.parametrize("name", TOUCHES)
def test_touching_a_released_parameter_names_it_and_the_remedy(ranks, name):
    """Every way of reading or writing its data raises, before and after a step; nothing stays gathered."""
    assert ranks.run(2, touch, name) == [0, 0]


def data_of_another(param):
    tensor = torch.ones(7, 7)
    tensor.data = param
    return tensor


DOORS = {
    "Tensor": lambda p: torch.Tensor(p),
    "FloatTensor": lambda p: torch.FloatTensor(p),
    "make_subclass": lambda p: torch.Tensor._make_subclass(torch.Tensor, p),
    "data of another": data_of_another,
}


def behind_the_guard(name: str):
    model, optimizer, zero = two()
    step(model, optimizer)
    tensor = DOORS[name](model.blocks[0].weight)
    assert tensor.shape == (7, 7) and tensor.isnan().all() and tensor.sum().isnan() and (tensor @ tensor).isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"):
        tensor.detach().mul_(2.0)
    tensor.detach().fill_(1.0)
    step(model, optimizer, 1)  # nothing was harmed, and the memory is not held by what was taken
    assert DOORS[name](model.blocks[0].weight).isnan().all()
    with zero.gathered():
        assert model.blocks[0].weight.isfinite().all()
    return zero.ledger().held["gather"]


@pytest.mark.processes
@pytest.mark.row(22)
@pytest.mark.parametrize("name", DOORS)
def test_what_no_guard_can_see_reads_nan_and_harms_nothing(ranks, name):
    """Types and descriptors of torch ask no Python class first: no crash, no weight, and training goes on."""
    assert ranks.run(2, behind_the_guard, name) == [0, 0]


class HalvesItsWeight(torch.autograd.Function):
    """Writes into a weight that it has saved, in backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grads = grad @ weight.t(), x.t() @ grad
        weight.mul_(0.5)
        return grads


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return HalvesItsWeight.apply(x, self.weight)


def halved(stage: int | None, precision: Precision):
    model = nn.Sequential(Halving(), nn.Linear(7, 7, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage, precision=precision)
    for index in range(3):
        step(model, optimizer, index)
    with contextlib.nullcontext() if zero is None else zero.gathered():
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.row(29)
def test_a_write_into_a_saved_weight_counts_as_in_plain_pytorch(ranks, stage):
    """In the backward of a custom Function: what rests, and its master, follow. Each rank has the same batch."""
    masters = Precision(master_dtype=torch.float64)
    for precision, wanted in (Precision(), halved(None, Precision())), (masters, ranks.run(2, halved, 0, masters)[0]):
        for got in ranks.run(2, halved, stage, precision):
            assert all(map(torch.equal, got, wanted)), precision


def metadata():
    model, _, _ = two()
    torch.manual_seed(0)
    plain = Two()
    for (name, mine), (plain_name, its) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == plain_name and isinstance(mine, nn.Parameter)
        for ask in ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "grad", "layout"):
            assert getattr(mine, ask) == getattr(its, ask), ask
        assert (mine.size(), mine.numel(), mine.stride(), mine.dim(), len(mine)) == (
            its.size(),
            its.numel(),
            its.stride(),
            its.dim(),
            len(its),
        )
        assert (mine.is_contiguous(), mine.storage_offset() >= 0) == (its.is_contiguous(), True)
        assert name in repr(mine) and "not gathered" in repr(mine)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert "Linear(in_features=7" in repr(model)
    return len(list(model.parameters()))


def test_metadata_is_that_of_the_full_model(ranks):
    """Names, shapes, dtypes and counts are answered while released, and repr says what is going on."""
    assert ranks.run(2, metadata) == [4, 4]


def state_dicts(stage: int):
    model, _, zero = two(stage)
    torch.manual_seed(0)
    want = Two().state_dict()
    if stage == 3:
        for call in (
            model.state_dict,
            model.blocks.state_dict,
            model.blocks[0].state_dict,
            lambda: model.load_state_dict(want),
            lambda: model.load_state_dict({}, strict=False),
            lambda: model.blocks[1].load_state_dict({}, strict=False),
        ):
            with pytest.raises(zeroshard.Error, match="zero.gathered"):
                call()
    with zero.gathered():
        state = model.state_dict()
        assert list(state) == list(want) and all(torch.equal(state[key], want[key]) for key in want)
        kept = {key: value.clone() for key, value in state.items()}
    return sorted(kept)


def test_state_dict_is_refused_or_whole(ranks, stage):
    """Never saved empty, never loaded into nothing: refused with the remedy, and whole inside gathered()."""
    assert len(ranks.run(2, state_dicts, stage)[0]) == 4


# --- nothing ends in a segmentation fault --------------------------------------------------------------------------------


def stashed():
    """A forward that returns and stashes views of its weights; someone looks at them afterwards."""
    model = models.build("views")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer)
    x, y = models.batch("views", 0, 0)
    out = model(x)
    stash = model.table.stash
    before = stash.detach().clone()
    assert torch.equal(stash, before)
    F.mse_loss(out, y).backward()
    assert torch.equal(stash, before)  # the memory is kept while somebody holds it
    held = zero.ledger().held["gather"]
    model.table.stash = None
    del stash, out
    optimizer.step()
    optimizer.zero_grad()
    with zero.gathered():
        pass
    return held, zero.ledger().held["gather"]


def test_views_of_weights_keep_their_memory(ranks):
    """A view that outlives the forward stays valid; once it is gone the memory is given back."""
    for held, after in ranks.run(2, stashed):
        assert held > 0 and after == 0


def foreign_hooks(kind: str):
    """Somebody else's saved_tensors_hooks inside the forward: they, not zeroshard's, are on top."""

    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([models.Scaled(7), models.Scaled(7)])

        def forward(self, x):
            pack, unpack = {
                "identity": (lambda t: t, lambda t: t),
                "detach": (lambda t: t.detach(), lambda t: t),
                "copy": (lambda t: t.clone(), lambda t: t),
            }[kind]
            for block in self.blocks:
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    x = x + block.act(block.norm(x) * block.gain)
            return x

    def run(sharded: bool):
        torch.manual_seed(0)
        model = Hooked()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if sharded:
            zero = zeroshard.shard(model, optimizer, layout=Layout(units=[models.Scaled, nn.RMSNorm, nn.PReLU]))
        for index in range(3):
            model(torch.randn(3, 7, generator=torch.Generator().manual_seed(index))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if sharded:
            with zero.gathered():
                return reference.weights(model)
        return reference.weights(model)

    return reference.first_difference(run(True), run(False))


@pytest.mark.parametrize("kind", ["identity", "detach", "copy"])
def test_someone_elses_saved_tensor_hooks(ranks, kind):
    """Hooks that keep the parameter itself, a detached alias or a copy: no crash, and plain PyTorch's bits."""
    assert ranks.run(1, foreign_hooks, kind) == [""]


ROUNDING = {
    "a tensor": (lambda t: t.bfloat16(), lambda packed: packed.float()),
    "a tuple": (lambda t: (t.dtype, t.bfloat16()), lambda packed: packed[1].to(packed[0])),
    "the weight beside a number": (lambda t: {"of": t, "by": 0.5}, lambda packed: packed["of"] * packed["by"]),
    "an object": (lambda t: SimpleNamespace(of=t), lambda packed: packed.of * 0.5),
}


def rounded_by_hooks(kind, stage):
    """Gradients where the program's hooks change what backward is computed with, and how many tensors they got."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage)
    pack, unpack = ROUNDING[kind]
    packed = []

    def counting(tensor):
        packed.append(tuple(tensor.shape))
        return pack(tensor)

    for step in range(3):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(step))
        with torch.autograd.graph.saved_tensors_hooks(counting, unpack):
            out = model(x)
        out.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if zero is None:
        return packed, reference.weights(model)
    with zero.gathered():
        return packed, reference.weights(model)


@pytest.mark.parametrize("kind", ROUNDING)
def test_hooks_that_change_what_backward_is_computed_with(ranks, kind):
    """They get the weights too, as in plain PyTorch, and the bits are those with the weights that they give back."""
    ((seen, want),) = ranks.run(1, rounded_by_hooks, kind, None)
    assert (24, 24) in seen
    for stage in (0, 3):
        ((got, found),) = ranks.run(1, rounded_by_hooks, kind, stage)
        assert got == seen
        reference.assert_same(found, want)


LOSSY = ROUNDING["a tensor"]


def beside_a_teacher(kind, stage):
    """Gradients where the program's hooks are around a forward in which, or a `gathered()` in which, a second model
    runs."""
    torch.manual_seed(0)
    model, teacher = Two(), Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = contextlib.nullcontext
    if stage is not None:
        weights = zeroshard.shard(model, optimizer, stage=stage).gathered
        zeroshard.shard(teacher, None, stage=stage)
    if kind == "in its forward":
        model.blocks[0].register_forward_hook(lambda module, args, y: y + teacher(y))
    for step in range(2):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
        around = weights() if kind == "in gathered()" else contextlib.nullcontext()
        with around, torch.autograd.graph.saved_tensors_hooks(*LOSSY):
            y = teacher(x) @ model.blocks[0].weight if kind == "in gathered()" else x
            loss = model(y).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with weights():
        return reference.weights(model)


@pytest.mark.parametrize("kind", ["in its forward", "in gathered()"])
def test_hooks_get_the_weights_of_every_sharded_model(ranks, kind):
    (want,) = ranks.run(1, beside_a_teacher, kind, None)
    for stage in (0, 3):
        (got,) = ranks.run(1, beside_a_teacher, kind, stage)
        reference.assert_same(got, want)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def hooks_between_modules(seed, stage):
    """Weights where pairs of hooks are entered by one module's hook and left by another's, at places that are drawn."""
    drawn = random.Random(seed)
    torch.manual_seed(0)
    model = Nested()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = None

    def places(module):
        yield module, False
        for child in module.children() if not isinstance(module, nn.ModuleList) else ():
            yield from places(child)
        yield module, True

    at = [place for block in model.blocks for place in places(block)]
    pairs = [drawn.sample(range(len(at)), 2)]
    first, last = pairs[0] = sorted(pairs[0])
    if drawn.random() < 0.5 and last - first > 2:
        pairs.append(sorted(drawn.sample(range(first + 1, last), 2)))
    before = drawn.random() < 0.5
    seen = []

    def register():
        for number, (enter, leave) in enumerate(pairs):
            pack, unpack = LOSSY

            def packs(tensor, number=number, pack=pack):
                seen.append((number, tuple(tensor.shape)))
                return pack(tensor)

            hooks = torch.autograd.graph.saved_tensors_hooks(packs, unpack)
            for place, act in ((enter, hooks.__enter__), (leave, partial(hooks.__exit__, None, None, None))):
                module, after = at[place]
                how = module.register_forward_hook if after else module.register_forward_pre_hook
                how(lambda *_, act=act: act())

    if before:
        register()
    if stage is not None:
        zero = zeroshard.shard(model, optimizer, stage=stage)
    if not before:
        register()
    for step in range(2):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered() if zero else contextlib.nullcontext():
        return seen, reference.weights(model)


def hooks_between_modules_of(seeds):
    for seed in seeds:
        seen, want = hooks_between_modules(seed, None)
        for stage in (0, 3):
            got, found = hooks_between_modules(seed, stage)
            assert got == seen, (seed, stage)
            assert reference.first_difference(found, want) == "", (seed, stage)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "seeds", [range(20), *(pytest.param(range(at, at + 40), marks=pytest.mark.full) for at in range(20, 220, 40))]
)
def test_hooks_that_one_module_enters_and_another_leaves(ranks, seeds):
    """They get the tensors that they get in plain PyTorch, and the bits are those."""
    ranks.run(1, hooks_between_modules_of, seeds, timeout=120.0)


class Keeps(torch.autograd.Function):
    """A custom function that keeps its weight in the context, past every hook."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.weight, None


def custom_function():
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
            self.gains = nn.ModuleList([nn.PReLU(7), nn.PReLU(7)])

        def forward(self, x):
            for block, gain in zip(self.blocks, self.gains, strict=True):
                x = Keeps.apply(torch.tanh(block(x)), gain.weight)
            return x

    def run(sharded: bool):
        torch.manual_seed(0)
        model = Custom()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = zeroshard.shard(model, optimizer) if sharded else None
        for index in range(3):
            step(model, optimizer, index)
        if zero is None:
            return reference.weights(model)
        with zero.gathered():
            return reference.weights(model)

    return reference.first_difference(run(True), run(False))


def test_a_weight_kept_in_an_autograd_context(ranks):
    """`ctx.weight = weight` in a custom Function: reading it in backward gathers it."""
    assert ranks.run(1, custom_function) == [""]


def numpy_view():
    """A NumPy view made under gathered() pins the storage; released memory must not be under it."""
    model, optimizer, zero = two()
    with zero.gathered():
        array = model.blocks[0].weight.detach().numpy()
    before = array.copy()
    step(model, optimizer)
    assert np.isfinite(array).all() and array.shape == (7, 7)
    held = zero.ledger().held["gather"]
    del array
    gc.collect()
    step(model, optimizer, 1)
    with zero.gathered():
        now = model.blocks[0].weight.detach().numpy().copy()
    return held > 0, zero.ledger().held["gather"], bool((now != before).any())


def test_numpy_views_of_gathered_weights(ranks):
    """The array stays readable, then its memory is given back and training goes on."""
    assert ranks.run(2, numpy_view) == [(True, 0, True)] * 2


def checkpoint_keeps_no_activation():
    """Bytes of live tensors between forward and backward, plain and checkpointed, alone and sharded."""

    def live() -> int:
        gc.collect()
        storages = {}
        for tensor in gc.get_objects():
            if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return sum(storages.values())

    saved = {}
    for checkpoint in (None, "nonreentrant", "reentrant"):
        for sharded in (False, True):
            model = models.build("gpt", hidden=40, layers=4, checkpoint=checkpoint)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if sharded:
                zeroshard.shard(model, optimizer, stage=3)
            kept = []

            def pack(tensor, kept=kept):
                kept.append(tensor.nbytes)
                return tensor

            tokens, _ = models.batch("gpt", 0, 0)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = model(tokens)
            saved[checkpoint, sharded] = sum(kept)
            del out
    return saved


def test_checkpointing_saves_as_much_memory_as_without_zeroshard(ranks):
    """What reaches the hooks below zeroshard's: as much under checkpointing, and without it, as in plain PyTorch."""
    (saved,) = ranks.run(1, checkpoint_keeps_no_activation)
    assert saved[None, True] == saved[None, False], saved
    for checkpoint in ("nonreentrant", "reentrant"):
        assert saved[checkpoint, True] <= saved[checkpoint, False], saved
        assert saved[checkpoint, True] < saved[None, True] / 3, saved


def saves_parameters(stage):
    """What `torch.save` of gathered parameters says; of copies it is as of a plain model's."""
    model, _, zero = two(stage)
    told = []
    for what in (model.blocks[0].weight, dict(model.named_parameters()), nn.ParameterList(model.parameters())):
        with pytest.raises(StateError):  # at stage 3 they cannot be read
            torch.save(what, io.BytesIO())
        with zero.gathered(), pytest.raises(StateError) as error:
            torch.save(what, io.BytesIO())
        told.append(f"{error.value}")
    file = io.BytesIO()
    with zero.gathered():
        torch.save({n: p.detach().clone() for n, p in model.named_parameters()}, file)
        want = reference.weights(model)
    file.seek(0)
    reference.assert_same(torch.load(file), want)
    return told


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_pickled_parameters_are_refused_with_what_to_write(ranks, stage):
    for told in ranks.run(1, saves_parameters, stage)[0]:
        assert "'blocks.0.weight'" in told and "copies = {n: p.detach().clone() for n, p in" in told, told


# --- edits -----------------------------------------------------------------------------------------------------------------

EDITS = {
    "in place": lambda p: p.mul_(1.5),
    "data in place": lambda p: p.data.mul_(1.5),
    "data replaced": lambda p: setattr(p, "data", p.data * 1.5),
    "init": lambda p: nn.init.constant_(p, 0.25),
    "copy": lambda p: p.copy_(torch.full_like(p, 0.25)),
}


def edited(world: int, stage: int, dtype, edit: str, write_from, where: str):
    rank = torch.distributed.get_rank() if world > 1 else 0

    def run(model, optimizer, around):
        for index in range(4):
            if index == 2:
                with torch.no_grad(), around():
                    for name in ("weight", "bias"):
                        if write_from is None or rank == write_from or optimizer is None:
                            EDITS[edit](getattr(model.blocks[1], name))
            yield index

    model, optimizer, zero = two(stage, precision=Precision(param_dtype=dtype))
    from contextlib import nullcontext

    around = partial(zero.gathered, write_from=write_from) if where == "gathered" else nullcontext
    for index in run(model, optimizer, around):
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(index), dtype=dtype or torch.float32)
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.heavy
@pytest.mark.row(27, 29)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_edits_count_at_every_stage(ranks, dtype, edit):
    """Edits inside gathered(), on all ranks or from one, give the same bits at every stage and rank count."""
    want = None
    for world in (1, 2):
        for stage in range(4):
            for write_from in (None, world - 1):
                for got in ranks.run(world, edited, world, stage, dtype, edit, write_from, "gathered"):
                    want = want or got
                    reference.assert_same(got, want)
    unedited = ranks.run(1, edited, 1, 0, dtype, edit, 7, "gathered" if False else "plain")[0]
    assert reference.first_difference(unedited, want)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(3))
def test_edits_of_replicated_parameters_need_no_gathered(ranks, dtype, edit, stage):
    """At stages 0-2 a plain edit between steps counts as well."""
    want = ranks.run(1, edited, 1, 3, dtype, edit, None, "gathered")[0]
    for got in ranks.run(2, edited, 2, stage, dtype, edit, None, "plain"):
        reference.assert_same(got, want)


def loaded(stage: int):
    model, optimizer, zero = two(stage, precision=Precision(param_dtype=torch.bfloat16))
    step_in = partial(torch.randn, 3, 7, dtype=torch.bfloat16)
    torch.manual_seed(5)
    other = {name: value.bfloat16() for name, value in Two().state_dict().items()}
    model(step_in(generator=torch.Generator().manual_seed(0))).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with zero.gathered():
        model.load_state_dict(other)
    model(step_in(generator=torch.Generator().manual_seed(1))).float().sum().backward()
    optimizer.step()
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(28, 29)
def test_load_state_dict_counts_at_every_stage(ranks, stage):
    """Masters follow the loaded weights, so the next step starts from them."""
    want = ranks.run(1, loaded, 0)[0]
    for got in ranks.run(2, loaded, stage):
        reference.assert_same(got, want)


def clamping(world: int, stage: int):
    """A forward that edits its own weight before using it, on every rank alike."""

    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([models.Scaled(7), models.Scaled(7)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def clamp(module, args):
        with torch.no_grad():
            module.gain.clamp_(-0.5, 0.5)

    def build():
        torch.manual_seed(0)
        model = Clamped()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    rank = torch.distributed.get_rank() if world > 1 else 0

    def x(index, r):
        return torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * index + r))

    want, optimizer = build()
    for block in want.blocks:
        block.register_forward_pre_hook(clamp)
    for index in range(3):
        for r in range(world):
            want(x(index, r)).square().mean().backward()
        for p in want.parameters():
            p.grad.div_(world)
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = build()
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for block in model.blocks:
        block.register_forward_pre_hook(clamp)
    for index in range(3):
        model(x(index, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return reference.first_difference(reference.weights(model), reference.weights(want))


@pytest.mark.parametrize("world", [1, 2])
def test_a_forward_that_edits_its_own_weights(ranks, world, stage):
    """Clamping a weight in a pre-hook counts, as in plain PyTorch."""
    assert ranks.run(world, clamping, world, stage) == [""] * world


def restructured(stage: int, how: str):
    model, optimizer, _ = two(stage)
    with pytest.raises((zeroshard.Error, RuntimeError), match="blocks.0|gathered"):
        if how == "replaced":
            model.blocks[0].weight = nn.Parameter(torch.ones(7, 7))
        elif how == "deleted":
            del model.blocks[0].bias
        elif how == "half":
            model.half()
        elif how == "double":
            model.to(torch.float64)
        elif how == "module":
            model.blocks[0] = nn.Linear(7, 7)
        step(model, optimizer)
    return True


@pytest.mark.row(27)
@pytest.mark.parametrize("how", ["replaced", "deleted", "half", "double", "module"])
def test_changes_of_structure_are_refused(ranks, stage, how):
    """Parameters replaced, removed or converted after shard are refused by name, never ignored."""
    assert ranks.run(2, restructured, stage, how) == [True, True]


def changed_in_between(stage: int):
    model, optimizer, zero = two(stage)
    loss = model(torch.ones(3, 7)).square().sum()
    model(torch.ones(3, 7)).square().sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    loss = model(torch.ones(3, 7)).square().sum()
    with zero.gathered(), torch.no_grad():
        model.blocks[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    step(model, optimizer)
    return True


@pytest.mark.row(28)
def test_a_weight_changed_between_forward_and_backward_raises(ranks, stage):
    """By a step or by an edit under gathered(); afterwards training goes on."""
    assert ranks.run(2, changed_in_between, stage) == [True, True]


def kept_activation():
    model, _, _ = two()
    x = torch.randn(3, 7, requires_grad=True)
    y = torch.exp(x * 1)
    out = model(y) + (y * y).sum()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    return True


@pytest.mark.row(28)
def test_autograds_own_version_check_survives(ranks):
    """zeroshard's hooks switch it off for what they keep, so they check themselves."""
    assert ranks.run(2, kept_activation) == [True, True]


def gathering():
    model, _, zero = two()
    for wrong in ("nothing.like.it", 3):
        with pytest.raises(ValueError, match="blocks|modules and names"), zero.gathered(wrong):
            pass
    with pytest.raises(ValueError, match="write_from"), zero.gathered(write_from=2):
        pass
    with zero.gathered("blocks.0.*"):
        assert model.blocks[0].weight.sum().isfinite()
        with pytest.raises(ReleasedError):
            model.blocks[1].weight.sum()
    with zero.gathered(model.blocks[1]), zero.gathered():  # nested
        assert model.blocks[0].weight.sum().isfinite()
    with pytest.raises(KeyError), zero.gathered():
        raise KeyError("the user's")
    with pytest.raises(StateError, match="shard"):
        copy.deepcopy(zero)
    return zero.ledger().held["gather"]


def test_gathered(ranks):
    """By module, name or pattern; nested; refused for what does not exist; closed after an exception."""
    assert ranks.run(2, gathering) == [0, 0]


# --- conversions that change nothing -----------------------------------------------------------------------------------

SAME = {
    "to(device)": lambda model: model.to("cpu"),
    "to(dtype)": lambda model: model.to(torch.float32),
    "to(device, dtype)": lambda model: model.to(torch.device("cpu"), torch.float32, non_blocking=True),
    "to(tensor)": lambda model: model.to(torch.zeros(1)),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "type": lambda model: model.type(torch.float32),
}
OTHER = {
    "half": lambda model: model.half(),
    "to(dtype)": lambda model: model.to(torch.float64),
    "to(device)": lambda model: model.to("meta"),
}


def converted(stage: int):
    """A run with conversions to what is there already, before and after backward; and what is refused after it."""
    runs = []
    for convert in (False, True):
        model, optimizer, zero = two(stage)
        params = list(model.parameters())
        for step in range(2):
            for change in SAME.values() if convert else ():
                assert change(model) is model
            model(torch.full((2, 7), 1.0 + step)).square().sum().backward()
            for change in SAME.values() if convert else ():
                change(model)
            optimizer.step()
            optimizer.zero_grad()
        assert all(param is own for param, own in zip(model.parameters(), params, strict=True))
        assert zero.ledger().held.get("gather", 0) == 0
        with zero.gathered():
            runs.append(reference.weights(model))
    for change in OTHER.values() if stage == 3 else ():
        with pytest.raises(zeroshard.Error, match=r"parameter 'blocks\.0\.weight'"):
            change(model)
    return reference.first_difference(*runs)


@pytest.mark.row(82)
def test_conversions_that_change_nothing_do_nothing(ranks, stage):
    """`model.to(...)` to the device and dtype it has: no gather, no error, the same bits. Others keep their error."""
    assert ranks.run(2, converted, stage) == ["", ""]


class Headed(nn.Module):
    def __init__(self, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x, skip_head: bool = False):
        for block in self.blocks:
            x = block(x)
        return x if skip_head else self.head(x)


@pytest.mark.parametrize(("blocks", "units"), [(0, '["head"]'), (2, '["blocks.*", "head"]')])
def test_a_part_of_the_root_called_by_itself_says_which_units_allow_it(blocks, units):
    """What the message says to write works."""
    torch.manual_seed(0)
    model = Headed(blocks)
    x = torch.ones(1, 4)
    wanted = model(x)
    zeroshard.shard(model, None, stage=3)
    with pytest.raises(ReleasedError) as caught:
        model.head(model(x, skip_head=True))
    assert f"Layout(units={units})" in str(caught.value)

    torch.manual_seed(0)
    model = Headed(blocks)
    zeroshard.shard(model, None, stage=3, layout=Layout(units=json.loads(units)))
    got = model.head(model(x, skip_head=True))
    got.sum().backward()
    assert torch.equal(got, wanted)
    assert model.head.weight.grad is not None
