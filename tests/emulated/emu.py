"""`torch.emu`: what `torch.cuda` is to a program, for the emulated device.

side = torch.emu.Stream("copies")
with torch.emu.stream(side):
    there = host.to("emu", non_blocking=True)
torch.emu.current_stream().wait_stream(side)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from .device import device as _device
from .streams import Mark, Queue, drained


class Stream(torch.Stream):
    """Runs its kernels one after the other, and late."""

    def __new__(cls, name: str = "", *, priority: int = 0, device: Any = None, number: int | None = None) -> Stream:
        """number: of a stream that there is."""
        machine = _device().machine
        if number is None:
            number = machine.queue(name or f"stream {len(machine.queues)}", device=_index(device)).number
        return super().__new__(cls, stream_id=number, device_index=machine.queues[number].device, device_type=_TYPE)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def queue(self) -> Queue:
        return _device().machine.queues[self.stream_id]

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return _query(self.queue.end())

    def synchronize(self) -> None:
        drained("stream.synchronize")
        _device().wait_for(self.queue.end())

    def __repr__(self) -> str:
        return f"<torch.emu.Stream {self.queue.name!r}>"


class Event:
    """A point in a stream. One that was never recorded is reached, as in CUDA."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.mark: Mark | None = None
        self._recorded = 0.0

    def record(self, stream: Stream | None = None) -> None:
        made, self._recorded = _device(), time.monotonic()
        with made.machine.lock:
            made.settle()
            self.mark = (made.stream_of(made.index) if stream is None else stream.queue).end()

    def wait(self, stream: Stream | None = None) -> None:
        if self.mark is not None:
            wait_for(current_stream().queue if stream is None else stream.queue, self.mark)

    def query(self) -> bool:
        return self.mark is None or _query(self.mark)

    def synchronize(self) -> None:
        if self.mark is not None:
            drained("event.synchronize")
            _device().wait_for(self.mark)

    def elapsed_time(self, other: Event) -> float:
        """Between the two records on the host: the device has no clock of its own."""
        return 1e3 * (other._recorded - self._recorded)


def _query(mark: Mark) -> bool:
    return _device().query(mark)


def wait_for(queue: Queue, mark: Mark) -> None:
    """Let a stream wait for a point in another one."""
    _device().wait_on(queue, mark)


_TYPE = 20  # c10::DeviceType::PrivateUse1


def _index(device: Any) -> int:
    """The index of a device; without one, of this thread's current device."""
    found = device if isinstance(device, int) or device is None else torch.device(device).index
    return _device().index if found is None else int(found)


def current_stream(device: Any = None) -> Stream:
    return Stream(number=_device().stream_of(_index(device)).number)


def default_stream(device: Any = None) -> Stream:
    return Stream(number=_device().defaults[_index(device)].number)


def set_stream(stream: Stream) -> None:
    _device().index = stream.queue.device
    _device().enter(stream.queue)


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Kernels that this thread launches on its device inside go to this stream; that device is current, too."""
    made = _device()
    if stream is None:
        yield
        return
    index, before = made.index, made.stream_of(stream.queue.device)
    made.index = stream.queue.device
    made.enter(stream.queue)
    try:
        yield
    finally:
        made.enter(before)
        made.index = index


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """As inside `torch.cuda.graph`: this thread's launches count as captured, and the host may wait for nothing. What is
    launched runs, late as always, and is not kept to be run again."""
    made = _device()
    made.capturing = made.current
    try:
        yield
    finally:
        made.capturing = None


def is_current_stream_capturing() -> bool:
    return _device().capturing is _device().current


def synchronize(device: Any = None) -> None:
    drained("synchronize")
    _device().synchronize(_index(device))


class cudart:
    """What of CUDA's library locks pages of host memory, by CUDA's names."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        _device().pin(address, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        _device().unpin(address)
        return 0


@contextlib.contextmanager
def device(device: Any = None) -> Iterator[None]:
    """This thread's current device inside."""
    made, index = _device(), _device().index
    made.index = _index(device)
    try:
        yield
    finally:
        made.index = index


_initialized = True  # asked by torch's checkpoint, which else leaves random states as they are


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return True


def init() -> None:
    pass


def current_device() -> int:
    return _device().index


def set_device(device: Any) -> None:
    _device().index = _index(device)


def device_count() -> int:
    return len(_device().defaults)


def _is_in_bad_fork() -> bool:
    return False


def manual_seed(seed: int) -> None:
    _device().generator.manual_seed(seed)


manual_seed_all = manual_seed


def _generator(device: Any) -> torch.Generator:
    return _device().generator if _index(device) == 0 else _device().another


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _generator(device).set_state(state.cpu())


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def memory_allocated(device: Any = None) -> int:
    made = _device()
    made.settle()
    return made.memory.allocated if _index(device) == 0 else 0


def max_memory_allocated(device: Any = None) -> int:
    return _device().memory.peak if _index(device) == 0 else 0


def reset_peak_memory_stats(device: Any = None) -> None:
    made = _device()
    made.settle()
    made.memory.peak = made.memory.allocated


def empty_cache() -> None:
    """Wait for the whole device, as `cudaFree` does."""
    drained("empty_cache")
    _device().synchronize()


def get_device_name(device: Any = None) -> str:
    return "emulated accelerator"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (0, 0)
