"""The page in a real browser: every number it shows is the document's, and it asks nothing of anybody.

Chromium is Debian's, driven headless from a file:// address. Every test also fails on an error in the console and on a
request for anything but the page.
"""

import importlib
import itertools
import json
import math
import os
import re
import shutil
from decimal import Decimal
from pathlib import Path

import pytest
import torch

import zeroshard
from zeroshard import Machine, Model
from zeroshard.explain.document import Page, built_in, document, template
from zeroshard.planner import gpus
from zeroshard.planner.gpus import GPUS

WEB = Path(__file__).parents[2] / "web"
CHROMIUM = shutil.which("chromium")
AXE = WEB / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MOST_BYTES = 200_000  # of the page without data
WIDTHS = [390, 900, 1440]
TEXTS = "#transformer?cut=model&step=1"  # the texts' own step: one cut, and Adam has no m and v yet
SENT = ("gather", "reduce", "broadcast")

CI = bool(os.environ.get("CI"))  # has all of it, or fails
if not CI and CHROMIUM is None:
    pytest.skip("the page is tested in Debian's Chromium: apt-get install chromium", allow_module_level=True)
if CI:
    sync_api = importlib.import_module("playwright.sync_api")
else:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the page is tested in a browser: pip install playwright"
    )


def fixture(name):
    return json.loads((WEB / "fixtures" / f"{name}.json").read_text())


RUN = fixture("run")["run"]
LOSSES = {"columns": ["step", "loss"], "rows": [[1, 5.5], [2, 4.25], [3, 4.0]], "note": None}
COMPARED = {
    "run": {**RUN, "curves": LOSSES},
    "other": {**RUN, "stage": 0, "curves": {**LOSSES, "rows": [[1, 5.5], [2, 4.25], [3, 3.75]]}},
    "compared": {
        "names": ["run/a", "run/<b>"], "steps": [3, 3], "compared": 3, "differs": {"step": 3, "losses": [4.0, 3.75]},
        "weights": ["ab" * 32, "cd" * 32], "equal": False,
    },
}  # fmt: skip
LINKS = {"Documentation": "./", "Repository": "https://example.org/x", "Not an address": "javascript:alert(1)"}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: path} of the pages that are opened: what ships, and what runs leave."""
    folder = tmp_path_factory.mktemp("pages")
    documents = {"walkthroughs": document(walkthroughs=built_in(), run=None)}
    documents |= {name: fixture(name) for name in ("run", "run-1000", "hostile", "tiers", "experts", "replicas")}
    documents["two"] = {**document(walkthroughs=None, run=None), **COMPARED, "links": LINKS}
    documents["version"] = {**document(walkthroughs=None, run=None), "version": 99}
    paths = {}
    for name, each in documents.items():
        paths[name] = folder / f"{name}.html"
        Page(each).write(paths[name])
    paths["bare"] = folder / "bare.html"
    paths["bare"].write_text(template())
    return paths


@pytest.fixture
def opened(browser, files):
    """`opened(name, hash, width=..., dark=...)`: a tab that is there; what went wrong in it fails the test."""
    contexts, wrong, allowed = [], [], {path.as_uri() for path in files.values()}

    def asked(request):
        if request.url.split("#")[0] not in allowed and not request.url.startswith("data:"):
            wrong.append(f"asked for {request.url}")

    def tab(name, view="", width=1440, dark=False, reduced=False):
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if reduced else "no-preference",
        )
        contexts.append(context)
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.on("console", lambda message: message.type in ("error", "warning") and wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", asked)
        page.goto(files[name].as_uri() + view)
        page.wait_for_selector("main h1")
        return page

    yield tab
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def walk():
    return built_in()


def shown(value):
    """A number of the document as the page writes it: as JavaScript does, with a real minus sign."""
    if float(value).is_integer():
        text = str(int(value))
    elif abs(value) >= 1e-6:
        text = f"{Decimal(repr(value)):f}"
    else:
        mantissa, _, power = repr(value).partition("e")
        text = f"{mantissa}e{int(power)}"
    return text.replace("-", "\N{MINUS SIGN}")


def rows(page, key=""):
    """{key: [text of each cell]} of the tables whose rows have a key that begins so."""
    script = """key => [...document.querySelectorAll('tr[data-row]')].filter(row => row.dataset.row.startsWith(key))
      .map(row => [row.dataset.row, [...row.querySelectorAll('th, td')].map(cell => cell.textContent.trim())])"""
    found = page.evaluate(script, key)
    return dict(found)


# ----------------------------------------------------------------------------------------------------------- the file


def test_the_template_is_small():
    assert len(template().encode()) <= MOST_BYTES


def test_the_bare_template_is_the_calculator(opened):
    page = opened("bare")
    assert page.locator("nav a").all_inner_texts() == ["Calculator"]


def test_another_version_of_the_document_is_refused_in_words(opened):
    page = opened("version")
    assert "version 99" in page.get_by_role("alert").inner_text()


# -------------------------------------------------------------------------------------------------------- transformer


STRIPS = ("parameters", "gradients", "master", "exp_avg", "exp_avg_sq")


def expected_of(walk, stage, at, rank, element):
    """What a rank has of one element at a moment: five values, None where it has none."""
    values, moments = walk["runs"]["bf16"], stage["moments"]
    now = moments[at]["ranks"][rank]
    done = at >= next(index for index, moment in enumerate(moments) if moment["key"] == "stepped")

    def inside(intervals):
        return next((rest for start, stop, *rest in intervals if start <= element < stop), None)

    parameter, gradient = inside(now["parameters"]), inside(now["gradients"])
    own = any(who == rank and start <= element < stop for who, start, stop, _ in stage["owners"]["optimizer"])
    table = {"own": values["gradients"][rank], "sum": values["sum"], "average": values["average"]}
    return [
        parameter and values["parameters_after" if parameter == ["new"] else "parameters"][element],
        gradient and table[gradient[0]][element],
        values["master_after" if done else "master"][element] if own else None,
        values["exp_avg"][element] if inside(now["optimizer"]) is not None else None,
        values["exp_avg_sq"][element] if inside(now["optimizer"]) is not None else None,
    ]


SCENE = """() => ({
  live: document.querySelector('[data-live]').innerText,
  held: [...document.querySelectorAll('[data-held]')].map(each => Number(each.dataset.held)),
  holds: [...document.querySelectorAll('[data-holds]')].map(each => Number(each.dataset.holds)),
  values: [...document.querySelectorAll('[data-value]')].map(each => [each.dataset.value, each.querySelector('.number').innerText]),
  strips: [...document.querySelectorAll('[data-strip]')].map(each => [each.dataset.strip,
    [...each.querySelectorAll('.piece')].map(piece => [parseFloat(piece.style.left), parseFloat(piece.style.width)])]),
})"""


@pytest.mark.full
def test_every_moment_of_every_stage(opened, walk, stage):
    """At the end of every chapter: bytes held, what each rank has of an element, and where it is drawn."""
    data = walk["transformer"]
    of = data["stages"][stage]
    element = 130  # behind the cut inside W1
    page = opened("walkthroughs", f"{TEXTS}&stage={stage}&element={element}")
    for at, moment in enumerate(of["moments"]):
        page.evaluate("hash => { location.hash = hash }", f"{TEXTS}&stage={stage}&element={element}&moment={at}")
        page.wait_for_selector(f'[data-moment="{moment["key"]}"]')
        scene = page.evaluate(SCENE)
        assert moment["title"] in scene["live"] and moment["says"] in scene["live"]
        assert scene["held"] == scene["holds"] == [sum(rank["held"].values()) for rank in moment["ranks"]]
        values, strips = dict(scene["values"]), dict(scene["strips"])
        for rank, now in enumerate(moment["ranks"]):
            for state, value in zip(STRIPS, expected_of(data, of, at, rank, element), strict=True):
                place = state == "gradients" and (stage < 2 or rank == 1)  # of element 130, with a value or without
                absent = "empty" if place else "not here"
                assert values[f"{rank} {state}"] == (absent if value is None else shown(value)), (at, rank, state)
            for state in ("parameters", "gradients"):
                drawn = [[100 * start / 260, 100 * (stop - start) / 260] for start, stop, _ in now[state]]
                assert strips[f"{rank} {state}"] == [[pytest.approx(x, abs=1e-3) for x in piece] for piece in drawn]


def beats(page, stop=None):
    """[key] of the frames from here on, stepped through by the button, until one of that key or the last."""
    found = []
    following = page.get_by_label("Next", exact=True)
    while True:
        found.append(page.locator("[data-beat]").get_attribute("data-beat"))
        if found[-1] == stop or following.is_disabled():
            return found
        following.click()


@pytest.mark.heavy
@pytest.mark.full
def test_a_step_goes_unit_by_unit(opened, walk, stage):
    """Forward as the record has it; at the end the counters are the traffic of the step."""
    of = walk["transformer"]["stages"][stage]
    page = opened("walkthroughs", f"{TEXTS}&stage={stage}", reduced=True)
    keys = beats(page)
    kinds = ("gather", "compute", "release") if stage == 3 else ("compute",)
    forward = [key for key in keys if ":forward:" in key]
    assert forward == [f"{kind}:forward:{unit}" for unit in range(1, 6) for kind in kinds]
    for rank in (0, 1):
        traffic = [line for line in of["traffic"][rank] if line["verb"] in SENT]
        sent = sum(line["sent"] for line in traffic)
        both = sum(line["sent_and_received"] for line in traffic)
        counted = [
            page.locator(f"[data-{name}]").nth(rank).get_attribute(f"data-{name}") for name in ("sent", "received")
        ]
        assert counted == [str(sent), str(both - sent)]


@pytest.mark.full
def test_stage_3_gathers_computes_and_releases(opened):
    """What a rank does not own comes, is there while the unit computes, and goes again; the model shows it too."""
    page = opened("walkthroughs", f"{TEXTS}&stage=3", reduced=True)
    seen = []
    for stop in ("release:forward:1", "gather:forward:2", "compute:forward:2", "release:forward:2"):
        beats(page, stop)
        strips = dict(page.evaluate(SCENE)["strips"])
        whole = page.locator('[data-unit="attention"]').get_attribute("data-whole")
        seen.append(([[round(x * 2.6) for x in piece] for piece in strips["1 parameters"]], whole))
    gone, there = ([[130, 130]], "false"), ([[8, 64], [130, 130]], "true")
    assert seen == [gone, there, there, gone]


@pytest.mark.full
def test_play_goes_on_to_the_end_and_stops(opened):
    page = opened("walkthroughs", f"{TEXTS}&stage=1&moment=4")
    last = page.locator("[data-beat]").get_attribute("data-beat")
    page.get_by_label("Speed").select_option("4")
    page.get_by_label("Back", exact=True).click()
    page.get_by_label("Back", exact=True).click()
    page.get_by_label("Play").click()
    page.wait_for_selector(".packet")
    page.wait_for_selector('[data-beat="rest"]')
    page.get_by_label("Play").wait_for()
    assert last == "return:gathered parameters:5" and page.locator(".packet").count() == 0
    still = opened("walkthroughs", f"{TEXTS}&stage=3", reduced=True)
    still.get_by_label("Next", exact=True).click()
    assert still.locator("[data-beat]").get_attribute("data-beat") == "gather:forward:1"
    assert still.locator(".packet").count() == 0


@pytest.mark.full
def test_the_arrows_step_and_pause_holds(opened):
    page = opened("walkthroughs", f"{TEXTS}&stage=3", reduced=True)
    for key, expected in [
        ("ArrowRight", "gather:forward:1"),
        ("ArrowRight", "compute:forward:1"),
        ("ArrowLeft", "gather:forward:1"),
    ]:
        page.keyboard.press(key)
        assert page.locator("[data-beat]").get_attribute("data-beat") == expected
    page.get_by_label("Play").click()
    page.wait_for_selector('[data-beat="compute:forward:1"]')
    page.get_by_label("Pause").click()
    assert page.get_by_label("Play").is_visible()


@pytest.mark.full
def test_the_space_bar_plays_and_pauses(opened):
    """On the page, and not where it types or presses something else."""
    page = opened("walkthroughs", "#transformer?stage=3", reduced=True)
    page.keyboard.press("Space")
    page.get_by_label("Pause").wait_for()
    page.keyboard.press("Space")
    page.get_by_label("Play").wait_for()
    page.locator('[data-block="loss"]').focus()
    page.keyboard.press("Space")
    assert page.locator('[data-block="loss"]').get_attribute("aria-expanded") == "true"
    assert page.get_by_label("Play").is_visible()
    page.get_by_label("Frame of the step").focus()
    page.keyboard.press("Space")
    assert page.get_by_label("Play").is_visible()


@pytest.mark.full
def test_a_frame_tells_what_changed_and_what_was_held_in_between(opened):
    """Two changes at once are named, and a peak that no frame ends at."""
    page = opened("walkthroughs", f"{TEXTS}&stage=3", reduced=True)
    assert "1,040 bytes (no m and v yet)" in " ".join(page.locator(".rank").first.inner_text().split())
    beats(page, "gather:backward:4")
    changed = page.locator("[data-changed]")
    assert changed.all_inner_texts() == ["+296 gathered, +296 reduction buffers"] * 2
    beats(page, "release:backward:5")
    assert changed.nth(1).inner_text() == "\N{MINUS SIGN}64 gathered, +16 reduction buffers (2,036 in between)"
    beats(page, "release:backward:4")
    assert "The sum of head has arrived at its owner." in page.locator("[data-beat]").inner_text()


@pytest.mark.full
def test_another_stage_is_at_the_same_frame(opened):
    page = opened("walkthroughs", f"{TEXTS}&stage=3", reduced=True)
    beats(page, "compute:forward:3")
    page.get_by_label("stage 1", exact=True).check()
    assert page.locator("[data-beat]").get_attribute("data-beat") == "compute:forward:3"


@pytest.mark.full
def test_all_stages_play_on_one_cursor(opened, walk):
    """Each stage is where its own last frame is; at the end every counter is that stage's traffic."""
    stages = walk["transformer"]["stages"]
    page = opened("walkthroughs", f"{TEXTS}&stage=3&all=true", reduced=True)
    beats(page, "gather:forward:2")
    scenes = page.locator("[data-scene]").evaluate_all("all => all.map(each => each.dataset.scene)")
    assert scenes == ["compute:forward:1"] * 3 + ["gather:forward:2"]
    assert beats(page)[-1] == "rest"
    for stage in stages:
        for rank, lines in enumerate(stage["traffic"]):
            seen = page.locator(f'[data-stage="{stage["stage"]}"] [data-rank="{rank}"]')
            sent = sum(line["sent"] for line in lines if line["verb"] in SENT)
            holds = sum(stage["moments"][-1]["ranks"][rank]["held"].values())
            assert [seen.get_attribute(f"data-{name}") for name in ("sent", "holds")] == [str(sent), str(holds)]


