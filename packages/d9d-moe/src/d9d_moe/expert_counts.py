"""Tokens per expert of a training step, counted in the backward pass.

A training step runs backward exactly once for each token; forward also runs in evaluation and recomputation. The tokens
are therefore counted in the backward pass of an identity function.

Shape legend: E experts, A experts per token (top-k), T tokens.
"""

from typing import Any, final

import torch
from torch import Tensor, nn


@final
class ExpertCounter(nn.Module):
    """Counter of tokens per expert that counts in the backward pass.

    Attributes:
        counts: Tokens, without padding, that this rank dispatched to each expert since the last reset, [E], int64; a
            non-persistent buffer.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.counts: Tensor
        self.register_buffer("counts", torch.empty(num_experts, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the counts to zero."""
        nn.init.zeros_(self.counts)

    def forward(self, y: Tensor, indices_TA: Tensor, mask_T: Tensor | None = None) -> Tensor:
        """Return `y` unchanged, and count the tokens when the gradient of `y` is computed. No collectives.

        If `y` does not require a gradient, forward counts instead: in training mode with gradients enabled, but not
        when forward is recomputed in a backward pass.

        Args:
            y: Output of the layer, of any shape.
            indices_TA: Chosen experts of each token [T, A].
            mask_T: Token mask [T], bool; False marks padding. None if there is no padding.
        """
        if y.requires_grad:
            return _CountInBackward.apply(y, indices_TA, mask_T, self.counts)
        if self.training and torch.is_grad_enabled() and not _is_in_backward():
            _count(self.counts, indices_TA, mask_T)
        return y


def _is_in_backward() -> bool:
    """Return True while autograd runs a backward pass: a forward pass is then a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _count(counts_E: Tensor, indices_TA: Tensor, mask_T: Tensor | None) -> None:
    ones_TA = (
        torch.ones_like(indices_TA) if mask_T is None else mask_T.to(torch.int64).unsqueeze(1).expand_as(indices_TA)
    )
    counts_E.scatter_add_(0, indices_TA.clamp(min=0).flatten(), (ones_TA * (indices_TA >= 0)).flatten())


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
