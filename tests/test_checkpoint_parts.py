"""Checkpoints of many ranks: each says itself what is in its file, and whoever loads reads those parts that it wants."""

import json
import shutil
from pathlib import Path

import pytest

import ranks as rank_processes
from test_checkpoint import joined, loads, same, saves
from test_checkpoint_faults import after_steps
from test_checkpoint_forgeries import forge, manifest_of, refuses
from zeroshard.arithmetic.hashing import digest
from zeroshard.checkpoint import files, parts
from zeroshard.checkpoint.files import canonical
from zeroshard.checkpoint.manifest import Saved
from zeroshard.checkpoint.parts import part_of
from zeroshard.errors import CheckpointError


def in_parts(function, *args, inline=0):
    """Call it where manifests are short from so many ranks on."""
    parts.INLINE = inline
    try:
        return function(*args)
    finally:
        parts.INLINE = 64


def save_in_parts(path, world, case="mlp", stage=3, **options):
    return rank_processes.run(world, in_parts, saves, case, path, stage, options, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of six ranks, whose shards are of 8 elements or so."""
    path = tmp_path_factory.mktemp("parts") / "a"
    written = save_in_parts(path, 6, align=1)
    return path, written


@pytest.mark.row(45)
@pytest.mark.parametrize(
    "world", [1, 3, pytest.param(4, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("options", [{"align": 1}, {"bounds": "tensor"}], ids=["unit", "tensor"])
def test_other_ranks_load_it(checkpoint, world, options):
    path, written = checkpoint
    assert manifest_of(path)["version"] == 3 and not manifest_of(path)["fragments"]
    run = rank_processes.run if world > 1 else None
    read = run(world, loads, "mlp", path, 2, options) if run else [loads("mlp", path, 2, options)]
    same(written, read)


@pytest.mark.row(45)
@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["sgd", "groups"])
@pytest.mark.parametrize("case", ["gpt", "degenerate"])
def test_what_it_says_in_parts_is_what_one_manifest_says(ranks, tmp_path, case, optimizer):
    written = save_in_parts(tmp_path / "parts", 3, case, 2, optimizer=optimizer)
    same(written, ranks.run(3, saves, case, tmp_path / "one", 2, {"optimizer": optimizer}, 2))
    same(written, ranks.run(2, loads, case, tmp_path / "parts", 3, {"optimizer": optimizer}))
    with Saved.open(tmp_path / "parts") as inside, Saved.open(tmp_path / "one") as one:
        assert inside.cut == one.cut and inside.whole == one.whole and inside.values == one.values
        assert (inside.grains, inside.states, inside.dtypes) == (one.grains, one.states, one.dtypes)
        assert inside.rng(1).keys() == one.rng(1).keys()


def read_parts(saved):
    return [rank for rank, file in enumerate(saved.files) if "digests" in saved.files[file]]


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_rank_reads_the_parts_that_it_wants(checkpoint, ranks, far):
    """Those that hold it. far: also if it has read one elsewhere, for its random states."""
    path, _ = checkpoint
    with Saved.open(path) as whole:
        for rank in range(ranks):
            mine = [*range(6 * rank // ranks, 6 * (rank + 1) // ranks)]
            other = (mine[0] + 3) % 6
            with Saved.open(path, alone=False) as saved:
                if far:
                    saved.rng(other)
                for key, held in whole.cut.items():
                    for part in (part for part in held if parts.rank_of(part.file) in mine):
                        got = saved.interval(key, part.start, part.stop)
                        assert got.tolist() == whole.interval(key, part.start, part.stop).tolist()
                assert read_parts(saved) == sorted({*mine, other} if far else mine)


@pytest.fixture
def copy(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint[0], tmp_path / "a"))


def part_of_rank(path, rank):
    return json.loads((path / f"rank{rank:05d}.json").read_text())


def forge_part(path, rank, part):
    """Write a part, and a manifest that tells of it."""
    file = f"rank{rank:05d}.safetensors"
    text = part if isinstance(part, bytes) else canonical(part).encode()
    (path / part_of(file)).write_bytes(text)
    manifest = manifest_of(path)
    manifest["files"][file]["part"] = [len(text), digest(text)]
    forge(path, manifest)


def change(key, value):
    return lambda part: {**part, key: value(part[key])}


def first(at, value):
    def changed(fragments):
        head, *rest = fragments
        return [[*head[:at], value(head[at]), *head[at + 1 :]], *rest]

    return changed


LIES = {
    "a list": lambda part: [],
    "text": lambda part: b"{",
    "twice": lambda part: b'{"nbytes":1,"nbytes":1}',
    "no digests": change("digests", lambda told: []),
    "one digest more": change("digests", lambda told: told * 2),
    "another digest": change("digests", lambda told: ["0" * 32]),
    "a number for a digest": change("digests", lambda told: [1]),
    "another size": change("nbytes", lambda told: told + 1),
    "nothing": change("fragments", lambda told: []),
    "one less": change("fragments", lambda told: told[1:]),
    "one twice": change("fragments", lambda told: [told[0], *told]),
    "unknown parameter": change("fragments", first(0, lambda name: "other")),
    "unknown state": change("fragments", first(1, lambda state: "other")),
    "a number for a state": change("fragments", first(1, lambda state: 7)),
    "begins below 0": change("fragments", first(2, lambda start: -1)),
    "begins before": change("fragments", first(2, lambda start: start - 1)),
    "ends after": change("fragments", first(3, lambda stop: stop + 1)),
    "ends after all": change("fragments", first(3, lambda stop: 1 << 40)),
    "ends where it begins": change("fragments", lambda told: [[*told[0][:3], told[0][2], told[0][4]], *told[1:]]),
    "a fraction": change("fragments", first(3, float)),
    "true": change("fragments", first(2, bool)),
    "bytes of another": change("fragments", lambda told: [[*told[0][:4], told[1][4]], *told[1:]]),
    "outside the file": change("fragments", first(4, lambda offset: 1 << 40)),
    "six": change("fragments", lambda told: [[*each, 1] for each in told]),
    "no list": change("fragments", lambda told: {}),
}


@pytest.mark.row(52)
@pytest.mark.parametrize("lie", LIES)
def test_a_part_that_lies_is_refused(copy, lie):
    forge_part(copy, 2, LIES[lie](part_of_rank(copy, 2)))
    assert "damaged" in refuses(after_steps(0)[2], copy)


DAMAGE = {
    "not there": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "a byte": lambda file: file.write_bytes(file.read_bytes().replace(b"1", b"2", 1)),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b" "),
    "of another rank": lambda file: shutil.copy(file.with_name(file.name.replace("2", "3")), file),
    "a link": lambda file: (file.rename(file.with_suffix(".moved")), file.symlink_to(file.with_suffix(".moved"))),
}


@pytest.mark.row(52)
@pytest.mark.parametrize("which", ["json", "safetensors"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_by_whoever_needs_it(copy, damage, which):
    """And found by ranks that each check a share."""
    file = copy / f"rank00002.{which}"
    DAMAGE[damage](file)
    assert file.name in refuses(after_steps(0)[2], copy)
    told = []
    for rank in range(3):
        try:
            with Saved.open(copy, alone=False) as saved:
                saved.reader.check_share(rank, 3)
        except CheckpointError as error:
            told.append(f"{error}")
    assert told and all(file.name in each for each in told)


@pytest.mark.row(52)
@pytest.mark.parametrize("name", ["rank00006.json", "rank00006.safetensors"])
def test_a_file_of_another_checkpoint_is_refused(copy, name):
    shutil.copy(copy / name.replace("6", "5"), copy / name)
    assert "a file of another checkpoint" in refuses(after_steps(0)[2], copy)


def test_few_files_are_open_at_once(checkpoint, monkeypatch):
    path, written = checkpoint
    monkeypatch.setattr(files, "OPEN", 2)
    same(written, [loads("mlp", path, 3, {})])
    with Saved.open(path) as saved:
        saved.reader.check_share(0, 1)
        saved.reader.unchanged()
        assert len(saved.reader._open) <= 2


def test_it_is_replaced_and_removed_as_others(tmp_path):
    """Saving over it, and `keep`, remove all that a save wrote."""
    for name in ("a", "a", "b"):
        save_in_parts(tmp_path / name, 2)
    assert files.foreign(tmp_path / "a") == [] and sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]
    assert files.remove(tmp_path / "a") == [] and [each.name for each in tmp_path.iterdir()] == ["b"]


def test_ranks_beyond_the_limit_write_parts(tmp_path):
    rank_processes.run(2, in_parts, saves, "mlp", tmp_path / "a", 1, {}, 1)
    one = rank_processes.run(2, saves, "mlp", tmp_path / "b", 1, {}, 1)
    assert [manifest_of(tmp_path / name)["version"] for name in "ab"] == [3, 1]
    assert sorted(each.name for each in (tmp_path / "b").iterdir()) == [
        "manifest.json", "rank00000.safetensors", "rank00001.safetensors",
    ]  # fmt: skip
    with Saved.open(tmp_path / "a") as saved:
        assert {key for key, *_ in joined(one)} == {name for name, _ in saved.cut}
