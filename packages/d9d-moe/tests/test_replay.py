import pytest
import torch
from torch import nn
from torch.testing import assert_close

from d9d_dist import UserError
from d9d_moe import MoELayer, SigmoidRouter, TopKRouter
from d9d_moe.router import ReplayRouter, Routing

ROUTERS = {
    "top_k": lambda: TopKRouter(8, num_experts=6, top_k=2, init_std=1.0),
    "biased": lambda: TopKRouter(8, num_experts=6, top_k=2, init_std=1.0, renormalize=False),
    "sigmoid": lambda: SigmoidRouter(8, num_experts=6, top_k=2, num_groups=3, top_groups=2, scale=2.0, init_std=1.0),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_replaying_the_experts_that_a_router_chose_changes_nothing(name: str) -> None:
    router, x = ROUTERS[name]().double(), torch.randn(9, 8, dtype=torch.float64)
    expected = router(x)
    found = router(x, expected.indices)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    gradients = [torch.autograd.grad(each.probabilities.square().sum(), router.weight)[0] for each in (found, expected)]
    assert_close(*gradients)


@pytest.mark.parametrize("name", ROUTERS)
def test_recorded_experts_get_their_current_scores(name: str) -> None:
    router, x = ROUTERS[name]().double(), torch.randn(9, 8, dtype=torch.float64)
    recorded = torch.rand(9, 6).topk(2, dim=-1).indices
    recorded[4] = -1
    found, own = router(x, recorded), router(x)
    assert_close(found.indices[:4], recorded[:4])
    assert_close(found.indices[4], own.indices[4])
    assert_close(found.probabilities[4], own.probabilities[4])
    assert found.logits is not None
    raw = found.logits.sigmoid() if name == "sigmoid" else found.logits.softmax(-1)
    weights = raw.gather(1, found.indices)
    if name != "biased":
        weights = weights / weights.sum(-1, keepdim=True)
    assert_close(found.probabilities, weights * (2.0 if name == "sigmoid" else 1.0))


def test_records_of_another_shape_are_refused() -> None:
    with pytest.raises(UserError, match=r"the recorded experts have shape \(9, 3\); expected \(9, 2\)"):
        ROUTERS["top_k"]()(torch.randn(9, 8), torch.zeros(9, 3, dtype=torch.int64))


class _FirstExpert(nn.Module):
    num_experts, top_k = 6, 1

    def forward(self, x: torch.Tensor) -> Routing:
        return Routing(torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1))


def test_a_layer_replays_and_refuses_a_router_that_cannot() -> None:
    layer, x = MoELayer(8, 4, router=ROUTERS["top_k"]()), torch.randn(2, 3, 8)
    recorded = layer.router(x.flatten(0, 1)).indices.view(2, 3, 2)
    assert isinstance(layer.router, ReplayRouter)
    assert_close(layer(x, expert_indices=recorded), layer(x))
    other = (recorded + 1) % 6
    assert not torch.equal(layer(x, expert_indices=other), layer(x))
    plain = MoELayer(8, 4, router=_FirstExpert())
    with pytest.raises(UserError, match="got recorded experts for a _FirstExpert, which cannot replay them"):
        plain(x, expert_indices=recorded[..., :1])
