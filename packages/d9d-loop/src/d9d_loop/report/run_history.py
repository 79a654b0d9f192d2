"""History of a run from its journal: interruptions with their causes, and the effective training time ratio.

    ratio = sum over lives of (training time x kept steps / completed steps) / total time

A life is the time from one start to the next start. Steps are kept if the next life resumes after them. The training
time of a life begins when the model is built and restored. The total time lasts from this moment of the first life
to the last record. It excludes the start-up of the first life, and includes the start-up of later lives. The ratio is
the ETTR of Kokolis et al. 2024 (arXiv:2410.21680).
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, final

JOURNAL = "journal.jsonl"
_VALUES = {
    "started": {"step"},
    "progress": {"step"},
    "slow": {"step", "parts"},
    "ended": {"step", "how"},
    "failed": {"rank", "host", "cause"},
}
"""Values of a record of the journal, by event."""


@final
@dataclass(frozen=True, slots=True)
class Interruption:
    """Interruption of a run that was started again.

    Attributes:
        time: Time of the last record before the interruption, in seconds since 1970.
        step: Last recorded completed step. The progress is recorded every 10 seconds.
        lost_steps: Recorded steps that were repeated.
        rank: Rank that failed; `None` if no rank reported a failure, as after the loss of all machines.
        host: Host of the failed rank; `None` if no failure record names it.
        cause: Cause that most failure records name, or how the job ended.
        detection_seconds: Time from the last progress record to the first failure record; `None` without a failure.
        recovery_seconds: Time from the first failure record, else from the last record, to the first progress record
            of the next life.
    """

    time: float
    step: int
    lost_steps: int
    rank: int | None
    host: str | None
    cause: str
    detection_seconds: float | None
    recovery_seconds: float | None


@final
@dataclass(frozen=True, slots=True)
class RunHistory:
    """History of a run.

    Attributes:
        total_seconds: Time from the first start to the last record, in seconds.
        effective_ratio: Fraction of the total time that was spent on kept steps, from 0 to 1.
        stragglers: Ranks with slow parts, by the step at which each was reported.
        lives: Progress of each life: time since the first start in seconds, and completed steps.
    """

    total_seconds: float
    effective_ratio: float
    interruptions: Sequence[Interruption]
    stragglers: Sequence[tuple[int, str]] = ()
    lives: Sequence[Sequence[tuple[float, int]]] = ()

    def describe(self) -> str:
        """Return the effective training time ratio, and a line for each interruption."""
        ratio = f"effective training time {100 * self.effective_ratio:.1f} % of {self.total_seconds:.0f} s"
        lines = [f"{ratio}, {len(self.interruptions)} interruptions"]
        lines += [f"  after step {each.step}, {_describe(each)}" for each in self.interruptions]
        return "\n".join([*lines, *(f"  at step {step}, {text}" for step, text in self.stragglers)])


def _describe(each: Interruption) -> str:
    parts = [f"{each.lost_steps} steps lost"]
    if each.detection_seconds is not None:
        parts.append(f"detected after {each.detection_seconds:.1f} s")
    if each.recovery_seconds is not None:
        parts.append(f"recovered after {each.recovery_seconds:.1f} s")
    if each.rank is not None:
        parts.append(f"rank {each.rank}" + ("" if each.host is None else f" on {each.host}"))
    return f"{', '.join(parts)}: {each.cause}"


def read_history(folder: Path) -> RunHistory | None:
    """Return the history of a run folder, or `None` if it has no journal. Incomplete lines are skipped."""
    records = _in_order(read_journal(folder))
    lives: list[list[Mapping[str, Any]]] = []
    for record in records:
        if record["event"] == "started":
            lives.append([])
        if lives:
            lives[-1].append(record)
    if not lives:
        return None
    total = lives[-1][-1]["time"] - lives[0][0]["time"]
    resumed = [life[0]["step"] for life in lives[1:]]
    useful = sum(_useful_seconds(life, until) for life, until in zip(lives, [*resumed, None], strict=True))
    interruptions = [_interruption(life, after) for life, after in pairwise(lives)]
    slow = [(record["step"], text) for record in records if record["event"] == "slow" for text in record["parts"]]
    begin = lives[0][0]["time"]
    points = [[(record["time"] - begin, record["step"]) for record in _course(life)] for life in lives]
    return RunHistory(total, useful / total if total > 0 else 1.0, interruptions, slow, points)


def _in_order(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return records whose times never decrease.

    While a clock is set back, or a job moves to a host whose clock is behind, no time passes. Ranks on other hosts
    write the records of failures.
    """
    ordered: list[Mapping[str, Any]] = []
    shift, last = 0.0, -math.inf
    for record in records:
        time = record["time"] + shift
        if record["event"] != "failed":
            shift += max(last - time, 0.0)
            last = max(last, time)
        ordered.append({**record, "time": max(last, time)})
    return ordered


