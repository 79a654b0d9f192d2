import copy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import DistributedContext, MeshConfig, UserError, materialize
from d9d_dist.testing import assert_rounds_like
from d9d_modules import Float8, Linear, convert_to_float8
from d9d_modules.float8 import Float8Recipe

EMULATED = Float8(emulate=True)


@pytest.fixture(scope="module")
def ctx() -> Iterator[DistributedContext]:
    with MeshConfig().build() as ctx:
        yield ctx


def _rounded(x: Tensor, *, dim: int | None) -> Tensor:
    """Round `x` to float8 with power-of-two scales that fit the largest value of each row or of the tensor."""
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(448.0 / largest)))
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


def test_matmul_operands_are_rounded_except_for_the_weight_gradient(ctx: DistributedContext) -> None:
    linear = nn.Linear(32, 48)
    plain = copy.deepcopy(linear)
    assert convert_to_float8(nn.Sequential(linear), EMULATED, ctx) == ["0"]
    x, seed = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 5, 48)
    y = linear(x)
    y.backward(seed)

    def products(dtype: torch.dtype) -> list[Tensor]:
        """The output and the gradients of the input and the weight: sums, in `dtype`, of rounded operands."""
        rows, rounded = _rounded(x, dim=-1).to(dtype), _rounded(plain.weight, dim=-1).to(dtype)
        gradients = _rounded(seed, dim=-1).to(dtype) @ _rounded(plain.weight, dim=None).to(dtype)
        weight_gradient = seed.to(dtype).flatten(0, 1).T @ x.to(dtype).flatten(0, 1)
        return [rows @ rounded.T + plain.bias.to(dtype), gradients, weight_gradient]

    assert_rounds_like([y, x.grad, linear.weight.grad], products(torch.float64), peer=products(torch.float32))


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "rowwise", "tensorwise"])
def test_every_recipe_is_close_to_the_exact_product(ctx: DistributedContext, recipe: Float8Recipe) -> None:
    plain = nn.Sequential(Linear(16, 64, init_std=0.2), nn.GELU(), Linear(64, 16, init_std=0.2)).bfloat16()
    rounded = copy.deepcopy(plain)
    convert_to_float8(rounded, Float8(recipe=recipe, emulate=True), ctx)
    x = torch.randn(64, 16, dtype=torch.bfloat16)
    error = ((rounded(x) - plain(x)).norm() / plain(x).norm()).item()
    assert 0.005 < error < 0.1


def test_conversion_keeps_names_classes_and_initial_values(ctx: DistributedContext) -> None:
    def build() -> nn.ModuleDict:
        with torch.device("meta"):
            return nn.ModuleDict(
                {"wide": Linear(16, 32, init_std=3.0), "odd": nn.Linear(16, 5), "norm": nn.RMSNorm(16)}
            )

    model, plain = build(), build()
    assert convert_to_float8(model, EMULATED, ctx) == ["wide"]
    for each in (model, plain):
        materialize(each, device=torch.device("cpu"), seed=0)
    assert isinstance(model["wide"], Linear)
    assert list(model.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert torch.equal(model["odd"](torch.ones(16)), plain["odd"](torch.ones(16)))


def test_a_layer_is_converted_once(ctx: DistributedContext) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    convert_to_float8(model, EMULATED, ctx)
    with pytest.raises(UserError, match="0 is already converted to float8; expected one conversion"):
        convert_to_float8(model, EMULATED, ctx)


def test_a_device_without_float8_raises(ctx: DistributedContext) -> None:
    linear = nn.Linear(16, 16)
    with pytest.raises(
        UserError, match=r"'rowwise_with_gw_hp' is enabled on cpu; expected an accelerator .* 9\.0 or higher"
    ):
        convert_to_float8(nn.Sequential(linear), Float8(), ctx)
    assert type(linear) is nn.Linear


@pytest.mark.parametrize(("capability", "is_enough"), [((8, 6), False), ((8, 9), True), ((10, 0), True), ({}, False)])
def test_devices_below_compute_capability_8_9_are_refused(
    ctx: DistributedContext, capability: object, is_enough: bool
) -> None:
    device = mock.Mock(ctx, device=torch.device("xpu", 0), size=lambda *_: 1)
    model = nn.Sequential(nn.Linear(16, 16))
    with mock.patch.object(
        torch, "get_device_module", return_value=mock.Mock(get_device_capability=lambda _: capability)
    ):
        if is_enough:
            assert convert_to_float8(model, Float8(recipe="tensorwise"), device) == ["0"]
        else:
            with pytest.raises(UserError, match=r"expected an accelerator of compute capability 8\.9 or higher"):
                convert_to_float8(model, Float8(recipe="tensorwise"), device)


def test_a_module_without_convertible_layers_raises(ctx: DistributedContext) -> None:
    with pytest.raises(
        UserError, match="Sequential has no linear layer for float8; expected at least one whose in and"
    ):
        convert_to_float8(nn.Sequential(nn.Linear(16, 5)), EMULATED, ctx)


def test_missing_torchao_raises(ctx: DistributedContext) -> None:
    with (
        mock.patch("d9d_modules.float8.find_spec", return_value=None),
        pytest.raises(UserError, match=r"pip install 'torchao>=0"),
    ):
        convert_to_float8(nn.Linear(16, 16), EMULATED, ctx)
