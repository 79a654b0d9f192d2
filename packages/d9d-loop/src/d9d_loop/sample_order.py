"""The global order of samples: a function of (seed, position) in constant memory, the same on any number of ranks."""

from d9d_dist import stream_key

_ROUNDS = 6
_MASK = (1 << 64) - 1


class SampleOrder:
    """Maps positions in an endless stream of epochs to sample indices; each epoch is a permutation of the data.

    The permutation is a Feistel network on the smallest square that holds the data, walked until it lands inside
    (Black, Rogaway: "Ciphers with arbitrary finite domains", 2002). Nothing is stored, so a job of 10^12 samples starts
    and resumes at once.

    Args:
        num_samples: Number of samples of an epoch.
        seed: Chooses the permutations.
        shuffle: Whether to permute at all; if not, each epoch goes through the data in order.
    """

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool = True) -> None:
        assert num_samples > 0
        self._num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        half_bits = max((num_samples - 1).bit_length() + 1, 2) // 2
        self._half_bits, self._half_mask = half_bits, (1 << half_bits) - 1

    def __getitem__(self, position: int) -> int:
        """The index of the sample at a position of the stream."""
        epoch, index = divmod(position, self._num_samples)
        if not self._shuffle:
            return index
        key = stream_key(self._seed, "sample order", epoch)
        index = self._permute(index, key)
        while index >= self._num_samples:
            index = self._permute(index, key)
        return index

    def _permute(self, index: int, key: int) -> int:
        left, right = index >> self._half_bits, index & self._half_mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_hash(right ^ (key + number * 0x9E3779B97F4A7C15)) & self._half_mask)
        return left << self._half_bits | right


def _hash(value: int) -> int:
    """The finaliser of SplitMix64."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
