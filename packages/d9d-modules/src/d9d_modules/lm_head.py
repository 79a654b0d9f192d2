"""From hidden states to logits or, better, straight to per-token losses without ever holding all logits.

Shape legend: B batch, L length, T = B * L tokens, D hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_dist.token_ids import check_token_ids
from d9d_dist.vocab_parallel import TokenLoss, token_cross_entropy
from d9d_modules._chunked_token_loss import chunked_token_loss, soft_cap
from d9d_modules._cut_cross_entropy import cut_cross_entropy, require_cut_cross_entropy, why_not_cut_cross_entropy
from d9d_modules._vocabulary_splits import register_splits
from d9d_modules.chunked_cross_entropy import linear_cross_entropy
from d9d_modules.cross_entropy import IGNORED_LABEL, PLAIN_CROSS_ENTROPY, CrossEntropy

LossBackend: TypeAlias = Literal["chunked", "cut_cross_entropy"]
"""Who computes losses: our own `linear_cross_entropy`, or the package `cut-cross-entropy`."""


@final
class LanguageModelHead(nn.Module):
    """The projection to the vocabulary, `logits = hidden @ weight.T`, and the loss on top of it.

    Args:
        hidden_size: Size of the last dim of the hidden states.
        vocab_size: Number of token ids.
        softcap: `c` of `c * tanh(x / c)`, which takes the place of each logit `x`; None for none.
        token_loss: Maps logits [T, V] and labels [T] to losses [T]; a `CrossEntropy` with numbers for z-loss or label
            smoothing.
        loss_backend: Who computes it; None for the fastest that can. See `language_model_head`.
        init_std: Standard deviation of the initial weight [V, D].

    Attributes:
        token_loss: The loss. Where the vocabulary is shared out to ranks (`d9d_dist.VocabParallelHead`), its form over
            them takes its place: that of a `CrossEntropy` never holds the logits either.

    Raises:
        UserError: If the soft-cap is not above 0.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        softcap: float | None = None,
        token_loss: TokenLoss = PLAIN_CROSS_ENTROPY,
        loss_backend: LossBackend | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        _check_softcap(softcap)
        self.vocab_size = vocab_size
        self.softcap = softcap
        self.init_std = init_std
        self.token_loss: TokenLoss = token_loss
        self.loss_backend: LossBackend | None = loss_backend
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from `Normal(0, init_std)`."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, hidden_BLD: Tensor, *, labels: Tensor | None = None) -> Tensor:
        """See `language_model_head`, which this calls with the weight and the loss of this module."""
        return language_model_head(
            hidden_BLD,
            self.weight,
            labels=labels,
            vocab_size=self.vocab_size,
            token_loss=self.token_loss,
            softcap=self.softcap,
            backend=self.loss_backend,
        )


@final
class SplitLanguageModelHead(nn.Module):
    """A `LanguageModelHead` whose vocabulary is in named splits, a parameter each; logits are in their order.

    To train new tokens only, freeze the others: `head.weight_orig.requires_grad_(False)`. Nothing is computed for a
    weight that needs no gradient.

    Args:
        hidden_size: Size of the last dim of the hidden states.
        vocab_sizes: Number of token ids of each split, such as `{"orig": 32000, "special": 8}`. The parameter of the
            split `special` is `weight_special`; that of the only one is `weight`.
        softcap: See `LanguageModelHead`.
        loss: What is computed where labels are given.
        init_std: Standard deviation of the initial weights.

    Raises:
        UserError: If there is no split, a name is none that a parameter can have, or the soft-cap is not above 0.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_sizes: Mapping[str, int],
        *,
        softcap: float | None = None,
        loss: CrossEntropy = PLAIN_CROSS_ENTROPY,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        _check_softcap(softcap)
        self.vocab_size = sum(vocab_sizes.values())
        self.softcap = softcap
        self.loss = loss
        self.init_std = init_std
        self._names = register_splits(self, vocab_sizes, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights from `Normal(0, init_std)`."""
        for name in self._names:
            nn.init.normal_(self.get_parameter(name), std=self.init_std)

    def forward(self, hidden_BLD: Tensor, *, labels: Tensor | None = None) -> Tensor:
        """See `language_model_head`, which this calls with the weights and the loss of this module."""
        weights_VD = [weight for name in self._names if (weight := self._parameters[name]) is not None]
        return language_model_head(
            hidden_BLD,
            weights_VD,
            labels=labels,
            vocab_size=self.vocab_size,
            token_loss=self.loss,
            softcap=self.softcap,
        )


