"""Copies float32 to bfloat16 by stochastic rounding: up or down by chance, so that it is exact on average.

bfloat16 has 8 bits of precision. An update of less than half of the last one is lost by rounding to nearest, in every
step; by chance the right part of them arrives.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from d9d_dist import UserError, stream_key
from d9d_loop.optimizers.groupwise import local_part
from d9d_loop.optimizers.local_box import IndexRule, global_indices, index_rules
from d9d_loop.optimizers.random_bits import bits_at, draw

CHUNK = 1 << 18
"""Elements that torch's operators take at once: what is made on the way stays small."""


@torch.no_grad()
def stochastic_copy_(target: Tensor, source: Tensor, *, seed: int, step: int, name: str) -> None:
    """Copy a tensor to one of bfloat16, rounding each value up or down with the probability that keeps its mean.

    What is drawn for an element is a function of the seed, the step, the name and the element's index in the full
    tensor: results do not depend on the layout, and a step that is repeated rounds alike. Values that are not finite
    are kept. On an accelerator with Triton it is one kernel. No collectives.

    Args:
        target: bfloat16, plain or a DTensor.
        source: float32, of the same shape, device and placements.
        seed: The seed.
        step: Which step this is.
        name: Which tensor this is.

    Raises:
        UserError: If the dtypes or shapes are others.
    """
    if target.dtype != torch.bfloat16 or source.dtype != torch.float32 or target.shape != source.shape:
        raise UserError(
            f"stochastic_copy_ got a target of {_describe(target)} and a source of {_describe(source)}; expected "
            "torch.bfloat16 and torch.float32 of one shape. Convert the source with .float()."
        )
    key, part = stream_key(seed, name, step), local_part(target)
    flat, values, begin = part.contiguous().view(-1), local_part(source).reshape(-1), 0
    for count, rule in index_rules(target):
        _copy(flat[begin : begin + count], values[begin : begin + count], key=key, rule=rule)
        begin += count
    if not part.is_contiguous():
        part.copy_(flat.view(part.shape))


def _copy(target: Tensor, source: Tensor, *, key: int, rule: IndexRule) -> None:
    if has_kernel(target.device):
        from d9d_loop.optimizers import _triton_stochastic  # noqa: PLC0415  (Triton is optional)

        _triton_stochastic.copy(target, source, key=key, rule=rule)
        return
    for begin in range(0, target.numel(), CHUNK):
        end = min(begin + CHUNK, target.numel())
        noise = draw(bits_at(global_indices(rule, begin, end, target.device), key), 0)
        target[begin:end] = round_stochastically(source[begin:end], noise)


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """float32 to bfloat16: away from zero with a probability of the 16 bits that are cut off, over 65536.

    Args:
        values: float32.
        noise: Uniform from 0 to 65535, int32.
    """
    # The carry would make another value of one that is not finite.
    rounded = values.view(torch.int32).add(noise).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def has_kernel(device: torch.device) -> bool:
    """Whether our Triton kernels can compute on a device: an accelerator, with Triton installed."""
    return device.type not in ("cpu", "meta") and find_spec("triton") is not None


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
