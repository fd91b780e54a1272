"""The device that a model computes on: the only module that knows accelerators.

On the CPU a call returns when its work is done. An accelerator is *asynchronous*: the host queues kernels and runs
ahead of them, and reading a number waits until all that was queued before it has run. So the host reads a device's
numbers by `ask` and `equal` alone, which count their calls by caller.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from . import nvrtc

log = logging.getLogger("zeroshard")
CHUNK = 1 << 18  # elements for each thread of the CPU at a time: 1 MiB of scratch stays in its cache, and calls are few
_AT_ONCE = 1 << 24  # and on a device, where a launch costs more than memory: 64 MiB of scratch, no more for any bucket
_ALONE = 1 << 16  # words of 64 bits that one thread compares as fast as two

asked: Counter[str] = Counter()  # by module and function, how often the host has waited for a device's numbers


def asynchronous(device: torch.device) -> bool:
    """Tell if the host runs ahead of a device, so that a call may return before its work is done."""
    return device.type not in ("cpu", "meta")


def chunk(tensor: Tensor) -> int:
    """Return how many of a tensor's elements to handle at a time, by where it rests."""
    return min(CHUNK * torch.get_num_threads(), _AT_ONCE) if tensor.is_cpu else _AT_ONCE


def current(device: torch.device) -> torch.device:
    """Return the device with its index: that of the program's current device if none is given."""
    if device.index is not None or not asynchronous(device):
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def chosen(device: torch.device) -> torch.device:
    """Return the device, with its index, that a model is to rest on.

    Without an index it is the program's current device. But if that is device 0, as it is if the program chose none, it
    is `LOCAL_RANK`'s device, which becomes current, so that the program's `.to("cuda")` of batches goes there too.
    """
    found, local = current(device), os.environ.get("LOCAL_RANK", "")
    if device.index is not None or found.index != 0 or not local.isdecimal():
        return found
    module = torch.get_device_module(device)
    if 0 < int(local) < module.device_count():
        module.set_device(int(local))
    return current(device)


def lacking(device: torch.device) -> str:
    """Return why this machine has no such device to compute on; "" if it has it, or its kind does not tell."""
    kind = device.type
    module = _tried(lambda: torch.get_device_module(kind)) if asynchronous(device) else None
    if module is None:
        return ""
    if _tried(module.is_available) is False:
        return f"torch {torch.__version__} finds no {kind} device on this machine"
    count = _tried(lambda: int(module.device_count()))
    if count is not None and (device.index or 0) >= count:
        return f"{device} of {count}, which count from {kind}:0"
    return ""


def take_own(rank: int, ranks: int) -> None:
    """Make a local rank's own accelerator the current one, to which `.cuda()` goes; fewer devices are shared in turn.

    NCCL refuses two ranks of one host on one device. Then all ranks claim to be hosts of their own, and send
    through sockets: the bits are the same, the speed means nothing.
    """
    found = accelerators()
    if found and (own := found[rank % len(found)]).index:
        torch.get_device_module(own).set_device(own)
    if 0 < len(found) < ranks:
        os.environ["NCCL_HOSTID"] = f"rank {rank}"


@functools.cache
def warn_of_idle() -> None:
    """Warn once that a model is sharded on the CPU, unasked, though the machine has an accelerator."""
    if torch.accelerator.is_available() and (found := torch.accelerator.current_accelerator()) is not None:
        kind = found.type
        words = 'the model is on the CPU and trains there, and %s is idle: shard(..., device="%s"), then batch.to("%s")'
        log.warning(words, kind, kind, kind)


def describe(device: torch.device) -> dict[str, str]:
    """Describe what a device's arithmetic depends on beside the build of torch; {} for the CPU."""
    if not asynchronous(device):
        return {}
    module = torch.get_device_module(device)
    asked: dict[str, Callable[[], object]] = {
        "name": lambda: module.get_device_name(device),
        "capability": lambda: module.get_device_capability(device),
        "CUDA": lambda: torch.version.cuda,
        "HIP": lambda: torch.version.hip,
        "cuDNN": torch.backends.cudnn.version,
    }
    return {what: _told(ask) for what, ask in asked.items()} | flags()


def flags() -> dict[str, str]:
    """Describe the program's settings that change a device's arithmetic."""
    asked: dict[str, Callable[[], object]] = {
        "precision of fp32 products": torch.get_float32_matmul_precision,
        "precision of fp32 convolutions": lambda: torch.backends.cudnn.allow_tf32,
        "bf16 sums of bf16 products": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16 sums of fp16 products": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic convolutions": lambda: torch.backends.cudnn.deterministic,
        "convolutions by speed": lambda: torch.backends.cudnn.benchmark,
    }
    settings = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
    return {what: _told(ask) for what, ask in asked.items()} | {name: f"{os.environ.get(name)}" for name in settings}


