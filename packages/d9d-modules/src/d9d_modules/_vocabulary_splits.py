"""Named vocabulary splits: one parameter per split instead of a single weight."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from d9d_dist.errors import UserError


class VocabularySplits(nn.Module):
    """Base class with one parameter [V_i, D] per split: `weight` for a single split, else `weight_<split>`."""

    def __init__(self, vocab_sizes: Mapping[str, int], hidden_size: int, *, init_std: float) -> None:
        super().__init__()
        _check_splits(vocab_sizes)
        self.vocab_size = sum(vocab_sizes.values())
        self.init_std = init_std
        self._names = ["weight"] if len(vocab_sizes) == 1 else [f"weight_{split}" for split in vocab_sizes]
        for name, size in zip(self._names, vocab_sizes.values(), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(size, hidden_size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights from `Normal(0, init_std)`."""
        for weight_VD in self._weights():
            nn.init.normal_(weight_VD, std=self.init_std)

    def _weights(self) -> list[Tensor]:
        # Parallelism replaces parameters in `_parameters` while forward runs.
        return [weight_VD for name in self._names if (weight_VD := self._parameters[name]) is not None]


def _check_splits(vocab_sizes: Mapping[str, int]) -> None:
    for split, size in vocab_sizes.items():
        if size < 1 or not f"weight_{split}".isidentifier():
            raise UserError(
                f"got vocabulary split {split!r} with {size} tokens; expected a Python identifier and at least 1 token."
            )
    if not vocab_sizes:
        raise UserError("vocab_sizes is empty; expected at least one split, such as {'orig': 32000, 'special': 8}.")
