"""Count what each feature costs outside its own files, the lines of ring A, and docstrings to rewrite, for the meters.

`python docs/features.py` lowers the numbers of docs/decisions/meters.md to what the code has, and never raises one.
`--lines "experts"` prints each line that counts for a feature, `--docstrings` those that begin with a word of VAGUE,
`--phrases` lines with a phrase of PHRASES.
A new feature begins with its row in FEATURES, and with the numbers that `--new` writes.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"
METERS = ROOT / "docs" / "decisions" / "meters.md"
AROUND = ("planner", "explain", "integrations", "cli")  # every other file of the package is the core's
APART = "worlds/", "runlog/", "testing/"  # know no feature, one under torch.distributed: their words mean other things
# Of what goes together, what rests where, the commands' options, what a codec does, where features hook in: none counts.
TABLES = "engine/refused.py", "resting.py", "planner/options.py", "engine/codec.py", "features.py"


class Feature(NamedTuple):
    """How to tell a line of code that names a feature."""

    named: str  # a pattern found in the line
    own: tuple[str, ...] = ()  # files that are the feature; nothing in them counts
    unless: str = ""  # a pattern of lines in which the same word means something else
    homonyms: tuple[str, ...] = ()  # files in which it always does


FEATURES = {
    "replicas": Feature(
        r"replica|[Rr]elay\b|relayed|\b(seat|sits|self)\.summed\b|def summed\(self\) ->|_pairs\(|\.pairs\b|\.copies\b(?!\[)|\bhand_on|\bhand_back|_hand\("
        r"|team\.column\b(?!\.share)",
        ("engine/relay.py", "ranks/column.py"),
        r"self\.copies:|host\.copies|replicated|is_replicate|not summed over|check_replicas|\"comparing replicas\"",
        ("ranks/shared_memory.py",),
    ),
    "the optimizer over all ranks": Feature(
        r"Degree\.ALL|\bOver\b|self\.over\b|comm\.optimizer|\.share\(|\b_share\(|bucket\.part\(|self\.part\(seat"
        r"|over is Degree|over: Degree|spread=spread|\bspread: bool|if spread\b|\bSAVED\b|self\.optimizer not in",
        ("ranks/levels.py",),
        unless=r"check_share|_share\(a|_share\(other|_share\(self, parent|self\._share\(parent|replicated, spread",
        homonyms=("checkpoint/files.py", "checkpoint/loading.py", "ranks/groups.py"),
    ),
    "experts": Feature(
        r"\balong\b|parameters_along|check_rows",
        ("checkpoint/listed.py", "planner/experts.py", "engine/apart.py", "engine/experts.py"),
        r"saved along|Saved along|along an axis\"|along an axis of the mesh|along the axes",
    ),
    "teams along an axis": Feature(
        r"axis_team|axis_streams|on_axis|seat_on|\.parts\b(?!\()|seat\.part\b|self\.part\b(?!\()|everyones|position_of"
        r"|team_of\(|give_all|\boffset\(|(bucket|spec|each|b|key)\.axis\b",
        ("checkpoint/listed.py", "planner/experts.py", "engine/apart.py", "engine/experts.py"),
        r"strips\.parts|saved along|self\.strips|_everyones|self\.parts\.get|kinds\.parts|strips\(name\)\.parts|cut\[r\.name\]",
        (
            "checkpoint/manifest.py",
            "checkpoint/parts.py",
            "strips.py",
            "checkpoint/files.py",
            "fp8.py",
            "int8.py",
            "engine/coded.py",
            "tiers/once.py",
            "batches.py",
            "numerics.py",
        ),
    ),
    "gradients source by source": Feature(
        r"\bsources\b|by_source|layout\.apart|self\._apart\b|place\.apart|\.apart = None|\bapart=|\bapart is None",
        ("engine/apart.py",),
        r"group\.sources|team\.seat\.sources|self\.sources = team|def sources|\bself\.sources$|groups",
        ("ranks/groups.py", "engine/quantised.py", "checkpoint/saving.py", "ranks/process_group.py"),
    ),
    "tensor parallelism": Feature(
        r"tensor_parallel|TensorParallel|is_dtensor|mesh_of|mirrored|SavedPart|Strips|strips|ONE_STRIP|slot\.cut"
        r"|cut is not None|spec\.cut|check_parts|_beside\(|tensors\.(cuts|axis)|whole_shape|replace_dtensors\(self"
        r"|self\.mesh\b|_local_tensor|\btensor: Any|tensor is not None|check_tensors",
        ("engine/tensor_parallel.py", "engine/rejoined.py", "strips.py"),
        r"place_beside|_show_beside|run_beside|_persistent_buffers|tensor is not None and name|sits\.replicas - 1, 2|_beside\(self|self\._beside\("
        r"|tensor: Any = self",
        ("checkpoint/files.py", "checkpoint/staging.py", "engine/undo.py", "engine/split.py"),
    ),
    "parameters in 8 bits": Feature(
        r"fp8|[Qq]uantis|requantise|\bscaling\b|Scaling\b|\blook\(buffer|import look|import spread|follow_edits\(units"
        r"|import follow_edits|\bCOMPUTED\b|_landing\(|def _fill",
        ("engine/quantised.py", "fp8.py", "engine/fused_fp8.py", "planner/formats.py"),
        r"accepted|_filled",
        ("engine/coded.py",),
    ),
    "gradients in 8 bits": Feature(
        r"int8|\bcodes\b|coded\(|Coded\b|\.encoded\(|def encoded|\.message\b|def message\b",
        ("int8.py", "engine/coded.py", "engine/fused_int8.py", "planner/formats.py"),
        r"torch\.u?int8|uint8|escape",
        ("ranks/transport.py", "ranks/shared_memory.py", "checkpoint/files.py"),
    ),
    "split masters": Feature(
        r"\.split\b(?!\()|split_master|Master\.SPLIT|\bsplits\b|\bSplit\b|split_nbytes|lost_edit|editable\(units|import.*editable"
        r"|\bjoin_\b|\bsplit_\(|split=|SPLIT_BITS|report_lost|check_split|forget_kept|\bkeep\(\)",
        ("engine/split.py", "halves.py", "engine/fused_split.py", "planner/formats.py"),
        r"ranks\.split|splits =|own, splits|receive, send, own, splits|\[self\.position\] = splits",
        ("ranks/process_team.py", "numerics.py", "checkpoint/replicas.py"),
    ),
    "fused kernels": Feature(
        r"@twin|import twin|nvrtc|compilers\b|\bLauncher\b|def compiled\(text|def architecture",
        ("twins.py", "nvrtc.py", "engine/fusion.py", "engine/fused.py"),
        homonyms=(
            "fp8.py",
            "int8.py",
            "halves.py",
            "engine/fused_fp8.py",
            "engine/fused_int8.py",
            "engine/fused_split.py",
        ),
    ),
    "shared memory": Feature(
        r"\bshares\b|Shared[A-Z]\w+|\bshared\b|_exchange\b|Exchange\b|\bMessages\b|messages\(|\.lends\(|\.used\(|def used"
        r"|_lent\b|LENT|\btransport\b|(self|team|team_of\(cut\))\.memory\b|\.again\(|def again|\.wanted\b|self\.sends\b",
        ("ranks/shared_memory.py", "ranks/neighbours.py"),
        r"def _exchange|self\._exchange\(what|_exchange\(store|one_copy|from \.\.ranks\.transport|from \.transport"
        r'|"shared" or|parameters=.shared|Offload\(parameters',
        (
            "engine/moving.py",
            "engine/preflight.py",
            "checkpoint/replicas.py",
            "ranks/process_group.py",
            "events.py",
            "checkpoint/files.py",
            "engine/backward.py",
            "engine/recompute.py",
            "engine/optim.py",
            "ranks/watch.py",
            "engine/contribution.py",
            "tiers/nvme.py",
        ),
    ),
    "one copy of parameters per host": Feature(
        r"\bonce\b|one_copy|make_one|OnceTier|\bSHARED\b|check_once|join_publishing|exchange\.publish|def publish\(self, full"
        r"|Copy\b|copy\.(window|own|forget)",
        ("tiers/once.py",),
        r"each once|shard it once|instead=once|holds it once|at once|torchrun once|self\.closures",
        (
            "checkpoint/manifest.py",
            "checkpoint/saving.py",
            "tiers/nvme.py",
            "ranks/launcher.py",
            "errors.py",
            "ranks/watch.py",
        ),
    ),
    "the optimizer in backward": Feature(
        r"InBackward|self\.in_backward|optimizer_in_backward|in_backward=|parts\.in_backward|check_in_backward|self\.early\b"
        r"|each\.early|\bearly and\b|Passing|\bpassing\b|\.stays\b|check_ended|each\.second"
        r"|stepped=|early\.awaited|catch_up|in_backward: bool|early = False|def (words|updates|update)\(self|^class Early"
        r"",
        ("engine/in_backward.py",),
        r"entry\.updater",
        (
            "ranks/neighbours.py",
            "ranks/shared_memory.py",
            "ranks/agreement.py",
            "ranks/streams.py",
            "engine/options.py",
            "engine/moving.py",
            "batches.py",
        ),
    ),
    "moving average": Feature(
        r'\bmoving\b|MovingAverage|averages_in|\bAVERAGE\b|updates_for|furthest\(|"average"|_furthest',
        ("engine/moving.py",),
        r"self\.moving\(buffer|states\.moving|def moving\(self, buffer|Holds\.AVERAGE|AVERAGE = enum",
    ),
    "join": Feature(
        r"\bjoined\(|import.*joined|\.silent\b|\.join\(batches|alike\.source|self\.source\b|comparing\.source",
        homonyms=("ranks/watch.py", "engine/guard.py", "engine/finite.py", "batches.py"),
    ),
    "batches": Feature(
        r"(engine|running|self)\.batches\b|import Batches|\bBatches\b:|-> Batches|def batches|ngine\.position\b|self\.position: dict|\"batches\"|\.divisor\b|divisor: int",
        ("batches.py",),
    ),
    "activations in tiers": Feature(
        r"offload\.activations|\"activations\" in|\{\"activations\"|saved_in_files|saved\.default|self\.default\b|self\.saves\b"
        r"|--offload-activations|offload_activations|Offload\(activations",
        ("engine/activations.py", "tiers/offload.py"),
        homonyms=("ranks/link.py",),
    ),
    "recompute": Feature(r"recompute", ("engine/recompute.py",)),
    "replay": Feature(r"\breplay\(|\bReplay\b|Corruption", ("replay.py",)),
    "first value that is no number": Feature(
        r"self\.finite|finite\.|\bFinite\b|nonfinite|Nonfinite|Finding\b|\.skipped\b|judge\(",
        ("engine/finite.py",),
        homonyms=("int8.py", "engine/tensor_parallel.py", "batches.py"),
    ),
    "tiers": Feature(
        r"\.here\(|on_demand|by_itself|\.ahead\(|\.behind\(|\bNVME\b|rests_away|TierError|on_device|\.reporting\(|\.present\(",
        ("tiers/offload.py", "tiers/tier.py", "tiers/nvme.py", "tiers/once.py", "engine/activations.py"),
        r"unit\.ahead|def on_demand",
        ("ranks/groups.py", "ranks/link.py"),
    ),
    "no_sync": Feature(
        r"accumulator\.local|self\.local\b|backward\.local|\.aside\b|self\._local\b|_flushing|(keeper|reduction)\.flush\(\)"
        r"|def flush\(|local=",
        homonyms=(
            "ranks/streams.py",
            "ranks/shared_memory.py",
            "ranks/link.py",
            "engine/tensor_parallel.py",
            "ranks/neighbours.py",
            "cli/train.py",
            "cli/output.py",
        ),
    ),
    "interrupts": Feature(
        r"levell|\.level\(|def level|interrupted|as_one|\btorn\b|\bCall\b|_party|\bparty\b|Party\b|unsettled|recovery_copy"
        r"|join_launched|\b_join\(|\bheed|self\.left\b|refuse_within|transactions\b|each\.abandon|\bbusy\b|running\(\)|\.begin\(Call|\.end\(\)$"
        r"|_unwind",
        ("ranks/streams.py", "ranks/calls.py", "ranks/ending.py", "engine/transaction.py"),
    ),
    "edits followed anywhere": Feature(
        r"edits\b|\.rebind\(|def rebind|reseed|follow_edits|seed_master|_keep_edits|unfollowed|\.notice\(|def notice"
        r"|\.written\(|def written|\.replaced\(|def replaced|\.publish\(\)|def publish\(self\)|fingerprint|\.news\b|\.heard\b|telling\("
        r"|\bedited\b|make_way|generation\b|increment_version",
        ("engine/edits.py", "digests.py"),
        r"reseed: bool|\"reseed\"|self\.gradients\.edits|before\.replaced|_edits_of_structure|take_edits|note_edit|_publish\(snap|publish\(beside"
        r"|max_norm edits|[Mm]ake the same edits",
        (
            "engine/undo.py",
            "engine/kernels.py",
            "checkpoint/files.py",
            "checkpoint/saving.py",
            "ranks/neighbours.py",
            "ranks/shared_memory.py",
            "batches.py",
            "replay.py",
        ),
    ),
    "torch.func": Feature(
        r"\boutside\b|transformed\(|refuse_inside|stop_noting|unnoted|without_ours|_asking|inside=True|_allowed\(|in_graphs",
        unless=r"outside: bool|outside=True|if outside|_asking\(original\) -> none",
        homonyms=("errors.py", "checkpoint/manifest.py"),
    ),
    "save_on": Feature(
        r"on_signal|signalled|group\.signal\b|self\.signal\b|_SIGNALLED|save_on|boundary\(",
        ("checkpoint/on_signal.py",),
        homonyms=("batches.py",),
    ),
    "unfreezing": Feature(r"_unfreeze|retarget|reserve_master|reserve_gradients|all_wanted|hook_gradients"),
    "exceptions of Precision": Feature(
        r"\.keeps\(|\bkept=|bucket\.kept|precision\.keep\b|self\.keep\b|kept: bool|key\.kept|spec\.kept",
        unless=r"ahead|averaged|on_demand|_landing|forget|spread_average|average\(self",
        homonyms=("engine/edits.py", "engine/gathered.py", "engine/accumulator.py", "engine/flat.py"),
    ),
    "fused weights": Feature(
        r"slot\.matrix|spec\.matrix|\bmatrix:|matrix=|\bmatrices\b|\bstacks\b|\bstacked\(|slot\.together",
        ("matrices.py",),
        homonyms=("explain/walk260.py", "explain/walk4.py", "planner/texts/b.py"),
    ),
    "tensors that are never cut": Feature(
        r"\bWHOLE\b|bucket\.whole|\.whole\b|\bblock_of|layout\.blocks|\.blocks\b|grain|owners\(|_block\(|together\(|key\.block"
        r"|bucket\.block|slot\.block",
        ("owners.py",),
        unless=r"as_a_whole|exchange\.whole|accumulator\.blocks|saved\.whole|self\.whole|seat\.whole|blocks\.owner|placements\.together"
        r"|_together\(group",
        homonyms=(
            "ranks/shared_memory.py",
            "numerics.py",
            "int8.py",
            "engine/gradient.py",
            "engine/accumulator.py",
            "engine/norms.py",
            "ranks/groups.py",
            "ranks/process_team.py",
            "ranks/neighbours.py",
            "ranks/watch.py",
            "tiers/pool.py",
            "ranks/agreement.py",
        ),
    ),
}

# What a newcomer reads to follow one step at stages 0-3, in reading order.
RING_A = (
    "errors.py", "features.py", "events.py", "stage.py", "layout.py", "numerics.py",
    "ranks/transport.py", "ranks/process_group.py",
    "engine/codec.py", "engine/flat.py", "engine/gathered.py", "engine/buffer.py", "engine/unit.py", "engine/accumulator.py",
    "engine/sharded_grad.py", "engine/gradient.py", "engine/subscriber.py", "engine/contribution.py", "flow.py",
    "engine/sums.py", "engine/reduction.py",
    "engine/script.py", "engine/transaction.py", "engine/backward.py", "engine/forward.py", "engine/schedule.py",
    "engine/fragment.py", "engine/averages.py", "engine/hooks.py", "engine/optim.py",
    "engine/assembly.py", "sharded.py", "api.py",
)  # fmt: skip


# How a docstring does not begin: it names its subject (a value) or says what it does (a function).
VAGUE = ("What", "Of", "Where", "Which", "Who", "Whose", "As", "By", "Why", "How", "Whether", "If", "Beside", "When")


# Phrases that a reader stumbles over, in documents and docstrings: equal, the same, no rank, the program, ... say it.
PHRASES = re.compile(
    r"\balike\b(?!:|\.py)|\bother bits\b|\bwhat (of|came of)\b|\b(nobody|somebody|anybody|everybody|whoever)\b|\bare of no\b"
    r"|\bof no step\b|\bwhose a\b|\bwho is at what\b|\bmend(ed)?\b|\b(is|are) no numbers?\b|\btwo models of one\b",
    re.IGNORECASE,
)


def code(path: Path) -> dict[int, str]:
    """The lines of a file that hold code: number to text, without comments, docstrings and blank lines."""
    text = path.read_text()
    prose, lines, comments = set(), set(), {}
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node) is not None:
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    silent = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.start[1]
        elif token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    whole = text.split("\n")
    return {number: whole[number - 1][: comments.get(number)] for number in sorted(lines - prose)}


def package() -> dict[str, dict[int, str]]:
    """The code of every file, by its path in the package."""
    return {str(path.relative_to(PACKAGE)): code(path) for path in sorted(PACKAGE.rglob("*.py"))}


def naming(feature: Feature, files: dict[str, dict[int, str]]) -> dict[str, list[int]]:
    """The lines outside a feature's own files that name it, by file; imports do not count."""
    named, unless = re.compile(feature.named), re.compile(feature.unless or r"(?!)")
    found = {
        name: [
            number
            for number, line in lines.items()
            if named.search(line) and not unless.search(line) and not line.lstrip().startswith(("from ", "import "))
        ]
        for name, lines in files.items()
        if name not in {*TABLES, *feature.own, *feature.homonyms} and not name.startswith(APART)
    }
    return {name: lines for name, lines in found.items() if lines}


