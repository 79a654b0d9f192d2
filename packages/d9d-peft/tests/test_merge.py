import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_peft import LoRA, LoraLinear, inject, merge_


def adapted(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A small model whose adapters are not at their start; the same on every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9, dtype=dtype), nn.Tanh(), nn.Linear(9, 5, bias=False, dtype=dtype))
    inject(LoRA("0|2", rank=3, alpha=6), model)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            nn.init.normal_(module.lora_b)
    return model


X = torch.linspace(-1, 1, 28, dtype=torch.float64).view(4, 7)


def test_the_merged_model_is_the_same_function() -> None:
    model = adapted()
    before = model(X)
    merge_(model)
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    plain = nn.Sequential(model.get_submodule("0.base"), model[1], model.get_submodule("2.base"))
    torch.testing.assert_close(plain(X), before, rtol=1e-12, atol=1e-12)


def test_merging_twice_is_merging_once() -> None:
    model = adapted()
    merge_(model)
    once = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merge_(model)
    torch.testing.assert_close(model.state_dict(), once, rtol=0, atol=0)


def test_a_low_precision_weight_is_rounded_once() -> None:
    model = adapted(torch.bfloat16)
    lora = model[0]
    assert isinstance(lora, LoraLinear)
    expected = (lora.base.weight.float() + 2 * lora.lora_b.float() @ lora.lora_a.float()).bfloat16()
    merge_(model)
    assert torch.equal(lora.base.weight, expected)


def test_the_parameters_stay_the_same_objects() -> None:
    model = adapted()
    before = [id(parameter) for parameter in model.parameters()]
    merge_(model)
    assert [id(parameter) for parameter in model.parameters()] == before


def test_refuses_a_model_without_adapters() -> None:
    with pytest.raises(UserError, match=r"merge_ got a model without adapters; expected one that inject\(\)"):
        merge_(nn.Linear(2, 2))


def test_refuses_a_tied_weight_and_changes_nothing() -> None:
    model = adapted()
    model.append(nn.Linear(9, 5, bias=False))
    model[3].weight = model.get_parameter("2.base.weight")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=r"2\.base\.weight is tied to a parameter of another module.*; untie them"):
        merge_(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def whole(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


def sharded_over(shape: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Gradients, merged weights and outputs of the sharded model, as whole tensors."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = adapted()
    for module in model:
        if isinstance(module, LoraLinear):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(X).square().sum().backward()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.requires_grad}
    merge_(model)
    return (
        gradients,
        {name: whole(parameter) for name, parameter in model.named_parameters()},
        {"outputs": model(X).detach()},
    )


def alone() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    model = adapted()
    model(X).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    outputs = model(X).detach()
    merge_(model)
    return gradients, {name: parameter.detach() for name, parameter in model.named_parameters()}, {"outputs": outputs}


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_a_sharded_model_trains_and_merges_like_one_process(shape: tuple[int, ...]) -> None:
    expected = alone()
    assert set(expected[0]) == {f"{i}.lora_{x}" for i in (0, 2) for x in "ab"}
    for result in run_ranks(sharded_over, shape, world_size=len(shape) * 2):
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
