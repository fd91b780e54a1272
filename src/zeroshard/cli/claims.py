"""Trials of zeroshard's claims on this machine in a second, as far as one process suffices.

A claim holds where it has been tried here, just now. A claim that takes ranks, a GPU or an hour is not tested here, and
is shown with the command that tests it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from zeroshard import Layout, Offload, device
from zeroshard.arithmetic import sums
from zeroshard.cli.config import one_line
from zeroshard.cli.reference import bits
from zeroshard.comm import shared_memory
from zeroshard.layout.stage import STAGES
from zeroshard.planner.built import predict_states

HOLDS, UNTRIED, FAILS = "holds", "not tested here", "does not hold"
STEPS, TURNS, WIDTH = 2, 2, 24
TESTED = "2.13."  # the release of torch that every test runs on
RANKS = 17  # averages of 1 to so many ranks are compared


@dataclass(frozen=True)
class Claim:
    """A claim and its verdict. why: what was seen, or why nothing was tried. instead: what to do unless it holds."""

    claim: str
    verdict: str
    why: str
    instead: str = ""


class Broken(Exception):
    """A trial found that its claim does not hold; the message says what it saw."""


def claims(folder: Path) -> list[Claim]:
    """Try all claims. folder: on the disk that files go to."""
    there = device.accelerators()
    return [
        _release(),
        _tried("stages 0 to 3 have the bits of plain torch, on the CPU", lambda: _stages(torch.device("cpu"))),
        _tried("each rank holds the bytes that are predicted", _bytes),
        _tried("a checkpoint loads with its bits, at another stage", lambda: _checkpoint(folder)),
        _tried("states in files have the bits of states in memory", lambda: _files(folder)),
        _tried("ranks of this host may share memory", _shared, instead='Comm(transport="gloo"), which "auto" is here'),
        Claim("any number of ranks has these bits", UNTRIED, "it takes processes", "zeroshard verify"),
        *(_on_accelerators(there) if there else [_no_accelerator()]),
    ]


def _tried(claim: str, trial: Callable[[], str], instead: str = "report it, with zeroshard doctor --json") -> Claim:
    """Try a claim. trial: returns what it has seen, or raises why the claim does not hold."""
    try:
        return Claim(claim, HOLDS, trial())
    except Exception as error:
        said = (
            one_line(error)
            if isinstance(error, (Broken, zeroshard.Error))
            else f"{type(error).__name__}: {one_line(error)}"
        )
        return Claim(claim, FAILS, said, instead)


def _release() -> Claim:
    what = "every test runs on this release of torch"
    if torch.__version__.startswith(TESTED):
        return Claim(what, HOLDS, f"torch {torch.__version__}")
    return Claim(what, UNTRIED, f"torch {torch.__version__}, and the tests run on {TESTED}x", "make test")


# --- what is trained ------------------------------------------------------------------------------------------------


def _model(on: torch.device) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    layers = [
        nn.Linear(8, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Linear(WIDTH, 3),
    ]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 4)
    return model.to(on)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, on: torch.device) -> None:
    for turn in range(TURNS):
        generator = torch.Generator().manual_seed(TURNS * number + turn)
        model(torch.randn(4, 8, generator=generator).to(on)).square().sum().backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.div_(TURNS)
    optimizer.step()
    optimizer.zero_grad()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: device.ask(param.detach()).clone() for name, param in model.named_parameters()}


def _plain(on: torch.device) -> dict[str, Tensor]:
    model = _model(on)
    optimizer = _adam(model)
    for number in range(STEPS):
        _step(model, optimizer, number, on)
    return _weights(model)


def _sharded(stage: int, on: torch.device, offload: Offload | None = None, begun: str = "", steps: int = STEPS) -> Any:
    """Train; return (weights, handle). begun: a checkpoint to go on from."""
    model = _model(on)
    optimizer, layout = _adam(model), Layout(bucket_mib=0.002)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout, offload=offload or Offload(), device=on)
    if begun:
        zero.load(begun)
    for number in range(STEPS - steps, STEPS):
        _step(model, optimizer, number, on)
    with zero.gathered():
        return _weights(model), zero


def _compare(what: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    for name, tensor in want.items():
        wrong = bits(got[name]) != bits(tensor)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            mine, plain = got[name].flatten()[at], tensor.flatten()[at]
            raise Broken(f"{what}: element {at} of {name!r} is {mine:.9g} and {plain:.9g} in plain torch")


# --- trials ---------------------------------------------------------------------------------------------------------


def _stages(on: torch.device) -> str:
    want = _plain(on)
    for stage in STAGES:
        _compare(f"stage {stage}", _sharded(stage, on)[0], want)
    return f"{STEPS} steps of {TURNS} micro-batches on one rank"


def _bytes() -> str:
    for stage in STAGES:
        _, zero = _sharded(stage, torch.device("cpu"))
        said, held = predict_states(zero), zero.ledger().held
        off = [state for state, nbytes in said.items() if held.get(state, 0) != nbytes]
        if off:
            raise Broken(
                f"stage {stage} holds {held.get(off[0], 0):,} bytes of {off[0]}, and {said[off[0]]:,} are predicted"
            )
    return "stages 0 to 3 on one rank, to the byte"


def _checkpoint(folder: Path) -> str:
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="zeroshard-doctor-", dir=folder) as there:
        model = _model(cpu)
        optimizer = _adam(model)
        zero = zeroshard.shard(model, optimizer, stage=3, layout=Layout(bucket_mib=0.002), device=cpu)
        _step(model, optimizer, 0, cpu)
        zero.save(os.path.join(there, "saved"))
        got, _ = _sharded(1, cpu, begun=os.path.join(there, "saved"), steps=STEPS - 1)
    _compare("loaded at stage 1", got, _plain(cpu))
    return f"saved at stage 3 in {folder}, trained on at stage 1"


def _files(folder: Path) -> str:
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="zeroshard-doctor-", dir=folder) as there:
        got, _ = _sharded(3, cpu, Offload(optimizer="nvme", gradients="nvme", parameters="nvme", path=there))
    _compare("all states in files", got, _plain(cpu))
    return f"all states of stage 3 in {folder}"


def _shared() -> str:
    shared_memory.possible()
    return "a page of memory without a name was made and mapped"


# --- accelerators ---------------------------------------------------------------------------------------------------


def _no_accelerator() -> Claim:
    return Claim(
        "accelerators have these bits too", UNTRIED, "torch sees none", "zeroshard doctor on a machine with one"
    )


def _on_accelerators(there: list[torch.device]) -> list[Claim]:
    first, kind = there[0], there[0].type
    return [
        _tried(f"stages 0 to 3 have the bits of plain torch, on {kind}", lambda: _stages(first)),
        _tried(f"sums, averages and casts on {kind} are the CPU's", lambda: _arithmetic(first)),
        _repeatable(),
        _pinned(first),
        _between(there),
        _relays(),
    ]


def _arithmetic(on: torch.device) -> str:
    generator = torch.Generator().manual_seed(5)
    pieces = [torch.randn(4096, generator=generator).to(torch.bfloat16) for _ in range(RANKS)]
    for ranks in range(1, RANKS + 1):
        both = []
        for where in (torch.device("cpu"), on):
            total = torch.zeros(4096, device=where)
            sums.fold(total, [piece.to(where) for piece in pieces[:ranks]], start=None, over=ranks)
            both += [device.ask(total), device.ask(total.to(torch.bfloat16)).float()]
        _compare(f"the average of {ranks}", {"sum": both[2], "cast": both[3]}, {"sum": both[0], "cast": both[1]})
    return f"averages of 1 to {RANKS} contributions in bfloat16, of 4,096 elements"


def _repeatable() -> Claim:
    claim, flags = "a run on accelerators has the same bits again", device.flags()
    wanted = {"deterministic algorithms": "True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    off = [f"{name} is {flags[name]}" for name, value in wanted.items() if flags[name] != value]
    why = "it takes two runs" if not off else f"{', '.join(off)} here, and your program decides"
    return Claim(
        claim,
        UNTRIED,
        why,
        "torch.use_deterministic_algorithms(True), and CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment",
    )


def _pinned(on: torch.device) -> Claim:
    claim = "offloaded states rest in pinned memory"
    if on.type != "cuda":
        return Claim(
            claim, UNTRIED, f"only CUDA's is pinned, and this is {on.type}", "nothing: copies are from pageable memory"
        )

    def trial() -> str:
        memory = torch.zeros(1 << 20, dtype=torch.uint8)
        if (end := device.pin(memory, on)) is not None:
            end()
        return "1 MiB was pinned and released"

    return _tried(claim, trial, instead="raise the limit of locked memory: ulimit -l unlimited")


def _between(there: list[torch.device]) -> Claim:
    claim = "ranks on several accelerators have these bits"
    if len(there) == 1:
        return Claim(claim, UNTRIED, "there is one accelerator", "make gpu on a machine with more")
    if there[0].type == "cuda" and not torch.distributed.is_nccl_available():
        return Claim(
            claim, FAILS, "this build of torch has no NCCL", "install a build of torch with CUDA from pytorch.org"
        )
    return Claim(claim, UNTRIED, f"{len(there)} accelerators, and it takes processes", "make gpu")


def _relays() -> Claim:
    claim, name = "replicas hand on their sums while kernels run", "CUDA_DEVICE_MAX_CONNECTIONS"
    if os.environ.get(name) == "1":
        return Claim(claim, FAILS, f"{name}=1 puts them behind each other", f"unset {name}, or Comm(replicas=1)")
    return Claim(claim, UNTRIED, "it takes processes", "make gpu")
