"""A skipped non-finite step has no effect on later steps, also if stages share a weight."""

from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import MeshConfig, StageInfo
from d9d_dist.testing import differences, full_gradients, full_parameters, run_ranks
from d9d_loop import BadStepFound, Finished, GradientsReady, Loss, ModelProvider, Task, Trainer, TrainerConfig
from d9d_modules import Qwen3ForCausalLM, Qwen3Params
from d9d_pipeline import Inputs

STEPS, BAD_STEP = 4, 2
MICROBATCHES, LENGTH, VOCAB = 2, 8, 17
RATE = 0.05

_PARAMS = Qwen3Params(
    vocab_size=VOCAB,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=12,
    tie_word_embeddings=True,
    initializer_range=0.3,
)


@final
class _Tied(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return Qwen3ForCausalLM(_PARAMS, stage).double()


@final
class _NextToken(Task):
    """Task in which a microbatch of the bad step is non-finite, also when the step is replayed."""

    def __init__(self, *, is_bad: bool) -> None:
        first_of_step = MICROBATCHES * (BAD_STEP - 1)
        self.bad_calls = (first_of_step, first_of_step + MICROBATCHES) if is_bad else ()
        self.num_calls = 0

    def inputs(self, batch: Tensor) -> Inputs:
        positions = torch.arange(LENGTH).unsqueeze(0)
        return Inputs(batch[:, :-1], labels=batch[:, 1:], position_ids=positions)

    def loss(self, outputs: Tensor, batch: Tensor) -> Loss:
        self.num_calls += 1
        factor = torch.nan if self.num_calls - 1 in self.bad_calls else 1.0
        return Loss(outputs.sum() * factor, weight=outputs.numel())


class _WithoutBadStep(torch.optim.AdamW):
    """AdamW that skips one step."""

    num_calls = 0

    def step(self, closure: Any = None) -> Any:
        self.num_calls += 1
        return super().step(closure) if self.num_calls != BAD_STEP else None


def _train(folder: Path, stages: int, is_bad: bool) -> dict[str, Any]:
    """Return the gradients of each step except the bad one, and the resulting parameters."""
    trace: dict[str, Any] = {"told": []}
    off = {"enabled": False}
    config = {
        "steps": STEPS,
        "batch": {"global_size": 4, "microbatch_size": 4 // MICROBATCHES},
        "mesh": MeshConfig(pipeline_parallel=stages),
        "optimizer": {"learning_rate": RATE, "weight_decay": 0.0},
        "lr_schedule": {"final_fraction": 1.0},
        "run": {"folder": folder},
        "trackers": (),
        "logging": {"progress": False},
        "resilience": {"health": off, "watchdog": off},
        "export": False,
    }
    tokens = torch.randint(VOCAB, (12, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def take_gradients(ready: GradientsReady) -> None:
        if ready.step != BAD_STEP:
            trace[f"step {ready.step}"] = full_gradients(ready.model)

    trainer = Trainer(
        TrainerConfig.model_validate(config),
        model=_Tied(),
        data=list(tokens),
        task=_NextToken(is_bad=is_bad),
        optimizer=None
        if is_bad
        else lambda model: _WithoutBadStep(model.parameters(), RATE, (0.9, 0.95), weight_decay=0),
    )
    trainer.events.on(GradientsReady, take_gradients)
    trainer.events.on(Finished, lambda done: trace.update(parameters=full_parameters(done.model)))
    trainer.events.on(BadStepFound, lambda found: trace["told"].append((found.step, found.decision, found.why)))
    trainer.train()
    return trace


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.slow("2")
def test_a_skipped_step_does_not_affect_later_steps(tmp_path: Path, stages: int) -> None:
    expected = _train(tmp_path / "expected", 1, False)
    assert not expected.pop("told")
    traces = run_ranks(_train, tmp_path / "found", stages, True, world_size=stages)
    for trace in traces:
        ((step, decision, why),) = trace.pop("told")
        assert (step, decision) == (BAD_STEP, "skip")
        assert f"the first tensor that is not finite is the loss, in the forward pass of rank {stages - 1}" in why
    found = {key: {name: tensor for trace in traces for name, tensor in trace[key].items()} for key in expected}
    assert len(found) == STEPS
    assert not list(differences(found, expected, rtol=1e-9))
