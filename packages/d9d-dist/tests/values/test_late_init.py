from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from d9d_dist import MeshConfig, UserError, canonical_name, materialize, parallelize_hsdp, parallelize_replicate
from d9d_dist.testing import Device, full_tree, run_ranks

CPU = torch.device("cpu")


class _Scale(nn.Module):
    """Has its own parameter, a persistent and a non-persistent buffer, and draws from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(9, 3))
        self.truncated = nn.Parameter(torch.empty(40, 30))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("table", torch.empty(4), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale, mean=1.0, std=0.1)
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-1.0, b=1.0)
        self.get_buffer("count").fill_(3)
        self.get_buffer("table").copy_(torch.arange(4.0))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 6))
        self.own = _Scale()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(ids)))


def _values(layout: str, seed: int) -> dict[str, torch.Tensor]:
    degrees = {"shard": {"data_parallel_shard": 4}, "hybrid": {"data_parallel_replicate": 2, "data_parallel_shard": 2}}
    with MeshConfig(**degrees.get(layout, {"data_parallel_shard": -1})).build() as ctx:
        with torch.device("meta"):
            model = _Tied()
        if layout == "replicate":
            parallelize_replicate(model, ctx.mesh_for("flat"))
        else:
            dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
            parallelize_hsdp(model.middle[0], dense, shard_axis="dp_cp_shard")
            parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")
        materialize(model, device=ctx.device, seed=seed)
        assert model.head.weight is model.embedding.weight
        return full_tree({**dict(model.named_parameters()), **dict(model.named_buffers())})


@pytest.mark.world_size(4)
@pytest.mark.parametrize("layout", ["shard", "hybrid", "replicate"])
def test_values_do_not_depend_on_the_layout(layout: str, device: Device) -> None:
    expected = _values("one", seed=5)
    for values in run_ranks(_values, layout, 5, world_size=4, device=device):
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name


class _Fillings(nn.Module):
    """A weight for each initializer of torch.nn.init, of even and uneven sizes, and a 1-D weight."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.fillers = {
            "normal": lambda weight: nn.init.normal_(weight, mean=0.5, std=2.0),
            "uniform": lambda weight: nn.init.uniform_(weight, -3.0, 1.0),
            "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.1, a=-0.1, b=0.2),
            "truncated_often": lambda weight: nn.init.trunc_normal_(weight, std=0.1, a=0.1, b=0.2),
            "kaiming_uniform": lambda weight: nn.init.kaiming_uniform_(weight, a=5**0.5),
            "kaiming_normal": lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out"),
            "xavier_uniform": nn.init.xavier_uniform_,
            "xavier_normal": nn.init.xavier_normal_,
            "zeros": nn.init.zeros_,
            "ones": nn.init.ones_,
            "constant": lambda weight: nn.init.constant_(weight, 0.3),
            "computed": lambda weight: weight.normal_().exp_().mul_(-1.0),
        }
        for name in self.fillers:
            setattr(self, name, nn.Parameter(torch.empty(rows, columns)))
        self.bias = nn.Parameter(torch.empty(rows))

    def reset_parameters(self) -> None:
        for name, fill in self.fillers.items():
            fill(self.get_parameter(name))
        nn.init.normal_(self.bias)


def _tensor_parallel_values(
    degrees: dict[str, int], tp_dim: int, sizes: list[tuple[int, int]]
) -> list[dict[str, torch.Tensor]]:
    """Split weights over tp, and then over the data-parallel axes, as FSDP2 does with tensor-parallel parameters."""
    values = []
    with MeshConfig(**degrees).build() as ctx:
        dense = ctx.mesh_for("dense")
        for size in sizes:
            with torch.device("meta"):
                model = _Fillings(*size)
            for name, weight in list(model.named_parameters()):
                placement = Shard(tp_dim) if weight.ndim > tp_dim else Replicate()
                setattr(model, name, nn.Parameter(distribute_tensor(weight, dense["tp"], [placement])))
            if dense["dp_replicate"].size() > 1:
                fully_shard(model, mesh=dense["dp_replicate", "dp_cp_shard"])
            elif dense["dp_cp_shard"].size() > 1:
                fully_shard(model, mesh=dense["dp_cp_shard"])
            materialize(model, device=ctx.device, seed=3)
            values.append(full_tree(dict(model.named_parameters())))
    return values


