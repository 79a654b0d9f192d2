"""Prefetch of batches in a background thread, with copies to the accelerator on a side stream."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


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
    """

    def __init__(self, items: Iterator[T], *, prepare: Callable[[T], T], depth: int, device: torch.device) -> None:
        assert depth > 0
        # An item, the event that marks the end of its copies to an accelerator, and the error that ended the items.
        self._ready: queue.Queue[tuple[Any, torch.Event | None, BaseException | None]] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._device = device
        self._thread = threading.Thread(target=self._run, args=(items, prepare), name="d9d-data-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next item. Errors of `items` or `prepare` are raised once all earlier items have been taken."""
        if self._error is not None:
            raise self._error
        item, copied, self._error = self._ready.get()
        if self._error is not None:
            raise self._error
        if copied is not None:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(copied)
            # The allocator must not reuse memory of the side stream before this stream has finished with it.
            pytree.tree_map_only(Tensor, lambda tensor: tensor.record_stream(stream), item)
        return item

    def close(self) -> None:
        """Stop the thread and drop all prepared items. Blocks until the thread has finished its current item."""
        self._stopped.set()
        while self._thread.is_alive():
            while not self._ready.empty():  # the thread may be blocked on a full queue
                self._ready.get_nowait()
            self._thread.join(0.05)

    def _run(self, items: Iterator[T], prepare: Callable[[T], T]) -> None:
        try:
            side: torch.Stream | None = None
            if self._device.type != "cpu":
                torch.accelerator.set_device_index(self._device)  # in a new thread the current device is device 0
                side = torch.Stream(self._device)
            for item in items:
                if self._stopped.is_set():
                    return
                if side is None:
                    self._ready.put((prepare(item), None, None))
                else:
                    with side:  # no variable for the prepared item, which would keep its memory until the next one
                        self._ready.put((prepare(pinned(item)), side.record_event(), None))
            self._ready.put((None, None, StopIteration()))
        except BaseException as error:  # raised again in the thread that takes the items
            if not self._stopped.is_set():
                self._ready.put((None, None, error))
