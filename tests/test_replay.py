"""`zero.replay`: bits flipped on one rank are found and its rank named; sound ranks train as without it."""

from __future__ import annotations

import random
import socket
from collections import Counter

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import emulated
import ranks as rank_processes
import reference
import selection
import test_experts
import test_tensor_parallel
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import CorruptionError, PeerError, UserError
from zeroshard.features import replay

ALWAYS, TRAINING, REPLAYED = "always", "in training", "in the replay"


class Net(nn.Module):
    """With all that makes a computation depend on more than its batch: dropout, statistics, numbers of Python's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        scale = 1 + random.random() + float(numpy.random.random())
        return self.last(torch.tanh(self.drop(self.norm(self.first(x))))) * scale


def flip(module, args, output):
    """One bit of one element of a product, on the way to what follows."""
    with torch.no_grad():
        output.view(torch.int32)[0, 1] ^= 1 << 21
    return output


def plant(model, when, at):
    """A hook that flips a bit: always, or in one of the forwards from `at` on."""
    forwards = iter(range(1 << 30))
    chosen = {ALWAYS: range(1 << 30), TRAINING: [at], REPLAYED: [at + 1]}[when]
    model.last.register_forward_hook(lambda *given: flip(*given) if next(forwards) in chosen else None)


def batch(step, rank, device="cpu"):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 4 + rank, generator=generator).t()  # another size on each rank, and not contiguous
    return {"x": x.to(device), "as": [(torch.randn(4 + rank, 5, generator=generator), 2.0)], "name": f"of {rank}"}


def trained(stage, every, *, steps=3, flips=None, accumulate=1, no_sync=False, device="cpu", **options):
    """Weights, losses, counts of collectives, and the error of a run of so many steps."""
    rank = rank_processes.rank()
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zero = zeroshard.shard(model, optimizer, stage=stage, **options)
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)
    if flips is not None and flips[0] == rank:
        plant(model, *flips[1:])

    def work(given, *, weight):
        ((y, factor),) = given["as"]
        loss = (model(given["x"].to(device)) - y.to(device)).square().mean() * factor * weight
        loss.backward()
        return {"loss": loss.detach()}

    step = work if every is None else zero.replay(work, every=every)
    losses, error = [], None
    zero.record()
    for number in range(steps):
        for turn in range(accumulate):
            given = batch(10 * number + turn, rank, device)
            try:
                if no_sync and turn + 1 < accumulate:
                    with zero.no_sync():
                        losses.append(step(given, weight=0.5)["loss"].item())
                else:
                    losses.append(step(given, weight=0.5)["loss"].item())
            except CorruptionError as caught:
                error = caught
                break
        if error is not None:
            break
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert error is None or error.found == step.found
    counts = Counter(event.verb for event in zero.events() if event.sent or event.received)
    told = None if error is None else (str(error), [each._asdict() | {"rank": each.rank} for each in error.found])
    statistics = {name: value.cpu() for name, value in model.named_buffers()}
    with zero.gathered():
        drawn = torch.rand(2).tolist(), random.random(), float(numpy.random.random())
        weights = {name: value.cpu() for name, value in reference.weights(model).items()}
        return weights, losses, counts, told, drawn, statistics


def alike(one, other):
    assert reference.first_difference(one[0], other[0]) == ""
    assert one[1] == other[1] and one[4] == other[4]
    assert all(torch.equal(value, other[5][name]) for name, value in one[5].items())


@pytest.mark.parametrize("stage", selection.STAGES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sound_ranks_train_with_the_same_bits(ranks, world, stage):
    """Dropout, statistics and sums of several micro-batches: nothing of a replay stays, and nothing is found."""
    settings = {"accumulate": 2}
    plain = ranks.run(world, trained, stage, None, **settings)
    for one, other in zip(plain, ranks.run(world, trained, stage, 1, **settings), strict=True):
        assert other[3] is None
        alike(one, other)


@pytest.mark.parametrize("stage", selection.STAGES)
@pytest.mark.parametrize("world", [2, 3])
def test_a_replay_costs_a_forward_a_backward_and_these_messages(ranks, world, stage):
    """Steps that are not replayed send what they always do, and no replay reduces gradients."""
    plain, replayed = (ranks.run(world, trained, stage, every)[0][2] for every in (None, 3))
    beside = {
        "broadcast": world + 1,  # micro-batches, and rank 0's buffers
        # arguments that are compared, sizes, digests; its forward, backward, and which gradients came
        "control": 2 + 1 + 2 + (2 if stage < 3 else 3),
        "gather": 2 * (stage == 3),
    }
    assert replayed == plain + Counter(beside)


SETTINGS = {
    "no_sync": {"accumulate": 2, "no_sync": True},
    "replicas": {"comm": Comm(replicas=2)},
    "hosts": {"comm": Comm(hosts=2)},
    "own buffers": {"layout": Layout(buffers="local")},
    "memory": {"comm": Comm(transport="shared")},
    "recompute": {"layout": Layout(recompute=True)},
    "8 bits": {"comm": Comm(reduce="int8")},
    "host": {"offload": Offload(gradients="cpu", optimizer="cpu")},
    "nonfinite": {"precision": Precision(nonfinite="raise")},
    "weights in 8 bits": {
        "precision": Precision(param_dtype=torch.bfloat16, fp8=True, cast_inputs=True, keep=["norm.*"])
    },
    "halves": {
        "precision": Precision(param_dtype=torch.bfloat16, split_master=True, cast_inputs=True, keep=["norm.*"])
    },
    "buffers always": {"layout": Layout(buffers="always"), "accumulate": 2},
    "spread": {"comm": Comm(replicas=2, optimizer="all"), "accumulate": 2, "no_sync": True},
    "native": {"comm": Comm(reduce="native", overlap=False)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_sound_ranks_train_with_the_same_bits_whatever_the_settings(ranks, name):
    plain = ranks.run(4, trained, 3, None, **SETTINGS[name])
    for one, other in zip(plain, ranks.run(4, trained, 3, 2, **SETTINGS[name]), strict=True):
        assert other[3] is None
        alike(one, other)


@pytest.mark.parametrize("stage", selection.STAGES)
@pytest.mark.parametrize("when", [ALWAYS, TRAINING, REPLAYED])
@pytest.mark.parametrize("world", [3, 4])
def test_a_flipped_bit_is_found_and_its_rank_named(ranks, world, when, stage):
    """On a drawn rank, in the second of two replays; on every rank in the same words."""
    drawn = random.Random(f"{world} {when} {stage}")
    wrong = drawn.randrange(world)
    # Forwards of a rank: call 1 and its replay, call 2, call 3, which is replayed too.
    told = ranks.run(world, trained, stage, 2, flips=(wrong, when, 3))
    (text, found), *others = (each[3] for each in told)
    assert all((text, found) == other for other in others)
    assert {each["rank"] for each in found} == {wrong}
    assert {each["step"] for each in found} == {1 if when == ALWAYS else 3}
    assert {each["parameter"] for each in found} == {"the gradient of 'first.weight'"}
    assert {each["spoiled"] for each in found} == {ALWAYS: {True, False}, TRAINING: {True}, REPLAYED: {False}}[when]
    assert found[0]["suspects"] == ((wrong, socket.gethostname(), "cpu"),)
    assert f"rank {wrong} computes wrongly" in text and f"rank {wrong} (host {socket.gethostname()}, cpu)" in text
    assert ("zero_grad" in text) is (when != REPLAYED)


def on_a_device(stage, every, flips=None):
    return trained(stage, every, flips=flips, device="emu")


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("stage", [0, 3])
def test_on_an_emulated_accelerator(stage):
    """Gradients are digested in the device's queue, batches travel through host memory, its random state comes along."""
    plain, replayed = (emulated.run(3, on_a_device, stage, every, timeout=200) for every in (None, 1))
    for one, other in zip(plain, replayed, strict=True):
        assert other[3] is None
        alike(one, other)
    told = emulated.run(3, on_a_device, stage, 1, (1, ALWAYS, 0), timeout=200)[0][3]
    assert {each["rank"] for each in told[1]} == {1} and "rank 1 (host" in told[0] and "emu" in told[0]


