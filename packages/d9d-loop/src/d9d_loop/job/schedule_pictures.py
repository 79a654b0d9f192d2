"""Text and images of a job's pipeline in its run folder: the program of a step, and a measured step."""

from importlib.util import find_spec
from pathlib import Path

from d9d_pipeline import Program, Timeline, plot_program, plot_simulation, simulate

PROGRAM, MEASURED = "schedule", "schedule_measured"


def draw_program(program: Program, folder: Path, *, title: str) -> None:
    """Write `schedule.txt`, and `schedule.png` if matplotlib is installed.

    Args:
        program: Pipeline program. The text shows its simulated timeline.
        folder: The run folder, which must exist.
        title: Title of the text and the image.
    """
    _write_text(simulate(program), folder / PROGRAM, title)
    if find_spec("matplotlib") is not None:
        plot_program(program, folder / f"{PROGRAM}.png", title=title)


def draw_measured(timeline: Timeline, folder: Path, *, title: str) -> None:
    """Write `schedule_measured.txt`, and `schedule_measured.png` if matplotlib is installed.

    Args:
        timeline: Measured times of one step.
        folder: The run folder, which must exist.
        title: Title of the text and the image.
    """
    _write_text(timeline, folder / MEASURED, title)
    if find_spec("matplotlib") is not None:
        plot_simulation(timeline, folder / f"{MEASURED}.png", title=title)


def _write_text(timeline: Timeline, path: Path, title: str) -> None:
    path.with_suffix(".txt").write_text(f"{title}\n{timeline}\n", encoding="utf-8")
