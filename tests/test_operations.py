"""Any order of operations: two sharded ranks in lock-step with plain PyTorch, driven by a machine of random rules.

The machine writes a script; at its end both ranks play it beside a twin that knows nothing of zeroshard, and compare bits.
A rule is offered only where plain PyTorch has an answer. What plain PyTorch refuses, zeroshard must refuse as well.
"""

from __future__ import annotations

import copy
import os
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch import nn

import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Layout
from zeroshard.errors import Error

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "4.weight", "4.bias"]


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 130), nn.RMSNorm(130), nn.Linear(130, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def batch(number: int, rank: int):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * number + rank))


class Boom(Exception):
    pass


class Twin:
    """Plain PyTorch with the two ranks' micro-batches one after the other: gradients as running sums, by name."""

    def __init__(self) -> None:
        self.model, self.optimizer = build()
        self.params = dict(self.model.named_parameters())
        self.sums: dict[str, torch.Tensor] = {}
        self.local: list[dict[str, torch.Tensor]] = [{}, {}]
        self.saved = None

    def backward(self, number: int, *, local: bool) -> None:
        for rank in range(2):
            wanted = [name for name, param in self.params.items() if param.requires_grad]
            loss = self.model(batch(number, rank)).square().sum()
            grads = torch.autograd.grad(loss, [self.params[name] for name in wanted])
            for name, grad in zip(wanted, grads, strict=True):
                held = self.local[rank]
                held[name] = held[name] + grad if name in held else grad
        if not local:
            self.settle()

    def settle(self) -> None:
        for held in self.local:
            for name, grad in held.items():
                self.sums[name] = self.sums[name] + grad if name in self.sums else grad
        self.local = [{}, {}]

    def step(self) -> None:
        self.settle()
        for name, param in self.params.items():
            param.grad = self.sums[name] / 2 if name in self.sums else None
        self.optimizer.step()

    def clear(self) -> None:
        self.sums, self.local = {}, [{}, {}]


class Play:
    """One rank's end of a script."""

    def __init__(self, stage: int, bounds: str, folder: str) -> None:
        self.rank, self.folder = rank_processes.rank(), folder
        self.model, self.optimizer = build()
        layout = Layout(units=[nn.Linear], bounds=bounds, align=128 if bounds == "unit" else 1)
        self.zero = zeroshard.shard(self.model, self.optimizer, stage=stage, layout=layout)
        self.params = dict(self.model.named_parameters())
        self.twin = Twin()
        self.saves = 0

    def backward(self, number: int) -> None:
        self.model(batch(number, self.rank)).square().sum().backward()
        self.twin.backward(number, local=False)

    def local(self, number: int) -> None:
        with self.zero.no_sync():
            self.model(batch(number, self.rank)).square().sum().backward()
        self.twin.backward(number, local=True)

    def step(self) -> None:
        self.optimizer.step()
        self.twin.step()

    def clear(self, to_none: bool, by_model: bool) -> None:
        (self.model if by_model else self.optimizer).zero_grad(set_to_none=to_none)
        if to_none:
            self.twin.clear()
        else:
            self.twin.settle()
            self.twin.sums = {name: torch.zeros_like(grad) for name, grad in self.twin.sums.items()}

    def clamp(self) -> None:
        if all(param.grad is None for param in self.params.values()):
            return  # torch itself has no answer
        nn.utils.clip_grad_value_(self.model.parameters(), 0.05)
        self.twin.settle()
        self.twin.sums = {name: (grad / 2).clamp(-0.05, 0.05) * 2 for name, grad in self.twin.sums.items()}

    def evaluate(self, number: int) -> None:
        self.model.eval()
        with torch.inference_mode() if number % 2 else torch.no_grad():
            out = self.model(batch(number, self.rank))
            wanted = self.twin.model(batch(number, self.rank))
        self.model.train()
        assert torch.equal(out, wanted)

    def generate(self, number: int) -> None:
        got = wanted = batch(number, self.rank)
        with torch.no_grad():
            for _ in range(3):
                got = torch.cat([self.model(got), got[:, :2]], dim=1)
                wanted = torch.cat([self.twin.model(wanted), wanted[:, :2]], dim=1)
        assert torch.equal(got, wanted)

    def unused(self, number: int) -> None:
        self.model(batch(number, self.rank))

    def save(self) -> None:
        self.saves += 1
        self.zero.save(os.path.join(self.folder, str(self.saves)))
        twin = self.twin
        self.twin.saved = copy.deepcopy((twin.model.state_dict(), twin.optimizer.state_dict()))

    def load(self) -> None:
        self.zero.load(os.path.join(self.folder, str(self.saves)))
        weights, state = copy.deepcopy(self.twin.saved)
        self.twin.model.load_state_dict(weights)
        self.twin.optimizer.load_state_dict(state)
        self.twin.clear()

    def edit(self, name: str, write_from: int | None) -> None:
        with torch.no_grad(), self.zero.gathered(name, write_from=write_from):
            if write_from in (None, self.rank):
                self.params[name].mul_(0.5).add_(0.01)
        with torch.no_grad():
            self.twin.params[name].mul_(0.5).add_(0.01)

    def toggle(self, name: str) -> None:
        for params in (self.params, self.twin.params):
            params[name].requires_grad_(not params[name].requires_grad)

    def failed_forward(self, number: int) -> None:
        def boom(*_):
            raise Boom

        hook = self.model[number % 5].register_forward_hook(boom)
        try:
            with pytest.raises(Boom):
                self.model(batch(number, self.rank))
        finally:
            hook.remove()

    def failed_backward(self, number: int) -> None:
        def boom(grad):
            raise Boom

        hidden = self.model[:3](batch(number, self.rank)) if number % 2 else None
        out = self.model(batch(number, self.rank))
        (out if hidden is None else hidden).register_hook(boom)
        with pytest.raises(Boom):
            (out.sum() if hidden is None else out.sum() + hidden.sum()).backward()
        self.dropped()

    def dropped(self) -> None:
        self.twin.clear()
        with self.zero.gathered("0.bias"):  # p.grad is cleared by the first thing that anybody asks for
            pass

    def stale(self, number: int) -> None:
        """A step between forward and backward: autograd refuses it in plain PyTorch, and so do we."""
        loss = self.model(batch(number, self.rank)).square().sum()
        before = {name for name, param in self.params.items() if param.grad is not None}
        self.step()
        if before:
            with pytest.raises((Error, RuntimeError)):
                loss.backward()
            self.dropped()

    def look(self) -> None:
        self.twin.settle()
        for name, param in self.params.items():
            assert (param.grad is not None) == (name in self.twin.sums), name
            if param.grad is not None:
                got = {name: param.grad.full_tensor()}
                reference.assert_same(got, {name: self.twin.sums[name] / 2})

    def compare(self) -> None:
        with self.zero.gathered():
            reference.assert_same(reference.weights(self.model), reference.weights(self.twin.model))


