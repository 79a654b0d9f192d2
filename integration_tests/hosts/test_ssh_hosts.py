"""`examples/clusters/ssh.sh` over hosts with OpenSSH's sshd, each with its own network."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_example import STEPS, copy_examples, read_losses

from d9d_loop.resilience import ExitCode
from hosts.hosts import Hosts

_SECONDS = 300.0
_SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
_SERVER = "HostKey {0}/key\nAuthorizedKeysFile {0}/key.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
_CLIENT = "IdentityFile {0}/key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"

pytestmark = [pytest.mark.full, pytest.mark.skipif(_SSHD is None, reason="needs sshd (Debian: openssh-server)")]


def test_a_job_over_ssh_saves_at_a_signal_and_the_same_command_resumes_it(tmp_path: Path) -> None:
    copy_examples(tmp_path)
    _configure_ssh(tmp_path)
    with Hosts(2) as hosts:
        for host in range(2):
            hosts.start(host, "sh", "-c", f"mkdir -p /run/sshd && exec {_SSHD} -D -e -f {tmp_path}/server")
        _wait(lambda: all(_answers(hosts, tmp_path, host) for host in range(2)))
        job = _start(hosts, tmp_path)
        _wait(lambda: max(read_losses(tmp_path, "run"), default=0) >= 3)
        hosts.run(0, "pkill", "-TERM", "--full", "bash examples/clusters/ssh.sh")
        output, _ = job.communicate(timeout=_SECONDS)
        assert job.returncode == ExitCode.STOPPED, output
        saved = max(read_losses(tmp_path, "run"))
        assert (tmp_path / "runs" / "run" / "checkpoints" / f"step-{saved:08}").is_dir(), output
        job = _start(hosts, tmp_path)
        output, _ = job.communicate(timeout=_SECONDS)
    assert job.returncode == 0, output
    assert f"step {saved + 1}/{STEPS}" in output
    assert list(read_losses(tmp_path, "run")) == list(range(1, STEPS + 1))


def _configure_ssh(folder: Path) -> None:
    """Create a key, the configuration of a server, and an `ssh` that uses the key."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    (folder / "server").write_text(_SERVER.format(folder), encoding="utf-8")
    (folder / "client").write_text(_CLIENT.format(folder), encoding="utf-8")
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n', encoding="utf-8")
    (folder / "ssh").chmod(0o755)


def _answers(hosts: Hosts, folder: Path, host: int) -> bool:
    try:
        return hosts.run(0, str(folder / "ssh"), "-n", f"host{host}", "hostname") == f"host{host}\n"
    except subprocess.CalledProcessError:
        return False


def _start(hosts: Hosts, folder: Path) -> "subprocess.Popen[str]":
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ("env", f"--chdir={folder}", "bash", "examples/clusters/ssh.sh", "run", "host0", "host1")
    return hosts.start(0, *words, environment={"PATH": path, "RANKS": "2"})


def _wait(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + _SECONDS
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.25)
