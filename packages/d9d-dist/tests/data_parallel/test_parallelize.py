import warnings
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from d9d_dist import (
    ColumnParallel,
    GradientSync,
    MeshConfig,
    Precision,
    UserError,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
    set_gradient_sync,
    sync_gradients,
)
from d9d_dist.data_parallel.embedding_rows import synchronize_embeddings
from d9d_dist.data_parallel.parallelize import refuse_lost_writes
from d9d_dist.gradients._local_parameters import compute_locally, distribute_parameters
from d9d_dist.testing import assert_trees_close, full_gradients, full_tree, run_ranks
from d9d_dist.values.parameter_writes import refuse_later_writes

HSDP_AXES = ("dp_replicate", "dp_cp_shard", "cp_replicate")


class _Sum(torch.autograd.Function):
    """Sums over ranks; all ranks use the sum alike, so its gradient is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Mlp(nn.Module):
    """A column-parallel layer, a scale with partial gradients, a row-parallel layer, and a replicated bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 4, bias=False)
        self.scale = _Scale()
        self.down = nn.Linear(4, 3, bias=False)
        self.bias = nn.Parameter(torch.randn(5))
        self.group: dist.ProcessGroup | None = None
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.scale(self.up(x)).tanh())
        return (y if self.group is None else _Sum.apply(y, self.group)) * self.bias.square().sum()


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _tensor_parallel(model: _Mlp, mesh: DeviceMesh) -> None:
    """Split a model by hand; other tests cover the tensor-parallel styles."""
    if mesh.size() == 1:
        return
    placements = {id(model.up.weight): Shard(0), id(model.down.weight): Shard(1)}
    distribute_parameters(model, mesh, placements, default=Replicate())
    for module in (model, model.up, model.down):
        compute_locally(module)
    compute_locally(model.scale, partial_axes=("tp",))
    model.group = mesh.get_group()


