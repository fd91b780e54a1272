"""The four gates of `zeroshard verify`: what each claims, and which runs it is tried by. No torch.

The first three have the names that Megatron-LM's roadmap for determinism gives them (github.com/NVIDIA/Megatron-LM,
issue 5785). The fourth, that no setting of how a run is sharded changes a bit, is this library's own claim.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple, get_args

from zeroshard.cli.config import Precision, Transport
from zeroshard.cli.question import Configuration, Question


class Gate(NamedTuple):
    key: str
    name: str
    claim: str


GATES = (
    Gate("repeatability", "fixed-environment repeatability", "the same run twice has the same bits"),
    Gate("baseline", "baseline equivalence", "the sharded run has the bits of one process without zeroshard"),
    Gate("restart", "restart replay", "a run resumed from a checkpoint has the bits of the one that never stopped"),
    Gate("configuration", "configuration independence", "no setting of how it is sharded changes a bit"),
)


# --- which runs -----------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """One run of some ranks. What it must equal lies in `against`, a folder beside its question's file."""

    format: str
    ranks: int
    configuration: Configuration
    kind: str = "grid"  # grid; reference or record: writes `against`; again; resumed
    against: str = ""
    may_refuse: bool = False  # a refusal is a reason, and no error of the command's input

    @property
    def axes(self) -> dict[str, str]:
        """The settings that must not change a bit, and for formats: that have a reference each."""
        one = self.configuration
        return {
            "ranks": str(self.ranks),
            "stage": str(one.stage),
            "bucket MiB": one.bucket,
            "overlap": "on" if one.overlap else "off",
            "tier": one.tier,
            "replicas": str(1 if one.over == "hosts" else one.replicas),
            "hosts": str(one.replicas if one.over == "hosts" else 1),
            "optimizer over": "team" if one.over == "hosts" else one.over,
            "transport": one.transport,
            "format": self.format,
        }

    @property
    def meetings(self) -> frozenset[tuple[Any, Any]]:
        return frozenset(combinations(self.axes.items(), 2))

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks}, {self.configuration}"


