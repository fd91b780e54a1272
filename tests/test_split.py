"""Masters that rest as what their bfloat16 parameters lack: the bits of whole ones, in 2.125 bytes in place of 4."""

import contextlib
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import nn

import models
import ranks
import reference
import test_offload
import zeroshard
from zeroshard import Comm, Layout, Machine, Offload, Precision
from zeroshard.arithmetic import digests
from zeroshard.arithmetic.split_bits import join_, split_
from zeroshard.cli import resume
from zeroshard.cli.config import InputError
from zeroshard.device import CHUNK
from zeroshard.errors import PeerError, StateError, UserError
from zeroshard.layout.states import Master
from zeroshard.planner import built, files

SPLIT = Precision(param_dtype=torch.bfloat16, cast_inputs=True, split_master=True)
WHOLE = Precision(param_dtype=torch.bfloat16, cast_inputs=True)
HOST, FILES = {"optimizer": "cpu"}, test_offload.ON_DISK
UPPER = {
    "zero": 0x0000, "subnormal": 0x0001, "smallest normal": 0x0080, "one": 0x3F80, "odd": 0x3F81, "largest": 0x7F7F,
    "infinity": 0x7F80, "nan": 0x7FC0, "last nan": 0x7FFF, "-zero": 0x8000, "-largest": 0xFF7F, "-last nan": 0xFFFF,
}  # fmt: skip


