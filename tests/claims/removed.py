"""Tests of features that are gone, and for each the claim that is made in its place, beside which choices.

A test said that some choices of the table together keep a promise; the claim is made of a case in which they meet.
`python -m claims.removed` lists every test function that the commit `SINCE` had and today's tests have not, and ends
with 1 where one of them is not here. test_claims.py holds the rest: the claims are there, and the choices meet.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SINCE = "f7570ce"  # the last commit before the first of them went
BITS = "test_bits_are_those_of_plain_pytorch"
REST = "test_what_rests_in_each_tier_is_predicted_to_the_byte"
FILES = "test_what_files_move_in_a_step_is_predicted_to_the_byte"
LOADS = "test_a_checkpoint_loads_into_any_other_case"
REAL = "test_a_simulated_rank_is_the_real_one_to_the_byte"

# file -> test -> (claim, choices that meet in a case of it, ...): several claims where the test had several
REMOVED: dict[str, dict[str, list[tuple[str, ...]]]] = {
    "test_bits": {
        "test_where_tensors_are_cut_changes_no_bit": [(BITS, "one-vector"), (BITS, "no-tensor"), (BITS, "units")],
        "test_overlap_and_prefetch_change_no_bit": [(BITS, "in-step"), (BITS, "none-ahead"), (BITS, "three-ahead")],
    },
    "test_fp8": {
        "test_8_bits_have_the_same_bits_where_backward_steps": [
            (BITS, "8bits", "in-backward"), (BITS, "8bits-in-tiles", "in-backward"),
        ],
        "test_what_rests_elsewhere_is_planned_to_the_byte": [(REST, "8bits", "host"), (REST, "8bits-of-bf16", "files")],
        "test_8_bits_at_every_stage_have_the_bits_of_plain_pytorch": [(BITS, "8bits"), (BITS, "8bits-of-bf16")],
        "test_8_bits_beside_other_settings_have_the_same_bits": [
            (BITS, "8bits", "replicas"), (BITS, "8bits", "int8"), (BITS, "8bits", "memory"), (BITS, "8bits", "kept"),
        ],
        "test_modules_compute_in_bf16_with_numbers_of_8_bits": [(BITS, "8bits-of-bf16")],
        "test_scales_of_tiles_have_the_same_bits_at_every_stage": [(BITS, "8bits-in-tiles"), (BITS, "8bits-in-squares")],
        "test_8_bits_have_the_same_bits_wherever_states_rest": [
            (BITS, "8bits", "host"), (BITS, "8bits", "files"), (BITS, "8bits", "parts"),
        ],
        "test_scales_of_tiles_are_planned_to_the_byte": [(REST, "8bits-in-tiles"), (REST, "8bits-in-squares")],
        "test_formats_and_ways_together_have_the_bits_of_stage_0": [
            (BITS, "8bits", "spread"), (BITS, "halves", "in-backward"), (BITS, "int8", "spread"),
        ],
        "test_a_simulation_holds_and_moves_what_a_run_does": [(REAL, "8bits"), (REAL, "8bits-in-tiles")],
    },
    "test_in_backward": {"test_replicas_have_the_bits_of_plain_pytorch": [
        (BITS, "in-backward", "replicas"), (BITS, "in-backward", "spread"), (BITS, "in-backward", "four-replicas"),
    ]},
    "test_in_backward_planned": {"test_held_is_what_is_predicted": [
        (REAL, "in-backward", "bf16"), (REST, "in-backward", "fp32"),
    ]},
    "test_int8": {
        "test_every_stage_has_the_bits_of_plain_pytorch_that_rounds_alike": [(BITS, "int8")],
        "test_buckets_stepped_in_backward_have_the_same_bits": [(BITS, "int8", "in-backward")],
        "test_other_settings_change_no_bit": [(BITS, "int8", "replicas"), (BITS, "int8", "host"), (BITS, "int8", "bf16")],
        "test_a_checkpoint_goes_on_with_the_same_bits": [(LOADS, "int8")],
        "test_a_quarter_of_the_bytes_is_sent_counted_and_simulated": [(REAL, "int8")],
    },
    "test_mesh_planned": {
        "test_what_replicas_hold_is_predicted_to_the_byte": [
            (REAL, "replicas", "fp32"), (REAL, "replicas", "bf16"), (REST, "replicas", "files"),
        ],
        "test_a_simulated_rank_of_a_replica_is_the_real_one": [(REAL, "replicas"), (REAL, "four-replicas")],
    },
    "test_offload": {
        "test_every_combination_gives_the_bits_of_the_device": [(BITS, "states-in-host"), (BITS, "parts"), (BITS, "files")],
        "test_any_tier_gives_the_bits_of_the_device": [(BITS, "host"), (BITS, "files"), (BITS, "parts")],
        "test_a_checkpoint_loads_into_any_tier": [(LOADS, "host"), (LOADS, "files"), (LOADS, "parts")],
    },
    "test_shared_memory": {"test_the_bits_hold_over_the_grid": [
        (BITS, "memory", "in-step"), (BITS, "memory", "kept"), (BITS, "memory", "three-ahead"), (BITS, "memory", "bf16"),
    ]},
    "test_split": {
        "test_split_masters_have_the_bits_of_whole_ones": [(BITS, "halves"), (BITS, "halves", "host")],
        "test_what_split_masters_hold_and_move_is_planned_to_the_byte": [(REST, "halves"), (FILES, "halves"), (REAL, "halves")],
    },
    "test_spread": {
        "test_an_optimizer_over_all_ranks_has_the_bits_of_plain_torch": [(BITS, "spread"), (BITS, "four-spread")],
        "test_a_simulated_rank_holds_and_sends_what_a_real_one_does": [(REAL, "spread"), (REAL, "four-spread")],
        "test_its_checkpoints_load_anywhere_and_any_into_it": [(LOADS, "spread"), (LOADS, "four-spread")],
        "test_tiers_overlap_and_cuts_change_no_bit": [
            (BITS, "spread", "files"), (BITS, "spread", "in-step"), (BITS, "spread", "one-vector"),
        ],
    },
    "test_spread_planned": {"test_what_all_replicas_share_is_predicted_to_the_byte": [
        (REAL, "spread"), (REST, "spread", "states-in-files"),
    ]},
    "test_tiers_planned": {
        "test_every_tier_of_every_state": [(REST, "host"), (REST, "files"), (REST, "parts"), (REST, "states-in-files")],
        "test_what_is_held_in_each_tier_and_moved_is_as_predicted": [(REST, "parts"), (FILES, "parts"), (FILES, "files")],
        "test_a_simulation_makes_no_files_and_counts_what_a_run_counts": [(REAL, "files"), (REAL, "parts")],
    },
}  # fmt: skip


def functions(revision: str | None) -> dict[str, str]:
    """Test function -> its file, of a commit or (None) as it stands."""
    root = Path(__file__).parents[2]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout

    paths = git("ls-tree", "-r", "--name-only", revision or "HEAD", "tests").splitlines()
    found = {}
    for path in map(Path, paths):
        if path.match("test_*.py"):
            text = git("show", f"{revision or 'HEAD'}:{path}")
            names = (node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
            found |= {name: path.stem for name in names if name.startswith("test_")}
    return found


def main() -> int:
    before, today = functions(SINCE), functions(None)
    missing = 0
    for name in sorted({*before} - {*today}, key=lambda name: (before[name], name)):
        claims = REMOVED.get(before[name], {}).get(name)
        missing += claims is None
        said = "; ".join(f"{claim}: {', '.join(choices)}" for claim, *choices in claims or [])
        print(f"{before[name]}.{name}\n    {said or 'NOT IN THE TABLE'}")
    print(f"{len(before)} test functions at {SINCE}, {len(today)} today; {missing} are gone and in no claim")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
