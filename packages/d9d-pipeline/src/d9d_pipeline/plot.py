"""Plots of programs and timelines: time on the x axis, one row per rank, one color per type of computation."""

import math
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from d9d_dist.install_hint import install_hint
from d9d_pipeline._earliest import Product, makes, needs
from d9d_pipeline.actions import Backward, BackwardInput, BackwardWeight, Forward, Overlap, Part, Transfer, parts
from d9d_pipeline.program import Program
from d9d_pipeline.simulate import simulate
from d9d_pipeline.timeline import Timeline, stages_in_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Target: TypeAlias = "Path | str | Axes"
"""Destination of a plot: a file, whose suffix selects the format (`.png`, `.svg`, `.pdf`), or axes of a figure."""

_GRAY, _TRANSFER = "#5a5a5a", "#3c3c3c"
# A color-blind safe palette (Okabe and Ito, "Color Universal Design").
_KINDS: dict[type[Part], tuple[str, str]] = {
    Forward: ("forward", "#0072b2"),
    Backward: ("backward", "#009e73"),
    BackwardInput: ("backward, inputs", "#e69f00"),
    BackwardWeight: ("backward, weights", "#cc79a7"),
}
_PALEST = 0.6  # fraction of white in the color of a rank's first stage, if it holds several
_ROW_HEIGHT = 0.86  # height of a rank's boxes; adjacent ranks are 1.0 apart
_TRANSFER_HEIGHT = 0.14  # height of the boxes of transfers
_ROW_INCHES, _MARGIN_INCHES = 0.42, 0.8
_BOX_INCHES = 0.22  # width of a short action
_MIN_INCHES, _MAX_INCHES = 8.0, 26.0  # width of the figure
_LEGEND_ENTRY_INCHES = 1.25
_POINTS_PER_INCH = 72
_MIN_FONT_POINTS = 4.0  # font size of the smallest readable numbers


def plot_program(program: Program, target: Target, *, title: str = "") -> None:
    """Plot a program, with lines from each computation to the computations on other ranks that need its result.

    A forward and each half of a backward take one unit of time. The bubble fraction is appended to the title.

    Raises:
        ProgramError: If the program does not pass `verify`.
        ModuleNotFoundError: If `target` is a file and matplotlib is not installed.
    """
    timeline = simulate(program)
    _draw(timeline, target, title=title, links=list(_links(program, timeline)))


def plot_simulation(timeline: Timeline, target: Target, *, title: str = "") -> None:
    """Plot a timeline, simulated or measured; see `plot_program`. Thin bars are transfers of the sending rank."""
    _draw(timeline, target, title=title, links=[])


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


_Link: TypeAlias = tuple[tuple[float, float], tuple[float, float]]
"""(time, rank) of a computation that makes a product, and (time, rank) of a computation that needs this product."""


def _links(program: Program, timeline: Timeline) -> Iterator[_Link]:
    made: dict[Product, tuple[float, int]] = {}
    for rank, timed in enumerate(timeline.ranks):
        for each in timed:
            for part in parts(each.action):
                made |= dict.fromkeys(makes(part), (each.end, rank))
    for rank, timed in enumerate(timeline.ranks):
        needed = [
            (product, each.start)
            for each in timed
            for part in parts(each.action)
            for product in needs(part, program.num_stages - 1)
        ]
        yield from ((made[product], (start, rank)) for product, start in needed if made[product][1] != rank)


def _draw(timeline: Timeline, target: Target, *, title: str, links: list[_Link]) -> None:
    if isinstance(target, Path | str):
        figure = _new_figure(timeline)
        _draw_on(figure.subplots(), timeline, title=title, links=links)
        figure.savefig(target)
    else:
        _draw_on(target, timeline, title=title, links=links)


