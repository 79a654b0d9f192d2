"""Mixture of experts of DeepSeek-V3 for any token mixer: dense layers, then layers with shared and routed experts."""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from d9d_dist.errors import UserError
from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.decoder_params import swiglu_from_hugging_face
from d9d_moe.experts import SharedExperts
from d9d_moe.models.experts_hugging_face import ExpertsLayout, expert_entries
from d9d_moe.models.sparse_params import SparseParams
from d9d_moe.router import SigmoidRouter, check_groups
from d9d_state import StateMapper, parallel, rename, scope


@dataclass(frozen=True, kw_only=True)
class DeepseekMoeParams(SparseParams, ABC):
    """Hyperparameters of a decoder with the experts of DeepSeek-V3 (arXiv:2412.19437); see also `SparseParams`.

    Attributes:
        num_dense_layers: Number of layers with a dense feed-forward block; they come first.
        num_shared_experts: Number of shared experts of `expert_intermediate_size`; 0 for none.
        num_groups: Number of groups of consecutive experts.
        top_groups: Number of groups from which the experts of a token are chosen.
        routed_scale: Multiplier of the routing weights, applied after renormalization.
    """

    may_be_zero: ClassVar[tuple[str, ...]] = (*SparseParams.may_be_zero, "num_dense_layers", "num_shared_experts")

    num_dense_layers: int
    num_shared_experts: int = 1
    num_groups: int = 1
    top_groups: int = 1
    routed_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_dense_layers > self.num_layers:
            raise UserError(
                f"num_dense_layers = {self.num_dense_layers}; expected 0 to num_layers = {self.num_layers}."
            )
        check_groups(
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
        )

    def is_dense(self, index: int) -> bool:
        """See `SparseParams`."""
        return index < self.num_dense_layers

    def router(self) -> SigmoidRouter:
        """See `SparseParams`."""
        return SigmoidRouter(
            self.hidden_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            renormalize=self.renormalize,
            scale=self.routed_scale,
            init_std=self.initializer_range,
        )

    def shared_experts(self) -> nn.Module | None:
        """See `SparseParams`."""
        size = self.num_shared_experts * self.expert_intermediate_size
        return SharedExperts(self.hidden_size, size, init_std=self.initializer_range) if size else None

    def moe_from_hugging_face(self, layout: ExpertsLayout) -> StateMapper:
        """See `SparseParams`."""
        shared = scope("shared_experts.", "shared.experts.", swiglu_from_hugging_face())
        return parallel(
            super().moe_from_hugging_face(layout),
            rename("gate.e_score_correction_bias", "router.selection_bias"),
            *([shared] if self.num_shared_experts else []),
        )


DEEPSEEK_MOE_ENTRIES = (
    *expert_entries("n_routed_experts"),
    hf.Entry("num_dense_layers", "first_k_dense_replace", default=1, minimum=0),
    hf.Entry("num_shared_experts", "n_shared_experts", default=1),
    hf.Entry("num_groups", "n_group", default=1),
    hf.Entry("top_groups", "topk_group", default=1),
    hf.Entry("renormalize", "norm_topk_prob", bool, default=True),
    hf.Entry("routed_scale", "routed_scaling_factor", float, 1.0),
)
"""Entries of `config.json` about experts."""


_NO_BALANCE_LOSS = "transformers has no balance loss for this family; set router_losses of the model for one"

DEEPSEEK_MOE_IRRELEVANT = {
    "aux_loss_alpha": _NO_BALANCE_LOSS,
    "ep_size": "the mesh of the job sets the expert-parallel degree",
    "num_mtp_layers": "only DecoderWithMtp has layers for multi-token prediction",
    "num_nextn_predict_layers": "only DecoderWithMtp has layers for multi-token prediction",
    "output_router_logits": "affects only the output: transformers has no balance loss for this family",
    "seq_aux": _NO_BALANCE_LOSS,
}
"""Entries of `config.json` about experts that do not affect the model, with the reasons."""

DEEPSEEK_MOE_UNUSED = ("model.layers.{num_layers}.*",)
"""Tensors of released checkpoints that only a `DecoderWithMtp` has."""
