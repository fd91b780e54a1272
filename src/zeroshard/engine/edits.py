"""Detection of edits of a bucket's weights: before weights are released, stepped, saved or gathered anew.

The program may write into an open parameter at any time, so the only proof is in the bits: a digest of the parameters,
taken when they were last the cast of the masters. Mostly none is needed, because no code could reach the gathered copy.
On a device a step does not ask at all, since it would wait for the answer: it copies edits, whatever they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..device import ask
from ..digests import differ, fingerprint
from ..numerics import reseed_


class Edits:
    """The evidence for edits of one bucket's weights since they were last looked at."""

    def __init__(self, *, anywhere: bool = False) -> None:
        """anywhere: take digests of weights in a device's memory too."""
        self._digest = functools.partial(fingerprint, anywhere=anywhere)
        self.reachable = True  # could the program have edited the gathered copy since it came?
        self.unfollowed = False  # do the resting parameters hold an edit that the master has not followed?
        self._version = 0  # of the gathered copy as it came
        # Digest of the parameters here when they were last the masters' cast.
        self._agreed: bytes | Tensor | None = None

    def came(self, full: Tensor, mine: Tensor | None, *, kept: bool) -> None:
        """Take note of a new gathered copy. kept: it is in memory that something still refers to. mine: this rank's
        part of it, if its digest will be needed."""
        self.reachable = kept
        self._agreed = self._digest(mine) if mine is not None and kept else None
        self._version = full._version

    def opened(self, full: Tensor, mine: Tensor | None) -> None:
        """Take note that the gathered copy may be edited from now on. A backward may have written to a saved weight."""
        if mine is not None and not self.reachable:
            self._agreed = None if full._version != self._version else self._digest(mine)
        self.reachable = True

    def look_at(self, full: Tensor) -> None:
        """Look for writes into the guarded copy past the guard: they change its version."""
        self.reachable |= full._version != self._version

    def not_an_edit(self) -> None:
        """Discount a raise of the gathered copy's version by the engine, which told autograd of new weights."""
        self._version += 1

    def agree(self, params: Tensor | None) -> None:
        """Take note that these parameters are the cast of the masters. None: nothing is known of them."""
        self._agreed = None if params is None else self._digest(params)

    def untouched(self, params: Tensor) -> bool:
        """Tell if it is certain that these parameters were not edited."""
        now = self._digest(params)
        return now is not None and not _told(differ(now, self._agreed))

    def differ(self, params: Tensor) -> bool | Tensor:
        """Tell if these have another digest than the masters' last known cast; not if neither of the two is known. On a
        device the answer stays there."""
        return differ(self._digest(params), self._agreed)

    def follow(self, master: Tensor, params: Tensor, bring: Callable[[Tensor, Tensor], Tensor], *, asked: bool) -> bool:
        """Copy to the master the parameters that are not its cast. Returns if anything was edited; see `reseed_`.

        bring: returns parameters where the master is. A digest is only kept up, never begun, here.
        """
        now = None if self._agreed is None else self._digest(params)
        changed = now is None or _told(differ(now, self._agreed))
        edited = changed and reseed_(master, bring(params, master), asked=asked)
        self._agreed = now
        return edited


def _told(answer: bool | Tensor) -> bool:
    """Ask a device for what it has found."""
    return bool(ask(answer)) if isinstance(answer, Tensor) else answer


def increment_versions(params: list[torch.nn.Parameter]) -> None:
    """Tell autograd that parameters were written to: tensors that it saved of them must not be used."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version(params)
