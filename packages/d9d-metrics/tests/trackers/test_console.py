import math
from pathlib import Path

import pytest

from d9d_metrics import ConsoleTracker, ConsoleTrackerConfig, Histogram, Text


def test_lines_of_a_run_are_aligned() -> None:
    lines: list[str] = []
    tracker = ConsoleTracker(lines.append)
    tracker.log_config({"name": "run"})
    tracker.log(1, {"loss": 5.5, "rate": 3e-4})
    tracker.log(12000, {"loss": math.nan, "rate": 1.23456789e-12})
    tracker.close()
    assert lines == [
        "step        1  loss     5.50000  rate 0.000300000",
        "step    12000  loss         nan  rate 1.23457e-12",
    ]


def test_resume_prints_the_step() -> None:
    lines: list[str] = []
    tracker = ConsoleTracker(lines.append)
    tracker.resume(-1)
    tracker.resume(40)
    assert lines == ["resumed after step 40"]


def test_config_prints_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = ConsoleTrackerConfig().build(tmp_path)
    tracker.log(2, {})
    tracker.close()
    assert capsys.readouterr().out == "step        2\n"
    assert list(tmp_path.iterdir()) == []


def test_prints_text_and_skips_histograms_and_images() -> None:
    lines: list[str] = []
    tracker = ConsoleTracker(lines.append)
    tracker.log(1, {"sample": Text("to be"), "weights": Histogram(0.0, 1.0, (1.0,))})
    assert lines == ["step        1  sample: to be"]
