import errno
import itertools
import json
import math
import os
from io import FileIO
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_metrics import Histogram, Image, JsonlTracker, JsonlTrackerConfig, Text, read_metrics


def tracker_with_steps(path: Path, *steps: int) -> JsonlTracker:
    tracker = JsonlTracker(path)
    for step in steps:
        tracker.log(step, {"loss": 1.0 / (step + 1)})
    return tracker


def steps_in(path: Path) -> list[float]:
    return [record["step"] for record in read_metrics(path)]


def test_writes_one_json_object_per_line(tmp_path: Path) -> None:
    clock = itertools.count(100.5)
    tracker = JsonlTracker(tmp_path / "runs" / "metrics.jsonl", clock=lambda: next(clock))
    tracker.log_config({"name": "größe", "mesh": {"dp": 2}})
    tracker.log(3, {"loss": 2, "rate": 0.5})
    tracker.close()
    assert (tmp_path / "runs" / "metrics.jsonl").read_text(encoding="utf-8") == (
        '{"time": 100.5, "config": {"name": "größe", "mesh": {"dp": 2}}}\n'
        '{"step": 3, "time": 101.5, "loss": 2.0, "rate": 0.5}\n'
    )


def test_a_resume_on_a_full_disk_keeps_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker_with_steps(path, 1, 2).close()
    tracker, full = JsonlTracker(path), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("d9d_metrics.trackers._files.os.fsync", side_effect=full), pytest.raises(OSError, match="No space"):
        tracker.resume(2)
    assert steps_in(path) == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_is_in_the_file_when_log_returns(tmp_path: Path) -> None:
    tracker_with_steps(tmp_path / "metrics.jsonl", 1)
    assert steps_in(tmp_path / "metrics.jsonl") == [1]


@given(values=st.dictionaries(st.text().filter(lambda name: name not in {"step", "time", "config"}), st.floats()))
def test_reads_every_float_and_every_name(values: dict[str, float], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    tracker = JsonlTracker(path, clock=lambda: 0.0)
    tracker.log(7, values)
    tracker.close()
    (record,) = read_metrics(str(path))
    assert record == pytest.approx(values | {"step": 7, "time": 0.0}, rel=0, abs=0, nan_ok=True)


def test_non_finite_values_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlTracker(path).log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (record["a"], record["b"], record["c"]) == ("nan", "inf", "-inf")


def test_resume_drops_later_steps_and_continues(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker_with_steps(path, 1, 2, 3, 4).close()
    tracker = JsonlTracker(path)
    tracker.resume(2)
    tracker.log(3, {"loss": 9.0})
    assert steps_in(path) == [1, 2, 3]
    assert read_metrics(path)[-1]["loss"] == 9.0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics-after-step-2.jsonl", "metrics.jsonl"]
    assert steps_in(tmp_path / "metrics-after-step-2.jsonl") == [3, 4]


def test_values_of_the_last_kept_step_that_are_logged_again_are_in_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(3, {"loss": 3.0})
    tracker.log(3, {"evaluation_loss": 4.0})  # after the checkpoint of step 3
    tracker.close()
    again = JsonlTracker(path)
    again.resume(3)
    for values in ({"evaluation_loss": 5.0}, {"evaluation_loss": 6.0}, {"text": 1.0}):
        again.log(3, values)
    again.log(4, {"loss": 3.0})
    again.close()
    rows = [{name: row[name] for name in row if name != "time"} for row in read_metrics(path)]
    assert rows == [
        {"step": 3, "loss": 3.0},
        {"step": 3, "evaluation_loss": 4.0},
        {"step": 3, "evaluation_loss": 6.0},
        {"step": 3, "text": 1.0},
        {"step": 4, "loss": 3.0},
    ]


def test_repeated_resumes_keep_one_copy_of_later_steps_and_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for last in (4, 3, 4):
        tracker = JsonlTracker(path)
        tracker.resume(0)
        tracker.log_config({"steps": 9, "betas": [0.9, 0.95]})
        for step in range(1, last + 1):
            tracker.log(step, {})
        tracker.close()
    assert steps_in(tmp_path / "metrics-after-step-0.jsonl") == [1, 2, 3, 4], "a shorter copy replaced a longer one"
    assert path.read_text().count("config") == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_resume_keeps_the_file_mode(tmp_path: Path) -> None:
    tracker = tracker_with_steps(tmp_path / "metrics.jsonl", 1, 2)
    before = (tmp_path / "metrics.jsonl").stat().st_mode
    tracker.resume(1)
    assert (tmp_path / "metrics.jsonl").stat().st_mode == before


def test_resume_from_step_minus_1_drops_every_step_but_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log_config({"name": "first"})
    tracker.log(0, {"loss": 1.0})
    tracker.resume(-1)
    assert json.loads(path.read_text())["config"] == {"name": "first"}


@pytest.mark.parametrize("torn", [b'{"step": 2, "time": 1.0, "lo', b"{", b'{"step": 2, "time": 1.0}'])
def test_an_incomplete_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker_with_steps(path, 1).close()
    path.write_bytes(path.read_bytes() + torn)
    assert steps_in(path) == [1]
    tracker_with_steps(path, 2).close()
    assert steps_in(path) == [1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        *(b"[1, 2]\n", b'{"st\rep": 2\n', b"\xff\xfe\n", b'{"step": "x"}\n', b"damaged\n"),
        *(b'{"step": 2, "loss": "x"}\n', b'{"step": 2, "loss": [1]}\n', b'{"step": 2, "loss": null}\n'),
    ],
    ids=repr,
)
def test_damaged_lines_are_moved_aside_and_the_job_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + damage + b'{"step": 3}\n'
    path.write_bytes(content)
    tracker = JsonlTracker(path, clock=lambda: 0.0)
    tracker.resume(3)
    tracker.log(4, {})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n{"step": 4, "time": 0.0}\n'
    assert (tmp_path / "metrics-damaged-1.jsonl").read_bytes() == content
    assert "metrics.jsonl has damaged lines, which are dropped; the whole file is kept as" in caplog.text


def test_the_reader_names_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[1, 2]\n')
    message = r"got b'\[1, 2\]' in line 2 of .*metrics\.jsonl; expected a JSON object\. Delete"
    with pytest.raises(UserError, match=message):
        read_metrics(path)


def test_rejects_a_value_with_a_reserved_name(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    with pytest.raises(
        UserError, match=r"got values named \['step', 'time'\]; expected names other than .* uses itself\. Rename"
    ):
        tracker.log(1, {"time": 1.0, "step": 2.0, "loss": 0.0})


def test_config_names_the_file_in_the_run_folder(tmp_path: Path) -> None:
    tracker = JsonlTrackerConfig(file="curves.jsonl").build(tmp_path)
    tracker.log(1, {})
    tracker.close()
    assert steps_in(tmp_path / "curves.jsonl") == [1]


def test_resume_drops_later_steps_before_it_returns(tmp_path: Path) -> None:
    tracker_with_steps(tmp_path / "metrics.jsonl", 1, 2, 3).close()
    tracker = JsonlTrackerConfig().build(tmp_path)
    tracker.resume(2)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]
    tracker.log(3, {})
    tracker.flush()
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3]
    tracker.close()


