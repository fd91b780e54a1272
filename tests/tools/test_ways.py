"""`Machine(cluster=...)`: which way to share a model is recommended on a cluster, and what is said for it."""

import json
from fractions import Fraction

import pytest
import torch

import zeroshard
from flat import plan_of
from test_planned_replicas import wide
from zeroshard import Comm, Layout, Machine, Precision
from zeroshard.cli.main import app
from zeroshard.cli.simulate import clock
from zeroshard.errors import UserError
from zeroshard.planner.machines import MACHINES, machine
from zeroshard.planner.simulate import simulate
from zeroshard.planner.ways import seconds

SLOW = "a100-ethernet"
SETTINGS = {"params": 8 * 10**9, "preset": "zeroshard", "ranks": 64, "machine": SLOW}
G, N, K, P = 8, 64, 8, 8 * 10**9


def of(ways, stage, replicas, over="team"):
    return next(way for way in ways.ways if (way.stage, way.replicas, way.over) == (stage, replicas, over))


def test_the_figures_are_those_of_each_plan_alone():
    """Bytes between nodes by hand, and all of them as plans say that ask for one mesh."""
    ways = plan_of(**SETTINGS).ways
    assert (
        len(ways.ways) == 4 + 3 * (4 + 3) + 1
    )  # stages, of one replica; of 2, 4 and 8, over each and over all; of hosts
    assert of(ways, 3, 1).between == 2 * P * (Fraction(2 * (N - 1), N * G) + Fraction(N - G, N))
    assert of(ways, 3, K).between == 8 * Fraction(P, G) * Fraction(K - 1, K)
    assert of(ways, 3, K, "all").between == (4 + Fraction(4, K) + 2) * Fraction(P, G) * Fraction(K - 1, K)
    by_levels = of(ways, 3, 1, "all")
    assert by_levels.between == (4 + Fraction(4, K) + 2 * 2) * Fraction(P, G) * Fraction(K - 1, K)
    assert (by_levels.nbytes, by_levels.hosts) == (of(ways, 3, 1).nbytes, K)
    for way in ways.ways:
        settings = {**SETTINGS, "machine": None, "gpus_per_node": G, "stage": way.stage}
        comm = Comm(hosts=K) if way.hosts > 1 else Comm(replicas=way.replicas, optimizer=way.over)
        (alone,) = plan_of(**settings, comm=comm).stages
        assert (alone.most, *alone.links) == (way.nbytes, way.inside, way.between)
    assert [way.seconds for way in ways.ways] == sorted(way.seconds for way in ways.ways)


@pytest.mark.parametrize(
    ("budget", "settings"),
    [
        ("40GB", 'stage=2, comm=Comm(replicas=8, optimizer="all")'),
        ("12GB", 'stage=3, comm=Comm(replicas=8, optimizer="all")'),
        ("3GB", "stage=3, comm=Comm(hosts=8)"),
        ("2GB", "stage=3, comm=Comm(hosts=8)"),
    ],
)
def test_the_less_memory_the_more_is_sharded(budget, settings):
    ways = plan_of(**SETTINGS, gpu_mem=budget).ways
    best = ways.recommended
    assert best.settings == settings
    assert best.nbytes <= ways.limit
    assert best.seconds == min(way.seconds for way in ways.ways if way.nbytes <= ways.limit)


def test_what_is_said_is_what_the_figures_show():
    ways = plan_of(**SETTINGS, gpu_mem="12GB").ways
    fitting = sum(way.nbytes <= 12e9 for way in ways.ways)
    first, late, beside, faster, _ = ways.because
    assert first.startswith(f"{fitting} of 26 ways fit")
    assert "5,687,500,000 bytes between nodes and 4,000,000,000 bytes of memory" in first
    (plan,) = plan_of(**SETTINGS | {"machine": None, "stage": 3}, comm=Comm(replicas=K, optimizer="all")).stages
    hops, cluster, numel = K - 1, MACHINES[SLOW], P / G / plan.buckets
    sums, back = 4 * numel / cluster.network, 4 * numel * hops / K / cluster.network
    took = hops * (2 * cluster.network_latency + sums) + back
    assert ways.recommended.chain == pytest.approx(took)
    assert late.startswith(f"{took:.3g} s of that come after backward: ") and f"hop by hop ({hops})" in late
    assert beside.startswith("beside it stage 3, one replica")
    assert "17,937,500,000 bytes between nodes and 2,000,000,000 bytes" in beside
    one, best = of(ways, 3, 1), ways.recommended
    assert beside.endswith(f", {one.seconds / best.seconds:.2f} times as long")
    before = ways.ways[: ways.ways.index(best)]
    assert faster.startswith(
        f"less time, but too much memory: {len(before)}; the smallest is stage 2, 8 replicas, the optimizer over all:"
    )
    assert not any(way.fits for way in before)
    shown = ways.shown
    for way in ways.ways:
        beaten = any(o.seconds <= way.seconds and o.nbytes <= way.nbytes and o != way for o in shown)
        assert way in shown or beaten