def _values_of_one_process(sizes: list[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
    values = []
    for size in sizes:
        with torch.device("meta"):
            model = _Fillings(*size)
        materialize(model, device=CPU, seed=3)
        values.append({name: weight.detach() for name, weight in model.named_parameters()})
    return values


TENSOR_PARALLEL = {
    "tp": {"tensor_parallel": 4},
    "fsdp x tp": {"data_parallel_shard": 2, "tensor_parallel": 2},
    "hsdp x tp": {"data_parallel_replicate": 2, "data_parallel_shard": 2, "tensor_parallel": 2},
}


@pytest.mark.parametrize("tp_dim", [0, 1])
@pytest.mark.parametrize("layout", TENSOR_PARALLEL)
@pytest.mark.sample("tp-0")
def test_values_do_not_depend_on_splits_of_splits(layout: str, tp_dim: int) -> None:
    degrees = TENSOR_PARALLEL[layout]
    # FSDP2 does not support empty shards of tensor-parallel parameters, so the smallest sizes are for tp only.
    sizes = [(8, 12), (7, 5), *([(3, 1), (1, 3)] if layout == "tp" else [])]
    expected = _values_of_one_process(sizes)
    assert expected[0]["truncated"].unique().numel() > 50
    for models in run_ranks(_tensor_parallel_values, degrees, tp_dim, sizes, world_size=prod(degrees.values())):
        for values, reference in zip(models, expected, strict=True):
            assert values.keys() == reference.keys()
            for name, value in values.items():
                assert torch.equal(value, reference[name]), name


def _sizes_that_do_not_fit(rows: int) -> str:
    with MeshConfig(data_parallel_shard=3, tensor_parallel=2).build() as ctx:
        with torch.device("meta"):
            model = nn.Linear(2, rows, bias=False)
        mesh = ctx.mesh_for("dense")
        model.weight = nn.Parameter(distribute_tensor(model.weight, mesh["tp"], [Shard(0)]))
        fully_shard(model, mesh=mesh["dp_cp_shard"])
        try:
            materialize(model, device=ctx.device, seed=0)
        except UserError as error:
            return str(error)
        return "fits"


def test_shards_that_contradict_their_placements_are_refused() -> None:
    # tp splits 7 rows into 4 + 3, and FSDP these into 2 + 2 + 0 and 1 + 1 + 1. A strided shard of 7 is split otherwise.
    messages = run_ranks(_sizes_that_do_not_fit, 7, world_size=6)
    assert any(message != "fits" for message in messages)
    for message in messages:
        assert message == "fits" or message.startswith(
            "weight has the shape (7, 2), and this rank has a shard of shape "
        )
    assert run_ranks(_sizes_that_do_not_fit, 12, world_size=6) == ["fits"] * 6


def test_values_follow_the_seed_and_the_name() -> None:
    one, other = _values("one", seed=1), _values("one", seed=2)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(one["middle.0.weight"].flatten(), one["middle.2.weight"].flatten())
    assert one["own.count"].item() == 3


def test_values_have_the_requested_distribution() -> None:
    with torch.device("meta"):
        model = nn.Linear(400, 500)
    materialize(model, device=CPU, seed=0)
    bound = 1 / 400**0.5
    assert model.weight.abs().max().item() <= bound
    assert model.weight.mean().item() == pytest.approx(0.0, abs=bound * 0.01)
    assert model.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)


def test_the_global_generator_is_unchanged() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    materialize(model, device=CPU, seed=0)
    assert torch.equal(torch.rand(3), expected)


class _Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.empty(2))
        self.bias = nn.Parameter(torch.empty(2))
        self.register_buffer("mask", torch.empty(2), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)


def test_uninitialized_tensors_are_listed() -> None:
    with torch.device("meta"):
        model = nn.Sequential(_Forgetful())
    with pytest.raises(ValueError, match=r"not set by any reset_parameters: 0\.weight, 0\.mask\. In each module that"):
        materialize(model, device=CPU, seed=0)


def test_wrappers_do_not_change_names() -> None:
    assert canonical_name("_orig_mod.layers.0._checkpoint_wrapped_module.up.weight") == "layers.0.up.weight"


class _Holder(nn.Module):
    """Writes through a list, where a full tensor cannot replace the parameter, or changes a shape."""

    def __init__(self, *, through_list: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2))
        self.held = [self.weight]
        self.through_list = through_list

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "_Holder":
        super()._apply(fn, recurse)
        self.held = [self.weight]
        return self

    def reset_parameters(self) -> None:
        if self.through_list:
            self.held[0][1].fill_(0.3)
        else:
            self.weight = nn.Parameter(torch.ones(5, 2))


def _refusal(through_list: bool) -> str:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        with torch.device("meta"):
            model = nn.Sequential(_Holder(through_list=through_list))
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"], shard_axis="dp_cp_shard")
        try:
            materialize(model, device=ctx.device, seed=0)
        except UserError as error:
            return str(error)
        return ""


def test_writes_that_sharded_parameters_would_lose_are_refused() -> None:
    for message in run_ranks(_refusal, True):
        assert message.startswith(
            "0.reset_parameters accesses the sharded 0.weight through a reference that is not an attr"
        )
    for message in run_ranks(_refusal, False):
        assert message.startswith("reset_parameters replaced the sharded 0.weight of shape (4, 2) by a tensor of")


class _Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        self.weight.data.normal_()


def test_values_written_through_data_are_kept() -> None:
    with torch.device("meta"):
        model = _Drawn()
    materialize(model, device=CPU, seed=0)
    assert model.weight.abs().min().item() > 0
