"""Lion optimizer: the update is the sign of averaged gradients, so every weight moves by the learning rate."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from d9d_loop.optimizers.groupwise import GroupwiseOptimizer, local_parts, scale_, update_unless


@final
class Lion(GroupwiseOptimizer):
    """Lion (Chen et al.: "Symbolic discovery of optimization algorithms", arXiv:2302.06675, algorithm 2).

        u = sign(beta1 m + (1 - beta1) g)
        w = (1 - lr wd) w - lr u
        m = beta2 m + (1 - beta2) g

    Args:
        lr: Learning rate, typically 3 to 10 times smaller than for AdamW.
        betas: beta1, the weight of m in the update, and beta2, the decay of m.
        weight_decay: Decoupled weight decay, typically 3 to 10 times larger than for AdamW.
    """

    def __init__(
        self, params: ParamsT, *, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Apply the equations of the class docstring to all parameters at once (`torch._foreach_*`)."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        weights = local_parts(parameters)
        if not weights:
            return
        gradients = local_parts([parameter.grad for parameter in parameters])
        averages = local_parts([self.state[parameter]["exp_avg"] for parameter in parameters])
        lr, (beta1, beta2) = group["lr"], group["betas"]

        def update(weights: list[Tensor], averages: list[Tensor], gradients: list[Tensor]) -> None:
            scale_(weights, 1.0 - lr * group["weight_decay"])
            updates = [average.clone() for average in averages]
            scale_(updates, beta1)
            torch._foreach_add_(updates, gradients, alpha=1.0 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_add_(weights, updates, alpha=-lr)
            scale_(averages, beta2)
            torch._foreach_add_(averages, gradients, alpha=1.0 - beta2)

        update_unless(self.gate, update, (weights, averages), (gradients,))
