"""The bytes that each rank's card sends to other nodes, of which `zeroshard.planner.traffic.links` has the mean."""

from __future__ import annotations

from fractions import Fraction

from zeroshard.planner.traffic import Traffic, back


def sent_between(
    moved: Traffic, ranks: int, gpus_per_node: int, replicas: int = 1, *, gloo: bool = False
) -> tuple[Fraction, ...]:
    """Count the bytes that each rank sends to other nodes in a step, in rank order: the busiest card decides.

    `links` has their mean. Every replica but the last hands on sums; averages come back along NCCL's ring, or in gloo's
    tree. The crossings of an NCCL gather are shared by a node's cards. gloo's bytes are what the kernel counts
    (tests/test_collectives.py); NCCL's are by formula, where no node has several replicas. Not for an optimizer that is
    sharded over all replicas.
    """
    group, averages = ranks // replicas, back(moved.relay, replicas) if replicas > 1 else Fraction()
    assert not moved.straight, "parts of shards go another way"
    assert gloo or gpus_per_node <= group, "whose ring enters a node how often is NCCL's to say"
    near = min(group, gpus_per_node)
    shard = Fraction(moved.gather.logical + moved.recompute.logical, group)
    sent = [Fraction(group - near, group) * moved.reduce.logical for _ in range(ranks)]
    for rank in range(ranks):
        team = rank - rank % group
        if gloo:
            for root in range(group):
                children = _children((rank - team - root) % group, group)
                peers = (team + (child + root) % group for child in children)
                sent[rank] += shard * sum(peer // gpus_per_node != rank // gpus_per_node for peer in peers)
        elif group > near:
            sent[rank] += (group - 1) * shard / near
        replica, last = rank // group, replicas - 1
        beyond = (rank + group) // gpus_per_node != rank // gpus_per_node
        sent[rank] += moved.relay.logical * (replica < last and beyond)
        place = (replica - last) % replicas  # counted from the last replica, which the averages come from
        places = _children(place, replicas) if gloo else range(place + 1, min(place + 2, replicas))
        peers = ((place + last) % replicas * group + rank % group for place in places)
        sent[rank] += averages * sum(peer // gpus_per_node != rank // gpus_per_node for peer in peers)
    return tuple(sent)


def _children(at: int, ranks: int) -> list[int]:
    """Return whom the rank at this place of gloo's binomial tree sends to; places are counted from the root."""
    return [at + distance for distance in (1 << bit for bit in range(ranks.bit_length())) if at < distance < ranks - at]
