"""Text of a cluster plan: a summary of three or four lines, then tables."""

from collections.abc import Iterable

from d9d_dist import UserError, read_launch
from d9d_loop.job.trainer import Trainer
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.job_plan import ClusterPlan, describe, plan_cluster
from d9d_loop.planning.step_model import PARTS

GIB = 2**30
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "unsharded_gradients", "activations", "reserve")


def verdict(plan: ClusterPlan) -> str:
    """Return one line each for memory, step time and bottleneck, and for traits that are not modeled, if any."""
    spare = plan.spare_bytes / GIB
    memory = plan.hardware.memory_error * max(each.total for each in plan.memory) / GIB
    fits = f"fits with {spare:.1f} GiB to spare" if plan.fits else f"does NOT fit: {-spare:.1f} GiB too much"
    fits += f" (+- {memory:.1f} GiB) on {plan.layout.world_size} x {plan.hardware.name}: {describe(plan.layout)}"
    if isinstance(plan.timing, str):
        return f"{fits}\nno step time and no other layouts: {plan.timing}"
    low, high = plan.interval
    limit = plan.time.limit
    share = getattr(plan.time, limit) / plan.time.total
    lines = [
        fits,
        f"{plan.time.total:.3g} s a step ({low:.3g} to {high:.3g}), {plan.tokens_per_second:,.0f} tokens/s, MFU "
        f"{plan.mfu:.1%}; {plan.steps} steps: {plan.days:.2g} days, {plan.device_hours:,.0f} device hours",
        f"limited by {limit} ({share:.0%} of the step); goodput {plan.goodput.fraction:.1%} with a save every "
        f"{plan.goodput.save_seconds / 60:.0f} minutes",
    ]
    if plan.images is not None:
        lines.append(
            f"{plan.images['patches']:,.0f} image patches and {plan.layout.global_tokens:,} tokens a step, as in the "
            f"first microbatch; {plan.images['share_of_flops']:.0%} of the model FLOPs are those of images"
        )
    if plan.timing.not_modeled:
        lines.append(f"not modeled, so the step time may be off: {'; '.join(plan.timing.not_modeled)}")
    return "\n".join(lines)


def warn_if_too_large(trainer: Trainer, *, hardware: str) -> None:
    """Print a warning on rank 0 if a job does not fit into the memory of its devices. Call it before `train`.

    If the planner does not support the model, the reason is printed. No collectives.

    Args:
        trainer: The job, for as many ranks as this process was launched with.
        hardware: A name such as "h100-dgx", or the path of a TOML file.

    Raises:
        UserError: On every rank, if `hardware` is neither a known name nor a valid file.
    """
    loaded, launch = Hardware.load(hardware), read_launch()
    if launch.rank != 0:
        return
    try:
        plan = plan_cluster(trainer, world_size=launch.world_size, hardware=loaded)
        text = None if plan.fits else _fit_message(plan)
    except UserError as error:
        text = f"the memory of the job was not checked: {error}"
    if text is not None:
        print(f"d9d: {text}", flush=True)


def _fit_message(plan: ClusterPlan) -> str:
    """Return a message that the job does not fit, with the nearest layout that fits."""
    largest = max(plan.memory, key=lambda each: each.total)
    parts = ", ".join(f"{name} {getattr(largest, name) / GIB:.1f}" for name in MEMORY_PARTS)
    device = plan.hardware.device.memory_bytes / GIB
    return (
        f"the job needs {largest.total / GIB:.1f} GiB on rank {largest.rank} ({largest.name}), but a device of "
        f"{plan.hardware.name} has {device:.1f} GiB: {parts}.\n" + _nearest(plan)
    )


def _nearest(plan: ClusterPlan) -> str:
    """Return the remedies of a job that does not fit: for unsharded gradients, and the nearest layout that fits."""
    whole = max(each.unsharded_gradients for each in plan.memory) / GIB
    saved = (
        f"Gradients are kept unsharded until the last microbatch: {whole:.1f} GiB. gradients.reduce_each_microbatch = "
        "true shards them after each one, and communicates more.\n"
    )
    return (saved if whole >= 0.1 else "") + _nearest_layout(plan)


def _nearest_layout(plan: ClusterPlan) -> str:
    if isinstance(plan.timing, str):
        return f"Other layouts were not compared: {plan.timing}"
    if plan.nearest is None:
        return "No layout that fits was found. Use more devices, or ones with more memory."
    best = plan.nearest
    return (
        f"The nearest layout that fits needs {best.memory.total / GIB:.1f} GiB and takes {best.seconds:.3g} s a step: "
        f"{describe(best.layout)}."
    )


def report(plan: ClusterPlan) -> str:
    """Return the summary and the tables: memory, time, sensitivity, collectives, and the search, if any."""
    memory = [
        (each.name, *(f"{getattr(each, name) / GIB:.2f}" for name in MEMORY_PARTS), f"{each.total / GIB:.2f}")
        for each in plan.memory
    ]
    sections = [
        verdict(plan),
        "Memory in GiB (exact, except for the reserve)\n" + _table(("rank", *MEMORY_PARTS, "total"), memory),
    ]
    if not isinstance(plan.timing, str):
        sections += _time_sections(plan)
    sent = [
        (name, f"{size / GIB:.3f}")
        for name, size in sorted(plan.collectives.items(), key=lambda each: -each[1])
        if size >= 2**20
    ]
    if sent:
        sections.append("Collectives of the first rank in a step\n" + _table(("collective", "GiB"), sent))
    if not plan.fits:
        sections.append(_nearest(plan))
    if plan.search is not None:
        rows = [
            (f"{each.seconds:.4g}", f"{each.memory.total / GIB:.1f}", each.time.limit, describe(each.layout))
            for each in plan.search.fitting
        ]
        title = f"Fastest and smallest of {plan.search.num_legal} layouts that fit"
        empty = f"No layout fits. The smallest needs {plan.search.smallest.memory.total / GIB:.1f} GiB: "
        empty += f"{describe(plan.search.smallest.layout)}. Use more devices, or ones with more memory."
        sections.append(f"{title}\n" + _table(("seconds", "GiB", "limit", "layout"), rows) if rows else empty)
    return "\n\n".join(sections)


def _time_sections(plan: ClusterPlan) -> list[str]:
    """Return the tables of the step time's parts and of its sensitivity."""
    time = [
        (name, f"{getattr(plan.time, name):.4g}", f"{getattr(plan.time, name) / plan.time.total:.1%}")
        for name in PARTS
        if getattr(plan.time, name) > 0
    ]
    better = [
        (name, f"{value:.4g}", f"{1 - value / plan.time.total:.1%}") for name, value in plan.timed.sensitivity.items()
    ]
    return [
        "Time of a step\n" + _table(("part", "seconds", "share"), time),
        "If it were 10 % faster\n" + _table(("part", "step in s", "gain"), better),
    ]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    last = len(head) - 1
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
