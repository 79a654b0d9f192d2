"""Root-mean-square normalisation: the only norm that today's decoders need."""

from typing import final, overload

import torch
from torch import Tensor, nn

from d9d_dist.errors import UserError
from d9d_modules._kernel_choice import has_kernel

_LARGEST_KERNEL_SIZE = 2**15
"""The kernel holds whole rows in registers."""


@final
class RMSNorm(nn.Module):
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dim.

    "Root Mean Square Layer Normalization", arXiv:1910.07467, equation 4. The whole expression is computed in float32
    (float64 for float64 input) and rounded once, to the dtype of the input; on an accelerator by one Triton kernel
    forward and one backward.

    Args:
        size: Size of the last dim.
        eps: Added to the mean square.
        zero_centered: Whether the factor is `1 + weight`, with a weight that starts from 0: weight decay then pulls it
            to 1 (Gemma, Qwen3-Next).
    """

    def __init__(self, size: int, *, eps: float = 1e-6, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that the factor is one."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise `x`, or the sum of both.

        Args:
            x: What is normalised [..., size].
            residual: What is added before [..., size], in the dtype of `x`.

        Returns:
            The normalised tensor, of the shape and dtype of `x`. With a residual also the sum, which is the next one:
            both in one pass over memory.

        Raises:
            UserError: If the last dim is not `size`, or the residual is not like `x`.
        """
        if residual is None:
            return rms_norm(x, self.weight, eps=self.eps, zero_centered=self.zero_centered)
        return add_rms_norm(x, residual, self.weight, eps=self.eps, zero_centered=self.zero_centered)


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float = 1e-6, zero_centered: bool = False) -> Tensor:
    """The equation of `RMSNorm` as a function.

    Args:
        x: What is normalised [..., D]; any floating-point dtype.
        weight_D: The weight [D].
        eps: Added to the mean square.
        zero_centered: Whether the factor is `1 + weight`.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        UserError: If the last dim of `x` is not D.
    """
    _check_size(x, weight_D)
    if has_kernel(x) and len(weight_D) <= _LARGEST_KERNEL_SIZE:
        from d9d_modules import _triton_rms_norm  # noqa: PLC0415  (Triton is optional)

        return _triton_rms_norm.rms_norm(x, weight_D, eps=eps, zero_centered=zero_centered)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    # In the dtype of the arithmetic, or 1 + weight would round small weights away.
    factor_D = 1.0 + weight_D.to(wide.dtype) if zero_centered else weight_D
    return (wide * inverse_rms * factor_D).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, *, eps: float = 1e-6, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + residual)`, and that sum.

    Args:
        x: The output of a block [..., D].
        residual: What goes around the block [..., D], in the dtype of `x`.
        weight_D: The weight [D].
        eps: Added to the mean square.
        zero_centered: Whether the factor is `1 + weight`.

    Returns:
        The normalised sum and the sum, both of the shape and dtype of `x`. The sum is rounded before it is normalised,
        so that the result does not depend on whether the two are computed together.

    Raises:
        UserError: If the last dim of `x` is not D, or the residual is not like `x`.
    """
    _check_size(x, weight_D)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise UserError(
            f"the residual has shape {tuple(residual.shape)} and dtype {residual.dtype}; expected those of what it is "
            f"added to, {tuple(x.shape)} and {x.dtype}."
        )
    if has_kernel(x) and len(weight_D) <= _LARGEST_KERNEL_SIZE:
        from d9d_modules import _triton_rms_norm  # noqa: PLC0415  (Triton is optional)

        return _triton_rms_norm.add_rms_norm(x, residual, weight_D, eps=eps, zero_centered=zero_centered)
    total = x + residual
    return rms_norm(total, weight_D, eps=eps, zero_centered=zero_centered), total


def _check_size(x: Tensor, weight_D: Tensor) -> None:
    if x.shape[-1:] != weight_D.shape:
        raise UserError(
            f"an RMS norm of size {len(weight_D)} got a tensor of shape {tuple(x.shape)}; expected {len(weight_D)} as "
            "its last dim."
        )
