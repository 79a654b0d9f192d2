import pytest
import torch

from d9d_dist import UserError
from d9d_moe import TopKRouter


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_takes_the_largest_probabilities(renormalize: bool, top_k: int) -> None:
    router = TopKRouter(6, num_experts=5, top_k=top_k, renormalize=renormalize, init_std=1.0).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    indices, probabilities = router(x)
    scores = (x @ router.weight.T).softmax(-1)
    assert indices.shape == probabilities.shape == (7, top_k)
    for token in range(7):
        best = sorted(range(5), key=lambda expert: -scores[token, expert].item())[:top_k]
        assert indices[token].tolist() == best
        expected = scores[token, best]
        if renormalize:
            expected = expected / expected.sum()
        torch.testing.assert_close(probabilities[token], expected)


def test_half_precision_is_routed_in_float32() -> None:
    router = TopKRouter(16, num_experts=8, top_k=2, init_std=1.0).bfloat16()
    x = torch.randn(50, 16).bfloat16()
    routing = router(x)
    assert routing.probabilities.dtype == torch.float32
    wide = TopKRouter(16, num_experts=8, top_k=2)
    wide.load_state_dict(router.state_dict())
    expected = wide(x.float())
    assert torch.equal(routing.indices, expected.indices)
    assert torch.equal(routing.probabilities, expected.probabilities)


def test_routing_changes_no_state() -> None:
    router = TopKRouter(4, num_experts=3, top_k=2)
    before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    first, second = router(torch.ones(2, 4)), router(torch.ones(2, 4))
    assert torch.equal(first.probabilities, second.probabilities)
    torch.testing.assert_close(dict(router.state_dict()), before, rtol=0, atol=0)


def test_reset_parameters_draws_from_the_given_normal_distribution() -> None:
    router = TopKRouter(300, num_experts=200, top_k=2, init_std=0.3)
    for _ in range(2):
        assert abs(router.weight.std().item() - 0.3) < 0.01
        torch.nn.init.zeros_(router.weight)
        router.reset_parameters()


@pytest.mark.parametrize("top_k", [0, 5])
def test_top_k_outside_the_experts_is_refused(top_k: int) -> None:
    with pytest.raises(UserError, match=rf"top_k = {top_k}; expected 1 <= top_k <= num_experts = 4"):
        TopKRouter(3, num_experts=4, top_k=top_k)
