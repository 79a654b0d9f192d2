"""State of a job with several stages and a tied weight: evaluations, rollbacks and resumes equal one process.

Numbers are random float64, so that no rounding is exact.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import DistributedContext, StageInfo, parallelize_replicate
from d9d_dist.testing import run_ranks
from d9d_loop import EvaluationDone, Loss, ModelProvider, StepDone, Task, Trainer, TrainerConfig
from d9d_loop.config._config_keys import kinds_of
from d9d_loop.optimizers.optimizer import OptimizerConfig
from d9d_pipeline import Inputs

SIZE, NUM_LAYERS = 4, 4
Run = tuple[str, dict[str, Any]]
"""Name of a run folder, and changes of its configuration."""
Trace = dict[str, list[float]]
"""Loss, gradient norm and learning rate by step; loss of each evaluation."""


class _Net(nn.Module):
    """The first and the last stage share a weight; the layer in the middle has a frozen bias."""

    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        self.stage = stage
        self.layers = nn.ModuleDict({str(index): nn.Linear(SIZE, SIZE) for index in stage.layers(NUM_LAYERS)})
        if "1" in self.layers:
            self.layers["1"].get_parameter("bias").requires_grad_(False)
        if stage.is_first or stage.is_last:
            self.tied = nn.Linear(SIZE, SIZE, bias=False)
        if stage.is_first and stage.is_last:
            self.head = nn.Linear(SIZE, SIZE, bias=False)
            self.head.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.stage.is_first:
            x = self.tied(x)
        for layer in self.layers.values():
            x = layer(x).tanh()
        return self.tied(x) if self.stage.is_last else x


class _Provider(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return _Net(stage).double()

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])


class _Regression(Task):
    """Task that is non-finite on one sample, a given number of times."""

    def __init__(self, num_bad: int = 0) -> None:
        self.num_bad = num_bad

    def inputs(self, batch: Any) -> Inputs:
        return Inputs(batch["x"])

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        total = (outputs - batch["y"]).square().sum()
        if self.num_bad and batch["number"].eq(14).any():
            self.num_bad -= 1
            total = total * float("nan")
        return Loss(total, weight=batch["y"].numel())


def _samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, count, SIZE, generator=draws, dtype=torch.float64).unbind()
    return [{"x": x[index], "y": y[index], "number": torch.tensor(index)} for index in range(count)]


def _train(folder: Path, mesh: dict[str, int], run: Run) -> Trace:
    name, more = run
    changed = dict(more)
    num_bad = changed.pop("num_bad", 0)
    values = {
        "steps": 4,
        "batch": {"global_size": 4, "microbatch_size": 1},
        "run": {"folder": folder, "name": name},
        "mesh": mesh,
        "pipeline": {"draw": False},
        "data": {"shuffle": False},
        "evaluation": {"every": 1},
        "checkpoint": {"every": 2},
        "optimizer": {"learning_rate": 0.03},
        "lr_schedule": {"warmup_steps": 3, "final_fraction": 1.0},
        "gradients": {"max_norm": 0.7},
        "trackers": (),
        "logging": {"progress": False},
        "export": False,
        "resilience": {"health": {"enabled": False}, "bad_steps": {"non_finite": "roll_back"}},
    }
    trainer = Trainer(
        TrainerConfig.model_validate({**values, **changed}),
        model=_Provider(),
        data=_samples(16, seed=0),
        task=_Regression(num_bad),
        evaluation_data=_samples(5, seed=1),
    )
    trace: Trace = {}

    def take_step(done: StepDone) -> None:
        trace[f"step {done.step}"] = [done.loss.item(), done.grad_norm.item(), done.learning_rate]

    trainer.events.on(StepDone, take_step)
    trainer.events.on(EvaluationDone, lambda done: trace.update({f"evaluation {done.step}": [done.values["loss"]]}))
    trainer.train()
    return trace


def _train_each(folder: Path, mesh: dict[str, int], runs: list[Run]) -> list[Trace]:
    return [_train(folder, mesh, run) for run in runs]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind, "learning_rate": 0.03} for kind in kinds_of(OptimizerConfig)},
    "muon": {
        "kind": "muon",
        "learning_rate": 0.03,
        "groups": [
            {"of": "vectors", "optimizer": {"kind": "schedule_free_adamw", "learning_rate": 0.02}},
            {"pattern": "tied", "optimizer": {"kind": "adam", "learning_rate": 0.01}},
        ],
    },
    # No parameter of the first stage has the rate of the last one.
    "adamw": {"kind": "adamw", "learning_rate": 0.03, "layer_decay": 0.7},
    # Groups of the last stage only.
    "sgd": {
        "kind": "sgd",
        "learning_rate": 0.03,
        "momentum": 0.7,
        "groups": [{"pattern": r"layers\.3", "learning_rate": 0.07}],
    },
    "lion": {"kind": "lion", "learning_rate": 0.003, "groups": [{"pattern": "bias", "weight_decay": 0.3}]},
}


def _equal(found: Trace, expected: Trace) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values == pytest.approx(expected[name], rel=1e-9), name


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> dict[str, Trace]:
    """Train optimizers without an interruption: all with `--all`."""
    names = OPTIMIZERS if exhaustive else ("schedule_free_adamw", "adamw", "muon")
    runs: list[Run] = [(name, {"optimizer": OPTIMIZERS[name]}) for name in names]
    (traces,) = run_ranks(_train_each, tmp_path_factory.mktemp("one"), {}, runs, world_size=1)
    return dict(zip(names, traces, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.sample("2")
def test_evaluations_of_every_optimizer_equal_one_process(
    tmp_path: Path, one_process: dict[str, Trace], num_ranks: int
) -> None:
    """An evaluation swaps averaged weights into the tied head too, and restores the training weights."""
    runs: list[Run] = [(name, {"optimizer": OPTIMIZERS[name]}) for name in one_process]
    mesh = {"pipeline_parallel": num_ranks}
    for traces in run_ranks(_train_each, tmp_path, mesh, runs, world_size=num_ranks):
        for (name, _), trace in zip(runs, traces, strict=True):
            _equal(trace, one_process[name])


@pytest.mark.slow
@pytest.mark.parametrize("later", [1, 2])
@pytest.mark.sample("2")
def test_every_optimizer_resumes_with_stages(tmp_path: Path, one_process: dict[str, Trace], later: int) -> None:
    """Non-tensor state, such as counters, is restored on every stage, also with other stages than before."""
    first: list[Run] = [(name, {"optimizer": OPTIMIZERS[name], "steps": 2}) for name in one_process]
    second: list[Run] = [(name, {"optimizer": OPTIMIZERS[name]}) for name in one_process]
    run_ranks(_train_each, tmp_path, {"pipeline_parallel": 2}, first, world_size=2)
    for traces in run_ranks(_train_each, tmp_path, {"pipeline_parallel": later}, second, world_size=later):
        for (name, _), trace in zip(second, traces, strict=True):
            _equal(trace, {key: values for key, values in one_process[name].items() if key[-1] in "34"})


@pytest.mark.slow
def test_a_rollback_restores_the_tied_weight_on_every_stage(tmp_path: Path, one_process: dict[str, Trace]) -> None:
    """The fourth step is non-finite, also when it is replayed: the job rolls back past an applied step."""
    names = ("schedule_free_adamw", "adamw", "muon")
    runs: list[Run] = [(name, {"optimizer": OPTIMIZERS[name], "num_bad": 2}) for name in names]
    for traces in run_ranks(_train_each, tmp_path, {"pipeline_parallel": 2}, runs, world_size=2):
        for name, trace in zip(names, traces, strict=True):
            _equal(trace, one_process[name])
