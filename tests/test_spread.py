"""`Comm(replicas=K, optimizer="all")`: parameters over a replica's ranks, what an optimizer updates and keeps over all."""

from __future__ import annotations

import pytest
import torch

import test_bits
import zeroshard
from test_mesh import job_model, replicated, train, weights
from zeroshard import Comm, Layout, Precision
from zeroshard.checkpoint import meeting
from zeroshard.errors import PeerError, UserError
from zeroshard.layout.stage import Degree
from zeroshard.planner import predict_states

STAGES = (1, 2, 3)
STATES = ("master", "exp_avg", "exp_avg_sq")


def spread(stage, replicas, **options):
    torch.manual_seed(0)
    model = job_model()
    one = torch.optim.AdamW(model.parameters(), lr=1e-2)
    comm = Comm(replicas=replicas, optimizer="all", **options.pop("comm", {}))
    return model, one, zeroshard.shard(model, one, stage=stage, comm=comm, **options)


def held(stage, dtype):
    model, optimizer, zero = spread(stage, 2, precision=Precision(param_dtype=dtype, cast_inputs=dtype is not None))
    train(model, optimizer, zero, 1)
    before = zero.ledger().traffic["share"].sent
    train(model, optimizer, zero, 1, first=1)
    ledger = zero.ledger()
    sent = ledger.traffic["share"].sent - before
    parts = sum(
        last - first for b in zero.partition.buckets for first, last in [seat(zero).own(b.portions(seat(zero)))]
    )
    owners = {state: zero.owners("0.weight", state) for state in ("parameters", "optimizer")}
    return predict_states(zero), {k: v for k, v in ledger.held.items() if v}, sent, parts, owners


def seat(zero):
    return zero._engine.group.team.seat


@pytest.mark.row(86)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_two_ranks_keep_the_same_optimizer_state(ranks, stage, dtype):
    """By the ledger, as planned, to the byte: and in all as many bytes as one copy has."""
    if stage == 0:
        pytest.skip("every rank keeps all of it")
    told = ranks.run(4, held, stage, dtype)
    numel = sum(p.numel() for p in job_model().parameters())
    for predicted, ledger, sent, parts, _ in told:
        assert predicted == {state: ledger.get(state, 0) for state in predicted}
        assert sent == parts * (4 if dtype is None else 2)  # to the one other replica
    kept = [sum(ledger.get(state, 0) for ledger in (each[1] for each in told)) for state in STATES]
    assert kept[1] == kept[2] == 4 * numel
    assert dtype is None or 4 * numel <= kept[0] < 4 * (numel + 128 * 16)  # masters have padding
    owners = told[0][4]
    assert sorted((o.start, o.stop) for o in owners["optimizer"])[0][0] == 0
    assert sum(o.stop - o.start for o in owners["optimizer"]) == 16 * 24
    assert sum(o.stop - o.start for o in owners["parameters"]) == 16 * 24 * (2 if stage == 3 else 4)


# ----------------------------------------------------------------------------------------------------------------- sums


@pytest.mark.heavy
@pytest.mark.row(86)
@pytest.mark.parametrize("precision", test_bits.PRECISIONS)
@pytest.mark.parametrize(
    ("world", "replicas"), [(4, 2), *(pytest.param(*each, marks=pytest.mark.full) for each in ((3, 3), (6, 3), (4, 4)))]
)
def test_sums_whose_parts_each_replica_keeps_have_the_bits_of_plain_torch(world, replicas, precision):
    """The next backward goes on from parts of all replicas: weights, states and norms, `==`, three backwards a step."""
    configurations = [(stage, "many", None, "loop") for stage in STAGES]
    comm = Comm(replicas=replicas, optimizer="all")
    test_bits.check(world, configurations, precision, backwards=3, steps=2, comm=comm)


def relayed(stage, backwards):
    """Bytes that this rank sends and receives in relays, its parts of sums, and all gradients of its shards."""
    model, _, zero = spread(stage, 2)
    for backward in range(backwards):
        data = torch.Generator().manual_seed(10 * backward + zero.rank)
        model(torch.randn(4, 16, generator=data)).square().mean().backward()
    moved, sits = zero.ledger().traffic["relay"], seat(zero)
    parts = [b.held(sits, Degree.ALL) for b in zero.partition.buckets]
    local = sum(p.grad.to_local().numel() for p in model.parameters())
    shards = sum(b.shard_numel(sits.position) for b in zero.partition.buckets)
    return moved.sent, moved.sent_and_received - moved.sent, sum(last - first for first, last in parts), shards, local


