import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import d9d_dist.values.model_values
from d9d_dist import (
    DistributedContext,
    MeshConfig,
    UserError,
    canonical_name,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
    place_values,
)
from d9d_dist.tensor_parallel.styles import ColumnParallel, RowParallel
from d9d_dist.testing import run_ranks
from d9d_dist.values.model_values import built_values, digest_values, move_to_meta


class _Odd(nn.Module):
    """Tensors of many dtypes and shapes; neither 2 nor 4 divides any size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 7)
        self.frozen = nn.Parameter(torch.randn(5, 3, 2), requires_grad=False)
        self.tied = nn.Linear(7, 12, bias=False)
        self.tied.weight = self.up.weight
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("scale", torch.tensor(0.3))
        self.register_buffer("positions", torch.randperm(11)[None], persistent=False)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("codes", torch.randn(6).to(torch.float8_e4m3fn))
        self.register_buffer("transposed", torch.randn(4, 3).bfloat16().t())
        self.register_buffer("nothing", torch.empty(0, 3))


def _build() -> _Odd:
    torch.manual_seed(3)
    return _Odd()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_tied_tensors_are_listed_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    values = built_values(model)
    assert list(values) == ["0.weight", "0.bias", "1.bias"]
    assert not any(value.requires_grad for value in values.values())


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "weight, bias"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight, 0.bias"),
    ],
)
def test_tensors_without_values_are_refused(build: Callable[[], nn.Module], names: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"built without values for {names}; expected real tensors.")):
        built_values(build())


def test_digests_depend_on_every_bit() -> None:
    first, second = digest_values(built_values(_build())), digest_values(built_values(_build()))
    assert first == second
    changed = _build()
    positions = changed.get_buffer("positions")
    with torch.no_grad():
        changed.frozen[4, 2, 1] *= 1 + 2**-20
        positions[0, 10] += 1
    third = digest_values(built_values(changed))
    assert {name for name in first if first[name] != third[name]} == {"frozen", "positions"}


def test_moving_a_model_to_meta_keeps_everything_but_the_values() -> None:
    model = _build()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    model.up.eval()
    model.up(torch.ones(7)).sum().backward()
    built = {name: (tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in built_values(model).items()}
    move_to_meta(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert all(tensor.is_meta for _, tensor in tensors)
    assert {name: (tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in tensors} == built
    assert model.tied.weight is model.up.weight
    assert model.up.weight.grad is None
    assert not model.frozen.requires_grad
    assert not model.up.training
    assert len(model._forward_pre_hooks) == 1


def test_flat_weights_of_recurrent_layers_are_updated() -> None:
    layer = nn.LSTM(3, 4)
    move_to_meta(layer)
    assert all(first is second for first, second in zip(layer._flat_weights, layer.parameters(), strict=True))


class _Keeping(nn.Module):
    """Keeps something of its layer in a plain attribute."""

    def __init__(self, keep: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        vars(self)["extra"] = keep(self.layer)


def _capture(layer: nn.Linear) -> Any:
    weight = layer.weight
    return lambda x: x @ weight


@pytest.mark.parametrize(
    "keep",
    [
        lambda layer: {"weights": [layer.weight]},
        lambda layer: layer.weight.detach()[:1],
        lambda layer: functools.partial(torch.add, layer.weight),
        _capture,
    ],
    ids=["list", "view", "partial", "closure"],
)
def test_parameters_outside_of_the_registries_are_refused(keep: Callable[[nn.Linear], Any]) -> None:
    with pytest.raises(UserError, match=r"(?s)  1\.extra holds 1\.layer\.weight\n.*Use nn\.ParameterList"):
        move_to_meta(nn.Sequential(nn.Identity(), _Keeping(keep)))
    move_to_meta(_Keeping(lambda layer: [layer, lambda: layer, layer.weight * 2, None]))


def test_sparse_buffers_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(2).to_sparse())
    with pytest.raises(UserError, match="edges are sparse tensors; expected dense tensors"):
        built_values(model)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(register: str) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    getattr(model[1].weight, register)(lambda gradient: None)
    with pytest.raises(UserError, match=r"1\.weight have hooks \(register_hook\); expected none"):
        move_to_meta(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_modules_of_torch_jit_are_refused() -> None:
    model = nn.Sequential(nn.Identity(), torch.jit.trace(nn.Linear(2, 2), torch.ones(2)))
    with pytest.raises(UserError, match=r"1 is a module of torch\.jit; expected Python modules"):
        move_to_meta(model)


def test_attributes_of_parameters_are_kept() -> None:
    model = nn.Linear(2, 2)
    vars(model.weight)["no_weight_decay"] = True
    move_to_meta(model)
    assert vars(model.weight) == {"no_weight_decay": True}
    assert not vars(model.bias)


def test_overlapping_views_are_refused() -> None:
    model = nn.Module()
    whole = nn.Parameter(torch.zeros(6))
    model.register_parameter("whole", whole)
    model.register_buffer("part", whole.detach()[2:4])
    with pytest.raises(UserError, match=r"(part and whole|whole and part) are views"):
        move_to_meta(model)


def test_disjoint_views_of_one_storage_are_kept() -> None:
    flat = torch.randn(6)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:2]), nn.Parameter(flat[2:])
    move_to_meta(model)
    assert model.second.shape == (4,)


def _shard(model: nn.Module, ctx: DistributedContext) -> None:
    dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
    parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")


def _replicate(model: nn.Module, ctx: DistributedContext) -> None:
    parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])


def _split(model: nn.Module, ctx: DistributedContext) -> None:
    plan = {"up": ColumnParallel(), "tied": ColumnParallel(), "down": RowParallel()}
    parallelize_tensor(model, ctx.mesh_for("dense")["tp"], plan)
    _shard(model, ctx)


def _placed_values(parallelize: Callable[[nn.Module, DistributedContext], None], degrees: dict[str, int]) -> list[str]:
    """Return the tensors whose placed values differ from the built ones."""
    small_blocks = mock.patch.object(
        d9d_dist.values.model_values, "_BLOCK_BYTES", 16
    )  # several blocks for most tensors
    with small_blocks, MeshConfig(**degrees).build() as ctx:
        model = _build()
        move_to_meta(model)
        layout = dict(built_values_on_meta(model))
        parallelize(model, ctx)
        build = (lambda: built_values(_build())) if ctx.is_main_process else None
        place_values([model], layout, build, device=ctx.device)
        tensors = {canonical_name(name): tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        wrong = []
        for name, value in built_values(_build()).items():
            found = tensors[name].detach()
            full = found.full_tensor() if isinstance(found, DTensor) else found
            if full.shape != value.shape or not torch.equal(_bits(full), _bits(value)):
                wrong.append(name)
        return wrong


def built_values_on_meta(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize(
    ("parallelize", "degrees"),
    [
        (_replicate, {"data_parallel_replicate": 2}),
        (_shard, {"data_parallel_shard": 2}),
        (_shard, {"data_parallel_shard": 4}),
        (_shard, {"data_parallel_replicate": 2, "data_parallel_shard": 2}),
        (_split, {"tensor_parallel": 2, "data_parallel_shard": 2}),
    ],
)
def test_every_rank_gets_its_shard(
    parallelize: Callable[[nn.Module, DistributedContext], None], degrees: dict[str, int]
) -> None:
    world_size = torch.tensor(list(degrees.values())).prod().item()
    for wrong in run_ranks(_placed_values, parallelize, degrees, world_size=int(world_size)):
        assert wrong == []


def _sent_bytes(parallelize: Callable[[nn.Module, DistributedContext], None], degrees: dict[str, int]) -> list[int]:
    """Return the bytes that this rank gets by scatters and by broadcasts for two layers of 8 x 8 and 8 elements."""
    with MeshConfig(**degrees).build() as ctx:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        values = built_values(model)
        move_to_meta(model)
        layout = dict(built_values_on_meta(model))
        parallelize(model, ctx)
        with (
            mock.patch.object(torch.distributed, "scatter", wraps=torch.distributed.scatter) as scatter,
            mock.patch.object(torch.distributed, "broadcast", wraps=torch.distributed.broadcast) as broadcast,
        ):
            place_values([model], layout, (lambda: values) if ctx.is_main_process else None, device=ctx.device)
        return [sum(call.args[0].nbytes for call in sent.call_args_list) for sent in (scatter, broadcast)]


@pytest.mark.parametrize(
    ("parallelize", "degrees", "expected"),
    [
        (_shard, {"data_parallel_shard": 2}, [288, 0]),
        (_replicate, {"data_parallel_replicate": 2}, [0, 576]),
    ],
)
def test_rows_sharded_over_all_ranks_are_sent_only_to_the_ranks_that_own_them(
    parallelize: Callable[[nn.Module, DistributedContext], None], degrees: dict[str, int], expected: list[int]
) -> None:
    assert run_ranks(_sent_bytes, parallelize, degrees, world_size=2) == [expected] * 2
