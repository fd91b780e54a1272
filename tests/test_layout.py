"""The layout is pure arithmetic: whatever shapes, ranks and policy, every element has exactly one place and owner."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zeroshard
from zeroshard import Error, Layout
from zeroshard.layout.balance import owners, work
from zeroshard.layout.partition import UNIT_MIB, WHOLE, BucketPlan, Partition, Slot, Spec, partition, slot_at
from zeroshard.planner.balance import balance

ITEM_BYTES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.int64": 8}
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 13, 64, 127, 128, 129, 257]), max_size=3).map(tuple)


@st.composite
def specs(draw):
    """Up to twelve parameters, 0-d and empty ones among them, in up to three units in any order."""
    shapes = draw(st.lists(SHAPES.filter(lambda shape: math.prod(shape) <= 20_000), max_size=12))
    kinds = st.tuples(st.sampled_from(list(ITEM_BYTES)), st.integers(0, 2), st.booleans())
    return [
        Spec(f"p{number}", shape, dtype, ITEM_BYTES[dtype], unit, trainable)
        for number, shape in enumerate(shapes)
        for dtype, unit, trainable in [draw(kinds)]
    ]


LAYOUTS = st.builds(
    Layout,
    bounds=st.sampled_from(["unit", "model", "tensor"]),
    bucket_mib=st.sampled_from([0.0001, 0.01, 24.0]),
    align=st.sampled_from([1, 2, 32, 128]),
)
RANKS = st.integers(1, 7)


@given(specs(), LAYOUTS, RANKS)
def test_fragments_tile_every_slot_exactly(given_specs, policy, ranks):
    """Every parameter has one slot, and the ranks' fragments of it follow each other from 0 to numel, without a gap."""
    made = partition(given_specs, policy, ranks)
    slots = [slot for bucket in made.buckets for slot in bucket.slots]
    assert sorted(slot.name for slot in slots) == sorted(spec.name for spec in given_specs)
    for spec in given_specs:
        bucket, slot = made.find(spec.name)
        assert (slot.shape, slot.numel) == (spec.shape, math.prod(spec.shape))
        assert (bucket.unit, bucket.dtype, bucket.itemsize, bucket.trainable) == (
            spec.unit,
            spec.dtype,
            spec.itemsize,
            spec.trainable,
        )
        at = 0
        for rank in range(ranks):
            fragment = bucket.fragment(slot, rank)
            if fragment.numel:
                assert fragment.start == at
                at = fragment.stop
        assert at == slot.numel


@given(specs(), LAYOUTS, RANKS)
def test_shards_tile_every_bucket_exactly(given_specs, policy, ranks):
    """Bounds rise from 0 to the bucket's size; parameters plus padding fill it; slots neither overlap nor leave it."""
    for bucket in partition(given_specs, policy, ranks).buckets:
        assert bucket.bounds[0] == 0
        assert bucket.bounds[-1] == bucket.numel
        assert list(bucket.bounds) == sorted(bucket.bounds)
        assert sum(bucket.shard_numel(rank) for rank in range(ranks)) == bucket.numel
        assert bucket.padding == bucket.numel - sum(slot.numel for slot in bucket.slots) >= 0
        taken = [range(slot.start, slot.stop) for slot in bucket.slots if slot.numel]
        assert all(before.stop <= after.start for before, after in itertools.pairwise(taken))
        assert all(slot.stop <= bucket.numel for slot in bucket.slots)


@given(specs(), LAYOUTS, RANKS)
def test_no_cut_falls_inside_a_block(given_specs, policy, ranks):
    """Slots, shards and fragments begin at whole blocks, so kernels and norms see the same runs at any rank count."""
    for bucket in partition(given_specs, policy, ranks).buckets:
        assert all(bound % policy.align == 0 for bound in bucket.bounds)
        for slot in bucket.slots:
            assert slot.start % policy.align == 0
            for rank in range(ranks):
                fragment = bucket.fragment(slot, rank)
                assert fragment.start % policy.align == 0 or fragment.numel == 0
                assert fragment.stop % policy.align == 0 or fragment.stop == slot.numel or fragment.numel == 0


