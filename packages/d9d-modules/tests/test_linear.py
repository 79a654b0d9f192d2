import torch
from torch import nn

from d9d_modules import Linear


def test_is_a_linear_layer_without_bias() -> None:
    layer = Linear(3, 5)
    assert isinstance(layer, nn.Linear)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer.weight.shape == (5, 3)


def test_a_bias_starts_at_zero() -> None:
    layer = Linear(3, 5, bias=True)
    assert torch.equal(layer.bias, torch.zeros(5))
    torch.nn.init.ones_(layer.bias)
    layer.reset_parameters()
    x = torch.randn(2, 3)
    assert torch.equal(layer(x), x @ layer.weight.T)


def test_weights_are_drawn_from_the_given_normal_distribution() -> None:
    layer = Linear(300, 300, init_std=0.5)
    for _ in range(2):
        assert abs(layer.weight.std().item() - 0.5) < 0.01
        # 4.6 % of normally distributed values exceed two standard deviations, but no uniform ones.
        assert abs((layer.weight.abs() > 1.0).float().mean().item() - 0.046) < 0.01
        torch.nn.init.zeros_(layer.weight)
        layer.reset_parameters()
