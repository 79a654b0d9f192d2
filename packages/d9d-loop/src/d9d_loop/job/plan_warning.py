"""Warning of a job that does not fit into the memory of its devices, before it starts."""

from d9d_dist import UserError
from d9d_loop.job.plan import JobPlan
from d9d_loop.job.rehearsal import in_fork
from d9d_loop.planning import Hardware, PlanWith, fit_message, plan_cluster

_SECONDS = 120.0
_FITS = "fits"


def warn_if_too_large(plan: JobPlan, plan_with: PlanWith) -> None:
    """Print on rank 0 that a job needs more memory than its devices have, if `plan.hardware` is set. No collectives.

    The planner runs in a forked process. If it does not support the model, the reason is printed.

    Args:
        plan: Plan of the job.
        plan_with: Plans the job with another layout.

    Raises:
        UserError: On every rank, if `plan.hardware` is neither a known name nor a valid file.
    """
    settings, launch = plan.config.plan, plan.model.launch
    if settings.hardware is None or not settings.warn:
        return
    hardware = Hardware.load(settings.hardware)
    if launch.rank != 0:
        return

    def message() -> str:
        try:
            return fit_message(plan_cluster(plan_with, world_size=launch.world_size, hardware=hardware)) or _FITS
        except UserError as error:
            return f"the memory of the job was not checked: {error}"

    # Empty if autograd ran in this process before: its threads do not survive a fork.
    text = in_fork(message, seconds=_SECONDS) or "the planner did not finish; run d9d-plan to check the job's memory."
    if text != _FITS:
        print(f"d9d: {text}", flush=True)