def docstrings() -> Iterator[tuple[Path, int, str]]:
    """Every docstring of the package: file, first line, text as it stands."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if documented and (text := ast.get_docstring(node, clean=False)):
                yield path, node.body[0].lineno, text


def vague() -> list[str]:
    """The docstrings that begin with a word of VAGUE: file, line and first words."""
    return [
        f"{path.relative_to(PACKAGE)}:{number}: {text.splitlines()[0]}"
        for path, number, text in docstrings()
        if text.split(" ")[0].rstrip(",:") in VAGUE
    ]


def messages() -> Iterator[tuple[Path, int, str]]:
    """Every text of the package that has a space and is no docstring, as messages and helps are: file, line, text."""
    documented = {(path, line) for path, line, _ in docstrings()}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            said = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
            if said and (path, node.lineno) not in documented:
                yield path, node.lineno, node.value


def riddles() -> list[str]:
    """The lines of documents, docstrings and messages that have a phrase of PHRASES: file, line, text."""
    pages = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
    texts = [*((path, 1, path.read_text()) for path in pages), *docstrings(), *messages()]
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, first, text in texts
        for number, line in enumerate(text.splitlines(), first)
        if PHRASES.search(line)
    ]


class Row(NamedTuple):
    """What one feature costs: files and lines of the core, and of the rooms around it."""

    core_files: int
    core_lines: int
    around_files: int
    around_lines: int


def measured() -> tuple[dict[str, Row], dict[str, int]]:
    """Each feature's row; the lines of ring A and the vague docstrings."""
    files, rows = package(), {}
    for name, feature in FEATURES.items():
        found = naming(feature, files)
        around = {path: lines for path, lines in found.items() if path.split("/")[0] in AROUND}
        core = {path: lines for path, lines in found.items() if path not in around}
        rows[name] = Row(len(core), sum(map(len, core.values())), len(around), sum(map(len, around.values())))
    lines = sum(len(files[name]) for name in RING_A)
    return rows, {"ring A": lines, "docstrings": len(vague()), "phrases": len(riddles())}


