"""Draw the diagrams of the documentation: layouts, meshes, splits, dispatch, checkpoints and memory.

Meshes come from `MeshConfig.domains`, and curves from recorded runs (`record_layout_curves.py`,
`record_post_training.py`). The other figures
show an order or a rule, not a measurement.
"""

import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from d9d_dist import MeshConfig

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
GREY = "#8a8a8a"


def diagrams() -> dict[str, Figure]:
    """Return all diagrams by name."""
    return {
        "layout_curves": layout_curves(),
        "post_training": post_training(),
        "packages": packages(),
        "meshes": meshes(),
        "context_split": context_split(),
        "expert_dispatch": expert_dispatch(),
        "checkpoint_save": checkpoint_save(),
        "step_memory": step_memory(),
    }


def layout_curves() -> Figure:
    """Plot the loss of one model in four layouts, and the difference from one process."""
    curves: dict[str, list[float]] = json.loads((ASSETS / "layout_curves.json").read_text(encoding="utf-8"))
    (_, reference), *others = curves.items()
    figure = Figure(figsize=(8.4, 3.1), layout="constrained")
    losses, errors = figure.subplots(1, 2, width_ratios=[3, 2])
    steps = range(1, len(reference) + 1)
    for index, (title, values) in enumerate(curves.items()):
        style = {"linewidth": 7 - 2 * index, "alpha": 0.9, "color": COLORS[index]}
        losses.plot(steps, values, label=title, **style)
    losses.set(xlabel="step", ylabel="loss", title="one model, four layouts")
    losses.legend(frameon=False, fontsize=8)
    for index, (_, values) in enumerate(others, start=1):
        relative = [abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True)]
        errors.plot(steps, [max(each, 1e-17) for each in relative], color=COLORS[index])
    errors.set(yscale="log", ylim=(1e-17, 1e-8), xlabel="step", title="difference from one process, relative")
    errors.title.set_fontsize(10)
    errors.axhline(1e-9, color=GREY, linestyle=":")
    errors.text(1, 1.3e-9, "bound of the tests", fontsize=8, color=GREY)
    return figure


