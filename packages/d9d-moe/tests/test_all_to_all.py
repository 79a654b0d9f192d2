import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import MeshConfig
from d9d_dist.testing import assert_trees_close, run_ranks
from d9d_moe import AllToAllDispatcher, LocalDispatcher, Routing

NUM_EXPERTS = 8
KINDS = ("random", "no tokens", "one expert")


def _case(kind: str, rank: int) -> tuple[Tensor, Routing, Tensor]:
    """Tokens of a rank, where they go, and the gradient of what comes back; float64."""
    draws = torch.Generator().manual_seed(10 + rank)
    num_tokens = {"random": 3 + 2 * rank, "no tokens": 4 * rank, "one expert": 5}[kind]
    tokens, gradient = torch.randn(2, num_tokens, 3, generator=draws, dtype=torch.float64)
    choices = [torch.randperm(NUM_EXPERTS, generator=draws)[:2] for _ in range(num_tokens)]
    indices = torch.stack(choices) if choices else torch.zeros(0, 2, dtype=torch.int64)
    if kind == "one expert":
        indices = torch.tensor([[5, 4]]).expand(num_tokens, 2)
    return tokens, Routing(indices, torch.rand(num_tokens, 2, generator=draws, dtype=torch.float64)), gradient


def _scales() -> Tensor:
    return torch.randn(NUM_EXPERTS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _run(kind: str) -> dict[str, Tensor]:
    with MeshConfig(data_parallel_shard=-1, expert_parallel=-1).build() as ctx:
        group = ctx.group_for("expert", "ep_shard")
        per_rank = NUM_EXPERTS // ctx.world_size
        scales = _scales()[ctx.rank * per_rank :][:per_rank].clone().requires_grad_()
        tokens, routing, gradient = _case(kind, ctx.rank)
        return _through(AllToAllDispatcher(group), tokens, routing, gradient, scales)


def _run_all_kinds() -> list[dict[str, Tensor]]:
    return [_run(kind) for kind in KINDS]


def _through(
    dispatcher: AllToAllDispatcher | LocalDispatcher, tokens: Tensor, routing: Routing, gradient: Tensor, scales: Tensor
) -> dict[str, Tensor]:
    tokens.requires_grad_()
    routing.probabilities.requires_grad_()
    dispatched = dispatcher.dispatch(tokens, routing, num_experts=NUM_EXPERTS)
    outputs = dispatched.rows.tanh() * scales.repeat_interleave(dispatched.counts, dim=0)
    combined = dispatched.combine(outputs).wait()
    inputs = (tokens, routing.probabilities, scales)
    gradients = torch.autograd.grad(combined, inputs, gradient)
    return {"out": combined.detach(), **dict(zip(("tokens", "probabilities", "scales"), gradients, strict=True))}


def test_tokens_travel_there_and_back() -> None:
    for num_ranks in (2, 4):
        for kind, *found in zip(KINDS, *run_ranks(_run_all_kinds, world_size=num_ranks), strict=True):
            expected_scales = torch.zeros(NUM_EXPERTS, 3, dtype=torch.float64)
            for rank, ours in enumerate(found):
                tokens, routing, gradient = _case(kind, rank)
                expected = _through(LocalDispatcher(), tokens, routing, gradient, _scales().requires_grad_())
                expected_scales += expected.pop("scales")
                got = {name: ours[name] for name in expected}
                assert_trees_close(got, expected, rtol=1e-12)
            # Each rank has the gradients of its own experts, summed over the tokens of all ranks.
            got_scales = torch.cat([ours["scales"] for ours in found])
            torch.testing.assert_close(got_scales, expected_scales)


def _crossing(kind: str) -> tuple[list[int], int]:
    """Bytes that this rank sends to others in each all-to-all of forward and backward; rows that have to leave it."""
    sent = []
    real = dist.all_to_all_single

    def counted(received: Tensor, x: Tensor, arriving: Any = None, leaving: Any = None, **options: Any) -> Any:
        rank, num_ranks = dist.get_rank(options["group"]), dist.get_world_size(options["group"])
        sizes = [len(x) // num_ranks] * num_ranks if leaving is None else leaving
        sent.append((sum(sizes) - sizes[rank]) * x[0:1].nbytes if len(x) else 0)
        return real(received, x, arriving, leaving, **options)

    with mock.patch.object(dist, "all_to_all_single", counted):
        _run(kind)
    rank, per_rank = int(os.environ["RANK"]), NUM_EXPERTS // int(os.environ["WORLD_SIZE"])
    homes = _case(kind, rank)[1].indices // per_rank
    return sent, int((homes != rank).sum())


def _crossing_of_all_kinds() -> list[tuple[list[int], int]]:
    return [_crossing(kind) for kind in KINDS]


def test_only_rows_whose_expert_is_elsewhere_cross_and_nothing_is_padded() -> None:
    num_ranks, row_bytes = 4, 3 * 8
    for kind, *ranks in zip(KINDS, *run_ranks(_crossing_of_all_kinds, world_size=num_ranks), strict=True):
        all_leaving = sum(leaving for _, leaving in ranks)
        assert all_leaving > 0
        for (counts, there, back, there_again, back_again), leaving in ranks:
            assert counts == (num_ranks - 1) * NUM_EXPERTS // num_ranks * 8  # how many rows of each expert come
            assert there == there_again == leaving * row_bytes, kind
            assert back == back_again
        # What is sent back is what came.
        assert sum(sent[2] for sent, _ in ranks) == all_leaving * row_bytes