def test_ten_ranks_compute_eight_micro_batches_again(ranks):
    """A rank is found that has no part in these but to compute one of them; the third result names it."""
    told = [each[3] for each in ranks.run(10, trained, 1, 1, flips=(9, ALWAYS, 0))]
    assert all(each == told[0] for each in told)
    assert [(each["rank"], each["owner"], each["spoiled"]) for each in told[0][1]] == [(9, 2, False)]


@pytest.mark.parametrize(
    ("world", "when", "suspects", "words"),
    [
        (1, TRAINING, [0], "this rank got different bits of a micro-batch when it computed it again"),
        (1, REPLAYED, [0], "this rank got different bits of a micro-batch when it computed it again"),
        (1, ALWAYS, None, ""),  # its bits are the same wrong ones each time
        (2, TRAINING, [1], "rank 1 computes wrongly"),  # when it computes its own once more it agrees with rank 0
        (2, REPLAYED, [0, 1], "which of them is wrong cannot be told"),
        (2, ALWAYS, [0, 1], "which of them is wrong cannot be told"),
    ],
)
def test_one_rank_and_two_say_what_they_can(ranks, world, when, suspects, words):
    told = ranks.run(world, trained, 2, 1, flips=(world - 1, when, 2))[0][3]
    if suspects is None:
        assert told is None
        return
    text, found = told
    assert {tuple(each["suspects"][at][0] for at in range(len(each["suspects"]))) for each in found} == {
        tuple(suspects)
    }
    assert words in text
    assert ("not deterministic" in text) is (world == 1 or len(suspects) > 1)


