"""Units: the submodules whose parameters are gathered and released together, and how they are found.

Every managed parameter belongs to exactly one unit: the nearest one that encloses the first module that registers it.
A unit that uses another's parameter (a tied weight, a shared layer) *borrows* from that unit: opening the borrower
opens both. The root module is always a unit; it owns the parameters that no other unit owns.

A unit is one module, or, if a model has many small blocks, several neighbouring modules of one list. The forward of
each of these modules opens the unit.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import UserError, nearest
from ...layout.partition import AROUND, LARGE, joined, joined_name, plain_name
from ...layout.partition import matching as names_matching
from ...policies.layout import Layout
from .bucket import Bucket

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class Managed:
    """A parameter of the model: its names (several when tied), where it is registered first, its unit."""

    param: nn.Parameter
    names: list[str]
    owners: list[tuple[nn.Module, str]]
    unit: int
    dtype: torch.dtype = field(init=False)  # before it was sharded

    def __post_init__(self) -> None:
        self.dtype = self.param.dtype

    @property
    def name(self) -> str:
        return self.names[0]


def profiled(what: str, unit: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range of that name for `torch.profiler`'s traces; one that does nothing while no trace is taken."""
    if not torch._C._autograd._profiler_enabled():
        return contextlib.nullcontext()
    return torch.autograd.profiler.record_function(f"zeroshard: {what} {unit or 'root'}")


class Found(NamedTuple):
    """A unit's name and modules, each with its own name."""

    name: str
    modules: Sequence[tuple[str, nn.Module]]


@dataclass
class Unit:
    """Its modules, their buckets, and how many reasons there are right now to keep it open or gathered."""

    index: int
    name: str
    names: Sequence[str]  # of its modules
    modules: Sequence[nn.Module]
    recomputed: bool = False  # does backward run its module's forward again? (`Layout.recompute`)
    forward: Callable[..., Any] | None = None  # its module's own, where another was put in its place
    buckets: list[Bucket] = field(default_factory=list)
    borrows: list[Unit] = field(default_factory=list)
    open_calls: int = 0  # forwards of this unit (or a borrower) running now
    pinned: int = 0  # `with zero.gathered()` blocks that hold it
    touched: bool = False  # read outside its own forward: stays gathered until backward, or the forward, ends
    ahead: int = 0  # gathers launched by the gather order that no forward or backward has demanded yet
    calls: dict[nn.Module, int] = field(default_factory=dict)  # by module: forwards not yet matched by a backward

    @property
    def joined(self) -> bool:
        """True if it has several modules: then it stays gathered between their forwards."""
        return len(self.modules) > 1

    def called(self, module: nn.Module) -> None:
        self.calls[module] = self.calls.get(module, 0) + 1

    def backward_ended(self) -> None:
        self.calls = {module: calls - 1 for module, calls in self.calls.items() if calls > 1}

    @functools.cached_property
    def released(self) -> list[Bucket]:
        """The buckets that are gathered for use and released after it."""
        return [bucket for bucket in self.buckets if not bucket.resident]

    @property
    def ready(self) -> bool:
        return all(bucket.gathered.ready for bucket in self.buckets)

    def gather(self, *, wait: bool, ahead: bool = False) -> None:
        with profiled("gather", self.name):
            for bucket in self.released:
                work = bucket.gather(ahead=ahead)
                if wait:
                    work.wait()
                    bucket.users.filled()

    def claim(self) -> None:
        """Count prefetched memory as gathered from now on, because it is used."""
        for bucket in self.released:
            bucket.gathered.claim()

    def land(self) -> None:
        for bucket in self.buckets:
            bucket.land()

    def open(self) -> None:
        for bucket in self.buckets:
            bucket.open()

    def close(self) -> None:
        """Guard again, unless a running forward or a `gathered()` keeps it open."""
        if not (self.open_calls or self.pinned):
            for bucket in self.released:
                bucket.close()

    def release(self) -> None:
        """Give the memory back if there is no reason left to hold it."""
        if not (self.open_calls or self.pinned or self.touched or self.ahead):
            for bucket in self.released:
                bucket.close()
                bucket.release()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a model's parameters and then buffers, each once and as without `torch.compile`."""
    return ((plain_name(name), each) for name, each in (*model.named_parameters(), *model.named_buffers()))


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of all modules; names as without `torch.compile`, a compiled module before the original."""
    return [(plain_name(name), module) for name, module in model.named_modules()]


def _index_of(units: Sequence[Found]) -> dict[int, int]:
    """Return {id of a module: number of the unit that it is one of}."""
    return {id(module): at for at, unit in enumerate(units) for _, module in unit.modules}


def managed_parameters(model: nn.Module, units: Sequence[Found], layout: Layout) -> list[Managed]:
    """List every parameter once, in the order of registration, except the ignored ones."""
    index = _index_of(units)
    found: dict[int, Managed] = {}
    names: list[str] = []
    for path, module, unit in _walk("", model, 0, index):
        for name, param in module._parameters.items():
            names.append(full := plain_name(f"{path}.{name}" if path else name))
            if param is None or any(fnmatch.fnmatchcase(full, pattern) for pattern in layout.ignore):
                continue
            record = found.setdefault(id(param), Managed(param, [], [], unit))
            record.names.append(full)
            record.owners.append((module, name))
    for pattern in layout.ignore:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                "Layout.ignore matches no parameter", got=repr(pattern), instead=nearest(pattern, names[:40])
            )
    return list(found.values())


def matching(managed: list[Managed], patterns: Sequence[str], setting: str) -> set[str]:
    """Return the names of the parameters that a setting's patterns name. Raises `UserError` if one names none."""
    return names_matching({record.name: record.names for record in managed}, patterns, setting)