_ROW = re.compile(r"^\| (?P<name>[^|]+?) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
_METERS = {
    "ring A": re.compile(r"(?<=Ring A has )[\d,]+(?= lines of code)"),
    "docstrings": re.compile(r"(?<=In the package )[\d,]+(?= docstrings)"),
    "phrases": re.compile(r"(?<=In documents, docstrings and messages )[\d,]+(?= lines)"),
}


def allowed() -> tuple[dict[str, Row], dict[str, int]]:
    """What the page allows of all that is measured."""
    text = METERS.read_text()
    rows = {match["name"]: Row(*map(int, match.groups()[1:])) for match in _ROW.finditer(text)}
    found = {name: pattern.search(text) for name, pattern in _METERS.items()}
    return rows, {name: int(match[0].replace(",", "")) for name, match in found.items() if match is not None}


def risen() -> list[str]:
    """What costs more than the page allows, in words."""
    (rows, meters), (limits, most) = measured(), allowed()
    page = METERS.relative_to(ROOT)
    said = [f"{name}: it has no row in {page}: python docs/features.py --new" for name in rows.keys() - limits]
    said += [f"{name}: docs/features.py does not know it" for name in limits.keys() - rows]
    for name in rows.keys() & limits.keys():
        for what, now, limit in zip(Row._fields, rows[name], limits[name], strict=True):
            if now > limit:
                see = f"python docs/features.py --lines {name!r}"
                said.append(f"{name}: {now} {what.replace('_', ' ')}, {limit} allowed: {see}")
    for name, now in meters.items():
        if now > most.get(name, 0):
            listed = f": python docs/features.py --{name}" if name in {"docstrings", "phrases"} else ""
            said.append(f"{name}: {now:,}, {most.get(name, 0):,} allowed in {page}{listed}")
    return sorted(said)


def write(*, new: bool) -> None:
    """Lower the page's numbers to what the code has. new: a feature without a row gets one, too."""
    (rows, meters), (limits, most) = measured(), allowed()
    kept = {name: Row(*map(min, row, limits.get(name, row))) for name, row in rows.items() if new or name in limits}
    text = METERS.read_text()
    first = text.index("\n", text.index("|---|")) + 1
    last = max((match.end() + 1 for match in _ROW.finditer(text)), default=first)
    table = "".join(f"| {name} | {' | '.join(map(str, row))} |\n" for name, row in kept.items())
    text = text[:first] + table + text[last:]
    for name, pattern in _METERS.items():
        text = pattern.sub(f"{min(meters[name], most[name]):,}", text)
    METERS.write_text(text)


if __name__ == "__main__":
    if "--lines" in sys.argv:
        every = package()
        for place, numbers in naming(FEATURES[sys.argv[sys.argv.index("--lines") + 1]], every).items():
            print(*(f"{place}:{number}: {every[place][number].strip()}" for number in numbers), sep="\n")
    elif "--phrases" in sys.argv:
        print(*riddles(), sep="\n")
    elif "--docstrings" in sys.argv:
        print(*vague(), sep="\n")
    else:
        write(new="--new" in sys.argv)
