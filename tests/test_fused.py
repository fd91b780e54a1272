"""Kernels of our own: one launch for what torch takes many operations for, with the same bits, or not used.

No GPU is asked here. NVRTC compiles the text for GPUs; g++ compiles the same text for the host, where every kernel runs
beside its twin, and trains on the emulated accelerator.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import re
from functools import partial
from inspect import unwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import emulated
import zeroshard
from emulated import compiler
from emulated.device import device
from zeroshard import Comm, Precision, nvrtc
from zeroshard import device as devices
from zeroshard.arithmetic import kernel_dispatch
from zeroshard.kernels import fused

needs_compiler = pytest.mark.skipif(
    not compiler.available(), reason="g++ is not here, which compiles kernels for the host"
)


def on_the_host(refuse=()):
    """The kernels over memory of the CPU, and which were launched. refuse: those that do nothing, as a wrong one might."""
    (text, names), launched = fused.text(), set()
    run = compiler.on_the_host(text, names, torch.device("cpu"))

    def launch(name, threads, arguments, writes):
        launched.add(name)
        if name not in refuse:
            run(name, threads, arguments, writes)

    return fused.Fused(launch, names), launched


@needs_compiler
@pytest.mark.row(110)
def test_every_kernel_has_the_bits_of_its_twin():
    """Sums of all dtypes and numbers of contributions, norms, 8 bits of both kinds, split masters; NaNs, infinities."""
    made, launched = on_the_host()
    made.compare(torch.device("cpu"))
    assert made.refused == set()
    _, names = fused.text()
    assert launched == names
    assert {name for case in made.cases(torch.device("cpu")) for name in case.kernels} == names


@needs_compiler
@pytest.mark.row(110)
def test_a_kernel_whose_bits_differ_is_refused_by_name():
    made, _ = on_the_host(refuse=("quantise_", "squares_float_some", "fold_bf16_float_code"))
    made.compare(torch.device("cpu"))
    assert made.refused == {"quantise_", "squares_float", "squares_float_some", "fold_bf16_float_code"}


WRONG = {  # a part of the text, what stands there in its place, and a kernel that is wrong then
    "a row of tiles": (
        "return at / columns / tall * across + at",
        "return (tall > 1 ? 0 : at / columns * across) + at",
        "quantise_",
    ),
    "another tile": ("atomicMax(most + own, found), found = 0", "atomicMax(most + own, found)", "largest"),
    "a tile without a number": ("bits = 0x7F;  // 480", "bits = 0x7E;  // 480", "quantise_"),
    "scales that are none": (
        "* scales[tile(first + at, columns, tall, broad, across)]);",
        "* notnan(scales[tile(first + at, columns, tall, broad, across)]));",
        "dequantise_bf16",
    ),
    "a code of -128": ("own == -128 && scale < 0", "own == -128", "fold_float_float_code"),
    "halfway between two": ("+ 0x7FFF + (bits >> 16 & 1)) >> 16", "+ 0x8000) >> 16", "fold_bf16_bf16_float"),
    "an infinite block": ("bits == 0x7F800000 ? width - 2", "bits == 0x7F800000 ? width - 1", "add_to_bins"),
    "the order of a tree": ("(x[0] + x[2]) + (x[1] + x[3])", "(x[0] + x[1]) + (x[2] + x[3])", "squares_fp16"),
    "padding": ("x[k] = 0;\n    x[k]", "x[k] = x[k];\n    x[k]", "squares_float_some"),
    "a tie": ("(master[at] & 1 << 16) == 0) << at - from", "true) << at - from", "split_"),
    "a negative half": ("int(lower[at])", "int((uint16)lower[at])", "join_"),
    "a block's largest": ("mixed(__float_as_uint(most) & 0x7FFFFF)", "mixed(__float_as_uint(most))", "encode_"),
}
WRONG_TEXT = "__device__ inline float notnan(float x) { return x == x ? x : 0; }\n"


@pytest.mark.heavy
@needs_compiler
@pytest.mark.parametrize(
    "name", [*list(WRONG)[:1], *(pytest.param(name, marks=pytest.mark.full) for name in [*WRONG][1:])]
)
def test_a_kernel_that_is_wrong_is_found(name):
    """A mistake planted in the text: the comparison sees it."""
    (text, names), (right, wrong, kernel) = fused.text(), WRONG[name]
    assert text.count(right) == 1
    planted = WRONG_TEXT + text.replace(right, wrong)
    made = fused.Fused(compiler.on_the_host(planted, names, torch.device("cpu")), names)
    made.compare(torch.device("cpu"))
    assert kernel in made.refused


@needs_compiler
@pytest.mark.full
def test_numbers_to_compare_on_are_fp32_whatever_the_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        made, launched = on_the_host()
        made.compare(torch.device("cpu"))
        assert (made.refused, launched) == (set(), {*fused.text()[1]})
    finally:
        torch.set_default_dtype(before)


# Of docs/decisions/fused-kernels.md: by twin and arguments, launches by the kernels and by torch's operations.
LAUNCHES = {
    ("fold", ("float", "float", "float"), (11, True, 3, 6)): (2, 14),
    ("block_sums", torch.float32, 4, True): (1, 11),
    ("block_sums", torch.float32, 4, False): (3, 17),
    ("add_to_bins",): (1, 27),
    ("magnitudes", "128x128", False, "magnitudes", torch.float32): (2, 31),
    ("quantise_", "128x128", False, "quantise_", torch.float32): (1, 36),
    ("dequantise_", "128x128", False, "dequantise_", torch.float32): (2, 15),
    ("encode_blocks", 7): (1, 54),
    ("split_", "split_"): (1, 13),
    ("join_", "join_"): (1, 9),
}


def launches():
    """By twin and arguments; and the kernels that are refused."""
    place, count, launch = torch.device("emu", 0), [0], device().launch

    def noted(*args, **kwargs):
        count[0] += 1
        return launch(*args, **kwargs)

    device().launch = noted
    text, names = fused.text()
    made, found = fused.Fused(compiler.compiled(text, names, place), names), {}
    made.compare(place)
    for _, twin, case in made.cases(place):

        def counted(call, own, *args, **kwargs):
            before = count[0]
            answer = call(*args, **kwargs)
            own.append(count[0] - before)
            return answer

        own = []
        for call in (made.stand_ins[twin.__name__], unwrap(twin)):
            case(partial(counted, call, own))
        told = [each for each in case.args if isinstance(each, (str, int, tuple, torch.dtype))]
        found[(twin.__name__, *told)] = tuple(own)
    return found, made.refused


@needs_compiler
@pytest.mark.full
def test_launches_are_those_that_the_documents_count():
    ((found, refused),) = emulated.run(1, launches, timeout=200)  # every kernel is compiled and compared
    assert {key: found[key] for key in LAUNCHES} == LAUNCHES
    assert not refused
    page = (Path(__file__).parents[1] / "docs" / "decisions" / "fused-kernels.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (\d+)(?:, (\d+))? \| (\d+)(?:, (\d+))? \|$", page, re.MULTILINE)
    told = [(int(ours), int(plain)) for a, b, c, d in rows for plain, ours in ((a, c), (b, d)) if plain]
    assert told == [*LAUNCHES.values()]


def library():
    """NVRTC, the newest of those that wheels have brought."""
    found = importlib.util.find_spec("nvidia")
    paths = sorted(
        path
        for folder in (found.submodule_search_locations if found else ())
        for path in Path(folder).glob("*/lib/libnvrtc.so.*")
    )
    if not paths:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    return ctypes.CDLL(str(paths[-1]))


@pytest.mark.parametrize(
    "architecture", ["sm_90", *(pytest.param(name, marks=pytest.mark.full) for name in ("sm_75", "sm_80", "sm_100"))]
)
@pytest.mark.row(110)
def test_nvrtc_compiles_all_kernels_for_gpus(architecture):
    """From its wheel, without a GPU: the machine code names each kernel."""
    text, names = fused.text()
    code = nvrtc.compile_(library(), text, "kernels", architecture)
    assert [name for name in names if f"\0{name}\0".encode() not in code] == []


def test_a_text_that_does_not_compile_is_reported_in_nvrtc_s_words():
    with pytest.raises(RuntimeError, match=r"kernels does not compile for sm_90: kernels\(1\): error"):
        nvrtc.compile_(library(), "nonsense", "kernels", "sm_90")


def ready(compiles, asked):
    """What the log says as a model is sharded, and what stands in for torch's operations then."""
    os.environ[fused.VARIABLE], said = asked, []
    if compiles:
        devices.compilers["emu"] = compiler.compiled
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    fused.log.addHandler(handler)
    model = nn.Linear(8, 8).to("emu")
    try:
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    except zeroshard.Error as error:
        said.append(str(error))
    return said, sorted(name for name, _ in kernel_dispatch.stand_ins)


