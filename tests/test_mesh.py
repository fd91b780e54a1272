"""Replicas of a sharded model: the number of them never changes a bit, and everything else knows of them.

Ranks are r = replica * size + position. Gathers stay inside a replica; the running sum of each shard is handed on from
replica to replica, so that K replicas of N/K ranks add what one replica of N ranks adds, in the same order.
"""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import test_bits
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import NotFiniteError, PeerError, UserError

STAGES = (0, 1, 2, 3)
MESHES = ((2, 2), (3, 3), (4, 2), (4, 4))  # ranks, replicas


def replicated(stage, replicas, *, group=None, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16), nn.Linear(16, 5))
    one = optimizer(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, one, stage=stage, comm=Comm(group=group, replicas=replicas), **options)
    return model, one, zero


def train(model, optimizer, zero, steps, first=0):
    """Different data on every rank; a checkpoint's next step goes on where it was."""
    for step in range(first, first + steps):
        data = torch.Generator().manual_seed(100 * step + zero.rank)
        model(torch.randn(4, 16, generator=data)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def weights(model, zero):
    with zero.gathered():
        return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


# ----------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.row(85)
@pytest.mark.parametrize("precision", test_bits.PRECISIONS)
@pytest.mark.parametrize(
    ("world", "replicas"), [MESHES[0], *(pytest.param(*each, marks=pytest.mark.full) for each in MESHES[1:])]
)
def test_any_number_of_replicas_has_the_bits_of_plain_torch(world, replicas, precision):
    """Weights, masters, states and norms, `==`, at every stage: two backwards a step, clipped, several buckets."""
    configurations = [(stage, "many", None, "loop") for stage in STAGES]
    test_bits.check(world, configurations, precision, backwards=2, steps=3, comm=Comm(replicas=replicas))


def in_tier(replicas, tier, folder):
    path = {"path": folder} if tier == "nvme" else {}
    offload = Offload(optimizer=tier, gradients=tier, parameters=tier, **path)
    found = []
    for stage in STAGES:
        model, optimizer, zero = replicated(
            stage, replicas, offload=offload, precision=Precision(param_dtype=torch.bfloat16)
        )
        for step in range(2):
            for backward in range(2):
                data = torch.Generator().manual_seed(100 * step + 10 * backward + zero.rank)
                model(torch.randn(4, 16, generator=data).bfloat16()).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model, zero))
    return found


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(85)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_replicas_have_the_same_bits_in_any_tier(ranks, tmp_path, tier):
    want = ranks.run(4, in_tier, 1, "device", None)[0]
    for replicas in (2, 4):
        for found in ranks.run(4, in_tier, replicas, tier, tmp_path):
            assert all(map(torch.equal, found, want))


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("options", [{"overlap": False}, {"prefetch": 3}], ids=["no overlap", "prefetch 3"])
def test_overlap_changes_no_bit_of_a_relay(options):
    configurations = [(stage, "many", None, "loop") for stage in STAGES]
    test_bits.check(4, configurations, "fp32", backwards=2, steps=3, comm=Comm(replicas=2, **options))


def added_up(replicas):
    found = []
    for stage in STAGES:
        model, optimizer, zero = replicated(stage, replicas)
        for step in range(2):
            data = torch.Generator().manual_seed(100 * step + zero.rank)
            with zero.no_sync():
                model(torch.randn(4, 16, generator=data)).square().mean().backward()
            model(torch.randn(4, 16, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model, zero))
    return found


@pytest.mark.full
def test_no_sync_is_the_same_with_replicas(ranks):
    one = ranks.run(4, added_up, 1)
    for replicas in (2, 4):
        for mine, theirs in zip(ranks.run(4, added_up, replicas), one, strict=True):
            assert all(map(torch.equal, mine, theirs))
            assert all(torch.equal(mine[0], each) for each in mine)


# ---------------------------------------------------------------------------------------------------------------- bytes


def moved(stage, replicas):
    model, optimizer, zero = replicated(stage, replicas, layout=Layout(units=()))
    train(model, optimizer, zero, 1)
    traffic = zero.ledger().traffic
    (bucket,) = zero.partition.buckets
    position = zero.rank % zero.partition.ranks
    sent = {verb: traffic[verb].sent for verb in ("gather", "reduce", "relay") if verb in traffic}
    relayed = traffic["relay"].sent_and_received if "relay" in traffic else 0
    return bucket.numel, bucket.shard_numel(position), sent, relayed


