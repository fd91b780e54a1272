"""`zeroshard.load(model, folder)`: a model on the meta device gets the weights of a folder, each rank its own parts.

The folder holds safetensors files, as `zero.export` and Hugging Face's `save_pretrained` write them, or is a checkpoint
of `zero.save`. No rank reads, or ever holds, more than what rests on it and one unit's empty memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..api import Zero, shard
from ..checkpoint.content import model_state, persistent
from ..checkpoint.files import MANIFEST, absolute
from ..checkpoint.loading import put, renew, resting
from ..checkpoint.manifest import Saved
from ..checkpoint.others import other
from ..checkpoint.saving import wait_for_saves
from ..comm.agreement import Group
from ..comm.all_or_none import Together
from ..comm.mesh import connect
from ..engine.build.tensor_parallel import mesh_of
from ..engine.weights.unit import Initialiser
from ..errors import CheckpointError, UserError
from ..events import Ledger
from ..layout.partition import plain_name
from ..policies.comm import Comm
from ..policies.layout import Layout
from ..policies.offload import Offload
from ..policies.precision import Precision
from ..validation import check_flag
from . import adapters
from .boxes import boxes

ADAPTED = ", or get_peft_model(model, config) of a model that is not on meta"
INDEX, INDEX_LIMIT = "model.safetensors.index.json", 64 << 20  # bytes


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    strict: bool = True,
    stage: int = 3,
    precision: Precision | None = None,
    offload: Offload | None = None,
    layout: Layout | None = None,
    comm: Comm | None = None,
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], None] | None = None,
    optimizer_in_backward: bool = False,
) -> Zero:
    """Shard a model and fill it with the weights of `folder`; best with a model built on the meta device.

    model: as in `shard`; what it holds is replaced.
    folder: safetensors files (with `model.safetensors.index.json` where there are several), or one such file, or a
        checkpoint of `zero.save`, of which the optimizers' states are loaded too. Values are converted to the dtype of
        the model's parameters, or of their masters, as `load_state_dict` does.
    optimizer: as in `shard`; None: none.
    strict: False leaves tensors that the folder does not have, or has in another shape, to `init`, and ignores those
        that the model does not have.
    init: as in `shard`, for modules on meta that hold something that the folder does not, such as buffers that are not
        saved (default: as in `shard`).
    stage, precision, offload, layout, comm, device, optimizer_in_backward: as in `shard`.

    Raises `CheckpointError` on every rank where the folder and the model do not fit, and what `shard` raises.

    Examples:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(8, 8)
        >>> zero = zeroshard.load(model, "weights", stage=3)  # an export, or a folder of Hugging Face's
    """
    if layout is not None and layout.along:
        raise UserError(
            "load(model, folder) fills whole tensors, and of parameters along an axis a rank has some rows",
            got=f"along={dict(layout.along)}",
            instead="zero = shard(...), then zero.load(checkpoint); or make the model with its rows of the weights",
        )
    # Before anything is built, all ranks hear whether each of them can: one that raised alone would keep them waiting.
    group = connect(comm or Comm(), Ledger(), torch.device("cpu"), tensor=mesh_of(model, comm or Comm()))
    group.same("zeroshard.load(...)", lambda: _asked(folder, strict))
    path, tensors = absolute(folder), {}
    first: Initialiser | adapters.FirstValues
    with Together(group, lambda told: CheckpointError("the model was not loaded", where=str(path), got=told[0])):
        wait_for_saves()
        tensors = _shapes(path, group, strict=strict)
        if strict and (differences := _differences(model, tensors)):
            raise CheckpointError(
                "".join(f"\n    {each}" for each in differences),
                instead="load(..., strict=False), which leaves what the folder lacks to init=function_of_a_module, or "
                "to the modules' own reset_parameters(), and ignores what the model lacks",
            )
        _check_initialisers(model, tensors, first := _first_values(model, init))
    settings: dict[str, Any] = {"precision": precision, "offload": offload, "layout": layout, "comm": comm}
    settings |= {"stage": stage, "device": device, "optimizer_in_backward": optimizer_in_backward}
    zero = shard(model, optimizer, init=_fill(model, tensors, first), **settings)
    if (path / MANIFEST).exists():
        zero.load(path, strict=strict)
        return zero
    lost = "the model was not loaded, and holds nothing of use"
    with Together(group, lambda told: CheckpointError(lost, where=str(path), got=told[0])):
        _read(zero, Weights(path), tensors)
    return zero


def _asked(folder: object, strict: object) -> dict[str, Any]:
    check_flag("strict", strict)
    absolute(folder)  # which may differ: ranks may have copies of one folder
    return {"strict": strict}


class Weights:
    """The tensors of a folder of safetensors files, read in parts."""

    def __init__(self, path: Path) -> None:
        """Open the files. Raises `CheckpointError` for a folder that is none of weights, or is not whole."""
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}  # by names as without torch.compile
        self._files: dict[str, tuple[Any, str]] = {}  # and the names there
        for file in self._listed():
            if not file.is_file():  # links are fine: Hugging Face's cache is made of them
                raise CheckpointError("no such file of weights", where=str(file), expected="a regular file")
            try:
                opened: Any = safe_open(file, "pt")
                for name in opened.keys():  # noqa: SIM118  # no mapping
                    self.shapes[plain_name(name)] = tuple(opened.get_slice(name).get_shape())
                    self._files[plain_name(name)] = opened, name
            except (SafetensorError, OSError) as error:
                raise CheckpointError("a file of weights is damaged", where=str(file), got=f"{error}") from error
        if missing := sorted(self._promised - {name for _, name in self._files.values()})[:5]:
            raise CheckpointError("the index lists tensors that no file has", where=str(path / INDEX), got=missing)

    def _listed(self) -> list[Path]:
        self._promised: set[str] = set()
        if self.path.is_file():
            return [self.path]
        if (self.path / INDEX).exists():
            try:
                if not (self.path / INDEX).is_file() or (self.path / INDEX).stat().st_size > INDEX_LIMIT:
                    raise ValueError(f"expected a regular file of at most {INDEX_LIMIT:,} bytes")
                listed = json.loads((self.path / INDEX).read_text(encoding="utf-8"))["weight_map"]
                self._promised, names = set(listed), sorted(set(listed.values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(
                    "the index of a folder of weights is damaged", where=str(self.path / INDEX), got=f"{error}"
                ) from error
            for name in names:
                if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                    raise CheckpointError(
                        "the index names a file that is none of the folder's", where=str(self.path / INDEX),
                        expected="names like model-00001-of-00002.safetensors", got=repr(name),
                    )  # fmt: skip
            return [self.path / name for name in names]
        found = sorted(self.path.glob("*.safetensors"))
        if not found:
            known = other(self.path)
            raise CheckpointError(
                "no weights here" if known is None else f"{known.what}, and no weights that can be read part by part",
                where=str(self.path), expected="safetensors files, or a checkpoint of zero.save",
                got=sorted(path.name for path in self.path.glob("*"))[:5] or "nothing",
                instead="zero.export(folder) or save_pretrained(folder)" if known is None else known.instead,
            )  # fmt: skip
        return found

    def interval(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of a tensor, counted flat, in its dtype. 1-D."""
        opened, stored = self._files[name]
        tensor = opened.get_slice(stored)
        parts = []
        for box in boxes(self.shapes[name], start, stop):
            part = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            parts.append((tensor[part] if part else tensor[...]).reshape(-1))
        return torch.cat(parts) if parts else torch.empty(0, device="cpu")