def accelerators() -> list[torch.device]:
    """Return all devices of the kind that torch chooses as this machine's accelerator; [] if there is none."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [] if kind is None else [torch.device(kind.type, at) for at in range(torch.accelerator.device_count())]


def hardware(device: torch.device) -> dict[str, Any]:
    """Describe an accelerator: name, capability, bytes of memory in all and free; None for what its kind does not
    tell."""
    module = torch.get_device_module(device)
    free, total = _tried(lambda: module.mem_get_info(device)) or (None, None)
    return {
        "name": _tried(lambda: module.get_device_name(device)),
        "capability": _tried(lambda: [*module.get_device_capability(device)]),
        "memory": total,
        "free": free,
    }


def nccl() -> str | None:
    """Return the version of the NCCL that torch brings; None if it brings none."""
    version = _tried(torch.cuda.nccl.version)
    return None if version is None else ".".join(map(str, version))


def free(device: torch.device) -> int | None:
    """Return the bytes of a device's memory that nobody has taken; None if its kind does not tell."""
    found = _tried(lambda: torch.get_device_module(device).mem_get_info(device))
    return None if found is None else int(found[0])


def _of_nccl(channels: int) -> Any:
    options: Any = torch.distributed.ProcessGroupNCCL.Options()
    # NCCL gives point-to-point messages no more channels than that (`ncclTopoComputeP2pChannels` in its source). Its
    # variable NCCL_MAX_CTAS goes before this.
    options.config.max_ctas = channels
    return options


# By backend: the `pg_options` of a process group that uses at most so many channels.
limited: dict[str, Callable[[int], Any]] = {"nccl": _of_nccl}


_UNTOLD = (RuntimeError, AttributeError, AssertionError, TypeError)  # how builds say that they do not know


