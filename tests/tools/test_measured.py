"""Numbers in the documents that were measured: each is what the file in bench/results has, rounded as it is written."""

import json
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAST = re.compile(r" \[.*")  # of "1.24 [1.19, 1.45]"


def page(name):
    return " ".join((ROOT / "docs" / name).read_text().split())


def result(name):
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def rows(name, **which):
    return [row for row in result(name)["rows"] if which.items() <= row.items()]


def row(name, **which):
    (found,) = rows(name, **which)
    return found


def rounded(number, decimals=0):
    """As one rounds on paper: 15.25 is 15.3."""
    return str(Decimal(str(number)).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP))


def median(text):
    return LEAST.sub("", text)


def says(name, *sentences):
    """Each sentence is in docs/`name`, wherever its lines are broken."""
    text = page(name)
    assert [each for each in sentences if each not in text] == []


TWO = {"model": "69M", "ranks": 2}
ONES = ("zeroshard 1", "zeroshard 2", "zeroshard 3")


def of(dtype, backend, key="over the limit"):
    found = row("train", **TWO, dtype=dtype, **{"back-end": backend})[key]
    return median(found) if isinstance(found, str) else found


def test_the_goals_of_training():
    """performance.md's table of goals, against the run whose bf16 part stands above it."""
    first, second, third = (of("bf16", each) for each in ONES)
    ours, theirs = (of("bf16", each, "peak B/param") for each in ("zeroshard 1", "DDP + ZeroRedundancyOptimizer"))
    fresh = ", ".join(f"{of('fp32', each, 'fresh MB')}" for each in ONES)
    fp32 = [of("fp32", each) for each in ONES]
    assert {of("bf16", each, "fresh MB") for each in ONES} == {0.0}
    says(
        "performance.md",
        f"| bf16, stages 1 and 2, time over the limit | 1.30 | {first}, {second} | stage 1 yes; stage 2 no, by 0.01 |",
        f"| bf16, stage 3 | 1.45 | {third} | no |",
        f"| fp32, stages 1 and 2 | 1.15 | {fp32[0]}, {fp32[1]} | yes |",
        f"| fp32, stage 3 | 1.40 | {fp32[2]} | yes |",
        f"| 1.05 | {rounded(ours / theirs, 2)} ({ours} over {theirs} B/param) | yes |",
        f"| fp32, fresh memory per step, stages 1 to 3 | 10 MB | {fresh} MB | no |",
    )
    assert float(first) <= 1.30 < float(second) == 1.31 and float(third) > 1.45  # as the last column has it
    assert max(map(float, fp32[:2])) <= 1.15 and float(fp32[2]) <= 1.40 and ours / theirs <= 1.05


def test_what_is_said_of_training_below_its_table():
    peers = [
        each["back-end"]
        for each in rows("train", **TWO, dtype="bf16")
        if not each["back-end"].startswith(("zero", "limit"))
    ]
    assert all(float(of("bf16", each)) < float(of("bf16", peer)) for each in ONES[:2] for peer in peers)
    peaks = {dtype: {each: of(dtype, each, "peak B/param") for each in (*ONES, *peers)} for dtype in ("bf16", "fp32")}
    low = of("bf16", "zeroshard 2, bf16 gradients", "peak B/param")
    assert max(low, peaks["bf16"]["zeroshard 3"]) < min(peaks["bf16"][peer] for peer in peers)
    bf16, fp32 = (peaks[dtype] for dtype in ("bf16", "fp32"))
    others = [bf16[each] for each in peers]
    assert (bf16["DDP + ZeroRedundancyOptimizer"], bf16["DDP"]) == (min(others), max(others))
    assert of("fp32", ONES[0]) == of("fp32", ONES[1])
    fresh = [of("fp32", each, "fresh MB") for each in ONES]
    sharing = "fairscale ShardedDDP + OSS"
    says(
        "performance.md",
        f"zeroshard's stage 3 takes {of('bf16', ONES[2])} times the limit. FSDP2 takes {of('bf16', 'FSDP2')} times, and DeepSpeed's "
        f"stage 3 takes {of('bf16', 'DeepSpeed 3')} times.",
        f"stages 1 and 2 take {of('fp32', ONES[0])} times the limit, and DDP takes {of('fp32', 'DDP')} times. zeroshard's stage 3 "
        f"takes {of('fp32', ONES[2])} times, and FSDP2 takes {of('fp32', 'FSDP2')} times",
        f"zeroshard's peak is {rounded(bf16['zeroshard 3'], 1)} B/param at stage 3, and {rounded(low, 1)} at stage 2 with bf16 gradients",
        f"higher: {rounded(min(others), 1)} (ZeroRedundancyOptimizer) to {rounded(max(others), 1)} B/param (DDP)",
        f"zeroshard's peak is {rounded(fp32[ONES[0]], 1)} B/param at stage 1, {rounded(fp32[ONES[1]], 1)} at stage 2 and "
        f"{rounded(fp32[ONES[2]], 1)} at stage 3",
        f"peak of ZeroRedundancyOptimizer is {rounded(fp32['DDP + ZeroRedundancyOptimizer'], 1)}, of fairscale "
        f"{rounded(fp32[sharing], 1)}, of DDP {rounded(fp32['DDP'], 1)} and of FSDP2 {rounded(fp32['FSDP2'], 1)} B/param",
        f"uses no fresh memory in bf16, and {rounded(min(fresh))} to {rounded(max(fresh))} MB in fp32. A step of plain PyTorch in "
        f"fp32 uses {rounded(of('fp32', 'limit', 'fresh MB'))} MB",
    )


