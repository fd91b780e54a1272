"""Sums in rank order, exact norms, masters that follow edits: against plain torch and Python's fractions."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import norms
from zeroshard import Error, Precision, device
from zeroshard.arithmetic import fp8
from zeroshard.arithmetic.digests import fingerprint
from zeroshard.arithmetic.exact_norms import (
    BlockMap,
    add_to_bins,
    add_to_maxima,
    block_sums,
    empty_bins,
    roots_from_bins,
    sums_from_bins,
    sums_in,
)
from zeroshard.arithmetic.split_bits import join_, split_
from zeroshard.arithmetic.sums import average_, divides_exactly, fold, reseed_, running_dtype, same_bits
from zeroshard.device import CHUNK
from zeroshard.engine.weights.edits import Edits

CPU = torch.device("cpu")
BIT_PATTERNS = st.integers(0, 0xFF7FFFFF).filter(lambda bits: (bits >> 23) & 0xFF != 0xFF)  # all finite floats


def floats(bits):
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32).copy())


def random(numel, seed=0, dtype=torch.float32, spread=20):
    """Signed numbers over many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-spread, spread, (numel,), generator=generator)
    return torch.ldexp(torch.randn(numel, generator=generator), scale).to(dtype)


# ---------------------------------------------------------------------------------------------------- the running sum


@pytest.mark.parametrize("numel", [0, 1, 127, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_fold_is_plain_accumulation(numel, fresh, ranks):
    """((total + g0) + g1) + ...: what p.grad does when autograd accumulates the pieces one after the other."""
    pieces = [random(numel, seed) for seed in range(ranks)]
    total = random(numel, 99)
    want = pieces[0].clone() if fresh else total + pieces[0]
    for piece in pieces[1:]:
        want += piece
    fold(total, pieces, start=None if fresh else total)
    assert same_bits(total, want)


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("fresh", [True, False])
def test_fold_adds_16_bit_numbers_in_fp32_and_rounds_once(held, sent, fresh):
    """Pieces are widened before they are added; a 16-bit accumulator is rounded once per call, not once per rank."""
    pieces, total = [random(300, seed, sent, 4) for seed in range(3)], random(300, 9, held, 4)
    wide = torch.float64 if held is torch.float64 else torch.float32
    want = pieces[0].to(wide) if fresh else total.to(wide) + pieces[0].to(wide)
    for piece in pieces[1:]:
        want = want + piece.to(wide)
    fold(total, pieces, start=None if fresh else total)
    assert same_bits(total, want.to(held))


def test_fold_may_start_from_its_own_total():
    """The accumulator may itself be the first piece: only its first use is read."""
    total, other = random(CHUNK + 5, 1), random(CHUNK + 5, 2)
    want = total + other
    fold(total, [total, other], start=None)
    assert same_bits(total, want)


@given(st.integers(0, 400), st.integers(1, 4), st.data())
def test_fold_of_a_part_is_the_part_of_the_fold(numel, ranks, data):
    """Elementwise: cutting a bucket anywhere, and folding the parts, gives the same bits."""
    cut = data.draw(st.integers(0, numel))
    pieces = [random(numel, seed) for seed in range(ranks)]
    whole, parts = torch.zeros(numel), torch.zeros(numel)
    fold(whole, pieces, start=None)
    for part in (slice(None, cut), slice(cut, None)):
        fold(parts[part], [piece[part] for piece in pieces], start=None)
    assert same_bits(whole, parts)


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32, torch.float64])
@given(st.integers(0, 400), st.lists(st.integers(1, 3), min_size=2, max_size=4), st.booleans())
def test_a_fold_goes_on_where_another_ended(held, numel, parts, fresh):
    """Handed on unrounded, and divided only at the end: any parting of the pieces has the bits of one fold."""
    count = sum(parts)
    pieces, total = [random(numel, seed, torch.bfloat16, 4) for seed in range(count)], random(numel, 99, held, 4)
    running, start = torch.empty(numel, dtype=running_dtype(held)), None if fresh else total.clone()
    want = total.clone()
    fold(want, pieces, start=None if fresh else want, times=count, over=count)
    first = 0
    for at, length in enumerate(parts):
        into = total if at == len(parts) - 1 else running
        times, over = (count if at == 0 else 1), (count if into is total else 1)
        fold(into, pieces[first : first + length], start=running if at else start, times=times, over=over)
        first += length
    assert same_bits(total, want)