def post_training() -> Figure:
    """Plot what the examples of post-training learn."""
    recorded = json.loads((ASSETS / "post_training_curves.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(9.6, 2.9), layout="constrained")
    sft, dpo, grpo = figure.subplots(1, 3)
    sft.plot(*zip(*recorded["sft"]["loss"], strict=True), color=COLORS[0])
    sft.set(title="sft_chat.py", xlabel="step", ylabel="loss of answers, nats per byte", ylim=(0, None))
    held_out = recorded["dpo"]["held_out"]
    steps = [each["step"] for each in held_out]
    dpo.plot(steps, [each["margin"] for each in held_out], color=COLORS[1], label="reward margin")
    dpo.plot(steps, [each["accuracy"] for each in held_out], color=COLORS[2], label="share of pairs above 0")
    dpo.set(title="dpo.py, held-out functions", xlabel="step")
    dpo.legend(frameon=False, fontsize=8)
    curves = {"one process": ("curve", "-", 1.5), "2 pipeline x 2 data ranks": ("curve_of_four_ranks", ":", 3.0)}
    for index, (label, (key, style, width)) in enumerate(curves.items()):
        values = [100 * each for each in recorded["grpo"][key]]
        grpo.plot(values, color=COLORS[3 - 3 * index], linestyle=style, linewidth=width, label=label)
    grpo.legend(frameon=False, fontsize=8)
    grpo.set(title="grpo.py", xlabel="step", ylabel="correct answers, %", ylim=(0, 100))
    return figure


def packages() -> Figure:
    """Draw the packages and what they depend on, without the dependencies that follow from others."""
    places = {
        "loop": (1.9, 3, "Trainer, config, data"),
        "moe": (4.2, 3, "mixture of experts"),
        "peft": (6.0, 2, "LoRA, DoRA"),
        "modules": (4.2, 2, "blocks, kernels, models"),
        "pipeline": (-0.2, 2, "schedules"),
        "metrics": (1.5, 2, "metrics, trackers"),
        "state": (3.3, 1, "weights, checkpoints"),
        "dist": (1.5, 0, "meshes, collectives, exact gradients"),
    }
    edges = (
        *(("loop", each) for each in ("pipeline", "metrics", "state")),
        *(("moe", "modules"), ("modules", "state"), ("peft", "state")),
        *(("state", "dist"), ("pipeline", "dist"), ("metrics", "dist")),
    )
    figure = Figure(figsize=(8.8, 3.6), layout="constrained")
    axes = _plain(figure, (-1.1, 6.9), (-0.45, 3.5))
    for upper, lower in edges:
        start, end = places[upper], places[lower]
        arrow = FancyArrowPatch((start[0], start[1] - 0.28), (end[0], end[1] + 0.28), arrowstyle="-|>")
        arrow.set(color=GREY, zorder=1, mutation_scale=9)
        axes.add_patch(arrow)
    for index, (name, (x, y, what)) in enumerate(places.items()):
        _box(axes, (x, y), COLORS[index], f"d9d-{name}", what)
    return figure


def meshes() -> Figure:
    """Draw the coordinates of eight ranks in three domains of a mesh."""
    config = MeshConfig(pipeline_parallel=2, data_parallel_shard=2, tensor_parallel=2, expert_parallel=4)
    domains = config.resolve(8).domains()
    figure = Figure(figsize=(10.4, 2.9), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("dense", "expert", "batch"), strict=True):
        sizes = {axis: size for axis, size in domains[name].items() if size > 1}
        axes.set(xlim=(-0.1, 4.1), ylim=(-0.1, 2.1), title=f'mesh_for("{name}")\n{_text(sizes)}')
        axes.title.set_fontsize(9)
        axes.axis("off")
        for rank in range(8):
            where, left = {}, rank
            for axis, size in reversed(sizes.items()):
                left, where[axis] = divmod(left, size)
            row, column = divmod(rank, 4)
            color = COLORS[next(iter(reversed(where.values())), 0)]
            axes.add_patch(Rectangle((column + 0.04, 1 - row + 0.04), 0.92, 0.92, color=color, alpha=0.35))
            axes.text(column + 0.5, 1 - row + 0.78, f"rank {rank}", ha="center", fontsize=7, weight="bold")
            lines = "\n".join(f"{axis} {where[axis]}" for axis in sizes)
            axes.text(column + 0.5, 1 - row + 0.35, lines, ha="center", va="center", fontsize=6)
    return figure


def _text(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def context_split(num_ranks: int = 4) -> Figure:
    """Draw the balanced split of a causal sequence: rank r holds chunk r and the mirrored chunk."""
    num_chunks = 2 * num_ranks
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    tokens, work = figure.subplots(1, 2, width_ratios=[3, 2])
    for query in range(num_chunks):
        rank = min(query, num_chunks - 1 - query)
        for key in range(query + 1):
            alpha = 0.45 if key == query else 0.85
            tokens.add_patch(Rectangle((key, num_chunks - 1 - query), 0.96, 0.96, color=COLORS[rank], alpha=alpha))
        tokens.text(-0.3, num_chunks - 0.5 - query, f"rank {rank}", ha="right", va="center", fontsize=8)
    tokens.set(xlim=(-2, num_chunks), ylim=(0, num_chunks), title="queries (rows) and the keys that they attend to")
    tokens.axis("off")
    balanced = [sum(min(q, num_chunks - 1 - q) == r and q + 0.5 for q in range(num_chunks)) for r in range(num_ranks)]
    in_order = [sum(q // 2 == rank and q + 0.5 for q in range(num_chunks)) for rank in range(num_ranks)]
    places = range(num_ranks)
    work.bar([each - 0.2 for each in places], in_order, 0.38, color=GREY, label="chunks in order")
    work.bar(
        [each + 0.2 for each in places], balanced, 0.38, color=COLORS[:num_ranks], label="first and mirrored chunk"
    )
    work.set(xticks=list(places), xlabel="rank", ylabel="attention work", title="the slowest rank decides")
    work.legend(frameon=False, fontsize=8)
    return figure


def expert_dispatch() -> Figure:
    """Draw how two ranks send tokens to the experts of each other, and combine the results."""
    chosen = [[0, 2, 3, 1], [1, 3, 3, 0]]  # the expert of each token; two experts per rank
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    axes = _plain(figure, (-0.3, 12.2), (-0.6, 4.6))
    for x, title in ((0, "tokens"), (3, "sorted by expert"), (6.4, "all-to-all, experts"), (10, "combined")):
        axes.text(x + 0.7, 4.25, title, ha="center", fontsize=9, weight="bold")
    for rank, experts in enumerate(chosen):
        base = 2.2 * (1 - rank)
        axes.text(-0.25, base + 0.9, f"rank {rank}", rotation=90, va="center", fontsize=9)
        for column, order in (
            (0.0, range(4)),
            (3.0, sorted(range(4), key=lambda token: experts[token])),
            (10.0, range(4)),
        ):
            for place, token in enumerate(order):
                _token(axes, column, base + 1.5 - 0.42 * place, f"{rank}.{token}", COLORS[experts[token]])
    arrived = [
        [
            (rank, token)
            for expert in (2 * holder, 2 * holder + 1)
            for rank in (0, 1)
            for token in range(4)
            if chosen[rank][token] == expert
        ]
        for holder in (0, 1)
    ]
    for holder, tokens in enumerate(arrived):
        for place, (rank, token) in enumerate(tokens):
            y = 2.2 * (1 - holder) + 1.5 - 0.42 * place
            _token(
                axes, 6.4, y, f"{rank}.{token}  expert {chosen[rank][token]}", COLORS[chosen[rank][token]], width=2.2
            )
            order = sorted(range(4), key=lambda each: chosen[rank][each]).index(token)
            for x0, x1, y1 in (
                (4.4, 6.4, 2.2 * (1 - rank) + 1.5 - 0.42 * order),
                (10.0, 8.6, 2.2 * (1 - rank) + 1.5 - 0.42 * token),
            ):
                axes.plot([x0, x1], [y1 + 0.17, y + 0.17], color=COLORS[chosen[rank][token]], linewidth=1, alpha=0.7)
    return figure


def checkpoint_save() -> Figure:
    """Draw the order of a background save, and what a kill leaves at each moment."""
    stages = (
        ("copy to host memory", 1.0, COLORS[0], "steps wait"),
        ("write a temporary folder, with digests", 4.0, COLORS[1], "steps continue"),
        ("fsync", 1.2, COLORS[2], ""),
        ("rename", 0.7, COLORS[4], "atomic"),
        ("retention", 1.1, COLORS[5], "delete old ones"),
    )
    figure = Figure(figsize=(8.4, 1.9), layout="constrained")
    axes = _plain(figure, (-0.1, 8.2), (-0.9, 1.5))
    x = 0.0
    for name, width, color, below in stages:
        axes.add_patch(Rectangle((x, 0), width - 0.05, 0.8, color=color, alpha=0.6))
        axes.text(
            x + width / 2,
            0.4,
            name.replace(" ", "\n", 1) if width < 1.3 else name,
            ha="center",
            va="center",
            fontsize=8,
        )
        axes.text(x + width / 2, -0.22, below, ha="center", va="center", fontsize=7, color=GREY)
        x += width
    axes.text(3.0, -0.65, "a kill here: resume from the previous checkpoint", ha="center", fontsize=8)
    axes.text(7.1, -0.65, "a kill here: resume from the new one", ha="center", fontsize=8)
    axes.text(0, 1.1, "one save, in the background", fontsize=9, weight="bold")
    return figure


def step_memory(num_layers: int = 8) -> Figure:
    """Draw the memory of a device during a step, without and with recomputation, in units of the parameters' bytes."""
    figure = Figure(figsize=(8.4, 3.0), layout="constrained")
    for axes, (title, kept) in zip(
        figure.subplots(1, 2, sharey=True),
        (("all activations kept", 0.6), ("full recomputation", 0.08)),
        strict=True,
    ):
        forward = [layer * kept for layer in range(num_layers + 1)]
        backward = [
            (num_layers - layer) * kept + (0.6 if kept < 0.6 and layer < num_layers else 0)
            for layer in range(num_layers + 1)
        ]
        activations = [*forward, *backward[1:], 0.0, 0.0]
        moments = range(len(activations))
        gradients = [0.0] * (num_layers + 1) + [layer / num_layers for layer in range(1, num_layers + 1)] + [1.0, 0.0]
        axes.stackplot(
            moments,
            [1.0] * len(activations),
            [2.0] * len(activations),
            gradients,
            activations,
            labels=["parameters", "optimizer (two moments)", "gradients", "activations"],
            colors=[COLORS[0], COLORS[5], COLORS[2], COLORS[1]],
            alpha=0.75,
        )
        axes.set(title=title, xticks=[num_layers / 2, 1.5 * num_layers, 2 * num_layers + 1.5])
        axes.set_xticklabels(["forward", "backward", "step"])
    figure.axes[0].set(ylabel="bytes / bytes of parameters")
    figure.axes[1].legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def _plain(figure: Figure, xlim: tuple[float, float], ylim: tuple[float, float]) -> Axes:
    axes = figure.subplots()
    axes.set(xlim=xlim, ylim=ylim)
    axes.axis("off")
    return axes


def _box(axes: Axes, place: tuple[float, float], color: str, title: str, below: str) -> None:
    x, y = place
    box = Rectangle((x - 0.8, y - 0.28), 1.6, 0.55, facecolor="white", edgecolor=color, linewidth=2, zorder=2)
    axes.add_patch(box)
    axes.text(x, y + 0.08, title, ha="center", va="center", fontsize=9, weight="bold", zorder=3)
    axes.text(x, y - 0.14, below, ha="center", va="center", fontsize=6.5, color="#444444", zorder=3)


def _token(axes: Axes, x: float, y: float, text: str, color: str, *, width: float = 1.4) -> None:
    axes.add_patch(Rectangle((x, y), width, 0.34, color=color, alpha=0.55))
    axes.text(x + width / 2, y + 0.16, text, ha="center", va="center", fontsize=7)
