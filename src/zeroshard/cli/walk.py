"""The page's document in the terminal: the walkthroughs, and the last recorded step of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zeroshard.cli import screen
from zeroshard.cli.config import InputError

# A letter beside the colour, so that a terminal without colours says the same.
VERSIONS = {"old": (".", "dim"), "new": ("N", "green")}
STATES = ("parameters", "gradients", "master", "exp_avg", "exp_avg_sq", "step")  # in this order, then any others
BAR = 52  # characters at most
UNITS_SHOWN = 24
NORMS = (
    "norms: the map from elements to parameters, for the norm of gradients. It is made when that norm is first asked "
    "for and stays; the prediction does not have it."
)
ORIGINS = {"text": "printed in the text", "seed": "left out by the text and drawn from a seed"}
ELEMENT = re.compile(r"(\w+)\[(\d+)(?:,\s*(\d+))?\]")


def walkthroughs(built_in: dict[str, Any], element: str, stage: int | None = None) -> None:
    """All of them, one after the other, or one stage. Raises `InputError` where there is no such element or stage."""
    chosen = find_element(built_in["transformer"], element)
    if stage is not None:
        _one_stage(built_in["transformer"], stage)
        return
    titles = (
        f"{letter}: {text['title'].removeprefix(f'Text {letter}: ')}" for letter, text in built_in["texts"].items()
    )
    _say(f"Five published texts explain ZeRO with numbers, and notes say where one of them slips. {'. '.join(titles)}.")
    _transformer(built_in["transformer"], *chosen)
    _four(built_in["four"])
    _layers(built_in["layers"])
    _overview(built_in["overview"])
    for letter, text in built_in["texts"].items():
        _tables(letter, text)


def _tables(letter: str, text: Mapping[str, Any]) -> None:
    """The text's own numbers beside the recomputed ones, as `zeroshard plan --text` has them."""
    _heading(f"Text {letter}: {text['title']}")
    for table in text["tables"]:
        shown = screen.new_table(table["title"], "line", "text says", "recomputed", "unit", "")
        for line in table["lines"]:
            value = line["value"]
            told = value if isinstance(value, str) else f"{int(value):,}" if value == int(value) else f"{value:.6g}"
            differs = "" if line["agrees"] else "[red]differs[/red]"
            shown.add_row(escape(line["what"]), line["text_says"] or "-", told, line["unit"], differs)
        _table(shown)
    for correction in text["corrections"]:
        _prose(f"- {correction}", 2)


def _one_stage(of: dict[str, Any], number: int) -> None:
    stage = next((stage for stage in of["stages"] if stage["stage"] == number), None)
    if stage is None:
        raise InputError(f"--stage must be 0, 1, 2 or 3, got {number}")
    _heading(f"{of['title']}, one step at stage {number}")
    _stage(of, stage)
    _beside({**of, "stages": [stage], "timing": [row for row in of["timing"] if row["stage"] == number]})


def find_element(transformer: Mapping[str, Any], wanted: str) -> tuple[int, str]:
    """The flat index of `W_q[0,0]`, `gamma1[3]` or `8`, and its name."""
    tensors = transformer["tensors"]
    if wanted.isdigit() and int(wanted) < transformer["numel"]:
        flat = int(wanted)
        tensor = next(t for t in tensors if t["start"] <= flat < t["start"] + t["numel"])
        return flat, _element_name(tensor, flat - tensor["start"])
    match = ELEMENT.fullmatch(wanted.strip())
    found = match and next((t for t in tensors if t["symbol"] == match[1]), None)
    if match and found:
        at = [int(index) for index in match.groups()[1:] if index is not None]
        if len(at) == len(found["shape"]) and all(i < n for i, n in zip(at, found["shape"], strict=True)):
            offset = at[0] if len(at) == 1 else at[0] * found["shape"][1] + at[1]
            return found["start"] + offset, _element_name(found, offset)
    raise InputError(
        f"--element {wanted}: no such parameter; write a flat index below {transformer['numel']}, or a symbol with its "
        f"indices: W_q[0,0], gamma1[3]. Symbols: {', '.join(tensor['symbol'] for tensor in tensors)}"
    )


def _element_name(tensor: Mapping[str, Any], offset: int) -> str:
    at = [offset] if len(tensor["shape"]) == 1 else divmod(offset, tensor["shape"][1])
    return f"{tensor['symbol']}[{','.join(map(str, at))}]"


