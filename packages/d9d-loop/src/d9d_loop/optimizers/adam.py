"""torch's Adam and AdamW on what this rank holds of every DTensor."""

from typing import Any, final

import torch
from torch.distributed.tensor import DTensor


@final
class LocalAdam(torch.optim.Adam):
    """`torch.optim.Adam` that computes with this rank's part of every DTensor as a plain tensor; see `LocalAdamW`."""

    def _init_group(  # ty: ignore[incompatible-method-override]  (takes all that its parent does)
        self, group: dict[str, Any], *lists: list[torch.Tensor]
    ) -> bool:
        """Fill the lists of parameters, gradients and states that a step works on; torch's own hook for it."""
        has_complex = super()._init_group(group, *lists)
        _localize(lists)
        return has_complex


@final
class LocalAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` that computes with this rank's part of every DTensor as a plain tensor.

    The update is elementwise, so the result is the same. What is saved are DTensors as ever. Without it, each of its
    operations asks DTensor how lists of placements combine, which takes seconds in the first step.
    """

    def _init_group(  # ty: ignore[incompatible-method-override]  (takes all that its parent does)
        self, group: dict[str, Any], *lists: list[torch.Tensor]
    ) -> bool:
        """Fill the lists of parameters, gradients and states that a step works on; torch's own hook for it."""
        has_complex = super()._init_group(group, *lists)
        _localize(lists)
        return has_complex


def _localize(lists: tuple[list[torch.Tensor], ...]) -> None:
    for tensors in lists:
        tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
