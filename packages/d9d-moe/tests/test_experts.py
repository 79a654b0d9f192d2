import pytest
import torch

from d9d_dist import UserError
from d9d_dist.testing import assert_rounds_like
from d9d_modules import SwiGLU
from d9d_moe import GroupedSwiGLU, MoELayer, TopKRouter
from d9d_moe.experts import GroupedClampedSwiGLU, clamped_swiglu


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 6), (torch.float32, 8)])
def test_each_expert_computes_swiglu(dtype: torch.dtype, size: int) -> None:
    experts = GroupedSwiGLU(3, size, 2 * size, init_std=1.0).to(dtype)
    counts = [2, 0, 4]
    rows = torch.randn(6, size, dtype=dtype)
    expected, exact = [], []
    for expert, chunk in enumerate(rows.split(counts)):
        dense = SwiGLU(size, 2 * size).to(dtype)
        dense.load_state_dict({name: tensor[expert] for name, tensor in experts.state_dict().items()})
        expected.append(dense(chunk))
        exact.append(dense.double()(chunk.double()))
    found = experts(rows, torch.tensor(counts))
    assert_rounds_like([found], [torch.cat(exact)], peer=[torch.cat(expected)])


@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_clamped_experts_and_biased_router_match_the_reference(limit: float) -> None:
    """Compare outputs and all gradients of the layer with those of GPT-OSS, in float64."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        hidden_size=6, intermediate_size=5, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=limit
    )
    config._experts_implementation = "eager"
    theirs = GptOssMLP(config).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    experts = GroupedClampedSwiGLU(4, 6, 5, limit=limit)
    ours = MoELayer(6, 5, router=TopKRouter(6, num_experts=4, top_k=2, bias=True), experts=experts).double()
    names = {f"experts.{name}.bias": f"experts.{name}_bias" for name in ("gate_up_proj", "down_proj")}
    names |= {f"router.{name}": f"router.{name}" for name in ("weight", "bias")}
    fused = {f"experts.{name}.weight": f"experts.{name}" for name in ("gate_up_proj", "down_proj")}
    with torch.no_grad():
        for name, other in (names | fused).items():
            value = theirs.get_parameter(other)
            ours.get_parameter(name).copy_(value.mT if name in fused else value)
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    got, (expected, _) = ours(inputs[0]), theirs(inputs[1])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(x)
    got.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-11, atol=1e-12)
    for name, other in (names | fused).items():
        grad = theirs.get_parameter(other).grad
        assert grad is not None
        wanted = grad.mT if name in fused else grad
        torch.testing.assert_close(ours.get_parameter(name).grad, wanted, rtol=1e-11, atol=1e-11)


def test_clamped_swiglu_does_not_broadcast() -> None:
    with pytest.raises(UserError, match=r"gate has shape \(2, 4\), up has \(4,\); expected the same shape"):
        clamped_swiglu(torch.zeros(2, 4), torch.zeros(4), alpha=1.0, limit=7.0)


def test_clamped_swiglu_clamps_gate_above_and_up_on_both_sides() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([9.0, -9.0, 0.0])
    capped = [(7 + 1) * 7 * torch.tensor(7 * 1.5).sigmoid(), (1 - 7) * -9 * torch.tensor(-9 * 1.5).sigmoid()]
    expected = torch.stack([*capped, torch.tensor(1.5).sigmoid()])
    torch.testing.assert_close(clamped_swiglu(gate, up, alpha=1.5, limit=7.0), expected)