@pytest.mark.full
def test_memory_of_the_stages_on_one_axis(opened, walk):
    """What the curves read at both ends, and the named peaks of backward, on either rank."""
    stages = walk["transformer"]["stages"]
    page = opened("walkthroughs", TEXTS, reduced=True)
    for rank in (0, 1):
        page.get_by_label(f"rank {rank}", exact=True).check()
        for at, key in ((0, "start"), (-1, "rest")):
            last = page.get_by_label("Frame of the step").get_attribute("max")
            page.get_by_label("Frame of the step").fill("0" if key == "start" else last)
            held = [sum(stage["moments"][at]["ranks"][rank]["held"].values()) for stage in stages]
            assert page.locator("[data-curves] .number").all_inner_texts() == [f"{nbytes:,}" for nbytes in held]
        moments = [next(each for each in stage["moments"] if each["key"] == "backward") for stage in stages]
        peaks = [moment["ranks"][rank]["peak"]["total"] for moment in moments]
        later = [stage["later"][rank] for stage in stages]
        expected = [
            [f"{first:,}", f"{each['backward']['total']:,}", f"{each['step']['total']:,}"]
            for first, each in zip(peaks, later, strict=True)
        ]
        assert [row.locator("td.number").all_inner_texts() for row in page.locator("[data-peak-of]").all()] == expected
        drawn = page.locator("svg .peak").all_text_contents()
        assert drawn[0].split() == ["peaks", "of", "step", "1", "on", "rank", str(rank)]
        labels = {f"stage {stage}: {nbytes:,}" for stage, nbytes in enumerate(peaks)}
        assert {" ".join(each.split()) for each in drawn[1:]} == labels
    assert peaks[2] > peaks[1]


def test_memory_begins_with_a_model_of_7_b(opened):
    """Before the 260 parameters, whose stages 2 and 3 peak above stage 1: as the planner has them, lower at each stage."""
    page = opened("walkthroughs", "#transformer")
    large = page.locator("[data-large]").all()
    rest, peaks = ([int(each.get_attribute(f"data-{name}")) for each in large] for name in ("rest", "peak"))
    plan = zeroshard.plan(Model(7e9, units=32), Machine(ranks=8, gpus_per_node=8))
    assert rest == [stage.total for stage in plan.stages] and peaks == sorted(peaks, reverse=True)
    assert all(stage.peak <= peak <= 1.05 * stage.peak for stage, peak in zip(plan.stages, peaks, strict=True))
    assert large[0].bounding_box()["y"] < page.locator("[data-curve]").first.bounding_box()["y"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("block", "values"),
    [("k", "k"), ("v", "v"), ("scores", "scores"), ("softmax", "weights"), ("heads", "mixed"), ("hidden", "hidden"), ("probabilities", "probabilities")],
)  # fmt: skip
def test_a_block_of_the_model_opens_its_values(opened, walk, block, values):
    """What the engine's run had there, on both ranks, in full beside what is written."""
    page = opened("walkthroughs", f"{TEXTS}&stage=3")
    page.locator(f'[data-block="{block}"]').click()
    for rank, forward in enumerate(walk["transformer"]["runs"]["bf16"]["forward"]):
        titles = page.locator(f'[data-made="{rank}"] td').evaluate_all(
            "all => all.map(each => each.title.split(' = ')[1])"
        )
        assert titles == [shown(value) for value in forward[values]["values"]]
    page.locator(f'[data-block="{block}"]').click()
    assert page.locator("[data-made]").count() == 0


