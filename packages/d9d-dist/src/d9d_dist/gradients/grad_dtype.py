"""dtype in which gradients accumulate, if it is not the parameters' dtype, such as float32 for bfloat16 parameters.

Sums over microbatches and ranks lose small terms in 16 bits. `torch.Tensor.grad_dtype` sets the dtype of `.grad`.
`GradientSync` supports it, and FSDP2 does from torch 2.15 on.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from d9d_dist.errors import UserError

HAS_GRAD_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)
"""True if gradients can have a dtype of their own, and FSDP2 accumulates and reduces them in it."""


def set_grad_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Accumulate and reduce the gradients of floating-point parameters in a dtype. No collectives.

    Call it after the model is parallelized, before its first forward, and before `GradientSync` is constructed.
    Optimizers of torch require gradients of the parameters' dtype: convert them before the optimizer step.

    Raises:
        UserError: If torch is older than 2.15.
    """
    if not HAS_GRAD_DTYPE:
        raise UserError(
            f"gradients with a dtype of their own need torch 2.15 or newer, and this is torch {torch.__version__}. "
            "Upgrade torch, or remove the gradient dtype."
        )
    for parameter in parameters:
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.grad_dtype = dtype


def grad_dtype_of(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which the gradient of a parameter accumulates; older versions of torch lack `grad_dtype`."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


@cache
def hide_wide_gradients() -> None:
    """Hide gradients of another dtype than their tensors from `torch.compile`, which fails or is eager with them."""
    from torch._dynamo.variables import builder  # noqa: PLC0415 - takes a second without compile
    from torch._subclasses import meta_utils  # noqa: PLC0415

    def grad_of_equal_dtype(tensor: Tensor, safe_grad: Any = meta_utils.safe_grad) -> Tensor | None:
        gradient = safe_grad(tensor)
        return None if gradient is None or gradient.dtype != tensor.dtype else gradient

    if HAS_GRAD_DTYPE:
        builder.safe_grad = meta_utils.safe_grad = grad_of_equal_dtype  # ty: ignore[invalid-assignment]
