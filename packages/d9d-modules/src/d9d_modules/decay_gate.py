"""Input-dependent decay of the recurrent state of linear attention.

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
    """Decay gate `log(alpha) = -exp(log_rate) * softplus(x + bias)`, with one rate and bias per head; alpha < 1.

    Formula and initialization are those of Mamba-2 (arXiv:2405.21060), as used by "Gated Delta Networks"
    (arXiv:2412.06464), section 3.3. The gate computes in float32 (float64 for float64 input), because products of many
    alphas need that precision.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw rates uniformly from [0.01, 16], and biases so that `softplus(bias)` is log-uniform in [0.001, 0.1]."""
        nn.init.uniform_(self.log_rate, 0.01, _LARGEST_RATE).log_()  # the lower bound avoids log(0)
        step = nn.init.uniform_(self.bias, math.log(_SMALLEST_STEP), math.log(_LARGEST_STEP)).exp_()
        step.add_(torch.log(-torch.expm1(-step)))  # inverse of softplus

    def forward(self, x_BLH: Tensor) -> Tensor:
        """Return the logarithms of the decays [B, L, H], float32 or float64, for gate inputs [B, L, H]."""
        dtype = torch.promote_types(x_BLH.dtype, torch.float32)
        return -self.log_rate.to(dtype).exp() * F.softplus(x_BLH.to(dtype) + self.bias)


@final
@dataclass(frozen=True)
class DecayParallel(TensorStyle):
    """Tensor-parallel style that shards both parameters [H] of a `DecayGate` by heads, as `Shard(0)`."""

    def placements(self) -> Mapping[str, Placement]:
        """See `d9d_dist.TensorStyle.placements`."""
        return {"log_rate": Shard(0), "bias": Shard(0)}
