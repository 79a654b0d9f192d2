"""Training job over several hosts under torchrun's elastic agents, which faults interrupt and agents start again.

Agents and ranks are forked from this process, which has imported everything, as by `d9d-torchrun --warm`.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from moe_job import BalancedNextToken, TinyDeepseek, samples
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from d9d_dist.failures.first_failure import NODE_FOLDER
from d9d_loop import ConfigReady, DataReady, ModelReady, StepDone, Trainer, TrainerConfig, cli_main, elastic_agent
from d9d_loop.elastic_rendezvous import BACKEND
from d9d_loop.rank_ends import RankEnds
from d9d_loop.testing import parse_layout
from hosts.forked_hosts import be_rank, enter
from hosts.hosts import PORT, Hosts

from forked_faults import Place  # isort: skip - its folder is added to the path by `forked_hosts`

# A connection to a host without power fails after some seconds, not after a quarter of an hour.
IMPATIENT = {"net.ipv4.tcp_rto_max_ms": 1000, "net.ipv4.tcp_retries2": 6}
_NUM_SAMPLES = 24  # divisible by 3, 4, 6 and 8
# The hosts share two cores, so their compute may differ; their data differs far more.
_REPLACES = {"every": 2, "window": 2, "slow_factor": 50.0, "replace": True}
_PROGRESS, _ALLOWED, _MARKS = "progress", "allowed", "marks"


@final
@dataclass(frozen=True)
class Settings:
    """Settings of a job; the same in a run with and without faults.

    Attributes:
        layout: Layout in the notation of `parse_layout`; "" for a replica on each rank.
        steps: Number of steps.
        ranks_per_host: Number of ranks of each host.
        num_hosts: Least and largest number of hosts.
        step_seconds: Time limit of a step.
        sections: Sections of the configuration.
        slow_host: Host on which reading a sample takes longer; "" for none.
    """

    layout: str
    steps: int
    ranks_per_host: int
    num_hosts: tuple[int, int]
    step_seconds: float
    sections: Mapping[str, Any]
    slow_host: str = ""


@final
@dataclass(frozen=True, slots=True)
class Step:
    """Completed step of a life of the job: bits of its values, and the time by the machine's monotonic clock."""

    step: int
    values: str
    seconds: float
    num_ranks: int
    life: str

    @property
    def loss(self) -> float:
        """Loss of the step."""
        return float.fromhex(self.values.partition(",")[0])


