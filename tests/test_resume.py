"""Runs that stop and go on: elsewhere, from the right checkpoint, or without stopping for the save at all."""

import json
import os
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import models
import reference
import zeroshard
from zeroshard import Layout
from zeroshard.arithmetic.hashing import digest
from zeroshard.checkpoint import content as checkpoint
from zeroshard.checkpoint import saving as saving_module
from zeroshard.checkpoint.files import canonical
from zeroshard.checkpoint.manifest import siblings
from zeroshard.errors import CheckpointError, UserError
from zeroshard.events import HOST

ROOT = Path(__file__).parents[1]
MICRO_BATCHES = 4
LAST = 40

# ------------------------------------------------------------------------------------------ other ranks, the same run


def part_of_a_run(case, start, stop, stage, bucket_mib, options, load=None, save=None):
    """Steps [start, stop) of a run of four micro-batches a step. (losses by (step, index), weights at the end)."""
    torch.manual_seed(7)
    model = models.build("gpt", tied=True, checkpoint=options.get("checkpoint"), dropout=options.get("dropout", 0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=bucket_mib))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=LAST)
    if load:
        torch.manual_seed(99)  # the run's seed comes back with the checkpoint
        extra = zero.load(load).extra
        scheduler.load_state_dict(extra["scheduler"])
        assert extra["position"] == start
    losses = {}
    for step in range(start, stop):
        for turn in range(MICRO_BATCHES // zero.world_size):
            index = turn * zero.world_size + zero.rank
            with zero.micro_batch_rng(step, index) if options.get("dropout") else nullcontext():
                loss = models.loss("gpt", model, models.batch("gpt", step, index)) / (MICRO_BATCHES // zero.world_size)
            loss.backward()
            losses[step, index] = loss.item() * (MICRO_BATCHES // zero.world_size)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if save:
        zero.save(save, extra={"scheduler": scheduler, "position": stop})
    with zero.gathered():
        return losses, reference.weights(model)


OPTIONS = {"plain": {}, "dropout": {"dropout": 0.1}, "dropout-recomputed": {"dropout": 0.1, "checkpoint": "reentrant"}}


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("plain", marks=pytest.mark.full),
        "dropout",
        pytest.param("dropout-recomputed", marks=pytest.mark.slow),
    ],
)
def test_forty_steps_with_stops_at_13_and_27(ranks, tmp_path, case):
    """Ranks, stage and bucket size change at each stop; every loss and every weight is the unstopped run's."""
    a, b, options = tmp_path / "a", tmp_path / "b", OPTIONS[case]
    straight = ranks.run(4, part_of_a_run, case, 0, LAST, 3, 24.0, options)
    parts = [
        ranks.run(4, part_of_a_run, case, 0, 13, 3, 24.0, options, None, a),
        ranks.run(2, part_of_a_run, case, 13, 27, 1, 0.003, options, a, b),
        ranks.run(1, part_of_a_run, case, 27, LAST, 2, 0.01, options, b),
    ]
    losses = {key: value for part in parts for outcome in part for key, value in outcome[0].items()}
    assert losses == {key: value for outcome in straight for key, value in outcome[0].items()}
    assert len(losses) == LAST * MICRO_BATCHES
    assert reference.first_difference(parts[-1][0][1], straight[0][1]) == ""


def accumulates(path, ask, no_sync, saved_again=None):
    """A step of four micro-batches over all ranks, saved or after a load; what a load warned of, and the weights."""
    torch.manual_seed(7)
    model = torch.nn.Linear(37, 41)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if ask == "load":
            zero.load(path)
    turns = MICRO_BATCHES // zero.world_size if zero.world_size != 3 else 2
    for turn in range(turns):
        torch.manual_seed(turn * zero.world_size + zero.rank)
        with zero.no_sync() if no_sync and turn < turns - 1 else nullcontext():
            (model(torch.randn(5, 37)).square().sum() / turns).backward()
    optimizer.step()
    optimizer.zero_grad()
    if saved_again or ask == "save":
        zero.save(saved_again or path)
    with zero.gathered():
        return [str(each.message) for each in told if "no_sync" in str(each.message)], reference.weights(model)


def test_a_checkpoint_of_no_sync_warns_on_another_number_of_ranks(ranks, tmp_path):
    """Once, on rank 0; also of one rank's. Not on as many ranks, not of what was trained without it since it was loaded,
    and not of a checkpoint that does not say it."""
    a, b, c = (tmp_path / name for name in "abc")
    ranks.run(2, accumulates, a, "save", True)
    assert [told for told, _ in ranks.run(2, accumulates, a, "load", False, b)] == [[], []]
    (one,), none, another = (told for told, _ in ranks.run(3, accumulates, a, "load", False))
    assert "each of 2 ranks" in one and "with 3 they are added in another order" in one and none == another == []
    assert [told for told, _ in ranks.run(3, accumulates, b, "load", True, c)] == [[]] * 3
    ((found, _),) = ranks.run(1, accumulates, c, "load", False)
    assert len(found) == 1 and "each of 3 ranks" in found[0]
    told = json.loads((a / "manifest.json").read_text())["manifest"]
    assert told.pop("no_sync") == 2
    (a / "manifest.json").write_text(f'{{"digest":"{digest(canonical(told))}","manifest":{canonical(told)}}}')
    assert [told for told, _ in ranks.run(1, accumulates, a, "load", False)] == [[]]


def test_no_sync_has_other_bits_at_another_number_of_ranks(ranks, tmp_path):
    """And without it there are the same: what the warning says."""
    ranks.run(1, accumulates, tmp_path / "a", "save", False)
    for no_sync, same in ((False, True), (True, False)):
        (_, one), (_, two) = (ranks.run(n, accumulates, tmp_path / "a", "load", no_sync)[0] for n in (1, 2))
        assert (reference.first_difference(one, two) == "") is same


def draws(zero, *place):
    import random

    import numpy

    with zero.micro_batch_rng(*place):
        return torch.rand(2).tolist(), random.random(), numpy.random.rand()


def seeded(path):
    torch.manual_seed(3 + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0))
    zero = zeroshard.shard(torch.nn.Linear(2, 2), None)
    outside = torch.get_rng_state()
    found = [draws(zero, step, index) for step in range(2) for index in range(3)]
    assert torch.equal(torch.get_rng_state(), outside)
    if path.exists():
        zero.load(path)
        return [draws(zero, step, index) for step in range(2) for index in range(3)]
    zero.save(path)
    return found


