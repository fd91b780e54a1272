"""The search for what fits: against every setting by the same clock, run as it is printed, and for every machine."""

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import emulated
import ranks
import zeroshard
from flat import plan_of
from zeroshard import Comm, Layout, Machine, Model, Offload, Precision, Step
from zeroshard.cli.main import app
from zeroshard.errors import UserError
from zeroshard.events import DEVICE, HOST, NVME
from zeroshard.layout.partition import partition
from zeroshard.planner import clock, fits_job, fitting, from_number, gpus, recipes, transformer
from zeroshard.planner.asked import Asked
from zeroshard.planner.disk import Disk
from zeroshard.planner.from_job import runner
from zeroshard.planner.line import of_fit
from zeroshard.planner.simulate import simulate

MB = 10**6
SMALL = 4 * MB  # parameters, in four units

# ---------------------------------------------------------------------------------------------- against brute force


def asked(ranks, device, host, files, preset="zeroshard", seq=8):
    disk = Disk(2e9, 1e9, size=files) if files else None
    return Asked(
        ranks=ranks, stages=(0, 1, 2, 3), recipe=recipes.PRESETS[preset], layout=Layout().on(accelerator=True),
        comm=Comm(), gpu_mem=device, host_mem=host, disk=disk, units=4, batch=1, seq=seq, gpu="4090", accelerator=True,
    )  # fmt: skip


def shares(mix):
    """Every way to share `PARTS` parts among these tiers, at least one in each."""
    for cuts in itertools.combinations(range(1, fitting.PARTS), len(mix) - 1):
        ends = (0, *cuts, fitting.PARTS)
        yield {tier: after - before for tier, before, after in zip(mix, ends, ends[1:], strict=False)}


def by_hand(search, numbers):
    """The least seconds of all settings that fit, each planned; None if none does."""
    least = None
    for way, mix in search.ways(numbers):
        for parts in shares(mix):
            each = way._replace(at={**way.at, "optimizer": parts})
            if (least is None or search.seconds(each) < least) and search.need(each).within(search.of.most):
                least = search.seconds(each)
    return least


def compared(question, heading=""):
    laid = from_number.laid_out(SMALL, question)
    most = fitting.Need(question.gpu_mem, question.host_mem, question.disk.size if question.disk else 0)
    machine = fitting.Machines(question, SMALL, laid.body, laid.planned, most, question.tokens_at_once)
    search = fitting.Search(machine)
    numbers = [each for each in fitting.numbers_of(question.recipe) if each.heading == heading]
    found = search.fastest(numbers, 1)
    return [search.seconds(each.way) for each in found], [*filter(None, [by_hand(fitting.Search(machine), numbers)])]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ranks", "device", "host", "files"),
    [
        (1, 20, 60, 0),
        *(
            pytest.param(*cell, marks=pytest.mark.full)
            for cell in (
                (1, 12, 60, 0),
                (1, 40, 40, 0),
                (1, 14, 52, 0),
                (2, 14, 30, 0),
                (2, 20, 16, 0),
                (1, 70, 8, 0),
                (1, 20, 12, 100),
                (1, 30, 40, 100),
                (2, 12, 12, 100),
            )
        ),
    ],
)
def test_no_setting_that_fits_is_faster(monkeypatch, ranks, device, host, files):
    """Shares in quarters: then every setting can be planned."""
    monkeypatch.setattr(fitting, "PARTS", 4)
    monkeypatch.setattr(fitting, "QUARTERS", tuple({DEVICE: 4 - at, HOST: at} for at in (1, 2, 3)))
    monkeypatch.setattr(fitting, "WHOLE", ({DEVICE: 4}, {HOST: 4}, {NVME: 4}))
    found, wanted = compared(asked(ranks, device * MB, host * MB, files * MB))
    assert found == wanted


@pytest.mark.full
@pytest.mark.parametrize("device", [12, 16, 24])
@pytest.mark.parametrize("heading", ["16-bit gradients", "everything in bf16, masters too"])
def test_no_setting_in_twentieths_is_faster(device, heading):
    found, wanted = compared(asked(1, device * MB, 40 * MB, 0), heading)
    assert found == wanted


# ----------------------------------------------------------------------------------------------- run as it is printed


