import re

import pytest
from faulty_loops import (
    BAD_STEP,
    unwatched,
    watched,
    watched_failing_late,
    watched_patiently,
    watched_victim_of_itself,
    watched_with_a_host_lost_after_a_peer,
    watched_with_a_lost_host,
)
from forked_faults import Rank, run_forked

from d9d_loop.resilience import ExitCode

LOST_HOST = "Rank 4 is missing: its process on host2 does not answer: the host is down or cut off."


def _reports(ended: list[Rank], culprit: int) -> list[str]:
    """Return the report of surviving ranks, before their stacks."""
    survivors = [rank for number, rank in enumerate(ended) if number != culprit]
    assert {rank.code for rank in survivors} == {ExitCode.HANG}, ended
    assert all("Thread 0x" in rank.errors and "all_reduce" in rank.errors for rank in survivors)
    return [rank.errors.partition("The stacks of")[0] for rank in survivors]


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.sample("2")
def test_the_report_names_a_rank_in_an_endless_loop_with_its_line(culprit: int) -> None:
    ended = run_forked(watched, "sleeps", culprit, world_size=3)
    waiting = ", ".join(str(rank) for rank in range(3) if rank != culprit)
    for report in _reports(ended, culprit):
        assert re.search(
            rf"Rank {culprit} is missing: it is in a step, step {BAD_STEP}, in no collective, at \w+/faulty_loops.py:",
            report,
        )
        assert f"Ranks {waiting} wait: in a step, step {BAD_STEP}, in all_reduce over ranks 0, 1, 2, at " in report
    assert ended[culprit].code == ExitCode.HANG
    assert "time.sleep" in ended[culprit].errors or "in do" in ended[culprit].errors


def test_ranks_end_with_an_error_that_names_a_host_lost_by_the_agents() -> None:
    ended = run_forked(watched_with_a_lost_host)
    assert [rank.code for rank in ended] == [ExitCode.PEER_LOST] * 2
    assert all(LOST_HOST in rank.errors for rank in ended), ended


@pytest.mark.slow
def test_the_error_names_a_lost_host_even_if_a_peer_exits_first() -> None:
    ended = run_forked(watched_with_a_host_lost_after_a_peer, 0)
    assert ended[1].code == ExitCode.PEER_LOST
    assert LOST_HOST in ended[1].errors


@pytest.mark.slow
def test_an_error_caused_by_a_hang_shows_the_report() -> None:
    ended = run_forked(watched_failing_late)
    assert [rank.code for rank in ended] == [ExitCode.HANG] * 2
    assert all("no progress for" in rank.errors and "in a step, step 2" in rank.errors for rank in ended)


@pytest.mark.slow
def test_the_report_names_a_rank_whose_process_is_stopped() -> None:
    ended = run_forked(watched, "is stopped", 1, world_size=3, unwaited=1)
    for report in _reports(ended, 1):
        assert re.search(r"Rank 1 is missing: (it does not answer; )?its process \d+ on \S+ is stopped\.", report)


@pytest.mark.slow
def test_the_report_names_a_rank_that_holds_the_gil_and_the_rank_exits() -> None:
    ended = run_forked(watched, "holds the interpreter", 1)
    (report,) = _reports(ended, 1)
    assert re.search(r"Rank 1 is missing: it does not answer; its process \d+ on \S+ holds the GIL", report)
    assert ended[1].code == 1
    assert "in do" in ended[1].errors  # its stacks


@pytest.mark.parametrize("fault", ["is killed", "crashes", "leaves"])
def test_ranks_that_wait_for_a_dead_rank_name_it(fault: str) -> None:
    ended = run_forked(unwatched, fault, 1, world_size=3)
    for victim in (ended[0], ended[2]):
        assert victim.code == 1
        assert re.search(r"Rank 1 failed before this rank: its process \d+ on \S+ is gone\.", victim.errors), victim


def test_a_rank_that_does_not_exit_after_a_death_is_ended() -> None:
    ended = run_forked(watched_victim_of_itself, 1)
    assert ended[0].code == ExitCode.PEER_LOST
    assert re.search(r"rank 1 failed: its process \d+ on \S+ is gone\.", ended[0].errors)


def test_a_rank_that_waits_for_a_failed_rank_names_the_error() -> None:
    ended = run_forked(watched_patiently, "raises", 0)
    assert "KeyError: 'the culprit'" in ended[0].errors
    assert "Rank 0 failed before this rank: KeyError: 'the culprit'" in ended[1].errors
    assert [rank.code for rank in ended] == [1, 1]
