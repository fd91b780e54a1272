"""`Offload(activations=...)`: what forward saves rests in host memory or files until backward; the same bits."""

from __future__ import annotations

import errno
import gc
import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ranks
import reference
import selection
import training
import zeroshard
from zeroshard import Comm, Layout, Machine, Offload
from zeroshard.errors import TierError, UserError
from zeroshard.layout.limits import aligned
from zeroshard.planner.simulate import STEPS, simulate

GPT = {"hidden": 24, "layers": 6}  # more units than a file of states has buffers
WIDTH, ROWS, BLOCKS = 32, 16, 6
X = ROWS * WIDTH * 4  # bytes of what a block takes and gives


def to(tier, folder):
    return Offload(activations=tier, path=folder if tier == "nvme" else None)


class Block(nn.Module):
    """Saves its input for the product, and what tanh gives, which is the next one's input: one storage."""

    def __init__(self, by_hand=False) -> None:
        super().__init__()
        self.linear, self.by_hand = nn.Linear(WIDTH, WIDTH), by_hand

    def forward(self, x):
        if self.by_hand:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)

    def body(self, x):
        return torch.tanh(self.linear(x))


class Blocks(nn.Module):
    def __init__(self, by_hand=False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(by_hand) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def made(stage, offload, by_hand=False, recompute=False):
    torch.manual_seed(0)
    model = Blocks(by_hand)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=stage, offload=offload, layout=Layout(recompute=recompute))
    return model, optimizer, zero


