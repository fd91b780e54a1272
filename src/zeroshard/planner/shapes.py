"""Names and shapes of a model's parameters from a file, without torch and without the model.

    shapes.json            {name: [shape]} or {name: {"shape": [...], "dtype": "BF16"}}
    model.safetensors      its header: 8 bytes of length, then JSON; the tensors themselves are not read
    a folder of these      with its *.safetensors.index.json if there is one
    a Hugging Face folder  that has config.json only: llama, mistral, qwen2 and gpt2; beside transformers all it has

Files are untrusted: sizes are bounded before anything is read, types are checked, nothing is executed, and a damaged
file is one `UserError` that names it.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError, nearest
from ..layout.partition import Spec
from . import from_transformers
from .units import units_of

Shape = tuple[int, ...]

HEADER_LIMIT = 100_000_000  # bytes; that of the safetensors library
JSON_LIMIT = 100_000_000
NUMEL_LIMIT = 1 << 60
LAYERS_LIMIT = 100_000
NAME_LIMIT = 500

# Bits per element. Those of whole numbers hold no parameters: masks, quantised weights, counters.
FLOATS = {
    "C64": 64,
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
}
OTHERS = {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8}
# Buffers that some checkpoints carry beside the parameters.
BUFFERS = ("*rotary_emb.inv_freq", "*.attn.masked_bias", "*.attn.bias")


@dataclass(frozen=True)
class Shapes:
    """A model's parameters: each once, in the order of the file (of registration, from a config.json).

    ties: other names of a parameter, by the name that is counted. left_out: names that are no parameters, and why.
    linear: the weights of linear layers that are no routers; None where the file does not tell.
    """

    source: str
    parameters: Mapping[str, Shape]
    ties: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    linear: Sequence[str] | None = None

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.parameters.values()))

    def specs(
        self, itemsize: int, rows: Mapping[str, str] | None = None, ep: int = 1, fp8: Collection[str] = ()
    ) -> list[Spec]:
        """Return specs for `layout.partition`: trainable, of one item size, in the units that the names tell.

        rows: {name pattern: axis} of parameters of which a rank has 1/ep of the rows, as `Layout.along`. Those that
        differ by a number alone, after the pattern's last word ("experts.7.w1.weight"), are rows of one tensor.
        fp8: names of parameters that rest in 8 bits.
        """
        units, rows = units_of(self.parameters), rows or {}
        found: dict[str, Spec] = {}
        for name, shape in self.parameters.items():
            stacked, pattern = name, next((each for each in rows if fnmatch.fnmatchcase(name, each)), "")
            if pattern:
                listed = next((part for part in reversed(pattern.split(".")) if part.isidentifier()), None)
                parts = name.split(".")
                numbers = [at for at, part in enumerate(parts) if at and part.isdecimal() and parts[at - 1] == listed]
                if numbers:
                    stacked = ".".join(part for at, part in enumerate(parts) if at != numbers[-1])
                    shape = (1 + (found[stacked].shape[0] if stacked in found else 0), *shape)
            kind = f"float{8 * itemsize}", itemsize, units[name], True, rows.get(pattern, "")
            found[stacked] = Spec(stacked, shape, *kind, fp8=name in fp8)
        for name, spec in found.items():
            if spec.axis and (not spec.shape or spec.shape[0] % ep):
                raise UserError(
                    "the rows of a parameter cannot be divided among so many ranks", where=name,
                    expected=f"a multiple of {ep} in the first dimension", got=spec.shape, instead="ep that divides it",
                )  # fmt: skip
        if rows and not any(spec.axis for spec in found.values()):
            pattern = next(iter(rows))
            raise UserError(
                "Layout.along matches no parameter", got=repr(pattern), instead=nearest(pattern, [*found][:40])
            )
        return [s._replace(shape=(s.shape[0] // ep, *s.shape[1:])) if s.axis else s for s in found.values()]


def read(path: str | os.PathLike[str]) -> Shapes:
    """Read the shapes in a file or folder. Raises `UserError`, naming the file, for whatever cannot be used."""
    where = Path(path)
    try:
        if where.is_dir():
            return _folder(where)
        if not where.exists():
            raise UserError("no such file or folder of shapes", where=where, instead=_neighbour(where))
        if not where.is_file():
            raise UserError("neither a file nor a folder", where=where)
        if where.suffix == ".safetensors":
            return _counted(where, _header(where))
        return _counted(where, _listing(where)) if where.name != "config.json" else _config(where)
    except OSError as error:
        raise UserError("the file cannot be read", where=where, got=error.strerror or str(error)) from error


def _neighbour(where: Path) -> str:
    folder = where.parent
    if not folder.is_dir():
        return f"{folder} does not exist"
    close = difflib.get_close_matches(where.name, [entry.name for entry in folder.iterdir()], n=1)
    return f"did you mean {folder / close[0]}?" if close else "a .json or .safetensors file, or a folder of them"


def _damaged(where: Path, expected: str, got: object) -> UserError:
    return UserError("the file is damaged or not what its name says", where=where, expected=expected, got=got)


# ------------------------------------------------------------------------------------------------------ files of shapes


class _Tensor(NamedTuple):
    shape: Shape
    dtype: str | None  # None: not said


def _parsed(text: bytes, where: Path) -> dict[str, Any]:
    """Parse a JSON object; refuse names that occur twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise _damaged(where, "every name once", f"{twice[:60]!r} twice")
        return table

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise _damaged(where, "JSON in UTF-8", str(error)[:100]) from error
    if not isinstance(value, dict):
        raise _damaged(where, "a JSON object", type(value).__name__)
    return value


