"""Hyperparameters of decoders with mixture-of-experts layers and any token mixer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from d9d_modules import DecoderParams, decoder_from_hugging_face
from d9d_modules.models.decoder_params import AuxiliaryLosses, check_layers
from d9d_moe.experts import Experts, GroupedSwiGLU
from d9d_moe.layer import NO_LOSSES, MoELayer
from d9d_moe.models.experts_hugging_face import ExpertsLayout, experts_from_hugging_face
from d9d_moe.router import Router, TopKRouter, check_top_k
from d9d_moe.router_losses import JointBalance, RouterLosses
from d9d_state import StateMapper, keep, parallel, rename


@dataclass(frozen=True, kw_only=True)
class SparseParams(DecoderParams, ABC):
    """Hyperparameters of a decoder with mixture-of-experts layers; see also `d9d_modules.DecoderParams`.

    Attributes:
        num_experts: Number of routed experts of each sparse layer.
        top_k: Number of routed experts per token.
        renormalize: If True, scale the weights of a token's experts to sum to 1.
    """

    not_exported: ClassVar[tuple[str, ...]] = (*DecoderParams.not_exported, "router_losses")

    num_experts: int
    top_k: int
    expert_intermediate_size: int
    renormalize: bool = True
    router_losses: RouterLosses = NO_LOSSES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top_k(self.top_k, self.num_experts)

    @property
    def auxiliary_losses(self) -> AuxiliaryLosses | None:
        """See `DecoderParams`."""
        losses = self.router_losses
        total = partial(JointBalance, losses) if losses.are_joint else None
        return AuxiliaryLosses("router losses", total) if losses.any else None

    @abstractmethod
    def is_dense(self, index: int) -> bool:
        """Return True if the layer with this global index has a dense feed-forward block."""

    @abstractmethod
    def router(self) -> Router:
        """Build the router of a layer."""

    def experts(self) -> Experts:
        """Build the routed experts of a layer; by default a `GroupedSwiGLU`."""
        sizes = self.num_experts, self.hidden_size, self.expert_intermediate_size
        return GroupedSwiGLU(*sizes, init_std=self.initializer_range)

    def shared_experts(self) -> nn.Module | None:
        """Build the shared experts of a layer; None for no shared experts."""
        return None

    def feed_forward(self, index: int) -> nn.Module:
        """See `DecoderParams`."""
        if self.is_dense(index):
            return super().feed_forward(index)
        return MoELayer(
            self.hidden_size,
            self.expert_intermediate_size,
            router=self.router(),
            experts=self.experts(),
            shared=self.shared_experts(),
            losses=self.router_losses,
            init_std=self.initializer_range,
        )

    def feed_forward_from_hugging_face(self, index: int, layout: ExpertsLayout = "per_expert") -> StateMapper:
        """See `DecoderParams`; `layout` is the layout of the experts."""
        if self.is_dense(index):
            return super().feed_forward_from_hugging_face(index)
        # The Hugging Face checkpoint does not contain the buffer of the router losses.
        load = [keep("global_load")] if self.router_losses.follow_global_batch else []
        return parallel(self.moe_from_hugging_face(layout), *load)

    def moe_from_hugging_face(self, layout: ExpertsLayout) -> StateMapper:
        """Build the mapper of router and experts of an MoE layer, with names relative to its block."""
        experts = experts_from_hugging_face(self.num_experts, self.expert_intermediate_size, layout=layout)
        return parallel(rename("gate.weight", "router.weight"), experts)


@dataclass(frozen=True, kw_only=True)
class SoftmaxRoutedParams(SparseParams, ABC):
    """Hyperparameters of an MoE decoder with a softmax router in each layer that is not in `dense_layers`.

    Attributes:
        dense_layers: Indices of the layers with a dense feed-forward block.
    """

    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("dense_layers", self.dense_layers, self.num_layers)

    def is_dense(self, index: int) -> bool:
        """See `SparseParams`."""
        return index in self.dense_layers

    def router(self) -> TopKRouter:
        """See `SparseParams`."""
        return TopKRouter(
            self.hidden_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            renormalize=self.renormalize,
            init_std=self.initializer_range,
        )


def sparse_from_hugging_face(
    params: SparseParams, *, prefix: str = "model.", layout: ExpertsLayout = "per_expert"
) -> StateMapper:
    """Build the mapper from a Hugging Face checkpoint to `DecoderForCausalLM`; its `inverse()` exports.

    `prefix` is the prefix of the backbone's tensor names.
    """
    return decoder_from_hugging_face(
        params, prefix=prefix, feed_forward=lambda index: params.feed_forward_from_hugging_face(index, layout)
    )
