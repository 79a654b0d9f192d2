"""Jobs with ranks on several hosts, forked from a warm process so that they need no imports.

Rank 0 holds the job's store, as under Slurm. A function that starts `torchrun`'s agent instead has the agent's store.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, final

from hosts.hosts import PORT, Hosts

sys.path.append(str(Path(__file__).resolve().parents[2] / "packages/d9d-loop/tests/resilience"))
from forked_faults import Place, Rank, be_rank, fork_ranks, warm_process

_SECONDS = 200.0
_NAMESPACES = ("net", "ipc", "uts", "pid", "mnt")  # the mounts come last: the others are opened under /proc


@final
@dataclass(frozen=True, slots=True)
class HostJob:
    """A running job on several hosts."""

    _shared: Path
    _ended: Future[list[Any]]

    def wait_for(self, mark: str) -> None:
        """Wait until a file of this name exists in the shared folder. Raises if the job ends before."""
        deadline = time.monotonic() + _SECONDS
        while not (self._shared / mark).exists():
            if self._ended.done():
                raise AssertionError(f"no rank reached {mark!r}: {self.ended()}")
            assert time.monotonic() < deadline, f"no rank reached {mark!r} in {_SECONDS} s"
            time.sleep(0.01)

    def make(self, mark: str) -> None:
        """Create a file in the shared folder, for which ranks wait."""
        (self._shared / mark).touch()

    def ended(self) -> list[Rank]:
        """Wait for all ranks; return how they ended."""
        return self._ended.result()[0]


@contextmanager
def forked(
    hosts: Hosts, job: Callable[..., None], *arguments: Any, ranks_per_host: int = 1, **named: Any
) -> Generator[HostJob]:
    """Call `job(place, *arguments, **named)` on every rank; the body runs meanwhile."""
    inits = [hosts.init_process(number) for number in range(len(hosts.names))]
    call = (_launch, partial(job, **named), arguments, inits, ranks_per_host, hosts.shared)
    with ThreadPoolExecutor(1) as pool:
        yield HostJob(hosts.shared, pool.submit(warm_process().run, *call, world_size=1, timeout=_SECONDS))


def _launch(
    job: Callable[..., None], arguments: tuple[Any, ...], inits: Sequence[int], ranks_per_host: int, folder: Path
) -> list[Rank]:
    world_size = len(inits) * ranks_per_host

    def run(rank: int) -> NoReturn:
        host, local_rank = divmod(rank, ranks_per_host)
        enter(inits[host])
        environment = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": ranks_per_host,
            "GROUP_RANK": host,
            "GROUP_WORLD_SIZE": len(inits),
            "MASTER_ADDR": "host0",
            "MASTER_PORT": PORT,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        be_rank(job, arguments, Place(folder, rank), environment)

    return fork_ranks(run, folder, world_size=world_size)


def enter(init: int) -> None:
    """Enter the namespaces of a host, in a process that was forked for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in _NAMESPACES]
    for descriptor in opened:
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    # Only children are in the new process-id namespace.
    child = os.fork()
    if child == 0:
        return
    _, status = os.waitpid(child, 0)
    if (code := os.waitstatus_to_exitcode(status)) < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)