def _new_figure(timeline: Timeline) -> "Figure":
    """Return a figure that pyplot does not manage, wide enough for the microbatch numbers."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        hint = install_hint("d9d-pipeline", "plot")
        raise ModuleNotFoundError(f"plots need matplotlib. Install it: {hint}") from error
    lengths = sorted(each.end - each.start for rank in range(len(timeline.ranks)) for each in timeline.computed(rank))
    short = lengths[len(lengths) // 4] if lengths else 0.0
    boxes = timeline.makespan / short if short > 0 else 0.0
    width = min(max(_MIN_INCHES, _BOX_INCHES * boxes + _MARGIN_INCHES), _MAX_INCHES)
    return Figure(figsize=(width, _ROW_INCHES * len(timeline.ranks) + 1.3), dpi=150, layout="constrained")


def _draw_on(axes: "Axes", timeline: Timeline, *, title: str, links: list[_Link]) -> None:
    has_transfers = any(isinstance(each.action, Transfer) for timed in timeline.ranks for each in timed)
    boxes = [box for rank in range(len(timeline.ranks)) for box in _boxes(timeline, rank, above=has_transfers)]
    axes.plot(*_paths(links), color=_TRANSFER, linewidth=0.5, alpha=0.6, zorder=1)
    boxes_by_style: dict[tuple[tuple[float, float], str, str], list[tuple[float, float]]] = defaultdict(list)
    for box in boxes:
        boxes_by_style[box.rows, box.color, box.edge].append(box.span)
    for (rows, color, edge), spans in boxes_by_style.items():
        axes.broken_barh(spans, rows, facecolor=color, edgecolor=edge, linewidth=0.6, zorder=2)
    _write_numbers(axes, boxes, timeline)
    for rank, timed in enumerate(timeline.ranks):
        transfers = [(each.start, each.end - each.start) for each in timed if isinstance(each.action, Transfer)]
        if transfers:
            axes.broken_barh(
                transfers,
                (rank + _ROW_HEIGHT / 2 - _TRANSFER_HEIGHT, _TRANSFER_HEIGHT),
                facecolor=_TRANSFER,
                alpha=0.6,
                zorder=2,
            )
    _style(axes, timeline, title)
    _add_legend(axes, timeline, has_transfers=has_transfers, has_links=bool(links))


class _Box(NamedTuple):
    """Rectangle: (start, length) on the time axis, (upper edge, height) on the rank axis, and its style."""

    span: tuple[float, float]
    rows: tuple[float, float]
    color: str
    edge: str
    text: str


def _boxes(timeline: Timeline, rank: int, *, above: bool) -> Iterator[_Box]:
    """Yield a box for each computation of a rank; the parts of an overlap are stacked, with a black edge."""
    stages = stages_in_order(timeline.computed(rank))
    top, height = rank - _ROW_HEIGHT / 2, _ROW_HEIGHT - (_TRANSFER_HEIGHT if above else 0.0)
    for timed in timeline.computed(rank):
        together = parts(timed.action)
        edge = "white" if len(together) == 1 else "black"
        span = (timed.start, timed.end - timed.start)
        for index, part in enumerate(together):
            rows = (top + index * height / len(together), height / len(together))
            color = _shade(_KINDS[type(part)][1], stages.index(part.stage), len(stages))
            yield _Box(span, rows, color, edge, str(part.microbatch))


def _shade(color: str, turn: int, turns: int) -> str:
    """Mix a color with white: the earlier the stage is on its rank, the more white."""
    white = _PALEST * (turns - 1 - turn) / (turns - 1) if turns > 1 else 0.0
    channels = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(channel + white * (255 - channel)):02x}" for channel in channels)


def _paths(links: list[_Link]) -> tuple[list[float], list[float]]:
    """Return all links as the x and y values of one line with gaps."""
    times, rows = [], []
    for (made, maker), (needed, user) in links:
        times += [made, needed, math.nan]
        rows += [maker, user, math.nan]
    return times, rows


def _write_numbers(axes: "Axes", boxes: list[_Box], timeline: Timeline) -> None:
    """Write the microbatch numbers into the boxes that are large enough."""
    inches = axes.get_window_extent().width / axes.figure.dpi
    for box in boxes:
        width = box.span[1] / timeline.makespan * inches * _POINTS_PER_INCH if timeline.makespan > 0 else 0.0
        tallest = box.rows[1] * _ROW_INCHES * _POINTS_PER_INCH
        size = min(9.0, 0.9 * tallest, 1.4 * width / len(box.text))
        if size >= _MIN_FONT_POINTS:
            middle = (box.span[0] + box.span[1] / 2, box.rows[0] + box.rows[1] / 2)
            color = "black" if _is_light(box.color) else "white"
            axes.text(*middle, box.text, size=size, color=color, ha="center", va="center_baseline", clip_on=True)


def _is_light(color: str) -> bool:
    red, green, blue = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue > 128


def _style(axes: "Axes", timeline: Timeline, title: str) -> None:
    bubble = f"bubble {100 * timeline.bubble:.1f} %"
    axes.set_title(f"{title}: {bubble}" if title else bubble, loc="left", fontsize=10, fontweight="bold")
    axes.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))])
    axes.set_ylim(len(timeline.ranks) - 0.5, -0.5)
    axes.set_xlabel(f"time ({timeline.unit})" if timeline.unit else "time", color=_GRAY, loc="right")
    axes.margins(x=0.01)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=_GRAY, labelsize=9)
    axes.tick_params(axis="y", length=0)


def _add_legend(axes: "Axes", timeline: Timeline, *, has_transfers: bool, has_links: bool) -> None:
    """Add the legend below the axes, with entries for the elements that the plot contains."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    computed = [each.action for rank in range(len(timeline.ranks)) for each in timeline.computed(rank)]
    kinds = {type(part) for action in computed for part in parts(action)}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=color, label=name) for kind, (name, color) in _KINDS.items() if kind in kinds
    ]
    if any(isinstance(action, Overlap) for action in computed):
        handles.append(Patch(facecolor="white", edgecolor="black", label="at the same time"))
    turns = max((len(stages_in_order(timeline.computed(rank))) for rank in range(len(timeline.ranks))), default=0)
    if turns > 1:
        shades = [_shade("#404040", turn, turns) for turn in range(turns)]
        handles += [Patch(facecolor=shade, label=f"stage {turn + 1} of a rank") for turn, shade in enumerate(shades)]
    if has_transfers or has_links:
        handles.append(Line2D([], [], color=_TRANSFER, linewidth=3.0 if has_transfers else 0.8, label="transfer"))
    columns = max(3, int(axes.get_window_extent().width / axes.figure.dpi / _LEGEND_ENTRY_INCHES))
    # `borderaxespad` is in units of the font size; it places the legend below the tick labels.
    axes.legend(
        handles=handles,
        ncols=min(columns, len(handles)),
        frameon=False,
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        borderaxespad=2.6,
        borderpad=0.0,
    )
