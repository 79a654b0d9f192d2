"""Dispatch: bring each token to its experts, and the experts' answers back to the token.

A dispatcher returns what it dispatched together with the way back, so it keeps no state of its own between the two.

Shape legend: T tokens, D hidden size, E experts, A experts active for each token, N = rows dispatched (T * A locally).
"""

from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from d9d_moe.router import Routing


class Dispatched(Protocol):
    """Rows sorted by expert, and the way back to tokens."""

    @property
    def rows(self) -> Tensor:
        """Copies of tokens [N, D]: those of the first expert, then those of the second, and so on."""
        ...

    @property
    def counts(self) -> Tensor:
        """Number of rows of each expert [E], int64; they add up to N."""
        ...

    def combine(self, outputs_ND: Tensor) -> Tensor:
        """Add up what the experts made of each token, weighed by the router.

        Args:
            outputs_ND: The experts' answers [N, D], in the order of `rows`.

        Returns:
            Tokens [T, D] in the dtype of `outputs_ND`; summed in the wider of its dtype and the probabilities'.
        """
        ...


class Dispatcher(Protocol):
    """Sends tokens to experts, wherever those live."""

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> Dispatched:
        """Sort copies of the tokens [T, D] by expert, as `routing` tells."""
        ...


@final
@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """All experts live on this rank: dispatch is a permutation. Exact, without a capacity, without dropping tokens."""

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> "LocalDispatched":
        """Sort copies of the tokens [T, D] by expert; the tokens of one expert stay in their order."""
        experts_N, order_N = routing.indices.flatten().sort(stable=True)
        inverse_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
        # A search in the sorted ids, since torch.bincount would wait for the device.
        starts = torch.searchsorted(experts_N, torch.arange(num_experts + 1, device=experts_N.device))
        return LocalDispatched(
            rows=_take(tokens_TD, order_N, inverse_N, copies=routing.indices.shape[1]),
            counts=starts.diff(),
            order=order_N,
            inverse=inverse_N,
            probabilities=routing.probabilities,
        )


@final
@dataclass(frozen=True, slots=True)
class LocalDispatched:
    """What `LocalDispatcher` sorted.

    Attributes:
        rows: See `Dispatched.rows`.
        counts: See `Dispatched.counts`.
        order: For each row, which (token, choice) pair it is, counted along the flattened [T, A].
        inverse: For each (token, choice) pair, its row.
        probabilities: The router's weights [T, A].
    """

    rows: Tensor
    counts: Tensor
    order: Tensor
    inverse: Tensor
    probabilities: Tensor

    def combine(self, outputs_ND: Tensor) -> Tensor:
        """See `Dispatched.combine`."""
        by_token_ND = _take(outputs_ND, self.inverse, self.order, copies=1)
        by_token_TAD = by_token_ND.view(*self.probabilities.shape, outputs_ND.shape[-1])
        return (by_token_TAD * self.probabilities.unsqueeze(-1)).sum(dim=1).to(outputs_ND.dtype)


class _Take(torch.autograd.Function):
    """Row `i` of the result is row `order[i] // copies` of the input, `order` being a permutation.

    Torch's own indexing adds gradients up in an unordered way on accelerators. Here the inverse permutation is known,
    so the gradient is a gather and a sum over the copies of a row, in a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        (inverse,) = ctx.saved_tensors
        by_copy = gradient.index_select(0, inverse)
        if ctx.copies > 1:
            by_copy = by_copy.view(len(inverse) // ctx.copies, ctx.copies, by_copy.shape[-1]).sum(dim=1)
        return by_copy, None, None, None


def _take(x: Tensor, order: Tensor, inverse: Tensor, *, copies: int) -> Tensor:
    return _Take.apply(x, order, inverse, copies)
