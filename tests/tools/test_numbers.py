"""Numbers in the documents that a command, or a file, has: each is read from its page and computed anew."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from bench import manifests

import zeroshard
from flat import plan_of
from zeroshard import Comm, Layout, Machine, Model, Precision, Step
from zeroshard.explain.document import Page, built_in, document, template
from zeroshard.planner.machines import MACHINES
from zeroshard.planner.simulate import STEPS, simulate
from zeroshard.testing import assert_same_bits

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"^```\w*\n\$ zeroshard (plan .*)\n((?:.*\n)*?)^```$", re.MULTILINE)
WHOLE = ("*.attn.c_*.weight", "*.mlp.c_*.weight")


def page(name):
    return " ".join((ROOT / name).read_text().split())


def cells(name, first):
    """The cells of a page's table row that begins with this one."""
    (row,) = re.findall(rf"^ *\| {re.escape(first)} \|(.*)\|$", (ROOT / name).read_text(), re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


@pytest.mark.parametrize("stage", range(4))
def test_what_a_stage_holds(stage):
    """docs/choose-a-stage.md: the formula, and 7 B parameters on 8 GPUs."""
    (found,) = zeroshard.plan(Model("7B", preset="zeroshard"), Machine(ranks=8), stage=stage).stages
    assert cells("docs/choose-a-stage.md", str(stage))[1:] == [found.formula, f"{found.total / 1e9:g} GB"]


def test_which_stage_sends_least():
    """docs/choose-a-stage.md, in bf16: stage 0 as much as stage 3, stages 1 and 2 as DDP."""
    sent = [
        stage.traffic.total.sent for stage in zeroshard.plan(Model("7B", preset="zeroshard"), Machine(ranks=8)).stages
    ]
    assert sent[0] == sent[3] and sent[1] == sent[2] == min(sent) == 2 * 2 * 7e9 * 7 / 8  # DDP: twice the bf16 weights
    said = f"for 7 B parameters on 8 ranks {sent[0] / 1e9:g} GB per rank and step, where stages 1 and 2 send {sent[1] / 1e9:g}"
    assert said in page("docs/choose-a-stage.md")
    fp32 = [stage.traffic.total.sent for stage in zeroshard.plan(Model("7B", preset="fp32"), Machine(ranks=8)).stages]
    assert fp32[0] == fp32[1] == fp32[2] == 2 * fp32[3] / 3


def test_passes_of_a_step():
    """README.md and docs/choose-a-stage.md: two numbers per parameter, at stage 3 three; A + 1 and 3A with A backwards."""
    for backwards in (1, 4):
        found = zeroshard.plan("7B", Machine(ranks=8), step=Step(accumulate=backwards)).stages
        assert [stage.traffic.passes for stage in found] == [backwards + 1] * 3 + [3 * backwards]
    said = "For each parameter a step sends two numbers (weights or gradients) at stages 0 to 2, and three at stage 3."
    assert said in page("README.md")
    assert "3A passes in a step of A backwards, and the other stages send A + 1 passes" in page(
        "docs/choose-a-stage.md"
    )


@pytest.mark.parametrize("name", ["README.md", "docs/choose-a-stage.md"])
def test_why_18_bytes_and_not_16(name):
    """One sentence where both are first met; the page has it too (web/src/views/Overview.svelte)."""
    ours, paper = (zeroshard.plan(Model(1000, preset=each), stage=0).stages[0].total for each in ("zeroshard", "paper"))
    assert (ours, paper) == (18_000, 16_000)
    # Only where it differs from the paper, in the words in which it is said.
    said = {
        "README.md": "At stage 0 zeroshard holds 18 bytes per parameter, and the paper counts 16: the paper's gradients take 2 bytes",
        "docs/choose-a-stage.md": "count 16 bytes at stage 0: their gradients take 2 bytes",
    }
    assert said[name] in " ".join(page(name).split())


def test_how_much_longer_a_step_in_host_memory_takes():
    """docs/choose-a-stage.md repeats what docs/gpus.md measured."""
    (measured,) = cells("docs/gpus.md", 'stage 3, all in host memory, `step="host"` (16 cores)')
    assert f"took {measured} times as long as plain PyTorch's" in page("docs/choose-a-stage.md")


def test_what_to_expect_on_a_gpu():
    """docs/your-gpu.md repeats what docs/gpus.md measured."""
    stages, (fsdp2,) = range(4), cells("docs/gpus.md", "FSDP2, sums in fp32")
    said, each = page("docs/your-gpu.md"), sorted(cells("docs/gpus.md", f"stage {stage}")[0] for stage in stages)
    assert f"{each[0]} to {each[-1]} times the time of plain PyTorch; FSDP2 took {fsdp2}" in said
    (clipped,) = cells("docs/gpus.md", "stage 3, clipped")
    (host,) = cells("docs/gpus.md", 'stage 3, all in host memory, `step="host"` (16 cores)')
    assert f"clips gradients | {clipped} times |" in said and f'`step="host"` | {host} times;' in said


HOSTS = {"one replica of 64": Comm(), "`hosts=8`": Comm(hosts=8), "`replicas=8`": Comm(replicas=8),
         '`replicas=8, optimizer="all"`': Comm(replicas=8, optimizer="all")}  # fmt: skip


@pytest.mark.parametrize("row", HOSTS)
def test_what_64_ranks_send_between_hosts(row):
    """docs/hosts.md: bytes per parameter held, and sent between hosts of 8, with one backward and with four."""
    numel = 64 * 10**6
    asked = {"params": numel, "preset": "zeroshard", "ranks": 64, "stage": 3, "comm": HOSTS[row], "gpus_per_node": 8}
    one, four = (plan_of(**asked, accumulate=backwards).stages[0] for backwards in (1, 4))
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
    assert f"An empty page takes {template_kb:.0f} kB, and the walkthroughs add {whole_kb - template_kb:.0f} kB" in said
    assert f"(`web/fixtures/run-1000.json`) make {large_mb:.1f} MB" in said


def test_between_hosts_in_words():
    """docs/hosts.md: one copy on 8 hosts beside one replica, in bytes per parameter; the optimizer over 2 hosts in fp32."""
    asked = {"params": 64 * 10**6, "ranks": 64, "stage": 3, "gpus_per_node": 8}
    sent = {}
    for backwards in (1, 4):
        (found,) = plan_of(**asked, preset="zeroshard", comm=Comm(hosts=8), accumulate=backwards).stages
        sent[backwards] = {name: nbytes / asked["params"] for name, nbytes in found.slow_link._asdict().items()}
    one, four = sent[1], sent[4]
    said = f"""a rank sends {one["sent"]:.2f} bytes per parameter between hosts in a step. Without `hosts` it sends
        {one["with_one"]:.2f}, or {one["with_one_gloo"]:.2f} over gloo, which gathers by broadcasts. These numbers are for
        bf16, fp32 sums and one backward. With four backwards it sends {four["sent"]:.2f}, and without `hosts`
        {four["with_one"]:.2f}."""
    assert " ".join(said.split()) in page("docs/hosts.md")
    team, spread = (
        zeroshard.plan(
            Model(10**8, preset="fp32"),
            Machine(ranks=4, gpus_per_node=2),
            stage=3,
            comm=Comm(replicas=2, optimizer=over),
        )
        .stages[0]
        .links.between
        for over in ("team", "all")
    )
    said = f"in fp32, it sends {spread / team:g} times as many bytes as `replicas` alone on average over the ranks"
    assert said in page("docs/hosts.md")


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_what_a_page_shows_of_a_plan_is_printed(name, command, monkeypatch):
    """Line after line; "..." stands for lines that are left out. Whole outputs too."""
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setenv("COLUMNS", "132")
    for words, shown in SHOWN.findall((ROOT / "docs" / name).read_text()):
        if "--check" in words:  # test_simulate.py runs it
            continue
        code, told, _ = command(*shlex.split(words))
        printed = "\n".join(line.rstrip() for line in told.strip("\n").splitlines())
        wanted = re.escape(shown.strip("\n")).replace(re.escape("..."), "(?:.*\n)*.*")
        assert code == 0 and re.fullmatch(wanted, printed), f"$ zeroshard {words}\n{printed}"


def test_every_output_of_a_plan_is_found():
    """By the pattern that the test above takes them with: the pages have no such command that it does not see."""
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text()
        assert len(SHOWN.findall(text)) == len(re.findall(r"^\$ zeroshard plan ", text, re.MULTILINE)), path.name


def llama_7b():
    """Shapes of Llama 2 7B."""
    blocks = {
        "self_attn.q_proj": [4096, 4096], "self_attn.k_proj": [4096, 4096], "self_attn.v_proj": [4096, 4096],
        "self_attn.o_proj": [4096, 4096], "mlp.gate_proj": [11008, 4096], "mlp.up_proj": [11008, 4096],
        "mlp.down_proj": [4096, 11008],
    }  # fmt: skip
    layers = {f"layers.{layer}.{name}.weight": shape for layer in range(32) for name, shape in blocks.items()}
    return {"embed_tokens.weight": [32000, 4096], **layers, "lm_head.weight": [32000, 4096]}


def test_how_even_the_owners_of_matrices_are(tmp_path):
    """docs/optimizers.md, of the rank with most work."""
    (tmp_path / "llama.json").write_text(json.dumps(llama_7b()))
    gpt2, llama = (
        zeroshard.plan(shapes, Machine(ranks=ranks), stage=1, layout=Layout(whole=whole)).json()["whole"]["work"]
        for shapes, ranks, whole in (
            (ROOT / "docs" / "shapes" / "gpt2", 8, WHOLE), (tmp_path / "llama.json", 64, ["layers.*"])
        )
    )  # fmt: skip
    said = f"With GPT-2's matrices the busiest of 8 ranks has {gpt2:.2f} times the mean work of a rank. "
    then = f"With the matrices of Llama 2 7B the busiest of 64 ranks has {llama:.2f} times the mean work."
    assert said + then in page("docs/optimizers.md")


def test_bytes_of_split_masters():
    """docs/precision.md, per parameter at stages 0 to 2."""
    formulas = [
        stage.formula
        for stage in zeroshard.plan(
            10**6, Machine(ranks=8), precision=Precision(param_dtype=torch.bfloat16, split_master=True)
        ).stages
    ]
    whole = zeroshard.plan(Model(10**6, preset="zeroshard"), stage=0).stages[0].total / 10**6
    said = (
        f"saves {whole - float(formulas[0]):g} bytes of each master. With AdamW on N ranks, each parameter then takes "
    )
    each = f"{formulas[0]} bytes at stage 0, {formulas[1]} at stage 1 and {formulas[2]} at stage 2"
    assert said + each in page("docs/precision.md")


@pytest.mark.parametrize("row", ["without it", "`--reduce int8`"])
def test_bytes_that_a_step_sends_with_gradients_of_8_bits(row):
    """docs/precision.md, of the demo's model on two ranks at stage 2, simulated."""
    comm = Comm(transport="gloo", reduce="int8" if "int8" in row else "ordered")
    run = simulate("zeroshard.cli.model:demo_job", ranks=2, rank=0, stage=2, comm=comm)
    sent = sum(run.ledger.traffic[verb].sent for verb in ("gather", "reduce")) // STEPS
    *_, said = cells("docs/precision.md", row)
    assert said == f"{sent:,}"


@pytest.mark.parametrize("what", ["launch", "kernel", "drain", "message"])
def test_what_a_simulation_assumes_of_the_host(what):
    """docs/simulation.md, in microseconds and milliseconds."""
    seconds = getattr(MACHINES["h100"], what)
    said, _ = cells("docs/simulation.md", f"`{what}`")
    wanted = f"{seconds * 1e3:g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:g} us"
    assert re.match(rf"(at least )?{re.escape(wanted)} ", said), said


@pytest.mark.full
def test_how_large_a_log_of_a_step_is(tmp_path):
    """docs/diff.md, in kB: of examples/job.py with two micro-batches, without a trace and with one."""
    spec = importlib.util.spec_from_file_location("job", ROOT / "examples" / "job.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    grown = []
    for trace in (False, True):
        torch.manual_seed(0)
        job, folder, sizes = module.job(), tmp_path / f"{trace}", []
        model = job["model"]
        optimizer = job["optimizer"](model.parameters())
        with zeroshard.RunLog(folder, model, optimizer, trace=trace) as log:
            for step in range(4):
                for turn in range(2):
                    loss = job["loss"](model, job["batch"](step, turn)) / 2
                    loss.backward()
                    log.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                sizes.append(sum(path.stat().st_size for path in folder.rglob("*")))
        grown.append((sizes[-1] - sizes[0]) / 3 / 1000)
    said = page("docs/diff.md")
    assert all(
        f"and writes {size:.0f} kB. {then}" in said for size, then in zip(grown, ("With", "A trace"), strict=True)
    )


@pytest.mark.full
def test_what_a_checkpoint_of_1024_ranks_has_beside_its_tensors(tmp_path, monkeypatch):
    """docs/clusters.md, written by the engine's own code; 4,096 ranks are in bench/results (test_measured.py)."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")  # it is in the manifest
    save = manifests.write(tmp_path, 1024)
    for name, key in (("manifest of 70 B", "manifest's bytes"), ("largest part of it", "largest part's bytes"),
                      ("told by all ranks in a save", "all tell")):  # fmt: skip
        *_, said, _ = cells("docs/clusters.md", f"{name}, bytes")
        assert said == f"{save[key]:,}"


def test_what_the_tutorials_model_takes():
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    numel = sum(parameter.numel() for parameter in model.parameters())
    said = f"The model has {numel:,} parameters, which take {16 * numel:,} bytes"
    assert said in page("docs/tutorial.md")


def test_what_two_tensors_differ_in():
    """docs/testing.md: the shown line, of two tensors with these numbers."""
    (shown,) = re.findall(
        r"^```text\n(0\.weight: element.*)\n```$", (ROOT / "docs" / "testing.md").read_text(), re.MULTILINE
    )
    first, second = (float(each) for each in re.findall(r"(0\.\d+) \(0x", shown))
    one = {f"{at}.{name}": torch.zeros(16, 8) for at in (0, 2) for name in ("weight", "bias")}
    other = {name: tensor + 1 for name, tensor in one.items()}
    one["0.weight"][3, 0], other["0.weight"] = first, one["0.weight"].clone()
    other["0.weight"][3, 0] = second
    other["0.weight"][4:6] += 2**-25  # sixteen more, by as much as the farthest that are apart
    with pytest.raises(AssertionError) as raised:
        assert_same_bits(one, other)
    assert str(raised.value) == shown


def test_how_much_less_stage_3_holds():
    """README.md, of its own table, whose rows tests/tools/test_cli.py computes."""
    (_, rest, peak, *_), (_, least, low, *_) = (
        [int(cell.split()[0].replace(",", "")) if cell[0].isdigit() else cell for cell in cells("README.md", stage)]
        for stage in ("0", "3")
    )
    assert rest / least == pytest.approx(4, abs=0.01)  # "a quarter", with counters of steps on every rank
    said = "stage 3 holds a quarter of the bytes that stage 0 holds, and the peak of stage 3 is"
    assert f"{said} {100 * low / peak:.0f} % of the peak of stage 0" in page("README.md")


def test_what_a_stage_sends_is_said_in_bytes():
    """README.md and docs/choose-a-stage.md: of 7 B parameters in bf16 on 8 ranks, for one backward."""
    sent = [stage.traffic.total.sent / 1e9 for stage in zeroshard.plan(Model("7B"), Machine(ranks=8)).stages]
    said = f"sends {sent[0]:.2f} GB in a step at stages 0 and 3, and {sent[1]:.2f} GB at stages 1 and 2"
    why = "Stage 0 sends more than stages 1 and 2 because it sends averaged gradients in fp32"
    assert f"{said}. {why}" in page("README.md")
    chosen = " ".join(page("docs/choose-a-stage.md").split())
    assert said in chosen and (sent[3], sent[2]) == (sent[0], sent[1]) and 3 * sent[1] == pytest.approx(2 * sent[0])
    fp32 = zeroshard.plan(Model("7B", preset="fp32"), Machine(ranks=8)).stages
    assert fp32[0].traffic.total.sent == fp32[1].traffic.total.sent  # "as many bytes in fp32"
