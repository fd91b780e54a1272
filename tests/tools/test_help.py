"""Helps of commands, at the widths of terminals."""

import re
from typing import get_args

import pytest
import typer

from zeroshard.cli import gates
from zeroshard.cli.config import Precision, Transport
from zeroshard.cli.main import app
from zeroshard.cli.question import Question
from zeroshard.layout.partition import BUCKET_MIB
from zeroshard.policies.layout import Layout

OPTIONS = {
    "train": "accumulate batch data device grad-dtype help hosts keep lr no-recompute no-report offload offload-activations offload-gradients offload-optimizer "
    "offload-parameters offload-path optimizer-over out precision ranks recompute reduce replicas report resume save-every seed size stage steps timeout "
    "transport",
    "demo": "help out ranks seed steps verbose",
    "plan": "accumulate align batch bounds bucket-mib bytes check config disk disk-read disk-write ep exact experts fp8 gpu gpu-mem gpus-per-node grad-dtype help hosts "
    "host-mem json machine matrices no-sync offload offload-activations offload-gradients offload-optimizer offload-parameters optimizer "
    "optimizer-in-backward optimizer-over params precision "
    "prefetch preset ranks recompute reduce replicas seq shapes stage step-time text tokens transport units whole",
    "simulate": "accumulate bucket-mib ep experts grad-dtype help hosts json machine matrices offload offload-activations offload-gradients offload-optimizer "
    "offload-parameters optimizer-in-backward optimizer-over precision prefetch rank ranks recompute reduce replicas stage trace transport",
    "ckpt inspect": "help json",
    "ckpt verify": "help json",
    "ckpt diff": "help json",
    "ckpt export": "dtype file-size help json overwrite",
    "ckpt import": "buffer help json optimizer tied weights",
    "explain": "help json no-open open out",
    "verify": "accumulate bucket-mib clip full help hosts json offload offload-path optimizer-in-backward "
    "optimizer-over out precision ranks reduce replicas seed stage steps timeout transport",
    "doctor": "help json",
}


@pytest.fixture
def helped(monkeypatch, capsys):
    """What a command's help prints on a terminal of that many columns."""

    def shown(command, asked, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        app([*command.split(), asked], standalone_mode=False)
        return capsys.readouterr().out

    return shown


def test_the_options_are_these(helped):
    """A new option is a decision; this list makes it one."""
    for command, options in OPTIONS.items():
        shown = helped(command, "--help-all")
        found = re.findall(r"^  --([a-z0-9-]+)|, --(no-[a-z-]+)\s", shown, re.MULTILINE)
        assert sorted({first or negated for first, negated in found} - {"help-all"}) == sorted(options.split())
    assert "train" in helped("", "--help")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ["", *OPTIONS])
def test_helps_fill_their_lines_and_cut_nothing(helped, command, width):
    """Lines within the terminal, of whole names and words; each goes on until the next word would not fit."""
    narrow, endless = (helped(command, "--help-all", columns) for columns in (width, 1000))
    words = re.split("\n(?:Arguments|Options)\n", narrow)[0]
    assert max(map(len, narrow.splitlines())) <= width
    assert narrow.split() == endless.split() and "\u2026" not in narrow and "\nOptions\n" in narrow
    for line, after in zip(words.splitlines(), words.splitlines()[1:], strict=False):
        if line and after and not line.startswith("  "):
            assert len(line) + 1 + len(after.split()[0]) > width or line.endswith(":"), line


@pytest.mark.parametrize(
    ("command", "common", "rest"),
    [
        ("plan", "params shapes ranks stage gpu gpu-mem host-mem disk preset check offload", 39),
        ("train", "data stage ranks size steps out resume offload", 22),
        ("verify", "ranks stage steps accumulate precision offload full out", 12),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_common_options_come_first_and_the_rest_is_behind_help_all(helped, command, common, rest):
    short, long = (helped(command, asked) for asked in ("--help", "--help-all"))
    first, all_of_it = (re.findall(r"^  --([a-z0-9-]+)", shown, re.MULTILINE) for shown in (short, long))
    assert first == [*common.split(), "help", "help-all"] == all_of_it[: len(first)]
    assert re.search(rf"--help-all +Show {rest} more option", short)
    assert len(all_of_it) == len(first) + rest


@pytest.mark.parametrize(
    ("command", "options"), [("demo", "steps ranks seed out verbose help"), ("doctor", "json help"), ("ckpt", "help")]
)
def test_a_help_of_few_options_shows_all(helped, command, options):
    shown = [helped(command, asked) for asked in ("--help", "--help-all")]
    assert shown[0] == shown[1] and re.findall(r"^  --([a-z-]+)", shown[0], re.MULTILINE) == options.split()


def test_verifys_help_says_what_gate_4_takes_where_no_setting_is_named(helped):
    """As its plan of everything does, and otherwise what the options' own defaults are."""
    told, defaults = {}, {}
    for row in helped("verify", "--help-all").split("\n  --")[1:]:
        if found := re.search(r"\[default: ([^\]]*)\]", re.sub(r"\s+", " ", row)):
            told[row.split()[0]] = found[1].removesuffix(" where no setting is named").split("; ")
    for each in typer.main.get_command(app).commands["verify"].params:
        defaults[each.name.replace("_", "-")] = str(each.default)
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
    assert told["precision"] == ["fp32, without a job bf16", "all"] and told["reduce"] == [defaults["reduce"], "both"]
    assert {*values("format")} == {*get_args(Precision), "fp32 with int8 gradients"}
    assert told["offload"] == ["none", "cpu,nvme"] and {*values("tier")} == {"device", "cpu", "nvme"}
    assert told["stage"] == [defaults["stage"]] and told["bucket-mib"] == [defaults["bucket-mib"]]


@pytest.mark.parametrize("width", [80, 120])
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
def test_plan_says_the_defaults_of_named_settings(helped, name, default, width):
    """Those of the policies, which the options leave to them."""
    shown = re.sub(r"\s+", " ", helped("plan", "--help-all", width))
    assert re.search(rf"--{name} [^[]*\[default: {default}\]", shown)
    fields = {"bounds": Layout().bounds, "align": Layout().align, "bucket-mib": f"{BUCKET_MIB:g} on a CPU"}
    assert str(fields.get(name, default)) == default
