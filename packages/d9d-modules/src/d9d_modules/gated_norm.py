"""RMS norm of what a recurrence gives, times a gate: its scale is not bounded, unlike that of attention."""

from typing import final

import torch
from torch import Tensor, nn

from d9d_modules.norm import rms_norm
from d9d_modules.swiglu import silu_mul


@final
class GatedRMSNorm(nn.Module):
    """`silu(gate) * x / sqrt(mean(x ** 2) + eps) * weight` over the last dim, normalised before it is gated.

    As in "Gated Delta Networks" (arXiv:2412.06464), figure 1; on an accelerator by the Triton kernels of `rms_norm` and
    `silu_mul`.

    Args:
        size: Size of the last dim.
        eps: Added to the mean square.
    """

    def __init__(self, size: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise `x` [..., size] and multiply it with the SiLU of `gate`, of the same shape and dtype."""
        return silu_mul(gate, rms_norm(x, self.weight, eps=self.eps))
