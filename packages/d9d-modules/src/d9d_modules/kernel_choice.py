"""Properties of tensors and devices that decide which kernels can be used."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

_STORED = (torch.float32, torch.bfloat16, torch.float16)


def has_kernel(x: Tensor) -> bool:
    """Return True if the Triton kernels support a tensor: float32, bfloat16 or float16 on an accelerator with Triton.

    Always False for tensor subclasses, such as fake tensors, and during torch.compile tracing: the compiler fuses torch
    operators with the surrounding ones.
    """
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type not in ("cpu", "meta")
        and x.dtype in _STORED
        and not torch.compiler.is_compiling()
        and find_spec("triton") is not None
    )


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device; None for other devices."""
    if device.type in ("cpu", "meta"):
        return None
    module: Any = torch.get_device_module(device)
    capability = module.get_device_capability(device) if hasattr(module, "get_device_capability") else None
    return capability if isinstance(capability, tuple) else None
