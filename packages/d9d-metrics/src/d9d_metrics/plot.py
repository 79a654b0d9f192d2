"""Plots of the metrics in a JSON Lines file."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_metrics.trackers.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#2a6fbb", "#d9622b", "#3a8f5c", "#8058a5")
_GRAY = "#5a5a5a"
_MIN_POINTS_TO_SMOOTH = 100  # a noisy curve with at least this many points is smoothed
_WINDOWS_PER_CURVE = 40  # the smoothing window extends by 1/40 of the curve to each side
_MAX_MARKED_POINTS = 40  # curves with fewer points have markers


class _Curve(NamedTuple):
    steps: list[float]
    values: list[float]


def plot_metrics(
    metrics_path: Path | str,
    png_path: Path | str,
    *,
    panels: Sequence[Sequence[str]] = (("loss", "evaluation_loss"), ("learning_rate",)),
    title: str = "",
) -> None:
    """Plot the values of a `JsonlTracker`'s file over steps, in vertically stacked panels of a PNG file.

    Long noisy curves are smoothed and drawn over their raw values. The legend shows the last value of each curve,
    smoothed if the curve is. `panels` has the names of the values in each panel, from top to bottom. The first panel is
    the tallest. Names that the file does not contain, and empty panels, are ignored.

    Raises:
        UserError: If the file contains none of the values, or a line is not a JSON object.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    records = read_metrics(metrics_path)
    curves = [{name: curve for name in names if (curve := _curve(records, name)).steps} for names in panels]
    drawn = [panel for panel in curves if panel]
    if not drawn:
        known = sorted({name for record in records for name in record} - {"step", "time"})
        raise UserError(
            f"got panels {[list(p) for p in panels]}, but {metrics_path} has no values for them; expected names from "
            f"{known}. Pass some of these names as panels."
        )
    figure = _new_figure(height=2.4 + 1.8 * len(drawn))
    heights = [3.0] + [1.2] * (len(drawn) - 1)
    grid = figure.subplots(len(drawn), sharex=True, squeeze=False, height_ratios=heights)
    axes = grid[:, 0]
    for panel_axes, panel in zip(axes, drawn, strict=True):
        _draw_panel(panel_axes, panel)
    axes[-1].set_xlabel("step", color=_GRAY)
    axes[0].set_title(title, loc="left", fontweight="bold")
    figure.savefig(png_path, format="png")


def _new_figure(*, height: float) -> "Figure":
    """Return a figure that pyplot does not manage; height in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        hint = install_hint("d9d-metrics", "plot")
        raise ModuleNotFoundError(f"plot_metrics needs matplotlib. Install it: {hint}") from error
    return Figure(figsize=(8.0, height), dpi=150, layout="constrained")


def _curve(records: Sequence[Mapping[str, float]], name: str) -> _Curve:
    points = [(record["step"], record[name]) for record in records if name in record]
    return _Curve([step for step, _ in points], [value for _, value in points])


def _draw_panel(axes: "Axes", curves: Mapping[str, _Curve]) -> None:
    for color, (name, curve) in zip(_COLORS * len(curves), curves.items(), strict=False):
        smoothed = _smoothed(curve)
        main = curve
        # A curve is noisy if smoothing removes more than half of its total variation. Schedules are not.
        is_noisy = _variation(curve.values) > 2 * _variation(smoothed.values)
        if len(curve.steps) >= _MIN_POINTS_TO_SMOOTH and is_noisy:
            axes.plot(*curve, color=color, alpha=0.22, linewidth=0.8)
            main = smoothed
        marker = "o" if len(curve.steps) < _MAX_MARKED_POINTS else ""
        label = f"{name} {main.values[-1]:.4g}"
        axes.plot(*main, color=color, linewidth=1.6, marker=marker, markersize=3.5, label=label)
    _style(axes, [value for curve in curves.values() for value in curve.values])


def _style(axes: "Axes", values: Sequence[float]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRAY)
    axes.tick_params(colors=_GRAY, labelsize=9)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(loc="best", frameon=False, fontsize=9, labelcolor="linecolor")
    finite = [value for value in values if math.isfinite(value)]
    if finite and max(abs(value) for value in finite) < 0.01:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
        axes.yaxis.get_offset_text().set_color(_GRAY)


def _smoothed(curve: _Curve) -> _Curve:
    """Return the mean over a window centered on each point, which does not lag behind a trend."""
    widest = len(curve.values) // _WINDOWS_PER_CURVE
    # The window shrinks near the start, where curves are steep. It is truncated at the end, where they are flat.
    reaches = [min(index, widest) for index in range(len(curve.values))]
    windows = [curve.values[index - reach : index + reach + 1] for index, reach in enumerate(reaches)]
    return curve._replace(values=[_finite_mean(window) for window in windows])


def _variation(values: Sequence[float]) -> float:
    steps = (abs(after - before) for before, after in itertools.pairwise(values))
    return sum(step for step in steps if math.isfinite(step))


def _finite_mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
