import copy

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import set_grad_dtype
from d9d_modules import CheckpointPolicy, DecoderLayer, SwiGLU, rotary_tables
from d9d_modules.checkpointing import checkpoint_layers
from d9d_modules.chunked_cross_entropy import linear_cross_entropy
from d9d_modules.compiling import compile_layers
from d9d_modules.cross_entropy import CrossEntropy
from d9d_modules.rope import RotaryTables


class _Mean(nn.Module):
    """Stand-in for attention."""

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        return x.mean(dim=1, keepdim=True) + rotary.cos.sum() * x


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.sample("selective")
def test_layers_compute_the_same_under_the_same_names(policy: CheckpointPolicy) -> None:
    layers = nn.ModuleDict({str(i): DecoderLayer(8, attention=_Mean(), feed_forward=SwiGLU(8, 12)) for i in (2, 3)})
    rotary = rotary_tables(torch.arange(3).unsqueeze(0), head_dim=2, theta=10.0)
    x = torch.randn(2, 3, 8)

    def run(layers: nn.ModuleDict) -> tuple[Tensor, ...]:
        y = x
        for layer in layers.values():
            y = layer(y, rotary)
        return y, *torch.autograd.grad(y.square().sum(), list(layers.parameters()))

    compiled = copy.deepcopy(layers)
    checkpoint_layers(compiled, policy=policy)
    compile_layers(compiled, backend="aot_eager", fullgraph=True)
    assert list(compiled.state_dict()) == list(layers.state_dict())
    torch.testing.assert_close(run(compiled), run(layers))


class _Rows(nn.Module):
    """A product with a slice of a weight that passes a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight[:2]
        torch._dynamo.graph_break()
        return nn.functional.linear(x, rows)


def test_gradients_of_another_dtype_do_not_prevent_compilation() -> None:
    layer, x = _Rows(), torch.arange(12.0).view(3, 4).bfloat16()  # all sums are exact
    set_grad_dtype(layer.parameters(), torch.float32)
    compile_layers(nn.ModuleDict({"0": layer}), backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for rows in (x, x[:2]):  # the second length compiles again, with gradients in float32
        layer(rows).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    gradient = x.sum(0, dtype=torch.float32) + x[:2].sum(0, dtype=torch.float32)
    expected = torch.stack([gradient, gradient, 0 * gradient, 0 * gradient])
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, expected)


def test_a_compiled_model_may_contain_the_loss() -> None:
    hidden, weight = torch.randn(9, 4, requires_grad=True), torch.randn(12, 4, requires_grad=True)
    labels = torch.randint(0, 12, (9,))
    compiled = torch.compile(lambda hidden: linear_cross_entropy(2.0 * hidden, [weight], labels), backend="aot_eager")
    expected = CrossEntropy()(2.0 * hidden @ weight.T, labels)
    losses = compiled(hidden)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(
        torch.autograd.grad(losses.sum(), (hidden, weight)), torch.autograd.grad(expected.sum(), (hidden, weight))
    )
