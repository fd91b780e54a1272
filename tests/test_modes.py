"""What torch's modes do to a sharded model, and ours on an accelerator: the table of docs/gpus.md, row by row."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import emulated
import ranks
import reference
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision, device
from zeroshard.errors import StateError
from zeroshard.policies.comm import Simulated

WIDTH, BLOCKS, STAGES = 8, 4, (0, 1, 2, 3)


class Net(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)).tanh()
        return x


def shard(model, stage, *, lr=1e-2, layout=None, **settings):
    adam = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    return adam, zeroshard.shard(model, adam, stage=stage, layout=layout or Layout(units=["blocks.*"]), **settings)


# --- autocast ---------------------------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """How many 16-bit copies of weights are alive."""

    def __init__(self):
        super().__init__()
        self.alive = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.dtype is torch.bfloat16 and each.numel() == WIDTH * WIDTH:
                storage = each.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive.add(storage._cdata)
                    weakref.finalize(storage, self.alive.discard, storage._cdata)
        return made


def casts_alive(stage, *, train=True, recompute=False, reentrant=None, cache=True):
    """After a forward, inside the autocast that it ran in."""
    model, casts = Net(reentrant), Casts()
    shard(model, stage, layout=Layout(units=["blocks.*"], recompute=["blocks.*"] * recompute))
    x = torch.randn(4, WIDTH, requires_grad=reentrant is True)
    with casts, torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), torch.set_grad_enabled(train):
        out = model(x)
        alive = len(casts.alive)
    if train:
        out.sum().backward()
    return alive


def test_autocast_keeps_no_16_bit_copies_of_released_weights_without_grad():
    """Its cache would keep all of them, where autograd keeps none."""
    assert casts_alive(3, train=False) <= 1


@pytest.mark.parametrize("stage", STAGES)
def test_autocast_leaves_autograds_16_bit_copies(stage):
    """Autograd keeps what backward multiplies by, of all blocks but the first, with autocast's cache and without, and
    the cache keeps it of all where backward recomputes; where nothing is released, it serves a loop without grad."""
    assert casts_alive(stage) == BLOCKS
    assert casts_alive(stage, cache=False) == BLOCKS - 1
    assert casts_alive(stage, train=False) == (BLOCKS if stage < 3 else 0)
    assert casts_alive(stage, recompute=True) == BLOCKS


class Shared(nn.Module):
    """One block that a forward calls four times, as ALBERT does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x, call=lambda block, x: block(x)):
        for _ in range(4):
            x = call(self.blocks[0], x).tanh()
        return x


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


def called_often(stage, ours):
    """Weights after a step under autocast, of one block that backward recomputes four times."""
    model = Shared()
    adam = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    if stage is not None:
        zero = zeroshard.shard(model, adam, stage=stage, layout=Layout(recompute=ours, units=["blocks.*"]))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x) if ours else model(x, checkpointed)).sum()
    loss.backward()
    adam.step()
    with contextlib.nullcontext() if stage is None else zero.gathered():
        return reference.weights(model)


@pytest.mark.parametrize("ours", [False, True], ids=["checkpoint", "Layout.recompute"])
def test_a_block_that_a_checkpointed_forward_calls_often_has_plain_torchs_bits(ours):
    """Autograd adds up the gradients of its one 16-bit copy in 16 bits, whoever recomputes."""
    want = called_often(None, False)
    for stage in STAGES:
        reference.assert_same(called_often(stage, ours), want)


def shared_in_a_graph(stage):
    """Gradients of weights that two forwards of one autocast share, with one without grad between them."""
    model = Net()
    adam, zero = shard(model, stage, lr=0.5)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        first = model(x)
        with torch.no_grad():
            model(x)
        (first.sum() + model(2 * x).sum()).backward()
    adam.step()
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.full
def test_weights_that_two_graphs_of_one_autocast_share_have_plain_torchs_bits():
    """The shared copy's gradients are summed in 16 bits: so it must be one and the same for both."""
    model = Net()
    adam = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        (model(x).sum() + model(2 * x).sum()).backward()
    adam.step()
    for stage in STAGES:
        reference.assert_same(shared_in_a_graph(stage), reference.weights(model))