@given(specs(), LAYOUTS, RANKS)
def test_where_a_parameter_lies_does_not_depend_on_ranks_or_policy(given_specs, policy, ranks):
    """Buckets and slots are the same at every rank count and bounds policy; only bounds and final padding differ."""
    for bounds in ("unit", "model", "tensor"):
        one = partition(given_specs, dataclasses.replace(policy, bounds=bounds), 1)
        many = partition(given_specs, policy, ranks)
        assert [(b.unit, b.dtype, b.trainable, b.slots) for b in one.buckets] == [
            (b.unit, b.dtype, b.trainable, b.slots) for b in many.buckets
        ]


@given(specs(), LAYOUTS, RANKS)
def test_unit_bounds_are_even(given_specs, policy, ranks):
    """`unit`: all shards of a bucket have one size, and padding is less than a block per slot plus a block per rank."""
    made = partition(given_specs, dataclasses.replace(policy, bounds="unit"), ranks)
    assert made.even
    for bucket in made.buckets:
        assert len({bucket.shard_numel(rank) for rank in range(ranks)}) == 1
        assert bucket.padding <= (policy.align - 1) * len(bucket.slots) + ranks * policy.align


@given(specs(), LAYOUTS, RANKS)
def test_model_bounds_cut_one_flat_vector_evenly(given_specs, policy, ranks):
    """`model`: laid end to end, buckets of one kind are cut into equal shares, the last one taking what is left."""
    made = partition(given_specs, dataclasses.replace(policy, bounds="model"), ranks)
    for members in _vectors(made):
        total = sum(bucket.numel for bucket in members)
        share = -(-total // ranks)
        share += -share % policy.align
        held = [sum(bucket.shard_numel(rank) for bucket in members) for rank in range(ranks)]
        assert held == [max(0, min(share, total - rank * share)) for rank in range(ranks)]
        _assert_ranks_follow_each_other(members, ranks)


@given(specs(), LAYOUTS, RANKS)
def test_tensor_bounds_never_cut_a_tensor(given_specs, policy, ranks):
    """`tensor`: every parameter belongs to one rank whole, and each cut is the boundary nearest to i * P / N."""
    made = partition(given_specs, dataclasses.replace(policy, bounds="tensor"), ranks)
    assert made.cut_tensors() == []
    for bucket in made.buckets:
        for slot in bucket.slots:
            assert sorted(bucket.fragment(slot, rank).numel for rank in range(ranks))[-1] == slot.numel
    for members in _vectors(made):
        total, edges = 0, []
        for bucket in members:
            edges += [total + slot.start for slot in bucket.slots]
            total += bucket.numel
        edges.append(total)
        for rank in range(1, ranks):
            cut = sum(bucket.bounds[rank] for bucket in members)
            assert cut in edges
            assert abs(cut - rank * total / ranks) == min(abs(edge - rank * total / ranks) for edge in edges)
        _assert_ranks_follow_each_other(members, ranks)


def _vectors(made: Partition) -> list[list[BucketPlan]]:
    kinds = dict.fromkeys((bucket.dtype, bucket.trainable) for bucket in made.buckets)
    return [[bucket for bucket in made.buckets if (bucket.dtype, bucket.trainable) == kind] for kind in kinds]


def _assert_ranks_follow_each_other(members: list[BucketPlan], ranks: int) -> None:
    owners = [rank for bucket in members for rank in range(ranks) if bucket.shard_numel(rank)]
    assert owners == sorted(owners)


@given(specs(), LAYOUTS, RANKS)
def test_buckets_keep_to_their_size(given_specs, policy, ranks):
    """Several parameters stay within bucket_mib; those of one unit, dtype and trainability share a bucket."""
    made = partition(given_specs, policy, ranks)
    limit = policy.bucket_mib * 2**20
    for bucket in made.buckets:
        assert len(bucket.slots) == 1 or sum(slot.numel for slot in bucket.slots) * bucket.itemsize <= limit
    if policy.bucket_mib == 24.0:
        kinds = [(bucket.unit, bucket.dtype, bucket.trainable) for bucket in made.buckets]
        assert len(kinds) == len(set(kinds))
    assert [bucket.index for bucket in made.buckets] == list(range(len(made.buckets)))
    assert [bucket.unit for bucket in made.buckets] == sorted(bucket.unit for bucket in made.buckets)


@given(specs(), LAYOUTS, RANKS)
def test_the_cut_tensors_are_those_on_several_ranks(given_specs, policy, ranks):
    """cut_tensors() names a parameter if and only if two ranks hold elements of it."""
    made = partition(given_specs, policy, ranks)
    several = {
        slot.name
        for bucket in made.buckets
        for slot in bucket.slots
        if sum(bucket.fragment(slot, rank).numel > 0 for rank in range(ranks)) > 1
    }
    assert set(made.cut_tensors()) == several


@given(specs(), LAYOUTS)
def test_every_element_finds_its_slot(given_specs, policy):
    """slot_at gives the slot an element lies in, empty slots at the same place notwithstanding."""
    for bucket in partition(given_specs, policy, 1).buckets:
        for slot in bucket.slots:
            for element in {slot.start, slot.stop - 1} if slot.numel else ():
                assert bucket.slots[slot_at([each.start for each in bucket.slots], element)] == slot


# -------------------------------------------------------------------------------------------------- the texts' examples

TEXT_A = {  # the 260-parameter transformer, in the order of its flat vector
    "gamma1": (4,), "beta1": (4,), "W_q": (4, 4), "W_k": (4, 4), "W_v": (4, 4), "W_o": (4, 4),
    "gamma2": (4,), "beta2": (4,),
    "W1": (4, 16), "b1": (16,), "W2": (16, 4), "b2": (4,), "W_vocab": (4, 8),
}  # fmt: skip


@pytest.mark.parametrize("bucket_mib", [24.0, 0.0001])
@pytest.mark.parametrize("units", [1, 3])
def test_the_260_parameter_model_is_cut_at_130_inside_w1(units, bucket_mib):
    """Ranks own 0-129 and 130-259; W1 (elements 80-143) is cut 50/14; 130 elements each, however it is bucketed."""
    given_specs = [
        Spec(name, shape, "torch.bfloat16", 2, min(number // 5, units - 1), True)
        for number, (name, shape) in enumerate(TEXT_A.items())
    ]
    made = partition(given_specs, Layout(bounds="model", align=1, bucket_mib=bucket_mib), 2)
    starts, owned, at = {}, {0: [], 1: []}, 0
    for bucket in made.buckets:
        for slot in bucket.slots:
            starts[slot.name] = at + slot.start
            for rank in (0, 1):
                fragment = bucket.fragment(slot, rank)
                owned[rank] += range(at + slot.start + fragment.start, at + slot.start + fragment.stop)
        at += bucket.numel
    assert at == 260
    assert list(starts.values()) == [0, 4, 8, 24, 40, 56, 72, 76, 80, 144, 160, 224, 228]
    assert owned == {0: list(range(130)), 1: list(range(130, 260))}
    bucket, slot = made.find("W1")
    assert [bucket.fragment(slot, rank).numel for rank in (0, 1)] == [50, 14]
    assert made.cut_tensors() == ["W1"]
    assert sum(bucket.padding for bucket in made.buckets) == 0


def test_of_the_four_weights_each_rank_owns_a_layer():
    """w1, w2 (layer 1) go to rank 0, w3, w4 (layer 2) to rank 1 under `tensor` bounds, in one unit or two."""
    for units in ((0, 0, 0, 0), (0, 0, 1, 1)):
        names = ("w1", "w2", "w3", "w4")
        given_specs = [Spec(name, (), "torch.float32", 4, unit, True) for name, unit in zip(names, units, strict=True)]
        made = partition(given_specs, Layout(bounds="tensor", align=1), 2)
        owners = {}
        for name in names:
            bucket, slot = made.find(name)
            owners[name] = [rank for rank in (0, 1) if bucket.fragment(slot, rank).numel]
        assert owners == {"w1": [0], "w2": [0], "w3": [1], "w4": [1]}


@pytest.mark.row(18)
def test_more_ranks_than_elements():
    """A one-element model on seven ranks: one rank owns it, the others own padding or nothing."""
    for bounds in ("unit", "model", "tensor"):
        for align in (1, 128):
            made = partition([Spec("p", (1,), "torch.float32", 4, 0, True)], Layout(bounds=bounds, align=align), 7)
            assert sorted(made.buckets[0].fragment(made.buckets[0].slots[0], rank).numel for rank in range(7)) == [
                0
            ] * 6 + [1]


# ------------------------------------------------------------------------------------------- tensors that are never cut


def decoder(layers, width, words, positions=0):
    """GPT-2's tensors: its matrices are never cut, the rest is."""
    found = [Spec("wte.weight", (words, width), "torch.float32", 4, 0, True)]
    found += [Spec("wpe.weight", (positions, width), "torch.float32", 4, 0, True)] if positions else []
    for layer in range(layers):
        sides = {
            "attn": (width, 3 * width),
            "proj": (width, width),
            "fc": (width, 4 * width),
            "out": (4 * width, width),
        }
        kind = "torch.float32", 4, layer + 1, True
        for name, shape in sides.items():
            found.append(Spec(f"h.{layer}.{name}.weight", shape, *kind, block=WHOLE))
            found.append(Spec(f"h.{layer}.{name}.bias", shape[1:], *kind))
        found += [Spec(f"h.{layer}.ln_{at}.{what}", (width,), *kind) for at in (1, 2) for what in ("weight", "bias")]
    return found


GPT2, SEVEN_B = (12, 768, 50257, 1024), (32, 4096, 32000)


@pytest.mark.parametrize(
    ("model", "ranks", "elements", "work_share", "fewest"),
    [
        (GPT2, 8, 1.00, 1.02, 1),
        (SEVEN_B, 64, 1.16, 1.14, 1),
        (SEVEN_B, 128, 1.33, 1.29, 1),
        (SEVEN_B, 1024, 10.47, 10.29, 8),
    ],
    ids=["gpt2-8", "7B-64", "7B-128", "7B-1024"],
)
def test_owners_of_whole_matrices_are_balanced(model, ranks, elements, work_share, fewest):
    """The longest first: the most that a rank has, over the mean. Cut at the nearest boundary it was 2.50 and 1.55 of
    GPT-2's, 1.31 and 1.36 of 7 B's on 64 ranks."""
    found = balance(partition(decoder(*model), Layout(), ranks))
    assert (round(found.elements, 2), round(found.work, 2), found.replicas) == (elements, work_share, fewest)
    assert found.tensors == 4 * model[0] and found.idle == max(0, ranks - found.tensors)


def test_of_one_work_the_longest_goes_to_whom_has_least():
    """Work is multiplications: s*s*(2*l + s) of sides s <= l; of equals the first rank; ranks beyond own none."""
    shapes = {"a": (8, 8), "b": (16, 4), "c": (4, 64), "d": (100,), "e": (2, 2, 3), "f": (), "g": (0, 3)}
    assert [work(shape) for shape in shapes.values()] == [1536, 576, 2112, 100, 56, 1, 0]
    loads = {(name, 0): (work(shape), math.prod(shape)) for name, shape in shapes.items()}
    assert owners(loads, 3) == {("c", 0): 0, ("a", 0): 1, **{(name, 0): 2 for name in "bdefg"}}
    assert set(owners(loads, 9).values()) == set(range(7))


@pytest.mark.parametrize(("ranks", "elements", "work_share"), [(4, 1.0, 1.0), (8, 1.0, 1.0), (16, 1.0, 1.07)])
def test_stacked_matrices_have_owners_as_matrices_of_their_own(ranks, elements, work_share):
    """Query, key and value of GPT-2's 12 blocks: dealt one by one, in their order, with the whole matrices beside them.
    Cut evenly they were 1.06, 1.30 and 1.83 of the mean elements, 1.10, 1.53 and 2.40 of the work, and at 16 ranks
    padding of 92 million elements."""
    model = decoder(*GPT2)
    for at, spec in enumerate(model):
        if spec.name.endswith("attn.weight"):
            model[at] = spec._replace(shape=(3 * 768, 768), matrix=(768, 768), block=768 * 768)
    made = partition(model, Layout(bucket_mib=UNIT_MIB), ranks)
    found = balance(made)
    assert (round(found.elements, 2), round(found.work, 2)) == (elements, work_share)
    assert (found.tensors, found.idle) == (12 * 6, 0)
    for layer in range(12):
        bucket, _ = made.find(f"h.{layer}.attn.weight")
        assert all(cut % (768 * 768) == 0 for cut in bucket.bounds) and not bucket.padding


@given(specs(), LAYOUTS, RANKS, st.lists(st.sampled_from([1, WHOLE, 96, 256, 300]), min_size=12, max_size=12))
def test_no_cut_parts_what_belongs_together(given_specs, policy, ranks, blocks):
    """A whole tensor has one owner; of others a cut is a multiple of their block, and of `align`, from their start."""
    given_specs = [spec._replace(block=block) for spec, block in zip(given_specs, blocks, strict=False)]
    made = partition(given_specs, policy, ranks)
    for spec in given_specs:
        bucket, slot = made.find(spec.name)
        cuts = [cut - slot.start for cut in bucket.bounds if slot.start < cut < slot.stop]
        assert not cuts or spec.block != WHOLE
        assert all(cut % spec.block == 0 and cut % policy.align == 0 for cut in cuts)
        assert sum(bucket.fragment(slot, rank).numel for rank in range(ranks)) == slot.numel
    assert sorted(slot.name for bucket in made.buckets for slot in bucket.slots) == sorted(s.name for s in given_specs)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.booleans()), min_size=1, max_size=8), RANKS)
