"""The decay of a recurrent state: how much of it each head keeps, as the input says.

Shape legend: B batch, L length, H heads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard
from torch.nn import functional as F

from d9d_dist import TensorStyle

_LARGEST_RATE = 16.0
_SMALLEST_STEP, _LARGEST_STEP = 0.001, 0.1


@final
class DecayGate(nn.Module):
    """`log(alpha) = -exp(log_rate) * softplus(x + bias)`, one of each for every head: below 0, so alpha is below 1.

    That of Mamba-2 (arXiv:2405.21060), which "Gated Delta Networks" (arXiv:2412.06464), section 3.3, takes over; so are
    the initial values. Computed in float32, or float64 for float64 input, where a product of many alphas is exact
    enough.

    Args:
        num_heads: Number of heads.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw rates uniformly up to 16, and biases so that `softplus(bias)` is log-uniform from 0.001 to 0.1."""
        nn.init.uniform_(self.log_rate, 0.01, _LARGEST_RATE).log_()  # never from 0, of which there is no logarithm
        step = nn.init.uniform_(self.bias, math.log(_SMALLEST_STEP), math.log(_LARGEST_STEP)).exp_()
        step.add_(torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, x_BLH: Tensor) -> Tensor:
        """The logarithms of the decays [B, L, H], float32 or float64, of what a projection gives for each head."""
        dtype = torch.promote_types(x_BLH.dtype, torch.float32)
        return -self.log_rate.to(dtype).exp() * F.softplus(x_BLH.to(dtype) + self.bias)


@final
@dataclass(frozen=True)
class DecayParallel(TensorStyle):
    """A `DecayGate` split like the heads: both of its parameters [H] are `Shard(0)`."""

    def placements(self) -> Mapping[str, Placement]:
        """See `d9d_dist.TensorStyle.placements`."""
        return {"log_rate": Shard(0), "bias": Shard(0)}
