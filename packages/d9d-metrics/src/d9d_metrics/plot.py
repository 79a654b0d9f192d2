"""Draws the curves of a run from its JSON Lines file, so that every run folder holds a picture of how it went."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from d9d_dist import UserError
from d9d_metrics.trackers.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#2a6fbb", "#d9622b", "#3a8f5c", "#8058a5")
_GREY = "#5a5a5a"
_SMOOTHED_FROM = 100  # number of points from which a noisy curve is drawn smoothed, over its raw self
_WINDOWS = 40  # the smoothing reaches over one 40th of the curve, each way
_CROWDED_FROM = 40  # number of points from which they are not marked one by one


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
    """Draw values over steps, in panels below each other.

    Long noisy curves are drawn smoothed over their raw values. The legend says the last value of each.

    Args:
        metrics_path: What a `JsonlTracker` wrote.
        png_path: Where to write the picture.
        panels: The names of the values of each panel, from the top, the first panel being the tallest. Values of one
            panel share its axis, so they should be of one unit. Names that the file does not have are left out, and so
            are panels without any.
        title: Stands above the picture.

    Raises:
        UserError: If the file has none of the values.
        ModuleNotFoundError: If matplotlib is missing.
    """
    records = read_metrics(metrics_path)
    curves = [{name: curve for name in names if (curve := _curve(records, name)).steps} for names in panels]
    drawn = [panel for panel in curves if panel]
    if not drawn:
        known = sorted({name for record in records for name in record} - {"step", "time"})
        raise UserError(
            f"{metrics_path} has none of the values {[list(p) for p in panels]}; name some of {known} in panels."
        )
    figure = _new_figure(height=2.4 + 1.8 * len(drawn))
    heights = [3.0] + [1.2] * (len(drawn) - 1)
    grid = figure.subplots(len(drawn), sharex=True, squeeze=False, height_ratios=heights)
    axes = grid[:, 0]
    for panel_axes, panel in zip(axes, drawn, strict=True):
        _draw_panel(panel_axes, panel)
    axes[-1].set_xlabel("step", color=_GREY)
    axes[0].set_title(title, loc="left", fontweight="bold")
    figure.savefig(png_path, format="png")


def _new_figure(*, height: float) -> "Figure":
    """A figure of its own, which no global state of matplotlib knows; height in inches."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plot_metrics needs matplotlib: pip install 'd9d-metrics[plot]'") from error
    return Figure(figsize=(8.0, height), dpi=150, layout="constrained")


def _curve(records: Sequence[Mapping[str, float]], name: str) -> _Curve:
    points = [(record["step"], record[name]) for record in records if name in record]
    return _Curve([step for step, _ in points], [value for _, value in points])


def _draw_panel(axes: "Axes", curves: Mapping[str, _Curve]) -> None:
    for color, (name, curve) in zip(_COLORS * len(curves), curves.items(), strict=False):
        smoothed = _smoothed(curve)
        main = curve
        if len(curve.steps) >= _SMOOTHED_FROM and _is_noisy(curve, smoothed):
            axes.plot(*curve, color=color, alpha=0.22, linewidth=0.8)
            main = smoothed
        marker = "o" if len(curve.steps) < _CROWDED_FROM else ""
        label = f"{name} {main.values[-1]:.4g}"
        axes.plot(*main, color=color, linewidth=1.6, marker=marker, markersize=3.5, label=label)
    _style(axes, [value for curve in curves.values() for value in curve.values])


def _style(axes: "Axes", values: Sequence[float]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_GREY, labelsize=9)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(loc="best", frameon=False, fontsize=9, labelcolor="linecolor")
    finite = [value for value in values if math.isfinite(value)]
    if finite and max(abs(value) for value in finite) < 0.01:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
        axes.yaxis.get_offset_text().set_color(_GREY)


def _smoothed(curve: _Curve) -> _Curve:
    """The mean over a window centred on each point, so that it does not lag behind a trend."""
    widest = len(curve.values) // _WINDOWS
    # Narrower near the start, where curves are steep; cut off at the end, where they are flat and one point is noise.
    reaches = [min(index, widest) for index in range(len(curve.values))]
    windows = [curve.values[index - reach : index + reach + 1] for index, reach in enumerate(reaches)]
    return curve._replace(values=[_finite_mean(window) for window in windows])


def _is_noisy(curve: _Curve, smoothed: _Curve) -> bool:
    """Whether smoothing takes most ups and downs from a curve; not from a schedule, which is drawn as it is."""
    return _variation(curve.values) > 2 * _variation(smoothed.values)


def _variation(values: Sequence[float]) -> float:
    steps = (abs(after - before) for before, after in itertools.pairwise(values))
    return sum(step for step in steps if math.isfinite(step))


def _finite_mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
