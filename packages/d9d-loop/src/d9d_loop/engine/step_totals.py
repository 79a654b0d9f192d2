"""Sums of losses and weights over the microbatches and ranks of a step."""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.task import Loss


@final
class StepTotals:
    """Sum of the losses and sum of the weights of a step.

    On a CPU, the sums are Python numbers, which are cheaper than tensors and as exact. On an accelerator they are a
    tensor, so the host does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = [0.0, 0.0]
        self._sums = None if device.type == "cpu" else torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, loss: Loss) -> None:
        """Add the loss and weight of a microbatch. No collectives."""
        if self._sums is None:
            self._numbers[0] += loss.total.item()
            self._numbers[1] += loss.weight.item() if isinstance(loss.weight, Tensor) else loss.weight
        else:
            self._sums[0].add_(loss.total.detach())
            self._sums[1].add_(loss.weight)

    def reduce(self, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor | float]:
        """Sum over the ranks of a group; return the mean loss, the weight, and 1 / weight. One all-reduce.

        The tensors are 0-dim float64. 1 / weight is 0 for weight 0, because 0 / 0 would be NaN; NaN for a NaN weight.

        Raises:
            UserError: On a CPU, if the weight is negative. On an accelerator, 1 / weight is NaN then, so that the step
                is bad.
        """
        if self._sums is not None:
            if group.size() > 1:
                dist.all_reduce(self._sums, group=group)
            total, weight = self._sums.unbind()
            per_weight = torch.where(weight > 0, 1.0 / weight, torch.where(weight < 0, torch.nan, 0.0 * weight))
            return total * per_weight, weight, per_weight
        if group.size() > 1:
            sums = torch.tensor(self._numbers, dtype=torch.float64)
            dist.all_reduce(sums, group=group)
            self._numbers = sums.tolist()
        total, weight = self._numbers
        if weight < 0:
            raise UserError(f"the loss weight of the step is {weight}; expected 0 or more. Check Loss.weight.")
        per_weight = 1.0 / weight if weight > 0 else 0.0 * weight
        mean_loss, whole_weight = torch.tensor([total * per_weight, weight], dtype=torch.float64).unbind()
        return mean_loss, whole_weight, per_weight