def play(stage: int, bounds: str, script: list[tuple], folder: str) -> None:
    run = Play(stage, bounds, folder)
    for verb, *arguments in script:
        getattr(run, verb)(*arguments)
    run.compare()
    if not any(params.requires_grad for params in run.params.values()):
        return
    for number in range(2):  # whatever came before, training goes on
        run.clear(True, False)
        run.backward(number)
        run.step()
    run.compare()


def after_a_failed_backward(stage: int, what: str, folder: str) -> None:
    run = Play(stage, "unit", folder)
    run.backward(0)
    run.save()
    out = run.model(batch(1, run.rank))

    def boom(grad):
        raise Boom

    out.register_hook(boom)
    with pytest.raises(Boom):
        out.sum().backward()
    run.twin.clear()
    if what == "norm":
        assert nn.utils.clip_grad_norm_(run.model.parameters(), 1.0) == 0  # they are gone, those from before as well
    else:
        getattr(run, what)()
    run.look()
    run.backward(2)
    run.step()
    run.compare()


@pytest.mark.row(28)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", ["save", "load", "compare", "step", "norm"])
def test_a_call_right_after_a_backward_that_failed(ranks, tmp_path, what, stage):
    """Found by the machine below: a load or save was refused at stage 3, as if backward were still running."""
    ranks.run(2, after_a_failed_backward, stage, what, str(tmp_path))


@pytest.mark.row(28)
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_after_a_backward_that_came_too_late(ranks, tmp_path, stage):
    """Found by the machine below: a step between forward and backward drops what earlier backwards had left."""
    ranks.run(2, play, stage, "unit", [("backward", 0), ("stale", 0), ("look",), ("save",), ("load",)], str(tmp_path))


NUMBER = st.integers(0, 5)


class Operations(RuleBasedStateMachine):
    """Writes a script by its rules; remembers only what decides which rule makes sense."""

    stage, bounds = 3, "unit"

    def __init__(self) -> None:
        super().__init__()
        self.script: list[tuple] = []
        self.saved = False
        self.frozen: set[str] = set()

    def say(self, *line) -> None:
        self.script.append(line)

    @rule(number=NUMBER)
    def backward(self, number):
        self.say("backward", number)

    @rule(number=NUMBER)
    def local(self, number):
        self.say("local", number)

    @rule()
    def step(self):
        self.say("step")

    @rule(to_none=st.booleans(), by_model=st.booleans())
    def clear(self, to_none, by_model):
        self.say("clear", to_none, by_model)

    @rule()
    def clamp(self):
        self.say("clamp")

    @rule(number=NUMBER, verb=st.sampled_from(["evaluate", "generate", "unused", "failed_forward"]))
    def forwards(self, number, verb):
        self.say(verb, number)

    @rule(number=NUMBER, verb=st.sampled_from(["failed_backward", "stale"]))
    def failures(self, number, verb):
        self.say(verb, number)

    @rule()
    def save(self):
        self.say("save")
        self.saved = True

    @precondition(lambda self: self.saved)
    @rule()
    def load(self):
        self.say("load")

    @rule(name=st.sampled_from(NAMES), write_from=st.sampled_from([None, 0, 1]))
    def edit(self, name, write_from):
        self.say("edit", name, write_from)

    @rule(name=st.sampled_from(NAMES))
    def toggle(self, name):
        if self.frozen ^ {name} != set(NAMES):  # something is left to train
            self.frozen ^= {name}
            self.say("toggle", name)

    @rule(verb=st.sampled_from(["look", "compare"]))
    def compare(self, verb):
        self.say(verb)

    def teardown(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            rank_processes.run(2, play, self.stage, self.bounds, self.script, folder, group_timeout=60, timeout=170)


def machine(stage: int, bounds: str, examples: int, steps: int) -> None:
    kind = type("Machine", (Operations,), {"stage": stage, "bounds": bounds})
    limits = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(kind, settings=limits)


@pytest.mark.row(28)
@pytest.mark.parametrize(("stage", "bounds"), [(1, "model"), (3, "unit")])
def test_any_order_of_operations(ranks, stage, bounds):
    """Some hundred operations, in scripts of up to 15."""
    machine(stage, bounds, examples=12, steps=15)


@pytest.mark.row(28)
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bounds", ["unit", "model", "tensor"])
def test_thousands_of_operations_in_any_order(ranks, stage, bounds):
    machine(stage, bounds, examples=40, steps=50)
