"""One rank's device: its streams, its memory, who may touch what, and its random numbers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import sites
from .counts import total
from .memory import Block, Memory, Place
from .pages import Pages
from .races import Detector
from .streams import Barrier, DeviceError, Item, Machine, Mark, Order, Queue

Access = tuple[Place, bool]  # what a kernel reads, or (True) writes


class Device:
    """What `torch.emu` is, as an object. One in a process."""

    def __init__(self, order: Order, slots: int, patience: float, detect: bool, *, elsewhere: bool = False) -> None:
        """elsewhere: the machine has a second device, and threads are on it unless they say otherwise."""
        self.machine = Machine(order, slots, patience)
        self.defaults = [self.machine.default]
        if elsewhere:
            self.defaults.append(self.machine.queue("default of the second device", device=1))
        self.memory = Memory()
        self.races = Detector(self.machine, on=detect)
        self.generator, self.another = torch.Generator("cpu"), torch.Generator("cpu")  # of both devices
        self._local = threading.local()
        self.pages = Pages(self.machine.default, on=detect)
        self.limbo: list[tuple[Block, tuple[Mark, ...]]] = []  # freed, and in use on streams that the program told of
        self.rounds_otherwise: set[str] = set()  # kernels whose results are not quite the CPU's, as a GPU's are not
        self.syncs_every = 0  # allocations, after each of which the host waits for the whole device, as cudaFree does
        self.capturing: Queue | None = None  # the stream that is being captured
        self._allocations = 0

    # --- streams --------------------------------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """This thread's current device. A thread of autograd's is on the device of the tensors."""
        if not hasattr(self._local, "index"):
            self._local.index = 0 if _of_autograd() else len(self.defaults) - 1
        return int(self._local.index)

    @index.setter
    def index(self, index: int) -> None:
        self._local.index = index

    def stream_of(self, index: int) -> Queue:
        """This thread's current stream of a device."""
        streams: dict[int, Queue] = self._local.__dict__.setdefault("streams", {})
        return streams.get(index, self.defaults[index])

    @property
    def current(self) -> Queue:
        """This thread's current stream of the device that tensors are on."""
        return self.stream_of(0)

    def enter(self, queue: Queue) -> None:
        """Make it this thread's current stream of its device."""
        self._local.__dict__.setdefault("streams", {})[queue.device] = queue

    def launch(
        self, name: str, run: Callable[[], Any] | Item, accesses: Iterable[Access] = (), queue: Queue | None = None
    ) -> Mark:
        """Queue a kernel. accesses: all memory that it touches, which is asked of the race detector first."""
        queue, accesses = queue or self.current, list(accesses)
        item = run if isinstance(run, Item) else Item(name, run)
        item.stack = sites.stack()
        item.holds = [place.block for place, _ in accesses]
        total.launches[sites.site(), name] += 1
        self.pages.raise_met()
        with self.machine.lock:
            self.settle()
            self.races.launched(queue, name, item.stack, accesses)
            mark = self.machine.launch(queue, item)
            self.pages.launched(mark, item.stack, accesses)
            return mark

    def settle(self) -> None:
        """Do what the ends of storages have noted: see *a finaliser only notes* in `memory.py`."""
        with self.machine.lock:
            while self.memory.ended:
                block, stack = self.memory.ended.popleft()
                self.memory.end(block, stack)
                if block.used_by:
                    self.limbo.append((block, tuple(queue.end() for queue in (block.queue, *block.used_by))))
                else:
                    self.machine.launch(block.queue, Item("free", block.poison, holds=block))
                self.races.freed(block, stack)
            for block, marks in [*self.limbo]:
                if all(mark.reached for mark in marks):
                    self.limbo.remove((block, marks))
                    block.poison()
        self.pages.raise_met()

    def wait_on(self, queue: Queue, mark: Mark) -> None:
        """Let a stream wait for a point in another one."""
        with self.machine.lock:
            self.settle()
            self.races.joined(queue, mark)
            if queue is not mark.stream:
                self.machine.launch(queue, Barrier(mark))

    def query(self, mark: Mark) -> bool:
        """Is it reached? If so, what the host launches from now on comes after it."""
        reached = self.machine.poll(mark)
        if reached:
            self._host_waited((mark,))
        return reached

    def wait_for(self, *marks: Mark, deadline: float | None = None) -> bool:
        """The host waits until these are reached; whatever it launches from then on comes after them."""
        self.settle()
        if self.capturing is not None:
            raise DeviceError("operation not permitted when stream is capturing")
        if not self.machine.wait(marks, deadline):
            return False
        self._host_waited(marks)
        return True

    def _host_waited(self, marks: Iterable[Mark]) -> None:
        with self.machine.lock:
            self.races.host_waited(marks)
            self.pages.waited(self.races.host)
        self.pages.raise_met()

    def wait_for_current(self) -> None:
        self.wait_for(self.current.end())

    def synchronize(self, index: int = 0) -> None:
        self.settle()
        self.wait_for(*(queue.end() for queue in self.machine.queues if queue.device == index))

    # --- memory ---------------------------------------------------------------------------------------------------------

    def new(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
        self.settle()
        self._allocations += 1
        if self.syncs_every and self._allocations % self.syncs_every == 0:
            total.drains[sites.site(), "allocation"] += 1
            self.synchronize()
        return self.memory.new(size, stride, dtype, self.current, into)

    def pin(self, address: int, nbytes: int) -> None:
        """Let the device copy from and to it late, as from page-locked memory."""
        with self.machine.lock:
            self.pages.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        with self.machine.lock:
            self.pages.unpin(address)


def _of_autograd() -> bool:
    """Was this thread started by C++?"""
    return isinstance(threading.current_thread(), threading._DummyThread)


_installed: dict[int, Device] = {}


def device() -> Device:
    """This process's."""
    return _installed[os.getpid()]


def set_device(made: Device) -> None:
    _installed[os.getpid()] = made