@pytest.mark.row(86)
@pytest.mark.parametrize("backwards", [1, 3])
def test_averages_go_to_whoever_keeps_them_alone(ranks, stage, backwards):
    """To the byte: sums to the next replica, averages to their owners, and before another backward back to the first."""
    if stage == 0:
        pytest.skip("every rank keeps all of it")
    told = ranks.run(4, relayed, stage, backwards)
    for position in (0, 1):
        (sent, received, first, shards, _), (back, came, last, _, _) = told[position], told[position + 2]
        assert first + last == shards
        assert (sent, came) == (4 * shards * backwards, 4 * shards * backwards)
        assert (back, received) == (4 * (first * backwards + last * (backwards - 1)),) * 2
    numel = sum(p.numel() for p in job_model().parameters())
    assert sum(local for *_, local in told) == numel


def spoiled(at, micro, where):
    model, optimizer, zero = spread(2, 2, precision=Precision(nonfinite="skip"))
    for backward in range(2):
        x = torch.ones(4, 16)
        if (zero.rank, backward) == (at, micro):
            x[1, where] = torch.nan
        model(x).square().mean().backward()
    optimizer.step()
    found = zero.nonfinite
    optimizer.zero_grad()
    train(model, optimizer, zero, 1)  # forgiven
    return found, zero.skipped


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("at", range(4))
def test_a_nan_is_named_by_a_rank_that_has_handed_it_on(ranks, at, micro):
    """It is found by whoever keeps that part of the sum, and no contribution lies beside that."""
    for found, skipped in ranks.run(4, spoiled, at, micro, 3):
        assert (found.rank, found.micro_batch, skipped) == (at, micro + 1, 1), found


def spoiled_twice(over, mended):
    model, optimizer, zero = replicated(2, 2, precision=Precision(nonfinite="skip"))
    if over == "all":
        model, optimizer, zero = spread(2, 2, precision=Precision(nonfinite="skip"))
    for backward, at in enumerate((0, 3) if mended else (3, 0)):
        x = torch.ones(4, 16)
        if zero.rank == at:
            x[1, 3] = torch.nan
        model(x).square().mean().backward()
        if mended and not backward:
            for param in model.parameters():
                param.grad.nan_to_num_()
    optimizer.step()
    return zero.nonfinite


@pytest.mark.parametrize("mended", [False, True])
def test_of_two_nans_at_one_place_the_first_that_counts_is_named(ranks, mended):
    for over in ("team", "all"):
        told = ranks.run(4, spoiled_twice, over, mended)
        assert [(found.rank, found.micro_batch) for found in told] == [(3, 1 + mended)] * 4, over


