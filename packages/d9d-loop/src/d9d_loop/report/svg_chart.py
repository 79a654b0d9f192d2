"""Charts as SVG. The page's style sheet sets the colors, so that charts follow its light and dark theme."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from d9d_loop.report.run_history import RunHistory

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 28, 12, 32
_MOST_POINTS = 600

Curve = Sequence[tuple[int, float]]


def line_chart(curves: Mapping[str, Curve], *, title: str) -> str:
    """Return the SVG of curves over steps, one color for each. The vertical axis is logarithmic above two decades.

    Curves are points (step, value) by label, sorted by step, with finite values. `title` is for screen readers.
    """
    drawn = {label: _thinned(curve) for label, curve in curves.items() if curve}
    if not drawn:
        return ""
    steps = [step for curve in drawn.values() for step, _ in curve]
    values = [value for curve in drawn.values() for _, value in curve]
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > 100
    low, high = (math.log10(low), math.log10(high)) if is_log else (low, high)
    if high - low <= 1e-9 * max(-low, high):  # one value, and maybe rounding errors
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-300:
        high = low + 1
    first = min(steps)
    last = max(*steps, first + 1)

    def x(step: int) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        at = math.log10(value) if is_log else value
        return TOP + (high / 2 - at / 2) / (high / 2 - low / 2) * (HEIGHT - TOP - BOTTOM)  # no overflow

    shown = [10**tick if is_log else tick for tick in ticks(low, high)]
    columns = [(x(int(tick)), f"{int(tick)}") for tick in ticks(first, last) if tick == int(tick)]
    parts = _axes(title, [(y(value), f"{value:.4g}") for value in shown], columns)
    for number, (label, curve) in enumerate(drawn.items()):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
        kind = f"curve c{number % 8}"
        if len(curve) == 1:
            parts.append(f'<circle class="{kind} dot" cx="{points.split(",")[0]}" cy="{points.split(",")[1]}" r="4"/>')
        parts.append(f'<polyline class="{kind}" points="{points}"><title>{escape(label)}</title></polyline>')
    return "".join([*parts, "</svg>"])


def _axes(title: str, rows: Iterable[tuple[float, str]], columns: Iterable[tuple[float, str]]) -> list[str]:
    """Return the start of a chart: lines with labels at the heights of `rows`, and labels below."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y, label in rows:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    return parts + [f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>' for x, label in columns]


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between two limits."""
    rough = high / 5 - low / 5
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = math.ceil(low / step)
    return [float(f"{(first + number) * step:.12g}") for number in range(int(high / step - first + 1e-9) + 1)]


def _thinned(curve: Curve) -> list[tuple[int, float]]:
    """Return at most `_MOST_POINTS` points: the least and largest value of each group of neighbors, and both ends."""
    if len(curve) <= _MOST_POINTS:
        return list(curve)
    size = math.ceil(2 * len(curve) / (_MOST_POINTS - 2))
    kept = {curve[0], curve[-1]}
    for start in range(0, len(curve), size):
        group = curve[start : start + size]
        kept |= {min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])}
    return sorted(kept)


_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def timeline(history: RunHistory) -> str:
    """Return the SVG of a run: interruptions in gray, with their causes as tooltips, and repeated steps in orange."""
    seconds = max(history.total_seconds, 1e-3)
    scale, unit = next((each for each in _UNITS if seconds >= 2 * each[0]), _UNITS[-1])
    last_step = max(1, *(step for life in history.lives for _, step in life))

    def x(time: float) -> float:
        return LEFT + time / seconds * (WIDTH - LEFT - RIGHT)

    def y(step: float) -> float:
        return HEIGHT - BOTTOM - step / last_step * (HEIGHT - TOP - BOTTOM)

    columns = [(x(tick * scale), f"{tick:g}" if tick else unit) for tick in ticks(0, seconds / scale)]
    parts = _axes("steps over time", [(y(tick), f"{tick:g}") for tick in ticks(0, last_step)], columns)
    for number, each in enumerate(history.interruptions):
        begin, after = history.lives[number][-1][0], history.lives[number + 1]
        end = next((time for time, step in after if step > after[0][1]), after[-1][0])  # the first progress, if any
        parts.append(
            f'<rect class="gap" x="{x(begin):.1f}" y="{TOP}" width="{max(x(end) - x(begin), 1):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(f"after step {each.step}: {each.cause}")}</title></rect>'
        )
    for number, life in enumerate(history.lives):
        until = history.lives[number + 1][0][1] if number + 1 < len(history.lives) else life[-1][1]
        kept = [point for point in life if point[1] <= until]
        for kind, points in (("c0", kept), ("lost", life[max(len(kept) - 1, 0) :])):
            places = " ".join(f"{x(time):.1f},{y(step):.1f}" for time, step in points)
            parts.append(f'<polyline class="curve {kind}" points="{places}"/>')
    return "".join([*parts, "</svg>"])
