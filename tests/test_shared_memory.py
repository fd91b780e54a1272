"""Ranks of one host read each other's memory: the same bits as by messages, nothing sent, nothing left behind."""

from __future__ import annotations

import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import interrupts
import ranks as rank_processes
import reference
import selection
import test_bits
import test_collectives
import test_fragments
import test_interrupts
import test_lost_ranks
import zeroshard
from zeroshard import Comm, Offload, Precision
from zeroshard.comm import host_peers, shared_memory
from zeroshard.comm.host_peers import POSTED, READ, Notice
from zeroshard.errors import PeerError, StateError, UserError
from zeroshard.features import shared_parameters
from zeroshard.features.shared_parameters import OneCopy
from zeroshard.policies import comm

SHARED = Comm(transport="shared")


def over_memory(function, *args):
    """A function of another test's, whose ranks share memory wherever it does not say how they exchange."""
    comm.AUTO = "auto"
    try:
        return function(*args)
    finally:
        comm.AUTO = "gloo"


# --- bits and bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", test_bits.PRECISIONS)
@pytest.mark.parametrize("world", [2, 3])
def test_the_bits_are_those_of_plain_pytorch(world, precision, stage):
    """As by messages, at every stage and for every kind of buckets."""
    configuration = stage, list(test_bits.BUCKETS)[(stage + world) % 3], None, "foreach"
    test_bits.check(world, [configuration], precision, steps=6, comm=SHARED)


def read(stage: int, no_sync: bool, width: int, transport: str):
    """What one step moves and shares, by verb, and what went over TCP meanwhile."""
    precision, settings = Precision(param_dtype=torch.bfloat16), Comm(transport=transport)
    found: dict[str, int] = {}
    count = zeroshard.Zero.ledger

    def ledger(zero):  # `traffic` asks before the last step and after it
        told = count(zero)
        for verb, moved in told.traffic.items():
            found[verb] = moved.shared - found.get(f"{verb} before", 0)
            found[f"{verb} before"] = moved.shared
        return told

    zeroshard.Zero.ledger = ledger
    try:
        moved, wire = test_collectives.traffic(stage, 2, no_sync, precision, width, settings)
    finally:
        zeroshard.Zero.ledger = count
    return moved, {verb: found.get(verb) for verb in ("reduce", "gather", "control")}, wire


@pytest.mark.parametrize("no_sync", [False, True], ids=["", "no_sync"])
@pytest.mark.parametrize("world", [2, 3])
def test_nothing_is_sent_and_what_is_read_is_counted(ranks, stage, world, no_sync):
    """The messages of gloo, byte for byte, but read; on the wire are agreements, also of a model 16 times as large."""
    wires = []
    for width in (96, 384):
        sent = ranks.run(world, read, stage, no_sync, width, "gloo")
        told = ranks.run(world, read, stage, no_sync, width, "shared")
        for (by_message, nothing, _), (moved, shared, wire) in zip(sent, told, strict=True):
            for verb in ("reduce", "gather"):
                calls, logical, own, both = by_message[verb]
                assert nothing[verb] == 0
                assert moved[verb] == (calls, logical, 0, 0)
                assert shared[verb] == both - own
            assert moved["control"] == by_message["control"] and shared["control"] == 0
            wires.append(wire)
    assert max(wires) < 8 << 10  # agreements and barriers: less than a shard of one of the smaller model's buckets


