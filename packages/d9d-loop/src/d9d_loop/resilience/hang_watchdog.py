"""Watchdog that ends a job without progress, and reports the missing rank, the location of the others, and all stacks.

When a collective times out, its error does not name the missing rank. So each rank runs two threads beside the main
thread. The *watcher* checks the clock and the results of the poller; it never uses the network. The *poller*
communicates with the other ranks through the job's store. A rank without progress for its timeout raises an alarm in
the store. Every poller then writes the location of its main thread. The rank that raised the alarm writes a report of
the ranks that do not answer or are elsewhere.

A process whose native code holds the interpreter lock can run neither thread. The other ranks report that it does not
answer. The thread of `faulthandler`, which needs no interpreter lock, ends the process itself.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self, final

from d9d_dist import DistributedContext
from d9d_dist.peers import Peer
from d9d_dist.side_channel import SideChannel
from d9d_loop.resilience.exit_codes import ExitCode
from d9d_loop.resilience.hang_report import describe_hang
from d9d_loop.resilience.rank_place import RankPlace, main_thread_place

_INTERVAL = 0.25  # polling interval in seconds
_ANSWER_INTERVALS = 3.2  # polling intervals to wait for the locations of other ranks
_READ_INTERVALS = 5.0  # polling intervals to wait for the report of the rank that raised the alarm
_REPORT_INTERVALS = 6.0  # polling intervals in which the poller gets the report of an alarm
_EXIT_SECONDS = 1.5  # time for the main thread to exit by itself after a peer failed
_GIL_SECONDS = 1.5  # time after the timeout, for a process whose interpreter lock is held
_ALARM, _LOST = "alarm", "lost: "  # key of an alarm; its value is the rank that raised it, or `_LOST` and a description
_MARGIN_INTERVALS = 20.0  # polling intervals for an alarm, the answers and the report, on a busy machine
_LATE = 0.75  # fraction of a timeout after which an error may be the consequence of a hang
_LARGE_WORLD_SIZE = 1024  # number of ranks above which each rank polls the store less often


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
    later.

    Beyond 1024 ranks these 2 seconds grow with the number of ranks, which limits the load on the store. All ranks must
    enter phases together: the first rank to time out ends the job.

    Args:
        ctx: The job's context. Its start-up timeout applies until the end of the first step, then its step timeout.
    """

    def __init__(self, ctx: DistributedContext, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._rank, self._timeout = ctx.rank, ctx.timeouts.step.total_seconds()
        self._startup = ctx.timeouts.startup.total_seconds()
        self._progress = _Progress(0, "start-up", time.monotonic(), self._startup)
        self._end = threading.Event()
        self._poller = _Poller(ctx, self) if ctx.world_size > 1 else None
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
        self._poller.report.wait(_REPORT_INTERVALS * self._poller.interval)
        if (hang := self._poller.hang()) is not None:
            self._end_process(f"{hang}\nIts step ended with {error!r}", ExitCode.HANG)

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
            if self.stuck_seconds() > progress.timeout:
                self._end_hang()
            if self._end.wait(_INTERVAL):
                return

    def _exit_if_reported(self, poller: "_Poller") -> None:
        """Exit if there is the report of a hang, or if a rank is lost and the main thread does not exit by itself."""
        if (hang := poller.hang()) is not None:
            self._end_process(hang, ExitCode.HANG)
        if (lost := poller.lost) is not None and not self._end.wait(_EXIT_SECONDS):
            self._end_lost(lost)

    def _end_lost(self, why: str) -> None:
        self._end_process(f"{why}\nThis rank is {self.place().describe()}.", ExitCode.PEER_LOST)

    def _end_hang(self) -> None:
        # The timer of faulthandler must not end the process before the report is written.
        faulthandler.cancel_dump_traceback_later()
        if self._poller is None:
            self._end_process(describe_hang({self._rank: self.place()}, seconds=self.stuck_seconds()), ExitCode.HANG)
            return
        self._poller.alarm.set()
        is_reported = self._poller.report.wait(_REPORT_INTERVALS * self._poller.interval)
        if self._poller.lost is not None:
            self._end_lost(self._poller.lost)
        self._end_process(
            self._poller.text if is_reported else self._poller.describe_unresponsive_store(), ExitCode.HANG
        )

    def _end_process(self, text: str, code: ExitCode) -> None:
        """Print the reason, and for a hang all stacks, then exit immediately with `os._exit`."""
        if self._end.is_set():  # the main thread has already left the watchdog's `with` block
            return
        out = sys.__stderr__ or sys.stderr
        print(f"d9d: rank {self._rank} exits: {text}", file=out, flush=True)
        if code == ExitCode.HANG:
            print(f"The stacks of rank {self._rank}:", file=out, flush=True)
            faulthandler.dump_traceback(file=out, all_threads=True)
        out.flush()
        os._exit(code)


class _Poller:
    """Communication with the other ranks, in its own thread, which may block on the store.

    Attributes:
        alarm: Set by this rank's watcher when there was no progress for the timeout.
        report: Set when `text` is the final report of an alarm of any rank.
        lost: Description of a peer that failed or whose process died, or `None`.
    """

    def __init__(self, ctx: DistributedContext, watchdog: HangWatchdog) -> None:
        self.alarm, self.report = threading.Event(), threading.Event()
        self.text = ""
        self.lost: str | None = None
        self._rank, self._ranks = ctx.rank, range(ctx.world_size)
        self._watchdog = watchdog
        self._channel = SideChannel(ctx, name="watchdog")
        self.interval = _INTERVAL * max(1.0, ctx.world_size / _LARGE_WORLD_SIZE)
        self._end = threading.Event()
        self._local_peers: list[Peer] = []
        self._thread = threading.Thread(target=self._poll, name="d9d-hang-poller", daemon=True)

    def hang(self) -> str | None:
        """Return the report of a hang, or `None`. Waiting for a lost rank does not count as a hang."""
        return self.text if self.report.is_set() and self.lost is None else None

    def start(self) -> None:
        self._local_peers = self._channel.peers_here()
        self._thread.start()

    def leave(self, *, has_finished: bool) -> None:
        self._end.set()
        self._thread.join(_REPORT_INTERVALS * self.interval)
        if has_finished and not self._thread.is_alive():
            try:
                self._channel.write(f"left/{self._rank}", "")
            except RuntimeError:  # rank 0 holds the store and may have exited already
                return

    def _poll(self) -> None:
        while not self.alarm.wait(self.interval) and not self._end.is_set():
            try:
                alarm = self._channel.read(_ALARM)
                if alarm is not None and not alarm.startswith(_LOST):
                    break
                self._check_for_lost_ranks(alarm)
            except RuntimeError:
                # The store is unavailable; the process that holds it may have exited because of a lost rank.
                if self.lost is None and (dead := self._dead_peers()):
                    self.lost = _describe_dead(dead[0])
        if self._end.is_set():
            return
        try:
            self._exchange_places()
        except RuntimeError:  # the store is unavailable
            self.text = self.describe_unresponsive_store()
        self.report.set()

    def describe_unresponsive_store(self) -> str:
        """Return a report for an unresponsive store, from the processes of this machine. No collectives, no network."""
        lines = [
            "no progress, and the job's store does not answer either: the process that hosts it, rank 0 or "
            "the launcher, is stopped, dead, or too slow."
        ]
        states = [(peer, peer.state()) for peer in self._local_peers]
        lines += [f"Rank {peer.rank} is missing: its {peer.describe()} {now}." for peer, now in states if now != "runs"]
        return "\n".join([*lines, f"This rank is {self._watchdog.place().describe()}."])

    def _check_for_lost_ranks(self, alarm: str | None) -> None:
        """Set `lost` if a rank failed, or if its process died before it was marked as finished.

        The rank that finds a dead process on its own machine publishes it as an alarm, unless there is one already.
        """
        left = [peer for peer in self._dead_peers() if not self._channel.has(f"left/{peer.rank}")]
        if left and alarm is None:
            alarm = self._channel.write_first(_ALARM, _LOST + _describe_dead(left[0]))
        failure = self._channel.first_failure()
        if failure is not None and failure[0] != self._rank:
            self.lost = f"rank {failure[0]} failed: {failure[1]}"
        elif alarm is not None and alarm.startswith(_LOST):
            self.lost = alarm.removeprefix(_LOST)

    def _dead_peers(self) -> list[Peer]:
        return [peer for peer in self._local_peers if peer.state() == "is gone"]

    def _exchange_places(self) -> None:
        """Publish this rank's location, then write the report if this rank raised the alarm first, else read it.

        If a rank is lost, set `lost` and return without a report: the other ranks wait for it, which is not a hang.
        """
        seconds = self._watchdog.stuck_seconds()
        self._channel.write(f"place/{self._rank}", json.dumps(asdict(self._watchdog.place())))
        alarm = self._channel.write_first(_ALARM, str(self._rank))
        self._check_for_lost_ranks(alarm)
        if self.lost is not None:
            return
        if alarm == str(self._rank):
            self._wait_for(*(f"place/{rank}" for rank in self._ranks), intervals=_ANSWER_INTERVALS)
            self.text = describe_hang(self._places(), seconds=seconds, states=self._states())
            self._channel.write("report", self.text)
        else:
            self._wait_for("report", intervals=_READ_INTERVALS)
            self.text = self._channel.read("report") or f"rank {alarm} reports no progress."

    def _wait_for(self, *keys: str, intervals: float) -> None:
        deadline = time.monotonic() + intervals * self.interval
        while not self._channel.has(*keys) and time.monotonic() < deadline:
            time.sleep(_INTERVAL / 10)

    def _places(self) -> dict[int, RankPlace | None]:
        texts = {rank: self._channel.read(f"place/{rank}") for rank in self._ranks}
        return {rank: None if text is None else RankPlace(**json.loads(text)) for rank, text in texts.items()}

    def _states(self) -> dict[int, str]:
        states = {peer.rank: (peer, peer.state()) for peer in self._local_peers}
        return {
            rank: f"its {peer.describe()} {state if state != 'runs' else 'holds the GIL'}"
            for rank, (peer, state) in states.items()
        }


def _describe_dead(peer: Peer) -> str:
    return f"rank {peer.rank} is lost: its {peer.describe()} is gone."
