"""Shard of a map-style dataset, for evaluation and inference, where each data-parallel rank reads its own shard."""

from typing import Any, Literal, final

from d9d_dist import UserError
from d9d_dist.errors import check_choice
from d9d_loop.data.samples import Samples

Layout = Literal["round_robin", "chunked"]
"""Samples of a shard: `round_robin` takes every n-th sample, `chunked` takes consecutive samples."""


@final
class ShardedSamples:
    """Shard of a dataset. The shards are disjoint and together contain every sample.

    Training does not use shards: the ranks divide the samples of each step among them instead.

    Attributes:
        num_real: Number of samples without padding, which come before the repeats.

    Args:
        shard: Index of the shard, for example the data-parallel rank.
        padded: If True, short shards repeat their last sample until all shards have equal length, so that ranks run
            equally many collectives; `num_real` excludes the repeats. If False, lengths differ by at most one.

    Raises:
        UserError: If `shard` is not below `num_shards`, the layout is unknown, or the dataset is empty.
    """

    def __init__(
        self, samples: Samples, *, shard: int, num_shards: int, layout: Layout = "round_robin", padded: bool = False
    ) -> None:
        check_choice("layout", layout, Layout)
        if not 0 <= shard < num_shards:
            raise UserError(f"shard = {shard}, num_shards = {num_shards}; expected shard from 0 to num_shards - 1.")
        total = len(samples)
        if not total:
            raise UserError("the data are empty; expected at least one sample. Check the path of the data.")
        self._samples = samples
        if layout == "round_robin":
            self._real = range(shard, total, num_shards)
        else:
            self._real = range(shard * total // num_shards, (shard + 1) * total // num_shards)
        self.num_real = len(self._real)
        self._length = -(-total // num_shards) if padded else self.num_real
        # An empty shard repeats the last sample of the dataset.
        self._padding = self._real[-1] if self._real else total - 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} is out of range: the shard has {self._length} samples")
        return self._samples[self._real[index] if index < self.num_real else self._padding]