def _json(where: Path) -> dict[str, Any]:
    if (nbytes := where.stat().st_size) > JSON_LIMIT:
        raise _damaged(where, f"JSON of at most {JSON_LIMIT} bytes", f"{nbytes} bytes")
    return _parsed(where.read_bytes(), where)


def _shape(value: object, name: str, where: Path) -> Shape:
    if not isinstance(value, list) or not all(type(length) is int and length >= 0 for length in value):
        raise _damaged(where, "a list of whole numbers as the shape", f"{str(value)[:60]} for {name!r}")
    if math.prod(value) > NUMEL_LIMIT or len(value) > 64:
        raise _damaged(where, f"at most {NUMEL_LIMIT} elements in a tensor", f"shape {str(value)[:60]} for {name!r}")
    return tuple(value)


def _listing(where: Path) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for name, entry in _json(where).items():
        dtype = None
        if isinstance(entry, dict):
            dtype = entry.get("dtype")
            if dtype is not None and not isinstance(dtype, str):
                raise _damaged(where, "a name as the dtype", f"{str(dtype)[:60]} for {name!r}")
            entry = entry.get("shape")
        tensors[name] = _Tensor(_shape(entry, name, where), dtype)
    return tensors


def _header(where: Path) -> dict[str, _Tensor]:
    """Read a safetensors header; check that its tensors fill the file without gap and overlap."""
    nbytes = where.stat().st_size
    with where.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT, nbytes - 8):
            raise _damaged(where, "a safetensors header inside the file", f"header of {length} bytes in {nbytes}")
        header = _parsed(file.read(length), where)
    header.pop("__metadata__", None)
    tensors: dict[str, _Tensor] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise _damaged(where, "dtype, shape and data_offsets of every tensor", f"{str(entry)[:60]} for {name!r}")
        shape, dtype, span = _shape(entry["shape"], name, where), entry["dtype"], entry["data_offsets"]
        bits = {**FLOATS, **OTHERS}.get(dtype) if isinstance(dtype, str) else None
        if bits is None:
            raise _damaged(where, "a dtype of safetensors", f"{str(dtype)[:60]!r} for {name!r}")
        two = isinstance(span, list) and len(span) == 2 and all(type(offset) is int for offset in span)
        if not two or (span[1] - span[0]) * 8 != math.prod(shape) * bits:
            raise _damaged(where, "offsets that fit shape and dtype", f"{str(span)[:60]} for {name!r}")
        spans.append((span[0], span[1]))
        tensors[name] = _Tensor(shape, dtype)
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise _damaged(where, f"a tensor at offset {end}", f"the next at {first}")
        end = last
    if end != nbytes - 8 - length:
        raise _damaged(where, f"{end} bytes of tensors", f"{nbytes - 8 - length}, so the file is cut off or too long")
    return tensors


