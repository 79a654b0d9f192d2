"""Language-model head: logits, or per-token losses without materializing all logits.

Shape legend: B batch, L length, T = B * L tokens, D hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError, check_choice
from d9d_dist.tensor_parallel.vocab import TokenLoss, token_cross_entropy
from d9d_dist.token_ids import check_token_ids
from d9d_modules._chunked_token_loss import chunked_token_loss, soft_cap
from d9d_modules._cut_cross_entropy import cut_cross_entropy, why_not_cut_cross_entropy
from d9d_modules.chunked_cross_entropy import check_softcap, linear_cross_entropy
from d9d_modules.cross_entropy import IGNORED_LABEL, PLAIN_CROSS_ENTROPY, CrossEntropy, candidate_losses
from d9d_modules.embedding import VocabularySplits
from d9d_modules.vocabulary_scores import token_scores

Scores: TypeAlias = bool | Literal["log_probs"]
"""Values that a head returns instead of losses: log-probabilities and entropies (True), or only the former."""

LossBackend: TypeAlias = Literal["chunked", "cut_cross_entropy"]
"""Implementation of the cross entropy: `linear_cross_entropy` of this package, or the package `cut-cross-entropy`."""


@final
class LanguageModelHead(VocabularySplits):
    """Projection to the vocabulary, `logits = hidden @ weight.T + bias`, and per-token loss.

    A vocabulary in named splits has one parameter per split; the logits of the splits are concatenated in order. To
    train only new tokens, freeze the other splits: `head.weight_orig.requires_grad_(False)`.

    Args:
        vocab_size: Number of token ids, of the whole vocabulary or of each split, such as
            `{"orig": 32000, "special": 8}`. The parameter of the split `special` is `weight_special`; that of a single
            split, or of a whole vocabulary, is `weight`.
        bias: If True, the logits have a bias, initialized to 0 (encoders); requires a single split.
        softcap: Soft-cap `c`: each logit `x` becomes `c * tanh(x / c)`. None disables it.
        token_loss: See `language_model_head`. Pass a `CrossEntropy` to set z-loss or label smoothing.
        loss_backend: See `backend` of `language_model_head`.

    Attributes:
        token_loss: Per-token loss. While the vocabulary is sharded, `d9d_dist.VocabParallelHead` replaces the loss by
            its vocabulary-parallel version.
        logit_positions: Positions whose logits are computed; all by default. `generate` sets it to the last position.

    Raises:
        UserError: If `softcap` is not above 0, there is no split, a split has no tokens, its name is not a Python
            identifier, `bias` is set for several splits, or the backend is unknown.
    """

    weight: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int | Mapping[str, int],
        *,
        bias: bool = False,
        softcap: float | None = None,
        token_loss: TokenLoss = PLAIN_CROSS_ENTROPY,
        loss_backend: LossBackend = "chunked",
        init_std: float = 0.02,
    ) -> None:
        vocab_sizes = {"": vocab_size} if isinstance(vocab_size, int) else vocab_size
        super().__init__(vocab_sizes, hidden_size, init_std=init_std)
        if bias and len(vocab_sizes) > 1:
            raise UserError("got bias = True and several vocabulary splits; expected no bias, or a single split.")
        self.register_parameter("bias", nn.Parameter(torch.zeros(self.vocab_size)) if bias else None)
        check_choice("loss_backend", loss_backend, LossBackend)
        check_softcap(softcap)
        self.softcap = softcap
        self.token_loss: TokenLoss = token_loss
        self.loss_backend: LossBackend = loss_backend
        self.logit_positions = slice(None)

    def forward(
        self, hidden_BLD: Tensor, *, labels: Tensor | None = None, scores: Scores = False
    ) -> Tensor | dict[str, Tensor]:
        """Call `language_model_head` with the weights and the loss of this module.

        With `scores`, return a dict; see `token_scores`. `log_probs` is the log-probability of each label, with
        gradients. `entropy` is the entropy of each prediction [B, L], without gradients. Label smoothing and z-loss do
        not change either. `scores="log_probs"` omits the entropy, which costs a second pass over the vocabulary, and
        also accepts K candidates [B, L, K] as labels.

        Raises:
            UserError: If `scores` is set without labels, or is True with candidates, or `token_loss` is not a cross
                entropy.
        """
        if scores:
            return self._scores(hidden_BLD, labels, with_entropy=scores is True)
        return self._loss(hidden_BLD, labels, self.token_loss)

    def reset_parameters(self) -> None:
        """Draw all weights from `Normal(0, init_std)`, and set the bias to 0."""
        super().reset_parameters()
        if (bias := self._parameters.get("bias")) is not None:
            nn.init.zeros_(bias)

    def _with_bias(self, hidden_BLD: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states and weights whose product includes the bias: a feature of ones, and its column."""
        weights_VD, bias_V = self._weights(), self._parameters["bias"]
        if bias_V is None or hidden_BLD.is_meta:  # on meta, products are counted, and these are none of the model
            return hidden_BLD, weights_VD
        # Append eight features instead of one, which keeps the rows of 16-bit weights aligned.
        ones = F.pad(torch.ones_like(hidden_BLD[..., :1]), (0, 7))
        column = F.pad(bias_V.unsqueeze(-1), (0, 7))
        return torch.cat([hidden_BLD, ones], dim=-1), [torch.cat([weights_VD[0], column], dim=-1)]

    def _loss(self, hidden_BLD: Tensor, labels: Tensor | None, token_loss: TokenLoss) -> Tensor:
        hidden_BLD = hidden_BLD[:, self.logit_positions] if labels is None else hidden_BLD
        hidden_BLD, weights_VD = self._with_bias(hidden_BLD)
        return language_model_head(
            hidden_BLD,
            weights_VD,
            labels=labels,
            vocab_size=self.vocab_size,
            token_loss=token_loss,
            softcap=self.softcap,
            backend=self.loss_backend,
        )

    def _scores(self, hidden_BLD: Tensor, labels: Tensor | None, *, with_entropy: bool) -> dict[str, Tensor]:
        loss = PLAIN_CROSS_ENTROPY if self.token_loss is token_cross_entropy else self.token_loss
        if labels is None or not isinstance(loss, CrossEntropy):
            got = "no labels" if labels is None else f"token_loss = {loss!r}"
            raise UserError(
                f"got scores with {got}; expected labels and a CrossEntropy. Pass labels, or compute the scores "
                "from the logits."
            )
        plain = CrossEntropy(mesh=loss.mesh)
        if not with_entropy:
            return {"log_probs": -self._loss(hidden_BLD, labels, plain)}
        if labels.dim() == hidden_BLD.dim():
            raise UserError(
                f"got scores=True with candidates, labels of shape {tuple(labels.shape)}; expected one label for each "
                'position. Pass scores="log_probs".'
            )
        scored_BLD, weights_VD = self._with_bias(hidden_BLD)
        found = token_scores(
            scored_BLD.flatten(0, -2), weights_VD, labels.flatten(), softcap=self.softcap, mesh=loss.mesh
        )
        log_probs_BL, entropy_BL = (each.view_as(labels) for each in found)
        if torch.is_grad_enabled() and hidden_BLD.requires_grad:
            log_probs_BL = -self._loss(hidden_BLD, labels, plain)
        return {"log_probs": log_probs_BL, "entropy": entropy_BL}


