"""Timeline of a run as SVG: completed steps over time, steps that were lost, and interruptions."""

from html import escape

from d9d_loop.report.run_history import RunHistory
from d9d_loop.report.svg_chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ticks

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

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="steps over time">']
    for tick in ticks(0, last_step):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(0, seconds / scale):
        label = f"{tick:g}" if tick else unit
        parts.append(f'<text x="{x(tick * scale):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>')
    for number, each in enumerate(history.interruptions):
        begin, end = history.lives[number][-1][0], _first_step_time(history, number + 1)
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


def _first_step_time(history: RunHistory, number: int) -> float:
    """Return the time of the first completed step after a start, else of the last record before the next start."""
    life = history.lives[number]
    return next((time for time, step in life if step > life[0][1]), life[-1][0])
