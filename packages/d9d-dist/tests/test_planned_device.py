import torch

from d9d_dist.planned_device import each_block, is_on_host, planned_accelerator, recorded_blocks


def test_no_tensor_is_on_the_host_while_an_accelerator_is_planned() -> None:
    tensors = [torch.empty(1), torch.empty(1, device="meta")]
    assert all(map(is_on_host, tensors))
    with planned_accelerator():
        assert not any(map(is_on_host, tensors))
    assert all(map(is_on_host, tensors))


def test_blocks_cover_the_range() -> None:
    assert list(each_block(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(each_block(0, 3)) == []


def test_equal_blocks_are_skipped_once_the_recorder_returns_true() -> None:
    counted = []

    def end(num_equal: int) -> bool:
        counted.append(num_equal)
        return len(counted) > 1  # the first block allocates

    with recorded_blocks(lambda: end):
        assert list(each_block(11, 2)) == [slice(0, 2), slice(2, 4), slice(10, 11)]
    assert counted == [4, 3, 0]
