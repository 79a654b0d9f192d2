from typing import Any

import pytest
import torch

from d9d_dist import UserError
from d9d_moe import SigmoidRouter, TopKRouter


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_chooses_the_largest_probabilities(renormalize: bool, top_k: int) -> None:
    router = TopKRouter(6, num_experts=5, top_k=top_k, renormalize=renormalize, init_std=1.0).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    indices, probabilities, logits, all_scores = router(x)
    scores = (x @ router.weight.T).softmax(-1)
    assert indices.shape == probabilities.shape == (7, top_k)
    torch.testing.assert_close(logits, x @ router.weight.T)
    torch.testing.assert_close(all_scores, scores)
    for token in range(7):
        best = sorted(range(5), key=lambda expert: -scores[token, expert].item())[:top_k]
        assert indices[token].tolist() == best
        expected = scores[token, best]
        if renormalize:
            expected = expected / expected.sum()
        torch.testing.assert_close(probabilities[token], expected)


@pytest.mark.parametrize("renormalize", [False, True])
def test_biases_change_logits_and_choice(renormalize: bool) -> None:
    router = TopKRouter(
        6, num_experts=5, top_k=2, renormalize=renormalize, bias=True, balance_bias=True, init_std=1.0
    ).double()
    assert router.bias is not None
    assert router.selection_bias is not None
    assert router.bias.eq(0).all()
    assert router.selection_bias.eq(0).all()
    torch.nn.init.normal_(router.bias)
    torch.nn.init.normal_(router.selection_bias)
    x = torch.randn(7, 6, dtype=torch.float64)
    routing = router(x)
    scores = (x @ router.weight.T + router.bias).softmax(-1)
    for token in range(7):
        biased = scores[token] + router.selection_bias
        best = sorted(range(5), key=lambda expert: -biased[expert].item())[:2]
        assert routing.indices[token].tolist() == best
        expected = scores[token, best] / (scores[token, best].sum() if renormalize else 1.0)
        torch.testing.assert_close(routing.probabilities[token], expected)


def test_autocast_does_not_affect_the_router() -> None:
    router, x = TopKRouter(8, num_experts=4, top_k=2, init_std=1.0), torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x)
    assert torch.equal(routing.probabilities, router(x).probabilities)


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
def test_invalid_top_k_is_refused(top_k: int) -> None:
    with pytest.raises(UserError, match=rf"top_k = {top_k}; expected 1 <= top_k <= num_experts = 4"):
        TopKRouter(3, num_experts=4, top_k=top_k)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (6, 5), (12, 3)])
def test_sigmoid_routing_matches_the_reference(num_groups: int, top_groups: int, renormalize: bool) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    top_k = 3 if num_groups == 12 else 2
    ours = SigmoidRouter(
        6,
        num_experts=12,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalize=renormalize,
        scale=2.5,
        init_std=1.0,
    )
    x = torch.randn(50, 6, requires_grad=True)
    if num_groups == 12:  # the reference needs two experts in a group, to add them up
        indices = _grouped_choice(ours, x)
        assert torch.equal(ours(x).indices.sort().values, indices.sort().values)
        return
    config = DeepseekV3Config(
        hidden_size=6,
        n_routed_experts=12,
        num_experts_per_tok=top_k,
        n_group=num_groups,
        topk_group=top_groups,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    reference = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(ours.selection_bias, std=0.5)
    reference.load_state_dict({"weight": ours.weight.detach(), "e_score_correction_bias": ours.selection_bias})
    _, weights, indices = reference(x)
    expected = torch.zeros(50, 12).scatter(1, indices, weights)
    routing = ours(x)
    got = torch.zeros(50, 12).scatter(1, routing.indices, routing.probabilities)
    torch.testing.assert_close(got, expected)
    gradient = torch.randn(50, 12)
    (wanted,) = torch.autograd.grad(expected, reference.weight, gradient)
    torch.testing.assert_close(torch.autograd.grad(got, ours.weight, gradient)[0], wanted)


def _grouped_choice(router: SigmoidRouter, x: torch.Tensor) -> torch.Tensor:
    """Return the expected choice for groups of one expert, where the best groups are the best experts."""
    return (x @ router.weight.T).sigmoid().topk(router.top_k).indices


def test_bias_affects_the_choice_but_not_the_weights() -> None:
    router = SigmoidRouter(4, num_experts=3, top_k=1, renormalize=False, init_std=1.0).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    router.selection_bias[2] = 10.0
    routing = router(x)
    assert routing.indices.eq(2).all()
    torch.testing.assert_close(routing.probabilities, (x @ router.weight[2]).sigmoid().unsqueeze(-1))
    assert routing.scores is not None
    torch.testing.assert_close(routing.scores.sum(-1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_groups": 5}, r"num_groups = 5; expected a divisor of num_experts = 8"),
        ({"num_groups": 4, "top_groups": 5}, r"top_groups = 5; expected 1 <= top_groups <= num_groups = 4"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, r"top_k = 3, but top_groups = 1 of 4 groups hold 2 experts"),
        ({"top_k": 9}, r"top_k = 9; expected 1 <= top_k <= num_experts = 8"),
    ],
)
def test_invalid_groups_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SigmoidRouter(4, num_experts=8, **{**sizes, "top_k": sizes.get("top_k", 2)})