def test_kernels_are_off_unless_they_are_asked_for():
    assert emulated.run(1, ready, True, "") == [([], [])]
    assert frozenset() == fused.RAN


@pytest.mark.row(110)
def test_where_nothing_compiles_the_log_says_so_and_torch_s_operations_run():
    said = "kernels are not used on emu:0, but torch's operations: there is no compiler for emu devices"
    assert emulated.run(1, ready, False, "1") == [([said], [])]


def test_a_value_that_says_neither_on_nor_off_is_refused():
    ((said,), found) = emulated.run(1, ready, False, "yes")[0]
    assert [line.strip() for line in said.splitlines()] == [
        "the environment variable ZEROSHARD_KERNELS turns kernels on or off",
        'expected: "0" or "1"',
        "got: 'yes'",
        "instead: ZEROSHARD_KERNELS=1",
    ]
    assert found == []


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 32)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


SETTINGS = {
    "fp32": {},
    "bf16": {"precision": Precision(param_dtype=torch.bfloat16)},
    "sums in 16 bits": {"precision": Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)},
    "fp8": {"precision": Precision(param_dtype=torch.bfloat16, fp8=True, scaling="128x128")},
    "split masters": {"precision": Precision(param_dtype=torch.bfloat16, split_master=True)},
    "int8": {"comm": Comm(reduce="int8")},
}