@pytest.mark.row(86)
@pytest.mark.parametrize(("world", "replicas"), [(4, 2), (4, 4), (3, 3)])
def test_the_bytes_of_a_relay_are_those_of_a_ring(ranks, world, replicas, stage):
    """Inside a replica (G-1)/G of the bucket as among G ranks; between them 2(K-1) messages of a shard in all."""
    told = ranks.run(world, moved, stage, replicas)
    size = world // replicas
    for rank, (numel, own, sent, relayed) in enumerate(told):
        last = rank // size == replicas - 1
        assert sent.get("reduce", 0) == 4 * (numel - own)
        assert sent["relay"] == 4 * own * (replicas - 1 if last else 1)
        first = rank // size == 0
        assert relayed - sent["relay"] == 4 * own * ((not first) + (not last))
        if stage in (1, 2):
            assert sent.get("gather", 0) == 4 * own * (size - 1)
    between = sum(sent["relay"] for _, _, sent, _ in told)
    assert between == 2 * (replicas - 1) * 4 * told[0][0]


@pytest.mark.row(86)
def test_a_rank_holds_what_a_rank_of_a_smaller_run_holds(ranks, stage):
    """With K replicas of G ranks: the states of a run of G ranks, by the ledger and by `owners`."""
    small = ranks.run(2, held, stage, 1)
    for rank, (states, owners) in enumerate(ranks.run(4, held, stage, 2)):
        assert states == small[rank % 2][0]
        if stage:
            mine, theirs = owners, small[0][1]
            assert [each[1:] for each in mine] == [each[1:] for each in theirs] * 2
            assert [each.rank for each in mine] == [*range(len(theirs)), *range(2, 2 + len(theirs))]


def held(stage, replicas):
    model, optimizer, zero = replicated(stage, replicas)
    train(model, optimizer, zero, 1)
    kept = ("parameters", "gradients", "master", "exp_avg", "exp_avg_sq", "step")
    states = {state: zero.ledger().held.get(state, 0) for state in kept}
    return states, zero.owners("0.weight")


# --------------------------------------------------------------------------------------------------------- checkpoints


def save(stage, replicas, folder):
    model, optimizer, zero = replicated(stage, replicas)
    train(model, optimizer, zero, 2)
    zero.save(folder)
    train(model, optimizer, zero, 1, first=2)
    return weights(model, zero)


def resume(stage, replicas, folder, world):
    model, optimizer, zero = replicated(stage, replicas)
    zero.load(folder)
    if zero.world_size == world:
        train(model, optimizer, zero, 1, first=2)
    return weights(model, zero)


@pytest.mark.heavy
@pytest.mark.row(87)
def test_a_checkpoint_is_written_once_and_loads_with_any_number_of_replicas(ranks, tmp_path, stage):
    """Replicas share the writing: as many bytes of tensors as one replica writes; resumed at every K, the same bits."""
    runs = {}
    for replicas in (1, 2, 4):
        folder = tmp_path / f"{replicas}"
        runs[replicas] = ranks.run(4, save, stage, replicas, folder)[0]
        shares = [path.stat().st_size for path in sorted(folder.glob("*.safetensors"))]
        assert max(shares) < 0.45 * sum(shares)  # and not all of it by one replica of two
        assert sum(shares) < 1.2 * 12 * sum(p.numel() for p in job_model().parameters()) + 4096 * 4
    assert torch.equal(runs[1], runs[2])
    assert torch.equal(runs[1], runs[4])
    for saved, loaded in ((1, 2), (2, 1), (4, 2), (2, 4)):
        for found in ranks.run(4, resume, stage, loaded, tmp_path / f"{saved}", 4):
            assert torch.equal(found, runs[1])
    (alone,) = ranks.run(1, resume, stage, 1, tmp_path / "2", 4)
    (pair, _) = ranks.run(2, resume, stage, 2, tmp_path / "4", 4)
    assert torch.equal(alone, pair)


def job_model():
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16), nn.Linear(16, 5))


def flipped(stage, what):
    model, optimizer, zero = replicated(stage, 2)
    train(model, optimizer, zero, 1)
    zero.check_replicas()
    if zero.rank == 3:
        fragment = optimizer.param_groups[0]["params"][0]
        tensor = optimizer.state[fragment]["exp_avg"] if what == "state" else fragment.data
        tensor.view(-1).view(torch.int32)[1] ^= 1
    with pytest.raises(PeerError) as caught:
        zero.check_replicas()
    return str(caught.value)