class Deep(nn.Module):
    """Five units of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 200)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def deep():
    torch.manual_seed(0)
    return {
        "model": Deep(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "batch": lambda step, index: torch.full((4, 64), step + 0.1 * index),
        "loss": lambda model, batch: model(batch).square().mean(),
    }


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("more", [(), ("--accumulate", "2", "--no-sync")], ids=["", "no_sync"])
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_held_are_those_planned(warm, command, world, more, monkeypatch):
    """Of every state, on every rank, at rest and at the most in every phase; with contributions that others read, and
    nothing that arrives."""
    monkeypatch.chdir(Path(__file__).parent)
    options = ["--ranks", str(world), "--check", "--transport", "shared", *more]
    code, out, error = command("plan", "test_shared_memory:deep", *options)
    assert code == 0, out + error


@pytest.mark.full
@pytest.mark.parametrize("no_sync", [False, True], ids=["", "no_sync"])
@pytest.mark.parametrize("stage", selection.STAGES)
def test_what_shapes_plan_bounds_what_is_held(tmp_path, stage, no_sync):
    """The peaks of a plan from shapes are at least those of the engine's own walk; its traffic is the same."""
    from flat import plan_of
    from zeroshard.planner.simulate import simulate

    shapes = tmp_path / "shapes.json"
    shapes.write_text(
        "{" + ", ".join(f'"{name}": {list(tensor.shape)}' for name, tensor in Deep().state_dict().items()) + "}"
    )
    options = {"accumulate": 2, "no_sync": no_sync}
    found = plan_of(
        shapes=shapes, ranks=4, stage=stage, preset="fp32", comm=Comm(transport="shared"), **options
    ).stages[0]
    run = simulate(deep, ranks=4, rank=found.rank, stage=stage, comm=SHARED, **options)
    held = {
        phase: sum(most.held.get(state, 0) for state in ("reduce", "lent")) for phase, most in run.ledger.phases.items()
    }
    planned = {
        phase: max(
            sum(each.nbytes.get(state, 0) for state in ("reduce", "lent"))
            for each in found.instants
            if phase in each.name
        )
        for phase in ("forward", "backward", "reduce", "step", "gather")
    }
    assert run.ledger.peak["lent"] and run.ledger.peak["reduce"]
    assert max(planned.values()) >= max(held.values())
    assert found.traffic.total.sent == 0 and found.traffic.reduce.logical == run_moved(run, "reduce")


def run_moved(run, verb: str) -> int:
    return sum(event.logical for event in run.events if event.verb == verb) // 2


# --- one copy for a host ------------------------------------------------------------------------------------------------

ONCE = Offload(parameters="shared")


@pytest.mark.parametrize("precision", test_bits.PRECISIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_one_copy_has_the_bits_of_plain_pytorch(world, stage, precision):
    configuration = stage, list(test_bits.BUCKETS)[(stage + world) % 3], None, "foreach"
    test_bits.check(world, [configuration], precision, steps=6, offload=ONCE)


def with_one_copy(function, *args):
    """A function of another test's, whose ranks have one copy of the parameters together."""
    shard = zeroshard.shard
    zeroshard.shard = functools.partial(shard, offload=ONCE)
    try:
        return function(*args)
    finally:
        zeroshard.shard = shard


def copies_of(zero):
    rests = (bucket.parameters.rest for bucket in zero._engine.buckets)
    return [rest._pages for rest in rests if isinstance(rest, OneCopy)]


EDITS = {
    "on all ranks": lambda zero, model: halved(model, True),
    "on one": lambda zero, model: halved(model, zero.rank == 1),
    "inside gathered": lambda zero, model: inside(zero, model, None),
    "written from one": lambda zero, model: inside(zero, model, 1),
}


def halved(model, here):
    """Of every element, whoever owns it."""
    with torch.no_grad():
        for param in model.parameters() if here else ():
            param.mul_(0.5)


def inside(zero, model, write_from):
    with zero.gathered(write_from=write_from):
        halved(model, write_from in (None, zero.rank))


def edited(stage, how, offload, skip=False, dtype=None):
    """Weights after steps between which somebody writes into them; and the private pages that are left of each copy."""
    forget = shared_parameters.Pages.forget
    if skip:
        shared_parameters.Pages.forget = lambda copy: None
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        zero = zeroshard.shard(
            model, optimizer, stage=stage, offload=offload, comm=SHARED, precision=Precision(param_dtype=dtype)
        )
        for index in range(4):
            x = torch.randn(3, 64, generator=torch.Generator().manual_seed(10 * index + zero.rank))
            optimizer.zero_grad()
            model(x.to(dtype)).float().square().sum().backward()
            optimizer.step()
            if index % 2 == 0:
                EDITS[how](zero, model)
        for param in model.parameters():
            param.sum()  # what the last step sent has landed
        left = [copy.private() for copy in copies_of(zero)]
        held = {tier: {state: n for state, n in held.items() if n} for tier, held in zero.ledger().tiers.items()}
        sent = zero.ledger().traffic["gather"]
        with zero.gathered():
            numel = sum(bucket.numel for bucket in zero.partition.buckets)
            return reference.weights(model), left, held, (sent.sent_and_received, sent.shared), numel
    finally:
        shared_parameters.Pages.forget = forget


@pytest.mark.row(103)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_edits_mean_what_they_mean_in_a_copy_of_its_own(ranks, stage, how, dtype):
    """On all ranks, on one, on what others own: and no page of a copy stays private once a step has landed."""
    if how == "on one":  # it is named, in either
        for offload in (Offload(), ONCE):
            told = ranks.run(2, edited, stage if offload is ONCE else 1, how, offload, False, dtype, expect_errors=True)
            assert all("rank 1: edited: '0.weight'" in each.message for each in told)
        return
    want = ranks.run(2, edited, min(stage, 2), how, Offload(), False, dtype)
    told = ranks.run(2, edited, stage, how, ONCE, False, dtype)
    for (weights, left, held, sent, numel), (plain, *_) in zip(told, want, strict=True):
        assert reference.first_difference(weights, plain) == ""
        assert left and not any(left)
        assert "parameters" not in held["device"]
        assert held["shared"]["parameters"] == numel * (4 if dtype is None else 2)
        assert sent == (0, 0)


@pytest.mark.row(103)
@pytest.mark.parametrize("how", [how for how in EDITS if how != "on one"])
def test_a_copy_that_forgets_nothing_is_caught(ranks, how):
    """Without it a page that was edited hides what its owners have written since."""
    want = ranks.run(2, edited, 1, how, Offload())
    found = ranks.run(2, edited, 1, how, ONCE, True)
    assert any(reference.first_difference(got[0], plain[0]) for got, plain in zip(found, want, strict=True))
    assert all(any(left) for _, left, *_ in found)


def left_by(write_from):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01)
    zero = zeroshard.shard(model, optimizer, stage=2, offload=ONCE)
    inside(zero, model, write_from)
    left = [copy.private() for copy in copies_of(zero)]
    return left, reference.weights(model)