def test_random_numbers_by_micro_batch(ranks, tmp_path):
    """The same on every rank and at any number of ranks, different for each step and index; the seed is saved."""
    first, second = ranks.run(2, seeded, tmp_path / "a")
    assert first == second and len({str(each) for each in first}) == 6
    torch.manual_seed(1000)
    assert seeded(tmp_path / "a") == first
    zero = zeroshard.shard(torch.nn.Linear(2, 2), None)
    for wrong in ((-1, 0), (0, -1), (0.5, 0), (True, 0)):
        with pytest.raises(UserError, match="counts from 0"), zero.micro_batch_rng(*wrong):
            pass


# -------------------------------------------------------------------------------------------- saves behind the training


class Counter(torch.nn.Module):
    """Every element of every weight and of Adam's first state equals a function of the number of steps taken."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(37, 41, bias=False) for _ in range(3))
        for block in self.blocks:
            torch.nn.init.zeros_(block.weight)

    def forward(self):
        return sum(block(torch.ones(1, 37)).sum() for block in self.blocks)


def counted(stage=3):
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage)


def count_on(model, optimizer):
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def slowly(write_tensors):
    def write(path, tensors):
        time.sleep(0.4)
        return write_tensors(path, tensors)

    return write


def saves_behind(stage, folder):
    write_tensors = saving_module.write_tensors
    saving_module.write_tensors = slowly(write_tensors)
    try:
        model, optimizer, zero = counted(stage)
        savings, under_way = [], 0
        own = sum(piece.tensor.numel() * 4 for piece in checkpoint.pieces(checkpoint.model_state(zero._engine)))
        for number in range(9):
            count_on(model, optimizer)
            if number % 3 == 2:
                savings.append(zero.save(folder / f"{number}", extra={"n": number}, asynchronous=True))
                assert all(saving.done for saving in savings[:-1])  # at most one under way
                under_way += not savings[-1].done
                own = sum(piece.tensor.numel() * 4 for piece in checkpoint.pieces(checkpoint.model_state(zero._engine)))
                assert zero.ledger().tiers[HOST]["snapshot"] == own
        assert under_way == 3
        paths = [saving.wait() for saving in savings]
        assert zero.ledger().tiers[HOST]["snapshot"] == 0 and all(saving.done for saving in savings)
    finally:
        saving_module.write_tensors = write_tensors
    found = []
    for number, path in zip((2, 5, 8), paths, strict=True):
        assert zero.load(path).extra == {"n": number}
        values = {
            p.tensor.unique().item()
            for p in checkpoint.pieces(checkpoint.model_state(zero._engine))
            if p.state == "value"
        }
        found.append(values)
    return found


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.row(48)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_save_behind_the_training_is_of_one_moment(ranks, tmp_path, stage):
    """No tensor of a later step in it, however long the writing takes; its memory is counted, and given back."""
    wanted, weight, momentum = [], 0.0, 0.0
    for number in range(9):
        momentum = 0.5 * momentum + 1
        weight -= momentum
        wanted += [{weight}] if number % 3 == 2 else []
    assert ranks.run(2, saves_behind, stage, tmp_path) == [wanted, wanted]


def fails_behind(folder):
    write_tensors = saving_module.write_tensors
    model, optimizer, zero = counted()
    count_on(model, optimizer)
    zero.save(folder / "good")
    told = []
    for ask in ("wait", "save", "load"):
        if zero.rank == 1:
            saving_module.write_tensors = full
        try:
            saving = zero.save(folder / "bad", asynchronous=True)
            saving._thread.join()
        finally:
            saving_module.write_tensors = write_tensors
        count_on(model, optimizer)
        with pytest.raises(CheckpointError, match="rank 1: No space left on device") as error:
            {"wait": saving.wait, "save": lambda: zero.save(folder / "next"), "load": lambda: zero.load(folder)}[ask]()
        told.append(str(error.value))
        assert zero.ledger().tiers[HOST]["snapshot"] == 0
    zero.save(folder / "next")  # said once, and that is it
    return told, sorted(path.name for path in folder.iterdir())


def full(*_):
    raise OSError(28, "No space left on device")


def test_a_failure_behind_the_training_is_told_once_on_every_rank(ranks, tmp_path):
    first, second = ranks.run(2, fails_behind, tmp_path)
    assert first == second and first[1] == ["good", "next"]
    assert "rank00001.safetensors" in first[0][0] and "bytes to write" in first[0][0]


def through_another_handle(ask, folder):
    """A save behind the training, and at once something is asked of a model that is built anew."""
    write_tensors = saving_module.write_tensors
    model, optimizer, zero = counted()
    zero.save(folder / "c", extra={"n": 1})
    if ask == "lost" and zero.rank == 1:
        saving_module.write_tensors = full
    elif ask != "lost":
        saving_module.write_tensors = slowly(write_tensors)
    try:
        target = folder / ("c" if ask in ("over", "lost") else "d")
        saving = zero.save(target, extra={"n": 2}, asynchronous=True)
        del model, optimizer, zero
        if ask == "load_weights":
            with torch.device("meta"):
                other = Counter()
            zeroshard.load(other, folder / "d", init=lambda module: None)
            return saving.done
        _, _, other = counted(stage=1)
        if ask == "lost":
            with pytest.raises(CheckpointError, match="rank 1: No space left on device"):
                other.load(folder / "c")
            return other.load(folder / "c").extra  # said once
        if ask == "latest":
            return other.latest(folder).name
        if ask == "save":
            other.save(folder / "e")
            return saving.done
        return other.load(target).extra
    finally:
        saving_module.write_tensors = write_tensors


ASKED = {"over": {"n": 2}, "first": {"n": 2}, "lost": {"n": 1}, "latest": "d", "save": True, "load_weights": True}


@pytest.mark.row(48)
@pytest.mark.parametrize("ask", ASKED)
def test_a_save_under_way_is_waited_for_through_any_handle(ranks, tmp_path, ask):
    assert ranks.run(2, through_another_handle, ask, tmp_path) == [ASKED[ask]] * 2


def program(tmp_path, body):
    text = "import torch, zeroshard\nmodel = torch.nn.Linear(64, 64)\nzero = zeroshard.shard(model, None)\n"
    path = tmp_path / "program.py"
    path.write_text(text + textwrap.dedent(body))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, path], env=environment, cwd=tmp_path, capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.row(48)
def test_the_end_of_the_program_waits_for_a_save(tmp_path):
    body = """
    import time
    from zeroshard.checkpoint import saving
    write = saving.write_tensors
    saving.write_tensors = lambda *a: (time.sleep(1), write(*a))[1]
    zero.save("a", asynchronous=True)
    raise RuntimeError("the program fails meanwhile")
    """
    done = program(tmp_path, body)
    assert done.returncode == 1 and "fails meanwhile" in done.stderr
    _, zero = None, zeroshard.shard(torch.nn.Linear(64, 64), None)
    assert zero.load(tmp_path / "a").extra == {}


@pytest.mark.full
@pytest.mark.row(48)
def test_the_end_of_the_program_says_what_was_lost(tmp_path):
    body = """
    def full(*_):
        raise OSError(28, "No space left on device")
    zeroshard.checkpoint.saving.write_tensors = full
    zero.save("a", asynchronous=True)
    """
    done = program(tmp_path, body)
    assert "a checkpoint was lost" in done.stderr and "No space left on device" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program.py"]


# ---------------------------------------------------------------------------------------- the latest, and the last few


def finds(folder, keep):
    _, _, zero = counted()
    found = [zero.latest(folder)]
    for name in ("z", "b", "step-10", "step-9", "a"):  # the order they are saved in, whatever their names say
        zero.save(folder / name, keep=keep)
        found.append(zero.latest(folder))
    return [path and path.name for path in found], sorted(path.name for path in folder.iterdir())


def test_the_latest_is_the_last_saved_and_so_many_are_kept(ranks, tmp_path):
    everything = [None, "z", "b", "step-10", "step-9", "a"]
    assert ranks.run(2, finds, tmp_path / "all", None) == [(everything, ["a", "b", "step-10", "step-9", "z"])] * 2
    assert ranks.run(2, finds, tmp_path / "two", 2) == [(everything, ["a", "step-9"])] * 2
    assert finds(tmp_path / "one", 1) == (everything, ["a"])
    _, _, zero = counted()
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(UserError, match="keep= counts checkpoints"):
            zero.save(tmp_path / "x", keep=wrong)


@pytest.mark.row(73)
def test_the_latest_is_the_last_saved_whatever_the_clock_says(tmp_path, monkeypatch):
    """Set back by a year for each save; checkpoints without a number, as earlier versions wrote them, are older."""
    _, _, zero = counted()
    for name, saved in (("old-1", 5 << 60), ("old-2", 6 << 60)):
        monkeypatch.setattr("zeroshard.checkpoint.saving.time.time_ns", lambda saved=saved: saved)
        zero.save(tmp_path / name)
        told = json.loads((tmp_path / name / "manifest.json").read_text())["manifest"]
        del told["number"]
        (tmp_path / name / "manifest.json").write_text(
            f'{{"digest":"{digest(canonical(told))}","manifest":{canonical(told)}}}'
        )
    found = []
    for at, name in enumerate("cbad"):
        monkeypatch.setattr("zeroshard.checkpoint.saving.time.time_ns", lambda at=at: (40 - at) * 365 * 86400 * 10**9)
        zero.save(tmp_path / name)
        found.append(zero.latest(tmp_path).name)
    assert found == ["c", "b", "a", "d"]
    assert [path.name for path in siblings(tmp_path)] == ["d", "a", "b", "c", "old-2", "old-1"]
    numbers = {
        path.name: json.loads((path / "manifest.json").read_text())["manifest"].get("number")
        for path in tmp_path.iterdir()
    }
    assert numbers == {"old-1": None, "old-2": None, "c": 1, "b": 2, "a": 3, "d": 4}
    zero.save(tmp_path / "e", keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "e"]


def passes_over(folder):
    _, _, zero = counted()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = zero.latest(folder)
    return found and found.name, len([w for w in told if "passes over a damaged checkpoint" in str(w.message)])


@pytest.mark.row(49)
def test_what_is_not_whole_is_passed_over_and_said(ranks, tmp_path):
    """A flipped bit on one rank's file, a cut manifest, no manifest, a link out, a stray file, a killed save's folder."""
    _, _, zero = counted()
    outside = tmp_path / "outside"
    folder = tmp_path / "run"
    for name in ("whole", "bit", "manifest", "none", "../outside"):
        zero.save(folder / name)
    file = folder / "bit" / "rank00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    (folder / "manifest" / "manifest.json").write_text("{")
    (folder / "none" / "manifest.json").unlink()
    (folder / "link").symlink_to(outside)
    (folder / "latest").write_text("../../outside")
    (folder / ".x.saving-0").mkdir()
    assert ranks.run(2, passes_over, folder) == [("whole", 2), ("whole", 0)]
    assert zero.latest(tmp_path / "missing") is None and zero.latest(folder / "latest") is None


def predicted_and_copied(case, stage, dtype, bounds):
    from zeroshard import Precision
    from zeroshard.planner.built import holding

    model = models.build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    precision = Precision(param_dtype=dtype, cast_inputs=False) if dtype else None
    zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision, layout=Layout(bounds=bounds))
    models.loss(case, model, models.batch(case, 0, 0)).backward()
    optimizer.step()
    own = checkpoint.pieces(checkpoint.model_state(zero._engine))
    return holding(zero).snapshot(), sum(piece.tensor.numel() * piece.tensor.itemsize for piece in own)


@pytest.mark.parametrize(
    ("stage", "bounds"),
    [pytest.param(0, "unit", marks=pytest.mark.full), pytest.param(1, "tensor", marks=pytest.mark.full), (3, "model")],
)
def test_the_planner_states_a_snapshot_to_the_byte(ranks, stage, bounds):
    for case, dtype in (("gpt", torch.bfloat16), ("lora", None), ("mlp", None)):
        found = ranks.run(3, predicted_and_copied, case, stage, dtype, bounds)
        assert [predicted for predicted, _ in found] == [copied for _, copied in found] and sum(map(sum, found))
