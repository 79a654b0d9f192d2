"""`benchmarks/rank_bytes.py`: memory of billion-parameter models on a thousand simulated ranks."""

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from d9d_dist import MeshConfig
from d9d_dist.testing import RankError, run_ranks
from d9d_modules import DecoderForCausalLM, Qwen3Params, parallelize_decoder

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "rank_bytes.py"
SMALL = Qwen3Params(
    vocab_size=36,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    tie_word_embeddings=True,
)


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_bytes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_bytes"] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


def _counted(model: str | Qwen3Params, mesh: MeshConfig) -> dict[str, Any]:
    """Run the count in a separate process, because it needs one without a process group."""
    script = _script()
    counted = script.rank_bytes(script.MODELS[model] if isinstance(model, str) else model, mesh)
    return {**asdict(counted), "total": counted.total}


@pytest.mark.parametrize(("model", "num_parameters"), [("qwen3-1.7b", 1_720_574_976), ("llama3.2-1b", 1_235_814_400)])
@pytest.mark.sample("llama3.2-1b-1235814400")
def test_a_model_of_a_billion_parameters_on_1024_ranks(model: str, num_parameters: int) -> None:
    mesh = MeshConfig(data_parallel_shard=128, context_parallel_shard=2, tensor_parallel=4)
    (counted,) = run_ranks(_counted, model, mesh, world_size=1)
    assert (counted["num_parameters"], counted["num_ranks"]) == (num_parameters, 1024)
    share = 4 * num_parameters / 1024
    assert share <= counted["parameters"] <= 1.05 * share  # uneven shards make the first ones larger
    assert counted["total"] == 4 * counted["parameters"]


def _stored(mesh: MeshConfig) -> int:
    with mesh.build() as ctx:
        model = DecoderForCausalLM(SMALL)
        parallelize_decoder(model, ctx)
        local = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
        return sum(part.nbytes for part in local)


@pytest.mark.parametrize(
    "degrees",
    [{"data_parallel_shard": 4}, {"data_parallel_replicate": 2, "tensor_parallel": 2}, {"context_parallel_shard": 2}],
)
@pytest.mark.slow("degrees1")
def test_counts_the_bytes_that_real_ranks_store(degrees: dict[str, int]) -> None:
    mesh = MeshConfig(**degrees)
    (counted,) = run_ranks(_counted, SMALL, mesh, world_size=1)
    assert counted["parameters"] == run_ranks(_stored, mesh, world_size=counted["num_ranks"])[0]


def test_invalid_degrees_raise_as_in_a_job() -> None:
    with pytest.raises(RankError, match="the tp degree = 3 does not divide dim 0 of backbone"):
        run_ranks(_counted, SMALL, MeshConfig(tensor_parallel=3, data_parallel_shard=4), world_size=1)