EXPECTED = {
    "fp8": {"quantise_", "largest", "dequantise_bf16"},
    "split masters": {"join_", "split_"},
    "int8": {"encode_"},
}


def trained(name, stage, kernels, refuse=()):
    """Weights after three clipped steps, and how often each kernel was launched."""
    launched = {}
    if kernels:
        os.environ[fused.VARIABLE] = "1"

        def compiled(*args):
            launch = compiler.compiled(*args)

            def noted(kernel, threads, arguments, writes):
                launched[kernel] = launched.get(kernel, 0) + 1
                if kernel not in refuse:
                    launch(kernel, threads, arguments, writes)

            return noted

        devices.compilers["emu"] = compiled
        if not refuse:  # the comparison has tests of its own, and takes seconds here
            fused.Fused.compare = lambda *_: None
    torch.manual_seed(0)
    model = Blocks().to("emu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=stage, **SETTINGS[name])
    launched.clear()  # by the comparison
    rank = torch.distributed.get_rank()
    for step in range(3):
        for micro in range(2):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            model(x.to("emu", next(model.parameters()).dtype)).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return [parameter.detach().float().cpu().clone() for parameter in model.parameters()], launched


@pytest.mark.heavy
@needs_compiler
@pytest.mark.parametrize(
    ("name", "stage", "world"),
    [
        ("bf16", 3, 2),
        *(
            pytest.param(name, stage, 3, marks=pytest.mark.full)
            for name in SETTINGS
            for stage in (1, 3)
            if (name, stage) != ("split masters", 3)  # where masters alone rest
        ),
    ],
)
@pytest.mark.row(110)
def test_training_with_kernels_has_the_same_bits(name, stage, world):
    """On the emulated accelerator, whose kernels run late and race."""
    plain = emulated.run(world, trained, name, stage, False, seed=1)
    ours = emulated.run(world, trained, name, stage, True, seed=2)
    for (want, _), (got, launched) in zip(plain, ours, strict=True):
        assert all(map(torch.equal, got, want))
        used = {*launched}
        assert used >= EXPECTED.get(name, set()) | {"add_to_bins"}
        assert any(kernel.startswith("fold_") for kernel in used) and any(k.startswith("squares_") for k in used)


def warned(refuse):
    """As `trained` with kernels of which some are wrong: what the log says of them, too."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    fused.log.addHandler(handler)
    weights, launched = trained("bf16", 3, True, refuse)
    return weights, {*launched}, [line for line in said if "kernels" in line]


@needs_compiler
@pytest.mark.full
@pytest.mark.row(110)
def test_training_goes_on_without_a_kernel_that_is_wrong():
    wrong = ("squares_float", "fold_float_float_bf16")
    plain = emulated.run(2, trained, "bf16", 3, False, seed=1)
    for (want, _), (got, launched, said) in zip(plain, emulated.run(2, warned, wrong, seed=2), strict=True):
        assert all(map(torch.equal, got, want))
        assert launched.isdisjoint(wrong) and "add_to_bins" in launched
        assert said == [
            "on emu:0 these kernels are not used, since their bits are not those of torch's operations: "
            "fold_float_float_bf16, squares_float"
        ]


def simulated():
    """A model without values on the device, and what stands in after it, and after a real one."""
    os.environ[fused.VARIABLE] = "1"
    devices.compilers["emu"] = compiler.compiled
    found = []
    for without in (True, False):
        with FakeTensorMode() if without else contextlib.nullcontext():
            model = nn.Linear(8, 8, device="emu")
            zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=2)
        found.append(len(kernel_dispatch.stand_ins))
    return found


@needs_compiler
@pytest.mark.full
def test_a_model_without_values_compares_nothing():
    ((before, after),) = emulated.run(1, simulated)
    assert (before, after) == (0, 9)
