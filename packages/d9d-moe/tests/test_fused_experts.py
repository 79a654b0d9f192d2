from typing import Any

import pytest
import torch

from d9d_dist import MeshConfig
from d9d_dist.testing import assert_trees_close
from d9d_moe import parallelize_moe
from d9d_moe.fused_experts import find_fused_experts

_SIZES = {"vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}


def _experts(kind: str, **changes: Any) -> Any:
    """Return a layer's fused experts in float64, with random values."""
    import transformers

    kind_class: Any = getattr(transformers, kind)
    config = kind_class.config_class(**_SIZES, num_hidden_layers=1, **changes)
    config._experts_implementation = "eager"
    torch.manual_seed(2)
    [experts] = find_fused_experts(kind_class(config)).values()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts.double()


def _run(experts: Any, num_dropped: int = 0) -> dict[str, torch.Tensor]:
    """Return the outputs and gradients for tokens with two experts each; the first ones have one."""
    generator = torch.Generator().manual_seed(3)
    tokens, weights = (torch.rand(5, size, dtype=torch.float64, generator=generator) for size in (8, 2))
    indices = torch.rand(5, 4, generator=generator).topk(2).indices
    indices[:num_dropped, 1] = 4
    inputs = [tokens.requires_grad_(), weights.requires_grad_()]
    outputs = experts(tokens, indices, weights)
    outputs.square().sum().backward()
    gradients: list[Any] = [each.grad for each in (*inputs, *experts.parameters())]
    return {"outputs": outputs.detach(), **{str(index): each for index, each in enumerate(gradients)}}


@pytest.mark.parametrize(
    ("kind", "sizes", "num_dropped"),
    [
        ("GptOssForCausalLM", {"num_local_experts": 4, "intermediate_size": 6}, 0),
        ("MixtralForCausalLM", {"num_local_experts": 4, "intermediate_size": 6}, 2),
        (
            "NemotronHForCausalLM",
            {"n_routed_experts": 4, "moe_intermediate_size": 6, "layers_block_type": ["moe"]},
            0,
        ),
    ],
)
def test_dispatched_experts_equal_those_of_transformers(kind: str, sizes: dict[str, Any], num_dropped: int) -> None:
    expected, experts = _run(_experts(kind, **sizes), num_dropped), _experts(kind, **sizes)
    with MeshConfig().build() as ctx:
        parallelize_moe(torch.nn.Sequential(experts), ctx)
        assert_trees_close(_run(experts, num_dropped), expected, rtol=1e-12)


def test_experts_with_other_parameters_are_not_found() -> None:
    experts = _experts("MixtralForCausalLM", num_local_experts=4, intermediate_size=6)
    experts.norm = torch.nn.LayerNorm(8)
    assert not find_fused_experts(experts)
