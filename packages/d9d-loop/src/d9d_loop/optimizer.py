"""The optimizers that a configuration can name; any other is passed to the Trainer as a function of the model."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, final

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

OptimizerProvider = Callable[[nn.Module], Optimizer]
"""Builds an optimizer over the trainable parameters of a materialised, parallelised model."""


_Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(BaseModel):
    """AdamW (Loshchilov, Hutter: "Decoupled weight decay regularization", arXiv:1711.05101)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = Field(1e-3, description="The peak learning rate; the schedule multiplies it.")
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.95), description="Decay of the first and second moment's averages.")
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decay of matrices; vectors, such as norms, do not decay.")

    def build(self, model: nn.Module) -> Optimizer:
        """Build it over the parameters that require gradients."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        ]
        return LocalAdamW(
            # A stage of a pipeline may have nothing to train; an optimizer wants a group.
            [group for group in groups if group["params"]] or groups[:1],
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
            foreach=True,
        )


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
        for tensors in lists:
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return has_complex


OptimizerConfig = AdamWConfig
