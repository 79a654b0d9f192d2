import json
from pathlib import Path

import pytest

from d9d_loop.report.run_history import JOURNAL, Interruption, read_history

GONE = {"rank": 2, "host": "node1", "cause": "its process 7 on node1 is gone."}


def _journal(folder: Path, *records: dict[str, object]) -> Path:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / JOURNAL).write_text(lines + '{"event": "progr', encoding="utf-8")  # the write of a killed process
    return folder


def _step(event: str, time: float, step: int, **more: object) -> dict[str, object]:
    return {"event": event, "time": time, "step": step, **more}


def _failed(time: float, rank: int, cause: str, **more: object) -> dict[str, object]:
    return {"event": "failed", "time": time, "rank": rank, "host": "node0", "cause": cause, **more}


def test_an_interruption_has_the_cause_of_most_ranks_and_the_steps_that_are_repeated(tmp_path: Path) -> None:
    folder = _journal(
        tmp_path,
        _step("started", 100.0, 0),
        _step("progress", 110.0, 1),
        _step("progress", 140.0, 40),
        _failed(142.0, 1, "RuntimeError: Connection reset by peer"),
        _failed(143.0, 0, "RuntimeError: Connection reset by peer", first=GONE),
        _failed(143.5, 3, "RuntimeError: Connection reset by peer", first=GONE),
        _step("started", 160.0, 30),
        _step("progress", 165.0, 31),
        _step("ended", 200.0, 50, how="finished"),
    )
    history = read_history(folder)
    assert history is not None
    assert history.interruptions == [
        Interruption(
            time=140.0,
            step=40,
            lost_steps=10,
            rank=2,
            host="node1",
            cause="its process 7 on node1 is gone.",
            detection_seconds=2.0,
            recovery_seconds=23.0,
        )
    ]
    assert history.lives == [[(0.0, 0), (10.0, 1), (40.0, 40)], [(60.0, 30), (65.0, 31), (100.0, 50)]]
    # 30 of 40 steps in 40 s, and 20 steps in 40 s, of 100 s.
    assert history.effective_ratio == pytest.approx(0.7)
    assert history.describe().splitlines() == [
        "effective training time 70.0 % of 100 s, 1 interruptions",
        "  after step 40, 10 steps lost, detected after 2.0 s, recovered after 23.0 s, rank 2 on node1: its process 7 "
        "on node1 is gone.",
    ]


def test_no_time_passes_while_a_clock_is_set_back(tmp_path: Path) -> None:
    folder = _journal(
        tmp_path,
        _step("started", 7200.0, 0),
        _step("progress", 7210.0, 10),
        _step("progress", 3620.0, 20),  # set back by an hour
        _step("progress", 3630.0, 30),
        _failed(3629.0, 1, "KeyError: 'x'"),  # a rank of another host, whose clock is a second behind
        _step("started", 3640.0, 20),
        _step("ended", 3660.0, 40, how="finished"),
    )
    history = read_history(folder)
    assert history is not None
    (interruption,) = history.interruptions
    assert (interruption.detection_seconds, interruption.recovery_seconds) == (0.0, 30.0)
    assert history.lives == [[(0.0, 0), (10.0, 10), (10.0, 20), (20.0, 30)], [(30.0, 20), (50.0, 40)]]
    assert history.total_seconds == 50.0
    assert history.effective_ratio == pytest.approx((20 * 2 / 3 + 20) / 50)


def test_interruptions_by_a_signal_or_of_all_ranks_have_no_culprit(tmp_path: Path) -> None:
    folder = _journal(
        tmp_path,
        _step("started", 0.0, 0),
        _step("ended", 10.0, 5, how="stopped by SIGTERM"),
        _step("started", 20.0, 5),
        _step("started", 40.0, 5),
    )
    history = read_history(folder)
    assert history is not None
    stop, loss = history.interruptions
    assert (stop.cause, stop.rank, stop.lost_steps, stop.recovery_seconds) == ("stopped by SIGTERM", None, 0, None)
    assert (loss.cause, loss.rank, loss.detection_seconds) == ("no rank reported a failure", None, None)
    assert history.effective_ratio == pytest.approx(10 / 40)


def test_a_folder_without_a_journal_has_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path) is None


@pytest.mark.parametrize(
    ("rank", "first", "expected"),
    [
        (0, None, (0, "node0", "KeyError: 'in the task'")),
        (1, {"rank": 2, "host": "node7", "cause": "it is in a step."}, (2, "node7", "it is in a step.")),
        (1, {"rank": 2, "host": None, "cause": "it is in a step."}, (2, None, "it is in a step.")),
        (1, {"rank": "2", "host": None, "cause": "damaged"}, (1, "node0", "KeyError: 'in the task'")),
    ],
)
def test_the_culprit_is_the_first_failure_of_a_record_or_its_own_rank(
    rank: int, first: object, expected: tuple[int, str | None, str], tmp_path: Path
) -> None:
    failed = _failed(5.0, rank, "KeyError: 'in the task'\nRank 9 failed before this rank: a text", first=first)
    history = read_history(_journal(tmp_path, _step("started", 0.0, 0), failed, _step("started", 9.0, 0)))
    assert history is not None
    (found,) = history.interruptions
    assert (found.rank, found.host, found.cause) == expected


def test_the_host_of_the_culprit_is_that_of_its_own_record(tmp_path: Path) -> None:
    victim = _failed(5.0, 1, "Connection closed", first={"rank": 0, "host": "before", "cause": "KeyError: 'x'"})
    own = _failed(5.1, 0, "KeyError: 'x'")
    history = read_history(_journal(tmp_path, _step("started", 0.0, 0), victim, own, _step("started", 9.0, 0)))
    assert history is not None
    assert (history.interruptions[0].rank, history.interruptions[0].host) == (0, "node0")


def test_stragglers_are_listed_with_their_step(tmp_path: Path) -> None:
    slow = "slow data of rank 3 (cpu of b): 31.0 ms."
    folder = _journal(
        tmp_path, _step("started", 0.0, 0), _step("slow", 4.0, 20, parts=[slow]), _step("progress", 9.0, 30)
    )
    history = read_history(folder)
    assert history is not None
    assert history.describe().splitlines()[1:] == [f"  at step 20, {slow}"]
    assert (history.effective_ratio, history.interruptions) == (1.0, [])
