"""The transformer of 260 parameters, stage by stage, and one element of it through Adam."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.text import Text

from zeroshard.cli import screen
from zeroshard.cli.config import InputError

from .pieces import bytes_by_state, corrections, heading, prose, say, show

# A letter beside the colour, so that a terminal without colours says the same.
VERSIONS = {"old": (".", "dim"), "new": ("N", "green")}
BAR = 52  # characters at most
ORIGINS = {"text": "printed in the text", "seed": "left out by the text and drawn from a seed"}
ELEMENT = re.compile(r"(\w+)\[(\d+)(?:,\s*(\d+))?\]")


def find_element(transformer: Mapping[str, Any], wanted: str) -> tuple[int, str]:
    """Return the flat index and the name of `W_q[0,0]`, `gamma1[3]` or `8`. Raises `InputError`."""
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


def transformer(of: dict[str, Any], flat: int, name: str) -> None:
    heading(f"{of['title']}, one step at every stage")
    table = screen.new_table("The model", "name", "shape", "elements", "from", "rank 0", "rank 1", "values are")
    for tensor in of["tensors"]:
        owned = dict.fromkeys(range(of["ranks"]), 0) | {rank: stop - start for rank, start, stop in tensor["owners"]}
        shape = " x ".join(map(str, tensor["shape"]))
        table.add_row(
            tensor["symbol"], shape, f"{tensor['numel']}", f"{tensor['start']}",
            *(f"{owned[rank]}" if owned[rank] else "" for rank in range(of["ranks"])), tensor["origin"],
        )  # fmt: skip
    show(table)
    dims = of["dims"]
    say(
        f"Width d = {dims['width']}, {dims['heads']} heads of {dims['width'] // dims['heads']}, feed_forward "
        f"{dims['inner']}, "
        f"vocabulary V = {dims['words']}, T = {dims['tokens']} tokens, {of['ranks']} ranks. norm1 -> "
        "attention, + x -> norm2 -> feed_forward, + -> head -> softmax -> cross-entropy"
    )
    cut = next(tensor for tensor in of["tensors"] if len(tensor["owners"]) > 1)
    shares = ", ".join(f"{stop - start} of rank {rank}" for rank, start, stop in cut["owners"])
    say(f"Flat, the model is {of['numel']} elements, cut at {of['cuts'][1]}: inside {cut['symbol']}, {shares}.")
    corrections(of, "ownership")
    values = of["runs"]["bf16"]
    _matrices(of, values)
    corrections(of, "forward")
    for stage in of["stages"]:
        _stage(of, stage)
    _frames(of)
    _adam(of, values, flat, name)
    _comparison(of)
    corrections(of, "memory")


def one_stage(of: dict[str, Any], number: int) -> None:
    stage = next((stage for stage in of["stages"] if stage["stage"] == number), None)
    if stage is None:
        raise InputError(f"--stage must be 0, 1, 2 or 3, got {number}")
    heading(f"{of['title']}, one step at stage {number}")
    _stage(of, stage)
    _beside({**of, "stages": [stage], "timing": [row for row in of["timing"] if row["stage"] == number]})


def _matrices(of: dict[str, Any], values: dict[str, Any]) -> None:
    trace = of["runs"]["float64"]["forward"]
    for rank, forward in enumerate(trace):
        batch = of["batches"][rank]
        letter = batch["micro_batch"]
        say(f"\n[bold]Forward of micro-batch {letter} on rank {rank}[/bold], first token, in float64")
        prose(f"x is {ORIGINS[batch['x_origin']]}. Its targets are {ORIGINS[batch['targets_origin']]}.", 2)
        for what, found in ({"x": of["batches"][rank]["x"]} | forward).items():
            if what != "loss":
                shape, width = found["shape"], found["shape"][-1]
                # The first token's row; for tensors by head, each head's; for the input, all rows.
                every = width if what == "x" else math.prod(shape[-2:]) if len(shape) > 2 else len(found["values"])
                starts = range(0, len(found["values"]), every)
                rows = [found["values"][at : at + width] for at in starts]
                numbers = " | ".join("  ".join(f"{value:8.5f}" for value in row) for row in rows)
                say(f"  {what:<14}{'x'.join(map(str, shape)):<6}{numbers}", markup=False)
        targets = ", ".join(map(str, of["batches"][rank]["targets"]))
        say(f"  {'loss':<20}{forward['loss']:8.5f}, of the targets {targets}", markup=False)
    for tensor in of["tensors"]:
        if tensor["origin"] == "text" and tensor["symbol"] != "W_q":
            say(f"\n[bold]{tensor['symbol']}[/bold], as the texts print it")
            _rows("", values["master"], tensor)
    w_q = next(tensor for tensor in of["tensors"] if tensor["symbol"] == "W_q")
    columns: list[tuple[str, Sequence[float]]] = [
        (f"gradient {batch['micro_batch']}", values["gradients"][batch["rank"]]) for batch in of["batches"]
    ]
    columns += [("average", values["average"]), ("master", values["master"]), ("updated", values["master_after"])]
    say(
        f"\n[bold]W_q[/bold], {w_q['numel']} elements as trained: bf16 gradients of both micro-batches, their average, "
        "the fp32 master"
    )
    for title, flat in columns:
        _rows(title, flat, w_q)


def _rows(title: str, flat: Sequence[float], tensor: Mapping[str, Any]) -> None:
    """Print a matrix out of the flat vector."""
    first, width = tensor["start"], tensor["shape"][1]
    for at in range(first, first + tensor["numel"], width):
        numbers = "  ".join(f"{value:10.6f}" for value in flat[at : at + width])
        say(f"  {title if at == first else '':<11}{numbers}", markup=False)


def _stage(of: dict[str, Any], stage: dict[str, Any]) -> None:
    sharded = [state for state, cut in stage["placements"].items() if cut]
    what = f"sharded: {', '.join(sharded)}" if sharded else "nothing is sharded"
    saved = f", {100 * stage['saved']:.4g} % less than stage 0" if stage["saved"] else ""
    say(
        f"\n[bold]Stage {stage['stage']}[/bold]: {what}. {stage['formula']} bytes per parameter, "
        f"{stage['nbytes']:,} bytes per rank{saved}"
    )
    for number, moment in enumerate(stage["moments"]):
        say(f"\n  [bold]{number + 1} {moment['title']}[/bold]")
        prose(moment["says"], 4)
        for rank, seen in enumerate(moment["ranks"]):
            sides = _versions(seen["parameters"], of["numel"])
            total = sum(seen["held"].values())
            peak = f", at most {seen['peak']['total']:,}" if seen["peak"] and seen["peak"]["total"] > total else ""
            line = Text(f"    rank {rank}  ")
            line.append_text(sides)
            line.append(f"  {total:,} bytes{peak}")
            screen.console.print(line, soft_wrap=True)
            say(f"            [dim]{bytes_by_state(seen['held'])}[/dim]")
            if peak:
                for state, why in seen["peak"]["why"].items():
                    there = seen["peak"]["held"][state] - seen["peak"]["rests"].get(state, 0)
                    say(f"            [dim]at most: {there:,} {state}, {escape(why)}[/dim]")
        if moment["key"] == "backward":
            later = ", ".join(f"rank {rank} {one['backward']['total']:,}" for rank, one in enumerate(stage["later"]))
            prose(f"This is the first step: Adam has no m and v yet. From the second on at most: {later} bytes.", 4)
        moved = _moved(stage["recording"], moment)
        if moved:
            say(f"    [dim]sent by rank 0: {moved}[/dim]")
    legend = f"{VERSIONS['old'][0]} parameters from before the step, {VERSIONS['new'][0]} after it, blank: not here"
    say(f"  [dim]{legend}[/dim]")


def _versions(intervals: Sequence[Sequence[Any]], numel: int) -> Text:
    """Draw the flat vector as a bar: which parameters are here, from before or after the step."""
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
        show(table)
    corrections(of, "backward")


def _adam(of: dict[str, Any], values: dict[str, Any], flat: int, name: str) -> None:
    """Print one element through Adam, in the ranks' fp32; the corrected moments are computed in float64 from theirs."""
    settings = of["optimizer"]
    owner = next(
        rank for rank, (low, high) in enumerate(zip(of["cuts"], of["cuts"][1:], strict=False)) if low <= flat < high
    )
    m, v = values["exp_avg"][flat], values["exp_avg_sq"][flat]
    m_hat, v_hat = m / (1 - settings["beta1"]), v / (1 - settings["beta2"])
    say(f"\n[bold]{escape(name)} through Adam[/bold], element {flat}, updated by rank {owner}")
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
        say(f"  {what:<44}{value}", markup=False)
    if flat in of["unchanged"]:
        say("  [dim]the copy did not change: the update is too small for bf16 here, and lives on in the master[/dim]")


def _comparison(of: dict[str, Any]) -> None:
    _beside(of)
    corrections(of, "traffic")


def _beside(of: dict[str, Any]) -> None:
    """Print what each stage holds, and what it moves."""
    table = screen.new_table(
        "Bytes per rank at rest, predicted and held", "stage", "rank", "predicted", "held", "saved"
    )
    for stage in of["stages"]:
        for rank, held in enumerate(stage["held"]):
            cells = sum(stage["predicted"][rank].values()), sum(held.values())
            saved = f"{100 * stage['saved']:.4g} %" if rank == 0 else ""
            table.add_row(f"{stage['stage']}" if rank == 0 else "", f"{rank}", *(f"{n:,}" for n in cells), saved)
    table.caption = "with step counters, 4 bytes per tensor"
    show(table)
    timing = screen.new_table("What rank 0 moves, and when", "stage", "verb", "state", "at", "calls", "logical", "sent")
    last = None
    for row in of["timing"]:
        timing.add_row(
            f"{row['stage']}" if row["stage"] != last else "", row["verb"], row["state"], row["phase"],
            f"{row['calls']}", f"{row['logical']:,}", f"{row['sent']:,}",
        )  # fmt: skip
        last = row["stage"]
    show(timing)