def borrowed(units: Sequence[Found], managed: list[Managed]) -> list[list[int]]:
    """Return for each unit the other units whose parameters its own modules use."""
    index = _index_of(units)
    owner = {id(record.param): record.unit for record in managed}
    result: list[list[int]] = []
    for i, found in enumerate(units):
        used = [
            owner.get(id(p))
            for path, root in found.modules
            for _, module, unit in _walk(path, root, i, index)
            if unit == i
            for p in module._parameters.values()
            if p is not None
        ]
        result.append(sorted({u for u in used if u is not None and u != i}))
    return result


def _walk(path: str, module: nn.Module, unit: int, index: dict[int, int]) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield (path, module, nearest enclosing unit) for each registration of each module, shared ones several times."""
    unit = index.get(id(module), unit)
    yield path, module, unit
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(f"{path}.{name}" if path else name, child, unit, index)


def find_units(model: nn.Module, layout: Layout) -> list[Found]:
    """Return every unit, the root first, then in the order of registration."""
    chosen = _automatic("", model) if layout.units is None else _chosen(model, layout)
    units: dict[int, tuple[str, nn.Module]] = {id(model): ("", model)}
    for name, module in chosen:
        units.setdefault(id(module), (plain_name(name), module))
    names = [name for name, _ in units.values() if name]
    for pattern in () if isinstance(layout.recompute, bool) else layout.recompute:
        if not fnmatch.filter(names, pattern):
            raise UserError("Layout.recompute matches no unit", got=repr(pattern), instead=nearest(pattern, names[:40]))
    _, *found = units.values()
    runs = [[number] for number in range(len(found))]
    if layout.units is None and not layout.recompute:  # patterns of `recompute` name single modules
        runs = joined(names, _numels(found))
    members = [[found[number] for number in run] for run in runs]
    return [Found("", [("", model)]), *(Found(joined_name([name for name, _ in run]), run) for run in members)]


def _numels(found: Sequence[tuple[str, nn.Module]]) -> list[int]:
    """Count the elements of each module's parameters; a shared parameter counts for the first module that has it."""
    seen: set[int] = set()
    numels = []
    for _, module in found:
        own = {id(param): param.numel() for param in module.parameters() if id(param) not in seen}
        seen |= own.keys()
        numels.append(sum(own.values()))
    return numels