def _counted(where: Path, tensors: Mapping[str, _Tensor]) -> Shapes:
    parameters, left_out = {}, {}
    for name, (shape, dtype) in tensors.items():
        if len(name) > NAME_LIMIT or not name.isprintable():
            raise _damaged(where, f"printable names of at most {NAME_LIMIT} characters", repr(name[:60]))
        kind = (dtype or "F32").upper().removeprefix("TORCH.")
        if kind in OTHERS or re.fullmatch(r"U?INT\d+|BOOL", kind):
            left_out[name] = f"{dtype} is not a floating dtype"
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in BUFFERS) and (len(shape) != 1 or "inv_freq" in name):
            left_out[name] = "a buffer"
        else:
            parameters[name] = shape
    if not sum(map(math.prod, parameters.values())):
        raise UserError("no parameters in it", where=where, got=f"{len(tensors)} tensors")
    return Shapes(str(where), parameters, {}, left_out)


def _folder(where: Path) -> Shapes:
    indices = sorted(where.glob("*.safetensors.index.json"))
    files = sorted(where.glob("*.safetensors"))
    if indices:
        index = next((path for path in indices if path.name == "model.safetensors.index.json"), indices[0])
        return _counted(where, _indexed(index))
    if files:
        tensors: dict[str, _Tensor] = {}
        for file in files:
            for name, tensor in _header(file).items():
                if name in tensors:
                    raise UserError("two files of the folder hold a tensor of one name", where=file, got=repr(name))
                tensors[name] = tensor
        return _counted(where, tensors)
    if (where / "config.json").exists():
        return _config(where / "config.json")
    raise UserError(
        "the folder has no shapes",
        where=where,
        expected="*.safetensors (with or without an index), or config.json",
        got=", ".join(sorted(path.name for path in where.iterdir())[:8]) or "nothing",
    )


def _indexed(index: Path) -> dict[str, _Tensor]:
    weights = _json(index).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise _damaged(index, "a weight_map of names to files", type(weights).__name__)
    headers: dict[str, dict[str, _Tensor]] = {}
    tensors: dict[str, _Tensor] = {}
    for name, file in weights.items():
        if file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise _damaged(index, "names of .safetensors files beside it", repr(file[:60]))
        if file not in headers:
            if not (index.parent / file).is_file():
                raise UserError("a file that the index names is missing", where=index, got=repr(file))
            headers[file] = _header(index.parent / file)
        if name not in headers[file]:
            raise _damaged(index, f"{name!r} in {file}", "no such tensor there")
        tensors[name] = headers[file][name]
    return tensors


# ----------------------------------------------------------------------------------------------- Hugging Face configs


