"""Hyperparameters of decoders with mixture-of-experts layers and any token mixer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

from torch import nn

from d9d_modules import AuxiliaryLosses, DecoderParams, check_positive
from d9d_moe.joint_balance import JointBalance
from d9d_moe.layer import NO_LOSSES, MoELayer
from d9d_moe.router import Router, check_top_k
from d9d_moe.router_losses import RouterLosses


@dataclass(frozen=True, kw_only=True)
class SparseParams(DecoderParams, ABC):
    """Hyperparameters of a decoder with mixture-of-experts layers; see also `d9d_modules.DecoderParams`.

    Attributes:
        num_experts: Number of routed experts of each sparse layer.
        top_k: Number of routed experts per token.
        expert_intermediate_size: Intermediate size of each expert.
        renormalize: If True, scale the weights of a token's experts to sum to 1.
        router_losses: Auxiliary losses of the routers.
    """

    num_experts: int
    top_k: int
    expert_intermediate_size: int
    renormalize: bool = True
    router_losses: RouterLosses = NO_LOSSES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(num_experts=self.num_experts, expert_intermediate_size=self.expert_intermediate_size)
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
            shared=self.shared_experts(),
            losses=self.router_losses,
            init_std=self.initializer_range,
        )
