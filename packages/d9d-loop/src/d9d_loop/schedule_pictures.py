"""Shows a job's pipeline in its run folder: the program that ranks follow, and what a step of it really took."""

from importlib.util import find_spec
from pathlib import Path

from d9d_pipeline import Program, Timeline, plot_program, plot_simulation, simulate

PROGRAM, MEASURED = "schedule", "schedule_measured"


def draw_program(program: Program, folder: Path, *, title: str) -> None:
    """Write `schedule.txt`, and `schedule.png` where matplotlib is installed.

    Args:
        program: What to show.
        folder: Where to.
        title: Stands above the picture.
    """
    _write_text(simulate(program), folder / PROGRAM, title)
    if find_spec("matplotlib") is not None:
        plot_program(program, folder / f"{PROGRAM}.png", title=title)


def draw_measured(timeline: Timeline, folder: Path, *, title: str) -> None:
    """Write `schedule_measured.txt`, and `schedule_measured.png` where matplotlib is installed; see `draw_program`."""
    _write_text(timeline, folder / MEASURED, title)
    if find_spec("matplotlib") is not None:
        plot_simulation(timeline, folder / f"{MEASURED}.png", title=title)


def _write_text(timeline: Timeline, path: Path, title: str) -> None:
    path.with_suffix(".txt").write_text(f"{title}\n{timeline}\n", encoding="utf-8")
