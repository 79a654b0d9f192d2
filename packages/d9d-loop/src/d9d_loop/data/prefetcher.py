"""Prepares batches ahead of their use, in a thread: on an accelerator, they are there before they are needed."""

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
    """An item, and on an accelerator what to wait for before it may be used."""

    item: T
    copied: torch.Event | None


@dataclass(frozen=True, slots=True)
class _Ended:
    """There are no more items, for a reason or none."""

    error: BaseException | None


def pinned(item: Any) -> Any:
    """Copy every tensor of a pytree to memory from which an accelerator copies without the host waiting."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), item)


@final
class Prefetcher(Generic[T]):
    """Iterates over items in a thread, up to `depth` ahead, and prepares them there.

    On an accelerator, items are pinned, and prepared on a stream of their own, so copies run beside the computation;
    whoever takes an item waits for its copies on the device, not on the host. Only what was taken was used: state that
    is to be saved belongs into the items.

    The thread draws no random numbers, and neither may items and `prepare`: the generators are those of the training.

    Args:
        items: What to iterate over, in the thread alone.
        prepare: Applied to each item, e.g. copies it to the device.
        depth: How many items are kept ready, at least 1.
        device: The device that `prepare` copies to.
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
        """The next item.

        Raises:
            StopIteration: When there are no more.
            Exception: What the items or `prepare` raised, after the items before it.
        """
        if self._ended is None:
            ready = self._ready.get()
            if isinstance(ready, _Ready):
                return self._hand_over(ready)
            self._ended = ready
        if self._ended.error is not None:
            raise self._ended.error
        raise StopIteration

    def close(self) -> None:
        """End the thread, once what it is waiting for is there; items that are ready are dropped."""
        self._stopped.set()
        while self._thread.is_alive():
            while not self._ready.empty():  # it may be waiting for room
                self._ready.get_nowait()
            self._thread.join(0.05)

    def _hand_over(self, ready: _Ready[T]) -> T:
        if ready.copied is not None:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(ready.copied)
            # Memory of the other stream must not be given out again before this one is done with it.
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
        except BaseException as error:  # it belongs to whoever takes the items
            if not self._stopped.is_set():
                self._ready.put(_Ended(error))

    def _side_stream(self) -> torch.Stream | None:
        if self._device.type == "cpu":
            return None
        torch.accelerator.set_device_index(self._device)  # a thread starts with the first one
        return torch.Stream(self._device)


def _on_stream(stream: torch.Stream, item: T, prepare: Callable[[T], T]) -> _Ready[T]:
    with stream:
        prepared = prepare(pinned(item))
        return _Ready(prepared, stream.record_event())
