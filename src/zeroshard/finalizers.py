"""Code of ours that runs by itself: at the end of an object, on a thread, in a signal's handler.

Named hazard, *the collector runs anywhere*: Python ends objects, and calls what was to be called then (finalisers,
`__del__`, callbacks of weak references), between any two instructions of any thread: inside the very loop over what
that would change, under the very lock that it would take. So code of ours that is called then does one of three things:

    it gives back what only the ended object could use: a descriptor, pages, threads, handles of collectives
    it lets streams of a device wait, which the host does not, for what uses the ended object's memory
    it notes, by one `append` to a deque, which is one call of C; the next user of what the note is about acts on it

A signal's handler runs between any two instructions of the main thread. It notes too, or ends the program.

A thread of ours that works beside the training changes no container that another thread walks through: it binds a name
to a new one. What another thread may bind meanwhile it reads once. It launches nothing but in a process group of its
own. Only counts in the ledger are behind a lock.

Here is the one function that lets anything be called at an object's end; a test knows who else could (`test_house`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def at_end_of(
    thing: object, call: Callable[..., object], *args: Any, at_exit: bool = False
) -> weakref.finalize[Any, Any]:
    """Have `call` called once the collector ends `thing`, or when the interpreter exits if `at_exit`.

    `call` may only do what is said above. Calling the returned object runs it at once, and then never again.
    """
    end = weakref.finalize(thing, call, *args)
    end.atexit = at_exit
    return end
