"""Checks of the options and arguments of losses."""

import math

import torch
from torch import Tensor

from d9d_dist import UserError


def check_finite(**values: float | None) -> None:
    """Raise `UserError` for a number that is infinite or NaN."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise UserError(f"{name} = {value}; expected a finite number.")


def check_shapes(log_probs: Tensor, **others: Tensor | None) -> None:
    """Raise `UserError` unless all tensors have the shape of the log-probabilities: torch would broadcast them.

    Masks have bool values.
    """
    for name, values in others.items():
        if values is not None and values.shape != log_probs.shape:
            raise UserError(
                f"{name} has shape {tuple(values.shape)}, and the log-probabilities {tuple(log_probs.shape)}; "
                "expected equal shapes [B, L]: a value for each position of the packed rows."
            )
        if values is not None and "mask" in name and values.dtype != torch.bool:
            raise UserError(f"{name} has dtype {values.dtype}; expected torch.bool. Pass {name}.bool().")
