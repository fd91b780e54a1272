"""The house rules that a machine can check; `make check` runs this file beside ruff and mypy."""

import ast
import functools
import graphlib
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import numpy
import pytest

import zeroshard
import zeroshard.testing
from zeroshard import hooks

pytestmark = pytest.mark.full  # `make check` runs them all

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"
PUBLIC = [
    "Comm",
    "Error",
    "Layout",
    "Machine",
    "Model",
    "Offload",
    "Precision",
    "RunLog",
    "Step",
    "Zero",
    "apart",
    "load",
    "plan",
    "settings",
    "shard",
    "world",
]
TESTING = ["Recorded", "assert_same_bits"]  # of zeroshard.testing
OUTSIDE = {"api.py": {"integrations", "explain"}, "features/automatic_offload.py": {"planner"}}


def script(name):
    """A script of docs/: tree.py has the core's files in reading order, lines.py counts code."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TREE, LINES = script("tree"), script("lines")
CORE, imported, module_file = TREE.core(), TREE.imported, TREE.module_file


@functools.cache
def code(path):
    """The numbers of a file's lines that hold code, without comments, blank lines and docstrings; and its syntax tree."""
    return {*LINES.code(path)}, ast.parse(path.read_text())


@pytest.mark.parametrize("page", ["architecture", "architecture's features"])
def test_lists_in_documents_are_what_the_code_says(page):
    """`make docs` writes them: rooms from their docstrings, features from their manifests."""
    path, content = {
        "architecture": (TREE.ARCHITECTURE, TREE.every_room()),
        "architecture's features": (TREE.ARCHITECTURE, TREE.every_feature()),
    }[page]
    written = TREE.written(path, content, TREE.FEATURES * page.endswith("features"))
    assert path.read_text() == written, "python docs/tree.py writes it"


def room_of(name):
    """The number of a file's room; files on top that use rooms come after these."""
    if name in TREE.ABOVE:
        return TREE.ROOMS.index(TREE.ABOVE[name]) + 0.5
    return TREE.ROOMS.index(name.rpartition("/")[0])


@pytest.mark.parametrize("room", TREE.ROOMS)
def test_a_room_imports_only_from_those_below_it(room):
    """And nothing of what is around the core, but for the methods of Zero and the feature that need it."""
    names = [name for name in CORE if name.rpartition("/")[0] == room]
    assert names
    for name in names:
        allowed = OUTSIDE.get(name, set())
        for module in imported(PACKAGE / name):
            file = module_file(module)
            if file in CORE:
                assert room_of(file) <= room_of(name), (name, file)
            elif module.startswith("zeroshard."):
                assert module.split(".")[1] in allowed, (name, module)


def test_every_folder_of_the_package_is_a_room():
    folders = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    assert {name for name in folders if name.partition("/")[0] not in TREE.AROUND} - {"."} == {*TREE.ROOMS} - {""}


def test_no_file_of_the_core_imports_a_feature_that_can_be_taken_out():
    """But for the table of them, which loads what is there: tests/test_rings.py builds the package without each."""
    taken = {f"zeroshard.{name}" for name in hooks.FILES}
    found = [(name, module) for name in CORE for module in imported(PACKAGE / name) if module in taken]
    assert found == [], "ask the feature by a hook of its manifest instead: src/zeroshard/hooks.py"


def test_no_modules_import_each_other_in_a_circle():
    """In functions neither."""
    names = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    graph = {name: {module_file(module) for module in imported(path)} & set(names) for name, path in names.items()}
    assert graph["engine/engine.py"] >= {"policies/layout.py", "engine/step/optim.py"}
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is one


def test_one_room_calls_torch_distributed():
    users = {name for name in CORE if any("torch.distributed" in module for module in imported(PACKAGE / name))}
    assert users == {
        "comm/groups.py",
        "comm/collectives.py",
        "comm/mesh.py",
        "comm/own_collectives.py",
        "comm/process_group.py",
        "comm/process_team.py",
        "reference.py",  # beside the engine, which has its bits
    }


TRUTHS = {"any", "all", "isfinite", "argmax", "argmin", "max", "min", "sum"}  # methods that answer with one number


def waits(tree, *, control):
    """Where the host may wait for a device, or names one, outside device.py: what is asked of `ask(...)` is not.

    control: in what moves rows between ranks, whose tensors are on the CPU.
    """
    read = {"item", "cpu", "nonzero", *["tolist"] * (not control)}
    for node in ast.walk(tree):
        words = []
        if isinstance(node, ast.Attribute):
            at = ast.unparse(node.value.func if isinstance(node.value, ast.Call) else node.value)
            known = at in {"ask", "torch.Tensor"}  # the second names a method
            words = [node.attr] if node.attr in {*read, "synchronize", "cuda"} and not known else []
            named = ast.unparse(node) in {
                "torch.equal",
                "torch.nonzero",
                "torch.accelerator",
                "torch.get_device_module",
            }
            words += [node.attr] * named
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            words = truths(node.test)
        elif isinstance(node, ast.BoolOp):
            words = [word for value in node.values for word in truths(value)]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            words = truths(node.operand)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"int", "float", "bool"} and node.args:
            words = truths(node.args[0])
        if isinstance(node, (ast.Compare, ast.Call, ast.IfExp)):
            inside = [each.value for each in ast.iter_child_nodes(node) if isinstance(each, ast.Constant)]
            words += [value for value in inside if value in ("cuda", "nccl")]
        yield from (f"{word}, line {node.lineno}" for word in words)


