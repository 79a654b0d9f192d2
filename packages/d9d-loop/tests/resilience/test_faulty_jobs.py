"""Whatever a rank of a job of the Trainer does, all ranks end, and say which rank it was and why."""

import re

import pytest
from faulty_jobs import restarted, trains
from forked_faults import run_forked

from d9d_dist.testing import RankPool


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("task raises", "KeyError: 'in the task'"),
        ("model raises", "KeyError: 'in the model'"),
        (
            "data raises",
            r"DataError: sample 11 \(position 23 of the global order\) could not be read: KeyError: 'in the d",
        ),
        ("event handler raises", "KeyError: 'in an event handler'"),
    ],
)
def test_what_a_rank_raises_is_named_on_the_others(fault: str, expected: str) -> None:
    ended = run_forked(trains, fault, 1)
    assert [rank.code for rank in ended] == [1, 1]
    assert re.search(expected, ended[1].errors), ended[1].errors
    assert re.search(f"Rank 1 failed before this rank: {expected}", ended[0].errors), ended[0].errors


def test_a_handler_is_named() -> None:
    ended = run_forked(trains, "event handler raises", 0)
    assert re.search("raised by the handler .*_raise", ended[0].errors)


def test_a_full_disk_ends_all_ranks_with_the_rank_that_has_it() -> None:
    ended = run_forked(trains, "disk is full", 1)
    assert [rank.code for rank in ended] == [1, 1]
    for rank in ended:
        assert "File too large" in rank.errors
        assert "rank 1" in rank.errors


def test_a_job_that_torchrun_restarts_goes_on_by_itself() -> None:
    with RankPool() as pool:
        (lives,) = pool.run(restarted, world_size=1, timeout=120)
    assert lives == [(6, [5, 6]), (6, [5, 6])]
