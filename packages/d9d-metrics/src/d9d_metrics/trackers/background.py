"""Puts a queue and a thread between a run and a tracker, so that a tracker that is down or slow never costs a step."""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_metrics.trackers.outbox import Entry, GoBack, MemoryOutbox, Outbox, RunConfig, StepValues
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.spool import Spool
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Tracked

_LOGGER = logging.getLogger("d9d.metrics")
_CAPACITY = 10_000  # entries
_FORGET_NOTHING = 2**53


@final
class BackgroundTracker:
    """Hands everything to another tracker, in order, from a thread of its own.

    Whatever that tracker raises is an outage: it is closed, opened again after a while, told to `resume` after what it
    has, and given the entry that failed once more. Only a `UserError` is not tried again: at the opening it is raised
    by `resume`, later the entry is left out with a warning.

    Args:
        open_tracker: Makes the tracker; called in the thread, again after each outage.
        name: What messages call it.
        spool: Folder where values wait until they are delivered, and wait for the next start if they are not. Without
            one they wait in memory.
        start_seconds: How long `resume` waits for the tracker to be opened.
        close_seconds: How long `close`, and without a spool `flush`, waits for what is on its way.
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
        close_seconds: float = 30.0,
        retry_seconds: float = 1.0,
        longest_retry_seconds: float = 60.0,
    ) -> None:
        self._open_tracker, self._name = open_tracker, name
        self._outbox: Outbox = MemoryOutbox(_CAPACITY) if spool is None else Spool(spool, capacity=_CAPACITY)
        self._start_seconds, self._close_seconds = start_seconds, close_seconds
        self._retry_seconds, self._longest_retry_seconds = retry_seconds, longest_retry_seconds
        self._tracker: Tracker | None = None
        self._state = self._outbox.load_state()
        self._step = _FORGET_NOTHING
        self._is_resumed = bool(self._state)
        self._refusal: UserError | None = None
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
            return
        self._outbox.forget_after(step)
        self._state, self._step, self._is_resumed = dict(state) or self._state, step, True
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
        self._outbox.put(StepValues(step, dict(values)))

    def flush(self) -> None:
        """Wait until everything is in the spool, or with the tracker if there is none; not for one that is down."""
        if self._thread.ident is not None and not self._outbox.flush(self._close_seconds):
            _LOGGER.warning("the %s tracker is behind; what was logged last is not safe yet", self._name)

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the tracker's state; while it is not open yet, that of its last life."""
        return dict(self._state)

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
        except UserError as error:
            _LOGGER.warning("the %s tracker leaves out an entry: %s", self._name, error)
        self._is_resumed = True
        if not isinstance(entry, RunConfig):
            self._step = entry.step

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
