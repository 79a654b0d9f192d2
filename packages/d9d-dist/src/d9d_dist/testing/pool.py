"""Pool of reused processes that runs functions on N ranks, so a distributed test costs little beyond its collectives.

A fork server imports torch and the caller's d9d packages once. Ranks are forked from it and reused. If a rank fails or
hangs, all processes of its pool are killed and the next run forks new ones. Tests that pass reuse each other's
processes: what a library caches for the life of a process, such as whether it is distributed, remains. Use a `RankPool`
of its own for a test that needs fresh processes.
"""

import atexit
import functools
import inspect
import multiprocessing
import os
import pickle  # noqa: TID251 - between a test and its ranks, on one host
import pickletools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from d9d_dist.errors import UserError
from d9d_dist.testing._worker import Call, Outcome, serve

_GRACE_SECONDS = 0.5
_STACKS_SECONDS = 10.0  # time for hanging ranks to write their stacks on a busy machine
_EXIT_SECONDS = 10.0  # time for a process to exit after its pipe is closed
_LOG_TAIL_CHARACTERS = 8_000
_VICTIM = (
    "failed before this rank: "  # note that `DistributedContext` adds to the error of a rank that did not fail first
)
# Modules that test files import; the ranks that run their functions import them too.
_SLOW_MODULES = ("hypothesis", "peft", "pytest", "transformers.modeling_utils")
_GLOO_CONNECT_ERROR = "Gloo connectFullMesh failed"


Device = Literal["cpu", "accelerator"]


class RankError(AssertionError):
    """Error of a rank that raised, died or hung, with the rank, its traceback, stacks and last output.

    Attributes:
        rank: The first rank that failed.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class _RendezvousError(RankError):
    """Failure of gloo to connect the ranks before the function ran. It happens on busy machines; the run is retried."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    log: Path

    def last_output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARACTERS:].strip()


