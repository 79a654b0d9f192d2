"""Placement of batches: copy to the device and context-parallel split of the sequences."""

from typing import Any

from d9d_dist import ContextSplit, DistributedContext
from d9d_loop.job.device import to_device
from d9d_loop.task import BatchTask


class BatchPlacement:
    """Copies batches to this rank's device and splits their sequences over context-parallel ranks.

    All context- and tensor-parallel ranks of one data-parallel rank read the same batch.

    Args:
        task: Task whose `split_sequence` splits a batch.
        ctx: Distributed context of the job.
    """

    def __init__(self, task: BatchTask, ctx: DistributedContext) -> None:
        self._task, self._device = task, ctx.device
        cuts = ctx.size("batch", "cp") > 1
        self._split = ContextSplit(ctx.mesh_for("batch")["cp"]) if cuts else None

    def __call__(self, batch: Any) -> Any:
        """Return this rank's part of a batch on its device. Issues no collectives."""
        on_device = to_device(batch, self._device)
        return on_device if self._split is None else self._task.split_sequence(on_device, self._split)