def truths(node):
    """A tensor's answer, used as a number."""
    method = (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "math"
    )
    return [node.func.attr] if method and node.func.attr in TRUTHS else []


def test_one_module_knows_accelerators():
    """Nothing else of what computes and moves waits for a device's numbers, or knows a kind of device."""
    rooms = ("arithmetic/", "comm/", "tiers/", "kernels/", "engine/", "features/")
    names = [name for name in CORE if name.startswith(rooms) and name != "features/replay.py"]  # which compares bits
    found = {name: [*waits(code(PACKAGE / name)[1], control=name.startswith("comm/"))] for name in names}
    wrong = {name: where for name, where in found.items() if where}
    assert wrong == {}, "ask in device.py, or by ask(...), which waits once for all ranks' sake"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x.item()", ["item"]),
        ("ask(x).item() + ask(x).tolist()", []),
        ("x.tolist()", ["tolist"]),
        ("if x.any(): pass", ["any"]),
        ("y = float(x.sum()) if ask(x.any()) else 0", ["sum"]),
        ("torch.equal(a, b) and torch.cuda.is_available()", ["equal", "cuda"]),
        ('x = "nccl" if device.type == "cuda" else "gloo"', ["cuda", "nccl"]),
    ],
)
def test_what_waits_is_found(line, words):
    assert sorted(each.partition(",")[0] for each in waits(ast.parse(line), control=False)) == sorted(words)


DIVISIONS = {
    "arithmetic/sums.py": {"1 / ranks", "wide.div_(divisor(ranks, wide))"},
    "arithmetic/exact_norms.py": {"total / (1 << _LOWEST)", "1.0 / order"},
    "arithmetic/fp8.py": {"piece.of(masters, first) / by"},  # a tensor
    "arithmetic/int8.py": {"largest / divisor(_MOST, largest)", "values.div_(scales)"},
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_no_tensor_is_divided_by_a_number_of_pythons(name):
    """CUDA would multiply by its rounded reciprocal. All divisions there are: of Python's numbers, and by tensors."""
    found = {
        ast.unparse(node)
        for node in ast.walk(code(PACKAGE / name)[1])
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))
        or (isinstance(node, ast.Call) and re.search(r"\b(true_)?div(ide)?_?$", ast.unparse(node.func)))
    }
    assert found == DIVISIONS[name]