class Tiny(nn.Module):
    """Blocks of a transformer's shape without attention, each 12 h^2: a 7 B model's policies at a millionth of it."""

    def __init__(self, width=96, blocks=12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, 4 * width // 2), nn.Tanh(),
                nn.Linear(2 * width, width),
            )
            for _ in range(blocks)
        )  # fmt: skip

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def arguments(line):
    """What a printed line gives to `shard`; called with a package that keeps it."""
    called = []
    package = SimpleNamespace(
        shard=lambda *model, **how: called.append(how), Precision=Precision, Layout=Layout, Comm=Comm, Offload=Offload
    )
    exec(line, {"zeroshard": package, "torch": torch, "model": "model", "optimizer": "optimizer"})
    return called[0]


def held(line, folder):
    """What a rank holds after three steps of the line, {tier: {state: bytes}}, and the most on the device."""
    how = arguments(line)
    if isinstance(how.get("offload"), Offload) and how["offload"].path:
        how["offload"] = Offload(**{**vars(how["offload"]), "path": folder})
    torch.manual_seed(0)
    model = Tiny().to("emu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    zero = zeroshard.shard(model, optimizer, **how)
    zero._engine.reduction.pause = 60.0  # on a busy machine the emulated device is late
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 96, generator=generator).to("emu", torch.bfloat16 if "precision" in how else torch.float32)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.emu.synchronize()
    ledger = zero.ledger()
    return {tier: dict(found) for tier, found in ledger.tiers.items()}, max(p.total for p in ledger.phases.values())


PASS = {"staging", "activations", "staged activations", "reduce", "gather", "prefetch", "norms"}
STATES_OF = {"m": "exp_avg", "v": "exp_avg_sq"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ranks", "device", "host", "disk", "heading"),
    [
        (1, "7MB", "22MB", None, ""),
        pytest.param(1, "8MB", "16MB", "60MB", "", marks=pytest.mark.full),
        pytest.param(2, "6MB", "9MB", None, "", marks=pytest.mark.full),
        pytest.param(1, "60MB", "1MB", None, "", marks=pytest.mark.full),
        pytest.param(2, "6MB", "7MB", None, "everything in bf16, masters too", marks=pytest.mark.full),
        pytest.param(1, "7MB", "22MB", None, "everything in bf16, masters too", marks=pytest.mark.full),
    ],
)
def test_a_line_runs_and_holds_what_was_planned(tmp_path, ranks, device, host, disk, heading):
    """To the byte in every tier, on the emulated device; at the peak no more than planned."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({name: list(param.shape) for name, param in Tiny().named_parameters()}))
    found = zeroshard.plan(
        Model(shapes=path, preset="zeroshard"),
        Machine(ranks=ranks, gpu_mem=device, host_mem=host, disk=disk),
        step=Step(batch=1, seq=4),
    ).fitting
    fits = [each.fits[0] for each in found.found if each.fits and each.heading == heading]
    assert fits, [each.proof for each in found.found]
    fit = fits[0]
    runs_as_planned(fit, ranks, tmp_path)


@pytest.mark.parametrize(("device", "host"), [("60MB", "1MB"), pytest.param("6MB", "20MB", marks=pytest.mark.full)])
def test_a_line_of_states_in_16_bits_runs_and_holds_what_was_planned(tmp_path, device, host):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({name: list(param.shape) for name, param in Tiny().named_parameters()}))
    states = {"*": torch.bfloat16}
    found = zeroshard.plan(
        path, Machine(ranks=1, gpu_mem=device, host_mem=host), step=Step(batch=1, seq=4),
        precision=Precision(param_dtype=torch.bfloat16, cast_inputs=True, states=states),
    ).fitting  # fmt: skip
    fit = found.found[0].fits[0]
    assert [each.heading for each in found.found] == [""]
    assert (fit.way.offload is None) == (device == "60MB")
    assert arguments(of_fit(fit, {}, {}))["precision"].states == states
    runs_as_planned(fit, 1, tmp_path)


def runs_as_planned(fit, ranks, folder):
    """Run the line of a fit; its bytes are the plan's, in every tier."""
    line = of_fit(fit, {}, {})
    for rank, (tiers, peak) in enumerate(emulated.run(ranks, held, line, str(folder), seed=1)):
        moved = fit.way.activations != "device"  # then the engine counts activations too
        assert peak <= (fit.plan.most if moved else fit.plan.peak)
        if rank != fit.plan.rank:  # which holds most
            continue
        for tier in (DEVICE, HOST, NVME):
            here = {state: n for state, n in tiers.get(tier, {}).items() if n and state not in PASS}
            planned = fit.plan.tiers.get(tier, {})
            wanted = {STATES_OF.get(state, state): n for state, n in planned.items() if state not in PASS}
            padding = wanted.pop("padding", 0)
            assert sum(here.values()) == sum(wanted.values()) + padding
            assert padding or here == wanted
        staging = tiers.get(HOST, {}).get("staging", 0)
        assert staging <= fit.plan.tiers.get(HOST, {}).get("staging", 0) + fit.plan.pinned