# ----------------------------------------------------------------------------------------------- 260 parameters


def _transformer(of: dict[str, Any], flat: int, name: str) -> None:
    _heading(f"{of['title']}, one step at every stage")
    table = screen.new_table("The model", "name", "shape", "elements", "from", "rank 0", "rank 1", "values are")
    for tensor in of["tensors"]:
        owned = dict.fromkeys(range(of["ranks"]), 0) | {rank: stop - start for rank, start, stop in tensor["owners"]}
        shape = " x ".join(map(str, tensor["shape"]))
        table.add_row(
            tensor["symbol"], shape, f"{tensor['numel']}", f"{tensor['start']}",
            *(f"{owned[rank]}" if owned[rank] else "" for rank in range(of["ranks"])), tensor["origin"],
        )  # fmt: skip
    _table(table)
    dims = of["dims"]
    _say(
        f"Width d = {dims['width']}, {dims['heads']} heads of {dims['width'] // dims['heads']}, feed_forward "
        f"{dims['inner']}, "
        f"vocabulary V = {dims['words']}, T = {dims['tokens']} tokens, {of['ranks']} ranks. norm1 -> "
        "attention, + x -> norm2 -> feed_forward, + -> head -> softmax -> cross-entropy"
    )
    cut = next(tensor for tensor in of["tensors"] if len(tensor["owners"]) > 1)
    shares = ", ".join(f"{stop - start} of rank {rank}" for rank, start, stop in cut["owners"])
    _say(f"Flat, the model is {of['numel']} elements, cut at {of['cuts'][1]}: inside {cut['symbol']}, {shares}.")
    _corrections(of, "ownership")
    values = of["runs"]["bf16"]
    _matrices(of, values)
    _corrections(of, "forward")
    for stage in of["stages"]:
        _stage(of, stage)
    _frames(of)
    _adam(of, values, flat, name)
    _comparison(of)
    _corrections(of, "memory")


def _matrices(of: dict[str, Any], values: dict[str, Any]) -> None:
    trace = of["runs"]["float64"]["forward"]
    for rank, forward in enumerate(trace):
        batch = of["batches"][rank]
        letter = batch["micro_batch"]
        _say(f"\n[bold]Forward of micro-batch {letter} on rank {rank}[/bold], first token, in float64")
        _prose(f"x is {ORIGINS[batch['x_origin']]}. Its targets are {ORIGINS[batch['targets_origin']]}.", 2)
        for what, found in ({"x": of["batches"][rank]["x"]} | forward).items():
            if what != "loss":
                shape, width = found["shape"], found["shape"][-1]
                # The first token's row; of what the heads have apart, each head's; of the input, all rows.
                every = width if what == "x" else math.prod(shape[-2:]) if len(shape) > 2 else len(found["values"])
                starts = range(0, len(found["values"]), every)
                rows = [found["values"][at : at + width] for at in starts]
                numbers = " | ".join("  ".join(f"{value:8.5f}" for value in row) for row in rows)
                _say(f"  {what:<14}{'x'.join(map(str, shape)):<6}{numbers}", markup=False)
        targets = ", ".join(map(str, of["batches"][rank]["targets"]))
        _say(f"  {'loss':<20}{forward['loss']:8.5f}, of the targets {targets}", markup=False)
    for tensor in of["tensors"]:
        if tensor["origin"] == "text" and tensor["symbol"] != "W_q":
            _say(f"\n[bold]{tensor['symbol']}[/bold], as the texts print it")
            _rows("", values["master"], tensor)
    w_q = next(tensor for tensor in of["tensors"] if tensor["symbol"] == "W_q")
    columns: list[tuple[str, Sequence[float]]] = [
        (f"gradient {batch['micro_batch']}", values["gradients"][batch["rank"]]) for batch in of["batches"]
    ]
    columns += [("average", values["average"]), ("master", values["master"]), ("updated", values["master_after"])]
    _say(
        f"\n[bold]W_q[/bold], {w_q['numel']} elements as trained: bf16 gradients of both micro-batches, their average, "
        "the fp32 master"
    )
    for title, flat in columns:
        _rows(title, flat, w_q)