def beside_a_teacher(stage, student):
    """Weights of a student (None: of a plain layer) that sees two views under one autocast, a teacher between them."""
    torch.manual_seed(7)
    trained, teacher, beside = Net(), Net().requires_grad_(False), torch.nn.Linear(WIDTH, WIDTH)
    layer = trained if student else beside
    adam = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True)
    if stage is not None:
        zeroshard.shard(teacher, None, stage=stage, layout=Layout(units=["blocks.*"]))
        zero = zeroshard.shard(trained, adam if student else None, stage=stage, layout=Layout(units=["blocks.*"]))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        first = layer(x)
        with torch.no_grad():
            wanted = teacher(x)
            assert torch.is_autocast_cache_enabled()
        (first - wanted).square().sum().add((layer(2 * x) - wanted).square().sum()).backward()
    adam.step()
    with contextlib.nullcontext() if stage is None else zero.gathered():
        return reference.weights(layer)


@pytest.mark.parametrize("student", [True, False], ids=["a student", "a plain layer"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_without_grad_leaves_other_models_16_bit_copies(stage, student):
    """Autocast's cache is the thread's: a frozen sharded teacher between two views of a student, as in DINO, BYOL and
    distillation, must not have the student's weights cast again."""
    reference.assert_same(beside_a_teacher(stage, student), beside_a_teacher(None, student))


class Energy(nn.Module):
    """Uses the gradient of its blocks in a forward, which may be without grad outside."""

    def __init__(self):
        super().__init__()
        self.net = Shared()

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            self.net(x).sum().backward()
        return x.grad


def with_grad_inside(stage):
    torch.manual_seed(7)
    model = Energy()
    adam = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    zero = None if stage is None else zeroshard.shard(model, adam, stage=stage, layout=Layout(units=["net.blocks.*"]))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        seen = model(x)
    adam.step()
    with contextlib.nullcontext() if stage is None else zero.gathered():
        return {"seen": seen, **reference.weights(model)}


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_with_grad_inside_one_without_shares_its_16_bit_copies(stage):
    reference.assert_same(with_grad_inside(stage), with_grad_inside(None))


# --- modes of the program's ---------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """The names of all operations that a dispatch mode of the program's sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class CountingCalls(TorchFunctionMode):
    """The same of a function mode."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


TIERS = dict.fromkeys(("parameters", "gradients", "optimizer"), "cpu")
MODED = {
    "plain": {},
    "bf16": {"precision": Precision(param_dtype=torch.bfloat16, cast_inputs=True)},
    "small buckets": {"layout": Layout(units=["blocks.*"], bucket_mib=0.0005)},
    "recompute": {"layout": Layout(units=["blocks.*"], recompute=True)},
    "host": {"offload": Offload(**TIERS)},
    "activations": {"offload": Offload(activations="cpu")},
    "messages": {"comm": Comm(transport="gloo")},
    "8 bits": {"precision": Precision(fp8=True)},
}


def moded(stage, setting, mode, folder):
    """What a mode around each call sees: at each stage, and of plain PyTorch where the stage is None."""
    model, zero = Net(), None
    adam = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    if stage is not None:
        zero = zeroshard.shard(model, adam, stage=stage, **{"layout": Layout(units=["blocks.*"]), **MODED[setting]})
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    found = {}

    @contextlib.contextmanager
    def around(what):
        with mode() as counter:
            yield
        found.setdefault(what, []).extend(counter.names)

    for _ in range(2):
        with around("forward"):
            out = model(x)
        loss = out.float().square().sum()
        with around("backward"):
            loss.backward()
        with around("step"):
            adam.step()
        adam.zero_grad()
    if zero is not None:
        average = zero.average(0.9)
        folder = Path(folder) / str(stage)
        calls = {
            "save": lambda: zero.save(folder / "saved"),
            "load": lambda: zero.load(folder / "saved"),
            "export": lambda: zero.export(folder / "exported"),
            "average": lambda: average.update(),
            "compare": lambda: zero.check_replicas(),
        }
        for what, call in calls.items():
            with around(what):
                call()
        with around("gathered"), zero.gathered():
            assert x.neg().shape == x.shape
        with around("swapped"), average.swapped():
            assert x.neg().shape == x.shape
        with around("stream"):
            for _ in zero.stream():
                assert x.neg().shape == x.shape
    return found


@pytest.mark.parametrize("mode", [Counting, CountingCalls])
@pytest.mark.parametrize("setting", MODED)
def test_a_mode_of_the_programs_sees_none_of_the_engines_operations(stage, setting, mode, tmp_path):
    """Selective activation checkpointing counts a region's operations in forward and again in backward: they must be
    plain PyTorch's. In a step it sees the optimizer's, in all other calls only what the program does inside."""
    plain, stepped = moded(None, setting, mode, tmp_path), set()
    for found in ranks.run(2, moded, stage, setting, mode, tmp_path):
        if setting in ("plain", "small buckets", "host", "activations", "messages"):
            assert left(found["forward"]) == left(plain["forward"])
            assert left(found["backward"]) == left(plain["backward"])
        assert {*found["step"]} <= {*plain["step"]}
        stepped |= {*found["step"]}
        program = {key: len(found.pop(key)) for key in ("gathered", "swapped", "stream")}
        assert program == {"gathered": 1, "swapped": 1, "stream": BLOCKS} if mode is Counting else program
        assert {key: seen for key, seen in found.items() if key not in ("forward", "backward", "step") and seen} == {}
    assert stepped == {*plain["step"]}  # of all ranks: one may own nothing of so small a model


def left(names):
    """All but torch's own detaching of an output that a node has saved, which it leaves out where there are hooks."""
    return [name for name in names if name != "aten.detach.default"]


def selected(stage):
    """Weights after two steps with selective activation checkpointing: products are kept, the rest is recomputed."""
    policy = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, policy)
    model = Net()
    adam = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    zero = None if stage is None else zeroshard.shard(model, adam, stage=stage, layout=Layout(units=["blocks.*"]))
    for step in range(2):
        for source in range(2) if zero is None else [zero.rank]:
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + source))
            for block in model.blocks:
                x = checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=False, context_fn=contexts)
            (x.square().mean() / (2 if zero is None else 1)).backward()
        adam.step()
        adam.zero_grad()
    with contextlib.nullcontext() if zero is None else zero.gathered():
        return reference.weights(model)


