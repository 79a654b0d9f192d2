import json
import threading
from pathlib import Path
from typing import Any

import pytest

from d9d_dist import DistributedContext, UserError
from d9d_dist.failures.first_failure import Failure
from d9d_loop.job.earlier_run import EarlierRun, read_earlier_run
from d9d_loop.job.journal import Journal
from d9d_loop.report.run_history import JOURNAL, read_history
from d9d_loop.report.run_status import read_status


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / JOURNAL).read_text(encoding="utf-8").splitlines()]


def test_progress_is_recorded_at_once_and_then_every_ten_seconds(
    tmp_path: Path, ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, ctx)
    journal.started(3, "id")
    for now, step, saved in [(1000.0, 4, None), (1009.9, 5, None), (1010.0, 6, None), (1011.0, 7, 6), (1020.0, 8, 6)]:
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        journal.progress(step, saved=saved)
    journal.ended(8, "finished")
    assert [(record["event"], record["step"]) for record in _records(tmp_path)] == [
        ("started", 3),
        ("progress", 4),
        ("progress", 6),
        ("progress", 7),
        ("ended", 8),
    ]
    assert [record.get("saved") for record in _records(tmp_path)] == [None, 3, 3, 6, 8]
    assert read_earlier_run(tmp_path) == EarlierRun(completed=8, saved=8, run_id="id")


def test_the_status_shows_life_during_a_long_step(
    tmp_path: Path, ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d9d_loop.job.journal._SECONDS", 0.001)
    journal, before = Journal(tmp_path, ctx), threading.enumerate()
    journal.started(3, "id")
    (thread,) = set(threading.enumerate()).difference(before)  # jobs of other tests may have left threads
    first = read_status(tmp_path)
    while read_status(tmp_path) == first:
        pass
    journal.failed("KeyError: 'x'")
    thread.join()
    assert (read_status(tmp_path) or {})["state"] == "failed"


def test_a_record_after_an_incomplete_line_is_read(tmp_path: Path, ctx: DistributedContext) -> None:
    journal = Journal(tmp_path, ctx)
    journal.started(0, "id")
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"event": "progr')  # the disk was full
    journal.ended(8, "finished")
    assert read_earlier_run(tmp_path) == EarlierRun(completed=8, saved=8, run_id="id")


@pytest.mark.parametrize(
    "line",
    [
        *('{"event": "started", "time": 1}', '{"event": "failed", "time": 1}', '{"event": [], "time": 1, "step": 1}'),
        *('{"event": "progress", "time": "x", "step": 1}', '{"event": "progress", "time": 1, "step": null}'),
        *('{"event": "ended", "time": 1, "step": 9, "how": 1}', "[]", "\x00", '{"event": "later", "time": 1}'),
    ],
)
def test_damaged_records_are_skipped(tmp_path: Path, ctx: DistributedContext, line: str) -> None:
    Journal(tmp_path, ctx).started(3, "id")
    with (tmp_path / JOURNAL).open("a") as file:
        file.write(f"{line}\n")
    assert read_earlier_run(tmp_path) == EarlierRun(completed=3, saved=3, run_id="id")
    assert read_history(tmp_path) is not None


def test_a_journal_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).mkdir()
    with pytest.raises(
        UserError, match=r"journal.jsonl cannot be read: Is a directory; expected the journal of the run"
    ):
        read_earlier_run(tmp_path)


def test_a_restart_after_a_failure_is_an_interruption(tmp_path: Path, ctx: DistributedContext) -> None:
    first = Journal(tmp_path, ctx)
    first.started(0, "id")
    first.progress(7, saved=None)
    first.failed("KeyError: 'x'\nin line 3")
    Journal(tmp_path, ctx).started(5, "id")
    history = read_history(tmp_path)
    assert history is not None
    (found,) = history.interruptions
    assert (found.step, found.lost_steps, found.rank, found.cause) == (7, 2, 0, "KeyError: 'x'")


def test_a_folder_that_cannot_be_written_does_not_stop_the_job(tmp_path: Path, ctx: DistributedContext) -> None:
    Journal(tmp_path / "missing", ctx).started(0, "id")
    assert not (tmp_path / "missing").exists()


def test_secrets_in_a_cause_are_not_recorded(tmp_path: Path, ctx: DistributedContext) -> None:
    Journal(tmp_path, ctx).failed("OSError: https://me:canary@host/data?token=canary2")
    assert _records(tmp_path)[0]["cause"] == "OSError: https://<redacted>@host/data?token=<redacted>"


def test_a_failure_names_the_rank_that_failed_first_with_its_host(tmp_path: Path, ctx: DistributedContext) -> None:
    journal = Journal(tmp_path, ctx, hosts=["b", "a", "b"])
    journal.failed("no progress", Failure(2, "OSError: https://me:canary@host\nin line 3"))
    journal.failed("no progress", Failure(7, "gone"))
    assert [record["first"] for record in _records(tmp_path)] == [
        {"rank": 2, "host": "b", "cause": "OSError: https://<redacted>@host"},
        {"rank": 7, "host": None, "cause": "gone"},
    ]
    journal.started(0, "id")
    assert (read_status(tmp_path) or {})["hosts"] == ["a", "b"]
