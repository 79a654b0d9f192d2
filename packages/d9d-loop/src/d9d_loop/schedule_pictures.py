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
    (folder / f"{PROGRAM}.txt").write_text(f"{title}\n{simulate(program)}\n", encoding="utf-8")
    if _has_matplotlib():
        plot_program(program, folder / f"{PROGRAM}.png", title=title)


def draw_measured(timeline: Timeline, folder: Path, *, title: str) -> None:
    """Write `schedule_measured.txt`, and `schedule_measured.png` where matplotlib is installed.

    Args:
        timeline: What to show.
        folder: Where to.
        title: Stands above the picture.
    """
    (folder / f"{MEASURED}.txt").write_text(f"{title}\n{timeline}\n", encoding="utf-8")
    if _has_matplotlib():
        plot_simulation(timeline, folder / f"{MEASURED}.png", title=title)


def _has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None