def _inputs() -> torch.Tensor:
    return torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _gradients(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a summed loss over two microbatches; only the last one reduces."""
    first, second = inputs.chunk(2)
    set_gradient_sync(model, False)
    model(first).square().sum().backward()
    set_gradient_sync(model, True)
    model(second).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def _on_ranks(kind: str, degrees: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, tuple[Any, ...]], bool]:
    with MeshConfig(**degrees).build() as ctx:
        model, dense = _Mlp(), ctx.mesh_for("dense")
        _tensor_parallel(model, dense["tp"])
        if kind == "replicate":
            parallelize_replicate(model, dense["dp_cp_shard"])
        elif kind == "fsdp":
            parallelize_fsdp(model, dense["dp_cp_shard"])
        else:
            num_groups = []
            for module in (model.up, model.down, model):
                parallelize_hsdp(module, dense[HSDP_AXES], shard_axis="dp_cp_shard")
                num_groups.append(len(dist.distributed_c10d._world.pg_map))
            assert len(set(num_groups)) == 1, "every call made groups of its own"
        placements = {n: tuple(p.placements) for n, p in model.named_parameters() if isinstance(p, DTensor)}
        batch = ctx.mesh_for("batch")["dp", "cp"]
        rank, size = (batch.get_local_rank(0) * batch.size(1) + batch.get_local_rank(1), batch.size())
        gradients = _gradients(model, _inputs().chunk(size)[rank])
        is_partial = any(
            placement.is_partial()
            for p in model.parameters()
            if isinstance(p.grad, DTensor)
            for placement in p.grad.placements
        )
        return gradients, placements, is_partial


def _check(kind: str, degrees: dict[str, int], placements: tuple[Any, ...], *, world_size: int) -> None:
    expected = _gradients(_Mlp(), _inputs())
    for gradients, found, is_partial in run_ranks(_on_ranks, kind, degrees, world_size=world_size):
        assert found["bias"] == placements
        assert is_partial == (kind == "replicate")
        assert gradients.keys() == expected.keys() == found.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "degrees", "placements"),
    [
        ("replicate", {"data_parallel_shard": 4}, (Replicate(),)),
        ("replicate", {"data_parallel_shard": 2, "tensor_parallel": 2}, (Replicate(), Replicate())),
        ("fsdp", {"data_parallel_shard": 4}, (Shard(0),)),
        ("hsdp", {"data_parallel_shard": 4}, (Shard(0),)),
        ("hsdp", {"data_parallel_replicate": 2, "data_parallel_shard": 2}, (Replicate(), Shard(0))),
        ("hsdp", {"data_parallel_replicate": 4}, (Replicate(), Shard(0))),
        ("hsdp", {"data_parallel_shard": 2, "context_parallel_replicate": 2}, (Replicate(), Shard(0))),
        ("hsdp", {"data_parallel_replicate": 2, "context_parallel_replicate": 2}, (Replicate(), Shard(0))),
    ],
)
def test_gradients_are_the_sum_over_all_ranks(kind: str, degrees: dict[str, int], placements: tuple[Any, ...]) -> None:
    _check(kind, degrees, placements, world_size=4)


@pytest.mark.parametrize(
    ("degrees", "placements"),
    [
        (
            {"data_parallel_replicate": 2, "data_parallel_shard": 2, "context_parallel_replicate": 2},
            (Replicate(), Shard(0)),
        ),
        (
            {"data_parallel_replicate": 2, "context_parallel_replicate": 2, "tensor_parallel": 2},
            (Replicate(), Shard(0), Replicate()),
        ),
        (
            {"data_parallel_shard": 2, "context_parallel_replicate": 2, "tensor_parallel": 2},
            (Replicate(), Shard(0), Replicate()),
        ),
    ],
)
@pytest.mark.slow("degrees1-placements1", "degrees2-placements2")
def test_replicate_axes_are_merged(degrees: dict[str, int], placements: tuple[Any, ...]) -> None:
    _check("hsdp", degrees, placements, world_size=8)


def test_one_rank_leaves_the_module_unchanged() -> None:
    with MeshConfig().build() as ctx:
        model = _Mlp()
        parallelize_hsdp(model, ctx.mesh_for("dense")[HSDP_AXES], shard_axis="dp_cp_shard")
        parallelize_replicate(model, ctx.mesh_for("flat"))
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("parallelize", [parallelize_fsdp, parallelize_replicate])
def test_precision_applies_on_one_rank(parallelize: Any) -> None:
    with MeshConfig().build() as ctx:
        model = nn.Linear(4, 4)
        parallelize(model, ctx.mesh_for("flat"), precision=Precision(compute=torch.bfloat16, reduce=torch.float32))
        output = model(torch.ones(1, 4))
        assert output.dtype == torch.bfloat16
        assert model.weight.dtype == torch.float32
        output.sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == torch.float32


def _narrow_gradients(kind: str) -> tuple[torch.dtype, list[float]]:
    """Return the gradients of one and of three microbatches, whose terms are exact in bfloat16, but not their sums."""
    axes = {"data_parallel_replicate" if kind == "replicate" else "data_parallel_shard": 2}
    with MeshConfig(**axes).build() as ctx:
        model = nn.Linear(4, 1, bias=False)
        mesh, precision = ctx.mesh_for("dense")[HSDP_AXES], Precision(compute=torch.bfloat16)
        if kind == "replicate":
            parallelize_replicate(model, mesh["dp_replicate"], precision=precision)
        else:
            parallelize_hsdp(model, mesh, shard_axis="dp_cp_shard", precision=precision)
        found = []
        for num in (1, 3):
            for index in range(num):
                set_gradient_sync(model, enabled=index == num - 1)
                model(torch.full((1, 4), 1.0 if ctx.rank == 0 else 2**-9)).sum().backward()
            sync_gradients(model)
            (gradient,) = full_gradients(model).values()
            found.append(gradient.max().item())
            model.zero_grad()
        return gradient.dtype, found


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_gradients_are_summed_in_the_dtype_of_the_parameters_by_default(kind: str) -> None:
    for dtype, found in run_ranks(_narrow_gradients, kind, world_size=2):
        assert dtype == torch.float32
        assert found == [1 + 2**-9, 3 * (1 + 2**-9)]


class _Dtypes(nn.Module):
    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, index: torch.Tensor) -> list[torch.dtype]:
        return [x.dtype, mask.dtype, index.dtype]


@pytest.mark.parametrize(
    ("precision", "floating"),
    [
        (Precision(compute=torch.bfloat16), torch.bfloat16),
        (Precision(torch.bfloat16, cast_inputs=False), torch.float32),
    ],
)
def test_inputs_are_cast_if_requested(precision: Precision, floating: torch.dtype) -> None:
    with MeshConfig().build() as ctx:
        model = _Dtypes()
        parallelize_replicate(model, ctx.mesh_for("flat"), precision=precision)
        found = model(torch.ones(1), mask=torch.ones(1), index=torch.ones(1, dtype=torch.int64))
    assert found == [floating, floating, torch.int64]


def _partial_on_both() -> tuple[list[Any], bool]:
    with MeshConfig(data_parallel_replicate=2, tensor_parallel=2).build() as ctx:
        model, dense = _Mlp(), ctx.mesh_for("dense")
        _tensor_parallel(model, dense["tp"])
        parallelize_replicate(model, dense["dp_replicate"])
        model(_inputs()).sum().backward()
        sums = {p.grad.placements for p in model.scale.parameters() if isinstance(p.grad, DTensor)}
        return list(sums), isinstance(model.scale.weight, nn.Parameter)


def test_tensor_parallel_parameters_are_sharded_over_both_axes() -> None:
    for placements, is_parameter in run_ranks(_partial_on_both, world_size=4):
        assert placements == [(Partial(), Partial())]
        assert is_parameter


def test_refuses_to_replicate_sharded_modules() -> None:
    with MeshConfig().build() as ctx:
        model = nn.Sequential(nn.Linear(2, 2))
        parallelize_fsdp(model[0], ctx.mesh_for("flat"), precision=Precision())
        with pytest.raises(UserError, match=r"submodule '0' is already sharded.*Replicate it with parallelize_hsdp"):
            parallelize_replicate(model, ctx.mesh_for("flat"), precision=Precision())


def test_refuses_an_unknown_axis() -> None:
    with MeshConfig().build() as ctx, pytest.raises(UserError, match=r"shard_axis = 'fsdp'; expected one of .* world"):
        parallelize_hsdp(_Mlp(), ctx.mesh_for("flat"), shard_axis="fsdp")


def test_refuses_several_axes_where_one_is_expected() -> None:
    with MeshConfig().build() as ctx:
        for parallelize in (parallelize_fsdp, parallelize_replicate):
            with pytest.raises(UserError, match=r"got a mesh with the axes \(pp, dp_replicate.*\); expected exactly"):
                parallelize(_Mlp(), ctx.mesh_for("dense"))


class _Odd(nn.Module):
    """Parameters that FSDP2 cannot shard as one group: 0-dim, empty, of two dtypes, frozen in a third, and tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5, dtype=torch.float64)
        self.layer.temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.small = nn.Linear(5, 3)
        self.tied = nn.Linear(5, 3)
        self.tied.weight = self.small.weight
        self.frozen = nn.Linear(3, 3, dtype=torch.bfloat16).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.layer(x) * self.scale).float()
        y = self.small(y).tanh() + self.tied(y)
        return y.double() + self.frozen(y.bfloat16()).double() + self.empty.sum()


