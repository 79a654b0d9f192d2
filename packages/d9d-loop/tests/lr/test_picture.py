import sys
from pathlib import Path

import pytest

from d9d_loop.lr import draw_lr_schedule, plot_lr_schedule
from d9d_loop.lr.lr_schedule import WarmupCosineConfig

SCHEDULE = WarmupCosineConfig(warmup_steps=10).build(100)


def test_a_picture_shows_every_step() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    plot_lr_schedule(SCHEDULE, axes, num_steps=100, peak=0.5, title="rates")
    (line,) = axes.lines
    assert list(line.get_xdata()) == list(range(100))
    assert list(line.get_ydata()) == [0.5 * SCHEDULE(step) for step in range(100)]
    assert axes.get_title(loc="left") == "rates"


def test_a_long_job_is_sampled_to_its_end() -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    plot_lr_schedule(lambda _: 1.0, axes, num_steps=1_000_001)
    steps = list(axes.lines[0].get_xdata())
    assert (steps[0], steps[-1]) == (0, 1_000_000)
    assert len(steps) < 2100


def test_a_run_folder_gets_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_lr_schedule(SCHEDULE, tmp_path, num_steps=100, peak=0.1)
    assert (tmp_path / "lr_schedule.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_message_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'matplotlib>=3"):
        plot_lr_schedule(SCHEDULE, tmp_path / "x.png", num_steps=3)