class _Config:
    """A config.json whose numbers are checked as they are asked for."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.table = _json(where)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.table.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value <= 1 << 31:
            raise _damaged(self.where, f"{key}: a positive whole number", repr(value)[:60])
        return value

    def yes(self, key: str, default: bool) -> bool:
        value = self.table.get(key, default)
        if type(value) is not bool:
            raise _damaged(self.where, f"{key}: true or false", repr(value)[:60])
        return value

    def layers(self, key: str) -> range:
        number = self.whole(key)
        if number > LAYERS_LIMIT:
            raise _damaged(self.where, f"{key}: at most {LAYERS_LIMIT}", number)
        return range(number)


Named = Iterable[tuple[str, Shape]]


def _linear(name: str, out: int, into: int, bias: bool) -> Named:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _gated(config: _Config, *, kv_default: int | None, qkv_bias: bool, o_bias: bool, mlp_bias: bool) -> Named:
    """Yield the parameters of a model like llama: RMSNorm, grouped attention, gated MLP."""
    hidden, inner, words = config.whole("hidden_size"), config.whole("intermediate_size"), config.whole("vocab_size")
    heads = config.whole("num_attention_heads")
    groups = config.whole("num_key_value_heads", kv_default or heads)
    width = config.whole("head_dim", max(hidden // heads, 1))
    yield "model.embed_tokens.weight", (words, hidden)
    for layer in config.layers("num_hidden_layers"):
        block = f"model.layers.{layer}"
        yield from _linear(f"{block}.self_attn.q_proj", heads * width, hidden, qkv_bias)
        yield from _linear(f"{block}.self_attn.k_proj", groups * width, hidden, qkv_bias)
        yield from _linear(f"{block}.self_attn.v_proj", groups * width, hidden, qkv_bias)
        yield from _linear(f"{block}.self_attn.o_proj", hidden, heads * width, o_bias)
        yield from _linear(f"{block}.mlp.gate_proj", inner, hidden, mlp_bias)
        yield from _linear(f"{block}.mlp.up_proj", inner, hidden, mlp_bias)
        yield from _linear(f"{block}.mlp.down_proj", hidden, inner, mlp_bias)
        yield f"{block}.input_layernorm.weight", (hidden,)
        yield f"{block}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (words, hidden)


def _llama(config: _Config) -> Named:
    bias = config.yes("attention_bias", False)
    return _gated(config, kv_default=None, qkv_bias=bias, o_bias=bias, mlp_bias=config.yes("mlp_bias", False))


def _mistral(config: _Config) -> Named:
    return _gated(config, kv_default=8, qkv_bias=False, o_bias=False, mlp_bias=False)


def _qwen2(config: _Config) -> Named:
    return _gated(config, kv_default=32, qkv_bias=True, o_bias=False, mlp_bias=False)


def _gpt2(config: _Config) -> Named:
    hidden, words = config.whole("n_embd"), config.whole("vocab_size")
    inner = config.whole("n_inner", 4 * hidden)

    def projection(name: str, into: int, out: int) -> Named:  # stored the other way round than a Linear's
        yield f"{name}.weight", (into, out)
        yield f"{name}.bias", (out,)

    def norm(name: str) -> Named:
        yield f"{name}.weight", (hidden,)
        yield f"{name}.bias", (hidden,)

    yield "transformer.wte.weight", (words, hidden)
    yield "transformer.wpe.weight", (config.whole("n_positions"), hidden)
    for layer in config.layers("n_layer"):
        block = f"transformer.h.{layer}"
        yield from norm(f"{block}.ln_1")
        yield from projection(f"{block}.attn.c_attn", hidden, 3 * hidden)
        yield from projection(f"{block}.attn.c_proj", hidden, hidden)
        yield from norm(f"{block}.ln_2")
        yield from projection(f"{block}.mlp.c_fc", hidden, inner)
        yield from projection(f"{block}.mlp.c_proj", inner, hidden)
    yield from norm("transformer.ln_f")
    yield "lm_head.weight", (words, hidden)


class _Family(NamedTuple):
    parameters: Callable[[_Config], Named]
    architecture: str  # whose parameters these are
    embedding: str  # what a tied head shares
    tied: bool  # unless the config says
    linear: tuple[str, ...] = ("_proj.weight", "lm_head.weight")  # ends of the names of linear layers' weights


FAMILIES = {
    "llama": _Family(_llama, "LlamaForCausalLM", "model.embed_tokens.weight", False),
    "mistral": _Family(_mistral, "MistralForCausalLM", "model.embed_tokens.weight", False),
    "qwen2": _Family(_qwen2, "Qwen2ForCausalLM", "model.embed_tokens.weight", False),
    "gpt2": _Family(_gpt2, "GPT2LMHeadModel", "transformer.wte.weight", True, ("lm_head.weight",)),
}


def _config(where: Path) -> Shapes:
    config = _Config(where)
    kind = config.table.get("model_type")
    if config.table.get("quantization_config"):
        without = "one without quantization_config"
        raise UserError("a config with quantization_config has other parameters", where=where, instead=without)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    named = config.table.get("architectures") or [family.architecture if family else None]
    if family is None or named != [family.architecture] or config.table.get("add_cross_attention"):
        if isinstance(kind, str) and from_transformers.installed():
            found, tied, linear = from_transformers.tensors(where, config.table)
            return Shapes(str(where), found, tied, {}, linear)
        known = FAMILIES if family is None else [family.architecture]
        raise UserError(
            "no shapes are known for this model without transformers", where=where,
            got=f"model_type {kind!r}, {named[0]}"[:120],
            instead=f"{nearest(kind, known)}; pip install transformers; or a folder with its *.safetensors",
        )  # fmt: skip
    parameters = dict(family.parameters(config))
    ties = {}
    if config.yes("tie_word_embeddings", family.tied):
        ties["lm_head.weight"] = family.embedding
        del parameters["lm_head.weight"]
    linear = [name for name in parameters if name.endswith(family.linear)]
    return Shapes(str(where), parameters, ties, {}, linear)