def _chosen(model: nn.Module, layout: Layout) -> list[tuple[str, nn.Module]]:
    modules = named_modules(model)
    result = []
    assert layout.units is not None
    for wanted in layout.units:
        if isinstance(wanted, str):
            hits = [(n, m) for n, m in modules if fnmatch.fnmatchcase(n, wanted) or type(m).__name__ == wanted]
            hits = [*{n: (n, m) for n, m in reversed(hits)}.values()]  # of two with one name, the compiled one
        elif isinstance(wanted, type) and issubclass(wanted, nn.Module):
            hits = [(name, module) for name, module in modules if isinstance(module, wanted)]
        else:
            raise UserError(
                "Layout.units takes module names, patterns, module classes or their names",
                got=repr(wanted),
                instead='Layout(units=["blocks.*"])',
            )
        if not hits:
            hint = (
                nearest(
                    wanted, sorted({type(m).__name__ for _, m in modules}) + [name for name, _ in modules if name][:40]
                )
                if isinstance(wanted, str)
                else f"{wanted.__name__} is not among {sorted({type(m).__name__ for _, m in modules})}"
            )
            raise UserError("Layout.units matches no module", got=repr(wanted), instead=hint)
        for name, module in hits:
            if isinstance(module, torch.jit.ScriptModule):
                raise UserError(
                    "a script of torch's takes no hooks, and cannot be a unit",
                    got=repr(name),
                    instead="the module around it, in Layout(units=...)",
                )
        result += hits
    order = {id(module): i for i, (_, module) in enumerate(modules)}
    return sorted(result, key=lambda pair: order[id(pair[1])])


