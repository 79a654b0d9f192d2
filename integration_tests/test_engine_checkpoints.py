"""An engine continues from a checkpoint that another layout saved, as if it had not been interrupted."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
from engine_rows import NUM_LAYERS, TASK
from oracle_models import decoder, samples
from own_decoder import Decoder
from torch import nn
from torch.utils.data import default_collate

from d9d_dist import StageInfo
from d9d_dist.testing import RankPool, differences, full_parameters, run_ranks
from d9d_loop import Engine, EngineConfig
from d9d_loop.config.trainer_config import LocalTierConfig
from d9d_loop.engine.local_tiers import local_tiers

Mesh = dict[str, int]
LAYOUTS: dict[str, tuple[Mesh, Mesh]] = {
    "pipeline to one process": ({"pipeline_parallel": 2}, {}),
    "one process to tensor": ({}, {"tensor_parallel": 2}),
    "four ranks to four others": (
        {"pipeline_parallel": 2, "data_parallel_shard": 2},
        {"context_parallel_shard": 2, "tensor_parallel": 2},
    ),
}


class _Double(Decoder):
    def build(self, stage: StageInfo) -> nn.Module:
        return super().build(stage).double()


def _steps(folder: Path, mesh: Mesh, *, loads: bool, num_steps: int, memory_every: int | None = None) -> dict[str, Any]:
    """Take steps; return the loss of each, and the parameters. Load before them, or save: in memory, or at the end."""
    tiers = {} if memory_every is None else {"memory_every": memory_every, "replicas": 0}
    config = EngineConfig.model_validate(
        {"run": {"folder": folder}, "mesh": mesh, "health": {"enabled": False}, "tiers": tiers}
    )
    tied = decoder("tied", method="all_gather", checkpointing="none", num_layers=NUM_LAYERS)
    trace: dict[str, Any] = {}
    with Engine.open(config, model=_Double(tied.dense, parallelism=tied.parallelism), task=TASK) as engine:
        assert engine.load() == ({"prompts": [3, 4]} if loads else None)
        rank, size = engine.ctx.coordinate("batch", "dp"), engine.ctx.size("batch", "dp")
        rows = samples(ragged=True)[rank::size]
        for _ in range(num_steps):
            engine.forward_backward([default_collate(rows[:2]), default_collate(rows[2:])], TASK.loss)
            result = engine.step(3e-3)
            trace[f"step {engine.num_steps}"] = {"loss": result.loss.item(), "norm": result.grad_norm.item()}
            if tiers:
                engine.save_local({"prompts": [3, 4]})
        if loads:
            engine.delete_local()
        elif not tiers:
            engine.save({"prompts": [3, 4]})
        return {**trace, "parameters": full_parameters(engine.model)}


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.sample("pipeline to one process")
def test_a_checkpoint_is_loaded_in_another_layout(layouts: str, tmp_path: Path) -> None:
    ((saved, resumed), ranks) = LAYOUTS[layouts], lambda mesh: prod(mesh.values())
    (expected,) = run_ranks(_whole, tmp_path / "one", world_size=1)
    run_ranks(_saving, tmp_path / "two", saved, world_size=ranks(saved))
    for found in run_ranks(_loading, tmp_path / "two", resumed, world_size=ranks(resumed)):
        assert found.keys() == {"step 3", "step 4", "parameters"}
        there = {key: {name: expected[key][name] for name in values} for key, values in found.items()}
        assert next(differences(found, there, rtol=1e-9), None) is None


@pytest.mark.full
@pytest.mark.parametrize("axis", ["data_parallel_shard", "pipeline_parallel"])
@pytest.mark.sample("data_parallel_shard")
def test_restarted_ranks_resume_bitwise_from_memory(axis: str, tmp_path: Path) -> None:
    mesh = {axis: 2}
    expected = run_ranks(_uninterrupted, tmp_path / "one", mesh)
    with RankPool() as pool:
        pool.run(_saving_in_memory, tmp_path / "two", mesh)
    for found, whole in zip(run_ranks(_loading_from_memory, tmp_path / "two", mesh), expected, strict=True):
        assert found.keys() == {"step 3", "step 4", "parameters"}
        assert next(differences(found, {key: whole[key] for key in found}, rtol=0, atol=0), None) is None
    (tier,) = local_tiers(LocalTierConfig(memory_every=2, replicas=0), tmp_path / "two" / "run")
    assert not tier.folder.exists()


def _whole(folder: Path) -> dict[str, Any]:
    return _steps(folder, {}, loads=False, num_steps=4)


def _saving(folder: Path, mesh: Mesh) -> dict[str, Any]:
    return _steps(folder, mesh, loads=False, num_steps=2)


def _loading(folder: Path, mesh: Mesh) -> dict[str, Any]:
    return _steps(folder, mesh, loads=True, num_steps=2)


def _uninterrupted(folder: Path, mesh: Mesh) -> dict[str, Any]:
    return _steps(folder, mesh, loads=False, num_steps=4)


def _saving_in_memory(folder: Path, mesh: Mesh) -> dict[str, Any]:
    return _steps(folder, mesh, loads=False, num_steps=3, memory_every=2)


def _loading_from_memory(folder: Path, mesh: Mesh) -> dict[str, Any]:
    return _steps(folder, mesh, loads=True, num_steps=2, memory_every=2)
