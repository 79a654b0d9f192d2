"""Qwen3 (dense), arXiv:2505.09388: grouped-query attention with QK norm, rotary positions, SwiGLU, RMS norm.

The models are those of `decoder_model`, `decoder_pooled` and `decoder_heads`, under the names of the family.
"""

from dataclasses import dataclass
from typing import TypeAlias, final

from d9d_dist.errors import UserError
from d9d_modules.lm_head import LanguageModelHead
from d9d_modules.models.decoder_heads import DecoderWithHeads
from d9d_modules.models.decoder_model import DecoderForCausalLM, DecoderModel, decoder_lm_head
from d9d_modules.models.decoder_params import RopeScaling, check_decoder_params
from d9d_modules.models.decoder_pooled import DecoderForClassification, DecoderForEmbedding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Params:
    """The sizes of a Qwen3 model.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Size of the hidden states.
        num_layers: Number of decoder layers of the whole model.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads; divides `num_heads`.
        head_dim: Size of one head; even.
        intermediate_size: Size between the projections of the feed-forward block.
        tie_word_embeddings: Whether the head uses the weight of the token embedding.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: Changes the wavelengths for long sequences; None for those of the base.
        rope_length: The longest sequence, for a scaling that depends on it (dynamic NTK, LongRoPE). None takes the
            longest of each call, as `transformers` does: results then depend on how a batch is split.
        sliding_window: To how many positions those of `sliding_layers` attend, themselves included; None for none.
        sliding_layers: Indices of the layers with a sliding window; all others attend to everything before.
        rms_norm_eps: Epsilon of every norm.
        initializer_range: Standard deviation of the initial weights.
        max_position_embeddings: Longest sequence that the model is meant for: positions are below it. Written to
            exported configurations.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool = False
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    rope_length: int | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have.

        Raises:
            UserError: Naming the field, its value, and what it may be.
        """
        check_decoder_params(self)
        if (self.sliding_window is None) is not (not self.sliding_layers):
            raise UserError(
                f"sliding_window = {self.sliding_window}, sliding_layers = {self.sliding_layers}; expected both or "
                "neither: a size, and the layers that have it."
            )
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise UserError(f"sliding_window = {self.sliding_window}; expected a number above 0, or None.")
        outside = [index for index in self.sliding_layers if index not in range(self.num_layers)]
        if outside:
            raise UserError(
                f"sliding_layers names layer {outside[0]}; expected indices from 0 to {self.num_layers - 1}, since "
                f"num_layers = {self.num_layers}."
            )

    @property
    def has_qk_norm(self) -> bool:
        """See `DecoderParams`; always."""
        return True

    def window(self, index: int) -> int | None:
        """See `DecoderParams`."""
        return self.sliding_window if index in self.sliding_layers else None


Qwen3Model: TypeAlias = DecoderModel
"""The backbone."""

Qwen3ForCausalLM: TypeAlias = DecoderForCausalLM
"""The backbone with a language-model head."""

Qwen3ForClassification: TypeAlias = DecoderForClassification
"""The backbone with scores of classes for each row."""

Qwen3ForEmbedding: TypeAlias = DecoderForEmbedding
"""The backbone with a vector for each row."""

Qwen3WithHeads: TypeAlias = DecoderWithHeads
"""The backbone with several named heads."""


def qwen3_lm_head(backbone: Qwen3Model) -> LanguageModelHead | None:
    """The head that belongs to a stage of the backbone: None on all but the last."""
    return decoder_lm_head(backbone) if backbone.stage.is_last else None
