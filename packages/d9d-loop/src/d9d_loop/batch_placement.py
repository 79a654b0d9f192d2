"""Brings a batch to where a rank computes: onto its device, and cut to the rank's share of the sequences."""

from typing import Any

from d9d_dist import ContextSplit, DistributedContext
from d9d_loop.device import to_device
from d9d_loop.task import BatchTask


class BatchPlacement:
    """Places the batches of a data-parallel rank, which all of its context- and tensor-parallel ranks read alike.

    Args:
        task: Says how a batch is cut.
        ctx: The job's context.
    """

    def __init__(self, task: BatchTask, ctx: DistributedContext) -> None:
        self._task, self._device = task, ctx.device
        cuts = ctx.size("batch", "cp") > 1
        self._split = ContextSplit(ctx.mesh_for("batch")["cp"]) if cuts else None

    def __call__(self, batch: Any) -> Any:
        """This rank's part of a batch, on its device. No collectives."""
        on_device = to_device(batch, self._device)
        return on_device if self._split is None else self._task.split_sequence(on_device, self._split)