def test_selective_activation_checkpointing_has_plain_pytorchs_bits(stage):
    want = selected(None)
    for got in ranks.run(2, selected, stage):
        reference.assert_same(got, want)


# --- graphs of a device -------------------------------------------------------------------------------------------------


def step(model, adam, x):
    model(x).square().sum().backward()
    adam.step()
    adam.zero_grad()


def refused(call, *args):
    with torch.emu.capture(), pytest.raises(StateError, match="cannot be captured as a graph"):
        call(*args)


def captured(stages):
    for stage in stages:
        found = []
        for capture in (False, True):
            model = Net().to("emu")
            adam, zero = shard(model, stage)
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(ranks.rank())).to("emu")
            step(model, adam, x)
            if capture:
                refused(model, x)
            loss = model(x).square().sum()
            if capture:
                refused(loss.backward)
                loss = model(x).square().sum()
            loss.backward()
            if capture:
                refused(adam.step)
            adam.step()
            adam.zero_grad()
            with zero.gathered():
                found.append(reference.weights(model))
        reference.assert_same(*found)


@pytest.mark.parametrize(
    ("world", "stages"), [(1, (0, 3)), pytest.param(2, STAGES, marks=pytest.mark.full)], ids=["1", "2"]
)
def test_a_step_is_not_captured(world, stages):
    """Forward, backward and step say so before anything is launched; the step goes on outside with the same bits."""
    emulated.run(world, captured, stages)


