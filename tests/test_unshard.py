"""`zero.unshard`: a plain model and a plain optimizer again, with the bits that they had."""

from __future__ import annotations

import gc
import itertools
import signal
import weakref

import pytest
import torch
from torch import nn

import models
import ranks
import reference
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import StateError, UserError

SIZES = (7, 131, 37, 5)
ROWS = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor, "sgd": torch.optim.SGD}


def made(kind="adamw"):
    model = models.build("mlp", sizes=SIZES)
    return model, ROWS[kind](model.parameters(), lr=0.01)


def four_a_step(model, optimizer, numbers):
    """Four micro-batches a step, however many ranks there are; of a plain model all of them on this one."""
    sharded = any(hasattr(parameter, "_zeroshard") for parameter in model.parameters())
    world, rank = (ranks.world(), ranks.rank()) if sharded else (1, 0)
    for number in numbers:
        for turn in range(4 // world):
            index = turn * world + rank
            loss = models.loss("mlp", model, models.batch("mlp", number, index))
            (loss / (4 // world if sharded else 1)).backward()
        if not sharded:
            for parameter in model.parameters():
                parameter.grad.div_(4)
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer):
    """Weights, and every state of every parameter, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[parameter]} {key}": value.clone() for key, value in state.items() if torch.is_tensor(value)}
    return found


def plain(kind, steps):
    model, optimizer = made(kind)
    four_a_step(model, optimizer, range(steps))
    return state_of(model, optimizer)


def traces(model, optimizer):
    """What of the engine can still be found on a model or an optimizer."""
    found = [key for each in (*model.modules(), optimizer) for key in each.__dict__ if "zeroshard" in key]
    found += [name for name, parameter in model.named_parameters() if type(parameter) is not nn.Parameter]
    found += [name for name, parameter in model.named_parameters() if parameter.__dict__ or parameter.grad is not None]
    found += [name for name, parameter in model.named_parameters() if parameter._post_accumulate_grad_hooks]
    for each in (*model.modules(), optimizer):
        found += [key for key, value in each.__dict__.items() if "hooks" in key and value]
        found += [key for key in ("__reduce_ex__", "forward", "zero_grad", "step") if key in each.__dict__]
    return found


def unsharded(kind, stage, folder, **settings):
    """Two steps sharded, then without; what is left of the engine; three more steps sharded at another stage."""
    model, optimizer = made(kind)
    if "nvme" in settings:
        settings = {"offload": Offload(optimizer="nvme", parameters="nvme", path=folder)}
    zero = zeroshard.shard(model, optimizer, stage=stage, **settings)
    engine, bucket = weakref.ref(zero._engine), weakref.ref(zero._engine.buckets[0])
    four_a_step(model, optimizer, range(2))
    gc.disable()
    zero.unshard()
    gone = engine() is None, bucket() is None
    gc.enable()
    left, at_two = traces(model, optimizer), state_of(model, optimizer)
    plain_groups = [id(p) for group in optimizer.param_groups for p in group["params"]]
    whose = plain_groups == [id(parameter) for parameter in model.parameters()]
    with pytest.raises(StateError, match="this model was unsharded") as refused:
        zero.gathered().__enter__()
    again = zeroshard.shard(model, optimizer, stage=(stage + 2) % 4)
    four_a_step(model, optimizer, range(2, 3))
    again.unshard()
    return gone, left, at_two, whose, str(refused.value), state_of(model, optimizer), repr(zero)


CASES = [("adamw", {}), ("adamw", {"nvme": True}), ("adafactor", {}), ("sgd", {})]


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_is_plain_again_with_all_states(kind, stage, settings, tmp_path):
    """On every rank: plain torch's weights and states after two steps, nothing of the engine, its memory given back."""
    two, three = plain(kind, 2), plain(kind, 3)
    for gone, left, at_two, whose, refused, again, shown in ranks.run(
        2, unsharded, kind, stage, str(tmp_path), **settings
    ):
        assert gone == (True, True)
        assert left == []
        reference.assert_same(at_two, two)
        assert whose
        assert "zeroshard.shard(model, optimizer, ...)" in refused
        reference.assert_same(again, three)
        assert shown.startswith(f"Zero(stage={stage}, ")


def there_and_back(stages, **settings):
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    number = itertools.count()
    for stage in stages:
        zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage, **settings)
        four_a_step(model, optimizer, [next(number)])
        scheduler.step()
        if zero is not None:
            zero.unshard()
    return state_of(model, optimizer)


def test_on_one_rank_and_in_plain_pytorch_and_on_two_the_bits_are_those_of_a_run_never_unsharded():
    """Sharded at one stage after the other, plain between: one run."""
    want = there_and_back([None] * 6)
    reference.assert_same(there_and_back([3, None, 1, 2, None, 0]), want)
    for each in ranks.run(2, there_and_back, [3, 1, 2, 0, 3, None]):
        reference.assert_same(each, want)


def in_bf16():
    return there_and_back([3, 1, 3], precision=Precision(param_dtype=torch.bfloat16, cast_inputs=True))


def in_bf16_all_along():
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    zero = zeroshard.shard(model, optimizer, stage=3, precision=Precision(param_dtype=torch.bfloat16, cast_inputs=True))
    for number in range(3):
        four_a_step(model, optimizer, [number])
        scheduler.step()
    zero.unshard()
    return state_of(model, optimizer)


def test_masters_are_the_parameters_that_a_model_in_fp32_gets_back():
    found = ranks.run(2, in_bf16) + ranks.run(2, in_bf16_all_along)
    for each in found:
        assert {value.dtype for value in each.values()} == {torch.float32}
        reference.assert_same(each, found[0])


def trains_in_another_dtype():
    """Autograd knew the parameters as bfloat16, and knows them as fp32 now."""
    model, optimizer = made()
    zero = zeroshard.shard(model, optimizer, precision=Precision(param_dtype=torch.bfloat16, cast_inputs=True))
    four_a_step(model, optimizer, range(1))
    zero.unshard()
    four_a_step(model, optimizer, range(1, 2))
    return {parameter.dtype for parameter in model.parameters()}


def test_a_model_trains_on_in_the_dtype_that_it_had():
    assert ranks.run(2, trains_in_another_dtype) == [{torch.float32}] * 2


def with_what_is_the_programs(folder):
    """Hooks of the program, recomputed forwards, frozen and ignored parameters, names, a handler, a gradient, an average."""
    model, seen = models.build("mlp", sizes=SIZES), []
    first, *_, last = [module for module in model.modules() if isinstance(module, nn.Linear)]
    first.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(list(model.named_parameters()), lr=0.01)
    names = list(optimizer.param_groups[0]["param_names"])
    model.register_forward_hook(lambda *_: seen.append("forward"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    handler = signal.getsignal(signal.SIGUSR1)
    ignored = next(name for name, parameter in model.named_parameters() if parameter is last.bias)
    layout = Layout(units=["*"], recompute=["*"], ignore=[ignored])
    zero = zeroshard.shard(model, optimizer, stage=3, layout=layout, comm=Comm(timeout=30))
    zero.save_on(signal.SIGUSR1, None)
    average = zero.average(0.9)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    last.weight.register_post_accumulate_grad_hook(lambda *_: seen.append("gradient"))
    model(torch.ones(2, SIZES[0])).sum().backward()
    optimizer.step()
    model(torch.ones(2, SIZES[0])).sum().backward()
    zero.unshard()
    with pytest.raises(StateError, match="unsharded"):
        average.update()
    seen.clear()
    left = [name for name, parameter in model.named_parameters() if parameter.grad is not None and name != ignored]
    forwards = [module for module in model.modules() if "forward" in module.__dict__]
    model(torch.ones(2, SIZES[0])).sum().backward()
    optimizer.step()
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    state = sorted(optimizer.param_groups[0]["param_names"]) == sorted(names)
    optimizer.zero_grad()
    zeroshard.shard(model, optimizer, stage=2)
    return seen, left, forwards, state, signal.getsignal(signal.SIGUSR1) == handler, len(frozen)


@pytest.mark.processes
def test_what_is_the_programs_stays(tmp_path):
    for seen, *rest in ranks.run(2, with_what_is_the_programs, str(tmp_path)):
        assert seen == ["forward", "gradient", "before", "after"]
        assert rest == [[], [], True, True, 1]


def inside():
    model, optimizer = made()
    zero = zeroshard.shard(model, optimizer, stage=3)
    with zero.gathered(), pytest.raises(StateError, match=r"unsharding inside forward, backward or gathered\(\)"):
        zero.unshard()
    four_a_step(model, optimizer, range(1))
    optimizer.param_groups[0]["params"][0].grad = None
    for each in optimizer.state.values():
        each[3] = torch.zeros(())
    with pytest.raises(UserError, match="the model was not unsharded, and is as it was") as refused:
        zero.unshard()
    for each in optimizer.state.values():
        del each[3]
    four_a_step(model, optimizer, range(1, 2))
    zero.unshard()
    return str(refused.value), state_of(model, optimizer)


def test_what_cannot_be_unsharded_stays_as_it_was():
    for refused, found in ranks.run(2, inside):
        assert "an optimizer's state has a name that is no text" in refused
        reference.assert_same(found, plain("adamw", 2))


def exported(stage, how):
    """What torch says of a program of a sharded model's forward, and whether that of the plain one is right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    x = torch.ones(2, 6)
    make = {
        "export": lambda: torch.export.export(model, (x,)).module(),
        "trace": lambda: torch.jit.trace(model, (x,)),
    }[how]
    try:
        with zero.gathered():
            want = model(x).detach()
            torch.equal(make()(x), want)
        said = ""
    except StateError as error:
        said = f"{error}"
    zero.unshard()
    return said, torch.equal(make()(x), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of jit
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_program_is_made_of_the_model_that_is_plain_again():
    """At every stage a sharded one is refused, with `zero.unshard()` to write first."""
    for stage, how in itertools.product((0, 1, 3), ("export", "trace")):
        for said, right in ranks.run(2, exported, stage, how):
            assert right and "zero.unshard()" in said
            assert f"where: torch.{'export' if how == 'export' else 'jit.trace'}" in said