@pytest.mark.full
def test_an_element_is_chosen_by_keyboard_and_kept_in_the_address(opened, walk):
    page = opened("walkthroughs", f"{TEXTS}&stage=1&moment=3")
    slider = page.get_by_label("Element of the flat vector")
    slider.focus()
    w_q = next(tensor["start"] for tensor in walk["transformer"]["tensors"] if tensor["symbol"] == "W_q")
    for key, expected in [
        ("ArrowRight", w_q + 1),
        ("ArrowDown", w_q + 5),
        ("PageDown", w_q + 16),
        ("End", 259),
        ("Home", 0),
    ]:
        page.keyboard.press(key)
        assert slider.get_attribute("aria-valuenow") == str(expected)
    page.keyboard.press("End")
    page.wait_for_url("**element=259*")
    page.reload()
    page.wait_for_selector("main h1")
    assert page.get_by_label("Element of the flat vector").get_attribute("aria-valuenow") == "259"


@pytest.mark.full
@pytest.mark.parametrize("element", [8, 129, 130, 259])
def test_adam_is_traced_with_the_run_s_numbers(opened, walk, element):
    page = opened("walkthroughs", f"{TEXTS}&element={element}")
    values = walk["transformer"]["runs"]["bf16"]
    found = page.locator(".trace .is").all_text_contents()
    expected = [
        values[name][element]
        for name in ("sum", "average", "exp_avg", "exp_avg_sq", "master_after", "parameters_after")
    ]
    assert found == [shown(value) for value in expected]
    # What stands there is true as it stands: the sum is rounded, and says to what.
    own = torch.tensor([gradients[element] for gradients in values["gradients"]], dtype=torch.float64)
    assert own.sum().bfloat16().item() == values["sum"][element]
    assert values["average"][element] == values["sum"][element] / 2
    written = ["".join(row.split()) for row in page.locator(".trace .row").all_text_contents()[:2]]
    signed = "\N{MINUS SIGN}" if own[1] < 0 else "+"
    numbers = f"{shown(values['gradients'][0][element])}{signed}{shown(abs(values['gradients'][1][element]))}"
    assert written == [f"gA+gB={numbers}", f"sum=bfloat16(gA+gB)={shown(values['sum'][element])}"]
    assert "their sum is rounded to it" in page.locator(".trace").text_content()


@pytest.mark.full
def test_hovering_names_the_element_and_who_has_it(opened):
    page = opened("walkthroughs", f"{TEXTS}&stage=1&moment=3")
    ruler = page.locator(".ruler")
    ruler.scroll_into_view_if_needed()
    box = ruler.bounding_box()
    for element, owner in [(129, 0), (130, 1)]:
        page.mouse.move(box["x"] + box["width"] * (element + 0.5) / 260, box["y"] + 8)
        text = page.locator("[data-readout]").inner_text()
        assert f"element {element}: optimizer of rank {owner}" in text
    assert text.replace(" ", "").startswith("W1[3,2],element130")


@pytest.mark.full
@pytest.mark.parametrize("by", ["tensor", "module"])
def test_every_frame_of_backward(opened, walk, by):
    data = walk["transformer"]["backward"][by]
    page = opened("walkthroughs", f"{TEXTS}&by={by}&frame=0")
    for summary in page.locator("summary", has_text="All frames").all():
        summary.click()
    found = rows(page, "frame")
    for number, frame in enumerate(data["frames"]):
        numbers = [frame["ranks"][0]["whole"]]
        for rank in frame["ranks"]:
            engine = rank["engine"]
            numbers += [rank["transient"], rank["kept"], f"{engine['gradients']} + {engine['reduce']}"]
        assert found[f"frame {number}"] == [", ".join(frame["symbols"]), *map(str, numbers)]
    peaks = data["peak"]["transient"]
    assert [found["frame peak"][2], found["frame peak"][5]] == list(map(str, peaks))
    engine = [[sum(frame["ranks"][rank]["engine"].values()) for frame in data["frames"]] for rank in (0, 1)]
    assert [found["frame peak"][4], found["frame peak"][7]] == [f"{max(nbytes):,}" for nbytes in engine]
    for _ in data["frames"][1:]:
        page.get_by_label("Frame after").click()
    page.wait_for_url(f"**frame={len(data['frames']) - 1}*")


@pytest.mark.full
def test_the_stages_side_by_side(opened, walk):
    page = opened("walkthroughs", TEXTS)
    found = [each.inner_text() for each in page.locator("[data-nbytes]").all()]
    assert (
        found
        == [f"{stage['nbytes']:,}" for stage in walk["transformer"]["stages"]]
        == ["4,160", "2,600", "2,340", "2,080"]
    )


# --------------------------------------------------------------------------------------------------- the other walks


@pytest.mark.full
def test_the_four_weights(opened, walk, stage):
    data = walk["four"]
    page = opened("walkthroughs", f"#weights?stage={stage}")
    for _ in range(min(map(len, data["stages"][stage]["story"])) - 1):
        page.get_by_label("Next", exact=True).click()
    assert page.get_by_label("Next", exact=True).is_disabled()
    found, values = rows(page, "through "), data["values"]
    tables = [
        values["master"],
        *values["gradients"],
        *(values[key] for key in ("average", "exp_avg", "exp_avg_sq")),
        *([float(f"{each:.7g}") for each in values[f"{key}_corrected"]] for key in ("exp_avg", "exp_avg_sq")),
        *(values[key] for key in ("master_after", "parameters_after", "bf16_after")),
    ]
    assert [cells[1:] for cells in found.values()][:-1] == [[shown(value) for value in table] for table in tables]
    minus = "\N{MINUS SIGN}"
    assert rows(page, "rank ") == {  # typed from the text, but for fp16's copies of 2.1, 2.9, 1.1 and 0.6 and fp32's v
        "rank 0": ["rank 0", f"{minus}4.5", f"{minus}4.5", "0", f"[2.099609375, {minus}2.900390625, 1, 0.5]",
                   f"w1: 2.1, {minus}0.55, 0.030250002; w2: {minus}2.9, {minus}0.275, 0.0075625004"],
        "rank 1": ["rank 1", f"{minus}5.5", f"{minus}5.5", f"{minus}5.5", f"[2, {minus}3, 1.099609375, 0.60009765625]",
                   f"w3: 1.1, {minus}0.275, 0.0075625004; w4: 0.6, {minus}0.5, 0.025000002"],
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_four_weights_are_drawn(opened, walk, stage):
    """After Adam the model is half new on each rank; what a rank does not hold has no value; a line is a button."""
    data = walk["four"]
    page = opened("walkthroughs", f"#weights?stage={stage}", reduced=True)
    story = data["stages"][stage]["story"]
    stepped = [[line["verb"] for line in lines].index("step") for lines in story]
    page.get_by_role("button", name="Adam: w1 2").click()
    shown_by = [[page.locator(f'[data-w="{rank} {weight}"]').text_content() for weight in range(4)] for rank in (0, 1)]
    gone = ["w1", "w2", "w3", "w4"]
    old, new = (
        [f"{name} = {shown(float(f'{value:.5g}'))}" for name, value in zip(gone, data["values"][key], strict=True)]
        for key in ("parameters", "parameters_after")
    )
    rest = gone if stage == 3 else old
    assert stepped[0] == stepped[1]
    assert shown_by == [new[:2] + rest[2:], rest[:2] + new[2:]]


@pytest.mark.full
def test_the_three_layers(opened, walk):
    data = walk["layers"]
    page = opened("walkthroughs", "#layers")
    steps = list(dict.fromkeys(each["step"] for each in data["path"]))
    for at, step in enumerate(steps):
        now = [each for each in data["path"] if each["step"] == step]
        titles = page.locator(".window td").evaluate_all("cells => cells.map(cell => cell.title.split(' = ')[1])")
        assert titles == [shown(value) for each in now for value in each["values"]]
        if at + 1 < len(steps):
            page.get_by_label("Next", exact=True).click()
    page.get_by_role("slider", name="Time in the step").press("p")
    peak = data["overlap"]["recording"]["ranks"][0]["peak"]["total"]
    assert page.locator("[data-now]").get_attribute("data-now") == str(peak)
    slow = page.locator("table", has=page.get_by_role("columnheader", name="ranks of a group or node"))
    cells = slow.locator("tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.children].map(c => c.textContent.trim()))"
    )
    columns = ("saved_gloo", "busiest_gloo", "busiest_gloo_fp32", "saved_nccl", "busiest_nccl", "busiest_nccl_fp32",
               "saved_per_rank", "saved_per_node")  # fmt: skip
    assert cells == [
        [str(row["replicas"]), str(8 // row["replicas"]), *(f"{100 * row[column]:.1f} %" for column in columns)]
        for row in data["replicas"]["rows"][1:]
    ]


@pytest.mark.full
def test_the_profile_is_on_the_page(opened, walk):
    """8.75 GiB planned, as the text's table; what is planned of a scaled one beside what four ranks held of it."""
    page = opened("walkthroughs", "#layers")
    found, scaled = rows(page, "profile "), walk["layers"]["profile"]["scaled"]
    assert found["profile at rest"][1:3] == ["9,396,674,720", "8.75 GiB"]
    for column, of in ((3, scaled["predicted"][0]), (4, scaled["held"][0])):
        states = {what.removeprefix("profile "): cells[column] for what, cells in found.items()}
        want = of["rest"] | {"at rest": sum(of["rest"].values())}
        want |= {f"most in {phase}": nbytes for phase, nbytes in of["peaks"].items()}
        assert states == {what: f"{nbytes:,}" for what, nbytes in want.items()}
    told = page.locator("section", has_text="The profile: planned, and held").inner_text()
    assert (
        "What was held is exactly what was planned, on all 4 ranks" in told and "17.50 GiB" in told and "42.7 %" in told
    )


@pytest.mark.full
def test_every_number_of_the_texts_is_on_the_page(opened, walk):
    """Tables, what differs in them, and the corrections."""
    page = opened("walkthroughs", "#texts")
    notes = [each for view in ("transformer", "four", "layers", "overview") for each in walk[view]["corrections"]]
    for letter, text in walk["texts"].items():
        card = page.locator("details", has=page.locator(f'summary b:text-is("Text {letter}: {text["title"]}")'))
        card.locator("summary").click()
        assert card.locator("caption").all_inner_texts() == [table["title"] for table in text["tables"]]
        lines = [line for table in text["tables"] for line in table["lines"]]
        cells = card.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => cell.textContent.trim()))"
        )
        expected = [
            [line["what"], line["text_says"] or "\N{EN DASH}", "" if line["agrees"] else "differs"] for line in lines
        ]
        assert [[what, says, differs] for what, says, _, differs in cells] == expected
        for line, (_, _, value, _) in zip(lines, cells, strict=True):
            told = value.removesuffix(line["unit"]).strip()
            if isinstance(line["value"], str):
                assert told == line["value"]
            else:
                # Four significant digits, and six decimals where these are more: v = 0.0000004 is not 0.
                near = (
                    abs(line["value"]) * (5e-4 if abs(line["value"]) < 1e-3 else 1e-9)
                    + (abs(line["value"]) >= 1e-3) * 5e-7
                )
                assert float(told.replace(",", "")) == pytest.approx(line["value"], abs=near, rel=0)
        assert [" ".join(each.split()) for each in card.locator("li").all_inner_texts()] == [
            " ".join(each.split()) for each in text["corrections"]
        ]
        pairs = [card.locator(each).all_text_contents() for each in ("dt", "dd")]
        own = [each for each in notes if each["text"] == letter]
        assert pairs == [[each[key] for each in own] for key in ("says", "right")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("view", "link"), [("overview", "its first step"), ("transformer", "their own step"), ("texts", "own step")]
)
def test_the_step_that_the_texts_print_is_one_click_away(opened, walk, view, link):
    """From wherever the page speaks of texts A and D: the first step, one cut, and the loss of each rank by itself."""
    page = opened("walkthroughs", f"#{view}" + "?stop=0" * (view == "transformer"))
    for each in page.locator("main summary").all() if view == "texts" else []:
        each.click()
    page.get_by_role("link", name=link).first.click()
    page.wait_for_function(f"location.hash.startsWith('{TEXTS}')")
    page.locator('[data-block="loss"]').click()
    first = walk["transformer"]["runs"]["bf16"]["forward"]
    told = " ".join(page.locator("main").inner_text().split())
    losses = " ".join(f"Rank {rank}: {shown(each['loss'])}." for rank, each in enumerate(first))
    assert f"{losses} Target words" in told


