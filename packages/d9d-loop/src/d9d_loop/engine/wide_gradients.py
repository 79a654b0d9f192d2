"""Gradients whose dtype differs from that of the parameter, which most optimizers do not support."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from d9d_dist import grad_dtype_of


def wide_gradients(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters whose gradients accumulate in a dtype other than the parameter's."""
    return [parameter for parameter in parameters if grad_dtype_of(parameter) != parameter.dtype]


@contextmanager
def converted_gradients(parameters: Sequence[nn.Parameter]) -> Generator[None]:
    """Convert gradients to the dtypes of their parameters for an optimizer step, and drop them afterwards."""
    wide = [(parameter, grad_dtype_of(parameter)) for parameter in parameters]
    with torch.no_grad():
        for parameter, _ in wide:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
    try:
        yield
    finally:
        for parameter, dtype in wide:
            parameter.grad = None
            parameter.grad_dtype = dtype
