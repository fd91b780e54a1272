"""The other texts: four weights by hand, three layers of a distributed optimizer, the overview."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroshard.cli import screen

from .pieces import corrections, heading, prose, say, show


def four(of: dict[str, Any]) -> None:
    heading(f"{of['title']}, with activation checkpointing")
    values = of["values"]
    names = of["names"]
    table = screen.new_table("Through one step, in fp16 with fp32 masters", "what", *names)

    def row(what: str, numbers: Sequence[Any]) -> None:
        table.add_row(what, *(f"{number + 0.0!r}" for number in numbers))

    row("weight", values["parameters"])
    for rank, gradient in enumerate(values["gradients"]):
        row(f"gradient, rank {rank}", gradient)
    for what, key in (("average", "average"), ("m", "exp_avg"), ("v", "exp_avg_sq"),
                      ("m, bias corrected", "exp_avg_corrected"), ("v, bias corrected", "exp_avg_sq_corrected"),
                      ("master", "master_after"), ("its fp16 copy", "parameters_after"),
                      ("a bf16 copy", "bf16_after")):  # fmt: skip
        row(what, [float(f"{value:.7g}") for value in values[key]] if "corrected" in key else values[key])
    for rank, half in enumerate(values["half_updated"]):
        row(f"rank {rank}, half updated", half)
    show(table)
    for rank, seen in enumerate(values["forward"]):
        numbers = ", ".join(f"{what} {value + 0.0!r}" for what, value in seen)
        back = ", ".join(f"dL/d{what} {value + 0.0!r}" for what, value in values["flow"][rank])
        say(f"  rank {rank}: {numbers}, loss {values['loss'][rank]!r}; after the step {values['loss_after'][rank]!r}")
        say(f"          backward: {back}")
    for rank, kept in enumerate(values["states"]):
        own = "; ".join(f"{name.split('.')[1]}: master {master!r}, m {m!r}, v {v!r}" for name, master, m, v in kept)
        say(f"  rank {rank} keeps {own}")
    corrections(of, "values")
    _stories(of)
    _checkpointing(of)
    _formats_and_memory(of)


def _stories(of: dict[str, Any]) -> None:
    """Print what rank 0 does, stage by stage."""
    for stage in of["stages"]:
        say(
            f"\n[bold]Stage {stage['stage']}[/bold], {stage['nbytes']} bytes per rank at rest, Adam's step counters "
            "apart: what rank 0 does"
        )
        for line in stage["story"][0]:
            nbytes = f"{line['logical']} bytes of {line['state']}" if line["logical"] else ""
            unit = line["unit"] or "the root"
            what = _computed(of, line["verb"], line["unit"]) or f"{nbytes:<22} {line['truth']}"
            say(f"  {line['phase']:<9} {line['verb']:<10} {unit:<9} {what}".rstrip(), markup=False)
    corrections(of, "stage 3", "volume")


def _checkpointing(of: dict[str, Any]) -> None:
    table = screen.new_table(
        "Stage 3: what each checkpointing moves, in elements",
        "what",
        "gathers",
        "recomputed",
        "gathered",
        "reduced",
        "in all",
        "passes",
    )
    for way in of["checkpointing"]:
        recomputed = ", ".join(way["recomputed"]) or "nothing"
        counts = (f"{way[column]}" for column in ("gathered_elements", "reduced_elements", "elements", "passes"))
        table.add_row(way["how"], ", ".join(way["gathered"]), recomputed, *counts)
    show(table)
    corrections(of, "checkpointing")


def _formats_and_memory(of: dict[str, Any]) -> None:
    """Print what an update changes in fp32 and fp16, and what Adam's memory does."""
    tiny = of["tiny"]
    say(f"\n[bold]Why masters are fp32[/bold]: an update of {tiny['update']} is {tiny['fp16']} in fp16")
    for one in tiny["weights"]:
        changes = [f"{dtype} {'changes' if one[f'{dtype}_changes'] else 'stays'}" for dtype in ("fp32", "fp16")]
        say(f"  weight {one['weight']:<7} {', '.join(changes)}")
    corrections(of, "fp32")
    table = screen.new_table("Why m and v are stored: the update of w3", "line", "gradient", "kept", "forgotten")
    for step in of["memory"]:
        cells = (step[key][2] for key in ("gradient", "kept", "forgotten"))
        table.add_row(f"step {step['step']}", *(f"{value:.6f}" for value in cells))
    show(table)


def _computed(of: dict[str, Any], verb: str, unit: str) -> str:
    """Say what rank 0 has computed for each weight of a unit: its gradient, or its new master."""
    values = of["values"]
    own = [at for at, (name, *_) in enumerate(of["layout"]["slots"]) if name.startswith(f"{unit}.")]
    if verb == "backward":
        return "its gradients: " + ", ".join(f"{of['names'][at]} {values['gradients'][0][at] + 0.0!r}" for at in own)
    if verb == "step":
        return "Adam: " + ", ".join(
            f"{of['names'][at]} {values['master'][at]!r} -> {values['master_after'][at]!r}" for at in own
        )
    return ""


LESS = {
    "saved_gloo": "engine on gloo",
    "saved_nccl": "engine on NCCL",
    "saved_per_rank": "rings",
    "saved_per_node": "rings, a card per node",
}
BUSIEST = {
    "busiest_gloo": "gloo",
    "busiest_gloo_fp32": "gloo, fp32 sums",
    "busiest_nccl": "NCCL",
    "busiest_nccl_fp32": "NCCL, fp32 sums",
}
BYTES = {"bytes": "bytes sent", "bytes_fp32": "bytes, fp32 sums"}


