"""`torch.compile` of a sharded model, or of its blocks: compiled once, with the bits of plain PyTorch at every stage."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import models
import ranks
import test_bits
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import StateError, UserError

STEPS = 3
BACKEND = "aot_eager"  # traces and partitions as inductor does, and needs no C++ compiler


def compiled(stage, what, overlap):
    """What differs from the same loop without `torch.compile`, graphs after each step, and how often a graph broke."""
    torch._dynamo.reset()
    want, _ = train(stage, None, overlap)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found, graphs = train(stage, what, overlap)
    return (
        test_bits.reference.first_difference(found, want),
        graphs,
        sum(torch._dynamo.utils.counters["graph_break"].values()),
    )


def train(stage, what, overlap):
    model = models.build("gpt", **test_bits.GPT)
    optimizer = test_bits.adamw(model.parameters(), "loop")
    if what == "blocks before":
        for block in model.blocks:
            block.compile(backend=BACKEND)
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=Comm(overlap=overlap))
    run = torch.compile(model, backend=BACKEND) if what == "model" else model
    if what == "blocks":
        for block in model.blocks:
            block.compile(backend=BACKEND)
    graphs = []
    for step in range(STEPS):
        models.loss("gpt", run, models.batch("gpt", step, ranks.rank())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    with zero.gathered():
        return test_bits.reference.weights(model), graphs


SETTINGS = {"fp32": {}, "bf16": {"precision": Precision(param_dtype=torch.bfloat16, cast_inputs=True)}}


def stepped(stage, setting, **settings):
    """Weights after steps of `torch.compile(optimizer.step)`, torch's recipe, and the graphs after each step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = models.build("mlp", sizes=(7, 131, 37, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = None
    if stage is not None:
        zero = zeroshard.shard(model, optimizer, stage=stage, **SETTINGS[setting], **settings)
    step = torch.compile(optimizer.step, backend=BACKEND)
    graphs = []
    for at in range(4):
        for source in range(2) if zero is None else [zero.rank]:
            models.loss("mlp", model, models.batch("mlp", at, source)).float().backward()
        if zero is None:
            for param in model.parameters():
                param.grad.div_(2)
        step()
        optimizer.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    with contextlib.nullcontext() if zero is None else zero.gathered():
        return test_bits.reference.weights(model), graphs


@pytest.mark.heavy
@pytest.mark.row(63)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_compiled_step_has_plain_pytorchs_bits(stage, setting):
    """Of its own compiled step, which need not be those of a step that is not: torch rounds as it compiles. The hooks
    around the update are not compiled, since they talk to ranks. The update is compiled once."""
    (want, _), *_ = ranks.run(1, stepped, None, setting) if setting != "bf16" else ranks.run(2, stepped, 0, setting)
    for got, graphs in ranks.run(2, stepped, stage, setting):
        test_bits.reference.assert_same(got, want)
        assert graphs[1] == graphs[-1], graphs


