"""Pre-norm decoder layer with pluggable token mixer and feed-forward block."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias, final, runtime_checkable

from torch import Tensor, nn

from d9d_modules.norm import Norm, RMSNorm
from d9d_modules.rope import RotaryTables


@final
class HiddenAndLosses(NamedTuple):
    """Hidden states and the auxiliary losses of the layers so far, such as router losses.

    Attributes:
        hidden: Hidden states [B, L, D].
        losses: Losses per token [B, L], or the records [B, L, R] from which `AuxiliaryLosses.total` computes them,
            summed over the layers.
    """

    hidden: Tensor
    losses: Tensor


Hidden: TypeAlias = Tensor | HiddenAndLosses
"""Input and output of a layer: hidden states, or `HiddenAndLosses` if the model has auxiliary losses."""


@runtime_checkable
class HasExperts(Protocol):
    """Feed-forward block that routes tokens to experts and needs expert parallelism.

    The method `forward` takes the keyword arguments `mask_BL`, the token mask [B, L], and `expert_indices`, recorded
    experts of each token [B, L, A].
    """

    num_experts: int


@final
class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: `h = x + attention(norm(x))`, then `h + feed_forward(norm(h))`.

    With sandwich norms, the outputs of both blocks are normalized too, before they are added (Gemma 2,
    arXiv:2408.00118, section 2; GLM-4).

    Auxiliary losses of the feed-forward block are added to those of the preceding layers.

    Args:
        attention: Token mixer, called with hidden states [B, L, D] and the rotary tables; returns [B, L, D].
            For packed sequences it also receives the keyword argument `document_ids_BL`, and with an attention mask
            `attention_mask`.
        feed_forward: Feed-forward block, called with hidden states [B, L, D]; returns [B, L, D] or `HiddenAndLosses`.
            A block that `HasExperts` also receives the token mask, if any.
        norm: Function that builds each norm; None for an `RMSNorm` with its defaults.
        attention_norm: If False, the attention has no norm before it (first layer of ModernBERT).
        sandwich_norms: If True, the outputs of attention and feed-forward block have norms as well.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm: Callable[[], Norm] | None = None,
        attention_norm: bool = True,
        sandwich_norms: bool = False,
    ) -> None:
        super().__init__()
        norm = (lambda: RMSNorm(hidden_size)) if norm is None else norm
        self.attention_norm = norm() if attention_norm else nn.Identity()
        self.attention = attention
        self.attention_output_norm = norm() if sandwich_norms else None
        self.feed_forward_norm = norm()
        self.feed_forward = feed_forward
        self.feed_forward_output_norm = norm() if sandwich_norms else None
        self._has_experts = isinstance(feed_forward, HasExperts)

    def forward(
        self,
        x: Hidden,
        rotary: RotaryTables,
        *,
        document_ids_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
        expert_indices: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Hidden:
        """Apply the layer; shape and dtype of the hidden states [B, L, D] are unchanged.

        `x` is a `HiddenAndLosses` if the model has auxiliary losses. `document_ids_BL` are the document ids of packed
        sequences, integer; None: each row is one document. `mask_BL` is the token mask for a feed-forward block with
        experts; None if there is no padding. `expert_indices` are recorded experts [B, L, A]; None: the router chooses.
        `attention_mask` is the boolean mask [B, L, L] of `GroupedQueryAttention.forward`.
        """
        x_BLD, losses = x if isinstance(x, HiddenAndLosses) else (x, None)
        # Token mixers without these arguments work as long as no sequences are packed or masked.
        optional = {"document_ids_BL": document_ids_BL, "attention_mask": attention_mask}
        given = {name: value for name, value in optional.items() if value is not None}
        # With autocast, or a custom mixer, the output dtype may differ from the residual stream's.
        attention_BLD = self.attention(self.attention_norm(x_BLD), rotary, **given).to(x_BLD.dtype)
        if self.attention_output_norm is not None:
            attention_BLD = self.attention_output_norm(attention_BLD)
        normed_BLD, attended_BLD = self.feed_forward_norm(attention_BLD, x_BLD)
        of_experts = {"mask_BL": mask_BL, "expert_indices": expert_indices} if self._has_experts else {}
        given = {name: value for name, value in of_experts.items() if value is not None}
        y_BLD = self.feed_forward(normed_BLD, **given)
        if isinstance(y_BLD, HiddenAndLosses):
            assert losses is not None, "auxiliary losses need an input of HiddenAndLosses"
            y_BLD, losses = y_BLD.hidden, losses + y_BLD.losses
        if self.feed_forward_output_norm is not None:
            y_BLD = self.feed_forward_output_norm(y_BLD.to(x_BLD.dtype))
        out_BLD = attended_BLD + y_BLD
        return out_BLD if losses is None else HiddenAndLosses(out_BLD, losses)
