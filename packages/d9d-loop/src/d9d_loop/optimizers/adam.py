"""Adam and AdamW of torch, applied to the local shards of DTensors."""

from typing import Any, final

import torch

from d9d_dist import local_tensor


@final
class LocalAdam(torch.optim.Adam):
    """`torch.optim.Adam` that computes on the local shard of each DTensor as a plain tensor; see `LocalAdamW`."""

    def _init_group(  # ty: ignore[incompatible-method-override]  (takes all that its parent does)
        self, group: dict[str, Any], *lists: list[torch.Tensor]
    ) -> bool:
        """Fill the lists of tensors for a step as torch does, then replace DTensors by their local shards."""
        has_complex = super()._init_group(group, *lists)
        _localize(lists)
        return has_complex


@final
class LocalAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` that computes on the local shard of each DTensor as a plain tensor.

    The update is elementwise, so the result is the same. The optimizer state still consists of DTensors. On DTensors,
    each operation would propagate the placements of the lists, which takes seconds in the first step.
    """

    def _init_group(  # ty: ignore[incompatible-method-override]  (takes all that its parent does)
        self, group: dict[str, Any], *lists: list[torch.Tensor]
    ) -> bool:
        """Fill the lists of tensors for a step as torch does, then replace DTensors by their local shards."""
        has_complex = super()._init_group(group, *lists)
        _localize(lists)
        return has_complex


def _localize(lists: tuple[list[torch.Tensor], ...]) -> None:
    for tensors in lists:
        tensors[:] = [local_tensor(tensor) for tensor in tensors]