def batch(number, rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def held(zero, tier):
    return zero.ledger().tiers.get({"cpu": "host"}.get(tier, tier), {}).get("activations", 0)


# --- the same bits ----------------------------------------------------------------------------------------------------


def trained(stage, recompute, offload):
    settings = {"options": GPT, "layout": Layout(bucket_mib=0.01, recompute=recompute), "offload": offload}
    return training.trained(stage, steps=2, backwards=2, **settings)


def equal(stage, recompute, tier, folder):
    got, want = trained(stage, recompute, to(tier, folder)), trained(stage, recompute, None)
    assert got[0] == want[0]
    reference.assert_same(got[1], want[1])
    return got[2]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", selection.STAGES)
def test_losses_norms_and_weights_have_the_same_bits(stage, world, tier, recompute, tmp_path):
    for found in ranks.run(world, equal, stage, recompute, tier, str(tmp_path)):
        assert bool(found.get("nvme", {}).get("activations")) == (tier == "nvme")


# --- what moves, to the byte ------------------------------------------------------------------------------------------


def counted(tier, folder, recompute=False, by_hand=False):
    """Bytes in the tier after forward and after backward, on the device at most, and what a step wrote and read."""
    model, optimizer, zero = made(0, to(tier, folder), by_hand, recompute)
    for number in range(2):
        before = zero.ledger()
        loss = model(batch(number)).square().mean()
        forward = held(zero, tier)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = zero.ledger()
    moved = {
        verb: after.traffic[verb].logical - before.traffic[verb].logical for verb in ("write", "read") if tier == "nvme"
    }
    return forward, held(zero, tier), after.tiers["device"].get("activations", 0), moved


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("way", ["kept", "recomputed", "checkpointed by hand"])
def test_every_storage_moves_once_and_what_stays_is_known(way, tier, tmp_path):
    """The input of the first block is the model's, and what the last saves stays: backward begins with it. Left are the
    outputs of five blocks: that of one is the input of the next, saved twice and moved once; what a checkpoint inside
    a block saves is its input alone, so that the last one's input is no part of what the fifth saved."""
    forward, left, on_device, moved = counted(tier, str(tmp_path), way == "recomputed", way == "checkpointed by hand")
    gone = (BLOCKS - 1 if way == "kept" else BLOCKS - 2) * X
    assert forward == gone
    assert left == (gone if tier == "nvme" else 0)  # room in files waits for the next forward
    assert on_device == 0
    if tier == "nvme":
        assert moved["write"] == gone
        assert moved["read"] == gone - 3 * X  # the last three are in their file's buffers still


def job():
    torch.manual_seed(0)
    return {
        "model": Blocks(),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "batch": lambda step, index: batch(10 * step + index),
        "loss": lambda model, x: model(x).square().mean(),
    }


def as_simulated(stage, offload, recompute):
    """A ledger after as many steps as a simulation takes."""
    parts = job()
    model, optimizer = parts["model"], parts["optimizer"](parts["model"].parameters())
    zero = zeroshard.shard(
        model, optimizer, stage=stage, offload=offload, layout=Layout(recompute=recompute), comm=Comm(transport="gloo")
    )
    for step in range(STEPS):
        parts["loss"](model, parts["batch"](step, zero.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return told(zero.ledger())


def told(ledger):
    tiers = {tier: {state: n for state, n in found.items() if n} for tier, found in ledger.tiers.items()}
    moved = {verb: (each.calls, each.logical) for verb, each in ledger.traffic.items() if verb != "control"}
    return {tier: found for tier, found in tiers.items() if found}, ledger.peak.get("activations"), ledger.phases, moved


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize("stage", selection.STAGES)
def test_a_simulation_holds_and_moves_what_a_rank_does_and_keeps_that_much_less_on_the_device(
    stage, tier, recompute, tmp_path
):
    """To the byte: what forward keeps on the device falls by what the tier gets."""
    layout, comm = Layout(recompute=recompute), Comm(transport="gloo")
    plain = simulate(job, ranks=2, stage=stage, layout=layout, comm=comm)
    moving = simulate(job, ranks=2, stage=stage, layout=layout, comm=comm, offload=to(tier, "/nowhere"))
    gone = (BLOCKS - 2 if recompute else BLOCKS - 1) * X
    assert moving.away == {"host" if tier == "cpu" else "nvme": gone}
    batches = X * (stage == 3)  # a plain simulation counts them where it has hooks on what autograd saves
    assert moving.activations == plain.activations - gone - batches
    assert ranks.run(2, as_simulated, stage, to(tier, str(tmp_path)), recompute)[0] == told(moving.ledger)


def test_a_plan_of_a_job_has_activations_where_they_rest_and_one_of_a_number_asks_for_tokens():
    (kept,) = zeroshard.plan(job, Machine(ranks=2), stage=2).stages
    (host,) = zeroshard.plan(job, Machine(ranks=2), stage=2, offload=to("cpu", "")).stages
    (files,) = zeroshard.plan(job, Machine(ranks=2), stage=2, offload=to("nvme", "/nowhere")).stages
    gone = (BLOCKS - 1) * X
    assert kept.activations - host.activations == kept.activations - files.activations == gone
    assert host.tiers["host"] == {"activations": gone}
    assert files.tiers["nvme"] == {"activations": gone}
    assert files.tiers["host"] == {"staging": 3 * aligned(X)}
    assert (files.files, files.moves) == ((BLOCKS - 1) * aligned(X), (gone - 3 * X, gone))
    with pytest.raises(UserError, match=r"Offload.activations: it is about activations, of jobs, or of so many tokens"):
        zeroshard.plan(7e9, offload=Offload(activations="cpu"))


# --- graphs of all kinds ----------------------------------------------------------------------------------------------


def twice(offload):
    """Two forwards, backward of the first, then twice of the second, and of a derivative."""
    model, optimizer, zero = made(3, offload)
    first, second = (model(batch(number)).square().mean() for number in range(2))
    first.backward()
    second.backward(retain_graph=True)
    second.backward()
    x = batch(3).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()
    optimizer.step()
    held_now = zero.ledger().tiers["device"].get("activations", 0)
    with zero.gathered():
        return reference.weights(model), held_now


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_graphs_that_wait_are_kept_and_derivatives_of_derivatives(tier, tmp_path):
    (got,), (want,) = (ranks.run(1, twice, offload) for offload in (to(tier, str(tmp_path)), None))
    reference.assert_same(got[0], want[0])
    assert got[1] == 0


class Editing(nn.Module):
    """Edits a block's output, which tanh has saved, in place: at once, or when others have run."""

    def __init__(self, late) -> None:
        super().__init__()
        self.blocks, self.late = nn.ModuleList(Block() for _ in range(3)), late

    def forward(self, x):
        first = self.blocks[0](x)
        if not self.late:
            first.add_(1)
        x = self.blocks[1](first * 2)
        x = self.blocks[2](x)
        if self.late:
            first.add_(1)
        return x


@pytest.mark.parametrize("late", [False, True], ids=["before it leaves", "after"])
@pytest.mark.parametrize("tier", ["plain", "cpu", "nvme"])
def test_an_edit_in_place_of_what_was_saved_is_the_error_that_plain_pytorch_raises(tier, late, tmp_path):
    model = Editing(late)
    if tier != "plain":
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=1), stage=0, offload=to(tier, str(tmp_path)))
    loss = model(batch(0)).sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[16, 32\].* is at version 1; expected"):
        loss.backward()


class Failing(Exception):
    pass


def fail(*_):
    raise Failing


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_an_exception_leaves_is_given_back(where, tier, tmp_path):
    """Of a backward that failed PyTorch itself keeps what is left of the last graph, that of three blocks here."""
    model, _, zero = made(3, to(tier, str(tmp_path)))

    def run():
        loss = model(batch(0)).sum()
        found.append(held(zero, tier))
        loss.backward()

    found = []
    run()
    for _ in range(3):
        if where == "forward":
            handle = model.blocks[4].register_forward_pre_hook(fail)
        else:
            handle = model.blocks[3].linear.weight.register_hook(fail)
        with pytest.raises(Failing):
            run()
        handle.remove()
        gc.collect()  # of the traceback, which holds the graph
    run()
    usual, left = (BLOCKS - 1) * X, (3 * X if where == "backward" else 0)
    assert found == [usual] * 2 + [usual + left] * (3 * bool(left))
    assert zero.ledger().tiers["device"].get("activations", 0) == 0


def test_a_disk_that_is_full_is_named_and_the_next_forward_tries_again(tmp_path, monkeypatch):
    model, _, zero = made(3, to("nvme", str(tmp_path)))

    def refuses(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuses)
        with pytest.raises(TierError, match=r"(?s)'activations' could not be moved.*4,096 bytes more are needed"):
            model(batch(0)).sum()
    gc.collect()
    model(batch(0)).sum().backward()
    assert held(zero, "nvme") == (BLOCKS - 1) * X


def test_room_that_a_forward_has_no_use_for_goes_back_to_the_disk(tmp_path):
    """Of batches of other lengths: the file never has the room of more than two lengths, in whole pages."""
    model, _, zero = made(3, to("nvme", str(tmp_path)))
    for rows in (ROWS, 3 * ROWS, 2 * ROWS, ROWS):
        model(batch(0, rows)).sum().backward()
        model(batch(0, rows)).sum().backward()
        assert held(zero, "nvme") == (BLOCKS - 1) * X * rows // ROWS
    (file,) = zero._engine.tiers["activations"]._files.values()
    assert file.nbytes == (BLOCKS - 1) * (aligned(X) + aligned(3 * X))


# --- refusals ---------------------------------------------------------------------------------------------------------


class Turning(Block):
    def forward(self, x, angles):
        return torch.tanh(self.linear(x * angles)) * angles


class Rotated(nn.Module):
    """Each block uses one tensor twice, as blocks use angles of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turning() for _ in range(BLOCKS))

    def forward(self, x):
        angles = x.cos()
        for block in self.blocks:
            x = block(x, angles)
        return x


def device_bytes_by_step(way, folder):
    """Bytes that activations have on the device after each of some steps."""
    torch.manual_seed(0)
    model = Rotated() if way == "one tensor twice in each unit" else Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=2, offload=to("nvme", folder))
    given, found = [], []
    model.blocks[2].register_forward_hook(lambda module, inputs, output: given.append(output))
    model.blocks[4].register_forward_hook(lambda module, inputs, output: given.append(output))
    for number in range(5):
        loss = model(batch(number)).square().mean()
        if way == "a part of the graph":
            torch.autograd.grad(given[1].sum(), given[0])
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        given.clear()
        del loss
        found.append(held(zero, "device"))
    return found


@pytest.mark.parametrize("way", ["one tensor twice in each unit", "a part of the graph"])
def test_what_came_back_to_the_device_is_given_back_step_by_step(way, tmp_path):
    first, *others = device_bytes_by_step(way, str(tmp_path))
    assert others == [first] * 4


def test_a_storage_that_was_edited_before_it_was_saved_counts_once():
    class Edited(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

        def forward(self, x):
            x = torch.relu_(self.first(x))
            return sum(block(x) for block in self.blocks)

    torch.manual_seed(0)
    model = Edited()
    zero = zeroshard.shard(model, None, stage=0, offload=to("cpu", None))
    loss = model(batch(0)).square().mean()
    assert held(zero, "cpu") <= (1 + BLOCKS) * X  # one input for all blocks, and what each tanh gives
    loss.backward()


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"Offload.activations names a tier"):
        Offload(activations="host")
    with pytest.raises(UserError, match=r'Offload.activations is "nvme", which needs a folder'):
        Offload(activations="nvme")
    with pytest.raises(
        UserError, match=r"(?s)activations go out unit by unit, and the model is one unit.*Layout\(units="
    ):
        model = nn.Linear(4, 4)
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=1), stage=0, offload=Offload(activations="cpu"))
