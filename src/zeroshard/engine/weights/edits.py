"""The program's edits of a bucket's weights: found, and copied to the parameters at rest and to the masters, before
weights are released, stepped, saved or gathered anew.

The program may write into an open parameter at any time, so only the bits prove an edit: they are compared by a digest
that was taken when the parameters were last the cast of the masters. Mostly no digest is needed, because no code could
reach the gathered copy. On a device a step does not ask if there are edits, because the host would wait for the answer:
it copies without knowing. If masters are stepped on the host, the device tells: `evidence.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...arithmetic.digests import differ, fingerprint
from ...arithmetic.sums import reseed_
from ...device import ask, asynchronous
from ...errors import TierError
from .evidence import Evidence, told

if TYPE_CHECKING:
    from .bucket import Bucket


class Edits:
    """Edits of one bucket's weights since they were last looked at: the evidence, and what is done with them."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.reachable = True  # could the program have edited the gathered copy since it came?
        self.unfollowed = False  # do the resting parameters hold an edit that the master has not followed?
        self._version = 0  # of the gathered copy as it came
        # Digest of the parameters here when they were last the masters' cast.
        self._agreed: bytes | Tensor | None = None
        self._evidence: Evidence | None = None

    @property
    def evidence(self) -> Evidence | None:
        """What the device knows of edits, if the masters are stepped on the host; else None."""
        bucket = self._bucket
        apart = asynchronous(bucket.tier.device) and not asynchronous(bucket.tiers["optimizer"].device)
        if not apart or bucket.master is None or bucket.codec.asks or bucket.codec.of_masters:
            return None
        if self._evidence is None:
            self._evidence = Evidence(bucket.tier)
        return self._evidence

    def looked(self) -> Evidence | None:
        """Return the evidence, complete to this moment; None if masters have nothing to follow."""
        bucket, evidence = self._bucket, self.evidence
        if evidence is None or not (bucket.resident or self.unfollowed):
            return None
        if bucket.parameters.on_device:
            evidence.look(bucket.parameters.of(*bucket.updated))
        return evidence

    def _digest(self, params: Tensor) -> bytes | Tensor | None:
        """Return a digest of weights; in a device's memory only for a codec that asks."""
        return fingerprint(params, anywhere=self._bucket.codec.asks)

    def came(self, full: Tensor, mine: Tensor | None, *, kept: bool) -> None:
        """Take note of a new gathered copy. kept: its memory was not released before, because something may still refer
        to it. mine: this rank's part of the copy, if its digest will be needed."""
        self.reachable = kept
        self._agreed = self._digest(mine) if mine is not None and kept else None
        self._version = full._version

    def opened(self, full: Tensor, mine: Tensor | None) -> None:
        """Take note that the gathered copy may be edited from now on. A backward may have written to it already."""
        if mine is not None and not self.reachable:
            self._agreed = None if full._version != self._version else self._digest(mine)
        evidence = None if self.reachable or full._version != self._version else self.evidence
        if evidence is not None and not self._bucket.parameters.on_device:
            evidence.came(self._bucket.mine)
        self.reachable = True

    def look_at(self, full: Tensor) -> None:
        """Look for writes into the guarded copy past the guard: they change its version."""
        self.reachable |= full._version != self._version

    def not_an_edit(self) -> None:
        """Discount the engine's own increment of the gathered copy's version, which told autograd of new weights."""
        self._version += 1

    def agree(self, params: Tensor | None) -> None:
        """Take note that these parameters are the cast of the masters. None: nothing is known of them."""
        evidence = self.evidence
        if evidence is not None:
            evidence.agree(params if self._bucket.parameters.on_device else None)
        else:
            self._agreed = None if params is None else self._digest(params)

    def untouched(self, params: Tensor) -> bool:
        """Tell if it is certain that these parameters were not edited."""
        now = self._digest(params)
        return now is not None and not _told(differ(now, self._agreed))

    def differ(self, params: Tensor) -> bool | Tensor:
        """Tell if the digest of these parameters differs from that of the masters' last known cast; False if neither
        is known. On a device the answer stays there."""
        return differ(self._digest(params), self._agreed)

    # --- what is done with an edit ------------------------------------------------------------------------------------

    def follow(self, *, asked: bool = True) -> None:
        """Copy edits of the gathered copy to the parameters at rest and to masters, and count them as new weights.

        If not `asked`, here and below, the host does not wait for a device: edits are copied, but a method may return
        False although there were some.
        """
        kept = self.keep(asked=asked)
        if self.seed_master(asked=asked) or kept:
            self._bucket.changed()

    def keep(self, *, asked: bool = True) -> bool:
        """Copy edits of the gathered copy to what rests. Returns if there were any."""
        if self._bucket.resident or not (self._bucket.ready and self.reachable):
            return False  # nothing gathered, only a copy that the last step made old, or one that no code could reach
        with torch.inference_mode(False), torch.no_grad():
            return self._bucket.codec.take_back(asked=asked)

    def take_back_to_masters(self, *, asked: bool) -> bool:
        """Copy edits of the gathered copy to the masters, which are all that rests. Returns if there were any."""
        self._bucket.rebind()
        return self.reseed(self._bucket.mine, asked=asked)

    def take_back(self, *, asked: bool) -> bool:
        """Copy edits of the gathered copy to parameters that rest in the same format. Returns if there were any."""
        bucket, parameters = self._bucket, self._bucket.parameters
        bucket.rebind()
        try:
            silent = not asked and self._silent and (parameters.pinned or not parameters.on_demand)
            if not silent and parameters.rest.same_as(bucket.mine):
                return False
            bucket.codec.before_taking_back()
            if (evidence := self.evidence) is not None and not parameters.on_device:
                evidence.look(bucket.mine) if silent else evidence.assume()
            if silent and parameters.pinned:
                mine = bucket.mine.clone()
                bucket.tier.leaving.keep(mine, parameters.rest.take(0, mine, fresh=True))
            else:
                with parameters.here(fresh=True) as resting:
                    resting.copy_(bucket.mine)
        except TierError as error:
            bucket.group.report(error)
        self.unfollowed = not bucket.codec.asks
        return not silent

    @property
    def _silent(self) -> bool:
        """True if edits can be copied without asking if there are any."""
        return not self._bucket.codec.asks and asynchronous(self._bucket.full.device)

    def seed_master(self, *, asked: bool = True) -> bool:
        """Copy edits of resting parameters to their masters. Returns if anything was edited."""
        bucket = self._bucket
        if bucket.master is None or bucket.codec.of_masters or not (bucket.resident or self.unfollowed):
            return False
        if (evidence := self.evidence) is None:
            return self._seed(asked=asked)
        if evidence.heard is None:
            with told([bucket]):
                return self.seed_master(asked=asked)
        if evidence.heard:
            edited = self._seed(asked=asked)
            self.agree(bucket.parameters.of(*bucket.updated) if bucket.parameters.on_device else None)
            return edited
        self.unfollowed = False
        return False

    def _seed(self, *, asked: bool) -> bool:
        bucket, self.unfollowed = self._bucket, False
        with bucket.parameters.here(changed=False):
            return bucket.codec.follow(bucket.parameters.of(*bucket.updated), asked=asked)

    def mark_followed(self) -> None:
        """Take note that the resting parameters are the cast of their masters: no edit is left to follow."""
        bucket, self.unfollowed = self._bucket, False
        if (bucket.codec.asks or self.evidence is not None) and bucket.resident:
            self.agree(bucket.parameters.of(*bucket.updated))
        elif self.evidence is not None:
            self.agree(None)

    def reseed(self, params: Tensor, *, asked: bool = True) -> bool:
        """Copy to the master the elements that are not its cast. Returns if anything was edited; see `reseed_`.

        A digest that is known is renewed; an unknown one is not taken here.
        """
        state = self._bucket.master
        assert state is not None
        with state.here(changed=False) as master:
            now = None if self._agreed is None else self._digest(params)
            changed = now is None or _told(differ(now, self._agreed))
            asked = asked or not self._silent
            edited = changed and reseed_(master, self._brought(params, master), asked=asked)
            self._agreed = now
            with state.here(changed=edited or (changed and not asked)):
                return edited

    def _brought(self, params: Tensor, master: Tensor) -> Tensor:
        """Return `params` on the master's device, so that edits can be copied to the master."""
        bucket = self._bucket
        if params.device == master.device:
            return params
        if master.is_cpu:
            return bucket.tier.fetch(params, params.dtype)
        brought = torch.empty_like(params, device=master.device)  # params rest on the host
        bucket.parameters.rest.give(bucket.updated[0] - bucket.parameters.first, brought)
        return brought


def _told(answer: bool | Tensor) -> bool:
    """Return an answer, waiting if a device has it."""
    return bool(ask(answer)) if isinstance(answer, Tensor) else answer


def increment_versions(params: list[torch.nn.Parameter]) -> None:
    """Tell autograd that parameters were written to: tensors that it saved of them must not be used."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version(params)
