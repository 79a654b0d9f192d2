"""Context manager for forward passes that do not affect training."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from d9d_state import rng_state, set_rng_state


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
    """Switch to evaluation mode without gradients; restore the modules' modes and the random states on exit."""
    state = rng_state()
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        set_rng_state(state)