def _rows(title: str, flat: Sequence[float], tensor: Mapping[str, Any]) -> None:
    """A matrix out of the flat vector."""
    first, width = tensor["start"], tensor["shape"][1]
    for at in range(first, first + tensor["numel"], width):
        numbers = "  ".join(f"{value:10.6f}" for value in flat[at : at + width])
        _say(f"  {title if at == first else '':<11}{numbers}", markup=False)


def _stage(of: dict[str, Any], stage: dict[str, Any]) -> None:
    sharded = [state for state, cut in stage["placements"].items() if cut]
    what = f"sharded: {', '.join(sharded)}" if sharded else "nothing is sharded"
    saved = f", {100 * stage['saved']:.4g} % less than stage 0" if stage["saved"] else ""
    _say(
        f"\n[bold]Stage {stage['stage']}[/bold]: {what}. {stage['formula']} bytes per parameter, "
        f"{stage['nbytes']:,} bytes per rank{saved}"
    )
    for number, moment in enumerate(stage["moments"]):
        _say(f"\n  [bold]{number + 1} {moment['title']}[/bold]")
        _prose(moment["says"], 4)
        for rank, seen in enumerate(moment["ranks"]):
            sides = _versions(seen["parameters"], of["numel"])
            total = sum(seen["held"].values())
            peak = f", at most {seen['peak']['total']:,}" if seen["peak"] and seen["peak"]["total"] > total else ""
            line = Text(f"    rank {rank}  ")
            line.append_text(sides)
            line.append(f"  {total:,} bytes{peak}")
            screen.console.print(line, soft_wrap=True)
            _say(f"            [dim]{_held(seen['held'])}[/dim]")
            if peak:
                for state, why in seen["peak"]["why"].items():
                    there = seen["peak"]["held"][state] - seen["peak"]["rests"].get(state, 0)
                    _say(f"            [dim]at most: {there:,} {state}, {escape(why)}[/dim]")
        if moment["key"] == "backward":
            later = ", ".join(f"rank {rank} {one['backward']['total']:,}" for rank, one in enumerate(stage["later"]))
            _prose(f"This is the first step: Adam has no m and v yet. From the second on at most: {later} bytes.", 4)
        moved = _moved(stage["recording"], moment)
        if moved:
            _say(f"    [dim]sent by rank 0: {moved}[/dim]")
    legend = f"{VERSIONS['old'][0]} parameters from before the step, {VERSIONS['new'][0]} after it, blank: not here"
    _say(f"  [dim]{legend}[/dim]")


def _versions(intervals: Sequence[Sequence[Any]], numel: int) -> Text:
    """A bar of the flat vector: which parameters are here, from before or after the step."""
    width = min(BAR, max(screen.console.width - 44, 10))
    bar = Text("|")
    at = 0
    for start, stop, version in intervals:
        first, last = round(start * width / numel), round(stop * width / numel)
        letter, style = VERSIONS[version]
        bar.append(" " * (first - at))
        bar.append(letter * (last - first), style)
        at = last
    bar.append(" " * (width - at) + "|")
    return bar


def _moved(recording: dict[str, Any], moment: dict[str, Any]) -> str:
    first, last = moment["ranks"][0]["moves"]
    sums: dict[str, list[int]] = {}
    for move in recording["ranks"][0]["moves"][first:last]:
        verb = recording["verbs"][move[0]]
        if verb in ("gather", "reduce"):
            row = sums.setdefault(f"{verb} of {recording['states'][move[1]]}", [0, 0, 0])
            for at, amount in enumerate((1, move[4], move[5])):
                row[at] += amount
    return "; ".join(
        f"{what}, {calls} message{'s' * (calls > 1)} of {logical:,} bytes in all, {sent:,} sent"
        for what, (calls, logical, sent) in sums.items()
    )


def _frames(of: dict[str, Any]) -> None:
    for how, grouping in of["backward"].items():
        ranks = range(of["ranks"])
        columns = [f"rank {rank}: {what}" for rank in ranks for what in ("stage 1", "at most", "stays")]
        title = f"Gradient elements held in backward, reduced {'tensor by tensor' if how == 'tensor' else 'by module'}"
        table = screen.new_table(title, "name", *columns)
        for frame in grouping["frames"]:
            cells = [f"{side[what]}" for side in frame["ranks"] for what in ("whole", "transient", "kept")]
            table.add_row(" ".join(frame["symbols"]), *cells)
        peak = grouping["peak"]
        most = [f"{peak[what][rank]}" for rank in ranks for what in ("whole", "transient", "kept")]
        table.add_section()
        table.add_row("most", *most, style="bold")
        _table(table)
    _corrections(of, "backward")


