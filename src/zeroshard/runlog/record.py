"""`RunLog`: a small file for each rank that says what every step's losses, gradients and weights were.

    with zeroshard.RunLog("runs/a", model, optimizer) as log:
        ...
        loss.backward()
        log.backward(loss)      # after each backward; the optimizer's own hook logs what it is about to use

It works in any loop: plain, DDP, FSDP2, DeepSpeed, zeroshard. Of each tensor the file has a digest of all bits, the
norm, and some elements, so that two runs can be told apart exactly, and their difference be named (`zeroshard diff`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arithmetic.digests import raw
from ..arithmetic.hashing import digest
from ..engine.build.supported_optimizers import unwrapped
from ..errors import StateError, UserError, check_local
from .read import FORMAT, VERSION, file_of, places
from .trace import Trace, check_traced
from .whole import gradient, hidden, shape, weight, whole

SAMPLES = 32  # elements of each tensor, evenly apart
WRAPPED = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")


class RunLog:
    """One rank's log of a run. All ranks make one, and make the same calls: whole tensors are put together for it.

    folder: where each rank writes a file, which must not be there yet.
    model: the one that is trained, as the loop calls it.
    optimizer: logs gradients when it steps; without one call `gradients()` before each step.
    zero: what `zeroshard.shard` returned, if it sharded the model.
    samples: elements of each tensor that the file has.
    trace: also log what each module gets and gives, and its gradient, call by call, so that `zeroshard diff` names the
        first module that computes otherwise. It copies every activation to the host.

    Raises `UserError` where the folder has a log already, `StateError` for a call after `close`.

    Examples:
        >>> with zeroshard.RunLog("runs/a", model, optimizer) as log:
        ...     loss = model(batch).square().mean()
        ...     loss.backward()
        ...     log.backward(loss)
        ...     optimizer.step()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        zero: Any = None,
        samples: int = SAMPLES,
        trace: bool = False,
    ) -> None:
        check_local(os.fspath(folder))
        if type(samples) is not int or samples < 1:
            raise UserError("samples is a number of elements", got=repr(samples), instead=f"samples={SAMPLES}")
        if trace:
            check_traced(model)
        running = dist.is_available() and dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
        self.samples, self._zero = samples, zero
        self._params = {WRAPPED.sub("", f".{name}")[1:]: param for name, param in model.named_parameters()}
        self._step = self._backwards = 0
        self._weighed = False  # are this step's weights in the file?
        # Of each gradient after the last backward: itself, to notice that it was dropped since, and its samples.
        self._before: dict[str, tuple[weakref.ref[Any], list[float]]] = {}
        path = Path(folder) / file_of(self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file: TextIO = path.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise UserError("there is a run's log already", where=str(path), instead="a folder of its own") from error
        facts = [
            [name, [*shape(param)], str(param.dtype).removeprefix("torch.")] for name, param in self._params.items()
        ]
        header = {"rank": self.rank, "ranks": self.ranks, "samples": samples, "torch": torch.__version__}
        header["processor"] = torch.backends.cpu.get_cpu_capability()  # the instructions that torch's kernels use
        self._trace = Trace(model, self._value, WRAPPED) if trace else None
        self._write({"format": FORMAT, "version": VERSION, **header, "parameters": facts})
        self._hook = optimizer and unwrapped(optimizer).register_step_pre_hook(lambda *_: self.gradients())

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file.closed:
            raise StateError("this run log is closed", where=self._file.name, instead="close() after the last step")
        self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()

    # --- what a loop calls ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def backward(self, loss: Tensor | float) -> None:
        """Log a micro-batch, after its backward: its loss, and what it has added to the gradients. Collective."""
        self._weigh()
        added = {}
        for name, grad in self._gradients():
            now = self._some(whole(grad))
            last, before = self._before.get(name, (None, []))
            if last is None or last() is not grad:
                before = [0.0] * len(now)
            added[name] = [_number(a - b) for a, b in zip(now, before, strict=True)]
            self._before[name] = weakref.ref(grad), now
        self._write_trace()
        self._write({"step": self._step, "backward": self._backwards, "loss": _number(float(loss)), "added": added})
        self._backwards += 1

    @torch.no_grad()
    def gradients(self) -> None:
        """Log the gradients that a step is about to use. Collective. An optimizer that was given calls it by itself."""
        self._weigh()
        grads = {name: gradient(param) for name, param in self._params.items()}
        found = {name: self._told(grad) for name, grad in grads.items() if grad is not None}
        self._write_trace()
        self._write({"step": self._step, "gradients": found})
        if self._trace is not None:
            self._trace.next_step()
        self._step, self._backwards, self._weighed, self._before = self._step + 1, 0, False, {}

    def close(self) -> None:
        """Log the weights that the last step has made, and end the log: what comes after is not logged. Collective."""
        if not self._file.closed:
            self._weigh()
            self._end()

    def _end(self) -> None:
        self._file.close()
        if self._hook:
            self._hook.remove()
        if self._trace is not None:
            self._trace.end()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    # --- whole tensors ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _weigh(self) -> None:
        """Log the weights of a step, once. Nothing has changed them since the last one."""
        if self._weighed:
            return
        with contextlib.nullcontext() if self._zero is None else self._zero.gathered():
            found = {name: self._told(weight(param)) for name, param in self._params.items()}
        self._write({"step": self._step, "weights": found})
        self._weighed = True

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self._params.items():
            if param.grad is not None and not hidden(param):
                yield name, param.grad

    def _write_trace(self) -> None:
        if self._trace is not None and (calls := self._trace.take()):
            self._write({"step": self._step, "calls": calls})

    def _value(self, tensor: Tensor) -> list[Any]:
        """Return a tensor's digest, dtype, number of elements and samples."""
        here = tensor.cpu().contiguous()
        dtype = str(here.dtype).removeprefix("torch.")
        return [digest(raw(here)), dtype, here.numel(), [_number(value) for value in self._some(here)]]

    def _told(self, tensor: Tensor) -> list[Any]:
        """Return a tensor's digest, dtype, norm and samples."""
        here = tensor.cpu().contiguous()
        norm = _number(float(here.double().norm()))
        dtype = str(here.dtype).removeprefix("torch.")
        return [digest(raw(here)), dtype, norm, [_number(value) for value in self._some(here)]]

    def _some(self, tensor: Tensor) -> list[float]:
        flat = tensor.reshape(-1)
        return [float(value) for value in flat[places(flat.numel(), self.samples)].double().tolist()]


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
