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

    def forward(self, y: Tensor, indices_TA: Tensor, mask_T: Tensor | None = None) -> Tensor:
        """What the layer computed, as it is; its backward counts. No collectives.

        Where everything up to here is frozen no gradient comes; then forward counts, in training mode and with
        gradients enabled, but not where it is run again within a backward pass.

        Args:
            y: What came of the tokens, of any shape.
            indices_TA: The experts that they chose [T, A].
            mask_T: Which of them are tokens, and not padding [T], bool; None for all.
        """
        if y.requires_grad:
            return _CountInBackward.apply(y, indices_TA, mask_T, self.counts)
        if self.training and torch.is_grad_enabled() and not _is_in_backward():
            _count(self.counts, indices_TA, mask_T)
        return y


def _is_in_backward() -> bool:
    """Whether autograd runs: then forward is activations that are recomputed."""
    return torch._C._current_graph_task_id() != -1


def _count(counts_E: Tensor, indices_TA: Tensor, mask_T: Tensor | None) -> None:
    seen_TA = (
        torch.ones_like(indices_TA) if mask_T is None else mask_T.to(torch.int64).unsqueeze(1).expand_as(indices_TA)
    )
    counts_E.scatter_add_(0, indices_TA.flatten(), seen_TA.flatten())


class _CountInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, indices: Tensor, mask: Tensor | None, counts: Tensor) -> Tensor:
        ctx.save_for_backward(indices, mask)
        ctx.counts = counts
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        _count(ctx.counts, *ctx.saved_tensors)
        return gradients[0], None, None, None
