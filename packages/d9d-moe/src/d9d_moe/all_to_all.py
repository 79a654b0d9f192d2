"""Dispatch over ranks: each has some of the experts, and tokens travel to them and back by all-to-all.

A token travels once to each rank that has some of its experts, however many, with their numbers and weights. There it
is copied for each of them, their answers are weighed and added up, and one row goes back; where the token is, those of
the ranks are added up. No all-to-all can move fewer rows: nothing is padded, no token is dropped, and what is for this
rank stays. How many rows travel follows from the routing: the host has to know it, and waits for the device once in
each forward pass. That is the only time. The way back is asynchronous: what a layer computes before it waits for its
tokens, such as shared experts, overlaps with it.

Shape legend: T tokens, D hidden size, E experts, A experts active for each token, R ranks, P experts of a rank (E / R),
L rows that leave this rank, one for each token and each rank that it goes to, M rows that arrive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import all_to_all
from d9d_moe.dispatch import Combining, LocalDispatched, dispatch_some, sort_by_expert
from d9d_moe.permute import inverse_permutation, sum_rows, take_rows
from d9d_moe.router import Routing


@final
@dataclass(frozen=True, slots=True)
class AllToAllDispatcher:
    """Sends tokens over a process group whose ranks have E / R consecutive experts each, in their order.

    Collective over the group: in forward an all-to-all of counts, one of rows, and those of their experts and weights;
    one of rows in `combine`; in backward two of rows and one of weights. Every rank takes part, also without tokens.

    Attributes:
        group: The ranks that share the experts out.
    """

    group: dist.ProcessGroup

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> "AllToAllDispatched":
        """See `Dispatcher.dispatch`; the host waits for the number of rows."""
        top_k = routing.indices.shape[1]
        num_here = num_experts // self.group.size()
        homes_TA = routing.indices // num_here
        order_N, leaving_R = sort_by_expert(_once_each(homes_TA, self.group.size()).flatten(), self.group.size())
        inverse_N = inverse_permutation(order_N)
        choices_R = torch.zeros_like(leaving_R).scatter_add_(0, homes_TA.flatten(), torch.ones_like(order_N))
        arriving_R2 = all_to_all(torch.stack((leaving_R, choices_R), dim=1), self.group)
        leaving, arriving, choices = torch.stack((leaving_R, *arriving_R2.unbind(1))).tolist()

        order_L = order_N[: sum(leaving)]
        experts_LA = routing.indices.to(torch.int32).index_select(0, order_L // top_k)
        weights_LA = take_rows(routing.probabilities, order_L, inverse_N, copies=top_k)
        rows_LD = take_rows(tokens_TD, order_L, inverse_N, copies=top_k)
        experts_MA, weights_MA, rows_MD = (
            wait() for wait in [_exchange(x, leaving, arriving, self.group) for x in (experts_LA, weights_LA, rows_LD)]
        )
        here = Routing(_numbered_here(experts_MA.long(), self.group.rank(), num_here), weights_MA)
        return AllToAllDispatched(
            arrived=dispatch_some(rows_MD, here, num_experts=num_here, num_rows=sum(choices)),
            order=order_L,
            inverse=inverse_N,
            leaving=tuple(leaving),
            arriving=tuple(arriving),
            group=self.group,
        )


@final
@dataclass(frozen=True, slots=True)
class AllToAllDispatched:
    """What `AllToAllDispatcher` brought to this rank's experts.

    Attributes:
        arrived: The tokens that arrived, sorted by expert.
        order: For each row that left, the first of its token's choices that sent it there, along the flattened [T, A].
        inverse: For each choice the row that left for it; beyond them, where an earlier choice sent it.
        leaving: Number of rows that left for each rank.
        arriving: Number of rows that arrived from each rank.
        group: The ranks.
    """

    arrived: LocalDispatched
    order: Tensor
    inverse: Tensor
    leaving: tuple[int, ...]
    arriving: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def rows(self) -> Tensor:
        """See `Dispatched.rows`."""
        return self.arrived.rows

    @property
    def counts(self) -> Tensor:
        """See `Dispatched.counts`."""
        return self.arrived.counts

    def combine(self, outputs_ND: Tensor) -> Combining:
        """See `Dispatched.combine`; weights and sums are taken where the experts are, then the ranks' added up."""
        top_k = self.arrived.probabilities.shape[1]
        sums_MD = self.arrived.combine(outputs_ND).wait()
        back = _exchange(sums_MD, self.arriving, self.leaving, self.group)
        return Combining(lambda: sum_rows(back(), self.order, self.inverse, copies=top_k))


def _once_each(homes_TA: Tensor, num_ranks: int) -> Tensor:
    """The rank of each choice, or R where an earlier choice of the token is on the same rank."""
    is_again_TA = (homes_TA.unsqueeze(2) == homes_TA.unsqueeze(1)).tril(-1).any(dim=2)
    return homes_TA.masked_fill(is_again_TA, num_ranks)


def _numbered_here(experts_MA: Tensor, rank: int, num_here: int) -> Tensor:
    """Experts as this rank counts its own, from 0; P for those of other ranks."""
    own_MA = experts_MA - rank * num_here
    return torch.where((own_MA >= 0) & (own_MA < num_here), own_MA, num_here)


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows that is under way, with what to wait for; its adjoint is the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: dist.ProcessGroup
    ) -> tuple[Tensor, dist.Work]:
        ctx.sizes, ctx.group = (leaving, arriving), group
        received = x.new_empty(sum(arriving), x.shape[1])
        work = dist.all_to_all_single(
            received, x.contiguous(), list(arriving), list(leaving), group=group, async_op=True
        )
        assert work is not None, "what is asynchronous gives its work"
        return received, work

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        leaving, arriving = ctx.sizes
        return _exchange(gradients[0], arriving, leaving, ctx.group)(), None, None, None


def _exchange(
    x: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Begin to exchange rows; the result gives those that arrive."""
    received, work = cast(tuple[Tensor, dist.Work], _Exchange.apply(x, leaving, arriving, group))

    def wait() -> Tensor:
        work.wait()
        return received

    return wait
