"""DeepSpeed's checkpoints: ZeRO stages 0 to 3 as `save_checkpoint` writes them, and the universal format.

Stages 1 and 2 keep a flat fp32 vector per group, cut evenly over the ranks, and say which parameter is where. Stage 3
cuts each parameter over the ranks, and puts the parts behind one another. The universal format has a folder for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, UserError
from .foreign import Found, Hints, Lazy, of, one_name, plain_only, shared_names, steps
from .pickles import read_torch

OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
OWN = {  # entries that only DeepSpeed can use
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "autoep_layers",
    "frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "csr_tensor_module_names",
    "ds_config", "ds_version", "dp_world_size", "mp_world_size", "universal_checkpoint_info", "zero_optimizer_state",
}  # fmt: skip


def folder(path: Path) -> Path | None:
    """Find the folder with the files: itself, or the one that its file `latest` names. None: it is not DeepSpeed's."""
    for name in ("", "latest", "latest_universal"):
        inner = path
        if name:
            if not (path / name).is_file():
                continue
            tag = (path / name).read_text(encoding="utf-8").strip()
            if not one_name(tag):
                raise CheckpointError("this names no folder beside it", where=str(path / name), got=repr(tag)[:100])
            inner = path / tag
        if inner.is_dir() and any(MODEL.fullmatch(each.name) for each in inner.iterdir()):
            return inner
    return None


def _numbered(place: Path, pattern: re.Pattern[str]) -> list[Path]:
    """List the files of a pattern in the order of ranks. Raises if one is missing, or if tensors are split."""
    found = [(match, each) for each in place.iterdir() if (match := pattern.fullmatch(each.name))]
    if split := [each.name for match, each in found if int(match[2])]:
        raise UserError(
            "tensors that are split over ranks are not put together here", where=str(place), got=split[0],
            instead="DeepSpeed's ds_to_universal.py, and the folder that it writes",
        )  # fmt: skip
    found.sort(key=lambda each: int(each[0][1] or 0))
    if (numbers := [int(match[1] or 0) for match, _ in found]) != list(range(len(found))):
        raise CheckpointError("a rank's file is missing", where=str(place), expected="ranks 0, 1, ...", got=numbers)
    return [each for _, each in found]


def read(place: Path, hints: Hints) -> Found:
    """Read a checkpoint. Raises `CheckpointError` for damaged files, `UserError` for kinds that are not read."""
    if any(each.name.startswith("layer_") and each.name.endswith("model_states.pt") for each in place.iterdir()):
        raise UserError("pipeline stages are not put together here", where=str(place), instead="DeepSpeed's own tools")
    models = [read_torch(path, path) for path in _numbered(place, MODEL)]
    try:
        return _Checkpoint(place, models, hints).read()
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, (CheckpointError, UserError)):
            raise
        raise CheckpointError(
            "these are no files as DeepSpeed writes them", where=str(place), got=f"{type(error).__name__}: {error}"
        ) from error