class RankPool(AbstractContextManager["RankPool"]):
    """Reused processes that run the ranks of a job on this machine, on the CPU with gloo or on one accelerator each."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["d9d_dist.testing._preload", *_imported_modules()])
        self._folder = tempfile.TemporaryDirectory(prefix="d9d-ranks-")
        self._workers: list[_Worker] = []
        atexit.register(self.close)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the pool."""
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout: float = 180.0,
        device: Device = "cpu",
    ) -> list[Any]:
        """Call `function(*args)` on every rank, in a fresh process group; return the results in rank order.

        Each rank has torchrun's environment variables, so `MeshConfig(...).build()` works as in a job.

        Args:
            function: Module-level function or static method of a module-level class.
            args: Positional arguments, pickled, the same for every rank.
            world_size: Number of ranks.
            timeout: Timeout of the run, in seconds.
            device: Device type of the ranks' contexts: the CPU, or one of this machine's accelerators for each rank.

        Raises:
            RankError: If a rank raises, dies or exceeds the timeout; after a timeout with the stacks of the hanging
                ranks.
            TypeError: If another process cannot find `function` by its name.
            UserError: If `device` is "accelerator" and this machine has fewer accelerators than ranks.
        """
        if device == "accelerator" and not accelerators_for(world_size):
            raise UserError(
                f"got {world_size} ranks with device = 'accelerator' on a machine with "
                f"{torch.accelerator.device_count()} accelerators; expected one per rank. "
                "Check accelerators_for(world_size) first, and skip the test or run it on the CPU."
            )
        calls = self._calls(function, args, world_size, device)
        try:
            return self._run(calls, timeout)
        except _RendezvousError:
            return self._run(calls, timeout)

    def _run(self, calls: Sequence[Call], timeout: float) -> list[Any]:
        """Run one call per rank."""
        world_size = len(calls)
        self._start_workers(world_size)
        workers = self._workers[:world_size]
        for worker in workers:
            worker.log.write_bytes(b"")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            for worker, call in zip(workers, calls, strict=True):
                environment = {**call.environment, "MASTER_PORT": str(store.port)}
                worker.connection.send_bytes(
                    pickle.dumps(Call(call.module, call.files, call.function, call.arguments, environment))
                )
            return self._collect(workers, time.monotonic() + timeout, timeout)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Terminate all ranks; this also happens at process exit. The pool can be reused afterwards."""
        for worker in self._workers:
            worker.connection.close()
        # Idle ranks exit by themselves and release shared resources; busy ranks are killed.
        deadline = time.monotonic() + 2.0
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    @staticmethod
    def _calls(function: Callable[..., Any], args: Sequence[Any], world_size: int, device: Device) -> list[Call]:
        name = getattr(function, "__qualname__", "<no name>")
        if "<" in name or inspect.getmodule(function) is None:
            raise TypeError(
                f"got the function {name}, which other processes cannot import by name; "
                "pass a function that is defined at the top level of a module."
            )
        arguments = pickle.dumps(args)
        files = {function.__module__: inspect.getfile(function), **_files_of(arguments)}
        return [
            Call(function.__module__, files, name, arguments, _environment(rank, world_size, device))
            for rank in range(world_size)
        ]

    def _start_workers(self, world_size: int) -> None:
        Path(self._folder.name).mkdir(exist_ok=True)
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            log = Path(self._folder.name) / f"rank-{len(self._workers)}.log"
            process = self._context.Process(target=serve, args=(theirs, str(log)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, log))

    def _collect(self, workers: Sequence[_Worker], deadline: float, timeout: float) -> list[Any]:
        outcomes: dict[int, Outcome] = {}
        failed: list[int] = []
        while len(outcomes) < len(workers):
            waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in outcomes}
            ready = mp_connection.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready and failed:
                break  # the remaining ranks wait for the failed rank
            if not ready:
                raise RankError(_describe_hang(workers, outcomes, timeout), rank=min(waiting.values()))
            for connection in ready:
                rank = waiting[connection]  # ty: ignore[invalid-argument-type]  (wait returns what it was given)
                outcomes[rank] = _receive(workers[rank])
                if outcomes[rank].error is not None:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failed:
            # A rank whose error has a note about another rank's failure is a victim, even if it reported first.
            failed.sort(key=lambda rank: _VICTIM in (outcomes[rank].error or ""))
            gloo_failed = all(_GLOO_CONNECT_ERROR in (outcomes[rank].error or "") for rank in failed)
            kind = _RendezvousError if gloo_failed else RankError
            raise kind(_describe_failures(workers, outcomes, failed), rank=failed[0])
        return [pickle.loads(outcomes[rank].result or b"") for rank in range(len(workers))]  # noqa: S301  (our own ranks)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers.clear()


@functools.cache
def _shared_pool() -> RankPool:
    return RankPool()


def run_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 180.0, device: Device = "cpu"
) -> list[Any]:
    """Call `function(*args)` on every rank of a pool shared by all calls of this process; see `RankPool.run`."""
    return _shared_pool().run(function, *args, world_size=world_size, timeout=timeout, device=device)


def accelerators_for(world_size: int) -> bool:
    """Return True if this machine has at least `world_size` accelerators."""
    return torch.accelerator.is_available() and torch.accelerator.device_count() >= world_size


def _imported_modules() -> list[str]:
    """Return the imported modules that ranks probably need too: public d9d modules, and those that import slowly."""
    siblings = sorted(name for name in sys.modules if name.startswith("d9d_") and "._" not in name)
    return [*siblings, *(name for name in _SLOW_MODULES if name in sys.modules)]


def _files_of(pickled: bytes) -> dict[str, str]:
    """Return the files of modules that pickled arguments refer to; a rank may not be able to import them by name."""
    names = {argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)}
    files = {name: getattr(sys.modules[name], "__file__", None) for name in names & sys.modules.keys() - {"__main__"}}
    return {name: file for name, file in files.items() if file is not None}


def _environment(rank: int, world_size: int, device: Device) -> dict[str, str | None]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        # The parent hosts the store on a port chosen by the system, so concurrent runs do not conflict.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "D9D_DEVICE": "cpu" if device == "cpu" else None,
    }


def _receive(worker: _Worker) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(worker.connection.recv_bytes())  # noqa: S301  (our own rank)
    except (EOFError, OSError):
        worker.process.join(timeout=_EXIT_SECONDS)
        outcome = Outcome(error=f"The process died with exit code {worker.process.exitcode}.")
    return outcome


def _describe_failures(workers: Sequence[_Worker], outcomes: dict[int, Outcome], failed: Sequence[int]) -> str:
    """Describe all failures, the first failed rank first; ranks with equal tracebacks share a paragraph."""
    parts = [f"{len(failed)} of {len(workers)} ranks failed; rank {failed[0]} was the first."]
    ranks_by_error: dict[str, list[int]] = {}
    for rank in failed:
        ranks_by_error.setdefault((outcomes[rank].error or "").strip(), []).append(rank)
    for error, ranks in ranks_by_error.items():
        parts.append(f"--- rank {', '.join(map(str, ranks))} ---\n{error}")
        if output := workers[ranks[0]].last_output():
            parts.append(f"--- last output of rank {ranks[0]} ---\n{output}")
    return "\n".join(parts)


def _describe_hang(workers: Sequence[_Worker], outcomes: dict[int, Outcome], timeout: float) -> str:
    hung = [rank for rank in range(len(workers)) if rank not in outcomes]
    sizes = {rank: workers[rank].log.stat().st_size for rank in hung}
    for rank in hung:
        with suppress(ProcessLookupError):
            os.kill(workers[rank].process.pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + _STACKS_SECONDS
    while any(workers[rank].log.stat().st_size == sizes[rank] for rank in hung) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(_GRACE_SECONDS)  # lets the ranks finish writing
    done = ", ".join(map(str, sorted(outcomes))) or "none"
    parts = [f"ranks {', '.join(map(str, hung))} did not finish within {timeout:g} s; finished: {done}."]
    parts += [f"--- stacks of rank {rank} ---\n{workers[rank].last_output()}" for rank in hung]
    return "\n".join(parts)
