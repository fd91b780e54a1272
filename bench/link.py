"""A link between two network namespaces that loses, doubles, reorders, delays and cuts: as root, with /dev/net/tun.

    with Link(("one", "10.77.0.1"), ("two", "10.77.0.2"), seed=7) as link:
        link.set(loss=0.05, delay=0.2)
        ...
        link.set(cut=True)

What `tc netem` does in kernels that have it. Each namespace has a tun device, and a thread of this process carries
packets between the two: whatever it does not carry on is lost, as with a cable, and the two ends hear nothing of it.
`python -m bench.link` says how much it can carry.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import random
import select
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_AT_ONCE = 64  # packets taken from one end before the other has its turn
_LONGEST = 1 << 16  # bytes of a packet


@dataclass(frozen=True)
class Faults:
    """Of one packet: the chance to be lost, to come twice, to come late; and the seconds that all of them take."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    late: float = 0.02  # seconds that a packet which others overtake takes longer
    delay: float = 0.0  # seconds, each way
    cut: bool = False  # nothing comes through, either way


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Link:
    """Between two namespaces that exist, each with an address of its own."""

    def __init__(self, one: tuple[str, str], other: tuple[str, str], *, seed: int = 0, mtu: int = 1500) -> None:
        """one, other: a namespace and the address that its end gets. mtu: bytes of the longest packet."""
        self.faults, self.counted = Faults(), Counter[str]()
        self.devices = [f"zs{os.getpid()}{at}" for at in "ab"]
        self._draws = [random.Random(f"{seed} {way}") for way in range(2)]
        self._ends = [_tun(device) for device in self.devices]
        self._wake, self._waker = os.pipe()
        try:
            for device, (space, host) in zip(self.devices, (one, other), strict=True):
                ip("link", "set", device, "netns", space)
                ip("-n", space, "addr", "add", f"{host}/24", "dev", device)
                ip("-n", space, "link", "set", device, "mtu", str(mtu), "up")
                ip("-n", space, "link", "set", "lo", "up")
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._waker, b".")
        self._thread.join()
        self._close()

    def set(self, **faults: Any) -> None:
        """From now on these faults, and no others."""
        self.faults = Faults(**faults)

    def _close(self) -> None:
        for end in (*self._ends, self._wake, self._waker):
            os.close(end)  # and with it its device

    def _carry(self) -> None:
        due: list[tuple[float, int, int, bytes]] = []  # when, in which order, to which end, what
        taken = 0
        while True:
            patience = max(0.0, due[0][0] - time.monotonic()) if due else None
            readable, _, _ = select.select([*self._ends, self._wake], [], [], patience)
            if self._wake in readable:
                return
            faults, now = self.faults, time.monotonic()
            for way, end in enumerate(self._ends):
                if end in readable:
                    for packet in _packets(end):
                        for after in self._fates(faults, self._draws[way]):
                            taken += 1
                            heapq.heappush(due, (now + after, taken, self._ends[1 - way], packet))
            now = time.monotonic()
            while due and due[0][0] <= now:
                _, _, end, packet = heapq.heappop(due)
                try:
                    os.write(end, packet)
                    self.counted["carried"] += 1
                except OSError:  # the device is down, or its queue full
                    self.counted["dropped"] += 1

    def _fates(self, faults: Faults, draw: random.Random) -> list[float]:
        """After how many seconds each copy of a packet comes out of the link."""
        if faults.cut:
            self.counted["cut off"] += 1
            return []
        if not (faults.loss or faults.duplicate or faults.reorder):
            return [faults.delay]
        lost, doubled, late = (draw.random() for _ in range(3))  # always as many: each packet has its own draws
        if lost < faults.loss:
            self.counted["lost"] += 1
            return []
        after = [faults.delay]
        if late < faults.reorder:
            self.counted["reordered"] += 1
            after = [faults.delay + faults.late]
        if doubled < faults.duplicate:
            self.counted["doubled"] += 1
            after += [faults.delay]
        return after


def _tun(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(end)
        raise
    return end


def _packets(end: int) -> list[bytes]:
    found: list[bytes] = []
    with suppress(OSError):  # no more of them for now
        while len(found) < _AT_ONCE:
            found.append(os.read(end, _LONGEST))
    return found


def cannot() -> str:
    """Why this machine makes no such link; "" where it does."""
    if os.geteuid() != 0:
        return "making network namespaces and tun devices needs root"
    try:
        os.close(_tun(f"zstry{os.getpid()}"))
        ip("netns", "add", f"zs-try-{os.getpid()}")
        ip("netns", "del", f"zs-try-{os.getpid()}")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this machine makes no tun device or no network namespace: {error}"
    return ""


# --- its own limits ---------------------------------------------------------------------------------------------------

_END = """
import socket, sys, time
role, seconds = sys.argv[1], float(sys.argv[2])
if role == "serve":
    server = socket.create_server(("10.78.0.1", 5000))
    print("ready", flush=True)
    one, _ = server.accept()
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(100):
        one.sendall(one.recv(1))
    total, began = 0, time.perf_counter()
    while part := one.recv(1 << 20):
        total += len(part)
    print(total * 8 / 1e6 / (time.perf_counter() - began))
else:
    one = socket.create_connection(("10.78.0.1", 5000))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took = []
    for _ in range(100):
        began = time.perf_counter()
        one.sendall(b".")
        one.recv(1)
        took.append(1e3 * (time.perf_counter() - began))
    end, block = time.perf_counter() + seconds, bytes(1 << 18)
    while time.perf_counter() < end:
        one.sendall(block)
    print(*took)
"""


def measure(seconds: float, mtu: int, delay: float) -> tuple[float, float]:
    """Megabits a second through one TCP connection, and the median milliseconds of a byte there and back."""
    spaces = [f"zs-measure-{os.getpid()}-{at}" for at in range(2)]
    try:
        for space in spaces:
            ip("netns", "add", space)
        with Link((spaces[0], "10.78.0.1"), (spaces[1], "10.78.0.2"), mtu=mtu) as link:
            link.set(delay=delay)
            ends = []
            for space, role in zip(spaces, ("serve", "ask"), strict=True):
                command = ["ip", "netns", "exec", space, sys.executable, "-c", _END, role, str(seconds)]
                ends.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                if role == "serve":
                    assert ends[0].stdout is not None
                    ends[0].stdout.readline()
            said = [end.communicate(timeout=seconds + 60)[0] for end in ends]
        return float(said[0]), statistics.median(map(float, said[1].split()))
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    seconds = parser.parse_args().seconds
    print("mtu    delay ms  Mbit/s  there and back ms")
    for mtu in (1500, 9000, 65000):
        for delay in (0.0, 0.001, 0.01):
            rate, took = measure(seconds, mtu, delay)
            print(f"{mtu:5}  {1e3 * delay:8g}  {rate:6.0f}  {took:8.2f}", flush=True)


if __name__ == "__main__":
    main()
