"""Backward passes that cannot be differentiated themselves."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from d9d_dist.errors import UserError

R = TypeVar("R")


def first_derivative_only(what: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate the static method `backward` of a `torch.autograd.Function` that autograd cannot differentiate.

    With `create_graph=True` it raises `UserError` that names `what`. torch's `once_differentiable` does so only if an
    outgoing gradient requires a gradient; that of a sum does not, and the second derivative would lack terms.
    """

    def decorate(backward: Callable[..., R]) -> Callable[..., R]:
        @wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> R:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise UserError(
                    f"got a backward pass with create_graph=True through {what}; expected first derivatives only, "
                    "because its backward pass cannot be differentiated. Compute this part with torch's own operators."
                )
            return backward(ctx, *gradients)

        return checked

    return decorate
