from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop.data import ShardedSamples
from d9d_loop.data.sharded_samples import Layout

LAYOUTS: list[Layout] = ["round_robin", "chunked"]


@given(total=st.integers(1, 40), num_shards=st.integers(1, 9), layout=st.sampled_from(LAYOUTS), padded=st.booleans())
def test_shards_together_contain_every_sample_once(
    *, total: int, num_shards: int, layout: Layout, padded: bool
) -> None:
    shares = [
        ShardedSamples(range(total), shard=shard, num_shards=num_shards, layout=layout, padded=padded)
        for shard in range(num_shards)
    ]
    real = [[share[index] for index in range(share.num_real)] for share in shares]
    assert sorted(sample for samples in real for sample in samples) == list(range(total))
    if layout == "chunked":
        assert [sample for samples in real for sample in samples] == list(range(total))
    else:
        assert all(sample % num_shards == shard for shard, samples in enumerate(real) for sample in samples)
    lengths = [len(share) for share in shares]
    if padded:
        assert set(lengths) == {-(-total // num_shards)}
        for share, samples in zip(shares, real, strict=True):
            extra = [share[index] for index in range(share.num_real, len(share))]
            assert all(sample == (samples[-1] if samples else total - 1) for sample in extra)
    else:
        assert lengths == [len(samples) for samples in real]
        assert max(lengths) - min(lengths) <= 1


def test_an_index_beyond_a_shard_is_refused() -> None:
    share = ShardedSamples("abc", shard=0, num_shards=2)
    assert [share[index] for index in range(len(share))] == ["a", "c"]
    with pytest.raises(IndexError, match="sample 2 is out of range: the shard has 2 samples"):
        share[2]


def test_shard_indices_out_of_range_and_empty_data_are_refused() -> None:
    with pytest.raises(UserError, match="shard = 2, num_shards = 2; expected shard from 0 to"):
        ShardedSamples("abc", shard=2, num_shards=2)
    with pytest.raises(UserError, match="layout = 'blocks'; expected one of round_robin, chunked"):
        ShardedSamples("abc", shard=0, num_shards=2, layout=cast(Any, "blocks"))
    with pytest.raises(UserError, match="the data are empty"):
        ShardedSamples("", shard=0, num_shards=2)
