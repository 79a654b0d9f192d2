"""torchrun over several hosts: the command of the documentation, and hosts that go."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import TINY_MODEL

from d9d_loop.report.run_history import read_history
from d9d_loop.resilience import ExitCode
from hosts.forked_hosts import forked
from hosts.host_jobs import agent
from hosts.hosts import Hosts
from hosts.test_host_faults import sections

ROOT = Path(__file__).resolve().parents[2]
# Without these settings, connections to a host that lost its power fail after a quarter of an hour.
IMPATIENT = {"net.ipv4.tcp_rto_max_ms": 1000, "net.ipv4.tcp_retries2": 6}

_SECONDS = 300.0  # timeout of a job; `Hosts` then kills it

pytestmark = pytest.mark.full


def _documented_command() -> list[str]:
    """Return the arguments of `torchrun` in the documentation."""
    text = (ROOT / "docs" / "many_hosts.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"^torchrun (--nnodes .*)$", text, flags=re.MULTILINE)
    return shlex.split(command)


def _assert_trained(jobs: Sequence[subprocess.Popen[str]], run: Path) -> None:
    output = [job.communicate(timeout=_SECONDS)[0] for job in jobs]
    assert {job.returncode for job in jobs} == {0}, "\n".join(output)
    assert (run / "checkpoints" / "step-00000002").is_dir(), "\n".join(output)


def test_the_documented_command_trains_over_two_hosts() -> None:
    with Hosts(2, aliases=["node{}.example.org"]) as hosts:
        stand_ins = {"train.py": "examples/quickstart.py", "/shared/runs": f"{hosts.shared}", "8": "2"}
        arguments = [stand_ins.get(argument, argument) for argument in _documented_command()]
        jobs = hosts.torchrun(*arguments, "--steps", "2", "--run.name", "run", "--export", "false")
        _assert_trained(jobs, hosts.shared / "run")


def test_the_job_file_for_kubernetes_trains_over_two_pods(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs yaml, which is optional")
    text = (ROOT / "examples" / "clusters" / "kubernetes.yaml").read_text(encoding="utf-8")
    _, job = yaml.safe_load_all(text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    with Hosts(2, aliases=["pretrain-{}.pretrain"]) as hosts:
        (command,) = container["args"]
        command = command.replace("/runs", str(hosts.shared)).replace("--nproc-per-node 8", "--nproc-per-node 2")
        command = f"{command} {_tiny(tmp_path)}"
        jobs = [hosts.start(host, *container["command"], command, environment=_path()) for host in range(2)]
        _assert_trained(jobs, hosts.shared / "pretrain")


def test_the_batch_script_for_slurm_trains_over_two_nodes(tmp_path: Path) -> None:
    for name in ("srun", "scontrol"):
        file = Path(__file__).with_name("slurm_stand_in.py")
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {sys.executable} {file} {name} "$@"\n', encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    with Hosts(2) as hosts:
        environment = {
            **os.environ,
            **_path(tmp_path),
            "D9D_DEVICE": "cpu",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "host[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
            "STAND_IN_INITS": " ".join(str(hosts.init_process(host)) for host in range(2)),
            "STAND_IN_TASKS": "2",
            "STAND_IN_MORE": f"--run.folder {hosts.shared} {_tiny(tmp_path)}",
        }
        script = ["bash", "examples/clusters/slurm.sh"]
        with subprocess.Popen(
            script, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as job:
            try:
                _assert_trained([job], hosts.shared / "pretrain-7")
            finally:
                job.kill()


def test_the_launcher_exits_with_the_code_of_a_user_error_on_all_ranks() -> None:
    with Hosts(1) as hosts:
        launcher = (sys.executable, "-m", "d9d_loop.torchrun", "--nproc-per-node", "2")
        job = hosts.start(0, *launcher, "examples/quickstart.py", "--steps", "-5")
        output, _ = job.communicate(timeout=_SECONDS)
    assert job.returncode == ExitCode.USER_ERROR, output
    assert "steps = '-5'" in output


def _tiny(folder: Path) -> str:
    """Return overrides for a small model and two steps."""
    overrides = {**TINY_MODEL, "steps": "2", "export": "false", "text.tokens": str(folder / "tokens")}
    del overrides["batch.global_size"]
    return shlex.join(word for name, value in overrides.items() for word in (f"--{name}", value))


def _path(*folders: Path) -> dict[str, str]:
    """Return `PATH` with folders and the interpreter's before the others."""
    found = [*map(str, folders), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {"PATH": os.pathsep.join(found)}


def test_two_hosts_finish_the_job_after_the_third_loses_power() -> None:
    with Hosts(3, sysctls=IMPATIENT) as hosts, forked(hosts, agent, "waits", 2, **sections()) as job:
        job.wait_for("fault")
        hosts.power_off(2)
        job.make("go")
        ended = job.ended()
        finished = sorted(path.name for path in hosts.shared.glob("finished-*"))
        history = read_history(hosts.shared / "run")
    assert [rank.code for rank in ended] == [0, 0, -9], ended
    assert finished == ["finished-0-of-2", "finished-1-of-2"]
    assert history is not None
    (interruption,) = history.interruptions
    assert interruption.rank == 2
    assert "host2 is down or cut off from the network" in interruption.cause


def test_all_agents_end_after_the_host_of_the_rendezvous_loses_its_power() -> None:
    with Hosts(3, sysctls=IMPATIENT) as hosts, forked(hosts, agent, "waits", 1, **sections()) as job:
        job.wait_for("fault")
        hosts.power_off(0)
        job.make("go")
        ended = job.ended()
    assert ended[0].code == -9
    assert all(rank.code != 0 for rank in ended)
