"""The processor: its kind, and whether it computes in bf16. Without such instructions each operand is converted:
products take some 50 times as long as in fp32."""

from __future__ import annotations

import hashlib
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86's, x86's for tiles, ARM's


def computes_bf16() -> bool | None:
    """Tell whether the processor computes in bf16; None where the system does not say."""
    try:
        lines = [line.partition(":") for line in CPUINFO.read_text().splitlines()]
    except OSError:
        return None
    told = [set(words.split()) for name, _, words in lines if name.strip() in ("flags", "Features")]
    return bool(INSTRUCTIONS & told[0]) if told else None


def name() -> str | None:
    """Return what the processor is sold as; None where the system does not say."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def kind() -> str:
    """Return a word that differs where libraries choose other kernels; empty where the system does not say."""
    names = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    try:
        first = CPUINFO.read_text().partition("\n\n")[0]
    except OSError:
        return ""
    lines = [line.partition(":") for line in first.splitlines()]
    told = [f"{name.strip()} {' '.join(sorted(words.split()))}" for name, _, words in lines if name.strip() in names]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:12]


def slow(precision: str, device: str = "cpu") -> str:
    """Return a warning if a run in this precision takes much longer here than in fp32; else an empty text."""
    if device != "cpu" or not precision.startswith("bf16") or computes_bf16() is not False:
        return ""
    return (
        "this processor has no bf16 arithmetic: products in bf16 take some 50 times as long as in fp32; "
        "use --precision fp32 here"
    )