@pytest.mark.full
def test_the_texts_are_checked_in_a_view_of_their_own(opened):
    """No other view says where a published text differs; the first one says where to look."""
    for view in ("overview", "transformer", "weights", "layers", "runs", "calculator"):
        page = opened("walkthroughs", f"#{view}")
        assert "differ here" not in page.content() and "differs here" not in page.content()
    assert opened("walkthroughs", "#overview").locator("main").get_by_role("link", name="Check the texts").is_visible()


@pytest.mark.full
def test_one_parameter_through_the_whole_step(opened, walk):
    """A row for each moment: what each rank has of the element, as the figure above says moment by moment."""
    data = walk["transformer"]
    for stage in data["stages"]:
        page = opened("walkthroughs", f"{TEXTS}&stage={stage['stage']}&element=130")
        found = rows(page, "whole ")
        assert list(found) == [f"whole {moment['key']}" for moment in stage["moments"]]
        for at, cells in enumerate(found.values()):
            here = [cell not in ("\N{EN DASH}", "empty") for cell in cells[1:]]
            empty = [cell == "empty" for cell in (cells[2], cells[5])]
            free = stage["moments"][at]["key"] in ("start", "forward", "rest")
            assert empty == [free and (rank == 1 or stage["stage"] < 2) for rank in range(2)]
            assert here == [
                value is not None for rank in range(2) for value in expected_of(data, stage, at, rank, 130)[:3]
            ]
        page.locator("main").get_by_role("button", name=stage["moments"][-1]["title"]).last.click()
        assert page.locator("[data-moment]").get_attribute("data-moment") == stage["moments"][-1]["key"]


def test_the_overview(opened, walk):
    """This engine's bytes first, at rest and sent, and the paper's on request."""
    page = opened("walkthroughs", "#overview")
    for name in ("zeroshard", "paper"):
        page.locator(f'input[value="{name}"]').check()
        plan, found = zeroshard.plan(Model("7B", preset=name), Machine(ranks=8)).stages, rows(page)
        for stage in plan:
            cells = found[f"stage {stage.stage}"]
            assert (cells[1], cells[-2]) == (stage.formula, str(stage.traffic.passes))
            assert [cells[-1], cells[3].split()[0]] == [
                f"{stage.traffic.total.sent / 1e9:.4g} GB",
                f"{stage.total / 7e9:.4g}",
            ]
        held = page.locator("article header .number").all_inner_texts()
        assert held == [f"{stage.total / 1e9:.4g} GB" for stage in plan]
    for stage in walk["overview"]["stages"]:
        cells = found[f"stage {stage['stage']}"]
        assert (cells[1], cells[-2]) == (stage["formula"], str(stage["passes"]))
        assert [float(cell.split()[0]) for cell in cells[2:-2]] == [
            pytest.approx(at["bytes_per_parameter"], rel=1e-3) for at in stage["at"]
        ]
    assert [found[f"equal {stage}"][2] for stage in range(4)] == ["= the same"] * 4
    counted = [stage["counted"] for stage in walk["overview"]["stages"]]
    assert [each["logical"] for each in counted] == [1040, 1040, 1040, 1544]  # norm1's 16 bytes once, not twice
    told = page.locator("section", has_text="What each stage saves").inner_text()
    assert "stage 3 takes 2.97" in told and "stage 2 takes" not in told


# --------------------------------------------------------------------------------------------------------- calculator


@pytest.mark.full
def test_the_calculator_answers_as_the_planner(opened):
    """Random questions of the golden file, put through the address; tests/planner.test.ts goes through all of them."""
    known = {"params", "ranks", "preset", "optimizer", "accumulate", "no_sync", "gpu_mem"}
    cases = [
        case
        for case in fixture("plan-golden")["cases"]
        if set(case["asked"]) <= known and 1e3 < case["asked"]["params"] <= 1e14
    ]
    page = opened("bare", "#calculator")
    for case in cases[:12]:
        asked, plan = case["asked"], case["plan"]
        words = {
            "p": asked["params"],
            "n": asked["ranks"],
            "recipe": asked["preset"],
            "optimizer": asked.get("optimizer", ""),
            "a": asked.get("accumulate", 1),
            "stage": 3,
        }
        query = "&".join(f"{key}={value}" for key, value in words.items()) + "&nosync=true" * asked.get(
            "no_sync", False
        )
        page.evaluate("hash => { location.hash = hash }", f"#calculator?{query}")
        total = plan["stages"][3]["total"]
        page.wait_for_selector(f'[data-total="{total}"]')
        found = rows(page)
        assert found["total"][1:] == [f"{stage['total']:,}" for stage in plan["stages"]]
        for state in plan["stages"][0]["states"]:
            assert found[state][1:] == [f"{stage['states'].get(state, 0):,}" for stage in plan["stages"]]
        moved = plan["stages"][3]["traffic"]["total"]
        titles = page.locator("tr[data-row='moved total'] td[title]").evaluate_all(
            "cells => cells.map(cell => cell.title)"
        )
        assert titles == [f"{nbytes:,} byte{'s' * (nbytes != 1)}" for nbytes in moved.values()]


