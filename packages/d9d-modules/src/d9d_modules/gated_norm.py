"""Gated RMS norm for the output of linear attention, whose magnitude is unbounded, unlike in softmax attention."""

from typing import final

import torch
from torch import Tensor, nn

from d9d_modules.norm import rms_norm
from d9d_modules.swiglu import silu_mul


@final
class GatedRMSNorm(nn.Module):
    """Gated RMS norm `silu(gate) * x / sqrt(mean(x ** 2) + eps) * weight` over the last dim.

    The norm is applied before the gate, as in "Gated Delta Networks" (arXiv:2412.06464), figure 1. On accelerators it
    uses the Triton kernels of `rms_norm` and `silu_mul`.
    """

    def __init__(self, size: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight with ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize `x` [..., size] and multiply by `silu(gate)`; `gate` has the shape and dtype of `x`."""
        return silu_mul(gate, rms_norm(x, self.weight, eps=self.eps))