@final
class ElasticJob:
    """Context manager with one agent on each host, which are killed at the end.

    Attributes:
        is_off: Hosts without power, on which no agent is started.

    Args:
        hosts: Hosts, of which all run an agent.
        name: Name of the run.
        settings: Settings of the job.
    """

    def __init__(self, hosts: Hosts, name: str, settings: Settings) -> None:
        self._hosts, self._name, self._settings = hosts, name, settings
        self._agents: dict[int, int] = {}
        self._missing: set[int] = set()
        self.is_off: set[int] = set()
        self._folder = hosts.shared / f"{name}-files"
        self._folder.mkdir()

    def __enter__(self) -> Self:
        """Start the agents."""
        for host in range(len(self._hosts.names)):
            self.start(host)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Kill all processes on the hosts: a rank without an agent would keep the sockets that it was forked with."""
        for host in set(range(len(self._hosts.names))) - self.is_off:
            self._hosts.run(host, "sh", "-c", "kill -9 -1 || true")
        for agent in self._agents.values():
            os.waitpid(agent, 0)

    def start(self, host: int) -> None:
        """Start the agent of a host."""
        child = os.fork()
        if child == 0:
            enter(self._hosts.init_process(host))
            environment = {
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as d9d-torchrun does
            }
            be_rank(_agent, (self._name, self._settings), Place(self._folder, host), environment)
        self._agents[host] = child

    def start_missing(self) -> None:
        """Start the agents that have ended before the last step, except on hosts without power."""
        ended = self.ended()
        if any(each.step == self._settings.steps for each in self.steps()):
            return
        self._missing.update(ended)
        for host in self._missing - self.is_off:
            self._missing.remove(host)
            self.start(host)

    def ended(self) -> dict[int, int]:
        """Return the exit codes of agents that have ended since the last call, by host."""
        found: dict[int, int] = {}
        for host, agent in list(self._agents.items()):
            child, status = os.waitpid(agent, os.WNOHANG)
            if child:
                del self._agents[host]
                found[host] = os.waitstatus_to_exitcode(status)
        return found

    def allow(self, step: int) -> None:
        """Let the job train up to a step; it then waits."""
        _replace(self._folder / _ALLOWED, str(step))

    def steps(self) -> list[Step]:
        """Return the completed steps of all lives, in the order of time."""
        try:
            lines = (self._folder / _PROGRESS).read_text(encoding="ascii").splitlines()
        except FileNotFoundError:
            return []
        found = [each.split() for each in lines]
        return [Step(int(step), values, float(at), int(n), life) for step, values, at, n, life in found]

    def processes(self) -> dict[int, tuple[int, int]]:
        """Return host and process id of each rank that has started last."""
        found: dict[int, tuple[int, int]] = {}
        for path in self._folder.glob("rank-*"):
            host, process, _ = json.loads(path.read_text(encoding="ascii"))
            found[int(path.name.removeprefix("rank-"))] = self._hosts.names.index(host), process
        return found

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, if its host and process exist."""
        host, process = self.processes()[rank]
        with suppress(Exception):
            self._hosts.run(host, "kill", f"-{int(number)}", str(process))

    def marks(self, *, since: float) -> list[tuple[str, float]]:
        """Return the phases that ranks have reached since a time, and when, by the machine's monotonic clock."""
        lines = (self._folder / _MARKS).read_text(encoding="ascii").splitlines()
        found = [(what, float(at)) for what, at in (line.split() for line in lines)]
        return [(what, at) for what, at in found if at > since]

    def are_warm(self) -> list[bool]:
        """Return for each rank that has started last whether its process had imported what a job needs."""
        return [json.loads(path.read_text(encoding="ascii"))[2] for path in self._folder.glob("rank-*")]

    def command(self) -> list[str]:
        """Return the module of a rank and its arguments, for agents that this object does not start."""
        settings = {**vars(self._settings), "sections": dict(self._settings.sections)}
        return ["-m", "hosts.elastic_job", str(self._folder), self._name, json.dumps(settings)]

    def errors(self, since: Mapping[int, int] | None = None) -> dict[int, str]:
        """Return what agents and ranks have written to stderr, by host; only what follows the sizes `since`."""
        found: dict[int, str] = {}
        for host, path in self._logs().items():
            with path.open("rb") as file:
                file.seek((since or {}).get(host, 0))
                found[host] = file.read().decode(errors="replace")
        return found

    def log_sizes(self) -> dict[int, int]:
        """Return the number of bytes that agents and ranks have written to stderr, by host."""
        return {host: path.stat().st_size for host, path in self._logs().items()}

    def _logs(self) -> dict[int, Path]:
        return {int(path.name.removeprefix("errors-")): path for path in self._folder.glob("errors-*")}


