"""Dispatch: send each token to its experts, and combine the experts' outputs per token.

`Dispatcher.dispatch` returns an object that holds the rows and has the method `combine`. So the dispatcher itself keeps
no state between dispatch and combine.

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
        wait: Waits for the combine and returns the tokens [T, D]. Call it exactly once.
    """

    wait: Callable[[], Tensor]


class Dispatched(Protocol):
    """Rows sorted by expert, with the method that combines the experts' outputs."""

    @property
    def rows(self) -> Tensor:
        """Copies of tokens [N, D], sorted by expert: rows of the first expert, then of the second, and so on."""
        ...

    @property
    def counts(self) -> Tensor:
        """Number of rows per expert of this rank [E], int64; the sum is N."""
        ...

    def combine(self, outputs_ND: Tensor) -> CombineHandle:
        """Start to sum the experts' outputs of each token, weighted by the router's probabilities.

        Args:
            outputs_ND: Experts' outputs [N, D], in the order of `rows`.

        Returns:
            A handle; its `wait` returns the tokens [T, D] in the dtype of `outputs_ND`. The sum over the experts of
            one rank is computed in the wider of that dtype and the dtype of the probabilities.
        """
        ...


class Dispatcher(Protocol):
    """Sends tokens to experts on this rank or on other ranks."""

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> Dispatched:
        """Send copies of the tokens to their experts, sorted by expert.

        Args:
            tokens_TD: This rank's tokens [T, D]; T may be 0.
            routing: Experts of each token, as indices from 0 to `num_experts` - 1.
            num_experts: Number of experts over all ranks.

        Returns:
            The rows for the experts of this rank.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """Dispatcher for experts that are all on this rank: a permutation, without capacity and dropped tokens."""

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> "LocalDispatched":
        """Sort copies of the tokens [T, D] by expert. The sort is stable."""
        return dispatch_local(tokens_TD, routing, num_experts=num_experts, num_rows=routing.indices.numel())


@final
@dataclass(frozen=True, slots=True)
class LocalDispatched:
    """Rows sorted by expert on this rank.

    Attributes:
        rows: See `Dispatched.rows`.
        counts: See `Dispatched.counts`.
        order: For each row, the index of its (token, choice) pair in the flattened [T, A].
        inverse: For each (token, choice) pair, the index of its row; N or more if the pair has no row.
        probabilities: Router probabilities [T, A].
    """

    rows: Tensor
    counts: Tensor
    order: Tensor
    inverse: Tensor
    probabilities: Tensor

    def combine(self, outputs_ND: Tensor) -> CombineHandle:
        """See `Dispatched.combine`."""
        return CombineHandle(lambda: combine_rows(outputs_ND, self.probabilities, self.order, self.inverse))


def dispatch_local(tokens_TD: Tensor, routing: Routing, *, num_experts: int, num_rows: int) -> LocalDispatched:
    """Sort copies of tokens by expert, for the choices whose expert is on this rank.

    Args:
        tokens_TD: Tokens [T, D].
        routing: Local expert indices. An index of `num_experts` or more means an expert of another rank; such a choice
            gets no row, and its probability is ignored.
        num_experts: Number of experts of this rank.
        num_rows: Number of choices of experts of this rank, as a Python int: avoids a host-device synchronization.
    """
    order_N, counts_E = sort_by_expert(routing.indices.flatten(), num_experts)
    inverse_N = inverse_permutation(order_N)
    order_K = order_N[:num_rows]
    return LocalDispatched(
        rows=take_rows(tokens_TD, order_K, inverse_N, copies=routing.indices.shape[1]),
        counts=counts_E,
        order=order_K,
        inverse=inverse_N,
        probabilities=routing.probabilities,
    )


def sort_by_expert(experts_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the stable order that sorts rows by expert [N], and the number of rows per expert [E].

    No host-device synchronization.

    Args:
        experts_N: Expert of each row [N], int64. Rows with an index of `num_experts` or more come last and are not
            counted.
        num_experts: E.
    """
    sorted_N, order_N = experts_N.sort(stable=True)
    # searchsorted, because torch.bincount synchronizes with the device.
    starts = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=sorted_N.device))
    return order_N, starts.diff()