def worked(stage, wrap):
    """Losses, norms, sums inside `gathered()` and last weights; `wrap` is around each function that works on a step."""
    torch._dynamo.reset()
    model = models.build("mlp", sizes=(7, 131, 37, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zeroshard.shard(model, optimizer, stage=stage)

    def forward_backward(batch):
        loss = models.loss("mlp", model, batch)
        loss.backward()
        return loss.detach()

    def clip():
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def look():
        with zero.gathered():
            return sum(param.detach().sum() for param in model.parameters())

    def all_of_it(batch):
        return forward_backward(batch), clip(), optimizer.zero_grad(), look()

    forward_backward, clip, look, clear, all_of_it = map(
        wrap, (forward_backward, clip, look, optimizer.zero_grad, all_of_it)
    )
    found = []
    for at in range(3):
        batch = models.batch("mlp", at, zero.rank)
        found += [forward_backward(batch), clip()]
        optimizer.step()
        clear()
        found += [look(), *all_of_it(batch)]
        assert all(param.grad is None for param in model.parameters())
    with zero.gathered():
        weights = [param.detach().clone() for param in model.parameters()]
    return [each for each in found if each is not None] + weights


def worked_alike(stage):
    want = worked(stage, lambda function: function)
    got = worked(stage, partial(torch.compile, backend=BACKEND))
    return [torch.equal(one, other) for one, other in zip(want, got, strict=True)]


@pytest.mark.heavy
@pytest.mark.row(63)
def test_what_clips_clears_or_gathers_may_be_compiled(stage):
    """Functions of the program's that call backward, clip, clear gradients or enter `gathered()`: as without compiling."""
    for alike in ranks.run(2, worked_alike, stage):
        assert alike == [True] * (3 * 6 + 6)


def test_one_graph_that_clips_is_refused_with_the_remedy():
    model = models.build("mlp", sizes=(7, 131, 37, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    zeroshard.shard(model, optimizer, stage=3)
    models.loss("mlp", model, models.batch("mlp", 0, 0)).backward()
    clip = torch.compile(
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), backend=BACKEND, fullgraph=True
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)not gathered.*leave fullgraph=True out"):
        clip()


def test_a_compiled_step_by_buckets_is_refused(stage):
    """Each bucket's update is not compiled, and another tier or format must not have other bits."""
    for settings in {"offload": Offload(optimizer="cpu")}, {"precision": Precision(grad_dtype=torch.bfloat16)}:
        with pytest.raises(ranks.RankFailure, match=r"StateError: torch.compile\(optimizer.step\), where buckets"):
            ranks.run(2, partial(stepped, **settings), stage, "fp32")


def check(cases):
    def expected(what):
        return ("", [1] * STEPS, int(what == "model"))  # all blocks are one graph; what is around them is not compiled

    for found in ranks.run(2, partial(all_of, cases), timeout=280.0):
        assert found == {case: expected(case[1]) for case in cases}


def all_of(cases):
    return {case: compiled(*case) for case in cases}


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_compiled_backward_is_refused(stage):
    """Compiled autograd gives hooks of gradients no values: a step would learn nothing."""
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    model = torch.nn.Linear(4, 4)
    zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=stage)
    out = model(torch.ones(2, 4)).sum()
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(StateError, match="(?s)backward is compiled.*instead: compile the model or its forward alone"),
    ):
        out.backward()


def with_a_program_inside(stage, made):
    """The weights of a model one of whose parts is a program of torch's: scripted, or traced."""
    torch.manual_seed(0)
    part = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    inside = torch.jit.script(part) if made == "script" else torch.jit.trace(part, torch.ones(2, 4))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), inside, torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage)
    for step in range(2):
        model(torch.full((2, 4), step + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered() if zero is not None else contextlib.nullcontext():
        return test_bits.reference.weights(model)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_script_is_no_unit():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.jit.script(torch.nn.Linear(4, 4)))
    with pytest.raises(UserError, match="(?s)takes no hooks, and cannot be a unit.*got: '1'"):
        zeroshard.shard(model, None, layout=Layout(units=["0", "1"]))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("made", ["script", "trace"])
def test_a_part_may_be_a_program_of_torchs(made):
    """What is refused is to make one of a sharded model."""
    want = with_a_program_inside(None, made)
    for stage in (0, 1, 3):
        test_bits.reference.assert_same(with_a_program_inside(stage, made), want)


@pytest.mark.row(63)
@pytest.mark.parametrize(
    ("stage", "what"),
    [(3, "model"), pytest.param(1, "model", marks=pytest.mark.full), pytest.param(3, "blocks", marks=pytest.mark.full)],
)
def test_blocks_and_models_compile_once(stage, what):
    """A replicated and a sharded model: no recompilation in later steps, and the bits of the same loop uncompiled."""
    check([(stage, what, True)])


@pytest.mark.row(63)
def test_one_graph_of_a_whole_model_is_refused_with_the_remedy():
    """In dynamo's error, since it is dynamo that finds the hooks."""
    model = models.build("gpt", **test_bits.GPT)
    zeroshard.shard(model, None)
    whole = torch.compile(model, backend=BACKEND, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile blocks, or leave fullgraph=True out"):
        models.loss("gpt", whole, models.batch("gpt", 0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "blocks", "blocks before"])
def test_every_stage_compiles_once(what):
    """Every stage, with and without overlap."""
    check([(stage, what, overlap) for stage in (0, 1, 2, 3) for overlap in (True, False)])


class Part(torch.nn.Module):
    """A compiled part of a unit, which torch's checkpoint runs again."""

    def __init__(self, wrapped):
        super().__init__()
        self.norm, self.wrapped = torch.nn.LayerNorm(16), wrapped
        inner = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
        self.inner = torch.compile(inner, backend=BACKEND)
        if wrapped:
            self.inner = checkpoint_wrapper(self.inner)

    def forward(self, x):
        y = self.norm(x)
        return x + (self.inner(y) if self.wrapped else checkpoint(self.inner, y, use_reentrant=False))


def in_part(stage, wrapped):
    """Weights after three steps. Of 16 rows all tensors of the part have one shape, so torch cannot tell them apart."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(Part(wrapped), Part(wrapped))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage)
    for rows in (16, 4, 16):
        model(torch.randn(rows, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with contextlib.nullcontext() if zero is None else zero.gathered():
        return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("stage", [3, 0, 2])
def test_a_compiled_part_runs_its_graph_again_under_torchs_checkpoint(stage, wrapped):
    (found,), (want,) = (ranks.run(1, in_part, each, wrapped) for each in (stage, None))
    assert all(map(torch.equal, found, want))