def unequal(stage, kind):
    rank = rank_processes.rank()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)

    def work(x, what=None):
        loss = model(x).sum() * (1 + (kind == "rank inside") * zero.rank)
        if kind != "forward alone":
            loss.backward()
        if kind == "step inside":
            optimizer.step()

    x = torch.ones(4, 6)
    if kind == "set":
        zero.replay(work)(x, what={1} if rank == 1 else [1])
    elif kind == "sparse":
        zero.replay(work)(x, what={"mask": [torch.eye(3).to_sparse() if rank == 1 else torch.eye(3)]})
    elif kind == "every":
        zero.replay(work, every=2 + rank)(x)
    elif kind == "every later":
        replay = zero.replay(work, every=1)
        replay(x)
        replay.every += rank == 1
        replay(x)
        optimizer.step()
    elif kind == "no number":
        zero.replay(work, every=0)
    else:
        zero.replay(work)(x)


REFUSED = {
    "set": (UserError, "kwargs['what'] of its arguments", "builtins.set", "dict(batch)"),
    "sparse": (UserError, "kwargs['what']['mask'][0]", "torch.sparse_coo on cpu"),
    "every": (PeerError, "zero.replay(...), every=", "2 on rank 0; 3 on rank 1"),
    "every later": (PeerError, "rank 0 is at telling the others of zero.replay(...) 0; rank 1 is at step 1"),
    "no number": (UserError, "every=0", "zero.replay(forward_backward, every=1000)"),
    "step inside": (UserError, "makes a step of the optimizer", "loss = step(batch); optimizer.step()"),
    "forward alone": (UserError, "leaves no gradient: it has to call backward(), too"),
    "rank inside": (CorruptionError, "cannot be told", "no zero.rank inside"),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_replayed_is_refused_on_every_rank(ranks, kind, stage):
    error, *words = REFUSED[kind]
    with pytest.raises(rank_processes.RankFailure) as failure:
        ranks.run(3, unequal, stage, kind)
    assert "failed on rank 0, 1, 2 of 3" in str(failure.value)
    assert f"{error.__name__}: " in str(failure.value)
    for word in words:
        assert word in str(failure.value), word


def miscounting(stage):
    """Replays of a rank whose count of them an interrupt has left behind."""
    rank = rank_processes.rank()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    replay = zero.replay(lambda x: model(x).sum().backward(), every=1)
    for step in range(3):
        replay.replays -= rank == 1
        replay(torch.full((4, 6), 1.0 + rank + step))
        optimizer.step()
        optimizer.zero_grad()
    return replay.found, replay.replays


@pytest.mark.parametrize("stage", [0, 3])
def test_who_computes_what_is_no_matter_of_a_count_that_one_rank_has(ranks, stage):
    """Of ten ranks eight are replayed, and others each time: by another count ranks would wait for other ones."""
    assert ranks.run(10, miscounting, stage) == [([], 3 * (rank != 1)) for rank in range(10)]


def refused_beside(what):
    if what == "optimizer_in_backward=True":
        model = Net()
        zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), optimizer_in_backward=True)
    elif what == "tensor parallelism":
        *_, zero = test_tensor_parallel.sharded(2, 2)
    else:
        *_, zero = test_experts.sharded(2, 2, 3)
    with pytest.raises(UserError) as error:
        zero.replay(lambda: None)
    return str(error.value)


@pytest.mark.parametrize("what", ["optimizer_in_backward=True", "tensor parallelism", "Layout(along=...)"])
def test_what_no_other_rank_could_compute_is_refused(ranks, what):
    for text in ranks.run(2, refused_beside, what):
        assert f"got: zero.replay(...), {what}" in text


