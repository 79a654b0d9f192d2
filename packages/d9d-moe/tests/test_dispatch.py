import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d9d_moe import LocalDispatcher
from d9d_moe.router import Routing


def _routing(num_tokens: int, num_experts: int, top_k: int, *, used: int) -> Routing:
    """Return a random routing to the first `used` experts."""
    indices = torch.stack([torch.randperm(max(used, top_k))[:top_k] for _ in range(num_tokens)])
    assert indices.max() < num_experts
    return Routing(indices, torch.rand(num_tokens, top_k, dtype=torch.float64))


@settings(max_examples=40)
@given(data=st.data(), num_tokens=st.integers(1, 12), num_experts=st.integers(1, 6))
def test_rows_are_sorted_by_expert_then_by_token(data: st.DataObject, num_tokens: int, num_experts: int) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    routing = _routing(num_tokens, num_experts, top_k, used=data.draw(st.integers(1, num_experts)))
    tokens = torch.randn(num_tokens, 3, dtype=torch.float64)
    dispatched = LocalDispatcher().dispatch(tokens, routing, num_experts=num_experts)
    expected: list[Tensor] = []
    counts: list[int] = []
    for expert in range(num_experts):
        chosen = [token for token in range(num_tokens) if expert in routing.indices[token]]
        expected += [tokens[token] for token in chosen]
        counts.append(len(chosen))
    assert dispatched.counts.tolist() == counts
    assert torch.equal(dispatched.rows, torch.stack(expected))


@pytest.mark.parametrize(("num_experts", "top_k", "used"), [(4, 2, 4), (6, 2, 2), (3, 1, 1), (3, 3, 3)])
def test_dispatch_and_combine_compute_a_weighted_sum(num_experts: int, top_k: int, used: int) -> None:
    tokens = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    routing = _routing(9, num_experts, top_k, used=used)
    probabilities = routing.probabilities.requires_grad_()
    scales = torch.randn(num_experts, 4, dtype=torch.float64)

    dispatched = LocalDispatcher().dispatch(tokens, routing, num_experts=num_experts)
    got = dispatched.combine(dispatched.rows.tanh() * scales.repeat_interleave(dispatched.counts, dim=0)).wait()
    expected = (tokens.tanh().unsqueeze(1) * scales[routing.indices] * probabilities.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(got, expected)

    gradient = torch.randn(9, 4, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(got, (tokens, probabilities), gradient),
        torch.autograd.grad(expected, (tokens, probabilities), gradient),
    )


def test_half_precision_is_summed_in_float32() -> None:
    outputs = torch.tensor([[256.0], [1.0], [-256.0]]).bfloat16()
    routing = Routing(torch.tensor([[0, 1, 2]]), torch.tensor([[1 + 2**-10, 1.0, 1.0]]))
    dispatched = LocalDispatcher().dispatch(torch.zeros(1, 1).bfloat16(), routing, num_experts=3)
    with torch.autocast("cpu", torch.bfloat16):
        combined = dispatched.combine(outputs).wait()
    assert combined.dtype == torch.bfloat16
    assert combined.item() == 1.25  # 256 + 1 is 256 in bfloat16, and the first weight is 1


def test_zero_tokens_give_zero_rows() -> None:
    routing = Routing(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    tokens = torch.zeros(0, 5, requires_grad=True)
    dispatched = LocalDispatcher().dispatch(tokens, routing, num_experts=3)
    assert dispatched.counts.tolist() == [0, 0, 0]
    combined = dispatched.combine(dispatched.rows).wait()
    assert combined.shape == (0, 5)
    combined.sum().backward()
    assert tokens.grad is not None
