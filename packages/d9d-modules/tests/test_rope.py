from typing import Any, cast

import pytest
import torch

from d9d_dist import UserError
from d9d_modules import apply_rotary, rotary_tables
from d9d_modules.rope import RotaryLayout, RotaryTables
from d9d_modules.rope_scaling import DynamicNtkScaling, LinearScaling, YarnScaling


def test_rotation_is_a_complex_product() -> None:
    position_ids = torch.randint(0, 1000, (2, 5))
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    tables = rotary_tables(position_ids, head_dim=8, theta=10_000.0)
    frequencies = 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    angles = (position_ids.unsqueeze(-1) * frequencies).unsqueeze(-2)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    rotated = apply_rotary(x, tables)
    # The tables are float32: a frequency and an angle of up to 1000 are rounded, by 2 eps together.
    rounding = 2 * torch.finfo(torch.float32).eps * 1000 * expected.abs().max().item()
    torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1), rtol=0, atol=rounding)


def test_scores_depend_only_on_the_distance() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).unbind()

    def score(query_position: int, key_position: int) -> torch.Tensor:
        positions = torch.tensor([[query_position], [key_position]])
        cos, sin = rotary_tables(positions, head_dim=16, theta=100.0)
        rotated = apply_rotary(torch.cat((query, key)), rotary_tables(positions, head_dim=16, theta=100.0))
        assert cos.shape == sin.shape == (2, 1, 8)
        return (rotated[0] * rotated[1]).sum()

    # Two rotations at each of two places, with float32 angles of up to 20, each rounded by 2 eps.
    rounding = 4 * 2 * torch.finfo(torch.float32).eps * 20 * (query.norm() * key.norm()).item()
    torch.testing.assert_close(score(7, 3), score(20, 16), rtol=0, atol=rounding)
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


def test_an_odd_head_dim_raises() -> None:
    with pytest.raises(UserError, match=r"head_dim = 5; RoPE rotates pairs of features: use an even"):
        rotary_tables(torch.zeros(1, 1, dtype=torch.int64), head_dim=5, theta=10_000.0)


def test_interleaved_pairs_are_adjacent() -> None:
    tables = rotary_tables(torch.randint(0, 1000, (2, 5)), head_dim=8, theta=100.0)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
    rotation = torch.complex(tables.cos.double(), tables.sin.double()).unsqueeze(-2)
    expected = torch.view_as_real(pairs * rotation).flatten(-2)
    torch.testing.assert_close(apply_rotary(x, tables, layout="interleaved"), expected, rtol=1e-12, atol=1e-12)


def test_layouts_differ_only_in_the_order_of_features() -> None:
    tables = rotary_tables(torch.randint(0, 1000, (2, 5)), head_dim=8, theta=100.0)
    x = torch.randn(2, 5, 3, 8)
    halves_to_neighbors = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    half = apply_rotary(x, tables)
    interleaved = apply_rotary(x[..., halves_to_neighbors], tables, layout="interleaved")
    assert torch.equal(interleaved, half[..., halves_to_neighbors])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_partial_rotation_keeps_the_other_features(layout: RotaryLayout) -> None:
    position_ids = torch.randint(0, 1000, (2, 5))
    x = torch.randn(2, 5, 3, 10, dtype=torch.bfloat16)
    rotated = apply_rotary(x, rotary_tables(position_ids, head_dim=10, rotary_dim=4, theta=100.0), layout=layout)
    alone = apply_rotary(x[..., :4], rotary_tables(position_ids, head_dim=4, theta=100.0), layout=layout)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, torch.cat((alone, x[..., 4:]), dim=-1))


