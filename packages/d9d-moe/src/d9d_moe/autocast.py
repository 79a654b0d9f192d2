"""Support of `torch.autocast`, which custom autograd functions must query themselves.

Grouped products use the autocast dtype, like `nn.Linear`; routing and weighted sums disable autocast.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_inputs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs of a product, cast to the autocast dtype if autocast is enabled on their device.

    As in torch's own products, float64 tensors are not cast, and gradients have the dtypes of the inputs.
    """
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x, weight
    dtype = torch.get_autocast_dtype(device)
    x, weight = (each if each.dtype == torch.float64 else each.to(dtype) for each in (x, weight))
    return x, weight


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast on the device of `x`."""
    device = x.device.type
    # torch.autocast does not support the meta device.
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