def addresses(stage):
    """Where each block's weight was in the forwards of three steps."""
    model, found = Net().to("emu"), []
    for at, block in enumerate(model.blocks):
        block.register_forward_hook(lambda module, *_, at=at: found.append((at, module.weight.data_ptr())))
    adam, _ = shard(model, stage, precision=Precision(param_dtype=torch.bfloat16))
    for _ in range(3):
        step(model, adam, torch.randn(4, WIDTH).to("emu", torch.bfloat16))
    return len(found), len(set(found))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 2])
def test_replicated_weights_stay_where_they_are(stage):
    """A graph that a program captures inside a unit may read them where they were."""
    assert emulated.run(2, addresses, stage) == [(3 * BLOCKS, BLOCKS)] * 2


# --- deterministic algorithms -------------------------------------------------------------------------------------------


def fills(stage, dtype):
    """By the engine, of memory that is written next: in a backward, whose end takes the norm, and in the rest of a step."""
    model = Net().to("emu")
    adam, _ = shard(model, stage, precision=Precision(param_dtype=dtype))
    x = torch.randn(4, WIDTH).to("emu", dtype)
    torch.use_deterministic_algorithms(True)
    for _ in range(2):
        with emulated.counted() as backward:
            model(x).square().sum().backward()
        with emulated.counted() as rest:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            adam.step()
            adam.zero_grad()
    torch.use_deterministic_algorithms(False)
    assert torch.utils.deterministic.fill_uninitialized_memory
    with emulated.counted() as of_programs:
        torch.use_deterministic_algorithms(True)
        torch.empty(3, device="emu")
        torch.use_deterministic_algorithms(False)
    assert of_programs.launches.total() == 1
    return [
        sum(n for (site, what), n in counts.launches.items() if what == FILL and not site.startswith("test_modes.py"))
        for counts in (backward, rest)
    ]


FILL = "fill of empty memory"


@pytest.mark.parametrize(
    ("stage", "dtype"), [(3, None)] + [pytest.param(s, torch.bfloat16, marks=pytest.mark.full) for s in STAGES]
)
def test_deterministic_algorithms_fill_no_message(stage, dtype):
    """What torch fills of ours is small: in a norm, once for a bucket with padding, and eight times."""
    first, second = emulated.run(2, fills, stage, dtype)
    assert first == [BLOCKS + 8, 0] and second == [7, 0]


# --- the backend's own sums -----------------------------------------------------------------------------------------------


def natively(stage, comm, **precision):
    """Weights after two steps, and how many bytes were sent for each gradient."""
    model = Net()
    adam, zero = shard(model, stage, comm=comm, precision=Precision(param_dtype=torch.bfloat16, **precision))
    for number in range(2):
        generator = torch.Generator().manual_seed(2 * number + ranks.rank())
        step(model, adam, torch.randn(4, WIDTH, generator=generator).bfloat16())
    numel = sum(bucket.numel for bucket in zero.partition.buckets)
    sent = zero.ledger().traffic["reduce"].logical / (2 * numel)
    with zero.gathered():
        return reference.weights(model), sent


def native_and_ordered(stage):
    ordered, narrow = natively(stage, Comm())
    native, wide = natively(stage, Comm(reduce="native"))
    _, asked = natively(stage, Comm(reduce="native"), reduce_dtype=torch.bfloat16)
    _, sums = natively(stage, Comm(reduce="native"), grad_dtype=torch.bfloat16)
    return reference.first_difference(native, ordered), narrow, wide, asked, sums


