"""Root-mean-square normalisation: the only norm that today's decoders need."""

from typing import final

import torch
from torch import Tensor, nn


@final
class RMSNorm(nn.Module):
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dim.

    "Root Mean Square Layer Normalization", arXiv:1910.07467, equation 4. The whole expression is computed in float32
    (float64 for float64 input) and rounded once, to the dtype of the input.

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

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., size]; the result has its shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.weight).to(x.dtype)