@pytest.mark.row(103)
@pytest.mark.parametrize("write_from", [None, 1], ids=["owners", "one rank"])
def test_gathered_leaves_one_copy(ranks, write_from):
    """Also of what is frozen, which no step publishes; and also where one rank's weights are sent into everybody's pages."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    halved(plain, True)
    for left, weights in ranks.run(2, left_by, write_from):
        assert left and not any(left)
        reference.assert_same(weights, reference.weights(plain))


def proportional():
    """What this process is charged of memory without a name, each page shared out among those that have it; private
    pages in full."""
    charged, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = "memfd:zeroshard" in line
        elif ours and line.startswith("Pss:"):
            charged += int(line.split()[1]) << 10
    return charged


def charged(stage):
    """Of 16 MiB of weights."""
    torch.manual_seed(0)
    gc.collect()
    before = proportional()  # of tests before this one
    model = nn.Linear(4096, 1024, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    zeroshard.shard(model, optimizer, stage=stage, offload=ONCE)
    model.weight.sum()  # in which all pages are read
    torch.distributed.barrier()
    found = proportional() - before
    torch.distributed.barrier()
    return found


@pytest.mark.row(103)
def test_a_host_holds_one_copy(ranks):
    """16 MiB of weights on 3 ranks are 16 in all and not 48, by the kernel's own count; it rounds each page's share."""
    assert abs(sum(ranks.run(3, charged, 1)) - (16 << 20)) < 64 << 10


@pytest.mark.parametrize(
    "stage_of_plan", [pytest.param("1", marks=pytest.mark.full), pytest.param("2", marks=pytest.mark.full), "3"]
)
def test_bytes_of_one_copy_are_those_planned(warm, command, stage_of_plan, monkeypatch):
    """At rest and at every peak, to the byte."""
    monkeypatch.chdir(Path(__file__).parent)
    options = ["--ranks", "2", "--stage", stage_of_plan, "--check", "--offload-parameters", "shared"]
    code, out, error = command("plan", "test_shared_memory:deep", *options)
    assert code == 0, out + error


def read_in_closures(stage, offload):
    """Weights of the others that a closure reads when its backward is over, late on one rank; and at the end."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = test_fragments.Reassigning(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage, offload=offload, comm=SHARED)
    seen = []

    def closure():
        optimizer.zero_grad()
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(len(seen)))
        loss = model(x).square().sum()
        loss.backward()
        time.sleep(0.2 * zero.rank)
        seen.append(model.weight.detach().clone())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    with zero.gathered():
        return reference.weights(model), seen


