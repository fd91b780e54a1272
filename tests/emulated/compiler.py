"""Kernels in CUDA's language, compiled for the host by g++: one thread after the other, and warps in step.

The text is the one that NVRTC compiles for a GPU. What CUDA has and C++ has not is written below: places of threads,
atomics, and the exchange of values in a warp, whose 32 threads are fibers that wait for each other there.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .device import Access, device

GROUP = 256
ARGUMENTS = 16  # of a kernel at most; each takes a slot of 64 bits, as the calling conventions of Linux have it
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-x", "c++"]

HEAD = r"""
#include <algorithm>
#include <cmath>
#include <cstring>
#include <ucontext.h>
using std::max; using std::min;
#define HOST
#define __device__
#define __global__
struct Dim { int x; };
static thread_local Dim threadIdx, blockIdx, blockDim;

static inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
static inline float half_to_float(unsigned short bits) { _Float16 x; memcpy(&x, &bits, 2); return x; }
static inline unsigned short float_to_half(float x) { _Float16 h = x; unsigned short b; memcpy(&b, &h, 2); return b; }
static inline void atomicAdd(unsigned long long* to, unsigned long long value) { *to += value; }
static inline void atomicMax(int* to, int value) { *to = max(*to, value); }

struct Fiber { ucontext_t context; bool ended; char stack[1 << 16]; };
static thread_local Fiber fibers[32];
static thread_local ucontext_t scheduler;
static thread_local int lane;
static thread_local unsigned long slots[32];

static void yield() { swapcontext(&fibers[lane].context, &scheduler); }

template <class T> static T exchanged(T value, int from) {  // all lanes write, all lanes read, then they go on
  slots[lane] = 0;
  memcpy(&slots[lane], &value, sizeof value);
  yield();
  T found = value;
  if (from < 32) memcpy(&found, &slots[from], sizeof found);
  yield();
  return found;
}
template <class T> static T __shfl_sync(unsigned, T value, int from) { return exchanged(value, from); }
template <class T> static T __shfl_down_sync(unsigned, T value, int by) { return exchanged(value, lane + by); }
template <class T> static T __shfl_xor_sync(unsigned, T value, int by) { return exchanged(value, lane ^ by); }
static bool __all_sync(unsigned, bool own) {
  bool all = true;
  for (int other = 0; other < 32; other++) all &= exchanged(own, other);
  return all;
}
"""

TAIL = r"""
typedef void (*Kernel)(long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long);
static thread_local Kernel kernel;
static thread_local const long* given;

static void call() {
  const long* a = given;
  kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]);
}

static void begin() {
  call();
  fibers[lane].ended = true;
  swapcontext(&fibers[lane].context, &scheduler);
}

extern "C" void drive(void* which, const long* arguments, int threads, int group) {
  kernel = (Kernel)which, given = arguments, blockDim.x = group;
  for (int first = 0; first < (threads + group - 1) / group * group; first += 32) {
    blockIdx.x = first / group;
    for (lane = 0; lane < 32; lane++) {
      Fiber& own = fibers[lane];
      getcontext(&own.context);
      own.context.uc_stack.ss_sp = own.stack, own.context.uc_stack.ss_size = sizeof own.stack;
      own.context.uc_link = nullptr, own.ended = false;
      makecontext(&own.context, begin, 0);
    }
    for (bool under_way = true; under_way;) {
      under_way = false;
      for (lane = 0; lane < 32; lane++) {
        if (fibers[lane].ended) continue;
        threadIdx.x = first % group + lane;
        swapcontext(&scheduler, &fibers[lane].context);
        under_way = true;
      }
    }
  }
}
"""


def available() -> bool:
    return shutil.which("g++") is not None


@functools.cache
def library(text: str) -> ctypes.CDLL:
    """The text's kernels, and `drive`. Built once on a machine."""
    source = HEAD + text + TAIL
    path = Path(tempfile.gettempdir()) / f"zeroshard-kernels-{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        own = path.with_suffix(f".{os.getpid()}")
        told = subprocess.run(["g++", *FLAGS, "-", "-o", str(own)], input=source, text=True, capture_output=True)
        if told.returncode:
            raise RuntimeError(told.stderr)
        own.rename(path)
    return ctypes.CDLL(str(path))


def drive(text: str, name: str, threads: int, arguments: Sequence[int]) -> None:
    """Run all threads of a kernel now. arguments: numbers, and addresses of memory."""
    built = library(text)
    filled = (ctypes.c_long * ARGUMENTS)(*arguments)
    built.drive(ctypes.cast(getattr(built, name), ctypes.c_void_p), filled, threads, GROUP)


def on_the_host(text: str, names: Sequence[str], _: torch.device) -> Callable[..., None]:
    """Launch kernels over memory of the CPU, which run at once."""
    built = library(text)
    assert all(hasattr(built, name) for name in names)

    def launch(name: str, threads: int, arguments: Sequence[Any], writes: int) -> None:
        drive(text, name, threads, [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments])

    return launch


def compiled(text: str, names: Sequence[str], _: torch.device) -> Callable[..., None]:
    """As `zeroshard.device.compiled`: launches are queued, and race as torch's own do."""
    built = library(text)
    assert all(hasattr(built, name) for name in names)

    def launch(name: str, threads: int, arguments: Sequence[Any], writes: int) -> None:
        own = device()
        places = {at: own.memory.place(each) for at, each in enumerate(arguments) if isinstance(each, Tensor)}
        accesses: list[Access] = [(place, at < writes) for at, place in places.items()]
        numbers = [places[at].address if at in places else each for at, each in enumerate(arguments)]
        if threads:
            own.launch(f"kernel {name}", lambda: drive(text, name, threads, numbers), accesses)

    return launch