def test_no_cut_parts_a_matrix(stacks, ranks):
    """Of stacks, and of others cut between blocks of the same size: each rank has whole matrices. What a rank has more
    to do than another is at most one of them."""
    works, most = [0] * ranks, 0
    given_specs = [
        Spec(
            str(at),
            (count * 8 * scale, 16),
            "fp32",
            4,
            at % 3,
            True,
            block=128 * scale,
            matrix=(8 * scale, 16) * stacked,
        )
        for at, (count, scale, stacked) in enumerate(stacks)
    ]
    made = partition(given_specs, Layout(bucket_mib=0.01), ranks)
    for spec in given_specs:
        bucket, slot = made.find(spec.name)
        numels = [bucket.fragment(slot, rank).numel for rank in range(ranks)]
        assert sum(numels) == spec.numel and all(numel % spec.block == 0 for numel in numels)
        if spec.matrix or bucket.whole:
            each = work(spec.matrix or spec.shape)
            works, most = [w + each * n // spec.block for w, n in zip(works, numels, strict=True)], max(most, each)
    assert max(works) - min(works) <= most


# ----------------------------------------------------------------------------------------------------- it checks itself


def _bucket(**changes):
    slots = (Slot("a", (200,), 0, 200), Slot("b", (56,), 256, 56))
    fields = {
        "index": 0,
        "unit": 0,
        "dtype": "torch.float32",
        "itemsize": 4,
        "trainable": True,
        "slots": slots,
        "numel": 512,
        "bounds": (0, 256, 512),
    }
    return BucketPlan(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"bounds": (0, 512)},
        {"bounds": (0, 256, 384)},
        {"bounds": (128, 256, 512)},
        {"bounds": (0, 100, 512)},
        {"bounds": (0, 640, 512)},
        {"slots": (Slot("a", (200,), 0, 200), Slot("b", (56,), 128, 56))},
        {"slots": (Slot("a", (200,), 0, 200), Slot("b", (56,), 200, 56))},
        {"slots": (Slot("a", (600,), 0, 600),)},
    ],
    ids=[
        "a-rank-too-few",
        "an-end-too-early",
        "a-start-too-late",
        "a-cut-in-a-block",
        "falling",
        "overlap",
        "unaligned",
        "too-long",
    ],
)
def test_a_wrong_layout_cannot_exist(changes):
    """Overlaps, gaps at the ends, unaligned slots and cuts inside blocks are refused at construction."""
    assert Partition(2, 128, (_bucket(),)).buckets
    with pytest.raises(AssertionError):
        Partition(2, 128, (_bucket(**changes),))


