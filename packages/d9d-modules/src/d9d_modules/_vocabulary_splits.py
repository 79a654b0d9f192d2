"""Named vocabulary splits: one parameter per split instead of a single weight."""

from collections.abc import Mapping

import torch
from torch import nn

from d9d_dist.errors import UserError


def register_splits(module: nn.Module, vocab_sizes: Mapping[str, int], hidden_size: int) -> list[str]:
    """Register an uninitialized parameter [size, hidden_size] for each split.

    Args:
        module: Module that owns the parameters.
        vocab_sizes: Number of token ids of each split.
        hidden_size: Size of each vector.

    Returns:
        Parameter names in split order: `weight` for a single split, else `weight_<split>`.

    Raises:
        UserError: If there is no split, a split has no tokens, or its name is not a Python identifier.
    """
    for split, size in vocab_sizes.items():
        if size < 1 or not f"weight_{split}".isidentifier():
            raise UserError(
                f"got vocabulary split {split!r} with {size} tokens; expected a Python identifier and at least 1 token."
            )
    if not vocab_sizes:
        raise UserError("vocab_sizes is empty; expected at least one split, such as {'orig': 32000, 'special': 8}.")
    names = ["weight"] if len(vocab_sizes) == 1 else [f"weight_{split}" for split in vocab_sizes]
    for name, size in zip(names, vocab_sizes.values(), strict=True):
        module.register_parameter(name, nn.Parameter(torch.empty(size, hidden_size)))
    return names