@pytest.mark.full
def test_the_calculator_by_hand(opened):
    page = opened("bare", "#calculator")
    page.get_by_role("button", name="7.5 B on 64").click()
    assert page.locator("[data-total]").get_attribute("data-total") == str(int(7.5e9 * (2 + 16 / 64)))
    page.get_by_label("Precision").select_option("paper")
    assert page.locator("[data-total]").inner_text() == "16.64 GB"
    page.get_by_label("Parameters Ψ").fill("7B")
    page.get_by_label("Parameters Ψ").press("Enter")
    page.get_by_label("Ranks N").fill("8")
    page.get_by_label("Ranks N").press("Enter")
    assert page.locator("[data-total]").get_attribute("data-total") == "26250000000"
    page.get_by_label("Parameters Ψ").fill("seven")
    page.get_by_label("Parameters Ψ").press("Enter")
    assert "is not a whole number of parameters" in page.locator("#parameters-wrong").inner_text()
    assert page.locator("[data-total]").count() == 0
    page.get_by_label("Parameters Ψ").fill("7B")
    page.get_by_label("Parameters Ψ").press("Enter")
    page.get_by_label("1", exact=True).check()
    page.get_by_label("Replicas K").select_option("2")
    assert page.locator("[data-total]").get_attribute("data-total") == str(7 * 10**9 * 4 + 7 * 10**9 * 12 // 4)
    assert "--replicas 2" in page.locator("pre").inner_text()
    page.get_by_label("Replicas K").select_option("1")
    page.get_by_label("optimizer", exact=True).select_option("nvme")
    page.get_by_label("gradients", exact=True).select_option("host")
    page.get_by_label("of gradients there, %").fill("25")
    page.get_by_label("of gradients there, %").press("Enter")
    assert "NVMe" in page.locator(".bars").inner_text()
    assert "--offload-gradients 0.25 --offload-optimizer nvme" in page.locator("pre").inner_text()
    offload = zeroshard.Offload(gradients=0.25, optimizer="nvme", path="/scratch")
    plan = zeroshard.plan(Model(7e9, preset="paper", units=32), Machine(ranks=8, gpus_per_node=8), offload=offload)
    found = rows(page)
    for most, stage in zip(found["peak"][1:], plan.stages, strict=True):
        assert stage.peak <= int(most.replace(",", "")) <= 1.05 * stage.peak
    assert found["total"][1:] == [f"{stage.total:,}" for stage in plan.stages]
    for tier in ("device", "host", "nvme"):
        held = [sum(stage.tiers.get(tier, {}).values()) for stage in plan.stages]
        assert found[f"tier {tier}"][1:] == [f"{nbytes:,}" for nbytes in held]
    page.get_by_label("GPUs per node").fill("4")
    page.get_by_label("GPUs per node").press("Enter")
    links = zeroshard.plan(Model(7e9, preset="paper"), Machine(ranks=8, gpus_per_node=4)).stages
    titles = page.locator("tr[data-row^=links] td").evaluate_all("cells => cells.map(cell => cell.title)")
    assert titles == [f"{nbytes:,} bytes" for stage in links for nbytes in stage.links]


@pytest.mark.full
@pytest.mark.parametrize(
    ("key", "label", "bad", "good", "says"),
    [
        ("n", "Ranks N", "2.5", "4", "whole number of ranks from 1 to 1,048,576"),
        ("n", "Ranks N", "-3", "3", "whole number of ranks from 1 to 1,048,576"),
        ("mem", "Memory of one GPU, GiB", "0", "23.5", "number of GiB from 0.01 to 100,000"),
        ("mem", "Memory of one GPU, GiB", "", "23.5", "number of GiB from 0.01 to 100,000"),
        ("a", "Micro-batches A", "0", "4", "whole number of micro-batches from 1 to 4,096"),
        ("units", "Equal blocks", "2.5", "16", "whole number of blocks from 0 to 1,024"),
        ("node", "GPUs per node", "0", "4", "whole number of GPUs per node from 1 to 1,048,576"),
        ("og%", "of gradients there, %", "250", "25", "whole number of percent of gradients from 1 to 100"),
    ],
)
def test_a_field_says_what_is_wrong_and_nothing_else_is_answered(opened, key, label, bad, good, says):
    page = opened("bare", "#calculator?og=host")
    field = page.get_by_label(label)
    field.fill(bad)
    field.press("Enter")
    expected = f"“{bad}” is not a {says}." if bad else f"Write a {says}."
    assert page.locator(".wrong", has_text=expected).is_visible()
    assert field.input_value() == bad
    assert page.locator("[data-total]").count() == 0 and expected in page.locator(".results").inner_text()
    field.fill(good)
    field.press("Enter")
    assert field.input_value() == good
    assert page.locator("[data-total]").count() == 1 and page.locator(".wrong:not(:empty)").count() == 0
    page.wait_for_function(  # the address follows a moment later
        "([key, good]) => new URLSearchParams(location.hash.split('?')[1]).get(key) === good", arg=[key, good]
    )
    page.reload()
    assert page.get_by_label(label).input_value() == good


@pytest.mark.full
def test_memory_of_a_gpu_has_decimals(opened):
    page = opened("bare", "#calculator?mem=23.5&units=0&p=7e9&n=8&stage=2")
    plan = zeroshard.plan(Model(7e9), Machine(ranks=8, gpu_mem="23.5GiB"), stage=2)
    assert [plan.stages[0].fits, page.locator("[data-fits]").inner_text()] == [False, "does not fit"]
    assert "--gpu-mem 23.5GiB" in page.locator("pre").inner_text()
    assert rows(page)["largest"][3] == f"{plan.stages[0].largest / 1e9:.4g} B"


@pytest.mark.full
def test_a_known_model_on_a_known_gpu_with_its_activations(opened):
    """The presets fill the fields; the estimate is apart from what the planner answers."""
    page = opened("bare", "#calculator?n=8&stage=3")
    page.get_by_label("A known model").select_option("Llama 3, 8.03 B")
    page.get_by_label("A known GPU").select_option("v100-32")
    asked = [
        page.get_by_label(name).input_value() for name in ("Parameters Ψ", "Memory of one GPU, GiB", "Equal blocks")
    ]
    assert asked == ["8,030,261,248", "26.83", "32"]
    names = page.get_by_label("A known GPU").locator("option").evaluate_all("all => all.map(one => one.value)")
    assert names == ["", *GPUS]
    assert math.floor(gpus.usable("v100-32", 8) / 2**30 * 100) == 2683
    page.locator("summary", has_text="With activations").click()
    layer = 2048 * (34 * 4096 + 5 * 32 * 2048)
    assert page.locator("[data-activations]").get_attribute("data-activations") == str(32 * layer)
    page.get_by_label("recomputed in backward").check()
    assert page.locator("[data-activations]").get_attribute("data-activations") == str(32 * 2 * 2048 * 4096 + layer)
    page.get_by_label("Tokens of a sample").fill("0")
    page.get_by_label("Tokens of a sample").press("Enter")
    assert page.locator("[data-activations]").count() == 0 and page.locator("[data-total]").count() == 1


def test_a_dark_page_is_dark_before_its_script_runs(browser, files):
    """No flash of white: the colours of the paper follow the system when nothing has been said yet."""
    context = browser.new_context(color_scheme="dark", java_script_enabled=False)
    page = context.new_page()
    page.goto(files["walkthroughs"].as_uri())
    seen = page.locator("html").evaluate("node => getComputedStyle(node).backgroundColor")
    context.close()
    assert seen == "rgb(19, 21, 25)"


@pytest.mark.full
def test_on_a_phone_all_is_large_enough_to_press(opened):
    """Buttons, fields and radio buttons are 40 pixels high; what sticks to the top takes at most 110."""
    small = """() => [...document.querySelectorAll(
        'main button:not(.model button), header button, main select, nav a, fieldset label, summary, input[type=range]')]
      .filter(each => each.checkVisibility() && each.getBoundingClientRect().height < 40).map(each => each.outerHTML.slice(0, 90))"""
    for view in ("transformer?stage=3&beat=4", "weights", "layers", "calculator", "overview"):
        page = opened("walkthroughs", f"#{view}", width=390)
        assert page.evaluate(small) == []
        sticky = """() => [...document.querySelectorAll('*')].filter(each => getComputedStyle(each).position === 'sticky')
          .reduce((sum, each) => sum + each.getBoundingClientRect().height, 0)"""
        assert page.evaluate(sticky) <= 110


def test_the_step_that_is_shown_first(opened, walk):
    """The second step, each layer cut: m and v are there, and each rank sends as much of attention as it receives."""
    page = opened("walkthroughs", "#transformer?stage=3", reduced=True)
    assert page.locator(".rank").first.get_by_text("bytes").first.inner_text() == "holds 2,108 bytes"
    strips = dict(page.evaluate(SCENE)["strips"])
    cuts = [0, 4, 8, 40, 72, 76, 80, 154, 228, 244, 260]  # each module in halves
    for rank in (0, 1):
        halves = [pytest.approx([100 * a / 260, 100 * (b - a) / 260], abs=1e-3) for a, b in itertools.pairwise(cuts)]
        for state in ("parameters", "master", "exp_avg", "exp_avg_sq"):
            assert strips[f"{rank} {state}"] == halves[rank::2], state
    beats(page, "gather:forward:2")
    assert page.locator(".delta").all_inner_texts() == ["+64"] * 4
    flies = page.locator("[data-flies]").all_inner_texts()
    assert flies == ["\N{DOWNWARDS ARROW} 64 B", "\N{UPWARDS ARROW} 64 B"]
    lane = page.locator("[data-lane] [role=img]").get_attribute("aria-label")
    assert lane == "rank 0 sends 64 bytes to rank 1, rank 1 sends 64 bytes to rank 0"
    page.get_by_label("one cut", exact=True).check()
    beats(page, "gather:forward:2")
    assert page.locator(".delta").all_inner_texts() == ["", "", "", ""]  # the chapter's end: it is gathered before
    page.get_by_label("Frame of the step").fill("0")
    beats(page, "gather:forward:2")
    assert page.locator(".delta").all_inner_texts() == ["+128", "", "", "+128"]


@pytest.mark.full
def test_ten_stops_come_before_free_play(opened):
    """Each stop is at its stage and frame, with one question per stage; free play goes on from the same frame."""
    page = opened("walkthroughs", "#transformer", reduced=True)
    assert page.get_by_label("stage 3", exact=True).count() == 0
    asked, tall = 0, []
    for number in range(1, 11):
        tour = page.locator(f'[data-stop="{number}"]')
        tour.wait_for()
        if tour.locator(".options").count():
            asked += 1
            for option in tour.locator(".options button").all():
                option.click()
                right = "right" in option.get_attribute("class")
                assert tour.locator("[data-verdict]").inner_text().startswith("Yes." if right else "No: ")
        tall.append(tour.bounding_box()["height"])
        if number < 10:
            page.get_by_role("button", name="Next stop").click()
    assert asked == 4 and page.locator("[data-rank]").count() == 8
    assert len(set(tall)) == 1  # room for every question and answer: what follows stays where it is
    page.get_by_role("button", name="Previous stop").click()
    frame = page.locator("[data-beat]").get_attribute("data-beat")
    assert frame == "release:forward:2"
    page.get_by_role("button", name="Free play").click()
    assert page.get_by_label("stage 3", exact=True).is_checked()
    assert page.locator("[data-beat]").get_attribute("data-beat") == frame
    page.get_by_role("button", name="Ten guided stops").click()
    page.wait_for_selector('[data-stop="1"]')


@pytest.mark.full
@pytest.mark.parametrize("cut", ["layers", "model"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_play(opened, walk, ranks, cut):
    """Each rank's counters end at its traffic, and it holds what the ledger had; the texts' step is of two ranks."""
    stages = next(
        each["stages"] for each in walk["transformer"]["played"] if (each["cut"], each["ranks"]) == (cut, ranks)
    )
    page = opened("walkthroughs", f"#transformer?cut={cut}&stage=2", reduced=True)
    page.get_by_label("ranks", exact=True).select_option(str(ranks))
    assert page.get_by_label("step", exact=True).is_disabled()
    assert beats(page)[-1] == "rest"
    assert page.locator("[data-rank]").count() == ranks
    for rank, lines in enumerate(stages[2]["traffic"]):
        sent = sum(line["sent"] for line in lines if line["verb"] in SENT)
        seen = page.locator(f'[data-rank="{rank}"]')
        holds = sum(stages[2]["held"][rank].values())
        assert [seen.get_attribute(f"data-{name}") for name in ("sent", "holds")] == [str(sent), str(holds)]


@pytest.mark.full
def test_the_main_figure_fits_one_screen(opened):
    """Controls, model and the strips of both ranks, without scrolling."""
    page = opened("walkthroughs", f"{TEXTS}&stage=3&beat=4")
    for part in (".play", "[data-model]", '[data-strip="1 exp_avg_sq"]'):
        box = page.locator(part).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 900


@pytest.mark.full
def test_on_a_phone_the_drawing_and_its_rows_are_on_one_screen(opened):
    """From the controls, which stick to the top, to the last row of rank 1."""
    page = opened("walkthroughs", "#transformer?stage=3&beat=5", width=390)
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("() => scrollBy(0, document.querySelector('.walk').getBoundingClientRect().top)")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(done))")
    bar = page.locator(".walk").bounding_box()
    model, last = (page.locator(each).bounding_box() for each in ("[data-model]", '[data-strip="1 exp_avg_sq"]'))
    assert bar["y"] + bar["height"] <= last["y"] and last["y"] < model["y"] and model["y"] + model["height"] <= 844


@pytest.mark.full
@pytest.mark.parametrize("stop", [2, 5, 6, 8])
def test_on_a_phone_a_stop_s_exchange_is_in_sight(opened, stop):
    """What flies between the ranks, on the first screen."""
    page = opened("walkthroughs", f"#transformer?stop={stop}", width=390, reduced=True)
    page.set_viewport_size({"width": 390, "height": 844})
    flying = page.locator("[data-flies]").first.bounding_box()
    assert flying["y"] >= 0 and flying["y"] + flying["height"] <= 844


@pytest.mark.full
def test_one_path_leads_through_the_page(opened):
    """Each view ends with a question, answered when it has been guessed, and a link to the next."""
    page = opened("walkthroughs", "#overview")
    path = []
    while page.locator(".next").count():
        path.append(page.title().split(" \N{MIDDLE DOT} ")[0])
        assert page.locator("[data-verdict]").inner_text() == ""
        for option in page.locator(".options button").all():
            option.click()
            right = "right" in option.get_attribute("class")
            assert page.locator("[data-verdict]").inner_text().startswith("Yes." if right else "No: ")
        assert page.locator(".options .right").count() == 1
        page.locator(".next").click()
    assert path == ["ZeRO in short", "260 parameters", "Four weights", "Three layers"]
    assert page.title().startswith("Calculator")


@pytest.mark.full
def test_a_million_ranks_have_an_answer(opened):
    page = opened("bare", "#calculator?n=1048576")
    assert rows(page)["largest"][4] == "5629 T"
    page.evaluate("location.hash = '#calculator?n=1024&mem=81920'")
    page.wait_for_selector("text=One GPU of 81920 GiB")


# ---------------------------------------------------------------------------------------------------------- your run


def held_at(recording, rank, time):
    """{tier: bytes a rank held there at a time}, added up from the recorded changes."""
    now = {tier: {} for tier in recording["tiers"]}
    for at, tier, state, nbytes in recording["ranks"][rank]["held"]:
        if at <= time:
            now[recording["tiers"][tier]][state] = nbytes
    return {tier: sum(held.values()) for tier, held in now.items()}


def held_now(page):
    """{tier: bytes} as the page has them under its cursor."""
    script = "all => all.map(each => [each.dataset.tier, Number(each.dataset.now)])"
    return dict(page.locator("[data-now]").evaluate_all(script))


@pytest.mark.full
def test_a_run_shows_its_peak_and_every_moment(opened):
    run = fixture("run")["run"]
    recording = run["recording"]
    fullest = max(range(len(recording["ranks"])), key=lambda rank: recording["ranks"][rank]["peak"]["total"])
    page = opened("run")
    assert page.locator("[data-peak]").get_attribute("data-peak") == str(recording["ranks"][fullest]["peak"]["total"])
    peak = recording["ranks"][fullest]["peak"]
    assert f"the most that rank {fullest} held on the device, {peak['where']}" in page.locator("#peak").inner_text()
    script = "all => all.map(each => [each.dataset.made, Number(each.dataset.nbytes)])"
    made = page.locator("[data-made]").evaluate_all(script)
    passing = [(state, peak["held"][state] - peak["rests"].get(state, 0)) for state in peak["why"]]
    assert sorted(map(tuple, made)) == sorted([*peak["rests"].items(), *passing])
    assert sum(nbytes for _, nbytes in made) == peak["total"]
    said = page.locator(".made").inner_text()
    assert all(why in said for why in peak["why"].values())
    for rank, of in enumerate(recording["ranks"]):
        start, stop = of["span"]
        for part in range(0, 21, 4):
            time = start + (stop - start) * part // 20
            page.evaluate("hash => { location.hash = hash }", f"#run?rank={rank}&t={time}")
            page.wait_for_selector(f'[role=slider][aria-valuenow="{time}"][aria-label$="rank {rank}"]')
            assert held_now(page) == held_at(recording, rank, time)
        page.get_by_role("slider", name="Time in the step").press("p")
        assert held_now(page) == {"device": of["peak"]["total"]}
        # The address follows a moment later: not in the middle of the next one that is set here.
        page.wait_for_function("at => location.hash.includes(`t=${at}`)", arg=of["peak"]["at"])


@pytest.mark.full
def test_two_runs_are_compared(opened):
    """What differs in one sentence, numbers side by side, and the curves of both on one pair of axes."""
    page = opened("two", "#compare")
    assert page.locator("[data-equal] > *").all_inner_texts() == [
        "The bits differ",
        "From step 3 on: the losses there are 4 and 3.75.",
    ]
    told, seen = rows(page), RUN["summary"][0]
    held, sent = sum(seen["held"].values()), sum(row["sent"] for row in RUN["traffic"])
    assert told["stage"] == ["stage", "3", "0"]
    assert told["rest"][1:] == [f"{held:,} bytes"] * 2
    assert told["peak"][1:] == [f"{seen['peak']:,} bytes"] * 2
    assert told["sent"][1:] == [f"{sent:,} bytes"] * 2
    assert told["weights"][1:] == ["abababababababab", "cdcdcdcdcdcdcdcd"]
    figures = page.locator("section:has([data-line])")
    assert [figure.locator("[data-line]").count() for figure in figures.all()] == [2, 2]
    assert "run/<b>" in figures.last.inner_text()
    svg = figures.last.locator("svg[role=img]")
    svg.hover(position={"x": svg.bounding_box()["width"] - 14, "y": 60})
    assert re.search(r"4\b.*3\.75\b.*at step 3", figures.last.inner_text(), re.DOTALL)
    assert page.locator(".plot").count() == 2  # a timeline each


@pytest.mark.full
def test_the_footer_links_to_addresses_alone(opened):
    links = opened("two", "#compare").locator("footer a")
    assert [(link.inner_text(), link.get_attribute("href")) for link in links.all()] == list(LINKS.items())[:2]
    footer = opened("run", "#run").locator("footer")
    assert footer.locator("a").count() == 0  # no address is known: the version, and where the documents are
    assert f"Written by zeroshard {fixture('run')['zeroshard']}." in footer.inner_text()
    assert "docs/README.md in a clone" in footer.inner_text()


@pytest.mark.full
def test_two_tabs_wait_behind_more(opened):
    page = opened("walkthroughs", "#overview")
    tabs = page.locator("nav a")
    few = tabs.all_inner_texts()
    page.get_by_role("button", name="more", exact=True).click()
    assert tabs.all_inner_texts() == [*few, "Recorded runs", "Check the texts"]
    page.get_by_role("link", name="Check the texts").first.click()
    page.get_by_role("button", name="less", exact=True).click()
    assert tabs.all_inner_texts() == [*few, "Check the texts"]  # the one that is open stays


def test_pointing_at_the_timeline_reads_it(opened):
    """Time, bytes, phase and unit under the pointer; the cursor stays where it is."""
    page = opened("run", "#run")
    plot = page.locator(".plot")
    plot.scroll_into_view_if_needed()
    box, before = plot.bounding_box(), plot.get_attribute("aria-valuenow")
    told = RUN["recording"]["ranks"]
    rank = max(told, key=lambda each: each["peak"]["total"])
    start, stop = rank["span"]
    share = (rank["peak"]["at"] - start) / (stop - start)
    page.mouse.move(box["x"] + box["width"] * share + 1, box["y"] + 40)
    assert re.fullmatch(
        r"[\d.]+ (ms|s) \N{MIDDLE DOT} .* held \N{MIDDLE DOT} .*", page.locator("[data-readout]").inner_text()
    )
    assert plot.get_attribute("aria-valuenow") == before
    page.mouse.move(box["x"] + 10, box["y"] - 60)
    assert page.locator("[data-readout]").count() == 0


@pytest.mark.full
def test_a_run_shows_each_tier_apart(opened):
    """What rests in host memory and files has strips of its own; the peak is the device's."""
    recording = fixture("tiers")["run"]["recording"]
    assert set(recording["tiers"]) == {"device", "host", "nvme"}
    page = opened("tiers")
    for rank, of in enumerate(recording["ranks"]):
        page.evaluate("hash => { location.hash = hash }", f"#run?rank={rank}&t={of['peak']['at']}")
        page.wait_for_selector(f'[role=slider][aria-valuenow="{of["peak"]["at"]}"][aria-label$="rank {rank}"]')
        assert held_now(page) == held_at(recording, rank, of["peak"]["at"])
        assert held_now(page)["device"] == of["peak"]["total"]
    names = [name.strip() for name in page.locator(".chart .names span").all_inner_texts()]
    assert names[:3] == ["device", "host memory", "files"]


def test_a_run_shows_predicted_beside_held_and_what_was_sent(opened):
    run = fixture("run")["run"]
    found = rows(opened("run"))
    for rank in run["summary"]:
        held, predicted = sum(rank["held"].values()), sum(rank["predicted"].values())
        norms = held - predicted  # the map for the norm alone is beside what is predicted
        assert norms == rank["held"]["norms"] > 0
        cells = found[f"rank {rank['rank']}"]
        assert cells[1:7] == [f"{n:,}" for n in (rank["numel"], predicted, held, held - norms, 0, rank["peak"])]
    for line in run["traffic"]:
        assert found[line["verb"]][1:] == [
            f"{line[key]:,}" for key in ("calls", "logical", "sent", "sent_and_received")
        ]


@pytest.mark.full
def test_any_element_of_a_run_has_an_owner(opened):
    layout = fixture("run")["run"]["layout"]
    page = opened("run")
    for bucket in layout["buckets"][:3]:
        name, shape, start = layout["slots"][bucket["last"] - 1]
        element = math.prod(shape) - 1
        page.get_by_label("Who has an element?").fill(f"{name}[{element}]")
        owner = (start + element) // bucket["share"]
        assert page.locator("[data-answer]").inner_text().startswith(f"Rank {owner}, element ")
    page.get_by_label("Find tensors").fill(name.split(".")[-1])
    matches = sum(name.split(".")[-1] in slot[0] for slot in layout["slots"])
    assert page.locator("table", has_text="owned by").locator("tbody tr").count() == matches


@pytest.mark.full
def test_a_thousand_tensors_stay_few_nodes(opened):
    """Units first, tensors when asked; the timeline is one canvas."""
    run = fixture("run-1000")["run"]
    assert len(run["layout"]["slots"]) >= 1000
    page = opened("run-1000")
    before = page.evaluate("document.querySelectorAll('*').length")
    assert before < 5 * len(run["layout"]["slots"])
    slider = page.get_by_role("slider", name="Time in the step")
    for _ in range(40):
        slider.press("ArrowLeft")
    assert abs(page.evaluate("document.querySelectorAll('*').length") - before) < 100


@pytest.mark.full
@pytest.mark.parametrize("name", ["run", "run-1000", "tiers", "hostile", "experts", "replicas"])
def test_a_run_plays_unit_by_unit(opened, name):
    """Its own blocks: what all ranks have sent at the end of the step, and what they hold, as recorded."""
    run = fixture(name)["run"]
    page = opened(name, "#run", reduced=True)
    page.get_by_label("Next", exact=True).click()
    copied = any("parameters" in bucket.get("rests", {}) for bucket in run["layout"]["buckets"])  # before they are sent
    first = "tier:up:" if copied else "gather:forward:"
    assert page.locator("[data-beat]").get_attribute("data-beat").startswith(first)
    slider = page.get_by_label("Frame of the step")
    slider.fill(slider.get_attribute("max"))
    assert page.get_by_label("Next", exact=True).is_disabled()
    sent = sum(line["sent"] for line in run["traffic"] if line["verb"] in SENT)
    assert page.locator('[data-rank="0"]').get_attribute("data-sent") == str(sent)
    assert page.locator("[data-rank]").count() == len(run["recording"]["ranks"])
    stop = int(page.get_by_role("slider", name="Time in the step").get_attribute("aria-valuenow"))
    chosen = int(page.locator(".names ~ .plot").get_attribute("aria-label").split()[-1])
    assert page.locator(f'[data-rank="{chosen}"]').get_attribute("data-holds") == str(
        held_at(run["recording"], chosen, stop)["device"]
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["experts", "replicas"])
def test_the_teams_of_a_run_are_shown(opened, name):
    """Each group, its teams, how many elements it has, and one copy of optimizer states where there is one."""
    run = fixture(name)["run"]
    page = opened(name, "#run")
    groups = page.locator("[data-group]").all()
    assert [group.get_attribute("data-group") for group in groups] == [group["axis"] for group in run["groups"]]
    for shown, group in zip(groups, run["groups"], strict=True):
        teams = [[int(rank) for rank in team.locator("b").all_inner_texts()] for team in shown.locator("li").all()]
        assert teams == group["teams"]
        assert f"{group['numel']:,} elements" in shown.inner_text()
        assert ("there is one copy" in shown.inner_text()) == group["spread"]
    if name == "experts":
        page.get_by_label("Who has an element?").fill("1.experts.weight[512]")
        assert page.locator("[data-answer]").inner_text().startswith("Rank 1, element 0 of its part")
    else:
        assert page.locator("#teams").count() == 1
        assert opened("run", "#run").locator("#teams").count() == 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["replicas", "experts", "offload", "infinity", "fp8"])
def test_recorded_runs_play_on_the_page_that_ships(opened, walk, name):
    """Chosen by a button; its teams, its bytes and what its ranks send are the run's."""
    shown = next(each for each in walk["runs"] if each["name"] == name)
    run, page = shown["run"], opened("walkthroughs", "#layers", reduced=True)
    page.get_by_role("link", name="Recorded runs").last.click()
    page.locator("label", has_text=name).click()
    assert shown["says"] in page.locator("main").inner_text()
    assert page.locator("h1").inner_text() == run["title"]
    for group, drawn in zip(run["groups"], page.locator("[data-group]").all(), strict=True):
        teams = [[int(rank) for rank in team.locator("b").all_inner_texts()] for team in drawn.locator("li").all()]
        assert teams == group["teams"]
    slider = page.get_by_label("Frame of the step")
    slider.fill(slider.get_attribute("max"))
    for rank in run["recording"]["ranks"]:
        verbs = run["recording"]["verbs"]
        sent = sum(move[5] for move in rank["moves"] if verbs[move[0]] in SENT)
        assert page.locator(f'[data-rank="{rank["rank"]}"]').get_attribute("data-sent") == str(sent) != "0"
    assert page.get_by_role("table").last.locator("tr").count() == 1 + len(run["dtypes"])


WAYS = {"copy gradients": ("device", "host"), "copy parameters": ("host", "device")}  # of both runs below
TIERED = {
    "offload": ("ZeRO-Offload", WAYS | {"copy master": ("host", "device")}),
    "infinity": ("ZeRO-Infinity", WAYS | {"read": ("nvme", "host"), "write": ("host", "nvme")}),
}


@pytest.mark.parametrize("name", [pytest.param("offload", marks=pytest.mark.full), "infinity"])
def test_what_moves_between_tiers_plays(opened, walk, name):
    """From the text's own place: the bytes into and out of each tier, what rests there, and packets on their way."""
    told = next(each["run"] for each in walk["runs"] if each["name"] == name)
    recording = told["recording"]
    page = opened("walkthroughs", "#overview")
    title, ways = TIERED[name]
    page.locator("article", has_text=title).get_by_role("link").click()
    slider = page.get_by_label("Frame of the step")
    slider.fill(slider.get_attribute("max"))
    for rank in recording["ranks"]:
        into, out = {}, {}
        for verb, state, bucket, _, nbytes, *_ in rank["moves"]:
            verb, state = recording["verbs"][verb], recording["states"][state]
            if bucket >= 0 and (way := ways.get(verb) or ways.get(f"{verb} {state}")):
                out[way[0]] = out.get(way[0], 0) + nbytes
                into[way[1]] = into.get(way[1], 0) + nbytes
        for tier, rests in told["summary"][rank["rank"]]["tiers"].items():
            if tier != "device":
                shown = page.locator(f'[data-tier="{rank["rank"]} {tier}"]')
                counted = [shown.get_attribute(f"data-{side}") for side in ("in", "out")]
                assert counted == [str(of.get(tier, 0)) for of in (into, out)]
                row = page.locator(f'[data-rank="{rank["rank"]}"]')
                assert f"{sum(rests.values()):,} bytes" in row.locator(".holds").all_text_contents()
    tier = told["layout"]["buckets"][0]["rests"]["optimizer"]
    assert page.locator(f'[data-has="1 optimizer new {tier}"]').count() == 1
    assert page.locator('[data-has$="optimizer new"]').count() == 0
    slider.fill("0")
    assert page.locator(f'[data-has="1 optimizer old {tier}"]').count() == 1
    page.evaluate("hash => { location.hash = hash }", f"#runs?of={name}&beat={slider.get_attribute('max')}")
    page.locator("[data-beat]").wait_for()
    while not page.locator("[data-beat]").get_attribute("data-beat").startswith("tier:"):
        page.get_by_label("Back", exact=True).click()
    page.get_by_label("Back", exact=True).click()
    page.get_by_label("Next", exact=True).click()
    page.wait_for_selector("[data-rank] .packet", state="attached")


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_thousand_tensors_play_smoothly(opened):
    """While things fly, a frame changes only what flies: the scene's nodes stay the same ones."""
    page = opened("run-1000", "#run?beat=40")
    count = "document.querySelectorAll('[data-scene] *').length"
    before = page.evaluate(count)
    page.get_by_label("Speed").select_option("4")
    page.get_by_label("Play").click()
    page.wait_for_selector(".packet", state="attached")
    page.get_by_label("Pause").click()
    assert before < 1500 and abs(page.evaluate(count) - before) < 200


def told_by(page, beat):
    """The page shows the beat: its ranks, messages word for word, and folders as they were recorded."""
    page.wait_for_selector(f'[data-beat="{beat["key"]}"]')
    assert page.locator("[data-state]").evaluate_all("all => all.map(each => each.dataset.state)") == beat["states"]
    said = beat.get("said", [])
    assert page.locator("[data-said] pre").all_text_contents() == [each["text"] for each in said]
    folders = page.locator("[data-checkpoint]").evaluate_all("all => all.map(each => each.dataset.checkpoint)")
    assert folders == [each["name"] for each in beat["files"]]


def test_faults_are_caused_by_a_button_and_go_on_by_keys(opened, walk):
    """Pressed, a fault plays from its beginning; space stops it, arrows go through it, to equal losses at the end."""
    page = opened("walkthroughs", "#faults")
    for kind, button in (("flip", "Flip a bit"), ("change", "Change N"), ("kill", "Kill a rank")):
        page.get_by_role("button", name=button).click()
        page.get_by_label("Pause").click()
        page.locator("main").focus()
        story = next(each for each in walk["faults"]["stories"] if each["kind"] == kind)
        assert page.locator("[data-fault]").get_attribute("data-fault") == f"{kind}:{story['name']}"
        for number, beat in enumerate(story["beats"]):
            if number:
                page.keyboard.press("ArrowRight")
            told_by(page, beat)
        assert page.get_by_label("Next", exact=True).is_disabled()
        marks = page.locator("[data-line='2'] b").all_inner_texts()
        assert marks == ["="] * len(story["lines"][1]["losses"])
        page.keyboard.press("Space")
        page.get_by_label("Pause").click()


@pytest.mark.full
def test_every_fault_shows_what_was_recorded(opened, walk):
    page = opened("walkthroughs", "#faults", reduced=True)
    for story in walk["faults"]["stories"]:
        for number, beat in enumerate(story["beats"]):
            view = f"#faults?fault={story['kind']}&which={story['name']}&beat={number}"
            page.evaluate("hash => { location.hash = hash }", view)
            page.wait_for_selector(f'[data-fault="{story["kind"]}:{story["name"]}"][data-beat="{beat["key"]}"]')
            told_by(page, beat)
            for rank, read in enumerate(beat.get("reads", [])):
                for name, spans in read["files"].items():
                    titles = page.locator(f'[data-read="{rank}:{name}"] i').evaluate_all(
                        "all => all.map(each => each.title)"
                    )
                    assert titles == [f"bytes {start:,} to {stop - 1:,}" for start, stop in spans]


def test_names_are_text_whatever_they_say(opened):
    run = fixture("hostile")["run"]
    page = opened("hostile")
    assert "gone" not in page.title()
    table = page.locator("#owners ~ .card table").first
    units = {row.locator("th").inner_text() for row in table.locator("tbody tr").all()}
    assert {" ".join(name.split()) for name in run["layout"]["units"] if name} <= {
        " ".join(unit.split()) for unit in units
    }
    page.get_by_label("Find tensors").fill("<")
    assert page.locator("main img, main script").count() == 0


# -------------------------------------------------------------------------------------------------------- for everyone


# Figures that measure their own width follow some frames later. (`wait_for_function` would evaluate strings in the page,
# which its policy forbids.)
FITS = """async () => {
  const fits = () => document.documentElement.scrollWidth <= innerWidth;
  for (let frame = 0; frame < 300 && !fits(); frame += 1) await new Promise(requestAnimationFrame);
  return fits();
}"""
VIEWS = [
    ("walkthroughs", view)
    for view in (
        "overview",
        "transformer",
        "transformer?stop=5",
        "transformer?ranks=8&stage=3&beat=5",
        "transformer?all=true&beat=9",
        "weights",
        "layers",
        "runs",
        "runs?of=experts",
        "faults?beat=2",
        "faults?fault=flip&beat=1",
        "faults?fault=change&which=2-1&beat=2",
        "calculator",
        "texts",
    )
] + [("run", "run")]


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
@pytest.mark.parametrize(("name", "view"), VIEWS)
def test_a_view_is_accessible_and_fits_every_width(opened, name, view, dark):
    if not AXE.exists() and not CI:
        pytest.skip("axe is one of the page's development packages: cd web && npm ci")
    page = opened(name, f"#{view}", dark=dark, reduced=True)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    assert [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found] == []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(FITS), width


@pytest.mark.full
def test_the_theme_follows_the_system_until_it_is_chosen(opened):
    page = opened("walkthroughs", dark=True)
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "dark"
    button = page.get_by_label("Colours: auto")
    button.click()
    assert page.evaluate(theme) == "light"


@pytest.mark.full
def test_motion_and_print(opened):
    still = opened("walkthroughs", TEXTS, reduced=True)
    moving = opened("walkthroughs", TEXTS)
    duration = "getComputedStyle(document.querySelector('.moves')).transitionDuration"
    assert still.evaluate(duration) == "0s" and moving.evaluate(duration) != "0s"
    moving.emulate_media(media="print")
    assert not moving.locator("nav").is_visible() and not moving.locator(".play").is_visible()
    assert moving.locator("[data-moment]").is_visible()


OUTSIDE = """() => [...document.querySelectorAll('main table, main canvas, main svg, main math')]
  .filter(each => each.checkVisibility() && each.getBoundingClientRect().right > innerWidth).map(each => each.outerHTML.slice(0, 80))"""


@pytest.mark.full
@pytest.mark.parametrize(("name", "view"), VIEWS)
def test_paper_is_light_and_keeps_every_column(opened, name, view):
    page = opened(name, f"#{view}", width=794, dark=True)  # A4
    page.emulate_media(media="print", color_scheme="dark")
    colour = "name => getComputedStyle(document.documentElement).getPropertyValue(name)"
    light = {"--accent": "#0b66a8", "--accent-soft": "#e3eff8", "--parameters": "#2b83c4", "--paper": "#fff"}
    assert {name: page.evaluate(colour, name) for name in light} == light
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate(OUTSIDE) == []


@pytest.mark.full
def test_a_figure_is_drawn_for_the_paper(opened):
    """Colours and width of the canvas are the paper's, before it is printed, and the screen's again after."""
    page = opened("run", dark=True)
    state = "[document.documentElement.dataset.theme, document.querySelector('canvas').style.width]"
    before = page.evaluate(state)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(state) == ["light", "100%"]
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(state) == before and before[0] == "dark"


@pytest.mark.full
def test_on_a_phone_the_open_tab_and_step_are_in_sight(opened):
    seen = """selector => {
      const node = document.querySelector(selector), box = node.getBoundingClientRect();
      const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
      return node === top || node.contains(top);
    }"""
    for view in ("layers?at=1", "layers?at=7", "calculator"):
        page = opened("walkthroughs", f"#{view}", width=390)
        box = page.locator("nav [aria-current]").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
        if "?" in view:
            page.locator(".stepper").scroll_into_view_if_needed()
            assert page.evaluate(seen, ".stepper li.on i")


@pytest.mark.full
def test_the_frames_start_at_the_first(opened):
    page = opened("walkthroughs", TEXTS)
    assert page.get_by_text("Frame 1 of 13").is_visible()


@pytest.mark.full
def test_a_view_goes_into_the_address_and_back(opened):
    page = opened("walkthroughs")
    page.get_by_role("link", name="260 parameters", exact=True).click()
    page.get_by_role("button", name="Free play").click()
    page.get_by_label("stage 2", exact=True).check()
    page.get_by_role("link", name="Calculator").click()
    page.go_back()
    page.wait_for_selector("[data-moment]")
    assert "stage=2" in page.url
    assert page.get_by_label("stage 2", exact=True).is_checked()
