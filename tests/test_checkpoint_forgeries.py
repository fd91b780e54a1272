"""What a checkpoint's files may say: whatever it is, it loads whole, or is refused and nothing has changed."""

import gc
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import models
import ranks as rank_processes
import zeroshard
from test_checkpoint import build, saves, step
from test_checkpoint_faults import after_steps, bits, forked, names
from zeroshard.arithmetic.hashing import digest
from zeroshard.checkpoint import files
from zeroshard.checkpoint.files import canonical
from zeroshard.checkpoint.manifest import Saved
from zeroshard.errors import CheckpointError, UserError

FIXTURES = Path(__file__).parent / "fixtures"


def manifest_of(path):
    return json.loads((path / "manifest.json").read_text())["manifest"]


def forge(path, content):
    """Write a manifest with the right digest: what anyone can who can write files."""
    text = content if isinstance(content, bytes) else canonical(content).encode()
    (path / "manifest.json").write_bytes(b'{"digest":"%s","manifest":%s}' % (digest(text).encode(), text))


def refuses(zero, path, match=None, **options):
    """The text of the refusal. Nothing has changed by it."""
    before = bits(zero)
    with pytest.raises((CheckpointError, UserError), match=match) as error:
        zero.load(path, **options)
    assert bits(zero) == before
    return f"{error.value}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of two ranks."""
    path = tmp_path_factory.mktemp("forgeries") / "a"
    rank_processes.run(2, saves, "mlp", path, 3, {}, 2)
    return path


@pytest.fixture
def copy(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint, tmp_path / "a"))


def zeros_in(path, nbytes):
    """A manifest and digests that are right for a file of so many bytes, of which the disk holds none."""
    manifest = manifest_of(path)
    facts = manifest["files"]["rank00001.safetensors"]
    blocks = nbytes // files.BLOCK
    facts |= {"nbytes": nbytes, "digests": facts["digests"] + [digest(bytes(files.BLOCK))] * (blocks - 1)}
    os.truncate(path / "rank00001.safetensors", nbytes)
    forge(path, manifest)


@pytest.mark.row(52)
def test_a_file_much_larger_than_its_tensors_is_refused_before_it_is_read(copy, monkeypatch):
    zeros_in(copy, 4 << 30)
    monkeypatch.setattr(files.Reader, "_check_block", lambda *_: pytest.fail("it was read"))
    _, _, zero = after_steps(1)
    assert "at most" in refuses(zero, copy, match=r"rank00001.safetensors with at most [0-9,]+ bytes, for its tensors")


def nested_index(folder):
    with torch.device("meta"):
        model = torch.nn.Linear(3, 3)
    if torch.distributed.get_rank() == 0:
        time.sleep(0.5)
    try:
        zeroshard.load(model, folder, stage=3)
    except CheckpointError as error:
        return f"{error}"


@pytest.mark.row(53)
@pytest.mark.parametrize(
    "content", ["[" * 100_000, "{", '{"weight_map": {"a": ["b"]}}', None], ids=["deep", "cut", "list", "pipe"]
)
def test_an_index_that_is_none_is_refused_on_every_rank(ranks, tmp_path, content):
    path = tmp_path / "model.safetensors.index.json"
    os.mkfifo(path) if content is None else path.write_text(content)
    for said in ranks.run(2, nested_index, tmp_path):
        assert "the model was not loaded" in said and "index" in said


# ------------------------------------------------------------------------------------------------------- damaged files


def flips(path, count):
    """Both ranks load after each flipped bit, wherever it is."""
    _, _, zero = after_steps(1)
    before, generator = bits(zero), random.Random(0)
    right = {name: (path / name).read_bytes() for name in names(path)}
    places = [(name, at) for name, content in right.items() for at in range(len(content))]
    for number in range(count):
        name, at = generator.choice(places)
        if zero.rank == 0:
            wrong = bytearray(right[name])
            wrong[at] ^= 1 << generator.randrange(8)
            (path / name).write_bytes(wrong)
        else:
            generator.randrange(8)
        torch.distributed.barrier()
        with pytest.raises(CheckpointError, match=name):
            zero.load(path)
        assert number % 50 or bits(zero) == before, (name, at)
        torch.distributed.barrier()
        if zero.rank == 0:
            (path / name).write_bytes(right[name])
    torch.distributed.barrier()
    assert bits(zero) == before
    zero.load(path)
    return bits(zero) != before


@pytest.mark.row(40)
def test_no_flipped_bit_loads(ranks, copy):
    assert ranks.run(2, flips, copy, 30) == [True, True]


@pytest.mark.row(40)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_none_of_2000_flipped_bits_loads(ranks, copy):
    """The error names the file."""
    assert ranks.run(2, flips, copy, 2000, timeout=500) == [True, True]


def exchanged(path, _):
    (path / "rank00000.safetensors").rename(path / "between")
    (path / "rank00001.safetensors").rename(path / "rank00000.safetensors")
    (path / "between").rename(path / "rank00001.safetensors")


