"""`d9d-torchrun --warm` over hosts with a spare one: a rank and then a host are lost, and the job continues."""

import signal

import pytest

from hosts.elastic_job import IMPATIENT, ElasticJob, Settings, differing_steps
from hosts.hosts import Hosts
from hosts.recovery_time import start_agent, wait_for

pytestmark = pytest.mark.full


def test_a_job_of_warm_ranks_continues_after_a_killed_rank_and_after_a_lost_host() -> None:
    sections = {"checkpoint": {"every": 1000, "memory_every": 1, "replicas": 1}}
    settings = Settings("dp_shard=2", 24, 1, (2, 2), 20.0, sections)
    with Hosts(3, sysctls=IMPATIENT) as hosts:
        calm, job = ElasticJob(hosts, "calm", settings), ElasticJob(hosts, "faults", settings)
        agents = [start_agent(hosts, calm, host, num_hosts=2, ranks=1) for host in range(2)]
        wait_for(hosts, lambda: [agent.poll() for agent in agents] == [0, 0])
        job.allow(6)
        for host in range(2):
            start_agent(hosts, job, host, num_hosts=2, ranks=1)
        wait_for(hosts, lambda: len(job.steps()) >= 6)
        assert job.are_warm() == [True, True]
        start_agent(hosts, job, 2, num_hosts=2, ranks=1)  # the spare host
        job.signal(1, signal.SIGKILL)
        job.allow(14)
        wait_for(hosts, lambda: job.steps()[-1].step >= 12)
        lost = max(host for host, _ in job.processes().values())
        hosts.power_off(lost)
        job.allow(24)
        wait_for(hosts, lambda: job.steps()[-1].step == 24)
        assert lost not in {host for host, _ in job.processes().values()}
        assert job.are_warm() == [True, True]
        assert differing_steps(job.steps(), calm.steps()) == []
        repeated = [
            after.step for before, after in zip(job.steps(), job.steps()[1:], strict=False) if after.life != before.life
        ]
    assert len(repeated) == 2
    assert len(job.steps()) <= 24 + 2  # each fault costs a step at most
