"""States that rest in host memory and in files: the same bits, bounded memory, and every fault named."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import resource
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import ranks
import reference
import training
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.engine.weights import flat
from zeroshard.errors import CheckpointError, PeerError, StateError, TierError, UserError
from zeroshard.events import Ledger
from zeroshard.features import nvme, split_master
from zeroshard.features.nvme import STAGING_ROOMS, aligned
from zeroshard.tiers.tier import DeviceTier, HostTier

SOME = [
    {"optimizer": "cpu"},
    {"parameters": "cpu", "gradients": "cpu", "optimizer": "cpu"},
    {"optimizer": "nvme"},
    {"parameters": "nvme"},
    {"gradients": "nvme", "optimizer": "cpu"},
    {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme", "digests": False},
    {"parameters": 0.5, "gradients": {"nvme": 0.5}, "optimizer": {"nvme": 0.4, "cpu": 0.3}},
]
ON_DISK = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
GPT = {"hidden": 24, "layers": 3}


def offload(path, **fields):
    on_disk = "nvme" in str(fields)
    return Offload(**fields, path=path if on_disk else None)


def how(settings, *, dtype=torch.bfloat16, optimizer=None, overlap=True):
    return {
        "options": GPT,
        "optimizer": optimizer or partial(training.ADAMW, fused=True),
        "precision": Precision(param_dtype=None if dtype == torch.float32 else dtype),
        "offload": settings,
        "comm": Comm(overlap=overlap, timeout=60),
    }


def start(stage, settings, **options):
    return training.sharded(stage, **how(settings, **options))


def step(*args, clip=True, backwards=2):
    return training.step(*args, clip=0.5 if clip else None, backwards=backwards)


def in_tiers(stage, settings, **options):
    return training.trained(stage, steps=2, backwards=2, **how(settings, **options))


def same(got, want):
    reference.assert_same(got[1], want[1])
    assert got[0] == want[0]


# --- the same bits --------------------------------------------------------------------------------------------------


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.1, centered=True),
    "adadelta": partial(torch.optim.Adadelta, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "adamax": partial(torch.optim.Adamax, lr=1e-2),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-2),
    "groups": lambda ps: torch.optim.Adam([{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(ps)]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer_keeps_its_states_in_files(name, tmp_path):
    settings = offload(tmp_path, **ON_DISK)
    got = in_tiers(3, settings, optimizer=OPTIMIZERS[name])
    same(got, in_tiers(3, None, optimizer=OPTIMIZERS[name]))
    assert not set(got[2]["device"]) - {"norms"}


def scaled(stage, settings):
    """float16 with torch's own scaler, unscaled and clipped; the third step overflows."""
    model, optimizer, zero = start(stage, settings, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number in range(4):
        loss = models.loss("gpt", model, models.batch("gpt", number, zero.rank))
        scaler.scale(loss * (1e30 if number == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with zero.gathered():
        return [scaler.get_scale()], reference.weights(model)


def edited(stage, settings):
    """Weights edited inside gathered(), one of them alone; gradients under no_sync; a closure; a layer unfrozen."""
    model = models.build("gpt", **GPT)
    frozen = [param for name, param in model.named_parameters() if name.startswith("blocks.1.")]
    assert frozen
    for param in frozen:
        param.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(
        model, optimizer, stage=stage, precision=Precision(param_dtype=torch.bfloat16), offload=settings,
        layout=Layout(bucket_mib=0.005),
    )  # fmt: skip
    losses = []
    for number in range(4):
        with zero.no_sync():
            models.loss("gpt", model, models.batch("gpt", number, 2 * zero.rank)).backward()
        models.loss("gpt", model, models.batch("gpt", number, 2 * zero.rank + 1)).backward()
        if number == 1:
            with zero.gathered(), torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.5)
        losses.append(optimizer.step(lambda: 1.0) if number == 2 else optimizer.step())
        optimizer.zero_grad()
        if number == 2:
            for param in frozen:
                param.requires_grad_()
            with zero.gathered(frozen[0]), torch.no_grad():
                frozen[0].data = frozen[0].data + 1
    with zero.gathered():
        return losses, reference.weights(model)


def both_like_the_device(loop, folder, stages):
    for stage, fields in itertools.product(stages, [SOME[1], SOME[5]]):
        same(loop(stage, offload(folder, **fields)), loop(stage, None))


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("loop", [scaled, edited])
@pytest.mark.parametrize("world", [1, 2])
def test_scalers_edits_and_unfreezing_count_in_every_tier(loop, world, tmp_path):
    ranks.run(world, both_like_the_device, loop, str(tmp_path), (0, 3) if world == 1 else (1, 3), timeout=120)


class Twice(torch.optim.AdamW):
    """Steps by its class's own `step`, which torch's hooks see as well."""

    elementwise = True

    def step(self, closure=None):
        super().step(closure)
        super().step()


@pytest.mark.parametrize("fields", [{"optimizer": "cpu"}, ON_DISK], ids=["cpu", "nvme"])
def test_an_optimizer_whose_step_calls_its_classs_own(fields, tmp_path):
    make = partial(Twice, lr=1e-2, fused=True)
    same(in_tiers(3, offload(tmp_path, **fields), optimizer=make), in_tiers(3, None, optimizer=make))


class Failing(torch.optim.AdamW):
    """Its own arithmetic raises once, on every rank alike, before it has changed anything."""

    elementwise = True
    failing = False

    def step(self, closure=None):
        if self.failing:
            self.failing = False
            raise ArithmeticError("once")
        super().step(closure)


def repeated(stage, settings):
    """The second step fails and is repeated; its gradients are kept and added to."""
    model, optimizer, zero = start(stage, settings, optimizer=partial(Failing, lr=1e-2))
    for number in range(4):
        models.loss("gpt", model, models.batch("gpt", number, zero.rank)).backward()
        optimizer.failing = number in (1, 2)
        if optimizer.failing:
            with pytest.raises(ArithmeticError):
                optimizer.step()
        optimizer.step()
        if number == 2:
            optimizer.zero_grad()
    with zero.gathered():
        return [], reference.weights(model)


def repeated_like_the_device(folder, stages):
    for stage in stages:
        want = repeated(stage, None)
        for fields in ({"optimizer": "cpu"}, {"gradients": "nvme"}, ON_DISK):
            same(repeated(stage, offload(folder, **fields)), want)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("world", [1, 3])
def test_a_step_that_raised_can_be_repeated(world, tmp_path):
    ranks.run(world, repeated_like_the_device, str(tmp_path), (0, 1, 3), timeout=120)


@pytest.mark.parametrize("at", range(4))
def test_a_step_can_be_repeated_that_an_interrupt_ended_in_a_buffer_for_files(at, tmp_path, monkeypatch):
    """A buffer was kept that had memory and no view of it: its next use was a TypeError."""
    want = in_tiers(1, offload(tmp_path, **ON_DISK))
    model, optimizer, zero = start(1, offload(tmp_path, **ON_DISK))
    made, raw = itertools.count(), nvme.raw

    def interrupted(memory):
        if next(made) == at:
            raise KeyboardInterrupt
        return raw(memory)

    monkeypatch.setattr(nvme, "raw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, zero, 0)
    optimizer.zero_grad()
    losses = [step(model, optimizer, zero, number) for number in range(2)]
    with zero.gathered():
        same((losses, reference.weights(model)), want)
    held = {state: n for state, n in zero.ledger().tiers["host"].items() if n}
    assert held == want[2]["host"]


@pytest.mark.parametrize("at", range(2))
def test_an_interrupt_leaves_no_room_in_files_that_no_state_has(at, tmp_path, monkeypatch):
    """The first step reserves it: what was reserved before a state had it was counted for good, and reserved again."""
    model, optimizer, zero = start(1, offload(tmp_path, **ON_DISK))
    made, begin = itertools.count(), flat.Flat.__init__

    def interrupted(self, *args):
        begin(self, *args)
        if next(made) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(flat.Flat, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, zero, 0)
    held = zero.ledger().tiers["nvme"]
    first, second = held.get("exp_avg", 0), held.get("exp_avg_sq", 0)
    assert (first > 0, second > 0) == (at == 1, False)


def sums_that_no_file_takes(folder):
    """Bytes of sums on their way, before and after a step in which the last rank's disk takes no gradient."""
    model = models.build("gpt", **GPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    where = offload(Path(folder), gradients="nvme", optimizer="nvme")
    zero = zeroshard.shard(model, optimizer, stage=0, offload=where, comm=Comm(replicas=2, timeout=60))
    step(model, optimizer, zero, 0)
    before = zero.ledger().held["reduce"]

    def full(*_, **__):
        raise TierError("drawn")

    if zero.rank == 1:
        for bucket in zero._engine.buckets:
            bucket.gradients.rest.take = full
    with pytest.raises((TierError, PeerError), match="drawn"):
        step(model, optimizer, zero, 1)
    return before, zero.ledger().held["reduce"]


def test_no_sum_is_kept_that_its_file_does_not_take(tmp_path):
    """Replicas received averages beside the file, and one that could not be written was kept until the end."""
    assert ranks.run(2, sums_that_no_file_takes, str(tmp_path)) == [(0, 0)] * 2


def test_the_last_checkpoint_is_found_after_a_disk_failed_under_edited_weights(tmp_path, monkeypatch):
    """`latest` followed the edits into the master on that disk, and raised what told to load the last checkpoint."""
    model, optimizer, zero = start(1, offload(tmp_path, optimizer="nvme"))
    step(model, optimizer, zero, 0)
    zero.save(tmp_path / "saved" / "1")
    want = reference.weights(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)

    def full(*_):
        raise OSError(errno.EIO, "drawn")

    with monkeypatch.context() as patch:
        patch.setattr(nvme.os, "preadv", full)
        for _ in range(2):
            with pytest.raises(TierError, match="load the last checkpoint"):
                zero.save(tmp_path / "saved" / "2")
    found = zero.latest(tmp_path / "saved")
    assert found == tmp_path / "saved" / "1"
    zero.load(found)
    reference.assert_same(reference.weights(model), want)


def test_memory_that_could_not_be_had_to_join_a_master_is_not_counted(tmp_path, monkeypatch):
    model = torch.nn.Linear(8, 8)
    precision = Precision(param_dtype=torch.bfloat16, split_master=True)
    settings = offload(tmp_path, optimizer="nvme")
    zero = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=1, precision=precision, offload=settings)
    held = {state: n for state, n in zero.ledger().held.items() if n}

    def none(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(split_master, "blank", none)
        with pytest.raises(CheckpointError):
            zero.save(tmp_path / "saved")
    assert {state: n for state, n in zero.ledger().held.items() if n} == held


def test_whole_tensor_optimizers_step_bucket_by_bucket(tmp_path):
    def run(settings):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(5)])
        optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
        zero = zeroshard.shard(model, optimizer, offload=settings, layout=Layout(bounds="tensor", bucket_mib=0.001))
        for number in range(3):
            model(torch.full((2, 16), 0.1 * number + 0.1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            return [], reference.weights(model)

    same(run(offload(tmp_path, **ON_DISK)), run(None))


# --- what is held, and where ----------------------------------------------------------------------------------------


def test_each_state_is_held_in_its_tier(tmp_path):
    _, weights, held = in_tiers(3, offload(tmp_path, parameters="cpu", gradients="cpu", optimizer="nvme"))
    model, _, zero = start(3, None)
    numel = sum(bucket.numel for bucket in zero.partition.buckets)
    assert held["host"].pop("step") == 4 * len(list(model.parameters()))
    staging = held["host"].pop("staging")
    assert held["host"] == {"parameters": 2 * numel, "gradients": 4 * numel}
    assert held["nvme"] == {"master": 4 * numel, "exp_avg": 4 * numel, "exp_avg_sq": 4 * numel}
    assert set(held["device"]) == {"norms"}
    assert staging == 3 * STAGING_ROOMS * aligned(4 * max(bucket.numel for bucket in zero.partition.buckets))
    assert all(owner.tier == "nvme" for name in weights for owner in zero.owners(name)) is False


def test_memory_for_files_does_not_grow_with_the_model(tmp_path):
    def staging(layers):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(layers)])
        optimizer = torch.optim.AdamW(model.parameters())
        settings = offload(tmp_path, **ON_DISK)
        zero = zeroshard.shard(model, optimizer, offload=settings, layout=Layout(units=["*"]))
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        zero.save(tmp_path / "checkpoint")
        zero.load(tmp_path / "checkpoint")
        return zero.ledger().peak["staging"], len(zero.partition.buckets)

    (small, few), (large, many) = staging(6), staging(18)
    assert few < many and small == large == 4 * STAGING_ROOMS * aligned(4 * (64 * 64 + 128))


def test_a_step_moves_the_bytes_it_must(tmp_path):
    """24 bytes per element of bf16 parameters: master and two states in, master and two states out; and 2 written."""
    model, optimizer, zero = start(3, offload(tmp_path, parameters="nvme", optimizer="nvme"))
    numel = sum(bucket.numel for bucket in zero.partition.buckets)
    for number in range(2):
        step(model, optimizer, zero, number)

    def moved():
        return {verb: zero.ledger().traffic[verb].logical for verb in ("read", "write")}

    model.zero_grad()
    loss = models.loss("gpt", model, models.batch("gpt", 9, 0))
    loss.backward()
    before = moved()
    optimizer.step()
    after = moved()
    # A bucket that is still in one of its three buffers is not read again.
    assert 12 * numel * 0.8 < after["read"] - before["read"] <= 12 * numel
    assert after["write"] - before["write"] <= 14 * numel


@pytest.mark.parametrize("where", ["device", "cpu", "nvme"])
def test_each_sum_that_leaves_the_device_is_on_record(where, tmp_path):
    """Each backward copies every bucket's sum once, where sums do not rest on the device; what comes up sends nothing."""
    model, optimizer, zero = start(3, offload(tmp_path, parameters="cpu", gradients=where))
    step(model, optimizer, zero, 0)
    zero.record()
    step(model, optimizer, zero, 1, clip=False, backwards=3)
    copies = [event for event in zero.events() if event.verb == "copy"]
    sizes = {bucket.index: 4 * bucket.numel for bucket in zero.partition.buckets}
    sums = sorted((event.bucket, event.logical, event.sent) for event in copies if event.state == "gradients")
    each = [(bucket, nbytes, nbytes) for bucket, nbytes in sorted(sizes.items()) for _ in range(3)]
    assert sums == ([] if where == "device" else each)
    others = [event for event in copies if event.state != "gradients"]
    assert others and not any(event.sent for event in others)


def kept_gradients(stage, settings):
    """Steps whose gradients are not cleared: what a step averages is added to, at numbers of ranks that divide badly."""
    model, optimizer, zero = start(stage, settings)
    for number in range(3):
        models.loss("gpt", model, models.batch("gpt", number, zero.rank)).backward()
        optimizer.step()
    told = [param.grad.full_tensor().sum().item() for param in model.parameters()]
    with zero.gathered():
        return told, reference.weights(model)


def kept_in_files(folder, stages):
    for stage in stages:
        same(kept_gradients(stage, offload(folder, gradients="nvme")), kept_gradients(stage, None))


@pytest.mark.full
def test_a_step_leaves_gradients_in_files_as_they_are(tmp_path):
    """It averages them in memory, writes nothing, and what is added to them later gives the bits of the device."""
    ranks.run(3, kept_in_files, str(tmp_path), (1, 3), timeout=120)
    model, optimizer, zero = start(3, offload(tmp_path, gradients="nvme"))
    models.loss("gpt", model, models.batch("gpt", 0, 0)).backward()
    before = zero.ledger().traffic["write"].logical
    optimizer.step()
    assert zero.ledger().traffic["write"].logical == before


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_dcp_refuses_states_in_files(tmp_path):
    _, _, zero = start(3, offload(tmp_path, optimizer="nvme"))
    with pytest.raises(UserError, match="rest in files"):
        zero.state_dict()


# --- faults ---------------------------------------------------------------------------------------------------------


def files_of(zero):
    """They have no names: what leads to them is a descriptor."""
    return [Path(f"/proc/self/fd/{file._descriptor}") for file in zero._engine.tiers["nvme"]._files.values()]


def after_a_fault(folder, checkpoint, fields, fault, culprit):
    """Two good steps, a checkpoint, the fault on one rank: what every rank raises; then load, and go on."""
    model, optimizer, zero = start(3, offload(folder, **fields))
    for number in range(2):
        step(model, optimizer, zero, number, clip=False)
    zero.save(checkpoint)
    undo = fault(zero) if zero.rank == culprit else None
    told = []
    for number in range(2, 4):
        try:
            step(model, optimizer, zero, number, clip=False)
        except (TierError, PeerError, StateError) as error:
            told.append((type(error).__name__, str(error)))
            break
    if undo is not None:
        undo()
    optimizer.zero_grad()
    zero.load(checkpoint)
    return told, [step(model, optimizer, zero, number, clip=False) for number in range(2, 4)]


def undisturbed(stage):
    model, optimizer, zero = start(stage, None)
    return [step(model, optimizer, zero, number, clip=False) for number in range(4)][2:]


def truncate(zero):
    for path in files_of(zero):
        os.truncate(path, 0)


def failing(call, zero):
    """From now on a system call of `os` answers with an error."""
    real = getattr(os, call)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    setattr(os, call, fail)
    return partial(setattr, os, call, real)


def corrupt(zero):
    for path in files_of(zero):
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.write(os.urandom(size))


FAULTS = {
    "truncated": (truncate, {}, "the file ends at 0"),
    "read-error": (partial(failing, "preadv"), {}, "Input/output error"),
    "write-error": (partial(failing, "pwritev"), {}, "Input/output error"),
    "corrupted": (corrupt, {}, "has digest"),
}


def asking(zero, how):
    """Use all gradients, as clipping, an edit and a GradScaler do."""
    params = [*zero.model.parameters()]
    if how == "clip":
        zero.clip_grad_norm_(1e-3)
    elif how == "edit":
        for param in params:
            param.grad.mul_(2.0)
    else:
        grads, found = [param.grad for param in params], torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))


