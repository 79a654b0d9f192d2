from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from d9d_dist import (
    ColumnParallel,
    MeshConfig,
    RowParallel,
    UserError,
    copy_from_full_,
    parallelize_hsdp,
    parallelize_tensor,
    sync_gradients,
)
from d9d_dist.testing import full_gradients, full_parameters, run_ranks
from d9d_moe import GroupedLinear
from d9d_peft import DoRA, LoRA, PeftMethod, Stack, inject, merge_

METHODS: dict[str, PeftMethod] = {
    "LoRA": LoRA("0|2", rank=3, alpha=6),
    "DoRA": DoRA("0|2", rank=3, alpha=6),
    "both": Stack(LoRA("0", rank=3, alpha=6), DoRA("2", rank=2)),
}


def adapted(method: PeftMethod = METHODS["LoRA"], dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a small model with changed adapters, equal on every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, dtype=dtype), nn.Tanh(), nn.Linear(12, 4, dtype=dtype))
    inject(method, model)
    for name, parameter in model.named_parameters():
        if "adapter" in name:
            nn.init.normal_(parameter)
    return model


X = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)


@pytest.mark.parametrize("method", METHODS)
def test_merged_model_has_the_same_output(method: str) -> None:
    model = adapted(METHODS[method])
    before = model(X)
    merge_(model)
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    plain = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double()
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "adapter" not in name})
    torch.testing.assert_close(plain(X), before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_second_merge_has_no_effect(method: str) -> None:
    model = adapted(METHODS[method])
    merge_(model)
    once = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merge_(model)
    torch.testing.assert_close(model.state_dict(), once, rtol=1e-15, atol=0)


def test_a_low_precision_weight_is_rounded_once() -> None:
    model = adapted(dtype=torch.bfloat16)
    weight, a, b = (model.get_parameter(f"0.{name}") for name in ("weight", "adapter.lora_a", "adapter.lora_b"))
    expected = (weight.float() + 2 * b.float() @ a.float()).bfloat16()
    merge_(model)
    assert torch.equal(model.get_parameter("0.weight"), expected)


def test_parameters_keep_identity_and_memory() -> None:
    model = adapted(METHODS["both"])
    before = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    merge_(model)
    assert [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()] == before


def test_each_group_merges_its_own_update() -> None:
    grouped = GroupedLinear(3, 6, 5, init_std=0.5).double()
    inject(LoRA(GroupedLinear), grouped)
    nn.init.normal_(grouped.get_parameter("adapter.lora_b"))
    x, counts = torch.randn(7, 6, dtype=torch.float64), torch.tensor([3, 0, 4])
    before = grouped(x, counts)
    merge_(grouped)
    torch.testing.assert_close(grouped(x, counts), before, rtol=1e-12, atol=1e-12)
    assert not grouped.get_parameter("adapter.lora_b").any()


def test_refuses_a_model_without_adapters() -> None:
    with pytest.raises(UserError, match=r"merge_ got a model without adapters; expected a model after inject\(\)"):
        merge_(nn.Linear(2, 2))


def test_unties_a_tied_weight() -> None:
    model = adapted()
    expected, other = model(X), nn.Linear(12, 4, bias=False)
    other.weight = model.get_parameter("2.weight")
    model.add_module("other", other)
    before = other.weight.clone()
    merge_(model)
    torch.testing.assert_close(model[:3](X), expected)
    torch.testing.assert_close(other.weight, before, rtol=0, atol=0)


def _merge_sharded() -> None:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model = adapted()
        model.add_module("other", nn.Linear(12, 4, bias=False))
        model.get_submodule("other").weight = model.get_parameter("2.weight")
        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")
        with pytest.raises(UserError, match=r"2\.weight is tied .* and sharded; expected a model that is not parallel"):
            merge_(model, ctx)


def test_refuses_a_tied_weight_that_is_sharded() -> None:
    run_ranks(_merge_sharded, world_size=2)


def traced(method: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Return outputs, gradients and merged weights of a model in a parallel layout, as full tensors."""
    with MeshConfig(**mesh).build() as ctx:
        model = adapted(METHODS[method])
        dense = ctx.mesh_for("dense")
        parallelize_tensor(model, dense["tp"], {"0": ColumnParallel(), "2": RowParallel()})
        data = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
        for layer in (model[0], model[2]):
            parallelize_hsdp(layer, data, shard_axis="dp_cp_shard")
        parallelize_hsdp(model, data, shard_axis="dp_cp_shard")
        rank, size = ctx.coordinate("batch", "dp"), ctx.size("batch", "dp")
        outputs = model(X.chunk(size)[rank])
        outputs.square().sum().backward()
        sync_gradients(model)
        gradients = full_gradients(model)
        merge_(model, ctx)
        merged = model(X.chunk(size)[rank])
        torch.testing.assert_close(merged, outputs, rtol=1e-11, atol=1e-11)
        return {"gradients": gradients, "merged": full_parameters(model)}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {method: run_ranks(traced, method, {}, world_size=1)[0] for method in ("LoRA", "DoRA")}


LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "sharded": ({"data_parallel_shard": 2}, 2),
    "tensor": ({"tensor_parallel": 2}, 2),
    "sharded and tensor": ({"data_parallel_shard": 2, "tensor_parallel": 2}, 4),
}


@pytest.mark.parametrize("method", ["LoRA", "DoRA"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow("sharded and tensor-DoRA")
def test_gradients_and_merged_weights_in_a_layout_equal_one_process(
    layout: str, method: str, alone: dict[str, dict[str, Any]]
) -> None:
    mesh, world_size = LAYOUTS[layout]
    expected = alone[method]
    assert any(name.endswith("lora_b") for name in expected["gradients"])
    assert not any(name.endswith("0.weight") for name in expected["gradients"])
    for result in run_ranks(traced, method, mesh, world_size=world_size):
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)


def mixed(dtypes: tuple[torch.dtype, torch.dtype], method: Any) -> nn.Sequential:
    """Return a frozen model of one dtype with adapters of another dtype."""
    base, adapter = dtypes
    return adapted(method("0|2", rank=3, alpha=6, dtype=adapter), base)


def traced_mixed(method: Any, dtypes: tuple[torch.dtype, torch.dtype], mesh: dict[str, int]) -> dict[str, Any]:
    """Return the gradients of two microbatches, and the merged weights after a step, in a parallel layout."""
    with MeshConfig(**mesh).build() as ctx:
        model = mixed(dtypes, method)
        dense = ctx.mesh_for("dense")
        parallelize_tensor(model, dense["tp"], {"0": ColumnParallel(), "2": RowParallel()})
        data = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
        parallelize_hsdp(model[0], data, shard_axis="dp_cp_shard")
        parallelize_hsdp(model, data, shard_axis="dp_cp_shard")
        rank, size = ctx.coordinate("batch", "dp"), ctx.size("batch", "dp")
        for microbatch in X.chunk(size)[rank].to(dtypes[0]).chunk(2):
            model(microbatch).to(dtypes[1]).square().sum().backward()
        sync_gradients(model)
        gradients = full_gradients(model)
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2).step()
        trained = full_parameters(model)
        merge_(model, ctx)
        return {"gradients": gradients, "trained": trained, "merged": full_parameters(model)}


MIXED = [
    # The layouts differ in the order of sums in the frozen layers, which round to their dtype: 2**-8 and 2**-24.
    (LoRA, (torch.bfloat16, torch.float32), 2**-5),
    (DoRA, (torch.bfloat16, torch.float32), 2**-5),
    (LoRA, (torch.float32, torch.float64), 1e-5),
    (DoRA, (torch.float32, torch.float64), 1e-5),
]


@pytest.mark.parametrize(("method", "dtypes", "tolerance"), MIXED)
@pytest.mark.parametrize("mesh", [{"data_parallel_shard": 2}, {"data_parallel_replicate": 2}, {"tensor_parallel": 2}])
@pytest.mark.sample("mesh0-LoRA-dtypes2-1e-05", "mesh1-DoRA-dtypes1-0.03125", "mesh2-LoRA-dtypes0-0.03125")
def test_adapters_of_another_dtype_train_in_a_layout_as_in_one_process(
    method: Any, dtypes: tuple[torch.dtype, torch.dtype], tolerance: float, mesh: dict[str, int]
) -> None:
    alone = run_ranks(traced_mixed, method, dtypes, {}, world_size=1)[0]
    names = alone["gradients"].keys()
    assert names
    assert {gradient.dtype for gradient in alone["gradients"].values()} == {dtypes[1]}
    for result in run_ranks(traced_mixed, method, dtypes, mesh, world_size=2):
        for name in names:
            got, expected = result["gradients"][name], alone["gradients"][name]
            assert got.dtype == dtypes[1]
            assert (got - expected).norm() <= tolerance * expected.norm(), name
            assert result["trained"][name].dtype == dtypes[1]
        # The expected merged weights: one process with the trained parameters of this layout.
        one = mixed(dtypes, method)
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                parameter.copy_(result["trained"][name])
        merge_(one)
        for name, parameter in one.named_parameters():
            assert result["merged"][name].dtype == parameter.dtype
            if method is LoRA or "adapter" in name:
                assert torch.equal(result["merged"][name], parameter)
            else:  # rows that are split have other sums of squares
                rtol = 4 * torch.finfo(dtypes[0]).eps
                torch.testing.assert_close(result["merged"][name], parameter, rtol=rtol, atol=0)


def fill_uneven() -> Tensor:
    mesh = init_device_mesh("cpu", (3,))
    tensor = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    copy_from_full_(tensor, torch.arange(8.0).view(4, 2))
    return tensor.full_tensor()


def test_fill_supports_uneven_shards() -> None:
    for result in run_ranks(fill_uneven, world_size=3):
        assert torch.equal(result, torch.arange(8.0).view(4, 2))