def language_model_head(
    hidden_BLD: Tensor,
    weight_VD: Tensor | Sequence[Tensor],
    *,
    labels: Tensor | None = None,
    vocab_size: int | None = None,
    token_loss: TokenLoss = PLAIN_CROSS_ENTROPY,
    softcap: float | None = None,
    backend: LossBackend = "chunked",
) -> Tensor:
    """Compute per-token losses if labels are given, else logits.

    Args:
        hidden_BLD: Hidden states [B, L, D].
        weight_VD: Projection to the vocabulary [V, D], or a sequence of tensors [V_i, D] to concatenate.
        labels: Token to predict at each position [B, L], int64; `IGNORED_LABEL` at positions without a loss. Or K
            candidates for each position [B, L, K], as for distillation; these require a plain cross entropy.
        vocab_size: Size of the whole vocabulary, if `weight_VD` is a vocabulary shard; None for its number of rows.
        token_loss: Maps logits [T, V] and labels [T] to losses [T]; the loss of a token must depend only on its own
            logits and label. Losses other than a `CrossEntropy` and `token_cross_entropy` are computed from
            the materialized logits of one chunk of tokens at a time.
        softcap: Soft-cap `c`: each logit `x` becomes `c * tanh(x / c)`. None disables it.
        backend: Implementation of a cross entropy. The package `cut-cross-entropy` is used only on request.

    Returns:
        Without labels, the logits [B, L, V] in the dtype of the product. With labels, the loss of each token [B, L] or
        candidate [B, L, K] in nats, 0 for ignored ones, without reduction: float32, or float64 for float64 input.

    Raises:
        UserError: If `softcap` is not above 0, the labels have another shape, a label on the CPU is out of range,
            `token_loss` does not support candidates, or `backend` does not support the call. On accelerators an
            out-of-range label raises an asynchronous device error instead.
    """
    check_choice("backend", backend, LossBackend)
    check_softcap(softcap)
    weights_VD = [weight_VD] if isinstance(weight_VD, Tensor) else list(weight_VD)
    if labels is None:
        parts = [F.linear(hidden_BLD, weight) for weight in weights_VD]
        return soft_cap(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1), softcap)
    if labels.shape[: hidden_BLD.dim() - 1] != hidden_BLD.shape[:-1] or labels.dim() > hidden_BLD.dim():
        raise UserError(
            f"labels have shape {tuple(labels.shape)}; expected {tuple(hidden_BLD.shape[:-1])}, one label for each "
            f"position, or that shape and one more dimension, the candidates of each position. Shift the labels before "
            f"the model, and pad them with {IGNORED_LABEL}."
        )
    num_rows = sum(len(weight) for weight in weights_VD)
    hidden_TD, labels_T = hidden_BLD.flatten(0, -2), labels.flatten(0, hidden_BLD.dim() - 2)
    loss = PLAIN_CROSS_ENTROPY if token_loss is token_cross_entropy else token_loss
    if labels.dim() == hidden_BLD.dim():
        loss = _loss_of_candidates(loss, labels)
    if isinstance(loss, CrossEntropy) and (backend == "chunked" or hidden_BLD.is_meta):  # checks the labels
        return linear_cross_entropy(hidden_TD, weights_VD, labels_T, loss=loss, softcap=softcap).view_as(labels)
    check_token_ids(labels, vocab_size or num_rows, what="labels", ignored=IGNORED_LABEL)
    if not isinstance(loss, CrossEntropy):
        weight = weights_VD[0] if len(weights_VD) == 1 else torch.cat(weights_VD)
        losses_T = chunked_token_loss(hidden_TD, weight, labels_T, token_loss=loss, softcap=softcap)
    else:
        reason = why_not_cut_cross_entropy(hidden_TD, len(weights_VD), loss)
        if reason is not None:
            raise UserError(f"loss backend 'cut_cross_entropy' is not available: {reason}. Use 'chunked'.")
        losses_T = cut_cross_entropy(hidden_TD, weights_VD[0], labels_T, softcap=softcap)
    return losses_T.view_as(labels)


def _loss_of_candidates(loss: TokenLoss, labels: Tensor) -> TokenLoss:
    if not isinstance(loss, CrossEntropy) or loss.z_loss or loss.label_smoothing:
        raise UserError(
            f"got labels with candidates, {tuple(labels.shape)}, and token_loss = {loss!r}; expected a plain cross "
            "entropy. Remove z-loss and label smoothing, or pass one label for each position."
        )
    return partial(candidate_losses, mesh=loss.mesh)