@pytest.mark.row(55)
@pytest.mark.parametrize("how", ["clip", "edit", "unscale"])
def test_gradients_that_cannot_be_brought_are_reported_at_the_step(monkeypatch, tmp_path, how):
    """Not where they are asked for: other ranks have no error there, and would wait for this one's answer."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))  # more buckets than a file has buffers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload = Offload(gradients="nvme", path=tmp_path)
    zero = zeroshard.shard(model, optimizer, stage=2, layout=Layout(units=["*"]), offload=offload)
    model(torch.ones(2, 64)).sum().backward()

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        asking(zero, how)
        with pytest.raises(TierError, match="Input/output error"):
            optimizer.step()


def test_what_could_not_be_had_is_not_counted(monkeypatch, tmp_path):
    """Of memory, and of a file: a state that an exception kept from being there is in no sum."""
    ledger, device = Ledger(), torch.device("cpu")
    for tier, wants in ((DeviceTier(device, ledger), "reserve"), (HostTier(device, ledger), "rest")):
        with pytest.raises((MemoryError, RuntimeError)):
            getattr(tier, wants)(*["state", 0][: 1 + (wants == "rest")], 1 << 55, torch.float32)
    files = nvme.NvmeTier(Offload(optimizer="nvme", path=tmp_path), 0, device, ledger, {"optimizer": 64}, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierError):
        files.rest("exp_avg", 0, 16, torch.float32)
    assert not any(ledger.held.values())


@pytest.mark.row(55)
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("at", ["before it is sent", "once a block is sent", "before it is waited for"])
def test_a_transfer_that_an_interrupt_ends_is_made_once_more(monkeypatch, tmp_path, verb, at):
    """Bytes counted as written that never were, and a buffer as read that was not: other bits, as drawn schedules showed."""
    monkeypatch.setattr(nvme, "BLOCK", 4096)
    ledger, device = Ledger(), torch.device("cpu")
    files = nvme.NvmeTier(Offload(optimizer="nvme", path=tmp_path), 0, device, ledger, {"optimizer": 4 * 4096}, 0)
    rests = [files.rest("exp_avg", number, 4096, torch.float32) for number in range(STAGING_ROOMS + 1)]
    want = [torch.full((4096,), 1.0 + number) for number in range(len(rests))]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    def write(number):
        with rests[number].here(fresh=True) as tensor:
            tensor.copy_(want[number])

    def go_through(numbers):
        for number in numbers:
            with rests[number].here(changed=False) as tensor:
                assert torch.equal(tensor, want[number])

    for number in range(len(rests)):
        write(number)
    go_through(range(len(rests)))  # the first has no buffer then
    if verb == "write":
        want[0] = want[0] + 100
        write(0)
    calls, submit = [], files.threads.submit

    def once_sent(*args):
        calls.append(submit(*args))
        if len(calls) > 1:
            raise KeyboardInterrupt
        return calls[-1]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if at == "before it is sent":
            patch.setattr(ledger, "move", interrupted)
        elif at == "once a block is sent":
            patch.setattr(files.threads, "submit", once_sent)
        else:
            patch.setattr(Future, "exception", interrupted)
        if verb == "write":
            rests[0].behind()
            rests[0].file.wait(rests[0].room)
        else:
            with rests[0].here(changed=False):
                pass
    assert all(each.done() for each in calls)
    go_through(range(len(rests)) if verb == "read" else [*range(1, len(rests)), 0])  # in the buffer, and from the file


@pytest.mark.processes
@pytest.mark.row(55)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "fields", [pytest.param({"optimizer": "nvme"}, marks=pytest.mark.slow), ON_DISK], ids=["optimizer", "all"]
)
def test_a_damaged_file_is_named_on_every_rank_and_nothing_stale_is_used(name, world, fields, tmp_path):
    fault, more, says = FAULTS[name]
    culprit = world - 1
    settings = {**fields, **more}
    ended = ranks.run(world, after_a_fault, str(tmp_path), tmp_path / "saved", settings, fault, culprit, timeout=90)
    went_on = ranks.run(world, undisturbed, 3)
    for rank, (told, resumed) in enumerate(ended):
        assert len(told) == 1, f"rank {rank} heard of nothing"
        kind, text = told[0]
        assert kind == ("TierError" if rank == culprit else "PeerError"), text
        assert says in text and f"rank {culprit}" in text and str(tmp_path) in text
        assert resumed == went_on[rank]


def whole_gradient(folder):
    """Rank 1's file of sums cannot be read when a whole gradient is asked for."""
    model, _, zero = start(3, offload(folder, gradients="nvme"))
    models.loss("gpt", model, models.batch("gpt", 0, zero.rank)).backward()
    if zero.rank == 1:
        corrupt(zero)
    try:
        for param in model.parameters():
            param.grad.full_tensor()
    except (TierError, PeerError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.row(55)
def test_a_whole_gradient_that_cannot_be_read_is_an_error_on_every_rank(tmp_path):
    """At once, and not what the next agreement finds: the gradient may never meet another one."""
    first, second = ranks.run(2, whole_gradient, str(tmp_path), group_timeout=20)
    assert first[0] == "PeerError" and second[0] == "TierError"
    assert "has digest" in first[1] and "has digest" in second[1] and "rank 1" in first[1]


def too_large(folder, checkpoint):
    """The optimizer's states, which are made in the first step, do not fit on rank 1's disk."""
    model, optimizer, zero = start(3, offload(folder, optimizer="nvme"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if zero.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        step(model, optimizer, zero, 0, clip=False)
    except (TierError, PeerError) as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.processes
@pytest.mark.row(55)
def test_no_space_left_names_the_bytes_on_every_rank(tmp_path):
    for text in ranks.run(2, too_large, str(tmp_path), None):
        assert "bytes more are needed" in text and "rank 1" in text


def no_room(folder):
    real = os.statvfs
    if ranks.rank() == 1:
        os.statvfs = lambda path: os.statvfs_result((4096, 4096, 9, 1, 1, 9, 9, 9, 0, 255))
    try:
        start(3, offload(folder, **ON_DISK))
    except (TierError, PeerError) as error:
        return str(error)
    finally:
        os.statvfs = real


@pytest.mark.processes
@pytest.mark.row(55)
def test_a_disk_too_small_is_refused_before_anything_is_sharded(tmp_path):
    for text in ranks.run(2, no_room, str(tmp_path)):
        assert "4,096 bytes are free" in text and "rank 1" in text
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot hold files"):
        start(3, offload(tmp_path / "file", optimizer="nvme"))


def test_without_direct_io_states_go_through_the_cache_and_it_is_said_once(tmp_path, monkeypatch, caplog):
    import fcntl

    real = fcntl.fcntl

    def refuse(descriptor, command, argument=0):
        if argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    got = in_tiers(3, offload(tmp_path, optimizer="nvme"))
    monkeypatch.undo()
    same(got, in_tiers(3, None))
    said = [record.getMessage() for record in caplog.records if "direct I/O" in record.getMessage()]
    assert len(said) == 1


RUN = """
    import sys, time, torch, zeroshard
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    zero = zeroshard.shard(model, optimizer, offload=zeroshard.Offload(optimizer="nvme", path=sys.argv[1]))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    print(flush=True)
    time.sleep(60)
"""


@pytest.mark.full
@pytest.mark.row(56, 57)
def test_files_have_no_names_so_whatever_ends_a_run_none_is_left(tmp_path):
    """Nobody else can open them, two runs cannot meet in one, and a long path is only the folder's."""
    folder = tmp_path / ("a" * 200)
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUN), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        run.stdout.readline()
        opened = [path for path in Path(f"/proc/{run.pid}/fd").iterdir() if str(folder) in os.readlink(path)]
        assert [(path.stat().st_nlink, stat.S_IMODE(path.stat().st_mode)) for path in opened] == [(0, 0o600)]
        run.kill()
        run.wait(timeout=30)
        assert list(folder.iterdir()) == []
    finally:
        run.kill()
        run.wait(timeout=30)
        run.stdout.close()


def many_steps(folder, steps):
    model, optimizer, zero = start(3, offload(folder, **ON_DISK))

    def resources():
        sizes = tuple(path.stat().st_size for path in files_of(zero))
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            sizes,
            zero.ledger().held["staging"],
        )

    for number in range(3):
        step(model, optimizer, zero, number)
    before = resources()
    for number in range(steps):
        step(model, optimizer, zero, number, backwards=1)
    return before, resources()


@pytest.mark.full
@pytest.mark.row(35)
@pytest.mark.parametrize("steps", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_steps_grow_neither_files_nor_descriptors_nor_threads(steps, tmp_path):
    ((before, after),) = ranks.run(1, many_steps, str(tmp_path), steps, timeout=900)
    assert after[2:] == before[2:]
    assert after[0] <= before[0] and after[1] <= before[1]  # fewer where what an earlier test left has ended


LIMITED = """
    import json, resource, sys, torch, zeroshard
    from zeroshard import Layout, Offload, Precision

    layers, mib, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

    def trained(offload, layers):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        zero = zeroshard.shard(
            model, optimizer, precision=Precision(param_dtype=torch.bfloat16), offload=offload,
            layout=Layout(units=["*"]), device="cpu",
        )
        told = []
        for step in range(3):
            loss = model(torch.full((4, 512), 0.1 * step, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            told.append((loss.item(), norm.item()))
        return told

    everywhere = {state: "nvme" for state in ("parameters", "gradients", "optimizer")}
    trained(None, 1)  # what torch takes for itself is there
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (taken + (mib << 20),) * 2)
    try:
        print(json.dumps(trained(Offload(**everywhere, path=folder) if folder else None, layers)))
    except (MemoryError, RuntimeError) as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_trains_in_a_quarter_of_the_memory_of_its_states(tmp_path):
    """Under a limit that the kernel keeps (RLIMIT_DATA), with the bits of a run without it, which the limit refuses."""

    def run(limit, folder):
        words = [sys.executable, "-c", textwrap.dedent(LIMITED), "128", str(limit), str(folder)]
        # Of what is freed malloc keeps nothing here: the 256 MiB that it may keep are no part of a quarter.
        malloc = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "65536"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **malloc}
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment, check=True)
        return json.loads(done.stdout)

    needs = 18 * 128 * (512 * 512 + 512) >> 20  # MiB of states
    free = run(1 << 20, "")
    assert len(free) == 3 and free[0] != free[2]
    assert "memory" in run(needs // 4, "")
    assert run(needs // 4, tmp_path) == free


# --- what is refused ------------------------------------------------------------------------------------------------

REFUSED = {
    "no path": (lambda: Offload(optimizer="nvme"), "path"),
    "path for nothing": (lambda: Offload(optimizer="cpu", path="/scratch"), "path"),
    "digests for nothing": (lambda: Offload(digests=False), "digests"),
    "unknown tier": (lambda: Offload(optimizer="gpu"), "cpu"),
    "above one": (lambda: Offload(optimizer=1.5), "add up"),
    "below zero": (lambda: Offload(optimizer={"cpu": -0.5}), "add up"),
    "too much": (lambda: Offload(optimizer={"cpu": 0.6, "nvme": 0.6}, path="/scratch"), "add up"),
    "too little": (lambda: Offload(optimizer={"cpu": 0.5, "device": 0.2}), "add up"),
    "no number": (lambda: Offload(optimizer=float("nan")), "add up"),
    "yes": (lambda: Offload(gradients=True), "fractions"),
    "nothing": (lambda: Offload(gradients=None), "fractions"),
    "no folder": (lambda: Offload(optimizer="nvme", path=3), "folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_work_are_refused(name):
    make, says = REFUSED[name]
    with pytest.raises(UserError, match=says):
        make()


def test_an_optimizer_that_needs_all_parameters_at_once_is_refused():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(UserError, match="LBFGS"):
        zeroshard.shard(model, torch.optim.LBFGS(model.parameters()), stage=0, offload=Offload(optimizer="cpu"))


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_a_fraction_is_of_the_bytes(fraction):
    _, _, zero = start(3, Offload(parameters=fraction, optimizer="cpu"))  # else masters stand for what stays
    tiers = zero.ledger().tiers
    host, device = tiers.get("host", {}).get("parameters", 0), tiers["device"].get("parameters", 0)
    largest = 2 * max(bucket.numel for bucket in zero.partition.buckets)
    assert abs(host - fraction * (host + device)) <= largest


def test_the_end_of_a_tier_waits_for_no_thread():
    """A collection may end it under the lock that threads need to end: that was a hang."""
    threads = ThreadPoolExecutor(1)
    threads.submit(int).result()

    def collect():
        with getattr(threading, "_shutdown_locks_lock", contextlib.nullcontext()):
            nvme._end(os.getpid(), threads)

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(20)
    assert not collecting.is_alive()
