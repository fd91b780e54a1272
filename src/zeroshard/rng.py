"""States of random number generators, of Python, NumPy, torch and the device: taken, set, and seeded for a while."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
import xxhash
from torch import Tensor

from .device import random_state, random_states_kept, set_random_state
from .errors import UserError


def rng_states(device: torch.device) -> dict[str, Any]:
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    states = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, numpy.asarray(keys).tobytes().hex(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if (own := random_state(device)) is not None:
        states[device.type] = own.numpy().tobytes().hex()
    return states


class Rng(NamedTuple):
    """Random states, ready to be set."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    device: Tensor | None  # of the device's generator, if the states have one of its kind


def parsed_rng(states: Mapping[str, Any], device: torch.device) -> Rng:
    """Parse what `rng_states` wrote. Raises ValueError or TypeError for what no generator would take."""
    version, numbers, gauss = states["python"]
    kind, keys, *rest = states["numpy"]
    own = random_state(device) if device.type in states else None
    rng = Rng(
        (version, tuple(numbers), gauss),
        (kind, numpy.frombuffer(bytes.fromhex(keys), dtype=numpy.uint32), *rest),
        torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8),
        torch.frombuffer(bytearray.fromhex(states[device.type]), dtype=torch.uint8) if own is not None else None,
    )
    # NumPy would read keys[pos] wherever that is; Python takes any gauss, and returns it.
    if not 0 <= rng.numpy[2] <= 624 or version != 3 or not isinstance(gauss, (float, type(None))):
        raise ValueError("no state of a random number generator")
    random.Random().setstate(rng.python)
    numpy.random.RandomState().set_state(rng.numpy)
    torch.Generator().set_state(rng.torch)
    if own is not None and rng.device is not None and rng.device.shape != own.shape:
        raise ValueError(f"no state of the random number generator of {device}")
    return rng


def restore_rng(rng: Rng, device: torch.device) -> None:
    random.setstate(rng.python)
    numpy.random.set_state(rng.numpy)
    torch.set_rng_state(rng.torch)
    if rng.device is not None:
        set_random_state(device, rng.device)


@contextlib.contextmanager
def drawing(seed: int, step: int, index: int, device: torch.device) -> Iterator[None]:
    """Seed Python, NumPy and torch, on the CPU and this device, from these three integers alone; after it all of them
    go on as before."""
    for name, given in (("step", step), ("index", index)):
        if type(given) is not int or given < 0:
            raise UserError(f"{name}= counts from 0", got=repr(given), instead="micro_batch_rng(step, index)")
    number = xxhash.xxh3_64_intdigest(f"{seed} {step} {index}".encode())
    python, legacy = random.getstate(), numpy.random.get_state()
    with random_states_kept(device):
        torch.manual_seed(number)
        random.seed(number)
        numpy.random.seed(number % (1 << 32))
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(legacy)
