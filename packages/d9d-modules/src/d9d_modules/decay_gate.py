"""Input-dependent decay of the recurrent state of linear attention.

Shape legend: B batch, L length, H heads.
"""

import math
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import UserError

_LARGEST_RATE = 16.0
_SMALLEST_STEP, _LARGEST_STEP = 0.001, 0.1


@final
class DecayGate(nn.Module):
    """Decay gate `log(alpha) = -exp(log_rate) * softplus(x + bias)`, with one rate and bias per head; alpha < 1.

    The formula and the initialization are from Mamba-2 (arXiv:2405.21060); "Gated Delta Networks" (arXiv:2412.06464),
    section 3.3, uses them too. The gate computes in float32 (float64 for float64 input), because products of many
    alphas need this precision.
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
class LogSigmoidDecayGate(nn.Module):
    """Decay gate `log(alpha) = log(sigmoid(x + bias)) / normalizer`, with one bias per head; alpha < 1.

    The gate of "Gated Linear Attention" (arXiv:2312.06635), section 4.4, with one decay per head. It computes in
    float32 (float64 for float64 input).

    Args:
        normalizer: Divisor, above 0. Larger values keep the state longer.

    Raises:
        UserError: If `normalizer` is not above 0.
    """

    def __init__(self, num_heads: int, *, normalizer: float = 16.0) -> None:
        super().__init__()
        if normalizer <= 0:
            raise UserError(f"normalizer = {normalizer}; expected a number above 0.")
        self.normalizer = normalizer
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the biases to 0."""
        nn.init.zeros_(self.bias)

    def forward(self, x_BLH: Tensor) -> Tensor:
        """Return the logarithms of the decays [B, L, H], float32 or float64, for gate inputs [B, L, H]."""
        dtype = torch.promote_types(x_BLH.dtype, torch.float32)
        return F.logsigmoid(x_BLH.to(dtype) + self.bias) / self.normalizer
