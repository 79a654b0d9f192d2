"""What `torch.autocast` does here: products of experts take part in it as `nn.Linear` does, routing and sums never.

torch decides for its own operators. Custom autograd functions have to ask.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_inputs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of a product in the dtype of autocast, where it is active on their device; else as they are.

    As for torch's own products, float64 stays; gradients come back in the dtypes that the inputs had.
    """
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x, weight
    dtype = torch.get_autocast_dtype(device)
    x, weight = (each if each.dtype == torch.float64 else each.to(dtype) for each in (x, weight))
    return x, weight


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Lets torch compute in the dtypes that it is given, on the device of a tensor."""
    device = x.device.type
    # The meta device, where shapes are found out, knows no autocast.
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
