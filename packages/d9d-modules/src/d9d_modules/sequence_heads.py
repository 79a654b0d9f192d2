"""Heads that give one result for a sequence: scores of classes, or the embedding of a text.

Shape legend: B batch, L length, D hidden size, C classes, E embedding size.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_modules.linear import Linear
from d9d_modules.pooling import Pooling, pool


@final
class ClassificationHead(nn.Module):
    """`pool(hidden) @ weight.T`: a score for each class.

    Args:
        hidden_size: Size of the last dim of the hidden states.
        num_classes: Number of classes.
        pooling: How tokens become one vector. A causal model has seen the whole text at its last token alone.
        init_std: Standard deviation of the initial weight [C, D].
    """

    def __init__(
        self, hidden_size: int, num_classes: int, *, pooling: Pooling = "last", init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.pooling: Pooling = pooling
        self.score = Linear(hidden_size, num_classes, init_std=init_std)

    @property
    def why_whole_rows(self) -> str:
        """See `d9d_dist.NeedsWholeRows`."""
        return "pools whole rows"

    def forward(self, hidden_BLD: Tensor, *, mask_BL: Tensor | None = None) -> Tensor:
        """Logits [B, C] of hidden states [B, L, D]; the mask [B, L] says where there is a token (see `pool`)."""
        return self.score(pool(hidden_BLD, mask_BL, pooling=self.pooling))


@final
class EmbeddingHead(nn.Module):
    """A vector for each text: pooled hidden states, projected if asked for, of length 1 if asked for.

    Args:
        hidden_size: Size of the last dim of the hidden states.
        embedding_size: Size of the vectors; None for the hidden size, without a projection.
        pooling: How tokens become one vector.
        normalize: Whether vectors are scaled to length 1, so that their products are cosines.
        init_std: Standard deviation of the initial projection.
    """

    def __init__(
        self,
        hidden_size: int,
        embedding_size: int | None = None,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.pooling: Pooling = pooling
        self.normalize = normalize
        self.projection = None if embedding_size is None else Linear(hidden_size, embedding_size, init_std=init_std)

    @property
    def why_whole_rows(self) -> str:
        """See `d9d_dist.NeedsWholeRows`."""
        return "pools whole rows"

    def forward(self, hidden_BLD: Tensor, *, mask_BL: Tensor | None = None) -> Tensor:
        """Embeddings of hidden states [B, L, D]; the mask [B, L] says where there is a token (see `pool`).

        Returns:
            Vectors [B, E]: in the dtype of the hidden states, or of unit length in float32 (float64 for float64).
        """
        pooled_BD = pool(hidden_BLD, mask_BL, pooling=self.pooling)
        embedding_BE = pooled_BD if self.projection is None else self.projection(pooled_BD)
        if not self.normalize:
            return embedding_BE
        return F.normalize(embedding_BE.to(torch.promote_types(embedding_BE.dtype, torch.float32)), dim=-1)