@pytest.mark.parametrize("held", [torch.float32, torch.float64])
@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 1 << 16])
def test_a_sum_divided_as_it_lands_is_the_sum_divided_late(held, sent, ranks):
    """All 65,536 numbers of 16 bits, subnormals, NaN and infinities among them, in three backwards of two pieces."""
    assert divides_exactly(held, sent, ranks)
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(sent)
    pieces = [every[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(seed))] for seed in range(6)]
    early, late = torch.zeros(1 << 16, dtype=held), torch.zeros(1 << 16, dtype=held)
    for at in range(0, 6, 2):
        fold(early, pieces[at : at + 2], start=early if at else None, times=ranks, over=ranks)
        fold(late, pieces[at : at + 2], start=late if at else None)
    number = late.isnan().logical_not_()  # which of two NaN a sum keeps is the processor's business
    average_(late, ranks)
    assert same_bits(early[number], late[number])
    assert early[~number].isnan().all()


def test_where_dividing_early_would_lose_bits():
    """Thirds are no binary fractions; a subnormal that is halved in its own dtype loses its last bit."""
    assert not divides_exactly(torch.float32, torch.bfloat16, 3)
    for held, sent in [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ]:
        assert not divides_exactly(held, sent, 2)
        smallest = torch.tensor([1], dtype=torch.int32 if held.itemsize == 4 else torch.int16).view(held)
        assert smallest / 2 * 2 != smallest


def test_averages_divide_truly():
    """x / 3, not x * (1/3): these differ, and one rank divides nothing. Also subnormal and infinite numbers."""
    x = random(1000)
    assert not same_bits(x / 3, x * (1 / 3))
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(1))
    every = bits.to(torch.int16)
    for kind in (x, bits.to(torch.int32).view(torch.float32), every.view(torch.bfloat16), every.view(torch.float16)):
        for ranks in (1, 2, 3, 4, 7, 8, 1024):
            y, number = kind.clone(), kind.isnan().logical_not()
            average_(y, ranks)
            assert same_bits(y[number], (kind / ranks)[number])


# ------------------------------------------------------------------------------------------------------------- the bins


@given(st.lists(BIT_PATTERNS.map(lambda bits: bits & 0x7FFFFFFF), min_size=1, max_size=60))
def test_bins_hold_the_exact_sum(bits):
    """Of any non-negative finite floats, subnormal and huge together: the bins as a fraction are the sum, exactly."""
    values = floats(bits)
    bins = empty_bins(1, CPU)
    add_to_bins(bins, torch.zeros(len(bits), dtype=torch.int64), values)
    exact = sum((Fraction(value) for value in values.tolist()), Fraction(0))
    assert (
        sum(Fraction(count) * Fraction(2) ** (8 * at - 150) for at, count in enumerate(bins[0, :32].tolist())) == exact
    )
    assert bins[0, 32:].tolist() == [0, 0]


@given(st.lists(BIT_PATTERNS.map(lambda bits: bits & 0x7FFFFFFF), min_size=1, max_size=60))
def test_sums_from_bins_round_to_the_right_float(bits):
    """The fp64 total, rounded to fp32, is Python's correctly rounded math.fsum rounded to fp32."""
    values = floats(bits)
    bins = empty_bins(1, CPU)
    add_to_bins(bins, torch.zeros(len(bits), dtype=torch.int64), values)
    want = torch.tensor([math.fsum(values.tolist())], dtype=torch.float64)
    assert same_bits(sums_from_bins(bins).float(), want.float())


