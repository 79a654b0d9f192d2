"""Checks of classification samples: shapes and dtypes raise an error, values outside their range are marked.

Values are not read by the host. A metric counts the marked samples and becomes NaN.
"""

import torch
from torch import Tensor

from d9d_dist import UserError


def check_samples(
    metric: str,
    predictions: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    *,
    num_columns: int | None = None,
    is_exclusive: bool = False,
) -> None:
    """Raise `UserError` unless predictions, targets and mask have the shapes of the same samples.

    `num_columns` is the size of the last dim of the predictions, or `None` if each element is a sample. With
    `is_exclusive`, targets are indices of classes, one for each sample. `metric` is the name for the error.
    """
    shape = tuple(predictions.shape)
    got = f"{metric} got predictions of shape {shape}, targets of shape {tuple(targets.shape)}"
    got += "" if mask is None else f" and a mask of shape {tuple(mask.shape)}"
    if num_columns is not None and shape[-1:] != (num_columns,):
        raise UserError(
            f"{got}; expected predictions of shape [..., {num_columns}], one column for each class or label."
        )
    samples = shape if num_columns is None else shape[:-1]
    expected = samples if is_exclusive else shape
    if tuple(targets.shape) != expected:
        raise UserError(
            f"{got}; expected targets of shape {expected}. Shapes are not broadcast: use squeeze or reshape."
        )
    if mask is not None and tuple(mask.shape) != samples:
        raise UserError(f"{got}; expected a mask of shape {samples}, one element for each sample.")
    if is_exclusive and (targets.is_floating_point() or targets.is_complex()):
        raise UserError(f"{metric} got targets of {targets.dtype}; expected integers, the indices of the true classes.")


def mask_of(mask: Tensor | None, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bool mask of the shape of `samples`, and the elements of the given mask that are neither 0 nor 1."""
    if mask is None:
        return torch.ones_like(samples, dtype=torch.bool), torch.zeros_like(samples, dtype=torch.bool)
    return mask.bool(), not_binary(mask)


def not_binary(values: Tensor) -> Tensor:
    """Return True for elements that are neither 0 nor 1, such as -1, -100, 0.5 and NaN."""
    return (values != 0) & (values != 1)


def not_probability(values: Tensor) -> Tensor:
    """Return True for elements outside [0, 1], except for rounding errors, and for NaN."""
    return ~((values >= -1e-4) & (values <= 1 + 1e-4))
