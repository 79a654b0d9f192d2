"""Pooling of token hidden states into one vector per sequence, for classifiers and text embeddings.

Shape legend: B batch, L length, D hidden size.
"""

from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from d9d_dist.errors import UserError, check_choice

Pooling: TypeAlias = Literal["last", "mean", "first"]
"""Hidden state of the last token, mean over all tokens, or hidden state of the first token (`[CLS]` in encoders)."""


def pool(hidden_BLD: Tensor, mask_BL: Tensor | None = None, *, pooling: Pooling) -> Tensor:
    """Pool the hidden states [B, L, D] of each row over its tokens to [B, D]. Padding may be on either side.

    `mask_BL` is the token mask [B, L], bool or 0 and 1; None if there is no padding. The mean is computed in at least
    float32 and rounded to the dtype of the hidden states. A row without tokens gives zeros.

    Raises:
        UserError: If the mask does not have the shape [B, L], or the pooling method is unknown.
    """
    if mask_BL is None:
        mask_BL = torch.ones(hidden_BLD.shape[:2], dtype=torch.bool, device=hidden_BLD.device)
    check_mask(mask_BL, hidden_BLD)
    is_token_BL = mask_BL.bool()
    check_choice("pooling", pooling, Pooling)
    if not hidden_BLD.shape[1]:
        return hidden_BLD.sum(dim=1)
    match pooling:
        case "mean":
            return masked_mean(hidden_BLD, is_token_BL)
        case "last":
            return _token_at(hidden_BLD, is_token_BL.cumsum(dim=1).argmax(dim=1), is_token_BL)
        case "first":
            return _token_at(hidden_BLD, is_token_BL.byte().argmax(dim=1), is_token_BL)
        case _:
            assert_never(pooling)


def masked_mean(hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the mean over the tokens of each row [B, D], computed in at least float32; zeros without tokens."""
    weight_BL1 = mask_BL.to(torch.promote_types(hidden_BLD.dtype, torch.float32)).unsqueeze(-1)
    sum_BD = (hidden_BLD * weight_BL1).sum(dim=1)
    return (sum_BD / weight_BL1.sum(dim=1).clamp(min=1.0)).to(hidden_BLD.dtype)


def check_mask(mask_BL: Tensor, hidden_BLD: Tensor) -> None:
    """Raise a `UserError` if the mask does not have the shape [B, L]."""
    if mask_BL.shape != hidden_BLD.shape[:-1]:
        raise UserError(
            f"the mask has shape {tuple(mask_BL.shape)}; expected {tuple(hidden_BLD.shape[:-1])}, one value for each "
            "position: 1 for a token, 0 for padding."
        )


def _token_at(hidden_BLD: Tensor, index_B: Tensor, is_token_BL: Tensor) -> Tensor:
    """Return the hidden state at `index_B` of each row [B, D]; zeros for a row without tokens."""
    rows_B = torch.arange(len(hidden_BLD), device=hidden_BLD.device)
    return hidden_BLD[rows_B, index_B] * is_token_BL.any(dim=1, keepdim=True)
