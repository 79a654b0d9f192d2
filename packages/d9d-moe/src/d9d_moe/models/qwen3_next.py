"""Qwen3-Next and the MoE models of Qwen3.5: Gated DeltaNet layers, gated attention, and a gated shared expert."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from torch import nn

from d9d_modules import QWEN3_5
from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.decoder_params import swiglu_from_hugging_face
from d9d_modules.models.hugging_face_config import HuggingFaceConfig
from d9d_modules.models.hybrid import (
    HYBRID_ENTRIES,
    HYBRID_FIXED,
    HYBRID_OWN,
    HybridParams,
    read_full_layers,
    written_full_layers,
)
from d9d_moe.experts import SharedExperts
from d9d_moe.models.experts_hugging_face import ExpertsLayout, expert_entries, read_router_losses, written_router_losses
from d9d_moe.models.qwen3_moe import read_dense_layers
from d9d_moe.models.sparse_params import SoftmaxRoutedParams
from d9d_state import JsonValue, StateMapper, parallel, rename, scope


@dataclass(frozen=True, kw_only=True)
class SparseHybridParams(SoftmaxRoutedParams, HybridParams, ABC):
    """Hyperparameters of a hybrid MoE decoder; see `SoftmaxRoutedParams` and `HybridParams`."""

    shared_intermediate_size: int

    def shared_experts(self) -> nn.Module:
        """See `SparseParams`."""
        size, std = self.shared_intermediate_size, self.initializer_range
        return SharedExperts(self.hidden_size, size, is_gated=True, init_std=std)

    def moe_from_hugging_face(self, layout: ExpertsLayout) -> StateMapper:
        """See `SparseParams`."""
        return parallel(
            super().moe_from_hugging_face(layout),
            scope("shared_expert.", "shared.experts.", swiglu_from_hugging_face()),
            rename("shared_expert_gate.weight", "shared.gate.weight"),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Qwen3NextParams(SparseHybridParams):
    """Hyperparameters of a Qwen3-Next model; see `SparseHybridParams`.

    `sparse_from_hugging_face` maps its weights; `QWEN3_NEXT` reads and writes its `config.json`.
    """

    has_grouped_projections: ClassVar[bool] = True


@final
@dataclass(frozen=True, kw_only=True)
class Qwen35MoeParams(SparseHybridParams):
    """Hyperparameters of a Qwen3.5 MoE model; see `SparseHybridParams`.

    `sparse_from_hugging_face` maps its weights; released checkpoints need `prefix="model.language_model."` and
    `layout="fused"`. `QWEN3_5_MOE` reads and writes its `config.json`.
    """

    not_exported: ClassVar[tuple[str, ...]] = (*SparseHybridParams.not_exported, "intermediate_size")  # no dense layers


def _read_own(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**read_full_layers(config, values), **read_router_losses(config)}


def _written_own(params: SparseHybridParams) -> Mapping[str, JsonValue]:
    return {**written_full_layers(params), **written_router_losses(params.router_losses)}


def _read_next(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_read_own(config, values), "dense_layers": read_dense_layers(config, values["num_layers"])}


def _written_next(params: Qwen3NextParams) -> Mapping[str, JsonValue]:
    return {**_written_own(params), "mlp_only_layers": list(params.dense_layers)}


_ENTRIES = (
    # The released models have no dense layers, and Qwen3.5's config.json has no `intermediate_size`.
    *(each for each in HYBRID_ENTRIES if each.field != "intermediate_size"),
    *expert_entries("num_experts"),
    hf.Entry("shared_intermediate_size", "shared_expert_intermediate_size", default=512),
)
_OWN = (*HYBRID_OWN, "output_router_logits", "router_aux_loss_coef")

QWEN3_NEXT = hf.HuggingFaceFamily(
    params=Qwen3NextParams,
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    entries=(
        *_ENTRIES,
        hf.Entry("intermediate_size", "intermediate_size", default=5632),
        hf.Entry("renormalize", "norm_topk_prob", bool, default=True),
    ),
    fixed={**HYBRID_FIXED, "use_sliding_window": False},
    written={"decoder_sparse_step": 1},
    own=(*_OWN, "decoder_sparse_step", "mlp_only_layers"),
    read_own=_read_next,
    write_own=_written_next,
    unused=("mtp.*",),
    rotary_factor=0.25,
)
"""`config.json` of Qwen3-Next."""

QWEN3_5_MOE: hf.HuggingFaceFamily[Any] = replace(
    QWEN3_5,
    params=Qwen35MoeParams,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    nested_type="qwen3_5_moe",
    entries=(*_ENTRIES, hf.Entry("intermediate_size", "shared_expert_intermediate_size", default=512)),
    own=_OWN,
    read_own=_read_own,
    write_own=_written_own,
    irrelevant={**QWEN3_5.irrelevant, "intermediate_size": "no layer is dense"},
    has_classifier=False,
)
"""`config.json` of Qwen3.5 MoE models, at the top level or as `text_config`."""
