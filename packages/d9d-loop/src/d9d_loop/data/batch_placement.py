"""Placement of batches: padding of the rows, copy to the device, and context-parallel split of the sequences."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from d9d_dist import ContextSplit, DistributedContext
from d9d_loop.task import BatchTask


class BatchPlacement:
    """Copy of batches to this rank's device, and split of their sequences over context-parallel ranks.

    Rows are padded to the length that context and tensor parallelism need.

    All context- and tensor-parallel ranks of one data-parallel rank read the same batch.
    """

    def __init__(self, task: BatchTask, ctx: DistributedContext) -> None:
        self._task, self._device = task, ctx.device
        cp_size, tp_size = ctx.size("batch", "cp"), ctx.size("batch", "tp")
        self._split = ContextSplit(ctx.mesh_for("batch")["cp"]) if cp_size > 1 else None
        self._multiple = row_multiple(cp_size, tp_size)

    def __call__(self, batch: Any) -> Any:
        """Return this rank's part of a batch on its device. Issues no collectives."""
        return self.padded(batch)[0]

    def padded(self, batch: Any) -> tuple[Any, int]:
        """Return this rank's part of a batch on its device, and the number of columns added to whole rows."""
        num_added = 0
        if self._multiple > 1:
            batch, num_added = self._task.pad_sequence(batch, self._multiple)
        on_device = to_device(batch, self._device)
        return on_device if self._split is None else self._task.split_sequence(on_device, self._split), num_added


def row_multiple(cp_size: int, tp_size: int) -> int:
    """Return the number whose multiples are lengths of rows; each context-parallel rank has two chunks."""
    return tp_size if cp_size == 1 else 2 * cp_size * tp_size


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a pytree to a device with `non_blocking=True`. On CPU, return the batch unchanged."""
    if device.type == "cpu":
        return batch
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
