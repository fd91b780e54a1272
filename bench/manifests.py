"""What a checkpoint of thousands of ranks costs beside its tensors: the manifest, each rank's part, and who reads them.

    python -m bench.manifests --ranks 4096 --out manifests.json

Shapes of Llama 3 70B (no tensor is there: the files are holes, and digests are zeros, which nobody checks here). Parts
and manifest are written by the engine's own code from its own layout, and read by it as a load reads them: every
element that rests on a rank of so many is looked for. Seconds are a process's own, of one core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import parts
from zeroshard.checkpoint.files import BLOCK, canonical, write_manifest
from zeroshard.checkpoint.manifest import FORMAT, IN_PARTS, Saved, check_loads
from zeroshard.layout.partition import BucketPlan, Slot, Spec, partition
from zeroshard.policies.layout import Layout

STATES = ("value", "exp_avg", "exp_avg_sq")
SHAPES = {  # of a layer
    "input_layernorm": (8192,), "self_attn.q_proj": (8192, 8192), "self_attn.k_proj": (1024, 8192),
    "self_attn.v_proj": (1024, 8192), "self_attn.o_proj": (8192, 8192), "post_attention_layernorm": (8192,),
    "mlp.gate_proj": (28672, 8192), "mlp.up_proj": (28672, 8192), "mlp.down_proj": (8192, 28672),
}  # fmt: skip


def specs() -> Iterator[Spec]:
    yield Spec("embed_tokens", (128256, 8192), "torch.bfloat16", 2, 0, True)
    for layer in range(80):
        for name, shape in SHAPES.items():
            yield Spec(f"layers.{layer}.{name}.weight", shape, "torch.bfloat16", 2, layer + 1, True)
    yield Spec("norm", (8192,), "torch.bfloat16", 2, 81, True)
    yield Spec("lm_head", (128256, 8192), "torch.bfloat16", 2, 81, True)


def cut(ranks: int) -> list[tuple[BucketPlan, Slot]]:
    found = partition(specs(), Layout(), ranks)
    return [(bucket, slot) for bucket in found.buckets for slot in bucket.slots]


def write(folder: Path, ranks: int) -> dict[str, Any]:
    """All that ranks write beside their tensors; and what of it rank 0 does for all of them."""
    slots, told, seconds, last = cut(ranks), [], [], {}
    for rank in range(ranks):
        file, at, fragments, begun = f"rank{rank:05d}.safetensors", 1 << 16, [], []
        for bucket, slot in slots:
            start, stop = bucket.fragment(slot, rank)
            for state in STATES if start < stop else ():
                fragments.append([slot.name, state, start, stop, at])
                at += 4 * (stop - start)
                begun += [[slot.name, state, "F32"]] if start == 0 else []
                last |= {(slot.name, state): rank} if stop == slot.numel else {}
        with open(folder / file, "wb") as out:
            out.truncate(at)
        digests = ["0" * 32] * -(-at // BLOCK)
        part = {"nbytes": at, "digests": digests, "rng": {}, "fragments": fragments}
        since = time.process_time()
        facts = {"nbytes": at, "part": parts.write_part(folder, file, part)}
        seconds.append(time.process_time() - since)
        told.append({"file": file, "facts": facts, "begun": begun})
    since = time.process_time()
    manifest = {
        "format": FORMAT, "version": IN_PARTS, "saved": 0, "number": 1, "ranks": ranks, "stage": 3, "seed": 0,
        "torch": torch.__version__, "python": "", "threads": 1, "optimizers": [], "average": None,
        "extra": {"map": []}, "extra_tensors": [], "extra_file": told[0]["file"], "buffers": {}, "grains": [],
        "values": [[slot.name, "step", 1.0] for _, slot in slots], "fragments": [],
        "parameters": {slot.name: {"shape": slot.shape, "dtype": "BF16", "names": [slot.name]} for _, slot in slots},
        "files": {each["file"]: each["facts"] for each in told},
        "cut": [[*entry, rank, last[tuple(entry[:2])]] for rank, each in enumerate(told) for entry in each["begun"]],
    }  # fmt: skip
    check_loads(folder, manifest)
    write_manifest(folder, manifest)
    return {
        "rank 0's seconds": time.process_time() - since,
        "manifest's bytes": os.path.getsize(folder / "manifest.json"),
        "largest part's bytes": max(os.path.getsize(each) for each in folder.glob("*.json") if each.name[0] == "r"),
        "a part's seconds, at most": max(seconds),
        "most that a rank tells": max(len(canonical(each)) for each in told),
        "all tell": sum(len(canonical(each)) for each in told),
    }


def read(folder: Path, rank: int, ranks: int, answers: Any) -> None:
    """As one of so many ranks."""
    slots, before = cut(ranks), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    since = time.process_time()
    with Saved.open(folder, alone=ranks == 1) as saved:
        saved.rng(rank % saved.manifest["ranks"])
        for bucket, slot in slots:
            start, stop = bucket.fragment(slot, rank)
            for state in STATES if start < stop else ():
                saved.want((slot.name, state), start, stop)
        count = sum("digests" in facts for facts in saved.files.values())
        seconds = time.process_time() - since
    answers.put((seconds, count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as made:
        folder, loads = Path(made), []
        saved = write(folder, options.ranks)
        print(json.dumps(saved), flush=True)
        for ranks in (2 * options.ranks, options.ranks, options.ranks // 4, 8, 1):
            for rank in sorted({0, ranks // 3, ranks - 1}):
                answers = context.SimpleQueue()
                process = context.Process(target=read, args=(folder, rank, ranks, answers))
                process.start()
                seconds, count, nbytes = answers.get()
                process.join()
                loads.append({"ranks": ranks, "rank": rank, "seconds": seconds, "parts": count, "bytes": nbytes})
                print(json.dumps(loads[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"ranks": options.ranks, "save": saved, "loads": loads}, indent=2) + "\n")


if __name__ == "__main__":
    main()