@pytest.mark.row(64)
@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"bounds": "modle"}, "did you mean 'model'"),
        ({"buffers": "brodcast"}, "did you mean 'broadcast'"),
        ({"bucket_mib": 0}, "bucket_mib"),
        ({"bucket_mib": math.inf}, "bucket_mib"),
        ({"bucket_mib": "24"}, "bucket_mib"),
        ({"align": 0}, "align"),
        ({"align": 3}, "align"),
        ({"align": 128.0}, "align"),
        ({"units": "blocks.*"}, "units=['blocks.*']"),
        ({"ignore": "head"}, "ignore=['head']"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_with_what_to_write(settings, hint):
    """A ValueError that is also zeroshard.Error names the setting, or the nearest valid value."""
    with pytest.raises(Error) as caught:
        Layout(**settings)
    assert isinstance(caught.value, ValueError)
    assert hint in str(caught.value)


def test_an_unknown_parameter_gets_the_nearest_name():
    """Partition.find answers a misspelt name with the one that was meant."""
    made = partition([Spec("head.weight", (3,), "torch.float32", 4, 0, True)], Layout(), 2)
    with pytest.raises(Error, match=r"did you mean 'head\.weight'"):
        made.find("head.wieght")


def test_the_layout_imports_neither_torch_nor_anything_distributed():
    """Pure arithmetic: beside the standard library it imports what is as pure, and everything in it is frozen."""
    folder = Path(zeroshard.__file__).with_name("layout")
    texts = ((folder / f"{name}.py").read_text() for name in ("partition", "balance"))
    tree = ast.parse("\n".join(text.replace("from __future__ import annotations", "") for text in texts))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert modules <= {
        "math",
        "bisect",
        "collections.abc",
        "dataclasses",
        "fnmatch",
        "heapq",
        "itertools",
        "typing",
        "errors",
        "policies.layout",  # for types
        "validation",
        "balance",
        "stage",
        "shard_dim",
        "sys",
    }
    for frozen in (Layout(), _bucket(), Partition(2, 128, (_bucket(),))):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.bounds = ()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_on_an_accelerator_a_bucket_is_all_of_a_unit_unless_its_size_is_given(ranks):
    """Of each kind; on the CPU, and where nobody says, as with 24 MiB."""
    sizes = [("a.w", 10_000_000, 0), ("a.b", 100, 0), ("b.v", 9_000_000, 1), ("b.w", 9_000_000, 1)]
    specs = [Spec(name, (numel,), "float32", 4, unit, True) for name, numel, unit in sizes]

    def names(layout):
        return [[slot.name for slot in bucket.slots] for bucket in partition(specs, layout, ranks).buckets]

    by_unit, single = [["a.w", "a.b"], ["b.v", "b.w"]], [[name] for name, *_ in sizes]
    assert names(Layout().on(accelerator=True)) == by_unit
    assert names(Layout()) == names(Layout().on(accelerator=False)) == names(Layout(bucket_mib=24)) == single
    assert Layout(bucket_mib=8).on(accelerator=True) == Layout(bucket_mib=8)
