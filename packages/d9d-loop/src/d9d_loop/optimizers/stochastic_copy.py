"""Copy of float32 to bfloat16 by stochastic rounding: up or down at random, so that the mean is exact.

bfloat16 has 8 bits of precision. Rounding to nearest loses every update smaller than half a unit in the last place;
with stochastic rounding, the parameter changes by the right amount on average.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from d9d_dist import UserError, local_tensor, stream_key
from d9d_dist.values.counter_random import random_bits_at
from d9d_loop.optimizers.index_rule import IndexRule, global_indices, index_rules

CHUNK = 1 << 18
"""Number of elements processed at a time without Triton, which limits the memory of temporary tensors."""


@torch.no_grad()
def stochastic_copy_(target: Tensor, source: Tensor, *, seed: int, step: int, name: str) -> None:
    """Copy float32 to bfloat16 with stochastic rounding, in place. The expected value of the result is the source.

    The random bits of an element are a function of the seed, the step, the name and the element's index in the full
    tensor. So results do not depend on the sharding, and a repeated step rounds identically. NaN and infinity are kept.
    On an accelerator with Triton, usually one kernel is launched. No collectives.

    `target` is a bfloat16 plain tensor or DTensor; `source` is float32, of the same shape, device and placements. Wrong
    dtypes or shapes raise `UserError`.
    """
    if target.dtype != torch.bfloat16 or source.dtype != torch.float32 or target.shape != source.shape:
        raise UserError(
            f"stochastic_copy_ got a target of {_describe(target)} and a source of {_describe(source)}; expected "
            "torch.bfloat16 and torch.float32 of the same shape. Convert the source with .float()."
        )
    key, part = stream_key(seed, name, step), local_tensor(target)
    flat, values, begin = part.contiguous().view(-1), local_tensor(source).reshape(-1), 0
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
        noise = draw(random_bits_at(global_indices(rule, begin, end, target.device), key), 0)
        target[begin:end] = round_stochastically(source[begin:end], noise)


def draw(bits: Tensor, number: int) -> Tensor:
    """Extract group `number` (0 to 3) of 16 bits from int64 `bits`, least significant first, as int32."""
    return (bits >> (16 * number)).bitwise_and_(0xFFFF).to(torch.int32)


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16: away from zero with probability (discarded 16 bits) / 65536, else toward zero.

    `noise` is int32, uniform from 0 to 65535.
    """
    # Adding noise could carry into other bits of NaN and infinity.
    rounded = values.view(torch.int32).add(noise).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def has_kernel(device: torch.device) -> bool:
    """Return True if the Triton kernels support the device: an accelerator, with Triton installed."""
    return device.type not in ("cpu", "meta") and find_spec("triton") is not None


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
