"""Text and images of a job's pipeline in its run folder: the program of a step, and a measured step."""

from importlib.util import find_spec
from pathlib import Path

from d9d_pipeline import Program, Timeline, plot_program, plot_simulation, simulate


def draw_program(program: Program, folder: Path, *, title: str) -> None:
    """Write the simulated timeline to `schedule.txt` and, if matplotlib is installed, the program to `schedule.png`."""
    (folder / "schedule.txt").write_text(f"{title}\n{simulate(program)}\n", encoding="utf-8")
    if find_spec("matplotlib") is not None:
        plot_program(program, folder / "schedule.png", title=title)


def draw_measured(timeline: Timeline, folder: Path, *, title: str) -> None:
    """Write a step's timeline to `schedule_measured.txt` and, if matplotlib is installed, `schedule_measured.png`."""
    (folder / "schedule_measured.txt").write_text(f"{title}\n{timeline}\n", encoding="utf-8")
    if find_spec("matplotlib") is not None:
        plot_simulation(timeline, folder / "schedule_measured.png", title=title)
