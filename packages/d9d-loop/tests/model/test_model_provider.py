import pytest
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from d9d_dist import DistributedContext, MeshConfig, StageInfo
from d9d_dist.testing import run_ranks
from d9d_loop import FunctionProvider, ModelProvider


def _build(stage: StageInfo) -> nn.Module:
    return nn.Linear(4 + stage.index, 4)


def test_a_function_is_a_provider_with_all_defaults(ctx: DistributedContext) -> None:
    provider = FunctionProvider(_build)
    model = provider.build(StageInfo(1, 2))
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5
    provider.parallelize(model, ctx)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert provider.state_mapper(model) is None
    assert provider.export_files() == {}


def test_only_build_is_required() -> None:
    with pytest.raises(TypeError, match=r"abstract method '?build"):
        ModelProvider()  # ty: ignore[abstract-class-instantiation]  (what is tested)


def _placements(degrees: dict[str, int]) -> list[tuple[object, ...]]:
    with MeshConfig(**degrees).build() as ctx:
        provider = FunctionProvider(_build)
        model = provider.build(StageInfo())
        provider.parallelize(model, ctx)
        return [parameter.placements for parameter in model.parameters() if isinstance(parameter, DTensor)]


def test_a_model_is_hybrid_sharded_by_default() -> None:
    for placements in run_ranks(_placements, {"data_parallel_replicate": 2, "data_parallel_shard": 2}, world_size=4):
        assert placements == [(Replicate(), Shard(0))] * 2
