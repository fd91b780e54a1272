"""`Zero.replay`: now and then a micro-batch is computed again on another rank, and a difference names the rank.

Gradients do not depend on the rank that computes them. So where two ranks get different bits from one micro-batch, one
of them computes wrongly, without an error: silent data corruption. A third rank's result says which.

    1  every rank computes its own micro-batch, as always; gradients are digested as they appear
    2  every rank computes another rank's micro-batch (`assigned`), with that rank's random numbers and buffers; its
       gradients are digested and dropped, as for a rank that `Zero.join` keeps in step
    3  the ranks compare digests. Each micro-batch whose digests differ is computed by one more rank (2, once more)
    4  a result that two ranks got is right (`right`); a rank that got another is named, unless most ranks would be

Every rank computes in 2 and 3, since gathers at stage 3 need all ranks. With more than `MOST` ranks only `MOST`
micro-batches travel, from other ranks each time, and several ranks compute each.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..arithmetic.digests import fingerprint, raw
from ..arithmetic.sums import as_bytes, dense, write_bytes
from ..comm.all_or_none import problem_of
from ..device import ask, describe, flags, hardware
from ..engine.gradients.sharded_grad import ShardedGrad
from ..errors import CorruptionError, PeerError, UserError
from ..hooks import Feature
from ..policies.incompatible import refuse
from ..rng import parsed_rng, restore_rng, rng_states

if TYPE_CHECKING:
    from ..engine.engine import Engine

MOST = 8  # micro-batches that are computed again in one replay
PIECES = 256  # of a tensor, each with a digest of its own
_WORDS = 1 << 22  # of 16 bits, that a device weighs at a time
_ODD = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
_ALIGNED = 64  # bytes: addresses are kept modulo this, which some kernels look at


class Suspect(NamedTuple):
    """A rank that may have computed wrongly, and where it runs."""

    rank: int
    host: str
    device: str

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, {self.device})"


class Corruption(NamedTuple):
    """One micro-batch for which a rank got other bits than the other ranks.

    step: from 1. owner: the rank whose micro-batch it was. suspects: the rank that is wrong; several where that cannot
        be told, because no two agree, or because more than half of all ranks would be wrong.
    spoiled: True if the training's gradients are wrong (or may be, with several suspects); else only the replay's were.
    parameter: the first, in the engine's order, whose gradient differs; else a buffer, or another product in words.
    elements: its flat range [first, end) in which the first difference lies.
    others: how many more of parameters and buffers differ.
    """

    step: int
    owner: int
    suspects: tuple[Suspect, ...]
    spoiled: bool
    parameter: str
    elements: tuple[int, int]
    others: int

    @property
    def rank(self) -> int:
        """The rank that computed wrongly; -1 if that cannot be told between several."""
        return self.suspects[0].rank if len(self.suspects) == 1 else -1

    def __str__(self) -> str:
        who = " or ".join(map(str, self.suspects))
        first, last = self.elements
        where = f"{self.parameter}, elements {first:,} to {last - 1:,}" if last else self.parameter
        more = f" and {self.others} more" if self.others else ""
        return f"{who}, in {where}{more}, of rank {self.owner}'s micro-batch in step {self.step}"


# --- who computes what ------------------------------------------------------------------------------------------------


def subjects(ranks: int, number: int) -> list[int]:
    """Return the ranks whose micro-batches are computed again in a replay of this number."""
    return [(number * MOST + at) % ranks for at in range(min(ranks, MOST))]


def assigned(rank: int, ranks: int, number: int, turn: int) -> int:
    """Return whose micro-batch a rank computes in a replay. turn: 0, or 1 where results of the first one differ.

    It is another rank's, and a different one in each turn, if there are enough ranks; else its own. Pairs of ranks
    change from replay to replay.
    """
    whose = subjects(ranks, number)
    others = len(whose) - 1
    away = 1 + (number + turn) % others if others > turn else 0
    return whose[((rank - whose[0]) % ranks + away) % len(whose)]


def right(found: Sequence[tuple[int, str]]) -> str | None:
    """Return the digest that most ranks got, if two or more did; else None. found: (rank, digest) of each."""
    who: dict[str, set[int]] = defaultdict(set)
    for rank, digest in found:
        who[digest].add(rank)
    most = max(len(ranks) for ranks in who.values())
    best = [digest for digest, ranks in who.items() if len(ranks) == most]
    return best[0] if most > 1 and len(best) == 1 else None


# --- digests ----------------------------------------------------------------------------------------------------------


def piece(numel: int) -> int:
    """Return how many elements of a tensor share a digest."""
    return max(-(-numel // PIECES), 1)


def digests(tensor: Tensor) -> Tensor:
    """Return `PIECES` digests of a dense tensor, int64, on its device; 0 for pieces that it does not have."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    found = torch.zeros(PIECES, dtype=torch.int64, device=flat.device)
    if not flat.numel():
        return found
    each = piece(flat.numel())
    if flat.is_cpu:
        told = [cast(bytes, fingerprint(part)) for part in flat.split(each)]
        numbers = [int.from_bytes(one[:8], "little", signed=True) for one in told]
        found[: len(told)] = torch.tensor(numbers, device="cpu")
        return found
    words = flat.view(torch.uint8).to(torch.int16) if flat.itemsize == 1 else flat.view(torch.int16)
    wide = each * (words.numel() // flat.numel())
    whole = words.numel() // wide
    found[:whole] = _weighed(words[: whole * wide].view(whole, wide))
    if whole * wide < words.numel():
        found[whole] = _weighed(words[whole * wide :].view(1, -1))[0]
    return found


def _weighed(words: Tensor) -> Tensor:
    """Return a sum of each row's words by odd weights, modulo 2^64: one word that differs always shows in it."""
    rows, wide = words.shape
    total = torch.zeros(rows, dtype=torch.int64, device=words.device)
    for low in range(0, wide, _WORDS):
        weights = torch.arange(low, min(low + _WORDS, wide), device=words.device) * _ODD[0]
        weights = (weights ^ (weights >> 31)) * _ODD[1] | 1
        step = max(_WORDS // weights.numel(), 1)
        for at in range(0, rows, step):
            part = words[at : at + step, low : low + _WORDS]
            total[at : at + step] += (part.to(torch.int64) * weights).sum(1)
    return total


@contextlib.contextmanager
def _watching(entries: Sequence[Any]) -> Iterator[dict[int, Tensor]]:
    """Digest each gradient as autograd leaves it, by its parameter's number, before anything else takes it."""
    seen: dict[int, Tensor] = {}
    handles = []

    def note(number: int, param: nn.Parameter) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad
            if grad is None or isinstance(grad, ShardedGrad) or grad.layout is not torch.strided:
                return
            with torch.no_grad():
                found = digests(grad)
                seen[number] = seen[number] * _ODD[0] + found if number in seen else found

    try:
        with torch._C.DisableTorchFunctionSubclass():
            for entry in entries:
                if entry.param.requires_grad:
                    handles.append(entry.param.register_post_accumulate_grad_hook(partial(note, entry.number)))
                    hooks = entry.param._post_accumulate_grad_hooks
                    for other in [each for each in hooks if each != handles[-1].id]:
                        hooks[other] = hooks.pop(other)  # autograd would not see `move_to_end`
        yield seen
    finally:
        for handle in handles:
            handle.remove()


# --- what a micro-batch is computed from ------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A buffer of the model, and its content at a moment."""

    name: str
    among: dict[str, Any]  # the module's
    key: str
    tensor: Tensor
    content: Tensor


def _buffers(model: nn.Module) -> list[_Place]:
    with torch.no_grad():
        return [
            _Place(f"{prefix}.{key}".lstrip("."), module._buffers, key, tensor, as_bytes(tensor).clone())
            for prefix, module in model.named_modules()
            for key, tensor in module._buffers.items()
            if isinstance(tensor, Tensor) and dense(tensor) and not tensor.is_meta
        ]


def _put_back(places: Sequence[_Place]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for place in places:
            place.among[place.key] = place.tensor
            write_bytes(place.tensor, place.content)


def _take(places: Sequence[_Place], given: dict[str, Tensor]) -> None:
    """Give a model the buffers of another rank. `_put_back` ends that."""
    with torch.inference_mode(False), torch.no_grad():
        for place in places:
            other = given.get(place.name)
            if other is not None and (other.shape, other.dtype) == (place.tensor.shape, place.tensor.dtype):
                write_bytes(place.tensor, as_bytes(other))
            elif other is not None:
                place.among[place.key] = other


def pack(given: dict[str, Any], device: torch.device) -> Tensor:
    """Write nested dicts, lists and tuples of tensors, numbers and text as bytes: 1-D uint8, on the CPU.

    Tensors keep their strides, and where their memory begins in a line of the cache: some kernels look at that. Raises
    `UserError`, with the place, for anything else.
    """
    parts: list[memoryview] = []
    told = ["dict", [[name, _written(each, name, parts, device)] for name, each in given.items()]]
    head = json.dumps(told).encode()
    whole = b"".join([len(head).to_bytes(8, "little"), head, *parts])
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def _written(given: Any, where: str, parts: list[memoryview], device: torch.device) -> list[Any]:
    if given is None or type(given) in (bool, int, float, str):
        return ["value", given]
    if type(given) in (list, tuple):
        kind = type(given).__name__
        return [kind, [_written(each, f"{where}[{at}]", parts, device) for at, each in enumerate(given)]]
    if type(given) is dict and all(type(key) in (str, int) for key in given):
        return ["dict", [[key, _written(each, f"{where}[{key!r}]", parts, device)] for key, each in given.items()]]
    if isinstance(given, Tensor) and dense(given) and given.device.type in ("cpu", device.type):
        tensor = given.detach().resolve_conj().resolve_neg()
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
        with torch.no_grad():
            run = tensor.as_strided((span,), (1,), tensor.storage_offset()).cpu()
        parts.append(raw(run))
        begins = tensor.data_ptr() % _ALIGNED // tensor.itemsize
        dtype = str(tensor.dtype).removeprefix("torch.")
        facts = [[*tensor.shape], [*tensor.stride()], begins, span, dtype, given.is_cpu, given.requires_grad]
        return ["tensor", facts]
    got = f"{type(given).__module__}.{type(given).__qualname__}"
    if isinstance(given, Tensor):
        got = f"a tensor of {given.layout} on {given.device}"
    raise UserError(
        "zero.replay(...) sends micro-batches to other ranks, and cannot send this",
        where=f"{where} of its arguments",
        expected="dicts (of text or whole numbers), lists and tuples of dense tensors, numbers, text and None",
        got=got,
        instead="dict(batch) of what is like one; what is the same for every micro-batch belongs into the function",
    )


def unpack(message: Tensor, device: torch.device) -> Any:
    """Read what `pack` wrote, with a device's tensors on this rank's."""
    length = int.from_bytes(raw(message[:8]), "little")
    at = [8 + length]

    def read(node: list[Any]) -> Any:
        kind, told = node
        if kind == "value":
            return told
        if kind == "dict":
            return {key: read(each) for key, each in told}
        if kind != "tensor":
            return (list if kind == "list" else tuple)(read(each) for each in told)
        shape, strides, begins, span, name, on_cpu, wants = told
        dtype: torch.dtype = getattr(torch, name)
        memory = torch.empty(begins + span, dtype=dtype, device="cpu" if on_cpu else device)
        nbytes = span * dtype.itemsize
        memory[begins:].copy_(message[at[0] : at[0] + nbytes].clone().view(dtype))
        at[0] += nbytes
        return memory.as_strided(shape, strides, begins).requires_grad_(wants)

    return read(json.loads(bytes(raw(message[8 : 8 + length]))))


# --- the replay -------------------------------------------------------------------------------------------------------


class Replay:
    """A function of a micro-batch that does forward and backward, of whose calls one in `every` is checked.

    every: the same on every rank, or all raise at the next call that is due on any. calls: made so far. replays: how
    many of these were checked; fewer on a rank that an interrupt kept from one. found: all that was found, oldest
    first; the same on every rank.
    """

    def __init__(self, engine: Engine, work: Callable[..., Any], every: int) -> None:
        group = engine.group
        refuse(engine.asked._replace(replay=True, tensor_parallel=group.sources != group.ranks))
        if not callable(work) or type(every) is not int or every < 1:
            raise UserError(
                "zero.replay(...) takes a function that does forward and backward, and how many of its calls share one "
                "replay",
                got=f"{work!r}, every={every!r}",
                instead="zero.replay(forward_backward, every=1000)",
            )
        self.every = every
        self.calls = self.replays = 0
        self.found: list[Corruption] = []
        self._engine, self._work = engine, work

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a micro-batch of this rank, and return what the function returns. Raises `CorruptionError` on every
        rank if this call is replayed and ranks get different bits."""
        due = self.calls % self.every == 0
        self.calls += 1
        if not due:
            return self._work(*args, **kwargs)
        engine, group = self._engine, self._engine.group
        engine.refuse_within()
        message, wrong = None, None
        before, steps = _buffers(engine.model), group.progress.steps
        try:
            told = {"args": args, "kwargs": kwargs, "drawn": rng_states(group.device), "buffers": self._sent(before)}
            message = pack(told, group.device)
        except UserError as error:  # raised once the other ranks hear of it
            wrong = error
        result, own, received = self._compute(args, kwargs)
        if wrong is None and group.progress.steps != steps:
            wrong = _refused("makes a step of the optimizer, which every computation of a micro-batch would make again")
        if wrong is None and not received:
            wrong = _refused("leaves no gradient: it has to call backward(), too")
        group.same("zero.replay(...)", partial(self._told, wrong))
        assert message is not None
        after, state = _buffers(engine.model), parsed_rng(rng_states(group.device), group.device)
        try:
            found = self._checked(message, own, before)
        finally:
            _put_back(after)
            restore_rng(state, group.device)
        self.replays += 1
        if found:
            self.found += found
            raise _error(found, group.ranks)
        return result

    def _told(self, wrong: UserError | None) -> dict[str, Any]:
        """Return what must be equal on all ranks, since bits depend on it."""
        if wrong is not None:
            raise wrong
        device = self._engine.group.device
        cpu = {"kernels": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
        computes = {"torch": torch.__version__} | (describe(device) or cpu | flags())
        return {"every": self.every, "calls so far": self.calls, "what computes": computes}

    def _sent(self, before: Sequence[_Place]) -> dict[str, Tensor] | None:
        """Return the buffers that travel: those that no forward will make equal on all ranks."""
        if self._engine.layout.buffers != "local" and self._engine.model.training:
            return None
        return {place.name: place.content.view(place.tensor.dtype).view(place.tensor.shape) for place in before}

    # --- computing --------------------------------------------------------------------------------------------------

    def _compute(self, args: Any, kwargs: Any) -> tuple[Any, Tensor, bool]:
        """Return what the function returns, digests of all that it leaves (a row each), and if it leaves gradients."""
        engine = self._engine
        entries = engine.gradients.entries
        with _watching(entries) as seen:
            result = self._work(*args, **kwargs)
        device = engine.group.device
        places = _buffers(engine.model)
        table = torch.zeros(len(entries) + len(places) + 2, PIECES, dtype=torch.int64, device=device)
        with torch.no_grad():
            for number, found in seen.items():
                table[number] = found
            for row, place in enumerate(places, len(entries)):
                table[row] = digests(place.content)
            for leaf in tree_leaves(result):
                if isinstance(leaf, (Tensor, bool, int, float)):
                    value = leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, device="cpu")
                    table[-2] = table[-2] * _ODD[0] + digests(value).to(device)
            drawn = json.dumps(rng_states(device)).encode()
            table[-1] = digests(torch.frombuffer(bytearray(drawn), dtype=torch.uint8)).to(device)
        return result, ask(table), bool(seen)

    def _again(self, message: Tensor, before: Sequence[_Place]) -> Tensor:
        """Compute a micro-batch that was sent, and drop its gradients. Returns digests as `_compute` does."""
        engine = self._engine
        args, kwargs, drawn, buffers = unpack(message, engine.group.device).values()
        _put_back(before)
        _take(before, buffers or {})
        restore_rng(parsed_rng(drawn, engine.group.device), engine.group.device)
        reduction, backward = engine.reduction, engine.schedule.backward
        kept = reduction.subscribers, reduction.silent, backward.was_local
        order, reduction.subscribers, reduction.silent = reduction.order, [], True
        try:
            # Sums that no_sync has kept stay where they are, and a norm that was computed stays true.
            with backward.holding_back(), engine.gradients.keeping_answers():
                _, table, _ = self._compute(args, kwargs)
        finally:
            reduction.subscribers, reduction.silent, backward.was_local = kept
        reduction.order = order
        return table

    def _all_again(self, turn: int, tables: dict[int, Tensor], again: Callable[[], Tensor]) -> list[list[str]]:
        """Compute again on all ranks, or raise on all. Returns each rank's digests: of training and each turn."""
        group, failed = self._engine.group, None
        try:
            tables[turn] = again()
        except PeerError:  # which all ranks have
            raise
        except Exception as error:  # the others wait for this rank, in that forward or after it
            failed = error
            group.progress.trouble = f"a replay raised {problem_of(error)}"
            schedule = self._engine.schedule
            if schedule.backward.begun and not schedule.backward.running():
                group.level(group.progress.trouble)  # others wait inside that backward, not for the message after it
                raise
        mine = [_digest(table) for table in tables.values()]
        try:
            told = group.describe([None if failed is None else group.progress.trouble, mine])
        except PeerError as error:
            raise (failed or error) from error
        if failed is not None:
            raise failed
        if wrong := [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(told) if problem]:
            raise PeerError("another rank could not replay", got="; ".join(wrong), instead="fix that")
        return [digests_of for _, digests_of in told]

    # --- comparing --------------------------------------------------------------------------------------------------

    def _checked(self, message: Tensor, own: Tensor, before: Sequence[_Place]) -> list[Corruption]:
        """Replay, and return what was found, the same on every rank."""
        group = self._engine.group
        number = (self.calls - 1) // self.every  # made of numbers that all ranks have compared, unlike `replays`
        with group.as_one():
            polled = group.poll("replaying", group.number("replay"), message.numel())
            sizes = [size for (size,) in polled] * (group.ranks // len(polled))
        whose = subjects(group.ranks, number)
        tables = {-1: own}
        # By owner: (rank, turn, digest) of each computation of its micro-batch; turn -1 is the training's own.
        results: dict[int, list[tuple[int, int, str]]] = {owner: [] for owner in whose}
        given, disputed = message, whose
        for turn in (0, 1):
            mine = assigned(group.rank, group.ranks, number, turn)
            with group.as_one():
                for owner in disputed:
                    room = torch.empty(sizes[owner], dtype=torch.uint8, device=message.device)
                    came = message if owner == group.rank else room
                    group.broadcast(came, owner)
                    given = came if owner == mine else given
            told = self._all_again(turn, tables, partial(self._again, given, before))
            for rank, digests_of in enumerate(told):
                if not turn and rank in results:
                    results[rank].append((rank, -1, digests_of[0]))
                owner = assigned(rank, group.ranks, number, turn)
                if owner in disputed:
                    results[owner].append((rank, turn, digests_of[-1]))
            disputed = [owner for owner in whose if len({digest for *_, digest in results[owner]}) > 1]
            if not disputed:
                return []
        return self._named({owner: results[owner] for owner in disputed}, tables)

    def _named(self, results: dict[int, list[tuple[int, int, str]]], tables: dict[int, Tensor]) -> list[Corruption]:
        """Say of each micro-batch with several results who is wrong, and where."""
        group, found = self._engine.group, []
        device = group.device
        name = None if device.type == "cpu" else hardware(device)["name"]
        told = group.describe([socket.gethostname(), f"{device}{f' {name}' if name else ''}"])
        machines = [Suspect(rank, *each) for rank, each in enumerate(told)]
        good = {owner: right([(rank, digest) for rank, _, digest in each]) for owner, each in results.items()}
        wrong = {
            rank for owner, each in results.items() for rank, _, digest in each if good[owner] not in (None, digest)
        }
        if group.ranks > 1 and 2 * len(wrong) > group.ranks:  # rather than most machines, the function is at fault
            good = dict.fromkeys(good)
        for owner, computed in results.items():
            agreed, everyone = good[owner], sorted({rank for rank, *_ in computed})
            one = next(each for each in computed if agreed in (None, each[2]))
            others = [each for each in computed if each[2] != one[2]]
            for other in others if agreed else others[:1]:
                place = self._place(self._everyones(one, tables), self._everyones(other, tables))
                suspects = tuple(machines[rank] for rank in ([other[0]] if agreed else everyone))
                spoiled = not agreed or other[1] < 0
                found.append(Corruption(group.progress.steps + 1, owner, suspects, spoiled, *place))
        return found

    def _everyones(self, computed: tuple[int, int, str], tables: dict[int, Tensor]) -> Tensor:
        """Send the digests of one computation from the rank that has made it to all."""
        rank, turn, _ = computed
        table = tables[turn].clone()
        self._engine.group.broadcast(table, rank)
        return table

    def _place(self, good: Tensor, bad: Tensor) -> tuple[str, tuple[int, int], int]:
        """Return what differs first, in which of its elements, and how many others do."""
        entries = self._engine.gradients.entries
        differ = (good != bad).any(1).nonzero().flatten().tolist()
        row, places = differ[0], len(good) - 2
        others = sum(each < places for each in differ[1:])
        if row >= places:
            words = "what the function returned" if row == places else "the state of random numbers afterwards"
            return words, (0, 0), others
        if row < len(entries):
            slot = entries[row].slot
            name, numel = f"the gradient of {slot.name!r}", slot.numel
        else:
            place = _buffers(self._engine.model)[row - len(entries)]
            name, numel = f"buffer {place.name!r}", place.tensor.numel()
        each = piece(numel)
        first = int((good[row] != bad[row]).nonzero()[0]) * each
        return name, (first, min(first + each, numel)), others


def _digest(table: Tensor) -> str:
    return cast(bytes, fingerprint(table)).hex()


def _refused(what: str) -> UserError:
    return UserError(
        f"the function that zero.replay(...) was given {what}",
        expected="forward and backward of one micro-batch",
        instead="step = zero.replay(forward_backward); loss = step(batch); optimizer.step()",
    )


def _error(found: list[Corruption], ranks: int) -> CorruptionError:
    named = ", ".join(f"{rank}" for rank in sorted({each.rank for each in found if each.rank >= 0}))
    again = "optimizer.zero_grad(), and this step again"
    instead = again if any(each.spoiled for each in found) else "go on with this step: only its replay was wrong"
    if ranks == 1:
        what = "this rank got different bits of a micro-batch when it computed it again"
    elif named:
        what = f"rank {named} computes wrongly: two other ranks got the same bits of a micro-batch, and it did not"
        instead += ", without that machine; what it trained since the replay before is to be doubted"
    else:
        what = "ranks got different bits of a micro-batch, and which of them is wrong cannot be told"
    if not named or ranks == 1:
        instead += (
            ". Where it comes at once, on machines that are sound, the function is not deterministic, or depends on "
            "the rank: torch.use_deterministic_algorithms(True), and no zero.rank inside"
        )
    error = CorruptionError(what, where="; ".join(map(str, found)), instead=instead)
    error.found = found
    return error


class ReplayFeature(Feature):
    name = "replays against silent data corruption"
    page = "replay.md"

    def replay(self, engine: Engine, work: Callable[..., Any], every: int) -> Replay:
        engine.schedule.recover()
        return Replay(engine, work, every)


FEATURE = ReplayFeature()