TIERS = {
    "optimizer": {"optimizer": "cpu"},
    "optimizer and gradients": {"optimizer": "cpu", "gradients": "cpu"},
    "host": dict.fromkeys(("parameters", "gradients", "optimizer"), "cpu"),
    "nvme": dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme"),
}


def stepped_there(stage, where, bf16, folder):
    """What a rank holds after three steps that the device makes, the most in a step, and the rank."""
    torch.manual_seed(0)
    model = Tiny().to("emu:0")
    zero = zeroshard.shard(
        model, optimizer := torch.optim.AdamW(model.parameters(), fused=True), stage=stage,
        precision=Precision(param_dtype=torch.bfloat16 if bf16 else None),
        offload=Offload(**where, step="device", path=folder if "nvme" in where.values() else None),
    )  # fmt: skip
    for _ in range(3):
        model(
            torch.ones(4, 96, device="emu:0", dtype=next(model.parameters()).dtype)
        ).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ledger = zero.ledger()
    return {tier: dict(found) for tier, found in ledger.tiers.items()}, ledger.phases["step"].total


@pytest.mark.parametrize("bf16", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "tiers", [each if each == "host" else pytest.param(each, marks=pytest.mark.full) for each in TIERS]
)
def test_rooms_of_states_that_the_device_steps_are_planned_to_the_byte(tmp_path, tiers, stage, bf16):
    """What rests in every tier, and the most on the device in a step: three buckets' states, and a copy of gradients."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({name: list(param.shape) for name, param in Tiny().named_parameters()}))
    where = Offload(**TIERS[tiers], step="device", path=str(tmp_path) if tiers == "nvme" else None)
    preset = "zeroshard" if bf16 else "fp32"
    (plan,) = zeroshard.plan(
        Model(shapes=path, preset=preset), Machine(ranks=2, gpu="4090"), stage=stage, offload=where
    ).stages
    found = emulated.run(2, stepped_there, stage, TIERS[tiers], bf16, str(tmp_path), elsewhere=True)
    (step,) = (each for each in plan.instants if each.name == "step")
    held, most = found[plan.rank]
    assert most == sum(plan.tiers.get(DEVICE, {}).values()) + step.total
    for tier in (DEVICE, HOST, NVME):
        here = sum(n for state, n in held.get(tier, {}).items() if state not in PASS)
        assert here == sum(n for state, n in plan.tiers.get(tier, {}).items() if state not in PASS)
    staging = held.get(HOST, {}).get("staging", 0)
    assert staging <= plan.tiers.get(HOST, {}).get("staging", 0) + plan.pinned


@pytest.mark.filterwarnings("ignore")  # torchao's, of what it was built for
@pytest.mark.trainers
def test_a_line_of_8_bit_states_runs_with_torchao(monkeypatch, tmp_path):
    """As it is printed, its optimizer before it. Beside the plan are a table of 256 numbers for each tensor and moment,
    and the fp32 moments of short tensors: docs/planning.md says it."""
    torchao = pytest.importorskip("torchao.optim") and importlib.import_module("torchao")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # a minute for a step of torchao's
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({name: list(param.shape) for name, param in Tiny().named_parameters()}))
    found = zeroshard.plan(Model(shapes=path, preset="zeroshard"), Machine(gpu_mem="20MB"), step=Step(batch=1, seq=4))
    (fit,) = (each.fits[0] for each in found.fitting.found if each.heading == "8-bit optimizer states")
    kept = {"zeroshard": zeroshard, "torch": torch, "torchao": torchao, "model": (model := Tiny())}
    exec(of_fit(fit, {}, {}), kept)
    for _ in range(3):
        model(torch.ones(4, 96, dtype=torch.bfloat16)).float().square().mean().backward()
        kept["optimizer"].step()
    held = {state: n for state, n in kept["zero"].ledger().tiers[DEVICE].items() if n and state not in PASS}
    planned = fit.plan.tiers[DEVICE]
    tensors = [param.numel() for param in model.parameters()]
    short = sum(numel for numel in tensors if numel < 4096)
    tables = 2 * 4 * 256 * sum(numel >= 4096 for numel in tensors)
    scales = planned["scales"] - sum(held[f"{moment}.scale"] for moment in ("exp_avg", "exp_avg_sq"))
    assert sum(held.values()) - sum(planned.values()) == tables + 2 * 3 * short - scales
    assert scales == 2 * 4 * short // 256


def scaled_down(monkeypatch, way, folder):
    """The same way with `Tiny`'s shapes: 1.56 M parameters in place of a table's billions, the same policies."""
    path = folder / "tiny.json"
    path.write_text(json.dumps({name: list(param.shape) for name, param in Tiny().named_parameters()}))
    made, start = [], fitting.Search.__init__

    def noted(search, of):
        made.append(search)
        start(search, of)

    with monkeypatch.context() as patch:
        patch.setattr(fitting.Search, "__init__", noted)
        everything = Machine(gpu_mem="1TB", host_mem="1TB", disk="1TB")
        zeroshard.plan(Model(shapes=path, preset="zeroshard"), everything, step=Step(batch=1, seq=4))
    return made[0].fit(way)


def tiny_job():
    return {
        "model": Tiny(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        "batch": lambda step, index: torch.ones(4, 96),
        "loss": lambda model, x: model(x).float().square().mean(),
    }


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ranks", "device", "host"),
    [
        pytest.param(1, "12MB", "30MB", marks=pytest.mark.full),
        (2, "8MB", "14MB"),
        pytest.param(2, "6MB", "12MB", marks=pytest.mark.full),
    ],
)
def test_a_line_for_a_job_runs_and_holds_what_was_planned(tmp_path, ranks, device, host):
    """With the job's own layout and activations."""
    fit = zeroshard.plan(tiny_job, Machine(ranks=ranks, gpu_mem=device, host_mem=host)).fitting.best
    runs_as_planned(fit, ranks, tmp_path)
    alone = simulate(tiny_job, ranks=ranks, stage=3, layout=Layout(recompute=fit.way.recompute))
    away = fit.plan.tiers.get(HOST, {}).get("activations", 0)
    assert (fit.plan.activations + away, fit.plan.working + away) == (alone.activations, alone.working)


