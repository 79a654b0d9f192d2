"""Faults of a rank, a host, a link or a disk of a job over three hosts: every log names the culprit."""

import re
from typing import Any

import pytest

from d9d_loop.resilience import ExitCode
from hosts.forked_hosts import Rank, forked
from hosts.host_jobs import stays_away
from hosts.hosts import Hosts

from faulty_jobs import trains  # isort: skip - its folder is added to the path by `forked_hosts`

STEP_SECONDS = 3.0


def sections(**more: Any) -> dict[str, Any]:
    """Return sections of a configuration with one rank per host, and short time limits."""
    timeouts = {"startup_seconds": 60, "step_seconds": STEP_SECONDS}
    return {
        "mesh": {"data_parallel_shard": -1},
        "batch": {"global_size": 12},
        "resilience": {"timeouts": {**timeouts, **more}, "health": {"enabled": False}},
    }


def _run(fault: str, culprit: int, *, num_hosts: int = 3, ranks_per_host: int = 1) -> list[Rank]:
    with Hosts(num_hosts) as hosts:
        call = forked(hosts, trains, fault, culprit, ranks_per_host=ranks_per_host, **sections())
        with call as job:
            return job.ended()


def _assert_all_match(ended: list[Rank], pattern: str, *, without: int | None = None) -> None:
    for number, rank in enumerate(ended):
        if number != without:
            assert re.search(pattern, rank.errors), f"rank {number}: {rank.errors}"


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.sample("2")
def test_every_log_names_a_killed_rank_that_was_alone_on_its_host(culprit: int) -> None:
    ended = _run("is killed", culprit)
    assert ended[culprit].code == -9
    assert {rank.code for number, rank in enumerate(ended) if number != culprit} <= {1, ExitCode.PEER_LOST}
    named = rf"[Rr]ank {culprit} failed( before this rank)?: its process on host{culprit} does not answer: killed, or"
    if culprit == 0:  # it hosts the store
        named = "The job's store, which rank 0 on host0:29500 hosts, does not answer: that process was killed"
    _assert_all_match(ended, named, without=culprit)


@pytest.mark.full
def test_the_error_names_the_process_of_a_killed_rank_if_another_rank_is_on_its_host() -> None:
    ended = _run("is killed", 3, num_hosts=3, ranks_per_host=2)
    named = r"[Rr]ank 3 failed( before this rank)?: its process \d+ on host1 is gone\."
    _assert_all_match(ended, named, without=3)


@pytest.mark.full
@pytest.mark.parametrize("culprit", [0, 2])
def test_other_ranks_log_the_exception_of_a_failed_rank_even_if_that_rank_hosts_the_store(culprit: int) -> None:
    ended = _run("task raises", culprit)
    assert ended[culprit].code == 1
    assert {rank.code for rank in ended} <= {1, ExitCode.PEER_LOST}
    named = rf"[Rr]ank {culprit} failed( before this rank)?: KeyError: 'in the task'"
    _assert_all_match(ended, named, without=culprit)


@pytest.mark.full
@pytest.mark.parametrize("culprit", [1, 2])
def test_the_errors_name_a_host_that_is_cut_off_and_mention_the_network(culprit: int) -> None:
    with Hosts(3) as hosts, forked(hosts, trains, "waits", culprit, **sections()) as job:
        job.wait_for("fault")
        hosts.cut(culprit)
        job.make("go")
        ended = job.ended()
    assert [rank.code for rank in ended] == [ExitCode.HANG] * 3, ended
    named = (
        rf"Rank {culprit} is missing: it does not answer; its process .* or host{culprit} is down or cut off from the"
    )
    _assert_all_match(ended, named, without=culprit)
    assert "or the network between the hosts is cut" in ended[culprit].errors


@pytest.mark.full
def test_a_cut_shorter_than_the_time_limit_changes_nothing() -> None:
    with (
        Hosts(3, sysctls={"net.ipv4.tcp_rto_max_ms": 1000}) as hosts,
        forked(hosts, trains, "waits", 1, **sections(step_seconds=60)) as job,
    ):
        job.wait_for("fault")
        hosts.cut(1)
        job.make("go")
        hosts.run(0, "sleep", "2")
        hosts.mend(1)
        ended = job.ended()
    assert [rank.code for rank in ended] == [0, 0, 0], ended


@pytest.mark.full
@pytest.mark.parametrize("culprit", [0, 2])
def test_the_errors_name_a_rank_that_never_starts_and_its_host(culprit: int) -> None:
    with Hosts(3) as hosts, forked(hosts, stays_away, culprit, **sections(startup_seconds=15)) as job:
        ended = job.ended()
    others = [rank for number, rank in enumerate(ended) if number != culprit]
    assert [rank.code for rank in others] == [ExitCode.HANG] * 2, ended
    named = r"d9d: rank 2 of node 2 did not start within 15 s; the other 2 ranks waited on host0, host1\."
    if culprit == 0:
        named = r"did not reach the job's store within 15 s\. rank 0 on host0:29500 hosts it"
    _assert_all_match(ended, named, without=culprit)
    assert not any("Traceback" in rank.errors for rank in others)


@pytest.mark.full
def test_folders_that_are_not_shared_are_refused_before_the_first_step() -> None:
    with Hosts(3) as hosts, forked(hosts, trains, "nothing", 0, run={"folder": hosts.local}, **sections()) as job:
        ended = job.ended()
    assert [rank.code for rank in ended] == [ExitCode.USER_ERROR] * 3, ended
    named = r"run/checkpoints of rank 0 on host0 is not seen by rank 1 on host1; rank 2 on host2; expected one folder"
    _assert_all_match(ended, named)


@pytest.mark.full
def test_a_full_disk_at_the_start_is_one_message_with_the_path_on_each_rank() -> None:
    with Hosts(1, disk_mib=1) as hosts:
        folder = hosts.local / "runs"
        hosts.run(0, "sh", "-c", f"mkdir {folder}; dd if=/dev/zero of={hosts.local}/full bs=4k status=none || true")
        call = forked(hosts, trains, "nothing", 0, ranks_per_host=2, run={"folder": folder}, **sections())
        with call as job:
            ended = job.ended()
        left = hosts.run(0, "find", str(folder), "-name", "*.partial")
    assert [rank.code for rank in ended] == [1, 1], ended
    _assert_all_match(ended, rf"d9d: (rank 0: )?{folder}\S* .*No space left on device")
    assert not any("Traceback" in rank.errors for rank in ended)
    assert left == ""
