"""Each field of the four policies refuses what it does not take, in one sentence that names it."""

import dataclasses

import pytest
import torch

from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import UserError

ANY = {("Comm", "group")}  # whatever torch calls a group: `mesh.py` looks at it
FIELDS = [
    pytest.param(policy, field.name, id=f"{policy.__name__}.{field.name}")
    for policy in (Comm, Layout, Offload, Precision)
    for field in dataclasses.fields(policy)
    if (policy.__name__, field.name) not in ANY
]


class Neither(str):
    """A word that no field knows, and neither a sequence nor a number."""

    __slots__ = ()


@pytest.mark.parametrize(("policy", "name"), FIELDS)
def test_each_field_refuses_what_it_does_not_take(policy, name):
    given = 7 if (policy.__name__, name) == ("Offload", "path") else Neither("neither")
    with pytest.raises(UserError) as refused:
        policy(**{name: given})
    first, *facts = str(refused.value).splitlines()
    assert first.startswith(f"{policy.__name__}.{name} ")
    assert f"  got: {given!r}" in facts


@pytest.mark.parametrize(
    ("policy", "name", "given"),
    [
        (Comm, "overlap", 1),
        (Comm, "prefetch", True),
        (Comm, "prefetch", -1),
        (Comm, "replicas", 0),
        (Comm, "replicas", 2.0),
        (Comm, "timeout", 0),
        (Comm, "timeout", float("nan")),
        (Comm, "timeout", True),
        (Layout, "bucket_mib", float("inf")),
        (Layout, "bucket_mib", 0),
        (Layout, "align", 96),
        (Layout, "apart", 1),
        (Layout, "ignore", "head.*"),
        (Offload, "digests", 0),
        (Precision, "param_dtype", torch.int64),
        (Precision, "reduce_dtype", torch.float8_e4m3fn),
        (Precision, "keep", [1]),
        (Precision, "fp8", 1),
        (Precision, "scaling", ["tensor"]),
        (Precision, "states", {1: torch.bfloat16}),
        (Precision, "rounding", ["nearest"]),
    ],
)
def test_values_that_are_nearly_right_are_refused(policy, name, given):
    with pytest.raises(UserError, match=rf"^{policy.__name__}\.{name} "):
        policy(**{name: given})


def test_a_field_says_what_to_write_instead():
    with pytest.raises(UserError, match=r"did you mean 'native'\? \(one of: ordered, native, int8\)"):
        Comm(reduce="nativ")
    with pytest.raises(UserError, match=r"Precision\(param_dtype=torch.bfloat16, fp8=True\), which computes"):
        Precision(param_dtype=torch.float8_e4m3fn)
