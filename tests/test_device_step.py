"""Without `step="host"` states that rest beside the device are stepped on it, with the bits of states on the device.

On an emulated accelerator, whose AdamW rounds otherwise than the CPU's, as that of every GPU does.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import emulated
import ranks
import reference
import zeroshard
from emulated.device import device
from test_emulated_grid import (
    BACKWARDS,
    DTYPES,
    STAGES,
    STEPS,
    adam,
    assert_same,
    batch,
    build,
    history_and_weights,
    loss,
    norm,
)
from test_emulated_grid import TIERS as PLACES
from test_emulated_offload import BATCH, BATCH_ARRIVES, WIDTH, backward, moved, sharded
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.engine.build import host_steps
from zeroshard.errors import StateError, UserError

TIERS = {name: tiers for name, tiers in PLACES.items() if tiers}


def offload(tiers, folder):
    """As it is by default, beside an accelerator."""
    return Offload(**TIERS[tiers], path=folder if tiers == "nvme" else None)


def plain(dtype, world):
    """Losses, norms and weights of plain PyTorch, stepped on the device."""
    model = build()
    settings = {"world": world, "steps": STEPS, "backwards": BACKWARDS, "clip": 0.5, "norm": norm}
    if dtype is None:
        return reference.accumulate(model, adam(model.parameters()), batch, loss, **settings), reference.weights(model)
    history, _ = reference.accumulate_with_masters(model, adam, batch, loss, dtype=dtype, **settings)
    return history, reference.weights(model)


def made(stage, dtype, tiers, folder, **comm):
    model = build()
    optimizer = adam(model.parameters())
    zero = zeroshard.shard(
        model, optimizer, stage=stage, precision=Precision(param_dtype=dtype), layout=Layout(bucket_mib=0.0005),
        comm=Comm(**comm), offload=offload(tiers, folder),
    )  # fmt: skip
    return model, optimizer, zero


def equal(dtype, tiers, stages, comm, seeds, folder):
    from emulated.streams import Order

    device().rounds_otherwise.add("_fused_adamw_")  # a state that the host steps is found
    want = plain(DTYPES[dtype], ranks.world())
    for seed in seeds:
        for stage in stages:
            device().synchronize()
            device().machine.order = Order(1000 * seed + 100 * stage + ranks.rank())
            assert_same(history_and_weights(*made(stage, DTYPES[dtype], tiers, folder, **comm)), want, (stage, tiers))


FIRST = {("optimizer", "bf16"): (1,), ("host", "fp32"): (3,), ("nvme", "bf16"): (2,)}  # stages in `make test`
ALL = [
    pytest.param(t, d, STAGES, range(1, 4), id=f"{t}-{d}-all", marks=pytest.mark.full) for t in TIERS for d in DTYPES
]


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tiers", "dtype", "stages", "seeds"), [*((*k, v, (0,)) for k, v in FIRST.items()), *ALL])
def test_states_beside_the_device_are_stepped_on_it(tiers, dtype, stages, seeds, tmp_path):
    emulated.run(2, equal, dtype, tiers, stages, {}, seeds, str(tmp_path), elsewhere=True, timeout=550)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("comm", [{"replicas": 2}, {"replicas": 2, "optimizer": "all"}, {"hosts": 2}], ids=str)
@pytest.mark.parametrize("tiers", TIERS)
def test_replicas_have_the_same_bits(tiers, comm, tmp_path):
    emulated.run(4, equal, "bf16", tiers, (1, 3), comm, (1,), str(tmp_path), timeout=550)


# --- what it costs ----------------------------------------------------------------------------------------------------


def third_step(stage, where):
    """Elements of the own shards; what a third step moved over the bus, and for what the host waited."""
    model, optimizer, zero = sharded(stage, torch.bfloat16, Offload(**where, step="device"))
    for number in range(3):
        torch.emu.synchronize()
        with emulated.counted() as counts:
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
    own = sum(bucket.shard_numel(zero.rank) for bucket in zero.partition.buckets)
    return own, moved(counts), dict(counts.drains)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_step_moves_states_once_each_way_and_the_host_waits_for_none(stage):
    """Master and two moments, 12 bytes an element; sums that rest in host memory leave and come as well."""
    arrives = BATCH * WIDTH * 2
    for own, ways, waits in emulated.run(2, third_step, stage, {"optimizer": "cpu"}, seed=1):
        assert ways == {"to the host": 12 * own, "to the device": 12 * own + arrives}
        assert waits == {BATCH_ARRIVES: 1}
    for own, ways, _ in emulated.run(2, third_step, stage, TIERS["optimizer"], seed=1):
        assert ways == {"to the host": 16 * own, "to the device": 16 * own + arrives}


# --- what else is done with states ------------------------------------------------------------------------------------


def saved_and_loaded(tiers, folder):
    """Steps; a save; steps; a load and the same steps again, also by an engine whose states are on the device."""
    settings = {"steps": 2, "clip": 0.5}

    def steps(model, optimizer):
        reference.loop(model, optimizer, batch, loss, ranks.rank(), ranks.world(), BACKWARDS, **settings)

    def weights(model, zero):
        with zero.gathered():
            return {name: each.clone() for name, each in reference.weights(model).items()}

    model, optimizer, zero = made(3, torch.bfloat16, tiers, folder)
    steps(model, optimizer)
    zero.save(f"{folder}/saved")
    steps(model, optimizer)
    want = weights(model, zero)
    zero.load(f"{folder}/saved")
    steps(model, optimizer)
    reference.assert_same(weights(model, zero), want)
    other = build()
    plainly = adam(other.parameters())
    elsewhere = zeroshard.shard(other, plainly, stage=1, precision=Precision(param_dtype=torch.bfloat16))
    elsewhere.load(f"{folder}/saved")
    steps(other, plainly)
    reference.assert_same(weights(other, elsewhere), want)
    elsewhere.save(f"{folder}/again")
    zero.load(f"{folder}/again")
    reference.assert_same(weights(model, zero), want)


@pytest.mark.parametrize(
    "tiers", ["optimizer", pytest.param("host", marks=pytest.mark.full), pytest.param("nvme", marks=pytest.mark.full)]
)
def test_checkpoints_go_from_and_to_states_on_the_device(tiers, tmp_path):
    emulated.run(2, saved_and_loaded, tiers, str(tmp_path))


def edited(tiers, folder):
    """Weights that are edited inside gathered() train on as those of states on the device."""
    found = []
    for where in (offload(tiers, folder), None):
        model = build()
        zero = zeroshard.shard(
            model, optimizer := adam(model.parameters()), stage=2, precision=Precision(param_dtype=torch.bfloat16),
            offload=where,
        )  # fmt: skip
        for step in range(4):
            loss(model, batch(step, ranks.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                with zero.gathered(), torch.no_grad():
                    model.first.weight[:2] = 0.25
        with zero.gathered():
            found.append({name: each.clone() for name, each in reference.weights(model).items()})
    reference.assert_same(*found)


@pytest.mark.parametrize(
    "tiers", ["optimizer", pytest.param("host", marks=pytest.mark.full), pytest.param("nvme", marks=pytest.mark.full)]
)
def test_edits_of_weights_are_followed(tiers, tmp_path):
    emulated.run(2, edited, tiers, str(tmp_path))


def in_backward(where, folder):
    """Also of weights that a hook has edited in a forward."""
    found = []
    for offload in (Offload(**where, step="device", path=folder if "nvme" in where.values() else None), None):
        model = build()
        optimizer = adam(model.parameters())
        zero = zeroshard.shard(
            model, optimizer, stage=3, precision=Precision(param_dtype=torch.bfloat16), offload=offload,
            optimizer_in_backward=True,
        )  # fmt: skip

        @torch.no_grad()
        def edit(module, _):
            module.weight[0] = 0.5

        for step in range(3):
            handle = model.blocks[1].register_forward_pre_hook(edit) if step == 1 else None
            loss(model, batch(step, ranks.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            if handle:
                handle.remove()
        with zero.gathered():
            found.append({name: each.clone() for name, each in reference.weights(model).items()})
    reference.assert_same(*found)


@pytest.mark.parametrize(
    "where",
    [{"optimizer": "cpu"}, pytest.param({"optimizer": "nvme", "parameters": "cpu"}, marks=pytest.mark.full)],
    ids=str,
)
def test_backward_steps_them_too(where, tmp_path):
    emulated.run(2, in_backward, where, str(tmp_path))


def refusals():
    """What is said of an edit of an optimizer's part, and of halves of masters."""
    model, optimizer, _ = made(1, torch.bfloat16, "optimizer", "")
    loss(model, batch(0, ranks.rank())).backward()
    optimizer.step()
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].fill_(1)
    with pytest.raises(StateError) as edit:
        loss(model, batch(1, ranks.rank())).backward()
        optimizer.step()
    other = build()
    with pytest.raises(UserError) as halves:
        zeroshard.shard(
            other, adam(other.parameters()), stage=1, offload=Offload(optimizer="cpu", step="device"),
            precision=Precision(param_dtype=torch.bfloat16, split_master=True),
        )  # fmt: skip
    frozen = build()
    frozen.first.requires_grad_(requires_grad=False)
    optimizer = adam(frozen.parameters())
    zeroshard.shard(frozen, optimizer, stage=1, offload=Offload(optimizer="cpu", step="device"))
    frozen.first.requires_grad_()
    with pytest.raises(StateError) as trained:
        loss(frozen, batch(0, ranks.rank()))
    return str(edit.value), str(halves.value), str(trained.value)


