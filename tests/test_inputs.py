"""Input: whatever public functions are given, they work or raise an error of zeroshard's own, with what to write instead."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import zeroshard
from zeroshard import Comm, Layout, Machine, Model, Offload, Precision, Step
from zeroshard.cli import demo, launch, main, start, train, verify
from zeroshard.errors import Error

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3),
    st.sampled_from(["unit", "ordered", "device", "raise", "cpu", torch.float32, torch.int8, "nvme", "ordred", -1, 0, 1e30]),
    st.lists(st.integers() | st.text(max_size=4), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.builds(object), st.just(torch.nn.Linear), st.just(torch.ones(2)), st.just({1, 2}), st.just(...),
)  # fmt: skip
POLICIES = {kind: list(kind.__dataclass_fields__) for kind in (Comm, Layout, Offload, Precision)}


def only_ours(call) -> None:
    with contextlib.suppress(Error):
        call()


@pytest.mark.row(64)
@pytest.mark.parametrize(("kind", "field"), [(k, f) for k, fields in POLICIES.items() for f in fields], ids=str)
def test_any_value_of_any_setting(kind, field):
    """Each policy's fields, with values of every type: taken, or refused by name."""

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(value=JUNK)
    def check(value):
        only_ours(lambda: kind(**{field: value}))

    check()


@functools.cache
def small():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, zeroshard.shard(model, optimizer)


def inside(value, **options):
    with small()[2].gathered(value, **options):
        pass


CALLS = {
    "shard stage": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), None, stage=v),
    "shard model": lambda v: zeroshard.shard(v, None),
    "shard optimizer": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), v),
    "shard precision": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), None, precision=v),
    "shard layout": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), None, layout=v),
    "shard comm": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), None, comm=v),
    "shard offload": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), None, offload=v),
    "gathered": inside,
    "gathered write_from": lambda v: inside("0.weight", write_from=v),
    "owners": lambda v: small()[2].owners(v),
    "owners state": lambda v: small()[2].owners("0.weight", v),
    "record": lambda v: small()[2].record(v),
    "trace": lambda v: small()[2].trace(v),
    "explain": lambda v: small()[2].explain(v),
    "explain metrics": lambda v: small()[2].explain(metrics=v),
    "save": lambda v: small()[2].save(v),
    "save extra": lambda v: small()[2].save("ckpt", v),
    "save keep": lambda v: small()[2].save("ckpt", keep=v),
    "save asynchronous": lambda v: small()[2].save("ckpt", asynchronous=v).wait(),
    "load": lambda v: small()[2].load(v),
    "load strict": lambda v: small()[2].load("ckpt", strict=v),
    "latest": lambda v: small()[2].latest(v),
    "load_state_dict": lambda v: small()[2].load_state_dict(v),
    "export": lambda v: small()[2].export(v),
    "export file_nbytes": lambda v: small()[2].export("exported", file_nbytes=v),
    "export dtype": lambda v: small()[2].export("exported", dtype=v),
    "export overwrite": lambda v: small()[2].export("exported", overwrite=v),
    "micro_batch_rng step": lambda v: small()[2].micro_batch_rng(v, 0).__enter__(),
    "micro_batch_rng index": lambda v: small()[2].micro_batch_rng(0, v).__enter__(),
    "load a model": lambda v: zeroshard.load(v, "exported"),
    "load a model folder": lambda v: zeroshard.load(torch.nn.Linear(2, 2), v),
    "plan": lambda v: zeroshard.plan(v),
    "plan machine": lambda v: zeroshard.plan(1e6, v),
    "plan step": lambda v: zeroshard.plan(1e6, step=v),
    "plan params": lambda v: zeroshard.plan(Model(v)),
    "plan shapes": lambda v: zeroshard.plan(Model(shapes=v)),
    "plan units": lambda v: zeroshard.plan(Model(1e6, units=v)),
    "plan preset": lambda v: zeroshard.plan(Model(1e6, preset=v)),
    "plan cluster": lambda v: zeroshard.plan(1e6, Machine(cluster=v)),
    "plan disk": lambda v: zeroshard.plan(1e6, Machine(gpu_mem="1GB", disk=v)),
    "plan disk_read": lambda v: zeroshard.plan(1e6, Machine(gpu_mem="1GB", disk_read=v, disk_write=1)),
    "plan batch": lambda v: zeroshard.plan(1e6, step=Step(batch=v)),
    "plan no_sync": lambda v: zeroshard.plan(1e6, step=Step(no_sync=v)),
    "plan ranks": lambda v: zeroshard.plan(1e6, Machine(ranks=v)),
    "plan stage": lambda v: zeroshard.plan(1e6, stage=v),
    "plan gpu_mem": lambda v: zeroshard.plan(1e6, Machine(gpu_mem=v)),
    "plan offload": lambda v: zeroshard.plan(1e6, offload=v),
    "plan comm": lambda v: zeroshard.plan(1e6, comm=v),
    "plan layout": lambda v: zeroshard.plan(1e6, layout=v),
    "plan precision": lambda v: zeroshard.plan(1e6, precision=v),
}


