import pytest

from d9d_dist import UserError
from d9d_loop.data.contents import contents_of
from d9d_loop.data.sample_order import SampleOrder
from d9d_loop.jobs.text_files import split_samples


@pytest.mark.parametrize(("size", "held_out"), [(2, 0.5), (10, 0.1), (97, 0.3), (100, 0.9)])
def test_each_sample_is_in_one_part_in_the_order_of_the_data(size: int, held_out: float) -> None:
    training, others = split_samples(range(size), held_out, key="held_out")
    assert others is not None
    order, count = SampleOrder(size, seed=0).take(0, size), round(size * held_out)
    assert [others[index] for index in range(len(others))] == sorted(order[:count])
    assert [training[index] for index in range(len(training))] == sorted(order[count:])
    with pytest.raises(IndexError, match=f"sample {size} is out of range"):
        training[size]


def test_a_split_does_not_list_the_training_samples() -> None:
    size = 10**12
    training, others = split_samples(range(size), 1e-10, key="held_out")
    assert others is not None
    assert (len(training), len(others)) == (size - 100, 100)
    held_out = {others[index] for index in range(100)}
    assert held_out.isdisjoint(training[index] for index in range(0, len(training), size // 50))
    smaller, _ = split_samples(range(size), 2e-10, key="held_out")
    assert contents_of(training) == contents_of(split_samples(range(size), 1e-10, key="held_out")[0])
    assert contents_of(training) != contents_of(smaller)


def test_an_empty_part_is_an_error() -> None:
    with pytest.raises(UserError, match=r"held_out = 0.1 holds out 0 of 3 samples; expected samples in both parts"):
        split_samples(range(3), 0.1, key="held_out")
