"""Copy of batches to a device."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a pytree to a device with `non_blocking=True`. For the CPU, return the batch unchanged."""
    if device.type == "cpu":
        return batch
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
