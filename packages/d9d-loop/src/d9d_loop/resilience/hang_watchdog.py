"""Ends a job in which nothing moves, and says why: which rank is missing, where the others wait, all stacks.

A collective whose peer does not come tells nothing but that it timed out. So each rank has two threads beside the main
one. The *decider* looks at the clock and at what the other one has heard; it never touches the network. The *asker*
talks to the other ranks over the job's store: a rank in which nothing has moved for the timeout rings an alarm there,
every asker answers where its main thread is, and whoever rang writes down who does not answer or is somewhere else.

A process whose interpreter is locked by native code can run neither thread. The others name it as the one that does not
answer; itself it is ended by a third thread, of `faulthandler`, that needs no interpreter.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self, final

from d9d_dist import DistributedContext
from d9d_dist.peers import Peer
from d9d_dist.side_channel import SideChannel
from d9d_loop.resilience.exit_codes import ExitCode
from d9d_loop.resilience.hang_report import describe_hang, dump_place, parse_place
from d9d_loop.resilience.rank_place import RankPlace, main_thread_place

_INTERVAL = 0.25  # seconds between looks
_ANSWER_INTERVALS = 3.2  # in which other ranks say where they are
_HEAR_INTERVALS = 5.0  # in which the report of the rank that rang the alarm is there
_REPORT_INTERVALS = 6.0  # in which the asker hears what came of an alarm
_LEAVE_SECONDS = 1.5  # for the main thread to leave by itself when a peer has failed
_LOCKED_SECONDS = 1.5  # over the timeout, for a process whose interpreter is locked
_ALARM, _LOST = "alarm", "lost: "  # the key of an alarm, which holds the rank that rang it, or this and who is lost
_MARGIN_INTERVALS = 20.0  # for an alarm, its answers and the report, on a busy machine
_LATE = 0.75  # of a timeout, from when on what fails may have failed because of a hang
_LARGE_WORLD = 1024  # ranks, from which on each of them asks the store less often


@dataclass(frozen=True, slots=True)
class _Progress:
    """What the main thread does, and since when by the monotonic clock."""

    step: int
    doing: str
    since: float
    timeout: float


@final
class HangWatchdog:
    """Watches a job from `with` to the end of its block, on every rank.

    What is watched is `beat`, called once a step by the main thread: it costs an assignment. The process ends with
    `ExitCode.HANG` at most 2 seconds after the timeout, or with `ExitCode.PEER_LOST` at most 2 seconds after another
    rank failed or its process of the same machine is gone, if the main thread has not left by itself by then.

    Beyond 1024 ranks these 2 seconds grow with the number of ranks, so that the store is not asked too often. Ranks
    enter phases together: the first one whose timeout is over ends the job.

    Args:
        ctx: The job's context, whose timeouts are used: that of start-up to the end of the first step.
        enabled: Whether to watch at all.
    """

    def __init__(self, ctx: DistributedContext, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._rank, self._timeout = ctx.rank, ctx.timeouts.step.total_seconds()
        self._startup = ctx.timeouts.startup.total_seconds()
        self._progress = _Progress(0, "start-up", time.monotonic(), self._startup)
        self._end = threading.Event()
        self._asker = _Asker(ctx, self) if ctx.world_size > 1 else None
        self._decider = threading.Thread(target=self._decide, name="d9d-hang-decider", daemon=True)

    def __enter__(self) -> Self:
        """Begin to watch."""
        if self._enabled:
            if self._asker is not None:
                self._asker.start()
            self._decider.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End watching. The other ranks are told that this one has left in good order, or that it has not."""
        if not self._enabled:
            return
        if error is not None:
            self._prefer_report(error)
        self._end.set()
        self._decider.join()
        faulthandler.cancel_dump_traceback_later()
        if self._asker is not None:
            self._asker.leave(in_order=error is None)

    @property
    def margin(self) -> timedelta:
        """How much longer than a step collectives are to wait: nothing is known any more once they fail by themselves.

        Give it to `ctx.set_timeout` on top of the step's limit.
        """
        if not self._enabled or self._asker is None:
            return timedelta(0)
        return timedelta(seconds=_MARGIN_INTERVALS * self._asker.interval)

    def beat(self, step: int, doing: str = "a step") -> None:
        """Say that the main thread moves. Local, and cheap.

        The first step makes kernels and process groups, and waits for data workers that import: it has start-up's time.

        Args:
            step: The step that it works on, counted from 1.
            doing: On what, for messages.
        """
        limit = self._timeout if self._progress.step else self._startup
        self._progress = _Progress(step, doing, time.monotonic(), limit)

    @contextmanager
    def phase(self, doing: str, *, timeout: timedelta | None = None) -> Generator[None]:
        """Give a part of the job a name, and a time limit of its own: a save, an evaluation, the handlers of an event.

        What is around it begins a new time limit when it ends.

        Args:
            doing: Its name, for messages: "a save".
            timeout: Its limit; by default, that of a step, or that of the phase around it if that is longer.
        """
        before = self._progress
        limit = max(self._timeout, before.timeout) if timeout is None else timeout.total_seconds()
        self._progress = _Progress(before.step, doing, time.monotonic(), limit)
        try:
            yield
        finally:
            self._progress = _Progress(before.step, before.doing, time.monotonic(), before.timeout)

    def place(self) -> RankPlace:
        """Where the main thread is."""
        progress = self._progress
        return main_thread_place(progress.step, progress.doing)

    def stuck_seconds(self) -> float:
        """For how long nothing has moved."""
        return time.monotonic() - self._progress.since

    def _prefer_report(self, error: BaseException) -> None:
        """End by the report of a hang, if one is under way, rather than by what a peer that ended so made fail here."""
        if self._asker is None or self._asker.lost is not None:
            return
        if self.stuck_seconds() < _LATE * self._progress.timeout:
            return
        self._asker.report.wait(_REPORT_INTERVALS * self._asker.interval)
        if (hang := self._asker.hang()) is not None:
            self._end_process(f"{hang}\nIts step ended with {error!r}", ExitCode.HANG)

    def _decide(self) -> None:
        """Look at the clock and at what the asker has heard, until the end."""
        armed_for: _Progress | None = None
        while True:
            progress = self._progress
            if progress is not armed_for:
                left = progress.since + progress.timeout - time.monotonic() + _LOCKED_SECONDS
                faulthandler.dump_traceback_later(max(left, _INTERVAL), exit=True, file=sys.__stderr__ or sys.stderr)
                armed_for = progress
            if self._asker is not None:
                self._heed(self._asker)
            if self.stuck_seconds() > progress.timeout:
                self._end_hang()
            if self._end.wait(_INTERVAL):
                return

    def _heed(self, asker: "_Asker") -> None:
        """End the process if another rank rang the alarm, or failed and this one does not leave by itself."""
        if (hang := asker.hang()) is not None:
            self._end_process(hang, ExitCode.HANG)
        if (lost := asker.lost) is not None and not self._end.wait(_LEAVE_SECONDS):
            self._end_lost(lost)

    def _end_lost(self, why: str) -> None:
        self._end_process(f"{why}\nThis rank is {self.place().describe()}.", ExitCode.PEER_LOST)

    def _end_hang(self) -> None:
        # What has armed itself for a locked interpreter must not end the process before it has said why.
        faulthandler.cancel_dump_traceback_later()
        if self._asker is None:
            self._end_process(describe_hang({self._rank: self.place()}, seconds=self.stuck_seconds()), ExitCode.HANG)
            return
        self._asker.alarm.set()
        heard = self._asker.report.wait(_REPORT_INTERVALS * self._asker.interval)
        if self._asker.lost is not None:
            self._end_lost(self._asker.lost)
        self._end_process(self._asker.text if heard else self._asker.describe_silence(), ExitCode.HANG)

    def _end_process(self, text: str, code: ExitCode) -> None:
        """Say why, of a hang with all stacks, and end without waiting for anything."""
        if self._end.is_set():  # the main thread has left after all
            return
        out = sys.__stderr__ or sys.stderr
        print(f"d9d: rank {self._rank} ends: {text}", file=out, flush=True)
        if code == ExitCode.HANG:
            print(f"The stacks of rank {self._rank}:", file=out, flush=True)
            faulthandler.dump_traceback(file=out, all_threads=True)
        out.flush()
        os._exit(code)