@pytest.mark.full
@pytest.mark.row(103)
@pytest.mark.parametrize("stage", [1, 2])
def test_no_rank_updates_what_a_closure_of_another_still_reads(ranks, stage):
    own, one = (ranks.run(2, read_in_closures, stage, offload) for offload in (Offload(), ONCE))
    for (weights, seen), (want, others) in zip(one, own, strict=True):
        reference.assert_same(weights, want)
        assert all(map(torch.equal, seen, others))


def test_a_plan_counts_the_one_copy_once_for_a_host(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # a row for each stage, whole
    for options, told in (((), False), (("--offload-parameters", "shared"), True)):
        code, out, error = command(
            "plan", "--params", "7e9", "--ranks", "8", "--stage", "2", "--offload-optimizer", "cpu", "--full", *options
        )
        assert code == 0, error
        title, row = (out[out.index("Where it rests") :].splitlines()[at] for at in (1, 2))
        assert (title.endswith("shared, once per host") and row.endswith(" 14.00")) is told


def loaded(folder, stage):
    model, optimizer, zero = test_lost_ranks.three(stage)
    test_lost_ranks.step(model, optimizer, 0)
    zero.save(folder)
    test_lost_ranks.step(model, optimizer, 1)
    zero.load(folder)
    left = [copy.private() for copy in copies_of(zero)]
    for index in (1, 2):
        test_lost_ranks.step(model, optimizer, index)
    with zero.gathered():
        return reference.weights(model), left


@pytest.mark.row(103)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_load_leaves_one_copy(ranks, tmp_path, stage):
    for weights, left in ranks.run(2, with_one_copy, loaded, str(tmp_path / str(stage)), stage):
        assert reference.first_difference(weights, test_lost_ranks.unbroken(3)) == ""
        assert left and not any(left)


def drawn_with_one_copy(*args):
    return with_one_copy(interrupts.several, *args, interrupts.plain)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(103)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("world", "cases"), [(2, 6), pytest.param(3, 250, marks=pytest.mark.slow)])
def test_exceptions_at_drawn_waits_tear_no_copy(tmp_path, world, cases, stage):
    outcomes = interrupts.run(
        world, stage, [*range(cases)], str(tmp_path), timeout=30.0 * cases, cases=drawn_with_one_copy
    )
    for _, outcome, words in outcomes:
        assert outcome.startswith(("the same bits", "named")), words
    assert sum(outcome.startswith("the same bits") for _, outcome, _ in outcomes) > cases // 3


def killed_with_one_copy(*args):
    return with_one_copy(test_lost_ranks.loses_a_rank, *args)


