import pytest
import torch
from example_streams import assert_resumes_anywhere, lists_stream

from d9d_dist import UserError
from d9d_loop.data import IndexedStream
from d9d_loop.data.indexed_stream import held_out_stream
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


@pytest.mark.parametrize("period", [2, 4, 10, 20])
def test_a_subset_of_periodic_data_has_every_kind(period: int) -> None:
    """Every 20th sample of alternating classes would be of one class."""
    stream = held_out_stream(range(2000), 200)
    chosen = stream.cursor().take(2000)
    counts = [sum(index % period == kind for index in chosen) for kind in range(period)]
    mean = 200 / period
    assert all(abs(count - mean) < 5 * mean**0.5 for count in counts)
    shuffled = IndexedStream(range(2000), seed=5, epochs=2, subset=200).cursor()
    first, second = shuffled.take(2000), shuffled.take(2000)
    assert sorted(first) == sorted(second) == chosen
    assert first != second


def test_a_subset_resumes_and_reads() -> None:
    stream = held_out_stream([[number] * number for number in range(10)], 5)
    entries = assert_resumes_anywhere(stream, 5)
    assert entries == sorted(set(entries))
    assert stream.cursor({"position": 5}).take(1) == []
    assert stream.num_batches(2) == 3
    assert (stream.read(4), stream.length(4)) == ([4] * 4, 4)


@pytest.mark.parametrize("subset", [None, 10, 11])
def test_a_subset_of_all_samples_is_the_dataset(subset: int | None) -> None:
    stream, whole = IndexedStream(range(10), seed=1, subset=subset), IndexedStream(range(10), seed=1)
    assert stream.cursor().take(25) == whole.cursor().take(25)
    assert stream.identity() == whole.identity()


def test_a_subset_has_a_sample() -> None:
    with pytest.raises(UserError, match=r"subset = 0; expected at least 1, or None"):
        IndexedStream(range(3), seed=0, subset=0)


def test_refuses_empty_data() -> None:
    with pytest.raises(UserError, match=r"got 0 samples; expected 1 to 2\^62"):
        IndexedStream([], seed=0)


def test_the_identity_of_an_indexed_stream_depends_on_length_seed_and_shuffling() -> None:
    orders = [
        IndexedStream([0], seed=0),
        IndexedStream([0, 1], seed=0),
        IndexedStream([0], seed=1),
        IndexedStream([0], seed=0, shuffle=False),
        IndexedStream([0, 1], seed=0, subset=1),
    ]
    identities = [order.identity() for order in orders]
    assert all(one != other for number, one in enumerate(identities) for other in identities[:number])