def _tried(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except _UNTOLD:
        return None


def _told(ask: Callable[[], object]) -> str:
    try:
        return f"{ask()}"
    except (RuntimeError, AttributeError) as error:  # if flags are set by old and new names, torch tells neither
        return type(error).__name__


def finish(device: torch.device) -> None:
    """Wait until a device has run all that was queued on it."""
    if asynchronous(device):
        torch.get_device_module(device).synchronize(device)


def blank(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised 1-D tensor. Every element that is read must be written first: deterministic algorithms do
    not fill it, as they fill the program's `torch.empty`, which on a device costs a kernel each."""
    settings: Any = torch.utils.deterministic
    if not (torch.are_deterministic_algorithms_enabled() and settings.fill_uninitialized_memory):
        return torch.empty(numel, dtype=dtype, device=device)
    settings.fill_uninitialized_memory = False
    try:
        return torch.empty(numel, dtype=dtype, device=device)
    finally:
        settings.fill_uninitialized_memory = True


def captured(device: torch.device) -> bool:
    """Tell if what this thread launches is being recorded, for a graph that runs it again without the host."""
    if not asynchronous(device):
        return False
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def divisor(number: float, like: Tensor) -> Tensor:
    """Put a divisor on the dividend's device: to divide by a Python number, CUDA multiplies by a rounded 1 / x."""
    return like.new_full((), number)


# --- what the host asks of it -----------------------------------------------------------------------------------------


def ask(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory: itself if it is on the CPU, else a copy, for which the host waits."""
    if tensor.is_cpu:
        return tensor
    _count(sys._getframe(1))
    return tensor.cpu()


def equal(a: Tensor, b: Tensor) -> bool:
    """Compare as `torch.equal` does, for which the host waits unless both are on the CPU.

    On the CPU all threads compare large flat int64 tensors; torch uses one thread.
    """
    if not a.is_cpu:
        _count(sys._getframe(1))
    elif (
        torch.get_num_threads() > 1
        and a.numel() > _ALONE
        and a.dtype == b.dtype == torch.int64
        and a.dim() == 1
        and a.shape == b.shape
        and b.is_cpu
    ):
        step = chunk(a) // 4
        return not any(torch.count_nonzero(x ^ y) for x, y in zip(a.split(step), b.split(step), strict=True))
    return torch.equal(a, b)


def _count(frame: Any) -> None:
    asked[f"{frame.f_globals['__name__'].removeprefix('zeroshard.')}.{frame.f_code.co_name}"] += 1


# --- kernels of our own -----------------------------------------------------------------------------------------------

# Launches a kernel: its name, the number of threads, arguments, and how many of them, the first ones, it writes.
Launcher = Callable[[str, int, Sequence[Any], int], None]
GROUP = 256  # threads that a device starts together


def architecture(device: torch.device) -> str:
    """Return what code is compiled for: "sm_90" for an H100."""
    if device.type != "cuda":
        return device.type
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _for_cuda(text: str, names: Sequence[str], device: torch.device) -> Launcher:
    from torch.cuda import _utils as utils

    with torch.cuda.device(device):
        image = nvrtc.compile_(utils._get_gpu_rtc_library(), text, "kernels", architecture(device))
        found: Any = utils._cuda_load_module(image, [*names])

    def launch(name: str, threads: int, arguments: Sequence[Any], writes: int) -> None:
        if threads:
            with torch.cuda.device(device):
                found[name](grid=(-(-threads // GROUP), 1, 1), block=(GROUP, 1, 1), args=[*arguments])

    return launch


compilers: dict[str, Callable[[str, Sequence[str], torch.device], Launcher]] = {"cuda": _for_cuda}


def compiled(text: str, names: Sequence[str], device: torch.device) -> Launcher:
    """Compile kernels in CUDA's language for a device. Raises RuntimeError or OSError where that cannot be done."""
    if device.type not in compilers:
        raise RuntimeError(f"there is no compiler for {device.type} devices")
    return compilers[device.type](text, names, device)


# --- streams and events -----------------------------------------------------------------------------------------------


@functools.cache
def streams(device: torch.device) -> bool:
    """Tell if a device has streams. The CPU and some accelerators have none: there one call follows another."""
    return asynchronous(device) and hasattr(torch.get_device_module(device), "current_stream")


class DeviceEvent:
    """A point in a stream. Without streams all that was called has happened: there is one event, and it is reached."""

    def wait(self, stream: Any = None) -> None:
        """Make what a stream, by default the current one, is given from now on run after this event."""

    def finish(self) -> None:
        """Let the host wait for this event, and for nothing after it."""

    def is_completed(self) -> bool:
        """Tell if it is reached."""
        return True


class _Recorded(DeviceEvent):
    """The event at the end of the stream that is current at construction."""

    def __init__(self, device: torch.device) -> None:
        self._module, self._device = torch.get_device_module(device), device
        self._event = self._module.Event()
        self._event.record(self._module.current_stream(device))

    def wait(self, stream: Any = None) -> None:
        (stream or self._module.current_stream(self._device)).wait_event(self._event)

    def finish(self) -> None:
        if not self.is_completed():
            waited[self._device.type] += 1
            self._event.synchronize()

    def is_completed(self) -> bool:
        return bool(self._event.query())


waited: Counter[str] = Counter()  # by the type of device, how often the host has waited for an event
_NOW = DeviceEvent()


def event(device: torch.device) -> DeviceEvent:
    """Return the event after all that the current stream was given so far."""
    return _Recorded(device) if streams(device) else _NOW


_sides: dict[tuple[str, torch.device], Any] = {}  # side streams, by name and device


def _stream(name: str, device: torch.device) -> Any:
    if (name, device) not in _sides:
        _sides[name, device] = torch.get_device_module(device).Stream(device=device)
    return _sides[name, device]


@contextlib.contextmanager
def behind(name: str, device: torch.device) -> Iterator[None]:
    """Launch what is inside on the side stream of that name, after all that the program has launched so far.

    Without streams it runs where it is called.
    """
    if not streams(device):
        yield
        return
    before, side = event(device), _stream(name, device)
    with torch.get_device_module(device).stream(side):
        before.wait()
        yield


TO_THE_DEVICE, TO_THE_HOST = "to the device", "to the host"  # streams of copies: a bus carries both ways at once


def sent(to: Tensor, values: Tensor) -> DeviceEvent:
    """Copy between pinned host memory and the device, on a side stream. Returns the event that ends the copy: until
    then do not write to either, do not drop `values` (but see `Leaving`), and do not read `to`."""
    device = values.device if to.is_cpu else to.device
    with behind(TO_THE_HOST if to.is_cpu else TO_THE_DEVICE, device):
        to.copy_(values, non_blocking=streams(device))
        return event(device)


def copies(device: torch.device) -> list[Any]:
    """Return an event at the end of all copies between pinned host memory and the device that were launched so far, for
    each stream that still has some. The host does not wait."""
    found = [_sides.get((name, device)) for name in (TO_THE_DEVICE, TO_THE_HOST)]
    return [side.record_event() for side in found if side is not None and not side.query()]


def at_the_end(device: torch.device) -> Callable[[], None]:
    """Return what to call before memory of the device goes that side streams may use still: it lets the streams that
    take that memory next, the current ones now and then, come after all side streams. The host does not wait."""
    if not streams(device):
        return lambda: None
    module = torch.get_device_module(device)
    home = module.current_stream(device)

    def end() -> None:
        if captured(device):  # the graph would have the wait in it
            return
        for (_, of), side in [*_sides.items()]:
            if of == device:
                home.wait_stream(side)
                module.current_stream(device).wait_stream(side)

    return end


class Leaving:
    """Memory of the device that is copied to the host behind the program: the latest few pieces.

    An older piece is dropped, and the stream that took it comes after its copy from then on: so the allocator gives
    that memory again in the stream's order. `record_stream` would keep it from being given while the host leads.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pieces: deque[tuple[Tensor, DeviceEvent, Any]] = deque()

    def keep(self, values: Tensor, through: DeviceEvent) -> None:
        """Keep `values`, which the current stream took, until their copy is through."""
        here = streams(values.device)
        stream = torch.get_device_module(values.device).current_stream(values.device) if here else None
        self._pieces.append((values, through, stream))
        while len(self._pieces) > self._most:
            oldest, through, stream = self._pieces.popleft()
            through.wait(stream)
            del oldest


class Users:
    """The streams that use one piece of memory, if its device has streams: each runs after the writes to the memory,
    and its next use for something else runs after all of them."""

    def begin(self, *, fresh: bool) -> None:
        """Let the current stream write after all streams that used the memory. fresh: it has just taken this memory."""

    def filled(self) -> None:
        """Note that the current stream was told to write."""

    def join(self) -> None:
        """Let the current stream use the memory, after what was written."""

    @contextlib.contextmanager
    def end(self) -> Iterator[None]:
        """Give the memory back inside, and write what all such memory shares: always in one stream."""
        yield


class _Streams(Users):
    def __init__(self, device: torch.device) -> None:
        self._module, self._device = torch.get_device_module(device), device
        self._first = self._home = self._current()  # the streams of construction, and of taking the memory
        self._used = {self._first}
        self._filled, self._after = event(device), {self._first}  # and streams that run after the last write

    def _current(self) -> Any:
        return self._module.current_stream(self._device)

    def begin(self, *, fresh: bool) -> None:
        current = self._current()
        if fresh:
            self._home, self._used = current, set()
        self._follow(current)

    def _follow(self, stream: Any) -> None:
        for other in self._used - {stream}:
            stream.wait_stream(other)

    def filled(self) -> None:
        current = self._current()
        self._filled, self._after = event(self._device), {current}
        self._used.add(current)

    def join(self) -> None:
        current = self._current()
        if current not in self._after:
            self._filled.wait()
            self._after.add(current)
            self._used.add(current)

    @contextlib.contextmanager
    def end(self) -> Iterator[None]:
        self._follow(self._home)
        with self._module.stream(self._first):
            yield


def users(device: torch.device) -> Users:
    """Return the `Users` of memory that the current stream has written."""
    return _Streams(device) if streams(device) else Users()


# --- host memory ------------------------------------------------------------------------------------------------------


def pin(memory: Tensor, device: torch.device) -> Callable[[], Any] | None:
    """Pin pages of host memory, so that a device copies from and to them by itself.

    Returns a function that unpins them; None if the device has no need of it, or its kind knows no such thing.
    """
    cudart = getattr(torch.get_device_module(device), "cudart", None) if asynchronous(device) else None
    if cudart is None:
        return None
    library: Any = cudart()
    address, nbytes = memory.data_ptr(), memory.numel() * memory.itemsize
    if failed := int(library.cudaHostRegister(address, nbytes, 0)):
        raise MemoryError(f"{nbytes:,} bytes of host memory could not be pinned: error {failed}")
    return lambda: library.cudaHostUnregister(address)


# --- random numbers ---------------------------------------------------------------------------------------------------


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of the device's own random generator; None if it has none but the CPU's."""
    return torch.get_device_module(device).get_rng_state(device) if asynchronous(device) else None


def set_random_state(device: torch.device, state: Tensor) -> None:
    torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Restore the random generators of the CPU and the device afterwards, whatever is drawn or seeded inside."""
    used = device if asynchronous(device) else torch.accelerator.current_accelerator()
    if used is None or not torch.get_device_module(used).is_initialized():
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[current(used).index], device_type=used.type):
            yield
