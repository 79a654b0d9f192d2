"""Brings batches to the device of a rank."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a pytree to a device; everything else passes through."""
    if device.type == "cpu":
        return batch
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
