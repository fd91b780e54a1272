"""One rank's numbers as trackers take them: flat, by name, as floats. For W&B, TensorBoard, MLflow, or a callback.

bytes/held/<tier>, bytes/held/<tier>/<state>   held now
bytes/peak/<phase>                             the most at once on the device in that phase, so far
bytes/<verb>/logical, .../sent, .../received   moved so far by gathers, reductions and so on, in .../calls
seconds/waited                                 for other ranks, so far: for gathers, reductions and agreements
steps, steps/skipped                           of optimizers, so far
tokens/s                                       of what the caller says was trained on since the call before
"""

from __future__ import annotations

from ..events import Ledger


def flat(ledger: Ledger, steps: int, skipped: int, rate: float | None) -> dict[str, float]:
    found: dict[str, float] = {"steps": steps, "steps/skipped": skipped}
    for tier, held in ledger.tiers.items():
        found[f"bytes/held/{tier}"] = sum(held.values())
        found |= {f"bytes/held/{tier}/{state}": nbytes for state, nbytes in held.items()}
    found |= {f"bytes/peak/{phase}": peak.total for phase, peak in ledger.phases.items()}
    for verb, moved in ledger.traffic.items():
        found[f"bytes/{verb}/calls"] = moved.calls
        found[f"bytes/{verb}/logical"] = moved.logical
        found[f"bytes/{verb}/sent"] = moved.sent
        found[f"bytes/{verb}/received"] = moved.sent_and_received - moved.sent
        found |= {f"bytes/{verb}/shared": moved.shared} if moved.shared else {}
    found["seconds/waited"] = ledger.waited / 1e9
    if rate is not None:
        found["tokens/s"] = rate
    return {f"zeroshard/{name}": float(value) for name, value in found.items()}
