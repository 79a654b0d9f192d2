import pytest
import torch

from d9d_dist import UserError
from d9d_modules import apply_rotary, rotary_tables


def test_rotation_is_a_complex_product() -> None:
    position_ids = torch.randint(0, 1000, (2, 5))
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    tables = rotary_tables(position_ids, head_dim=8, theta=10_000.0)
    frequencies = 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    angles = (position_ids.unsqueeze(-1) * frequencies).unsqueeze(-2)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    rotated = apply_rotary(x, tables)
    torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1), rtol=0, atol=1e-3)


def test_scores_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).unbind()

    def score(query_position: int, key_position: int) -> torch.Tensor:
        positions = torch.tensor([[query_position], [key_position]])
        cos, sin = rotary_tables(positions, head_dim=16, theta=100.0)
        rotated = apply_rotary(torch.cat((query, key)), rotary_tables(positions, head_dim=16, theta=100.0))
        assert cos.shape == sin.shape == (2, 1, 8)
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=1e-4, atol=1e-4)
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 1, 2, 6)
    tables = rotary_tables(torch.zeros(1, 1, dtype=torch.int64), head_dim=6, theta=10_000.0)
    torch.testing.assert_close(apply_rotary(x, tables), x, rtol=0, atol=0)


def test_tables_stay_float32_and_half_precision_is_rounded_once() -> None:
    tables = rotary_tables(torch.tensor([[100_000, 100_001]]), head_dim=4, theta=10_000.0)
    assert tables.cos.dtype == tables.sin.dtype == torch.float32
    assert not torch.equal(tables.cos[:, 0], tables.cos[:, 1])
    x = torch.randn(1, 2, 1, 4, dtype=torch.bfloat16)
    rotated = apply_rotary(x, tables)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rotary(x.float(), tables).bfloat16())


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(UserError, match=r"head_dim = 5; rotary positions rotate pairs of features: use an even"):
        rotary_tables(torch.zeros(1, 1, dtype=torch.int64), head_dim=5, theta=10_000.0)
