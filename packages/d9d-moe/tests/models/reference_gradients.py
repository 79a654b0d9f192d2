"""Comparison of a model's gradients with those of a reference under other names."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from d9d_state import StateMapper


def assert_same_gradients(
    model: nn.Module, mapper: StateMapper, reference: Mapping[str, Tensor], *, tolerance: float
) -> None:
    """Assert that all gradients are those of a reference's tensors, up to a share of the largest gradient.

    The mapper maps the names of the reference. A tensor of the reference without a gradient counts as one of zeros:
    routers with one renormalized expert, and experts without tokens.
    """
    named = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in reference.items()}
    gradients = mapper.apply_all(named)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad - gradients[name]).abs().max() <= tolerance * largest, name
