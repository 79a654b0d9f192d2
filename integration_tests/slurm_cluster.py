"""Real Slurm on one machine: its daemons with a database for `sacct`, in a PID namespace that ends them all.

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

NODES = ("a7-gpu08", "node1", "node2", "x")
"""Names of the nodes, which Slurm writes as a7-gpu08,node[1-2],x."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "sbatch", "unshare", "nsenter")
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
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={database}
AccountingStoragePass={folder}/munge.socket
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
Prolog={folder}/prolog
NodeName={nodes} NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=128 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
_ACCOUNTING = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={database}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mariadb}
StorageUser=root
StorageLoc=slurm
"""
_DAEMONS = """
set -e
mount --bind {folder}/hosts /etc/hosts
munged --force --socket={folder}/munge.socket --pid-file={folder}/munge.pid --log-file={folder}/munge.log \\
    --key-file={folder}/munge.key --seed-file={folder}/munge.seed
cat > {folder}/mariadb.conf << END
[mariadbd]
user=root
datadir={folder}/database
socket={folder}/mariadb.socket
pid-file={folder}/mariadb.pid
log-error={folder}/mariadb.log
bind-address=127.0.0.1
port={mariadb}
innodb-buffer-pool-size=16M
END
mariadb-install-db --defaults-file={folder}/mariadb.conf --auth-root-authentication-method=normal > /dev/null
mariadbd --defaults-file={folder}/mariadb.conf &
until mariadb --no-defaults --host=127.0.0.1 --port={mariadb} --user=root -e quit 2> /dev/null; do sleep 0.2; done
slurmdbd
until sacctmgr --immediate add cluster test > /dev/null 2>&1; do sleep 0.2; done
slurmctld
for node in {names}; do slurmd -N "$node"; done
sleep infinity
"""


def why_no_slurm() -> str | None:
    """Return a reason for a skip: what this machine lacks, or None."""
    lacking = [name for name in PROGRAMS if which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if lacking:
        return f"needs Slurm (Debian: slurm-wlm, slurmdbd, mariadb-server and munge); {', '.join(lacking)} not found"
    return None if os.geteuid() == 0 else "needs root, for the namespaces of the nodes"


class SlurmCluster:
    """Cluster of four nodes. `close` ends all of its processes."""

    def __init__(self, folder: Path, *, port: int) -> None:
        self.folder = folder
        for name in ("state", *NODES):
            (folder / name).mkdir()
        names = " ".join(NODES)
        first = port + 1
        last, database, mariadb = (port + len(NODES) + offset for offset in range(3))
        places = {"folder": folder, "port": port, "database": database, "mariadb": mariadb, "names": names}
        text = _CONFIG.format(nodes=",".join(NODES), first=first, last=last, **places)
        (folder / "slurm.conf").write_text(text)
        (folder / "slurmdbd.conf").write_text(_ACCOUNTING.format(**places))
        (folder / "slurmdbd.conf").chmod(0o600)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-7]\n")
        (folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()} {names}\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        (folder / "prolog").write_text(f"#!/bin/sh\n[ ! -e {folder}/prolog-fails-on-$SLURMD_NODENAME ]\n")
        (folder / "prolog").chmod(0o755)
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._environment = {
            **os.environ,
            "SLURM_CONF": f"{folder}/slurm.conf",
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        script = _DAEMONS.format(**places)
        with (folder / "daemons.log").open("w") as log:
            self._process = subprocess.Popen([*namespaces, "bash", "-c", script], env=self._environment, stderr=log)
        self.wait(lambda: self.run("sinfo", "-h", "-o", "%D %T", check=False).split() == [str(len(NODES)), "idle"])

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
        """Return the fields of a job, as `scontrol show job` prints them: for the ID of an array, also other jobs."""
        lines = self.run("scontrol", "show", "job", number, "-o").splitlines()
        (words,) = (line.split() for line in lines if line.startswith(f"JobId={number} "))
        return dict(word.split("=", 1) for word in words if "=" in word)

    def accounts(self, number: str) -> list[tuple[str, str]]:
        """Return state and exit code of each run of a job, as `sacct` prints them. A requeued job has several runs."""
        words = ("sacct", "--duplicates", "--allocations", "--noheader", "--parsable2", "--format=State,ExitCode")
        rows = self.run(*words, f"--jobs={number}").splitlines()
        return [(row.split("|")[0].split()[0], row.split("|")[1]) for row in rows]

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
