"""Helps of commands, at the widths of terminals."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typer

from zeroshard.cli import gates
from zeroshard.cli.config import Precision, Transport
from zeroshard.cli.main import app
from zeroshard.cli.question import Question
from zeroshard.layout.partition import BUCKET_MIB
from zeroshard.policies.layout import Layout

ROOT = Path(__file__).parents[2]

OPTIONS = {
    "train": "accumulate batch data device grad-dtype help hosts keep lr no-recompute no-report offload offload-activations offload-gradients offload-optimizer "
    "offload-parameters offload-path offload-step optimizer-over out precision ranks recompute reduce replicas report resume save-every seed size stage steps timeout "
    "transport",
    "demo": "help out ranks seed steps verbose",
    "plan": "accumulate align batch bounds bucket-mib bytes check config disk disk-read disk-write ep exact experts fp8 full gpu gpu-mem gpus-per-node grad-dtype help hosts "
    "host-mem json machine matrices no-sync offload offload-activations offload-gradients offload-optimizer offload-parameters offload-step optimizer "
    "optimizer-in-backward optimizer-over params precision "
    "prefetch preset ranks recompute reduce replicas seq shapes stage step-time tokens transport units whole",
    "simulate": "accumulate bucket-mib ep experts grad-dtype help hosts json machine matrices offload offload-activations offload-gradients offload-optimizer "
    "offload-parameters offload-step optimizer-in-backward optimizer-over precision prefetch rank ranks recompute reduce replicas stage trace transport",
    "ckpt inspect": "help json",
    "ckpt verify": "help json",
    "ckpt diff": "help json",
    "ckpt export": "dtype file-size help json overwrite",
    "ckpt import": "buffer help json optimizer tied weights",
    "explain": "help json no-open open out",
    "verify": "accumulate bucket-mib clip full help hosts json offload offload-path optimizer-in-backward "
    "optimizer-over out precision quick ranks reduce replicas seed stage steps timeout transport",
}


def options(command):
    """{name: (the option, its help with its default)} of a command, as typer shows them."""
    found, context = typer.main.get_command(app), None
    for word in command.split():
        context = typer.Context(found, context, word)
        found = found.commands[word]
    context = typer.Context(found, context, command)
    shown = [each for each in found.get_params(context) if each.param_type_name == "option" and not each.hidden]
    return {each.opts[0].removeprefix("--"): (each, each.get_help_record(context)[1]) for each in shown}


def test_the_options_are_these():
    """A new option is a decision; this list makes it one."""
    for command, names in OPTIONS.items():
        found = options(command)
        negated = {name.removeprefix("--") for each, _ in found.values() for name in each.secondary_opts}
        assert sorted({*found} | {name for name in negated if name.startswith("no-")}) == sorted(names.split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ["", *OPTIONS])
def test_helps_fit_their_terminal_and_cut_nothing(monkeypatch, capsys, command, width):
    """Lines within the terminal; each option by its whole name, and no word cut."""
    monkeypatch.setenv("COLUMNS", str(width))
    app([*command.split(), "--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width and "\u2026" not in shown
    names = {name for each, _ in options(command).values() for name in (*each.opts, *each.secondary_opts)}
    assert names <= set(re.findall(r"--[a-z0-9-]+", shown))
    assert command or "train" in shown


@pytest.mark.parametrize(
    ("command", "common"),
    [
        ("plan", "params shapes ranks stage gpu gpu-mem host-mem disk preset check offload full help"),
        ("train", "data stage ranks size steps out resume offload help"),
        ("verify", "ranks stage steps accumulate precision offload full quick out help"),
    ],
    ids=lambda value: value if value.isalpha() else "",
)
def test_common_options_come_first(capsys, command, common):
    app([command, "--help"], standalone_mode=False)
    first = capsys.readouterr().out.partition(" Options ")[2].partition("\u2570")[0]
    assert re.findall(r"^\S \s*--([a-z0-9-]+)", first, re.MULTILINE) == common.split()


def test_verifys_help_says_what_gate_4_takes_where_no_setting_is_named():
    """As its plan of everything does, and otherwise what the options' own defaults are."""
    told, defaults = {}, {}
    for name, (each, words) in options("verify").items():
        defaults[name] = str(each.default)
        if found := re.search(r"\[default: ([^\]]*)\]", words):
            told[name] = found[1].removesuffix(" where no setting is named").split("; ")
    question = Question("job", (2, 3, 4), (0, 1, 2, 3), ("24", "small"), 4, 2, "fp32", None, 0, 300.0)
    plan = gates.everything(question, (), full=False, folder="/tmp", slow="")

    def values(axis):
        return list(dict.fromkeys(trial.axes[axis] for trial in plan.trials))

    assert told["ranks"] == [defaults["ranks"], "1 to 4"] and sorted(values("ranks")) == ["1", "2", "3", "4"]
    assert told["steps"] == [defaults["steps"], "2 of the pairs of gate 4"] and plan.own.steps == 2
    for axis in ("replicas", "hosts", "optimizer-over"):
        beside, alone = told[axis]
        assert beside == defaults[axis] and {*alone.split(",")} == {*values(axis.replace("-", " "))}
    assert told["transport"] == [defaults["transport"], "all"] and {*values("transport")} == {*get_args(Transport)}
    assert told["precision"] == ["fp32, without a job bf16", "all but ...-states16"] and told["reduce"] == [
        defaults["reduce"],
        "both",
    ]
    formats = {word for word in get_args(Precision) if "states16" not in word}
    assert {*values("format")} == formats | {"fp32 with int8 gradients"}
    assert told["offload"] == ["none", "cpu,nvme"] and {*values("tier")} == {"device", "cpu", "nvme"}
    assert told["stage"] == [defaults["stage"]] and told["bucket-mib"] == [defaults["bucket-mib"]]