def test_training_on_four_ranks():
    names = (*ONES, "DDP", "DDP + ZeroRedundancyOptimizer", "fairscale ShardedDDP + OSS", "FSDP2")
    for model, ranks in (("69M", 4), ("10M", 2), ("10M", 4)):
        found = [row("train-ranks", model=model, ranks=ranks, **{"back-end": each}) for each in names]
        over = " | ".join(median(each["over the limit"]) for each in found)
        says("performance.md", f"| {model}, {ranks} ranks | {over} |")
        if model == "69M":
            peaks = " | ".join(rounded(each["peak B/param"], 1) for each in found)
            says("performance.md", f"| its peak | {peaks} |")
    slow = [row("train-ranks", model="10M", ranks=4, **{"back-end": each})["step ms"] for each in ONES[:2]]
    assert all(abs(each - 220) <= 10 for each in slow)  # "a step takes 220 ms"


def test_speed_of_checkpoints():
    for ranks in (1, 2):
        found = {
            way: [
                median(row("checkpoint", ranks=ranks, move=move, way=way)["zeroshard's speed over it"])
                for move in ("save", "load, cold", "load, hot")
            ]
            for way in ("safetensors", "safetensors, checked", "dcp")
        }
        # Two decimals where it is the slower one, and then in bold.
        cells = [
            ", ".join(f"**{each}**" if float(each) < 1 else rounded(float(each), 1) for each in of_way)
            for of_way in found.values()
        ]
        name = f"{ranks} rank{'s' * (ranks > 1)}"
        says("performance.md", f"| {name}: save, load cold, load hot | {' | '.join(cells)} |")
    says(
        "performance.md",
        f"[{rounded(result('checkpoint')['nbytes'] / 1e9, 1)} GB, {result('checkpoint')['rounds']} rounds]",
    )


NAMES = {"zeroshard, 1 replica": "zeroshard 3, 1 replica", "zeroshard, 1 replica, 2 hosts": "zeroshard 3, 2 hosts",
         "zeroshard, 2 replicas": "zeroshard 3, 2 replicas", "the same, the optimizer over all ranks":
         "zeroshard 3, 2 replicas, all", "FSDP2": "FSDP2", "FSDP2, hybrid": "FSDP2, hybrid 2 x 2"}  # fmt: skip


def test_a_slow_link():
    text, found = page("performance.md"), {}
    for link in ("100 Mbit/s", "1 Gbit/s"):
        table = text.partition(f"| {link} | zeroshard, 1 replica |")
        cut = table[1] + table[2]
        for name, backend in NAMES.items():
            its = found[link, name] = row("links", link=link, **{"back-end": backend})
            step, over, sent = re.search(rf"\| {re.escape(name)} \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", cut).groups()
            assert step == f"{its['step s']:.{len(step.partition('.')[2])}f}", (link, name)
            assert over == ("1" if name == "FSDP2, hybrid" else its["over hybrid"]), (link, name)
            assert sent == f"{its['sent MB']:.{len(sent.partition('.')[2])}f}", (link, name)
    faster = found["100 Mbit/s", "zeroshard, 1 replica, 2 hosts"], found["100 Mbit/s", "FSDP2"]
    planned = [found["100 Mbit/s", name]["predicted MB"] for name in list(NAMES)[1:4]]
    says(
        "performance.md",
        f"takes {rounded(faster[0]['step s'] / faster[1]['step s'], 2)} of FSDP2's time at 100 Mbit/s",
        f"({planned[1]} MB for the relay, {planned[2]} with the optimizer over all ranks, {planned[0]} for `hosts=2`)",
    )
    most = found["100 Mbit/s", list(NAMES)[3]]["sent MB"] / found["100 Mbit/s", list(NAMES)[2]]["sent MB"]
    says("hosts.md", f"{rounded(most, 1)} times on the rank that sends most ([measured]")