@given(
    st.lists(st.tuples(st.integers(0, 4), BIT_PATTERNS.map(lambda b: b & 0x7FFFFFFF)), max_size=60),
    st.randoms(use_true_random=False),
)
def test_bins_depend_on_neither_order_nor_cut(entries, shuffler):
    """Any order, and any distribution over ranks whose bins are then added: the very same integers."""

    def bins_of(some):
        bins = empty_bins(5, CPU)
        owner = torch.tensor([slot for slot, _ in some], dtype=torch.int64)
        add_to_bins(bins, owner, floats([bits for _, bits in some]))
        return bins

    whole = bins_of(entries)
    shuffled = list(entries)
    shuffler.shuffle(shuffled)
    ranks = [shuffled[at::3] for at in range(3)]
    assert torch.equal(sum(bins_of(each) for each in ranks), whole)


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([1.0, math.inf], math.inf),
        ([math.inf, math.inf, 0.0], math.inf),
        ([math.nan, 1.0], math.nan),
        ([math.nan, math.inf], math.nan),
        ([], 0.0),
        ([0.0, 0.0], 0.0),
        ([2.0**-149] * 3, 3 * 2.0**-149),
        ([3.4028234663852886e38] * 4, 4 * 3.4028234663852886e38),
    ],
    ids=str,
)
def test_bins_show_infinities_nans_and_the_smallest_numbers(values, want):
    """inf and NaN come out as such, subnormals count to the last bit, and sums beyond fp32 are finite in fp64."""
    bins = empty_bins(2, CPU)
    add_to_bins(bins, torch.ones(len(values), dtype=torch.int64), torch.tensor(values, dtype=torch.float32))
    got = sums_from_bins(bins)
    assert got[0].item() == 0.0
    assert got[1].item() == want or (math.isnan(want) and math.isnan(got[1].item()))


def test_a_billion_blocks_would_fit():
    """The largest mantissa, shifted most, added 2^31 times, is still an int64: 2^38 elements per parameter and more."""
    largest = 0xFFFFFF << 7
    assert largest * 2**31 < 2**63


@given(st.lists(BIT_PATTERNS, min_size=1, max_size=40), st.booleans(), st.booleans())
def test_maxima_compare_like_their_bits(bits, with_inf, with_nan):
    """The integer maximum of non-negative floats is their maximum, and NaN wins over everything."""
    values = floats(bits).abs()
    if with_inf:
        values[0] = math.inf
    if with_nan:
        values[-1] = math.nan
    maxima = torch.zeros(1, dtype=torch.int32)
    add_to_maxima(maxima, torch.zeros(len(bits), dtype=torch.int64), values)
    got = maxima.view(torch.float32).item()
    assert math.isnan(got) if with_nan else got == values.max().item()


# ------------------------------------------------------------------------------------------------------- the blocks


