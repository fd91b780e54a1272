"""Matrices that tensor parallelism has cut, put together for an optimizer of whole matrices, such as Muon.

A rank holds one part of a matrix, of its averaged gradient and of each of its states; parts rest and are saved as for
an elementwise optimizer. While the optimizer steps a bucket, the ranks of the tensor axis gather all parts: each rank
has the whole matrix for that moment, computes the same update of it, and keeps its part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..engine.build.supported_optimizers import block_of, by_bucket
from ..engine.build.tensor_parallel import TensorParallel
from ..engine.step.fragment import Fragment, fresh_states, updated
from ..engine.step.optim import Binding
from ..engine.weights.bucket import Bucket
from ..errors import UserError
from ..events import Ledger
from ..hooks import Feature
from ..layout.partition import WHOLE
from ..policies.incompatible import rejoined_in_backward

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly
    from ..engine.engine import Engine

_PROBE = (5, 7)  # sides of a matrix that shows which states an optimizer keeps: no two states are alike by chance
_ELSE = "an elementwise optimizer for it, such as AdamW, beside this one for the others: shard(model, [muon, adamw])"


def states_of_elements(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names of the states with one element per element of the matrix. Refuses, by name, optimizers with
    states of another shape, one number aside: a rank could not keep a part of these."""
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        device = next((param.device for param in group["params"]), torch.device("cpu"))
        try:
            found |= fresh_states(optimizer, group, nn.Parameter(torch.zeros(_PROBE, device=device)))
        except Exception as error:
            raise UserError(
                "an optimizer of whole tensors could not be asked what it keeps of a matrix that a rank has a part of",
                where=f"{type(optimizer).__name__}.step() on a parameter of shape {_PROBE}",
                got=f"{type(error).__name__}: {error}",
                instead=_ELSE,
            ) from error
    tensors = {key: tuple(value.shape) for key, value in found.items() if isinstance(value, Tensor)}
    others = {key: shape for key, shape in tensors.items() if shape != _PROBE and math.prod(shape) != 1}
    if others:
        raise UserError(
            "this optimizer keeps states of a matrix that are not one number for each element, and tensor parallelism "
            "has cut the matrix",
            where=f"{type(optimizer).__name__}, of a matrix of shape {_PROBE}",
            expected=f"states of shape {_PROBE} or of one number, as Muon's momentum",
            got=", ".join(f"{key}: {shape}" for key, shape in others.items()),
            instead=_ELSE,
        )
    return {key for key, shape in tensors.items() if shape == _PROBE}


class Rejoined:
    """Puts together, for an optimizer's steps, matrices of which this rank has parts. tensors: how they are cut."""

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: TensorParallel, ledger: Ledger) -> None:
        self._optimizer, self._tensors, self._ledger = optimizer, tensors, ledger
        self._keys: set[str] | None = None  # names of states with one element per matrix element

    def ask(self, binding: Binding) -> None:
        """Ask the optimizer what it keeps, if it has cut matrices; if it gets some later, `shown` asks then."""
        slots = [member.place.bucket.plan.slots[member.place.position] for member in binding.members]
        if any(slot.cut is not None for slot in slots):
            self._keys = states_of_elements(self._optimizer)

    def takes(self, bucket: Bucket) -> bool:
        """Tell if parameters of a bucket are cut: then it is stepped by itself."""
        return any(slot.cut is not None for slot in bucket.plan.slots)

    @contextlib.contextmanager
    def shown(self, fragments: Sequence[Fragment]) -> Iterator[None]:
        """Show the optimizer whole matrices for one step, on all ranks of the tensor axis at once.

        After a step that raised, the parts of matrices and of their states are as before it.
        """
        cut = [(each, dim) for each in fragments if each.param.grad is not None and (dim := _dim(each)) is not None]
        if cut and self._keys is None:
            self._keys = states_of_elements(self._optimizer)
        before = [(fragment, fragment.param.data, self._parts(fragment)) for fragment, _ in cut]
        held = 0
        try:
            for fragment, dim in cut:
                held += self._make_whole(fragment, dim)
            yield
            for (fragment, dim), (_, part, states) in zip(cut, before, strict=True):
                self._keep(fragment, dim, part, states)
        finally:
            self._ledger.hold("gather", -held)
            for fragment, part, states in before:
                fragment.param.grad = None
                fragment.param.data = part
                state = self._optimizer.state.get(fragment.param, {})
                for key in self._parts(fragment):
                    del state[key]
                state.update(states)

    def _parts(self, fragment: Fragment) -> dict[str, Tensor]:
        """Return this rank's parts of a matrix's states, by name."""
        state = self._optimizer.state.get(fragment.param, {})
        return {key: value for key, value in state.items() if key in (self._keys or ())}

    def _make_whole(self, fragment: Fragment, dim: int) -> int:
        """Put the whole matrix, its gradient and its states in place of this rank's parts; return their bytes."""
        param, state = fragment.param, self._optimizer.state.get(fragment.param, {})
        grad, param.grad = param.grad, None
        assert grad is not None
        param.data = self._tensors.assembled(param.data, dim)
        param.grad = self._tensors.assembled(grad, dim)
        states = {key: self._tensors.assembled(part, dim) for key, part in self._parts(fragment).items()}
        state.update(states)
        nbytes = sum(each.nbytes for each in (param.data, param.grad, *states.values()))
        self._ledger.hold("gather", nbytes)
        return nbytes

    def _keep(self, fragment: Fragment, dim: int, part: Tensor, states: dict[str, Tensor]) -> None:
        """Copy this rank's part of what the step has made: of the matrix into `part`, of states into `states`."""
        for key, value in self._parts(fragment).items():
            own = self._tensors.own(value, dim)
            states[key] = states[key].copy_(own) if key in states else own.clone(memory_format=torch.contiguous_format)
        part.copy_(self._tensors.own(fragment.param.data, dim))


def _takes_whole(optimizer: torch.optim.Optimizer) -> bool:
    return block_of(optimizer) == WHOLE


def _dim(fragment: Fragment) -> int | None:
    """Return the dimension on which the matrix is cut; None if this rank has all of it.

    Of stacked matrices a rank has a part of each: the leading dimensions only count the matrices.
    """
    slot = fragment.slot
    dim = -1 if slot.cut is None or not fragment.elements.numel else slot.cut - len(slot.shape) + len(fragment.shape)
    return None if dim < 0 else dim


class MuonTensorParallelFeature(Feature):
    name = "Muon beside tensor parallelism"
    page = "meshes.md#tensor-parallelism"

    def rejoins(self, optimizer: torch.optim.Optimizer) -> bool | None:
        if not _takes_whole(optimizer) or not by_bucket(optimizer):
            return None
        states_of_elements(optimizer)
        return True

    def check(self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse updates in backward: messages of backward and of the update share an axis, without a common order."""
        cut = {
            id(record.param): record.name for record in assembly.managed if id(record.param) in assembly.tensors.cuts
        }
        for optimizer in optimizers if assembly.asked.in_backward else ():
            found = [cut[id(param)] for param in updated(optimizer) if id(param) in cut]
            if found and _takes_whole(optimizer):
                raise rejoined_in_backward(type(optimizer).__name__, found[0])

    def ready(self, engine: Engine) -> None:
        for binding in engine.bindings if engine.tensors.made is not None else ():
            if _takes_whole(binding.optimizer):
                binding.alone.around = around = Rejoined(binding.optimizer, engine.tensors, engine.ledger)
                around.ask(binding)


FEATURE = MuonTensorParallelFeature()
