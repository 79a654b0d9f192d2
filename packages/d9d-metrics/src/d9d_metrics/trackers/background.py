"""Puts a queue and a thread between a run and a tracker, so that a tracker that is down or slow never costs a step."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_metrics.trackers.outbox import Entry, Flush, GoBack, MemoryOutbox, Outbox, RunConfig, StepValues
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.spool import Spool
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Tracked, from_json, to_json

_LOGGER = logging.getLogger("d9d.metrics")
_CAPACITY = 10_000  # entries
_FLUSH_EVERY = 1000  # entries, after which a tracker is flushed though nobody asked: a spool must not grow for ever
_NOT_DURABLE = "not_durable"  # the key of values that travel in a checkpoint
_FORGET_NOTHING = 2**53


@final
class BackgroundTracker:
    """Hands everything to another tracker, in order, from a thread of its own.

    What was logged before a checkpoint is not lost with the job. `flush` makes it durable: in the spool, or by the
    tracker's own `flush`. If that fails or takes too long, `state_dict` has the values themselves, for the checkpoint,
    and `resume` logs them again.

    Whatever that tracker raises is an outage: it is closed, opened again after a while, told to `resume` after what it
    has, and given the entry that failed once more. Only a `UserError` is not tried again: at the opening it is raised
    by `resume`, later the entry is left out with a warning.

    Args:
        open_tracker: Makes the tracker; called in the thread, again after each outage.
        name: What messages call it.
        spool: Folder where values wait until they are delivered, and wait for the next start if they are not. Without
            one they wait in memory.
        start_seconds: How long `resume` waits for the tracker to be opened.
        flush_seconds: How long `flush` waits; not again for a tracker that has done nothing since it was waited for.
        close_seconds: How long `close` waits for what is on its way.
        retry_seconds: The time until a tracker that failed is tried again; it doubles from failure to failure.
        longest_retry_seconds: What it doubles up to.
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
        retry_seconds: float = 1.0,
        longest_retry_seconds: float = 60.0,
    ) -> None:
        self._open_tracker, self._name = open_tracker, name
        self._outbox: Outbox = MemoryOutbox(_CAPACITY) if spool is None else Spool(spool, capacity=_CAPACITY)
        self._start_seconds, self._flush_seconds, self._close_seconds = start_seconds, flush_seconds, close_seconds
        self._retry_seconds, self._longest_retry_seconds = retry_seconds, longest_retry_seconds
        self._tracker: Tracker | None = None
        self._state = self._outbox.load_state()
        self._step = _FORGET_NOTHING
        self._is_resumed = bool(self._state)
        self._refusal: UserError | None = None
        self._not_durable: deque[StepValues] = deque(maxlen=_CAPACITY)
        self._num_unflushed = 0
        self._was_tried, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._deliver_all, name=f"d9d-metrics-{name}", daemon=True)

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Continue a run, with what its last life did not deliver; or go back in the order of what is handed on.

        Raises:
            UserError: If the tracker refused in time.
        """
        if self._thread.ident is not None:
            self._start()
            self._outbox.put(GoBack(step))
            kept = [values for values in self._not_durable if values.step <= step]
            self._not_durable = deque(kept, maxlen=_CAPACITY)
            return
        state = dict(state)
        carried = _decoded(state.pop(_NOT_DURABLE, []))
        # The tracker may have got some of the carried values after all: it forgets them, and gets all of them again.
        first = min((values.step for values in carried), default=step + 1)
        self._outbox.forget_after(first - 1)
        self._state, self._step, self._is_resumed = state or self._state, first - 1, True
        for values in carried:
            self._log(values)
        self._start()
        self._was_tried.wait(self._start_seconds)
        if self._refusal is not None:
            raise self._refusal

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Hand on the configuration, its secrets redacted: it may be written to the disk on its way."""
        self._start()
        self._outbox.put(RunConfig(redact_secrets(config)))

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Hand on values; takes a few microseconds, whatever the tracker does."""
        self._start()
        self._log(StepValues(step, dict(values)))

    def flush(self) -> None:
        """Wait for the disk: that of the spool, or the tracker's if there is none; not for a tracker that is down."""
        if self._thread.ident is None:
            return
        self._outbox.put(Flush())
        if self._outbox.flush(self._flush_seconds):
            self._not_durable.clear()
        else:
            _LOGGER.warning("the %s tracker is behind; what was logged last is not safe without its state", self._name)

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the tracker's state, of its last life while it is not open yet; and values that are not durable."""
        not_durable = {_NOT_DURABLE: _encoded(self._not_durable)} if self._not_durable else {}
        return {**self._state, **not_durable}

    def close(self) -> None:
        """Give the tracker some time for what is on its way; what it does not take then stays in the spool."""
        self._outbox.close()
        self._closing.set()
        if self._thread.ident is None:
            return
        self._thread.join(timeout=self._close_seconds)
        if self._thread.is_alive():
            _LOGGER.warning("the %s tracker does not end; it is left alone", self._name)
        if rest := self._outbox.describe_rest():
            _LOGGER.warning("the %s tracker did not take everything: %s", self._name, rest)
        else:
            self._not_durable.clear()

    def _log(self, values: StepValues) -> None:
        self._outbox.put(values)
        self._not_durable.append(values)

    def _start(self) -> None:
        if self._closing.is_set():
            raise ValueError(f"the {self._name} tracker is closed")
        if self._thread.ident is None:
            self._thread.start()

    def _deliver_all(self) -> None:
        """What the thread does."""
        retry = self._retry_seconds
        while True:
            try:
                if self._tracker is None and self._is_resumed:
                    self._open()  # at once, so that what a resumed run forgets is forgotten now
                entry = self._outbox.head()
                if entry is None:
                    break
                self._deliver(entry)
            except Exception as error:  # whatever a tracker raises, the run goes on
                self._after_failure(error, retry)
                self._outbox.failed()
                if self._refusal is not None or self._closing.is_set():
                    break
                self._closing.wait(retry)
                retry = min(2 * retry, self._longest_retry_seconds)
            else:
                self._outbox.delivered()
                if self._num_unflushed == 0:
                    self._outbox.flushed()
                retry = self._retry_seconds
        self._close_tracker()

    def _open(self) -> Tracker:
        try:
            tracker = self._open_tracker()
            if self._is_resumed:
                tracker.resume(self._step, self._state)
        except UserError as error:
            self._refusal = error
            raise
        finally:
            self._was_tried.set()
        self._tracker = tracker
        self._keep_state()
        return tracker

    def _keep_state(self) -> None:
        assert self._tracker is not None
        state = self._tracker.state_dict()
        if state and state != self._outbox.load_state():
            self._outbox.save_state(state)
        self._state = state or self._state

    def _deliver(self, entry: Entry) -> None:
        tracker = self._tracker or self._open()
        try:
            match entry:
                case StepValues(step, values):
                    tracker.log(step, values)
                case RunConfig(config):
                    tracker.log_config(config)
                case GoBack(step):
                    self._go_back(tracker, step)
                case Flush():
                    tracker.flush()
        except UserError as error:
            _LOGGER.warning("the %s tracker leaves out an entry: %s", self._name, error)
        self._is_resumed = True
        if isinstance(entry, StepValues | GoBack):
            self._step = entry.step
        self._num_unflushed = 0 if isinstance(entry, Flush) else self._num_unflushed + 1
        if self._num_unflushed == _FLUSH_EVERY:
            tracker.flush()
            self._num_unflushed = 0

    def _go_back(self, tracker: Tracker, step: int) -> None:
        """Resume the tracker there; one that can be resumed only at its start is opened anew."""
        try:
            tracker.resume(step, self._state)
        except UserError:
            raise
        except Exception:
            self._close_tracker()
            self._step, self._is_resumed = step, True
            self._open()

    def _after_failure(self, error: Exception, retry: float) -> None:
        self._was_tried.set()
        if self._refusal is not None:
            _LOGGER.warning("the %s tracker refuses to start: %s", self._name, error)
        else:
            _LOGGER.warning("the %s tracker failed and is tried again in %g s: %r", self._name, retry, error)
        self._close_tracker()

    def _close_tracker(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            try:
                tracker.close()
            except Exception as error:  # the run does not end with its tracker
                _LOGGER.warning("the %s tracker failed to close: %r", self._name, error)
            else:
                self._num_unflushed = 0
                self._outbox.flushed()


def _encoded(entries: Iterable[StepValues]) -> list[JsonValue]:
    return [[step, {name: to_json(value) for name, value in values.items()}] for step, values in entries]


def _decoded(encoded: Any) -> list[StepValues]:
    return [StepValues(step, {name: from_json(value) for name, value in values.items()}) for step, values in encoded]
