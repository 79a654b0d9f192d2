"""From hidden states to logits or, better, straight to per-token losses without ever holding all logits.

At a vocabulary of 150k the logits of a batch are the largest tensor of a training step. The loss needs them one token
at a time, so they are computed chunk by chunk, and again in the backward pass.

Shape legend: B batch, L length, T = B * L tokens, D hidden size, V vocabulary.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d9d_dist.errors import UserError
from d9d_dist.vocab_parallel import TokenLoss, token_cross_entropy

IGNORED_LABEL = -100
"""A position with this label has loss 0 and gives no gradient."""

_LOGITS_PER_CHUNK = 2**25
"""Logits alive at once, 128 MiB in float32: large enough to keep a device busy, small beside a model."""


@final
class LanguageModelHead(nn.Module):
    """The projection to the vocabulary, `logits = hidden @ weight.T`, and the loss on top of it.

    Args:
        hidden_size: Size of the last dim of the hidden states.
        vocab_size: Number of token ids.
        init_std: Standard deviation of the initial weight [V, D].

    Attributes:
        token_loss: Maps logits [T, V] and labels [T] to losses [T]; another one takes its place where the vocabulary is
            shared out to ranks (`d9d_dist.VocabParallelHead`).
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        self.init_std = init_std
        self.token_loss: TokenLoss = token_cross_entropy
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from `Normal(0, init_std)`."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, hidden_BLD: Tensor, *, labels: Tensor | None = None) -> Tensor:
        """See `language_model_head`, which this calls with the weight and the loss of this module."""
        return language_model_head(hidden_BLD, self.weight, labels=labels, token_loss=self.token_loss)


def language_model_head(
    hidden_BLD: Tensor, weight_VD: Tensor, *, labels: Tensor | None = None, token_loss: TokenLoss = token_cross_entropy
) -> Tensor:
    """Per-token losses where labels are given, else logits.

    Args:
        hidden_BLD: Hidden states [B, L, D].
        weight_VD: Projection to the vocabulary [V, D].
        labels: The token to predict at each position [B, L], int64; `IGNORED_LABEL` leaves a position out.
        token_loss: Maps logits [T, V] and labels [T] to losses [T].

    Returns:
        Without labels the logits [B, L, V] in the dtype of the product. With labels the negative log-likelihood of each
        label [B, L], in nats, 0 where ignored: float32, or float64 for float64 input. Not summed and not averaged.

    Raises:
        UserError: If the labels do not have the shape [B, L].
    """
    if labels is None:
        return F.linear(hidden_BLD, weight_VD)
    if labels.shape != hidden_BLD.shape[:-1]:
        raise UserError(
            f"labels have shape {tuple(labels.shape)}; expected {tuple(hidden_BLD.shape[:-1])}, one label for each "
            f"position: shift labels against inputs before the model, and fill up with {IGNORED_LABEL}."
        )
    tokens_per_chunk = max(1, _LOGITS_PER_CHUNK // weight_VD.shape[0])
    losses_T = _chunked_losses(hidden_BLD.flatten(0, 1), weight_VD, labels.flatten(), tokens_per_chunk, token_loss)
    return losses_T.view_as(labels)


def _chunked_losses(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, tokens_per_chunk: int, token_loss: TokenLoss
) -> Tensor:
    """Losses [T] with the logits of at most `tokens_per_chunk` tokens alive, in the backward pass too."""
    if len(labels_T) <= tokens_per_chunk:
        return _losses(hidden_TD, weight_VD, labels_T, token_loss)
    chunks = zip(hidden_TD.split(tokens_per_chunk), labels_T.split(tokens_per_chunk), strict=True)
    return torch.cat(
        [checkpoint(_losses, hidden, weight_VD, labels, token_loss, use_reentrant=False) for hidden, labels in chunks]
    )


def _losses(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, token_loss: TokenLoss) -> Tensor:
    logits_TV = F.linear(hidden_TD, weight_VD)
    wide = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return token_loss(wide, labels_T)
