"""Schedule-Free AdamW: averaged iterates instead of a learning rate decay, for runs of unknown length."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from d9d_dist import local_tensor
from d9d_loop.optimizers.groupwise import GroupwiseOptimizer, local_parts, scale_, update_unless


@final
class ScheduleFreeAdamW(GroupwiseOptimizer):
    """Schedule-Free AdamW (Defazio et al.: "The road less scheduled", arXiv:2405.15682, algorithm 1).

        y = (1 - beta1) z + beta1 x              training weights, at which gradients are computed
        z = z - lr (g / (sqrt(v) + eps) + wd y)  v: bias-corrected average of the squared gradients
        x = (1 - c) x + c z                      evaluation weights; c = lr_max^2 / (sum of lr_max^2 over all steps)

    The parameters hold y, and the state holds z and v. x is computed from y and z by `evaluation_weights`. A learning
    rate schedule should warm up and then stay constant: each step has the weight lr_max^2, where lr_max is the largest
    learning rate so far.

    Args:
        betas: beta1, the weight of x in y, which must not be 0; and beta2, the decay of v.
        weight_decay: Decoupled weight decay, applied to y.
    """

    counts_steps = True

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "steps": 0, "largest_lr": 0.0, "weight_sum": 0.0})
        self._holds_result = False

    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Apply the equations of the class docstring, without computing x."""
        assert not self._holds_result, "expected a step outside of evaluation_weights()"
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {"z": parameter.detach().clone(), "exp_avg_sq": torch.zeros_like(parameter)}
        lr, (beta1, beta2) = group["lr"], group["betas"]
        largest_lr = max(lr, group["largest_lr"])
        weight_sum = group["weight_sum"] + largest_lr**2
        self.count(group, steps=group["steps"] + 1, largest_lr=largest_lr, weight_sum=weight_sum)
        # While a warm-up is at learning rate 0, the weights do not change and the step has weight 0.
        c = largest_lr**2 / weight_sum if weight_sum > 0 else 0.0
        y = local_parts(parameters)
        if not y:
            return
        gradients = local_parts([parameter.grad for parameter in parameters])
        z = local_parts([self.state[parameter]["z"] for parameter in parameters])
        squares = local_parts([self.state[parameter]["exp_avg_sq"] for parameter in parameters])

        def update(y: list[Tensor], z: list[Tensor], squares: list[Tensor], gradients: list[Tensor]) -> None:
            scale_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - beta2)
            denominators = torch._foreach_div(squares, 1.0 - beta2 ** group["steps"])
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, group["eps"])
            directions = torch._foreach_div(gradients, denominators)
            torch._foreach_add_(directions, y, alpha=group["weight_decay"])
            # y' = (1 - beta1) z' + beta1 ((1 - c) x + c z'), with beta1 x = y - (1 - beta1) z and z' = z - lr direction
            torch._foreach_lerp_(y, z, weight=c)
            torch._foreach_add_(y, directions, alpha=lr * (beta1 * (1.0 - c) - 1.0))
            torch._foreach_add_(z, directions, alpha=-lr)

        update_unless(self.gate, update, (y, z, squares), (gradients,))

    @contextmanager
    @torch.no_grad()
    def evaluation_weights(self) -> Generator[None]:
        """Swap in x for the body of the `with` block, then restore y bit for bit from a copy."""
        assert not self._holds_result, "expected evaluation_weights() not to be entered twice"
        averaged = [
            (local_tensor(parameter), local_tensor(self.state[parameter]["z"]), group["betas"][0])
            for group in self.param_groups
            for parameter in group["params"]
            if self.state.get(parameter)
        ]
        kept = [y.clone() for y, _, _ in averaged]
        for y, z, beta1 in averaged:
            y.lerp_(z, weight=1.0 - 1.0 / beta1)
        self._holds_result = True
        try:
            yield
        finally:
            self._holds_result = False
            for (y, _, _), before in zip(averaged, kept, strict=True):
                y.copy_(before)
