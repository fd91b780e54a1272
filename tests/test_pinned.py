"""States in pinned memory: whatever a program does with them, host and device use them one after the other.

On an emulated accelerator, where an access that nothing orders is an error, whether or not it would do harm this time.
"""

from __future__ import annotations

import random

import pytest
import torch

import emulated
from zeroshard.device import behind
from zeroshard.engine.gradients.sums import SUMS
from zeroshard.events import Ledger
from zeroshard.tiers.tier import DeviceTier, HostTier

N = 64


def drawn(seeds):
    """Operations on two rests and on the tier's own pieces, in drawn order and on drawn streams. What each leaves is
    known; a stream that the program would have joined is joined."""
    from emulated.device import device
    from emulated.streams import Order

    torch.emu.set_device(0)
    place = torch.device("emu:0")
    for seed in seeds:
        torch.emu.synchronize()
        device().machine.order = Order(seed, "late" if seed % 2 else None)
        draw, ledger = random.Random(seed), Ledger()
        tier, host = DeviceTier(place, ledger), HostTier(place, ledger)
        rests = [host.rest("master", index, N, torch.float32) for index in range(2)]
        known = [torch.zeros(N), torch.zeros(N)]
        checks = []  # of what came to the device: compared at the end, so that nothing is waited for before
        pending = []  # events that no stream waits for before the end

        def one(draw=draw, tier=tier, rests=rests, known=known, checks=checks, pending=pending, seed=seed):
            at, value = draw.randrange(2), float(draw.randrange(1, 1000))
            rest, start = rests[at], 8 * draw.randrange(4)
            what = draw.choice(("take", "take", "give", "give", "bring", "read", "write", "same", "send", "fetch"))
            if what == "take":
                given = torch.full((N - start,), value, device=place)
                through = rest.take(start, given, fresh=False)
                known[at][start:] = value
                pending.append((through, given))  # which may not be dropped before
            elif what in ("give", "bring"):
                came = torch.empty(N - start, device=place)
                if what == "give":
                    rest.give(start, came)
                else:
                    pending.append((rest.bring(start, came), came))
                checks.append((came, known[at][start:].clone()))
            elif what == "read":
                with rest.here(changed=False) as tensor:
                    assert torch.equal(tensor, known[at]), (what, seed)
            elif what == "write":
                with rest.here() as tensor:
                    assert torch.equal(tensor, known[at]), (what, seed)
                    tensor[start : start + 8] = known[at][start : start + 8] = value
            elif what == "same":
                assert rest.same_as(known[at].clone()), (what, seed)
            elif what == "send":
                came = torch.empty(N, dtype=torch.bfloat16, device=place)
                tier.send(came, torch.full((N,), value % 128))
                checks.append((came.float(), torch.full((N,), value % 128)))
            else:
                got = tier.fetch(torch.full((N,), value, device=place), torch.float32)
                assert torch.equal(got, torch.full((N,), value)), (what, seed)

        for _ in range(30):
            if draw.random() < 0.3:
                with behind(SUMS, place):
                    one()
                    event = torch.emu.Event()
                    event.record(torch.emu.current_stream(place))
                event.wait(torch.emu.current_stream(place))
            else:
                one()
        for through, _ in pending:
            through.wait()
        for came, want in checks:
            assert torch.equal(came.cpu(), want), seed


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 1000), marks=pytest.mark.full)], ids=["a-few", "many"]
)
def test_host_and_device_take_turns_in_any_order_of_operations(seeds):
    emulated.run(1, drawn, seeds, timeout=280)
