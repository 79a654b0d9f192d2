"""torchrun over several hosts: the command of the documentation, and hosts that go."""

import re
import shlex
from pathlib import Path

import pytest

from hosts.forked_hosts import forked
from hosts.host_jobs import agent
from hosts.hosts import Hosts
from hosts.test_host_faults import sections

ROOT = Path(__file__).resolve().parents[2]
# Without these settings, connections to a host that lost its power fail after a quarter of an hour.
IMPATIENT = {"net.ipv4.tcp_rto_max_ms": 1000, "net.ipv4.tcp_retries2": 6}

pytestmark = pytest.mark.full


def _documented_command() -> list[str]:
    """Return the arguments of `torchrun` in the documentation."""
    text = (ROOT / "docs" / "many_hosts.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"^torchrun (--nnodes .*)$", text, flags=re.MULTILINE)
    return shlex.split(command)


def test_the_documented_command_trains_over_two_hosts() -> None:
    with Hosts(2) as hosts:
        stand_ins = {"train.py": "examples/quickstart.py", "/shared/runs": f"{hosts.shared}", "8": "2"}
        arguments = [stand_ins.get(argument, argument) for argument in _documented_command()]
        jobs = hosts.torchrun(*arguments, "--steps", "3", "--run.name", "run", "--export", "false")
        output = [job.communicate()[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], output
        assert (hosts.shared / "run" / "checkpoints" / "step-00000003").is_dir(), output


def test_a_host_that_loses_its_power_is_survived_by_the_other_two() -> None:
    with Hosts(3, sysctls=IMPATIENT) as hosts, forked(hosts, agent, "waits", 2, **sections()) as job:
        job.wait_for("fault")
        hosts.power_off(2)
        job.make("go")
        ended = job.ended()
        finished = sorted(path.name for path in hosts.shared.glob("finished-*"))
    assert [rank.code for rank in ended] == [0, 0, -9], ended
    assert finished == ["finished-0-of-2", "finished-1-of-2"]


def test_all_agents_end_after_the_host_of_the_rendezvous_loses_its_power() -> None:
    with Hosts(3, sysctls=IMPATIENT) as hosts, forked(hosts, agent, "waits", 1, **sections()) as job:
        job.wait_for("fault")
        hosts.power_off(0)
        job.make("go")
        ended = job.ended()
    assert ended[0].code == -9
    assert all(rank.code != 0 for rank in ended)