@dataclass
class Plan:
    """All runs that `verify` makes: a question for each format, the job's own first, and the trials of all."""

    questions: dict[str, Question]
    trials: list[Trial]
    bases: tuple[int, ...]  # numbers of ranks that gates 1 and 3 are tried on
    chosen: str = "asked"  # every combination of what was "asked", or of "all"; or any two values of it, "pairs"
    untried: list[tuple[str, str]] = field(default_factory=list)  # (what, why)
    possible: frozenset[Any] = frozenset()  # pairs of values that some run could have together

    @property
    def own(self) -> Question:
        return next(iter(self.questions.values()))

    @property
    def half(self) -> int:
        """The step after which a run is stopped; 0 where there is no such step."""
        return self.own.steps // 2

    def needs(self) -> dict[str, list[int]]:
        """Return, for each format, the numbers of ranks whose plain runs are needed."""
        found: dict[str, set[int]] = {}
        for trial in self.trials:
            found.setdefault(trial.format, set()).update((trial.configuration.plain, trial.ranks))
        return {key: sorted(found.get(key, ())) for key in self.questions}

    def launches(self) -> Iterator[tuple[int, list[Trial]]]:
        """Yield (ranks, their trials) of each start of processes: bases first, each again in new processes at once."""
        for ranks in sorted({trial.ranks for trial in self.trials}, key=lambda ranks: (ranks not in self.bases, ranks)):
            recorded = [self._trial(ranks, "record")] if ranks in self.bases else []
            for key, question in self.questions.items():
                own = [trial for trial in self.trials if (trial.format, trial.ranks) == (key, ranks)]
                if own and question.reference(ranks) != "plain PyTorch":
                    recorded.append(Trial(key, ranks, question.baseline, "reference", f"plain-{ranks}"))
                recorded += own
            yield ranks, recorded + self._elsewhere(ranks)
            if ranks in self.bases:
                yield ranks, [self._trial(ranks, kind) for kind in ("again", "resumed")[: 1 + bool(self.half)]]

    def _trial(self, ranks: int, kind: str) -> Trial:
        return Trial(self.own.format, ranks, self.own.first_of(ranks), kind, f"kept-{ranks}")

    def _elsewhere(self, ranks: int) -> list[Trial]:
        """Resume the first base's checkpoint on other ranks, at another stage, with as many micro-batches a step."""
        base, own = self.bases[0], self.own
        several = own.accumulate * base
        if ranks in self.bases or not self.half or not own.elastic or several % ranks or ranks & (ranks - 1):
            return []
        one = own.first_of(ranks)._replace(accumulate=several // ranks)
        stage, count, over = min(own.meshes(ranks), key=lambda mesh: mesh[:2])
        one = one._replace(stage=stage, replicas=count, over=over)
        return [Trial(own.format, ranks, one, "resumed", f"kept-{base}", may_refuse=True)]

    def save(self, folder: Path) -> None:
        for key, question in self.questions.items():
            target = self.folder(folder, key)
            target.mkdir(exist_ok=True)  # of a format that has no run left, there is none yet
            question.save(target)

    def folder(self, folder: Path, key: str) -> Path:
        return folder / str(list(self.questions).index(key))


class Launch(NamedTuple):
    """The trials of one start of ranks, in a file."""

    results: str
    half: int
    trials: list[tuple[str, Trial]]  # with the name of its question's folder

    def save(self, folder: Path) -> None:
        (folder / "launch.json").write_text(json.dumps(self._asdict()), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Launch:
        found = json.loads((folder / "launch.json").read_text(encoding="utf-8"))
        trials = [
            (name, Trial(key, ranks, Configuration(*one), *rest)) for name, (key, ranks, one, *rest) in found["trials"]
        ]
        return cls(found["results"], found["half"], trials)


def asked(question: Question) -> Plan:
    """Plan all combinations of what a command line names, and gates 1 and 3 on few ranks."""
    trials = [
        Trial(question.format, ranks, one, against=f"plain-{one.plain}")
        for ranks in question.ranks
        for one in question.configurations(ranks)
    ]
    return Plan({question.format: question}, trials, (_base(question.ranks),))


def _base(ranks: Sequence[int]) -> int:
    """Choose few ranks, of a number that others can go on from."""
    return min(ranks, key=lambda count: (count == 1, count & (count - 1) != 0, count))


# Options that name settings which gate 4 varies. Steps, clipping and the like are the job's, and change its bits.
SETTINGS = frozenset({
    "ranks", "stage", "replicas", "hosts", "optimizer_over", "transport", "bucket_mib", "precision", "reduce",
    "offload",
})  # fmt: skip
FEW, MANY = (1, 2, 3, 4), tuple(range(1, 9))
# Formats that are tried beside the job's own; states in 16 bits are tried where --precision asks for them.
FORMATS: tuple[dict[str, Any], ...] = (
    *({"precision": word} for word in get_args(Precision)[1:] if "states16" not in word),
    {"reduce": "int8"},
)


def everything(question: Question, given: Iterable[str], *, full: bool, folder: str, slow: str) -> Plan:
    """Plan runs over every setting that is not `given`: so that any two values meet in a run, or with `full` all.

    Without full the runs have two steps, with one to resume. With full, they are on up to eight ranks; in the job's own
    format every combination, and pairs with other formats and
    transports. folder: where states in files rest. slow: why formats with bfloat16 would take too long here, or "".
    """
    given, counts = set(given), MANY if full else FEW
    wide = replace(
        question,
        steps=question.steps if full or "steps" in given else 2,
        ranks=question.ranks if "ranks" in given else counts,
        stages=question.stages if "stage" in given else (0, 1, 2, 3),
    )
    dividing = tuple(count for count in (MANY if full else (1, 2)) if any(ranks % count == 0 for ranks in wide.ranks))
    wide = replace(
        wide,
        replicas=wide.replicas if "replicas" in given else dividing,
        hosts=wide.hosts if "hosts" in given else dividing,
        optimizer_over=wide.optimizer_over if "optimizer_over" in given else ("team", "all"),
        tiers=wide.tiers if "offload" in given else ("cpu", "nvme"),
        offload_path=wide.offload_path if "offload" in given else folder,
    )
    plan = Plan({wide.format: wide}, [], (_base(wide.ranks),), "all" if full else "pairs")
    if not full and "ranks" not in given:
        plan.untried.append((f"ranks {FEW[-1] + 1} to {MANY[-1]}", "they take --full, or --ranks"))
    formats = () if {"precision", "reduce"} & given or wide.reduce != "ordered" else FORMATS
    for settings in formats:
        if slow and settings.get("precision", "").startswith("bf16"):
            plan.untried.append(
                (f"format {settings['precision']}", f"{slow}; --precision {settings['precision']} tries it")
            )
            continue
        other = replace(wide, **settings)
        plan.questions[other.format] = other
    ways = (wide.transport,) if "transport" in given else get_args(Transport)
    candidates = [each for key, one in plan.questions.items() for each in _candidates(key, one, ways)]
    always = [Trial(wide.format, ranks, wide.first_of(ranks), against=f"plain-{ranks}") for ranks in wide.ranks]
    always += [
        Trial(wide.format, ranks, one, against=f"plain-{one.plain}")
        for ranks in wide.ranks
        for one in wide.configurations(ranks)
        if full or one.plain != ranks
    ]
    plan.possible = frozenset(pair for each in candidates for pair in each.meetings)
    chosen = covering(candidates, list(dict.fromkeys(always)))
    firsts = {wide.first_of(ranks) for ranks in wide.ranks}
    plan.trials = [
        each._replace(may_refuse=each.format != wide.format or each.configuration not in firsts) for each in chosen
    ]
    return plan


def _candidates(key: str, question: Question, ways: Sequence[Any]) -> Iterator[Trial]:
    """Yield all runs of a format that may be. Memory is shared by ranks of one host, and holds no codes of 8 bits."""
    plain = not question.reduce.startswith("int")
    for way, ranks in product(ways, question.ranks):
        for one in replace(question, transport=way).configurations(ranks):
            if one.plain == ranks and (way != "shared" or (one.over != "hosts" and plain)):
                yield Trial(key, ranks, one, against=f"plain-{ranks}")


def covering(candidates: Sequence[Trial], chosen: list[Trial]) -> list[Trial]:
    """Choose runs, beside those that are chosen, so that any two values that meet in a candidate meet in one of them.

    Always the one with most new pairs for its ranks. These numbers only fall, so a heap does: one that is out of date
    goes back with the new number.
    """
    met = {pair for each in chosen for pair in each.meetings}
    heap = [(-len(each.meetings) / each.ranks, at) for at, each in enumerate(candidates)]
    heapq.heapify(heap)
    while heap:
        gain, at = heapq.heappop(heap)
        now = -len(candidates[at].meetings - met) / candidates[at].ranks
        if now == gain:
            chosen.append(candidates[at])
            met |= candidates[at].meetings
        elif now:
            heapq.heappush(heap, (now, at))
    return chosen
