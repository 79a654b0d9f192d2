from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import MeshConfig, UserError
from d9d_dist.collectives.differentiable import (
    all_to_all_reshard,
    copy_to_axis,
    gather_from_axis,
    reduce_from_axis,
    reduce_scatter_to_axis,
    scatter_to_axis,
)
from d9d_dist.testing import Device, run_ranks

SHAPE = (4, 8, 12)
DIMS = [0, 1, -1]

# Placement of a global tensor over ranks. "equal": equal on all ranks; "part": each rank has a part of a sum; a number:
# split on that dim. If the ranks use an equal value differently, its gradient is a "part".
Spread = str | int
Operation = Callable[[Tensor, DeviceMesh], Tensor]


def _operation(name: str, dim: int, other: int) -> Operation:
    operations: dict[str, Operation] = {
        "copy_to_axis": copy_to_axis,
        "reduce_from_axis": reduce_from_axis,
        "gather_from_axis partial": lambda x, mesh: gather_from_axis(x, mesh, dim=dim, gradient="partial"),
        "gather_from_axis equal": lambda x, mesh: gather_from_axis(x, mesh, dim=dim, gradient="equal"),
        "reduce_scatter_to_axis": lambda x, mesh: reduce_scatter_to_axis(x, mesh, dim=dim),
        "scatter_to_axis": lambda x, mesh: scatter_to_axis(x, mesh, dim=dim),
        "all_to_all_reshard": lambda x, mesh: all_to_all_reshard(x, mesh, scatter_dim=dim, gather_dim=other),
    }
    return operations[name]


def _spreads(name: str, dim: int, other: int) -> tuple[Spread, Spread, Spread, Spread]:
    """Return the placements of the input, the output, the output's gradient and the input's gradient."""
    spreads: dict[str, tuple[Spread, Spread, Spread, Spread]] = {
        "copy_to_axis": ("equal", "equal", "part", "equal"),
        "reduce_from_axis": ("part", "equal", "equal", "equal"),
        "gather_from_axis partial": (dim, "equal", "part", dim),
        "gather_from_axis equal": (dim, "equal", "equal", dim),
        "reduce_scatter_to_axis": ("part", dim, dim, "equal"),
        "scatter_to_axis": ("equal", dim, dim, "equal"),
        "all_to_all_reshard": (other, dim, dim, other),
    }
    return spreads[name]


def _rank_part(spread: Spread, whole: Tensor, rank: int, size: int, seed: int) -> Tensor:
    """Return a rank's part of a global tensor. Parts of a sum are random on all ranks but the first."""
    if isinstance(spread, int):
        return whole.chunk(size, dim=spread)[rank].clone()
    if spread == "equal":
        return whole.clone()
    others = [_random(seed + other) for other in range(1, size)]
    return others[rank - 1] if rank else whole - cast("Tensor", sum(others))


