from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from d9d_dist import SplitBackward, UserError
from d9d_moe import GroupedLinear
from d9d_peft import DoRA, inject, load_adapters, merge_, save_adapters
from d9d_peft.dora import DoraAdapter
from d9d_state import stack


def layer(method: DoRA | None = None, dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, DoraAdapter]:
    linear = nn.Linear(6, 5, dtype=dtype)
    inject(method or DoRA(nn.Linear, rank=2, alpha=3.0), linear)
    adapter = linear.get_submodule("adapter")
    assert isinstance(adapter, DoraAdapter)
    return linear, adapter


def perturb(adapter: DoraAdapter) -> None:
    nn.init.normal_(adapter.lora_b)
    nn.init.normal_(adapter.magnitude_offset)


def equation_5(linear: nn.Linear, adapter: DoraAdapter, x: Tensor) -> Tensor:
    turned = linear.weight + 1.5 * adapter.lora_b @ adapter.lora_a
    length = linear.weight.norm(dim=1) + adapter.magnitude_offset
    return x @ (length / turned.norm(dim=1).detach() * turned.T) + linear.bias


def test_initial_adapter_has_no_effect() -> None:
    linear, _ = layer()
    x = torch.randn(3, 6, dtype=torch.float64)
    expected = nn.functional.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(linear(x), expected, rtol=1e-14, atol=1e-14)


def test_matches_equation_5_with_a_constant_norm_in_backward() -> None:
    linear, adapter = layer()
    perturb(adapter)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *adapter.parameters()]
    expected = equation_5(linear, adapter, x)
    torch.testing.assert_close(linear(x), expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(linear(x).square().sum(), inputs)
    expected_gradients = torch.autograd.grad(expected.square().sum(), inputs)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-11)


def test_rows_of_zeros_are_trained_and_merged() -> None:
    linear, adapter = layer()
    with torch.no_grad():
        linear.weight[2] = 0
    x = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(3):
        gradients = torch.autograd.grad((linear(x) - 1).square().sum(), list(adapter.parameters()))
        assert all(each.isfinite().all() for each in gradients)
        with torch.no_grad():
            for each, gradient in zip(adapter.parameters(), gradients, strict=True):
                each.sub_(0.01 * gradient)
    assert adapter.magnitude_offset[2] != 0
    assert adapter.lora_b[2].abs().min() > 0
    y = linear(x)
    merge_(linear)
    torch.testing.assert_close(linear(x), y, rtol=1e-12, atol=1e-12)


def test_initial_adapter_has_no_effect_if_the_weight_is_loaded_later() -> None:
    linear, adapter = layer()
    nn.init.normal_(linear.weight, std=7.0)
    adapter.reset_parameters()
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias), rtol=1e-14, atol=1e-14)


def test_merges_into_the_weight() -> None:
    linear, adapter = layer()
    perturb(adapter)
    x = torch.randn(3, 6, dtype=torch.float64)
    expected = equation_5(linear, adapter, x)
    merge_(linear)
    torch.testing.assert_close(nn.functional.linear(x, linear.weight, linear.bias), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear(x), expected, rtol=1e-12, atol=1e-12)


def test_a_low_precision_weight_is_merged_in_float32() -> None:
    linear, adapter = layer(dtype=torch.bfloat16)
    perturb(adapter)
    turned = linear.weight.float() + 1.5 * adapter.lora_b.float() @ adapter.lora_a.float()
    length = linear.weight.float().norm(dim=1) + adapter.magnitude_offset.float()
    expected = (length / turned.norm(dim=1))[:, None] * turned
    merge_(linear)
    torch.testing.assert_close(linear.weight.float(), expected, rtol=2**-8, atol=0)