class _Asker:
    """Talks to the other ranks, in a thread of its own, which may wait for the store as long as it likes.

    Attributes:
        alarm: Set by this rank's decider when nothing has moved for the timeout.
        report: Set when `text` says what came of an alarm, this rank's or another's.
        text: What came of it.
        lost: What happened to a peer that failed or is gone, if one did.
        interval: Seconds between two questions to the store.
    """

    def __init__(self, ctx: DistributedContext, watchdog: HangWatchdog) -> None:
        self.alarm, self.report = threading.Event(), threading.Event()
        self.text = ""
        self.lost: str | None = None
        self._rank, self._ranks = ctx.rank, range(ctx.world_size)
        self._watchdog = watchdog
        self._channel = SideChannel(ctx, name="watchdog")
        self.interval = _INTERVAL * max(1.0, ctx.world_size / _LARGE_WORLD)
        self._end = threading.Event()
        self._here: list[Peer] = []
        self._thread = threading.Thread(target=self._ask, name="d9d-hang-asker", daemon=True)

    def hang(self) -> str | None:
        """The report of a hang, if there is one. That the others wait for a rank which is lost is none."""
        return self.text if self.report.is_set() and self.lost is None else None

    def start(self) -> None:
        self._here = self._channel.peers_here()
        self._thread.start()

    def leave(self, *, in_order: bool) -> None:
        self._end.set()
        self._thread.join(_REPORT_INTERVALS * self.interval)
        if in_order and not self._thread.is_alive():
            try:
                self._channel.write(f"left/{self._rank}", "")
            except RuntimeError:  # rank 0 holds the store and may have left before
                return

    def _ask(self) -> None:
        while not self.alarm.wait(self.interval) and not self._end.is_set():
            try:
                alarm = self._channel.read(_ALARM)
                if alarm is not None and not alarm.startswith(_LOST):
                    break
                self._look_for_lost(alarm)
            except RuntimeError:
                # Without the store, which may have gone with a rank that left because of what was heard before.
                if self.lost is None and (gone := self._gone()):
                    self.lost = _describe_gone(gone[0])
        if self._end.is_set():
            return
        try:
            self._tell_and_hear()
        except RuntimeError:  # the store is gone
            self.text = self.describe_silence()
        self.report.set()

    def describe_silence(self) -> str:
        """What can be said when the store does not answer: what this machine shows. No collectives, no network."""
        lines = [
            "no progress, and the job's store does not answer either: the process that holds it, which is rank 0 or "
            "the launcher, is stopped, gone, or too slow."
        ]
        states = [(peer, peer.state()) for peer in self._here]
        lines += [f"Rank {peer.rank} is missing: its {peer.describe()} {now}." for peer, now in states if now != "runs"]
        return "\n".join([*lines, f"This rank is {self._watchdog.place().describe()}."])

    def _look_for_lost(self, alarm: str | None) -> None:
        """Hear of a rank that failed; or find one whose process is gone without having left, and tell the others."""
        left = [peer for peer in self._gone() if not self._channel.has(f"left/{peer.rank}")]
        if left and alarm is None:
            alarm = self._channel.write_first(_ALARM, _LOST + _describe_gone(left[0]))
        failure = self._channel.first_failure()
        if failure is not None and failure[0] != self._rank:
            self.lost = f"rank {failure[0]} failed: {failure[1]}"
        elif alarm is not None and alarm.startswith(_LOST):
            self.lost = alarm.removeprefix(_LOST)

    def _gone(self) -> list[Peer]:
        return [peer for peer in self._here if peer.state() == "is gone"]

    def _tell_and_hear(self) -> None:
        """Say where this rank is; as the first to ring the alarm, write the report, else read it.

        Unless the others wait for a rank that failed or is gone: that is what happened, and no hang.
        """
        seconds = self._watchdog.stuck_seconds()
        self._channel.write(f"place/{self._rank}", dump_place(self._watchdog.place()))
        alarm = self._channel.write_first(_ALARM, str(self._rank))
        self._look_for_lost(alarm)
        if self.lost is not None:
            return
        if alarm == str(self._rank):
            self._wait_for(*(f"place/{rank}" for rank in self._ranks), intervals=_ANSWER_INTERVALS)
            self.text = describe_hang(self._places(), seconds=seconds, states=self._states())
            self._channel.write("report", self.text)
        else:
            self._wait_for("report", intervals=_HEAR_INTERVALS)
            self.text = self._channel.read("report") or f"rank {alarm} says that nothing moves."

    def _wait_for(self, *keys: str, intervals: float) -> None:
        deadline = time.monotonic() + intervals * self.interval
        while not self._channel.has(*keys) and time.monotonic() < deadline:
            time.sleep(_INTERVAL / 10)

    def _places(self) -> dict[int, RankPlace | None]:
        texts = {rank: self._channel.read(f"place/{rank}") for rank in self._ranks}
        return {rank: None if text is None else parse_place(text) for rank, text in texts.items()}

    def _states(self) -> dict[int, str]:
        states = {peer.rank: (peer, peer.state()) for peer in self._here}
        return {
            rank: f"its {peer.describe()} {state if state != 'runs' else 'holds the lock of the interpreter'}"
            for rank, (peer, state) in states.items()
        }


def _describe_gone(peer: Peer) -> str:
    return f"rank {peer.rank} is lost: its {peer.describe()} is gone."
