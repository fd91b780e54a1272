"""Helps of commands, at the widths of terminals."""

import re

import pytest

from zeroshard.cli.main import app

OPTIONS = {
    "train": "accumulate batch data device grad-dtype help hosts keep lr no-recompute no-report offload offload-activations offload-gradients offload-optimizer "
    "offload-parameters offload-path optimizer-over out precision ranks recompute reduce replicas report resume save-every seed size stage steps timeout "
    "transport",
    "demo": "help out ranks seed steps verbose",
    "plan": "accumulate align bounds bucket-mib bytes check config disk ep exact experts export gpu gpu-mem gpus-per-node grad-dtype help hosts "
    "host-mem json machine no-sync offload offload-activations offload-gradients offload-optimizer offload-parameters optimizer "
    "optimizer-in-backward optimizer-over params precision "
    "prefetch preset ranks recompute reduce replicas shapes stage step-time text tokens transport units whole",
    "simulate": "accumulate bucket-mib ep experts grad-dtype help hosts json machine offload offload-activations offload-gradients offload-optimizer "
    "offload-parameters optimizer-in-backward optimizer-over precision prefetch rank ranks recompute reduce replicas stage trace transport",
    "ckpt inspect": "help json",
    "ckpt verify": "help json",
    "ckpt diff": "help json",
    "ckpt export": "dtype file-size help json overwrite",
    "ckpt import": "buffer help json optimizer tied weights",
    "explain": "element help no-open open out stage text",
    "verify": "accumulate bucket-mib clip full help hosts json offload offload-path optimizer-in-backward "
    "optimizer-over out precision ranks reduce replicas seed stage steps timeout transport",
    "doctor": "help json",
    "io-bench": "block depth direct help json offload offload-activations offload-gradients offload-optimizer offload-parameters out params "
    "ranks rounds sharing size stage tokens",
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
        found = re.findall(r"^  --([a-z-]+)|, --(no-[a-z-]+)\s", shown, re.MULTILINE)
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
        ("plan", "params shapes ranks stage gpu gpu-mem preset check offload", 36),
        ("train", "data stage ranks size steps out resume offload", 22),
        ("verify", "ranks stage steps accumulate precision offload full out", 12),
        ("io-bench", "params ranks stage tokens size out offload", 10),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_common_options_come_first_and_the_rest_is_behind_help_all(helped, command, common, rest):
    short, long = (helped(command, asked) for asked in ("--help", "--help-all"))
    first, all_of_it = (re.findall(r"^  --([a-z-]+)", shown, re.MULTILINE) for shown in (short, long))
    assert first == [*common.split(), "help", "help-all"] == all_of_it[: len(first)]
    assert re.search(rf"--help-all +Show {rest} more option", short)
    assert len(all_of_it) == len(first) + rest


@pytest.mark.parametrize(
    ("command", "options"), [("demo", "steps ranks seed out verbose help"), ("doctor", "json help"), ("ckpt", "help")]
)
def test_a_help_of_few_options_shows_all(helped, command, options):
    shown = [helped(command, asked) for asked in ("--help", "--help-all")]
    assert shown[0] == shown[1] and re.findall(r"^  --([a-z-]+)", shown[0], re.MULTILINE) == options.split()
