"""Background thread and queue for a tracker, so that a failing or slow tracker does not delay steps."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from operator import index
from pathlib import Path
from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_metrics.trackers._outbox import Entry, MemoryOutbox, Outbox
from d9d_metrics.trackers._spool import Spool
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Tracked, supported

_LOGGER = logging.getLogger("d9d.metrics")
_CAPACITY = 10_000  # entries
_FLUSH_EVERY = 1000  # entries between forced flushes of the tracker; after a flush, the spool can be truncated
_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 1.0, 60.0  # the delay doubles with each consecutive failure
_NOT_DURABLE = "not_durable"  # key of the values in the checkpoint's state
_FORGET_NOTHING = 2**53


@final
class BackgroundTracker:
    """Tracker that forwards every call to another tracker, in order, from a background thread.

    Values logged before a checkpoint survive a failure of the job. `flush` makes them durable: in the spool, or without
    a spool through the tracker's own `flush`. If `flush` fails or times out, `state_dict` contains the values, and
    `resume` logs them again.

    After an exception the tracker is closed, opened again after a delay, resumed from its last step, and given the
    failed entry again. Only a `UserError` is not retried: if opening the tracker raises one, so does `resume`; if an
    entry causes one, the entry is dropped with a warning.

    Args:
        open_tracker: Function that creates the tracker; called in the background thread, again after each exception.
        name: Name of the tracker in log messages.
        spool: Folder that stores values until this or the next process delivers them. None: store in memory.
        start_seconds: Timeout of `resume`, which waits for the tracker to be opened.
        flush_seconds: Timeout of `flush`. After a timeout, `flush` waits again only once the tracker has made progress.
        close_seconds: Timeout of `close` for undelivered values.
    """

    def __init__(
        self,
        open_tracker: Callable[[], Tracker],
        *,
        name: str,
        spool: Path | None = None,
        start_seconds: float = 0.0,
        flush_seconds: float = 5.0,
        close_seconds: float = 30.0,
    ) -> None:
        self._open_tracker, self._name = open_tracker, name
        self._outbox: Outbox = MemoryOutbox(_CAPACITY) if spool is None else Spool(spool, capacity=_CAPACITY)
        self._start_seconds, self._flush_seconds, self._close_seconds = start_seconds, flush_seconds, close_seconds
        self._tracker: Tracker | None = None
        self._state = self._outbox.load_state()
        self._step = _FORGET_NOTHING
        self._is_resumed = bool(self._state)
        self._start_error: UserError | None = None
        self._not_durable: deque[Entry] = deque(maxlen=_CAPACITY)
        self._durable_of_step: list[Entry] = []  # of the last durable step, which may get more values
        self._num_unflushed = 0
        self._open_attempted, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._deliver_all, name=f"d9d-metrics-{name}", daemon=True)

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Continue a run and deliver the values that its last process left; for a started tracker, queue a rollback.

        Raises:
            UserError: If the tracker raised one within `start_seconds`.
        """
        if self._thread.ident is not None:
            self._start()
            self._outbox.put(Entry("resume", step))
            kept = [values for values in self._not_durable if values.step <= step]
            self._not_durable = deque(kept, maxlen=_CAPACITY)
            self._durable_of_step = [values for values in self._durable_of_step if values.step <= step]
            return
        state = dict(state)
        records: Any = state.pop(_NOT_DURABLE, [])
        from_checkpoint = [Entry.decode(record) for record in records]
        # The tracker may already have some of the checkpoint's values. Delete these, and log all of them again.
        first = min((values.step for values in from_checkpoint), default=step + 1)
        self._outbox.forget_after(first - 1)
        self._state, self._step, self._is_resumed = state or self._state, first - 1, True
        for values in from_checkpoint:
            self._log(values)
        self._start()
        self._open_attempted.wait(self._start_seconds)
        if self._start_error is not None:
            raise self._start_error

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Queue the configuration, with secrets redacted because the spool may write it to disk."""
        self._start()
        self._outbox.put(Entry("log_config", data=redact_secrets(config)))

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Queue supported values without waiting for the tracker; takes a few microseconds."""
        self._start()
        self._log(Entry("log", index(step), supported(values)))

    def flush(self) -> None:
        """Wait up to `flush_seconds` until queued values are durable in the spool, or else in the tracker."""
        if self._thread.ident is None:
            return
        self._outbox.put(Entry("flush"))
        if self._outbox.flush(self._flush_seconds):
            durable = [*self._durable_of_step, *self._not_durable]
            self._durable_of_step = [values for values in durable if values.step == durable[-1].step]
            self._not_durable.clear()
        else:
            _LOGGER.warning(
                "the %s tracker did not flush in time; its latest values are durable only in the checkpoint's state",
                self._name,
            )

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the tracker's last known state, and all values of the steps with values that are not durable."""
        if not self._not_durable:
            return dict(self._state)
        # A resume deletes the whole first step before it logs these values.
        first = [values for values in self._durable_of_step if values.step == self._not_durable[0].step]
        return {**self._state, _NOT_DURABLE: [values.encode() for values in (*first, *self._not_durable)]}

    def close(self) -> None:
        """Wait up to `close_seconds` for the tracker, or its last attempt; undelivered values stay in the spool."""
        self._outbox.close()
        self._closing.set()
        if self._thread.ident is None:
            return
        self._thread.join(timeout=self._close_seconds)
        if self._thread.is_alive():
            _LOGGER.warning("the %s tracker did not close within %g s", self._name, self._close_seconds)
        if rest := self._outbox.describe_rest():
            _LOGGER.warning("the %s tracker did not receive all values: %s", self._name, rest)
        else:
            self._not_durable.clear()

    def _log(self, values: Entry) -> None:
        self._outbox.put(values)
        self._not_durable.append(values)

    def _start(self) -> None:
        if self._closing.is_set():
            raise ValueError(f"the {self._name} tracker is closed")
        if self._thread.ident is None:
            self._thread.start()

    def _deliver_all(self) -> None:
        retry = _RETRY_SECONDS
        while True:
            is_last_attempt = self._closing.is_set()
            try:
                if self._tracker is None and self._is_resumed:
                    self._open()  # without waiting for an entry: `resume` must drop later steps now
                entry = self._outbox.head()
                if entry is None:
                    break
                self._deliver(entry)
            except Exception as error:  # a tracker exception must not end the run
                self._open_attempted.set()
                why = f"failed; retrying in {retry:g} s" if self._start_error is None else "cannot start"
                _LOGGER.warning("the %s tracker %s: %r", self._name, why, error)
                self._close_tracker()
                self._outbox.failed()
                if self._start_error is not None or is_last_attempt:
                    break
                self._closing.wait(retry)
                retry = min(2 * retry, _LONGEST_RETRY_SECONDS)
            else:
                self._outbox.delivered()
                if self._num_unflushed == 0:
                    self._outbox.flushed()
                retry = _RETRY_SECONDS
        self._close_tracker()

    def _open(self) -> Tracker:
        try:
            tracker = self._open_tracker()
            if self._is_resumed:
                tracker.resume(self._step, self._state)
        except UserError as error:
            self._start_error = error
            raise
        finally:
            self._open_attempted.set()
        self._tracker = tracker
        state = tracker.state_dict()
        if state and state != self._outbox.load_state():
            self._outbox.save_state(state)
        self._state = state or self._state
        return tracker

    def _deliver(self, entry: Entry) -> None:
        tracker = self._tracker or self._open()
        try:
            match entry.method:
                case "log":
                    tracker.log(entry.step, entry.data)
                case "log_config":
                    tracker.log_config(entry.data)
                case "resume":
                    self._roll_back(tracker, entry.step)
                case "flush":
                    tracker.flush()
        except UserError as error:
            _LOGGER.warning("the %s tracker rejected an entry, which is dropped: %s", self._name, error)
        self._is_resumed = True
        if entry.method in ("log", "resume"):
            self._step = entry.step
        self._num_unflushed = 0 if entry.method == "flush" else self._num_unflushed + 1
        if self._num_unflushed == _FLUSH_EVERY:
            tracker.flush()
            self._num_unflushed = 0

    def _roll_back(self, tracker: Tracker, step: int) -> None:
        """Resume the tracker from an earlier step; if that fails, close the tracker and open it again."""
        try:
            tracker.resume(step, self._state)
        except UserError:
            raise
        except Exception:
            self._close_tracker()
            self._step, self._is_resumed = step, True
            self._open()

    def _close_tracker(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            try:
                tracker.close()
            except Exception as error:  # a tracker exception must not end the run
                _LOGGER.warning("the %s tracker failed to close: %r", self._name, error)
            else:
                self._num_unflushed = 0
                self._outbox.flushed()