def named_memory():
    """Names of what is shared on this host, but temporary files of other programs."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("tmp")}


@pytest.mark.row(103)
@pytest.mark.parametrize("where", ["forward", "step"])
def test_a_rank_killed_beside_one_copy_is_named(ranks, tmp_path, where):
    before = named_memory()
    outcomes = ranks.run(2, killed_with_one_copy, where, 1, signal.SIGKILL, str(tmp_path), **test_lost_ranks.PATIENT)
    test_lost_ranks.check_named(outcomes, where, "is gone: its process has ended")
    assert named_memory() <= before


SPLIT = zeroshard.Precision(param_dtype=torch.bfloat16, split_master=True)


@pytest.mark.parametrize(
    "settings", [{"gradients": "shared"}, {"parameters": {"shared": 0.5}}], ids=["gradients", "half"]
)
def test_one_copy_is_of_all_parameters(settings):
    with pytest.raises(UserError) as caught:
        Offload(**settings)
    assert 'Offload(parameters="shared")' in str(caught.value).split("instead:")[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stage": 0}, "stage=1"),
        ({"stage": 1, "comm": Comm(transport="gloo")}, 'Comm(transport="shared")'),
        ({"stage": 1, "precision": SPLIT}, "whole masters"),
    ],
    ids=["stage 0", "gloo", "split masters"],
)
def test_one_copy_is_refused_where_it_would_be_wrong(options, says):
    """At stage 0 every rank would write every element."""
    model = nn.Linear(4, 4)
    with pytest.raises(UserError) as caught:
        zeroshard.shard(model, torch.optim.SGD(model.parameters()), offload=ONCE, **options)
    assert says in str(caught.value).split("instead:")[1]


# --- what else there is -------------------------------------------------------------------------------------------------


def saved_or_loaded(folder: str, transport: str, offload: Offload):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zeroshard.shard(model, optimizer, stage=2, comm=Comm(transport=transport), offload=offload)
    if Path(folder).exists():
        zero.load(folder)
    else:
        test_lost_ranks.step(model, optimizer, 0)
        zero.save(folder)
    for index in range(1, 3):
        test_lost_ranks.step(model, optimizer, index)
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.parametrize("where", ["device", "cpu", "nvme"])
def test_checkpoints_and_tiers_are_the_same(ranks, tmp_path, where):
    """What ranks that share memory have saved others load, and go on with the same bits; wherever states rest."""
    path = {"path": tmp_path / "states"} if where == "nvme" else {}
    offload = Offload(parameters=where, gradients=where, optimizer=where, **path)
    first = ranks.run(2, saved_or_loaded, str(tmp_path / "ckpt"), "shared", offload)
    second = ranks.run(1, saved_or_loaded, str(tmp_path / "ckpt"), "gloo", Offload(), group=False)
    for weights in first:
        assert reference.first_difference(weights, second[0]) == ""


def steady(stage: int):
    """Blocks, descriptors and ledger after some steps and after more."""
    model, optimizer, zero = test_lost_ranks.three(stage, optimizer=torch.optim.SGD)
    host = zero._engine.group._groups.shared[0].host
    seen = []
    for index in range(30):
        test_lost_ranks.step(model, optimizer, index)
        torch.distributed.barrier()
        if index in (9, 29):
            gc.collect()
            held = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
            seen.append((host._made, len(os.listdir("/proc/self/fd")), len(host.flights), held))
    return seen


def test_a_steady_step_makes_no_new_memory(ranks, stage):
    for before, after in ranks.run(2, over_memory, steady, stage):
        made, descriptors, flights, held = after
        assert (descriptors, held) == (before[1], before[3])
        assert made <= before[0] + 2 and flights <= before[2] + 4  # which depends on who is faster
        assert sum(os.path.exists(f"/dev/shm/{name}") and "zeroshard" in name for name in os.listdir("/dev/shm")) == 0


def used(stage: int, settings: dict[str, object]):
    """Do ranks share memory, with these settings of `Comm`? And what a step has moved."""
    return over_memory(used_by_default, stage, settings)


def used_by_default(stage: int, settings: dict[str, object]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=Comm(**settings))
    for index in range(2):
        model(torch.full((2, 16), 1.0 + index + zero.rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = zero.ledger().traffic["reduce"]
    return zero._engine.group.team.shares, moved.sent, moved.shared


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, True),
        ({"transport": "gloo"}, False),
        ({"reduce": "native"}, False),
        ({"reduce": "int8"}, False),
        ({"hosts": 2}, False),
        ({"replicas": 2}, True),
    ],
    ids=["default", "gloo", "native", "int8", "hosts", "replicas"],
)
def test_ranks_of_one_host_share_memory_by_default(ranks, settings, shares):
    """By "auto", unless a setting takes messages; then nothing is read in others' memory."""
    for found, sent, shared in ranks.run(4, used, 2, settings):
        assert (found, shared > 0, sent > 0) == (shares, shares, not shares)


