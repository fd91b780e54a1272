"""What the documents say is run or looked up here: snippets, examples, commands, file names, links."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LIMIT = 60  # seconds a program may take before it counts as hung


def fenced(text, language):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for its_language, block in blocks if its_language == language]


@pytest.mark.filterwarnings("ignore:torch.distributed")  # what torch and we say of DCP, the pages say too
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}  # of the page: a snippet may go on from the one before
    for snippet in fenced(page.read_text(), "python"):
        exec(compile(snippet, str(page), "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


def test_the_first_screen_differs_from_plain_torch_by_one_line():
    """The README's loop without zeroshard's line is a plain PyTorch loop that runs."""
    (snippet,) = fenced(README, "python")
    plain = [line for line in snippet.splitlines() if "zeroshard" not in line]
    assert len(snippet.splitlines()) - len(plain) == 2  # the import and the one new line
    exec(compile("\n".join(plain), "README.md", "exec"), {})


def test_the_readme_quotes_the_last_benchmark(monkeypatch):
    """Its table is the one in bench/results; `python -m bench.report` brings it up to date."""
    monkeypatch.syspath_prepend(ROOT)
    report = importlib.import_module("bench.report")
    rows = json.loads((report.RESULTS / "train.json").read_text())["rows"]
    assert report.OPENING in README
    assert report.quote(README, rows) == README


def test_the_walkthrough_in_the_documents_is_the_packages(tmp_path):
    """`make docs` writes it anew."""
    command = [sys.executable, "-m", "zeroshard", "explain", "--out", str(tmp_path / "zero.html")]
    subprocess.run(command, capture_output=True, check=True, timeout=LIMIT)
    assert (tmp_path / "zero.html").read_bytes() == (ROOT / "docs" / "zero.html").read_bytes()


def test_commands_exist():
    """Every `make target` that a page names is a target, and every target runs something."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for target in re.findall(r"^make (\w+)|`make (\w+)`", page.read_text(), re.MULTILINE)
    }
    assert {target for pair in named for target in pair if target} <= targets
    assert {"install", "demo", "test", "slow", "check", "docs"} <= targets
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_file_tree_is_the_one_on_disk():
    """Each name in the README's tree exists, and no file or folder of the package is missing from it."""
    (tree,) = (block for block in fenced(README, "") if "src/zeroshard/" in block)
    folder, named = ROOT, set()
    for line in tree.splitlines():
        name = line.split()[0]
        if name == "src/zeroshard/":
            folder = ROOT / name
        path = folder / name if line.startswith(" ") else ROOT / name
        assert path.exists(), name
        named.add(path)
    package = {path for path in (ROOT / "src" / "zeroshard").iterdir() if not path.name.startswith(("_", "py.typed"))}
    assert package - named == set()


@pytest.mark.full
def test_the_example_is_short_and_runs(tmp_path):
    """Under 60 lines; the same program alone and on two ranks."""
    example = ROOT / "examples" / "train_gpt.py"
    assert len(example.read_text().splitlines()) < 60
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": LIMIT, "check": False}
    alone = subprocess.run([sys.executable, "-W", "error", str(example), "--steps", "2"], **run)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert re.fullmatch(r"step 2  loss \d\.\d{3}  held [\d,]+ bytes\n", alone.stdout)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = subprocess.run([*launcher, str(example), "--steps", "2", "--stage", "0"], **run)
    assert both.returncode == 0, both.stderr
    assert re.fullmatch(r"step 2  loss \d\.\d{3}  held [\d,]+ bytes\n", both.stdout)
