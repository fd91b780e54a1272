"""The table of settings: for each what there is to choose from, and what a user writes for it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

import selection
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import UserError
from zeroshard.policies.incompatible import refuse, settings

from . import pairwise

POLICIES = {"comm": Comm, "layout": Layout, "offload": Offload, "precision": Precision}
BF16 = {"param_dtype": torch.bfloat16}
FILES = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
PARTS = {"parameters": 0.4, "gradients": {"nvme": 0.5, "cpu": 0.3}, "optimizer": {"nvme": 0.6}}
SMALL = {"bucket_mib": 0.005}
STATES = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "*": torch.float32}

# Setting -> choice -> arguments of `shard`, those of a policy by its name. The first choice goes with all others.
SETTINGS: dict[str, dict[Any, dict[str, Any]]] = {
    "ranks": {2: {}, 1: {}, 3: {}, 4: {}},
    "stage": {at: {"stage": at} for at in (2, 0, 1, 3)},
    "format": {  # of parameters
        "fp32": {},
        "bf16": {"precision": BF16},
        "drawn": {"precision": {**BF16, "master_dtype": torch.bfloat16, "rounding": "stochastic"}},
        "halves": {"precision": {**BF16, "split_master": True}},
        "8bits": {"precision": {"fp8": True}},
        "8bits-of-bf16": {"precision": {**BF16, "fp8": True}},
        "8bits-in-tiles": {"precision": {"fp8": True, "scaling": "1x128"}},
        "8bits-in-squares": {"precision": {"fp8": True, "scaling": "128x128"}},
    },
    "states": {  # of the optimizer, at rest
        "fp32-states": {},
        "bf16-states": {"precision": {"states": STATES}},
        "drawn-states": {"precision": {"states": {"*": torch.bfloat16}, "rounding": "stochastic"}},
    },
    "sent": {"whole": {}, "int8": {"comm": {"reduce": "int8"}}},
    "copies": {
        "one": {},
        "replicas": {"comm": {"replicas": 2}},
        "spread": {"comm": {"replicas": 2, "optimizer": "all"}},
        "four-replicas": {"comm": {"replicas": 4}},
        "four-spread": {"comm": {"replicas": 4, "optimizer": "all"}},
        "hosts": {"comm": {"hosts": 2}},
        "four-hosts": {"comm": {"hosts": 4}},
    },
    "rests": {
        "device": {},
        "host": {"offload": dict.fromkeys(FILES, "cpu")},
        "states-in-host": {"offload": {"optimizer": "cpu"}},
        "files": {"offload": FILES},
        "files-unchecked": {"offload": {**FILES, "digests": False}},
        "states-in-files": {"offload": {"optimizer": "nvme"}},
        "parts": {"offload": PARTS},
        "one-copy": {"offload": {"parameters": "shared"}},
    },
    "transport": {"messages": {}, "memory": {"comm": {"transport": "shared"}}},
    "cut": {
        "small": {"layout": SMALL},
        "units": {},
        "one-unit": {"layout": {"units": ()}},
        "one-vector": {"layout": {**SMALL, "bounds": "model"}},
        "no-tensor": {"layout": {**SMALL, "bounds": "tensor"}},
        "no-matrix": {"layout": {**SMALL, "whole": ["*.weight"]}},
    },
    "gathers": {
        "one-ahead": {},
        "none-ahead": {"comm": {"prefetch": 0}},
        "three-ahead": {"comm": {"prefetch": 3}},
        "in-step": {"comm": {"overlap": False}},
        "kept": {"comm": {"release_after_forward": False}},
    },
    "micro": {1: {}, 2: {}},  # micro-batches of a rank in a step
    "steps": {"after": {}, "in-backward": {"optimizer_in_backward": True}},
    "recomputes": {"nothing": {}, "blocks": {}, "blocks-reentrant": {}, "units": {"layout": {"recompute": True}}},
    "kernel": {"loop": {}, "foreach": {}, "fused": {}},  # of AdamW
    "model": {"gpt": {}, "tied": {}, "frozen": {}},
}
MODELS: dict[str, dict[str, Any]] = {"gpt": {}, "tied": {"tied": True}, "frozen": {"frozen": ("embed", "blocks.0")}}
CHECKPOINTS = {"blocks": "nonreentrant", "blocks-reentrant": "reentrant"}
LINEAR = ("qkv.weight", "proj.weight", "mlp.0.weight", "mlp.2.weight", "head.weight")  # what may rest in 8 bits


@dataclass(frozen=True)
class Case:
    """A choice of each setting."""

    ranks: int
    stage: int
    format: str
    states: str
    sent: str
    copies: str
    rests: str
    transport: str
    cut: str
    gathers: str
    micro: int
    steps: str
    recomputes: str
    kernel: str
    model: str

    def __str__(self) -> str:
        """What differs from each setting's first choice, so that a failure is read in one line."""
        chosen = [f"{self.ranks}ranks", f"stage{self.stage}"]
        for name, choices in list(SETTINGS.items())[2:]:
            if (choice := getattr(self, name)) != next(iter(choices)):
                chosen.append(f"{choice}micro" if name == "micro" else choice)
        return "-".join(chosen)

    @functools.cached_property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """Arguments of `shard`, a policy's still by name."""
        found: dict[str, Any] = {}
        for name, choices in SETTINGS.items():
            for key, value in choices[getattr(self, name)].items():
                found[key] = found.get(key, {}) | value if key in POLICIES else value
        return found

    def settings(self, folder: Any = "/tmp") -> dict[str, Any]:
        """Arguments of `shard` and `simulate`; files go to `folder`."""
        made = dict(self.arguments)
        made["offload"] = made.get("offload", {}) | ({"path": str(folder)} if self.on_disk else {})
        made["comm"] = {"timeout": 60} | made.get("comm", {})
        return made | {name: policy(**made.get(name, {})) for name, policy in POLICIES.items()}

    @property
    def on_disk(self) -> bool:
        """Do some states rest in files?"""
        return "nvme" in str(self.arguments.get("offload"))

    @property
    def of_shapes(self) -> bool:
        """Do names and shapes alone say what rests of it? Not which units there are, nor what is frozen or in 8 bits."""
        alone = self.rests in ("device", "one-copy", "host", "files", "files-unchecked")
        masters = self.format == "bf16" or (
            self.format == "fp32" and alone
        )  # else a GPU has copies that a CPU needs not
        wide = self.states == "fp32-states"
        return wide and masters and self.model != "frozen" and self.cut != "one-unit"

    @property
    def early(self) -> bool:
        """Does the optimizer step in backward?"""
        return self.steps == "in-backward"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the model."""
        return {"hidden": 12, "layers": 2, "checkpoint": CHECKPOINTS.get(self.recomputes)} | MODELS[self.model]


def legal(case: Case) -> bool:
    """Do these settings go together, by `policies/incompatible.py` and by what is said beside it?"""
    comm = case.arguments.get("comm", {})
    if case.ranks % (comm.get("replicas") or comm.get("hosts", 1)):
        return False  # replicas, and hosts, divide the ranks
    if case.early and case.micro > 1:
        return False  # nothing is added up
    if case.recomputes == "units" and case.cut == "one-unit":
        return False  # all but the root
    try:
        made = case.settings()
        comm = made["offload"].reached_by(made["comm"])
        policies = (made["precision"], made["layout"], comm, made["offload"])
        refuse(settings(case.stage, *policies, replicas=comm.rows or 1, in_backward=case.early))
    except UserError:
        return False
    return True


@functools.cache
def drawn(seed: int) -> list[Case]:
    """Draw cases in which every two choices meet that go together."""
    choices = [[*each] for each in SETTINGS.values()]

    def case_of(case: pairwise.Case) -> Case:
        return Case(*(choices[at][choice] for at, choice in enumerate(case)))

    return [*map(case_of, pairwise.draw([len(each) for each in choices], lambda case: legal(case_of(case)), seed))]


def covering(cases: Sequence[Case]) -> set[Case]:
    """Choose few of these that have each choice of each setting."""
    chosen = selection.cover([{*enumerate(astuple(case))} for case in cases], range(len(cases)))
    return {cases[at] for at in chosen}


def linear(name: str) -> bool:
    return name.endswith(LINEAR)
