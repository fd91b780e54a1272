"""Plans of settings by the names of the command line's options, for tests that change one of them at a time."""

import zeroshard
from zeroshard.planner.question import from_flat


def plan_of(**settings):
    model, machine, step, rest = from_flat(settings)
    return zeroshard.plan(model, machine, step=step, **rest)