def test_output_keeps_low_precision() -> None:
    linear, _ = layer(dtype=torch.bfloat16)
    assert linear(torch.randn(3, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_dropout_affects_only_the_update_in_training() -> None:
    linear, adapter = layer(DoRA(nn.Linear, rank=2, alpha=3.0, dropout=0.999999))
    perturb(adapter)
    x = torch.randn(3, 6, dtype=torch.float64)
    turned = linear.weight + 1.5 * adapter.lora_b @ adapter.lora_a
    stretch = (linear.weight.norm(dim=1) + adapter.magnitude_offset) / turned.norm(dim=1)
    torch.testing.assert_close(linear(x), stretch * (x @ linear.weight.T) + linear.bias)
    linear.eval()
    torch.testing.assert_close(linear(x), equation_5(linear, adapter, x))


def test_split_backward_gives_the_same_gradients() -> None:
    linear, adapter = layer()
    perturb(adapter)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    parameters = list(adapter.parameters())
    expected = torch.autograd.grad(linear(x).square().sum(), [x, *parameters])
    split = SplitBackward()
    with split.forward():
        loss = linear(x).square().sum()
    later = split.backward([loss], [None])
    assert len(later) == 2, "A and B wait"
    later.compute()
    torch.testing.assert_close([x.grad, *(p.grad for p in parameters)], list(expected), rtol=1e-12, atol=1e-12)


def test_magnitudes_are_split_with_rows() -> None:
    _, adapter = layer()
    assert adapter.tensor_placements(Shard(0)) == {"lora_b": Shard(0), "magnitude_offset": Shard(0)}
    assert adapter.tensor_placements(Shard(1)) == {"lora_a": Shard(1)}
    assert adapter.tensor_placements(Replicate()) == {}


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's own name)
        return 2 * super().forward(input)


def test_refuses_layers_that_override_forward() -> None:
    with pytest.raises(
        UserError, match=r"DoRA got the pattern '0', which matches only 0 \(Doubled\); expected nn\.Lin"
    ):
        inject(DoRA("0"), nn.Sequential(Doubled(2, 2)))


def test_extra_repr_has_the_options() -> None:
    assert "(adapter): DoraAdapter(rank=2, alpha=3.0, dropout=0.0)" in repr(layer()[0])


def test_refuses_rank_zero() -> None:
    with pytest.raises(UserError, match="DoRA got rank = 0; expected an integer of at least 1"):
        DoRA("q", rank=0)


COUNTS = torch.tensor([3, 0, 4])


def grouped() -> GroupedLinear:
    torch.manual_seed(0)
    layer = GroupedLinear(3, 6, 5, init_std=0.5).double()
    inject(DoRA(GroupedLinear, rank=2, alpha=6), layer)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def of_group(layer: GroupedLinear, group: int) -> nn.Linear:
    """Return one group as a linear layer with its own adapter."""
    linear = nn.Linear(6, 5, bias=False, dtype=torch.float64)
    inject(DoRA(nn.Linear, rank=2, alpha=6), linear)
    linear.load_state_dict({name: tensor[group] for name, tensor in layer.state_dict().items()})
    return linear


def test_each_group_computes_as_a_linear_layer() -> None:
    layer, x = grouped(), torch.randn(7, 6, dtype=torch.float64)
    linears = [of_group(layer, group) for group in range(3)]
    expected = torch.cat([linear(part) for linear, part in zip(linears, x.split(COUNTS.tolist()), strict=True)])
    y = layer(x, COUNTS)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    expected.square().sum().backward()
    for name in ("lora_a", "lora_b", "magnitude_offset"):
        gradient = layer.get_parameter(f"adapter.{name}").grad
        gradients = [linear.get_parameter(f"adapter.{name}").grad for linear in linears]
        for group in (0, 2):
            assert gradient is not None
            torch.testing.assert_close(gradient[group], gradients[group], rtol=1e-11, atol=1e-12)


def test_merged_groups_have_the_same_output() -> None:
    layer, x = grouped(), torch.randn(7, 6, dtype=torch.float64)
    before = layer(x, COUNTS)
    merge_(layer)
    torch.testing.assert_close(layer(x, COUNTS), before, rtol=1e-12, atol=1e-12)
    assert not layer.get_parameter("adapter.magnitude_offset").any()


def test_adapters_of_experts_are_saved_and_loaded(tmp_path: Path) -> None:
    mapper = stack([f"experts.{i}.up.weight" for i in range(3)], "up.weight", dim=0)
    model = nn.ModuleDict({"up": grouped()})
    save_adapters(model, tmp_path, mapper)
    other = nn.ModuleDict({"up": GroupedLinear(3, 6, 5).double()})
    inject(DoRA("up", rank=2, alpha=6), other)
    other["up"].get_parameter("weight").data.copy_(model["up"].get_parameter("weight"))
    load_adapters(other, tmp_path, mapper)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=1e-12, atol=1e-12)
