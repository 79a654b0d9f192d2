import torch

from d9d_dist import is_on_host, planned_accelerator


def test_no_tensor_is_on_the_host_while_an_accelerator_is_planned() -> None:
    tensors = [torch.empty(1), torch.empty(1, device="meta")]
    assert all(map(is_on_host, tensors))
    with planned_accelerator():
        assert not any(map(is_on_host, tensors))
    assert all(map(is_on_host, tensors))
