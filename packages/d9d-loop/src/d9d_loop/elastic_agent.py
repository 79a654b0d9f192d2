"""Agent of `d9d-torchrun`: torch's elastic agent, which ends the ranks of a failed job in seconds.

torch's agent gives each rank 30 seconds between SIGTERM and SIGKILL, even if the job has failed and nothing can be
saved. A rank that is stopped (SIGSTOP), or that waits for a host without power, uses all 30 seconds.
"""

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Final, final

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.launcher import api as launcher

from d9d_dist.failures.peers import process_state
from d9d_loop.elastic_rendezvous import QuickRendezvous, register
from d9d_loop.rank_ends import RankEnds
from d9d_loop.resilience.exit_codes import ExitCode
from d9d_loop.resilience.node_files import (
    NodeFile,
    describe_lost_host,
    forget_ranks,
    read_first_failure,
    read_node_file,
    take_slow_host,
    write_node_file,
)

# Time for failing ranks to look for the first failure and to close trackers. Rank 0 keeps the store for 5 seconds.
_END_SECONDS: Final = 10.0
# Exit codes of a running rank (None) or of a rank without a failure: other ranks may still be saving.
_STOPS: Final = (None, 0, ExitCode.STOPPED, ExitCode.INTERRUPTED)
_POLL_SECONDS = 0.02


def install(ends: RankEnds) -> None:
    """Make torchrun use this agent in this process, and register its rendezvous. May be called again.

    The agent updates `ends` whenever a rank ends.
    """
    register()
    # torchrun has no option for it.
    launcher.LocalElasticAgent = partial(QuickAgent, ends=ends)  # ty: ignore[invalid-assignment]
    for handler in logging.getLogger("torch.distributed").handlers:
        handler.addFilter(_format_exception)


def _format_exception(record: logging.LogRecord) -> bool:
    """Format the exception of a log record: torch's formatter would import `torch._dynamo`, which takes seconds."""
    if isinstance(record.exc_info, tuple):
        record.exc_text, record.exc_info = logging.Formatter().formatException(record.exc_info), None
    return True


@final
class QuickAgent(LocalElasticAgent):
    """torch's agent of a node, with a short time limit for ranks of a failed job.

    If another node is lost, the ranks of this node exit by themselves: they read the lost host from a file and report
    it. If the ranks of this node ask to replace this node because it is slow, it becomes a spare node.
    """

    def __init__(self, *arguments: Any, ends: RankEnds, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._ends = ends

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run torch's agent. If a spare node still waits when the job ends, return success without ranks."""
        return super().run(role) or RunResult(WorkerState.SUCCEEDED)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except RendezvousConnectionError:
            # This agent ends, so its ranks must not wait for a host that does not answer.
            rendezvous = self._worker_group.spec.rdzv_handler
            host = rendezvous.host if isinstance(rendezvous, QuickRendezvous) else "another host"
            write_node_file(
                NodeFile.LOST_HOST, f"the rendezvous on {host} does not answer: the host is down or cut off."
            )
            self._end_ranks()
            raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        forget_ranks()
        self._ends.codes.clear()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if any(code not in _STOPS for code in self._exit_codes()):
            self._end_ranks()
        rendezvous = worker_group.spec.rdzv_handler
        if isinstance(rendezvous, QuickRendezvous):
            waits = self._remaining_restarts > 0 and rendezvous.has_spare()
            write_node_file(NodeFile.SPARE_HOST, "waits" if waits else None)
        self._note_ends()
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._note_ends()
            if not self._ends.wants_restart():
                self._remaining_restarts = 0
        return result

    def _note_ends(self) -> None:
        """Note the exit codes of the ranks that have ended, and what they know about the first failure."""
        ends, workers = self._ends, self._worker_group.workers
        ends.codes |= {
            worker.global_rank: code
            for worker, code in zip(workers, self._exit_codes(), strict=False)
            if code is not None and worker.global_rank not in ends.codes
        }
        ends.first, ends.is_replacing = read_first_failure(), read_node_file(NodeFile.REPLACING) is not None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Send a signal to the ranks and wait until they have ended, for `--shutdown-timeout`.

        A further signal to this process is forwarded too: a second one ends a rank without a save.
        """
        before = {number: signal.signal(number, self._forward) for number in _handled_signals()}
        super()._shutdown(death_sig, self._shutdown_timeout)
        self._note_ends()
        for number, handler in before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        for process in self._running():
            _signal(process, signal.Signals(number))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        rendezvous = worker_group.spec.rdzv_handler
        if take_slow_host() and isinstance(rendezvous, QuickRendezvous):
            rendezvous.yield_to_spare()
        super()._rendezvous(worker_group)
        store: Any = worker_group.store
        # Nodes may have different numbers of ranks.
        store.set(_first_rank_key(worker_group.group_rank), str(worker_group.workers[0].global_rank))

    def _stop_workers(self, worker_group: WorkerGroup, *arguments: Any, **named: Any) -> None:
        rendezvous = worker_group.spec.rdzv_handler
        is_quick = isinstance(rendezvous, QuickRendezvous)
        lost, is_broken = (rendezvous.lost_nodes(), rendezvous.is_broken()) if is_quick else ([], False)
        if lost:
            node, host = lost[0]
            write_node_file(NodeFile.LOST_HOST, describe_lost_host(_first_rank(node, worker_group), host))
        if lost or is_broken or worker_group.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._end_ranks()
        super()._stop_workers(worker_group, *arguments, **named)

    def _exit_codes(self) -> list[int | None]:
        """Return the exit code of each rank; `None` for a running rank."""
        match self._pcontext:
            case MultiprocessContext(_pc=ranks) if ranks is not None:
                return [process.exitcode for process in ranks.processes]
            case SubprocessContext(subprocess_handlers=handlers):
                return [handler.proc.poll() for handler in handlers.values()]
            case _:
                return []

    def _running(self) -> list[int]:
        processes = [] if self._pcontext is None else self._pcontext.pids().values()
        return [process for process, code in zip(processes, self._exit_codes(), strict=True) if code is None]

    def _end_ranks(self) -> None:
        """Send SIGTERM to the ranks; send SIGKILL to ranks that are stopped or exit too late."""
        deadline = time.monotonic() + _END_SECONDS
        for process in self._running():
            _signal(process, signal.SIGTERM)
        while running := self._running():
            is_late = time.monotonic() > deadline
            for process in running:
                if is_late or process_state(process) == "is stopped":
                    _signal(process, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)


def _first_rank_key(node: int | None) -> str:
    """Return the key of a node's first rank in the store of a round."""
    return f"d9d/first_rank/{node}"


def _first_rank(node: int, worker_group: WorkerGroup) -> int:
    """Return the first rank of a lost node; as if all nodes had equally many ranks if its store does not answer."""
    store: Any = worker_group.store
    with suppress(RuntimeError):
        if store.check([key := _first_rank_key(node)]):
            return int(store.get(key))
    return node * len(worker_group.workers)


def _handled_signals() -> list[signal.Signals]:
    """Return the signals that torchrun handles, `--signals-to-handle`; none outside the main thread."""
    names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    is_main = threading.current_thread() is threading.main_thread()
    return [signal.Signals[name.strip()] for name in names.split(",") if name and is_main]


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)
