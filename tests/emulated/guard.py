"""torch's guard of a device in Python, and a way past it for exceptions in backward.

Named hazard, *an exception meets the guard*: a hook that raises in backward leaves its exception in the interpreter's
indicator while C++ unwinds; on the way the guard asks Python for the device's type. Python refuses an answer that comes
with an exception set, and C++ ends the process. So `type_` takes the exception out of the indicator, by the one call
that it makes, and `run_backward` raises it where C++ has nothing left to say.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_KIND: Any = torch._C._autograd.DeviceType.PrivateUse1  # type: ignore[attr-defined]
_type, _value, _trace = ctypes.py_object(), ctypes.py_object(), ctypes.py_object()
_found = ctypes.byref(_type), ctypes.byref(_value), ctypes.byref(_trace)
_fetch = ctypes.pythonapi.PyErr_Fetch
_fetch.restype = None
_taken: list[BaseException] = []


class Guard(torch._C._acc.DeviceGuard):  # type: ignore[name-defined, misc]
    """Says which type of device it is for."""

    def type_(self) -> Any:
        _fetch(*_found)  # nothing before it may call anything
        if _type:
            _keep()
        return _KIND


def _keep() -> None:
    error, trace = _value.value if _value else None, _trace.value if _trace else None
    if not isinstance(error, BaseException):  # as C raises them
        error = _type.value(*(() if error is None else error if isinstance(error, tuple) else (error,)))
    _taken.append(error.with_traceback(trace))


def run_backward(engine: Any) -> Any:
    """torch's call of its engine, which raises what hooks have raised."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _taken.clear()
        try:
            return engine(*args, **kwargs)
        except BaseException as error:
            if _taken and isinstance(error, SystemError):
                raise _taken[0] from None
            raise

    return run
