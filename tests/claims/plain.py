"""What a case comes to in plain PyTorch: few of its settings change a bit of it, and only these are looked at here."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import models
import norms
import reference
from zeroshard.cli.reference import in_8_bits, in_16_bits, in_codes

from .features import MODELS, Case, linear

SEED = 12345  # torch's, where a run begins
LR, CLIP = 1e-2, 0.05  # every step is clipped to that, or the test of the norms would be one of no scale
BATCHES, LOSS = partial(models.batch, "gpt"), partial(models.loss, "gpt")
KERNELS = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def adamw(kernel: str, parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, **KERNELS[kernel])


class Numbers(NamedTuple):
    """What of a case decides its numbers. Micro-batches are those of all ranks; stages, tiers, cuts are not here."""

    format: str
    states: str
    sent: str
    kernel: str
    model: str
    recomputes: str
    ranks: int
    micro: int
    clips: bool


class State(NamedTuple):
    """Training after some steps: what goes on from it, and what a test looks at."""

    masters: dict[str, Tensor]
    moments: dict[str, Any]  # the optimizer's own state_dict
    weights: dict[str, Tensor]
    trained: list[str]  # names of what has moments, in order
    losses: tuple[tuple[float, ...], ...] = ()  # of the last steps: step -> micro-batch
    norms: tuple[float, ...] = ()
    drawn: int = 0  # steps so far that rounded states by drawn bits


def numbers(case: Case) -> Numbers:
    # A mean over ranks and one over micro-batches are both exact where they divide by a power of two.
    ranks, micro = (case.ranks * case.micro, 1) if case.ranks != 3 else (3, case.micro)
    formats = {"halves": "bf16"}  # halves have the bits of whole masters
    drawn = case.format == "drawn" and case.states == "bf16-states"  # one setting says how both are rounded
    return Numbers(
        formats.get(case.format, case.format), "drawn-states" if drawn else case.states, case.sent, case.kernel, case.model, case.recomputes,
        ranks, micro, not case.early,
    )  # fmt: skip


def rounded(form: str, name: str, master: Tensor) -> Tensor:
    """What a parameter keeps of its master, before the cast."""
    if "8bits" not in form or not linear(name):
        return master
    if "tiles" not in form:  # a matrix is smaller than a square
        return in_8_bits(master)
    return torch.cat([in_8_bits(part) for row in master for part in row.split(128)]).view_as(master)


def go_on(state: State | None, how: Numbers, steps: int, first: int, *, clips: bool) -> State:
    """Train on from a state, of whatever format it was: masters and moments are all there is."""
    model = models.build("gpt", hidden=12, layers=2, **MODELS[how.model])
    if state:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(state.masters[name])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    names = [name for name, _ in model.named_parameters() if name not in frozen]
    made, drawn = [], state.drawn if state else 0

    def round_moments(step: int | None) -> None:
        """Round what the optimizer keeps, by the bits of so many steps before, or to nearest even."""
        for name, kept in zip(names, made[0].state.values(), strict=True) if how.states != "fp32-states" else ():
            for key in ("exp_avg", "exp_avg_sq"):
                kept[key].copy_(in_16_bits(kept[key], SEED, key, name, step))

    def make(masters: list[Tensor]) -> torch.optim.Optimizer:
        made.append(adamw(how.kernel, masters))
        if state:
            made[0].load_state_dict(_copied(state.moments))
            round_moments(None)  # of a checkpoint of another format
        return made[0]

    draws, seen = "drawn" in (how.format, how.states.partition("-")[0]), dict.fromkeys(names, -1)

    def round_master(name: str, master: Tensor) -> Tensor:
        """Round a parameter that has no master: once as it is made, and after each step by the bits of that."""
        if name in frozen:
            return master
        if how.format != "drawn":
            return rounded(how.format, name, master)
        seen[name] += 1
        return master.copy_(in_16_bits(master, SEED, "parameter", name, drawn + seen[name] - 1 if seen[name] else None))

    history, masters = reference.accumulate_with_masters(
        model, make, lambda step, index: BATCHES(step + first, index), LOSS, how.ranks, how.micro,
        dtype=torch.bfloat16 if "bf16" in how.format or how.format == "drawn" else None, steps=steps, clip=CLIP if clips else None,
        norm=norms.total, average=True,
        rounded=round_master,
        sent=in_codes if how.sent == "int8" else lambda name, gradient: gradient,
        after_step=lambda step: round_moments(drawn + step if how.states == "drawn-states" else None),
    )  # fmt: skip
    weights = reference.weights(model)
    kept = {
        name: (weights[name].float() if name in frozen else master.detach().clone()) for name, master in masters.items()
    }
    trained = [name for name in masters if name not in frozen]
    losses = tuple(map(tuple, history.losses))
    moments, found = _copied(made[0].state_dict()), tuple(map(float, history.norms))
    return State(kept, moments, weights, trained, losses, found, drawn + steps if draws else 0)


def edited(state: State, how: Numbers, edit: Any) -> State:
    """Apply `edit` to the weights: what it changes becomes the masters, of which weights keep what their format can."""
    masters = dict(state.masters)
    for name in masters:
        weight = state.weights[name].clone()
        edit(name, weight)
        if not torch.equal(weight, state.weights[name]):
            masters[name] = weight.float()
    return state._replace(masters=masters)


def content(state: State) -> dict[str, Tensor]:
    """What a checkpoint holds of it, flat."""
    found = {f"value of {name}": master.reshape(-1) for name, master in state.masters.items()}
    for at, moments in state.moments["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} of {state.trained[at]}"] = moments[key].reshape(-1)
    return found


def _copied(moments: dict[str, Any]) -> dict[str, Any]:
    states = {at: {key: value.clone() for key, value in each.items()} for at, each in moments["state"].items()}
    return {"state": states, "param_groups": moments["param_groups"]}
