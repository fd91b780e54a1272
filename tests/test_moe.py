"""examples/moe.py: experts divided among groups of ranks, tokens sent to them; the bits of one process that has all."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import norms
import selection
import zeroshard
from zeroshard import Comm, Layout
from zeroshard.errors import StateError, UserError
from zeroshard.policies.comm import Simulated

EXAMPLE = Path(__file__).parents[1] / "examples" / "moe.py"
STEPS = 3


def moe():
    if "moe" not in sys.modules:
        spec = importlib.util.spec_from_file_location("moe", EXAMPLE)
        sys.modules["moe"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["moe"]


@functools.cache
def plain(world, backwards=1):
    """One process that has all experts and accumulates all ranks' micro-batches, in plain torch."""
    torch.manual_seed(0)
    model = moe().GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, STEPS + 1):
        for backward in range(backwards):
            for rank in range(world):
                model(*moe().batch(step + 100 * backward, rank)).backward()
        for p in model.parameters():
            p.grad /= world
        norm = norms.total([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def weights(model, zero):
    with zero.gathered():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def tokens_sent(ep, stage, options, backwards=1, local=False):
    model, optimizer, zero = moe().sharded(ep, stage, **options)
    for step in range(1, STEPS + 1):
        for backward in range(backwards):
            with zero.no_sync() if local and not backward else contextlib.nullcontext():
                model(*moe().batch(step + 100 * backward, zero.rank)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, zero)


def whole(told, ep):
    """All rows of every parameter, from the ranks of one group."""
    return {
        name: torch.cat([told[at][name] for at in range(ep)]) if ".experts." in name else told[0][name]
        for name in told[0]
    }


def alike(found, want):
    return [name for name in want if not torch.equal(found[name], want[name])] == []


@pytest.mark.row(94)
@pytest.mark.parametrize("stage", selection.STAGES)
@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("backwards", [1, 2])
def test_apart_any_number_of_groups_has_the_bits_of_one_plain_process(ranks, backwards, world, ep, stage):
    """Each source's tokens multiplied apart, and their gradients added up in the order of all ranks: EP = 1, 2, 4 and
    one process, `==`, after steps of one backward and of two."""
    told = ranks.run(world, tokens_sent, ep, stage, {"layout": {"bucket_mib": 0.05}}, backwards)
    assert alike(whole(told, ep), plain(world, backwards))


@pytest.mark.full
@pytest.mark.row(94)
def test_without_it_another_number_of_groups_has_other_bits(ranks):
    """Else the test above would say nothing: the same products, their gradients added up group by group."""
    told = ranks.run(4, tokens_sent, 2, 3, {"apart": False})
    found, want = whole(told, 2), plain(4)
    assert not alike(found, want)
    assert all(torch.allclose(found[name], want[name], atol=1e-2) for name in want)


@pytest.mark.heavy
@pytest.mark.row(94)
@pytest.mark.full
@pytest.mark.parametrize("ep", [2, 4])
def test_grouped_the_bits_are_equal_over_stages_and_buckets(ranks, ep):
    """One product for each expert over all sources' tokens, at one number of groups."""
    runs = [
        whole(ranks.run(4, tokens_sent, ep, stage, {"apart": False, "layout": {"bucket_mib": size}}), ep)
        for stage, size in ((0, 24), (1, 0.05), (2, 24), (3, 0.05), (3, 24))
    ]
    assert all(alike(each, runs[0]) for each in runs)


@pytest.mark.full
def test_sums_of_no_sync_stay_apart(ranks):
    """Two micro-batches are added up on each rank, source by source, and sent once: EP 2 and 4 as EP 1."""
    for stage in (1, 3):
        one = whole(ranks.run(4, tokens_sent, 1, stage, {}, 2, True), 1)
        for ep in (2, 4):
            assert alike(whole(ranks.run(4, tokens_sent, ep, stage, {}, 2, True), ep), one)


def saved(folder):
    model, optimizer, zero = moe().sharded(2, 2)
    moe().train(model, optimizer, zero, 2)
    zero.save(folder / "ckpt")
    moe().train(model, optimizer, zero, 1, first=3)
    return weights(model, zero)


def resumed(folder, ep):
    model, optimizer, zero = moe().sharded(ep, 3)
    zero.load(folder / "ckpt")
    moe().train(model, optimizer, zero, 1, first=3)
    return weights(model, zero)


@pytest.mark.row(95)
@pytest.mark.full
def test_a_run_goes_on_bit_equal_with_another_number_of_groups(ranks, tmp_path):
    """Saved by EP = 2; the next step with EP = 1, 2 and 4, moments and all, is the one that it would have taken."""
    want = whole(ranks.run(4, saved, tmp_path), 2)
    for ep in (1, 2, 4):
        assert alike(whole(ranks.run(4, resumed, tmp_path, ep), ep), want)


def moved(apart):
    model, optimizer, zero = moe().sharded(2, 2, apart=apart)
    moe().train(model, optimizer, zero, 1)
    zero.record()
    moe().train(model, optimizer, zero, 1, first=2)
    along = {b.index: b for b in zero.partition.buckets if b.axis}
    sent = [(e.bucket, e.sent) for e in zero.events() if e.verb == "reduce" and e.bucket in along]
    position = zero.rank // 2
    assert sorted(sent) == sorted(
        (index, 4 * (1 + apart) * (b.numel - b.shard_numel(position))) for index, b in along.items()
    )
    return zero.ledger().held["reduce"]


@pytest.mark.full
def test_what_it_sends_is_the_gradient_of_each_source(ranks):
    """As many times the bytes as there are groups, of experts alone; and no memory stays."""
    assert ranks.run(4, moved, True) == ranks.run(4, moved, False) == [0] * 4


def forgotten():
    model, _, _ = moe().sharded(2, 3)
    for block in model.blocks:
        block.experts.apart = False
    with pytest.raises(StateError) as caught:
        model(*moe().batch(1, 0)).backward()
    return str(caught.value)


def test_gradients_that_do_not_come_apart_are_named(ranks):
    for message in ranks.run(4, forgotten):
        assert "did not come source by source" in message and "experts.down" in message


def test_contradictory_settings_are_refused():
    with pytest.raises(UserError, match=r"Layout\.apart"):
        Layout(apart=True)
    layout = Layout(along={"*": "edp"}, apart=True)
    comm = Comm(reduce="native", group=Simulated(0, 4, (("edp", 2), ("ep", 2))))
    with pytest.raises(UserError, match="whatever comes apart"):
        zeroshard.shard(torch.nn.Linear(4, 4), None, comm=comm, layout=layout)


def test_in_a_plain_process_it_is_the_weight_and_its_gradient_their_sum():
    weight = torch.nn.Parameter(torch.randn(3, 5))
    both = zeroshard.apart(weight, 2)
    assert both.shape == (2, 3, 5) and both.data_ptr() == weight.data_ptr()
    first, second = torch.randn(3, 5), torch.randn(3, 5)
    (both * torch.stack([first, second])).sum().backward()
    assert torch.equal(weight.grad, first + second)


@pytest.mark.full
def test_the_program_runs(tmp_path):
    """On four ranks in groups of two, apart and grouped, in fp32 and bf16; it learns."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(EXAMPLE)]
    for options in (["--ep", "2"], ["--ep", "4", "--stage", "1", "--grouped", "--bf16"]):
        done = subprocess.run(
            [*launcher, "--steps", "20", *options], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses = re.findall(r"step \d+  loss (\d\.\d{3})  held [\d,]+ bytes", done.stdout)
        assert len(losses) == 2 and float(losses[1]) < float(losses[0]) < 5.0
