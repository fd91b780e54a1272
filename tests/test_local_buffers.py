"""Buffers that are each rank's own, `Layout(buffers="local")`: kept by shard, saves and loads, and named where only one
of them can be."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import nn

import ranks as rank_processes
import zeroshard
from test_checkpoint_forgeries import forge, manifest_of
from test_checkpoint_parts import in_parts
from zeroshard import Layout
from zeroshard.checkpoint.manifest import Saved
from zeroshard.errors import CheckpointError, PeerError

LOCAL = Layout(buffers="local")


class Counting(nn.Module):
    """It counts what it has seen. Buffers: a count that differs between ranks, a table that does not, and one that is
    on odd ranks only, of another size on each."""

    def __init__(self, rank, odd=True):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.tensor(100 * rank))
        self.register_buffer("table", torch.arange(300.0))
        if odd and rank % 2:
            self.register_buffer("odd", torch.full((rank,), float(rank)))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return self.layer(x)

    def own(self):
        return {name: each.tolist() for name, each in self.named_buffers() if name != "table"}


def shard(stage, layout=LOCAL, **options):
    model = Counting(rank_processes.rank(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, layout=layout)


def want(rank, rows=0):
    return {"seen": 100 * rank + rows} | ({"odd": [float(rank)] * rank} if rank % 2 else {})


def sharded_and_trained(stage):
    rank = rank_processes.rank()
    model, optimizer, zero = shard(stage)
    first = model.own()
    for rows in (rank + 1, 2):
        model(torch.ones(rows, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.unshard()
    return first, model.own()


def test_each_ranks_stay_from_shard_to_unshard(ranks, stage):
    """Of other values, of other sizes, and where only some ranks have them."""
    assert ranks.run(3, sharded_and_trained, stage) == [(want(rank), want(rank, rank + 3)) for rank in range(3)]


def grown_and_loaded(folder):
    """A buffer that has grown since the model was made, by another number of elements on each rank."""
    rank = rank_processes.rank()
    model, _, zero = shard(3)
    model.seen.fill_(rank)
    model.register_buffer("log", torch.zeros(2))
    model.log = torch.arange(2.0 + rank)
    zero.save(folder)
    again, _, other = shard(3)
    again.register_buffer("log", torch.zeros(2))
    with pytest.raises(CheckpointError) as error:
        other.load(folder)
    loaded = other.load(folder, strict=False)
    skipped, left = loaded.buffers["log"] if loaded.buffers else None, again.log.tolist()
    again.log = torch.empty(2 + rank)
    whole = other.load(folder)
    return f"{error.value}", skipped, left, again.log.tolist(), {**whole.buffers}


@pytest.mark.row(45)
def test_a_buffer_that_has_grown_is_named_with_what_to_write(ranks, tmp_path):
    for rank, (says, skipped, left, loaded, none) in enumerate(ranks.run(2, grown_and_loaded, tmp_path / "a")):
        assert "buffer 'log' is (2,) torch.float32, saved was (3,) torch.float32" in says
        assert "torch.empty((3,), dtype=torch.float32)" in says
        if rank:
            assert [each.tolist() for each in skipped] == [[0, 1], [0, 1, 2]] and left == [0, 0]
        else:  # its own fits
            assert skipped is None and left == [0, 1]
        assert loaded == [*range(2 + rank)] and none == {}


def partly_on_meta():
    """Rank 1's values of `seen` and `table` are on meta: it gets rank 0's, and others keep theirs."""
    rank = rank_processes.rank()
    model = Counting(rank, odd=False)
    if rank == 1:
        model.to("meta")
    zeroshard.shard(model, None, stage=3, layout=LOCAL)
    return model.seen.item(), torch.equal(model.table, torch.arange(300.0))


def test_a_rank_without_values_gets_those_of_the_first_that_has_them(ranks):
    assert ranks.run(3, partly_on_meta) == [(0, True), (0, True), (200, True)]


def unlike_on_meta():
    model = Counting(rank_processes.rank())
    if rank_processes.rank() == 1:
        model.to("meta")
    with pytest.raises(PeerError, match=r"(?s)buffer 'odd'.*rank 0: None; rank 1: \(1,\).*before shard"):
        zeroshard.shard(model, None, layout=LOCAL)


def test_values_that_no_other_rank_has_are_asked_for(ranks):
    ranks.run(2, unlike_on_meta)


def saved_and_loaded(folder, stage, asynchronous):
    model, _, zero = shard(stage)
    model.seen += 7
    before = model.own()
    zero.save(folder, asynchronous=asynchronous).wait()
    for buffer in model.buffers():
        buffer.zero_()
    loaded = zero.load(folder)
    assert not loaded.skipped and not loaded.buffers
    return model.own() == before and torch.equal(model.table, torch.arange(300.0))


@pytest.mark.row(45)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_each_rank_gets_its_own_from_a_checkpoint(ranks, tmp_path, stage, asynchronous):
    assert ranks.run(3, saved_and_loaded, tmp_path / "a", stage, asynchronous) == [True] * 3


@pytest.mark.row(45)
def test_what_is_equal_is_stored_once(ranks, tmp_path):
    """In rank 0's file, and listed as in every checkpoint; without any that differ, it is of the version that it was
    before."""
    ranks.run(3, saved_and_loaded, tmp_path / "a", 3, False)
    manifest = manifest_of(tmp_path / "a")
    assert (manifest["version"], [*manifest["buffers"]], [*manifest["local_buffers"]]) == (
        4,
        ["table"],
        ["odd", "seen"],
    )
    held = [each and each["file"] for each in manifest["local_buffers"]["odd"]]
    assert held == [None, "rank00001.safetensors", None]
    table = 300 * 4
    sizes = [manifest["files"][f"rank{rank:05d}.safetensors"]["nbytes"] for rank in range(3)]
    assert sizes[0] > table > max(sizes[1:])
    ranks.run(3, saved_alike, tmp_path / "b")
    alike = manifest_of(tmp_path / "b")
    assert alike["version"] == 1 and "local_buffers" not in alike and sorted(alike["buffers"]) == ["seen", "table"]


def saved_alike(folder):
    model, _, zero = shard(3, odd=False)
    model.seen.fill_(5)
    zero.save(folder)


def other_ranks_load(folder, inline=64):
    """What a load says that leaves nothing out, and what one gives that does."""
    model, _, zero = in_parts(shard, 2, inline=inline)
    before = model.own()
    with pytest.raises(CheckpointError) as error:
        zero.load(folder)
    assert model.own() == before
    loaded = zero.load(folder, strict=False)
    assert model.own() == before and torch.equal(model.table, torch.arange(300.0))
    return f"{error.value}", [*loaded.skipped], {k: [x and x.tolist() for x in v] for k, v in loaded.buffers.items()}


EACH = {"odd": [None, [1.0], None], "seen": [7, 107, 207]}


@pytest.mark.row(45)
@pytest.mark.parametrize("inline", [64, 0], ids=["one manifest", "in parts"])
@pytest.mark.parametrize("world", [1, 2])
def test_other_ranks_are_told_and_given_all_of_them(tmp_path, world, inline):
    path = tmp_path / "a"
    assert rank_processes.run(3, in_parts, saved_and_loaded, path, 1, False, inline=inline) == [True] * 3
    assert ("cut" in manifest_of(path)) is (inline == 0) and manifest_of(path)["version"] == 4
    told = rank_processes.run(world, other_ranks_load, path) if world > 1 else [other_ranks_load(path)]
    for rank, (said, skipped, each) in enumerate(told):
        assert "buffer 'seen' is another one on each of the 3 ranks" in said and "strict=False" in said
        assert [line.split("'")[1] for line in skipped if "strict=False" in line] == ["odd", "seen"]
        assert each == EACH, rank


def exported(folder):
    model, _, zero = shard(3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        zero.export(folder)
    streamed = dict(zero.stream())
    own = {name: streamed[name].tolist() for name in model.own()} == model.own()
    return [f"{each.message}" for each in said if "differ between ranks" in f"{each.message}"], own


@pytest.mark.processes
def test_an_export_names_those_of_which_it_has_one(ranks, tmp_path, command):
    """Of a running model, and of a checkpoint; a stream gives each rank its own."""
    from safetensors.torch import load_file

    first, *others = ranks.run(3, exported, tmp_path / "run")
    assert len(first[0]) == 1 and "'odd', 'seen'" in first[0][0] and "all_reduce" in first[0][0]
    assert first[1] and others == [([], True)] * 2
    assert load_file(tmp_path / "run" / "model.safetensors")["seen"] == 0
    ranks.run(3, saved_and_loaded, tmp_path / "a", 3, False)
    with pytest.warns(UserWarning, match="rank 0's of buffers that differ between ranks: 'odd', 'seen'"):
        assert command("ckpt", "export", tmp_path / "a", tmp_path / "saved")[0] == 0
    assert load_file(tmp_path / "saved" / "model.safetensors")["seen"] == 7


def test_commands_show_each_ranks(ranks, tmp_path, command):
    ranks.run(3, saved_and_loaded, tmp_path / "a", 3, False)
    found = json.loads(command("ckpt", "inspect", tmp_path / "a", "--json")[1])["buffers"]
    assert [(each["name"], each.get("rank")) for each in found] == [
        ("table", None), ("odd", 1), ("seen", 0), ("seen", 1), ("seen", 2),
    ]  # fmt: skip
    assert "seen of rank 2" in command("ckpt", "inspect", tmp_path / "a")[1]
    ranks.run(3, saved_with, tmp_path / "b", 9)
    code, out, _ = command("ckpt", "diff", tmp_path / "a", tmp_path / "b", "--json")
    named = {each["name"] for each in json.loads(out)["differences"] if each["what"] == "buffer"}
    assert code == 1 and named == {"seen of rank 1"}


def saved_with(folder, more):
    model, _, zero = shard(3)
    model.seen += 7 + (more if rank_processes.rank() == 1 else 0)
    zero.save(folder)


@pytest.mark.row(52)
def test_forged_lists_of_them_are_refused(ranks, tmp_path):
    ranks.run(3, saved_and_loaded, tmp_path / "a", 3, False)
    good = manifest_of(tmp_path / "a")
    own = good["local_buffers"]
    forged = {
        "too few ranks": {"seen": own["seen"][:2]},
        "twice": {"table": own["seen"]},
        "one place for two": {"seen": [own["seen"][0]] * 3},
        "no list": {"seen": own["seen"][0]},
        "no entry": {"seen": [7, 7, 7]},
        "outside": {"seen": [{**own["seen"][0], "offset": 1 << 40}, *own["seen"][1:]]},
    }
    for name, local in forged.items():
        forge(tmp_path / "a", {**good, "local_buffers": {**own, **local}})
        with pytest.raises(CheckpointError), Saved.open(tmp_path / "a"):
            raise AssertionError(name)
    forge(tmp_path / "a", good)
    with Saved.open(tmp_path / "a") as saved:
        assert saved.buffers_for(1, 3).keys() == {"table", "odd", "seen"}
        assert saved.buffers_for(0, 3).keys() == {"table", "seen"}
        assert saved.buffers_for(0, 2).keys() == {"table"}
