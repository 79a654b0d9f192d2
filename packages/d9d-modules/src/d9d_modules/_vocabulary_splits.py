"""A vocabulary in named splits: a parameter each, in the place where one weight would be."""

from collections.abc import Mapping

import torch
from torch import nn

from d9d_dist.errors import UserError


def register_splits(module: nn.Module, vocab_sizes: Mapping[str, int], hidden_size: int) -> list[str]:
    """Give a module an empty weight [size, hidden_size] for each split; they are its own, as one weight would be.

    Args:
        module: Gets the parameters.
        vocab_sizes: Number of token ids of each split.
        hidden_size: Size of each vector.

    Returns:
        The names of the parameters, in the order of the splits: `weight` for the only one, else `weight_` and the name.

    Raises:
        UserError: If there is no split, one has no tokens, or a name is none that a parameter can have.
    """
    for split, size in vocab_sizes.items():
        if size < 1 or not f"weight_{split}".isidentifier():
            raise UserError(f"vocabulary split {split!r} of {size} tokens; expected an identifier and 1 token or more.")
    if not vocab_sizes:
        raise UserError("vocab_sizes is empty; expected one split or more, such as {'orig': 32000, 'special': 8}.")
    names = ["weight"] if len(vocab_sizes) == 1 else [f"weight_{split}" for split in vocab_sizes]
    for name, size in zip(names, vocab_sizes.values(), strict=True):
        module.register_parameter(name, nn.Parameter(torch.empty(size, hidden_size)))
    return names
