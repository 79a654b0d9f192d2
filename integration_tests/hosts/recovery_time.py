"""Time from a fault to the next step, and what it is spent on: `d9d-torchrun --warm` over hosts with a spare one.

    PYTHONPATH=integration_tests python -m hosts.recovery_time --kills 5 --power-offs 1

Needs what `Hosts` needs, and an idle machine. Ranks are killed, or hosts lose their power; a spare host replaces them.
Prints one line of JSON per fault: the seconds from the fault until each phase was over on all ranks, and until the end
of the first step. `packages/d9d-loop/benchmarks/goodput_of_tiers.py --measured` reads them.
"""

import argparse
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

from hosts.elastic_job import IMPATIENT, ElasticJob, Settings
from hosts.hosts import PORT, Hosts

RENDEZVOUS = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3}
_SECONDS = 200.0
_PHASES = ("forked", "context", "restored", "ready")


def start_agent(hosts: Hosts, job: ElasticJob, host: int, *, num_hosts: int, ranks: int) -> "subprocess.Popen[str]":
    """Start `d9d-torchrun --warm` on a host; its output is appended to the file log-HOST."""
    elastic = ["--nnodes", f"{num_hosts}", "--nproc-per-node", f"{ranks}", "--max-restarts", "99", "--rdzv-id", "job"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"host0:{PORT}"]
    patience = ["--rdzv-conf", ",".join(f"{name}={value}" for name, value in RENDEZVOUS.items())]
    launcher = [sys.executable, "-m", "d9d_loop.torchrun", "--warm", *elastic, *rendezvous, *patience]
    path = f"{Path(__file__).resolve().parents[1]}"
    command = f"exec {shlex.join([*launcher, *job.command()])} >> {hosts.shared}/log-{host} 2>&1"
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": path, "LOGLEVEL": "INFO"}
    return hosts.start(host, "sh", "-c", command, environment=variables)


def wait_for(hosts: Hosts, is_true: Callable[[], bool]) -> None:
    """Wait for a condition. Raises with the end of all logs after a time limit."""
    deadline = time.monotonic() + _SECONDS
    while not is_true():
        assert time.monotonic() < deadline, "\n".join(log.read_text()[-5000:] for log in hosts.shared.glob("log-*"))
        time.sleep(0.02)


def machine_processes(hosts: Hosts, job: ElasticJob) -> dict[int, int]:
    """Return each rank's process id on this machine, where the host's own is another one."""
    spaces = {Path(f"/proc/{hosts.init_process(host)}/ns/pid").readlink(): host for host in range(len(hosts.names))}
    found: dict[tuple[int, int], int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            host = spaces.get((status.with_name("ns") / "pid").readlink())
            inner = re.search(r"NSpid:.*\t(\d+)\n", status.read_text())
            if host is not None and inner is not None:
                found[host, int(inner[1])] = int(status.parent.name)
    return {rank: found[place] for rank, place in job.processes().items()}


def is_gone(process: int) -> bool:
    """Return True if a process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def strike(hosts: Hosts, job: ElasticJob, draws: random.Random, fault: str) -> dict[str, object]:
    """Let a fault strike, and wait for the next step; return the times of the phases in seconds after the fault."""
    old, life = machine_processes(hosts, job), job.steps()[-1].life
    rank = draws.choice([each for each, (host, _) in job.processes().items() if host or fault == "rank killed"])
    host = job.processes()[rank][0]
    step = job.steps()[-1].step
    job.allow(step + 8)
    wait_for(hosts, lambda: job.steps()[-1].step >= step + 3)
    start, ends = time.monotonic(), dict[int, float]()
    if fault == "rank killed":
        os.kill(old[rank], signal.SIGKILL)
    else:
        hosts.power_off(host)

    def is_back() -> bool:
        for each, process in old.items():
            if each not in ends and is_gone(process):
                ends[each] = time.monotonic()
        return job.steps()[-1].life != life

    wait_for(hosts, is_back)
    first = next(each for each in job.steps() if each.life == job.steps()[-1].life)
    last = [each for each in job.steps() if each.life == life][-1]
    marks = job.marks(since=start)
    phases = {name: max(at for what, at in marks if what == name) - start for name in _PHASES}
    return {
        "fault": fault,
        "rank": rank,
        "ranks ended": [round(each - start, 2) for _, each in sorted(ends.items())],
        **{name: round(seconds, 2) for name, seconds in phases.items()},
        "seconds": round(first.seconds - start, 2),
        "lost_steps": last.step - first.step + 1,
    }


def main() -> None:
    """Parse the arguments, let faults strike, and print their times and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="number of killed ranks")
    parser.add_argument("--power-offs", type=int, default=1, help="number of hosts that lose their power")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each host")
    parser.add_argument("--layout", default="dp_shard=8")
    parser.add_argument("--logs", type=Path, help="folder to which the agents' logs are copied")
    arguments = parser.parse_args()
    faults = ["rank killed"] * arguments.kills + ["host without power"] * arguments.power_offs
    sections = {"checkpoint": {"every": 100000, "memory_every": 1, "replicas": 1}}
    settings = Settings(arguments.layout, 100000, arguments.ranks, (arguments.hosts,) * 2, 30.0, sections)
    draws = random.Random(0)  # noqa: S311
    times: list[float] = []
    with Hosts(arguments.hosts + arguments.power_offs, sysctls=IMPATIENT) as hosts:
        job = ElasticJob(hosts, "job", settings)
        job.allow(4)
        for host in range(len(hosts.names)):
            if host == arguments.hosts:
                wait_for(hosts, lambda: any(each.step >= 1 for each in job.steps()))
            start_agent(hosts, job, host, num_hosts=arguments.hosts, ranks=arguments.ranks)
        try:
            wait_for(hosts, lambda: any(each.step >= 4 for each in job.steps()))
            time.sleep(10.0 if arguments.power_offs else 0.0)  # the spare host imports
            for fault in faults:
                outcome = strike(hosts, job, draws, fault)
                times.append(float(str(outcome["seconds"])))
                print(json.dumps(outcome), flush=True)
                time.sleep(2.0)
        finally:
            if arguments.logs is not None:
                for log in [*hosts.shared.glob("log-*"), *hosts.shared.glob("*/marks")]:
                    (arguments.logs / log.name).write_bytes(log.read_bytes())
    print(json.dumps({"median_seconds": median(times), "most": max(times)}))


if __name__ == "__main__":
    main()
