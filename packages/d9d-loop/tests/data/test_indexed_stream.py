import pytest
import torch
from example_streams import assert_resumes_anywhere, lists_stream

from d9d_dist import UserError
from d9d_loop.data import IndexedStream
from d9d_loop.data.sample_order import SampleOrder


def test_an_indexed_stream_follows_the_sample_order_across_epochs() -> None:
    entries = assert_resumes_anywhere(lists_stream(7, seed=5), 30)
    assert entries == [SampleOrder(7, seed=5)[position] for position in range(30)]


@pytest.mark.parametrize("position", [0, 999, 10**12 - 1, 123456789012345])
def test_starts_anywhere_in_a_large_epoch(position: int) -> None:
    stream = IndexedStream(range(10**12), seed=1)
    cursor = stream.cursor({"position": position})
    assert cursor.take(3) == [SampleOrder(10**12, seed=1)[position + ahead] for ahead in range(3)]
    assert cursor.state_dict() == {"position": position + 3}


def test_reads_and_measures_samples() -> None:
    stream = lists_stream()
    assert stream.read(3) == [3] * 9
    assert stream.length(3) == 9
    assert IndexedStream([torch.zeros(4, 2)], seed=0).length(0) == 4
    assert IndexedStream([{"x": 1}], seed=0, length=lambda index: 5 + index).length(0) == 5


@pytest.mark.parametrize("sample", [{"x": [1, 2]}, 3, torch.tensor(1.0)])
def test_refuses_an_unknown_length(sample: object) -> None:
    with pytest.raises(UserError, match=r"of type (dict|int|Tensor) is unknown; .* Pass length="):
        IndexedStream([sample], seed=0).length(0)


def test_refuses_empty_data() -> None:
    with pytest.raises(UserError, match=r"got 0 samples; expected 1 to 2\^62"):
        IndexedStream([], seed=0)


def test_the_identity_of_an_indexed_stream_depends_on_length_seed_and_shuffling() -> None:
    orders = [
        IndexedStream([0], seed=0),
        IndexedStream([0, 1], seed=0),
        IndexedStream([0], seed=1),
        IndexedStream([0], seed=0, shuffle=False),
    ]
    identities = [order.identity() for order in orders]
    assert all(one != other for number, one in enumerate(identities) for other in identities[:number])