def _adam(of: dict[str, Any], values: dict[str, Any], flat: int, name: str) -> None:
    """One element through Adam, in fp32 as the ranks have it; the corrected moments in float64 from what they keep."""
    settings = of["optimizer"]
    owner = next(
        rank for rank, (low, high) in enumerate(zip(of["cuts"], of["cuts"][1:], strict=False)) if low <= flat < high
    )
    m, v = values["exp_avg"][flat], values["exp_avg_sq"][flat]
    m_hat, v_hat = m / (1 - settings["beta1"]), v / (1 - settings["beta2"])
    _say(f"\n[bold]{escape(name)} through Adam[/bold], element {flat}, updated by rank {owner}")
    lines: Iterable[tuple[str, Any]] = (
        ("parameter, bf16", values["parameters"][flat]),
        ("master, fp32", values["master"][flat]),
        *((f"gradient of {b['micro_batch']}, bf16", values["gradients"][b["rank"]][flat]) for b in of["batches"]),
        (f"their sum, kept in {values['dtype']['gradients']}", values["sum"][flat]),
        ("average g, half of that", values["average"][flat]),
        (f"m = {1 - settings['beta1']:.3g} g", m),
        (f"v = {1 - settings['beta2']:.3g} g^2", v),
        (f"m^ = m / (1 - {settings['beta1']})", f"{m_hat:.9g}"),
        (f"v^ = v / (1 - {settings['beta2']})", f"{v_hat:.9g}"),
        (f"master - {settings['lr']} m^ / (sqrt(v^) + {settings['eps']})", values["master_after"][flat]),
        ("its bf16 copy, sent to all", values["parameters_after"][flat]),
    )
    for what, value in lines:
        _say(f"  {what:<44}{value}", markup=False)
    if flat in of["unchanged"]:
        _say("  [dim]the copy did not change: the update is too small for bf16 here, and lives on in the master[/dim]")


def _comparison(of: dict[str, Any]) -> None:
    _beside(of)
    _corrections(of, "traffic")


def _beside(of: dict[str, Any]) -> None:
    """What each stage holds, and what it moves."""
    table = screen.new_table(
        "Bytes per rank at rest, predicted and held", "stage", "rank", "predicted", "held", "saved"
    )
    for stage in of["stages"]:
        for rank, held in enumerate(stage["held"]):
            cells = sum(stage["predicted"][rank].values()), sum(held.values())
            saved = f"{100 * stage['saved']:.4g} %" if rank == 0 else ""
            table.add_row(f"{stage['stage']}" if rank == 0 else "", f"{rank}", *(f"{n:,}" for n in cells), saved)
    table.caption = "with step counters, 4 bytes per tensor"
    _table(table)
    timing = screen.new_table("What rank 0 moves, and when", "stage", "verb", "state", "at", "calls", "logical", "sent")
    last = None
    for row in of["timing"]:
        timing.add_row(
            f"{row['stage']}" if row["stage"] != last else "", row["verb"], row["state"], row["phase"],
            f"{row['calls']}", f"{row['logical']:,}", f"{row['sent']:,}",
        )  # fmt: skip
        last = row["stage"]
    _table(timing)


# ------------------------------------------------------------------------------------------------- the other three


