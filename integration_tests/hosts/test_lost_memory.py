"""A job over three hosts whose memory holds the steps: a host loses its memory, and the job ends with the same bits."""

import pytest

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
def test_job_resumes_from_the_memory_of_other_hosts_with_the_same_bits(lost: int) -> None:
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
