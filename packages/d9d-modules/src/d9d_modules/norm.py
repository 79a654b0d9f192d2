"""Root-mean-square normalization, plain and gated, and layer normalization with the same interface."""

from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_modules.kernel_choice import has_kernel
from d9d_modules.swiglu import silu_mul

_LARGEST_KERNEL_SIZE = 2**14
"""Largest row of the Triton kernel. A program keeps whole rows in registers; longer rows would spill to memory."""


@final
class RMSNorm(nn.Module):
    """RMS norm `x / sqrt(mean(x ** 2) + eps) * weight` over the last dim.

    "Root Mean Square Layer Normalization", arXiv:1910.07467, equation 4. The whole expression is computed in float32
    (float64 for float64 input) and rounded once to the input dtype. On accelerators forward and backward are one fused
    Triton kernel each.

    Args:
        zero_centered: If True, scale by `1 + weight`, with the weight initialized to 0. Weight decay then pulls the
            scale to 1 (Gemma, Qwen3-Next).
    """

    def __init__(self, size: int, *, eps: float = 1e-6, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight so that the scale is 1."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize `x` [..., size]; with a residual, see `add_rms_norm`.

        Raises:
            UserError: If the last dim is not `size`, or shape or dtype of `residual` differ from `x`.
        """
        if residual is None:
            return rms_norm(x, self.weight, eps=self.eps, zero_centered=self.zero_centered)
        return add_rms_norm(x, residual, self.weight, eps=self.eps, zero_centered=self.zero_centered)


@final
class LayerNorm(nn.Module):
    """Layer norm over the last dim (arXiv:1607.06450), with the residual argument of `RMSNorm`."""

    def __init__(self, size: int, *, eps: float = 1e-5, bias: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize `x` [..., size]; with a residual, return the norm of the sum, and the sum."""
        total = x if residual is None else x + residual
        normed = F.layer_norm(total, self.weight.shape, self.weight, self.bias, self.eps)
        return normed if residual is None else (normed, total)


@final
class GatedRMSNorm(nn.Module):
    """Gated RMS norm `silu(gate) * x / sqrt(mean(x ** 2) + eps) * weight` over the last dim.

    For the output of linear attention, whose magnitude is unbounded, unlike in softmax attention.

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


Norm: TypeAlias = RMSNorm | LayerNorm
"""Norm of a decoder layer."""


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float = 1e-6, zero_centered: bool = False) -> Tensor:
    """Compute the norm of `RMSNorm` for `x` [..., D], with the weight [D]; shape and dtype do not change.

    Raises:
        UserError: If the last dim of `x` is not D.
    """
    _check_size(x, weight_D)
    if has_kernel(x) and len(weight_D) <= _LARGEST_KERNEL_SIZE:
        from d9d_modules import _triton_rms_norm  # noqa: PLC0415  (Triton is optional)

        return _triton_rms_norm.rms_norm(x, weight_D, eps=eps, zero_centered=zero_centered)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    # Add in the wide dtype: in bfloat16, 1 + weight would lose small weights.
    factor_D = 1.0 + weight_D.to(wide.dtype) if zero_centered else weight_D
    return (wide * inverse_rms * factor_D).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, *, eps: float = 1e-6, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm(x + residual)` and the sum `x + residual`.

    `x` and `residual` [..., D] have the same shape and dtype, and so do the results. The sum is rounded to that dtype
    before the norm, so the fused kernel and the separate operators compute the same.

    Raises:
        UserError: If the last dim of `x` is not D, or shape or dtype of `residual` differ from `x`.
    """
    _check_size(x, weight_D)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise UserError(
            f"the residual has shape {tuple(residual.shape)} and dtype {residual.dtype}; expected those of x, "
            f"{tuple(x.shape)} and {x.dtype}."
        )
    if has_kernel(x) and len(weight_D) <= _LARGEST_KERNEL_SIZE:
        from d9d_modules import _triton_rms_norm  # noqa: PLC0415  (Triton is optional)

        return _triton_rms_norm.add_rms_norm(x, residual, weight_D, eps=eps, zero_centered=zero_centered)
    total = x + residual
    return rms_norm(total, weight_D, eps=eps, zero_centered=zero_centered), total


def _check_size(x: Tensor, weight_D: Tensor) -> None:
    if x.shape[-1:] != weight_D.shape:
        raise UserError(
            f"an RMS norm of size {len(weight_D)} got a tensor of shape {tuple(x.shape)}; expected a last dim of "
            f"{len(weight_D)}."
        )