def _shapes(path: Path, group: Group, *, strict: bool) -> dict[str, tuple[int, ...]]:
    if not (path / MANIFEST).exists():
        return Weights(path).shapes
    with Saved.open(path) as saved:
        found = {name: entry.shape for entry in saved.parameters.values() for name in entry.names}
        # Strictly, those of each rank's own too, which `zero.load` names where other ranks load them.
        buffers = saved.buffers if strict else saved.buffers_for(group.rank, group.ranks)
        return found | {name: stored.shape for name, stored in buffers.items()}


def _all_names(model: nn.Module) -> dict[int, tuple[list[str], Tensor]]:
    """Return {id: (all names, tensor)} of every parameter and saved buffer; below an adapter also the base's names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    others = adapters.candidates(model) if adapters.is_adapted(model) else {}
    parameters = ((plain_name(name), each) for name, each in model.named_parameters(remove_duplicate=False))
    for name, tensor in (*parameters, *persistent(model)):
        found.setdefault(id(tensor), ([], tensor))[0].extend(others.get(name, [name]))
    return found


def _place(names: Sequence[str], shape: tuple[int, ...], tensors: dict[str, tuple[int, ...]]) -> str | None:
    """Find the name, of a tensor's names, that the folder has in this shape; None if there is none."""
    return next((name for name in names if tensors.get(name) == tuple(shape)), None)


