"""Buffers of unusual kinds, gradients edited by what does not fit, and a default device that is not the model's."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ranks as rank_processes
import reference
import zeroshard
from test_memory_shared import Wrapped
from zeroshard import Layout
from zeroshard.errors import PeerError, ReleasedError, StateError, UserError


def dense_of(kind, value):
    return {
        "expanded": lambda: torch.full((1,), value).expand(8),
        "expanded rows": lambda: (torch.arange(8.0) * value)[:, None].expand(8, 3),
        "conjugated": lambda: torch.full((8,), complex(value, 1)).conj(),
        "negated": lambda: torch.full((8,), complex(1, value)).conj().imag,
        "transposed": lambda: (torch.arange(64.0) * value).view(8, 8).t(),
        "strided": lambda: (torch.arange(16.0) * value)[::2],
        "bools": lambda: torch.arange(8) > value,
        "one number": lambda: torch.tensor(value),
    }[kind]()


DENSE = ["expanded", "expanded rows", "conjugated", "negated", "transposed", "strided", "bools", "one number"]


class With(nn.Module):
    def __init__(self, buffer, persistent=False):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("odd", buffer, persistent=persistent)

    def forward(self, x):
        return self.layer(x)


def sent(kind, stage):
    """Rank 0's count: at construction, and before a forward that trains."""
    rank = rank_processes.rank()
    model = With(dense_of(kind, 2.0 + rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    first = torch.equal(model.odd, dense_of(kind, 2.0))
    model.odd = dense_of(kind, 5.0 + rank)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    zero.check_replicas()
    return first, torch.equal(model.odd, dense_of(kind, 5.0))


@pytest.mark.row(69)
@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("stage", [0, 3])
def test_dense_buffers_of_any_form_are_rank_0s(ranks, kind, stage):
    """Expanded ones, which torch refuses to write to as they are, conjugated and negated ones among them."""
    assert ranks.run(2, sent, kind, stage) == [(True, True)] * 2


def saved_and_loaded(kind, folder):
    model = With(dense_of(kind, 2.0), persistent=True)
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    zero.save(folder)
    model.odd = dense_of(kind, 5.0)
    zero.load(folder)
    return torch.equal(model.odd, dense_of(kind, 2.0))


@pytest.mark.row(69)
@pytest.mark.parametrize("kind", DENSE)
def test_dense_buffers_of_any_form_are_saved_and_loaded(ranks, tmp_path, kind):
    assert ranks.run(2, saved_and_loaded, kind, tmp_path / "ckpt") == [True, True]


def made_of(kind, value=1.0):
    warnings.simplefilter("ignore", UserWarning)  # torch's, that these are young
    square = torch.eye(8) * value
    return {
        "sparse": square.to_sparse,
        "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [value, value], (8, 8)),
        "CSR": square.to_sparse_csr,
        "CSC": square.to_sparse_csc,
        "BSR": lambda: square.to_sparse_bsr((2, 2)),
        "nested": lambda: torch.nested.nested_tensor([torch.full((2,), value), torch.ones(3)]),
        "jagged": lambda: torch.nested.nested_tensor([torch.full((2,), value), torch.ones(3)], layout=torch.jagged),
    }[kind]()


PARTS = ["sparse", "uncoalesced", "CSR", "CSC", "BSR", "nested", "jagged"]


class Graph(With):
    def forward(self, x):
        return self.layer(torch.sparse.mm(self.odd, x)) if self.odd.layout is not torch.strided else self.layer(x)


def of_parts(kind, stage, folder):
    torch.manual_seed(0)
    model = (With if kind in ("nested", "jagged") else Graph)(made_of(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage)
    for step in range(2):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if zero is None:
        return reference.weights(model)
    zero.save(folder)  # the buffer is not persistent
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(69)
@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("stage", [0, 3])
def test_sparse_and_nested_buffers_train_with_plain_pytorchs_bits(ranks, tmp_path, kind, stage):
    """As graph networks have them: nobody sends them, since they must be alike on all ranks."""
    want = of_parts(kind, None, None)
    for got in ranks.run(2, of_parts, kind, stage, tmp_path / str(stage)):
        reference.assert_same(got, want)


def of_other_parts(kind, when):
    rank = rank_processes.rank()
    model = With(made_of(kind, 1.0 + rank * (when == "at first")))
    if when == "at first":
        with pytest.raises(PeerError, match=r"(?s)build different things.*buffer 'odd'"):
            zeroshard.shard(model, None, stage=1)
        return
    zeroshard.shard(model, None, stage=1)
    model(torch.ones(2, 8)).sum().backward()
    if rank == 1:
        if when == "replaced":
            model.odd = made_of(kind, 3.0)
        else:
            model.odd.mul_(3.0)
    with pytest.raises(PeerError, match=r"(?s)not doing the same thing.*'odd'"):
        model(torch.ones(2, 8))


@pytest.mark.row(69)
@pytest.mark.parametrize("when", ["at first", "replaced", "in place"])
@pytest.mark.parametrize("kind", ["sparse", "CSR", "nested", "jagged"])
def test_sparse_and_nested_buffers_that_differ_are_named(ranks, kind, when):
    """At construction, and at the next forward that trains."""
    ranks.run(2, of_other_parts, kind, when)


def refused_buffers(folder):
    warnings.simplefilter("ignore", UserWarning)  # torch's, that quantized tensors are old
    for odd in (Wrapped(torch.ones(8)), torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)):
        with pytest.raises(UserError, match=r"(?s)this kind of buffer.*'odd'"):
            zeroshard.shard(With(odd), None)
    for kind in ("sparse", "CSR", "nested", "jagged"):
        model = With(made_of(kind), persistent=True)
        zero = zeroshard.shard(model, None)
        with pytest.raises(zeroshard.Error, match=r"(?s)'odd'.*persistent=False"):
            zero.save(folder / kind)


@pytest.mark.row(69)
def test_buffers_that_cannot_be_told_or_saved_are_refused_by_name(ranks, tmp_path):
    ranks.run(2, refused_buffers, tmp_path)


def edited_gradient(stage, shape):
    model = nn.Linear(8, 8)
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model(torch.ones(2, 8)).sum().backward()
    before = model.weight.grad.full_tensor()
    for edit in (torch.Tensor.add_, torch.Tensor.mul_, torch.Tensor.copy_, torch.Tensor.sub_, torch.Tensor.div_):
        with pytest.raises(StateError, match=r"(?s)tensors that broadcast to its shape.*'weight'.*of that shape"):
            edit(model.weight.grad, torch.ones(shape))
    model.weight.grad.add_(torch.ones(8, 8))
    return torch.equal(model.weight.grad.full_tensor(), before + 1)


@pytest.mark.row(69)
@pytest.mark.parametrize("shape", [(3, 3), (2, 8, 8), (1, 8, 8), (64,), (0,), (2, 1), (4,)], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_edited_by_a_tensor_of_another_shape_is_refused(ranks, shape, stage):
    assert ranks.run(2, edited_gradient, stage, shape) == [True, True]


def combined(stage):
    """Gradients of two layers of one size, which are cut in different places, and of another size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 3))
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, layout=Layout(bounds="model"))
    model(torch.randn(2, 20)).sum().backward()
    first, second, third = (layer.weight.grad for layer in model)
    before = [grad.full_tensor() for grad in (first, second)]
    for other in (second, third):
        with pytest.raises(StateError, match=r"(?s)cut differently.*'0.weight' and .*full_tensor"):
            first.add_(other)
    first.add_(first)
    second.add_(before[0])
    return torch.equal(first.full_tensor(), 2 * before[0]), torch.equal(second.full_tensor(), before[1] + before[0])


@pytest.mark.row(69)
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_are_cut_elsewhere_are_not_combined(ranks, stage):
    """Each rank would add elements of one to others of the other, without an error where their numbers agree."""
    assert ranks.run(2, combined, stage) == [(True, True)] * 2


def on_another_device(stage, world, folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.randn(4, 8) for _ in range(3)]
    torch.set_default_device("meta")
    try:
        zero = zeroshard.shard(model, optimizer, stage=stage) if world else None
        for x in batches:
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if zero is None:
            return reference.weights(model)
        zero.save(folder)
        zero.load(folder)
        zero.export(folder.with_suffix(".weights"))
        zero.check_replicas()
        with zero.gathered():
            return {name: param.detach().clone() for name, param in model.named_parameters()}
    finally:
        torch.set_default_device(None)


@pytest.mark.row(69)
@pytest.mark.parametrize("world", [1, 2])
def test_a_default_device_that_is_not_the_models_changes_nothing(ranks, stage, tmp_path, world):
    """Whatever the engine makes is where the model is, or on the CPU."""
    want = ranks.run(1, on_another_device, stage, 1, tmp_path / "first")[0]
    for got in ranks.run(world, on_another_device, stage, world, tmp_path / str(world)):
        assert set(got) == set(want) and all(param.device.type == "cpu" for param in got.values())
        if world == 1:
            reference.assert_same(got, want)


def test_every_tensor_the_engine_makes_says_its_device():
    """Else a default device that the user has set would decide."""
    package = Path(zeroshard.__file__).parent
    makers = {"zeros", "empty", "ones", "tensor", "full", "arange", "as_tensor", "rand", "randn", "eye", "linspace"}
    found = [
        f"{path.name}:{node.lineno}"
        for path in package.rglob("*.py")
        if not {"planner", "explain", "cli"} & set(path.relative_to(package).parts)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in makers
        if ast.unparse(node.func).startswith("torch.") and "device" not in {word.arg for word in node.keywords}
    ]
    assert found == []


class Spectral(nn.Module):
    """Its weight is pairs of reals, seen as complex numbers, behind parameters of odd sizes."""

    def __init__(self):
        super().__init__()
        self.lead = nn.Parameter(torch.ones(3))
        self.pairs = nn.Parameter(torch.arange(50.0).view(5, 5, 2) / 50)
        self.odd = nn.Parameter(torch.ones(5))
        self.more = nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        numbers = torch.view_as_complex(self.pairs) @ (x[:, 0] + 1j * x[:, 1]).to(torch.complex64)
        return torch.view_as_real(numbers).sum(0) * self.lead.sum() + torch.view_as_complex(self.more).abs().sum()


def spectral(stage, align):
    torch.manual_seed(0)
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage, layout=Layout(align=align))
    for _ in range(2):
        model(torch.ones(5, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if zero is None:
        return reference.weights(model)
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(69)
@pytest.mark.parametrize("align", [1, 2, 128])
def test_pairs_are_seen_as_complex_numbers_under_any_align(ranks, stage, align):
    """`torch.view_as_complex` takes them at an even element only."""
    for found in ranks.run(2, spectral, stage, align):
        reference.assert_same(found, spectral(None, align))


def test_a_collective_of_a_gradient_hears_that_it_is_averaged(stage):
    """Where a program written for plain processes sums the gradient itself."""
    model = nn.Linear(8, 8)
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(StateError, match="leave it out if it is over the ranks of shard"):
        torch.ops._c10d_functional.all_reduce(model.weight.grad, "sum", "0")


def normalised():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def two_forwards(model, step, rank):
    """A GAN's loss, of which each part has statistics of its own."""
    one, two = (
        torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * rank + at)) for at in (1, 2)
    )
    (model(one).square().mean() - model(two).mean()).backward()


def with_statistics(stage):
    model, optimizer = normalised()
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for step in range(2):
        two_forwards(model, step, zero.rank)
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full), 3]
)
def test_statistics_are_sent_between_a_forward_and_its_backward(ranks, stage):
    """A batch norm saves them and does not use them: autograd must not take the second forward's for another tensor's."""
    model, optimizer = normalised()
    for step in range(2):
        for rank in range(2):
            two_forwards(model, step, rank)
        for param in model.parameters():
            param.grad.div_(2)
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(2, with_statistics, stage):
        reference.assert_same(found, reference.weights(model))