def replicated(transport: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zeroshard.shard(model, optimizer, stage=3, comm=Comm(transport=transport, replicas=2))
    for index in range(3):
        test_lost_ranks.step(model, optimizer, 4 * index + zero.rank)
    sent = {verb: moved.sent for verb, moved in zero.ledger().traffic.items() if verb in ("gather", "reduce", "relay")}
    with zero.gathered():
        return reference.weights(model), sent


@pytest.mark.full
def test_replicas_share_inside_and_hand_on_by_messages(ranks):
    by_message, shared = (ranks.run(4, replicated, transport) for transport in ("gloo", "shared"))
    for (want, sent), (got, read_) in zip(by_message, shared, strict=True):
        assert reference.first_difference(got, want) == ""
        assert read_ == {"gather": 0, "reduce": 0, "relay": sent["relay"]} and sent["gather"] > 0 < sent["relay"]


# --- what cannot be ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"transport": "sharde"}, "'shared'"),
        ({"transport": "shared", "reduce": "native"}, 'Comm(transport="shared")'),
    ],
    ids=["unknown", "native"],
)
def test_settings_that_contradict_each_other(settings, says):
    with pytest.raises(UserError) as caught:
        Comm(**settings)
    assert says in str(caught.value).split("instead:")[1]


WHY = {
    "another host": "rank 1 is on another host",
    "another user": "rank 1 is another user's",
    "another namespace": "cannot reach rank 0 by a local socket",
    "another system": "rank 1 cannot share memory: this system has no memory without a name",
}


def apart(why: str, transport: str, folder: str):
    """Training where rank 1 cannot share memory; what all of them log."""
    patched, told = pytest.MonkeyPatch(), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("zeroshard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        if rank_processes.rank() == 1:
            if why == "another host":
                other = Path(folder, "boot_id")
                other.write_text("another")
                patched.setattr(host_peers, "_BOOT", other)
            elif why == "another user":
                patched.setattr(os, "geteuid", lambda: 12345)
            elif why == "another namespace":  # where nobody listens at that name
                call = host_peers._call
                patched.setattr(host_peers, "_call", lambda place, rank: call([*place[:2], "0061", place[3]], rank))
            else:
                patched.delattr(os, "memfd_create")
        try:
            weights = over_memory(replicated_not, transport)
        except UserError as error:
            return str(error)
        return weights, [each for each in told if "share" in each]
    finally:
        patched.undo()
        logger.removeHandler(handler)


def replicated_not(transport: str):
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    zero = zeroshard.shard(model, optimizer, stage=1, comm=Comm(transport=transport))
    test_lost_ranks.step(model, optimizer, zero.rank)
    assert zero.ledger().traffic["reduce"].sent > 0
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(101)
@pytest.mark.parametrize("why", WHY)
def test_who_cannot_share_memory_sends_messages_or_says_so(ranks, tmp_path, why):
    """All ranks alike: by themselves they fall back, with one line in the log; asked for, it is an error on each."""
    (first, lines), (second, none) = ranks.run(2, apart, why, "auto", str(tmp_path))
    assert reference.first_difference(first, second) == "" and none == []
    assert len(lines) == 1 and lines[0].startswith("ranks send messages and share no memory: ") and WHY[why] in lines[0]
    for message in ranks.run(2, apart, why, "shared", str(tmp_path)):
        assert "the ranks cannot share memory" in message and WHY[why] in message
        assert 'Comm(transport="gloo")' in message.split("instead:")[1]


def differ():
    with pytest.raises(PeerError) as caught:
        model = nn.Linear(4, 4)
        transport = ("gloo", "shared")[rank_processes.rank()]
        zeroshard.shard(model, torch.optim.SGD(model.parameters()), comm=Comm(transport=transport))
    return str(caught.value)


def test_ranks_that_ask_for_different_transports_are_told(ranks):
    for message in ranks.run(2, differ):
        assert "different meshes or transports" in message and "rank 1 has replicas=1 and transport='shared'" in message


def test_a_stranger_is_not_let_in():
    """Any program of the host can find the socket: who does not know the token is not connected."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind("")
    server.listen(4)
    place = ["", os.geteuid(), server.getsockname().hex(), "token"]
    stranger = host_peers._call([*place[:3], "wrong"], 1)
    assert host_peers._accept(server, "token")[0] == -1
    assert stranger.recv(1) == b""
    friend = host_peers._call(place, 1)
    rank, connection = host_peers._accept(server, "token")
    assert rank == 1
    for each in (stranger, friend, connection, server):
        each.close()


# --- notices ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    """Two hosts' ends in this process, with a stream of each."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hosts = [
        shared_memory.Host(rank, host_peers.Neighbours({1 - rank: end}), 5.0) for rank, end in enumerate((one, other))
    ]
    yield [shared_memory.SharedStream(host, (0, 1)) for host in hosts]
    one.close()
    other.close()


