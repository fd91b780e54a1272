"""A rank in place of a process: its random numbers, warnings, environment and process groups."""

from __future__ import annotations

import ctypes
import os
import random
import types
import warnings
from typing import Any

import numpy
import torch

# Python's and NumPy's generators are Mersenne twisters: 624 words and a place. Moved as they lie, since the baton
# changes hands hundreds of times a run, and their own functions take 26 and 150 us where these take 1.
_TWISTER = 2500
_PYTHON = id(random._inst) + object.__basicsize__
_NUMPY = numpy.random.mtrand._rand._bit_generator.ctypes.state_address


GONE, SILENT = "is gone", "is silent"  # of ranks: as after kill -9 and kill -STOP


class Registers:
    """Random states, filters of warnings, and environment: swapped when the baton goes to another rank."""

    def __init__(self) -> None:
        self.save()

    def save(self) -> None:
        self.torch = torch.get_rng_state()
        self.python = ctypes.string_at(_PYTHON, _TWISTER), random._inst.gauss_next  # type: ignore[attr-defined]
        self.numpy = ctypes.string_at(_NUMPY, _TWISTER)
        self.filters, self.shows = warnings.filters, warnings._showwarnmsg_impl  # type: ignore[attr-defined]
        self.environment = os.environ._data  # type: ignore[attr-defined]

    def load(self) -> None:
        torch.set_rng_state(self.torch)
        ctypes.memmove(_PYTHON, self.python[0], _TWISTER)
        random._inst.gauss_next = self.python[1]  # type: ignore[attr-defined]
        ctypes.memmove(_NUMPY, self.numpy, _TWISTER)
        warnings.filters, warnings._showwarnmsg_impl = self.filters, self.shows  # type: ignore[attr-defined]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        os.environ._data = self.environment  # type: ignore[attr-defined]


class Rank:
    """One rank of a world, in place of a process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.world: Any = None
        self.away = ""  # GONE or SILENT
        self.until = 0.0  # when it wakes, where it is SILENT for a while
        self.registers = Registers()
        self.registers.environment = dict(self.registers.environment)
        self.registers.filters = [("default", None, Warning, None, 0)]
        self.groups: dict[Any, int] = {}  # by name and members, how many process groups it has made
        # The fields of torch's `_World`.
        self.distributed = types.SimpleNamespace(
            default_pg=None, pg_map={}, pg_names={}, pg_group_ranks={}, pg_backend_config={}, group_count=0,
            tags_to_pg={}, pg_to_tag={}, pg_coalesce_state={}, comms=[],
        )  # fmt: skip

    def __str__(self) -> str:
        return f"rank {self.number} of {self.world.size}"

    def launched(self) -> None:
        """Find in the environment what torchrun says of a rank."""
        ranks, own = str(self.world.size), str(self.number)
        said = {
            "RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "world",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        }  # fmt: skip
        self.registers.environment.update((name.encode(), value.encode()) for name, value in said.items())
