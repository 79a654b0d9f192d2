"""`d9d-torchrun` over hosts with a spare one: a slow host changes places with it, and the results are bitwise equal."""

from dataclasses import replace

import pytest

from hosts.elastic_job import IMPATIENT, ElasticJob, Settings, differing_steps
from hosts.hosts import Hosts
from hosts.recovery_time import start_agent, wait_for

pytestmark = pytest.mark.full


@pytest.mark.parametrize("slow", [0, 1], ids=["host of the rendezvous", "another"])
def test_a_slow_host_changes_places_with_a_spare_one(slow: int) -> None:
    settings = Settings("dp_shard=3", 16, 1, (3, 3), 100.0, {"checkpoint": {"every": 1000}})
    with Hosts(4, sysctls=IMPATIENT) as hosts:
        calm = ElasticJob(hosts, "calm", settings)
        job = ElasticJob(hosts, "slow", replace(settings, slow_host=hosts.names[slow]))
        agents = [start_agent(hosts, calm, host, num_hosts=3, ranks=1) for host in range(3)]
        wait_for(hosts, lambda: [agent.poll() for agent in agents] == [0, 0, 0])
        job.allow(1)
        agents = [start_agent(hosts, job, host, num_hosts=3, ranks=1) for host in range(3)]
        wait_for(hosts, lambda: bool(job.steps()))
        assert {host for host, _ in job.processes().values()} == {0, 1, 2}
        agents.append(start_agent(hosts, job, 3, num_hosts=3, ranks=1))  # the spare host
        wait_for(hosts, lambda: "Rendezvous'ing" in _log(hosts, 3))
        job.allow(17)
        wait_for(hosts, lambda: None not in [agent.poll() for agent in agents])
        assert [agent.returncode for agent in agents] == [0] * 4, [
            _log(hosts, host)[-3000:] for host in range(4) if agents[host].returncode
        ]
        assert {host for host, _ in job.processes().values()} == {0, 1, 2, 3} - {slow}
        assert differing_steps(job.steps(), calm.steps()) == []
        assert [each.step for each in job.steps()] == list(range(1, 17))  # none is repeated
        journal = (hosts.shared / "slow" / "journal.jsonl").read_text()
        assert f"stopped to replace host{slow}, which is slow, with a spare host" in journal
        assert "slow data of rank" in journal
        assert f"stopped to replace host{slow}, which is slow, with a spare host, after step" in _log(hosts, 0)


def _log(hosts: Hosts, host: int) -> str:
    path = hosts.shared / f"log-{host}"
    return path.read_text() if path.exists() else ""