def interrupted(stage, where):
    """The replay raises on one rank, and the step is made again."""
    rank = rank_processes.rank()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=Comm(prefetch=0))
    torch.manual_seed(rank)
    calls = iter(range(9))
    losses = []

    def wrong(grad):
        raise ArithmeticError(where)

    def work(x):
        raises = next(calls) == 1 and rank == 1
        if raises and where == "before forward":
            raise ArithmeticError(where)
        hook = None
        if raises and where == "inside backward":
            hook = model.last.register_forward_pre_hook(lambda module, args: args[0].register_hook(wrong) and None)
        loss = model(x).square().mean()
        if hook is not None:
            hook.remove()
        if raises and where == "before backward":
            raise ArithmeticError(where)
        loss.backward()
        if raises:
            raise ArithmeticError(where)
        return loss.item()

    step = zero.replay(work, every=1)
    for turn in range(2):
        try:
            losses.append(step(torch.full((4, 6), turn + 1.0)))
        except (ArithmeticError, PeerError) as error:
            optimizer.zero_grad()
            losses.append(f"{type(error).__name__}: {error}")
    assert model.first.weight.grad is not None
    optimizer.step()
    engine = zero._engine
    return losses, engine.reduction.silent, len(engine.reduction.subscribers), engine.schedule.backward.local


@pytest.mark.parametrize("stage", selection.STAGES)
@pytest.mark.parametrize("where", ["before forward", "before backward", "inside backward", "after backward"])
def test_after_an_exception_in_a_replay_all_ranks_go_on(ranks, where, stage):
    told = ranks.run(3, interrupted, stage, where)
    assert [losses[0].partition(":")[0] for losses, *_ in told] == ["PeerError", "ArithmeticError", "PeerError"]
    assert all(f"ArithmeticError: {where}" in losses[0] for losses, *_ in told), told
    for losses, silent, subscribers, local in told:
        assert isinstance(losses[1], float)
        assert (silent, subscribers, local) == (False, 1, False)


def numbered(stage, every):
    """Micro-batches of `zero.batches`, three on two ranks: one rank has none in the last round."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    data = [(torch.full((6,), float(at)), torch.full((5,), float(at % 3))) for at in range(12)]

    def work(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss.item()

    work = zero.replay(work, every=every) if every else work
    losses = []
    for step in zero.batches(data, per_step=3, size=2):
        losses += [work(*each) for each in step]
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return reference.weights(model), losses


@pytest.mark.parametrize("stage", [1, 3])
def test_micro_batches_of_zero_batches_are_replayed(ranks, stage):
    plain, replayed = (ranks.run(2, numbered, stage, every) for every in (None, 1))
    for one, other in zip(plain, replayed, strict=True):
        assert reference.first_difference(one[0], other[0]) == "" and one[1] == other[1]


def uneven(stage, every):
    """`zero.join`: the rank that has run out is replayed too, with the batch that it repeats."""
    rank = rank_processes.rank()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    torch.manual_seed(rank)

    def work(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.item()

    step, losses = zero.replay(work, every=every) if every else work, []
    for x in zero.join([torch.full((3, 6), rank + at + 1.0) for at in range(1 + rank)]):
        losses.append(step(x))
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return reference.weights(model), losses


@pytest.mark.parametrize("stage", selection.STAGES)
def test_ranks_that_have_run_out_are_replayed(ranks, stage):
    plain, replayed = (ranks.run(3, uneven, stage, every) for every in (None, 1))
    for one, other in zip(plain, replayed, strict=True):
        assert reference.first_difference(one[0], other[0]) == "" and one[1] == other[1]


class Tied(nn.Module):
    """A weight used by two layers, and by a third one inside a re-entrant checkpoint: several gradients a backward."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight, self.reentrant = self.one.weight, reentrant

    def forward(self, x):
        x = torch.tanh(self.two(torch.tanh(self.one(x))))
        return checkpoint(lambda x: torch.dropout(self.two(x), 0.3, True), x, use_reentrant=self.reentrant)


def several(stage, reentrant, flips):
    rank = rank_processes.rank()
    model = Tied(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(units=()))
    if flips and rank == 2:
        model.one.register_forward_hook(flip)

    def work(x):
        model(x).square().mean().backward()

    step = zero.replay(work, every=1)
    for number in range(2):
        try:
            step(torch.full((3, 6), rank + number + 1.0))
        except CorruptionError as error:
            return [each.rank for each in error.found]
        optimizer.step()
        optimizer.zero_grad()
    return []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", selection.STAGES)
