"""QLoRA: adapters over a base in 4 bits, bitsandbytes' and torchao's, train as one plain process does, to the bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import ranks
import zeroshard
from test_trainer import examples, llama
from trainers import LIMIT
from zeroshard.planner.simulate import simulate

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.trainers

STEPS, MICRO = 3, 6  # micro-batches of a step, over all ranks


def in_4_bits(linear):
    import bitsandbytes

    made = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32
    )
    made.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    return made


def in_nf4(linear):
    from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters
    from torchao.quantization import to_nf4

    linear.weight = torch.nn.Parameter(to_nf4(linear.weight.data, block_size=16, scaler_block_size=8), False)
    unwrap_tensor_subclass_parameters(linear)  # its codes and scales are plain parameters, to be sharded
    return linear


BASES = {"bitsandbytes": in_4_bits, "torchao": in_nf4}


def build(base):
    model = llama()
    for name, linear in [*model.named_modules()]:
        if isinstance(linear, torch.nn.Linear) and "layers" in name:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, BASES[base](linear))
    model.to("cpu")  # which is when bitsandbytes quantises
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def job(base):
    return {
        "model": lambda: build(base),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "batch": lambda step, at: torch.tensor([row["input_ids"] for row in examples(MICRO * step + at + 1)]),
        "loss": lambda model, rows: model(input_ids=rows, labels=rows).loss,
    }


def trained(base, stage, world, folder=None):
    """By step and micro-batch the losses of this rank's; the adapter at the end; bytes by state that rest here.

    folder: it is saved there after a step, and loaded before the next one.
    """
    model = build(base)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    losses = {}
    for step in range(STEPS):
        for at in range(ranks.rank(), MICRO, world):
            rows = torch.tensor([row["input_ids"] for row in examples(MICRO * step + at + 1)])
            loss = model(input_ids=rows, labels=rows).loss
            (loss * world / MICRO).backward()
            losses[step, at] = loss.item()
            del loss  # and with it its graph, which may hold weights
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and folder is not None:
            zero.save(folder)
    if folder is not None:
        zero.load(folder)
    held = dict(zero.ledger().held)
    with zero.gathered():
        adapter = {name: param.tolist() for name, param in model.named_parameters() if "lora" in name}
    return losses, adapter, held


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("base", BASES)
def test_adapters_over_a_base_in_4_bits(tmp_path, base):
    """At stages 0 to 3 on two ranks as on one, with the base sharded as all else, and held as planned."""
    pytest.importorskip(base)
    plain = ranks.run(1, trained, base, 0, 1, group="env", timeout=LIMIT)[0]
    whole = 0
    for stage in range(4):
        first, second = ranks.run(2, trained, base, stage, 2, group="env", timeout=LIMIT)
        assert first[0] | second[0] == plain[0]
        assert first[1] == second[1] == plain[1]
        rest = [each[2]["parameters"] for each in (first, second)]
        whole = rest[0] if stage == 0 else whole
        assert sum(rest) == whole * (2 if stage < 3 else 1)
        for rank, each in enumerate((first, second)):  # a plan knows all of it, to the byte
            planned = simulate(partial(job, base), ranks=2, rank=rank, stage=stage, accumulate=MICRO // 2).ledger.held
            assert {state: n for state, n in planned.items() if n} == {state: n for state, n in each[2].items() if n}
    saved = [
        ranks.run(n, trained, base, stage, n, tmp_path / "a", group="env", timeout=LIMIT)[0][1]
        for n, stage in ((2, 3), (1, 0))
    ]
    assert saved[0] == saved[1] != plain[1]
