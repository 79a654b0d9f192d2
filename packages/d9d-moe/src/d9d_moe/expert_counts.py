"""How often experts were chosen in a step, counted where nothing else can count: in the backward pass.

A training step runs backward exactly once for every token that it learns from. Forward runs more often: in evaluation,
when activations are recomputed, when something is tried twice. So counts are taken by an identity whose backward adds
them up, and neither counts nor the bias that follows from them can be changed by anything but a training step.

Shape legend: E experts, A experts active for each token (top-k), T tokens.
"""

from typing import Any, final

import torch
from torch import Tensor, nn


@final
class ExpertCounter(nn.Module):
    """Counts how many tokens chose each expert, while their gradients are computed.

    Args:
        num_experts: Number of experts.

    Attributes:
        counts: This rank's counts since they were last taken [E], int64; a buffer that is not saved.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.counts: Tensor
        self.register_buffer("counts", torch.empty(num_experts, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start from zero."""
        nn.init.zeros_(self.counts)

    def forward(self, probabilities_TA: Tensor, indices_TA: Tensor) -> Tensor:
        """The probabilities [T, A] as they are; their backward counts the experts [T, A]. No collectives."""
        return _CountInBackward.apply(probabilities_TA, indices_TA, self.counts)


class _CountInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.counts = counts
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        chosen = indices.flatten()
        ctx.counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        return gradients[0], None, None