def norms_of_shards(gradients, cuts, order, ranks, block, dtype=torch.float32, garbage=math.nan):
    """Each gradient's norm, from its blocks after cutting the flat bucket at `cuts`, with `garbage` in all padding."""
    starts, total = [], 0
    for gradient in gradients:
        starts.append(total)
        total += -(-gradient.numel() // block) * block
    total += 3 * block  # the bucket's own padding
    flat = torch.full((total,), garbage, dtype=dtype)
    for gradient, start in zip(gradients, starts, strict=True):
        flat[start : start + gradient.numel()] = gradient
    bins, maxima = empty_bins(len(gradients), CPU, sums_in(order)), torch.zeros(len(gradients), dtype=torch.int32)
    bounds = [0, *sorted(cut * block for cut in cuts), total]
    for low, high in itertools.pairwise(bounds):
        spans = []
        for number, (gradient, start) in enumerate(zip(gradients, starts, strict=True)):
            first, last = max(low, start), min(high, start + gradient.numel())
            if last > first:
                spans.append((number, first - low, last - low))
        blocks = BlockMap(high - low, block, spans, CPU)
        sums = block_sums(flat[low:high], blocks, ranks, order)
        (add_to_maxima if order == math.inf else add_to_bins)(maxima if order == math.inf else bins, blocks.owner, sums)
    if sums_in(order) is torch.float64:
        return roots_from_bins(bins, order)
    sums = maxima.view(torch.float32) if order == math.inf else sums_from_bins(bins)
    return sums.sqrt() if order == 2.0 else sums


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=5),
    st.lists(st.integers(0, 8), max_size=4),
    st.sampled_from([0.5, 0.7, 1.0, 2.0, 2.5, 3.0, 7.0, math.inf]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 32, 128]),
)
def test_norms_do_not_depend_on_cuts_and_never_see_padding(sizes, cuts, order, ranks, block):
    """Wherever the bucket is cut, with NaN in all padding, each slot's norm is the definition's on the plain tensor."""
    gradients = [random(size, seed, spread=8) for seed, size in enumerate(sizes)]
    got = norms_of_shards(gradients, [cut % 4 for cut in cuts], order, ranks, block)
    want = [norms.of_tensor(gradient / ranks, order, block) for gradient in gradients]
    assert same_bits(got.float(), torch.stack(want))


@pytest.mark.parametrize("order", [0.7, 1.0, 2.0, 3.0, math.inf])
def test_large_shards_are_handled_in_pieces_of_the_same_bits(order):
    """More blocks than one chunk, of which the last is partial: the same sums as block by block."""
    gradient = random(3 * CHUNK + 61, spread=6)
    got = norms_of_shards([gradient], [], order, 3, 128)
    want = norms.of_tensor(gradient / 3, order)
    assert same_bits(got.float(), want.view(1))


@pytest.mark.parametrize("order", [0.3, 1.5, 3.0, 6.0])
def test_norms_of_any_order_are_close_to_torchs_in_fp64(order):
    """Of the same numbers: to seven digits, which is what a result in fp32 has. Large and small ones do not overflow."""
    for scale in (1e-12, 1.0, 1e12):
        gradient = random(1000) * scale
        want = torch.linalg.vector_norm(gradient.double(), order)
        torch.testing.assert_close(norms.of_tensor(gradient, order).double(), want, rtol=2e-7, atol=0.0)  # rounding
        assert same_bits(
            norms_of_shards([gradient], [3], order, 1, 128).float(), norms.of_tensor(gradient, order).view(1)
        )


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_norms_of_any_order_show_what_is_not_finite(value):
    """An inf or NaN among the numbers is the norm's."""
    gradient = random(300)
    gradient[7] = value
    for order in (0.5, 3.0):
        got = norms_of_shards([gradient], [], order, 2, 128).item()
        assert got == value or (math.isnan(value) and math.isnan(got))


def test_bf16_sums_are_squared_in_fp32():
    """A bf16 accumulator is widened before anything is divided or squared."""
    gradient = random(300, dtype=torch.bfloat16, spread=3)
    got = norms_of_shards([gradient], [1], 2.0, 3, 128, dtype=torch.bfloat16)
    assert same_bits(got.float(), norms.of_tensor(gradient.float() / 3).view(1))


# ---------------------------------------------------------------------------------------------------- bits and masters


def test_equal_bits_are_stricter_than_equal_values():
    """-0.0 is not 0.0, and a NaN is itself."""
    assert same_bits(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.empty(0), torch.empty(0))
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))