def _four(of: dict[str, Any]) -> None:
    _heading(f"{of['title']}, with activation checkpointing")
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
    _table(table)
    for rank, seen in enumerate(values["forward"]):
        numbers = ", ".join(f"{what} {value + 0.0!r}" for what, value in seen)
        back = ", ".join(f"dL/d{what} {value + 0.0!r}" for what, value in values["flow"][rank])
        _say(f"  rank {rank}: {numbers}, loss {values['loss'][rank]!r}; after the step {values['loss_after'][rank]!r}")
        _say(f"          backward: {back}")
    for rank, kept in enumerate(values["states"]):
        own = "; ".join(f"{name.split('.')[1]}: master {master!r}, m {m!r}, v {v!r}" for name, master, m, v in kept)
        _say(f"  rank {rank} keeps {own}")
    _corrections(of, "values")
    for stage in of["stages"]:
        _say(
            f"\n[bold]Stage {stage['stage']}[/bold], {stage['nbytes']} bytes per rank at rest, Adam's step counters "
            "apart: what rank 0 does"
        )
        for line in stage["story"][0]:
            nbytes = f"{line['logical']} bytes of {line['state']}" if line["logical"] else ""
            unit = line["unit"] or "the root"
            what = _computed(of, line["verb"], line["unit"]) or f"{nbytes:<22} {line['truth']}"
            _say(f"  {line['phase']:<9} {line['verb']:<10} {unit:<9} {what}".rstrip(), markup=False)
    _corrections(of, "stage 3", "volume")
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
    _table(table)
    _corrections(of, "checkpointing")
    tiny = of["tiny"]
    _say(f"\n[bold]Why masters are fp32[/bold]: an update of {tiny['update']} is {tiny['fp16']} in fp16")
    for one in tiny["weights"]:
        changes = [f"{dtype} {'changes' if one[f'{dtype}_changes'] else 'stays'}" for dtype in ("fp32", "fp16")]
        _say(f"  weight {one['weight']:<7} {', '.join(changes)}")
    _corrections(of, "fp32")
    table = screen.new_table("Why m and v are stored: the update of w3", "line", "gradient", "kept", "forgotten")
    for step in of["memory"]:
        cells = (step[key][2] for key in ("gradient", "kept", "forgotten"))
        table.add_row(f"step {step['step']}", *(f"{value:.6f}" for value in cells))
    _table(table)


def _computed(of: dict[str, Any], verb: str, unit: str) -> str:
    """What rank 0 has computed of each weight of a unit: its gradient, or its new master."""
    values = of["values"]
    own = [at for at, (name, *_) in enumerate(of["layout"]["slots"]) if name.startswith(f"{unit}.")]
    if verb == "backward":
        return "its gradients: " + ", ".join(f"{of['names'][at]} {values['gradients'][0][at] + 0.0!r}" for at in own)
    if verb == "step":
        return "Adam: " + ", ".join(
            f"{of['names'][at]} {values['master'][at]!r} -> {values['master_after'][at]!r}" for at in own
        )
    return ""


def _layers(of: dict[str, Any]) -> None:
    _heading(of["title"])
    first, last = of["window"]
    fragments = ", ".join(f"rank {rank} [{start}, {stop})" for rank, start, stop in of["cut"]["fragments"])
    _say(
        f"{of['numel']:,} parameters in one flat buffer, padded to {of['padded'][str(of['ranks'])]:,} for "
        f"{of['ranks']} ranks. The cut is inside {of['cut']['name']}: {fragments}. Elements {first} to {last - 1}:"
    )
    last_step = None
    for step in of["path"]:
        if step["step"] != last_step:
            _say(f"\n  [bold]{step['step']}[/bold], {step['dtype']}")
            _prose(step["says"], 4)
            last_step = step["step"]
        who = "both" if step["rank"] is None else f"rank {step['rank']}"
        blank = " " * 9 * (step["start"] - first)
        _say(f"    {who:<7}{blank}{''.join(f'{value:9.4f}' for value in step['values'])}", markup=False)
    _corrections(of, "buffer")
    rows = of["replicas"]["rows"]
    columns = ("optimizer", "reduce_inside", "reduce_between", "gather_inside", "total")
    title = f"K replicas of the optimizer on {of['replicas']['ranks']} ranks: bytes per parameter, and P sent per rank"
    table = screen.new_table(title, "K", *(column.replace("_", " ") for column in columns))
    for row in rows:
        table.add_row(f"{row['replicas']}", *(f"{row[column]:g}" for column in columns))
    _table(table)
    _corrections(of, "replicas")
    _profile(of["profile"])
    _corrections(of, "profile")


