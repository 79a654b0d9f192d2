"""Calibration: the written file is a valid description, and an existing one is kept."""

from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_loop.planning import Hardware, calibration
from d9d_loop.planning.collective_time import Span, collective_seconds


def test_the_written_file_is_a_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SECONDS", 0.001)
    monkeypatch.setattr(calibration, "links_of", lambda *_: (1e9, 1e-5, 2e-3))
    hardware = Hardware.load(str(calibration.calibrate(tmp_path / "mine.toml")))
    assert hardware.device.peak_flops["bf16"] > 1e8
    assert hardware.device.shard_seconds == 2e-3
    assert hardware.device.memory_bandwidth > 1e8
    assert hardware.dense_error >= Hardware.load("a100-80-4hdr").dense_error


@pytest.mark.parametrize("num_devices", [2, 8])
def test_with_the_calibrated_link_the_planner_predicts_the_measured_all_gathers(num_devices: int) -> None:
    seconds = {"small": 1e-4, "large": 2e-3}
    bandwidth, latency = calibration.link_of(num_devices, **seconds)
    hardware = Hardware.load("h100-dgx")
    links = hardware.links.model_copy(update={"bandwidth": bandwidth, "latency": latency})
    fitted = hardware.fitted.model_copy(update={"link_efficiency": 1.0})
    mine = hardware.model_copy(update={"links": links, "fitted": fitted})
    for size, expected in zip((1024, calibration.GATHERED_BYTES), seconds.values(), strict=True):
        found = collective_seconds(mine, "all_gather", size, Span(num_devices, num_devices))
        # 1024 bytes are counted as none, which is 1024 / 2**25 of the time of the large ones.
        assert found == pytest.approx(expected, abs=2e-3 * 1024 / calibration.GATHERED_BYTES)


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("")
    with pytest.raises(UserError, match=r"mine\.toml exists; expected a new file"):
        calibration.calibrate(path)


@pytest.mark.full
def test_the_links_of_two_processes_are_measured() -> None:
    bandwidth, latency, shard = calibration.links_of("cpu", 2)
    assert bandwidth > 0
    assert latency > 0
    assert shard >= 0
