"""Adam and AdamW of torch, applied to the local shards of DTensors."""

from typing import Any, final

import torch
from torch.distributed.tensor import DTensor

from d9d_dist import local_tensor


class _OnLocalShards(torch.optim.Adam):
    """Adam that computes on the local shard of each DTensor as a plain tensor; its state consists of DTensors.

    The update is elementwise, so the result is the same. On DTensors, each operation would propagate the placements of
    all tensors, which takes seconds in the first step.
    """

    def _init_group(  # ty: ignore[incompatible-method-override]  (accepts the parent's arguments)
        self, group: dict[str, Any], *lists: list[torch.Tensor]
    ) -> bool:
        """Fill the lists of tensors for a step as torch does, then replace DTensors by their local shards.

        On CPUs, torch's fused kernels ignore the strides of gradients, so they get contiguous ones.
        """
        has_complex = super()._init_group(group, *lists)
        if group["fused"]:
            lists[1][:] = [gradient.contiguous() for gradient in lists[1]]
        if any(isinstance(parameter, DTensor) for parameter in group["params"]):
            for tensors in lists:
                tensors[:] = map(local_tensor, tensors)
        return has_complex


@final
class LocalAdam(_OnLocalShards):
    """`torch.optim.Adam` that computes on local shards."""


@final
class LocalAdamW(_OnLocalShards, torch.optim.AdamW):
    """`torch.optim.AdamW` that computes on local shards."""