def _random(seed: int) -> Tensor:
    """Return a transposed tensor, so that neither inputs nor gradients are contiguous."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*reversed(SHAPE), dtype=torch.float64, generator=draws).permute(2, 1, 0)


def _forward_and_gradient(name: str, dim: int, other: int) -> tuple[Tensor, Tensor, bool]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        spread_in, _, spread_gradient, _ = _spreads(name, dim, other)
        x = _rank_part(spread_in, _random(1), ctx.rank, mesh.size(), 100).to(ctx.device)
        before = x.clone()
        y = _operation(name, dim, other)(x.requires_grad_(), mesh)
        upstream = _rank_part(spread_gradient, _random(2), ctx.rank, mesh.size(), 200).to(ctx.device)
        assert not upstream.is_contiguous()
        (gradient,) = torch.autograd.grad(y, x, upstream)
        return y.detach().cpu(), gradient.cpu(), torch.equal(x, before)


NAMES = [
    "copy_to_axis",
    "reduce_from_axis",
    "gather_from_axis partial",
    "gather_from_axis equal",
    "reduce_scatter_to_axis",
    "scatter_to_axis",
    "all_to_all_reshard",
]


def _check(name: str, dim: int, other: int, world_size: int, device: Device) -> None:
    """Check a function and its gradient: on the global tensor both are the identity."""
    _, spread_out, _, spread_input_gradient = _spreads(name, dim, other)
    ranks = run_ranks(_forward_and_gradient, name, dim, other, world_size=world_size, device=device)
    for rank, (y, gradient, is_input_kept) in enumerate(ranks):
        expected = _rank_part(spread_out, _random(1), rank, world_size, 100)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
        expected = _rank_part(spread_input_gradient, _random(2), rank, world_size, 200)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)
        assert is_input_kept


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_functions_and_gradients_equal_one_process(name: str, dim: int, device: Device) -> None:
    _check(name, dim, (dim + 1) % 3, 2, device)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.world_size(4)
def test_functions_and_gradients_equal_one_process_on_more_ranks(name: str, device: Device) -> None:
    _check(name, -2, 0, 4, device)


LENGTH, SIZE, HIDDEN = 8, 4, 12


def _layer_inputs() -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    shapes = ((LENGTH, SIZE), (SIZE, HIDDEN), (HIDDEN, SIZE))
    x, up, down = (torch.randn(shape, dtype=torch.float64, generator=draws) for shape in shapes)
    return x, up, down


def _layers_on_one_process() -> tuple[Tensor, list[Tensor]]:
    x, up, down = (tensor.requires_grad_() for tensor in _layer_inputs())
    h = x + (x @ up).tanh() @ down
    h = h.cumsum(dim=0).sin()
    h = ((h @ up).tanh() @ down).sin()
    loss = h.square().sum()
    return loss.detach(), list(torch.autograd.grad(loss, (x, up, down)))


def _layers_on_ranks() -> tuple[Tensor, list[Tensor]]:
    """Run a sequence-parallel layer, a mix over the sequence for some of the features, and a tensor-parallel layer."""
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        parts = zip(_layer_inputs(), (0, 1, 0), strict=True)
        x, up, down = (
            whole.chunk(mesh.size(), dim=dim)[ctx.rank].to(ctx.device).requires_grad_() for whole, dim in parts
        )
        h = x + reduce_scatter_to_axis(
            (gather_from_axis(x, mesh, dim=0, gradient="partial") @ up).tanh() @ down, mesh, dim=0
        )
        h = all_to_all_reshard(h, mesh, scatter_dim=-1, gather_dim=0).cumsum(dim=0).sin()
        h = gather_from_axis(all_to_all_reshard(h, mesh, scatter_dim=0, gather_dim=-1), mesh, dim=0, gradient="equal")
        h = reduce_from_axis((copy_to_axis(h, mesh) @ up).tanh() @ down, mesh)
        h = gather_from_axis(scatter_to_axis(h, mesh, dim=-1).sin_(), mesh, dim=-1, gradient="equal")
        loss = h.square().sum()
        gradients = torch.autograd.grad(loss, (x, up, down))
        return loss.detach().cpu(), [gradient.cpu() for gradient in gradients]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers_equal_one_process(world_size: int) -> None:
    expected_loss, expected = _layers_on_one_process()
    ranks = run_ranks(_layers_on_ranks, world_size=world_size)
    for loss, _ in ranks:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=0)
    for i, dim in enumerate((0, 1, 0)):
        gradient = torch.cat([gradients[i] for _, gradients in ranks], dim=dim)
        torch.testing.assert_close(gradient, expected[i], rtol=1e-12, atol=1e-13)


def _second_derivative() -> tuple[Tensor, Tensor]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        shard = torch.arange(1.0, 3.0, dtype=torch.float64) + 2 * ctx.rank
        shard.requires_grad_()
        loss = (
            gather_from_axis(shard, mesh, dim=0, gradient="partial").pow(3).sum()
        )  # both ranks add it to the total loss
        (first,) = torch.autograd.grad(loss, shard, create_graph=True)
        (second,) = torch.autograd.grad(first, shard, torch.ones_like(first))
        return shard.detach(), second


def test_gradients_can_be_differentiated() -> None:
    for shard, second in run_ranks(_second_derivative):
        torch.testing.assert_close(second, 2 * 6 * shard)


def _compiled_and_not() -> list[Tensor]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        x = (torch.arange(8.0) + ctx.rank).view(4, 2).requires_grad_()

        def layer(x: Tensor) -> Tensor:
            h = gather_from_axis(x.sin(), mesh, dim=0, gradient="partial")
            h = all_to_all_reshard(h.cos(), mesh, scatter_dim=0, gather_dim=1)
            h = copy_to_axis(reduce_scatter_to_axis(h, mesh, dim=-1), mesh).sin()
            return scatter_to_axis(reduce_from_axis(h, mesh), mesh, dim=0).square().sum()

        compiled: Callable[[Tensor], Tensor] = torch.compile(layer, backend="aot_eager", fullgraph=True)
        losses = layer(x), compiled(x)
        return [tensor for loss in losses for tensor in (loss.detach(), *torch.autograd.grad(loss, x))]


@pytest.mark.full
def test_differentiable_collectives_compile_to_one_graph() -> None:
    for loss, gradient, compiled_loss, compiled_gradient in run_ranks(_compiled_and_not):
        assert torch.equal(compiled_loss, loss)
        assert torch.equal(compiled_gradient, gradient)


def _identity_on_one_rank() -> list[bool]:
    with MeshConfig().build() as ctx:
        mesh, x = ctx.mesh_for("dense")["tp"], torch.ones(3, 3, 3)
        return [_operation(name, 0, 1)(x, mesh) is x for name in NAMES]


def test_functions_return_their_input_on_a_single_rank() -> None:
    (are_same,) = run_ranks(_identity_on_one_rank, world_size=1)
    assert are_same == [True] * len(NAMES)


def _changed_tensors() -> list[str]:
    """Return the contiguous inputs and gradients that a collective has overwritten."""
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh, changed = ctx.mesh_for("dense")["tp"], []
        for name in NAMES:
            x = torch.full((2, 2, 2), 1.0 + ctx.rank, device=ctx.device, requires_grad=True)
            y = _operation(name, 0, 1)(x, mesh)
            upstream = torch.full_like(y, 3.0 + ctx.rank)
            torch.autograd.grad(y, x, upstream)
            if not torch.equal(x, torch.full_like(x, 1.0 + ctx.rank)):
                changed.append(f"{name}: input")
            if not torch.equal(upstream, torch.full_like(y, 3.0 + ctx.rank)):
                changed.append(f"{name}: gradient")
        return changed


def test_arguments_are_not_modified(device: Device) -> None:
    assert run_ranks(_changed_tensors, device=device) == [[]] * 2


def _dtypes() -> list[torch.dtype]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh, x = ctx.mesh_for("dense")["tp"], torch.ones(2, 2, 2, dtype=torch.bfloat16, device=ctx.device)
        return [_operation(name, 0, 1)(x, mesh).dtype for name in NAMES]


def test_outputs_keep_the_dtype_of_the_input(device: Device) -> None:
    assert run_ranks(_dtypes, device=device) == [[torch.bfloat16] * len(NAMES)] * 2


def _refusal(name: str) -> str:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        with pytest.raises(UserError) as caught:
            _operation(name, 1, 0)(torch.zeros(4, 5), ctx.mesh_for("dense")["tp"])
        return str(caught.value)


@pytest.mark.parametrize("name", ["reduce_scatter_to_axis", "scatter_to_axis", "all_to_all_reshard"])
def test_refuses_uneven_parts(name: str) -> None:
    message = (
        "got a tensor of shape (4, 5) to split over 2 ranks on dim 1, whose size is 5; expected a multiple of 2. "
        "Pad it to 6."
    )
    assert run_ranks(_refusal, name) == [message] * 2


def _other_refusals() -> None:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh = ctx.mesh_for("dense")
        with pytest.raises(
            UserError, match=r"got a mesh with the axes \(.*, tp\); expected exactly one. Slice it: mesh"
        ):
            reduce_from_axis(torch.zeros(2), mesh)
        wrong: Any = "sum"
        with pytest.raises(UserError, match=r"got gradient = 'sum'; expected 'partial' or 'equal'."):
            gather_from_axis(torch.zeros(2), mesh["tp"], dim=0, gradient=wrong)


def test_refuses_an_unknown_gradient_mode() -> None:
    run_ranks(_other_refusals)


def _sums_of_random_sizes(num_sums: int) -> list[Tensor]:
    sums = []
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        sizes = torch.Generator().manual_seed(0)
        for number in range(num_sums):
            size = int(torch.randint(1, (20, 3000, 200_000)[number % 3], (), generator=sizes))
            dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float16)[number % 4]
            part = torch.randn(size, generator=torch.Generator().manual_seed(100 * number + ctx.rank)).to(dtype)
            sums.append(reduce_from_axis(part, ctx.mesh_for("dense")["tp"]))
    return sums


@pytest.mark.parametrize("world_size", [3, 5, 6, 7])
def test_sums_are_bitwise_equal_on_all_ranks(world_size: int) -> None:
    """Replicas must not diverge, also for sizes that the number of ranks does not divide."""
    first, *others = run_ranks(_sums_of_random_sizes, 24, world_size=world_size)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