def edited_here_and_there(over, group, stage):
    """An edit of an optimizer's parameters divides sums where this rank has any of them, and not elsewhere."""
    torch.manual_seed(0)
    model = job_model().bfloat16()
    weights = [param for name, param in model.named_parameters() if "weight" in name]
    biases = [param for name, param in model.named_parameters() if "bias" in name]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases}], lr=1e-2)
    comm = Comm(replicas=2, optimizer=over)
    precision = Precision(param_dtype=torch.bfloat16)
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=comm, precision=precision)
    data = torch.Generator().manual_seed(zero.rank)

    def backward():
        model(torch.randn(4, 16, generator=data).bfloat16()).square().mean().backward()

    with zero.no_sync():
        backward()
        backward()
    before = [param.grad.full_tensor() for param in model.parameters()]
    for param in optimizer.param_groups[group]["params"]:
        if param.grad is not None:
            param.grad.mul_(1.0)
    after = [param.grad.full_tensor() for param in model.parameters()]
    backward()
    return before, after, [param.grad.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("group", [0, 1], ids=["weights", "biases"])
def test_a_sum_that_some_ranks_have_divided_goes_on_from_what_it_was(ranks, stage, group):
    found = [ranks.run(4, edited_here_and_there, over, group, stage) for over in ("team", "all")[: 1 + bool(stage)]]
    for each in found:
        for before, after, last in each:
            assert all(map(torch.equal, before, after))
            assert all(map(torch.equal, last, found[0][0][2]))


def combined():
    torch.manual_seed(0)
    one, two = torch.nn.Linear(32, 32, bias=False), torch.nn.Module()
    for name, numel in (("r", 256), ("q", 1024), ("s", 256)):
        setattr(two, name, torch.nn.Parameter(torch.randn(numel)))
    one.weight = torch.nn.Parameter(torch.randn(1024))
    model = torch.nn.Module()
    model.units = torch.nn.ModuleList([one, two])
    params = [one.weight, two.r, two.q, two.s]
    optimizer = torch.optim.SGD(params, lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=2, comm=Comm(replicas=2))
    (sum(param.square().sum() for param in params) * (1 + zero.rank)).backward()
    one.weight.grad.add_(two.q.grad)
    return one.weight.grad.full_tensor()


def test_gradients_that_replicas_have_whole_shards_of_are_compared_by_shards(ranks):
    first, *others = ranks.run(4, combined)
    assert all(torch.equal(first, other) for other in others)


def cleared():
    model, optimizer, zero = spread(2, 2, precision=Precision(nonfinite="raise"))
    x = torch.full((4, 16), torch.nan if zero.rank == 3 else 1.0)
    model(x).square().mean().backward()
    for param in model.parameters():
        param.grad.zero_()
    optimizer.step()
    return zero.nonfinite


def test_a_nan_that_is_edited_away_is_forgiven(ranks):
    assert ranks.run(4, cleared) == [None] * 4


def edits(stage):
    return edited(*spread(stage, 2))


def edited(model, optimizer, zero):
    """Weights after edits inside gathered(), and of an optimizer's own part outside of a step."""
    train(model, optimizer, zero, 1)
    with zero.gathered(), torch.no_grad():
        model[0].weight.mul_(2)
    with torch.no_grad():
        for fragment in optimizer.param_groups[0]["params"]:
            fragment.add_(1)
    train(model, optimizer, zero, 1, first=1)
    zero.check_replicas()
    return weights(model, zero)


def test_edits_count_on_all_ranks(ranks):
    first, *others = (ranks.run(4, edits, stage) for stage in STAGES)
    assert all(torch.equal(found, first[0]) for each in (first, *others) for found in each)


def edits_under_way():
    """How many messages of the edited weights had not arrived yet at each comparison."""
    compare, under_way = meeting.check_replicas, []

    def count(running, buckets, number):
        under_way.append(sum(len(bucket._work) for bucket in buckets))
        compare(running, buckets, number)

    meeting.check_replicas = count
    edits(1)
    return under_way


@pytest.mark.processes
def test_edits_are_compared_when_they_have_arrived(ranks):
    """What is still on its way to a rank is no edit of the other ranks alone."""
    assert ranks.run(4, edits_under_way) == [[0, 0]] * 4


def averaged(stage, how):
    model, optimizer, zero = (spread if how == "all" else replicated)(stage, 2)
    average = zero.average(0.5)
    for step in range(2):
        train(model, optimizer, zero, 1, first=step)
        average.update()
    with average.swapped():
        swapped = weights(model, zero)
    return swapped, weights(model, zero)


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_averages_of_weights_go_to_all_replicas(ranks, stage):
    want = ranks.run(4, averaged, stage, "team")[0]
    for found in ranks.run(4, averaged, stage, "all"):
        assert all(map(torch.equal, found, want))


def flipped():
    model, optimizer, zero = spread(3, 2)
    train(model, optimizer, zero, 1)
    if zero.rank == 3:
        bucket = model[0].weight._zeroshard.bucket
        with bucket.parameters.here() as own:
            own.view(torch.int32)[1] ^= 1
    with pytest.raises(PeerError) as caught:
        zero.check_replicas()
    return str(caught.value)


@pytest.mark.row(88)
def test_a_flipped_bit_of_a_parameter_is_still_named(ranks):
    assert all("shard 1 of" in said and "ranks 1 and 3" in said for said in ranks.run(4, flipped))


def test_what_contradicts_it_is_refused():
    with pytest.raises(UserError, match=r"(?s)optimizer says over which ranks.*all"):
        Comm(optimizer="al")


def refused(options):
    with pytest.raises(UserError) as caught:
        spread(options.pop("stage", 3), 2, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stage": 0}, "whole optimizer state at stage 0"),
        ({"layout": Layout(bounds="tensor")}, "no tensor is to be cut"),
        ({"stage": 2, "precision": Precision(param_dtype=torch.bfloat16, split_master=True)}, "halves of"),
    ],
    ids=["stage 0", "tensors", "split masters"],
)
def test_what_cannot_be_spread_is_refused_by_name(ranks, options, said):
    assert all(said in each for each in ranks.run(2, refused, options))


def one_replica():
    _, _, zero = spread(3, 1)
    return zero.placements.optimizer


def test_of_one_replica_all_ranks_are_its_team(ranks):
    assert ranks.run(2, one_replica) == [Degree.TEAM] * 2
