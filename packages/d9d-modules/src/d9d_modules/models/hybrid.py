"""Hyperparameters of decoders that mix Gated DeltaNet layers with gated attention, as in Qwen3-Next and Qwen3.5."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from d9d_dist.errors import UserError
from d9d_modules.gated_delta_net import GatedDeltaNet
from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.decoder_params import MixerKind, check_layers
from d9d_modules.models.grouped_query import AttentionForm, GroupedQueryParams
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, layers_of_kind, written_layer_types
from d9d_state import JsonValue, StateMapper, parallel, rename, rename_all, reshape, sequential, split


@dataclass(frozen=True, kw_only=True)
class HybridParams(GroupedQueryParams, ABC):
    """Hyperparameters of a decoder whose layers are `GatedDeltaNet`s or gated attention; see `GroupedQueryParams`.

    Attributes:
        rotary_dim: Number of leading features of each attention head to rotate.
        full_layers: Indices of the layers with attention; the other layers are linear (`GatedDeltaNet`).
        num_linear_key_heads: Number of key heads of a linear layer; divides `num_linear_value_heads`.
        conv_width: Kernel width of the convolutions of a linear layer.
    """

    zero_centered_norms: ClassVar[bool] = True
    has_grouped_projections: ClassVar[bool] = False
    """True if a checkpoint stores the projections of a linear layer by key head (Qwen3-Next)."""

    rotary_dim: int
    full_layers: tuple[int, ...]
    num_linear_key_heads: int
    num_linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("full_layers", self.full_layers, self.num_layers)
        if self.num_linear_value_heads % self.num_linear_key_heads:
            raise UserError(
                f"num_linear_key_heads = {self.num_linear_key_heads} does not divide num_linear_value_heads = "
                f"{self.num_linear_value_heads}; expected a number that does."
            )

    @property
    def attention_form(self) -> AttentionForm:
        """See `GroupedQueryParams`."""
        return AttentionForm(qk_norm=True, output_gate=True, rotary_dim=self.rotary_dim)

    def mixer_kind(self, index: int) -> MixerKind:
        """See `DecoderParams`; by `full_layers`. MTP layers, which come last, have full attention."""
        is_full = index in self.full_layers or index >= self.num_layers
        return super().mixer_kind(index) if is_full else "linear_attention"

    def mixer(self, index: int) -> nn.Module:
        """See `DecoderParams`."""
        if self.mixer_kind(index) != "linear_attention":
            return super().mixer(index)
        return GatedDeltaNet(
            self.hidden_size,
            num_key_heads=self.num_linear_key_heads,
            num_value_heads=self.num_linear_value_heads,
            key_dim=self.linear_key_dim,
            value_dim=self.linear_value_dim,
            conv_width=self.conv_width,
            norm_eps=self.rms_norm_eps,
            init_std=self.initializer_range,
        )

    def mixer_from_hugging_face(self, index: int) -> StateMapper:
        """See `DecoderParams`."""
        if self.mixer_kind(index) == "linear_attention":
            return parallel(*self._linear_projections(), self._convolutions(), rename_all(_LINEAR))
        heads = {"attention.q_proj.weight": self.head_dim, "attention.gate_proj.weight": self.head_dim}
        return parallel(_grouped("self_attn.q_proj.weight", heads, self.num_heads, self.hidden_size), rename_all(_FULL))

    def _linear_projections(self) -> list[StateMapper]:
        """Map the input projections of a linear layer; the checkpoint has two or four matrices."""
        groups = self.num_linear_key_heads if self.has_grouped_projections else 1
        values = self.num_linear_value_heads * self.linear_value_dim // groups
        keys = self.num_linear_key_heads * self.linear_key_dim // groups
        heads = self.num_linear_value_heads // groups
        qkv = {"attention.q_proj.weight": keys, "attention.k_proj.weight": keys, "attention.v_proj.weight": values}
        gate = {"attention.gate_proj.weight": values}
        beta, decay = {"attention.beta_proj.weight": heads}, {"attention.decay_proj.weight": heads}
        matrices = (
            {"qkvz": qkv | gate, "ba": beta | decay}
            if self.has_grouped_projections
            else {"qkv": qkv, "z": gate, "b": beta, "a": decay}
        )
        return [
            _grouped(f"linear_attn.in_proj_{name}.weight", parts, groups, self.hidden_size)
            for name, parts in matrices.items()
        ]

    def _convolutions(self) -> StateMapper:
        keys = self.num_linear_key_heads * self.linear_key_dim
        sizes = [keys, keys, self.num_linear_value_heads * self.linear_value_dim]
        name, shape = "linear_attn.conv1d.weight", [sum(sizes), self.conv_width]
        flat = reshape(name, name, shape, source_shape=[shape[0], 1, shape[1]])
        return sequential(flat, split(name, [f"attention.{each}_conv.weight" for each in "qkv"], sizes, dim=0))


HYBRID_ENTRIES = (
    *hf.with_defaults(hf.GROUPED_QUERY_ENTRIES, max_position_embeddings=32768),
    hf.Entry("num_linear_key_heads", "linear_num_key_heads", default=16),
    hf.Entry("num_linear_value_heads", "linear_num_value_heads", default=32),
    hf.Entry("linear_key_dim", "linear_key_head_dim", default=128),
    hf.Entry("linear_value_dim", "linear_value_head_dim", default=128),
    hf.Entry("conv_width", "linear_conv_kernel_dim", default=4),
)
"""Entries of hybrid decoders, except for experts."""

HYBRID_FIXED: Mapping[str, JsonValue] = {**hf.UNBIASED_ENTRIES, "attn_output_gate": True}
"""`config.json` entries of hybrid decoders for which only one value is supported."""

HYBRID_OWN = ("full_attention_interval", "layer_types")
"""Entries that `read_full_layers` reads."""


def read_full_layers(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the layers with attention: by `layer_types`, or else every `full_attention_interval`-th layer."""
    interval = config_value(config, "full_attention_interval", int, default=4)
    layers = layers_of_kind(
        config,
        values["num_layers"],
        "full_attention",
        default=lambda index: (index + 1) % interval == 0,
        known=("linear_attention", "full_attention"),
    )
    return {"full_layers": layers}


def written_full_layers(params: HybridParams) -> Mapping[str, JsonValue]:
    """Return the entries of `config.json` about the kinds of layers."""
    return {"layer_types": written_layer_types(params)}


_FULL = {
    **{f"self_attn.{name}_proj.weight": f"attention.{name}_proj.weight" for name in "kvo"},
    **{f"self_attn.{name}_norm.weight": f"attention.{name}_norm.weight" for name in "qk"},
}
_LINEAR = {
    "linear_attn.A_log": "attention.decay_gate.log_rate",
    "linear_attn.dt_bias": "attention.decay_gate.bias",
    "linear_attn.norm.weight": "attention.norm.weight",
    "linear_attn.out_proj.weight": "attention.o_proj.weight",
}


def _grouped(name: str, rows: Mapping[str, int], num_groups: int, columns: int) -> StateMapper:
    """Split a matrix whose rows are in groups; a group has `rows[name]` rows of the output `name`."""
    total = sum(rows.values())
    if num_groups == 1:
        return rename(name, *rows) if len(rows) == 1 else split(name, [*rows], [*rows.values()], dim=0)
    return sequential(
        reshape(name, name, [num_groups, total, columns], source_shape=[num_groups * total, columns]),
        split(name, [*rows], [*rows.values()], dim=1),
        parallel(
            *(
                reshape(each, each, [num_groups * size, columns], source_shape=[num_groups, size, columns])
                for each, size in rows.items()
            )
        ),
    )
