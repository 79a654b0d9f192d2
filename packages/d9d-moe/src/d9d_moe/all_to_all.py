"""Dispatch over ranks: each has some of the experts, and tokens travel to them and back by all-to-all.

Tokens are sorted by expert, so what goes to a rank is one piece. Each copy of a token travels once there and once back,
unless its expert is on the same rank; nothing is padded, and no token is dropped. How many rows travel follows from the
routing: the host has to know it, and waits for the device once in each forward pass. That is the only time. The way
back is asynchronous: what a layer computes before it waits for its tokens, such as shared experts, overlaps with it.

Shape legend: T tokens, D hidden size, E experts, A experts active for each token, R ranks, P experts of a rank (E / R),
N rows that leave this rank (T * A), M rows that arrive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import all_to_all
from d9d_moe.dispatch import Combining, LocalDispatched, LocalDispatcher
from d9d_moe.permute import inverse_permutation, take_rows
from d9d_moe.router import Routing


@final
@dataclass(frozen=True, slots=True)
class AllToAllDispatcher:
    """Sends tokens over a process group whose ranks have E / R consecutive experts each, in their order.

    Collective over the group: in forward an all-to-all of counts and one of rows, one of rows in `combine`; in backward
    two of rows. Every rank takes part, also without tokens.

    Attributes:
        group: The ranks that share the experts out.
    """

    group: dist.ProcessGroup

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> "AllToAllDispatched":
        """See `Dispatcher.dispatch`; the host waits for the number of rows."""
        local = LocalDispatcher().dispatch(tokens_TD, routing, num_experts=num_experts)
        leaving_RP = local.counts.view(self.group.size(), -1)
        arriving_RP = all_to_all(leaving_RP, self.group)
        leaving, arriving = torch.stack((leaving_RP.sum(1), arriving_RP.sum(1))).tolist()
        rows_MD = _exchange(local.rows, leaving, arriving, self.group)()
        order_M = _by_expert(arriving_RP, num_rows=sum(arriving))
        inverse_M = inverse_permutation(order_M)
        return AllToAllDispatched(
            rows=take_rows(rows_MD, order_M, inverse_M),
            counts=arriving_RP.sum(0),
            local=local,
            order=order_M,
            inverse=inverse_M,
            leaving=tuple(leaving),
            arriving=tuple(arriving),
            group=self.group,
        )


@final
@dataclass(frozen=True, slots=True)
class AllToAllDispatched:
    """What `AllToAllDispatcher` brought to this rank's experts.

    Attributes:
        rows: See `Dispatched.rows`.
        counts: See `Dispatched.counts`.
        local: The rows of this rank's tokens, as they left.
        order: For each row, where it was among those that arrived, in the order of the ranks they came from.
        inverse: Its inverse.
        leaving: Number of rows that left for each rank.
        arriving: Number of rows that arrived from each rank.
        group: The ranks.
    """

    rows: Tensor
    counts: Tensor
    local: LocalDispatched
    order: Tensor
    inverse: Tensor
    leaving: tuple[int, ...]
    arriving: tuple[int, ...]
    group: dist.ProcessGroup

    def combine(self, outputs_ND: Tensor) -> Combining:
        """See `Dispatched.combine`; weights and sums are taken where the tokens are."""
        by_rank_MD = take_rows(outputs_ND, self.inverse, self.order)
        arrived = _exchange(by_rank_MD, self.arriving, self.leaving, self.group)
        return Combining(lambda: self.local.combine(arrived()).wait())


def _by_expert(arriving_RP: Tensor, *, num_rows: int) -> Tensor:
    """The order that sorts arrived rows by expert; those of one expert stay in the order of their ranks."""
    num_ranks, num_experts = arriving_RP.shape
    experts = torch.arange(num_experts, device=arriving_RP.device).repeat(num_ranks)
    return experts.repeat_interleave(arriving_RP.flatten(), output_size=num_rows).argsort(stable=True)


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
