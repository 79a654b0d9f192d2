"""A share of a dataset: for data that ranks go through by themselves, as in evaluation or inference."""

from typing import Any, Literal, final

from d9d_dist import UserError
from d9d_loop.batches import Samples

Layout = Literal["round_robin", "chunked"]
"""Which samples make a share: every n-th one, or consecutive ones."""


@final
class ShardedSamples:
    """The samples of a dataset that fall to one of several shards; together they are all of it, each sample once.

    It has no state: a share and an index say which sample is meant. Training needs no shards, since ranks share out the
    samples of each step, whatever their number is.

    Args:
        samples: The whole dataset.
        shard: Number of the share, e.g. the data-parallel rank.
        num_shards: Number of shares.
        layout: Which samples make a share.
        padded: Whether short shares repeat their last sample until all are equally long, as ranks need that wait for
            each other; `num_real` says how many count. If not, lengths differ by up to one.

    Raises:
        UserError: If there is no such shard, or no sample.
    """

    def __init__(
        self, samples: Samples, *, shard: int, num_shards: int, layout: Layout = "round_robin", padded: bool = False
    ) -> None:
        if not 0 <= shard < num_shards:
            raise UserError(f"shard = {shard} of num_shards = {num_shards}; expected 0 to {num_shards - 1}.")
        total = len(samples)
        if not total:
            raise UserError("the data are empty; expected at least one sample. Check where they are read from.")
        self._samples = samples
        if layout == "round_robin":
            self._real = range(shard, total, num_shards)
        else:
            self._real = range(shard * total // num_shards, (shard + 1) * total // num_shards)
        self._length = -(-total // num_shards) if padded else len(self._real)
        # A share without a sample of its own repeats one of others'.
        self._padding = self._real[-1] if self._real else total - 1

    @property
    def num_real(self) -> int:
        """How many samples at the front count; those after them are repeated."""
        return len(self._real)

    def __len__(self) -> int:
        """Number of samples, repeated ones included."""
        return self._length

    def __getitem__(self, index: int) -> Any:
        """The sample at an index of the share."""
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of a share of {self._length}")
        return self._samples[self._real[index] if index < len(self._real) else self._padding]
