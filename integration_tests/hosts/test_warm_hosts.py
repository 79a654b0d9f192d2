"""`d9d-torchrun --warm` over hosts with a spare one: a rank and then a host are lost, and the job goes on."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.elastic_job import IMPATIENT, ElasticJob, Settings, differing_steps
from hosts.hosts import PORT, Hosts

pytestmark = pytest.mark.full
_SECONDS = 200.0


def _start(hosts: Hosts, job: ElasticJob, host: int) -> "subprocess.Popen[str]":
    elastic = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-id", "job"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"host0:{PORT}"]
    patience = ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=5"]
    launcher = [sys.executable, "-m", "d9d_loop.torchrun", "--warm", *elastic, *rendezvous, *patience]
    path = f"{Path(__file__).resolve().parents[1]}"
    command = f"exec {shlex.join([*launcher, *job.command()])} >> {hosts.shared}/log-{host} 2>&1"
    return hosts.start(host, "sh", "-c", command, environment={"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": path})


def _wait(hosts: Hosts, is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not is_true():
        assert time.monotonic() < deadline, "\n".join(log.read_text()[-5000:] for log in hosts.shared.glob("log-*"))
        time.sleep(0.05)


def test_warm_ranks_go_on_after_a_killed_rank_and_on_a_spare_host_after_a_lost_one() -> None:
    sections = {"checkpoint": {"every": 1000, "memory_every": 1, "replicas": 1}}
    settings = Settings("dp_shard=2", 24, 1, (2, 2), 20.0, sections)
    with Hosts(3, sysctls=IMPATIENT) as hosts:
        calm, job = ElasticJob(hosts, "calm", settings), ElasticJob(hosts, "faults", settings)
        agents = [_start(hosts, calm, host) for host in range(2)]
        _wait(hosts, lambda: [agent.poll() for agent in agents] == [0, 0])
        job.allow(6)
        for host in range(2):
            _start(hosts, job, host)
        _wait(hosts, lambda: len(job.steps()) >= 6)
        assert job.are_warm() == [True, True]
        _start(hosts, job, 2)  # the spare host
        job.signal(1, signal.SIGKILL)
        job.allow(14)
        _wait(hosts, lambda: job.steps()[-1].step >= 12)
        lost = max(host for host, _ in job.processes().values())
        hosts.power_off(lost)
        job.allow(24)
        _wait(hosts, lambda: job.steps()[-1].step == 24)
        assert lost not in {host for host, _ in job.processes().values()}
        assert job.are_warm() == [True, True]
        assert differing_steps(job.steps(), calm.steps()) == []
        repeated = [
            after.step for before, after in zip(job.steps(), job.steps()[1:], strict=False) if after.life != before.life
        ]
    assert len(repeated) == 2
    assert len(job.steps()) <= 24 + 2  # each fault costs a step at most