def layers(of: dict[str, Any]) -> None:
    heading(of["title"])
    first, last = of["window"]
    fragments = ", ".join(f"rank {rank} [{start}, {stop})" for rank, start, stop in of["cut"]["fragments"])
    say(
        f"{of['numel']:,} parameters in one flat buffer, padded to {of['padded'][str(of['ranks'])]:,} for "
        f"{of['ranks']} ranks. The cut is inside {of['cut']['name']}: {fragments}. Elements {first} to {last - 1}:"
    )
    last_step = None
    for step in of["path"]:
        if step["step"] != last_step:
            say(f"\n  [bold]{step['step']}[/bold], {step['dtype']}")
            prose(step["says"], 4)
            last_step = step["step"]
        who = "both" if step["rank"] is None else f"rank {step['rank']}"
        blank = " " * 9 * (step["start"] - first)
        say(f"    {who:<7}{blank}{''.join(f'{value:9.4f}' for value in step['values'])}", markup=False)
    corrections(of, "buffer")
    rows = of["replicas"]["rows"]
    columns = ("optimizer", "reduce_inside", "reduce_between", "gather_inside", "total")
    title = f"K replicas of the optimizer on {of['replicas']['ranks']} ranks: bytes held, and P elements sent per rank"
    table = screen.new_table(title, "K", *(column.replace("_", " ") for column in columns), *BYTES.values())
    for row in rows:
        table.add_row(f"{row['replicas']}", *(f"{row[column]:g}" for column in (*columns, *BYTES)))
    table.caption = "bytes are per parameter; with fp32 sums, the default, a step with bf16 weights sends the last ones"
    show(table)
    for what, shown in (("on average", LESS), ("on the card that sends most", BUSIEST)):
        title = f"How much less than with K = 1 crosses the slow link, {what}, with a network card per rank"
        table = screen.new_table(title, "K", "a group or node", *shown.values())
        for row in rows[1:]:
            size = of["replicas"]["ranks"] // row["replicas"]
            table.add_row(f"{row['replicas']}", f"{size}", *(f"{100 * row[column]:.1f} %" for column in shown))
        show(table)
    say("Below zero, more crosses it.")
    corrections(of, "replicas")
    _profile(of["profile"])
    corrections(of, "profile")


def _profile(of: dict[str, Any]) -> None:
    whole, scaled = of["whole"], of["scaled"]
    say(
        f"\n[bold]The profile[/bold] on {of['ranks']} ranks at stage {of['stage']}, parameters and gradients in bf16: "
        f"{whole['parameters']:,} parameters planned; {scaled['parameters']:,}, an eighth of the width, held as well"
    )
    table = screen.new_table("Bytes of rank 0", "what", "whole, planned", "GiB", "scaled, planned", "scaled, held")
    columns = (whole["predicted"][0], scaled["predicted"][0], scaled["held"][0])
    rows = [(state, *(column["rest"][state] for column in columns)) for state in columns[0]["rest"]]
    rows.append(("at rest", *(sum(column["rest"].values()) for column in columns)))
    rows += [(f"most in {phase}", *(column["peaks"][phase] for column in columns)) for phase in columns[0]["peaks"]]
    for what, planned, small, held in rows:
        table.add_row(what, f"{planned:,}", f"{planned / 2**30:.2f}", f"{small:,}", f"{held:,}")
    show(table)
    equal = "the same" if scaled["held"] == scaled["predicted"] else "not the same"
    say(f"  planned and held are {equal} on all {of['ranks']} ranks: {of['command']}", markup=False)
    say(
        f"  One GPU with all of it: {whole['baseline']['rest'] / 2**30:.2f} GiB at rest without gradients, "
        f"{whole['baseline']['peak'] / 2**30:.2f} with them. Saved at rest {100 * whole['saved']['rest']:.4g} %, step "
        f"counters apart, at the peak {100 * whole['saved']['peak']:.4g} %; the text says 42.7 %.",
        markup=False,
    )


def overview(of: dict[str, Any]) -> None:
    heading(of["title"])
    ranks = [one["ranks"] for one in of["stages"][0]["at"]]
    table = screen.new_table(
        "Bytes per parameter and rank", "stage", "formula", *(f"N = {count}" for count in ranks), "passes"
    )
    for stage in of["stages"]:
        cells = (f"{one['bytes_per_parameter']:g}" for one in stage["at"])
        table.add_row(f"{stage['stage']}", stage["formula"], *cells, f"{stage['passes']}")
    table.caption = "passes of the model per step, by formula"
    show(table)
    say(_counted(of))
    equality = of["equality"]
    equal = all(stage["equal"] for stage in equality["stages"])
    verdict = "the same bits" if equal else "different bits"
    say(
        f"\nAfter {equality['steps']} steps in {equality['precision']} the stages and plain PyTorch in one process "
        f"have {verdict}: sha256 {equality['plain'][:16]}"
    )
    tiers = screen.new_table(
        "Where states rest: 10B parameters on 8 ranks, GB per rank", "name", "device", "host", "nvme"
    )
    for tier in of["tiers"]:
        tiers.add_row(tier["name"], *(f"{sum(tier[place].values()) / 1e9:g}" for place in ("device", "host", "nvme")))
    show(tiers)
    corrections(of, *dict.fromkeys(correction["at"] for correction in of["corrections"]))


def _counted(of: dict[str, Any]) -> str:
    """Say at which stages the step of the 260 moved less than the formula has."""
    less = [stage for stage in of["stages"] if stage["counted"]["passes"] != stage["passes"]]
    return "".join(
        f"In the step of 260 parameters stage {stage['stage']} moves {stage['counted']['passes']:.2f} passes: "
        "norm1's weights are not gathered in backward. Its input x needs no gradient, and the gradients of gamma and "
        "beta do not depend on gamma and beta."
        for stage in less
    )