@pytest.mark.heavy
@pytest.mark.parametrize("stage", [pytest.param(s, marks=[pytest.mark.full] * (s in (1, 2))) for s in STAGES])
def test_the_backend_adds_in_the_accumulators_dtype(stage):
    """Two contributions of 16 bits, whose sum has no order, have the bits of the sum in rank order; it takes 4 bytes for
    each gradient where that takes 2, unless less is asked for. A simulated rank sends as many."""
    alone = [natively(stage, Comm(reduce=reduce, group=Simulated(0, 2)))[1] for reduce in ("ordered", "native")]
    assert ranks.run(2, native_and_ordered, stage) == [("", 2, 4, 2, 2)] * 2 and alone == [2, 4]


# --- gradients in 8 bits --------------------------------------------------------------------------------------------------

OURS = (
    "engine/",
    "features/",
    "comm/",
    "arithmetic/",
)


def ours(counter):
    return sum(n for (site, _), n in counter.items() if site.startswith(OURS))


class Wider(nn.Module):
    """Of so many elements; its gradients are as many numbers as its weights."""

    def __init__(self, width, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


def coded(width):
    """Launches of int8's own in a backward."""
    model = Wider(width).to("emu")
    adam, zero = shard(model, 2, comm=Comm(reduce="int8"), precision=Precision(param_dtype=torch.bfloat16))
    x = torch.randn(2, width).to("emu", torch.bfloat16)
    for _ in range(2):
        with emulated.counted() as counts:
            model(x).float().square().sum().backward()
        adam.step()
        adam.zero_grad()
    found = Counter(
        {site.removeprefix("arithmetic/int8.py:"): n for site, n in counts.by_site(counts.launches).items()}
    )
    padded = sum(
        start > end
        for bucket in zero.partition.buckets
        for end, start in zip(
            [0, *(slot.stop for slot in bucket.slots)],
            [*(slot.start for slot in bucket.slots), bucket.numel],
            strict=True,
        )
    )
    return len(zero.partition.buckets), padded, [found[name] for name in ("_seeds", "encode_", *CODING, "__getitem__")]


CODING = "encode_blocks", "_mixed"  # of so many elements as are handled at a time; the second also once


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("width", "parts"),
    [(16, 1), pytest.param(200, 1, marks=pytest.mark.full), pytest.param(2100, 2, marks=pytest.mark.full)],
)
def test_8_bit_gradients_are_so_many_launches(width, parts):
    """Of each bucket 13, one for each gap between parameters, 54 for each 4 M elements, and 7 for what each rank sent."""
    for buckets, padded, found in emulated.run(2, coded, width):
        assert found == [
            buckets,
            padded + buckets * (1 + parts),
            31 * parts * buckets,
            (11 + 22 * parts) * buckets,
            14 * buckets,
        ]


# --- how often the host waits ---------------------------------------------------------------------------------------------


def waited(stage, settings, order):
    """In a step: who asks the device for how much, and how many buckets there are, and of 8 bits."""
    model = Wider(16).to("emu")
    adam, zero = shard(model, stage, **settings)
    for _ in range(3):
        x = torch.randn(4, 16).to("emu", next(model.parameters()).dtype)
        before = Counter(device.asked)
        with emulated.counted() as counts:
            model(x).float().square().sum().backward()
            if order is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)
            adam.step()
            adam.zero_grad()
    buckets = zero.partition.buckets
    asked = +(device.asked - before)
    copied = sum(n for (_, what), n in counts.drains.items() if what == "copy to the device")
    assert counts.drains.total() == asked.total() + copied
    return dict(asked), copied, len(buckets), sum(bucket.fp8 for bucket in buckets)


def low(**more):
    return {"precision": Precision(param_dtype=torch.bfloat16, **more)}


NEVER = {
    "int8": ({"comm": Comm(reduce="int8"), **low()}, 2.0),
    "native": ({"comm": Comm(reduce="native"), **low()}, 2.0),
    "norms of order 1": (low(), 1.0),
    "norms of order inf": (low(), float("inf")),
    "optimizer_in_backward": ({"optimizer_in_backward": True, **low()}, None),
}