def test_writes_histograms_text_and_images(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, clock=lambda: 0.0)
    values = {"h": Histogram(0.0, 1.0, (2.0,)), "a/t": Text("nan"), "a/p": Image(b"png"), "loss": 1.0}
    tracker.log(4, values)
    tracker.close()
    assert json.loads(path.read_text()) == {
        "step": 4,
        "time": 0.0,
        "h": {"histogram": {"low": 0.0, "high": 1.0, "counts": [2.0]}},
        "a/t": {"text": "nan"},
        "a/p": {"picture": "metrics-pictures/a_p-4.png"},
        "loss": 1.0,
    }
    assert (tmp_path / "metrics-pictures" / "a_p-4.png").read_bytes() == b"png"
    assert read_metrics(path) == [{"step": 4, "time": 0.0, "loss": 1.0}]


def test_no_secret_is_written(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log_config({"hub": {"token": "canary"}})
    tracker.close()
    assert "canary" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_full_disk_leaves_no_incomplete_line_between_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = tracker_with_steps(path, 1)

    class Full:
        def __init__(self, file: FileIO) -> None:
            self.file, self.close = file, file.close

        def write(self, line: bytes) -> int:
            return self.file.write(line[:9])

    monkeypatch.setattr(tracker, "_file", Full(tracker._file))
    with pytest.raises(OSError, match="the disk may be full"):
        tracker.log(2, {"loss": 1.0})
    assert path.read_bytes().endswith(b'{"step": ')
    tracker_with_steps(path, 2).close()
    assert steps_in(path) == [1, 2]


def test_resume_replaces_the_file_that_a_link_points_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "metrics.jsonl").symlink_to("disk/file.jsonl")
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0})
    tracker.resume(1)
    tracker.close()
    assert (tmp_path / "metrics.jsonl").is_symlink()
    assert [each["step"] for each in read_metrics(tmp_path / "disk/file.jsonl")] == [1]