def test_weights_with_several_gradients_in_a_backward(ranks, stage, reentrant):
    assert ranks.run(3, several, stage, reentrant, False) == [[]] * 3
    assert ranks.run(3, several, stage, reentrant, True) == [[2, 2]] * 3


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [*range(1, 9), *(pytest.param(n, marks=pytest.mark.full) for n in (12, 64, 1000))])
def test_who_computes_what(world):
    """Every micro-batch that travels is computed by another rank, and by a third one in the second turn."""
    for number in range(20):
        whose = replay.subjects(world, number)
        assert len(set(whose)) == min(world, replay.MOST)
        computed = [
            {owner: {r for r in range(world) if replay.assigned(r, world, number, turn) == owner} for owner in whose}
            for turn in (0, 1)
        ]
        for owner in whose:
            first, second = computed[0][owner], computed[1][owner]
            assert first and second
            assert world == 1 or owner not in first
            assert world < 3 or owner not in second
            assert world < 3 or len(first | second | {owner}) >= 3
    met = {(r, replay.assigned(r, world, number, 0)) for number in range(world * 8) for r in range(world)}
    assert world > 12 or len(met) == max(world * (world - 1), 1)  # in time each rank has computed every other one's


def test_two_ranks_that_agree_are_right():
    assert replay.right([(0, "a"), (1, "b"), (2, "b")]) == "b"
    assert replay.right([(0, "a"), (1, "b"), (0, "a")]) is None  # one rank agrees with itself
    assert replay.right([(0, "a"), (1, "b"), (2, "c")]) is None
    assert replay.right([(0, "a"), (1, "b"), (2, "a"), (3, "b")]) is None
    assert replay.right([(0, "a"), (1, "b"), (2, "a"), (3, "b"), (4, "b")]) == "b"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64], ids=str)
@pytest.mark.parametrize("numel", [1, 7, 256, 257, 5000])
def test_one_bit_changes_the_digest_of_its_piece_alone(dtype, numel, monkeypatch):
    """On the CPU by a hash, and by the sums that devices make, in several turns."""
    monkeypatch.setattr(replay, "_WORDS", 8)
    tensor = torch.arange(numel).to(dtype)
    each, draw = replay.piece(numel), random.Random(numel)
    words = tensor.view(torch.uint8).to(torch.int16) if tensor.itemsize == 1 else tensor.view(torch.int16)
    before, wide = replay.digests(tensor), each * (words.numel() // numel)
    rows = [words[at : at + wide].view(1, -1) for at in range(0, words.numel(), wide)]
    sums = torch.cat([replay._weighed(row) for row in rows])
    if len(rows) > 1:
        assert torch.equal(replay._weighed(torch.cat(rows[:-1])), sums[:-1])
    for _ in range(20):
        byte, bit = draw.randrange(numel * tensor.itemsize), draw.randrange(8)
        tensor.view(torch.uint8)[byte] ^= 1 << bit
        hit = byte // tensor.itemsize // each
        assert (replay.digests(tensor) != before).nonzero().flatten().tolist() == [hit]
        words = tensor.view(torch.uint8).to(torch.int16) if tensor.itemsize == 1 else tensor.view(torch.int16)
        assert (replay._weighed(words[hit * wide : (hit + 1) * wide].view(1, -1)) != sums[hit]).all()
        tensor.view(torch.uint8)[byte] ^= 1 << bit
    assert torch.equal(replay.digests(tensor), before)


def test_a_micro_batch_travels_with_its_strides_and_where_its_memory_begins():
    whole = torch.arange(240.0)
    given = [
        {"image": whole.view(2, 3, 5, 8).to(memory_format=torch.channels_last), 3: None, "text": "é", "flag": True},
        (whole[5:25].view(4, 5).t(), whole[3:].as_strided((4,), (0,)), whole[::7], torch.tensor(2), torch.empty(0, 3)),
        [1, 0.1, float("inf"), torch.arange(5, dtype=torch.int8)[1:], torch.ones(2, dtype=torch.bfloat16)],
        torch.ones(3, requires_grad=True),
    ]
    came = replay.unpack(replay.pack({"given": given}, torch.device("cpu")), torch.device("cpu"))["given"]
    assert [type(each) for each in came] == [dict, tuple, list, torch.Tensor]
    assert came[0].keys() == given[0].keys() and came[0]["text"] == "é" and came[0]["flag"] is True
    assert came[2][:3] == given[2][:3]
    tensors = [torch.utils._pytree.tree_leaves(each) for each in (given, came)]
    for one, other in zip(*tensors, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other) and one.dtype == other.dtype
            assert one.stride() == other.stride() and one.requires_grad == other.requires_grad
            assert one.data_ptr() % 64 == other.data_ptr() % 64
