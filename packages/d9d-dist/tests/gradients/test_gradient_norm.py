from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from d9d_dist import DistributedContext, MeshConfig, UserError, parallelize_hsdp, parallelize_replicate
from d9d_dist.gradients._local_parameters import distribute_parameters
from d9d_dist.gradients.gradient_norm import global_grad_norm, grad_norm_parts
from d9d_dist.gradients.operations import clip_grad_norm_
from d9d_dist.testing import run_ranks

HSDP_AXES = ("dp_replicate", "dp_cp_shard", "cp_replicate")
SHAPES = [(5, 7), (9,), (7, 5), (3, 4), (1,), (6, 2)]
"""Some do not divide, and some leave shards empty."""


def _full(seed: int) -> torch.Tensor:
    """Return a full gradient that depends only on the parameter's number, as after a reduction."""
    shape = SHAPES[seed % len(SHAPES)]
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * (1 + seed)


def _expected(seeds: range | list[int], norm_type: float) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.cat([_full(seed).flatten() for seed in seeds]), norm_type)


def _spread(seed: int, mesh: DeviceMesh, placements: Any, *, has_gradient: bool = True) -> nn.Parameter:
    full = _full(seed)
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, placements, src_data_rank=None))
    if has_gradient:
        parameter.grad = distribute_tensor(full, mesh, placements, src_data_rank=None)
    return parameter


def _plain(seed: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(_full(seed)))
    parameter.grad = _full(seed)
    return parameter


def _sharded_model(ctx: DistributedContext, seeds: list[int]) -> list[nn.Parameter]:
    """Shard tensor-parallel parameters by FSDP; the gradients equal the values."""
    dense = ctx.mesh_for("dense")
    model = nn.ParameterList(nn.Parameter(_full(seed)) for seed in seeds)
    if dense["tp"].size() > 1:
        splits = {id(p): Shard(0) for p in model if p.shape[0] % dense["tp"].size() == 0}
        distribute_parameters(model, dense["tp"], splits, default=Replicate())
    parallelize_hsdp(model, dense[HSDP_AXES], shard_axis="dp_cp_shard")
    for parameter in model:
        parameter.grad = parameter.detach().clone()
    return list(model)


def _layout(degrees: dict[str, int], norm_type: float) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    with MeshConfig(**degrees).build() as ctx:
        stage = ctx.coordinate("regular", "pp")
        parameters = _sharded_model(ctx, [6 * stage + index for index in range(6)])
        parts = grad_norm_parts(parameters, ctx=ctx, norm_type=norm_type)
        norm = clip_grad_norm_(parameters, 0.5, ctx=ctx, norm_type=norm_type)
        return norm, global_grad_norm(parameters, ctx=ctx, norm_type=norm_type), parts