class _Heated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd, self.temperature = _Odd(), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(x) * self.temperature


def _odd_gradients(degrees: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, tuple[Any, ...]]]:
    with MeshConfig(**degrees).build() as ctx:
        model, dense = _Heated(), ctx.mesh_for("dense")
        parallelize_tensor(model, dense["tp"], {"odd.layer": ColumnParallel(output=Replicate(), head_dim=1)})
        for module in (model.odd, model):
            parallelize_hsdp(module, dense["dp_replicate", "dp_cp_shard"], shard_axis="dp_cp_shard")
        assert model.odd.tied.weight is model.odd.small.weight
        sync = GradientSync(model)
        batch = ctx.mesh_for("batch")["dp", "cp"]
        model(_inputs().chunk(batch.size())[batch.get_local_rank(0)]).square().sum().backward()
        sync.finish()
        sync.close()
        placements = {n: tuple(p.placements) for n, p in model.named_parameters() if isinstance(p, DTensor)}
        return full_tree({n: p.grad for n, p in model.named_parameters() if p.grad is not None}), placements


@pytest.mark.parametrize(
    "degrees",
    [
        {"data_parallel_shard": 2},
        {"data_parallel_replicate": 2, "data_parallel_shard": 2},
        {"data_parallel_shard": 2, "tensor_parallel": 5},
    ],
    ids=str,
)
@pytest.mark.sample("{'data_parallel_shard': 2}", "{'data_parallel_replicate': 2, 'data_parallel_shard': 2}")
def test_parameters_that_fsdp_cannot_shard_are_replicated(degrees: dict[str, int]) -> None:
    expected, _ = _odd_gradients({})
    assert expected.keys() >= {"temperature", "odd.scale", "odd.empty", "odd.small.weight", "odd.tied.bias"}
    for gradients, placements in run_ranks(_odd_gradients, degrees, world_size=prod(degrees.values())):
        # A part of the model is float32, and sums over 16 samples have another order.
        assert_trees_close(gradients, expected, rtol=16 * torch.finfo(torch.float32).eps)
        for name in ("temperature", "odd.scale", "odd.empty", "odd.small.weight"):
            assert all(placement.is_replicate() for placement in placements[name]), name
        for name in ("odd.layer.weight", "odd.frozen.weight"):
            assert any(not placement.is_replicate() for placement in placements[name]), name


