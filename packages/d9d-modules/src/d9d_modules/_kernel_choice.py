"""Where our Triton kernels can serve: the one place that decides between a kernel and torch's operators."""

from importlib.util import find_spec

import torch
from torch import Tensor, nn

_STORED = (torch.float32, torch.bfloat16, torch.float16)


def has_kernel(x: Tensor) -> bool:
    """Whether a Triton kernel can compute on a tensor: 32 bits or fewer, on an accelerator, with Triton installed.

    Not for the subclasses of tensors, such as those that only know their shape, and not while torch.compile traces: it
    makes kernels of torch's operators itself, together with what stands around them.
    """
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type not in ("cpu", "meta")
        and x.dtype in _STORED
        and not torch.compiler.is_compiling()
        and find_spec("triton") is not None
    )
