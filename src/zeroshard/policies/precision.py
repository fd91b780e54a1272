"""`Precision`: in which formats states rest and travel, and modules compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch

from ..arithmetic.sums import LOW
from ..errors import UserError, nearest
from ..layout.partition import BucketPlan
from ..layout.states import Formats
from ..validation import FLAG, Field, check_fields, is_patterns, one_of

Nonfinite = Literal["ignore", "raise", "skip"]


Scaling = Literal["tensor", "1x128", "128x128"]
Rounding = Literal["nearest", "stochastic"]

COMPUTED = (*LOW, torch.float32)  # what modules may compute in with parameters of 8 bits
OTHERS = "*"  # in `Precision.states`: all states that it does not name
STATES_REST_IN = (torch.bfloat16, torch.float32)


def _is_wide(given: object) -> bool:
    """Tell if it is a dtype that states may have."""
    return isinstance(given, torch.dtype) and given.is_floating_point and given.itemsize >= 2


def _dtype(name: str) -> Field:
    """Describe one field of `Precision` that takes a dtype."""

    def instead(given: object) -> str:
        if name == "param_dtype" and "float8" in f"{given}":
            return "Precision(param_dtype=torch.bfloat16, fp8=True), which computes in the first"
        return f"Precision({name}=torch.bfloat16)"

    return Field(_is_wide, "must be a floating dtype of 16 bits or more", instead=instead).or_none()


def _is_states(given: object) -> bool:
    """Tell formats of an optimizer's states, by name, from anything else."""
    return isinstance(given, Mapping) and all(isinstance(name, str) for name in given)


_FIELDS = {
    **{name: _dtype(name) for name in ("param_dtype", "reduce_dtype", "grad_dtype", "master_dtype")},
    "nonfinite": one_of(Nonfinite),
    "store_params": FLAG,
    "cast_inputs": Field(
        lambda given: type(given) is bool or given == "units",
        "is a yes, a no, or a word",
        'True, False or "units"',
        lambda given: nearest(given, ["units"]) if isinstance(given, str) else None,
    ),
    "keep": Field(
        is_patterns,
        "takes patterns of parameters that are not converted to Precision.param_dtype",
        instead=lambda given: (
            f"Precision(param_dtype=torch.bfloat16, keep={[given] if isinstance(given, str) else ['*.router.*']!r})"
        ),
    ),
    "split_master": FLAG,
    "fp8": Field(
        lambda given: type(given) is bool or is_patterns(given),
        "takes patterns of parameters that rest and travel in 8 bits, or a yes or a no",
        instead=lambda _: 'Precision(fp8=["*.mlp.*.weight"]), or Precision(fp8=True) for the weights of linear layers',
    ),
    "scaling": one_of(Scaling, "says of which part of a tensor in 8 bits each scale is"),
    "states": Field(
        _is_states,
        "takes the dtype in which each of an optimizer's states rests, by the state's name",
        instead=lambda _: 'Precision(states={"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16})',
    ),
    "rounding": one_of(Rounding, "says how states are rounded to 16 bits"),
}


