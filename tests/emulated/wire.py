"""Messages between the ranks' devices: datagrams between processes of one host, with what is long in a file beside.

Not gloo: nothing there can be aborted, and each group of it connects all pairs. A device that waits for another rank
says so ("want"): that one's device then runs what leads there, whatever its own host is at.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from . import sites
from .streams import Machine

_INLINE = 1 << 15  # bytes that travel in a datagram
_ANSWER = 1.0  # seconds to wait for what another rank says of itself


class Wire:
    """This process's end: an address, a thread that receives, and one that takes what has come.

    What has come is taken under the device's lock, which the device holds while it sends, and a datagram waits until the
    other end's few places are free. A single thread would not receive meanwhile: two devices that send each other more
    than these places hold would wait for each other for good.
    """

    def __init__(self, machine: Machine, folder: str | None = None) -> None:
        """folder: in which the end lies, and what is long; else among the temporary files."""
        self.machine = machine
        self.folder = tempfile.mkdtemp(prefix="emu-", dir=folder)
        self.address = os.path.join(self.folder, "wire")
        self.taken: dict[str, Callable[..., None]] = {"ask": self._asked, "tell": self._told}
        self.peers: dict[str, str] = {}  # by address, who that is
        self._files = 0
        self._answers: dict[str, str] = {}
        self._came: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        for act in (self._receive, self._serve):
            threading.Thread(target=act, name="emu wire", daemon=True).start()
        machine.report = self.report

    def send(self, address: str, kind: str, *facts: Any, payload: bytes = b"") -> None:
        path = None
        if len(payload) > _INLINE:
            self._files += 1
            path = os.path.join(self.folder, str(self._files))
            with open(path, "wb") as file:
                file.write(payload)
            payload = b""
        with contextlib.suppress(OSError):  # a rank that has ended; who waits for it will say so
            self._socket.sendto(pickle.dumps((kind, facts, payload, path)), address)

    def _receive(self) -> None:
        while True:
            self._came.put(self._socket.recv(1 << 17))

    def _serve(self) -> None:
        while True:
            kind, facts, payload, path = pickle.loads(self._came.get())
            if path is not None:
                with open(path, "rb") as file:
                    payload = file.read()
                os.unlink(path)
            self.taken[kind](*facts, payload)

    # --- who waits for whom --------------------------------------------------------------------------------------------

    def report(self) -> str:
        """What this rank's device and host are at, and what the others say."""
        self._answers = {}
        for address in self.peers:
            self.send(address, "ask", self.address)
        done = threading.Event()
        for _ in range(20):
            if len(self._answers) == len(self.peers):
                break
            done.wait(_ANSWER / 20)
        others = [f"  {who}:\n{self._answers.get(at, '    no answer')}" for at, who in self.peers.items()]
        return "\n".join(["  this rank:", self._state(), *others])

    def _asked(self, address: str, _: bytes) -> None:
        self.send(address, "tell", self.address, self._state())

    def _told(self, address: str, state: str, _: bytes) -> None:
        self._answers[address] = state

    def _state(self) -> str:
        if not self.machine.lock.acquire(timeout=_ANSWER / 4):
            return "    busy"
        try:
            device = self.machine.state() or "    nothing is queued on the device"
        finally:
            self.machine.lock.release()
        host = sites.words(sites.stack(sys._current_frames()[threading.main_thread().ident or 0]))
        return f"{device}\n    the host is at\n{host}"
