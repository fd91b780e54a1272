"""`Comm(hosts=H)`: one copy of the model over all ranks, whose messages between hosts go by two levels."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

import test_bits
import zeroshard
from test_mesh import job_model, train, weights
from test_spread import edited
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import UserError
from zeroshard.layout.stage import Degree
from zeroshard.planner import predict_states

STAGES = (0, 1, 2, 3)
BF16 = {"param_dtype": torch.bfloat16, "cast_inputs": True}
WAYS = {
    "fp8": {"precision": Precision(**BF16, fp8=["0.weight"])},
    "split masters": {"precision": Precision(**BF16, split_master=True)},
    "int8": {"comm": {"reduce": "int8"}},
    "no overlap": {"comm": {"overlap": False}},
    "two ahead": {"comm": {"prefetch": 2}},
    "kept": {"comm": {"release_after_forward": False}},
    "host memory": {"offload": Offload(parameters="cpu", gradients="cpu", optimizer="cpu")},
    "files": {"offload": {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}},
    "shared memory": {"comm": {"transport": "shared"}},
    "recomputed": {"layout": Layout(recompute=True)},
    "whole": {"layout": Layout(whole=["0.weight"])},
}


def over(hosts, stage, **options):
    torch.manual_seed(0)
    model = job_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    comm = Comm(hosts=hosts, **options.pop("comm", {}))
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, comm=comm, **options)


# ----------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.heavy
@pytest.mark.row(109)
@pytest.mark.parametrize("precision", test_bits.PRECISIONS)
@pytest.mark.parametrize(
    ("world", "hosts"), [(4, 2), *(pytest.param(*each, marks=pytest.mark.full) for each in ((3, 3), (6, 3), (6, 2)))]
)
def test_ranks_of_several_hosts_have_the_bits_of_plain_torch(world, hosts, precision):
    """Weights, states and norms, `==`, three backwards a step."""
    configurations = [(stage, "many", None, "loop") for stage in STAGES]
    test_bits.check(world, configurations, precision, backwards=3, steps=2, comm=Comm(hosts=hosts))


def trained(hosts, stage, way, folder):
    options = dict(WAYS[way])
    if isinstance(options.get("offload"), dict):
        options["offload"] = Offload(**options["offload"], path=f"{folder}/{hosts}-{stage}")
    model, optimizer, zero = over(hosts, stage, **options)
    for step in range(2):
        train(model, optimizer, zero, 1, first=step)
    return weights(model, zero)


OF_GATHERS = ("kept", "two ahead", "recomputed")  # which are of stage 3


@pytest.mark.parametrize(
    ("way", "level"), [(way, level) for way in WAYS for level in ((3,) if way in OF_GATHERS else (1, 2, 3))]
)
def test_no_setting_beside_it_changes_a_bit(ranks, way, level, tmp_path):
    want = ranks.run(4, trained, None, level, way, tmp_path)[0]
    for found in ranks.run(4, trained, 2, level, way, tmp_path):
        assert all(map(torch.equal, found, want))


# ---------------------------------------------------------------------------------------------------------------- bytes


def held(stage, dtype):
    model, optimizer, zero = over(2, stage, precision=Precision(param_dtype=dtype, cast_inputs=dtype is not None))
    train(model, optimizer, zero, 1)
    before = {verb: moved.sent for verb, moved in zero.ledger().traffic.items()}
    zero.record()
    train(model, optimizer, zero, 1, first=1)
    gathers = [event.bucket for event in zero.events() if event.verb == "gather" and event.state != "gradients"]
    ledger, sits = zero.ledger(), zero._engine.group.team.seat
    sent = {verb: moved.sent - before.get(verb, 0) for verb, moved in ledger.traffic.items()}
    buckets = [zero.partition.buckets[index] for index in gathers]
    part = sum(last - first for bucket in buckets for first, last in [bucket.held(sits, Degree.ALL)])
    own = sum(bucket.shard_numel(sits.position) for bucket in buckets)
    return zero.placements, predict_states(zero), {k: v for k, v in ledger.held.items() if v}, sent, part, own


@pytest.mark.row(109)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_each_element_rests_once_and_crosses_between_hosts_once_in_a_gather(ranks, stage, dtype):
    """By the ledger, to the byte: a rank sends other hosts its own part alone, and its host the whole shard."""
    told = ranks.run(4, held, stage, dtype)
    numel, size = sum(p.numel() for p in job_model().parameters()), 4 if dtype is None else 2
    for placed, predicted, ledger, sent, part, own in told:
        assert placed == tuple(Degree.ALL if each else Degree.RANK for each in zeroshard.layout.stage.STAGES[stage])
        assert predicted == {state: ledger.get(state, 0) for state in predicted}
        if stage:
            assert (sent["share"], sent["gather"]) == (part * size, own * size)
    kept = [sum(ledger.get(state, 0) for _, _, ledger, *_ in told) for state in ("exp_avg", "parameters", "gradients")]
    assert kept[0] == 4 * numel * (1 if stage else 4)
    if stage == 3:
        padded = numel + 128 * 16
        assert kept[1] == 0 if dtype else 4 * numel <= kept[1] < 4 * padded
        assert 4 * numel <= kept[2] < 4 * padded


# ------------------------------------------------------------------------------------------------- order, edits, errors


def gathered_ahead(prefetch):
    """What is on its way when a unit begins, and the second levels that wait."""
    model, optimizer, zero = over(2, 3, comm={"prefetch": prefetch}, layout=Layout(units=["0", "2", "3"]))
    train(model, optimizer, zero, 2)
    levels, found = zero._engine.group._groups.gathers.levels, []
    for at in (0, 2, 3):
        model[at].register_forward_pre_hook(lambda *_: found.append(len(levels.waiting)))
    model(torch.ones(4, 16))
    return found


@pytest.mark.processes
def test_second_levels_wait_for_the_program_and_not_it_for_them(ranks):
    """One unit ahead its second level begins where it is used; two ahead, where the next one is asked for."""
    assert ranks.run(4, gathered_ahead, 1) == [[1, 1, 0]] * 4
    assert ranks.run(4, gathered_ahead, 2) == [[2, 1, 0]] * 4


def edits(stage):
    """And before them one of one rank for all."""
    model, optimizer, zero = over(2, stage)
    with zero.gathered("2.*", write_from=3), torch.no_grad():
        model[2].weight.add_(zero.rank)
    return edited(model, optimizer, zero)


def test_edits_count_on_all_ranks(ranks):
    first, *others = (ranks.run(4, edits, stage) for stage in (1, 2, 3))
    assert all(torch.equal(found, first[0]) for each in (first, *others) for found in each)


def said():
    _, _, zero = over(2, 3)
    return zero.replicas, zero.hosts, zero.world_size


def test_hosts_are_no_replicas(ranks):
    assert ranks.run(4, said) == [(1, 2, 4)] * 4


def refused(options):
    with pytest.raises(UserError) as caught:
        over(options.pop("hosts", 2), options.pop("stage", 3), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": 3}, "hosts must divide the ranks"),
        ({"layout": Layout(bounds="tensor")}, "cut between the hosts"),
        ({"offload": Offload(parameters="shared")}, "instead: Comm(replicas=2), or Offload()"),
    ],
    ids=["no divisor", "tensors", "one copy"],
)
def test_what_does_not_go_with_hosts_is_refused_by_name(ranks, options, said):
    assert all(said in each for each in ranks.run(2, refused, options))


def test_replicas_on_several_hosts_are_refused():
    with pytest.raises(
        UserError, match=r"(?s)one copy of the model, or each host .*Comm\(hosts=2\), or Comm\(replicas=4\)"
    ):
        Comm(hosts=2, replicas=4)


def on_a_mesh(shape):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", shape)
    torch.manual_seed(0)
    model = job_model()
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        return zeroshard.shard(model, optimizer, comm=Comm(group=mesh, hosts=2)).hosts
    except UserError as error:
        return str(error)


@pytest.mark.processes
def test_a_mesh_of_one_axis_has_hosts_and_one_of_two_replicates(ranks):
    assert ranks.run(4, on_a_mesh, (4,)) == [2] * 4
    assert all("first axis of a DeviceMesh replicates" in said for said in ranks.run(4, on_a_mesh, (2, 2)))


# ---------------------------------------------------------------------------------------------------------------- edits


def filled(stage, comm):
    torch.manual_seed(0)
    model = job_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=comm)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("zeroshard").addHandler(handler)
    with zero.gathered(), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(zero.rank))
    logging.getLogger("zeroshard").removeHandler(handler)
    return weights(model, zero), messages


@pytest.mark.parametrize("stage", [1, 3])
def test_of_edits_that_differ_the_owner_s_count_where_each_element_has_one(ranks, stage):
    """As with one copy directly; at stage 1 hosts are replicas, of which rank 0's edits count."""
    told = ranks.run(4, filled, stage, Comm(hosts=2))
    assert all(torch.equal(found, told[0][0]) for found, _ in told)
    owners = {float(each) for each in told[0][0].unique()}
    assert owners == ({0.0, 1.0, 2.0, 3.0} if stage == 3 else {0.0})
    assert ("its owner's counts" if stage == 3 else "rank 0's count") in told[0][1][0]


# ---------------------------------------------------------------------------------------------------------- checkpoints


def saved(comm, stage, folder):
    torch.manual_seed(0)
    model = job_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=comm)
    if (path := zero.latest(folder)) is not None:
        zero.load(path)
        train(model, optimizer, zero, 1, first=1)
    else:
        train(model, optimizer, zero, 1)
        zero.save(f"{folder}/one")
    return weights(model, zero)


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(("hosts", "all", "plain"), 2)])
def test_checkpoints_load_from_and_into_other_settings(ranks, before, after, tmp_path):
    ways = {"hosts": Comm(hosts=2), "all": Comm(replicas=2, optimizer="all"), "plain": Comm()}
    host = ranks
    want = []
    for name, (one, two) in {"want": ("plain", "plain"), "found": (before, after)}.items():
        host.run(4, saved, ways[one], 3, tmp_path / name)
        want.append(host.run(4, saved, ways[two], 2 if name == "found" else 3, tmp_path / name)[0])
    assert torch.equal(*want)