@dataclass(frozen=True)
class Precision:
    """The dtype of each state. Parameters keep their own dtype unless asked.

    param_dtype: floating parameters are converted to it (None: kept). Masters are seeded before the conversion.
    reduce_dtype: what gradients are sent as (None: the parameter's dtype; the accumulator's after `no_sync`, and with
        `Comm(reduce="native")`).
    grad_dtype: what they are accumulated in (None: float32 for 16-bit parameters, else the parameter's dtype).
        bfloat16 saves two bytes per parameter; then bits are equal over stages, but not over rank counts.
    master_dtype: what the optimizer updates (None: float32 for 16-bit parameters, else the parameter itself).
    keep: names or patterns of parameters that keep their own dtype, in all states, whatever the other fields ask for,
        as a router does in fp32: `["*.router.*"]`. Their modules compute in it: give them inputs of it (`x.float()`).
    store_params: keep sharded parameters (stage 3) in their own dtype beside their masters, as the ZeRO paper counts
        them: 2 bytes per owned parameter more. Else, where both rest on the device and masters are the wider ones,
        gathers cast the masters.
    cast_inputs: convert floating inputs to `param_dtype` (needs `param_dtype`): the root module's (True), or those of
        every unit ("units"), where something between two of them may have computed in a wider dtype.
    nonfinite: what a NaN or infinity among the gradients does to a step. "ignore" is plain PyTorch; "raise" ends it in
        a `NotFiniteError`, on every rank and before any weight changes, that names rank, step, micro-batch, parameter
        and element; "skip" passes over the step on every rank, counts it in `zero.skipped`, and logs the same. Where a
        parameter was spoiled before, by an update or an edit, that one is named, and "skip" raises as well. Costs a sum
        over the own shards of the gradients and a message of one byte per step; on CUDA also a wait per reduction.
        Where replicated gradients are sent in their own dtype, also room for the contributions apart from their sums.
    split_master: beside a bfloat16 parameter rest the 17 bits that it lacks of its fp32 master: 2.125 bytes in place of
        4, and the same bits in every step. Masters are joined bucket by bucket inside the step, in which a fused AdamW
        takes three to four times as long. Where masters alone rest (stage 3, on the device) nothing is split. The
        optimizer must allow to be stepped bucket by bucket; replicated weights are edited inside `gathered()` only.
    fp8: names or patterns of parameters that rest and travel as 8-bit floats (e4m3), a byte each, with a scale for each
        tensor. True: the weights of all trained `nn.Linear`, but for routers (modules called "router" or "gate") and
        `keep`. Modules compute in `param_dtype` with the numbers that these stand for. Masters are fp32, seeded before
        anything is rounded, and rounded once, to 8 bits. Such weights are edited inside `gathered()` only.
    scaling: which part of such a tensor has a scale of its own: "tensor", all of it, or each of stacked experts;
        "128x128", so many rows and columns; or "1x128", 128 elements of a row. Columns are the last dimension, rows all
        others.
    states: {name: dtype} of an optimizer's states at rest, torch.bfloat16 or torch.float32. "*" stands for all that are
        not named, which else are float32. The optimizer computes in float32, bucket by bucket, with states that are
        decoded for its step and rounded after it. Only states with an element for each of the parameter's can be
        named. Numbers differ from those of float32 states, and not between stages, tiers and numbers of ranks.
    rounding: how these are rounded: "nearest", ties to even; or "stochastic", up or down at random with a probability
        that makes the mean right. The random bits follow from the seed, the number of the optimizer's step, the state's
        and the parameter's name, and the element's place in the parameter (Philox 4x32-10, Salmon et al. 2011). With
        master_dtype=torch.bfloat16, "stochastic" rounds bfloat16 parameters so, too: they have no masters, and are
        decoded to float32 for the optimizer's step, as its states are, which rest in float32 unless `states` says
        otherwise.

    Raises `UserError` for fields that do not go together.

    Examples:
        >>> precision = zeroshard.Precision(param_dtype=torch.bfloat16, cast_inputs=True)
        >>> zero = zeroshard.shard(model, optimizer, stage=2, precision=precision)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    store_params: bool = False
    cast_inputs: bool | Literal["units"] = False
    nonfinite: Nonfinite = "ignore"
    keep: Sequence[str] = ()
    split_master: bool = False
    fp8: bool | Sequence[str] = False
    scaling: Scaling = "tensor"
    states: Mapping[str, torch.dtype] = field(default_factory=dict, hash=False)
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_fields(self, _FIELDS)
        if self.cast_inputs and self.param_dtype is None:
            raise UserError(
                "Precision.cast_inputs needs to know what to cast to",
                expected="param_dtype",
                got="None",
                instead="Precision(param_dtype=torch.bfloat16, cast_inputs=True)",
            )

        if len(self.keep) and self.param_dtype is None:
            raise UserError(
                "Precision.keep takes patterns of parameters that are not converted to Precision.param_dtype",
                got=f"keep={self.keep!r}, param_dtype={self.param_dtype}",
                instead='Precision(param_dtype=torch.bfloat16, keep=["*.router.*"])',
            )

        others = self.param_dtype not in (None, torch.bfloat16) or self.master_dtype not in (None, torch.float32)
        if self.split_master and others:
            raise UserError(
                "Precision.split_master takes apart fp32 masters of bfloat16 parameters",
                got=f"param_dtype={self.param_dtype}, master_dtype={self.master_dtype}",
                instead="Precision(param_dtype=torch.bfloat16, split_master=True)",
            )
        self._check_fp8()
        object.__setattr__(self, "states", dict(sorted(self.states.items())))  # a copy, in one order on all ranks
        self._check_states()

    def _check_fp8(self) -> None:
        if self.scaling != "tensor" and not self.fp8:
            raise UserError(
                "Precision.scaling says of which part of a tensor in 8 bits each scale is",
                expected="fp8=True or patterns beside it",
                got=f"scaling={self.scaling!r}, fp8={self.fp8!r}",
                instead='Precision(param_dtype=torch.bfloat16, fp8=True, scaling="128x128")',
            )
        others = self.param_dtype not in (None, *COMPUTED) or self.master_dtype not in (None, torch.float32)
        if self.fp8 and (others or self.split_master):
            raise UserError(
                "Precision.fp8 rounds whole fp32 masters, for modules that compute in 16 or 32 bits",
                got=f"param_dtype={self.param_dtype}, master_dtype={self.master_dtype}, "
                f"split_master={self.split_master}",
                instead="Precision(param_dtype=torch.bfloat16, fp8=True)",
            )

    def _check_states(self) -> None:
        for name, dtype in self.states.items():
            if dtype not in STATES_REST_IN:
                raise UserError(
                    "an optimizer's states rest in torch.bfloat16 or torch.float32",
                    where=f"Precision.states[{name!r}]",
                    got=dtype if isinstance(dtype, torch.dtype) else repr(dtype),
                    instead=f"Precision(states={{{name!r}: torch.bfloat16}})",
                )
        if self.rounding != "nearest" and not self.narrow:
            raise UserError(
                "Precision.rounding says how states, and parameters without masters, are rounded to 16 bits, and none "
                "is",
                got=f"rounding={self.rounding!r}, states={dict(self.states)!r}, master_dtype={self.master_dtype}",
                instead='Precision(states={"*": torch.bfloat16}, rounding="stochastic"), or Precision('
                'param_dtype=torch.bfloat16, master_dtype=torch.bfloat16, rounding="stochastic")',
            )

    @property
    def narrow_states(self) -> bool:
        """Tell if some of an optimizer's states may rest in a narrower format than it computes in."""
        return any(dtype is not torch.float32 for dtype in self.states.values())

    @property
    def rounds_updates(self) -> bool:
        """Tell if parameters without masters are decoded for the optimizer's step, and rounded at random after it."""
        return self.rounding == "stochastic" and self.master_dtype is torch.bfloat16

    @property
    def narrow(self) -> bool:
        """Tell if anything rests in a narrower format than the optimizer computes in."""
        return self.narrow_states or self.rounds_updates

    def stepped(self, master: torch.dtype) -> torch.dtype:
        """Return the dtype in which the optimizer updates what rests in the format `master`."""
        return torch.float32 if self.rounds_updates and master is torch.bfloat16 else master

    def decodes(self, master: torch.dtype) -> bool:
        """Tell if states beside what rests in the format `master` are in memory, as they are computed with, for a step
        only."""
        return self.narrow_states or self.stepped(master) is not master

    def state(self, name: str) -> torch.dtype:
        """Return the dtype in which an optimizer's state of this name rests, if it has an element for each of its
        parameter's."""
        return self.states.get(name, self.states.get(OTHERS, torch.float32))

    def keeps(self, names: Sequence[str]) -> bool:
        """Tell if a parameter of these names is an exception (`keep`)."""
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.keep)

    def of(self, *, kept: bool) -> Precision:
        """Return the settings of exceptions (`kept`), or of all others."""
        return Precision(store_params=self.store_params) if kept else self

    def of_bucket(self, bucket: BucketPlan) -> Precision:
        """Return the settings of a bucket's parameters. Those in 8 bits rest beside masters, so they are stored."""
        return replace(self, store_params=True) if bucket.fp8 else self.of(kept=bucket.kept)

    def formats(self, bucket: BucketPlan) -> Formats[torch.dtype]:
        """Return the formats of a bucket's states."""
        own = self.of_bucket(bucket)
        param: torch.dtype = getattr(torch, bucket.dtype.removeprefix("torch."))
        rest = torch.uint8 if bucket.fp8 else param
        return Formats(param, rest, own.grad(param), own.master(param), own.casts(param), own.splits(param))

    def param(self, own: torch.dtype) -> torch.dtype:
        return self.param_dtype if self.param_dtype is not None and own.is_floating_point else own

    def grad(self, param: torch.dtype) -> torch.dtype:
        return self.grad_dtype or (torch.float32 if param in LOW else param)

    def reduce(self, param: torch.dtype) -> torch.dtype:
        return self.reduce_dtype or param

    def master(self, param: torch.dtype) -> torch.dtype:
        return self.master_dtype or (torch.float32 if param in LOW else param)

    def casts(self, param: torch.dtype) -> bool:
        """Tell if gathers may cast sharded parameters from their masters: not if parameters are to be stored, or if
        they can be more exact than masters."""
        wider = {torch.float32: LOW, torch.float64: (*LOW, torch.float32)}
        return param in wider.get(self.master(param), ()) and not self.store_params

    def splits(self, param: torch.dtype) -> bool:
        """Tell if the master beside such a parameter rests as the bits that the parameter lacks (`split_master`)."""
        return self.split_master and (param, self.master(param)) == (torch.bfloat16, torch.float32)
