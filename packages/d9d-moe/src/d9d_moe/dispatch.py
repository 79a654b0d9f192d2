"""Dispatch: bring each token to its experts, and the experts' answers back to the token.

A dispatcher returns what it dispatched together with the way back, so it keeps no state of its own between the two.

Shape legend: T tokens, D hidden size, E experts, A experts active for each token, N = rows dispatched (T * A locally).
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
class Combining:
    """Tokens that may still be on their way back: what is computed before `wait` overlaps with it.

    Attributes:
        wait: Gives the tokens [T, D]; called once.
    """

    wait: Callable[[], Tensor]


class Dispatched(Protocol):
    """Rows sorted by expert, and the way back to tokens."""

    @property
    def rows(self) -> Tensor:
        """Copies of tokens [N, D]: those of the first expert, then those of the second, and so on."""
        ...

    @property
    def counts(self) -> Tensor:
        """Number of rows of each expert of this rank [E], int64; they add up to N."""
        ...

    def combine(self, outputs_ND: Tensor) -> Combining:
        """Begin to add up what the experts made of each token, weighed by the router.

        Args:
            outputs_ND: The experts' answers [N, D], in the order of `rows`.

        Returns:
            What to wait for: tokens [T, D] in the dtype of `outputs_ND`, those of each rank summed in the wider of its
            dtype and the probabilities'.
        """
        ...


class Dispatcher(Protocol):
    """Sends tokens to experts, wherever those live."""

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> Dispatched:
        """Sort copies of the tokens [T, D] by expert, as `routing` tells.

        Args:
            tokens_TD: This rank's tokens; there may be none.
            routing: Which of all experts they go to.
            num_experts: Number of experts of all ranks together.

        Returns:
            The rows for the experts of this rank.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """All experts live on this rank: dispatch is a permutation. Exact, without a capacity, without dropping tokens."""

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> "LocalDispatched":
        """Sort copies of the tokens [T, D] by expert; the tokens of one expert stay in their order."""
        return dispatch_some(tokens_TD, routing, num_experts=num_experts, num_rows=routing.indices.numel())


@final
@dataclass(frozen=True, slots=True)
class LocalDispatched:
    """What was sorted on this rank.

    Attributes:
        rows: See `Dispatched.rows`.
        counts: See `Dispatched.counts`.
        order: For each row, which (token, choice) pair it is, counted along the flattened [T, A].
        inverse: For each (token, choice) pair, its row; beyond them, where it has none.
        probabilities: The router's weights [T, A].
    """

    rows: Tensor
    counts: Tensor
    order: Tensor
    inverse: Tensor
    probabilities: Tensor

    def combine(self, outputs_ND: Tensor) -> Combining:
        """See `Dispatched.combine`."""
        return Combining(lambda: combine_rows(outputs_ND, self.probabilities, self.order, self.inverse))


def dispatch_some(tokens_TD: Tensor, routing: Routing, *, num_experts: int, num_rows: int) -> LocalDispatched:
    """Sort copies of tokens by expert, of those choices alone whose experts are here.

    Args:
        tokens_TD: Tokens [T, D].
        routing: Their experts, from `num_experts` on for those that are elsewhere; their weights count nothing.
        num_experts: Number of experts that are here.
        num_rows: Number of choices of those: on the host, so that nothing has to wait for the device.
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
    """The order that sorts rows by their expert, stable [N], and how many each expert has [E]; waits for no device.

    Args:
        experts_N: The expert of each row, int64; those from `num_experts` on come last, and are not counted.
        num_experts: E.
    """
    sorted_N, order_N = experts_N.sort(stable=True)
    # A search in the sorted ids, since torch.bincount would wait for the device.
    starts = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=sorted_N.device))
    return order_N, starts.diff()
