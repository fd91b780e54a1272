"""What the documents say is run or looked up here: snippets, examples, commands, file names, links."""

import collections
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from email.message import Message
from pathlib import Path

import pytest

import pages
from zeroshard.explain import document

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BESIDE = [ROOT / "tests" / "trust-table.md", ROOT / "tests" / "world" / "README.md"]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *BESIDE]
LIMIT = 180  # seconds a program may take before it counts as hung


def fenced(text, language):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for its_language, block in blocks if its_language == language]


def snippets(text):
    """Python that runs with what is installed. `<!-- needs: NAME -->` before one: only where that package is, too."""
    found = re.findall(r"(?:^<!-- needs: (\w+) -->\n)?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(found) == len(fenced(text, "python"))
    return [code for needs, code in found if not needs or importlib.util.find_spec(needs)]


def test_how_it_works_quotes_the_reference_engine():
    """Its blocks are lines of the one file, as they stand there."""
    source = (ROOT / "src" / "zeroshard" / "reference.py").read_text()
    quoted = fenced((ROOT / "docs" / "how-it-works.md").read_text(), "py")
    assert len(quoted) == 5
    for block in quoted:
        assert any(textwrap.indent(block, " " * depth) in source for depth in range(0, 20, 4)), block


@pytest.mark.filterwarnings("ignore:torch.distributed")  # what torch and we say of DCP, the pages say too
@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # Lightning's own use of torch
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.trainers] * (page.stem == "trainers")) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}  # of the page: a snippet may go on from the one before
    for snippet in snippets(page.read_text()):
        exec(compile(snippet, str(page), "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)|\ssrc(?:set)?=\"([^\"]+)\"", page.read_text())
    targets = [first or second for first, second in targets]
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_prose_is_wide(page):
    """At most 132 columns, but for rows of tables and what is in code blocks."""
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    wide = [line for line in prose.splitlines() if len(line) > 132 and not line.lstrip().startswith(("|", "<"))]
    assert wide == [], f"break these lines of {page.name} at 132 columns"


def test_the_first_screen_differs_from_plain_torch_by_one_line():
    """The README's loop without zeroshard's line is a plain PyTorch loop that runs."""
    (snippet,) = fenced(README, "python")
    snippet, _, shown = snippet.partition("    if zero.rank == 0 ")
    assert shown.splitlines()[1].startswith("        print(")
    plain = [line for line in snippet.splitlines() if "zeroshard" not in line]
    assert len(snippet.splitlines()) - len(plain) == 2  # the import and the one new line
    exec(compile("\n".join(plain), "README.md", "exec"), {})


@pytest.mark.full
def test_the_first_screen_shows_what_its_program_prints(tmp_path):
    """On two ranks, to the last digit; and there is a line to install it, and a picture."""
    (snippet,) = fenced(README, "python")
    (tmp_path / "train.py").write_text(snippet)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert [block for block in fenced(README, "") if block.startswith("step")] == [done.stdout]
    first = README.partition("## ")[0]
    assert 'pip install ".[torch]"' in first
    assert first.index("docs/pictures/exchange-dark.svg") < first.index("```python") < first.index("memory-dark.svg")


def test_pictures_are_drawn_from_their_numbers(monkeypatch):
    """`make docs` draws them; light and dark, and nothing is loaded from elsewhere."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawn = importlib.import_module("pictures").pictures() | importlib.import_module("exchange").pictures()
    assert {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")} == drawn
    assert sorted(drawn) == [
        f"{name}-{theme}.svg" for name in ("exchange", "memory", "speed", "step") for theme in ("dark", "light")
    ]
    assert all("http" not in content.replace("http://www.w3.org/2000/svg", "") for content in drawn.values())
    assert all(len(content) < 60_000 for content in drawn.values())


def test_the_moving_picture_is_the_recorded_step(monkeypatch):
    """Every gather and reduction is in it; it ends with the bytes that the step sent, and its most are the peak."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawn = importlib.import_module("exchange")
    layout, recording = drawn.recorded()
    story = drawn.beats(layout, recording)
    kinds = collections.Counter((beat.kind, beat.phase) for beat in story)
    units = len(layout["buckets"])
    # The weights of the first unit are not gathered in backward: its input needs no gradient.
    assert kinds == {
        ("gather", "forward"): units, ("compute", "forward"): units, ("release", "forward"): units,
        ("gather", "backward"): units - 1, ("compute", "backward"): units, ("reduce", "backward"): units,
        ("release", "backward"): units - 1, ("adam", "step"): 1,
    }  # fmt: skip
    assert story[-1].sent == (772, 772)
    assert [max(beat.holds[rank] for beat in story) for rank in range(2)] == [
        rank["peak"]["total"] for rank in recording["ranks"]
    ]


def test_a_page_quotes_the_last_benchmark(monkeypatch):
    """Its table is the one in bench/results; `python -m bench.report` brings it up to date."""
    monkeypatch.syspath_prepend(ROOT)
    report = importlib.import_module("bench.report")
    rows = json.loads((report.RESULTS / "train.json").read_text())["rows"]
    page = report.PAGE.read_text()
    assert report.OPENING in page
    assert report.quote(page, rows) == page


def test_the_walkthrough_in_the_documents_is_the_packages(tmp_path):
    """The page in the documents holds the numbers of today's planner and recordings."""
    command = [sys.executable, "-m", "zeroshard", "explain", "--out", str(tmp_path / "zero.html")]
    subprocess.run(command, capture_output=True, check=True, timeout=LIMIT, env={**os.environ, "ZEROSHARD_DOCS": "./"})
    same = (tmp_path / "zero.html").read_bytes() == (ROOT / "docs" / "zero.html").read_bytes()
    assert same, "`make docs` writes docs/zero.html anew"  # pytest would compare a megabyte line by line


def test_commands_exist():
    """Every `make target` that a page names is a target, and every target runs something."""
    targets = set(" ".join(re.findall(r"^(\w[\w ]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)).split())
    named = {
        target for page in PAGES for target in re.findall(r"^make (\w+)|`make (\w+)`", page.read_text(), re.MULTILINE)
    }
    assert {target for pair in named for target in pair if target} <= targets
    assert {"install", "demo", "test", "slow", "check", "docs"} <= targets
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_an_address_that_is_not_there_yet_is_shown_nowhere_and_refused_by_a_release(monkeypatch):
    """[project.urls] has placeholders; a person writes the addresses there, and nowhere else."""
    tomllib = pytest.importorskip("tomllib")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    told = Message()
    for label, address in [*urls.items(), ("Changelog", "https://example.org/changes")]:
        told["Project-URL"] = f"{label}, {address}"
    monkeypatch.setattr(document.metadata, "metadata", lambda name: told)
    monkeypatch.delenv("ZEROSHARD_DOCS", raising=False)
    waiting = {label for label, address in urls.items() if address.endswith(".invalid")}
    assert document.links() == {"Changelog": "https://example.org/changes"} | {
        label: address for label, address in urls.items() if label not in waiting
    }
    if waiting:
        made = subprocess.run(
            ["make", "-o", "install", "release"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert made.returncode and "write the project's addresses into [project.urls]" in made.stdout


def test_the_table_of_rooms_names_the_whole_package():
    """architecture.md has a row for each folder of the package and of the repository, and links the package's own files."""
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## The rooms")[2]
    rooms = re.findall(r"^\| `(.+?)/`(, beside the package)? \|", table, re.MULTILINE)
    assert [name for name, beside in rooms if not (ROOT / ("" if beside else "src/zeroshard") / name).is_dir()] == []
    package = {
        path.name for path in (ROOT / "src" / "zeroshard").iterdir() if not path.name.startswith(("_", "py.typed"))
    }
    named = {name.partition("/")[0] for name, _ in rooms}
    assert {each for each in package - named if f"](../src/zeroshard/{each})" not in table} == set()


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Cell after cell; what is committed has no outputs."""
    monkeypatch.chdir(tmp_path)
    cells = [
        cell for cell in json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    scope = {"__name__": "__main__"}
    for cell in cells:
        assert cell["outputs"] == []
        exec(compile("".join(cell["source"]), "notebook.ipynb", "exec"), scope)
    assert scope["world"].run(scope["equal"]) == [True, True]
    assert scope["its"].stage == 1 and len(cells) == 7


def masked(text):
    return re.sub(r"weights [0-9a-f]{16}", "weights ...", text)


@pytest.mark.full
def test_the_tutorial_prints_what_it_shows(tmp_path):
    """Two ranks, one rank that goes on, and two that never stopped: the page's lines, and the last two's bits equal."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    program = next(code for code in fenced(page, "python") if "zero.latest(" in code)
    said = []
    for shown, folder in zip(fenced(page, "console"), ("a", "a", "b"), strict=True):
        command, _, wanted = shown.partition("\n")
        steps, launcher, *words = command.removeprefix("$ STEPS=").split()
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "train.py").write_text(program)
        launched = ["-m", "torch.distributed.run"] if launcher == "torchrun" else []
        done = subprocess.run(
            [sys.executable, *launched, *words], cwd=tmp_path / folder, env={**os.environ, "STEPS": steps},
            capture_output=True, text=True, timeout=LIMIT, check=True,
        )  # fmt: skip
        assert masked(done.stdout) == masked(wanted)
        said.append(done.stdout.splitlines()[-1])
    assert said[1] == said[2] != said[0]


def test_a_replay_says_what_its_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page, scope = ROOT / "docs" / "replay.md", {"__name__": "__main__"}
    exec(compile(snippets(page.read_text())[0], str(page), "exec"), scope)
    block = pages.shown("replay.md", "zeroshard.errors.CorruptionError: ").partition(": ")[2]
    assert all(pages.is_shown(block, told, r"(?<=host )\w+") for told in scope["told"])


# Blocks that show what a program has printed, by page and what they begin with: the test that compares them with what
# it prints today. `$ zeroshard plan` is test_numbers' and `$ zeroshard ckpt` test_ckpt's.
COMPARED = {
    ("README.md", "step 10  loss"): "tools/test_docs.test_the_first_screen_shows_what_its_program_prints",
    ("diff.md", "$ zeroshard diff runs/right"): "tools/test_runlog.test_the_page_shows_what_the_command_prints",
    ("diff.md", "$ zeroshard diff runs/new"): "tools/test_runlog.test_a_missing_no_sync_is_found",
    ("diff.md", "runs/avx2"): "tools/test_traces.test_of_two_processors_the_first_module_that_differs_is_named",
    ("one-process.md", ""): "tools/test_docs.test_ranks_in_one_process_print_what_the_page_shows",
    ("referee.md", "they part at step"): "tools/test_referee.test_a_job_shows_its_bug",
    ("replay.md", "zeroshard.errors.Corr"): "tools/test_docs.test_a_replay_says_what_its_page_shows",
    (
        "testing.md",
        ">   ",
    ): "tools/test_testing.test_a_failing_rank_is_named_with_its_traceback_and_what_each_rank_printed",
    ("testing.md", "0.weight: element"): "tools/test_numbers.test_what_two_tensors_differ_in",
    ("testing.md", "a bit moved"): "tools/test_testing.test_the_page_shows_what_is_said_of_a_bit_that_moved",
    ("troubleshooting.md", "[rank 1]"): "tools/test_docs.test_ranks_in_one_process_print_what_the_page_shows",
    ("trust.md", "zeroshard.errors.Peer"): "test_lost_ranks.test_the_page_shows_what_the_other_ranks_say",
    ("tutorial.md", "[rank 0]"): "tools/test_docs.test_ranks_in_one_process_print_what_the_page_shows",
    ("tutorial.md", "$ STEPS="): "tools/test_docs.test_the_tutorial_prints_what_it_shows",
    (
        "verify.md",
        "$ zeroshard verify examples",
    ): "tools/test_verify.test_the_gates_of_a_gpt_with_dropout_and_tied_weights",
    ("verify.md", "$ zeroshard verify tests"): "tools/test_verify.test_the_page_shows_what_is_printed_of_a_difference",
}
# What a block begins with that is typed, not printed: commands, scripts, code.
TYPED = re.compile(
    r" *(zeroshard |zeroshard\.(?!errors)|torchrun |make |pip |python |fio |srun |export |#!|ZEROSHARD_|with |from |import |mesh = |def )"
)
DRAWN = {("architecture.md", "                     your model"), ("checkpoints.md", "step-1/"), ("diff.md", "+with ")}


def outputs():
    """Page and first line of each block that shows what a program prints. commands.md is made from the commands."""
    for page in PAGES:
        for language, text in pages.blocks(page):
            typed = language in ("python", "py", "sh") or TYPED.match(text) or page.name == "commands.md"
            if not typed and not any((page.name, text[: len(begins)]) == (name, begins) for name, begins in DRAWN):
                yield page.name, text.partition("\n")[0]


def test_every_shown_output_is_compared_with_todays():
    """A new block goes into COMPARED, with a test that runs what it shows."""
    found, used = [*outputs()], set()
    for name, first in found:
        if first.startswith(("$ zeroshard plan ", "$ zeroshard ckpt ")):
            continue
        by = [key for key in COMPARED if key[0] == name and first.startswith(key[1])]
        assert len(by) == 1, (name, first)
        used |= {*by}
    assert used == {*COMPARED} and len(found) > 30
    for test in COMPARED.values():
        file, _, function = test.partition(".")
        assert f"\ndef {function}(" in (ROOT / "tests" / f"{file}.py").read_text(), test


@pytest.mark.parametrize("page", ["tutorial", "one-process", "troubleshooting"])
def test_ranks_in_one_process_print_what_the_page_shows(page, tmp_path, monkeypatch, capsys):
    """Each block of text is what the snippet before it has printed."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", (ROOT / "docs" / f"{page}.md").read_text(), re.M | re.DOTALL)
    scope, shown = {"__name__": "__main__"}, 0
    for language, block in blocks:
        if language == "text":
            assert capsys.readouterr().out == block
            shown += 1
        elif shown < sum(each == "text" for each, _ in blocks):
            capsys.readouterr()
            exec(compile(block, f"{page}.md", "exec"), scope)
    assert shown > 0


@pytest.mark.full
def test_the_site_is_built_from_these_pages(tmp_path):
    """Every link leads somewhere, nothing is loaded from elsewhere, and docstrings are on the page of the API."""
    built = subprocess.run(
        [sys.executable, ROOT / "docs" / "site.py", tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    api = (tmp_path / "site" / "api.html").read_text()
    assert "The dtype of each state." in api and 'id="zeroshard.Zero.save"' in api
    assert "Arguments:" not in api and "draws the order of samples" in api  # fields are rows of tables
    assert (tmp_path / "site" / "source" / "examples" / "job.py.txt").exists()
    assert (tmp_path / "site" / "zero.html").exists()
    assert (tmp_path / "site" / "trust-table.html").exists()  # which the page of a step links
    assert 'href="optimizers.html#which-optimizers"' in (tmp_path / "site" / "contributing.html").read_text()
    assert not [path for path in (tmp_path / "site").rglob("*") if path.name == "__pycache__" or path.suffix == ".pyc"]
    found = {item["location"] for item in json.loads((tmp_path / "site" / "search.json").read_text())["items"]}
    assert "guide.html" in found and not [page for page in found if page.startswith("decisions/")]


def test_the_site_refuses_what_is_loaded_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    (tmp_path / "a.html").write_text(
        "<a href='https://example.org'>x</a><script src='https://example.org/x.js'></script>"
    )
    (tmp_path / "b.css").write_text("@import url('https://example.org/x.css');")
    assert [line.split(":")[0] for line in sorted(site.from_elsewhere(tmp_path))] == ["a.html", "b.css"]


@pytest.mark.full
def test_the_example_is_short_and_runs(tmp_path):
    """At most 60 lines beside what uv reads; the same program alone and on two ranks."""
    example = ROOT / "examples" / "train_gpt.py"
    assert len([line for line in example.read_text().splitlines() if not line.startswith("# ")]) <= 60
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": LIMIT, "check": False}
    alone = subprocess.run([sys.executable, "-W", "error", str(example), "--steps", "2"], **run)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert re.fullmatch(r"step 2  loss \d\.\d{3}  held [\d,]+ bytes\n", alone.stdout)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = subprocess.run([*launcher, str(example), "--steps", "2", "--stage", "0"], **run)
    assert both.returncode == 0, both.stderr
    assert re.fullmatch(r"step 2  loss \d\.\d{3}  held [\d,]+ bytes\n", both.stdout)
