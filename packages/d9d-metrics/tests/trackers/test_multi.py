from collections.abc import Mapping

import pytest
from pydantic import JsonValue

from d9d_metrics import MultiTracker


class Recorder:
    """A tracker of a user's own: no base class."""

    def __init__(self, calls: list[tuple[str, object]], *, fails: bool = False) -> None:
        self.calls = calls
        self.fails = fails

    def resume(self, step: int) -> None:
        self.calls.append(("resume", step))

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        self.calls.append(("config", config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("log", (step, values)))

    def close(self) -> None:
        self.calls.append(("close", None))
        if self.fails:
            raise OSError("disk full")


def test_hands_everything_to_every_tracker() -> None:
    calls: list[tuple[str, object]] = []
    tracker = MultiTracker([Recorder(calls), MultiTracker([Recorder(calls)])])
    tracker.resume(3)
    tracker.log_config({"a": 1})
    tracker.log(4, {"loss": 1.0})
    tracker.close()
    once = [("resume", 3), ("config", {"a": 1}), ("log", (4, {"loss": 1.0})), ("close", None)]
    assert calls == [call for call in once for _ in range(2)]


def test_closes_the_others_when_one_fails() -> None:
    first: list[tuple[str, object]] = []
    tracker = MultiTracker([Recorder(first), Recorder([], fails=True)])
    with pytest.raises(OSError, match="disk full"):
        tracker.close()
    assert first == [("close", None)]
