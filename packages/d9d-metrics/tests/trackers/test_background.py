import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import JsonValue
from torch import Tensor

from d9d_dist import UserError
from d9d_metrics import BackgroundTracker, JsonlTracker, Text, Tracker, read_metrics
from d9d_metrics.trackers import background
from d9d_metrics.trackers._outbox import Entry, MemoryOutbox
from d9d_metrics.trackers.values import Tracked


class Recorder:
    """Records the calls of the trackers behind a `BackgroundTracker`, and makes them fail or hang on request.

    It outlives the trackers that are opened on it.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.is_down = False
        self.is_free = threading.Event()
        self.is_free.set()
        self.failures = 0

    @property
    def steps(self) -> list[int]:
        return [what[0] for name, what in self.calls if name == "log" and isinstance(what, tuple)]

    def open(self) -> "RecorderTracker":
        self.check()
        self.calls.append(("open", None))
        return RecorderTracker(self)

    def check(self) -> None:
        assert self.is_free.wait(60)
        if self.is_down:
            self.failures += 1
            raise ConnectionError("no route to host")


class RecorderTracker:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        self.recorder.check()
        self.recorder.calls.append(("resume", (step, dict(state))))

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        self.recorder.check()
        self.recorder.calls.append(("config", dict(config)))

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        self.recorder.check()
        if "refused" in values:
            raise UserError("the name 'refused' is taken")
        self.recorder.calls.append(("log", (step, dict(values))))

    def flush(self) -> None:
        self.recorder.check()
        self.recorder.calls.append(("flush", None))

    def state_dict(self) -> dict[str, JsonValue]:
        return {"id": "run-7"}

    def close(self) -> None:
        self.recorder.calls.append(("close", None))


def tracker_of(recorder: Recorder, spool: Path | None = None, **options: Any) -> BackgroundTracker:
    options = {"start_seconds": 30.0} | options
    return BackgroundTracker(recorder.open, name="test", spool=spool, **options)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(background, "_LONGEST_RETRY_SECONDS", 0.02)


@pytest.fixture(params=["memory", "spool"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "spool" if request.param == "spool" else None


def test_a_background_tracker_forwards_all_calls_in_order(spool: Path | None) -> None:
    recorder = Recorder()
    tracker = tracker_of(recorder, spool)
    tracker.resume(3, {"id": "run-7"})
    tracker.log_config({"a": 1, "api_key": "abc"})
    for step in range(4, 8):
        tracker.log(step, {"loss": 1.0 / step})
    tracker.close()
    assert recorder.calls == [
        ("open", None),
        ("resume", (3, {"id": "run-7"})),
        ("config", {"a": 1, "api_key": "<redacted>"}),
        *[("log", (step, {"loss": 1.0 / step})) for step in range(4, 8)],
        ("close", None),
    ]


def test_a_rollback_is_forwarded_in_order(spool: Path | None) -> None:
    recorder = Recorder()
    recorder.is_down = True
    tracker = tracker_of(recorder, spool)
    for step in (1, 2, 3):
        tracker.log(step, {})
    tracker.resume(1)
    for step in (2, 3):
        tracker.log(step, {})
    recorder.is_down = False
    tracker.close()
    calls = [what[0] if isinstance(what, tuple) else name for name, what in recorder.calls]
    assert calls == ["open", 1, 2, 3, 1, 2, 3, "close"]
    assert recorder.calls[4] == ("resume", (1, {"id": "run-7"}))


def test_a_tracker_that_cannot_resume_while_open_is_opened_again(spool: Path | None) -> None:
    class Once(RecorderTracker):
        is_new = True

        def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
            if not self.is_new:
                raise ConnectionError("it is under way")
            super().resume(step, state)

        def log(self, step: int, values: Mapping[str, Tracked]) -> None:
            self.is_new = False
            super().log(step, values)

    recorder = Recorder()
    tracker = BackgroundTracker(lambda: Once(recorder), name="test", spool=spool)
    for step in (1, 2):
        tracker.log(step, {})
    tracker.resume(1)
    tracker.log(2, {})
    tracker.close()
    calls = [what[0] if isinstance(what, tuple) else name for name, what in recorder.calls]
    assert calls == [1, 2, "close", 1, 2, "close"]


def test_logged_values_are_copied(spool: Path | None) -> None:
    recorder, values = Recorder(), {"loss": 1.0}
    recorder.is_free.clear()
    tracker = tracker_of(recorder, spool)
    tracker.log(1, values)
    values["loss"] = 2.0
    recorder.is_free.set()
    tracker.close()
    assert ("log", (1, {"loss": 1.0})) in recorder.calls


def test_after_an_outage_delivery_continues_with_the_failed_entry(spool: Path | None) -> None:
    recorder = Recorder()
    tracker = tracker_of(recorder, spool)
    tracker.log(1, {"loss": 1.0})
    wait_for(lambda: recorder.steps == [1])
    recorder.is_down = True
    tracker.log(2, {"loss": 2.0})
    tracker.log(3, {"loss": 3.0})
    wait_for(lambda: recorder.failures >= 3)
    recorder.is_down = False
    tracker.close()
    assert recorder.steps == [1, 2, 3]
    assert [call for call in recorder.calls if call[0] != "log"] == [
        ("open", None),
        ("close", None),
        ("open", None),
        ("resume", (1, {"id": "run-7"})),
        ("close", None),
    ]


def test_a_tracker_that_hangs_delays_no_step(spool: Path | None, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    recorder.is_free.clear()
    tracker = tracker_of(recorder, spool, close_seconds=0.2)
    for step in range(1, 101):
        tracker.log(step, {"loss": 1.0})  # returns although the tracker hangs
    with caplog.at_level(logging.WARNING):
        tracker.close()
    assert recorder.steps == []
    assert "the test tracker did not close within" in caplog.text
    assert ("100 entries are lost" if spool is None else "for the next start of the run") in caplog.text
    recorder.is_free.set()


def test_spooled_values_are_delivered_in_order_at_the_next_start(tmp_path: Path) -> None:
    recorder = Recorder()
    first = tracker_of(recorder, tmp_path)
    first.log(1, {"loss": 1.0})
    wait_for(lambda: recorder.steps == [1])
    recorder.is_down = True
    for step in (2, 3, 4):
        first.log(step, {"loss": float(step)})
    first.close()
    assert recorder.steps == [1]
    recorder.is_down, recorder.calls = False, []
    second = tracker_of(recorder, tmp_path)
    assert second.state_dict() == {"id": "run-7"}, "the run is found without a checkpoint"
    second.resume(3)
    second.log(4, {"loss": 40.0})
    second.close()
    assert recorder.calls == [
        ("open", None),
        ("resume", (3, {"id": "run-7"})),
        *[("log", (step, {"loss": loss})) for step, loss in [(2, 2.0), (3, 3.0), (4, 40.0)]],
        ("close", None),
    ]


def test_without_a_spool_lost_values_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    recorder.is_down = True
    tracker = tracker_of(recorder)
    tracker.log(1, {"loss": 1.0})
    with caplog.at_level(logging.WARNING):
        tracker.close()
    assert "the test tracker did not receive all values: 1 entries are lost" in caplog.text
    assert "failed; retrying in 0.01 s: ConnectionError('no route to host')" in caplog.text


def test_a_full_queue_drops_and_counts_values(
    spool: Path | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_CAPACITY", 2)
    recorder = Recorder()
    recorder.is_free.clear()
    tracker = tracker_of(recorder, close_seconds=0.1)
    for step in range(5):
        tracker.log(step, {})
    with caplog.at_level(logging.WARNING):
        tracker.close()
    assert "5 entries are lost" in caplog.text
    recorder.is_free.set()


def test_a_rejected_entry_is_dropped(spool: Path | None, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    tracker = tracker_of(recorder, spool)
    with caplog.at_level(logging.WARNING):
        tracker.log(1, {"refused": 1.0})
        tracker.log(2, {"loss": 1.0})
        tracker.close()
    assert recorder.steps == [2]
    assert "the test tracker rejected an entry, which is dropped: the name 'refused' is taken" in caplog.text


def test_resume_raises_the_user_error_of_a_tracker_that_cannot_start() -> None:
    def refuse() -> Tracker:
        raise UserError("no such project; make it first")

    tracker = BackgroundTracker(refuse, name="test", start_seconds=30.0)
    with pytest.raises(UserError, match="no such project; make it first"):
        tracker.resume(0)
    tracker.close()


def test_flush_waits_for_logged_values(spool: Path | None) -> None:
    recorder = Recorder()
    tracker = tracker_of(recorder, spool)
    tracker.log(1, {"loss": 1.0})
    tracker.flush()
    if spool is None:
        assert recorder.steps == [1]
    else:
        recorder.is_free.clear()
        tracker.log(2, {"loss": 2.0})
        tracker.flush()
        assert b'["log", 2,' in (spool / "entries.jsonl").read_bytes()
        recorder.is_free.set()
    tracker.close()


def test_flush_does_not_wait_for_a_failing_tracker(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    tracker = tracker_of(recorder, close_seconds=60.0)
    tracker.log(1, {"loss": 1.0})
    tracker.flush()
    recorder.is_down = True
    for step in (2, 3):
        tracker.log(step, {"loss": 1.0})
        begin = time.monotonic()
        tracker.flush()
        assert time.monotonic() - begin < 50.0
    assert "its latest values are durable only in the checkpoint's state" in caplog.text
    recorder.is_down = False
    wait_for(lambda: recorder.steps == [1, 2, 3])
    tracker.flush()
    tracker.close()


def test_the_tracker_is_flushed_after_the_logged_values(spool: Path | None) -> None:
    recorder = Recorder()
    tracker = tracker_of(recorder, spool)
    tracker.log(1, {})
    tracker.flush()
    if spool is None:
        assert recorder.calls[-1] == ("flush", None), "there is no spool that could wait for it"
    tracker.log(2, {})
    tracker.close()
    assert [name for name, _ in recorder.calls] == ["open", "log", "flush", "log", "close"]


def test_a_tracker_is_flushed_periodically(spool: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_FLUSH_EVERY", 2)
    recorder = Recorder()
    tracker = tracker_of(recorder, spool)
    for step in (1, 2, 3):
        tracker.log(step, {})
    tracker.close()
    assert [name for name, _ in recorder.calls] == ["open", "log", "log", "flush", "log", "close"]


@pytest.mark.parametrize("fault", ["is down", "hangs"])
def test_state_dict_has_values_that_the_tracker_did_not_receive(fault: str) -> None:
    recorder = Recorder()
    tracker = tracker_of(recorder, flush_seconds=0.05, close_seconds=0.05)
    tracker.log(1, {"loss": 1.0})
    wait_for(lambda: recorder.steps == [1])
    recorder.is_down = fault == "is down"
    if fault == "hangs":
        recorder.is_free.clear()
    tracker.log(2, {"loss": math.nan, "text": Text("a")})
    tracker.flush()
    carried = json.loads(json.dumps(tracker.state_dict()))
    assert carried.pop("id") == "run-7"
    tracker.close()  # the process ends
    recorder.is_free.set()
    recorder = Recorder()
    second = tracker_of(recorder)
    second.resume(2, {"id": "run-7", **carried})
    second.log(3, {"loss": 3.0})
    second.close()
    assert repr(recorder.calls) == repr(
        [
            ("open", None),
            ("resume", (0, {"id": "run-7"})),
            ("log", (1, {"loss": 1.0})),
            ("log", (2, {"loss": math.nan, "text": Text("a")})),
            ("log", (3, {"loss": 3.0})),
            ("close", None),
        ]
    )


def test_state_dict_excludes_durable_values(spool: Path | None) -> None:
    tracker = tracker_of(Recorder(), spool)
    tracker.resume(0)
    tracker.log(1, {})
    assert tracker.state_dict()["not_durable"] == [["log", 1, {}]]
    tracker.flush()
    assert "not_durable" not in tracker.state_dict()
    tracker.log(2, {})
    tracker.log(3, {})
    tracker.resume(2)
    assert tracker.state_dict()["not_durable"] == [["log", 2, {}]], "the job went back"
    tracker.close()


def test_state_dict_has_the_whole_step_of_values_that_are_not_durable(tmp_path: Path) -> None:
    """A resume deletes this step, also what was durable of it."""
    path = tmp_path / "metrics.jsonl"
    tracker = BackgroundTracker(lambda: JsonlTracker(path), name="jsonl")
    for step in (1, 2):
        tracker.log(step, {"loss": step})
    tracker.flush()
    tracker.log(2, {"evaluation_loss": 3.0})
    state = tracker.state_dict()
    assert state["not_durable"] == [["log", 2, {"loss": 2}], ["log", 2, {"evaluation_loss": 3.0}]]
    tracker.close()
    again = BackgroundTracker(lambda: JsonlTracker(path), name="jsonl")
    again.resume(2, state)
    again.close()
    assert [[*row][2:] for row in read_metrics(path)] == [["loss"], ["loss"], ["evaluation_loss"]]


def test_flush_waits_only_once_for_a_tracker_that_hangs() -> None:
    outbox = MemoryOutbox(10)
    outbox.put(Entry("flush"))
    assert not outbox.flush(0.01)
    assert not outbox.flush(10_000)
    outbox.head()
    outbox.delivered()
    assert outbox.flush(10_000)


def test_values_from_a_checkpoint_are_in_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = BackgroundTracker(lambda: JsonlTracker(path), name="jsonl")
    tracker.log(1, {"loss": 1.0})
    tracker.flush()
    for step in (2, 3):
        tracker.log(step, {"loss": step})
    state = (
        tracker.state_dict()
    )  # state of a checkpoint whose flush timed out, although the tracker wrote the values later
    tracker.log(4, {"loss": 4.0})
    tracker.close()
    again = BackgroundTracker(lambda: JsonlTracker(path), name="jsonl")
    again.resume(3, state)
    again.log(4, {"loss": 40.0})
    again.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_an_unsupported_value_is_skipped_and_later_values_are_delivered(spool: Path | None) -> None:
    recorder = Recorder()
    tracker = tracker_of(recorder, spool)
    for step, bad in enumerate((None, "a text", "2.5", [1.0], torch.zeros(2), torch.tensor(2.0))):
        with nullcontext() if isinstance(bad, Tensor) and bad.ndim == 0 else pytest.warns(match="as the value 'best'"):
            tracker.log(step, {"loss": torch.tensor(3.0), "best": bad})  # ty: ignore[invalid-argument-type]
    assert len(json.dumps(tracker.state_dict())) > 0
    tracker.close()
    logged = [what for name, what in recorder.calls if name == "log"]
    assert logged == [(step, {"loss": 3.0}) for step in range(5)] + [(5, {"loss": 3.0, "best": 2.0})]


def test_a_step_is_an_integer_of_any_library(spool: Path | None) -> None:
    recorder = Recorder()
    tracker = tracker_of(recorder, spool)
    tracker.log(torch.tensor(3), {"loss": 1.0})  # ty: ignore[invalid-argument-type]
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        tracker.log(None, {"loss": 1.0})  # ty: ignore[invalid-argument-type]
    tracker.close()
    assert recorder.steps == [3]


def test_a_configuration_with_values_that_json_lacks_does_not_end_the_tracker(tmp_path: Path) -> None:
    tracker = BackgroundTracker(lambda: JsonlTracker(tmp_path / "metrics.jsonl"), name="jsonl")
    tracker.log_config({"data": Path("/data"), "clip": math.inf})  # ty: ignore[invalid-argument-type]
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    config, values = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (config["config"], values["loss"]) == ({"data": "/data", "clip": "inf"}, 1.0)


def test_close_without_any_call_opens_nothing(spool: Path | None) -> None:
    recorder, before = Recorder(), set(threading.enumerate())
    tracker = tracker_of(recorder, spool)
    tracker.close()
    tracker.close()
    with pytest.raises(ValueError, match="the test tracker is closed"):
        tracker.log(1, {})
    assert recorder.calls == []
    assert set(threading.enumerate()) <= before


def wait_for(condition: Any) -> None:
    for _ in range(30_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true in five minutes")
