"""What the optimizers of our own have in common: one group after the other, each with its trained parameters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class GroupwiseOptimizer(Optimizer, ABC):
    """An optimizer whose step is the same update for every group."""

    @final
    @torch.no_grad()
    def step(  # ty: ignore[incompatible-method-override]  (torch declares an overload for each kind of closure)
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss anew; called once, with gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self.update(group, trained)
        return loss

    @abstractmethod
    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Update some parameters of a group, one or more, all of which have gradients.

        Args:
            group: The group's settings.
            parameters: Plain or DTensors; their states are in `self.state`.
        """


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """What this rank holds of some tensors: an update that treats each element alike needs no more.

    On DTensors themselves each operation would first ask how lists of placements combine, which takes seconds in the
    first step. Parts without an element are left out; those of one parameter are without one together.
    """
    parts = [local_part(tensor) for tensor in tensors if tensor is not None]
    return [part for part in parts if part.numel()]


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors by a number, in place.

    `torch._foreach_mul_` rounds a Python number to the tensors' dtype on CPUs: 0.99 is 0.98828125 in bfloat16.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    torch._foreach_mul_(list(tensors), torch.full((), factor, dtype=wide, device=tensors[0].device))
