"""Dispatch between ranks by all-to-all: each rank holds a part of the experts.

A token is sent once to each rank that has at least one of the token's experts, with expert indices and weights. The
receiving rank copies the token for each expert, computes the weighted sum of the experts' outputs, and returns one row.
The sending rank sums the returned rows of each token. Rows are not padded, and no token is dropped.

The host reads the numbers of rows, which depend on the routing: the only host-device synchronization of a forward
pass. Combine is asynchronous: work issued before its `wait`, such as shared experts, overlaps with the communication.

Shape legend: T tokens, D hidden size, E experts, A experts per token (top-k), R ranks, P experts per rank (E / R),
L rows sent by this rank, one per token and destination rank, M rows received.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from d9d_moe.dispatch import CombineHandle, Dispatched, dispatch_local, sort_by_expert
from d9d_moe.permute import inverse_permutation, sum_rows, take_rows
from d9d_moe.router import Routing


@final
@dataclass(frozen=True, slots=True)
class AllToAllDispatcher:
    """Dispatcher over an expert-parallel group, whose rank r holds the experts r * E / R to (r + 1) * E / R - 1.

    Collective over the group. Forward: one all-to-all each of counts, rows, expert indices and weights, and one of rows
    in `combine`. Backward: two all-to-alls of rows and one of weights. Ranks without tokens must take part as well.
    """

    group: dist.ProcessGroup

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> Dispatched:
        """See `Dispatcher.dispatch`. One host-device synchronization, to read the numbers of rows."""
        top_k = routing.indices.shape[1]
        num_local_experts = num_experts // self.group.size()
        ranks_TA = routing.indices // num_local_experts
        first_ranks_TA = _mask_repeated_ranks(ranks_TA, self.group.size())
        order_N, sent_R = sort_by_expert(first_ranks_TA.flatten(), self.group.size())
        inverse_N = inverse_permutation(order_N)
        choices_R = torch.zeros_like(sent_R).scatter_add_(0, ranks_TA.flatten(), torch.ones_like(order_N))
        one_each = [1] * self.group.size()
        received_R2 = _start_all_to_all(torch.stack((sent_R, choices_R), dim=1), one_each, one_each, self.group)()
        send_sizes, receive_sizes, choices = _sizes(sent_R, received_R2, routing, num_experts)

        order_L = order_N[: sum(send_sizes)]
        experts_LA = routing.indices.to(torch.int32).index_select(0, order_L // top_k)
        weights_LA = take_rows(routing.probabilities, order_L, inverse_N, copies=top_k)
        rows_LD = take_rows(tokens_TD, order_L, inverse_N, copies=top_k)
        experts_MA, weights_MA, rows_MD = (
            wait()
            for wait in [
                _start_all_to_all(x, send_sizes, receive_sizes, self.group) for x in (experts_LA, weights_LA, rows_LD)
            ]
        )
        local = Routing(_local_experts(experts_MA.long(), self.group.rank(), num_local_experts), weights_MA)
        arrived = dispatch_local(rows_MD, local, num_experts=num_local_experts, num_rows=sum(choices))

        def combine(outputs_ND: Tensor) -> CombineHandle:
            # The weighted sum over experts is computed on the experts' rank, the sum over ranks on this rank.
            sums_MD = arrived.combine(outputs_ND).wait()
            wait_returned = _start_all_to_all(sums_MD, receive_sizes, send_sizes, self.group)
            return CombineHandle(lambda: sum_rows(wait_returned(), order_L, inverse_N, copies=top_k))

        return Dispatched(arrived.rows, arrived.counts, combine)


def _sizes(
    sent_R: Tensor, received_R2: Tensor, routing: Routing, num_experts: int
) -> tuple[list[int], list[int], list[int]]:
    """Read how many rows to send and receive, and how many expert choices the received rows have, for each rank.

    Fake tensors have no values, so a dry run of a job assumes that every set of experts is equally likely. A token is
    sent once to each rank that has any of its experts: on average T (1 - C(E - P, A) / C(E, A)) tokens to each rank,
    with the binomial coefficient C.
    """
    if not isinstance(sent_R, FakeTensor):
        send_sizes, receive_sizes, choices = torch.stack((sent_R, *received_R2.unbind(1))).tolist()
        return send_sizes, receive_sizes, choices
    (num_tokens, top_k), num_ranks = routing.indices.shape, len(sent_R)
    elsewhere = comb(num_experts - num_experts // num_ranks, top_k) / comb(num_experts, top_k)
    rows = round(num_tokens * (1 - elsewhere))
    return [rows] * num_ranks, [rows] * num_ranks, [num_tokens * top_k // num_ranks] * num_ranks


def _mask_repeated_ranks(ranks_TA: Tensor, num_ranks: int) -> Tensor:
    """Replace the rank of a choice by `num_ranks` if an earlier choice of the same token is on the same rank."""
    is_repeated_TA = (ranks_TA.unsqueeze(2) == ranks_TA.unsqueeze(1)).tril(-1).any(dim=2)
    return ranks_TA.masked_fill(is_repeated_TA, num_ranks)


def _local_experts(experts_MA: Tensor, rank: int, num_local_experts: int) -> Tensor:
    """Convert global expert indices to local ones, from 0; experts of other ranks get the index P."""
    local_MA = experts_MA - rank * num_local_experts
    return torch.where((local_MA >= 0) & (local_MA < num_local_experts), local_MA, num_local_experts)


class _AsyncAllToAll(torch.autograd.Function):
    """All-to-all of rows that returns its output before the rows have arrived; `wait_tensor` waits for them.

    A functional collective, whose output selective activation checkpointing can save.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (send_sizes, receive_sizes), group
        received: Tensor = torch.ops._c10d_functional.all_to_all_single(
            x.contiguous(), list(receive_sizes), list(send_sizes), group.group_name
        )
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        send_sizes, receive_sizes = ctx.sizes
        return _start_all_to_all(gradients[0], receive_sizes, send_sizes, ctx.group)(), None, None, None


def _start_all_to_all(
    x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Start an all-to-all of rows; the returned function waits for it and returns the received rows."""
    received: Tensor = _AsyncAllToAll.apply(x, send_sizes, receive_sizes, group)

    def wait() -> Tensor:
        torch.ops._c10d_functional.wait_tensor(received.detach())
        return received

    return wait
