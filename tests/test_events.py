"""What is held in which phase, what happened in which order, who owns what, and the trace of it all."""

import json
import re
import time

import pytest
import torch
from torch import nn

import models
import reference
import zeroshard
from zeroshard import Comm, Layout, Precision
from zeroshard.errors import StateError, UserError
from zeroshard.events import Ledger

WIDTH, LAYERS = 128, 4
BLOCK = WIDTH * WIDTH * 4  # bytes of one block's weights: a multiple of 128 elements at one and two ranks


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def of_blocks(stage, steps=3, record=True, **options):
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zero = zeroshard.shard(model, optimizer, stage=stage, **options)
    for step in range(steps):
        if record and step == steps - 1:
            zero.record()
        model(torch.ones(2, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if stage in (1, 2):
        list(map(torch.Tensor.sum, model.parameters()))  # wait for what the last step sent
    return model, optimizer, zero


# ------------------------------------------------------------------------------------------------------------- phases


def phases(stage, overlap):
    _, _, zero = of_blocks(stage, record=False, comm=Comm(overlap=overlap))
    ledger = zero.ledger()
    for phase, peak in ledger.phases.items():
        assert sum(peak.held.values()) == peak.total, phase
    return {phase: peak.held for phase, peak in ledger.phases.items()}, dict(ledger.tiers["device"]), ledger.held


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_the_most_held_in_each_phase(ranks, stage, overlap):
    """To the byte, of four equal blocks at two ranks: what rests, and what passes in forward, backward and step."""
    share = lambda sharded: LAYERS * BLOCK // (2 if sharded else 1)  # noqa: E731
    moments = {"exp_avg": share(stage >= 1), "exp_avg_sq": share(stage >= 1), "step": LAYERS * 4}
    rest = {"parameters": share(stage == 3), "gradients": share(stage >= 2), **moments}
    for most, device, held in ranks.run(2, phases, stage, overlap):
        assert {state: n for state, n in held.items() if n} == rest
        assert {state: n for state, n in device.items() if n} == rest
        ahead = {"gather": BLOCK, "prefetch": BLOCK} if overlap else {"gather": BLOCK}
        assert most["forward"] == rest | (ahead if stage == 3 else {})
        # A contribution and what the other rank has for the own half, for each reduction under way and the one that is
        # being filled. Below stage 2 the accumulator that holds nothing yet doubles as the place of contributions.
        flying = {"reduce": (3 if overlap else 1) * (BLOCK // 2 + (BLOCK if stage >= 2 else 0))}
        passing = ("gather", "prefetch", "reduce")
        rests = {state: n for state, n in most["backward"].items() if state not in passing}
        assert rests == rest
        assert max(most[p].get("reduce", 0) for p in ("backward", "reduce")) == flying["reduce"]
        assert most["step"] == rest
        assert set(most) >= {"init", "forward", "backward", "reduce", "step"}


def what_gathered_holds():
    _, _, zero = of_blocks(3, record=False)
    with zero.gathered():
        pass
    return zero.ledger().phases["gather"].held["gather"], zero.ledger().peak["prefetch"]


def test_gathered_is_a_phase(ranks):
    assert ranks.run(2, what_gathered_holds) == [(LAYERS * BLOCK, BLOCK)] * 2


def test_an_exception_leaves_no_phase_behind():
    """A forward, a backward or a step that raises is over; the next ones are counted as what they are."""

    class Fails(Blocks):
        def forward(self, x, fail=False):
            x = super().forward(x)
            if fail:
                raise ZeroDivisionError
            return x

    class Explodes(torch.optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError

    model = Fails()
    optimizer = Explodes(model.parameters(), lr=0.1)
    optimizer.elementwise = True
    zero = zeroshard.shard(model, optimizer)
    ledger = zero._engine.ledger
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, WIDTH), fail=True)
    assert ledger.phase == "between"
    out = model(torch.ones(2, WIDTH))
    out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    model(torch.ones(2, WIDTH)).sum().backward()
    assert ledger.phase == "between"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert [phase for phase, _ in ledger._running] == ["step"]


def shown_in_a_notebook():
    _, _, zero = of_blocks(3)
    ledger = zero.ledger()
    want = {f"{state}, device": nbytes for state, nbytes in ledger.tiers["device"].items() if nbytes}
    want |= {f"peak in {phase}, device": peak.total for phase, peak in ledger.phases.items()}
    return want, ledger._repr_html_()


def test_a_notebook_shows_a_ledger_as_a_table(ranks):
    ((want, html),) = ranks.run(1, shown_in_a_notebook)
    cells = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", html)[1:]]
    assert {what: int(nbytes.replace(",", "")) for what, nbytes in cells} == want


# ------------------------------------------------------------------------------------------------------------ metrics


def told_to_a_tracker(stage):
    _, _, zero = of_blocks(stage)
    ledger, metrics = zero.ledger(), zero.metrics()
    assert {type(value) for value in metrics.values()} == {float}
    said = {name.removeprefix("zeroshard/"): value for name, value in metrics.items()}
    want = {"steps": 3, "steps/skipped": 0, "bytes/held/device": sum(ledger.tiers["device"].values())}
    want |= {f"bytes/held/device/{state}": nbytes for state, nbytes in ledger.tiers["device"].items()}
    want |= {f"bytes/peak/{phase}": peak.total for phase, peak in ledger.phases.items()}
    for verb, moved in ledger.traffic.items():
        both = {"calls": moved.calls, "logical": moved.logical, "sent": moved.sent}
        both["received"] = moved.sent_and_received - moved.sent
        want |= {f"bytes/{verb}/{what}": nbytes for what, nbytes in both.items()}
    want["seconds/waited"] = ledger.waited / 1e9  # also where nothing is recorded
    return said == want, {verb for verb in ledger.traffic if said[f"bytes/{verb}/received"]}


def waits():
    """Seconds that this rank says it waited, without a record, for rank 1 that came 0.2 s late to each of 3 backwards."""
    model = Blocks()
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    before = zero.metrics()["zeroshard/seconds/waited"]
    for _ in range(3):
        loss = model(torch.ones(2, WIDTH)).sum()
        time.sleep(0.2 * zero.rank)
        loss.backward()
        zero.model.zero_grad()
    return zero.metrics()["zeroshard/seconds/waited"] - before


def test_waits_are_always_counted(ranks):
    """More than 0.5 s of the 0.6 by the rank that waits: it computes for a moment while the other sleeps."""
    early, late = ranks.run(2, waits)
    assert early > 0.5 > late


def test_a_tracker_is_told_what_the_ledger_says(ranks):
    usual = {"control", "gather", "reduce"}
    assert ranks.run(2, told_to_a_tracker, 3) == [(True, usual), (True, usual | {"broadcast"})]


# ------------------------------------------------------------------------------------------------------------- events


def recorded(stage):
    _, _, zero = of_blocks(stage)
    events = zero.events()
    assert all(event.end >= event.start > 0 for event in events), events
    traffic = zero.ledger().traffic
    kinds = {}
    for event in events:
        kinds.setdefault(event.verb, []).append((event.unit, event.logical, event.sent, event.received))
    return kinds, {verb: t.calls for verb, t in traffic.items()}


def test_events_of_a_step(ranks, stage):
    """Every gather, reduce, release, phase and unit of one step at two ranks, with bytes in the three conventions."""
    blocks = [f"blocks.{i}" for i in range(LAYERS)]
    for kinds, _ in ranks.run(2, recorded, stage):
        moved = (BLOCK, BLOCK // 2, BLOCK // 2)
        down = [(name, *moved) for name in reversed(blocks)]
        assert [e for e in kinds["reduce"] if e[1]] == down
        # The first block's input needs no gradient, so backward never asks for its weight.
        gathers = [*down[::-1], *down[:-1]] if stage == 3 else down[::-1]
        assert kinds["gather"] == gathers
        assert [unit for unit, *_ in kinds["forward"]] == [None, "", *blocks]
        assert [unit for unit, *_ in kinds["backward"]] == [None, *reversed(blocks)]
        assert len(kinds["step"]) == 1
        releases = [unit for unit, logical, *_ in kinds.get("release", ())]
        if stage == 3:  # in backward when the second unit after it begins, or at the end
            assert (releases[:LAYERS], sorted(releases[LAYERS:])) == (blocks, blocks[1:])
        else:
            assert releases == []


def recompute():
    model = models.build("gpt", checkpoint="nonreentrant")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer)
    zero.record()
    models.loss("gpt", model, models.batch("gpt", 0, 0)).backward()
    return [event.unit for event in zero.events() if event.verb == "recompute"]


def test_recomputed_units_are_told_apart(ranks):
    """Activation checkpointing runs units again, last first."""
    (order,) = ranks.run(1, recompute)
    assert order == sorted(order, reverse=True) and len(order) >= 2


def test_recording_is_off_by_default_and_bounded():
    _, _, zero = of_blocks(3, record=False)
    with pytest.raises(StateError, match=r"zero\.record\(\)"):
        zero.events()
    model, optimizer, zero = of_blocks(3, record=False)
    zero.record(7)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert len(zero.events()) == 7
    assert zero.events()[-1].verb == "step"
    zero.record(0)
    with pytest.raises(StateError):
        zero.events()
    for bad in (-1, 1.5, "many", None):
        with pytest.raises(UserError, match="record"):
            zero.record(bad)


def test_recording_changes_no_bit():
    weights = []
    for record in (False, True):
        model, _, zero = of_blocks(3, record=record)
        with zero.gathered():
            weights.append(reference.weights(model))
    assert reference.first_difference(*weights) == ""


def test_a_ledger_counts_what_it_is_told():
    """Phases nest; the peak of a phase is the most while it is the innermost, together with what made it up."""
    ledger = Ledger()
    ledger.hold("a", 5)
    with ledger.during("step"):
        ledger.hold("b", 3)
        ledger.hold("b", 100, "host")  # peaks are the device's, which is what runs out
        with ledger.during("forward"):
            ledger.hold("b", 4)
            ledger.hold("b", -6)
        ledger.hold("a", 1)
    assert {phase: (peak.total, peak.held) for phase, peak in ledger.phases.items()} == {
        "between": (7, {"a": 6, "b": 1}),
        "step": (8, {"a": 5, "b": 3}),
        "forward": (12, {"a": 5, "b": 7}),
    }
    ledger.rename("a", "c", 6)
    assert dict(ledger.held) == {"a": 0, "b": 101, "c": 6}
    assert ledger.phases["between"].total == 7


# -------------------------------------------------------------------------------------------------------- owners, trace


def owners(stage, bounds):
    torch.manual_seed(0)
    model = models.build("gpt", tied=True)
    zero = zeroshard.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, layout=Layout(bounds=bounds)
    )
    table = {}
    for state in ("parameters", "gradients", "optimizer"):
        for name, param in model.named_parameters():
            table[state, name] = (param.numel(), [tuple(owner) for owner in zero.owners(name, state)])
    for other in ("no.such", "blocks.0"):
        with pytest.raises(UserError, match="no such parameter"):
            zero.owners(other)
    with pytest.raises(UserError, match="did you mean 'parameters'"):
        zero.owners(name, "parameter")
    return table


@pytest.mark.parametrize("bounds", ["unit", "model", "tensor"])
def test_owners_cover_every_element(ranks, stage, bounds):
    """Once where the state is sharded, on every rank where it is replicated; the same answer on all ranks."""
    sharded = {"parameters": stage == 3, "gradients": stage >= 2, "optimizer": stage >= 1}
    tables = ranks.run(3, owners, stage, bounds)
    assert tables[0] == tables[1] == tables[2]
    for (state, name), (numel, parts) in tables[0].items():
        if sharded[state]:
            ends = [0, *(stop for _, _, stop, _ in parts)]
            assert [start for _, start, _, _ in parts] == ends[:-1] and ends[-1] == numel, name
            assert [rank for rank, *_ in parts] == sorted({rank for rank, *_ in parts})
        else:
            assert parts == [(rank, 0, numel, "device") for rank in range(3)]


def traced(path):
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zero = zeroshard.shard(model, optimizer, precision=Precision())
    zero.record()
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered(model.blocks[0]):
        pass
    zero.trace(path)
    return len(zero.events())


def test_the_trace_nests(ranks, tmp_path):
    """One process per rank; its slices nest, its collectives begin and end once, its counters end at what rests."""
    path = tmp_path / "trace.json"
    ranks.run(2, traced, path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        open_until = []
        slices = sorted((e for e in mine if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
        for event in slices:  # in nanoseconds, which microseconds since the base are rounded to
            event["ts"], event["dur"] = round(event["ts"] * 1000), round(event["dur"] * 1000)
        assert {"forward", "forward root", "forward blocks.1", "backward blocks.3", "step", "reduce", "gather"} <= {
            event["name"] for event in slices
        }
        for event in slices:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)
        begun = [event["id"] for event in mine if event["ph"] == "b"]
        assert sorted(begun) == sorted(set(begun)) == sorted(event["id"] for event in mine if event["ph"] == "e")
        last = [event for event in mine if event["ph"] == "C"][-1]
        assert last["args"]["gather"] == 0
    assert not list(tmp_path.glob("*.tmp"))


def test_profiler_ranges_carry_the_units_name():
    """torch.profiler shows which unit's gather and forward it is; without a profiler nothing is entered."""
    model, optimizer, _ = of_blocks(3, record=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    names = {event.name for event in profile.events()}
    assert {"zeroshard: forward root", "zeroshard: forward blocks.2", "zeroshard: gather blocks.2"} <= names
    assert "zeroshard: reduce blocks.2" in names


def test_recording_costs_little():
    """Counted, not timed: a handful of notes per unit and step, each one object in a bounded ring."""
    _, _, zero = of_blocks(3)
    assert len(zero.events()) <= 16 * LAYERS
    started = time.perf_counter_ns()
    assert zero.events()[0].start < started


def one_records():
    model = Blocks()
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if zero.rank == 0:
        zero.record()
    with pytest.raises(StateError, match=r"ranks \[1\]"):
        zero.trace("nowhere.json")
    return True


def test_a_trace_needs_every_ranks_record(ranks):
    assert ranks.run(2, one_records) == [True, True]
