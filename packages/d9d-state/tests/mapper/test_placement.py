import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from d9d_dist import MeshConfig, Region
from d9d_dist.testing import run_ranks
from d9d_state import TensorInfo, parallel, rename, sequential
from d9d_state.mapper.fill import Destination
from d9d_state.mapper.placement import distribute, gather_full


class _Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensors = {"a": TensorInfo.of(tensor)}
        self._tensor = tensor

    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        target.copy_(region.of(self._tensor))


def _on_two_ranks() -> None:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        mesh = ctx.mesh_for("flat")
        whole = torch.arange(15.0, device=ctx.device).view(5, 3) / 7
        _round_trip(mesh, whole)
        _refusals(mesh, whole)


def _round_trip(mesh: DeviceMesh, whole: Tensor) -> None:
    mapper = sequential(rename("a", "b"), distribute("b", mesh, [Shard(0)]))
    with CommDebugMode() as communication:
        output = mapper.apply({"a": whole})["b"]
    assert communication.get_total_counts() == 0
    assert isinstance(output, DTensor)
    assert output.placements == (Shard(0),)
    assert output.to_local().shape == ((3, 3) if mesh.get_local_rank() == 0 else (2, 3))
    back = mapper.inverse().apply({"b": output})["a"]
    assert not isinstance(back, DTensor)
    assert torch.equal(back, whole)
    assert torch.equal(gather_full("a", mesh, [Shard(0)]).apply({"a": whole})["a"], whole)
    assert mapper.infer({"a": TensorInfo((5, 3), torch.float32)}) == {"b": TensorInfo((5, 3), torch.float32)}
    assert mapper.apply({"a": whole.to("meta")})["b"].shape == (5, 3)
    assert "distribute(S(0))" in mapper.explain() or "distribute(Shard(dim=0))" in mapper.explain()
    assert mapper.inverse().inverse().explain() == mapper.explain()
    # A region of a DTensor is the same region of the full tensor.
    part = torch.empty(2, 3, device=whole.device)
    for each in (distribute("a", mesh, [Shard(0)]), gather_full("a", mesh, [Shard(0)])):
        each.fill({"a": Destination(Region((3, 0), (2, 3)), part.zero_())}, _Held(whole))
        assert torch.equal(part, whole[3:])


def _refusals(mesh: DeviceMesh, whole: Tensor) -> None:
    sharded = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)
    with pytest.raises(ValueError, match="got a DTensor; expected the full tensor as a plain tensor on every rank"):
        distribute("a", mesh, [Shard(0)]).apply({"a": sharded})
    with pytest.raises(ValueError, match=r"got a DTensor with .*1.* on .*; expected .*0.* on "):
        gather_full("a", mesh, [Shard(0)]).apply({"a": sharded})
    for placements in ([], [Shard(0), Replicate()], [Partial()]):
        with pytest.raises(
            ValueError, match=r"a: got the placements .* for a mesh of 1 axes; expected one Shard or Repl"
        ):
            parallel(distribute("a", mesh, placements))


def test_distribute_and_gather_round_trip() -> None:
    run_ranks(_on_two_ranks, world_size=2)
