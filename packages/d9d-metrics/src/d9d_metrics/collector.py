"""Collection of metric values in a background thread, which does not block training steps."""

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from d9d_metrics.metric import Metric
from d9d_metrics.sync import MetricSync, PendingSync, read_values

_JOIN_SECONDS_AFTER_ERROR = 1.0


@final
class MetricCollector(AbstractContextManager["MetricCollector"]):
    """Collector that reduces metrics and delivers their values from a background thread, in step order.

    `collect` copies the state and starts its all-reduce on the calling thread, so every rank issues its collectives in
    the same order. On an accelerator the background thread waits for the all-reduce on its own stream, while the step's
    stream continues; on CPU the thread waits. `collect` blocks while `max_lag` collections are undelivered.

    Use the collector as a context manager, or call `close`.

    Args:
        metrics: Metrics by name, as for `sync_metrics`. Each collection resets them.
        over: Process group to reduce over (flatten a mesh to one axis); `None` for only this process.
        deliver: Function called with a step and its values in the background thread, e.g. the `log` of a tracker. The
            next `collect`, `flush` or `close` of this rank raises its exception. `BackgroundTracker.log` does not raise
            the tracker's errors.
        device: Device of the metrics and of the values passed to `collect`; by default the metrics' device.
        max_lag: Largest number of undelivered collections.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        over: ProcessGroup | None,
        deliver: Callable[[int, Mapping[str, float]], object],
        *,
        device: torch.device | None = None,
        max_lag: int = 2,
    ) -> None:
        assert max_lag >= 1
        self._metrics, self._deliver = dict(metrics), deliver
        self._sync = MetricSync(metrics, over)
        devices = (each.value.device for metric in metrics.values() for each in metric.accumulators().values())
        self._device = next(devices, torch.device("cpu")) if device is None else device
        self._collections: queue.Queue[_Collection | None] = queue.Queue()
        self._free = threading.Semaphore(max_lag)
        self._failure: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._deliver_all, name="d9d-metrics-collector", daemon=True)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the collector; after an exception in the body, wait one second at most and raise nothing."""
        if error is None:
            self.close()
        else:
            # A running all-reduce may wait for a rank that failed.
            self._end(_JOIN_SECONDS_AFTER_ERROR)

    def collect(self, step: int, values: Mapping[str, Tensor | float] | None = None) -> None:
        """Start to collect the metrics, and reset them.

        Collective: issues the all-reduce of `sync_metrics`, without waiting for it. `values` are numbers, or scalar
        tensors on the collector's device, already equal on all ranks; they are delivered before the metrics. The
        tensors are read later and must not be overwritten.
        """
        self._raise_failure()
        self._free.acquire()
        if self._failure is not None:
            self._free.release()
            self._raise_failure()
        pending = self._sync.start()
        for metric in self._metrics.values():
            metric.reset()
        self._collections.put(_Collection(step, dict(values or {}), pending, self._mark()))

    def flush(self) -> None:
        """Wait until all values are delivered. A closed collector returns immediately."""
        if not self._is_closed:
            self._collections.join()
        self._raise_failure()

    def close(self) -> None:
        """Deliver the remaining values, and end the thread."""
        self._end()
        self._raise_failure()

    def _end(self, seconds: float | None = None) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._collections.put(None)
        self._thread.join(seconds)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _mark(self) -> torch.Event | None:
        """Record an event on the calling thread's stream, after the copy of the state; None on CPU."""
        if self._device.type == "cpu":
            return None
        event = torch.Event(self._device)
        event.record()
        return event

    def _deliver_all(self) -> None:
        stream = None if self._device.type == "cpu" else torch.Stream(self._device)
        while (collection := self._collections.get()) is not None:
            try:
                with stream or nullcontext():
                    if stream is not None and collection.taken is not None:
                        stream.wait_event(collection.taken)
                    values = collection.read()
                self._deliver(collection.step, values)
            except BaseException as error:  # raised by the next call on the user's thread
                self._failure = error
            finally:
                self._free.release()
                self._collections.task_done()


@final
@dataclass(frozen=True, slots=True)
class _Collection:
    """Collection in progress: metrics that are being reduced, and values that may still be on the device."""

    step: int
    values: dict[str, Tensor | float]
    pending: PendingSync[Metric]
    taken: torch.Event | None

    def read(self) -> dict[str, float]:
        """Wait for the reduction, and copy all values to the host with one synchronization."""
        on_device = {name: value for name, value in self.values.items() if isinstance(value, Tensor)}
        computed = {name: metric.compute() for name, metric in self.pending.wait().items()}
        # The state is referenced until its values are on the host, so its memory is not reused by another stream.
        numbers = read_values({**on_device, **computed})
        known = {name: float(numbers[name] if name in on_device else value) for name, value in self.values.items()}
        return {**known, **numbers}