def _agent(place: Place, name: str, settings: Settings) -> None:
    """Run the agent of a host, that of `d9d-torchrun`."""
    elastic_agent.install(RankEnds())
    node = place.folder / f"node-{place.rank}"
    node.mkdir(exist_ok=True)
    os.environ[NODE_FOLDER] = str(node)
    launch = LaunchConfig(
        min_nodes=settings.num_hosts[0],
        max_nodes=settings.num_hosts[1],
        nproc_per_node=settings.ranks_per_host,
        run_id="job",
        rdzv_backend=BACKEND,
        rdzv_endpoint=f"host0:{PORT}",
        rdzv_configs={
            "last_call_timeout": 5,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 4,
            "read_timeout": 20,
        },
        max_restarts=1000,
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(launch, _life)(str(place.folder), name, settings)


def _life(folder: str, name: str, settings: Settings) -> None:
    """Run a rank between two restarts."""
    rank, shared = int(os.environ["RANK"]), Path(folder)
    _mark(shared, "forked")
    is_warm = "d9d_loop.job.training" in sys.modules
    _replace(shared / f"rank-{rank}", json.dumps([socket.gethostname(), os.getpid(), is_warm]))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked rank has the handler of its agent
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    where = parse_layout(settings.layout)
    config = TrainerConfig.model_validate(
        {
            "steps": settings.steps,
            "batch": {"global_size": _NUM_SAMPLES, "microbatch_size": where.microbatch_size},
            "run": {"folder": shared.parent, "name": name},
            "mesh": where.mesh if where.world_size > 1 else {"data_parallel_replicate": -1},
            "pipeline": {"schedule": where.schedule, "draw": False},
            "optimizer": {"learning_rate": 3e-3},
            "logging": {"progress": False, "every": 10, "report": False},
            "rehearsal": False,
            "export": False,
            "resilience": {
                "health": _REPLACES if settings.slow_host else {"enabled": False},
                "timeouts": {"startup_seconds": 90, "step_seconds": settings.step_seconds},
            },
            **settings.sections,
        }
    )
    task = BalancedNextToken(0.02)
    data: Any = samples(_NUM_SAMPLES)
    if socket.gethostname() == settings.slow_host:
        data = _SlowSamples(data)
    trainer = Trainer(config, model=TinyDeepseek(), data=data, task=task, lr_schedule=lambda step: 1.0)
    trainer.events.subscribe(task)
    for event, phase in ((ConfigReady, "context"), (ModelReady, "restored"), (DataReady, "ready")):
        trainer.events.on(event, lambda _, phase=phase: _mark(shared, phase))
    if rank == 0:
        life = uuid.uuid4().hex  # a rebooted host gives the same process ids again
        trainer.events.on(StepDone, lambda event: _record(event, shared, life))
    try:
        with cli_main():
            trainer.train()
    except Exception:  # the agent would print the traceback of only one rank of the host
        traceback.print_exc()
        raise SystemExit(1) from None


@final
class _SlowSamples:
    """Samples, each of which takes a tenth of a second to read."""

    def __init__(self, fast: Sequence[Any]) -> None:
        self._fast = fast

    def __len__(self) -> int:
        return len(self._fast)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.1)
        return self._fast[index]


def _mark(folder: Path, what: str) -> None:
    """Append a phase that this rank has reached to a file of all ranks."""
    with (folder / _MARKS).open("a", encoding="ascii") as file:
        file.write(f"{what} {time.monotonic()}\n")


def _replace(path: Path, text: str) -> None:
    """Write a file that others may read at any time."""
    new = path.with_name(f"new-{path.name}")
    new.write_text(text, encoding="ascii")
    new.replace(path)


def _record(event: StepDone, folder: Path, life: str) -> None:
    """Append a step to the progress, then wait until the next step is allowed."""
    values = f"{float(event.loss).hex()},{float(event.grad_norm).hex()}"
    with (folder / _PROGRESS).open("a", encoding="ascii") as file:
        file.write(f"{event.step} {values} {time.monotonic()} {os.environ['WORLD_SIZE']} {life}\n")
    while event.step >= _allowed(folder):
        time.sleep(0.01)


def _allowed(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return int((folder / _ALLOWED).read_text(encoding="ascii"))
    return sys.maxsize


def differing_steps(steps: Sequence[Step], calm: Sequence[Step]) -> list[int]:
    """Return the steps whose values differ from those of a run without faults."""
    expected = {each.step: each.values for each in calm}
    return [each.step for each in steps if expected[each.step] != each.values]


if __name__ == "__main__":
    _life(sys.argv[1], sys.argv[2], Settings(**json.loads(sys.argv[3])))
