"""Qwen3, dense (arXiv:2505.09388): grouped-query attention with QK norm, RoPE, SwiGLU, RMS norm.

The model classes are aliases of those in `decoder_model`, `decoder_pooled` and `decoder_heads`.
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
    """Hyperparameters of a Qwen3 model.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Size of the hidden states.
        num_layers: Number of decoder layers of the whole model.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads; divides `num_heads`.
        head_dim: Size of one head; even.
        intermediate_size: Intermediate size of the feed-forward block.
        tie_word_embeddings: If True, the language-model head shares the weight of the token embedding.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: RoPE scaling for long sequences; None for no scaling.
        rope_length: Longest sequence length, for scalings that depend on it (dynamic NTK, LongRoPE). None uses the
            longest row of each call, like `transformers`; results then depend on how a batch is split.
        sliding_window: Window size of the layers in `sliding_layers`, including the current position; None if no layer
            has a window.
        sliding_layers: Indices of the layers with a sliding window; the other layers use full causal attention.
        rms_norm_eps: Epsilon of all RMS norms.
        initializer_range: Standard deviation of the initial weights.
        max_position_embeddings: Exclusive upper bound of the positions; written to exported configurations.
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
        """Validate the hyperparameters.

        Raises:
            UserError: If a field is out of range; the message names the field, its value and the valid values.
        """
        check_decoder_params(self)
        if (self.sliding_window is None) is not (not self.sliding_layers):
            raise UserError(
                f"sliding_window = {self.sliding_window}, sliding_layers = {self.sliding_layers}; expected both or "
                "neither: the window size, and the indices of the layers that use it."
            )
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise UserError(f"sliding_window = {self.sliding_window}; expected a number above 0, or None.")
        outside = [index for index in self.sliding_layers if index not in range(self.num_layers)]
        if outside:
            raise UserError(
                f"sliding_layers contains {outside[0]}; expected indices from 0 to {self.num_layers - 1}, since "
                f"num_layers = {self.num_layers}."
            )

    @property
    def has_qk_norm(self) -> bool:
        """See `DecoderParams`. Always True."""
        return True

    def window(self, index: int) -> int | None:
        """See `DecoderParams`."""
        return self.sliding_window if index in self.sliding_layers else None


Qwen3Model: TypeAlias = DecoderModel
"""Qwen3 backbone."""

Qwen3ForCausalLM: TypeAlias = DecoderForCausalLM
"""Qwen3 backbone with a language-model head."""

Qwen3ForClassification: TypeAlias = DecoderForClassification
"""Qwen3 backbone with a classification head."""

Qwen3ForEmbedding: TypeAlias = DecoderForEmbedding
"""Qwen3 backbone with a text-embedding head."""

Qwen3WithHeads: TypeAlias = DecoderWithHeads
"""Qwen3 backbone with several named heads."""


def qwen3_lm_head(backbone: Qwen3Model) -> LanguageModelHead | None:
    """Build the language-model head if the backbone is a last stage; return None for other stages."""
    return decoder_lm_head(backbone) if backbone.stage.is_last else None
