"""Brings metrics from the device to the trackers off the hot path: a step neither waits for ranks nor for values."""

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from d9d_metrics.metric import Metric
from d9d_metrics.sync import MetricSync, PendingSync, read_values

_SECONDS_AFTER_ERROR = 1.0


@final
class MetricCollector:
    """Reduces metrics, computes them and hands their values on, in a thread of its own, in the order of steps.

    `collect` takes the state and lets its all-reduce begin; that is issued by the calling thread, so that every rank
    has its collectives in the same order. The rest happens in the collector's thread: on an accelerator in a stream of
    its own, which waits for the collective while the step's stream goes on; on CPU the thread waits.

    The lag is bounded: `collect` waits if the values of `max_lag` collections before are still not handed on.

    Use it as a context manager, or call `close`.

    Args:
        metrics: As for `sync_metrics`. They are reset by each collection.
        over: The ranks to reduce over, one group (flatten a mesh to one axis); `None` for this process alone.
        deliver: Takes in a step and its values, for instance the `log` of a tracker; called in the collector's thread.
            What it raises is raised by the next `collect`, `flush` or `close`, on the ranks where it raised; a
            `BackgroundTracker` raises nothing.
        device: Where the metrics and the values are that are collected with them; that of the metrics by default.
        max_lag: How many collections may be under way.
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
        self._device = _device_of(metrics) if device is None else device
        self._collections: queue.Queue[_Collection | None] = queue.Queue()
        self._free = threading.Semaphore(max_lag)
        self._failure: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._deliver_all, name="d9d-metrics-collector", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """Give the collector itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close it; after an error of the body, without raising another one."""
        if error is None:
            self.close()
        else:
            # What is on its way may wait for a rank that is gone.
            self._end(_SECONDS_AFTER_ERROR)

    def collect(self, step: int, values: Mapping[str, Tensor | float] | None = None) -> None:
        """Begin to collect what the metrics have gathered, and reset them.

        Collective; issues the all-reduce of `sync_metrics`, and does not wait for it.

        Args:
            step: The step that the values belong to.
            values: What is known on every rank already, to be handed on with the metrics and before them: numbers, or
                scalar tensors on their device, which are not read here and must not be overwritten later.
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
        """Wait until all values are handed on. Once it is closed there is nothing to wait for."""
        if not self._is_closed:
            self._collections.join()
        self._raise_failure()

    def close(self) -> None:
        """Hand on what is left, and end the thread."""
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
        """The moment in the calling thread's stream at which the state was taken."""
        if self._device.type == "cpu":
            return None
        event = torch.Event(self._device)
        event.record()
        return event

    def _deliver_all(self) -> None:
        """What the thread does."""
        stream = None if self._device.type == "cpu" else torch.Stream(self._device)
        while (collection := self._collections.get()) is not None:
            try:
                if stream is None:
                    values = collection.read()
                else:
                    assert collection.taken is not None
                    with stream:
                        stream.wait_event(collection.taken)
                        values = collection.read()
                self._deliver(collection.step, values)
            except BaseException as error:  # it is raised where the collector is used
                self._failure = error
            finally:
                self._free.release()
                self._collections.task_done()


@final
@dataclass(frozen=True, slots=True)
class _Collection:
    """Values on their way: the state of the metrics is being reduced, the others are on the device."""

    step: int
    values: dict[str, Tensor | float]
    pending: PendingSync[Metric]
    taken: torch.Event | None

    def read(self) -> dict[str, float]:
        """Wait for the values and bring them to the host; at once, whatever their number."""
        on_device = {name: value for name, value in self.values.items() if isinstance(value, Tensor)}
        computed = {name: metric.compute() for name, metric in self.pending.wait().items()}
        # The state stays alive until its values are on the host, so no other stream is given its memory.
        numbers = read_values({**on_device, **computed})
        known = {name: float(numbers[name] if name in on_device else value) for name, value in self.values.items()}
        return {**known, **numbers}


def _device_of(metrics: Mapping[str, Metric]) -> torch.device:
    for metric in metrics.values():
        for accumulator in metric.accumulators().values():
            return accumulator.value.device
    return torch.device("cpu")
