"""What a decoder has to know of its family: the sizes that all families share, and where they differ."""

from typing import Annotated, Protocol, TypeAlias

from pydantic import Field

from d9d_dist.errors import UserError
from d9d_modules.rope_scaling import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
)

RopeScaling: TypeAlias = Annotated[
    LinearScaling | YarnScaling | Llama3Scaling | LongRopeScaling | DynamicNtkScaling, Field(discriminator="kind")
]
"""The scalings of rotary positions that a configuration can name, such as `{kind = "linear", factor = 2.0}`."""


class DecoderParams(Protocol):
    """The sizes of a decoder; the dataclass of a family, such as `Qwen3Params`, says what each is."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states."""
        ...

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the whole model."""
        ...

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads; divides `num_heads`."""
        ...

    @property
    def head_dim(self) -> int:
        """Size of one head; even."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Size between the projections of the feed-forward block."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether a language-model head uses the weight of the token embedding."""
        ...

    @property
    def rope_theta(self) -> float:
        """Base of the rotary wavelengths."""
        ...

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """Changes the wavelengths for long sequences; None for those of the base."""
        ...

    @property
    def rope_length(self) -> int | None:
        """The longest sequence, for a scaling that depends on it; None for the longest of each call."""
        ...

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of every norm."""
        ...

    @property
    def initializer_range(self) -> float:
        """Standard deviation of the initial weights."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence that the model is meant for: positions are below it; written to exported configurations."""
        ...

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised, head by head."""
        ...

    def window(self, index: int) -> int | None:
        """To how many positions those of the layer with this index attend; None: to all before them."""
        ...


def check_decoder_params(params: DecoderParams) -> None:
    """Refuse sizes that no decoder can have.

    Raises:
        UserError: Naming the field, its value, and what it may be.
    """
    for name, value in (
        ("vocab_size", params.vocab_size),
        ("hidden_size", params.hidden_size),
        ("num_layers", params.num_layers),
        ("num_heads", params.num_heads),
        ("num_kv_heads", params.num_kv_heads),
        ("head_dim", params.head_dim),
        ("intermediate_size", params.intermediate_size),
        ("rope_theta", params.rope_theta),
        ("rope_length", 1 if params.rope_length is None else params.rope_length),
        ("rms_norm_eps", params.rms_norm_eps),
        ("initializer_range", params.initializer_range),
        ("max_position_embeddings", params.max_position_embeddings),
    ):
        if value <= 0:
            raise UserError(f"{name} = {value}; expected a number above 0.")
    if params.num_heads % params.num_kv_heads:
        fitting = [str(n) for n in range(1, params.num_heads + 1) if params.num_heads % n == 0]
        raise UserError(
            f"num_kv_heads = {params.num_kv_heads} does not divide num_heads = {params.num_heads}; "
            f"use one of {', '.join(fitting)}."
        )
    if params.head_dim % 2:
        raise UserError(f"head_dim = {params.head_dim}; rotary positions rotate pairs of features: use an even one.")
