"""Hyperparameters of decoders with grouped-query attention, dense or MoE."""

from abc import ABC
from dataclasses import dataclass
from typing import final

from torch import nn

from d9d_dist.errors import UserError
from d9d_modules.attention import GroupedQueryAttention
from d9d_modules.attention_backends.backend import AttentionOptions
from d9d_modules.models.decoder_params import DecoderParams, MixerKind, check_layers
from d9d_modules.rope import RotaryLayout, check_rotary_sizes
from d9d_state import StateMapper, rename_all


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Features of a family's attention; see the arguments of `GroupedQueryAttention` and `AttentionOptions`."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    sinks: bool = False
    rotary_dim: int | None = None
    rotary_layout: RotaryLayout = "half"
    is_causal: bool = True
    scale: float | None = None
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class GroupedQueryParams(DecoderParams, ABC):
    """Hyperparameters of a decoder with grouped-query attention in all layers; see also `DecoderParams`.

    Attributes:
        num_kv_heads: Number of key/value heads; divides `num_heads`.
        head_dim: Size of one head; even.
        sliding_window: Window size of the layers in `sliding_layers`, including the current position; None if no layer
            has a window.
        sliding_layers: Indices of the layers with a sliding window; the other layers use full attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            fitting = [str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise UserError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}; "
                f"use one of {', '.join(fitting)}."
            )
        check_rotary_sizes(self.head_dim, self.rotated_features)
        if (self.sliding_window is None) is not (not self.sliding_layers):
            raise UserError(
                f"sliding_window = {self.sliding_window}, sliding_layers = {self.sliding_layers}; expected both or "
                "neither: the window size, and the indices of the layers that use it."
            )
        check_layers("sliding_layers", self.sliding_layers, self.num_layers)

    @property
    def attention_form(self) -> AttentionForm:
        """Features of the attention of all layers; by default plain attention, as in Llama."""
        return AttentionForm()

    @property
    def rotated_features(self) -> int:
        """See `DecoderParams`."""
        return self.attention_form.rotary_dim or self.head_dim

    def mixer_kind(self, index: int) -> MixerKind:
        """See `DecoderParams`; by `sliding_layers`."""
        return "sliding_attention" if index in self.sliding_layers else "full_attention"

    def window(self, index: int) -> int | None:
        """Return the sliding-window size of the layer with this global index; None for full attention."""
        return self.sliding_window if self.mixer_kind(index) == "sliding_attention" else None

    def mixer(self, index: int) -> nn.Module:
        """See `DecoderParams`."""
        form = self.attention_form
        return GroupedQueryAttention(
            self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            qkv_bias=form.qkv_bias,
            output_bias=form.output_bias,
            qk_norm_eps=self.rms_norm_eps if form.qk_norm else None,
            zero_centered_norms=self.zero_centered_norms,
            output_gate=form.output_gate,
            sinks=form.sinks,
            rotary_dim=form.rotary_dim,
            rotary_layout=form.rotary_layout,
            options=AttentionOptions(
                is_causal=form.is_causal, window=self.window(index), scale=form.scale, softcap=form.softcap
            ),
            init_std=self.initializer_range,
        )

    def mixer_from_hugging_face(self, index: int) -> StateMapper:
        """See `DecoderParams`; names as in Llama. Families with an output gate override this method."""
        form = self.attention_form
        assert not form.output_gate, "families with an output gate have layouts of their own"
        weights = ["q_proj", "k_proj", "v_proj", "o_proj", *(["q_norm", "k_norm"] if form.qk_norm else [])]
        biases = [*(["q_proj", "k_proj", "v_proj"] if form.qkv_bias else []), *(["o_proj"] if form.output_bias else [])]
        names = [*(f"{name}.weight" for name in weights), *(f"{name}.bias" for name in biases)]
        renamed = {f"self_attn.{name}": f"attention.{name}" for name in names}
        return rename_all({**renamed, **({"self_attn.sinks": "attention.sinks.weight"} if form.sinks else {})})