class _Checkpoint:
    def __init__(self, place: Path, models: list[Any], hints: Hints) -> None:
        self.place, self.models, self.hints, self.model = place, models, hints, models[0]
        self.shapes: list[dict[str, Any]] = list(self.model["param_shapes"] or [])
        self.universal = (place / "zero").is_dir()
        files = [] if self.universal else _numbered(place, OPTIM)
        self.optims = [read_torch(path, path)["optimizer_state_dict"] for path in files]
        self.stage = 3 if len(models) > 1 or any(not t.numel() for t in self.model["module"].values()) else 0
        if self.optims:
            self.stage = int(self.optims[0]["zero_stage"].args[0])
        count = self.optims[0]["partition_count"] if self.optims else 0
        ranks = max(count) if isinstance(count, list) else int(count)
        if ranks != len(self.optims):
            raise CheckpointError(
                "files of ranks are missing",
                where=str(place),
                expected=f"{ranks} *_optim_states.pt",
                got=len(self.optims),
            )
        version = self.model.get("ds_version")
        what = "universal format" if self.universal else f"ZeRO stage {self.stage} of {len(self.optims) or 1} ranks"
        self.found = Found(f"DeepSpeed {version}, {what}", self.stage)

    def read(self) -> Found:
        found, module = self.found, self.model["module"]
        shared: dict[str, str] = dict(self.model.get("shared_params") or shared_names(module))
        buffers = set(self.model["buffer_names"])
        trained = {name: shape for group in self.shapes for name, shape in group.items()}
        frozen = self.model.get("frozen_param_shapes") or {}
        for name, tensor in module.items():
            if name in shared or name in self.hints.tied:
                continue
            if name in buffers:
                found.buffers[name] = of(tensor)
            elif name in trained and (self.optims or self.universal):
                found.dtypes[name] = tensor.dtype
                found.values[name] = self._state(name, "fp32", tuple(trained[name]))
            elif name in frozen and self.stage == 3:
                found.values[name] = self._frozen(name, tuple(frozen[name]), tensor.dtype)
            elif tensor.numel() or self.stage < 3:
                found.values[name] = of(tensor)
            else:
                raise CheckpointError(
                    "a parameter has no values in its checkpoint", where=f"{name} in {self.place}",
                    instead=f"--tied {name}=NAME, if it is another name of a parameter",
                )  # fmt: skip
        for alias, name in shared.items():
            found.aliases.setdefault(name, []).append(alias)
        if self.optims or self.universal:
            self._optimizer()
        elif self.model.get("optimizer") is not None:
            found.notes.append("without ZeRO its optimizer names no parameters: only weights are read")
        plain_only({key: value for key, value in self.model.items() if key not in OWN and value is not None}, found)
        return found

    # --- states -------------------------------------------------------------------------------------------------------

    def _optimizer(self) -> None:
        found, groups = self.found, self._groups()
        single = len(groups) == 1
        if not single and len(groups) != len(self.shapes):
            raise UserError(
                "sub-groups of several parameter groups cannot be told apart", where=str(self.place),
                expected=f"{len(groups)} of them", got=len(self.shapes), instead="ds_to_universal.py; or --weights",
            )  # fmt: skip
        for index, shapes in enumerate(self.shapes):
            options = dict(groups[0 if single else index])
            if single and found.groups:
                found.groups[0][0].extend(shapes)
            else:
                found.groups.append((list(shapes), options))
            kept = self._kept(index, shapes)
            for name, shape in shapes.items():
                for key in kept:
                    found.states.setdefault(name, {})[key] = self._state(name, key, tuple(shape))
            step = self._step(index, options)
            if step is not None:
                steps(found, list(shapes), step)

    def _groups(self) -> list[dict[str, Any]]:
        if self.universal:
            return list(self._common()["param_groups"])
        base = self._base(0)
        return list(base["param_groups"])

    def _base(self, rank: int) -> Any:
        told = self.optims[rank]
        base = told["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        if not isinstance(base, dict):
            raise UserError(
                "the older elastic format is not read", where=str(self.place), instead="DeepSpeed's ds_to_universal.py"
            )
        return base

    def _common(self) -> Any:
        path = self.place / "zero" / "optimizer_state.pt"
        return read_torch(path, path)

    def _kept(self, index: int, shapes: dict[str, Any]) -> list[str]:
        """List the states that have an element for each of a parameter's."""
        if self.universal:
            names = {each.stem for name in shapes for each in self._folder(name).glob("*.pt")}
            return sorted(names - {"fp32", "step"})
        state = self._base(0)["state"].get(index, {})
        return [key for key, value in state.items() if isinstance(value, Tensor) and value.dim() == 1 and key != "step"]

    def _step(self, index: int, options: dict[str, Any]) -> Any:
        if self.universal:
            common = self._common()
            state = common.get("optimizer_state_dict", {}).get("state", {})
            path = self._folder(next(iter(self.shapes[index]))) / "step.pt"
            told = read_torch(path, path) if path.is_file() else state.get(index, {}).get("step")
        else:
            told = self._base(0)["state"].get(index, {}).get("step")
        return options.get("step") if told is None else told

    # --- one parameter's values ---------------------------------------------------------------------------------------

    def _state(self, name: str, key: str, shape: tuple[int, ...]) -> Lazy:
        """Return a parameter's master ("fp32") or one of its moments."""
        if self.universal:
            return self._own_file(name, key, shape)
        pieces = list(self._pieces(name, key, math.prod(shape)))
        if sum(piece.numel() for piece in pieces) != math.prod(shape):
            raise CheckpointError(
                "parts of a parameter are missing", where=f"{key} of {name} in {self.place}",
                expected=f"{math.prod(shape)} elements", got=sum(piece.numel() for piece in pieces),
            )  # fmt: skip
        return Lazy(shape, pieces[0].dtype, _joined(pieces, shape))

    def _pieces(self, name: str, key: str, numel: int) -> Iterator[Tensor]:
        """Yield each rank's elements of a parameter's state, without padding."""
        (index,) = (number for number, shapes in enumerate(self.shapes) if name in shapes)
        part = -(-numel // len(self.optims))
        before = sum(-(-math.prod(shape) // len(self.optims)) for shape in _until(self.shapes[index], name))
        for rank, told in enumerate(self.optims):
            if self.stage == 3:
                flat, start = told["fp32_flat_groups"][index], before
                length = max(0, min(part, numel - rank * part))
            else:
                flat, place = (
                    told["single_partition_of_fp32_groups"][index],
                    told["param_slice_mappings"][index].get(name),
                )
                if place is None:
                    continue
                start, length = int(place.start), int(place.numel)
            if key != "fp32":
                flat = self._base(rank)["state"][index][key]
            yield flat.narrow(0, start, length)

    def _frozen(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Lazy:
        pieces = [model["frozen_param_fragments"][name].reshape(-1) for model in self.models]
        return Lazy(shape, dtype, lambda: torch.cat(pieces)[: math.prod(shape)].view(shape))

    def _folder(self, name: str) -> Path:
        if not one_name(name):
            raise CheckpointError(
                "a parameter's name is no name of a folder", where=str(self.place), got=repr(name)[:100]
            )
        return self.place / "zero" / name

    def _own_file(self, name: str, key: str, shape: tuple[int, ...]) -> Lazy:
        path = self._folder(name) / f"{key}.pt"

        def read() -> Tensor:
            told = read_torch(path, path)
            tensor: Tensor = told["param"] if isinstance(told, dict) else told
            return tensor.reshape(shape)  # of stage 3 it is flat

        return Lazy(shape, torch.float32, read)


def _joined(pieces: list[Tensor], shape: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: torch.cat(pieces).view(shape)


def _until(shapes: dict[str, Any], name: str) -> Iterator[Any]:
    for each, shape in shapes.items():
        if each == name:
            return
        yield shape
