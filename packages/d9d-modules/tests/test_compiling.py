import copy

import pytest
import torch
from torch import Tensor, nn

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
