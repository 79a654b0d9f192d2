"""Generate the plots of the documentation from the code of this checkout while the documentation is built."""

import io
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from mkdocs.structure.files import File, Files

from d9d_modules import (
    AttentionOptions,
    DynamicNtkScaling,
    EagerBackend,
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    YarnScaling,
)
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

sys.path.append(str(Path(__file__).parent))
from docs_diagrams import diagrams

NUM_RANKS, NUM_MICROBATCHES = 4, 8
GALLERY: dict[str, tuple[str, Schedule]] = {
    "forward_only": ("Forward only", ForwardOnly(2)),
    "gpipe": ("GPipe", GPipe()),
    "looped_breadth_first": ("Looped breadth first", LoopedBreadthFirst()),
    "one_forward_one_backward": ("1F1B", OneForwardOneBackward()),
    "interleaved": ("Interleaved 1F1B", Interleaved()),
    "zero_bubble_1p": ("ZB1P", ZeroBubble1P()),
    "zero_bubble_1p_interleaved": ("Interleaved ZB1P", ZeroBubble1P(2)),
    "zero_bubble_1p_long": ("Interleaved ZB1P with a long warm-up", ZeroBubble1P(2, warmup="long")),
    "zero_bubble_v": ("ZB-V", ZeroBubbleV()),
    "dualpipe_v": ("DualPipeV", DualPipeV()),
}


def pictures() -> dict[str, str]:
    """Return all plots as SVG, by name."""
    return {
        **schedules(),
        "attention_masks": as_svg(attention_masks()),
        "rope_scalings": as_svg(rope_scalings()),
        **{name: as_svg(figure) for name, figure in diagrams().items()},
    }


def schedules() -> dict[str, str]:
    """Plot each schedule, and one with transfer times."""
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


def attention_masks(length: int = 16) -> Figure:
    """Plot attention probabilities for equal queries and keys, which show only the mask."""
    documents_BS = torch.tensor([[0] * 6 + [1] * (length - 6)])
    window = AttentionOptions(window=4)
    cases = {
        "causal": (AttentionOptions(), None),
        "a window of 4": (window, None),
        "documents of 6 and 10": (AttentionOptions(), documents_BS),
        "both": (window, documents_BS),
    }
    figure = Figure(figsize=(10.0, 2.9), layout="constrained")
    same = torch.zeros(1, length, 1, length)
    each_its_own = torch.eye(length).view(1, length, 1, length)
    for axes, (title, (options, documents)) in zip(
        figure.subplots(1, len(cases), sharey=True), cases.items(), strict=True
    ):
        seen = EagerBackend().attend(same, same, each_its_own, options=options, documents_BS=documents, sinks_H=None)
        axes.imshow(seen[0, :, 0].tolist(), cmap="Blues", vmin=0.0, vmax=0.5)
        axes.set(title=title, xlabel="key")
    figure.axes[0].set(ylabel="query")
    return figure


def rope_scalings() -> Figure:
    """Plot the factor by which each scaling lengthens the wavelength of each pair."""
    theta, rotary_dim, original, factor = 500_000.0, 128, 8192, 8.0
    length = torch.tensor(int(factor) * original)
    scalings: dict[str, RotaryScaling] = {
        "linear": LinearScaling(factor=factor),
        f"dynamic NTK, at length {length:,}": DynamicNtkScaling(factor=factor, original_max_positions=original),
        "YaRN": YarnScaling(factor=factor, original_max_positions=original),
        "Llama 3": Llama3Scaling(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=original
        ),
    }
    plain_R = LinearScaling(factor=1.0).frequencies(theta, rotary_dim=rotary_dim, length=length)
    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, scaling in scalings.items():
        stretch_R = plain_R / scaling.frequencies(theta, rotary_dim=rotary_dim, length=length)
        axes.plot((2 * math.pi / plain_R).tolist(), stretch_R.tolist(), label=name, marker=".", markersize=3)
    axes.axvline(original, color="0.5", linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="wavelength without scaling, in positions", ylabel="times longer")
    axes.set_yticks([1, 2, 4, 8, 16, 32, 64], labels=["1", "2", "4", "8", "16", "32", "64"])
    axes.legend(frameon=False)
    return figure


def as_svg(figure: Figure) -> str:
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "d9d"}):  # equal plots give equal files
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def on_files(files: Files, config: Any) -> Files:
    """Add the plots; mkdocs calls this hook before it reads pages."""
    for name, svg in pictures().items():
        files.append(File.generated(config, f"pictures/{name}.svg", content=svg))
    return files