def _profile(of: dict[str, Any]) -> None:
    whole, scaled = of["whole"], of["scaled"]
    _say(
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
    _table(table)
    equal = "the same" if scaled["held"] == scaled["predicted"] else "not the same"
    _say(f"  planned and held are {equal} on all {of['ranks']} ranks: {of['command']}", markup=False)
    _say(
        f"  One GPU with all of it: {whole['baseline']['rest'] / 2**30:.2f} GiB at rest without gradients, "
        f"{whole['baseline']['peak'] / 2**30:.2f} with them. Saved at rest {100 * whole['saved']['rest']:.4g} %, step "
        f"counters apart, at the peak {100 * whole['saved']['peak']:.4g} %; the text says 42.7 %.",
        markup=False,
    )


def _overview(of: dict[str, Any]) -> None:
    _heading(of["title"])
    ranks = [one["ranks"] for one in of["stages"][0]["at"]]
    table = screen.new_table(
        "Bytes per parameter and rank", "stage", "formula", *(f"N = {count}" for count in ranks), "passes"
    )
    for stage in of["stages"]:
        cells = (f"{one['bytes_per_parameter']:g}" for one in stage["at"])
        table.add_row(f"{stage['stage']}", stage["formula"], *cells, f"{stage['passes']}")
    table.caption = "passes of the model per step, by formula"
    _table(table)
    _say(_counted(of))
    equality = of["equality"]
    equal = all(stage["equal"] for stage in equality["stages"])
    verdict = "the same bits" if equal else "different bits"
    _say(
        f"\nAfter {equality['steps']} steps in {equality['precision']} the stages and plain PyTorch in one process "
        f"have {verdict}: sha256 {equality['plain'][:16]}"
    )
    tiers = screen.new_table(
        "Where states rest: 10B parameters on 8 ranks, GB per rank", "name", "device", "host", "nvme"
    )
    for tier in of["tiers"]:
        tiers.add_row(tier["name"], *(f"{sum(tier[place].values()) / 1e9:g}" for place in ("device", "host", "nvme")))
    _table(tiers)
    _corrections(of, *dict.fromkeys(correction["at"] for correction in of["corrections"]))


def _counted(of: dict[str, Any]) -> str:
    """Where the step of the 260 moved other than the formula has it."""
    less = [stage for stage in of["stages"] if stage["counted"]["passes"] != stage["passes"]]
    return "".join(
        f"In the step of 260 parameters stage {stage['stage']} moves {stage['counted']['passes']:.2f} passes: "
        "norm1's weights are not gathered in backward. Its input x needs no gradient, and the gradients of gamma and "
        "beta do not depend on gamma and beta."
        for stage in less
    )


# -------------------------------------------------------------------------------------------------- a run of yours


def run(of: dict[str, Any]) -> None:
    """Who holds what, where the peak comes from, and what the step waited for."""
    _heading(of["title"])
    table = screen.new_table("Bytes per rank at rest", "rank", "state", "predicted", "held", "most")
    for one in of["summary"][: screen.RANKS_SHOWN]:
        predicted = one["predicted"] or {}
        for at, state in enumerate(dict.fromkeys([*predicted, *one["held"]])):
            cells = (predicted.get(state), one["held"].get(state, 0), one["most"].get(state, 0))
            table.add_row("" if at else f"{one['rank']}", state, *("" if n is None else f"{n:,}" for n in cells))
        table.add_section()
    if len(of["summary"]) > screen.RANKS_SHOWN:
        table.caption = f"and {len(of['summary']) - screen.RANKS_SHOWN} more ranks"
    _table(table)
    for one in of["summary"][: screen.RANKS_SHOWN]:
        if set(one["tiers"]) != {"device"}:
            shares = ", ".join(f"{tier} {sum(held.values()):,}" for tier, held in one["tiers"].items())
            _say(f"  rank {one['rank']}, by tier: {shares}", markup=False)
    if any("norms" in one["held"] for one in of["summary"]):
        _prose(NORMS, 2)
    _units(of)
    recording = of["recording"]
    if recording is None:
        _say("\nNo step was recorded: zero.record() before the steps, on every rank")
    else:
        _step(recording, of["layout"]["units"])
    if of["curves"]:
        _curve(of["curves"])


def _units(of: dict[str, Any]) -> None:
    layout = of["layout"]
    numel = [0] * len(layout["units"])
    tensors = [0] * len(layout["units"])
    for bucket in layout["buckets"]:
        for _, shape, _ in layout["slots"][bucket["first"] : bucket["last"]]:
            numel[bucket["unit"]] += math.prod(shape)
            tensors[bucket["unit"]] += 1
    table = screen.new_table("Units, the largest first", "unit", "tensors", "elements", "share")
    order = sorted((unit for unit, count in enumerate(tensors) if count), key=lambda unit: -numel[unit])
    for unit in order[:UNITS_SHOWN]:
        name = escape(layout["units"][unit]) or "(root)"
        table.add_row(name, f"{tensors[unit]:,}", f"{numel[unit]:,}", f"{100 * numel[unit] / of['numel']:.1f} %")
    if len(order) > UNITS_SHOWN:
        table.caption = f"and {len(order) - UNITS_SHOWN} more"
    _table(table)


def _step(recording: dict[str, Any], units: Sequence[str]) -> None:
    for rank in recording["ranks"][: screen.RANKS_SHOWN]:
        took = (rank["span"][1] - rank["span"][0]) / 1e6
        waited = rank["waited"] / 1e6
        _say(
            f"\n[bold]The recorded step on rank {rank['rank']}[/bold]: {took:.1f} ms, of which it stood still for "
            f"{waited:.1f} ms ({100 * waited / took if took else 0:.0f} %)"
        )
        for at, (name, start, end) in enumerate(rank["phases"]):
            around = [
                other for n, (other, first, last) in enumerate(rank["phases"]) if n != at and first <= start < last
            ]
            inside = f", in the time of {around[-1]}" if around else ""
            _say(f"  {name:<9} {(end - start) / 1e6:8.1f} ms{inside}", markup=False)
        for line in _peak(rank["peak"]) if rank["peak"] else ():
            _say(f"  {line}", markup=False)
        _longest(recording, rank, units)
    if recording["note"]:
        _say(f"  [dim]{escape(recording['note'])}[/dim]")


def _peak(peak: Mapping[str, Any]) -> Iterable[str]:
    """Where the device held most, what of it is always there, and why the rest was."""
    yield f"the device holds most {peak['where']}: {peak['total']:,} bytes"
    if peak["rests"]:
        yield f"  {sum(peak['rests'].values()):,} there all the time: {_held(peak['rests'])}"
    for state, why in peak["why"].items():
        yield f"  {peak['held'][state] - peak['rests'].get(state, 0):,} {state}: {why}"


def _longest(recording: dict[str, Any], rank: dict[str, Any], units: Sequence[str]) -> None:
    """The messages that the rank stood still for, longest first."""
    waiting = sorted((move for move in rank["moves"] if move[9]), key=lambda move: -move[9])[:5]
    for move in waiting:
        what = f"{recording['verbs'][move[0]]} {recording['states'][move[1]]}".strip()
        of = f" of {units[move[3]] or 'the root'}" if move[3] >= 0 else ""
        what = "the other ranks to agree" if what == "control" else f"{what}{of}, {move[4]:,} bytes"
        _say(f"  waited {move[9] / 1e6:7.2f} ms for {what}", markup=False)


def _curve(curves: dict[str, Any]) -> None:
    if not curves["rows"]:
        return
    table = screen.new_table("First and last steps", *curves["columns"])
    rows = curves["rows"]
    for row in rows if len(rows) <= 6 else [*rows[:3], *rows[-3:]]:
        table.add_row(*("" if value is None else f"{value:g}" for value in row))
    _table(table)


# ---------------------------------------------------------------------------------------------------------- pieces


def _say(line: str, *, markup: bool = True) -> None:
    screen.console.print(line, markup=markup, soft_wrap=True)


def _prose(text: str, indent: int) -> None:
    """Sentences, wrapped at the terminal's width."""
    screen.console.print(Padding(Text(text, style="dim"), (0, 0, 0, indent), expand=False))


def _heading(title: str) -> None:
    screen.console.print()
    screen.console.rule(f"[bold]{escape(title)}[/bold]", align="left")
    screen.console.print()


def _table(table: Table) -> None:
    screen.wide(table)


def _held(held: Mapping[str, int]) -> str:
    order = [state for state in STATES if state in held]
    return ", ".join(f"{state} {held[state]:,}" for state in dict.fromkeys([*order, *held]))


def _corrections(of: dict[str, Any], *places: str) -> None:
    for correction in of["corrections"]:
        if correction["at"] in places:
            _say(f"  [yellow]text {correction['text']} says[/yellow] {escape(correction['says'])}")
            _prose(correction["right"], 4)
