"""Watchdog that ends a job without progress, and reports the missing rank, the other ranks' locations and all stacks.

When a collective times out, its error does not name the missing rank. So each rank runs two threads besides the main
thread. The *watcher* checks the clock and the results of the poller; it never uses the network. The *poller*
communicates with the other ranks through the job's store. A rank without progress for its timeout raises an alarm in
the store. Every poller then writes the location of its main thread. The rank that raised the alarm writes a report of
the ranks that do not answer or are elsewhere.

A process whose native code holds the interpreter lock can run neither thread. The other ranks report that it does not
answer. The thread of `faulthandler`, which needs no interpreter lock, ends this process.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self, final

from d9d_dist import DistributedContext
from d9d_dist.failures.first_failure import Failure
from d9d_loop.resilience.exit_codes import ExitCode
from d9d_loop.resilience.hang_poller import HangPoller
from d9d_loop.resilience.hang_report import HangReport, RankPlace, describe_hang, main_thread_place
from d9d_loop.resilience.node_files import NodeFile, read_node_file

_INTERVAL = 0.25  # interval of the watcher in seconds
_EXIT_SECONDS = 1.5  # time for the main thread to exit by itself after a peer failed
_GIL_SECONDS = 1.5  # extra time before faulthandler ends a process in which a thread holds the GIL
_MARGIN_INTERVALS = 20.0  # polling intervals for an alarm, the answers and the report, on a busy machine
_LATE = 0.75  # fraction of a timeout after which an error may be the consequence of a hang


@dataclass(frozen=True, slots=True)
class _Progress:
    """Phase of the main thread, its start by the monotonic clock, and its timeout in seconds."""

    step: int
    doing: str
    since: float
    timeout: float


@final
class HangWatchdog:
    """Context manager that ends the process if the job makes no progress. Enter it on every rank.

    The main thread calls `beat` once per step, which only stores a few numbers. Without progress, the process exits
    with `ExitCode.HANG` at most 2 seconds after the timeout. If another rank fails, or its process on the same machine
    dies, the main thread may exit by itself. Otherwise, this process exits with `ExitCode.PEER_LOST` at most 2 seconds
    later. If a connection to another machine breaks, finding the lost rank takes at most 2 seconds more. A rank that
    hosts the job's store exits up to 5 seconds after the others.

    Beyond 1024 ranks these 2 seconds grow with the number of ranks, which limits the load on the store. All ranks must
    enter phases together: the first rank to time out ends the job.

    Args:
        ctx: The job's context. Its start-up timeout applies until the end of the first step, then its step timeout.
        on_exit: Called with the reason, and the rank that failed or is missing if it is known, before the watchdog ends
            the process.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        *,
        enabled: bool = True,
        on_exit: Callable[[str, Failure | None], None] | None = None,
    ) -> None:
        self._enabled, self._on_exit = enabled, on_exit
        self._rank, self._timeout = ctx.rank, ctx.timeouts.step.total_seconds()
        self._startup = ctx.timeouts.startup.total_seconds()
        self._progress = _Progress(0, "start-up", time.monotonic(), self._startup)
        self._end = threading.Event()
        self._poller = (
            HangPoller(ctx, place=self.place, stuck_seconds=self.stuck_seconds) if ctx.world_size > 1 else None
        )
        self._watcher = threading.Thread(target=self._watch, name="d9d-hang-watcher", daemon=True)

    def __enter__(self) -> Self:
        if self._enabled:
            if self._poller is not None:
                self._poller.start()
            self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop the threads. Unless an exception was raised, mark this rank as finished for the other ranks."""
        if not self._enabled:
            return
        if error is not None:
            self._prefer_report(error)
            if self._poller is not None:
                self._poller.explain(error)
        self._end.set()
        self._watcher.join()
        faulthandler.cancel_dump_traceback_later()
        if self._poller is not None:
            self._poller.leave(has_finished=error is None)

    @property
    def margin(self) -> timedelta:
        """Time to add to the step timeout in `ctx.set_timeout`, so that the watchdog reports before collectives fail.

        Zero for a single rank or a disabled watchdog.
        """
        if not self._enabled or self._poller is None:
            return timedelta(0)
        return timedelta(seconds=_MARGIN_INTERVALS * self._poller.interval)

    def beat(self, step: int, doing: str = "a step") -> None:
        """Record that step `step`, counted from 1, starts now. Local, and cheap.

        The start-up timeout also covers the first step, which compiles kernels, creates process groups and starts data
        workers.
        """
        limit = self._timeout if self._progress.step else self._startup
        self._progress = _Progress(step, doing, time.monotonic(), limit)

    @contextmanager
    def phase(self, doing: str, *, timeout: timedelta | None = None) -> Generator[None]:
        """Give a phase of the job its own name and timeout: a save, an evaluation, the handlers of an event.

        The default is the longer of the step timeout and the enclosing phase's timeout. After the body, the enclosing
        phase's timeout starts again.
        """
        before = self._progress
        limit = max(self._timeout, before.timeout) if timeout is None else timeout.total_seconds()
        self._progress = _Progress(before.step, doing, time.monotonic(), limit)
        try:
            yield
        finally:
            self._progress = _Progress(before.step, before.doing, time.monotonic(), before.timeout)

    def place(self) -> RankPlace:
        """Return the current location of the main thread."""
        progress = self._progress
        return main_thread_place(progress.step, progress.doing)

    def stuck_seconds(self) -> float:
        """Return the time since the last progress, in seconds."""
        return time.monotonic() - self._progress.since

    def _prefer_report(self, error: BaseException) -> None:
        """Exit with the report of a hang, if there is one.

        If a peer exits because of a hang, collectives on this rank fail; the report explains more than their error.
        """
        if self._poller is None or self._poller.lost is not None:
            return
        if self.stuck_seconds() < _LATE * self._progress.timeout:
            return
        self._poller.wait_for_report()
        if (hang := self._poller.hang()) is not None:
            self._end_process(hang._replace(text=f"{hang.text}\nIts step ended with {error!r}"), ExitCode.HANG)

    def _watch(self) -> None:
        """Check the clock and the results of the poller until the watchdog stops: the watcher's loop."""
        armed_for: _Progress | None = None
        while True:
            progress = self._progress
            if progress is not armed_for:
                left = progress.since + progress.timeout - time.monotonic() + _GIL_SECONDS
                faulthandler.dump_traceback_later(max(left, _INTERVAL), exit=True, file=sys.__stderr__ or sys.stderr)
                armed_for = progress
            if self._poller is not None:
                self._exit_if_reported(self._poller)
            if (lost_host := read_node_file(NodeFile.LOST_HOST)) is not None:
                self._end_lost(HangReport(lost_host))
            if self.stuck_seconds() > progress.timeout:
                self._end_hang()
            if self._end.wait(_INTERVAL):
                return

    def _exit_if_reported(self, poller: HangPoller) -> None:
        """Exit if a hang was reported, or if a rank is lost and the main thread does not exit by itself."""
        if (hang := poller.hang()) is not None:
            self._end_process(hang, ExitCode.HANG)
        if (lost := poller.lost) is not None and not self._end.wait(_EXIT_SECONDS):
            self._end_lost(lost)

    def _end_lost(self, report: HangReport) -> None:
        # A peer may have exited first because of a lost host, which is then the cause to report.
        # Every rank reads the lost host from its own node, so no rank needs the store.
        if (lost_host := read_node_file(NodeFile.LOST_HOST)) is not None:
            report = HangReport(lost_host)
        report = report._replace(text=f"{report.text}\nThis rank is {self.place().describe()}.")
        self._end_process(report, ExitCode.PEER_LOST, keep_store=lost_host is None)

    def _end_hang(self) -> None:
        # The timer of faulthandler must not end the process before the report is written.
        faulthandler.cancel_dump_traceback_later()
        if self._poller is None:
            self._end_process(describe_hang({self._rank: self.place()}, seconds=self.stuck_seconds()), ExitCode.HANG)
            return
        self._poller.alarm.set()
        is_reported = self._poller.wait_for_report()
        if self._poller.lost is not None:
            self._end_lost(self._poller.lost)
        self._end_process(
            self._poller.report if is_reported else self._poller.describe_unresponsive_store(), ExitCode.HANG
        )

    def _end_process(self, report: HangReport, code: ExitCode, *, keep_store: bool = True) -> None:
        """Print the reason, and for a hang all stacks, then exit immediately with `os._exit`.

        If `keep_store`, a rank that hosts the job's store first waits until the other ranks no longer need the store.
        """
        if self._end.is_set():  # the main thread has already left the watchdog's `with` block
            return
        out = sys.__stderr__ or sys.stderr
        print(f"d9d: rank {self._rank} exits: {report.text}", file=out, flush=True)
        if code == ExitCode.HANG:
            print(f"The stacks of rank {self._rank}:", file=out, flush=True)
            faulthandler.dump_traceback(file=out, all_threads=True)
        out.flush()
        if self._on_exit is not None:
            self._on_exit(*report)
        if self._poller is not None and keep_store:
            self._poller.leave_store()
        os._exit(code)
