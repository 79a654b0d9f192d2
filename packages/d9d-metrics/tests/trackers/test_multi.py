from collections.abc import Mapping

import pytest
from pydantic import JsonValue

from d9d_metrics import MultiTracker
from d9d_metrics.trackers.values import Tracked


class Recorder:
    """A custom tracker without a base class."""

    def __init__(self, calls: list[tuple[str, object]], *, fails: bool = False, state: str | None = None) -> None:
        self.calls = calls
        self.fails = fails
        self.state = state

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        self.calls.append(("resume", (step, dict(state))))

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        self.calls.append(("config", config))

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        self.calls.append(("log", (step, values)))

    def flush(self) -> None:
        self.calls.append(("flush", None))

    def state_dict(self) -> dict[str, JsonValue]:
        return {} if self.state is None else {"id": self.state}

    def close(self) -> None:
        self.calls.append(("close", None))
        if self.fails:
            raise OSError("disk full")


def test_every_call_is_forwarded_to_every_tracker() -> None:
    calls: list[tuple[str, object]] = []
    tracker = MultiTracker([Recorder(calls), MultiTracker([Recorder(calls)])])
    tracker.resume(3)
    tracker.log_config({"a": 1})
    tracker.log(4, {"loss": 1.0})
    tracker.flush()
    tracker.close()
    once = [("resume", (3, {})), ("config", {"a": 1}), ("log", (4, {"loss": 1.0})), ("flush", None), ("close", None)]
    assert calls == [call for call in once for _ in range(2)]


def test_every_tracker_gets_only_supported_values() -> None:
    calls: list[tuple[str, object]] = []
    with pytest.warns(match="got a NoneType as the value 'best'; expected a number, Histogram, Text or Image"):
        MultiTracker([Recorder(calls)]).log(4, {"loss": 1, "best": None})  # ty: ignore[invalid-argument-type]
    assert calls == [("log", (4, {"loss": 1.0}))]


def test_all_other_trackers_are_closed_if_closing_one_fails() -> None:
    first: list[tuple[str, object]] = []
    tracker = MultiTracker([Recorder(first), Recorder([], fails=True)])
    with pytest.raises(OSError, match="disk full"):
        tracker.close()
    assert first == [("close", None)]


def test_every_tracker_gets_its_own_state_back() -> None:
    first: list[tuple[str, object]] = []
    third: list[tuple[str, object]] = []
    tracker = MultiTracker([Recorder(first, state="a"), Recorder([]), Recorder(third, state="c")])
    state = tracker.state_dict()
    assert state == {"0": {"id": "a"}, "2": {"id": "c"}}
    tracker.resume(5, state)
    assert (first, third) == ([("resume", (5, {"id": "a"}))], [("resume", (5, {"id": "c"}))])
