"""What is written where, and shown: never over what zeroshard did not write, or to what is no file of this machine."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ranks
import zeroshard
from test_inputs import small
from zeroshard.arithmetic.hashing import digest
from zeroshard.checkpoint.files import canonical
from zeroshard.checkpoint.staging import put
from zeroshard.cli.checkpoints import open_checkpoint
from zeroshard.cli.config import InputError
from zeroshard.cli.data import make_writable, read_corpus
from zeroshard.errors import CheckpointError, UserError
from zeroshard.integrations.export import Wanted, export_saved


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SMALL = ["--steps", "2", "--batch", "1"]


@pytest.mark.row(72)
@pytest.mark.parametrize(
    "mine", ["checkpoints/thesis.txt", "model.safetensors", "metrics.jsonl", "ledger.json", "explain.json", "run.json"]
)
def test_a_folder_that_never_was_a_run_is_left_as_it_is(tmp_path, mine):
    (tmp_path / mine).parent.mkdir(exist_ok=True)
    (tmp_path / mine).write_text("years")
    with pytest.raises(InputError, match=f"{mine.split('/')[0]}, which no run of zeroshard train wrote"):
        make_writable(str(tmp_path))
    assert tree(tmp_path) == {mine: b"years"}


@pytest.mark.full
@pytest.mark.row(72)
def test_an_earlier_run_is_moved_and_what_else_is_there_stays(tmp_path):
    """By a second run without --resume; one that goes on keeps its place, checkpoints and all."""
    out = tmp_path / "run"
    command = ["train", "--out", str(out), "--data", __file__, *SMALL]
    assert ranks.command(*command).returncode == 0
    (out / "notes.txt").write_text("years")
    (out / "checkpoints" / "thesis.txt").write_text("years")
    first = tree(out)
    again = ranks.command(*command)
    assert again.returncode == 0 and f"the earlier run in {out} is now in {out / 'earlier-1'}" in again.stdout
    assert tree(out / "earlier-1") == {name: content for name, content in first.items() if name != "notes.txt"}
    assert (out / "notes.txt").read_text() == "years"
    on = ranks.command("train", "--resume", str(out), "--steps", "3")
    assert on.returncode == 0 and len((out / "metrics.jsonl").read_text().splitlines()) == 3
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    assert not (out / "earlier-2").exists()


@pytest.mark.row(72)
def test_only_a_file_of_its_kind_is_replaced(tmp_path):
    """A page, a trace: an earlier one is, anything else and any link is not."""
    path = tmp_path / "file"
    for text in ("mine one", "mine two"):
        put(path, text, "mine")
        assert path.read_text() == text
    link, folder = tmp_path / "link", tmp_path / "folder"
    link.symlink_to(path)
    folder.mkdir()
    for place, ours in ((path, "other"), (link, "mine"), (folder, "mine")):
        with pytest.raises(UserError, match="would replace what zeroshard did not write"):
            put(place, "new", ours)
    path.write_text("years")
    for words in (["explain", "--out", str(path)], ["simulate", "zeroshard.cli.model:demo_job", "--trace", str(path)]):
        done = ranks.command(*words)
        assert done.returncode == 2 and "would replace what zeroshard did not write" in done.stderr
    _, _, zero = small()
    zero.record()
    for call in (zero.trace, zero.explain):
        with pytest.raises(UserError, match="would replace what zeroshard did not write"):
            call(path)
    assert path.read_text() == "years" and sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "link"]


@pytest.mark.row(74)
@pytest.mark.parametrize("address", ["s3://bucket/x", "hf://me/x", "gs:/x", "file:///x"])
def test_an_address_is_no_folder(tmp_path, monkeypatch, address):
    """It would become a folder called `s3:`."""
    monkeypatch.chdir(tmp_path)
    _, _, zero = small()
    zero.record()
    makes = {
        "save": zero.save, "load": zero.load, "latest": zero.latest, "export": zero.export, "trace": zero.trace,
        "explain": zero.explain, "as a Path": lambda path: zero.save(Path(path)),
        "load a model": lambda path: zeroshard.load(torch.nn.Linear(2, 2), path),
        "Offload": lambda path: zeroshard.Offload(optimizer="nvme", path=path), "--out": make_writable,
        "ckpt": open_checkpoint, "put": lambda path: put(path, "", ""),
        "ckpt export": lambda path: export_saved(SimpleNamespace(parameters={}, buffers={}, cut={}), path, Wanted(1, None, False)),
    }  # fmt: skip
    for what, make in makes.items():
        with pytest.raises(UserError, match=r"an address[^$]*FsspecWriter"):
            make(address)
            pytest.fail(what)
    assert list(tmp_path.iterdir()) == []
    names = [f"torch.distributed.checkpoint.{name}" for name in ("fsspec_filesystem", "_fsspec_filesystem")]
    found = next(name for name in names if importlib.util.find_spec(name))  # as the message says
    assert all(hasattr(importlib.import_module(found), name) for name in ("FsspecReader", "FsspecWriter"))


@pytest.mark.row(74)
def test_data_comes_from_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match=f"--data {path}: no regular file"):
            read_corpus([str(path)], context=4)


# ------------------------------------------------------------------------------------------- what a terminal is shown

EVIL = "\x1b]0;owned\x07\x1b[2J\nlayer \x9b[red]\ud800[/red]\u202egpj"
SHOWN = r"\x1b]0;owned\x07\x1b[2J"


class Evil(torch.nn.Module):
    """Every name that its checkpoint holds would steer a terminal."""

    def __init__(self):
        super().__init__()
        self.register_parameter(EVIL, torch.nn.Parameter(torch.ones(3)))
        self.register_buffer(EVIL + "buffer", torch.ones(2))

    def forward(self, x):
        return getattr(self, EVIL) * x


def save_evil(folder, value):
    model = Evil()
    optimizer = torch.optim.SGD(model.parameters(), lr=value)
    zero = zeroshard.shard(model, optimizer, stage=1)
    optimizer.param_groups[0][EVIL] = value
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {EVIL: torch.full((3,), value)}
    zero.save(folder, extra={EVIL: EVIL, "more": {EVIL: [value]}})
    told = json.loads((folder / "manifest.json").read_text())["manifest"]
    told["optimizers"][0]["class"], told["torch"], told["python"] = EVIL, EVIL, EVIL
    text = canonical(told)
    (folder / "manifest.json").write_text(f'{{"digest":"{digest(text)}","manifest":{text}}}')
    return zero


def steers(text):
    return sorted({character for character in text if not (character.isprintable() or character == "\n")})


def command(*words):
    """A process of its own: it reads the environment as it starts."""
    return subprocess.run(
        [sys.executable, "-m", "zeroshard", *words], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.full
@pytest.mark.row(75)
def test_names_from_files_are_escaped_and_any_terminal_can_show_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    folder = tmp_path / "run\x1b[31m"
    for number, name in enumerate(("one", "two")):
        save_evil(folder / name, float(number + 1))
    one, two = str(folder / "one"), str(folder / "two")
    for words in (["inspect", one], ["inspect", str(folder)], ["verify", one], ["diff", one, two]):
        done = ranks.command("ckpt", *words)
        assert done.returncode == (words[0] == "diff"), done.stderr
        assert steers(done.stdout + done.stderr) == [] and "Traceback" not in done.stderr
        assert SHOWN in done.stdout or words != ["inspect", one]
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    for words in (["inspect", one], ["diff", one, two]):
        done = command("ckpt", *words)
        assert done.returncode == (words[0] == "diff") and (done.stdout + done.stderr).isascii(), done.stderr
    (folder / "one" / "rank00000.safetensors").write_bytes(b"")
    for words in (["verify", one], ["export", one, str(tmp_path / "out")], ["inspect", str(folder) + "x"]):
        done = ranks.command("ckpt", *words)
        assert done.returncode in (1, 2) and steers(done.stdout + done.stderr) == []


@pytest.mark.row(75)
def test_an_error_shows_no_character_that_steers_a_terminal():
    with pytest.raises(CheckpointError) as error:
        raise CheckpointError("what", where=EVIL, got=[EVIL], instead=EVIL)
    assert steers(f"{error.value}") == [] and SHOWN in f"{error.value}"


@pytest.mark.full
@pytest.mark.row(75)
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--params", "1e9"],
        ["plan", "--params", "7B", "--ranks", "64", "--machine", "dgx-2"],
        ["train", "--help"],
    ],
    ids=str,
)
def test_every_command_can_be_shown_in_ascii(monkeypatch, words):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = command(*words)
    assert done.returncode == 0 and done.stdout.isascii() and "Error" not in done.stderr, done.stderr


@pytest.mark.row(72)
@pytest.mark.parametrize("name", ["manifest.json", "rank00000.safetensors"])
def test_a_folder_with_a_manifest_of_the_users_is_not_replaced(tmp_path, name):
    """A file of a checkpoint's name makes no checkpoint."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / name).write_text('{"name": "my site"}')
    _, _, zero = small()
    with pytest.raises(CheckpointError, match="what zeroshard did not write"):
        zero.save(tmp_path / "site")
    assert os.listdir(tmp_path / "site") == [name]
    assert (tmp_path / "site" / name).read_text() == '{"name": "my site"}'
    zero.save(tmp_path / "own")
    zero.save(tmp_path / "own")  # its own is replaced


def saved_where_one_rank_cannot(folder):
    _, _, zero = small()
    with pytest.raises(zeroshard.Error) as caught:
        zero.save("s3://bucket/x" if zero.rank else folder / "ckpt")
    zero.save(folder / "ckpt")
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.row(74)
def test_a_path_that_only_one_rank_cannot_take_is_an_error_on_all(tmp_path):
    """The others must not wait for a rank that never comes to the first save's group."""
    for told in ranks.run(2, saved_where_one_rank_cannot, tmp_path):
        assert "FsspecWriter" in told
