"""Weights without files: equal to those of an export, gathered or as shards."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from d9d_dist import DistributedContext, MeshConfig, Region, UserError, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_state import (
    StateMapper,
    cast,
    concat,
    drop,
    gathered_weights,
    identity,
    pad,
    parallel,
    rename,
    save_model_state,
    sequential,
    stack,
    transform,
    transpose,
    weight_shards,
)

Shards = list[tuple[str, Tensor, Region]]


class _Model(nn.Module):
    """Fused projections, stacked experts, a transposed weight, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.qkv, self.experts, self.down, self.embedding = (
            nn.Parameter(torch.randn(shape, generator=draws)) for shape in ((10, 4), (4, 6, 2), (8, 6), (7, 4))
        )
        self.register_buffer("scale", torch.randn(3, generator=draws))
        self.head = self.embedding


def _mapper() -> StateMapper:
    return parallel(
        concat(["q", "k", "v"], "qkv", dim=0, sizes=[4, 3, 3]),
        sequential(
            parallel(*(transpose(f"expert.{index}") for index in range(4))),
            stack([f"expert.{index}" for index in range(4)], "experts"),
        ),
        sequential(rename("w", "down"), transpose("down")),
        identity("embedding"),
        sequential(rename("s", "scale"), cast("scale", dtype=torch.float32, back=torch.float64)),
    )


def _built(ctx: DistributedContext, *, by: str) -> _Model:
    model = _Model()
    dense = ctx.mesh_for("dense")
    if by == "hsdp":
        parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")
    else:
        mesh = dense["dp_cp_shard", "tp"]
        model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh, [Shard(0), Shard(1)]))
        model.down = nn.Parameter(distribute_tensor(model.down.detach(), mesh, [Shard(1), Shard(0)]))
    return model


def _streamed(folder: str, by: str, degrees: dict[str, int]) -> tuple[dict[str, Tensor], Shards]:
    with MeshConfig(**degrees).build() as ctx:
        model = _built(ctx, by=by)
        inverse = parallel(_mapper().inverse(), drop("head"))
        save_model_state(model, folder, inverse, ctx)
        gathered = {name: tensor.clone() for name, tensor in gathered_weights(model, inverse, ctx)}
        shards = list(weight_shards(model, _mapper()))
        memory = {
            (local.to_local() if isinstance(local, DTensor) else local).untyped_storage().data_ptr()
            for local in model.state_dict(keep_vars=True).values()
        }
        for name, shard, _ in shards:
            assert (shard.untyped_storage().data_ptr() in memory) == (name != "s"), f"{name} is copied"
        return gathered, [(name, shard.clone(), region) for name, shard, region in shards]


CASES = [
    ("hsdp", {"data_parallel_shard": 2}),
    ("hsdp", {"data_parallel_replicate": 2}),
    ("tensor", {"data_parallel_shard": 2, "tensor_parallel": 2}),
]


@pytest.mark.parametrize(("by", "degrees"), CASES)
def test_streamed_weights_equal_the_export(tmp_path: Path, by: str, degrees: dict[str, int]) -> None:
    world_size = 4 if by == "tensor" else 2
    ranks = run_ranks(_streamed, str(tmp_path / "export"), by, degrees, world_size=world_size)
    expected = load_file(tmp_path / "export" / "model.safetensors")
    assembled = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for gathered, shards in ranks:
        _assert_equal(gathered, expected)
        for name, shard, region in shards:
            part = region.of(assembled[name])
            assert shard.dtype == part.dtype
            assert shard.shape == part.shape
            assert torch.equal(shard, region.of(expected[name])), (name, region)
            part.copy_(shard)
    _assert_equal(assembled, expected)


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_computed_weights_have_no_shards() -> None:
    def double(tensor: Tensor) -> Sequence[Tensor]:
        return (2 * tensor,)

    def half(tensor: Tensor) -> Sequence[Tensor]:
        return (tensor / 2,)

    mapper = transform(["w"], ["weight"], double, inverse=half)
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(UserError, match="w is computed from weight by the state mapper; expected an operation that"):
        list(weight_shards(model, mapper))
    (found,) = gathered_weights(model, mapper.inverse())
    assert found[0] == "w"
    assert torch.equal(found[1], model.weight / 2)


def test_constants_of_the_mapper_are_not_written_to_the_model() -> None:
    model = nn.Embedding(6, 2)
    before = model.weight.detach().clone()
    mapper = sequential(rename("w", "weight"), pad("weight", size=4, padded_size=6))
    (found,) = weight_shards(model, mapper)
    assert found[2] == Region((0, 0), (4, 2))
    assert torch.equal(found[1], before[:4])
    assert torch.equal(model.weight, before)


def test_a_mapper_that_does_not_match_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="the mapper does not match the model to export"):
        list(gathered_weights(nn.Linear(2, 2), identity("weight")))


SIZE = 4096
"""Rows and columns of a layer: 64 MiB."""


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{key}:")[1].split()[0]) << 10


def _growth() -> int:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(3)))
        for layer in model:
            parallelize_hsdp(layer, ctx.mesh_for("dense")["dp_cp_shard",], shard_axis="dp_cp_shard")
        for _ in range(2):  # the first one warms up the allocator and the process group
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = _status("VmRSS")
            for _name, tensor in gathered_weights(model, None, ctx):
                del tensor
        return _status("VmHWM") - before


@pytest.mark.full
def test_one_group_is_in_memory_at_a_time() -> None:
    for growth in run_ranks(_growth, world_size=2):
        assert growth <= (SIZE * SIZE * 4) + 32 * 2**20, f"{growth / 2**20:.0f} MiB"