def test_what_does_not_go_with_it_is_refused_by_name():
    for edit, halves, trained in emulated.run(2, refusals):
        assert "is to be trained that was frozen at shard(...)" in trained and "requires_grad_(True) before" in trained
        assert "was edited while it rests elsewhere" in edit and 'step="host"' in edit
        assert "split masters are joined with their parameters where they rest" in halves
    with pytest.raises(UserError, match="Offload.step names a processor"):
        Offload(optimizer="cpu", step="gpu")


class Heard(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def said(fused, threads, step, where):
    """What `shard` warns of."""
    torch.set_num_threads(threads)
    logging.getLogger("zeroshard").addHandler(heard := Heard())
    os.sched_getaffinity = lambda _: set(range(8))
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    zeroshard.shard(model, optimizer, offload=Offload(**where, step=step))
    return heard.said


def heard(cases):
    return [said(*case) for case in cases]


def test_slow_steps_on_the_host_are_warned_of():
    beside = {"optimizer": "cpu"}
    cases = [(None, 1, "host", beside), (True, 8, "host", beside), (None, 1, "device", beside), (None, 1, "host", {})]
    ((many_passes, idle_cores), *silent) = emulated.run(1, heard, cases)[0]
    assert many_passes == "AdamW steps in host memory, in a pass for each of its operations: AdamW(..., fused=True)"
    assert idle_cores.endswith("with 1 of this machine's 8 cores, and has 0 ranks beside it: OMP_NUM_THREADS=8")
    assert silent == [[], [], []]


def on_two_nodes(folder):
    """What `shard` warns of where a rank may use cores of two NUMA nodes, and where it is bound to one."""
    host_steps.NODES = Path(folder)
    found = []
    for cores in (set(range(8)), {4, 5, 6, 7}):
        os.sched_getaffinity = lambda _, cores=cores: cores
        logging.getLogger("zeroshard").addHandler(heard := Heard())
        torch.set_num_threads(len(cores))
        model = build()
        zeroshard.shard(model, adam(model.parameters()), offload=Offload(optimizer="cpu", step="host"))
        found.append(heard.said)
    return found


def test_a_rank_of_several_numa_nodes_is_warned(tmp_path):
    for node, cores in enumerate(("0-2,3", "4-7", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    ((several,), bound) = emulated.run(1, on_two_nodes, str(tmp_path))[0]
    assert "cores of 2 NUMA nodes" in several and several.endswith("torchrun --numa-binding=node")
    assert bound == []


def halves(step):
    """What `shard` says of split masters, whose optimizer rests beside the device, and which processor steps them."""
    logging.getLogger("zeroshard").addHandler(heard := Heard())
    os.sched_getaffinity = lambda _: {0}
    model = build()
    zero = zeroshard.shard(
        model, adam(model.parameters()), stage=1, offload=Offload(optimizer="cpu", step=step),
        precision=Precision(param_dtype=torch.bfloat16, split_master=True),
    )  # fmt: skip
    return heard.said, zero._engine.offload.step


def both(steps):
    return [halves(step) for step in steps]


def test_where_the_default_is_the_host_shard_says_so_once():
    """Split masters are stepped where they rest; who asks for that is told nothing."""
    first, other = emulated.run(2, both, (None, "host"))
    (((said,), step), asked), others = first, other
    assert said.startswith("split masters are stepped in host memory") and 'Offload(step="host")' in said
    assert step == "host" and asked == ([], "host") and others == [([], "host")] * 2


def led(where):
    """The most that the device's memory has in a steady step, with what is freed and not through yet, as the host leads."""
    model, optimizer, _ = sharded(1, torch.bfloat16, Offload(**where, step="device"), optimizer_in_backward=True)
    found = []
    for number in range(3):
        torch.emu.synchronize()
        device().settle()
        torch.emu.reset_peak_memory_stats()
        before = torch.emu.memory_allocated()
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        found.append((torch.emu.max_memory_allocated() - before, len(device().limbo)))
    return found


def test_a_host_that_leads_takes_no_more_memory():
    """Nothing is freed that a stream of copies still reads: an allocator could not give it to the next bucket."""
    for found in emulated.run(1, led, {"optimizer": "cpu"}):
        assert [waiting for _, waiting in found] == [0, 0, 0]


def on_the_cpu():
    found = []
    for step in ("host", "device"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zeroshard.shard(model, optimizer, offload=Offload(optimizer="cpu", step=step))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with zero.gathered():
            found.append({name: each.clone() for name, each in model.named_parameters()})
    reference.assert_same(*found)


def test_where_the_device_is_the_host_nothing_changes():
    ranks.run(2, on_the_cpu)
