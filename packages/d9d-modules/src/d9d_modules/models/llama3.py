"""Llama 3, arXiv:2407.21783, 3.1 and 3.2 included: grouped-query attention, rotary positions, SwiGLU, RMS norm.

The models are those of `decoder_model`, `decoder_pooled` and `decoder_heads`, under the names of the family. Releases
from 3.1 on have a `Llama3Scaling`; the small ones of 3.2 tie their head.
"""

from dataclasses import dataclass
from typing import TypeAlias, final

from d9d_modules.models.decoder_heads import DecoderWithHeads
from d9d_modules.models.decoder_model import DecoderForCausalLM, DecoderModel
from d9d_modules.models.decoder_params import RopeScaling, check_decoder_params
from d9d_modules.models.decoder_pooled import DecoderForClassification, DecoderForEmbedding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Params:
    """The sizes of a Llama 3 model.

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
        rope_scaling: Changes the wavelengths for long sequences; None for those of the base, as in 3.0.
        rope_length: The longest sequence, for a scaling that depends on it (dynamic NTK, LongRoPE). None takes the
            longest of each call, as `transformers` does: results then depend on how a batch is split.
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
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    rope_length: int | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have.

        Raises:
            UserError: Naming the field, its value, and what it may be.
        """
        check_decoder_params(self)

    @property
    def has_qk_norm(self) -> bool:
        """See `DecoderParams`; never."""
        return False

    def window(self, index: int) -> None:
        """See `DecoderParams`; none."""


Llama3Model: TypeAlias = DecoderModel
"""The backbone."""

Llama3ForCausalLM: TypeAlias = DecoderForCausalLM
"""The backbone with a language-model head."""

Llama3ForClassification: TypeAlias = DecoderForClassification
"""The backbone with scores of classes for each row."""

Llama3ForEmbedding: TypeAlias = DecoderForEmbedding
"""The backbone with a vector for each row."""

Llama3WithHeads: TypeAlias = DecoderWithHeads
"""The backbone with several named heads."""
