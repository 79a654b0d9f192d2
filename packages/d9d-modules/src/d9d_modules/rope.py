"""Rotary position embedding, so that attention sees how far apart two tokens are.

Which two features are rotated together is the layout. Half (that of most Hugging Face checkpoints): feature `i` with
feature `i + rotary_dim / 2`. Interleaved (that of the paper, of DeepSeek and of GPT-J): feature `2 i` with `2 i + 1`.

Shape legend: B batch, L length, H heads, K head dim, R rotated pairs, `rotary_dim / 2`.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from d9d_dist.errors import UserError
from d9d_modules.rope_scaling import RotaryScaling, plain_frequencies

RotaryLayout: TypeAlias = Literal["half", "interleaved"]
"""Which two features make up a rotated pair."""


@final
class RotaryTables(NamedTuple):
    """Cosine and sine of the angle of every position and pair, each [B, L, R] in float32.

    B is 1 where all rows of a batch share their positions.
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
    """Angles `position * theta ** (-2 i / rotary_dim)` of "RoFormer" (arXiv:2104.09864), equation 15.

    No host synchronisation: the values of position ids are checked only where they are on the CPU.

    Args:
        position_ids: Positions [B, L], integer, from 0.
        head_dim: Size of one attention head; even.
        theta: Base of the geometric series of wavelengths.
        rotary_dim: How many features of a head are rotated, the first ones; even; None for all.
        scaling: Changes the frequencies for long sequences; None for those of the equation.
        length: The longest sequence, for a scaling that depends on it. None takes the largest position id of this call:
            give it where batches are split (data or context parallel, microbatches), or results depend on the split.
        max_positions: Position ids are to be below it; None for any.

    Returns:
        Tables in float32 whatever the model computes in: half precision cannot tell distant positions apart.

    Raises:
        UserError: If a size is odd or out of range, or the position ids are not of this kind.
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
    """Rotate each pair of features by the angle of its position; features beyond the first 2 R stay as they are.

    Args:
        x_BLHK: Queries or keys [B, L, H, K].
        tables: Tables of the same positions, of at most `K / 2` pairs.
        layout: Which features make up a pair.

    Returns:
        The rotated tensor, of the shape and dtype of `x_BLHK`; computed in the wider of its dtype and the tables'.
    """
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
    """Check that tables are those of a layer's positions.

    Args:
        tables: The tables that the layer was given.
        positions: Its batch and length, B and L.
        rotary_dim: How many features of a head it rotates.

    Raises:
        UserError: If there is not one angle for each position and pair.
    """
    batch, length = positions
    if tables.cos.shape not in ((batch, length, rotary_dim // 2), (1, length, rotary_dim // 2)):
        raise UserError(
            f"got rotary tables of the shape {tuple(tables.cos.shape)} for {batch} x {length} positions; expected one "
            f"row for each position, of {rotary_dim // 2} pairs: make them by rotary_tables, from its position_ids and "
            f"with the layer's rotary_dim = {rotary_dim}."
        )


def _longest(position_ids: Tensor, length: int | None) -> Tensor:
    """Length of the longest sequence, a scalar on the device of the positions."""
    if length is None and position_ids.numel():
        return position_ids.max() + 1
    return torch.full((), length or 0, device=position_ids.device)


def check_rotary_sizes(head_dim: int, rotary_dim: int) -> None:
    """Refuse heads whose features cannot be rotated in pairs.

    Raises:
        UserError: If one size is odd, or more is to be rotated than there is.
    """
    if head_dim % 2:
        raise UserError(f"head_dim = {head_dim}; rotary positions rotate pairs of features: use an even head_dim.")
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
    # Looking at values elsewhere would wait for the device, and tensors of other types (fake ones) have none.
    if position_ids.device.type != "cpu" or type(position_ids) is not Tensor or torch.compiler.is_compiling():
        return
    if position_ids.numel() == 0:
        return
    low, high = position_ids.aminmax()
    if low < 0 or (max_positions is not None and high >= max_positions):
        expected = "0 or more" if max_positions is None else f"from 0 to {max_positions - 1}"
        raise UserError(
            f"position_ids go from {low.item()} to {high.item()}; expected {expected}. Split or truncate longer "
            "rows, scale the positions, or raise the maximum (max_position_embeddings)."
        )
