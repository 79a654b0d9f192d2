"""Rotary position embedding, so that attention sees how far apart two tokens are.

Half layout (the one of Hugging Face checkpoints): feature `i` is rotated together with feature `i + head_dim / 2`.

Shape legend: B batch, L length, H heads, K head dim, R = K / 2 rotated pairs.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

from d9d_dist.errors import UserError


@final
class RotaryTables(NamedTuple):
    """Cosine and sine of the angle of every position and pair, each [B, L, R] in float32.

    B is 1 where all rows of a batch share their positions.
    """

    cos: Tensor
    sin: Tensor


def rotary_tables(position_ids: Tensor, *, head_dim: int, theta: float) -> RotaryTables:
    """Angles `position * theta ** (-2 i / head_dim)` of "RoFormer" (arXiv:2104.09864), equation 15.

    Args:
        position_ids: Positions [B, L], integer.
        head_dim: Size of one attention head; even.
        theta: Base of the geometric series of wavelengths.

    Returns:
        Tables in float32 whatever the model computes in: half precision cannot tell distant positions apart.

    Raises:
        UserError: If `head_dim` is odd.
    """
    if head_dim % 2:
        raise UserError(f"head_dim = {head_dim}; rotary positions rotate pairs of features: use an even head_dim.")
    exponents_R = torch.arange(0, head_dim, 2, device=position_ids.device).float() / head_dim
    frequencies_R = 1.0 / theta**exponents_R
    angles_BLR = position_ids.unsqueeze(-1).float() * frequencies_R
    return RotaryTables(angles_BLR.cos(), angles_BLR.sin())


def apply_rotary(x_BLHK: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate each pair of features by the angle of its position.

    Args:
        x_BLHK: Queries or keys [B, L, H, K].
        tables: Tables for `head_dim = K` and the same positions.

    Returns:
        The rotated tensor, of the shape and dtype of `x_BLHK`; computed in the wider of its dtype and the tables'.
    """
    cos, sin = tables.cos.unsqueeze(-2), tables.sin.unsqueeze(-2)
    first, second = x_BLHK.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_BLHK.dtype)
