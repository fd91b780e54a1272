"""Model-state bytes of one rank at rest, as arithmetic on the layout: nothing here looks at a tensor that is held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..api import Zero


def predict_states(zero: Zero) -> dict[str, int]:
    """Bytes per state on this rank once the optimizer has stepped, under the names that `zero.ledger().held` uses.

    Optimizer state is found by asking the optimizer itself: one step of a twin on a parameter of two elements tells
    which of its states grow with the parameter and which are one number.
    """
    place, rank = zero.placements, zero.rank
    total: dict[str, int] = {}

    def add(state: str, nbytes: int) -> None:
        if nbytes:
            total[state] = total.get(state, 0) + nbytes

    for bucket in zero.partition.buckets:
        dtypes = zero.dtypes(bucket)
        shard, whole = bucket.shard_numel(rank), bucket.numel
        add("parameters", (shard if place.parameters else whole) * dtypes.param.itemsize)
        if bucket.trainable:
            add("gradients", (shard if place.gradients else whole) * dtypes.grad.itemsize)
            if dtypes.master != dtypes.param:
                add("master", (shard if place.optimizer else whole) * dtypes.master.itemsize)
    for optimizer, group, buckets_and_slots in zero.optimizer_members():
        states: dict[Any, dict[str, tuple[int, bool]]] = {}
        held = [
            (bucket, bucket.fragment(slot, rank).numel if place.optimizer else slot.numel)
            for bucket, slot in buckets_and_slots
        ]
        # A rank that owns nothing of a group holds one empty fragment of it, which has no state.
        held = [(bucket, numel) for bucket, numel in held if numel]
        for bucket, numel in held:
            if bucket.trainable:
                dtype = zero.dtypes(bucket).master
                if dtype not in states:
                    states[dtype] = {
                        k: (d.itemsize, grows) for k, (d, grows) in probe(type(optimizer), group, dtype).items()
                    }
                for key, (nbytes, grows) in states[dtype].items():
                    add(key, nbytes * numel if grows else nbytes)
    return total


def probe(kind: Any, group: dict[str, Any], dtype: Any) -> dict[str, tuple[Any, bool]]:
    """{state: (dtype, per element?)} after one step of an optimizer class with the user's options."""
    import torch

    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        param = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
        twin = kind([{"params": [param], **options}], **({"lr": 0.1} if kind.__name__ == "SGD" else {}))
        param.grad = torch.ones_like(param)
        twin.step()
    return {
        key: (value.dtype, value.numel() == 2 and key != "step")
        for key, value in twin.state[param].items()
        if isinstance(value, torch.Tensor)
    }