@pytest.mark.parametrize(
    ("name", "default"),
    {
        "precision": "fp32",
        "bounds": "unit",
        "align": "128",
        "bucket-mib": "24 on a CPU",
        "replicas": "1",
        "hosts": "1",
    }.items(),
)
def test_plan_says_the_defaults_of_named_settings(name, default):
    """Those of the policies, which the options leave to them."""
    assert f"[default: {default}]" in options("plan")[name][1]
    fields = {"bounds": Layout().bounds, "align": Layout().align, "bucket-mib": f"{BUCKET_MIB:g} on a CPU"}
    assert str(fields.get(name, default)) == default


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ver", "verify"),
        ("ckpt ", "inspect verify diff export import"),
        ("plan --off", "--offload --offload-parameters --offload-gradients --offload-optimizer --offload-activations "
         "--offload-step"),
        ("train --size ", "tiny deep small medium"),
    ],
)  # fmt: skip
def test_the_tab_key_completes_commands_options_and_their_words(typed, offered):
    words = f"zeroshard {typed}"
    asked = {"_ZEROSHARD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys; sys.argv = ['zeroshard']; from zeroshard.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout.split(), done.stderr) == (offered.split(), "")


@pytest.mark.parametrize(("said", "where"), [(None, "docs/README.md in a clone"), ("https://docs.test/", None)])
def test_the_help_names_the_address_of_the_documents(said, where):
    code = "import sys; sys.argv = ['zeroshard', '--help']; from zeroshard.cli.main import main; main()"
    told = {name: value for name, value in os.environ.items() if name != "ZEROSHARD_DOCS"}
    told |= {"ZEROSHARD_DOCS": said} if said else {}
    done = subprocess.run(
        [sys.executable, "-c", code], env=told, capture_output=True, text=True, timeout=60, check=True
    )
    assert f"Documents: {said or where}" in done.stdout


SPEC = importlib.util.spec_from_file_location("commands", ROOT / "docs" / "commands.py")
PAGES = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PAGES)


@pytest.mark.parametrize("name", PAGES.PAGES)
def test_the_reference_is_made_from_the_code(name):
    page = (ROOT / "docs" / name).read_text()
    assert page == PAGES.PAGES[name](), "python docs/commands.py"
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 132


def test_the_reference_has_every_command_and_option():
    page = (ROOT / "docs" / "commands.md").read_text()
    for command, names in OPTIONS.items():
        section = page.partition(f"## zeroshard {command}\n")[2].partition("\n## ")[0]
        assert {*re.findall(r"--([a-z0-9-]+)", section)} >= {*names.split()}, command
