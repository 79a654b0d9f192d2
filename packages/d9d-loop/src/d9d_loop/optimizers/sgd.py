"""SGD of torch, applied to the local shards of DTensors."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from d9d_loop.optimizers.groupwise import GroupwiseOptimizer, local_parts, update_unless


@final
class LocalSGD(GroupwiseOptimizer):
    """`torch.optim.SGD` that computes on the local shard of each DTensor as a plain tensor.

    The momentum buffer starts at zero, which is equivalent to torch's start at the first gradient. The weight decay is
    an L2 penalty.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay})

    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Update the local shards with `torch.optim.sgd.sgd`."""
        gradients, changed = local_parts([parameter.grad for parameter in parameters]), [local_parts(parameters)]
        if group["momentum"]:
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            changed.append(local_parts([self.state[parameter]["momentum_buffer"] for parameter in parameters]))

        def update(values: list[Tensor], *others: list[Tensor]) -> None:
            *buffers, gradients = others
            sgd(
                values,
                gradients,
                [*buffers[0]] if buffers else [None] * len(values),
                foreach=True,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
            )

        update_unless(self.gate, update, changed, (gradients,))