def never_waited(stages):
    return {(name, stage): waited(stage, *case)[:2] for name, case in NEVER.items() for stage in stages}


SOME = pytest.mark.parametrize("stages", [(3,), pytest.param((0, 1, 2), marks=pytest.mark.full)], ids=str)


@pytest.mark.row(107)
@SOME
def test_no_wait_for_the_device(stages):
    """In a step, whatever gradients travel as, of norms that are no roots, and of the optimizer in backward."""
    for found in emulated.run(2, never_waited, stages, timeout=120):
        assert set(map(str, found.values())) == {"({}, 0)"}, found


def waits(stages):
    found = {stage: {name: waited(stage, *case) for name, case in ASKING.items()} for stage in stages}
    for stage in set(stages) - {3}:  # there masters rest alone
        found[stage]["split"] = waited(stage, low(split_master=True), 2.0)
    return found


ASKING = {
    "fp8": (low(fp8=True), None),
    "fp8 in tiles": (low(fp8=True, scaling="1x128"), None),
    "nonfinite": (low(nonfinite="raise"), 2.0),
    "norms of order 3": (low(), 3.0),
}


@pytest.mark.row(107)
@SOME
def test_waits_for_the_device_are_so_many(stages):
    """In a step of one backward: of each bucket of 8 bits one, of each sum of which NaN is looked for one, of all split
    masters one, and two of a norm that takes a root."""
    for rank in emulated.run(2, waits, stages, timeout=120):
        for stage, found in rank.items():
            for name, (asked, copied, buckets, fp8) in found.items():
                want = {
                    "fp8": {"arithmetic.sums.same_bits": fp8},
                    "fp8 in tiles": {"arithmetic.sums.same_bits": fp8},
                    "nonfinite": {"features.nonfinite._is_finite": buckets},
                    "norms of order 3": {"arithmetic.exact_norms.roots_from_bins": 1},
                    "split": {"features.split_master._report_lost_edits": 1},
                }[name]
                assert (asked, copied) == (want, int(name == "norms of order 3")), (stage, name)
                assert buckets >= 2 and fp8 == 2 * name.startswith("fp8")


# --- their bits -----------------------------------------------------------------------------------------------------------


def three_steps(where, stage, settings):
    model = Wider(16).to(where)
    adam, zero = shard(model, stage, **settings)
    for number in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * number + ranks.rank()))
        model(x.to(where, next(model.parameters()).dtype)).float().square().sum().backward()
        adam.step()
        adam.zero_grad()
    with zero.gathered():
        return reference.weights(model)


BITS = {name: settings for name, (settings, _) in {**NEVER, **ASKING}.items()} | {"split": low(split_master=True)}


def compared(stages):
    for name, stage in ((name, stage) for name in BITS for stage in stages if (name, stage) != ("split", 3)):
        reference.assert_same(three_steps("emu", stage, BITS[name]), three_steps("cpu", stage, BITS[name]))


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("stages", [(2,), (3,), (0, 1)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_mode_has_the_bits_that_it_has_on_the_cpu(stages, seed):
    """In drawn orders of late kernels: what is no longer waited for is not read too early either."""
    emulated.run(2, compared, stages, seed=seed, timeout=200)


# --- the page -------------------------------------------------------------------------------------------------------------

HERE = Path(__file__).parent


def test_the_page_names_a_test_of_every_mode():
    table = (HERE.parent / "docs" / "gpus.md").read_text().partition("## Modes")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10 and {row[1] for row in rows} == {"works", "refused"}
    for row in rows:
        named = re.findall(r"`(test_\w+)\.(test_\w+)`", row[-1])
        assert named, row[0]
        for file, test in named:
            assert f"def {test}(" in (HERE / f"{file}.py").read_text()
