"""Base class and helpers of d9d's own optimizers, which update one parameter group at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from d9d_dist import local_tensor


class GroupwiseOptimizer(Optimizer, ABC):
    """Optimizer whose step calls `update` for each parameter group."""

    @final
    @torch.no_grad()
    def step(  # ty: ignore[incompatible-method-override]  (torch declares an overload for each kind of closure)
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient, and return the loss of `closure`, if there is one.

        `closure` recomputes the loss; it is called once, with gradients enabled.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self.update(group, trained)
        return loss

    @abstractmethod
    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Update one or more parameters of a group; all of them have gradients, and their state is in `self.state`.

        Parameters are plain tensors or DTensors.
        """


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Call an optimizer's closure with gradients enabled; return None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def local_parts(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the non-empty local shards of tensors, which suffice for an elementwise update; drop `None`.

    On DTensors, each operation would first propagate the placements of all tensors, which takes seconds in the first
    step. An empty parameter shard has empty gradients and state, so parallel lists still match.
    """
    parts = [local_tensor(tensor) for tensor in tensors if tensor is not None]
    return [part for part in parts if part.numel()]


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors by a number in place, with the number in at least float32.

    On CPUs, `torch._foreach_mul_` rounds a Python number to the dtype of the tensors: 0.99 is 0.98828125 in bfloat16.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    torch._foreach_mul_(list(tensors), torch.full((), factor, dtype=wide, device=tensors[0].device))