@pytest.mark.parametrize("ranks", [8, 64])
def test_where_the_backends_own_reduction_is_faster_is_said_by_how_much(ranks):
    """By hand: it rings in fp32, so that inside a node it sends twice as much as 16 bits in an exchange, and between
    nodes the cards of one share what leaves it. It is never what is recommended."""
    limit = None if ranks == G else "2.5GB"  # in which one replica fits
    ways = plan_of(**SETTINGS | {"ranks": ranks, "machine": "h100", "stage": 3, "gpu_mem": limit}).ways
    ordered, native = of(ways, 3, 1), next(way for way in ways.native if way.plain)
    assert ordered.inside == 2 * P * (Fraction(2 * (ranks - 1), ranks) + Fraction(G - 1, ranks))
    assert native.inside == 2 * P * Fraction(4 * (ranks - 1), ranks)
    assert native.between == (native.inside // G if ranks > G else 0)
    assert (native.nbytes, native.settings) == (ordered.nbytes, 'stage=3, comm=Comm(reduce="native")')
    assert {way.reduce for way in ways.ways} == {"ordered"} and ways.recommended in ways.ways
    said, best = ways.because[-1], min((way for way in ways.native if way.fits), key=lambda way: way.seconds)
    if ranks == G:
        assert said == 'reduce="native", whose sums have an order of their own, is no faster here'
        assert native.seconds > ordered.seconds
    else:
        times = ways.recommended.seconds / best.seconds
        assert said.startswith(f'reduce="native" is {times:.2f} times as fast, {best.settings}: ') and times > 1
        assert "bits depend on stage, buckets and ranks" in said


def test_what_the_host_is_asked_counts(tmp_path):
    """Beside the messages; nothing of it on a host that launches, waits and meets at once."""
    ways = plan_of(**SETTINGS | {"machine": "h100"}).ways
    for plan in plan_of(**SETTINGS | {"machine": None}).stages:
        way = of(ways, plan.stage, 1)
        alone = seconds(plan.traffic, MACHINES["h100"], N, 1, plan.buckets)
        assert way.seconds == alone + way.overhead > alone
    path = tmp_path / "free.json"
    free = {**MACHINES["h100"].__dict__, "launch": 0.0, "kernel": 0.0, "drain": 0.0, "message": 0.0}
    path.write_text(json.dumps(free))
    assert {way.overhead for way in plan_of(**SETTINGS | {"machine": str(path)}).ways.ways} == {0.0}


def test_nothing_fits_and_one_node():
    none = plan_of(**SETTINGS, gpu_mem="1GB").ways
    assert none.recommended is None
    assert none.json()["recommended"] is None
    (said,) = none.because
    assert said.startswith("none of 26 ways fits; the smallest is stage 3, one replica")
    one = plan_of(**{**SETTINGS, "ranks": 8, "machine": "a100"}).ways
    assert {way.replicas for way in one.ways} == {1}
    assert {way.between for way in one.ways} == {0}
    assert any("all ranks are on one node" in each for each in one.because)
    assert one.limit == MACHINES["a100"].memory


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("gpus", [2, 4])
def test_the_time_of_messages_is_that_of_a_simulated_clock(gpus):
    """One replica, whose messages run one after the other on the clock too; gathers after the step are all there are."""
    plan = zeroshard.plan(
        wide, Machine(ranks=8, cluster="a100", gpus_per_node=gpus), stage=2, layout=Layout(bucket_mib=0.003)
    )
    cluster = plan.ways.machine
    assert cluster.gpus == gpus
    run = simulate(wide, ranks=8, stage=2, layout=zeroshard.Layout(bucket_mib=0.003))
    way = of(plan.ways, 2, 1)
    assert way.seconds - way.overhead == pytest.approx(clock(run, cluster, ordered=True).moving)  # sums of floats
    assert {(way.replicas, way.over) for way in plan.ways.ways if way.hosts == 1} == {
        (1, "team"), *((k, over) for k in (2, 4) if 8 % (k * gpus) == 0 for over in ("team", "all"))
    }  # fmt: skip


def test_a_machine_of_one_s_own(tmp_path):
    """Half the bandwidth and twice every latency take twice the time, for each way, and change no recommendation."""
    told = {**machine(SLOW).__dict__, "name": "mine"}
    told |= {name: told[name] / 2 for name in ("link", "network")}
    slower = ("link_latency", "network_latency", "launch", "kernel", "drain", "message")
    told |= {name: told[name] * 2 for name in slower}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(told))
    mine, slow = (plan_of(**SETTINGS | {"machine": name}).ways for name in (str(path), SLOW))
    halved = [
        way._replace(seconds=way.seconds / 2, overhead=way.overhead / 2, chain=way.chain / 2) for way in mine.ways
    ]
    assert halved == list(slow.ways)
    assert (mine.recommended.settings, mine.json()["machine"]) == (slow.recommended.settings, "mine")


