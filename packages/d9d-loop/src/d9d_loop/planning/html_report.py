"""HTML report of a cluster plan: one self-contained file with plots."""

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.planning.job_plan import ClusterPlan, describe
from d9d_loop.planning.plan_report import GIB, MEMORY_PARTS, report, verdict
from d9d_loop.planning.schedule_time import simulated_step
from d9d_loop.planning.step_model import PARTS
from d9d_loop.report.run_report import html_page
from d9d_pipeline import plot_simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999", "#000000")


def write_html(plan: ClusterPlan, path: Path) -> None:
    """Write the report.

    Raises:
        UserError: If matplotlib is not installed, or the file cannot be written.
    """
    try:
        pictures = [("Memory by rank", _memory(plan))]
        if not isinstance(plan.timing, str):
            pictures += [("Time of a step", _time(plan)), ("Roofline", _roofline(plan))]
            if plan.layout.pp > 1:
                pictures.append(("Pipeline", _pipeline(plan)))
        if plan.search is not None and plan.search.fitting:
            pictures.append(("Layouts: time and memory", _pareto(plan)))
    except ModuleNotFoundError:
        raise UserError(f"--html needs matplotlib. Install it: {install_hint('d9d-loop', 'plot')}") from None
    lines = verdict(plan).split("\n")
    body = [f"<h1>{html.escape(plan.hardware.name)}: {plan.layout.world_size} devices</h1>"]
    mark = "#009e73" if plan.fits else "#d55e00"
    body += [f'<p class="verdict" style="--mark: {mark}">{html.escape(line)}</p>' for line in lines]
    body += [f'<h2>{title}</h2>\n<img alt="{title}" src="data:image/png;base64,{data}">' for title, data in pictures]
    if plan.search is not None and plan.search.fitting:
        body += ["<h2>Fastest and smallest layouts that fit</h2>", _search_table(plan)]
    body += ["<h2>All figures</h2>", f"<pre>{html.escape(report(plan))}</pre>"]
    try:
        path.write_text(html_page("d9d-plan", body), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}. Choose another file for --html.") from None


def _search_table(plan: ClusterPlan) -> str:
    assert plan.search is not None
    rows = [
        f"<tr><td>{each.seconds:.3g} s</td><td>{each.memory.total / GIB:.1f} GiB</td><td>{each.time.limit}</td>"
        f"<td>{html.escape(describe(each.layout))}</td></tr>"
        for each in plan.search.fitting
    ]
    return "<table><tr><th>step</th><th>memory</th><th>limit</th><th>layout</th></tr>" + "".join(rows) + "</table>"


def _figure(height: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, height), layout="constrained")  # narrow: text stays readable on a phone
    return figure, figure.subplots()


def _encoded(figure: "Figure") -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=220)
    return base64.b64encode(data.getvalue()).decode()


def _memory(plan: ClusterPlan) -> str:
    figure, axes = _figure(1.2 + 0.5 * len(plan.memory))
    left = [0.0] * len(plan.memory)
    for name, color in zip(MEMORY_PARTS, _COLORS, strict=False):
        sizes = [getattr(each, name) / GIB for each in plan.memory]
        axes.barh([each.name for each in plan.memory], sizes, left=left, label=name, color=color)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(plan.hardware.device.memory_bytes / GIB, color="black", linestyle="--", label="device")
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return _encoded(figure)


def _time(plan: ClusterPlan) -> str:
    figure, axes = _figure(2.6)
    left = 0.0
    for name, color in zip(PARTS, _COLORS, strict=True):
        seconds = getattr(plan.time, name)
        if seconds > 1e-3 * plan.time.total:  # thinner bars are invisible
            axes.barh([""], [seconds], left=left, label=name, color=color)
            left += seconds
    low, high = plan.interval
    axes.errorbar([left], [0], xerr=[[left - low], [high - left]], color="black", capsize=4, label="90 % interval")
    axes.set_xlabel("seconds")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return _encoded(figure)


def _pipeline(plan: ClusterPlan) -> str:
    timeline = simulated_step(plan.timed.shape, plan.layout, plan.hardware, plan.program)
    figure, axes = _figure(1.3 + 0.3 * plan.layout.pp)
    plot_simulation(timeline, axes, title=f"{plan.program.num_microbatches} microbatches, in seconds")
    return _encoded(figure)


def _roofline(plan: ClusterPlan) -> str:
    figure, axes = _figure(3.6)
    device, fitted = plan.hardware.device, plan.hardware.fitted
    roof = device.memory_bandwidth * fitted.memory_efficiency
    peak = device.peak_flops["bf16"] * fitted.matmul_efficiency
    intensities = [2**power for power in range(-2, 14)]
    axes.loglog(intensities, [min(peak, each * roof) / 1e12 for each in intensities], color="black", label="roofline")
    shape, layout = plan.timed.shape, plan.layout
    tokens, h = layout.tokens_per_microbatch, shape.hidden_size
    products = {
        "attention projection": (tokens, shape.num_heads * shape.head_dim / layout.tp, h),
        "head": (tokens, shape.vocab_size / layout.tp, h),
    }
    if shape.num_layers > shape.num_sparse_layers:
        products["feed-forward"] = (tokens, shape.intermediate_size / layout.tp, h)
    if shape.num_experts:
        products["expert"] = (tokens * shape.top_k * layout.ep / shape.num_experts, shape.expert_size, h)
    for (name, (m, n, k)), color in zip(products.items(), _COLORS, strict=False):
        intensity = m * n * k / (m * k + k * n + m * n)
        axes.plot([intensity], [min(peak, intensity * roof) / 1e12], "o", color=color, label=name)
    axes.set_xlabel("FLOP per byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend(frameon=False)
    return _encoded(figure)


def _pareto(plan: ClusterPlan) -> str:
    assert plan.search is not None
    figure, axes = _figure(3.6)
    fitting = plan.search.fitting
    axes.plot([each.seconds for each in fitting], [each.memory.total / GIB for each in fitting], "o", color="#999999")
    front = plan.search.pareto()
    axes.step(
        [each.seconds for each in front],
        [each.memory.total / GIB for each in front],
        where="post",
        color="#0072b2",
        label="Pareto front",
    )
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel("GiB of the largest rank")
    axes.legend(frameon=False)
    return _encoded(figure)
