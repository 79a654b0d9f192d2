from dataclasses import dataclass
from typing import Any, final

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import MeshConfig
from d9d_dist.testing import assert_trees_close, run_ranks
from d9d_modules import CheckpointPolicy, checkpoint_activations
from d9d_moe import AllToAllDispatcher, LocalDispatcher
from d9d_moe.router import Routing

NUM_EXPERTS, SIZE = 8, 3


@final
@dataclass(frozen=True)
class Case:
    """Inputs of all ranks, in float64.

    Attributes:
        num_tokens: Number of tokens of each rank.
        top_k: Number of experts per token.
        used: Experts that tokens may choose, at least `top_k`.
        seed: Seed of the random inputs.
    """

    num_tokens: tuple[int, ...]
    top_k: int
    used: tuple[int, ...]
    seed: int = 0

    def of_rank(self, rank: int) -> tuple[Tensor, Routing, Tensor]:
        """Return the tokens of a rank, their routing, and the output gradient."""
        draws = torch.Generator().manual_seed(100 * self.seed + rank)
        num_tokens = self.num_tokens[rank]
        tokens, gradient = torch.randn(2, num_tokens, SIZE, generator=draws, dtype=torch.float64)
        chosen = torch.rand(num_tokens, len(self.used), generator=draws).argsort(dim=1)[:, : self.top_k]
        weights = torch.rand(num_tokens, self.top_k, generator=draws, dtype=torch.float64)
        return tokens, Routing(torch.tensor(self.used)[chosen], weights), gradient


def _scales() -> Tensor:
    return torch.randn(NUM_EXPERTS, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _run(case: Case) -> tuple[dict[str, Tensor], list[int]]:
    """Return outputs and all gradients, and the bytes that this rank sends to other ranks in each all-to-all."""
    with MeshConfig(data_parallel_shard=-1, expert_parallel=-1).build() as ctx:
        group = ctx.group_for("expert", "ep_shard")
        scales = _scales().chunk(ctx.world_size)[ctx.rank].clone()
        with _Exchanges(ctx.rank) as exchanges:
            return _through(AllToAllDispatcher(group), case, ctx.rank, scales), exchanges.sent


class _Exchanges(TorchDispatchMode):
    """Record the bytes that this rank sends to other ranks in each all-to-all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.sent: list[int] = []
        self._rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            x, _, sizes, _ = args
            self.sent.append((sum(sizes) - sizes[self._rank]) * x[0:1].nbytes if len(x) else 0)
        return func(*args, **(kwargs or {}))


def _through(
    dispatcher: AllToAllDispatcher | LocalDispatcher, case: Case, rank: int, scales: Tensor
) -> dict[str, Tensor]:
    tokens, routing, gradient = case.of_rank(rank)
    inputs = (tokens.requires_grad_(), routing.probabilities.requires_grad_(), scales.requires_grad_())
    dispatched = dispatcher.dispatch(tokens, routing, num_experts=NUM_EXPERTS)
    outputs = dispatched.rows.tanh() * scales.repeat_interleave(dispatched.counts, dim=0)
    combined = dispatched.combine(outputs).wait()
    gradients = torch.autograd.grad(combined, inputs, gradient)
    return {"out": combined.detach(), **dict(zip(("tokens", "probabilities", "scales"), gradients, strict=True))}


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    used = draw(st.sets(st.integers(0, NUM_EXPERTS - 1), min_size=1))
    num_ranks = draw(st.sampled_from([2, 4]))
    num_tokens = draw(st.lists(st.integers(0, 6), min_size=num_ranks, max_size=num_ranks))
    return Case(tuple(num_tokens), draw(st.integers(1, len(used))), tuple(used), draw(st.integers(0, 99)))


@settings(max_examples=10)
@given(case=_cases())
@example(case=Case((5, 5, 5, 5), 1, (5,)))  # all to one expert
@example(case=Case((3, 0, 7, 9), 5, tuple(range(NUM_EXPERTS))))  # more experts of a token than a rank has
@example(case=Case((0, 0), 2, (0, 1)))
def test_each_token_is_sent_once_per_rank_and_outputs_match_local_dispatch(case: Case) -> None:
    num_ranks = len(case.num_tokens)
    found, crossed = zip(*run_ranks(_run, case, world_size=num_ranks), strict=True)
    expected_scales = torch.zeros(NUM_EXPERTS, SIZE, dtype=torch.float64)
    for rank, ours in enumerate(found):
        expected = _through(LocalDispatcher(), case, rank, _scales())
        expected_scales += expected.pop("scales")
        assert_trees_close({name: ours[name] for name in expected}, expected, rtol=1e-12)
    # Each rank has the gradients of its experts, summed over the tokens of all ranks.
    torch.testing.assert_close(torch.cat([ours["scales"] for ours in found]), expected_scales)
    _assert_fewest_bytes(case, crossed)


def _assert_fewest_bytes(case: Case, crossed: tuple[list[int], ...]) -> None:
    """Check that each token is sent once to each other rank with one of its experts and back, also in backward."""
    num_ranks = len(crossed)
    crossing_RR = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)
    for rank in range(num_ranks):
        for experts in case.of_rank(rank)[1].indices.tolist():
            for home in {expert * num_ranks // NUM_EXPERTS for expert in experts} - {rank}:
                crossing_RR[rank, home] += 1
    leaving, arriving = crossing_RR.sum(1).tolist(), crossing_RR.sum(0).tolist()
    for rank, (counts, experts, weights, there, back, there_again, *of_gradients) in enumerate(crossed):
        assert counts == (num_ranks - 1) * 2 * 8  # numbers of rows and of expert choices
        assert (experts, weights) == (leaving[rank] * case.top_k * 4, leaving[rank] * case.top_k * 8)
        assert there == there_again == leaving[rank] * SIZE * 8
        assert back == arriving[rank] * SIZE * 8
        assert sorted(of_gradients) == sorted((arriving[rank] * case.top_k * 8, back))


class _Dispatching(nn.Module):
    def __init__(self, dispatcher: AllToAllDispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher

    def forward(self, tokens: Tensor, routing: Routing) -> Tensor:
        dispatched = self.dispatcher.dispatch(tokens, routing, num_experts=NUM_EXPERTS)
        return dispatched.combine(dispatched.rows.tanh()).wait()


def _exchanges_under_checkpointing(policy: CheckpointPolicy) -> tuple[int, Tensor]:
    """Return the number of all-to-alls of a forward and a backward, and the gradient of the tokens."""
    with MeshConfig(data_parallel_shard=-1, expert_parallel=-1).build() as ctx:
        layer = _Dispatching(AllToAllDispatcher(ctx.group_for("expert", "ep_shard")))
        checkpoint_activations(layer, policy=policy)
        tokens, routing, gradient = Case((5, 4), 3, tuple(range(NUM_EXPERTS))).of_rank(ctx.rank)
        with _Exchanges(ctx.rank) as exchanges:
            layer(tokens.requires_grad_(), routing).backward(gradient)
        assert tokens.grad is not None
        return len(exchanges.sent), tokens.grad


def test_selective_checkpointing_does_not_repeat_the_exchanges() -> None:
    policies: tuple[CheckpointPolicy, ...] = ("none", "selective", "full")
    found = {policy: run_ranks(_exchanges_under_checkpointing, policy) for policy in policies}
    for rank in range(2):
        counts = [found[policy][rank][0] for policy in policies]
        assert counts == [7, 7, 12]  # "full" repeats the exchanges of counts, indices, weights, rows and outputs
        for policy in policies:
            torch.testing.assert_close(found[policy][rank][1], found["none"][rank][1], rtol=0, atol=0)
