"""Real Slurm on one machine: munged, slurmctld and one slurmd per node, in a PID namespace that ends them all.

The nodes share the machine's network and disk, and have names of their own in `/etc/hosts` of a mount namespace.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import which

NUM_NODES = 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter")
_CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=30
SlurmdTimeout=10
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=128 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def why_no_slurm() -> str | None:
    """Return a reason for a skip: what this machine lacks, or None."""
    lacking = [name for name in PROGRAMS if which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if lacking:
        return f"needs Slurm (Debian: slurm-wlm and munge); {', '.join(lacking)} not found"
    return None if os.geteuid() == 0 else "needs root, for the namespaces of the nodes"


class SlurmCluster:
    """Cluster of four nodes. `close` ends all of its processes."""

    def __init__(self, folder: Path, *, port: int) -> None:
        self.folder = folder
        for name in ("state", *(f"node{number + 1}" for number in range(NUM_NODES))):
            (folder / name).mkdir()
        text = _CONFIG.format(port=port, folder=folder, nodes=NUM_NODES, first=port + 1, last=port + NUM_NODES)
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-7]\n")
        names = " ".join(f"node{number + 1}" for number in range(NUM_NODES))
        (folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()} {names}\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        own = f"--socket={folder}/munge.socket --pid-file={folder}/munge.pid --log-file={folder}/munge.log"
        slurmds = "; ".join(f"slurmd -N node{number + 1}" for number in range(NUM_NODES))
        script = (
            f"mount --bind {folder}/hosts /etc/hosts && munged --force {own} --key-file={folder}/munge.key "
            f"--seed-file={folder}/munge.seed && slurmctld && {{ {slurmds}; }} && sleep infinity"
        )
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._environment = {
            **os.environ,
            "SLURM_CONF": f"{folder}/slurm.conf",
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        with (folder / "daemons.log").open("w") as log:
            self._process = subprocess.Popen([*namespaces, "bash", "-c", script], env=self._environment, stderr=log)
        self.wait(lambda: self.run("sinfo", "-h", "-o", "%D %T", check=False).split() == [str(NUM_NODES), "idle"])

    def run(self, *words: str, cwd: Path | None = None, check: bool = True, variables: Mapping[str, str] = {}) -> str:
        """Run a command inside of the namespaces, and return its output."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        if not children:
            return ""
        enter = ["nsenter", "--target", children[0], "--mount", "--pid", f"--wd={cwd or self.folder}"]
        done = subprocess.run(
            [*enter, *words], env={**self._environment, **variables}, check=check, capture_output=True, text=True
        )
        return done.stdout

    def job(self, number: str) -> Mapping[str, str]:
        """Return the fields of a job, as `scontrol show job` prints them."""
        words = self.run("scontrol", "show", "job", number, "-o").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, is_done: Callable[[], bool], *, seconds: float = 120) -> None:
        """Wait until a condition is true; raise `TimeoutError` otherwise."""
        end = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() > end:
                raise TimeoutError(self.run("squeue", "-l", check=False) + self.run("sinfo", "-l", check=False))
            time.sleep(0.25)

    def close(self) -> None:
        """End all daemons and jobs."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