def _gradient_penalty(kind: str) -> dict[str, torch.Tensor] | str:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        torch.manual_seed(0)
        model, mesh = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double(), ctx.mesh_for("dense")
        if kind == "replicate":
            parallelize_replicate(model, mesh["dp_cp_shard"])
        else:
            parallelize_fsdp(model, mesh["dp_cp_shard"])
        sync = GradientSync(model)
        x = _inputs().chunk(ctx.world_size)[ctx.rank].requires_grad_()
        try:
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            slope.square().sum().backward()
        except UserError as error:
            return str(error)
        sync.finish()
        sync.close()
        return full_tree({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def test_gradient_penalties_are_exact_over_replicas_and_refused_over_shards() -> None:
    expected = _gradient_penalty("one")
    assert isinstance(expected, dict)
    for gradients in run_ranks(_gradient_penalty, "replicate"):
        assert_trees_close(gradients, expected, rtol=1e-12)
    for message in run_ranks(_gradient_penalty, "fsdp"):
        assert message.startswith(
            "got a backward pass with create_graph=True through a module sharded by parallelize_hsdp"
        )


class _Lent(nn.Module):
    """Uses a scalar and a weight of a submodule outside of that submodule's forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 5).double()
        self.inner = _Inner()
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.again(self.inner(self.layer(x)).float()).sum() * self.inner.scale
        )  # the scalar is used without calling its module


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0, 5, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.frozen = nn.Parameter(torch.randn(5).half(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale @ self.weight.double() + self.frozen + self.nothing.sum()


def _lent_gradients(degrees: dict[str, int]) -> dict[str, Any]:
    with MeshConfig.model_validate(degrees).build() as ctx:
        model = _Lent()
        if ctx.world_size > 1:
            parallelize_hsdp(model, ctx.mesh_for("dense")[HSDP_AXES], shard_axis="dp_cp_shard")
        sync = GradientSync(model, num_microbatches=1)
        rows = torch.arange(20, dtype=torch.float64).view(4, 5).cos()
        model(rows.chunk(ctx.world_size)[ctx.rank]).backward()
        sync.finish()
        placements = {
            name: tuple(p.placements) if isinstance(p, DTensor) else None for name, p in model.named_parameters()
        }
        return {"gradients": full_gradients(model), "placements": placements}


@pytest.mark.parametrize(
    "degrees", [{"data_parallel_replicate": 2}, {"data_parallel_replicate": 2, "data_parallel_shard": 2}]
)
def test_replicated_parameters_can_be_used_outside_their_module(degrees: dict[str, int]) -> None:
    [alone] = run_ranks(_lent_gradients, {}, world_size=1)
    found = run_ranks(_lent_gradients, degrees, world_size=prod(degrees.values()))
    for rank in found:
        # Sums over 4 rows of the float32 part have another order.
        assert_trees_close(rank["gradients"], alone["gradients"], rtol=4 * torch.finfo(torch.float32).eps)
        for name, placements in rank["placements"].items():
            is_sharded = Shard(0) in placements
            assert is_sharded == name.startswith(("layer", "inner.frozen")), (name, placements)


class _Writes(nn.Linear):
    """A layer whose forward casts it, or clamps, halves, replaces or freezes its weight, from the given call on."""

    def __init__(self, how: str, first_call: int) -> None:
        super().__init__(4, 4)
        self._how, self._left = how, first_call

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        self._left -= 1
        if self._left > 0:
            return super().forward(input)
        if self._how == "freezes":
            self.weight.requires_grad_(False)
        if self._how == "replaces":
            self.weight.data = self.weight.data.clone()
        if self._how == "casts":
            self.to(torch.float64)
        with torch.no_grad():
            self.weight.clamp_(-1, 1) if self._how == "clips" else self.weight.clamp(-1, 1)
            if self._how == "halves":
                self.weight.data.mul_(0.5)  # does not change the version counter of the weight
        return super().forward(input.to(self.weight.dtype))


def _forward_that(how: str, first_call: int) -> tuple[int, str]:
    """Return the number of calls before the error, and the error message."""
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model = nn.Sequential(nn.Linear(4, 4), _Writes(how, first_call))
        parallelize_fsdp(model, ctx.mesh_for("dense")["dp_cp_shard"])
        call = 0
        try:
            for call in range(6):
                model(torch.ones(2, 4)).sum().backward()
                refuse_later_writes(model, compare_next=call == 1)
        except UserError as error:
            return call, str(error)
        return 6, ""


@pytest.mark.parametrize(
    ("how", "first_call", "found_in_call", "names"),
    [
        ("reads", 1, 6, ""),
        ("clips", 1, 0, "1.weight"),
        ("halves", 1, 0, "1.weight"),
        ("casts", 1, 0, "1.weight, 1.bias"),
        ("freezes", 1, 0, "1.weight"),
        ("clips", 5, 4, "1.weight"),
        ("replaces", 5, 4, "1.weight"),
        ("halves", 2, 2, "1.weight"),
        ("freezes", 2, 2, "1.weight"),
        ("halves", 5, 6, ""),  # not found, because only the third call is compared
    ],
)
def test_a_forward_that_changes_sharded_parameters_is_refused(
    how: str, first_call: int, found_in_call: int, names: str
) -> None:
    for call, message in run_ranks(_forward_that, how, first_call):
        assert message.startswith(f"forward replaces or writes to {names}, for example by" if names else "")
        assert (call, bool(message)) == (found_in_call, bool(names))


def _later_writes_to_rows() -> float:
    """Return the largest norm of a row after a forward that clips rows while its writes are compared."""
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model = nn.Sequential(nn.EmbeddingBag(3, 4, max_norm=1.0), nn.Linear(4, 4))
        synchronize_embeddings(model, ctx.group_for("batch", "dp", "cp"))
        parallelize_fsdp(model, ctx.mesh_for("dense")["dp_cp_shard"])
        rows = model[0].weight
        assert isinstance(rows, DTensor)
        for compare_next in (True, False):
            model(torch.arange(3).repeat(2, 1)).sum().backward()
            refuse_later_writes(model, compare_next=compare_next)
            if compare_next:
                rows.to_local().data.fill_(8.0)
        return rows.to_local().norm(dim=1).max().item()


def test_replicated_embeddings_may_clip_rows_in_any_forward() -> None:
    for norm in run_ranks(_later_writes_to_rows):
        assert norm <= 1 + 4 * torch.finfo(torch.float32).eps


class _View(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"flat": self.inner(x).view(-1)}


def _gradient_of_a_view(degrees: dict[str, int]) -> tuple[dict[str, torch.Tensor], list[str]]:
    with MeshConfig(**degrees).build() as ctx, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _View()
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"], shard_axis="dp_cp_shard")
        flat = model(torch.arange(8.0, dtype=torch.float64).view(2, 4) / ctx.world_size)["flat"]
        flat += 1  # an in-place operation, which would lose FSDP's hook on a view
        flat.square().sum().backward()
        return full_gradients(model), [str(each.message) for each in caught]


class _ReturnsParameters(nn.Module):
    """Returns a parameter, a view of it without a gradient, and an expanded view of a parameter in channels-last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.codes = nn.Parameter(torch.randn(4, 3))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.conv(x), self.codes, self.codes.detach()[1:], self.conv.weight.expand(2, 3, 2, 3, 3)]


def _returned_parameters(num_ranks: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    with MeshConfig(data_parallel_shard=num_ranks).build() as ctx:
        model = _ReturnsParameters()
        parallelize_fsdp(model, ctx.mesh_for("dense")["dp_cp_shard"])
        outputs = model(torch.ones(1, 2, 3, 3))
        torch.stack([output.square().sum() for output in outputs]).sum().div(num_ranks).backward()
        return [output.detach() for output in outputs], full_gradients(model)


def test_returned_parameters_stay_valid_after_resharding_in_any_memory_format() -> None:
    expected = run_ranks(_returned_parameters, 1, world_size=1)[0]
    for found in run_ranks(_returned_parameters, 2, world_size=2):
        assert_trees_close(found, expected, rtol=1e-5)


def test_outputs_that_are_views_may_be_changed_in_place_and_do_not_warn() -> None:
    [(alone, _)] = run_ranks(_gradient_of_a_view, {}, world_size=1)
    model = _View()
    for gradients, messages in run_ranks(_gradient_of_a_view, {"data_parallel_shard": 2}):
        model.zero_grad()
        ((model(torch.arange(8.0, dtype=torch.float64).view(2, 4) / 2)["flat"] + 1).square().sum() * 2).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=0)
            assert alone[name].shape == parameter.shape
        assert not [message for message in messages if "view" in message]


def _values_that_differ() -> list[str]:
    messages = []
    with MeshConfig(data_parallel_shard=2, data_parallel_replicate=2).build() as ctx:
        dense = ctx.mesh_for("dense")
        both = dense["dp_replicate", "dp_cp_shard"]
        for seed, parallelize in (
            (ctx.rank, lambda model: parallelize_replicate(model, dense["dp_cp_shard"])),
            (ctx.rank % 2, lambda model: parallelize_hsdp(model, both, shard_axis="dp_cp_shard")),
            (ctx.rank // 2, lambda model: parallelize_hsdp(model, both, shard_axis="dp_cp_shard")),
            (ctx.rank == 0, lambda model: parallelize_hsdp(model, both, shard_axis="dp_cp_shard")),
        ):
            torch.manual_seed(seed)
            with pytest.raises(UserError) as caught:
                parallelize(nn.Linear(2, 2))
            messages.append(str(caught.value))
        with torch.device("meta"):
            parallelize_replicate(nn.Linear(2, 2), dense["dp_cp_shard"])  # nothing to compare
        torch.manual_seed(0)
        for other in (
            _with_weight(torch.arange(4.0).roll(ctx.rank % 2)),  # another order of the same values
            _with_weight(torch.arange(4.0).view((2, 2) if ctx.rank % 2 else (4,))),
            nn.Linear(2, 2, bias=ctx.rank % 2 == 0),  # another number of parameters
        ):
            with pytest.raises(UserError) as caught:
                parallelize_replicate(other, dense["dp_cp_shard"])
            messages.append(str(caught.value))
        with torch.device("meta" if ctx.rank else "cpu"), pytest.raises(UserError) as caught:
            parallelize_hsdp(nn.Linear(2, 2), both, shard_axis="dp_cp_shard")
        messages.insert(4, str(caught.value))
        return messages


def _with_weight(values: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(values)
    return module


def test_values_that_differ_between_ranks_are_an_error_on_all_of_them() -> None:
    for messages in run_ranks(_values_that_differ, world_size=4):
        for message, num_ranks in zip(messages[:5], (2, 4, 4, 4, 4), strict=True):
            text = f"the values of weight, bias differ between the {num_ranks} ranks that would share them; "
            assert message.startswith(text)
            assert "Call torch.manual_seed with the same seed on all ranks before the model is built" in message
        for message, name in zip(messages[5:], ("weight", "weight", "bias"), strict=True):
            assert message.startswith(f"the values of {name} differ between the 2 ranks that would share them; ")


def _sparse_rows() -> str:
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        model = nn.Embedding(10, 4, sparse=True, _weight=torch.ones(10, 4))
        parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])
        with pytest.raises(UserError) as caught:
            model(torch.tensor([1, 2])).sum().backward()
        return str(caught.value)


def test_a_sparse_gradient_of_a_replicated_embedding_is_an_error() -> None:
    expected = "the gradient of a parameter, of shape (10, 4), is sparse; expected a dense gradient"
    assert all(each.startswith(expected) for each in run_ranks(_sparse_rows, world_size=2))


def test_writes_that_sharding_would_lose_are_found_before_it() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="weight"), refuse_lost_writes(model):
        model.weight.data.clamp_(max=0.0)
    with refuse_lost_writes(model):
        model(torch.ones(1, 2))
