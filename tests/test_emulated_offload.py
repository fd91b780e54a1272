"""Offload beside an emulated accelerator: what moves between host and device, on which streams, and who waits for it."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from torch import nn

import emulated
import ranks
import reference
import zeroshard
from emulated.device import device
from zeroshard import Layout, Offload, Precision
from zeroshard.engine.gradients.sums import Sums

WIDTH, BLOCKS, BATCH = 16, 4, 4


def sharded(stage, dtype, offload, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))).to("emu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    zero = zeroshard.shard(
        model,
        optimizer,
        stage=stage,
        precision=Precision(param_dtype=dtype),
        layout=Layout(bucket_mib=0.001),
        offload=offload,
        **settings,
    )
    return model, optimizer, zero


def backward(model, number):
    generator = torch.Generator().manual_seed(10 * number + ranks.rank())
    x = torch.randn(BATCH, WIDTH, generator=generator).to("emu", next(model.parameters()).dtype)
    model(x).float().square().sum().backward()


def sums(zero):
    found = []
    for accumulator in zero._engine.gradients.accumulators:
        with accumulator.sum.here(changed=False):
            found.append(accumulator.sum.own.clone())
    return found


def moved(counts):
    """Bytes over the bus, by their way."""
    found = {"to the host": 0, "to the device": 0}
    for (_, what), nbytes in counts.nbytes.items():
        if what in found:
            found[what] += nbytes
    return found


def summed(dtype, tier, path, on_the_host):
    """Sums after one backward and after three; elements of the own shards; what the third moved, and what waited."""
    if on_the_host:  # as sums were made before: of contributions that went there one by one
        Sums._staged = staticmethod(lambda accumulator: False)
    model, _, zero = sharded(2, dtype, Offload(gradients=tier, path=path))
    backward(model, 0)
    first = sums(zero)
    backward(model, 1)
    torch.emu.synchronize()
    with emulated.counted() as counts:
        backward(model, 2)
    own = sum(bucket.shard_numel(zero.rank) for bucket in zero.partition.buckets)
    return first + sums(zero), own, moved(counts), {what for _, what in counts.drains}


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)])
def test_the_sum_leaves_the_device_and_not_what_it_is_made_of(world, dtype, tier, tmp_path):
    """It comes back for the next backward that adds to it. On the host the same numbers were added in the same order."""
    path = str(tmp_path) if tier == "nvme" else None
    new = emulated.run(world, summed, dtype, tier, path, False, seed=1)
    old = emulated.run(world, summed, dtype, tier, path, True, seed=2)
    batch = BATCH * WIDTH * 4 if dtype is torch.float32 else BATCH * WIDTH * 2
    for (got, own, ways, waits), (want, _, ways_before, waits_before) in zip(new, old, strict=True):
        reference.assert_same(dict(enumerate(got)), dict(enumerate(want)))
        assert ways == {"to the host": 4 * own, "to the device": 4 * own + batch}
        assert ways_before == {"to the host": dtype.itemsize * own * world, "to the device": batch}
        assert "copy to the host" in waits_before
        assert waits - ({"event.synchronize"} if tier == "nvme" else set()) == {"copy to the device"}  # of the batch


def one_by_one():
    """How much of the program's stream comes after the point that the host waits for, bucket by bucket as sent."""
    model, _, zero = sharded(2, torch.bfloat16, Offload(gradients="cpu"))
    backward(model, 0)
    queue, after = device().machine.default, []
    for accumulator in zero._engine.gradients.accumulators[::-1]:
        after.append(queue.issued - accumulator.sum.rest._written._event.mark.clock[queue.number])
        with accumulator.sum.here(changed=False):
            assert accumulator.sum.own[: WIDTH // 2].isfinite().all()  # not of padding
    return after


def test_the_host_waits_for_one_sum_and_not_for_the_device():
    for after in emulated.run(2, one_by_one):
        assert len(after) == BLOCKS and after == sorted(set(after), reverse=True)


HOST = dict.fromkeys(("parameters", "gradients", "optimizer"), "cpu")
TIERS = {
    "gradients and optimizer": {"gradients": "cpu", "optimizer": "cpu"},
    "optimizer": {"optimizer": "cpu"},
    "parameters": {"parameters": "cpu"},
    "host": HOST,
    "nvme": dict.fromkeys(HOST, "nvme"),
}
BATCH_ARRIVES = ("test_emulated_offload.py:backward", "copy to the device")


def third_step(stage, dtype, tiers, clip, path):
    """Elements of the own shards; what a step moved, and for what the host waited."""
    model, optimizer, zero = sharded(stage, dtype, Offload(**tiers, step="host", path=path))
    for number in range(3):
        torch.emu.synchronize()
        with emulated.counted() as counts:
            backward(model, number)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    own = sum(bucket.shard_numel(zero.rank) for bucket in zero.partition.buckets)
    return own, len(zero.partition.buckets), moved(counts), Counter(counts.drains)


def steps(cases, path):
    return [third_step(*case, path if "nvme" in case[2].values() else None) for case in cases]


@pytest.mark.parametrize(
    "names", [("gradients and optimizer", "host"), pytest.param(("optimizer", "parameters"), marks=pytest.mark.full)]
)
def test_a_step_moves_so_many_bytes_and_waits_for_events_alone(names):
    """Of its shards a rank sends the sums, and a byte of each bucket that says if somebody edited its weights; or,
    where weights rest in host memory, the weights too. Updates come back
    in the masters' dtype, and all that is gathered. Where weights rest in host memory, the updates' cast goes there."""
    dtypes = (torch.bfloat16, torch.float32)
    cases = [(stage, dtype, TIERS[name], False) for name in names for stage, dtype in zip((1, 3), dtypes, strict=True)]
    names = [name for name in names for _ in dtypes]
    if "host" in names:
        cases.append((3, torch.bfloat16, TIERS["host"], False))
        names.append("host")
    every = emulated.run(2, steps, cases, None, seed=1)
    for found in every:
        for name, (stage, dtype, *_), (own, buckets, ways, waits) in zip(names, cases, found, strict=True):
            width, batch = dtype.itemsize, BATCH * WIDTH * dtype.itemsize
            sums, updates, weights = 4 * own, 4 * own, width * own
            # The first rank has elements of every bucket; of padding alone no average is needed.
            if name == "gradients and optimizer" or (name == "optimizer" and found is every[0]):
                assert ways == {"to the host": sums + buckets, "to the device": updates + batch}, name
            elif stage == 3 and name == "host":  # the last block is still there when backward begins
                sent, gathers = sums + weights, 2 * weights - weights // BLOCKS
                if dtype is torch.bfloat16:  # which has masters beside it
                    sent, gathers = sent + weights + buckets, gathers + updates
                assert ways == {"to the host": sent, "to the device": gathers + batch}, name
            assert waits.pop(BATCH_ARRIVES) == 1
            assert {what for _, what in waits} <= {"event.synchronize"}, (name, waits)
            assert waits.total() <= 3 * buckets, (name, waits)


def test_a_step_that_clips_asks_once_and_tells_once():
    """Each bucket's part of the norm is taken where it rests: one table of them goes to the device, and one factor
    comes back. States in files ask also whether weights were edited, as their files need not be written else."""
    cases = [(3, torch.bfloat16, TIERS[name], True) for name in ("gradients and optimizer", "host")]
    for found in emulated.run(2, steps, cases, None, seed=1):
        for _, _, _, waits in found:
            assert {site for site in waits if site[1] != "event.synchronize"} == {
                BATCH_ARRIVES,
                ("engine/gradients/norms.py:norms", "copy to the device"),
                ("device.py:ask", "copy to the host"),
            }
            assert all(number == 1 for site, number in waits.items() if site[1] != "event.synchronize")


def test_states_in_files_move_as_many_bytes(tmp_path):
    cases = [(3, torch.bfloat16, TIERS["host"], False), (3, torch.bfloat16, TIERS["nvme"], False)]
    for (_, buckets, host, _), (_, _, files, waits) in emulated.run(2, steps, cases, str(tmp_path), seed=1):
        assert host == files | {"to the host": files["to the host"] + buckets}  # which say if weights were edited
        assert waits["features/nvme.py:same_as", "copy to the host"] == BLOCKS


def ended(where, path):
    """Bytes of the device's memory that are freed and used still, after each of three models goes with copies under way."""
    found = []
    for stage, complete in ((1, True), (3, True), (3, False)):
        model, optimizer, zero = sharded(stage, torch.bfloat16, Offload(**where, path=path))
        for number in range(2):
            backward(model, number)
            if complete or not number:
                optimizer.step()
                optimizer.zero_grad()
        del model, optimizer, zero
        gc.collect()
        found.append(len(device().limbo))
        after = [torch.zeros(1 << 12, device="emu") for _ in range(8)]  # where copies that come late would write
        torch.emu.synchronize()
        assert not any(each.any() for each in after)
    return found


ENDED = {
    "on the device": {"optimizer": "cpu"},
    "on the host": {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu", "step": "host"},
    "activations": {"activations": "cpu", "gradients": "cpu"},
    "files": {"optimizer": "nvme", "gradients": "nvme"},
}


@pytest.mark.parametrize(
    "where", [*list(ENDED)[:2], *(pytest.param(each, marks=pytest.mark.full) for each in list(ENDED)[2:])]
)
def test_what_ends_with_copies_under_way_leaves_its_memory_to_them(where, tmp_path):
    path = str(tmp_path) if where == "files" else None
    assert emulated.run(2, ended, ENDED[where], path, seed=1) == [[0, 0, 0]] * 2