def test_parameters_in_another_order_are_named(caplog):
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.ones(4, 4).t().mul(torch.arange(4.0)).t())
    zeroshard.shard(nn.Sequential(nn.Linear(4, 4)), None, stage=3)
    assert "is not contiguous" not in caplog.text
    model.weight = nn.Parameter(torch.ones(4, 4).t())
    zeroshard.shard(model, None, stage=3)
    assert "parameter 'weight' is not contiguous" in caplog.text and "p.data.contiguous()" in caplog.text


def test_a_part_that_another_model_has_sharded_is_named():
    part = nn.Linear(4, 4)
    zeroshard.shard(nn.Sequential(part, nn.Tanh()), None, stage=1)
    with pytest.raises(UserError, match=r"(?s)is sharded already.*parameter '0\.weight'.*ModuleList\(\[a, b\]\)"):
        zeroshard.shard(nn.Sequential(part, nn.ReLU()), None, stage=1)


class Yielding(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            yield x * self.scale


def yielding():
    model = Yielding()
    zero = zeroshard.shard(model, None, stage=3)
    with pytest.raises(ReleasedError) as told:
        list(model(torch.ones(2, 4)))
    with zero.gathered():
        assert len(list(model(torch.ones(2, 4)))) == 2
    return str(told.value)


def test_a_forward_that_yields_is_told_what_to_return(ranks):
    for told in ranks.run(2, yielding):
        assert "a list in place of what the forward of Yielding yields" in told and "module.forward(" not in told


def frozen_on_one():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=1)
    if zero.rank:
        model.weight.requires_grad_(requires_grad=False)
    with pytest.raises(PeerError) as told:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return str(told.value)


def test_what_one_rank_alone_froze_is_told_with_its_cure(ranks):
    for told in ranks.run(2, frozen_on_one):
        assert "rank 1: frozen parameters: 'weight'" in told
        assert "requires_grad_(...) of the same parameters on every rank" in told


@pytest.mark.parametrize("backwards", [1, 3])
def test_a_hook_that_sees_one_backward_of_several_is_told_so_once(backwards, caplog):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeroshard.shard(model, optimizer, stage=2)
    seen = []
    model.bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad[0].item()))
    for _ in range(2):
        for _ in range(backwards):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [2] * 2 * backwards
    said = [each.getMessage() for each in caplog.records if "the hook after the gradient" in each.getMessage()]
    assert len(said) == (backwards > 1)
    assert all(
        "parameter 'bias'" in each and "edit p.grad between the last backward and step()" in each for each in said
    )
