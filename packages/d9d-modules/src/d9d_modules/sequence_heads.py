"""Heads with one output per sequence: classification and text embedding.

Shape legend: B batch, L length, D hidden size, C classes, E embedding size.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_dist.token_ids import check_token_ids
from d9d_modules.cross_entropy import IGNORED_LABEL
from d9d_modules.linear import Linear
from d9d_modules.norm import Norm
from d9d_modules.pooling import Pooling, pool


@final
class HeadTransform(nn.Module):
    """Layer between the hidden states of an encoder and its head, `norm(gelu(dense(x)))` ("BERT", arXiv:1810.04805)."""

    def __init__(self, hidden_size: int, *, norm: Norm, bias: bool = False, init_std: float = 0.02) -> None:
        super().__init__()
        self.dense = Linear(hidden_size, hidden_size, bias=bias, init_std=init_std)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Transform `x` [..., hidden_size]; the shape is unchanged."""
        return self.norm(F.gelu(self.dense(x)))


@final
class ClassificationHead(nn.Module):
    """Sequence classification head: logits `score(transform(pool(hidden)))`, or the loss of each row.

    Args:
        pooling: Pooling method. In a causal model only the last token attends to the whole text.
        transform: Module between pooling and score, such as `HeadTransform`; None for no module.
    """

    full_sequence_reason = "pools whole sequences"

    def __init__(
        self,
        hidden_size: int,
        num_classes: int,
        *,
        pooling: Pooling = "last",
        transform: nn.Module | None = None,
        bias: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.pooling: Pooling = pooling
        self.transform = transform
        self.score = Linear(hidden_size, num_classes, bias=bias, init_std=init_std)

    def forward(self, hidden_BLD: Tensor, *, mask_BL: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Compute the loss of each row if labels are given, else logits.

        Args:
            hidden_BLD: Hidden states [B, L, D].
            mask_BL: Token mask [B, L]; see `pool`.
            labels: Class of each row [B], int64; -100 for rows without a loss.

        Returns:
            Without labels, the logits [B, C]. With labels, the losses [B] in nats, in at least float32; 0 for ignored
            rows.

        Raises:
            UserError: If the shape of mask or labels does not match, or a label on the CPU is out of range.
        """
        pooled_BD = pool(hidden_BLD, mask_BL, pooling=self.pooling)
        logits_BC = self.score(pooled_BD if self.transform is None else self.transform(pooled_BD))
        if labels is None:
            return logits_BC
        if labels.shape != logits_BC.shape[:1]:
            raise UserError(
                f"class labels have shape {tuple(labels.shape)}; expected {tuple(logits_BC.shape[:1])}, one class per "
                "row."
            )
        check_token_ids(labels, logits_BC.shape[1], what="class labels", ignored=IGNORED_LABEL)
        wide_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
        return F.cross_entropy(wide_BC, labels, reduction="none", ignore_index=IGNORED_LABEL)


@final
class EmbeddingHead(nn.Module):
    """Text embedding head: pooled hidden states, optionally projected and L2-normalized.

    Args:
        embedding_size: Size of the embeddings; None for the hidden size without a projection.
        normalize: If True, scale embeddings to unit L2 norm, so that dot products are cosine similarities.
    """

    full_sequence_reason = "pools whole sequences"

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

    def forward(self, hidden_BLD: Tensor, *, mask_BL: Tensor | None = None) -> Tensor:
        """Compute embeddings [B, E] of hidden states [B, L, D]; `mask_BL` [B, L] is the token mask of `pool`.

        Normalized embeddings are float32 (float64 for float64 input); others have the dtype of the hidden states.
        """
        pooled_BD = pool(hidden_BLD, mask_BL, pooling=self.pooling)
        embedding_BE = pooled_BD if self.projection is None else self.projection(pooled_BD)
        if not self.normalize:
            return embedding_BE
        return F.normalize(embedding_BE.to(torch.promote_types(embedding_BE.dtype, torch.float32)), dim=-1)