def _differences(model: nn.Module, tensors: dict[str, tuple[int, ...]]) -> list[str]:
    found, known = [], set()
    own = adapters.own(model) if adapters.is_adapted(model) else set()
    for names, tensor in _all_names(model).values():
        known |= set(names)
        there = [name for name in names if name in tensors]
        if not there and names[0] in own:
            continue  # it has first values, or gets them
        if not there:
            found.append(f"{names[0]!r} is not in the folder")
        elif _place(names, tensor.shape, tensors) is None:
            found.append(f"{there[0]!r} has shape {tuple(tensor.shape)}, in the folder {tensors[there[0]]}")
    return found + [f"{name!r} of the folder is not in the model" for name in tensors if name not in known]


def _unfilled(model: nn.Module, tensors: dict[str, tuple[int, ...]]) -> set[int]:
    """Return the ids of modules that hold a meta tensor which the folder does not have."""
    filled = {key for key, (names, tensor) in _all_names(model).items() if _place(names, tensor.shape, tensors)}
    return {
        id(module)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and tensor.is_meta and id(tensor) not in filled
    }


def _first_values(model: nn.Module, init: Callable[[nn.Module], None] | None) -> Initialiser | adapters.FirstValues:
    own = Initialiser(model, init)
    return adapters.FirstValues(model, own) if init is None and adapters.is_adapted(model) else own


def _check_initialisers(model: nn.Module, tensors: dict[str, tuple[int, ...]], init: Any) -> None:
    unfilled = _unfilled(model, tensors)
    for path, module in model.named_modules():
        if id(module) in unfilled and not init.knows(module):
            raise UserError(
                "a module on the meta device holds something that the folder does not, such as a buffer that is not "
                "saved, and does not say how to initialise it", where=f"module {path!r} ({type(module).__name__})",
                expected="a reset_parameters() method; of LoRA's matrices init_lora_weights=True or 'gaussian'",
                instead="load(..., init=function_of_a_module)" + ADAPTED * adapters.is_adapted(model),
            )  # fmt: skip


def _fill(model: nn.Module, tensors: dict[str, tuple[int, ...]], init: Any) -> Callable[[nn.Module], None]:
    unfilled = _unfilled(model, tensors)

    def fill(module: nn.Module) -> None:
        if id(module) in unfilled:
            init(module)

    return fill


@torch.no_grad()
def _read(zero: Zero, weights: Weights, tensors: dict[str, tuple[int, ...]]) -> None:
    running = model_state(zero._engine)
    known = {name: names for names, _ in _all_names(running.model).values() for name in names}
    for record in running.records:
        name = _place(known[record.name], running.shape(record), tensors)
        if name is not None:
            start, stop = resting(running, record.name)
            bucket, slot = running.places[record.name]
            among = bucket.among(slot)
            runs = among.strips.rows_of(among.offset + start, among.offset + stop)
            values = [weights.interval(name, low, high) for low, high in runs]
            value = torch.cat(values) if len(values) > 1 else [*values, weights.interval(name, 0, 0)][0]
            updated = slot.within(*bucket.updated)
            put(running, record.name, value, value[updated.start - start : updated.stop - start])
    for name, tensor in persistent(running.model):
        if (found := _place(known[name], tensor.shape, tensors)) is not None:
            tensor.copy_(weights.interval(found, 0, tensor.numel()).view(tensor.shape))
    renew(running)
    zero._engine.loaded()
