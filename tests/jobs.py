"""Jobs for `zeroshard verify`: good ones, ones that cannot be verified, and ones that bring a known bug of a peer along.

The bugs are patched into zeroshard when the job is built, so the plain reference, which uses none of it, is right.
"""

import atexit
import itertools
import os
import signal
from itertools import pairwise

import torch
from torch import nn

from zeroshard import Zero
from zeroshard.engine.gradients import accumulator, sums

FOLD, AVERAGE, SEND, LOAD = sums.fold, accumulator.average_, sums.Sums.send, Zero.load
calls = itertools.count()


def undo():
    sums.fold, accumulator.average_, sums.Sums.send, Zero.load = FOLD, AVERAGE, SEND, LOAD


def batch(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(5, 10, generator=generator), torch.randn(5, 3, generator=generator)


def loss(model, batch):
    return (model(batch[0]).float() - batch[1]).square().mean()


def mlp(*middle, **other):
    """0.weight is 120 elements, 0.bias 12, the last ones 36 and 3: each of them is padded to whole blocks of 128."""
    return {
        "model": nn.Sequential(nn.Linear(10, 12), nn.Tanh(), *middle, nn.Linear(12, 3)),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "batch": batch,
        "loss": loss,
        **other,
    }


# ------------------------------------------------------------------------------------------------------- bugs of peers


def last_micro_batch_dropped():
    """The step's last contribution arrives after the gradients have been read."""
    sums.fold = lambda total, pieces, *, start, **how: FOLD(
        total, pieces if start is None else pieces[:-1], start=start, **how
    )
    return mlp()


def padding_summed_into_the_next_parameter():
    """Offsets count a parameter without its padding; the padding holds what the memory held before."""

    def send(self, contribution):
        self.room(contribution)
        whole = contribution.memory
        for slot, following in pairwise(contribution.plan.slots):
            whole[slot.stop : following.start] = 0.5
            length = min(following.start - slot.stop, following.numel)
            whole[following.start : following.start + length] += whole[slot.stop : slot.stop + length]
        SEND(self, contribution)

    sums.Sums.send = send
    return mlp()


def average_divided_twice():
    """Once where the gradients are summed and once more where they are used."""

    def average(total, ranks):
        AVERAGE(total, ranks)
        AVERAGE(total, ranks)

    accumulator.average_ = average
    return mlp()


def sums_that_are_raced_for():
    """What a rank adds up depends on which of two threads was first."""

    def fold(total, pieces, *, start, **how):
        return FOLD(total, [piece + os.urandom(1)[0] / 256 for piece in pieces], start=start, **how)

    sums.fold = fold
    return mlp()


def momentum_that_is_not_resumed():
    """A checkpoint's weights are loaded, and what the optimizer keeps of them is not."""
    made = []

    def load(zero, path, **how):
        LOAD(zero, path, **how)
        for state in made[-1].state.values():
            state["momentum_buffer"].zero_()

    def optimizer(parameters):
        made.append(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        return made[-1]

    Zero.load = load
    return mlp(optimizer=optimizer)


# -------------------------------------------------------------------------------------------- jobs that are special


def batch_norm():
    return mlp(nn.BatchNorm1d(12))


def dropout():
    return mlp(nn.Dropout(0.3))


def unsteady():
    """A loader that is read on and on, whatever step and micro-batch are asked for."""
    return mlp(batch=lambda step, index: batch(0, next(calls)))


def by_rank():
    return mlp(batch=lambda step, index: batch(step, index + 7 * int(os.environ.get("RANK", "0"))))


def fails_on_rank_1():
    def failing(model, batch):
        if os.environ.get("RANK") == "1" and next(calls) == 5:
            raise ArithmeticError("only here")
        return loss(model, batch)

    return mlp(loss=failing)


def dies_at_the_end():
    if os.environ.get("RANK") == "1":
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)  # when all results are written
    return mlp()


class WithoutClosure(torch.optim.LBFGS):
    """As plain loops call it."""

    def step(self, closure=None):
        return super().step(closure or (lambda: torch.zeros(())))


def products():
    return mlp(model=nn.Linear(10, 60), optimizer=WithoutClosure, loss=lambda model, batch: model(batch[0]).mean())


def without_loss():
    job = mlp()
    del job["loss"]
    return job


class Unknown(torch.optim.SGD):
    pass


def unknown_optimizer():
    """It may be elementwise, or not."""
    return mlp(optimizer=lambda parameters: Unknown(parameters, lr=0.1))


def misspelt():
    return mlp(optimiser=torch.optim.SGD)


def cannot_be_built():
    raise OSError("no such corpus")


def cannot_be_trained():
    return mlp(loss=lambda model, batch: model(batch[1]))
