"""For any fault of a rank of a Trainer job, all ranks end in time, and name the rank and the cause."""

import re
from typing import Any

import pytest
from faulty_jobs import STARTUP_SECONDS, infers, infers_slowly, restarted, takes_long, trains
from forked_faults import Rank, run_forked

from d9d_dist.testing import RankPool
from d9d_loop.resilience import ExitCode

WORKER: dict[str, Any] = {"data": {"num_workers": 1}}
STEP_SECONDS = 3.0


def _run(
    fault: str, culprit: int, *, unwaited: int | None = None, resilience: dict[str, Any] | None = None, **sections: Any
) -> list[Rank]:
    """Return the outcomes of the ranks of a faulty job: none of them ends by the start-up timeout."""
    timeouts = {"startup_seconds": STARTUP_SECONDS, "step_seconds": STEP_SECONDS}
    resilience = {"timeouts": timeouts, **(resilience or {})}
    ended = run_forked(trains, fault, culprit, unwaited=unwaited, resilience=resilience, **sections)
    late = [rank for number, rank in enumerate(ended) if number != unwaited and not _is_in_time(rank)]
    assert not late, late
    return ended


def _is_in_time(rank: Rank) -> bool:
    assert rank.seconds is not None, "there was no fault"
    return 0 <= rank.seconds <= STARTUP_SECONDS / 2  # on a busy machine the exit may take longer than the step timeout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sections", "expected"),
    [
        ("task raises", {}, "KeyError: 'in the task'"),
        ("model raises", {}, "KeyError: 'in the model'"),
        (
            "data raises",
            {},
            r"DataError: sample 11 \(position 23 of the global order\) could not be read: KeyError: 'in the d",
        ),
        (
            "data raises",
            WORKER,
            r"DataError: data worker 0 \(process \d+\): sample 11 \(position 23 of the global order\) could not be r",
        ),
        (
            "data worker is killed",
            WORKER,
            r"DataError: data worker 0 \(process \d+\) was killed by SIGKILL at sample 11 \(position 23 of the glob",
        ),
        ("event handler raises", {}, "KeyError: 'in the event handler'"),
    ],
    ids=["task", "model", "data", "data in a worker", "killed data worker", "event handler"],
)
@pytest.mark.sample("task")
def test_the_errors_of_other_ranks_contain_the_error_of_the_failed_rank(
    fault: str, sections: dict[str, Any], expected: str
) -> None:
    ended = _run(fault, 1, **sections)
    assert [rank.code for rank in ended] == [ExitCode.PEER_LOST, 1]
    assert re.search(expected, ended[1].errors), ended[1].errors
    assert re.search(f"Rank 1 failed before this rank: {expected}", ended[0].errors), ended[0].errors


@pytest.mark.full
def test_the_error_names_the_event_handler_that_failed() -> None:
    ended = _run("event handler raises", 0)
    assert re.search("raised by the handler _Fault.on_step of StepDone", ended[0].errors)


def test_a_full_disk_ends_all_ranks_and_names_the_rank() -> None:
    ended = _run("disk is full", 1)
    assert [rank.code for rank in ended] == [1, 1]
    for rank in ended:
        assert "File too large" in rank.errors
        assert "rank 1" in rank.errors


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.sample("1")
def test_the_errors_name_a_rank_that_is_killed(culprit: int) -> None:
    ended = _run("is killed", culprit)
    assert ended[culprit].code == -9
    survivor = ended[1 - culprit]
    assert survivor.code in (1, ExitCode.PEER_LOST), survivor
    assert re.search(rf"[Rr]ank {culprit} failed( before this rank)?: its process \d+ on \S+ is gone", survivor.errors)


@pytest.mark.slow
def test_the_errors_name_a_rank_whose_process_is_stopped() -> None:
    ended = _run("is stopped", 1, unwaited=1)
    assert ended[0].code == ExitCode.HANG, ended[0]
    assert re.search(r"Rank 1 is missing: (it does not answer; )?its process \d+ on \S+ is stopped\.", ended[0].errors)


@pytest.mark.full
def test_handlers_have_their_own_timeouts() -> None:
    ended = run_forked(takes_long, 2.0)
    assert [rank.code for rank in ended] == [0, 0], ended


@pytest.mark.full
def test_the_errors_name_a_rank_that_is_stopped_in_an_inference() -> None:
    ended = run_forked(infers, 1, unwaited=1)
    assert ended[0].code == ExitCode.HANG, ended[0]
    assert _is_in_time(ended[0])
    assert re.search(r"Rank 1 is missing: (it does not answer; )?its process \d+ on \S+ is stopped\.", ended[0].errors)
    where = r"Rank 0 waits: in the wait for other ranks, step [2-5], in the wait for a collective, at"
    assert re.search(where, ended[0].errors), ended[0].errors.partition("The stacks")[0]


@pytest.mark.full
def test_a_rank_that_has_nothing_to_infer_waits_for_all_batches_of_another() -> None:
    assert [rank.code for rank in run_forked(infers_slowly, 0)] == [0, 0]


@pytest.mark.full
def test_a_second_stop_signal_ends_the_rank_and_names_it() -> None:
    ended = _run("is asked twice", 1, resilience={"stop": {"repeat_seconds": 0.3}})
    assert ended[1].code == 128 + 15
    assert "rank 1 exits without saving: a second signal was received (SIGTERM)" in ended[1].errors
    assert ended[0].code in (1, ExitCode.PEER_LOST), ended[0]
    assert re.search(r"[Rr]ank 1 failed( before this rank)?: its process \d+ on \S+ is gone", ended[0].errors)


def test_a_signal_after_the_save_does_not_change_the_exit_code() -> None:
    ended = _run("is asked again when it leaves", 1)
    assert [rank.code for rank in ended] == [ExitCode.STOPPED] * 2, ended
    assert "stopped by SIGTERM after step 4, which is saved" in ended[0].errors


def test_a_non_finite_gradient_on_one_rank_is_reported_by_all() -> None:
    ended = _run("gradient is NaN", 1, resilience={"bad_steps": {"non_finite": "stop"}})
    assert [rank.code for rank in ended] == [1, 1]
    where = r"BadStepError: step 3: .* the gradient of \w+ of 'linear', in the backward pass of rank 1\."
    assert all(re.search(where, rank.errors) for rank in ended), ended


@pytest.mark.full
def test_the_error_names_a_tracker_that_is_down_without_delay() -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard, which is optional")
    ended = _run("tracker is down", 0, trackers=[{"kind": "tensorboard"}])
    assert [rank.code for rank in ended] == [0, 0], ended
    assert "the tensorboard tracker failed; retrying in 1 s: ConnectionError('the tr" in ended[0].errors
    assert "the tensorboard tracker did not receive all values" in ended[0].errors


@pytest.mark.slow
def test_a_job_restarted_by_torchrun_resumes() -> None:
    with RankPool() as pool:
        (lives,) = pool.run(restarted, world_size=1, timeout=120)
    assert lives == [(6, [5, 6]), (6, [5, 6])]
