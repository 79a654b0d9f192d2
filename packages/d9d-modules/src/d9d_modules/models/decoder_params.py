"""Hyperparameters that all decoder families share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, final

from pydantic import Field
from torch import nn

from d9d_dist.errors import UserError
from d9d_modules.lm_head import LanguageModelHead
from d9d_modules.norm import Norm, RMSNorm
from d9d_modules.pooling import Pooling
from d9d_modules.rope_scaling import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    YarnScaling,
)
from d9d_modules.swiglu import SwiGLU
from d9d_state import StateMapper, identity

RopeScaling: TypeAlias = Annotated[
    LinearScaling | NtkScaling | YarnScaling | Llama3Scaling | LongRopeScaling | DynamicNtkScaling,
    Field(discriminator="kind"),
]
"""RoPE scaling in a configuration, selected by `kind`, such as `{kind = "linear", factor = 2.0}`."""


MixerKind: TypeAlias = Literal["full_attention", "sliding_attention", "linear_attention"]
"""Kind of a layer's token mixer, named as in the entry `layer_types` of a Hugging Face `config.json`."""


@final
@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE base and scaling of a layer."""

    theta: float
    scaling: RopeScaling | None = None


@final
@dataclass(frozen=True, slots=True)
class AuxiliaryLosses:
    """Losses per token that feed-forward blocks return with the hidden states, summed over the layers.

    Attributes:
        name: Name in error messages, such as "router losses".
        total: Function that builds the module that converts the records [B, L, R] of all layers to losses [B, L]; None
            if the layers return losses [B, L].
    """

    name: str
    total: Callable[[], nn.Module] | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderParams(ABC):
    """Hyperparameters that all decoder families share. The subclass of a family builds the blocks of each layer.

    Attributes:
        num_layers: Number of decoder layers of the whole model.
        tie_word_embeddings: If True, the language-model head shares the weight of the token embedding.
        rope_scaling: RoPE scaling for long sequences; None for no scaling.
        rope_length: Longest sequence length, for scalings that depend on it (dynamic NTK, LongRoPE). None uses the
            longest row of each call, like `transformers`; results then depend on how a batch is split.
        initializer_range: Standard deviation of the initial weights.
        max_position_embeddings: Exclusive upper bound of the positions; written to exported configurations.
        head_layers: Cost of the head as a number of layers: the last pipeline stage gets fewer layers accordingly. The
            losses do not depend on this number, and exports do not contain it.
    """

    zero_centered_norms: ClassVar[bool] = False
    """True if all norms scale by `1 + weight`."""

    sandwich_norms: ClassVar[bool] = False
    """True if the outputs of attention and feed-forward block have norms; see `DecoderLayer`."""

    hugging_face_norms: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
    }
    """Names of a layer's norms by their names in a Hugging Face checkpoint."""

    score_bias: ClassVar[bool] = False
    """True if classification heads have a bias."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("head_layers",)
    """Hyperparameters that may be 0; all other numbers must be above 0."""

    not_exported: ClassVar[tuple[str, ...]] = ("head_layers", "rope_length")
    """Hyperparameters that a Hugging Face `config.json` does not contain."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_length: int | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096
    head_layers: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) in (int, float) and (value < 0 or (value == 0 and each.name not in self.may_be_zero)):
                bound = "0 or more" if each.name in self.may_be_zero else "a number above 0"
                raise UserError(f"{each.name} = {value}; expected {bound}.")

    @classmethod
    def like(cls, other: "DecoderParams", **changes: Any) -> Self:
        """Return hyperparameters of this family with the values of `other`, a model of another family, and `changes`.

        Raises:
            UserError: If `other` sets a hyperparameter that this family does not have.
        """
        names = {each.name for each in fields(cls)}
        values = {each.name: getattr(other, each.name) for each in fields(other)}
        for each in fields(other):
            if each.name not in names and values[each.name] != each.default:
                raise UserError(
                    f"{each.name} = {values[each.name]}; expected its default, because {cls.__name__} has no such "
                    "hyperparameter."
                )
        return cls(**{**{name: value for name, value in values.items() if name in names}, **changes})

    @property
    @abstractmethod
    def rotated_features(self) -> int:
        """Number of features per head that RoPE rotates; even."""

    @property
    def embedding_scale(self) -> float:
        """Multiplier of the token embeddings."""
        return 1.0

    @property
    def pooling(self) -> Pooling:
        """Default pooling of classification and embedding heads."""
        return "last"

    @property
    def auxiliary_losses(self) -> AuxiliaryLosses | None:
        """Losses that the feed-forward blocks return; None for no losses."""
        return None

    def norm(self) -> Norm:
        """Build a norm of the hidden states; by default an `RMSNorm`."""
        return RMSNorm(self.hidden_size, eps=self.rms_norm_eps, zero_centered=self.zero_centered_norms)

    def embedding_norm(self) -> Norm | None:
        """Build the norm of the token embeddings; None for no norm."""
        return None

    def has_attention_norm(self, index: int) -> bool:
        """Return True if the layer with this global index has a norm before its token mixer."""
        return True

    def lm_head(self) -> LanguageModelHead:
        """Build the language-model head, before its weight is tied."""
        return LanguageModelHead(self.hidden_size, self.vocab_size, init_std=self.initializer_range)

    def head_transform(self) -> nn.Module | None:
        """Build the module before a language-model head or the scores of a classification head; None to omit it."""
        return None

    def rope(self, index: int) -> Rope:
        """Return RoPE base and scaling of the layer with this global index; by default equal for all layers."""
        return Rope(self.rope_theta, self.rope_scaling)

    def mixer_kind(self, index: int) -> MixerKind:
        """Return the kind of the token mixer of the layer with this global index; by default full attention."""
        return "full_attention"

    @abstractmethod
    def mixer(self, index: int) -> nn.Module:
        """Build the token mixer of the layer with this global index; see `DecoderLayer`."""

    @abstractmethod
    def mixer_from_hugging_face(self, index: int) -> StateMapper:
        """Build the mapper of a token mixer's weights, such as `self_attn.q_proj.weight` to `attention.q_proj.weight`.

        Names are relative to the layer with this global index.
        """

    def feed_forward(self, index: int) -> nn.Module:
        """Build the feed-forward block of the layer with this global index; by default a `SwiGLU`."""
        return SwiGLU(self.hidden_size, self.intermediate_size, init_std=self.initializer_range)

    def feed_forward_from_hugging_face(self, index: int) -> StateMapper:
        """Build the mapper of a feed-forward block's weights, with names relative to the block; see `feed_forward`."""
        return swiglu_from_hugging_face()


def swiglu_from_hugging_face() -> StateMapper:
    """Build the mapper of one `SwiGLU` or `GeGLU` block without biases, with names relative to the block."""
    names = [f"{projection}_proj.weight" for projection in ("gate", "up", "down")]
    return identity(*names)


def check_layers(name: str, layers: tuple[int, ...], num_layers: int) -> None:
    """Raise a `UserError` if a layer index is out of range."""
    outside = [index for index in layers if index not in range(num_layers)]
    if outside:
        raise UserError(
            f"{name} contains {outside[0]}; expected indices from 0 to {num_layers - 1}, since "
            f"num_layers = {num_layers}."
        )
