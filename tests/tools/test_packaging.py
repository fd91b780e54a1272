"""What packages and tools of 2026 read: dependency groups, uv's lock, headers of scripts, the bill of materials."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEADER = re.compile(r"^# /// script\n((?:# .*\n)*)# ///$", re.MULTILINE)  # PEP 723
SCRIPTS = [
    "accelerate_loop",
    "hf_trainer",
    "lightning_fit",
    "long_sequences",
    "moe",
    "ray_train",
    "train_gpt",
]  # need no torchrun


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


@pytest.mark.parametrize("name", SCRIPTS)
def test_uv_can_run_an_example(name):
    """Its header names this project, where it is, and extras that there are."""
    path = ROOT / "examples" / f"{name}.py"
    told = tomllib.loads(re.sub("^# ", "", HEADER.search(path.read_text())[1], flags=re.MULTILINE))
    (needed,) = told["dependencies"]
    assert re.fullmatch(r"zeroshard\[(\w+)\]", needed)[1] in PROJECT["project"]["optional-dependencies"]
    assert (path.parent / told["tool"]["uv"]["sources"]["zeroshard"]["path"] / "pyproject.toml").samefile(
        ROOT / "pyproject.toml"
    )
    assert told["requires-python"] in (">=3.11", PROJECT["project"]["requires-python"])


def test_uvs_lock_is_of_this_project():
    """Of all that pyproject.toml asks for; its torch is the one that CI runs, and everything comes from PyPI."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    packages = {each["name"]: each for each in lock["package"]}
    own = packages["zeroshard"]
    asked = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    wanted = {name_of(each) for requirements in asked for each in requirements} - {"zeroshard"}
    assert {each["name"] for each in own["metadata"]["requires-dist"]} == wanted
    for group, requirements in PROJECT["dependency-groups"].items():
        found = {each["name"] for each in own["metadata"]["requires-dev"][group]}
        assert found == {name_of(each) for each in requirements}
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert packages["torch"]["version"] == pinned
    sources = {json.dumps(each["source"]) for each in lock["package"]}
    assert sources == {'{"registry": "https://pypi.org/simple"}', '{"editable": "."}'}


def test_the_bill_of_materials_lists_the_packages_of_the_page():
    bill = json.loads((ROOT / "src/zeroshard/explain/page.cdx.json").read_text())
    locked = json.loads((ROOT / "web/package-lock.json").read_text())["packages"]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    found = {each["name"]: each for each in bill["components"]}
    assert {"svelte", "d3-scale", "d3-shape"} <= found.keys()
    for name, each in found.items():
        entry = locked[f"node_modules/{name}"]
        assert (each["version"], each["licenses"][0]["license"]["id"]) == (entry["version"], entry["license"])
        assert each["purl"] == f"pkg:npm/{name}@{each['version']}"
