"""Replicas, known beforehand: what is predicted, simulated and compared of several copies of the sharded model."""

import itertools
import json

import pytest
import torch
from torch import nn
from walkthroughs.texts import b as text_b
from walkthroughs.texts.sent_between import sent_between

import selection
import zeroshard
from zeroshard import Comm, Layout, Machine, Offload, Precision, shard
from zeroshard.checkpoint.content import model_state, pieces
from zeroshard.cli.main import app
from zeroshard.comm.agreement import ROW
from zeroshard.explain.reading import read
from zeroshard.explain.run import record_step
from zeroshard.layout.partition import Spec, partition
from zeroshard.layout.stage import STAGES
from zeroshard.planner import built, recipes, states, traffic
from zeroshard.planner.machines import machine
from zeroshard.planner.simulate import RECORDED, simulate

STEPS = 3


def wide():
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(5)])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks, self.last = nn.Linear(16, 24), blocks, nn.Linear(24, 5)

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x).relu()
            return self.last(x)

    return {
        "model": Model(),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
        "batch": lambda step, index: torch.full((4, 16), float(step + index)),
        "loss": lambda model, batch: model(batch).square().mean(),
    }


@pytest.mark.row(86)
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2)), 3])
def test_what_a_relay_sends_is_planned_to_the_byte(stage):
    """Over all replicas, what a simulated rank of each sends is what the plan says on average, bucket by bucket."""
    specs = [
        Spec(name, tuple(param.shape), "float32", 4, 0, True) for name, param in wide()["model"].named_parameters()
    ]
    layout = Layout(bucket_mib=0.003, units=())
    for replicas in (2, 4):
        cut = partition(specs, layout, 8 // replicas)
        runs = [
            simulate(wide, ranks=8, rank=rank, stage=stage, layout=layout, comm=Comm(replicas=replicas))
            for rank in range(0, 8, 8 // replicas)
        ]
        sent = sum(run.ledger.traffic["relay"].sent for run in runs)
        planned = states.recipe_traffic(cut, STAGES[stage], 0, recipes.PRESETS["fp32"], replicas=replicas)
        assert sent == 3 * replicas * planned.relay.sent  # three steps


def narrow():
    """Of 16-bit weights; its number of parameters divides by 8."""
    torch.manual_seed(0)
    return {
        "model": nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)]),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
        "batch": lambda step, index: torch.ones(2, 32),
        "loss": lambda model, batch: model(batch).float().square().mean(),
    }


@pytest.mark.parametrize(
    ("recipe", "dtype", "says"),
    [("paper", torch.bfloat16, (3.5, 3.75, 4.25, 5.25)), ("zeroshard", None, (3.5, 4, 5, 7))],
)
def test_elements_are_the_same_for_every_number_of_replicas_and_bytes_are_not(recipe, dtype, says):
    """What text B is answered with is what the ledgers of all 8 ranks have: running sums go on in fp32."""
    precision = Precision(param_dtype=torch.bfloat16, grad_dtype=dtype, cast_inputs=True)
    for count, nbytes in zip((1, 2, 4, 8), says, strict=True):
        runs = [
            simulate(narrow, ranks=8, rank=rank, stage=1, precision=precision, comm=Comm(replicas=count))
            for rank in range(8)
        ]
        verbs = ("gather", "reduce", "relay")
        sent = sum(moved.sent for run in runs for verb, moved in run.ledger.traffic.items() if verb in verbs)
        steps = 3
        assert sent == steps * 8 * 3 * 32 * 32 * nbytes
        assert text_b.as_sent(count, recipes.PRESETS[recipe]) == nbytes
        assert traffic.replicas(1, 8, count, recipes.PRESETS[recipe]).total == 1.75


