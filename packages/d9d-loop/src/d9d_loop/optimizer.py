"""The optimizers that a configuration can name; any other is passed to the Trainer as a function of the model."""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat
from torch import nn
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
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
            foreach=True,
        )


OptimizerConfig = AdamWConfig
