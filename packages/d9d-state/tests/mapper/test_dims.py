from itertools import product

import pytest
import torch

from d9d_state import TensorInfo
from d9d_state.mapper._dims import common_dtype, is_lossless, normalized_dim

_FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


def test_dims_count_from_both_ends() -> None:
    assert [normalized_dim(dim, 3) for dim in (0, 2, -1, -3)] == [0, 2, 2, 0]
    for dim in (3, -4):
        with pytest.raises(ValueError, match=f"got dim {dim}; expected a dim of a tensor with 3 dims"):
            normalized_dim(dim, 3)


def test_lossless_casts_round_trip() -> None:
    for one, other in product(_FLOATS, _FLOATS):
        values = _all_values(one)
        back = values.to(other).to(one)
        exact = torch.equal(values.double(), back.double())
        assert is_lossless(one, other) == exact, (one, other)


def _all_values(dtype: torch.dtype) -> torch.Tensor:
    """Return every finite value of a small dtype; for a large dtype, values near its limits and near 1."""
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(dtype)
    elif dtype.itemsize == 2:
        values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    else:
        info = torch.finfo(dtype)
        values = torch.tensor([info.max, info.tiny, info.tiny * info.eps, 1 + info.eps, 0.0], dtype=dtype)
    return values[values.double().isfinite()]


def test_the_common_dtype_is_the_promoted_dtype_of_torch() -> None:
    def common(*dtypes: torch.dtype) -> torch.dtype:
        return common_dtype([TensorInfo((), dtype) for dtype in dtypes])

    assert common(torch.bfloat16, torch.bfloat16) is torch.bfloat16
    assert common(torch.bfloat16, torch.float16) is torch.cat([torch.ones(1).bfloat16(), torch.ones(1).half()]).dtype
    assert common(torch.int64, torch.float16) is torch.float16
    message = r"got float8_e4m3fn and float32, which torch cannot promote to a common dtype; cast\(\) the inputs first"
    with pytest.raises(ValueError, match=message):
        common(torch.float8_e4m3fn, torch.float32)
