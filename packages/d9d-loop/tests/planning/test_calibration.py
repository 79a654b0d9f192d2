"""Calibration: the written file is a valid description, and an existing one is kept."""

from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_loop.planning import Hardware, calibration


def test_the_written_file_is_a_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SECONDS", 0.001)
    monkeypatch.setattr(calibration, "links_of", lambda *_: (1e9, 1e-5, 2e-3))
    hardware = Hardware.load(str(calibration.calibrate(tmp_path / "mine.toml")))
    assert hardware.device.peak_flops["bf16"] > 1e8
    assert hardware.device.shard_seconds == 2e-3
    assert hardware.device.memory_bandwidth > 1e8


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("")
    with pytest.raises(UserError, match=r"mine\.toml exists; expected a new file"):
        calibration.calibrate(path)


@pytest.mark.full
def test_the_links_of_two_processes_are_measured() -> None:
    bandwidth, latency, shard = calibration.links_of("cpu", 2)
    assert 1e6 < bandwidth < 1e12
    assert 0 < latency < 10
    assert 0 <= shard < 10
