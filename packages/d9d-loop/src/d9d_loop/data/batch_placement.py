"""Placement of batches: copy to the device and context-parallel split of the sequences."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from d9d_dist import ContextSplit, DistributedContext
from d9d_loop.task import BatchTask


class BatchPlacement:
    """Copy of batches to this rank's device, and split of their sequences over context-parallel ranks.

    All context- and tensor-parallel ranks of one data-parallel rank read the same batch.
    """

    def __init__(self, task: BatchTask, ctx: DistributedContext) -> None:
        self._task, self._device = task, ctx.device
        cuts = ctx.size("batch", "cp") > 1
        self._split = ContextSplit(ctx.mesh_for("batch")["cp"]) if cuts else None

    def __call__(self, batch: Any) -> Any:
        """Return this rank's part of a batch on its device. Issues no collectives."""
        on_device = to_device(batch, self._device)
        return on_device if self._split is None else self._task.split_sequence(on_device, self._split)


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a pytree to a device with `non_blocking=True`. On CPU, return the batch unchanged."""
    if device.type == "cpu":
        return batch
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
