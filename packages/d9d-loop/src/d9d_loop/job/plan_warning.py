"""Warning of a job that does not fit into the memory of its devices, before it starts."""

from typing import TYPE_CHECKING

from d9d_dist import UserError
from d9d_loop.job.plan import JobPlan
from d9d_loop.job.rehearsal import in_fork

if TYPE_CHECKING:
    from d9d_loop.planning import PlanWith

_SECONDS = 120.0


def warn_if_too_large(plan: JobPlan, plan_with: "PlanWith") -> None:
    """Print on rank 0 that a job needs more memory than its devices have, if `plan.hardware` is set. No collectives.

    The planner runs in a forked process. Models that it does not support are not checked.

    Args:
        plan: Plan of the job.
        plan_with: Plans the job with another layout.

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

    def message() -> str:
        try:
            return fit_message(plan_cluster(plan_with, world_size=launch.world_size, hardware=hardware))
        except UserError:
            return ""

    if text := in_fork(message, seconds=_SECONDS):
        print(f"d9d: {text}", flush=True)
