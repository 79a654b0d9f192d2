from typing import Any

import pytest
import torch
from torch import Tensor

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_moe import RouterLosses, SigmoidRouter, TopKRouter
from d9d_moe.router import Routing
from d9d_moe.router_losses import TokenGroups, expert_load, token_losses

ALONE = TokenGroups()


def _sequence_loss(scores_LE: Tensor, indices_LA: Tensor) -> Tensor:
    """Compute the loss of DeepSeek-V3, equations 17 to 20, without the factor."""
    length, num_experts = scores_LE.shape
    total = torch.zeros((), dtype=scores_LE.dtype)
    for expert in range(num_experts):
        share = (indices_LA == expert).sum() * num_experts / (indices_LA.shape[1] * length)
        total = total + share * scores_LE[:, expert].mean()
    return total


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_sequence_balance_loss_matches_the_paper(kind: str) -> None:
    sizes: dict[str, Any] = {"num_experts": 5, "top_k": 2, "init_std": 1.0}
    router = (TopKRouter(6, **sizes) if kind == "softmax" else SigmoidRouter(6, **sizes)).double()
    x = torch.randn(3, 7, 6, dtype=torch.float64)
    routing = router(x.flatten(0, 1))
    got = token_losses(routing, RouterLosses(balance=0.3), ALONE, rows=3).view(3, 7).mean(dim=1)
    logits = x @ router.weight.T
    scores = logits.softmax(-1) if kind == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    expected = torch.stack(
        [0.3 * _sequence_loss(row, chosen) for row, chosen in zip(scores, routing.indices.view(3, 7, 2), strict=True)]
    )
    torch.testing.assert_close(got, expected)
    (wanted,) = torch.autograd.grad(expected.sum(), router.weight, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), router.weight)[0], wanted)


def test_batch_balance_loss_matches_transformers() -> None:
    # Here, not above: the ranks of other tests import this file.
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    router = TopKRouter(6, num_experts=5, top_k=2, init_std=1.0)
    routing = router(torch.randn(21, 6))
    assert routing.logits is not None
    expected = load_balancing_loss_func((routing.logits,), 5, 2)
    assert isinstance(expected, Tensor)
    got = token_losses(routing, RouterLosses(balance=1.0, scope="batch"), ALONE, rows=3).mean()
    torch.testing.assert_close(2 * got, expected)
    (wanted,) = torch.autograd.grad(expected, router.weight, retain_graph=True)
    torch.testing.assert_close(2 * torch.autograd.grad(got, router.weight)[0], wanted)


def _load_of_a_batch(num_tokens: int) -> Tensor:
    with MeshConfig(data_parallel_replicate=-1).build() as ctx:
        indices = torch.arange(num_tokens * (1 + ctx.rank)).unsqueeze(1) % 4
        shape = (len(indices), 4)
        routing = Routing(indices, torch.ones(len(indices), 1), torch.zeros(shape), torch.full(shape, 0.25))
        groups = TokenGroups(sequence=None, batch=ctx.group_for("batch", "dp"))
        return expert_load(routing, groups, scope="batch", rows=1)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_batch_load_weights_ranks_by_number_of_tokens(num_tokens: int) -> None:
    counts = torch.bincount(torch.cat([torch.arange(num_tokens), torch.arange(2 * num_tokens)]) % 4, minlength=4)
    for load in run_ranks(_load_of_a_batch, num_tokens, world_size=2):
        torch.testing.assert_close(load[0], counts * 4 / counts.sum().clamp(min=1))


def test_with_an_even_load_the_balance_loss_equals_its_factor() -> None:
    indices = torch.arange(6).repeat(4).view(12, 2)
    routing = Routing(indices, torch.ones(12, 2), torch.zeros(12, 6), torch.full((12, 6), 1 / 6))
    torch.testing.assert_close(expert_load(routing, ALONE, scope="batch", rows=1), torch.ones(1, 6))
    torch.testing.assert_close(token_losses(routing, RouterLosses(balance=0.7), ALONE, rows=4), torch.full((12,), 0.7))


def test_global_batch_balance_loss_uses_the_given_load() -> None:
    router = TopKRouter(6, num_experts=5, top_k=2, init_std=1.0)
    routing, load = router(torch.randn(12, 6)), torch.tensor([0.5, 2.0, 0.0, 1.5, 1.0])
    assert routing.scores is not None
    got = token_losses(routing, RouterLosses(balance=0.3, scope="global_batch"), ALONE, rows=3, global_load_E=load)
    torch.testing.assert_close(got, (routing.scores @ load) * 0.3)


def test_z_loss_is_the_squared_logsumexp() -> None:
    routing = TopKRouter(6, num_experts=5, top_k=2, init_std=1.0)(torch.randn(4, 6))
    assert routing.logits is not None
    expected = 0.1 * routing.logits.exp().sum(-1).log().square()
    torch.testing.assert_close(token_losses(routing, RouterLosses(z=0.1), ALONE, rows=2), expected)


def test_zero_tokens_have_zero_losses() -> None:
    routing = TopKRouter(6, num_experts=5, top_k=2)(torch.zeros(0, 6))
    losses = RouterLosses(balance=1.0, z=1.0)
    assert token_losses(routing, losses, ALONE, rows=2).shape == (0,)
    assert token_losses(routing, losses, ALONE, rows=0).shape == (0,)


def test_invalid_losses_are_refused() -> None:
    with pytest.raises(UserError, match=r"router_losses\.balance = -1; expected 0 \(disabled\) or above"):
        RouterLosses(balance=-1)
    with pytest.raises(UserError, match=r"router_losses\.z = -0\.5"):
        RouterLosses(z=-0.5)
    with pytest.raises(
        UserError, match=r"router_losses\.scope = 'rank'; expected one of sequence, batch, global_batch"
    ):
        RouterLosses(scope="rank")  # ty: ignore[invalid-argument-type]
    hashed = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    with pytest.raises(UserError, match="a router that returns no logits and scores"):
        token_losses(hashed, RouterLosses(z=1.0), ALONE, rows=1)
