import pytest
import torch

from d9d_dist.testing import assert_rounds_like
from d9d_modules import SwiGLU
from d9d_moe import GroupedSwiGLU


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 6), (torch.float32, 8)])
def test_each_expert_computes_swiglu(dtype: torch.dtype, size: int) -> None:
    experts = GroupedSwiGLU(3, size, 2 * size, init_std=1.0).to(dtype)
    counts = [2, 0, 4]
    rows = torch.randn(6, size, dtype=dtype)
    expected, exact = [], []
    for expert, chunk in enumerate(rows.split(counts)):
        dense = SwiGLU(size, 2 * size).to(dtype)
        dense.load_state_dict({name: tensor[expert] for name, tensor in experts.state_dict().items()})
        expected.append(dense(chunk))
        exact.append(dense.double()(chunk.double()))
    found = experts(rows, torch.tensor(counts))
    assert_rounds_like([found], [torch.cat(exact)], peer=[torch.cat(expected)])
