"""Token embeddings."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_dist.token_ids import check_token_ids


@final
class TokenEmbedding(nn.Embedding):
    """`torch.nn.Embedding` initialized from `Normal(0, init_std)` instead of `Normal(0, 1)`."""

    def __init__(self, vocab_size: int, hidden_size: int, *, init_std: float = 0.02) -> None:
        self.init_std = init_std  # before the parent's __init__, which calls reset_parameters
        super().__init__(vocab_size, hidden_size)

    def reset_parameters(self) -> None:
        """Draw the weight from `Normal(0, init_std)`."""
        nn.init.normal_(self.weight, std=self.init_std)


class VocabularySplits(nn.Module):
    """Base class with one parameter [V_i, D] per split: `weight` for a single split, else `weight_<split>`."""

    def __init__(self, vocab_sizes: Mapping[str, int], hidden_size: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        for split, size in vocab_sizes.items():
            if size < 1 or not f"weight_{split}".isidentifier():
                raise UserError(
                    f"got vocabulary split {split!r} with {size} tokens; expected a Python identifier and at least 1 "
                    "token."
                )
        if not vocab_sizes:
            raise UserError("vocab_sizes is empty; expected at least one split, such as {'orig': 32000, 'special': 8}.")
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


@final
class SplitTokenEmbedding(VocabularySplits):
    """Token embedding whose vocabulary is divided into named splits with one parameter each.

    The token ids of the splits are consecutive. To train only new tokens, freeze the other splits:
    `embedding.weight_orig.requires_grad_(False)`.

    Args:
        vocab_sizes: Number of token ids of each split, such as `{"orig": 32000, "special": 8}`, where `special` has the
            ids from 32000. The parameter of the split `special` is `weight_special`; with a single split, `weight`.

    Raises:
        UserError: If there is no split, a split has no tokens, or the name of a split is not a Python identifier.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the vectors [..., hidden_size] of token ids [...], int64.

        Raises:
            UserError: If an id on the CPU is out of range. On accelerators an out-of-range id raises an asynchronous
                device error instead.
        """
        check_token_ids(ids, self.vocab_size, what="token ids")
        first, vectors = 0, None
        for weight_VD in self._weights():
            local = ids - first
            is_here = (local >= 0) & (local < len(weight_VD))
            found = F.embedding(local.masked_fill(~is_here, 0), weight_VD)
            vectors = found if vectors is None else torch.where(is_here.unsqueeze(-1), found, vectors)
            first += len(weight_VD)
        assert vectors is not None
        return vectors
