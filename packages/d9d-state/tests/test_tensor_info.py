import torch

from d9d_state import TensorInfo


def test_tensor_info_has_shape_dtype_and_size() -> None:
    info = TensorInfo.of(torch.empty(2, 3, dtype=torch.bfloat16, device="meta"))
    assert info == TensorInfo((2, 3), torch.bfloat16)
    assert info.num_bytes == 12
    assert info.describe() == "[2, 3] bfloat16"
    assert TensorInfo.of(info.to_meta()) == info
    assert info.to_meta().is_meta