def posted(stream, value: float):
    host = stream.host
    tensor = host.take(8, torch.float32).fill_(value)
    flight = stream.launch(("lend", 1, 0, "", 32), shared_memory.Flight, stream, tensor, None)
    host.free(tensor)
    return flight


def test_memory_is_used_again_when_it_was_read(pair):
    first, second = pair
    flights = [posted(first, 1.0), posted(second, 2.0)]
    assert [flight.wait() for flight in flights] == [True, True]
    assert flights[1].pieces(torch.float32)[0].tolist() == [1.0] * 8
    unread = posted(first, 3.0)  # its peer still reads the first
    assert first.host._made == 2 and flights[1].pieces(torch.float32)[0].tolist() == [1.0] * 8
    flights[1].read()
    second.host.neighbours.listen()
    first.host.neighbours.listen()
    posted(first, 4.0)
    assert first.host._made == 2 and not unread.finished


def test_notices_that_come_twice_do_no_harm(pair):
    first, second = pair
    flight, other = posted(first, 1.0), posted(second, 2.0)
    host = second.host
    host.neighbours.listen()
    again = [Notice(POSTED, 0, host.posted((0, 1))[0].what, 1, 1, 32), Notice(READ, 0, 0, 1), Notice(READ, 0, 0, 1)]
    for notice in again:
        host._hear(0, notice, -1)
    other.wait()
    other.read()
    for notice in again:
        host._hear(0, notice, -1)
    assert host.posted((0, 1)) == {} and other.finished
    assert flight.wait()


def test_what_is_not_the_same_collective_is_an_error(pair):
    first, second = pair
    flight = posted(first, 1.0)
    tensor = second.host.take(8, torch.float32)
    second.launch(("lend", 1, 7, "", 32), shared_memory.Flight, second, tensor, None)
    with pytest.raises(RuntimeError, match="rank 1 shares something else"):
        flight.wait()


