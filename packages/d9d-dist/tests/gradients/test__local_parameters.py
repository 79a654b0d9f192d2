from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from d9d_dist import MeshConfig
from d9d_dist.data_parallel.parallelize import parallelize_fsdp
from d9d_dist.gradients._local_parameters import (
    compute_locally,
    distribute_parameters,
    local_parameters_of,
    modules_outside_fsdp,
    partial_parameters,
)
from d9d_dist.precision import Precision
from d9d_dist.testing import run_ranks


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with MeshConfig().build() as ctx:
        yield ctx.mesh_for("flat")


class _Sum(nn.Module):
    """Two parameters that receive the same gradient tensor from autograd, and one with an expanded gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not any(isinstance(parameter, DTensor) for parameter in self._parameters.values())
        return (self.a + self.b) * x + self.c.sum()


def _local(mesh: DeviceMesh, module: nn.Module) -> nn.Module:
    distribute_parameters(module, mesh, {}, default=Replicate())
    for submodule in module.modules():
        compute_locally(submodule)
    return module


def test_accumulated_gradients_do_not_share_memory(mesh: DeviceMesh) -> None:
    module, x = _local(mesh, _Sum()), torch.arange(4.0)
    for _ in range(3):
        module(x).sum().backward()
    found = [parameter.grad.full_tensor() for parameter in module.parameters() if isinstance(parameter.grad, DTensor)]
    assert [gradient.tolist() for gradient in found] == [[0, 3, 6, 9], [0, 3, 6, 9], [12, 12, 12, 12]]


def test_attention_of_torch_uses_its_output_layer_without_a_call(mesh: DeviceMesh) -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.linspace(-1, 1, 24).view(2, 3, 4)
    expected, _ = attention(x, x, x)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in attention.parameters()]
    y, _ = _local(mesh, attention)(x, x, x)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    for parameter, gradient in zip(attention.parameters(), gradients, strict=True):
        assert isinstance(parameter.grad, DTensor)
        assert gradient is not None
        assert torch.equal(parameter.grad.full_tensor(), gradient)


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self) -> None:
        raise RuntimeError("on purpose")


def test_parameters_are_restored_after_forward(mesh: DeviceMesh) -> None:
    module, failing = _local(mesh, _Sum()), _local(mesh, _Fails())
    before = [*module.parameters(), *failing.parameters()]
    module(torch.ones(4))
    with pytest.raises(RuntimeError, match="on purpose"):
        failing()
    after = [*module.parameters(), *failing.parameters()]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert all(isinstance(parameter, DTensor) for parameter in after)


def test_compute_dtype_leaves_the_gradient_in_the_parameters(mesh: DeviceMesh) -> None:
    module = nn.Linear(2, 2)
    distribute_parameters(module, mesh, {}, default=Replicate())
    compute_locally(module, compute_dtype=torch.bfloat16)
    output = module(torch.ones(1, 2, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32


def test_gradients_accumulate_over_calls(mesh: DeviceMesh) -> None:
    module = nn.Linear(2, 2)
    compute_locally(module, partial_axes=("tp",), compute_dtype=torch.bfloat16)
    compute_locally(module, partial_axes=("dp",), reduce_dtype=torch.float32)
    hooks = local_parameters_of(module)
    assert hooks is not None
    assert hooks.partial_axes == {"tp", "dp"}
    assert (hooks.compute_dtype, hooks.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert len(module._forward_pre_hooks) == len(module._forward_hooks) == 1


def test_axes_of_one_rank_are_not_partial(mesh: DeviceMesh) -> None:
    module = nn.Linear(2, 2)
    distribute_parameters(module, mesh, {}, default=Replicate())
    compute_locally(module, partial_axes=("world",))
    assert list(partial_parameters(module)) == []


def test_modules_managed_by_fsdp_are_skipped(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    parallelize_fsdp(model[0], mesh, precision=Precision())
    assert list(modules_outside_fsdp(model)) == [model, model[1]]


def _spread() -> list[object]:
    with MeshConfig(data_parallel_replicate=2, tensor_parallel=2).build() as ctx:
        dense = ctx.mesh_for("dense")
        first, second, third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        model = nn.Sequential(first, second, third)
        third.weight = first.weight
        second.bias.requires_grad_(False)
        torch.manual_seed(1)
        full = nn.init.normal_(second.weight).detach().clone()
        placements = {id(first.weight): Shard(0), id(second.weight): Shard(1)}
        distribute_parameters(model, dense["tp"], placements, default=Replicate())
        distribute_parameters(model, dense["tp"], {}, default=Replicate())
        distribute_parameters(model, dense["dp_replicate"], {}, default=Replicate())
        for module in model:
            compute_locally(module, partial_axes=("dp_replicate",))
        compute_locally(first, partial_axes=("tp",))
        weight = second.weight
        assert isinstance(weight, DTensor)
        assert third.weight is first.weight, "shared parameters stay shared"
        assert torch.equal(weight.full_tensor(), full)
        assert torch.equal(weight.to_local(), full.chunk(2, dim=1)[ctx.coordinate("dense", "tp")])
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [
            weight.device_mesh.mesh_dim_names,
            second.bias.requires_grad,
            {names[id(found.parameter)]: found.placements for found in partial_parameters(model)},
        ]


def test_parameters_are_sharded_over_two_axes() -> None:
    for names, requires_grad, partial in run_ranks(_spread, world_size=4):
        assert names == ("dp_replicate", "tp")
        assert not requires_grad
        assert partial == {
            "0.weight": (Partial(), Shard(0)),
            "0.bias": (Partial(), Partial()),
            "1.weight": (Partial(), Shard(1)),
            "2.bias": (Partial(), Replicate()),
        }
