"""Step: what the test suite has for this device, each test as a row."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from .place import ROOT
from .record import Record, Wrong

WHAT = {  # a rehearsal runs what says the same of the device that it has
    "cuda": ["tests", "-m", "gpu"],
    "emu": ["tests/test_emulated.py", "-m", "not full"],
    "cpu": ["tests/test_gpu.py", "-m", "not gpu", "-k", "fp32 and device-fp32"],
}


def run(record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run([*words, *WHAT[record.place.kind]], cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            raise Wrong(done.stdout[-2000:] + done.stderr[-2000:])
        for test in ElementTree.parse(report).iter("testcase"):
            name = f"{test.get('classname')}.{test.get('name')}"
            failed = [*test.findall("failure"), *test.findall("error")]
            if (skipped := test.find("skipped")) is not None:
                record.skip(name, skipped.get("message") or "")
            else:
                record.case(name, _of, [each.text or "" for each in failed], float(test.get("time") or 0))


def _of(failures: list[str], seconds: float) -> dict[str, float]:
    if failures:
        raise Wrong("\n".join(failures))
    return {"seconds": seconds}