def language_model_head(
    hidden_BLD: Tensor,
    weight_VD: Tensor | Sequence[Tensor],
    *,
    labels: Tensor | None = None,
    vocab_size: int | None = None,
    token_loss: TokenLoss = PLAIN_CROSS_ENTROPY,
    softcap: float | None = None,
    backend: LossBackend | None = None,
) -> Tensor:
    """Per-token losses where labels are given, else logits.

    Args:
        hidden_BLD: Hidden states [B, L, D].
        weight_VD: Projection to the vocabulary [V, D], or several, one after the other.
        labels: The token to predict at each position [B, L], int64; `IGNORED_LABEL` leaves a position out.
        vocab_size: Number of token ids, of which the weight may be this rank's part; None for its rows. Labels have to
            be below.
        token_loss: Maps logits [T, V] and labels [T] to losses [T], each of the logits of its token alone. A
            `CrossEntropy`, and `d9d_dist.token_cross_entropy`, are computed by `linear_cross_entropy`, any other from
            the logits of some tokens at a time.
        softcap: `c` of `c * tanh(x / c)`, which takes the place of each logit `x`; None for none.
        backend: Who computes a cross entropy. None takes Cut Cross Entropy where it is installed and can, unless
            deterministic algorithms are asked for, which it has none of; else `"chunked"`.

    Returns:
        Without labels the logits [B, L, V] in the dtype of the product. With labels the loss of each [B, L], in nats, 0
        where ignored: float32, or float64 for float64 input. Not summed and not averaged.

    Raises:
        UserError: If the labels do not have the shape [B, L], one of them is out of range (on an accelerator the device
            fails instead, later), or the backend that is asked for cannot serve.
    """
    weights_VD = [weight_VD] if isinstance(weight_VD, Tensor) else list(weight_VD)
    if labels is None:
        parts = [F.linear(hidden_BLD, weight) for weight in weights_VD]
        return soft_cap(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1), softcap)
    if labels.shape != hidden_BLD.shape[:-1]:
        raise UserError(
            f"labels have shape {tuple(labels.shape)}; expected {tuple(hidden_BLD.shape[:-1])}, one label for each "
            f"position: shift labels against inputs before the model, and fill up with {IGNORED_LABEL}."
        )
    num_rows = sum(len(weight) for weight in weights_VD)
    check_token_ids(labels, vocab_size or num_rows, what="labels", ignored=IGNORED_LABEL)
    hidden_TD, labels_T = hidden_BLD.flatten(0, -2), labels.flatten()
    loss = PLAIN_CROSS_ENTROPY if token_loss is token_cross_entropy else token_loss
    if isinstance(loss, CrossEntropy):
        losses_T = _cross_entropy(hidden_TD, weights_VD, labels_T, loss=loss, softcap=softcap, backend=backend)
    else:
        weight = weights_VD[0] if len(weights_VD) == 1 else torch.cat(weights_VD)
        losses_T = chunked_token_loss(hidden_TD, weight, labels_T, token_loss=loss, softcap=softcap)
    return losses_T.view_as(labels)


def _cross_entropy(
    hidden_TD: Tensor,
    weights_VD: Sequence[Tensor],
    labels_T: Tensor,
    *,
    loss: CrossEntropy,
    softcap: float | None,
    backend: LossBackend | None,
) -> Tensor:
    reason = why_not_cut_cross_entropy(hidden_TD, len(weights_VD), loss)
    if backend is None:
        is_able = reason is None and not torch.are_deterministic_algorithms_enabled()
        backend = "cut_cross_entropy" if is_able else "chunked"
    if backend == "chunked":
        return linear_cross_entropy(hidden_TD, weights_VD, labels_T, loss=loss, softcap=softcap)
    require_cut_cross_entropy(reason)
    return cut_cross_entropy(hidden_TD, weights_VD[0], labels_T, softcap=softcap)


def _check_softcap(softcap: float | None) -> None:
    if softcap is not None and softcap <= 0.0:
        raise UserError(f"softcap = {softcap}; expected a number above 0, or None for no soft-cap.")
