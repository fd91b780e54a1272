"""Did somebody edit the weights of a bucket? Asked before weights are released, stepped, saved or gathered anew.

Anybody may write into an open parameter, so the only proof is in the bits: a digest of the parameters, taken when they
were last what the masters cast to. Mostly the question needs no digest, because nobody could reach the gathered copy.
On a device it is not asked at all in a step, which would wait for the answer: what was edited is taken, whatever it is.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..digests import fingerprint
from ..numerics import reseed_


class Edits:
    """What is known of one bucket's weights since they were last looked at."""

    def __init__(self, *, anywhere: bool = False) -> None:
        """anywhere: also of weights that no processor's memory holds, digests are the only proof."""
        self._digest = functools.partial(fingerprint, anywhere=anywhere)
        self.reachable = True  # could anybody have edited the gathered copy since it came?
        self.unfollowed = False  # do the resting parameters hold an edit that the master has not followed?
        self._version = 0  # of the gathered copy as it came
        self._agreed: bytes | None = None  # digest of the parameters here when they were last the masters' cast

    def came(self, full: Tensor, mine: Tensor | None, *, kept: bool) -> None:
        """The gathered copy is new. kept: into memory that somebody still holds. mine: the own part of it, where a
        digest of that will be asked for."""
        self.reachable = kept
        self._agreed = self._digest(mine) if mine is not None and kept else None
        self._version = full._version

    def opened(self, full: Tensor, mine: Tensor | None) -> None:
        """From now on anybody may edit the gathered copy; a backward may have done so, into a weight it had saved."""
        if mine is not None and not self.reachable:
            self._agreed = None if full._version != self._version else self._digest(mine)
        self.reachable = True

    def look_at(self, full: Tensor) -> None:
        """Somebody may have written into the guarded copy past the guard: then its version has changed."""
        self.reachable |= full._version != self._version

    def not_an_edit(self) -> None:
        """The version of the gathered copy was just raised by us, to tell autograd of new weights."""
        self._version += 1

    def agree(self, params: Tensor | None) -> None:
        """These parameters are what the masters cast to. None: nothing is known of them."""
        self._agreed = None if params is None else self._digest(params)

    def untouched(self, params: Tensor) -> bool:
        """Is it certain that nobody has edited these?"""
        now = self._digest(params)
        return now is not None and now == self._agreed

    def agrees(self, params: Tensor) -> bool:
        """Are these still the parameters that are known to be what the masters cast to?"""
        return self._digest(params) == self._agreed

    def follow(self, master: Tensor, params: Tensor, *, asked: bool) -> bool:
        """The master takes what of the parameters is not its cast. Says whether anything was edited; see `reseed_`."""
        now = self._digest(params)
        edited = (now is None or now != self._agreed) and reseed_(master, params.to(master.device), asked=asked)
        self._agreed = now
        return edited


def increment_versions(params: list[torch.nn.Parameter]) -> None:
    """Tell autograd that these were written to: what it saved of them must not be used."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version(params)