def test_a_digest_tells_contents_apart():
    """Order, sign of zero and NaN count, the storage's other elements do not; nothing is read off the processor."""
    x = torch.tensor([0.0, 1.0, math.nan, 3.0], dtype=torch.bfloat16)
    assert fingerprint(x) == fingerprint(x.clone()) == fingerprint(torch.cat([x[3:], x])[1:])
    others = [x.flip(0), torch.tensor([-0.0, 1.0, math.nan, 3.0], dtype=torch.bfloat16), x[:3], x[:0]]
    assert len({fingerprint(tensor) for tensor in (x, *others)}) == 5
    assert fingerprint(x.to("meta")) is None


@pytest.mark.parametrize("numel", [1, 300, CHUNK + 3])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float32])
def test_masters_follow_edits_and_nothing_else(low, numel):
    """Where a parameter is the cast of its master, the master keeps its extra bits; else the edit is the master."""
    master = random(numel, spread=4)
    param = master.to(low, copy=True)
    kept = master.clone()
    assert not reseed_(master, param)
    assert same_bits(master, kept)
    at = numel // 2
    param[at] = 3.0 if param[at] != 3.0 else 5.0
    assert reseed_(master, param)
    kept[at] = param[at].float()
    assert same_bits(master, kept)
    assert not reseed_(master, param)


def test_an_edit_to_negative_zero_or_nan_counts():
    """-0.0 over 0.0 is an edit, and so is a NaN."""
    master = torch.tensor([0.0, 1.0])
    assert reseed_(master, torch.tensor([-0.0, 1.0], dtype=torch.bfloat16))
    assert same_bits(master, torch.tensor([-0.0, 1.0]))
    assert reseed_(master, torch.tensor([-0.0, math.nan], dtype=torch.bfloat16))
    assert math.isnan(master[1])


# -------------------------------------------------------------------------------------------------------- Precision


@pytest.mark.parametrize(
    ("precision", "own", "want"),
    [
        (Precision(), torch.float32, (torch.float32, torch.float32, torch.float32, torch.float32)),
        (Precision(), torch.bfloat16, (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)),
        (Precision(), torch.float64, (torch.float64, torch.float64, torch.float64, torch.float64)),
        (
            Precision(param_dtype=torch.bfloat16),
            torch.float32,
            (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32),
        ),
        (Precision(param_dtype=torch.bfloat16), torch.int64, (torch.int64,) * 4),
        (
            Precision(torch.float16, torch.float32, torch.bfloat16, torch.float64),
            torch.float32,
            (torch.float16, torch.bfloat16, torch.float32, torch.float64),
        ),
    ],
    ids=["fp32", "bf16", "fp64", "to-bf16", "integers", "all-given"],
)
def test_each_state_has_its_dtype(precision, own, want):
    """Parameter, accumulator, transport and master dtypes: kept unless asked, fp32 beside 16-bit parameters."""
    param = precision.param(own)
    assert (param, precision.grad(param), precision.reduce(param), precision.master(param)) == want


@pytest.mark.parametrize(
    "settings",
    [
        {"param_dtype": torch.int32},
        {"grad_dtype": torch.float8_e4m3fn},
        {"master_dtype": "float32"},
        {"reduce_dtype": torch.complex64},
        {"cast_inputs": True},
    ],
    ids=str,
)
def test_dtypes_that_cannot_work_are_refused(settings):
    """A ValueError that is also zeroshard.Error, naming the setting."""
    with pytest.raises(Error, match=next(iter(settings))) as caught:
        Precision(**settings)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_same_bits_from_any_offset(dtype):
    """Also where eight bytes at a time are not possible; one bit anywhere counts."""
    memory = torch.arange(80, dtype=torch.float64).view(torch.uint8).clone()
    item = dtype.itemsize
    for start, numel in ((0, 9), (1, 9), (3, 0), (0, 0), (5, 1), (2, 16), (4, 13)):
        a = memory[start * item : (start + numel) * item].view(dtype) if numel else torch.empty(0, dtype=dtype)
        b = a.clone()
        assert same_bits(a, b) and same_bits(b, a)
        for at in range(numel * item):
            wrong = b.clone()
            wrong.view(torch.uint8)[at] ^= 1
            assert not same_bits(a, wrong) and not same_bits(wrong, a)