def _automatic(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find units: children of the outermost containers of blocks, and outside of these large subtrees."""
    result: list[tuple[str, nn.Module]] = []
    module = next((inner for each in AROUND if (inner := module._modules.get(each)) is not None), module)
    holds_blocks = isinstance(module, nn.ModuleList) or (
        isinstance(module, CONTAINERS) and not _contains(module, nn.ModuleList)
    )
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if not any(True for _ in child.parameters()) or isinstance(child, torch.jit.ScriptModule):
            continue  # a script takes no hooks: its parameters are of the unit around it
        if holds_blocks:
            result.append((full, child))
        elif isinstance(child, CONTAINERS) or _contains(child, CONTAINERS):
            result += _automatic(full, child)
        elif sum(param.numel() for param in child.parameters()) >= LARGE:
            result.append((full, child))
    return result


def _contains(module: nn.Module, kinds: type | tuple[type, ...]) -> bool:
    return any(isinstance(inner, kinds) for inner in module.modules() if inner is not module)


# --- modules built on the meta device -------------------------------------------------------------------------------


def on_meta(module: nn.Module) -> bool:
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


class Initialiser:
    """Gives first values to tensors that were on meta: by `init`, else by the module and then, if it can, its model.

    A Hugging Face model has an `_init_weights(module)` for all its modules; an inner model has one for its own.
    """

    def __init__(self, model: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
        self._init = init
        self._own: dict[int, Callable[[nn.Module], None]] = {}
        self._adapters: set[int] = set()  # PEFT's adapter modules: only the layer around them knows the first values
        for module in model.modules():  # the inner ones last
            for inner in (getattr(module, name, None) for name in getattr(module, "adapter_layer_names", ())):
                self._adapters |= set(map(id, inner.modules() if isinstance(inner, nn.Module) else ()))
            own: Any = getattr(module, "_init_weights", None)
            if callable(own) and len(inspect.signature(own).parameters) == 1:
                self._own |= dict.fromkeys(map(id, module.modules()), own)

    def knows(self, module: nn.Module) -> bool:
        if self._init is not None or id(module) in self._adapters:
            return self._init is not None
        return id(module) in self._own or hasattr(type(module), "reset_parameters")

    def __call__(self, module: nn.Module) -> None:
        if self._init is not None:
            return self._init(module)
        if hasattr(type(module), "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        if id(module) in self._own:
            self._own[id(module)](module)
        return None


def check_initialisers(modules: list[tuple[str, nn.Module]], init: Initialiser, fresh: set[int]) -> None:
    """Refuse, before anything is changed, a module with fresh tensors (by id) that does not say how to fill them."""
    seen: set[int] = set()
    for path, module in modules:
        own = {id(tensor) for tensor in _own_meta(module)} & fresh - seen
        seen |= own
        if own and not init.knows(module):
            raise UserError(
                "a module on the meta device does not say how to initialise itself",
                where=f"module {path!r} ({type(module).__name__})",
                expected="a reset_parameters() method",
                got="none",
                instead="shard(..., init=function_of_a_module)",
            )


def materialise(
    modules: list[tuple[str, nn.Module]],
    device: torch.device,
    init: Initialiser,
    memory: dict[int, Tensor],
    fresh: set[int],
) -> None:
    """Give the tensors of one unit's own modules real memory, and the `fresh` ones (ids) initial values.

    memory: by a parameter's id, the memory that it gets; other tensors get their own. The parameters stay the same
    Python objects, so ties and the user's optimizer survive. A module's tensors that are not fresh (a weight tied to an
    earlier module's, one loaded already, one that another rank sends) keep their values, but numbers are drawn for them
    too (`_standing_in`), so that each rank draws the same numbers, whatever it has.
    """
    for _, module in modules:
        own = _own_meta(module)
        if not own:
            continue
        recurrent = isinstance(module, nn.RNNBase)
        if recurrent:
            module._flat_weight_refs = []  # type: ignore[assignment]  # nothing with a weak reference can be swapped
        for tensor in own:
            given = memory.pop(id(tensor), None)
            # .data, because a parameter must not share the version counter of the storage it lies in.
            real = torch.empty_like(tensor, device=device) if given is None else given.data
            if isinstance(tensor, nn.Parameter):
                real = nn.Parameter(real, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, real)
        if mine := {id(tensor) for tensor in own} & fresh:
            with torch.no_grad(), _standing_in(module, mine, device):
                init(module)
        if recurrent:
            module._init_flat_weights()  # type: ignore[operator]


def units_named(
    model: nn.Module, managed: Sequence[Managed], units: Sequence[Unit], what: Sequence[nn.Module | str]
) -> list[Unit]:
    """Return the units of `what`: modules, parameters, or names (`*` matches anything) of these or of units; or all."""
    if not what:
        return list(units)
    joined = {unit.name: unit.index for unit in units if unit.joined}
    index = {id(record.param): record.unit for record in managed}
    names = {name: record.unit for record in managed for name in record.names}
    modules = dict(reversed(named_modules(model)))
    found: set[int] = set()
    for item in what:
        if isinstance(item, str):
            hits = {unit for name, unit in names.items() if fnmatch.fnmatchcase(name, item)}
            if item in joined:
                hits.add(joined[item])
            if item in modules:
                hits |= {index[id(param)] for param in modules[item].parameters() if id(param) in index}
            if not hits:
                instead = nearest(item, [*names, *modules])
                raise UserError("no parameter or module of that name", got=repr(item), instead=instead)
            found |= hits
        elif isinstance(item, nn.Module):
            found |= {index[id(param)] for param in item.parameters() if id(param) in index}
        elif isinstance(item, nn.Parameter) and id(item) in index:
            found.add(index[id(item)])
        else:
            instead = 'zero.gathered(model.head), or zero.gathered("head.weight")'
            raise UserError("gathered() takes modules and names", got=type(item).__name__, instead=instead)
    return [units[unit] for unit in sorted(found)]


@contextlib.contextmanager
def _standing_in(module: nn.Module, fresh: set[int], device: torch.device) -> Iterator[None]:
    """Hide tensors that keep their values behind throw-away ones of the same kind, while a module is initialised."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    hidden = [(t, name, x) for t in tables for name, x in t.items() if x is not None and id(x) not in fresh]
    for table, name, tensor in hidden:
        blank = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        table[name] = nn.Parameter(blank, tensor.requires_grad) if table is module._parameters else blank
    try:
        yield
    finally:
        for table, name, tensor in hidden:
            table[name] = tensor


def _own_meta(module: nn.Module) -> list[Tensor]:
    tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None and t.is_meta]
    return list({id(tensor): tensor for tensor in tensors}.values())