def test_settings_beside_each_other():
    pairs = {"stage 3, weights of linear layers in 8 bits": ("fp8", 0, 1), "stage 2, split masters": ("split", 0, 1),
             "stage 3, `torch.optim.Muon` of the blocks' matrices": ("muon", 0, 2), "FSDP2, the same": ("muon", 0, 1)}  # fmt: skip
    text = page("performance.md")
    for name, (pair, first, this) in pairs.items():
        found = result(f"pairs-{pair}")["rows"]
        of_first, its = found[first], found[this]
        wire = its["wire B/param"], of_first["wire B/param"]
        sent = f"{wire[0]} both" if wire[0] == wire[1] else f"{wire[0]}, not {wire[1]}"
        rest = f"{rounded(its['rest B/param'], 1)}, not {rounded(of_first['rest B/param'], 1)}"
        cells = re.search(rf"\| {re.escape(name)} \| [^|]* \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", text).groups()
        assert cells == (its["CPU over the first"], sent, rest)
    for pair in ("split", "muon"):
        assert len({each["final loss"] for each in result(f"pairs-{pair}")["rows"]}) == 1


def test_many_tensors():
    """performance.md and choose-a-stage.md: from 1,000 tensors on."""
    many = [each for each in rows("tensors") if each["tensors"] >= 1000]
    few, three, plain = (
        sorted(each[key] for each in many for key in keys)
        for keys in (("stage 0", "stage 1", "stage 2"), ("stage 3",), ("plain",))
    )
    least, most = (f"{rounded(found[0])} to {rounded(found[-1])}" for found in (few, three))
    says(
        "performance.md",
        f"With 1,000 tensors or more, a step of plain PyTorch takes {rounded(plain[0])} to {rounded(plain[-1])} microseconds per "
        f"tensor. Stages 0 to 2 add {least} microseconds, and stage 3 adds {most}",
        f"| 10 microseconds | {least} | no |",
    )
    says("choose-a-stage.md", f"costs {least} microseconds a step at stages 0 to 2, and {most} at stage 3")


def test_two_trees():
    for name, said in (
        ("trees", "{} times the processor time of the earlier code if ranks send messages"),
        ("trees-shared", "{} times if they share memory"),
    ):
        ratios = [float(each["CPU over old"]) for each in rows(name) if each["tree"] != "old"]
        says("performance.md", said.format(f"{rounded(min(ratios), 2)} to {rounded(max(ratios), 2)}"))
        assert {each["losses"] for each in rows(name)} == {"same bits"}


def test_speed_of_offload():
    text, whole = page("offload.md"), result("offload")
    found = {(each["where"], each["way"]): each["of the bound"] for each in whole["rows"]}
    notes = whole["notes"]
    hidden = re.search(r"arithmetic, (.*\]) of the smaller", notes[2])[1]
    queue = re.search(r"the step reaches (.*\]) of it", notes[3])[1]
    theirs = [re.search(r"beside DeepSpeedCPUAdam: (.*\]) times", note)[1] for note in notes[4:]]
    host = [found[f"memory, {threads}", "step, states in host memory"] for threads in ("1 thread", "2 threads")]
    plain, kernel = (median(found["memory, 1 thread", way]) for way in ("torch", "DeepSpeedCPUAdam"))
    for each in (
        f"| 0.85 | {found['files', 'step, states in files']} |",
        f"(`io_submit`) | | {queue} |",
        f"| 0.8 | {hidden} |",
        f"| 0.85 | {'; '.join(host)} |",
        f"| 1.00 | {'; '.join(theirs)} |",
        f"torch's AdamW reaches {plain} times the bandwidth of the simple operation in the table's fourth row. DeepSpeed's kernel "
        f"reaches {kernel} times this bandwidth",
        f"[{rounded(whole['files']['numel'] / 1e6)}M parameters, AdamW, {whole['rounds']} rounds]",
    ):
        assert each in text, each