ONE = "rank00001.safetensors"
DAMAGE = {  # name: (what it does to the folder, given another run's; what the error says)
    "empty": (lambda path, _: (path / ONE).write_bytes(b""), "0 bytes"),
    "truncated": (lambda path, _: os.truncate(path / ONE, (path / ONE).stat().st_size // 2), "bytes"),
    "extended": (lambda path, _: (path / ONE).write_bytes((path / ONE).read_bytes() + b"\0"), "bytes"),
    "missing": (lambda path, _: (path / ONE).unlink(), "No such file"),
    "exchanged": (exchanged, "rank0000"),
    "duplicated": (lambda path, _: shutil.copy(path / ONE, path / "rank00002.safetensors"), "of another checkpoint"),
    "overwritten": (lambda path, _: shutil.copy(path / "rank00000.safetensors", path / ONE), "rank00001"),
    "foreign": (lambda path, other: shutil.copy(other / ONE, path / ONE), "digest"),
    "foreign manifest": (lambda path, other: shutil.copy(other / "manifest.json", path), "digest"),
    "no manifest": (lambda path, _: (path / "manifest.json").unlink(), "no complete checkpoint"),
    "empty manifest": (lambda path, _: (path / "manifest.json").write_bytes(b""), "digest"),
    "link": (lambda path, other: ((path / ONE).unlink(), (path / ONE).symlink_to(other / ONE)), "levels of symbolic"),
    "pipe": (lambda path, _: ((path / ONE).unlink(), os.mkfifo(path / ONE)), "regular file"),
    "folder": (lambda path, _: ((path / ONE).unlink(), (path / ONE).mkdir()), "regular file"),
    "device": (lambda path, _: ((path / ONE).unlink(), os.symlink("/dev/zero", path / ONE)), "levels of symbolic"),
    "manifest is a pipe": (
        lambda path, _: ((path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")), "regular file",
    ),
}  # fmt: skip


def all_refused(folder, other):
    _, _, zero = after_steps(1)
    messages = {}
    for how, (_, message) in DAMAGE.items():
        messages[how] = refuses(zero, folder / how, message)
    step("mlp", zero.model, zero._engine.bindings[0].optimizer, 7, total=2)
    return messages


@pytest.mark.row(41, 43)
def test_damaged_files_are_refused_before_anything_changes(ranks, tmp_path, checkpoint):
    """Only rank 1's file is bad in most of them; rank 0 refuses too."""
    other = tmp_path / "other run"
    ranks.run(2, saves, "mlp", other, 3, {}, 3)  # as many files of the same sizes
    for how, (damage, _) in DAMAGE.items():
        damage(shutil.copytree(checkpoint, tmp_path / "all" / how), other)
    told = ranks.run(2, all_refused, tmp_path / "all", other)
    assert told[0] == told[1]


# ------------------------------------------------------------------------------------------------ other models, groups


class Other(torch.nn.Module):
    """Differs from `Mine` in every way at once."""

    def __init__(self, mine):
        super().__init__()
        self.same = torch.nn.Linear(3, 2)
        self.transposed = torch.nn.Parameter(torch.ones((4, 6) if mine else (6, 4)))
        self.register_parameter("only_mine" if mine else "only_theirs", torch.nn.Parameter(torch.ones(3)))
        self.register_parameter("name" if mine else "renamed", torch.nn.Parameter(torch.ones(5)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64 if mine else torch.int32))
        self.register_buffer("wide", torch.zeros(3 if mine else 4))


def differs(path):
    _, theirs = (other := Other(False)), torch.optim.AdamW(other.parameters())
    zeroshard.shard(other, theirs).save(path)
    mine = Other(True)
    optimizer = torch.optim.AdamW(mine.parameters())
    zero = zeroshard.shard(mine, optimizer)
    text = refuses(zero, path)
    loaded = zero.load(path, strict=False)
    with zero.gathered():
        kept = [(name, param.detach().clone()) for name, param in mine.named_parameters()]
    return text, loaded.skipped, kept


@pytest.mark.row(44)
def test_every_difference_is_told_at_once(ranks, tmp_path):
    (text, skipped, kept), *_ = ranks.run(2, differs, tmp_path / "a")
    wanted = [
        "parameter 'transposed' has shape (4, 6), saved was (6, 4)",
        "parameter 'only_mine' is not in the checkpoint",
        "parameter 'name' is not in the checkpoint",
        "saved parameter 'only_theirs' is not in the model",
        "saved parameter 'renamed' is not in the model",
        "buffer 'count' is () torch.int64, saved was () torch.int32",
        "buffer 'wide' is (3,) torch.float32, saved was (4,) torch.float32",
        "optimizer 0, group 0: no saved group holds just what it does, ['same.weight', 'same.bias', 'transposed']",
    ]
    assert [each for each in wanted if each not in text and not each.startswith("optimizer")] == []
    assert "no saved group holds just what it does" in text and text.count("\n    ") == len(skipped) == 8
    assert all((param == 1).all() for name, param in kept if not name.startswith("same"))


def group_options(order):
    model = models.build("mlp")
    params = dict(model.named_parameters())
    made = [{"params": [params[name] for name in names], "lr": lr} for names, lr in order]
    optimizer = torch.optim.SGD(made, momentum=0.9, lr=1.0)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=2)


def saves_groups(path, order):
    model, optimizer, zero = group_options(order)
    step("mlp", model, optimizer, 0, total=2)
    zero.save(path)
    return {
        (p[0], p[1], p[2]): p.tensor.clone()
        for p in zeroshard.checkpoint.content.pieces(zeroshard.checkpoint.content.model_state(zero._engine))
    }


def loads_groups(path, order, strict):
    model, optimizer, zero = group_options(order)
    if strict:
        loaded = zero.load(path)
    else:
        text = refuses(zero, path, "no saved group holds just what it does")
        loaded = zero.load(path, strict=False)
        assert all(each in text for each in loaded.skipped)
    rates = [group["lr"] for group in optimizer.param_groups]
    pieces = {
        (p[0], p[1], p[2]): p.tensor.clone()
        for p in zeroshard.checkpoint.content.pieces(zeroshard.checkpoint.content.model_state(zero._engine))
    }
    step("mlp", model, optimizer, 1, total=2)
    return loaded.skipped, rates, pieces


A, B, C = ["0.weight", "0.bias"], ["2.weight", "2.bias"], ["4.weight", "4.bias"]


@pytest.mark.row(46)
def test_groups_are_matched_by_name(ranks, tmp_path):
    """Another order of groups, and within them, is the same groups; another division is refused, never guessed."""
    written = ranks.run(2, saves_groups, tmp_path / "a", [(A, 0.1), (B, 0.2), (C, 0.3)])
    for found in ranks.run(2, loads_groups, tmp_path / "a", [(C[::-1], 1.0), (A, 1.0), (B[::-1], 1.0)], True):
        assert found[:2] == ([], [0.3, 0.1, 0.2])
    read = ranks.run(2, loads_groups, tmp_path / "a", [(A, 0.1), (B, 0.2), (C, 0.3)], True)
    for rank in range(2):
        assert read[rank][2].keys() == written[rank].keys()
        assert all(torch.equal(read[rank][2][key], written[rank][key]) for key in written[rank])
    for skipped, rates, _ in ranks.run(
        2, loads_groups, tmp_path / "a", [(A + B[:1], 1.0), (B[1:], 1.0), (C, 1.0)], False
    ):
        assert rates == [1.0, 1.0, 0.3] and [each.count("group 0") + 2 * each.count("group 1") for each in skipped] == [
            1,
            2,
        ]


# ------------------------------------------------------------------------------------------------------ forged manifests

NAMES = [
    "/etc/passwd", "../a/rank00000.safetensors", "./rank00000.safetensors", "sub/rank00000.safetensors", "..", ".", "",
    "rank00000.safetensors\0", "rank00000.safetensors/", "..\\rank00000.safetensors", "rank0000\u0660.safetensors",
    "rank\u0660\u0660\u0660\u0660\u0660.safetensors", "\uff0e\uff0e/rank00000.safetensors", "rank00000.safetensors\n", "manifest.json",
    "/dev/zero", "/dev/stdin", "rank000000.safetensors", "RANK00000.safetensors", "rank-0001.safetensors", "rank1e400.safetensors",
    "\ud800", "rank00000.safetensorsx", "file:rank00000.safetensors", "C:\\rank00000.safetensors", "~", "$HOME",
]  # fmt: skip


@pytest.mark.row(50)
@pytest.mark.parametrize("name", NAMES)
def test_only_plain_names_are_opened(copy, monkeypatch, name):
    manifest = manifest_of(copy)
    manifest["files"][name] = manifest["files"].pop("rank00000.safetensors")
    manifest["extra_file"] = name
    for entry in [*manifest["fragments"], *manifest["buffers"].values()]:
        if entry[-1] == "rank00000.safetensors":
            entry[-1] = name
    forge(copy, manifest)
    tried = []
    gc.collect()  # models of earlier tests that end open folders of their own
    plain_open = os.open
    monkeypatch.setattr(files.os, "open", lambda path, *a, **k: (tried.append(path), plain_open(path, *a, **k))[1])
    refuses(after_steps(0)[2], copy, "file names like rank00000.safetensors")
    assert set(tried) <= {copy, "manifest.json", "rank00001.safetensors"} | {
        p for p in tried if str(p).startswith("/proc")
    }


class Payload:
    """Run by whoever unpickles it."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({self.marker!r}, 'w')",)


RUNS_CODE = {"exec", "compile", "import", "pickle.find_class", "os.system", "os.exec", "os.fork", "os.posix_spawn",
             "subprocess.Popen", "marshal.loads", "code.__new__", "ctypes.dlopen", "socket.connect"}  # fmt: skip


def loads_payloads(folder, marker):
    """Under an audit hook that lets nothing run, in a process of its own: hooks stay."""
    payload = pickle.dumps(Payload(marker))
    _, _, zero = build("mlp", 3)
    text = f"__import__('os').system('touch {marker}')"
    zero.save(folder / "good", extra={
        text: text, "bytes": torch.frombuffer(bytearray(payload), dtype=torch.uint8), "hex": payload.hex(),
    })  # fmt: skip
    zero.load(folder / "good")  # what is imported late is imported now
    for name, content in {"manifest.json": payload, "rank00000.safetensors": payload}.items():
        shutil.copytree(folder / "good", folder / name)
        (folder / name / name).write_bytes(content)
    torch.save({"model": Payload(marker)}, folder / "saved.pt")
    for name in ("manifest.json", "rank00000.safetensors"):
        shutil.copytree(folder / "good", folder / f"torch {name}")
        shutil.copy(folder / "saved.pt", folder / f"torch {name}" / name)
    forged = Path(shutil.copytree(folder / "good", folder / "forged"))  # a pickle whose digests are right
    (forged / "rank00000.safetensors").write_bytes(payload)
    manifest = manifest_of(forged)
    manifest["files"] = {"rank00000.safetensors": {"nbytes": len(payload), "digests": [digest(payload)]}}
    forge(forged, manifest)
    forge(Path(shutil.copytree(folder / "good", folder / "inside")), payload)
    shutil.copy(folder / "saved.pt", folder / "good" / "optimizer.pt")
    (folder / "good" / "__init__.py").write_text(f"open({marker!r}, 'w')")
    known = set(sys.modules)

    def hook(event, arguments):
        if event in RUNS_CODE and not (event == "import" and arguments[0] in known):
            os.write(2, f"{event} {arguments}\n".encode())
            traceback.print_stack()
            raise AssertionError(event)

    def act():
        sys.addaudithook(hook)
        loaded = zero.load(folder / "good")
        assert loaded.extra[text] == text and bytes(loaded.extra["bytes"].tolist()) == payload
        for name in ("manifest.json", "rank00000.safetensors", "torch manifest.json", "forged", "inside"):
            refuses_plainly(zero, folder / name)
        try:
            pickle.loads(payload)
        except AssertionError:
            return
        raise RuntimeError("the hook lets a pickle through")

    code = forked(act)
    assert not Path(marker).exists()
    return code


def refuses_plainly(zero, path):
    before = bits(zero)
    try:
        zero.load(path)
    except CheckpointError:
        assert bits(zero) == before
        return
    raise RuntimeError(f"{path} was loaded")


@pytest.mark.processes
@pytest.mark.row(51)
def test_no_pickle_runs_wherever_it_lies(ranks, tmp_path):
    assert ranks.run(1, loads_payloads, tmp_path, str(tmp_path / "marker"), group=False) == [0]


def deep(depth, inside):
    return b"[" * depth + inside + b"]" * depth


def with_(**changes):
    def make(manifest):
        return canonical({**manifest, **{key: change(manifest[key]) for key, change in changes.items()}}).encode()

    return make


def first(change):
    """Change the first fragment."""
    return lambda fragments: [change(list(fragments[0])), *fragments[1:]]


def put(at, value):
    return first(lambda fragment: [*fragment[:at], value, *fragment[at + 1 :]])


def file_facts(**facts):
    return lambda told: {name: {**each, **facts} for name, each in told.items()}


def parameter_facts(**facts):
    return lambda told: {name: {**each, **facts} for name, each in told.items()}


def raw_number(text):
    """A number that Python's writer would not write, in place of the number of ranks."""
    return lambda manifest: canonical({**manifest, "ranks": "here"}).encode().replace(b'"here"', text)


def twice(manifest):
    return canonical(manifest).encode()[:-1] + b',"version":1}'


BOMBS = {
    "depth 10^5": lambda _: deep(100_000, b"1"),
    "depth 10^5 inside": lambda manifest: canonical({**manifest, "extra": "here"}).encode().replace(b'"here"', deep(100_000, b"")),
    "10^5 objects deep": lambda _: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "not JSON": lambda _: b"\x00" * 1000,
    "no text": lambda _: b"\xff\xfe" * 1000,
    "nothing": lambda _: b"",
    "a number": lambda _: b"1",
    "a list": lambda _: b"[]",
    "an empty object": lambda _: b"{}",
    "a key twice": twice,
    "NaN": raw_number(b"NaN"),
    "Infinity": raw_number(b"-Infinity"),
    "1e999": raw_number(b"1e999"),
    "a number of 10^5 digits": raw_number(b"9" * 100_000),
    "a number of 4000 digits": raw_number(b"9" * 4000),
    "-0": raw_number(b"-0"),
    "2.0": raw_number(b"2.0"),
    "true": with_(version=lambda _: True),
    "ranks true": with_(ranks=lambda _: True),
    "ranks 2^62": with_(ranks=lambda _: 1 << 62),
    "seed": with_(seed=lambda _: -1),
    "no_sync": with_(no_sync=lambda _: True),
    "saved": with_(saved=lambda _: "now"),
    "10^5 empty lists": with_(fragments=lambda _: [[]] * 100_000),
    "10^5 fragments again": with_(fragments=lambda told: told + told[:1] * 100_000),
    "10^5 parameters": with_(parameters=lambda told: {**told, **{f"p{n}": None for n in range(100_000)}}),
    "10^5 dimensions": with_(parameters=parameter_facts(shape=[1] * 100_000)),
    "overflow of a product": with_(parameters=parameter_facts(shape=[1 << 40] * 60)),
    "huge and empty": with_(fragments=lambda told: [*told, ["0.weight", "more", None, None, "F32", [1 << 47, 0, 1 << 47], -1, "rank00000.safetensors"]]),
    "a shape 2^63": with_(parameters=parameter_facts(shape=[1 << 63])),
    "negative size": with_(parameters=parameter_facts(shape=[-7, -13])),
    "float size": with_(parameters=parameter_facts(shape=[7.0, 13.0])),
    "bool size": with_(parameters=parameter_facts(shape=[True, 91])),
    "shape is text": with_(parameters=parameter_facts(shape="")),
    "unknown dtype": with_(parameters=parameter_facts(dtype="F31")),
    "dtype is a list": with_(parameters=parameter_facts(dtype=["F32"])),
    "names is text": with_(parameters=parameter_facts(names="0.weight")),
    "value of integers": with_(fragments=lambda told: [[*f[:4], "I32", *f[5:]] if f[1] == "value" else f for f in told]),
    "negative start": with_(fragments=put(2, -1)),
    "start after stop": with_(fragments=first(lambda f: [f[0], f[1], f[3], f[2], *f[4:]])),
    "start without stop": with_(fragments=put(3, None)),
    "overlap": with_(fragments=lambda told: [*told, told[0]]),
    "hole": with_(fragments=lambda told: told[1:]),
    "short": with_(fragments=first(lambda f: [f[0], f[1], f[2], f[3] - 1, f[4], [f[5][0] - 1], *f[6:]])),
    "offset beyond": with_(fragments=put(6, 1 << 30)),
    "offset negative": with_(fragments=put(6, -8)),
    "offset 1e300": with_(fragments=put(6, 1e300)),
    "offset of another": with_(fragments=lambda told: [[*f[:6], told[0][6], *f[7:]] if f[7] == told[0][7] else f for f in told]),
    "file unknown": with_(fragments=put(7, "rank00009.safetensors")),
    "file is a number": with_(fragments=put(7, 0)),
    "nbytes 2^62": with_(files=file_facts(nbytes=1 << 62)),
    "nbytes negative": with_(files=file_facts(nbytes=-1)),
    "nbytes float": with_(files=lambda told: {n: {**each, "nbytes": float(each["nbytes"])} for n, each in told.items()}),
    "no digests": with_(files=file_facts(digests=[])),
    "digest is a number": with_(files=file_facts(digests=[0])),
    "digests is text": with_(files=file_facts(digests="a")),
    "10^5 digests": with_(files=file_facts(digests=["a"] * 100_000)),
    "files is a list": with_(files=list),
    "extra is a list": with_(extra=lambda _: {"list": []}),
    "extra of an unknown kind": with_(extra=lambda _: {"map": [["a", {"pickle": "gASV"}]]}),
    "extra float": with_(extra=lambda _: {"map": [["a", {"float": "1e999"}]]}),
    "extra key twice": with_(extra=lambda _: {"map": [["a", 1], ["a", 2]]}),
    "extra key is a list": with_(extra=lambda _: {"map": [[[1], 1]]}),
    "extra tensor unknown": with_(extra=lambda _: {"map": [["a", {"tensor": "b"}]]}),
    "extra tensors that are one": with_(extra_tensors=lambda _: [[f"t{n}", [100], "U8", 0] for n in range(1000)]),
    "value twice": with_(values=lambda _: [["0.weight", "x", 1], ["0.weight", "x", 1]]),
    "value of nobody": with_(values=lambda _: [["nobody", "x", 1]]),
    "value is a map": with_(values=lambda _: [["0.weight", "x", {}]]),
    "value beside tensor": with_(values=lambda _: [["0.weight", "exp_avg", 1]]),
    "optimizers is a map": with_(optimizers=lambda _: {}),
    "group of nobody": with_(optimizers=lambda told: [{**told[0], "groups": [{"parameters": [[]], "options": {}}]}]),
    "rng of nobody": with_(rng=lambda told: told[:1]),
}  # fmt: skip


def rng_of(**changes):
    return with_(
        rng=lambda told: [{**each, **{key: change(each[key]) for key, change in changes.items()}} for each in told]
    )


RNG = {  # a generator would crash on these, or read beyond its keys
    "numpy position": rng_of(numpy=lambda told: [*told[:2], 1_000_000, *told[3:]]),
    "numpy position negative": rng_of(numpy=lambda told: [*told[:2], -1, *told[3:]]),
    "numpy keys": rng_of(numpy=lambda told: [told[0], told[1][:80], *told[2:]]),
    "numpy kind": rng_of(numpy=lambda told: ["PCG64", *told[1:]]),
    "python position": rng_of(python=lambda told: [told[0], [*told[1][:-1], 10_000], told[2]]),
    "python gauss": rng_of(python=lambda told: [*told[:2], "x"]),
    "python version": rng_of(python=lambda told: [2, *told[1:]]),
    "python number": rng_of(python=lambda told: [told[0], [10**30, *told[1][1:]], told[2]]),
    "torch short": rng_of(torch=lambda told: told[:-2]),
    "torch zeros": rng_of(torch=lambda told: "00" * (len(told) // 2)),
    "torch no hexadecimal": rng_of(torch=lambda told: "zz" + told[2:]),
}


def options_of(**changes):
    def change(told):
        groups = [{**group, "options": {**group["options"], **changes}} for group in told[0]["groups"]]
        return [{**told[0], "groups": groups}]

    return with_(optimizers=change)


OPTIONS = {  # the next step would crash on these
    "lr text": options_of(lr="0.1"),
    "lr bool": options_of(lr=True),
    "lr none": options_of(lr=None),
    "lr 10^30": options_of(lr=10**30),
    "lr list": options_of(lr=[0.1]),
    "betas one": options_of(betas=[0.9]),
    "betas text": options_of(betas=[0.9, "x"]),
    "betas number": options_of(betas=0.9),
    "amsgrad number": options_of(amsgrad=7),
    "params": options_of(params=[]),
    "unknown": options_of(unknown=1),
}


def renamed(state, to):
    return with_(fragments=lambda told: [[f[0], to if f[1] == state else f[1], *f[2:]] for f in told])


STATES = {  # and on these
    "renamed": renamed("exp_avg", "exp_average"),
    "without": with_(fragments=lambda told: [f for f in told if f[1] != "exp_avg_sq"]),
    "without step": with_(fragments=lambda told: [f for f in told if f[1] != "step"]),
    "step is a number": with_(
        fragments=lambda told: [f for f in told if f[1] != "step"],
        values=lambda _: [[name, "step", 2] for name in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")],
    ),
    "step of another shape": with_(fragments=lambda told: [[*f[:5], [1], *f[6:]] if f[1] == "step" else f for f in told]),
    "integers": with_(fragments=lambda told: [[*f[:4], "I32", *f[5:]] if f[1] == "exp_avg" else f for f in told]),
    "one more": with_(fragments=lambda told: [*told, ["0.weight", "more", None, None, "F32", [0], 0, "rank00000.safetensors"]]),
}  # fmt: skip


def high_water():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def reset_high_water():
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()


def meets_forgeries(path, kinds, strict):
    """Each refused, in a limited time, with little memory, and nothing changed."""
    tables = {"bombs": BOMBS, "rng": RNG, "options": OPTIONS, "states": STATES}
    _, optimizer, zero = after_steps(1)
    right = manifest_of(path)
    grown = {}
    for kind in kinds:
        for name, make in tables[kind].items():
            text = make(right)
            forge(path, text)
            start = reset_high_water()
            try:
                message = refuses(zero, path, strict=strict)
            except BaseException as error:
                raise AssertionError(f"{kind}, {name}") from error
            grown[name] = (high_water() - start, len(text), len(message))
            assert len(message) < 20_000, (name, len(message))
    forge(path, right)
    zero.load(path)
    step("mlp", zero.model, optimizer, 3, total=1)
    return grown


@pytest.mark.row(52)
def test_forged_manifests_are_refused(ranks, copy):
    (grown,) = ranks.run(1, meets_forgeries, copy, ["bombs", "options", "states"], True, group=False)
    for name, (nbytes, length, _) in grown.items():
        assert nbytes <= (50 << 20) + 30 * length, (name, nbytes, length)


@pytest.mark.row(52)
def test_random_states_that_no_generator_takes_are_refused(ranks, tmp_path):
    """On as many ranks as saved it: elsewhere they are not used."""
    ranks.run(1, saves, "mlp", tmp_path / "a", 3, {}, 2)
    ranks.run(1, meets_forgeries, tmp_path / "a", ["rng"], True, group=False)


def skips_what_does_not_fit(path):
    """Not strict: what would crash at the next step is left out, and told."""
    right = manifest_of(path)
    skipped = {}
    for name, make in {**OPTIONS, **STATES}.items():
        forge(path, make(right))
        _, optimizer, zero = after_steps(1)
        skipped[name] = zero.load(path, strict=False).skipped
        step("mlp", zero.model, optimizer, 1, total=1)
        assert [type(group["lr"]) for group in optimizer.param_groups] == [float]
    return skipped


@pytest.mark.row(52)
def test_not_strict_skips_and_trains_on(ranks, copy):
    (skipped,) = ranks.run(1, skips_what_does_not_fit, copy, group=False)
    assert all(skipped.values())
    assert skipped["betas one"] == ["optimizer 0, group 0: option 'betas' is [0.9, 0.999], saved was [0.9]"]


@pytest.mark.row(52)
@pytest.mark.parametrize("nbytes", [(64 << 20) + 1, 100 << 20, 1 << 30, 1 << 40])
def test_a_manifest_too_long_is_not_read(ranks, copy, nbytes):
    os.truncate(copy / "manifest.json", nbytes)  # sparse
    ((grown, message),) = ranks.run(1, meets_length, copy, group=False)
    assert grown < 50 << 20 and "at most 67,108,864 bytes" in message


def meets_length(path):
    zero = after_steps(1)[2]
    start = reset_high_water()
    message = refuses(zero, path)
    return high_water() - start, message


@pytest.mark.row(52)
def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MANIFEST_LIMIT", 30_000)
    _, _, zero = after_steps(0)
    with pytest.raises(CheckpointError, match="the manifest would be too long to be read"):
        zero.save(tmp_path / "a", extra={"long": list(range(10_000))})
    assert names(tmp_path) == []


@pytest.mark.row(52)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_longest_bombs(ranks, copy):
    (grown,) = ranks.run(1, meets_longest, copy, group=False, timeout=500)
    print({name: f"{nbytes >> 20} MiB, {seconds:.1f} s" for name, (nbytes, seconds) in grown.items()})
    for name, (nbytes, _) in grown.items():
        assert nbytes <= 30 * files.MANIFEST_LIMIT, name


def meets_longest(path):
    zero = after_steps(1)[2]
    room = files.MANIFEST_LIMIT - 100
    grown = {}
    for name, make in {
        "lists": lambda: b"[" + b"[]," * (room // 3 - 10) + b"[]]",
        "objects": lambda: b"[" + b"{}," * (room // 3 - 10) + b"{}]",
        "keys": lambda: b"{" + b",".join(b'"%07d":0' % n for n in range(room // 12)) + b"}",
        "depth": lambda: deep(room // 2 - 10, b""),
        "digits": lambda: b"9" * (room - 10),
        "numbers": lambda: b"[" + b"1.5," * (room // 4 - 10) + b"1]",
        "text": lambda: b'"' + b"a" * (room - 10) + b'"',
    }.items():
        forge(path, make())
        start, began = reset_high_water(), time.monotonic()
        refuses(zero, path)
        grown[name] = high_water() - start, time.monotonic() - began
    return grown


# ----------------------------------------------------------------------------------------------------------- mutations

SCALARS = [None, True, False, 0, 1, -1, 2, 7, 1 << 31, 1 << 53, 1 << 63, 10**30, 0.5, -0.0, 1e308, "", "value", "F32", "F64",
           "BF16", "I64", "exp_avg", "step", "rank00000.safetensors", "../x", "0.weight", "\ud800", "lr", "params"]  # fmt: skip


def places(value, path=()):
    """Every place in a JSON value, but few within the long lists of random states and digests."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for at in range(len(value)) if len(value) < 100 else (0, 1, len(value) - 1):
            yield from places(value[at], (*path, at))


def anything(generator, depth=2):
    kind = generator.randrange(8) if depth else 0
    if kind == 6:
        return [anything(generator, depth - 1) for _ in range(generator.randrange(4))]
    if kind == 7:
        return {f"{generator.choice(SCALARS)}": anything(generator, depth - 1) for _ in range(generator.randrange(4))}
    return generator.choice(SCALARS)


def mutate(manifest, known, generator):
    """One node replaced, deleted, doubled, nudged, exchanged with another, or renamed."""
    *path, last = generator.choice(known)
    parent = manifest
    try:
        for key in path:
            parent = parent[key]
        old = parent[last]
    except (KeyError, IndexError, TypeError):
        return  # an earlier mutation took it away
    if isinstance(parent, str):
        return
    how = generator.randrange(7)
    if how == 0:
        parent[last] = anything(generator)
    elif how == 1:
        del parent[last]
    elif how == 2 and isinstance(parent, list):
        parent.insert(last, json.loads(json.dumps(old)))
    elif how == 2:
        parent[f"{last}2"] = json.loads(json.dumps(old))
    elif how == 3 and type(old) is int:
        parent[last] = old + generator.choice([-1, 1, 4, -4, 1 << 20])
    elif how == 3 and type(old) is float and abs(old) < 1e300:
        parent[last] = -old * 3
    elif how == 4:
        other = generator.choice(list(parent)) if isinstance(parent, dict) else generator.randrange(len(parent))
        parent[last], parent[other] = parent[other], old
    elif how == 5 and isinstance(parent, dict):
        parent[f"{generator.choice(SCALARS)}"] = parent.pop(last)
    else:
        parent[last] = generator.choice(SCALARS)


def scramble(text, generator):
    """Some bytes flipped, taken out, put in or repeated."""
    text = bytearray(text)
    for _ in range(generator.randrange(1, 4)):
        at, length = generator.randrange(len(text)), generator.randrange(1, 40)
        how = generator.randrange(4)
        if how == 0:
            text[at] ^= 1 << generator.randrange(8)
        elif how == 1:
            del text[at : at + length]
        elif how == 2:
            text[at:at] = generator.choice(
                [b"[", b"{", b'"', b"9" * length, b"null", b",", generator.randbytes(length)]
            )
        else:
            text[at:at] = text[at : at + length]
    return bytes(text)


def meets_mutations(folder, count):
    """Each is refused with an error of ours and no change; or loads, and what it loads can be trained and saved again."""
    rank = rank_processes.rank()
    generator = random.Random(rank)
    path = folder / f"{rank}"
    shutil.copytree(folder / "a", path)
    right = manifest_of(path)
    text = canonical(right).encode()
    known = [place for place in places(right) if place]
    model, optimizer, zero = after_steps(1)
    zero.load(path)
    before = bits(zero)
    seen = {"refused": 0, "loaded": 0, "skipped": 0}
    for number in range(count):
        if number % 4 == 3:
            content = scramble(text, generator)
        else:
            content = json.loads(text)
            for _ in range(generator.randrange(1, 4)):
                mutate(content, known, generator)
        forge(path, content)
        try:
            loaded = zero.load(path, strict=number % 2 == 0)
        except (CheckpointError, UserError):
            seen["refused"] += 1
            assert bits(zero) == before, (rank, number)
            continue
        except BaseException as error:
            raise AssertionError(f"rank {rank}, mutation {number}") from error
        seen["skipped" if loaded.skipped else "loaded"] += 1
        if (seen["loaded"] + seen["skipped"]) % 10 == 0:
            held = bits(zero)
            zero.save(folder / f"again-{rank}")
            zero.load(folder / f"again-{rank}")
            assert bits(zero) == held, (rank, number)
        forge(path, right)
        zero.load(path, strict=False)
        if bits(zero) != before:  # options that are only here stay: as good as new
            model, optimizer, zero = after_steps(1)
            zero.load(path)
            assert bits(zero) == before, (rank, number)
    assert bits(zero) == before
    step("mlp", model, optimizer, 3, total=1)
    return seen


def mutated(ranks, folder, count):
    ranks.run(1, saves, "mlp", folder / "a", 3, {}, 2)
    return ranks.run(2, meets_mutations, folder, count // 2, group=False, timeout=1700)


@pytest.mark.full
@pytest.mark.row(53)
def test_mutations_load_whole_or_not_at_all(ranks, tmp_path):
    for seen in mutated(ranks, tmp_path, 400):
        assert seen["refused"] > 100 and seen["loaded"] + seen["skipped"] > 5


@pytest.mark.row(53)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_100_000_mutations_load_whole_or_not_at_all(ranks, tmp_path):
    print(mutated(ranks, tmp_path, 100_000))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
)
KEYS = ["format", "version", "saved", "ranks", "stage", "seed", "parameters", "fragments", "values", "files", "buffers",
        "optimizers", "extra", "extra_tensors", "extra_file", "rng"]  # fmt: skip


def opens(path):
    with Saved.open(path) as saved:
        saved.reader.check_share(0, 1)


@pytest.mark.full
@pytest.mark.row(53)
@settings(max_examples=100)
@given(value=json_values | st.dictionaries(st.sampled_from(KEYS), json_values).map(
    lambda told: {**told, "format": "zeroshard checkpoint", "version": 1}
))  # fmt: skip
def test_any_json_is_refused(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "any-json"
    path.mkdir(exist_ok=True)
    forge(path, value)
    with pytest.raises(CheckpointError):
        opens(path)


@pytest.mark.row(53)
@settings(max_examples=100)
@given(content=st.binary(max_size=300), forged=st.booleans())
def test_any_bytes_are_refused(tmp_path_factory, content, forged):
    path = tmp_path_factory.getbasetemp() / "any-bytes"
    path.mkdir(exist_ok=True)
    if forged:
        forge(path, content)
    else:
        (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        opens(path)


# ------------------------------------------------------------------------------------------------------------ versions


def of_fixture():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return model, torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.5, 0.75))


def loads_fixture(path):
    model, optimizer = of_fixture()
    zero = zeroshard.shard(model, optimizer, stage=3)
    loaded = zero.load(path)
    with zero.gathered():
        weights = {name: tensor.tolist() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    states = [
        (*p[:3], p.tensor.tolist())
        for p in zeroshard.checkpoint.content.pieces(zeroshard.checkpoint.content.model_state(zero._engine))
        if p.state != "value"
    ]
    options = {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "weight_decay")}
    return weights, states, options, {**loaded.extra, "tensor": loaded.extra["tensor"].tolist()}, zero.seed


@pytest.mark.row(54)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_version_1_loads_for_ever(ranks, world):
    """Written by two ranks with the first release; every number here is what was saved then."""
    told = ranks.run(world, loads_fixture, FIXTURES / "checkpoint-1")
    states = sorted(state for _, mine, *_ in told for state in mine)
    flat = {}
    for name, state, start, held in states:
        flat.setdefault((name, state), []).extend(held if start is not None else [held])
    for weights, _, options, extra, seed in told:
        assert weights == {
            "0.weight": [[0.0, 0.125, 0.25], [0.375, 0.5, 0.625]], "0.bias": [0.75, 0.875],
            "1.weight": [1.0, 1.125], "1.bias": [1.25, 1.375],
            "1.running_mean": [-1.0, -2.0], "1.running_var": [3.0, 4.0], "1.num_batches_tracked": 5,
        }  # fmt: skip
        assert options == {"lr": 0.0625, "betas": (0.5, 0.75), "weight_decay": 0.01}
        assert extra == {"position": 12, "note": [1, (2.5, None), {"x": True}], "inf": math.inf, "tensor": [3, 1, 2]}
        assert seed == 1234
    assert flat[("0.weight", "exp_avg")] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert flat[("1.bias", "exp_avg_sq")] == [100.0, 101.0] and flat[("1.bias", "step")] == [7.0]


@pytest.mark.row(54)
def test_the_stored_version_1_is_as_it_was():
    """A digest of another make than the checkpoint's own: whoever touches the fixture touches this line."""
    folder = FIXTURES / "checkpoint-1"
    found = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16] for name in names(folder)}
    assert found == {
        "manifest.json": "3dc153b592d95ce0",
        "rank00000.safetensors": "af837483256ba057",
        "rank00001.safetensors": "9af109224a068580",
    }


@pytest.mark.row(54)
@pytest.mark.parametrize("version", [0, 6, 7, 10**6, "1", 1.0, None, [1]])
def test_another_version_is_refused_by_number(copy, version):
    forge(copy, {**manifest_of(copy), "version": version})
    text = refuses(after_steps(0)[2], copy, "of a format that is not read here")
    assert f"zeroshard checkpoint {version}" in text and "expected: zeroshard checkpoint 1 or 2 or 3" in text


@pytest.mark.row(54)
@pytest.mark.parametrize("strips", [[], [1, 2], [0, 0, 0], [2, -1, 2], [3, 2, 5], [1, 1, 10**12], "abc", {"rows": 1}])
def test_strips_that_are_not_the_tensors_are_refused(copy, strips):
    """How tensor parallelism has cut a parameter: else every element would be another one's."""
    manifest = manifest_of(copy)
    next(entry for entry in manifest["parameters"].values() if len(entry["shape"]) == 2)["strips"] = strips
    forge(copy, {**manifest, "version": 2})
    assert "damaged" in refuses(after_steps(0)[2], copy)


@pytest.mark.row(54)
def test_a_future_version_is_refused_before_its_content_is_looked_at(tmp_path):
    """A stored one: all that it shares with versions 1 to 5 is where the number is."""
    text = refuses(after_steps(0)[2], FIXTURES / "checkpoint-6")
    assert "zeroshard checkpoint 6" in text and "the zeroshard that wrote it" in text
