"""Rotary position embedding (RoPE).

The layout defines which two features form a rotated pair. "half" (most Hugging Face checkpoints) pairs feature `i` with
`i + rotary_dim / 2`. "interleaved" (the paper, DeepSeek, GPT-J) pairs feature `2 i` with `2 i + 1`.

Shape legend: B batch, L length, H heads, K head dim, R rotated pairs (`rotary_dim / 2`).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from d9d_dist.errors import UserError, check_choice
from d9d_modules.rope_scaling import RotaryScaling, plain_frequencies

RotaryLayout: TypeAlias = Literal["half", "interleaved"]
"""Pairing of the rotated features; see the module docstring."""


@final
class RotaryTables(NamedTuple):
    """Cosine and sine of the rotation angles, each [B, L, R] in float32.

    B is 1 if all rows of the batch have the same positions.
    """

    cos: Tensor
    sin: Tensor


def rotary_tables(
    position_ids: Tensor,
    *,
    head_dim: int,
    theta: float,
    rotary_dim: int | None = None,
    scaling: RotaryScaling | None = None,
    length: int | None = None,
    max_positions: int | None = None,
) -> RotaryTables:
    """Compute cosine and sine of `position * theta ** (-2 i / rotary_dim)`: "RoFormer" (arXiv:2104.09864), equation 15.

    No host-device synchronization: the values of `position_ids` are checked only for CPU tensors.

    Args:
        position_ids: Positions [B, L], integer, at least 0.
        head_dim: Size of one attention head; even.
        theta: RoPE base.
        rotary_dim: Number of leading features of each head to rotate; even. None rotates all.
        scaling: RoPE scaling for long sequences; None keeps the frequencies of the equation.
        length: Longest sequence length, for scalings that depend on it. None uses the largest position id of this call
            plus 1; results then depend on how batches are split (data or context parallelism, microbatches).
        max_positions: Exclusive upper bound of the position ids; None for no bound.

    Raises:
        UserError: If `head_dim` or `rotary_dim` is odd or out of range, `position_ids` is not an integer tensor [B, L],
            or a position id on the CPU is out of range.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    check_rotary_sizes(head_dim, rotary_dim)
    _check_positions(position_ids, max_positions)
    device = position_ids.device
    if scaling is None:
        frequencies_R, factor = plain_frequencies(theta, rotary_dim=rotary_dim, device=device), 1.0
    else:
        frequencies_R = scaling.frequencies(theta, rotary_dim=rotary_dim, length=_longest(position_ids, length))
        factor = scaling.attention_factor
    angles_BLR = position_ids.unsqueeze(-1).float() * frequencies_R
    cos_BLR, sin_BLR = angles_BLR.cos(), angles_BLR.sin()
    return RotaryTables(cos_BLR, sin_BLR) if factor == 1 else RotaryTables(cos_BLR * factor, sin_BLR * factor)


def apply_rotary(x_BLHK: Tensor, tables: RotaryTables, *, layout: RotaryLayout = "half") -> Tensor:
    """Rotate each pair of features of `x_BLHK` [B, L, H, K] by the angle of its position.

    The tables have at most `K / 2` pairs; features beyond the first 2 R are unchanged. The arithmetic uses the wider
    dtype of `x_BLHK` and the tables; the result has the dtype of `x_BLHK`.

    Raises:
        UserError: If the tables are not [B, L, R] or [1, L, R], or the layout is unknown.
    """
    check_choice("layout", layout, RotaryLayout)
    check_tables(tables, x_BLHK.shape[:2], rotary_dim=2 * tables.cos.shape[-1])
    cos, sin = tables.cos.unsqueeze(-2), tables.sin.unsqueeze(-2)
    rotary_dim = 2 * cos.shape[-1]
    x, kept = (x_BLHK, None) if rotary_dim == x_BLHK.shape[-1] else x_BLHK.tensor_split([rotary_dim], dim=-1)
    if layout == "half":
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = x[..., ::2], x[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    rotated = rotated.to(x_BLHK.dtype)
    return rotated if kept is None else torch.cat((rotated, kept), dim=-1)


def check_tables(tables: RotaryTables, positions: Sequence[int], *, rotary_dim: int) -> None:
    """Check that the rotary tables passed to a layer are [B, L, rotary_dim / 2] or [1, L, rotary_dim / 2].

    `positions` are B and L of the layer's input.

    Raises:
        UserError: If the tables have another shape.
    """
    batch, length = positions
    if tables.cos.shape not in ((batch, length, rotary_dim // 2), (1, length, rotary_dim // 2)):
        raise UserError(
            f"got rotary tables of shape {tuple(tables.cos.shape)} for {batch} x {length} positions; expected one "
            f"row of {rotary_dim // 2} pairs per position: build them with rotary_tables from the position_ids, with "
            f"rotary_dim = {rotary_dim}."
        )


def _longest(position_ids: Tensor, length: int | None) -> Tensor:
    """Return the longest sequence length as a scalar tensor on the device of `position_ids`."""
    if length is None and position_ids.numel():
        return position_ids.max() + 1
    return torch.full((), length or 0, device=position_ids.device)


def check_rotary_sizes(head_dim: int, rotary_dim: int) -> None:
    """Raise a `UserError` if `head_dim` or `rotary_dim` is odd, or `rotary_dim` is not between 2 and `head_dim`."""
    if head_dim % 2:
        raise UserError(f"head_dim = {head_dim}; RoPE rotates pairs of features: use an even head_dim.")
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UserError(
            f"rotary_dim = {rotary_dim}; expected an even number of features from 2 to head_dim = {head_dim}."
        )


def _check_positions(position_ids: Tensor, max_positions: int | None) -> None:
    if position_ids.dim() != 2 or position_ids.is_floating_point() or position_ids.is_complex():
        raise UserError(
            f"position_ids have shape {tuple(position_ids.shape)} and dtype {position_ids.dtype}; expected integers "
            "[batch, length]."
        )
    # Reading values on another device would synchronize with it. Fake tensors have no values.
    if position_ids.device.type != "cpu" or type(position_ids) is not Tensor or torch.compiler.is_compiling():
        return
    if position_ids.numel() == 0:
        return
    low, high = position_ids.aminmax()
    if low < 0 or (max_positions is not None and high >= max_positions):
        expected = "0 or more" if max_positions is None else f"from 0 to {max_positions - 1}"
        raise UserError(
            f"position_ids range from {low.item()} to {high.item()}; expected {expected}. Split or truncate longer "
            "rows, use a RoPE scaling, or raise max_position_embeddings."
        )
