"""`zeroshard ckpt inspect`, `verify`, `export`, `import`: checkpoints as files, without a model or ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from zeroshard.arithmetic.hashing import digest
from zeroshard.checkpoint.dtypes import DTYPES
from zeroshard.checkpoint.files import BLOCK, FILE, MANIFEST
from zeroshard.checkpoint.manifest import VALUE, Saved, Stored, by_number, numel, order
from zeroshard.checkpoint.staging import under_way
from zeroshard.cli import launch, screen
from zeroshard.cli.config import InputError, one_line
from zeroshard.cli.prefixes import SCREEN, PrefixSums, only, table_of
from zeroshard.cli.working import Working
from zeroshard.errors import CheckpointError, check_local

CONTAINERS = ("map", "list", "tuple")


def open_checkpoint(path: str) -> Any:
    """Open a checkpoint as a context. Raises `InputError` for what is none; a damaged one raises on entry."""
    check_local(path)
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{path}: no such folder; expected one that zero.save(...) was given")
    if not (folder / MANIFEST).exists() and not _rank_files(folder):
        inside = folder / "checkpoints"
        hint = f"; did you mean {inside}?" if inside.is_dir() else f": it has no {MANIFEST}"
        raise InputError(f"{path}: no checkpoint{hint}")
    return Saved.open(folder)


def _rank_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if FILE.fullmatch(path.name)]


# --- inspect --------------------------------------------------------------------------------------------------------


def inspect(path: str, prefix: str | None = None, *, as_json: bool) -> None:
    """Print what a checkpoint holds, of it all or below a prefix, or the list of checkpoints in a folder of several."""
    folder = Path(path)
    if folder.is_dir() and not (folder / MANIFEST).exists() and (found := list(_inside(folder))):
        if prefix is not None:
            names = ", ".join(str(folder / row["name"]) for row in found)
            raise InputError(f"{path}: a folder of checkpoints, and {prefix!r} is about one; instead: one of {names}")
        if as_json:
            print(json.dumps({"path": path, "checkpoints": found}, indent=2))
        else:
            _show_list(path, found)
        return
    with open_checkpoint(path) as saved:
        facts = {"path": path, **describe(saved)}
    if prefix is not None:
        facts = only(facts, prefix)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)


def describe(saved: Saved) -> dict[str, Any]:
    """Describe a checkpoint as `inspect --json` prints it, without the path."""
    manifest = saved.manifest
    parameters = []
    for name in sorted(saved.parameters, key=by_number):
        told = saved.parameters[name]
        states = {state: _state(saved, name, state) for state in [VALUE, *saved.states.get(name, ())]}
        parameters.append(
            {"name": name, "shape": told.shape, "dtype": DTYPES[told.dtype], "names": told.names, "states": states}
        )
    return {
        **{key: manifest[key] for key in ("version", "saved", "ranks", "stage", "seed", "torch", "python", "threads")},
        "numel": sum(numel(told.shape) for told in saved.parameters.values()),
        "nbytes": sum(file["nbytes"] for file in manifest["files"].values()),
        "files": {name: file["nbytes"] for name, file in manifest["files"].items()},
        "parameters": parameters,
        "buffers": [
            {"name": name, **_tensor(stored)} for name, stored in saved.buffers.items() if name not in saved.differing
        ]
        + [
            {"name": name, "rank": rank, **_tensor(stored)}
            for name, each in saved.differing.items()
            for rank, stored in enumerate(each)
            if stored is not None
        ],
        "optimizers": manifest["optimizers"],
        "extra": [{"name": name, "value": value} for name, value in leaves(saved)],
    }


def _tensor(stored: Stored) -> dict[str, Any]:
    nbytes = numel(stored.shape) * stored.dtype.itemsize
    return {"shape": stored.shape, "dtype": DTYPES[stored.dtype], "nbytes": nbytes}


def _state(saved: Saved, name: str, state: str) -> Any:
    """Describe a state: {"dtype", "shape", "nbytes"} of a tensor, or the number that it is."""
    if (name, state) in saved.values:
        return saved.values[name, state]
    if (name, state) in saved.whole:
        return _tensor(saved.whole[name, state])
    parts = saved.cut.get((name, state), [])
    nbytes = sum(numel(part.shape) * part.dtype.itemsize for part in parts)
    return {
        "shape": saved.parameters[name].shape,
        "dtype": DTYPES[saved.dtypes.get((name, state), saved.parameters[name].dtype)],
        "nbytes": nbytes,
    }


def leaves(saved: Saved) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of everything saved along, its nesting in the name: ("extra.scheduler.last_epoch", 4).

    A tensor's value is its shape, dtype and bytes; a map, list or tuple comes first with its length: {"map": 3}.
    """

    def walk(where: str, told: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(told, dict):
            yield where, told
            return
        ((kind, inner),) = told.items()
        if kind == "tensor":
            yield where, _tensor(saved.extra[inner])
        elif kind == "float":
            yield where, inner  # nan, inf
        else:
            yield where, {kind: len(inner)}
            for key, each in inner if kind == "map" else enumerate(inner):
                yield from walk(f"{where}.{key}", each)

    yield from walk("extra", saved.manifest["extra"])


def _show(told: dict[str, Any]) -> None:
    facts = screen.shown(told)
    by = f"{screen.ranks_text(facts['ranks'])} at stage {facts['stage']}"
    parameters = facts["parameters"]
    screen.opening(
        escape(facts["path"]),
        {
            "saved": f"{_time(facts['saved'])} by {by}, torch {escape(facts['torch'])}, "
            f"Python {escape(facts['python'])}, "
            f"{screen.many(facts['threads'], 'thread')}, seed {facts['seed']}",
            "holds": f"{facts['numel']:,} parameters in {screen.many(len(parameters), 'tensor')}, "
            f"{screen.many(len(facts['buffers']), 'buffer')}",
            "takes": f"{facts['nbytes']:,} bytes in {screen.many(len(facts['files']), 'file')}",
        },
    )
    whole = "prefix" not in facts
    if parameters:
        _show_parameters(parameters, as_tree=whole and len(parameters) > SCREEN)
    if facts["buffers"]:
        _show_buffers(facts["buffers"], as_tree=whole and len(facts["buffers"]) > SCREEN)
    if whole:
        if max(len(parameters), len(facts["buffers"])) > SCREEN:
            screen.say(f"  [dim]zeroshard ckpt inspect {escape(facts['path'])} NAME lists those of a name[/dim]")
        _show_rest(facts)


def _show_parameters(parameters: Sequence[dict[str, Any]], *, as_tree: bool) -> None:
    title = "Parameters and what the optimizer keeps"
    sizes = [sum(told["nbytes"] for told in each["states"].values() if isinstance(told, dict)) for each in parameters]
    if as_tree:
        held = zip(parameters, sizes, strict=True)
        screen.wide(
            table_of(title, {each["name"]: PrefixSums(1, numel(each["shape"]), nbytes) for each, nbytes in held})
        )
        return
    states = list(dict.fromkeys(state for each in parameters for state in each["states"]))
    table = screen.new_table(title, "name", "shape", "dtype", *map(escape, states), "bytes")
    for each, nbytes in zip(parameters, sizes, strict=True):
        cells = [_cell(each["states"][state]) if state in each["states"] else "" for state in states]
        name = " = ".join(each["names"])
        table.add_row(escape(name), _shape(each["shape"]), each["dtype"], *cells, f"{nbytes:,}")
    screen.wide(table)


def _show_buffers(buffers: Sequence[dict[str, Any]], *, as_tree: bool) -> None:
    if as_tree:
        held = {_buffer(each): PrefixSums(1, numel(each["shape"]), each["nbytes"]) for each in buffers}
        screen.wide(table_of("Buffers", held))
        return
    table = screen.new_table("Buffers", "name", "shape", "dtype", "bytes")
    for each in buffers:
        table.add_row(escape(_buffer(each)), _shape(each["shape"]), each["dtype"], f"{each['nbytes']:,}")
    screen.wide(table)


def _buffer(each: dict[str, Any]) -> str:
    return f"{each['name']} of rank {each['rank']}" if "rank" in each else str(each["name"])


def _show_rest(facts: dict[str, Any]) -> None:
    """Print what is beside the tensors: the optimizers' options, and what was saved along."""
    for number, told in enumerate(facts["optimizers"]):
        table = screen.new_table(f"Optimizer {number}: {told['class']}", "group", "parameters", "what")
        for at, group in enumerate(told["groups"]):
            words = ", ".join(f"{key}={value}" for key, value in group["options"].items())
            table.add_row(str(at), str(len(group["parameters"])), escape(words))
        screen.wide(table)
    table = screen.new_table("Saved along", "name", "what")
    for each in facts["extra"]:
        if not (isinstance(each["value"], dict) and any(each["value"].get(kind) for kind in CONTAINERS)):
            table.add_row(escape(each["name"]), escape(_cell(each["value"])))
    screen.wide(table)


def _cell(told: Any) -> str:
    if not isinstance(told, dict):
        return str(told)
    if "shape" not in told:
        return ", ".join(f"{kind} of {length}" for kind, length in told.items())
    return told["dtype"] if told["shape"] else f"{told['dtype']}, one"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one"


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _inside(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a folder's checkpoints, oldest first, by manifests and files' sizes; then unfinished and damaged ones."""
    complete, others = [], []
    for path in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
        row: dict[str, Any] = {"name": path.name, "state": "complete", "problem": None}
        if (saving := under_way(path)) is not None:
            killed = {"state": "leftover", "problem": "a save was killed here; the next removes it"}
            others.append(row | ({"state": "saving", "problem": "a save is under way here"} if saving else killed))
        elif (path / MANIFEST).exists() or _rank_files(path):
            try:
                with Saved.open(path) as saved:
                    nbytes = sum(file["nbytes"] for file in saved.manifest["files"].values())
                    told = {key: saved.manifest[key] for key in ("saved", "ranks", "stage")}
                    at = order(saved.manifest)
                complete.append((at, row | told | {"nbytes": nbytes}))
            except CheckpointError as error:
                others.append(row | {"state": "damaged", "problem": one_line(error)})
    yield from (row for _, row in sorted(complete, key=lambda each: each[0]))
    yield from others


def _show_list(path: str, found: list[dict[str, Any]]) -> None:
    table = screen.new_table(
        f"Checkpoints in {screen.shown(path)}", "name", "state", "ranks", "stage", "bytes", "saved"
    )
    for row in map(screen.shown, found):
        if row["state"] == "complete":
            cells = (str(row["ranks"]), str(row["stage"]), f"{row['nbytes']:,}", _time(row["saved"]))
            table.add_row(escape(row["name"]), "[green]complete[/green]", *cells)
        else:
            state = f"[yellow]{row['state']}[/yellow]" if row["state"] == "saving" else f"[red]{row['state']}[/red]"
            table.add_row(escape(row["name"]), state, "", "", "", escape(row["problem"]))
    screen.wide(table)
    screen.say("  [dim]by manifests and sizes; zeroshard ckpt verify reads every byte[/dim]")


# --- verify ---------------------------------------------------------------------------------------------------------


def verify(paths: Sequence[str], *, as_json: bool) -> int:
    """Read every byte of all checkpoints; return exit code 0 where each is as it was written, else 1."""
    opened = [open_checkpoint(path) for path in paths]  # all are checkpoints, or none is read
    with Working(("checkpoints read", len(paths)), lines=not as_json) as counts:
        results = [
            _verified(path, saved, partial(counts.now, done=number))
            for number, (path, saved) in enumerate(zip(paths, opened, strict=True))
        ]
    complete = all(not result["problems"] for result in results)
    if as_json:
        print(json.dumps({"complete": complete, "checkpoints": results}, indent=2))
    else:
        for result in map(screen.shown, results):
            read = ", ".join(
                [
                    screen.many(len(result["files"]), "file"),
                    f"{result['nbytes']:,} bytes",
                    screen.many(result["blocks"], "block"),
                ]
            )
            if not result["problems"]:
                screen.say(f"{escape(result['path'])}: {read}: [bold green]every byte is as written[/bold green]")
            for problem in result["problems"]:
                screen.say(f"{escape(result['path'])}: [bold red]damaged:[/bold red] {escape(problem['what'])}")
    return 0 if complete else launch.FAILED


def _verified(path: str, opening: Any, told: Callable[[str], None]) -> dict[str, Any]:
    result: dict[str, Any] = {"path": path, "files": {}, "nbytes": 0, "blocks": 0, "problems": []}
    try:
        with opening as saved:
            for name, facts in saved.files.items():
                result["files"][name] = facts["nbytes"]
                result["nbytes"] += facts["nbytes"]
                for block, recorded in enumerate(facts["digests"]):
                    told(f"{path}, {name}, {block} of {len(facts['digests'])} blocks")
                    result["blocks"] += 1
                    try:
                        found = _digest_of(Path(path) / name, block)
                    except OSError as error:
                        found = f"cannot be read ({error.strerror})"
                    if found != (expected := f"digest {recorded}"):
                        end = min((block + 1) * BLOCK, facts["nbytes"]) - 1
                        what = f"{name}, block {block} (bytes {block * BLOCK} to {end}): {found}, expected {expected}"
                        result["problems"].append({"file": name, "block": block, "what": what})
    except CheckpointError as error:  # the manifest, or a file that is not there or of another size
        result["problems"].append({"file": None, "block": None, "what": one_line(error)})
    return result


def _digest_of(path: Path, block: int) -> str:
    with open(path, "rb", buffering=0) as file:
        file.seek(block * BLOCK)
        return f"digest {digest(file.read(BLOCK))}"


# --- export ---------------------------------------------------------------------------------------------------------


def export(path: str, out: str, *, dtype: str | None, file_nbytes: int, overwrite: bool, as_json: bool) -> None:
    import torch

    from zeroshard.integrations.export import Wanted, export_saved

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    with open_checkpoint(path) as saved, Working((f"exporting {path}", None), lines=not as_json):
        files = export_saved(saved, Path(out), Wanted(file_nbytes, dtypes[dtype] if dtype else None, overwrite))
        names = len(saved.parameters) + len(saved.buffers)
    if as_json:
        print(json.dumps({"path": path, "out": out, "tensors": names, "files": dict(files)}, indent=2))
        return
    for file, nbytes in files:
        screen.say(f"  {escape(str(Path(out) / file))}  {nbytes:,} bytes")
    screen.say(f"[bold green]{names} tensors written[/bold green], for safetensors and what reads it")


# --- import ---------------------------------------------------------------------------------------------------------


def import_foreign(
    source: str,
    path: str,
    optimizer: str | None,
    weights: bool,
    buffers: Sequence[str],
    tied: Sequence[str],
    *,
    as_json: bool,
) -> None:
    from zeroshard.integrations.foreign import Hints
    from zeroshard.integrations.importing import import_checkpoint

    check_local(source)
    if not Path(source).exists():
        raise InputError(f"{source}: no such file or folder")
    pairs = [pair.split("=") for pair in tied]
    if odd := [text for text, pair in zip(tied, pairs, strict=True) if len(pair) != 2 or not all(pair)]:
        raise InputError(f"--tied takes ALIAS=NAME, got {odd[0]!r}")
    hints = Hints(optimizer, buffers, dict(pairs))  # type: ignore[arg-type, unused-ignore]
    with Working((f"importing {source}", None), lines=not as_json):
        found = import_checkpoint(source, path, hints, weights=weights)
    told = {
        "source": found.source,
        "path": path,
        "parameters": len(found.values),
        "with_states": sum(bool(states) for states in found.states.values()),
        "buffers": sorted(found.buffers),
        "tied": found.aliases,
        "extra": sorted(found.extra),
        "notes": found.notes,
    }
    if as_json:
        print(json.dumps(told, indent=2))
        return
    shown = screen.shown(told)
    screen.say(f"{escape(shown['source'])}")
    for note in shown["notes"]:
        screen.say(f"  [yellow]{escape(note)}[/yellow]")
    screen.say(
        f"[bold green]{screen.many(shown['parameters'], 'parameter')}[/bold green], "
        f"{shown['with_states']} with states, "
        f"{screen.many(len(shown['buffers']), 'buffer')}, in {escape(shown['path'])}"
    )
