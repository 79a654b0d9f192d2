from dataclasses import replace
from typing import Any

import pytest
import torch

from d9d_dist import StageInfo, UserError
from d9d_modules import SwiGLU
from d9d_moe import (
    DeepseekV3ForCausalLM,
    DeepseekV3ForClassification,
    DeepseekV3ForEmbedding,
    DeepseekV3Params,
    MoELayer,
    RouterLosses,
)

PARAMS = DeepseekV3Params(
    vocab_size=19,
    hidden_size=12,
    num_layers=3,
    num_heads=2,
    kv_rank=6,
    q_rank=None,
    head_dim=4,
    rotary_dim=4,
    value_dim=6,
    intermediate_size=20,
    num_dense_layers=1,
    num_experts=6,
    top_k=2,
    expert_intermediate_size=10,
    num_groups=3,
    top_groups=2,
    router_losses=RouterLosses(balance=0.3, z=0.1),
    initializer_range=0.3,
)


def test_chained_stages_match_the_whole_model_with_router_losses() -> None:
    whole = DeepseekV3ForCausalLM(PARAMS).double()
    input_ids, labels = torch.randint(0, 19, (2, 2, 7))
    labels[0, :3] = -100
    expected = whole(input_ids, labels=labels)
    assert expected[0, :3].eq(0).all()
    expected.sum().backward()
    stages = [DeepseekV3ForCausalLM(PARAMS, StageInfo(index, 3)).double() for index in range(3)]
    hidden: Any = input_ids
    for stage in stages:
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        hidden = stage(hidden, labels=labels)
    hidden.sum().backward()
    torch.testing.assert_close(hidden, expected, rtol=1e-12, atol=1e-12)
    split = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
    torch.testing.assert_close(split, {name: p.grad for name, p in whole.named_parameters()}, rtol=1e-10, atol=1e-12)


def test_router_losses_are_added_to_token_losses() -> None:
    with_losses, without = (
        DeepseekV3ForCausalLM(replace(PARAMS, router_losses=losses)).double()
        for losses in (PARAMS.router_losses, RouterLosses())
    )
    without.load_state_dict(with_losses.state_dict())
    input_ids, labels = torch.randint(0, 19, (2, 2, 7))
    torch.testing.assert_close(with_losses(input_ids), without(input_ids))
    _, added = with_losses.backbone(input_ids)
    assert added.gt(0).all()
    difference = with_losses(input_ids, labels=labels) - without(input_ids, labels=labels)
    torch.testing.assert_close(difference, added)


def test_the_first_layers_are_dense() -> None:
    model = DeepseekV3ForCausalLM(PARAMS)
    kinds = [type(layer.feed_forward) for layer in model.layers.values()]
    assert kinds == [SwiGLU, MoELayer, MoELayer]


def test_classification_and_embedding_heads() -> None:
    input_ids = torch.randint(0, 19, (2, 7))
    classifier = DeepseekV3ForClassification(PARAMS, num_classes=3).double()
    logits = classifier(input_ids)
    assert logits.shape == (2, 3)
    losses = classifier(input_ids, labels=torch.tensor([2, -100]))
    _, added = classifier.backbone(input_ids)
    torch.testing.assert_close(losses[0], -logits[0].log_softmax(-1)[2] + added[0].mean())
    assert losses[1] == 0
    embedder = DeepseekV3ForEmbedding(replace(PARAMS, router_losses=RouterLosses()), embedding_size=5)
    torch.testing.assert_close(embedder(input_ids).norm(dim=-1), torch.ones(2))
    with pytest.raises(UserError, match=r"router_losses = .* for an embedding"):
        DeepseekV3ForEmbedding(PARAMS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_rank": 0}, "kv_rank = 0; expected a number above 0"),
        ({"q_rank": 0}, "q_rank = 0; expected a number above 0"),
        ({"num_dense_layers": 4}, "num_dense_layers = 4; expected 0 to num_layers = 3"),
        ({"num_shared_experts": -1}, "num_shared_experts = -1; expected 0"),
        ({"rotary_dim": 3}, "rotary_dim = 3; expected an even number"),
        ({"top_k": 7}, "top_k = 7; expected 1 <= top_k <= num_experts = 6"),
        ({"num_groups": 4}, "num_groups = 4; expected a divisor of num_experts = 6"),
    ],
)
def test_invalid_params_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(PARAMS, **changes)


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (
            torch.zeros(2, 3, 12),
            r"stage 1 got \(2, 3, 12\) of torch\.float32; expected .*, in a tuple with the router losses",
        ),
        ((torch.zeros(2, 3, 5), torch.zeros(2, 3)), r"expected .*\[batch, length, 12\]"),
    ],
)
def test_input_of_another_stage_is_refused(received: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DeepseekV3ForCausalLM(PARAMS, StageInfo(1, 3))(received)
