"""Global order of samples: a function of (seed, position) in constant memory, independent of the world size."""

from collections.abc import Callable
from typing import Any, final

import torch

from d9d_dist import UserError, stream_key
from d9d_dist.values.counter_random import mix_bits

_ROUNDS = 6
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LARGEST = 1 << 62
_SCALAR = 128
"""Largest number of positions that are faster to permute one by one than as a tensor."""


@final
class SampleOrder:
    """Map from positions in an infinite stream of epochs to sample indices; each epoch is a permutation of the data.

    The permutation is a Feistel network on the range up to the smallest power of 4 that holds all samples. It is
    applied again while the result is out of range (cycle walking; Black, Rogaway: "Ciphers with arbitrary finite
    domains", 2002). No permutation is stored, so a job of 10^12 samples starts and resumes immediately.

    Args:
        num_samples: Number of samples per epoch, from 1 to 2^62.
        shuffle: If False, each epoch has the samples in their original order.

    Raises:
        UserError: If `num_samples` is out of range.
    """

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool = True) -> None:
        if not 0 < num_samples <= _LARGEST:
            raise UserError(f"got {num_samples} samples; expected 1 to 2^62. Check the path of the data.")
        self._num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        half_bits = max((num_samples - 1).bit_length() + 1, 2) // 2
        self._half_bits, self._half_mask = half_bits, (1 << half_bits) - 1
        self._keys = (-1, [0])

    def __getitem__(self, position: int) -> int:
        return self.take(position, position + 1)[0]

    def take(self, start: int, stop: int) -> list[int]:
        """Return the sample indices at positions `start` to `stop - 1`. Much faster than indexing one by one."""
        taken: list[int] = []
        while start < stop:
            epoch, first = divmod(start, self._num_samples)
            last = min(first + stop - start, self._num_samples)
            taken += self._permuted(first, last, epoch) if self._shuffle else range(first, last)
            start += last - first
        return taken

    def _permuted(self, first: int, last: int, epoch: int) -> list[int]:
        keys = self._round_keys(epoch)
        if last - first <= _SCALAR:
            return [self._permuted_index(index, keys) for index in range(first, last)]
        indices = self._permute(torch.arange(first, last), keys, mix_bits)
        while (outside := (indices >= self._num_samples).nonzero()).numel():
            indices[outside] = self._permute(indices[outside], keys, mix_bits)
        return indices.tolist()

    def _permuted_index(self, index: int, keys: list[int]) -> int:
        index = self._permute(index, keys, _hash)
        while index >= self._num_samples:
            index = self._permute(index, keys, _hash)
        return index

    def _round_keys(self, epoch: int) -> list[int]:
        """Return the round keys of an epoch. The last result is cached."""
        kept, keys = self._keys
        if kept != epoch:
            key = stream_key(self._seed, "sample order", epoch)
            keys = [(key + number * _GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63) for number in range(_ROUNDS)]
            self._keys = (epoch, keys)
        return keys

    def _permute(self, indices: Any, keys: list[int], mix: Callable[[Any], Any]) -> Any:
        """Apply the network once, to an int64 tensor with `mix_bits` or to an integer with `_hash`."""
        left, right = indices >> self._half_bits, indices & self._half_mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & self._half_mask)
        return left << self._half_bits | right


def _hash(value: int) -> int:
    """Return the SplitMix64 finalizer of the lower 64 bits of an integer, like `mix_bits` but faster for one number."""
    value &= _MASK
    value = (value ^ value >> 30) * _FIRST & _MASK
    value = (value ^ value >> 27) * _SECOND & _MASK
    return value ^ value >> 31