@pytest.mark.parametrize("recipe", ["paper", "zeroshard", "fp32"])
def test_what_each_card_sends_has_the_planned_mean(recipe):
    """Over gloo for any nodes, over NCCL where a node holds no more than a replica; at all stages."""
    for ranks, node, part, stage in itertools.product((4, 8, 12), (1, 2, 4), (1, 2, 4, 12), range(4)):
        replicas = min(part, ranks)
        moved = traffic.per_step(24 * ranks, ranks, STAGES[stage], recipes.PRESETS[recipe], replicas=replicas)
        group = ranks // replicas
        if group % node == 0 or node % group == 0:
            for gloo in (True, False):
                if gloo or node <= group:
                    each = sent_between(moved, ranks, node, replicas, gloo=gloo)
                    mean = traffic.links(moved, ranks, node, replicas, gloo=gloo).between
                    assert -(-sum(each) // ranks) == mean, (ranks, node, replicas, stage, gloo)


@pytest.mark.full
def test_512_replicas_of_8_ranks():
    """4,096 ranks, in two seconds: states and messages inside of a run of 8, and one relay for each reduction.

    Ranks agree as often as 8 do; a rank sends 7 messages for each factor of 8 in their number: 28, not 4,095.
    """
    one = simulate(wide, ranks=8, stage=3)
    for rank in (0, 8 * 300 + 3, 4095):
        run = simulate(wide, ranks=4096, rank=rank, stage=3, comm=Comm(replicas=512))
        small = one if rank % 8 == 0 else simulate(wide, ranks=8, rank=rank % 8, stage=3)
        assert built.predict_states(run.zero) == built.predict_states(small.zero)
        assert {state: n for state, n in run.ledger.held.items() if n} == {
            state: n for state, n in small.ledger.held.items() if n
        }
        for verb in ("gather", "reduce"):
            assert run.ledger.traffic[verb] == small.ledger.traffic[verb]
        relays = [event for event in run.events if event.verb == "relay"]
        assert len(relays) == sum(event.verb == "reduce" and event.bucket is not None for event in run.events)
        own = sum(event.logical for event in relays)
        last = rank == 4095
        assert sum(event.sent for event in relays) == own * (511 if last else 1)
        assert sum(event.received for event in relays) == own * (1 if last or not rank else 2)
        asked, before = ([e for e in r.events if e.verb == "control"] for r in (run, small))
        assert (len(asked), len(before)) == (5 * RECORDED, 5 * RECORDED)
        assert {(event.logical, event.sent) for event in before} == {(8 * ROW, 7 * 8 * ROW)}
        assert {(event.logical, event.sent) for event in asked} == {(8 * ROW, 28 * 8 * ROW)}


@pytest.mark.full
def test_what_512_replicas_send_between_nodes():
    """Nodes of 8, which are replicas: gathers and reductions stay inside; (K-1)/K of a shard goes on and back between."""
    (found,) = zeroshard.plan(wide, Machine(ranks=4096, gpus_per_node=8), stage=3, comm=Comm(replicas=512)).stages
    one = simulate(wide, ranks=8, stage=3)
    own = sum(bucket.shard_numel(0) for bucket in one.zero.partition.buckets)
    assert found.traffic.relay.logical == 4 * own
    assert found.links.between == found.traffic.relay.sent == -(-511 * 8 * own // 512)
    assert found.links.inside == -(-7 * (found.traffic.gather.logical + found.traffic.reduce.logical) // 8)


@pytest.mark.full
def test_a_simulation_shows_replicas(capsys):
    """The command: what is handed on, how often ranks agree, and a clock on which a relay takes its hops."""
    words = ["simulate", f"{__file__}:wide", "--ranks", "16", "--json"]
    moving = []
    for replicas in ("1", "2", "8"):
        with pytest.raises(SystemExit) as ended:
            app([*words, "--replicas", replicas])
        assert ended.value.code == 0
        told = json.loads(capsys.readouterr().out)
        (found,) = told["simulated"]
        assert told["replicas"] == int(replicas)
        assert found["predicted"] == found["held"]
        assert bool(found["traffic"]["relay"]["calls"]) == (replicas != "1")
        assert found["control"]["calls"] >= 1
        moving.append(found["time"]["moving"])
    assert moving[1] < moving[2]
    a100 = machine("a100")
    long, busy = a100.relay_seconds(25e9, 5e9, 3, 8)  # a second on, a fifth of one back, over the network
    assert long == pytest.approx(2.2, abs=1e-3)
    assert busy == pytest.approx(1.2, abs=1e-3)
    assert a100.relay_seconds(30e9, 30e9, 4, 2)[1] == pytest.approx(0.2, abs=1e-3)  # all on one node


def copied(stage, offload):
    parts = wide()
    optimizer = parts["optimizer"](parts["model"].parameters())
    zero = shard(parts["model"], optimizer, stage=stage, comm=Comm(replicas=2), offload=offload)
    parts["loss"](parts["model"], parts["batch"](0, zero.rank)).backward()
    optimizer.step()
    own = pieces(model_state(zero._engine))
    held = {tier: {state: n for state, n in held.items() if n} for tier, held in zero.ledger().tiers.items()}
    predicted = {tier: held for tier, held in built.predict_tiers(zero).items() if held}
    return built.holding(zero).snapshot(), sum(p.tensor.numel() * p.tensor.itemsize for p in own), predicted, held


@pytest.mark.full
@pytest.mark.parametrize("stage", selection.STAGES)
def test_a_save_copies_a_replica_s_part_and_tiers_hold_what_is_predicted(ranks, stage):
    """Each element is some rank's to write, and nobody's beside: values, states, and step counters."""
    numel = sum(param.numel() for param in wide()["model"].parameters())
    tensors = len(list(wide()["model"].parameters()))
    for offload in (None, Offload(optimizer="cpu", gradients="cpu")):
        found = ranks.run(4, copied, stage, offload)
        assert sum(written for _, written, _, _ in found) == 12 * numel + 4 * tensors
        for predicted, written, rests, held in found:
            assert predicted == written
            assert rests == {tier: states for tier, states in held.items() if states}


def recorded(folder, over="team"):
    parts = wide()
    optimizer = parts["optimizer"](parts["model"].parameters())
    zero = shard(parts["model"], optimizer, stage=3, comm=Comm(replicas=2, optimizer=over))
    zero.record(1 << 16)
    for step in range(2):
        parts["loss"](parts["model"], parts["batch"](step, zero.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    record_step(zero, folder)


def test_a_recorded_run_with_replicas_is_one_the_page_takes(ranks, tmp_path):
    """Shards of a team and ranks of two of them; what was handed on is a message like any other."""
    ranks.run(4, recorded, tmp_path)
    run = read(tmp_path)
    assert run["title"] == "Model, stage 3, 4 ranks in 2 replicas"
    assert (run["ranks"], run["layout"]["ranks"], len(run["summary"])) == (4, 2, 4)
    assert [one["numel"] for one in run["summary"][:2]] == [one["numel"] for one in run["summary"][2:]]
    assert "relay" in run["recording"]["verbs"]
    (group,) = run["groups"]
    assert (group["teams"], group["rows"], group["spread"], group["numel"]) == (
        [[0, 1], [2, 3]],
        False,
        False,
        run["numel"],
    )
    rows = {row["verb"]: row for row in run["traffic"]}
    assert rows["relay"]["calls"] == rows["reduce"]["calls"]
    assert rows["relay"]["sent"] == rows["relay"]["logical"]


@pytest.mark.full
def test_the_page_says_which_part_of_a_shard_a_replica_updates(ranks, tmp_path):
    """The document's parts are those that the layout gives each rank, one after the other."""
    ranks.run(4, recorded, tmp_path, "all")
    run = read(tmp_path)
    (group,) = run["groups"]
    assert (group["teams"], group["spread"]) == ([[0, 1], [2, 3]], True)
    for bucket in run["layout"]["buckets"]:
        cuts = bucket["updates"]
        assert len(cuts) == 5
        assert cuts == sorted(cuts)
        assert (cuts[0], cuts[2], cuts[4]) == (0, bucket.get("share", bucket.get("bounds", [0, 0])[1]), bucket["numel"])
    assert {row["verb"] for row in run["traffic"]} >= {"relay", "share"}