def test_shapes_are_compared_by_their_peaks(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({f"blocks.{n}.w": [256, 256] for n in range(8)}))
    ways = zeroshard.plan(path, Machine(ranks=16, cluster="a100"), stage=3).ways
    alone = zeroshard.plan(path, Machine(ranks=16), stage=3, comm=Comm(replicas=2, optimizer="all")).stages[0]
    assert of(ways, 3, 2, "all").nbytes == alone.peak > alone.total


def test_ways_that_shard_would_refuse_are_left_out(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({f"blocks.{n}.w": [256, 256] for n in range(8)}))
    for bounds, overs in (("unit", {"team", "all"}), ("tensor", {"team"})):
        ways = zeroshard.plan(path, Machine(ranks=16, cluster="a100"), layout=Layout(bounds=bounds)).ways.ways
        assert {way.over for way in ways} == overs and {way.replicas for way in ways} == {1, 2}
        assert {way.hosts for way in ways} == ({1, 2} if "all" in overs else {1})
    split = Precision(param_dtype=torch.bfloat16, split_master=True)
    ways = zeroshard.plan("jobs:mlp", Machine(ranks=16, cluster="a100"), precision=split).ways.ways
    assert {(way.replicas, way.over, way.hosts) for way in ways} == {(1, "team", 1), (2, "team", 1), (1, "all", 2)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"comm": Comm(replicas=2)}, "replicas: Machine.cluster compares them itself"),
        ({"comm": Comm(optimizer="all")}, "Comm.optimizer: Machine.cluster compares them itself"),
        ({"comm": Comm(transport="shared")}, "transport: Machine.cluster asks for the links of GPUs"),
        (
            {"offload": zeroshard.Offload(parameters="shared")},
            "Offload.parameters: Machine.cluster asks for the links of GPUs",
        ),
        ({"machine": "a1000"}, "no such machine"),
    ],
)
def test_what_a_machine_contradicts_is_refused(settings, said):
    with pytest.raises(UserError, match=said):
        plan_of(**SETTINGS | settings)


def test_the_command_says_it(capsys):
    words = [
        "plan",
        "--params",
        "8e9",
        "--preset",
        "zeroshard",
        "--ranks",
        "64",
        "--machine",
        SLOW,
        "--gpu-mem",
        "12GB",
        "--full",
    ]
    app(words, standalone_mode=False)
    shown = capsys.readouterr().out
    assert shown.startswith(
        "\nStage 3, 8 replicas, the optimizer over all: least time of what fits, 1.37 s for the messages"
    )
    assert "after backward" not in shown.partition(" of a step")[2].partition(".\n")[0]  # of 8 it is little
    assert 'comm=zeroshard.Comm(replicas=8, optimizer="all")' in shown
    ways = plan_of(**SETTINGS, gpu_mem="12GB").ways
    assert all(" ".join(reason.split()) in " ".join(shown.split()) for reason in ways.because)
    app([*words, "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["ways"] == json.loads(json.dumps(ways.json()))


def test_the_verdict_says_how_long_a_chain_of_many_replicas_takes(capsys):
    """Where it is a tenth of the time and more: here of 32, one on each node."""
    words = ["--params", "7e9", "--units", "32", "--ranks", "256", "--machine", "h100", "--stage", "3"]
    app(["plan", *words], standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.split())
    best = plan_of(params=7 * 10**9, units=32, ranks=256, machine="h100", stage=3).ways.recommended
    assert best.replicas == 32 and 10 * best.chain > best.seconds
    assert f"messages of a step ({best.chain:.3g} s of it from replica to replica, after backward), " in shown
