"""Draws the pictures of the documentation while it is built: what the code of this checkout makes of each schedule."""

import io
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from mkdocs.structure.files import File, Files

from d9d_pipeline import (
    Costs,
    DualPipeV,
    ForwardOnly,
    GPipe,
    Interleaved,
    LoopedBreadthFirst,
    OneForwardOneBackward,
    Schedule,
    ZeroBubble1P,
    ZeroBubbleV,
    build,
    plot_program,
    plot_simulation,
    simulate,
)

NUM_RANKS, NUM_MICROBATCHES = 4, 8
GALLERY: dict[str, tuple[str, Schedule]] = {
    "forward_only": ("Forward only", ForwardOnly(2)),
    "gpipe": ("GPipe", GPipe()),
    "looped_breadth_first": ("Looped breadth first", LoopedBreadthFirst()),
    "one_forward_one_backward": ("1F1B", OneForwardOneBackward()),
    "interleaved": ("Interleaved 1F1B", Interleaved()),
    "zero_bubble_1p": ("ZB1P", ZeroBubble1P()),
    "zero_bubble_1p_interleaved": ("Interleaved ZB1P", ZeroBubble1P(2)),
    "zero_bubble_v": ("ZB-V", ZeroBubbleV()),
    "dualpipe_v": ("DualPipeV", DualPipeV()),
}


def pictures() -> dict[str, str]:
    """All pictures, as SVG by name."""
    drawn = {}
    for name, (title, schedule) in GALLERY.items():
        program = build(schedule, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
        length = simulate(program).makespan
        figure = Figure(figsize=(max(8.0, 0.22 * length), 3.0), layout="constrained")
        plot_program(program, figure.subplots(), title=title)
        drawn[name] = as_svg(figure)
    program = build(OneForwardOneBackward(), num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    figure = Figure(figsize=(10.0, 3.0), layout="constrained")
    plot_simulation(
        simulate(program, Costs(transfer=0.5)), figure.subplots(), title="1F1B, transfers take half a forward"
    )
    drawn["one_forward_one_backward_transfers"] = as_svg(figure)
    return drawn


def as_svg(figure: Figure) -> str:
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "d9d"}):  # the same picture is the same file
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs before it looks at any page."""
    for name, svg in pictures().items():
        files.append(File.generated(config, f"pictures/{name}.svg", content=svg))
    return files
