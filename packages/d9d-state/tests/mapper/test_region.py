import torch

from d9d_state.mapper.region import Region


def test_whole() -> None:
    region = Region.whole((2, 3))
    assert region == Region((0, 0), (2, 3))
    assert region.num_elements == 6
    assert region.is_whole([2, 3])
    assert not region.is_whole([2, 4])
    assert Region.whole(()).num_elements == 1


def test_within() -> None:
    assert Region((1, 0), (1, 3)).is_within((2, 3))
    assert Region((2, 0), (0, 3)).is_within((2, 3))
    assert not Region((1, 0), (2, 3)).is_within((2, 3))
    assert not Region((-1, 0), (1, 3)).is_within((2, 3))
    assert not Region((0,), (1,)).is_within((2, 3))


def test_of_a_tensor_is_a_view() -> None:
    tensor = torch.arange(12).view(3, 4)
    view = Region((1, 2), (2, 2)).of(tensor)
    assert view.tolist() == [[6, 7], [10, 11]]
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_regions_with_changed_dims() -> None:
    region = Region((1, 2), (3, 4))
    assert region.replaced(1, 7, 8) == Region((1, 7), (3, 8))
    assert region.inserted(1, 7, 8) == Region((1, 7, 2), (3, 8, 4))
    assert region.removed(0) == Region((2,), (4,))
    assert region.permuted([1, 0]) == Region((2, 1), (4, 3))