def as_floats(bits):
    return torch.as_tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def joined_again(master, *, ties=True):
    """What comes back of a master that was split beside its cast; without the bits for ties, where these are not kept."""
    lower = torch.empty(master.numel(), dtype=torch.int16)
    packed = torch.full((-(-master.numel() // 8),), 0xFF, dtype=torch.uint8)
    split_(master, lower, packed)
    back = torch.full_like(master, 7.0)
    join_(back, master.bfloat16(), lower, packed if ties else torch.zeros_like(packed))
    return back


def differing(got, want):
    """How many numbers have other bits; of NaN only that it is one counts."""
    return int(((got.view(torch.int32) != want.view(torch.int32)) & ~(got.isnan() & want.isnan())).sum())


@pytest.mark.parametrize("upper", UPPER)
def test_every_lower_half_comes_back(upper):
    """All 65,536 of them; without the bits for ties one of an even upper half does not, as 16 bits cannot tell it."""
    master = as_floats((UPPER[upper] << 16) + torch.arange(1 << 16))
    assert differing(joined_again(master), master) == 0
    tied = UPPER[upper] % 2 == 0 and "nan" not in upper and upper != "infinity"
    assert differing(joined_again(master, ties=False), master) == tied


@hypothesis.given(strategies.lists(strategies.integers(0, (1 << 32) - 1), max_size=40))
def test_any_numbers_of_any_count_come_back(bits):
    master = as_floats(bits)
    assert differing(joined_again(master), master) == 0


@pytest.mark.parametrize("numel", [CHUNK - 1, CHUNK + 1033])
def test_ties_alone_come_back_from_several_chunks(numel):
    """Every element lies right between two bfloat16."""
    master = as_floats((torch.arange(numel) % (1 << 16) << 16) + 0x8000)
    assert differing(joined_again(master), master) == 0


def test_a_thousand_steps_have_the_bits_of_a_master_that_stays_whole():
    """AdamW on random numbers, ties, subnormals, infinities and the largest numbers, joined and split in every step."""
    torch.manual_seed(0)
    special = [0x3F808000, 0x3F818000, 0x00000001, 0x80007FFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000000]
    start = torch.cat([torch.randn(3000), as_floats(special), torch.full((64,), 1 + 2**-8), torch.randn(64) * 1e-41])
    gradients = torch.randn(7, start.numel())
    whole = nn.Parameter(start.clone())
    held = nn.Parameter(start.clone())
    steps = [torch.optim.AdamW([each], lr=1e-3) for each in (whole, held)]
    lower, ties = torch.empty(start.numel(), dtype=torch.int16), torch.empty(-(-start.numel() // 8), dtype=torch.uint8)
    for step in range(1000):
        param = held.detach().bfloat16()
        split_(held.detach(), lower, ties)
        held.data.fill_(torch.nan)
        join_(held.data, param, lower, ties)
        for each, optimizer in zip((whole, held), steps, strict=True):
            each.grad = gradients[step % 7].clone()
            optimizer.step()
    assert differing(held.detach(), whole.detach()) == 0
    assert whole.isinf().any() and differing(whole.detach(), start) > 3000


# ------------------------------------------------------------------------------------------------------ in the engine


@contextlib.contextmanager
def splitting():
    """The loops of test_offload, with masters that are split."""
    test_offload.Precision = partial(Precision, split_master=True)
    try:
        yield
    finally:
        test_offload.Precision = Precision


def masters(zero):
    """Of each bucket this rank's masters; and how many bytes rest of them."""
    found = {}
    for bucket in zero._engine.buckets:
        with bucket.updating.here(changed=False):
            found[str(bucket.plan.index)] = bucket.target.clone()
    return found


def settled(stage, split, replicas, **precision):
    """Masters and weights of a short run, and nothing that replicas hold differently."""
    model = models.build("gpt", **test_offload.GPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(
        model, optimizer, stage=stage, layout=Layout(bucket_mib=0.005), comm=Comm(replicas=replicas, timeout=60),
        precision=Precision(param_dtype=torch.bfloat16, split_master=split, **precision),
    )  # fmt: skip
    for number in range(3):
        test_offload.step(model, optimizer, zero, number)
    zero.check_replicas()
    with zero.gathered():
        return masters(zero) | reference.weights(model)


def settled_alike():
    for stage, replicas, precision in (
        (0, 2, {}),
        (2, 2, {}),
        (1, 1, {"grad_dtype": torch.bfloat16, "nonfinite": "skip"}),
    ):
        reference.assert_same(*(settled(stage, split, replicas, **precision) for split in (True, False)))


@pytest.mark.full
def test_split_masters_of_replicas_and_beside_16_bit_sums():
    ranks.run(2, settled_alike, timeout=120)


def as_whole(loop, cases, folder):
    for stage, fields in cases:
        whole = loop(stage, test_offload.offload(folder, **fields))
        with splitting():
            test_offload.same(loop(stage, test_offload.offload(folder, **fields)), whole)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("loop", [test_offload.edited, test_offload.repeated])
@pytest.mark.parametrize("world", [1, 2])
def test_edits_unfreezing_and_steps_that_raise_count_as_beside_whole_ones(loop, world, tmp_path):
    """Of an edit inside gathered() the masters of what was not edited keep their lower halves."""
    ranks.run(world, as_whole, loop, [(0, {}), (2, {}), (3, HOST), (3, FILES)], str(tmp_path), timeout=120)


def written_from(stage):
    """One rank's edits, of one row; and its masters where every rank has all of them."""
    model, optimizer, zero = test_offload.start(stage, None)
    for number in range(3):
        test_offload.step(model, optimizer, zero, number)
        with zero.gathered(write_from=1), torch.no_grad():
            if zero.rank:
                next(iter(model.parameters()))[0].mul_(1.5)
    with zero.gathered():
        return [], masters(zero) | reference.weights(model)


def written_from_alike():
    for stage in (0, 1):
        whole = written_from(stage)
        with splitting():
            test_offload.same(written_from(stage), whole)


@pytest.mark.full
def test_one_ranks_edits_count_for_split_masters():
    ranks.run(2, written_from_alike)


def lost(stage):
    """An edit of one element outside gathered(): what this rank is told at the next step, and at a save."""
    model, optimizer, zero = test_offload.start(stage, None)
    test_offload.step(model, optimizer, zero, 0)
    zero.save("checkpoint")
    before = masters(zero)
    with torch.no_grad():
        next(iter(model.parameters())).view(-1)[0] += 1
    told = []
    for act in (optimizer.step, lambda: zero.save("another"), lambda: zero.gathered().__enter__()):
        with pytest.raises((StateError, PeerError)) as raised:
            act()
        told.append(str(raised.value))
    zero.load("checkpoint")
    reference.assert_same(masters(zero), before)
    test_offload.step(model, optimizer, zero, 1)
    return told


def lost_in(folder, stage):
    with contextlib.chdir(folder), splitting():
        return lost(stage)


@pytest.mark.row(102)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_edit_that_split_masters_cannot_follow_is_named_on_every_rank(stage, tmp_path):
    """Its owner sees it, and all are told; a checkpoint mends it."""
    for told in ranks.run(2, lost_in, str(tmp_path), stage):
        for text in told:
            assert "outside gathered()" in text and ", among parameters" in text and "split_master" in text


@pytest.mark.parametrize("numel", [1000, 1 << 14, (65 << 14) + 1000])
def test_a_digest_of_a_device_tells_contents_apart(numel):
    """A sum of words, wherever the tensor lies: each bit of one element, two elements that change places, in a row of
    the table of weights or between rows, and two signs."""
    tensor = torch.randn(numel).bfloat16()
    seen = {digests._weighed(tensor).item()}
    for bit in range(16):
        tensor.view(torch.int16)[777] ^= 1 << bit if bit < 15 else -(1 << 15)
        seen.add(digests._weighed(tensor).item())
    for other in (2, numel - 1):
        tensor[[1, other]] = tensor[[other, 1]]
        seen.add(digests._weighed(tensor).item())
    tensor[[1, numel // 2]] *= -1
    seen.add(digests._weighed(tensor).item())
    assert len(seen) == 20


# ------------------------------------------------------------------------------------------- planned, saved and refused


def test_a_step_from_files_moves_less(tmp_path):
    """Of each master 2.125 bytes are read, and written, and not 4."""
    moved = {}
    for precision in (WHOLE, SPLIT):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(5)))
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zeroshard.shard(
            model, optimizer, stage=3, precision=precision, offload=Offload(optimizer="nvme", path=tmp_path)
        )
        moved[precision] = files.moves(built.holding(zero))
    elements = sum(bucket.numel for bucket in zero.partition.buckets)  # padding too
    less = elements * (4 - 17 / 8)
    assert [a - b for a, b in zip(moved[WHOLE], moved[SPLIT], strict=True)] == [less, less]


def saved(folder, split, stage, fields):
    with splitting() if split else contextlib.nullcontext():
        model, optimizer, zero = test_offload.start(stage, test_offload.offload(folder, **fields))
        for number in range(2):
            test_offload.step(model, optimizer, zero, number, backwards=4 // zero.world_size, clip=False)
        zero.save(f"{folder}/saved")
        return went_on(model, optimizer, zero)


def loaded(folder, split, stage, fields):
    with splitting() if split else contextlib.nullcontext():
        model, optimizer, zero = test_offload.start(stage, test_offload.offload(folder, **fields))
        zero.load(f"{folder}/saved")
        zero.save(f"{folder}/again")
        return went_on(model, optimizer, zero)


def went_on(model, optimizer, zero):
    for number in (2, 3):
        test_offload.step(model, optimizer, zero, number, backwards=4 // zero.world_size, clip=False)
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(102)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, True, 2, {}), (1, False, 1, {})),
        ((1, False, 0, {}), (2, True, 1, {})),
        ((2, True, 3, FILES), (1, True, 2, {})),
        ((1, True, 0, {}), (2, True, 3, HOST)),
        ((2, False, 3, {}), (4, True, 2, FILES)),
    ],
    ids=["to-whole", "from-whole", "files-to-memory", "to-more-ranks", "to-files"],
)
def test_a_checkpoint_of_either_kind_loads_into_the_other(before, after, tmp_path):
    """Files hold whole masters: at any number of ranks, stage and tier training goes on with the same bits."""
    want = ranks.run(before[0], saved, str(tmp_path), *before[1:])[0]
    for got in ranks.run(after[0], loaded, str(tmp_path), *after[1:]):
        reference.assert_same(got, want)


def refused(precision, **settings):
    model = models.build("mlp")
    optimizer = settings.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-2)
    return zeroshard.shard(model, optimizer, precision=precision, **settings)


def test_a_byte_of_bits_may_belong_to_two_parameters():
    """What is loaded changes no bit of its neighbours, whose parameters may be on their way and not go with them."""
    split = refused(SPLIT, stage=2, layout=Layout(align=1))._engine.buckets[0].codec.rest
    lower, ties = split.planes.tensor[: 2 * split.numel].view(torch.int16), split.planes.tensor[2 * split.numel :]
    split.parameters.tensor.view(torch.int16).fill_(0x3F81)
    lower.fill_(-32768)
    ties.fill_(0xFF)
    with split.some(11, 21, changed=True) as part:
        part.fill_(1.0)
    assert ties[:4].tolist() == [0xFF, 0b00000111, 0b11100000, 0xFF]
    assert not lower[11:21].any() and (lower[:11] == -32768).all() and (lower[21:] == -32768).all()


REFUSED = {
    "a word": (lambda: Precision(split_master="yes"), "must be True or False"),
    "fp16": (lambda: Precision(param_dtype=torch.float16, split_master=True), "fp32 masters of bfloat16"),
    "bf16 master": (lambda: Precision(master_dtype=torch.bfloat16, split_master=True), "fp32 masters of bfloat16"),
    "nothing to split": (lambda: refused(Precision(split_master=True), stage=2), "no masters to split"),
    "all at once": (lambda: refused(SPLIT, stage=0, optimizer=torch.optim.LBFGS), "(?s)bucket by bucket.*LBFGS"),
    "DCP": (lambda: refused(SPLIT, stage=2).state_dict(), "in halves"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused(name):
    make, says = REFUSED[name]
    with pytest.raises(UserError, match=says):
        make()


def test_where_masters_rest_alone_splitting_is_noted_and_changes_nothing(caplog):
    """Stage 3 on the device, with an optimizer, too, that split masters would not go with."""
    caplog.set_level("INFO", logger="zeroshard")
    held = []
    for split in (True, False):
        zero = refused(
            Precision(param_dtype=torch.bfloat16, split_master=split), stage=3, optimizer=torch.optim.Adagrad
        )
        held.append(zero.ledger().held)
        assert not any(bucket.masters is Master.SPLIT for bucket in zero._engine.buckets)
        assert caplog.text.count("split_master=True splits nothing") == 1
    assert held[0] == held[1]


def test_some_masters_are_split_where_others_rest_alone():
    """Of half of the buckets at stage 3 the states rest in host memory: their masters alone are beside parameters."""
    zero = refused(SPLIT, stage=3, offload=Offload(optimizer=0.5), layout=Layout(bucket_mib=0.005))
    rests = [resting["optimizer"] for resting in zero._engine.resting]
    assert {(bucket.masters is Master.SPLIT, rest) for bucket, rest in zip(zero._engine.buckets, rests, strict=True)} == {
        (True, "host"), (False, "device"),
    }  # fmt: skip
    assert zeroshard.planner.predict_states(zero)["master"] == zero.ledger().held["master"]


def planned_job():
    return {
        "model": models.build("mlp", sizes=[32, 16, 8]),
        "optimizer": torch.optim.AdamW,
        "batch": lambda step, index: torch.ones(2, 32),
        "loss": lambda model, batch: model(batch).float().sum(),
    }


@pytest.mark.parametrize(
    ("stage", "fields", "said"),
    [(3, {}, True), (2, {}, False), (3, {"optimizer": "cpu"}, False), (3, {"optimizer": 0.5}, True)],
)
def test_a_plan_notes_where_masters_rest_alone(stage, fields, said):
    """With half of the optimizer's states in host memory some masters do."""
    offload = Offload(**fields) if fields else None
    notes = zeroshard.plan(
        planned_job, Machine(ranks=2), stage=stage, precision=SPLIT, offload=offload, layout=Layout(bucket_mib=0.001)
    ).notes
    assert any("nothing is split there" in note for note in notes) == said


def test_a_run_goes_on_with_split_masters(monkeypatch):
    """Its bits stay the same: of all that decides the losses this alone may be said anew."""
    before = dict.fromkeys((*resume.FIXED, *resume.KEPT), 1) | {
        "precision": "bf16",
        "ranks": 1,
        "accumulate": 1,
        "data": [],
    }
    monkeypatch.setattr(resume, "read", lambda path: before)

    def settled(precision):
        options = before | {"precision": precision, "offload_path": ""} | dict.fromkeys(resume.TIERS, "")
        return resume.merge("run", options, frozenset({"precision", "offload_path", *resume.TIERS}), None)["precision"]

    assert (settled("bf16-split"), settled("bf16")) == ("bf16-split", "bf16")
    with pytest.raises(InputError, match="--precision fp32: the run in run has bf16"):
        settled("fp32")
