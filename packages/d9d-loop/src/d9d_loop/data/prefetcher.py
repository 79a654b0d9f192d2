"""Prefetch of batches in a background thread, with copies to the accelerator on a side stream."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Ready(Generic[T]):
    """Prepared item; on an accelerator, also the event that marks the end of its copies."""

    item: T
    copied: torch.Event | None


@dataclass(frozen=True, slots=True)
class _Ended:
    """End of the items: the error that ended them, or `None` if they are exhausted."""

    error: BaseException | None


def pinned(item: Any) -> Any:
    """Copy every tensor of a pytree to pinned memory, from which copies to an accelerator can be asynchronous."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), item)


@final
class Prefetcher(Generic[T]):
    """Iterator over `items`, which a background thread takes up to `depth` items ahead and passes through `prepare`.

    On an accelerator, items are pinned and prepared on a side stream, so copies overlap with computation. The stream
    that takes an item waits for its copies; the host does not. `close` drops prefetched items, so state to be saved
    must be part of the items.

    `items` and `prepare` must not draw random numbers, because the thread shares the random generators of training.

    Args:
        prepare: Function applied to each item, such as a copy to the device.
    """

    def __init__(self, items: Iterator[T], *, prepare: Callable[[T], T], depth: int, device: torch.device) -> None:
        assert depth > 0
        self._ready: queue.Queue[_Ready[T] | _Ended] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._ended: _Ended | None = None
        self._device = device
        self._thread = threading.Thread(target=self._run, args=(items, prepare), name="d9d-data-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next item. Errors of `items` or `prepare` are raised once all earlier items have been taken."""
        if self._ended is None:
            ready = self._ready.get()
            if isinstance(ready, _Ready):
                return self._hand_over(ready)
            self._ended = ready
        if self._ended.error is not None:
            raise self._ended.error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and drop all prepared items. Blocks until the thread has finished its current item."""
        self._stopped.set()
        while self._thread.is_alive():
            while not self._ready.empty():  # the thread may be blocked on a full queue
                self._ready.get_nowait()
            self._thread.join(0.05)

    def _hand_over(self, ready: _Ready[T]) -> T:
        if ready.copied is not None:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(ready.copied)
            # The allocator must not reuse memory of the side stream before this stream has finished with it.
            pytree.tree_map_only(Tensor, lambda tensor: tensor.record_stream(stream), ready.item)
        return ready.item

    def _run(self, items: Iterator[T], prepare: Callable[[T], T]) -> None:
        try:
            side = self._side_stream()
            for item in items:
                if self._stopped.is_set():
                    return
                self._ready.put(_Ready(prepare(item), None) if side is None else _on_stream(side, item, prepare))
            self._ready.put(_Ended(None))
        except BaseException as error:  # raised again in the thread that takes the items
            if not self._stopped.is_set():
                self._ready.put(_Ended(error))

    def _side_stream(self) -> torch.Stream | None:
        if self._device.type == "cpu":
            return None
        torch.accelerator.set_device_index(self._device)  # in a new thread the current device is device 0
        return torch.Stream(self._device)


def _on_stream(stream: torch.Stream, item: T, prepare: Callable[[T], T]) -> _Ready[T]:
    with stream:
        prepared = prepare(pinned(item))
        return _Ready(prepared, stream.record_event())
