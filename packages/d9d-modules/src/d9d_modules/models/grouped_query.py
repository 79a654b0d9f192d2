"""Hyperparameters of decoders with grouped-query attention, dense or sparse."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from d9d_dist.errors import UserError
from d9d_modules.attention import GroupedQueryAttention
from d9d_modules.attention_backends import AttentionOptions
from d9d_modules.models.decoder_params import DecoderParams, check_layers, check_positive


@dataclass(frozen=True, kw_only=True)
class GroupedQueryParams(DecoderParams, ABC):
    """Hyperparameters of a decoder with grouped-query attention in all layers; see also `DecoderParams`.

    Attributes:
        num_kv_heads: Number of key/value heads; divides `num_heads`.
        head_dim: Size of one head; even.
        sliding_window: Window size of the layers in `sliding_layers`, including the current position; None if no layer
            has a window.
        sliding_layers: Indices of the layers with a sliding window; the other layers use full causal attention.
    """

    has_qk_norm: ClassVar[bool]
    """True if each query and key head has an RMS norm (QK norm)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.num_heads % self.num_kv_heads:
            fitting = [str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise UserError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}; "
                f"use one of {', '.join(fitting)}."
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim = {self.head_dim}; RoPE rotates pairs of features: use an even head_dim.")
        if (self.sliding_window is None) is not (not self.sliding_layers):
            raise UserError(
                f"sliding_window = {self.sliding_window}, sliding_layers = {self.sliding_layers}; expected both or "
                "neither: the window size, and the indices of the layers that use it."
            )
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise UserError(f"sliding_window = {self.sliding_window}; expected a number above 0, or None.")
        check_layers("sliding_layers", self.sliding_layers, self.num_layers)

    @property
    def rotated_features(self) -> int:
        """See `DecoderParams`."""
        return self.head_dim

    @property
    def hugging_face_mixer(self) -> Mapping[str, str]:
        """See `DecoderParams`."""
        norms = ("q_norm", "k_norm") if self.has_qk_norm else ()
        return {name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj", *norms)}

    def window(self, index: int) -> int | None:
        """Return the sliding-window size of the layer with this global index; None for full causal attention."""
        return self.sliding_window if index in self.sliding_layers else None

    def mixer(self, index: int) -> nn.Module:
        """See `DecoderParams`."""
        return GroupedQueryAttention(
            self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            qk_norm_eps=self.rms_norm_eps if self.has_qk_norm else None,
            options=AttentionOptions(window=self.window(index)),
            init_std=self.initializer_range,
        )
