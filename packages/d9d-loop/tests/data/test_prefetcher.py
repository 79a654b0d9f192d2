import threading
import weakref
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from d9d_loop.data import Prefetcher

CPU = torch.device("cpu")


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "d9d-data-prefetch"]


def test_a_prefetcher_prepares_items_in_order_and_ends() -> None:
    prefetcher = Prefetcher(iter(range(5)), prepare=lambda item: item * 10, depth=2, device=CPU)
    assert list(prefetcher) == [0, 10, 20, 30, 40]
    with pytest.raises(StopIteration):
        next(prefetcher)
    prefetcher.close()
    assert not _threads()


def test_prefetches_at_most_its_depth() -> None:
    made: list[int] = []
    full = threading.Event()

    def items() -> Iterator[int]:
        for item in range(100):
            made.append(item)
            if item == 4:
                full.set()
            yield item

    prefetcher = Prefetcher(items(), prepare=lambda item: item, depth=3, device=CPU)
    assert next(prefetcher) == 0
    assert full.wait(30)  # one was taken, three are ready, one waits for space
    assert made == [0, 1, 2, 3, 4]
    prefetcher.close()
    assert not _threads()


def test_the_thread_keeps_no_prepared_item(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = mock.MagicMock(name="a stream of a device that this machine lacks")
    stream.record_event.return_value = None
    monkeypatch.setattr(torch, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    waits, go_on = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 0
        waits.set()
        assert go_on.wait(30)

    prefetcher = Prefetcher(items(), prepare=lambda _: torch.ones(2), depth=1, device=torch.device("meta"))
    item = weakref.ref(next(prefetcher))
    assert waits.wait(30)
    assert item() is None
    go_on.set()
    prefetcher.close()


def test_an_error_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("here")

    prefetcher = Prefetcher(items(), prepare=lambda item: item, depth=4, device=CPU)
    assert next(prefetcher) == 1
    for _ in range(2):
        with pytest.raises(KeyError, match="here"):
            next(prefetcher)
    prefetcher.close()


def test_an_error_of_prepare_is_raised() -> None:
    prefetcher = Prefetcher(iter([0]), prepare=lambda item: 1 // item, depth=1, device=CPU)
    with pytest.raises(ZeroDivisionError):
        next(prefetcher)
    prefetcher.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_prefetched_copies_to_the_device_have_the_right_values() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    batches = [{"x": torch.full((1 << 20,), float(number))} for number in range(20)]
    prefetcher = Prefetcher(
        iter(batches),
        prepare=lambda batch: {"x": batch["x"].to(device, non_blocking=True)},
        depth=3,
        device=torch.device(device.type, torch.accelerator.current_device_index()),
    )
    for number, batch in enumerate(prefetcher):
        assert batch["x"].device.type == device.type
        assert (batch["x"] * 2).sum().item() == 2.0 * number * (1 << 20)
    prefetcher.close()