@pytest.mark.full
@pytest.mark.parametrize("policy", [Layout(), Layout(align=256), Layout(bounds="model"), Layout(bounds="tensor"),
                                    Layout(whole=["*.0.weight"]), Layout(bucket_mib=0.25), Layout(units=[])], ids=str)  # fmt: skip
def test_the_layout_of_a_job_is_the_engines(policy):
    made = simulate(tiny_job, ranks=3, stage=3, layout=policy).zero
    layout = made._engine.layout
    assert partition([*fits_job.specs_of_partition(made.partition, layout)], layout, 3) == made.partition


@pytest.mark.full
def test_what_a_jobs_micro_batch_keeps_in_16_bits_is_simulated_too():
    asked = Asked(2, (3,), recipes.PRESETS["fp32"], Layout(), Comm())
    run = runner(tiny_job, asked)
    found = dict(fits_job._measured(run, run(3, 0), asked, 4))
    for (itemsize, again), kept in found.items():
        precision = None if itemsize == 4 else Precision(param_dtype=torch.bfloat16, cast_inputs=True)
        alone = simulate(tiny_job, ranks=2, stage=3, layout=Layout(recompute=again), precision=precision)
        assert kept == (alone.activations, alone.working)
    assert sorted(found) == [(2, False), (2, True), (4, False), (4, True)]


@pytest.mark.full
def test_a_job_that_the_search_does_not_know_says_why():
    """An optimizer whose states have no recipe; what a number or shapes cannot have; parameters of two kinds."""
    for job, layout, why in (
        (lambda: tiny_job() | {"optimizer": lambda p: Unknown(p, lr=0.1)}, None, "Unknown"),
        (tiny_job, Layout(recompute=["blocks.0"]), "Layout.recompute"),
        (lambda: tiny_job() | {"model": mixed()}, None, "dtypes of parameters"),
    ):
        found = zeroshard.plan(job, Machine(ranks=1, gpu_mem="1GB"), layout=layout)
        assert found.fitting is None
        (note,) = (note for note in found.notes if note.startswith("no search for what fits"))
        assert why in note


class Unknown(torch.optim.SGD):
    elementwise = True


def mixed():
    model = Tiny()
    model.blocks[0].double()
    model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    model.blocks[0].register_forward_hook(lambda _, args, out: out.float())
    return model


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def said(monkeypatch, capsys):
    """What `zeroshard plan` prints, without the spaces at ends of lines."""

    def printed(words):
        monkeypatch.setenv("COLUMNS", "132")
        app(["plan", "--full", *words.split()], standalone_mode=False)
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return printed