@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
@pytest.mark.parametrize(
    ("degrees", "names"),
    [
        ({"data_parallel_shard": 4}, {"dp_cp_shard"}),
        ({"data_parallel_replicate": 2, "data_parallel_shard": 2}, {"dp_cp_shard"}),
        ({"data_parallel_replicate": 2, "context_parallel_replicate": 2}, {"replicated"}),
        ({"data_parallel_shard": 2, "tensor_parallel": 2}, {"dp_cp_shard", "dp_cp_shard x tp"}),
        ({"pipeline_parallel": 2, "data_parallel_shard": 2}, {"dp_cp_shard"}),
        ({"pipeline_parallel": 2, "data_parallel_replicate": 2}, {"replicated"}),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
@pytest.mark.slow(
    "data_parallel_shard=4--3.0",
    "data_parallel_replicate=2,data_parallel_shard=2--3.0",
    "data_parallel_replicate=2,context_parallel_replicate=2--3.0",
    "data_parallel_shard=2,tensor_parallel=2--3.0",
    "pipeline_parallel=2,data_parallel_shard=2--3.0",
    "pipeline_parallel=2,data_parallel_replicate=2--3.0",
    "data_parallel_shard=4--inf",
    "data_parallel_replicate=2,context_parallel_replicate=2--inf",
    "pipeline_parallel=2,data_parallel_shard=2--inf",
)
def test_each_element_is_counted_once(degrees: dict[str, int], names: set[str], norm_type: float) -> None:
    num_stages = degrees.get("pipeline_parallel", 1)
    expected = _expected(range(6 * num_stages), norm_type)
    for norm, clipped, parts in run_ranks(_layout, degrees, norm_type, world_size=4):
        torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0)
        # Clipping adds 1e-6 to the norm, as torch does.
        torch.testing.assert_close(clipped, 0.5 * expected / (expected + 1e-6), rtol=1e-13, atol=0)
        assert parts.keys() == names
        if num_stages == 1:
            whole = torch.linalg.vector_norm(torch.stack(list(parts.values())), norm_type)
            torch.testing.assert_close(whole, expected, rtol=1e-13, atol=0)


def _everything(norm_type: float) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[tuple[int, int]]]:
    """Run on eight ranks: two stages, each with dense, tensor-parallel and expert parameters; one has no gradient."""
    degrees = {"pipeline_parallel": 2, "data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2}
    with MeshConfig(**degrees).build() as ctx, pytest.MonkeyPatch.context() as patch:
        dense, expert = ctx.mesh_for("dense"), ctx.mesh_for("expert")
        stage, shard = ctx.coordinate("regular", "pp"), ctx.coordinate("dense", "dp_cp_shard")
        first = 24 * stage
        parameters = [
            _plain(first),
            _spread(first + 1, dense["tp"], [Replicate()]),
            _spread(first + 2, dense["tp"], [Shard(1)]),
            _spread(first + 3, dense["dp_cp_shard", "tp"], [Shard(0), Shard(1)]),
            _spread(first + 5, dense["dp_cp_shard", "tp"], [Replicate(), Shard(0)]),
            _spread(first + 6, expert["ep_shard"], [Shard(0)]),
            _spread(first + 8, expert["ep_replicate", "ep_shard"], [Replicate(), Shard(0)]),
            _spread(first + 9, expert["ep_replicate", "ep_shard"], [Shard(0), Shard(1)]),
            # Has a gradient on one shard only; the other shard counts as zero, without a deadlock.
            _spread(first + 11, dense["dp_cp_shard"], [Shard(0)], has_gradient=shard == 0),
        ]
        frozen = _plain(first)
        frozen.requires_grad_(False)
        log: list[tuple[int, int]] = []
        all_reduce = dist.all_reduce

        def record(tensor: torch.Tensor, *args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            log.append((tensor.numel(), id(group)))
            return all_reduce(tensor, *args, group=group, **kwargs)

        patch.setattr(dist, "all_reduce", record)
        norm = global_grad_norm([*parameters, frozen], ctx=ctx, norm_type=norm_type)
        return norm, grad_norm_parts(parameters, ctx=ctx, norm_type=norm_type), log


@pytest.mark.slow("1.0")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_equals_one_process_over_all_kinds_of_axes(norm_type: float) -> None:
    whole = [24 * stage + seed for stage in range(2) for seed in (0, 1, 2, 3, 5, 6, 8, 9)]
    halves = [_full(24 * stage + 11).chunk(2)[0].flatten() for stage in range(2)]
    expected = torch.linalg.vector_norm(torch.cat([*(_full(seed).flatten() for seed in whole), *halves]), norm_type)
    for rank, (norm, parts, log) in enumerate(run_ranks(_everything, norm_type, world_size=8)):
        torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0)
        first = 24 * (rank // 4)
        by_name = {
            "replicated": [0, 1],
            "tp": [2, 5],
            "dp_cp_shard x tp": [3],
            "ep_shard": [6, 8],
            "ep_replicate x ep_shard": [9],
        }
        assert parts.keys() == {*by_name, "dp_cp_shard"}
        for name, seeds in by_name.items():
            own = _expected([first + seed for seed in seeds], norm_type)
            torch.testing.assert_close(parts[name], own, rtol=1e-13, atol=0)
        groups = [group for _, group in log[: len(log) // 2 + 1]]
        assert len(groups) == len(set(groups)), "a group was used twice for one norm"
        assert sum(size for size, _ in log[: len(log) // 2 + 1]) < 12


def _unsummed() -> str:
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        model = nn.Linear(2, 2)
        parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UserError) as error:
            clip_grad_norm_(model.parameters(), 1.0, ctx=ctx)
        return str(error.value)


def test_refuses_partial_gradients() -> None:
    for message in run_ranks(_unsummed):
        assert f"({Partial()!r})" in message
        assert "on the axes (dp_replicate); expected equal placements" in message
        assert "call GradientSync.finish(), or sync_gradients(model)" in message


def test_refuses_a_plain_gradient_of_a_dtensor() -> None:
    with MeshConfig().build() as ctx:
        parameter = _spread(0, ctx.mesh_for("flat"), [Shard(0)])
        parameter.grad = _full(0)
        with pytest.raises(
            UserError, match=r"a plain tensor as the gradient of a parameter of shape \(5, 7\) that is a"
        ):
            global_grad_norm([parameter], ctx=ctx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0])
def test_norms_of_low_precision_gradients_are_float32(norm_type: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.empty(size, dtype=dtype)) for size in (5000, 17, 1)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    exact = torch.cat([p.grad.double() for p in parameters if p.grad is not None]).norm(norm_type).item()
    assert exact != torch.tensor(exact, dtype=dtype).item(), "the norm must not be a number of the low precision"
    with MeshConfig().build() as ctx:
        norm = global_grad_norm(parameters, ctx=ctx, norm_type=norm_type)
        (part,) = grad_norm_parts(parameters, ctx=ctx, norm_type=norm_type).values()
    assert norm.dtype == part.dtype == torch.float32
    # Float32: a tree of 13 sums, then powers of norms, which scale errors by p, and a root. bfloat16 is
    # off by 2**-9, float16 by 2**-12.
    assert norm.item() == pytest.approx(exact, rel=2**-18)
    assert part.item() == pytest.approx(exact, rel=2**-18)


def test_the_norm_without_gradients_is_zero() -> None:
    with MeshConfig().build() as ctx:
        assert global_grad_norm(nn.Linear(2, 2).parameters(), ctx=ctx).item() == 0.0
        assert global_grad_norm([], ctx=ctx).item() == 0.0
        assert grad_norm_parts([], ctx=ctx) == {}


@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
def test_complex_gradients_count_by_their_absolute_values(norm_type: float) -> None:
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.complex128, torch.float32)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = torch.cat([parameter.grad.abs().double() for parameter in parameters if parameter.grad is not None])
    with MeshConfig().build() as ctx:
        norm = global_grad_norm(parameters, ctx=ctx, norm_type=norm_type)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(gradients, norm_type))


def _norm_of_fully_shard(norm_type: float) -> tuple[float, set[str]]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
        for module in (model[0], model):
            fully_shard(module)
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        parts = grad_norm_parts(model.parameters(), ctx=ctx, norm_type=norm_type)
        return clip_grad_norm_(model.parameters(), 1.0, ctx=ctx, norm_type=norm_type).item(), set(parts)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_model_of_fully_shard_on_a_mesh_without_axis_names(norm_type: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type).item()
    for norm, parts in run_ranks(_norm_of_fully_shard, norm_type, world_size=2):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert parts == {"ranks 0, 1"}


def test_a_sparse_gradient_is_an_error() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with (
        MeshConfig().build() as ctx,
        pytest.raises(UserError, match=r"the gradient of a parameter, of shape \(10, 4\), is sparse; expected a dense"),
    ):
        clip_grad_norm_(embedding.parameters(), 1.0, ctx=ctx)