def read_journal(folder: Path) -> list[Mapping[str, Any]]:
    """Return the records of a run folder's journal; empty without a journal. Damaged lines are skipped."""
    records: list[Mapping[str, Any]] = []
    with suppress(FileNotFoundError):
        for line in (folder / JOURNAL).read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # a line that a killed process did not finish
                continue
            if _is_sound(record):
                records.append(record)
    return records


def _is_sound(record: object) -> bool:
    """Return True if a record has the values of its event."""
    if not isinstance(record, dict) or not isinstance(record.get("time"), int | float):
        return False
    needed = _VALUES.get(str(record.get("event")))
    types = {**dict.fromkeys(("step", "saved", "rank"), int), **dict.fromkeys(("how", "cause", "host"), str)}
    return (
        needed is not None
        and needed <= record.keys()
        and all(isinstance(record[name], types[name]) for name in record.keys() & types.keys())
    )


def _course(life: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records with a step, which the main process writes."""
    return [record for record in life if "step" in record]


def _useful_seconds(life: Sequence[Mapping[str, Any]], until: int | None) -> float:
    first, last = _course(life)[0], _course(life)[-1]
    done = last["step"] - first["step"]
    if done <= 0:
        return 0.0
    kept = done if until is None else min(max(until - first["step"], 0), done)
    return (last["time"] - first["time"]) * kept / done


def _interruption(life: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Interruption:
    last = _course(life)[-1]
    failures = [record for record in life if record["event"] == "failed"]
    culprit = _culprit(failures)
    how = last.get("how", "no rank reported a failure")
    begin = failures[0]["time"] if failures else last["time"]
    first_step = next((record["time"] for record in after if record["event"] in ("progress", "ended")), None)
    return Interruption(
        time=last["time"],
        step=last["step"],
        lost_steps=max(last["step"] - after[0]["step"], 0),
        rank=None if culprit is None else culprit["rank"],
        host=None if culprit is None else culprit["host"],
        cause=how if culprit is None else culprit["cause"],
        detection_seconds=failures[0]["time"] - last["time"] if failures else None,
        recovery_seconds=None if first_step is None else first_step - begin,
    )


def _culprit(failures: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return rank, host and cause of the failure that most records name; `None` without a record.

    A record names its `first` failure, or else itself. The host is that of the rank's own record, if it wrote one.
    """
    if not failures:
        return None
    hosts = {failure["rank"]: failure["host"] for failure in reversed(failures)}
    named = [_first(failure) or {**failure, "cause": failure["cause"].partition("\n")[0]} for failure in failures]
    found = Counter((each["rank"], each["cause"]) for each in named).most_common(1)[0][0]
    culprit = next(each for each in named if (each["rank"], each["cause"]) == found)
    return {**culprit, "host": hosts.get(culprit["rank"], culprit["host"])}


def _first(failure: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first failure that a record names; `None` for a record without one, or with a damaged one."""
    match failure.get("first"):
        case {"rank": int(), "host": str() | None, "cause": str()} as first:
            return first
    return None
