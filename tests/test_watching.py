"""What watches a run from outside: reductions and histograms of weights and gradients, trackers, torch's profiler."""

from __future__ import annotations

import itertools
import json
import time

import pytest
import torch
from torch import nn

import norms
import ranks
import zeroshard
from zeroshard.errors import ReleasedError, StateError

ASKED = {
    "mean": torch.mean, "sum": torch.sum, "std": torch.std, "var": torch.var, "max": torch.max, "min": torch.min,
    "abs().max()": lambda t: t.abs().max(), "amax": torch.amax, "aminmax": lambda t: t.aminmax().max, "norm": torch.norm,
    "median": torch.median, "quantile": lambda t: t.quantile(0.5), "count_nonzero": torch.count_nonzero,
    "isfinite": lambda t: t.isfinite().all(), "histc": lambda t: t.histc(8), "data": lambda t: t.data.mean(),
    "histogram": lambda t: torch.histogram(t.detach(), 8).hist, "reshape": lambda t: t.reshape(-1).mean(),
    "cpu": lambda t: t.detach().cpu().std(), "numpy": lambda t: torch.tensor(t.detach().numpy().mean()),
}  # fmt: skip


def built():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def answers(stage):
    """What each question is answered: "exactly", "refused", or what is wrong with it."""
    model, optimizer = built()
    zero = zeroshard.shard(model, optimizer, stage=stage)
    plain, _ = built()
    for rank in range(zero.world_size):
        (plain(batch(rank)).square().mean() / zero.world_size).backward()
    model(batch(zero.rank)).square().mean().backward()
    found = {}
    for name, ask in ASKED.items():
        for what, watched, wanted in (
            ("p", model[0].weight, plain[0].weight),
            ("p.grad", model[0].weight.grad, plain[0].weight.grad),
        ):
            try:
                said = ask(watched)
                right = norms.of_tensor(wanted) if (what, name) == ("p.grad", "norm") else ask(wanted)
                found[what, name] = "exactly" if torch.equal(said, right) else f"{said}, and not {right}"
            except (ReleasedError, StateError) as error:
                remedy = "with zero.gathered()" if what == "p" else "p.grad.full_tensor() on every rank"
                found[what, name] = "refused" if remedy in str(error) else str(error)
    with zero.gathered():
        assert all(torch.equal(ask(model[0].weight), ask(plain[0].weight)) for ask in ASKED.values())
    whole = model[0].weight.grad.full_tensor()
    assert all(torch.equal(ask(whole), ask(plain[0].weight.grad)) for ask in ASKED.values())
    return found


def test_reductions_are_exact_or_refused_with_the_remedy(stage):
    """At every stage, and never something else: of a gradient its norm is known, and weights where they are whole."""
    wanted = {("p", name): "refused" if stage == 3 else "exactly" for name in ASKED}
    wanted |= {("p.grad", name): "exactly" if name == "norm" else "refused" for name in ASKED}
    assert ranks.run(2, answers, stage) == [wanted, wanted]


def hooked(stage):
    """Hooks as `wandb.watch` sets them: on each weight's gradient, and after the model's forward."""
    model, optimizer = built()
    zero, seen = zeroshard.shard(model, optimizer, stage=stage), {}
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.update({name: grad.data.histc(8).sum().item()}))
    model(batch(0)).square().mean().backward()
    assert seen == {name: param.numel() for name, param in model.named_parameters()}
    model.register_forward_hook(lambda *_: [param.data.histc(8) for param in model.parameters()] and None)
    if stage == 3:
        with pytest.raises(ReleasedError, match=r"with zero.gathered\(\)"):
            model(batch(0))
    with zero.gathered():
        model(batch(0))
    return True


def test_hooks_that_draw_histograms(stage):
    assert ranks.run(1, hooked, stage) == [True]


def test_tokens_by_the_second_are_counted_from_call_to_call(monkeypatch):
    model, optimizer = built()
    clock = itertools.count(100.0, 4.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    zero = zeroshard.shard(model, optimizer)
    assert zero.metrics(tokens=600)["zeroshard/tokens/s"] == 150.0
    assert "zeroshard/tokens/s" not in zero.metrics()  # and it starts no new count
    assert zero.metrics(tokens=2000)["zeroshard/tokens/s"] == 500.0


def test_a_trace_and_torchs_own_lie_on_one_axis(tmp_path):
    """The same origin, and what the program does between two sleeps lies between them in the profiler's trace."""
    model, optimizer = built()
    zero = zeroshard.shard(model, optimizer)
    zero.record()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile, torch.profiler.record_function("around"):
        time.sleep(0.02)  # more than the two clocks differ by
        model(batch(0)).sum().backward()
        time.sleep(0.02)
    profile.export_chrome_trace(str(tmp_path / "torch.json"))
    zero.trace(tmp_path / "zeroshard.json")
    theirs, ours = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("torch", "zeroshard"))
    assert theirs["baseTimeNanoseconds"] == ours["baseTimeNanoseconds"]
    (around,) = (event for event in theirs["traceEvents"] if event.get("name") == "around" and event["ph"] == "X")
    inside = [event for event in ours["traceEvents"] if event["ph"] == "X"]
    assert {"forward", "backward"} <= {event["name"] for event in inside}
    for event in inside:
        assert around["ts"] < event["ts"] and event["ts"] + event["dur"] < around["ts"] + around["dur"], event