def test_a_stranger_gets_a_line_without_torch(tmp_path):
    """7 B, one 4090, 64 GiB: the line is the first that stands there, and nothing loads torch."""
    code = (
        "import sys; sys.argv = 'zeroshard plan --params 7B --ranks 1 --gpu 4090 --host-mem 64GiB'.split()\n"
        "from zeroshard.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, ranks.untimed(done.stderr)) == (0, "")
    before, _, after = done.stdout.partition("\nzero = ")
    assert "fits on one rank" in " ".join(before.split())
    assert set(arguments("zero = " + after.split("\n\n")[0])) <= {
        "stage", "precision", "layout", "comm", "offload", "optimizer_in_backward",
    }  # fmt: skip


@pytest.mark.parametrize(("model", "gpu", "step"), [("13B", "h100-80", "device"), ("7B", "4090", "host")])
def test_the_search_chooses_the_processor_that_steps(model, gpu, step):
    """Twelve bytes an element pass a fast bus sooner than the host's AdamW. The line names the host alone."""
    fitting = zeroshard.plan(model, Machine(gpu=gpu, host_mem="128GiB")).fitting
    assert fitting.best.way.step == step and f"the {step} steps" in str(fitting.best.way)
    for fit in (fit for found in fitting.found for fit in found.fits):
        assert ('step="host"' in of_fit(fit, {}, {})) is (fit.way.step == "host")
        assert fit.json()["offload"] is None or fit.json()["offload"]["step"] == fit.way.step


@pytest.mark.parametrize(
    ("words", "total"), [("--offload-optimizer cpu --optimizer-in-backward", 8), ("--preset zeroshard", 10)]
)
def test_pure_bf16_has_its_bytes_and_its_line(said, words, total):
    """Masters that a tier makes count: 8 bytes and not 6. The line has no masters wider than the parameters."""
    shown = said(f"--params 7B --stage 3 {words} --optimizer pure-bf16")
    assert next(line for line in shown if line.startswith("  recipe")).endswith(f"= {total} bytes per parameter")
    assert any(line.split()[:2] == ["3", f"{total}/N"] for line in shown)
    line = "\n".join(shown).partition("zero = ")[2].split("\n\n")[0]
    how = arguments("zero = " + line)
    assert how["precision"] == Precision(param_dtype=torch.bfloat16, master_dtype=torch.bfloat16, cast_inputs=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zeroshard.shard(model, optimizer, **how)
    model(torch.randn(2, 8)).float().sum().backward()
    optimizer.step()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
    assert zero.ledger().held["exp_avg"] == 2 * sum(param.numel() for param in model.parameters())


@pytest.mark.full
def test_a_disk_is_a_size_a_speed_or_both():
    """Of a size alone the speed is assumed; a speed alone is that of a disk with room for all."""
    question = {"params": "7B", "gpu": "4090", "host_mem": "32GiB"}
    without, sized = (plan_of(**question, disk=disk) for disk in (None, "1TB"))
    assert not without.fitting.found[0].fits and sized.fitting.found[0].fits
    assert sized.disk.json() == {"read": 3e9, "write": 2e9, "size": 10**12, "assumed": True}
    slow, both = (plan_of(**question, disk=disk, disk_read=1, disk_write=1) for disk in (None, "1TB"))
    assert slow.disk.json() == {"read": 1e9, "write": 1e9, "size": None, "assumed": False}
    assert both.disk.json() == {"read": 1e9, "write": 1e9, "size": 10**12, "assumed": False}
    assert slow.fitting.best.times == both.fitting.best.times
    assert slow.fitting.best.times.middle > sized.fitting.best.times.middle
    assert plan_of(**question, disk="10GB").fitting.found[0].proof is not None
    with pytest.raises(UserError, match="disk: a budget of memory is a number and a unit"):
        plan_of(**question, disk="100")


def test_activations_are_those_of_the_formula():
    """Korthikanti et al. 2022: 34 s b h of a layer, 2 of one that is recomputed; logits and their gradients."""
    body = transformer.of(7 * 10**9)
    assert (body.layers, body.hidden, body.vocabulary) == (32, 4272, 32000)
    tokens = 2 * 1024
    layer, logits = 34 * tokens * body.hidden, 8 * tokens * 32000
    all_kept = body.held(tokens, itemsize=2, recompute=False, moved=False)
    assert all_kept.device == 32 * layer + logits and all_kept.away == 0
    again = body.held(tokens, itemsize=2, recompute=True, moved=False)
    assert again.device == 32 * 2 * tokens * body.hidden + layer + logits
    away = body.held(tokens, itemsize=2, recompute=False, moved=True)
    assert away.device == 2 * layer + logits and away.away == 31 * layer
    (found,) = zeroshard.plan(7e9, Machine(gpu="h200"), step=Step(batch=2, seq=1024), stage=0).stages
    assert (found.activations, found.working) == (all_kept.kept, all_kept.device)
    with pytest.raises(UserError, match="Layout.recompute: it is about activations"):
        zeroshard.plan(7e9, layout=Layout(recompute=True))
    with pytest.raises(UserError, match="batch stands for a job"):
        zeroshard.plan("a:b", step=Step(batch=2))


def test_every_gpu_has_a_clock():
    assert set(clock.CARDS) >= set(gpus.GPUS)


def check(found):
    """The line is one that `shard` takes; the proof's figures are over what there is, and what it says to buy fits."""
    for each in found.found:
        assert bool(each.fits) is (each.proof is None)
        for fit in each.fits:
            assert fit.need.within(found.most)
            assert set(arguments(of_fit(fit, {}, {}).replace("torchao.optim.AdamW8bit(model.parameters())", "1")))
        assert each.fits or each.buys
    middles = [fit.times.middle for fit in found.found[0].fits]
    assert middles == sorted(middles)
    best = found.best
    assert best is None or all(fit.times.middle <= best.times.middle for each in found.found[1:] for fit in each.fits)


MACHINES = {
    (params, device, host, disk): () if host == "64GiB" and params in ("1B", "70B") else (pytest.mark.slow,)
    for params in ("1B", "7B", "13B", "30B", "70B")
    for device in ("16GB", "24GB", "48GB", "80GB")
    for host in ("32GiB", "64GiB", "128GiB")
    for disk in (None, "1TB")
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("params", "device", "host", "disk"), [pytest.param(*each, marks=marks) for each, marks in MACHINES.items()]
)
def test_every_machine_has_a_line_or_a_proof(params, device, host, disk):
    """Also those of the page's table, below."""
    check(zeroshard.plan(params, Machine(ranks=1, gpu_mem=device, host_mem=host, disk=disk)).fitting)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("gpu", ["t4", "4090", "a6000", "h100-80"])
@pytest.mark.parametrize("model", ["7B", *(pytest.param(size, marks=pytest.mark.slow) for size in ("13B", "30B"))])
def test_a_row_of_the_table_of_machines_is_what_plan_says(monkeypatch, model, gpu):
    """docs/choose-a-stage.md; `python docs/fits.py` writes it."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    made = importlib.import_module("fits")
    assert model in made.MODELS and gpu in made.GPUS
    found = [made.answer(model, gpu, *machine) for machine in made.MACHINES]
    for each in found:
        check(each)
    assert made.row(model, gpu, found) in made.PAGE.read_text()


ROWS = [(model, gpu) for model in ("7B", "13B", "30B") for gpu in ("t4", "4090", "a6000", "h100-80")]


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "gpu"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row not in (("7B", "t4"), ("13B", "a6000")))) for row in ROWS],
)
def test_the_lines_of_a_row_run_scaled_down_as_planned(monkeypatch, tmp_path, model, gpu):
    """On the emulated device: held = planned, to the byte, in every tier. Lines of torchao's states run with it, above."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    made = importlib.import_module("fits")
    found = [each for machine in made.MACHINES for each in made.answer(model, gpu, *machine).found]
    ways = {f"{each.heading}: {fit.way}": fit.way for each in found for fit in each.fits[:1]}
    ran = 0
    for number, way in enumerate(ways.values()):
        if way.numbers.optimizer is None:
            (folder := tmp_path / f"{number}").mkdir()
            runs_as_planned(scaled_down(monkeypatch, way, folder), 1, folder)
            ran += 1
    assert ran or model == "30B"


def test_the_table_of_machines_has_a_row_for_each(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    made = importlib.import_module("fits")
    shown = made.PAGE.read_text().partition(made.BEGIN)[2].partition(made.END)[0]
    assert shown.startswith(made.head())
    rows = [tuple(line.split(" | ")[:2]) for line in shown.removeprefix(made.head()).splitlines()]
    assert rows == [(f"| {model.replace('B', ' B')}", name) for model in made.MODELS for name in made.GPUS.values()]
