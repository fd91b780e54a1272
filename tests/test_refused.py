"""Each row of the table of settings that do not go together: refused by name, and only where both are asked for."""

import pytest
import torch
import torch.distributed as dist

import zeroshard
from flat import plan_of
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import Error, UserError
from zeroshard.policies.incompatible import REFUSALS, Settings, refuse, settings

HOSTS = {"comm": Comm(hosts=2), "replicas": 2}
ALL, ONCE = {"comm": Comm(optimizer="all"), "replicas": 2}, {"offload": Offload(parameters="shared")}
# for each row what a user asks for: both sides together, and then each of them by itself
CASES = {
    ("stage=0", 'Comm(optimizer="all")'): ({"stage": 0}, ALL),
    ("stage=0", 'Offload(parameters="shared")'): ({"stage": 0}, ONCE),
    ('Comm(optimizer="all")', 'Offload(parameters="shared")'): (ALL, ONCE),
    ("Comm(hosts={hosts})", 'Offload(parameters="shared")'): (HOSTS, ONCE),
    ('Comm(transport="gloo")', 'Offload(parameters="shared")'): ({"comm": Comm(transport="gloo")}, ONCE),
    ('Comm(optimizer="all")', 'Layout(bounds="tensor")'): (ALL, {"layout": Layout(bounds="tensor")}),
    ("Comm(hosts={hosts})", 'Layout(bounds="tensor")'): (HOSTS, {"layout": Layout(bounds="tensor")}),
    ('Comm(optimizer="all")', "Precision(split_master=True)"): (ALL, {"precision": Precision(split_master=True)}),
    ("Precision(split_master=True)", 'Offload(step="device")'): (
        {"precision": Precision(split_master=True)},
        {"offload": Offload(optimizer="cpu", step="device")},
    ),
    ("Precision(split_master=True)", 'Offload(parameters="shared")'): (
        {"precision": Precision(split_master=True)},
        ONCE,
    ),
    ('Comm(reduce="native")', "Layout(apart=True)"): (
        {"comm": Comm(reduce="native")},
        {"layout": Layout(along={"*.experts.*": "edp"}, apart=True)},
    ),
    ('Comm(reduce="int8")', "Precision(reduce_dtype={reduce_dtype})"): (
        {"comm": Comm(reduce="int8")},
        {"precision": Precision(reduce_dtype=torch.float32)},
    ),
    ('Comm(reduce="int8")', "Layout(align={align})"): ({"comm": Comm(reduce="int8")}, {"layout": Layout(align=64)}),
    ("optimizer_in_backward=True", "Precision(nonfinite={nonfinite!r})"): (
        {"in_backward": True},
        {"precision": Precision(nonfinite="skip")},
    ),
    ("optimizer_in_backward=True", "Offload(gradients={gradients!r})"): (
        {"in_backward": True},
        {"offload": Offload(gradients={"cpu": 0.5})},
    ),
    ("Precision(fp8={fp8})", 'Offload(parameters="shared")'): ({"precision": Precision(fp8=True)}, ONCE),
    ("optimizer_in_backward=True", 'Offload(parameters="shared")'): ({"in_backward": True}, ONCE),
    ("optimizer_in_backward=True", "Step(accumulate={accumulate})"): ({"in_backward": True}, {"accumulate": 4}),
    ("optimizer_in_backward=True", "Step(no_sync=True)"): ({"in_backward": True}, {"no_sync": True}),
    ("zero.replay(...)", "optimizer_in_backward=True"): ({"replay": True}, {"in_backward": True}),
    ("zero.replay(...)", "Layout(along=...)"): ({"replay": True}, {"layout": Layout(along={"*.experts.*": "edp"})}),
    ("zero.replay(...)", "tensor parallelism"): ({"replay": True}, {"tensor_parallel": True}),
}


def asked(options):
    policies = {"precision": Precision(), "layout": Layout(), "comm": Comm(), "offload": Offload()}
    return settings(**{"stage": 3, **policies, **options})


def test_every_row_has_its_case():
    assert [row.sides for row in REFUSALS] == [*CASES]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: " and ".join(row.sides))
def test_what_does_not_go_together_is_refused_by_name(row):
    one, other = CASES[row.sides]
    with pytest.raises(UserError) as refused:
        refuse(asked({**one, **other}))
    first, *facts = str(refused.value).splitlines()
    said = asked({**one, **other})._asdict()
    got = ", ".join(row.sides).format(**said)
    assert first == row.what
    assert f"  got: {got}" in facts and f"  instead: {row.instead.format(**said)}" in facts
    refuse(asked(one))  # each by itself is fine
    refuse(asked(other))


def test_defaults_go_with_everything():
    assert asked({}) == Settings()


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({"stage": 0, "comm": Comm(replicas=2, optimizer="all")}, 0),
        ({"stage": 0, "offload": Offload(parameters="shared")}, 1),
        ({"comm": Comm(replicas=2, optimizer="all"), "offload": Offload(parameters="shared")}, 2),
        ({"comm": Comm(hosts=2), "offload": Offload(parameters="shared")}, 3),
        ({"comm": Comm(transport="gloo"), "offload": Offload(parameters="shared")}, 4),
        ({"optimizer_in_backward": True, "offload": Offload(gradients="cpu")}, 14),
        ({"optimizer_in_backward": True, "offload": Offload(parameters="shared")}, 16),
    ],
)
def test_a_plan_refuses_the_same(options, row):
    with pytest.raises(UserError) as refused:
        plan_of(params=1000, ranks=4, **options)
    assert str(refused.value).splitlines()[0] == REFUSALS[row].what


def one_rank_contradicts_itself():
    model = torch.nn.Linear(4, 4)
    precision = Precision(reduce_dtype=None if dist.get_rank() else torch.float32)
    try:
        zeroshard.shard(model, None, precision=precision, comm=Comm(reduce="int8"))
    except Error as error:
        return type(error).__name__, str(error)


def test_a_rank_whose_settings_do_not_go_together_tells_the_others(ranks):
    (one, said), (other, heard) = ranks.run(2, one_rank_contradicts_itself)
    assert (one, other) == ("UserError", "PeerError")
    assert "both say what gradients are sent as" in said and "both say what gradients are sent as" in heard
