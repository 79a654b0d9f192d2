"""A job over three hosts that keep steps in memory: a host loses its memory, and the results are bitwise equal."""

from typing import Any

import pytest

from d9d_loop.resilience import ExitCode
from d9d_state import CheckpointStore
from hosts.forked_hosts import Rank, forked
from hosts.hosts import Hosts
from hosts.test_host_faults import sections

from faulty_jobs import trains  # isort: skip - its folder is added to the path by `forked_hosts`

pytestmark = pytest.mark.full


def _train(hosts: Hosts, name: str, fault: str = "nothing", culprit: int = 0) -> list[Rank]:
    checkpoint = {"every": 1000, "memory_every": 1, "replicas": 1}
    run = {"folder": hosts.shared, "name": name}
    with forked(hosts, trains, fault, culprit, ranks_per_host=2, run=run, checkpoint=checkpoint, **sections()) as job:
        return job.ended()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_job_resumes_bitwise_from_the_memory_of_other_hosts(lost: int) -> None:
    with Hosts(3) as hosts:
        assert [rank.code for rank in _train(hosts, "calm")] == [0] * 6
        ended = _train(hosts, "lost", "is killed", culprit=2 * lost)
        assert ended[2 * lost].code == -9
        assert not list((hosts.shared / "lost" / "checkpoints").glob("step-*"))
        assert "record-" in hosts.run(lost, "sh", "-c", "ls /dev/shm/d9d-*/slot-*")
        hosts.run(lost, "sh", "-c", "rm -r /dev/shm/d9d-*")
        ended = _train(hosts, "lost")
        assert [rank.code for rank in ended] == [0] * 6, ended
        found, calm = (CheckpointStore(hosts.shared / name / "checkpoints").newest() for name in ("lost", "calm"))
        assert found is not None
        assert calm is not None
        assert found.manifest.tensors == calm.manifest.tensors  # with the digest of each chunk
        assert hosts.run(lost, "ls", "/dev/shm") == ""  # noqa: S108 - a namespace of the host


def _without_shared_run_folder(*, export: bool) -> list[Rank]:
    with Hosts(2) as hosts:
        checkpoint = {"every": 2, "folder": str(hosts.shared / "checkpoints")}
        more: dict[str, Any] = {
            "run": {"folder": hosts.local},
            "checkpoint": checkpoint,
            "export": export,
            **sections(),
        }
        with forked(hosts, trains, "nothing", 0, **more) as job:
            ended = job.ended()
        assert (hosts.shared / "checkpoints" / "run" / "step-00000006").is_dir() == (not export)
    return ended


def test_hosts_need_not_share_the_run_folder_without_an_export() -> None:
    assert [rank.code for rank in _without_shared_run_folder(export=False)] == [0, 0]


def test_export_to_a_folder_that_hosts_do_not_share_is_refused_before_the_first_step() -> None:
    ended = _without_shared_run_folder(export=True)
    assert [rank.code for rank in ended] == [ExitCode.USER_ERROR] * 2, ended
    for rank in ended:
        assert "is not seen by rank 1 on host1" in rank.errors
        assert "set export = false if the hosts share no folder" in rank.errors