def test_a_system_without_room_says_so_when_memory_is_made(pair):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(MemoryError, match="the system has no 4,194,304 bytes for memory that ranks share"):
            pair[0].host.take(1 << 20, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


# --- faults -------------------------------------------------------------------------------------------------------------


def survives(where: str, stage: int, folder: str):
    """As rank 1 is killed: what this process has open of memory without a name, once it has heard of that."""
    try:
        over_memory(test_lost_ranks.loses_a_rank, where, stage, signal.SIGKILL, folder)
    except PeerError as error:
        descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        opened = [os.readlink(path) for path in descriptors if os.path.islink(path)]
        error.args = (f"{error}\nopen: {[path for path in opened if 'memfd' in path]}",)
        raise


@pytest.mark.row(101)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward", "reduce", "step"])
def test_a_killed_rank_is_named_and_leaves_nothing(ranks, tmp_path, where, stage):
    """kill -9 in the middle of a step: at once by name; the memory had none, and no descriptor of it stays."""
    before = named_memory()
    outcomes = ranks.run(2, survives, where, stage, str(tmp_path), **test_lost_ranks.PATIENT)
    assert outcomes[-1].type == "Died" and "SIGKILL" in outcomes[-1].message
    test_lost_ranks.check_named(outcomes, where, "is gone: its process has ended")
    assert outcomes[0].message.endswith("open: []")
    assert named_memory() <= before
    (after,) = ranks.run(1, test_lost_ranks.continued, stage, str(tmp_path / "ckpt"), group=False)
    assert reference.first_difference(after, test_lost_ranks.unbroken(test_lost_ranks.DYING)) == ""


def stops(stage: int, where: str, folder: str) -> None:
    over_memory(test_lost_ranks.stopped, stage, where, folder)


@pytest.mark.full
@pytest.mark.row(101)
@pytest.mark.parametrize(("stage", "where"), [(3, "forward"), pytest.param(1, "backward", marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named_in_time(ranks, tmp_path, stage, where):
    waker = threading.Thread(target=test_lost_ranks.wake, args=(tmp_path / "pid1", 7.0))
    waker.start()
    outcomes = ranks.run(2, stops, stage, where, str(tmp_path), group_timeout=3.0, timeout=60.0, expect_errors=True)
    waker.join()
    test_lost_ranks.check_named(outcomes, where, "is silent: it is stopped")
    assert outcomes[1].type == PeerError.__name__, outcomes[1]


@pytest.mark.row(101)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", ["waiting for reduce", "waiting for gather", "waiting for end of backward"])
@pytest.mark.parametrize("kind", ["Ctrl-C", "no memory"])
def test_an_interrupted_wait_is_tried_again(ranks, what, stage, kind):
    if what == "waiting for end of backward" and stage == 3:
        what = "waiting for choosing what to gather"
    first, second = ranks.run(
        2, over_memory, test_interrupts.interrupted_at, what, stage, kind, **test_interrupts.LIMITS
    )
    for weights, told in (first, second):
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(4)) == "", told
    assert [error.partition(":")[0] for error in second[1]] == [
        {"Ctrl-C": "KeyboardInterrupt", "no memory": "MemoryError"}[kind]
    ]


FILES = (host_peers.__file__, shared_memory.__file__)
MESSAGE = 2048  # bytes of the largest of the model below


def interrupted_at_lines(stage: int, every: int, steps: int):
    """Ctrl-C at one line of these two files in each step, a later one in the next, on the ranks in turn."""
    rank, (model, optimizer, zero) = rank_processes.rank(), test_lost_ranks.three(stage, optimizer=torch.optim.SGD)
    ledger, left, struck = zero._engine.ledger, 0, []

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and left and ledger.phase in ("forward", "backward", "reduce"):
            left -= 1
            if not left:
                struck.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return trace

    for index in range(steps):
        left = 1 + every * (index // 2) if index % 2 == rank else 0
        tries = 0
        while True:
            try:
                sys.settrace(trace)
                optimizer.zero_grad()
                model(test_lost_ranks.x(index)).square().sum().backward()
                sys.settrace(None)
                optimizer.step()
                break
            except (KeyboardInterrupt, PeerError, StateError):
                sys.settrace(None)
                left = 0
                tries += 1
                assert tries < 5
        left = 0
    held = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes and state in ("reduce", "lent")}
    with zero.gathered():
        return reference.weights(model), struck, held


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(101)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("every", "steps"), [(37, 16), pytest.param(5, 200, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_ctrl_c_between_any_two_lines_changes_no_bit(ranks, stage, every, steps):
    told = ranks.run(2, over_memory, interrupted_at_lines, stage, every, steps, timeout=1200.0, group_timeout=100.0)
    for weights, _, held in told:
        assert reference.first_difference(weights, test_lost_ranks.plain_steps(steps)) == ""
        # An interrupt right after memory was taken leaves nobody to give it back.
        assert held.get("reduce", 0) <= MESSAGE
    assert sum(len(struck) for _, struck, _ in told) > steps // 2


def drawn(*args):
    return over_memory(interrupts.several, *args)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(101)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "cases"), [(2, 6), pytest.param(3, 250, marks=pytest.mark.slow)])
def test_exceptions_at_drawn_waits_change_no_bit(tmp_path, world, cases, stage):
    outcomes = interrupts.run(world, stage, [*range(cases)], str(tmp_path), timeout=30.0 * cases, cases=drawn)
    for _, outcome, words in outcomes:
        assert outcome.startswith(("the same bits", "named")), words
    assert sum(outcome.startswith("the same bits") for _, outcome, _ in outcomes) > cases // 3
