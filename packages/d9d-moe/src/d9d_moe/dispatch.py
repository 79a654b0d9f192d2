"""Dispatch: send each token to its experts, and combine the experts' outputs per token.

`Dispatcher.dispatch` returns the rows and the function `combine`, so that dispatchers keep no state.

Shape legend: T tokens, D hidden size, E experts, A experts per token (top-k), N dispatched rows (T * A locally).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from d9d_moe.permute import combine_rows, inverse_permutation, take_rows
from d9d_moe.router import Routing


@final
@dataclass(frozen=True, slots=True)
class CombineHandle:
    """Handle of a combine that may still be in flight: work issued before `wait` overlaps with the communication.

    Attributes:
        wait: Function that waits for the combine and returns the tokens [T, D]. Call it exactly once.
    """

    wait: Callable[[], Tensor]


@final
@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows for the experts of this rank, sorted by expert, with the function that combines the experts' outputs.

    Attributes:
        rows: Copies of tokens [N, D]: rows of the first expert, then of the second, and so on.
        counts: Number of rows of each expert of this rank, int64; the sum is N.
        combine: Function of the experts' outputs [N, D], ordered like `rows`. Starts the sum over each token's experts,
            weighted by the router's probabilities, and returns a handle. The handle's `wait` returns the tokens [T, D]
            in the dtype of the outputs. Experts of one rank are summed in the wider dtype of outputs and probabilities.
    """

    rows: Tensor
    counts: Tensor
    combine: Callable[[Tensor], CombineHandle]


class Dispatcher(Protocol):
    """Transport of tokens to experts on this rank or on other ranks."""

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> Dispatched:
        """Send copies of this rank's tokens [T, D] to their experts; return the rows for the experts of this rank.

        The expert indices of the routing are global, from 0 to `num_experts` - 1. T may be 0.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """Dispatcher for experts that are all on this rank: a permutation that drops no tokens."""

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> Dispatched:
        """Sort copies of the tokens [T, D] by expert. The sort is stable."""
        return dispatch_local(tokens_TD, routing, num_experts=num_experts, num_rows=routing.indices.numel())


def dispatch_local(tokens_TD: Tensor, routing: Routing, *, num_experts: int, num_rows: int) -> Dispatched:
    """Sort copies of tokens [T, D] by expert, for the choices whose expert is on this rank.

    The routing has local expert indices; choices with an index of `num_experts` or more are ignored. `num_rows` is the
    number of choices that are not ignored, passed to avoid a host-device synchronization.
    """
    order_N, counts_E = sort_by_expert(routing.indices.flatten(), num_experts)
    inverse_N = inverse_permutation(order_N)
    order_K = order_N[:num_rows]
    rows_KD = take_rows(tokens_TD, order_K, inverse_N, copies=routing.indices.shape[1])

    def combine(outputs_KD: Tensor) -> CombineHandle:
        return CombineHandle(lambda: combine_rows(outputs_KD, routing.probabilities, order_K, inverse_N))

    return Dispatched(rows_KD, counts_E, combine)


def sort_by_expert(experts_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the stable order that sorts rows by expert [N], and the number of rows per expert [E].

    Rows with an index of `num_experts` or more come last and are not counted. No host-device synchronization.
    """
    sorted_N, order_N = experts_N.sort(stable=True)
    # Use searchsorted, because torch.bincount is a host-device synchronization.
    starts = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=sorted_N.device))
    return order_N, starts.diff()