def test_who_is_called_by_itself():
    """At an object's end, on a thread, by a signal: each keeps the rule of `finalizers.py`, where anything new is weighed."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            what = getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))
            if what in {
                "at_end_of",
                "finalize",
                "proxy",
                "__del__",
                "Thread",
                "Timer",
                "ThreadPoolExecutor",
                "register_at_fork",
            }:
                found.add((name, what))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "weakref.ref" and len(node.args) > 1:
                found.add((name, "weakref.ref"))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"signal.signal", "_signal.signal"}:
                found.add((name, "signal"))
    assert found == {
        ("finalizers.py", "at_end_of"),
        ("finalizers.py", "finalize"),
        ("events.py", "at_end_of"),  # notes
        ("engine/engine.py", "at_end_of"),  # orders streams
        ("comm/watch.py", "at_end_of"),  # a socket
        ("comm/process_group.py", "at_end_of"),  # handles
        ("comm/host_peers.py", "__del__"),  # a descriptor
        ("tiers/tier.py", "__del__"),  # pages
        ("features/nvme.py", "at_end_of"),  # a file, and threads
        ("features/nvme.py", "ThreadPoolExecutor"),
        ("checkpoint/files.py", "ThreadPoolExecutor"),
        ("checkpoint/saving.py", "Thread"),
        ("comm/watch.py", "Thread"),
        ("comm/abort.py", "Thread"),
        ("cli/launch.py", "Thread"),
        ("cli/working.py", "Thread"),  # prints
        ("comm/groups.py", "Timer"),  # logs
        ("comm/watch.py", "register_at_fork"),
        ("comm/host_peers.py", "register_at_fork"),
        ("checkpoint/staging.py", "signal"),  # ends the program
        ("checkpoint/on_signal.py", "signal"),  # notes
        ("integrations/unshard.py", "signal"),
        ("cli/launch.py", "signal"),
        ("cli/main.py", "signal"),
        ("checkpoint/staging.py", "register_at_fork"),
        ("testing/processes.py", "signal"),  # gives a rank the defaults: no code of ours
        ("worlds/schedule.py", "Thread"),  # a rank
        ("worlds/install.py", "Thread"),  # threads of zeroshard's own in a world
        ("worlds/install.py", "ThreadPoolExecutor"),
        ("worlds/messages.py", "ThreadPoolExecutor"),
    }


def test_layout_is_pure():
    """It imports nothing but the standard library and the exceptions."""
    names = {name.split(".")[0] for name in imported(PACKAGE / "layout/partition.py")}
    assert names <= sys.stdlib_module_names | {"zeroshard"}


def test_no_function_is_long():
    """A function is read at one glance. How long a file is, its idea decides."""
    long = {
        node.name
        for lines, tree in map(code, PACKAGE.rglob("*.py"))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and len(lines & {*range(node.lineno, node.end_lineno + 1)}) > 60
    }
    assert long == set(), "cut the function into steps with names"


def test_public_names():
    """What users may rely on grows only with a decision note."""
    how = "a new public name goes into PUBLIC here, with a note in docs/decisions/ that says why"
    assert sorted(zeroshard.__all__) == PUBLIC == sorted(dir(zeroshard)), how
    assert all(getattr(zeroshard, name).__name__ == name for name in PUBLIC)
    assert sorted(zeroshard.testing.__all__) == TESTING == sorted(dir(zeroshard.testing))
    assert all(getattr(zeroshard.testing, name).__name__ == name for name in TESTING)


@pytest.mark.parametrize(
    "module",
    [
        "zeroshard",
        "zeroshard.layout.partition",
        "zeroshard.planner.plan",
        "zeroshard.cli.main",
        "zeroshard.testing.plugin",
    ],
)
def test_importing_does_not_load_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_stage_is_data():
    """No name of that kind outside the table, the public call and what prints it."""
    speakers = {
        "layout/stage.py",
        "layout/states.py",
        "api.py",
        "engine/engine.py",
        "policies/incompatible.py",
        "engine/build/assembly.py",
        "engine/build/preflight.py",
        "reference.py",  # which says in one file what a stage is
    }
    for name in {name for name in CORE if not name.startswith("checkpoint/")} - speakers:
        nodes = ast.walk(ast.parse((PACKAGE / name).read_text()))
        names = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg")}
        assert "stage" not in names, f"{name}: ask the placement (layout/states.py, layout/stage.py), not the stage"


def test_nothing_is_left_unfinished_and_no_path_is_one_machines():
    unfinished = re.compile(
        r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|NotImpl" + r"emented\w*)\b|(?<!\w)/(root|home|work)/\w"
    )
    folders = [PACKAGE, *(ROOT / name for name in ("tests", "examples", "docs", ".ci"))]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".md", ""}]
    for path in [*files, *(path for path in ROOT.glob("*.*") if path.name != ".git"), ROOT / "Makefile"]:
        if (
            path.is_file()
            and "__pycache__" not in path.parts
            and not any(part.endswith("_cache") for part in path.parts)
        ):
            assert unfinished.findall(path.read_text()) == [], f"{path}: finish it, or write what is refused and why"


def built(kind, folder):
    """The package, made of this tree as it is released."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, timeout=60, check=True, capture_output=True)
    (package,) = folder.iterdir()
    return package


def test_the_wheel_is_pure_and_typed(tmp_path):
    wheel = built("wheel", tmp_path)
    assert wheel.name == f"zeroshard-{zeroshard.__version__}-py3-none-any.whl"
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {f"zeroshard/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")} <= packed
    assert {"zeroshard/py.typed", "zeroshard/explain/page.html", "zeroshard/explain/walkthroughs.json"} <= packed


def test_the_source_package_has_what_its_tests_read(tmp_path):
    package = built("sdist", tmp_path)
    with tarfile.open(package) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    tracked = {name for name in listed if (ROOT / name).exists()}  # none where this is no clone
    assert {name for name in tracked if not Path(name).name.startswith(".") and name[0] != "."} <= packed
    assert packed - tracked - {"PKG-INFO"} == {".gitignore"} - tracked if tracked else True


@pytest.mark.full
def test_the_wheel_works_where_nothing_else_of_the_tree_is(tmp_path):
    """Installed into an environment of its own, beside the dependencies of this one: the command, and a step."""
    environment, wheel = tmp_path / "environment", built("wheel", tmp_path / "wheel")
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    with zipfile.ZipFile(wheel) as archive:
        assert any(
            re.fullmatch(r"zeroshard-[^/]+\.dist-info/sboms/page\.cdx\.json", name) for name in archive.namelist()
        )
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    place = Path(subprocess.run(where, timeout=60, check=True, capture_output=True, text=True).stdout.strip())
    (place / "dependencies.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, timeout=120, check=True)
    program = """
import torch, zeroshard
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
zeroshard.shard(model, optimizer, stage=3)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(zeroshard.__file__)
"""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", program], cwd=tmp_path, env=alone, timeout=120, check=True, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).is_relative_to(environment)
    command = [environment / "bin" / "zeroshard", "--version"]
    said = subprocess.run(
        command, cwd=tmp_path, env=alone, timeout=60, check=True, capture_output=True, text=True
    ).stdout
    assert said.startswith(f"zeroshard {zeroshard.__version__}, torch ")
