"""Input: whatever public functions are given, they work or raise an error of zeroshard's own, with what to write instead."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import Error

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3),
    st.sampled_from(["unit", "ordered", "device", "raise", "cpu", torch.float32, torch.int8, "nvme", "ordred", -1, 0, 1e30]),
    st.lists(st.integers() | st.text(max_size=4), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.builds(object), st.just(torch.nn.Linear), st.just(torch.ones(2)), st.just({1, 2}), st.just(...),
)  # fmt: skip
POLICIES = {kind: list(kind.__dataclass_fields__) for kind in (Comm, Layout, Offload, Precision)}


def only_ours(call) -> None:
    with contextlib.suppress(Error):
        call()


@pytest.mark.parametrize(("kind", "field"), [(k, f) for k, fields in POLICIES.items() for f in fields], ids=str)
def test_row64_any_value_of_any_setting(kind, field):
    """Each policy's fields, with values of every type: taken, or refused by name."""

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(value=JUNK)
    def check(value):
        only_ours(lambda: kind(**{field: value}))

    check()


@functools.cache
def small():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, zeroshard.shard(model, optimizer)


def inside(value, **options):
    with small()[2].gathered(value, **options):
        pass


CALLS = {
    "shard stage": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), None, stage=v),
    "shard model": lambda v: zeroshard.shard(v, None),
    "shard optimizer": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), v),
    "shard precision": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), None, precision=v),
    "shard layout": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), None, layout=v),
    "shard comm": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), None, comm=v),
    "shard offload": lambda v: zeroshard.shard(torch.nn.Linear(2, 2), None, offload=v),
    "gathered": inside,
    "gathered write_from": lambda v: inside("0.weight", write_from=v),
    "owners": lambda v: small()[2].owners(v),
    "owners state": lambda v: small()[2].owners("0.weight", v),
    "record": lambda v: small()[2].record(v),
}


@pytest.mark.parametrize("name", CALLS)
def test_row64_any_argument_of_any_call(name):
    """The public functions' arguments, with values of every type."""

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(value=JUNK)
    def check(value):
        only_ours(lambda: CALLS[name](value))

    check()
    small()[2].record(0)