@pytest.mark.row(64)
@pytest.mark.parametrize("name", CALLS)
def test_any_argument_of_any_call(name, tmp_path, monkeypatch):
    """The public functions' arguments, with values of every type."""
    monkeypatch.chdir(tmp_path)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(value=JUNK)
    def check(value):
        only_ours(lambda: CALLS[name](value))

    check()
    small()[2].record(0)


# --- commands -------------------------------------------------------------------------------------------------------

WORDS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
    st.sampled_from([
        "", " ", "-1", "0", "1", "3", "0.5", "nan", "-inf", "1e400", "9" * 30, "1e9", "cpu", "nvme", "devic", "fp32", "tiny",
        "0,1", "1,,2", "24,small", "80GiB", "80 Gib", "adamw", "adamx", "a100", "paper", "unit", "x:y", "./none.py:job", "\udcff",
    ]),
)  # fmt: skip
BASES = {
    "train": [], "demo": [], "explain": ["--json"], "plan": ["--params", "1e6"], "verify": ["none:job"], "simulate": ["none:job"],
    "ckpt inspect": ["none"], "ckpt verify": ["none"], "ckpt diff": ["none", "none"],
    "ckpt export": ["none", "out"],
}  # fmt: skip
SWITCHES = ("--help", "--open", "--check", "--exact")


def options(words: str) -> list[str]:
    command = typer.main.get_command(main.app)
    for word in words.split():
        command = command.commands[word]
    found = [name for param in command.params for name in param.opts if name.startswith("--")]
    return [name for name in found if name not in SWITCHES]


def said(argv: list[str]) -> tuple[object, str, str]:
    """Exit code, output and errors of the command, in this process."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["zeroshard", *argv])
        with pytest.raises(SystemExit) as ended:
            main.main()
    return ended.value.code, out.getvalue(), error.getvalue()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, without colours, and the signals' handlers as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def nothing_runs(here, monkeypatch):
    """What would start when the words are understood does not: only the reading of them is tried."""
    monkeypatch.setattr(start, "run_training", lambda *_: 0)
    monkeypatch.setattr(demo, "demo", lambda **_: 0)
    monkeypatch.setattr(verify, "verify", lambda *_, **__: 0)


@pytest.mark.full
@pytest.mark.row(64)
@pytest.mark.parametrize("words", BASES)
@pytest.mark.parametrize("part", range(4))
def test_any_word_for_any_option_of_any_command(nothing_runs, words, part):
    """Understood, or exit code 2 with one line on stderr that starts with `zeroshard:` and nothing on stdout."""

    @seed(part)
    @settings(max_examples=2 * len(options(words)), suppress_health_check=list(HealthCheck))
    @given(option=st.sampled_from(options(words)), value=WORDS, typo=st.booleans())
    def check(option, value, typo):
        code, out, error = said([*words.split(), *BASES[words], option[:-1] if typo else option, value])
        assert code in (0, 2), (option, value, code, error)
        if code == 2:
            assert out == "" and re.fullmatch(r"zeroshard: [^\n]+\n", error), (option, value, error)

    check()


TRAINS = start.run_training
EXTREMES = ("0", "-1", "1" + "0" * 30, "nan", "inf", "1e-300", "")


@pytest.mark.full
@pytest.mark.row(64)
@pytest.mark.parametrize("words", BASES)
def test_extremes_of_any_option_of_any_command(nothing_runs, monkeypatch, words):
    """None, less, far too many, no number, nothing: understood or refused, and what is refused leaves no file."""
    monkeypatch.setattr(start, "run_training", TRAINS)
    monkeypatch.setattr(train, "train", lambda *_: 0)  # it comes as far as its ranks
    monkeypatch.setattr(launch, "end_at_once_when_told", lambda **_: None)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: lambda *_: None)
    Path("text").write_text("text " * 100)
    base = [*words.split(), *BASES[words], *(["--data", "text"] if words == "train" else [])]
    draw = random.Random(words)
    cases = [(option, value) for option in options(words) for value in EXTREMES]
    for option, value in draw.sample(cases, min(len(cases), 60)):
        before = set(os.listdir())
        code, out, error = said([*base, f"{option}={value}"])
        assert code == 2 if not value else code in (0, 2), (option, value, code, error)
        if code == 2:
            assert out == "" and re.fullmatch(r"zeroshard: [^\n]+\n", error), (option, value, error)
            assert set(os.listdir()) == before, (option, value)


@pytest.mark.row(64)
@pytest.mark.parametrize("words", ["train --data text", "demo", "verify none:job", "plan none:job --check"])
def test_more_ranks_than_this_machine_holds_are_refused_by_a_named_limit(here, words):
    Path("text").write_text("text " * 100)
    most = launch.memory_of_machine() // launch.RANK_NBYTES
    code, out, error = said([*words.split(), "--ranks", "1000000000"])
    assert (code, out, os.listdir()) == (2, "", ["text"])
    assert f"--ranks 1000000000: this machine starts at most {most}, of " in error
    assert f"instead: --ranks {most} or fewer" in error
    launch.check_ranks(most)
