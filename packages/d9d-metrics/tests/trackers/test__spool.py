import math
from pathlib import Path

import pytest

from d9d_metrics import Histogram, Image, Text
from d9d_metrics.trackers import _spool as spool_module
from d9d_metrics.trackers._outbox import Entry
from d9d_metrics.trackers._spool import Spool


def filled(folder: Path, *steps: int) -> Spool:
    spool = Spool(folder)
    for step in steps:
        spool.put(Entry("log", step, {"loss": float(step)}))
    assert spool.flush(60)
    return spool


def drained(spool: Spool) -> list[int | None]:
    spool.close()
    steps = []
    while (entry := spool.head()) is not None:
        steps.append(entry.step if entry.method == "log" else None)
        spool.delivered()
        spool.flushed()
    return steps


def test_a_spool_returns_every_type_of_value(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    values = {
        "loss": 0.1,
        "inf": -math.inf,
        "h": Histogram(0.0, 1.0, (1.0, 2.0)),
        "text": Text("größe"),
        "picture": Image(b"\x89PNG\xff"),
    }
    spool.put(Entry("log", 3, {**values, "nan": math.nan}))
    spool.put(Entry("log_config", data={"a": {"b": [1, None]}}))
    entry = spool.head()
    assert entry is not None
    assert entry is not None
    assert entry.step == 3
    assert repr(entry.data["nan"]) == "nan"
    assert {name: value for name, value in entry.data.items() if name != "nan"} == values
    spool.delivered()
    assert spool.head() == Entry("log_config", data={"a": {"b": [1, None]}})
    spool.close()


def test_a_new_process_continues_delivery(tmp_path: Path) -> None:
    first = filled(tmp_path, 1, 2, 3)
    first.head()
    first.delivered()
    first.flushed()
    # Not closed: simulates a killed process.
    assert drained(Spool(tmp_path)) == [2, 3]
    assert (tmp_path / "entries.jsonl").read_bytes() == b""
    assert drained(Spool(tmp_path)) == []


def test_keeps_delivered_entries_until_they_are_flushed(tmp_path: Path) -> None:
    first = filled(tmp_path, 1, 2, 3)
    for _ in range(2):
        first.head()
        first.delivered()
    assert drained(Spool(tmp_path)) == [1, 2, 3], "the process was killed"
    second = filled(tmp_path, 4, 5)
    second.head()
    second.delivered()
    second.failed()
    assert drained(second) == [4, 5], "the tracker was closed after an error"


def test_a_disk_error_in_flush_is_logged_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = filled(tmp_path, 1)

    def failing(_file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(spool_module.os, "fsync", failing)
        assert not spool.flush(60)
    assert f"cannot fsync {tmp_path / 'entries.jsonl'}: [Errno 5] Input/output error" in caplog.text
    assert spool.flush(60)
    assert drained(spool) == [1]


@pytest.mark.parametrize("torn", [b'{"step": 2, "val', b"{"])
def test_drops_an_incomplete_last_line(tmp_path: Path, torn: bytes) -> None:
    filled(tmp_path, 1).close()
    with (tmp_path / "entries.jsonl").open("ab") as file:
        file.write(torn)
    assert drained(filled(tmp_path, 5)) == [1, 5]


def test_a_kill_between_truncation_and_offset_update_loses_nothing(tmp_path: Path) -> None:
    spool = filled(tmp_path, 1)
    spool.close()
    (tmp_path / "delivered").write_bytes(b"%020d" % 10**6)
    assert drained(Spool(tmp_path)) == [1]


def test_forget_after_drops_later_steps_but_no_configuration(tmp_path: Path) -> None:
    first = filled(tmp_path, 1, 2)
    first.put(Entry("log_config", data={"a": 1}))
    first.put(Entry("log", 3, {}))
    first.put(Entry("log", 4, {}))
    first.head()
    first.delivered()
    first.flushed()
    first.close()
    second = Spool(tmp_path)
    second.forget_after(3)
    assert drained(second) == [2, None, 3]


def test_writes_are_retried_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "_RETRY_SECONDS", 0.01)
    write, failures = spool_module.os.write, iter([OSError(28, "No space left on device"), 3])

    def failing(file: int, line: bytes) -> int:
        match next(failures, None):
            case OSError() as error:
                raise error
            case int(part):
                return write(file, line[:part])  # a partial write
        return write(file, line)

    monkeypatch.setattr(spool_module.os, "write", failing)
    assert drained(filled(tmp_path, 1, 2)) == [1, 2]


def test_close_does_not_wait_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_file: int, _line: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool_module.os, "write", failing)
    spool = Spool(tmp_path)
    spool.put(Entry("log", 1, {}))
    assert drained(spool) == []
    assert spool.describe_rest() == "1 entries are lost"


def test_drops_entries_beyond_max_bytes(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=100)
    for step in range(5):
        spool.put(Entry("log", step, {"loss": 1.0}))
    spool.flush(60)
    assert spool.describe_rest() == f"78 bytes wait in {tmp_path} for the next start of the run; 2 entries are lost"
    assert drained(spool) == [0, 1, 2]


def test_state_round_trip(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    assert spool.load_state() == {}
    spool.save_state({"id": "a"})
    spool.save_state({"id": "b"})
    assert Spool(tmp_path).load_state() == {"id": "b"}
    (tmp_path / "state.json").write_text("{")
    assert Spool(tmp_path).load_state() == {}
