"""Numbers in the documents that a command, or a file, has: each is read from its page and computed anew."""

import json
import re
from pathlib import Path

import pytest

import zeroshard
from zeroshard import Comm
from zeroshard.explain.document import Page, built_in, document, template

ROOT = Path(__file__).parents[2]


def page(name):
    return " ".join((ROOT / name).read_text().split())


def cells(name, first):
    """The cells of a page's table row that begins with this one."""
    (row,) = re.findall(rf"^ *\| {re.escape(first)} \|(.*)\|$", (ROOT / name).read_text(), re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


@pytest.mark.parametrize("stage", range(4))
def test_what_a_stage_holds(stage):
    """docs/choose-a-stage.md: the formula, and 7 B parameters on 8 GPUs."""
    (found,) = zeroshard.plan(params="7B", ranks=8, preset="zeroshard", stage=stage).stages
    assert cells("docs/choose-a-stage.md", str(stage))[1:] == [found.formula, f"{found.total / 1e9:g} GB"]


def test_which_stage_sends_least():
    """docs/when-not.md and docs/choose-a-stage.md, in bf16: stage 0 as much as stage 3, stages 1 and 2 as DDP."""
    sent = [stage.traffic.total.sent for stage in zeroshard.plan(params="7B", ranks=8, preset="zeroshard").stages]
    assert sent[0] == sent[3] and sent[1] == sent[2] == min(sent) == 2 * 2 * 7e9 * 7 / 8  # DDP: twice the bf16 weights
    said = f"for 7 B parameters on 8 ranks {sent[0] / 1e9:g} GB per rank and step, where stages 1 and 2 send {sent[1] / 1e9:g}"
    assert said in page("docs/when-not.md")
    fp32 = [stage.traffic.total.sent for stage in zeroshard.plan(params="7B", ranks=8, preset="fp32").stages]
    assert fp32[0] == fp32[1] == fp32[2] == 2 * fp32[3] / 3


def test_passes_of_a_step():
    """README.md and docs/choose-a-stage.md: the model twice, at stage 3 three times; A + 1 and 3A with A backwards."""
    for backwards in (1, 4):
        found = zeroshard.plan(params="7B", ranks=8, accumulate=backwards).stages
        assert [stage.traffic.passes for stage in found] == [backwards + 1] * 3 + [3 * backwards]
    assert "Stages 0 to 2 send the model twice in a step, stage 3 three times" in page("README.md")
    assert "3A passes of the parameters in a step of A backwards, where the other stages take A + 1" in page(
        "docs/choose-a-stage.md"
    )


@pytest.mark.parametrize("name", ["README.md", "docs/choose-a-stage.md"])
def test_why_18_bytes_and_not_16(name):
    """One sentence where both are first met; the page has it too (web/src/views/Overview.svelte)."""
    ours, paper = (
        zeroshard.plan(params=1000, ranks=1, stage=0, preset=each).stages[0].total for each in ("zeroshard", "paper")
    )
    assert (ours, paper) == (18_000, 16_000)
    # Only where it differs from the paper, in the words in which it is said.
    said = {
        "README.md": "18 bytes here and 16 there: the paper's gradients, and those of the page's walkthroughs, take 2 bytes",
        "docs/choose-a-stage.md": "count 16 bytes at stage 0: their gradients take 2 bytes",
    }
    assert said[name] in " ".join(page(name).split())


def test_how_much_longer_a_step_in_host_memory_takes():
    """docs/choose-a-stage.md repeats what docs/gpus.md measured."""
    (measured,) = cells("docs/gpus.md", "stage 3, all in host memory (16 cores)")
    assert f"took {measured} times as long as plain PyTorch's" in page("docs/choose-a-stage.md")


HOSTS = {"one replica of 64": Comm(), "`hosts=8`": Comm(hosts=8), "`replicas=8`": Comm(replicas=8),
         '`replicas=8, optimizer="all"`': Comm(replicas=8, optimizer="all")}  # fmt: skip


@pytest.mark.parametrize("row", HOSTS)
def test_what_64_ranks_send_between_hosts(row):
    """docs/hosts.md: bytes per parameter held, and sent between hosts of 8, with one backward and with four."""
    numel = 64 * 10**6
    asked = {"params": numel, "preset": "zeroshard", "ranks": 64, "stage": 3, "comm": HOSTS[row], "gpus_per_node": 8}
    one, four = (zeroshard.plan(**asked, accumulate=backwards).stages[0] for backwards in (1, 4))
    *_, held, sent, with_four = cells("docs/hosts.md", row)
    for said, nbytes in ((held, one.total), (sent, one.links.between), (with_four, four.links.between)):
        decimals = len(said.partition(".")[2])
        assert said == f"{nbytes / numel:.{decimals}f}"


def test_how_large_the_page_is(tmp_path):
    """docs/explain.md, in kB: the template, the walkthroughs in it, and a page of 1,000 tensors."""
    template_kb = len(template().encode()) / 1000
    Page(document(walkthroughs=built_in(), run=None)).write(tmp_path / "zero.html")
    whole_kb = (tmp_path / "zero.html").stat().st_size / 1000
    run = json.loads((ROOT / "web" / "fixtures" / "run-1000.json").read_text())["run"]
    Page(document(walkthroughs=built_in(), run=run)).write(tmp_path / "run.html")
    large_mb = (tmp_path / "run.html").stat().st_size / 1e6
    said = page("docs/explain.md")
    assert f"A page takes {template_kb:.0f} kB, the walkthroughs {whole_kb - template_kb:.0f} kB" in said
    assert f"`web/fixtures/run-1000.json`, {large_mb:.1f} MB with the walkthroughs" in said