def test_manifests_of_thousands_of_ranks():
    """checkpoints.md and clusters.md, of 4,096 ranks."""
    whole = result("manifests")
    save, loads = whole["save"], {}
    for each in whole["loads"]:
        loads.setdefault(each["ranks"], []).append(each)
    manifest, part, told = (save[key] for key in ("manifest's bytes", "largest part's bytes", "all tell"))
    some, few, one = (max(loads[ranks], key=lambda each: each["parts"]) for ranks in (1024, 8, 1))
    says(
        "checkpoints.md",
        f"that {whole['ranks']:,} ranks saved: a manifest of {rounded(manifest / 1e6, 2)} MB, parts of at most "
        f"{rounded(part / 1e6, 2)} MB, and {rounded(told / 1e6, 2)} MB sent between ranks. If 1,024 ranks load this checkpoint, a rank "
        f"reads at most {some['parts']} parts, in {rounded(some['seconds'], 1)} s. If 8 ranks load this checkpoint, a rank reads at "
        f"most {few['parts']} parts, in {rounded(few['seconds'])} s",
    )
    text = (ROOT / "docs" / "clusters.md").read_text()
    for name, nbytes in (
        ("manifest of 70 B", manifest),
        ("largest part of it", part),
        ("told by all ranks in a save", told),
    ):
        assert re.search(rf"^\| {name}, bytes \| written \|.* \| {nbytes:,} \|$", text, re.MULTILINE), name
    says(
        "clusters.md", f"reads all parts, in {rounded(one['seconds'])} seconds and {rounded(one['bytes'] / 1e9, 1)} GB"
    )


def test_on_one_gpu():
    """gpus.md, of one H100."""
    found = {each["row"]: each for each in rows("gpu-speed")}
    over = {name: median(each["over plain"]) for name, each in found.items()}
    launches = {each["2 ranks"]: each["launches"] for each in rows("gpu-launches")}
    says(
        "gpus.md",
        *(f"| stage {stage} | {over[f'stage {stage}']} |" for stage in range(4)),
        f"| FSDP2, sums in fp32 | {over['FSDP2']} |",
        f"| stage 3, compiled, over plain that is not | {over['stage 3, compiled']} |",
        *(f"| {name}, clipped | {over[f'{name}, clipped']} |" for name in ("stage 3", "FSDP2", "plain")),
        f'| stage 3, all in host memory, `step="host"` (16 cores) | {over["stage 3, all in host memory"]} |',
        f'| stage 2, optimizer and gradients in host memory, `step="host"` (16 cores) | {over["stage 2, optimizer in host memory"]} |',
        f"a step takes {rounded(found['stage 3, all in host memory']['step ms'] / 1000, 2)} s",
        f"{launches['stage 0']} kernels at stages 0 to 2, and {launches['stage 3']} at stage 3. A step of FSDP2 launches {launches['FSDP2']}.",
    )
    assert launches["stage 0"] == launches["stage 1"] == launches["stage 2"]
    clipping = found["stage 3, clipped"]["step ms"] - found["stage 3"]["step ms"]
    says("gpus.md", f"a step with clipping takes {rounded(clipping)} ms more")


CASES = re.compile(r"^\| (?P<what>[^|]*) \| (?P<ranks>[^|]*) \| (?P<cases>\d+) \| (?P<said>[^|]*) \|$", re.MULTILINE)


def test_what_one_gpu_was_asked():
    """gpus.md: as many cases as the results count, none of which failed."""
    done = rows("gpu-steps")
    assert all(each["failed"] == 0 for each in done)
    cases = CASES.findall((ROOT / "docs" / "gpus.md").read_text())
    assert sum(int(each[2]) for each in cases) == sum(
        each["cases"] for each in done if each["step"] != "suite"
    )  # gloo's


@pytest.mark.parametrize("name", ["performance.md", "offload.md", "gpus.md"])
def test_a_result_that_a_page_names_is_there(name):
    named = set(re.findall(r"bench/results/([\w-]+)\.(?:md|json|svg)", (ROOT / "docs" / name).read_text()))
    assert named and [each for each in named if not (ROOT / "bench" / "results" / f"{each}.json").exists()] == []
