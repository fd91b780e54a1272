"""Bugs that were planted to see what drawn schedules find: each a change of the engine's source, one line or a few.

They were chosen by reading the engine, before the rules of drawing that had to find them were written. `python -m world
planted` puts each into a copy of the package and draws until it is found; a change whose place is gone is said so.
"""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    """What is changed in one file, `was` to `becomes`."""

    name: str
    file: str
    was: str
    becomes: str


BUGS = (
    Bug(
        "only the first of a gather's broadcasts is waited for", "comm/transport.py",
        "            self._wait(self._handles[0])\n            self._handles.pop(0)\n",
        "            self._wait(self._handles[0])\n            self._handles.clear()\n",
    ),
    Bug(
        "a relay's average is taken off its queue before it came: an exception loses it", "comm/reduce_pipeline.py",
        "        self.wait(self._landed[0])  # an interrupt may come here: then it is still under way\n"
        "        self._store(self._landed.pop(0))\n",
        "        self._store(self._landed.pop(0))\n",
    ),
    Bug(
        "what the replica before has summed up is not waited for", "engine/gradients/sums.py",
        "            delivery.receive()\n            delivery.came.wait()\n",
        "            delivery.receive()\n",
    ),
    Bug(
        "the end of a slice of waiting is taken for the message's", "comm/collectives.py",
        "                if not queued and handle.wait(SLICE):  # False: shared memory was not posted in this slice\n"
        "                    return\n",
        "                handle.wait(SLICE)\n                return\n",
    ),
    Bug(
        "the memory that a reduction lands in is given back when it is launched", "engine/gradients/sums.py",
        "        contribution.move(ContributionState.SENT)\n        self.begin(Sent(",
        "        contribution.move(ContributionState.SENT)\n        self.scratch.give_back(receive)\n        self.begin(Sent(",
    ),
    Bug(
        "the order of reductions follows what this rank got", "engine/gradients/reduction.py",
        "key=lambda index: (index not in with_gradient, -index))",
        "key=lambda index: (not self.contributions[index].received, -index))",
    ),
    Bug(
        "units that ranks name in one round are gathered beginning with the own", "engine/weights/gather_order.py",
        "            named = list(dict.fromkeys(names for names, _, _ in told if names != _NOBODY))\n",
        "            told = told[self.group.rank % len(told) :] + told[: self.group.rank % len(told)]\n"
        "            named = list(dict.fromkeys(names for names, _, _ in told if names != _NOBODY))\n",
    ),
    Bug(
        "what this rank did not use is left out of the sequence, though others used it", "engine/weights/gather_order.py",
        "        used = self.group.flags(bytes(self._used))\n",
        "        used = bytes(self._used)\n",
    ),
    Bug(
        "the end of a model prunes the streams, wherever the collector finds it", "comm/launch_log.py",
        "    for stream in streams:\n        stream.let_go(engine)\n",
        "    for stream in streams:\n        stream.let_go(engine)\n        stream.prune()\n",
    ),
    Bug(
        "who waits for a save behind the training goes on at once", "checkpoint/saving.py",
        "            self._thread.join()\n            release_signals()\n",
        "            release_signals()\n",
    ),
    Bug(
        "a save behind the training reads states that go on changing", "checkpoint/saving.py",
        "snapshot = _snapshot(running, extra, differing, copied=asynchronous)",
        "snapshot = _snapshot(running, extra, differing, copied=False)",
    ),
    Bug(
        "a checkpoint is published whose files are not on the disk", "checkpoint/files.py",
        "                os.ftruncate(self._descriptor, self.nbytes)\n                os.fsync(self._descriptor)\n",
        "                os.ftruncate(self._descriptor, self.nbytes)\n",
    ),
    Bug(
        "a write that took fewer bytes is taken for a whole one", "checkpoint/files.py",
        "                pages, at = pages[done:], at + done\n",
        "                pages, at = pages[max(done, pages.nbytes) :], at + done\n",
    ),
    Bug(
        "what failed on the disk of one rank is not told to the others", "comm/all_or_none.py",
        "        if error is not None and not isinstance(error, Exception):\n",
        "        if isinstance(error, OSError) or (error is not None and not isinstance(error, Exception)):\n",
    ),
    Bug(
        "older checkpoints are removed before the new one is published", "checkpoint/saving.py",
        "        _together(group, target, lambda: _publish(snapshot, everyone, beside, target) if first else None)\n",
        "        if keep is not None and first:\n            _forget(target, keep)\n"
        "        _together(group, target, lambda: _publish(snapshot, everyone, beside, target) if first else None)\n",
    ),
    Bug(
        "a state is read from its file while it is still on its way there", "features/nvme.py",
        "        before = [*room.work, *rest.writing]  # must end before, without an error\n",
        "        before = [*room.work]  # must end before, without an error\n",
    ),
    Bug(
        "a state from a file is used before it was read", "features/nvme.py",
        "        assert self.room is not None\n        self.file.wait(self.room)\n        self.depth += 1\n",
        "        assert self.room is not None\n        self.depth += 1\n",
    ),
    Bug(
        "a rank leaves a levelling before all are through with it", "comm/collectives.py",
        "        watch.posted[number, THROUGH] = THROUGH\n        self._posted(number, THROUGH)\n",
        "        watch.posted[number, THROUGH] = THROUGH\n",
    ),
    Bug(
        "averages that all ranks step with are not waited for", "engine/step/optim.py",
        "if not each.bucket.by_itself]:\n            work.wait()\n",
        "if not each.bucket.by_itself]:\n            pass\n",
    ),
    Bug(
        "the optimizer in backward does not wait for the average", "features/optimizer_in_backward.py",
        "        accumulator, having, work = self._landed[0]\n        work.wait()\n",
        "        accumulator, having, work = self._landed[0]\n",
    ),
)  # fmt: skip
