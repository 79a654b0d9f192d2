"""Checksum of a tensor, to compare tensors between ranks or steps without exchanging or keeping their values.

The checksum of the 64-bit words w of a tensor's bytes is sum_i (2i + 1) w_i mod 2^64. A change of a single word always
changes the checksum, because 2i + 1 is odd; most permutations of words also change it.
"""

import torch

_WORDS_AT_ONCE = 1 << 20


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a tensor's values, 0-dim int64 on its device. Does not synchronize host and device."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    total = rest.view(torch.int64).squeeze(0)  # the last, zero-padded word has the factor 1
    for start in range(0, whole // 8, _WORDS_AT_ONCE):
        words = data[start * 8 : min((start + _WORDS_AT_ONCE) * 8, whole)].view(torch.int64)
        factors = torch.arange(start + 1, start + 1 + words.numel(), device=data.device).mul_(2).add_(1)
        total = total + (words * factors).sum()
    return total