# --------------------------------------------------------------------------------------------------- threads of a CPU


@pytest.fixture
def threads(monkeypatch):
    """Set torch's number of threads, which chunks of a CPU's tensors grow with."""
    monkeypatch.setattr(device, "CHUNK", 1 << 13)
    monkeypatch.setattr(device, "_ALONE", 1 << 10)
    yield torch.set_num_threads
    torch.set_num_threads(1)


def everything(masters):
    """Results of all arithmetic that goes chunk by chunk."""
    numel = masters.numel()
    total = random(numel, 5)
    fold(total, [random(numel, seed) for seed in range(3)], start=total, over=3)
    found = [total, block_sums(masters, BlockMap(numel, 128, [(0, 0, numel)], CPU), 3, 2.0)]
    lower, ties = torch.zeros(numel, dtype=torch.int16), torch.zeros(-(-numel // 8), dtype=torch.uint8)
    cast, joined = masters.bfloat16(), torch.zeros_like(masters)
    split_(masters.clone(), lower, ties)
    join_(joined, cast, lower, ties)
    assert same_bits(joined, masters)
    tiles = fp8.grid((numel // 1024, 1024), "tensor")
    raw, scales = torch.zeros(numel, dtype=torch.uint8), fp8.scales_of(masters, tiles)
    fp8.quantise_(raw, masters, scales, tiles)
    values = torch.zeros(numel)
    fp8.dequantise_(values, raw, scales, tiles)
    return [*found, lower, ties, raw, scales, values]


@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_threads_has_the_same_bits(threads, count):
    masters = random(77 * 1024, 7, spread=3)
    threads(1)
    want = everything(masters)
    threads(count)
    assert device.chunk(masters) == count << 13
    assert all(same_bits(got, wanted) for got, wanted in zip(everything(masters), want, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("numel", [0, 1, 2**12, 2**14 + 3])
def test_any_number_of_threads_compares_every_word(threads, count, numel):
    threads(count)
    a = torch.arange(numel)
    assert device.equal(a, a.clone())
    for at in {0, numel // 2, numel - 1} & set(range(numel)):
        other = a.clone()
        other[at] ^= 1 << 62
        assert not device.equal(a, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_threads_compare_weights_with_masters(threads, monkeypatch, dtype):
    """Also of 16 bits, of which a chunk is a quarter as many words."""
    threads(2)
    masters = random(2 * device.chunk(torch.zeros(1)), 7)
    weights = masters.to(dtype)
    monkeypatch.setattr(torch, "equal", lambda a, b: 1 / 0)  # one thread
    assert not reseed_(masters, weights)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("known", [True, False])
def test_any_number_of_threads_misses_no_edit(threads, count, known):
    """With a digest of the parameters as they were, or without one."""
    threads(count)
    numel = 40 * 1024 + 3
    for at in (0, numel // 2, numel - 1):
        master = random(numel, 7)
        params = master.bfloat16()
        held = SimpleNamespace(here=lambda changed, own=master: nullcontext(own))
        on_cpu = SimpleNamespace(device=CPU)
        bucket = SimpleNamespace(master=held, tier=on_cpu, tiers={"optimizer": on_cpu})
        bucket.codec = SimpleNamespace(asks=False)
        edits = Edits(bucket)
        if known:
            edits.agree(params)
        for edited in (False, True):
            if edited:
                params.view(torch.int16)[at] ^= 1
            before = master.clone()
            assert edits.reseed(params) == edited
            assert same_bits(master.bfloat16(), params)
            assert [*(master != before).nonzero().flatten()] == [at] * edited


def test_scratch_of_a_cpu_with_many_threads_is_no_more_than_a_devices(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 256)
    assert device.chunk(torch.zeros(1)) == 1 << 24
