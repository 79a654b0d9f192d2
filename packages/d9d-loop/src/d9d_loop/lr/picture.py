"""Plots of learning-rate schedules."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from d9d_dist.install_hint import install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Target: TypeAlias = "Path | str | Axes"
"""Output of a plot: a file, whose suffix selects the format (`.png`, `.svg`, `.pdf`), or matplotlib axes."""

_POINTS = 2000
_COLOR, _GRAY = "#0072b2", "#5a5a5a"


def plot_lr_schedule(
    schedule: Callable[[int], float], target: Target, *, num_steps: int, peak: float = 1.0, title: str = ""
) -> None:
    """Plot the learning rate over the steps of a job, to a file (which requires matplotlib) or to axes.

    `schedule` is a function of the step, counted from 0, that returns the learning rate relative to the peak. With
    `peak` 1, this relative value is plotted.
    """
    if isinstance(target, Path | str):
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            hint = install_hint("d9d-loop", "plot")
            raise ModuleNotFoundError(f"plots need matplotlib. Install it: {hint}") from error
        figure = Figure(figsize=(8.0, 3.2), dpi=150, layout="constrained")
        plot_lr_schedule(schedule, figure.subplots(), num_steps=num_steps, peak=peak, title=title)
        figure.savefig(target)
        return
    stride = -(-num_steps // _POINTS)
    steps = sorted({*range(0, num_steps, stride), num_steps - 1})
    target.plot(steps, [peak * schedule(step) for step in steps], color=_COLOR, linewidth=1.6)
    target.set_title(title, loc="left", fontsize=10, fontweight="bold")
    target.set_xlabel("steps done", color=_GRAY, loc="right")
    target.set_ylim(bottom=0.0)
    target.margins(x=0.01)
    target.grid(alpha=0.25)
    target.spines[["top", "right"]].set_visible(False)
    target.tick_params(colors=_GRAY, labelsize=9)


def draw_lr_schedule(schedule: Callable[[int], float], folder: Path, *, num_steps: int, peak: float) -> None:
    """Write `lr_schedule.png` to an existing folder if matplotlib is installed; otherwise do nothing.

    `schedule` is a function of the step, counted from 0, that returns the learning rate relative to the peak.
    """
    if find_spec("matplotlib") is not None:
        title = f"learning rate, peak {peak:g}"
        plot_lr_schedule(schedule, folder / "lr_schedule.png", num_steps=num_steps, peak=peak, title=title)