def test_scaling_changes_angles_and_their_size() -> None:
    position_ids = torch.arange(7).unsqueeze(0)
    scaled = rotary_tables(position_ids, head_dim=8, theta=100.0, scaling=LinearScaling(factor=2.0))
    expected = rotary_tables(2 * position_ids, head_dim=8, theta=100.0, scaling=LinearScaling(factor=4.0))
    torch.testing.assert_close(scaled, expected)
    yarn = YarnScaling(factor=4.0, original_max_positions=8)
    cos, sin = rotary_tables(position_ids, head_dim=8, theta=100.0, scaling=yarn)
    sizes = (cos.square() + sin.square()).sqrt()
    torch.testing.assert_close(sizes, torch.full_like(sizes, yarn.attention_factor))
    assert yarn.attention_factor > 1.1


def test_with_a_given_length_the_tables_do_not_depend_on_the_batch_length() -> None:
    scaling = DynamicNtkScaling(factor=4.0, original_max_positions=8)
    whole = rotary_tables(torch.arange(20).unsqueeze(0), head_dim=8, theta=100.0, scaling=scaling)

    def part(length: int | None) -> RotaryTables:
        return rotary_tables(torch.arange(10).unsqueeze(0), head_dim=8, theta=100.0, scaling=scaling, length=length)

    assert torch.equal(part(20).cos, whole.cos[:, :10])
    assert not torch.equal(part(None).cos, whole.cos[:, :10])


def test_empty_and_meta_positions() -> None:
    scaling = DynamicNtkScaling(factor=4.0, original_max_positions=8)
    empty = rotary_tables(torch.zeros(2, 0, dtype=torch.int64), head_dim=8, theta=100.0, scaling=scaling)
    assert empty.cos.shape == (2, 0, 4)
    positions = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    tables = rotary_tables(positions, head_dim=8, theta=100.0, scaling=scaling, max_positions=2)
    assert tables.sin.shape == (2, 3, 4)
    assert tables.sin.is_meta


@pytest.mark.parametrize("rotary_dim", [0, 3, 10])
def test_invalid_rotary_dim_raises(rotary_dim: int) -> None:
    message = rf"rotary_dim = {rotary_dim}; expected an even number of features from 2 to head_dim = 8"
    with pytest.raises(UserError, match=message):
        rotary_tables(torch.zeros(1, 1, dtype=torch.int64), head_dim=8, rotary_dim=rotary_dim, theta=100.0)


@pytest.mark.parametrize("position_ids", [torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3)])
def test_invalid_position_ids_raise(position_ids: torch.Tensor) -> None:
    with pytest.raises(
        UserError, match=r"position_ids have shape .* and dtype .*; expected integers \[batch, length\]"
    ):
        rotary_tables(position_ids, head_dim=8, theta=100.0)


def test_tables_are_not_broadcast_over_positions() -> None:
    tables = rotary_tables(torch.zeros(1, 1, dtype=torch.int64), head_dim=8, theta=100.0)
    with pytest.raises(UserError, match=r"got rotary tables of shape \(1, 1, 4\) for 2 x 5 positions"):
        apply_rotary(torch.zeros(2, 5, 3, 8), tables)
    with pytest.raises(UserError, match=r"layout = 'interleave'; expected one of half, interleaved\."):
        apply_rotary(torch.zeros(1, 1, 3, 8), tables, layout="interleave")  # ty: ignore[invalid-argument-type]


def test_positions_out_of_range_raise() -> None:
    with pytest.raises(UserError, match=r"position_ids range from -1 to 3; expected 0 or more"):
        rotary_tables(torch.tensor([[3, -1]]), head_dim=8, theta=100.0)
    with pytest.raises(UserError, match=r"position_ids range from 3 to 8; expected from 0 to 7\."):
        rotary_tables(torch.tensor([[3, 8]]), head_dim=8, theta=100.0, max_positions=8)
    rotary_tables(torch.tensor([[0, 7]]), head_dim=8, theta=100.0, max_positions=8)


def test_an_unknown_layout_raises() -> None:
    tables = rotary_tables(torch.zeros(1, 1, dtype=torch.int64), head_dim=8, theta=100.0)
    with pytest.raises(UserError, match="layout = 'pairs'; expected one of half, interleaved"):
        apply_rotary(torch.zeros(1, 1, 1, 8), tables, layout=cast(Any, "pairs"))