@pytest.mark.row(88)
@pytest.mark.parametrize("what", ["state", "weight"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_flipped_bit_in_one_replica_is_named(ranks, what, stage):
    """Nobody else holds that element's copy but the rank at the same position: both are named, on every rank."""
    for message in ranks.run(4, flipped, stage, what):
        everywhere = what == "weight" and stage < 3  # a parameter that every rank holds
        assert ("ranks 0 and 3" if everywhere else "shard 1 of") in message
        assert everywhere or ("ranks 1 and 3" in message and "element 1 is" in message)


def edited(stage):
    model, _, zero = replicated(stage, 2)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("zeroshard").addHandler(handler)
    with zero.gathered(), torch.no_grad():
        model[0].weight.fill_(float(zero.rank))
    logging.getLogger("zeroshard").removeHandler(handler)
    zero.check_replicas()
    return weights(model, zero), messages


def test_of_edits_that_differ_rank_0_s_count(ranks, stage):
    """Each element has an owner in every replica: a mixture would leave the replicas different."""
    told = ranks.run(4, edited, stage)
    assert all(torch.equal(found, told[0][0]) for found, _ in told)
    assert not told[0][0][: 16 * 24].any()
    assert "rank 0's count" in told[0][1][0]


# ------------------------------------------------------------------------------------------------------------- meshes


def by_mesh(shape):
    mesh = init_device_mesh("cpu", shape)
    model, optimizer, zero = replicated(3, None, group=mesh)
    train(model, optimizer, zero, 2)
    return zero.replicas, zero.partition.ranks, weights(model, zero)


def test_a_device_mesh_of_two_axes_replicates_along_the_first(ranks):
    """As with FSDP2's hybrid sharding; one axis shards."""
    ((_, _, want), *_) = outcomes = ranks.run(4, by_mesh, (4,))
    for shape in ((2, 2), (4, 1), (1, 4)):
        outcomes += ranks.run(4, by_mesh, shape)
    assert [told[:2] for told in outcomes] == [each for each in ((1, 4), (2, 2), (4, 1), (1, 4)) for _ in range(4)]
    assert all(torch.equal(found, want) for *_, found in outcomes)


REFUSED = {
    "no divisor": (lambda: {"replicas": 3}, "replicas must divide the ranks"),
    "no number": (lambda: {"replicas": "2"}, "counts copies of the model"),
    "none": (lambda: {"replicas": 0}, "counts copies of the model"),
    "another than the mesh's": (
        lambda: {"group": init_device_mesh("cpu", (2, 2)), "replicas": 4},
        "contradicts the DeviceMesh",
    ),
    "three axes": (lambda: {"group": init_device_mesh("cpu", (2, 2, 1))}, "more than two axes"),
    "descending": (lambda: {"group": DeviceMesh("cpu", [[0, 2], [1, 3]])}, "must ascend"),
}


def refused(which):
    make, _ = REFUSED[which]
    with pytest.raises(UserError) as caught:
        zeroshard.shard(job_model(), None, comm=Comm(**make()))
    return str(caught.value)


@pytest.mark.parametrize("which", REFUSED)
def test_a_mesh_that_cannot_be_is_refused(ranks, which):
    assert all(REFUSED[which][1] in message for message in ranks.run(4, refused, which))


def given_differently():
    with pytest.raises(PeerError) as caught:
        replicated(2, 2 if ranks_of_test() else 4)
    return str(caught.value)


def ranks_of_test():
    return dist.get_rank()


def test_ranks_that_are_given_different_meshes_say_so_at_once(ranks):
    for message in ranks.run(4, given_differently, timeout=30):
        assert "rank 0 has replicas=4, rank 1 has replicas=2" in message


# --------------------------------------------------------------------------------------------------------------- faults


def spoiled():
    model, optimizer, zero = replicated(2, 2, precision=Precision(nonfinite="raise"))
    train(model, optimizer, zero, 1)
    x = torch.ones(4, 16)
    if zero.rank == 2:
        x[1, 3] = math.nan
    model(x).square().mean().backward()
    with pytest.raises(NotFiniteError) as caught:
        optimizer.step()
    return zero.nonfinite.rank, str(caught.value)


def test_a_rank_of_another_replica_is_named_for_its_nan(ranks):
    assert [rank for rank, _ in ranks.run(4, spoiled)] == [2] * 4


def interrupted(stage, replicas, at):
    model, optimizer, zero = replicated(stage, replicas)
    train(model, optimizer, zero, 1)
    if zero.rank == at:
        handle = model[0].register_full_backward_hook(raises)
    errors = []
    while len(errors) < 3:
        try:
            train(model, optimizer, zero, 1, first=1)
            break
        except (ArithmeticError, PeerError) as error:
            errors.append(type(error).__name__)
            optimizer.zero_grad()
            if zero.rank == at:
                handle.remove()
    return errors, weights(model, zero)


def raises(*_):
    raise ArithmeticError("on this rank alone")


@pytest.mark.full
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_backward_that_raised_on_one_rank_can_be_tried_again(ranks, stage, at):
    """Whatever was being handed on is handed on to its end: no replica waits for another."""
    want = ranks.run(4, interrupted, stage, 1, -1)[0][1]
    for rank, (errors, found) in enumerate(ranks.run(4, interrupted, stage, 2, at)):
        assert errors == (["ArithmeticError"] if rank == at else ["PeerError"])
        assert torch.equal(found, want)


def killed(stage):
    model, optimizer, zero = replicated(stage, 2)
    train(model, optimizer, zero, 1)
    if zero.rank == 3:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    train(model, optimizer, zero, 1, first=1)


def test_a_rank_that_died_is_named_in_every_replica(ranks):
    from ranks import RankFailure

    with pytest.raises(RankFailure) as caught:
        ranks.run(4, killed, 3, timeout=60)
    text = str(caught.value)
    assert text.count("rank 3 is gone") >= 3
