"""Files of the repository that a program wrote are what it writes today; CONTRIBUTING lists them all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bench import links, pages, report, tensors

import ranks
from zeroshard.explain.document import document

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "web" / "fixtures"
TIMED = ("step", "waited", "peak", "most", "phases")  # of a rank: times, and what was on the way at one
TABLES = sorted(path.stem for path in report.RESULTS.glob("*.md"))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_results_is_its_numbers(name):
    """bench/results/NAME.md is NAME.json as a page, and the curve is drawn from the same numbers."""
    whole = json.loads((report.RESULTS / f"{name}.json").read_text())
    assert report.page(whole) == (report.RESULTS / f"{name}.md").read_text()
    plots = {"tensors": tensors.plot, "links": links.plot}
    if name in plots:
        assert plots[name](whole["rows"]) == (report.RESULTS / f"{name}.svg").read_text()


@pytest.mark.parametrize(
    "name",
    [
        "hostile",
        "tiers",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("run", "run-1000", "experts", "replicas")),
    ],
)
def test_a_recorded_run_of_the_pages_tests_is_what_a_run_leaves(name, tmp_path, monkeypatch):
    """web/fixtures/NAME.json is what `python -m bench.pages NAME` writes, but for times and what depends on them."""
    monkeypatch.chdir(tmp_path)
    told = ranks.run(pages.WORLDS[name], recorded, name)[0]
    again = json.loads(json.dumps(document(walkthroughs=None, run=told)))
    stored = json.loads((FIXTURES / f"{name}.json").read_text("utf-8"))
    assert settled(again) == settled(stored), f"python -m bench.pages {name}"


def recorded(name):
    return pages.Watched(name).told()


def settled(page):
    """A page's document without what differs between runs: times, their order, a loss's last bits, torch's version."""
    run = page["run"]
    run["summary"] = [{key: row[key] for key in row if key not in TIMED} for row in run["summary"]]
    del run["facts"]["torch"]
    told = run["recording"]
    verbs, states = told.pop("verbs"), told.pop("states")
    told["tiers"].sort()
    told["ranks"] = [
        {
            "rank": rank["rank"],
            "phases": sorted(name for name, *_ in rank["phases"]),
            "units": sorted((verbs[verb], unit) for verb, unit, *_ in rank["units"]),
            "moves": sorted((verbs[verb], states[state], *sizes) for verb, state, *sizes, _, _, _ in rank["moves"]),
        }
        for rank in told["ranks"]
    ]
    run["curves"]["rows"] = [step for step, *_ in run["curves"]["rows"]]
    return page


def test_contributing_lists_what_is_generated():
    """Every such file is of a pattern there, and every pattern there is of a file."""
    rows = re.findall(r"^\| (`.*?`) \| .*\| .*\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    listed = [path for row in rows for path in re.findall(r"`(.+?/.+?)`", row)]
    found = {path: set(ROOT.glob(path)) for path in listed}
    assert [path for path in found if not found[path]] == []
    written = [
        "src/zeroshard/explain/*.[hj]*",
        "docs/*.html",
        "docs/pictures/*.svg",
        "web/fixtures/*",
        "bench/results/*.[ms]*",
    ]
    assert set().union(*found.values()) == {path for pattern in written for path in ROOT.glob(pattern)}
