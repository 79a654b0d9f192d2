"""Hyperparameters of a decoder that all families share, and the properties in which families differ."""

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
"""RoPE scaling in a configuration, selected by `kind`, such as `{kind = "linear", factor = 2.0}`."""


class DecoderParams(Protocol):
    """Hyperparameters of a decoder, implemented by the dataclass of each family, such as `Qwen3Params`."""

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
        """Intermediate size of the feed-forward block."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """True if the language-model head shares the weight of the token embedding."""
        ...

    @property
    def rope_theta(self) -> float:
        """Base of the rotary wavelengths."""
        ...

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """RoPE scaling for long sequences; None for no scaling."""
        ...

    @property
    def rope_length(self) -> int | None:
        """Longest sequence length, for scalings that depend on it; None uses the longest row of each call."""
        ...

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of all RMS norms."""
        ...

    @property
    def initializer_range(self) -> float:
        """Standard deviation of the initial weights."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Exclusive upper bound of the positions; written to exported configurations."""
        ...

    @property
    def has_qk_norm(self) -> bool:
        """True if each query and key head has an RMS norm (QK norm)."""
        ...

    def window(self, index: int) -> int | None:
        """Return the sliding-window size of the layer with this global index; None for full causal attention."""
        ...


def check_decoder_params(params: DecoderParams) -> None:
    """Validate the hyperparameters that all families share.

    Raises:
        UserError: If a field is out of range; the message names the field, its value and the valid values.
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
        raise UserError(f"head_dim = {params.head_dim}; RoPE rotates pairs of features: use an even head_dim.")
