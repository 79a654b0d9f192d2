"""Communication of a rank's watchdog with the other ranks, through the job's store.

Three keys of the store describe what happened. The first failure names a rank that raised, or whose process is gone.
An alarm names a rank that made no progress. A rank starts a roll call if its connection to another rank broke and no
rank has reported a failure; the ranks that do not answer the roll call are lost.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import final

from d9d_dist import DistributedContext
from d9d_dist.collectives.consensus import name_ranks
from d9d_dist.failures.first_failure import Failure, describe_lost_store, is_victim, name_first_failure, within
from d9d_dist.failures.peers import Peer
from d9d_dist.groups.side_channel import SideChannel
from d9d_loop.resilience.hang_report import HangReport, RankPlace, describe_hang

_INTERVAL = 0.25  # polling interval in seconds
_ANSWER_INTERVALS = 3.2  # polling intervals to wait for the locations of other ranks
_READ_INTERVALS = 5.0  # polling intervals to wait for the report of the rank that raised the alarm
_REPORT_INTERVALS = 6.0  # polling intervals in which the poller gets the report of an alarm
_ROLL_INTERVALS = 8.0  # polling intervals to wait for answers to a roll call; an idle machine answers in one interval
_ALARM, _ROLL_CALL = "alarm", "roll_call"  # store keys; the value is the first rank that raised the alarm or called
# Texts in the errors that gloo and NCCL raise if a collective times out while all connections are intact.
_TIMEOUTS = ("Timed out waiting", "collective operation timeout")
_LARGE_WORLD_SIZE = 1024  # number of ranks above which each rank polls the store less often


@final
class HangPoller:
    """Communication with the other ranks, in its own thread, which may block on the store.

    Attributes:
        alarm: Set by this rank's watcher when there was no progress within the timeout.
        lost: Report of a rank that failed or whose process died, or `None`.
        report: Report of an alarm of any rank, valid after `wait_for_report`.
        interval: Polling interval in seconds.
    """

    def __init__(
        self, ctx: DistributedContext, *, place: Callable[[], RankPlace], stuck_seconds: Callable[[], float]
    ) -> None:
        self.alarm, self._is_reported = threading.Event(), threading.Event()
        self.report = HangReport("")
        self.lost: HangReport | None = None
        self._rank, self._ranks = ctx.rank, range(ctx.world_size)
        self._place, self._stuck_seconds = place, stuck_seconds
        self._store_place = ctx.store_place
        self._channel = SideChannel(ctx, name="watchdog")
        self.interval = _INTERVAL * max(1.0, ctx.world_size / _LARGE_WORLD_SIZE)
        self._end = threading.Event()
        self._has_answered = False
        self._local_peers: list[Peer] = []
        self._thread = threading.Thread(target=self._poll, name="d9d-hang-poller", daemon=True)

    def hang(self) -> HangReport | None:
        """Return the report of a hang, or `None`. Waiting for a lost rank does not count as a hang."""
        return self.report if self._is_reported.is_set() and self.lost is None else None

    def wait_for_report(self) -> bool:
        """Wait for the report of an alarm for a limited time; return True if `report` has it."""
        return self._is_reported.wait(_REPORT_INTERVALS * self.interval)

    def start(self) -> None:
        """Start the thread."""
        self._local_peers = self._channel.peers_here()
        self._thread.start()

    def leave(self, *, has_finished: bool) -> None:
        """Stop the thread; if `has_finished`, mark this rank as finished for the other ranks."""
        self._end.set()
        self._thread.join(_REPORT_INTERVALS * self.interval)
        if has_finished and not self._thread.is_alive():
            try:
                self._channel.write(f"left/{self._rank}", "")
            except RuntimeError:  # rank 0 holds the store and may have exited already
                return

    def leave_store(self) -> None:
        """Mark that this process, which is about to exit, no longer needs the store; see `SideChannel.leave`."""
        self._channel.leave()

    def explain(self, error: BaseException) -> None:
        """Find the rank that failed first if the error of this rank is a broken connection; note it in the error.

        Other errors are published only when the context exits: before that, the other ranks would exit while this rank
        still finishes a save with them.
        """
        if is_victim(error):
            within(2 * _ROLL_INTERVALS * self.interval, lambda: self._find_cause(error))
        else:
            within(_READ_INTERVALS * self.interval, self._answer)

    def _poll(self) -> None:
        while not self.alarm.wait(self.interval) and not self._end.is_set():
            try:
                self._check_for_lost_ranks()
                if self._channel.has(_ROLL_CALL):
                    self._answer()
                if self._channel.has(_ALARM):
                    break
            except RuntimeError:
                # The store is unavailable; the process that holds it may have exited because of a lost rank. The
                # connection does not come back, and torch prints a stack at each further request.
                self._wait_without_store()
                break
        if self._end.is_set():
            return
        try:
            self._exchange_places()
        except RuntimeError:  # the store is unavailable
            self.report = self.describe_unresponsive_store()
        self._is_reported.set()

    def _wait_without_store(self) -> None:
        """Wait for an alarm of this rank or the end of the job, and look for dead processes on this machine."""
        while not self._end.is_set():
            if self.lost is None and (dead := self._dead_peers()):
                self.lost = _report_lost(Failure(dead[0].rank, _describe_dead(dead[0])))
            if self.alarm.wait(self.interval):
                return

    def describe_unresponsive_store(self) -> HangReport:
        """Return a report for an unresponsive store, from the processes of this machine. No collectives, no network."""
        lines = [f"no progress for {self._stuck_seconds():.1f} s. {describe_lost_store(self._store_place)}"]
        states = [(peer, peer.state()) for peer in self._local_peers]
        missing = [Failure(peer.rank, f"its {peer.describe()} {now}.") for peer, now in states if now != "runs"]
        lines += [f"Rank {each.rank} is missing: {each.text}" for each in missing]
        text = "\n".join([*lines, f"This rank is {self._place().describe()}."])
        return HangReport(text, missing[0] if missing else None)

    def _check_for_lost_ranks(self) -> None:
        """Set `lost` if a rank failed, or if its process died before it was marked as finished.

        The rank that finds a dead process on its own machine publishes it as a failure, unless there is one already.
        """
        failure = self._channel.first_failure()
        if failure is None:
            left = [peer for peer in self._dead_peers() if not self._channel.has(f"left/{peer.rank}")]
            if not left:
                return
            self._channel.publish_failure(left[0].rank, _describe_dead(left[0]), num_ended=1)
            failure = self._channel.first_failure()
        if failure is not None and failure.rank != self._rank:
            self.lost = _report_lost(failure)

    def _dead_peers(self) -> list[Peer]:
        return [peer for peer in self._local_peers if peer.state() == "is gone"]

    def _answer(self) -> None:
        """Answer a roll call, once."""
        if not self._has_answered:
            self._channel.write(f"present/{self._rank}", "")
            self._has_answered = True

    def _find_cause(self, error: BaseException) -> None:
        self._call_roll(is_late=any(text in str(error) for text in _TIMEOUTS))
        failure = self._channel.first_failure()
        if failure is not None and failure.rank == self._rank:
            error.add_note(f"This rank failed first: {failure.text}")
        elif failure is not None:
            name_first_failure(error, failure, rank=self._rank)

    def _call_roll(self, *, is_late: bool) -> None:
        """Publish the ranks that do not answer as the first failure, unless there is one.

        If all ranks answer, the network is published as the cause, except if `is_late`: then a rank did not join a
        collective, but all connections are intact.
        """
        caller = self._channel.write_first(_ROLL_CALL, str(self._rank))
        self._answer()
        keys = [f"present/{rank}" for rank in self._ranks] if caller == str(self._rank) else ["never"]
        self._wait_for(*keys, intervals=_ROLL_INTERVALS, also=lambda: self._channel.first_failure() is not None)
        if caller != str(self._rank) or self._channel.first_failure() is not None:
            return
        silent = [rank for rank in self._ranks if not self._channel.has(f"present/{rank}")]
        silent = [rank for rank in silent if not self._channel.has(f"left/{rank}")]
        if silent:
            hosts = ", ".join(sorted(set(self._channel.hosts_of(silent))))
            who = f"its process on {hosts} does" if not silent[1:] else f"{name_ranks(silent)} on {hosts} do"
            text = f"{who} not answer: killed, or the host is down or cut off from the network."
            self._channel.publish_failure(silent[0], text, num_ended=len(silent))
        elif not is_late:
            text = "a connection broke, but all ranks answer: the network between the hosts was interrupted."
            self._channel.publish_failure(self._rank, text)

    def _exchange_places(self) -> None:
        """Publish this rank's location. The rank with the first alarm writes the report, which the others read.

        If a rank is lost, set `lost` and return without a report: waiting for a lost rank is not a hang.
        """
        seconds = self._stuck_seconds()
        self._channel.write(f"place/{self._rank}", json.dumps(asdict(self._place())))
        alarm = self._channel.write_first(_ALARM, str(self._rank))
        self._check_for_lost_ranks()
        if self.lost is not None:
            return
        if alarm == str(self._rank):
            self._wait_for(*(f"place/{rank}" for rank in self._ranks), intervals=_ANSWER_INTERVALS)
            self.report = describe_hang(self._places(), seconds=seconds, states=self._states())
            self._channel.write("report", json.dumps(self.report))
        else:
            self._wait_for("report", intervals=_READ_INTERVALS)
            text, culprit = json.loads(self._channel.read("report") or "[null, null]")
            text = text or f"rank {alarm} reports no progress."
            self.report = HangReport(text, None if culprit is None else Failure(*culprit))

    def _wait_for(self, *keys: str, intervals: float, also: Callable[[], bool] = lambda: False) -> None:
        """Wait until all keys have a text or `also` returns True, for a limited time."""
        deadline = time.monotonic() + intervals * self.interval
        while not self._channel.has(*keys) and not also() and time.monotonic() < deadline:
            time.sleep(_INTERVAL / 10)

    def _places(self) -> dict[int, RankPlace | None]:
        texts = {rank: self._channel.read(f"place/{rank}") for rank in self._ranks}
        return {rank: None if text is None else RankPlace(**json.loads(text)) for rank, text in texts.items()}

    def _states(self) -> dict[int, str]:
        """Describe each rank for the report, in case it does not answer."""
        states = dict(zip(self._ranks, self._channel.hosts_of(self._ranks), strict=True))
        described = {
            rank: f"its process is stopped or holds the GIL, or {host} is down or cut off from the network"
            for rank, host in states.items()
        }
        for peer in self._local_peers:
            state = peer.state()
            described[peer.rank] = f"its {peer.describe()} {state if state != 'runs' else 'holds the GIL'}"
        return described


def _report_lost(failure: Failure) -> HangReport:
    return HangReport(f"rank {failure.rank} failed: {failure.text}", failure)


def _describe_dead(peer: Peer) -> str:
    return f"its {peer.describe()} is gone."
