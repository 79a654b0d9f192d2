"""Sums of losses and weights over the microbatches and ranks of a step."""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.task import Loss


@final
class StepTotals:
    """Summed losses and summed weights of a step.

    On a CPU, the sums are Python numbers, which are cheaper than tensors and as exact. On an accelerator they are a
    tensor, so the host does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on_host = device.type == "cpu"
        self._numbers = [0.0, 0.0]
        self._sums = None if self._is_on_host else torch.zeros(2, dtype=torch.float64, device=device)
        self._reduction: dist.Work | None = None

    def add(self, loss: Loss) -> None:
        """Add the loss and weight of a microbatch. No collectives."""
        if self._sums is None:
            self._numbers[0] += loss.total.item()
            self._numbers[1] += loss.weight.item() if isinstance(loss.weight, Tensor) else loss.weight
        else:
            self._sums[0].add_(loss.total.detach())
            self._sums[1].add_(loss.weight)

    def start_reduction(self, group: dist.ProcessGroup) -> None:
        """Start the sum over the ranks of a group: one all-reduce, which overlaps with the gradient reduction.

        One all-reduce for both sums, because each collective costs at least the latency of the slowest link.
        """
        if group.size() > 1:
            if self._sums is None:
                self._sums = torch.tensor(self._numbers, dtype=torch.float64)
            self._reduction = dist.all_reduce(self._sums, group=group, async_op=True)

    def finish(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """Wait for the reduction; return the mean loss, the weight, and 1 / weight.

        The tensors are 0-dim float64. 1 / weight is 0 for weight 0, because 0 / 0 would be NaN; NaN for a NaN weight.

        Raises:
            UserError: On a CPU, if the weight is negative. On an accelerator, 1 / weight is NaN instead, so that the
                step is bad.
        """
        if self._reduction is not None:
            self._reduction.wait()
        if not self._is_on_host:
            assert self._sums is not None
            total, weight = self._sums.unbind()
            per_weight = torch.where(weight > 0, 1.0 / weight, torch.where(weight < 0, torch.nan, 0.0 * weight))
            return total * per_weight, weight, per_weight
        total, weight = self._numbers if self._sums is None else self._sums.tolist()
        if weight < 0:
            raise UserError(f"the loss weight of the step is {weight}; expected 0 or more. Check Loss.weight.")
        per_weight = 1.0 / weight if weight > 0 else 0.0 * weight
        # `torch.scalar_tensor` takes a third of the time of `torch.tensor`.
        mean_loss, whole_weight = (
            torch.scalar_tensor(each, dtype=torch.float64) for each in (total * per_weight, weight)
        )
        return mean_loss, whole_weight, per_weight
