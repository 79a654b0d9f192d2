"""Every layout that the Trainer offers equals one process in float64: losses, norms, and every trained parameter.

In float64 a wrong factor or a missing reduction cannot hide in a tolerance, and a routing decision cannot flip.
"""

from pathlib import Path

import pytest
import torch
from pretrain import Decoder, NextByte, PretrainConfig
from safetensors.torch import load_file
from torch import nn

from d9d_dist import StageInfo
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, StepDone, Trainer

TOLERANCE = 1e-9
STEPS = 4

LAYOUTS = {
    "dp_shard=2": {"data_parallel_shard": 2},
    "dp_shard=4": {"data_parallel_shard": 4},
    "dp_replicate=4": {"data_parallel_replicate": 4},
    "dp_replicate=2,dp_shard=2": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
}
MODELS = {
    "dense": {"model": {"tie_word_embeddings": False}},
    "tied": {"model": {"tie_word_embeddings": True}},
    "moe": {"model": {}, "experts": {"num_experts": 6, "top_k": 2, "intermediate_size": 20}},
}


class _Float64(Decoder):
    def build(self, stage: StageInfo) -> nn.Module:
        return super().build(stage).double()


class _Masked(NextByte):
    """Leaves out a number of bytes that differs from sample to sample, all of one sample's in some."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        mask = torch.arange(outputs.shape[1]) < batch[:, :1] % (outputs.shape[1] + 1)
        return Loss((outputs * mask).sum(), weight=mask.sum())


def _train(
    folder: str, model: str, mesh: dict[str, int], microbatch_size: int
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    sizes = {
        "vocab_size": 256,
        "hidden_size": 24,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 12,
        "intermediate_size": 36,
        "initializer_range": 0.2,
    }
    config = PretrainConfig.model_validate(
        {
            "steps": STEPS,
            "batch": {"global_size": 8, "microbatch_size": microbatch_size},
            "run": {"folder": folder},
            "mesh": mesh,
            "optimizer": {"learning_rate": 1e-2},
            "gradients": {"max_norm": 0.3},
            **MODELS[model],
            "model": {**sizes, **MODELS[model]["model"]},
        }
    )
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, 256, (17,), generator=generator) for _ in range(24)]
    curve: list[tuple[float, float]] = []
    trainer = Trainer(config, model=_Float64(config.model, config.moe), data=data, task=_Masked())
    trainer.events.on(StepDone, lambda done: curve.append((done.loss.item(), done.grad_norm.item())))
    result = trainer.train()
    assert result.export_dir is not None
    return curve, load_file(result.export_dir / "model.safetensors")


@pytest.mark.parametrize("microbatch_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_equals_one_process(tmp_path: Path, model: str, layout: str, microbatch_size: int) -> None:
    mesh = LAYOUTS[layout]
    world_size = 2 if layout == "dp_shard=2" else 4
    ((one_curve, one),) = run_ranks(_train, str(tmp_path / "one"), model, {}, 8, world_size=1)
    ranks = run_ranks(_train, str(tmp_path / "ranks"), model, mesh, microbatch_size, world_size=world_size)
    for curve, parameters in ranks:
        assert len(curve) == STEPS
        for ours, theirs in zip(curve, one_curve, strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE)
        assert parameters.keys() == one.keys()
        for name, parameter in parameters.items():
            assert parameter.dtype == torch.float64
            error = ((parameter - one[name]).norm() / one[name].norm()).item()
            assert error <= TOLERANCE, f"{name} differs by {error:.1e}"
