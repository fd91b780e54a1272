"""NVIDIA's compiler as a library, by the four calls that a text without headers takes.

torch has a way to it too (`torch.cuda._compile_kernel`), but looks for headers of CUDA, which no wheel of
torch brings.
"""

from __future__ import annotations

import ctypes
from typing import Any

# A product and a sum are rounded one after the other, and quotients rightly, as in torch's operations.
OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", "--std=c++17")


def compile_(library: Any, text: str, name: str, architecture: str) -> bytes:
    """Return the machine code of a text for an architecture ("sm_90"), which a driver can load.

    library: NVRTC as `ctypes` loads it. name: of the text, in messages. Raises RuntimeError with the compiler's words.
    """
    program = ctypes.c_void_p()
    source = text.encode()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None))
    try:
        words = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
        ended = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        if ended:
            log = _taken(library, "ProgramLog", program)
            raise RuntimeError(f"{name} does not compile for {architecture}: {log.decode(errors='replace').strip()}")
        return _taken(library, "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _taken(library: Any, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    memory = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, memory))
    return memory.raw


def _check(library: Any, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")
