import json
import re
import struct
import subprocess
import sys
import time
import urllib.request
import zlib
from pathlib import Path
from typing import Any

import pytest

from d9d_dist import UserError
from d9d_metrics import Histogram, Image, TensorBoardTracker, TensorBoardTrackerConfig, Text
from d9d_metrics.trackers import _extras


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def scalars(folder: Path, name: str) -> dict[int, float]:
    return {event.step: event.value for event in read(folder).Scalars(name)}


def png_of(width: int, height: int) -> bytes:
    """Return a black PNG image."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" * (width + 1) for _ in range(height)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_every_type_of_value_can_be_read(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log_config({"lr": 0.5, "mesh": {"password": "canary"}})
    picture = Image(png_of(3, 2))
    tracker.log(7, {"loss": 1.5, "h": Histogram(0.0, 4.0, (1.0, 3.0)), "t": Text("hello"), "p": picture})
    tracker.close()
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 1.5)]
    histogram = events.Histograms("h")[0].histogram_value
    assert (histogram.num, histogram.sum, list(histogram.bucket_limit)[-2:]) == (4.0, 1 + 3 * 3, [2.0, 4.0])
    assert list(histogram.bucket)[-2:] == [1.0, 3.0]
    (image,) = events.Images("p")
    assert (image.width, image.height, image.encoded_image_string) == (3, 2, picture.png)
    assert events.Tensors("t/text_summary")[0].tensor_proto.string_val == [b"hello"]
    shown = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    config = json.loads(shown.removeprefix("```json\n").removesuffix("\n```"))
    assert config == {"lr": 0.5, "mesh": {"password": "<redacted>"}}


def test_a_resumed_run_hides_later_steps(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, {"loss": float(step)})
    first.flush()  # the process is killed
    second = TensorBoardTracker(tmp_path)
    second.resume(2, first.state_dict())
    second.log(3, {"loss": 30.0})
    second.close()
    assert scalars(tmp_path, "loss") == {1: 1.0, 2: 2.0, 3: 30.0}


def _shown(folder: Path, *, fast: bool) -> dict[str, list[tuple[int, float]]]:
    """Return the points that TensorBoard's Python server or its data server (`fast`) sends to a browser, by tag."""
    words = ["--logdir", str(folder), "--port", "0", f"--load_fast={str(fast).lower()}"]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stderr is not None
        (url,) = next(filter(None, (re.findall(r" at (http://\S+)", line) for line in server.stderr)))

        def get(query: str) -> Any:
            with urllib.request.urlopen(f"{url}data/plugin/scalars/{query}") as answer:  # noqa: S310 - our own server
                return json.load(answer)

        while not (tags := get("tags")):  # it reads the files in the background
            time.sleep(0.1)
        return {tag: [(step, value) for _, step, value in get(f"scalars?run=.&tag={tag}")] for tag in tags["."]}
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
def test_both_servers_show_a_resumed_run_without_the_old_steps(fast: bool, tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path)
    for step in range(1, 7):
        first.log(step, {"loss": float(step), "rare": 10.0 * step})
    first.close()
    second = TensorBoardTracker(tmp_path)
    second.resume(2, first.state_dict())
    second.log(3, {"loss": 30.0})
    second.log(4, {"loss": 40.0})
    second.close()
    expected = {"loss": [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)], "rare": [(1, 10.0), (2, 20.0)]}
    assert _shown(tmp_path, fast=fast) == expected


def test_a_resume_keeps_the_events_of_a_file_that_is_cut_off(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"loss": float(step), "text": Text(str(step))})
    first.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    second = TensorBoardTracker(tmp_path)
    second.resume(1)
    assert scalars(tmp_path, "loss") == {1: 1.0}
    assert len(read(tmp_path).Tensors("text/text_summary")) == 1
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    second.close()


def test_flush_makes_values_readable(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.flush()
    tracker.log(1, {"loss": 1.0})
    tracker.flush()
    assert scalars(tmp_path, "loss") == {1: 1.0}
    tracker.close()


def test_config_writes_to_the_run_folder(tmp_path: Path) -> None:
    tracker = TensorBoardTrackerConfig(folder="events").build(tmp_path)
    tracker.resume(-1)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert scalars(tmp_path / "events", "loss") == {1: 1.0}
    assert (tmp_path / "trackers" / "tensorboard" / "entries.jsonl").read_bytes() == b""


def test_without_the_package_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extras, "find_spec", lambda _module: None)
    with pytest.raises(UserError, match=r"tensorboard.* not installed\. Install it: pip install 'tensorboard>=2"):
        TensorBoardTrackerConfig().build(tmp_path)
