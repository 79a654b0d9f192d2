"""Warning before the start of a job that does not fit into the memory of its devices."""

from typing import TYPE_CHECKING

from d9d_dist import UserError
from d9d_loop.job.plan import JobPlan

if TYPE_CHECKING:
    from d9d_loop.planning import PlanWith


def warn_if_too_large(plan: JobPlan, plan_with: "PlanWith") -> None:
    """Print a warning on rank 0 if a job needs more memory than its devices have. No collectives.

    Without `plan.hardware`, nothing is checked. If the planner does not support the model, the reason is printed.

    Args:
        plan: Plan of the job.
        plan_with: Function that plans the job with another layout.

    Raises:
        UserError: On every rank, if `plan.hardware` is neither a known name nor a valid file.
    """
    settings, launch = plan.config.plan, plan.model.launch
    if settings.hardware is None or not settings.warn:
        return
    from d9d_loop.planning import Hardware, fit_message, plan_cluster  # noqa: PLC0415 - imports Triton through torch

    hardware = Hardware.load(settings.hardware)
    if launch.rank != 0:
        return
    try:
        text = fit_message(plan_cluster(plan_with, world_size=launch.world_size, hardware=hardware))
    except UserError as error:
        text = f"the memory of the job was not checked: {error}"
    if text:
        print(f"d9d: {text}", flush=True)
