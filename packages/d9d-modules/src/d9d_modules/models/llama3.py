"""Llama 3 (arXiv:2407.21783), including 3.1 and 3.2: grouped-query attention, RoPE, SwiGLU, RMS norm.

The model classes are aliases of those in `decoder_model`, `decoder_pooled` and `decoder_heads`. Releases from 3.1 on
use `Llama3Scaling`; the small 3.2 models tie the language-model head to the embedding.
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
    """Hyperparameters of a Llama 3 model.

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
        rope_scaling: RoPE scaling for long sequences; None for no scaling, as in Llama 3.0.
        rope_length: Longest sequence length, for scalings that depend on it (dynamic NTK, LongRoPE). None uses the
            longest row of each call, like `transformers`; results then depend on how a batch is split.
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
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    rope_length: int | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        """Validate the hyperparameters.

        Raises:
            UserError: If a field is out of range; the message names the field, its value and the valid values.
        """
        check_decoder_params(self)

    @property
    def has_qk_norm(self) -> bool:
        """See `DecoderParams`. Always False."""
        return False

    def window(self, index: int) -> None:
        """See `DecoderParams`. Always None: Llama 3 has no sliding windows."""


Llama3Model: TypeAlias = DecoderModel
"""Llama 3 backbone."""

Llama3ForCausalLM: TypeAlias = DecoderForCausalLM
"""Llama 3 backbone with a language-model head."""

Llama3ForClassification: TypeAlias = DecoderForClassification
"""Llama 3 backbone with a classification head."""

Llama3ForEmbedding: TypeAlias = DecoderForEmbedding
"""Llama 3 backbone with a text-embedding head."""

Llama3WithHeads: TypeAlias = DecoderWithHeads
"""Llama 3 backbone with several named heads."""
