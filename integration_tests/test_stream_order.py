import pytest
from fake_accelerator import DeviceEntry, DeviceLog, StreamOrder


def _kernel(stream: int, name: str = "mm") -> DeviceEntry:
    return DeviceEntry("kernel", stream, name)


def test_only_kernels_of_the_same_stream_are_ordered() -> None:
    first, second, other = _kernel(0), _kernel(0), _kernel(1)
    order = StreamOrder(DeviceLog([first, other, second]))
    assert order.precedes(first, second)
    assert not order.precedes(second, first)
    assert not order.precedes(first, first)
    assert not order.precedes(first, other)
    assert order.beside(other, name="mm") == [first, second]
    assert order.beside(other, name="add") == []


@pytest.mark.parametrize("number", [7, 8])
def test_an_event_orders_what_was_issued_before_it(number: int) -> None:
    before, after, waiting = _kernel(0), _kernel(0), _kernel(1)
    record, wait = DeviceEntry("event record", 0, number=7), DeviceEntry("event wait", 1, number=number)
    order = StreamOrder(DeviceLog([before, record, after, wait, waiting]))
    assert order.precedes(before, waiting) == (number == 7)
    assert not order.precedes(after, waiting)


def test_events_order_transitively() -> None:
    first, last = _kernel(0), _kernel(2)
    hops = [
        DeviceEntry("event record", 0, number=1),
        DeviceEntry("event wait", 1, number=1),
        DeviceEntry("event record", 1, number=2),
        DeviceEntry("event wait", 2, number=2),
    ]
    assert StreamOrder(DeviceLog([first, *hops, last])).precedes(first, last)
    assert not StreamOrder(DeviceLog([first, *hops[:3], last])).precedes(first, last)
