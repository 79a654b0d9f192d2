from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from d9d_dist import (
    ColumnParallel,
    MeshConfig,
    RowParallel,
    SequenceParallel,
    TensorStyle,
    UserError,
    parallelize_tensor,
    sync_gradients,
)
from d9d_dist.tensor_parallel.follows_weight import FollowsWeight
from d9d_dist.testing import assert_trees_close, full_gradients, run_ranks


class Gain(nn.Module):
    """Scales the inputs and outputs of its parent layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.inputs = nn.Parameter(torch.linspace(1, 2, layer.in_features, dtype=torch.float64))
        self.outputs = nn.Parameter(torch.linspace(2, 3, layer.out_features, dtype=torch.float64))
        self.learned: tuple[Placement, int] | None = None

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        return {"inputs": Shard(0)} if weight == Shard(1) else {"outputs": Shard(0)}

    def prepare_tensor(self, weight: Placement, mesh: DeviceMesh) -> None:
        self.learned = weight, mesh.size()

    def forward(self, layer: "Scaled", x: Tensor) -> Tensor:
        return nn.functional.linear(x * self.inputs, layer.weight) * self.outputs


class Scaled(nn.Linear):
    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False, dtype=torch.float64)
        self.gain = Gain(self)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's own name)
        return self.gain(self, input)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(4, 6), nn.Tanh(), Scaled(6, 4))


X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
PLAN: dict[str, TensorStyle] = {"0": ColumnParallel(), "2": RowParallel()}


def train(degree: int) -> dict[str, Any]:
    with MeshConfig(tensor_parallel=degree).build() as ctx:
        split = model()
        parallelize_tensor(split, ctx.mesh_for("dense")["tp"], PLAN)
        if degree > 1:
            learned = [layer.gain.learned for layer in split if isinstance(layer, Scaled)]
            assert learned == [(Shard(0), 2), (Shard(1), 2)]
            placements = {n: p.placements[0] for n, p in split.named_parameters() if isinstance(p, DTensor)}
            assert placements == {
                "0.weight": Shard(0), "0.gain.inputs": Replicate(), "0.gain.outputs": Shard(0),
                "2.weight": Shard(1), "2.gain.inputs": Shard(0), "2.gain.outputs": Replicate(),
            }  # fmt: skip
        y = split(X)
        y.square().sum().backward()
        sync_gradients(split)
        return {"outputs": y.detach(), **full_gradients(split)}


def test_followers_of_a_weight_are_sharded_with_it() -> None:
    (expected,) = run_ranks(train, 1, world_size=1)
    for result in run_ranks(train, 2, world_size=2):
        assert_trees_close(result, expected, rtol=1e-12)


class Third(Gain):
    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        return {"outputs": Shard(0)}


def refuse() -> None:
    with MeshConfig(tensor_parallel=2).build() as ctx:
        layer = Scaled(4, 3)
        layer.gain = Third(layer)
        with pytest.raises(UserError, match=r"does not divide dim 0 of 0\.gain\.outputs, which is 3"):
            parallelize_tensor(nn.Sequential(layer), ctx.mesh_for("dense")["tp"], {"0": RowParallel()})
        assert layer.gain.learned is None
        parallelize_tensor(nn.Sequential(layer), ctx.mesh_for("dense")["tp"], {"0": SequenceParallel()})
        assert layer.gain.learned is None, "nothing is split, so there is nothing to follow"


def test_indivisible_followers_are_refused_and_replicated_ones_unchanged() -> None:
    run_ranks(refuse, world_size=2)


def test_a_module_with_the_methods_of_follows_weight_is_an_instance() -> None:
    assert isinstance(Gain(nn.Linear(2, 2)), FollowsWeight)
    assert not isinstance(nn.Linear(2, 2), FollowsWeight)
