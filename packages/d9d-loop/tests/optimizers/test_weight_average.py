"""Average of the weights: compared with torch's `AveragedModel` on one process, in layouts, and over resumes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from d9d_dist import (
    ColumnParallel,
    DistributedContext,
    RowParallel,
    StageInfo,
    UserError,
    parallelize_tensor,
)
from d9d_dist.testing import run_ranks
from d9d_loop import AdamWConfig, Ema, Engine, EngineConfig, Loss, ModelProvider, Task, Trainer, TrainerConfig
from d9d_loop.optimizers import WeightAverage
from d9d_loop.optimizers.optimizer import GroupConfig, ScheduleFreeAdamWConfig, SGDConfig
from d9d_loop.optimizers.weight_average import average_of
from d9d_pipeline import Inputs

DECAY = 0.8
NUM_STEPS = 12
SKIPPED = 5
MESHES: dict[str, dict[str, int]] = {
    "one process": {},
    "replicated": {"data_parallel_replicate": 2, "data_parallel_shard": 1},
    "sharded": {"data_parallel_shard": 2},
    "tensor": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 2},
}
Weights = dict[str, Tensor]


class _Layers(nn.Module):
    """Two layers, a frozen scale, and a buffer that the forward changes."""

    calls: Tensor

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        built = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
        self.layers = nn.ModuleDict({str(index): built[index] for index in layers})
        if 0 in layers:
            self.scale = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64), requires_grad=False)
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if "0" in self.layers:
            if self.training:
                self.calls += 1
            x = x * self.scale
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


class _Provider(ModelProvider):
    late_init = False

    def build(self, stage: StageInfo) -> nn.Module:
        return _Layers(list(stage.layers(2)))

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        if ctx.size("dense", "tp") > 1:
            plan = {"layers.0": ColumnParallel(), "layers.1": RowParallel()}
            parallelize_tensor(model, ctx.mesh_for("dense")["tp"], plan)
        super().parallelize(model, ctx)


class _Squares(Task):
    def inputs(self, batch: Any) -> Inputs:
        return Inputs(batch["x"])

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss((outputs - 0.5).square().sum(), weight=len(outputs))


TASK = _Squares()


def _x(step: int) -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x.fill_(torch.nan) if step == SKIPPED else x


def _opened(mesh: dict[str, int], folder: Path, **settings: Any) -> Any:
    config = {
        "run": {"folder": folder},
        "mesh": mesh,
        "precision": "parameters",
        "health": {"enabled": False},
        "optimizer": {"kind": "sgd", "learning_rate": 0.3, "momentum": 0.5},
    }
    config = EngineConfig.model_validate({**config, **settings})
    return Engine.open(config, model=_Provider(), task=TASK, average=settings.get("average"))


def _step(engine: Engine) -> None:
    rows = _x(engine.num_steps + 1).chunk(engine.ctx.size("batch", "dp"))
    engine.forward_backward([{"x": rows[engine.ctx.coordinate("batch", "dp")]}], TASK.loss)
    engine.step()


def _weights(engine: Engine) -> tuple[Weights, Weights]:
    """Return the averaged and the trained weights."""
    trained = {name: each.clone() for name, each in engine.weights()}
    with engine.evaluation_weights():
        averaged = {name: each.clone() for name, each in engine.weights()}
    again = dict(engine.weights())
    assert all(torch.equal(again[name], each) for name, each in trained.items())
    return averaged, trained


def _continue(mesh: dict[str, int], folder: Path, warmup: bool, until: int) -> tuple[Weights, Weights, Weights]:
    """Resume a run; return the averages after the load, and averages and weights at its end."""
    with _opened(mesh, folder, average=Ema(DECAY, warmup=warmup)) as engine:
        engine.load()
        loaded, _ = _weights(engine)
        while engine.num_steps < until:
            _step(engine)
        engine.save()
        return loaded, *_weights(engine)


def _expected(*, warmup: bool) -> dict[int, tuple[Weights, Weights]]:
    """Return averages and weights of each step, computed by torch alone."""
    model = _Layers([0, 1])
    trainable = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.3, momentum=0.5)
    average, number, found = AveragedModel(model), 0, {}
    for step in range(1, NUM_STEPS + 1):
        if step != SKIPPED:
            ((model(_x(step)) - 0.5).square().sum() / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
            number += 1
            decay = min(DECAY, number / (9 + number)) if warmup else DECAY
            average.multi_avg_fn = get_ema_multi_avg_fn(decay)
            average.update_parameters(model)
        averaged = {**dict(model.state_dict()), **dict(average.module.named_parameters())}
        found[step] = tuple(
            {name: each.detach().clone() for name, each in of.items()} for of in (averaged, model.state_dict())
        )
    return found


def _check(found: Weights, expected: Weights) -> None:
    assert found, "a rank has weights"
    for name, each in found.items():
        torch.testing.assert_close(
            each, expected[name], rtol=1e-12, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("warmup", [False, True], ids=["constant", "warm-up"])
@pytest.mark.slow("constant")
def test_averages_equal_those_of_torch_in_a_run_that_changes_its_layout(warmup: bool, tmp_path: Path) -> None:
    expected = _expected(warmup=warmup)
    layouts, steps = list(MESHES), range(0, NUM_STEPS + 1, 2)
    layouts = ["one process", "sharded", "stages"] if warmup else [*layouts, "one process"]
    previous: Weights = {}
    for (begin, end), layout in zip(pairwise(steps), layouts, strict=False):
        size = 1 if layout == "one process" else 2
        results = run_ranks(_continue, MESHES[layout], tmp_path, warmup, end, world_size=size)
        for loaded, averaged, trained in results:
            if begin:
                assert all(torch.equal(each, previous[name]) for name, each in loaded.items())
            _check(averaged, {**expected[end][0], "calls": averaged.get("calls", torch.zeros(()))})
            _check({name: each for name, each in trained.items() if name != "calls"}, expected[end][1])
        previous = {name: each for _, averaged, _ in results for name, each in averaged.items()}


def _in_one_process(folder: Path) -> None:
    with _opened({}, folder, average=Ema(DECAY)) as engine:
        untrained, trained = _weights(engine)
        assert all(torch.equal(untrained[name], each) for name, each in trained.items()), "no step, no average"
        for _ in range(2):
            _step(engine)
        engine.save()
        saved, _ = _weights(engine)
        _step(engine)
        later, _ = _weights(engine)
        with engine.offloaded():
            pass
        offloaded, _ = _weights(engine)
        engine.load()
        again, _ = _weights(engine)
        assert all(torch.equal(again[name], each) for name, each in saved.items())
        assert all(torch.equal(offloaded[name], each) for name, each in later.items())
        weights = engine.weights()
        next(weights)
        with engine.evaluation_weights():
            for call, run in {"step()": engine.step, "save()": engine.save, "load()": engine.load}.items():
                with pytest.raises(
                    UserError, match=rf"got {call[:-2]}\(\) inside evaluation_weights\(\); expected only"
                ):
                    run()
            with pytest.raises(UserError, match="the weights changed while weights"):
                next(weights)
    with _opened({}, folder) as engine:  # a run may end its average
        engine.load()
        averaged, trained = _weights(engine)
        assert all(torch.equal(averaged[name], each) for name, each in trained.items())
        _step(engine)
        engine.save()
    with _opened({}, folder, average=Ema(DECAY)) as engine:  # or start one, with the loaded weights
        engine.load()
        averaged, trained = _weights(engine)
        assert all(torch.equal(averaged[name], each) for name, each in trained.items())
        _step(engine)
        averaged, trained = _weights(engine)
        assert all(torch.equal(averaged[name], each) for name, each in trained.items()), "the average of one step"


def test_averages_over_loads_and_offloads_and_calls_inside(tmp_path: Path) -> None:
    run_ranks(_in_one_process, tmp_path, world_size=1)


class _Averaging(torch.optim.SGD):
    """Optimizer of a user."""

    def evaluation_weights(self) -> AbstractContextManager[None]:
        return nullcontext()


_SCHEDULE_FREE = GroupConfig(of="vectors", optimizer=ScheduleFreeAdamWConfig())


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (ScheduleFreeAdamWConfig().build, "ScheduleFreeAdamW"),
        (AdamWConfig(groups=(_SCHEDULE_FREE,)).build, "ScheduleFreeAdamW"),
        (lambda model: _Averaging(model.parameters(), lr=0.1), "_Averaging"),
    ],
)
def test_an_optimizer_that_averages_has_no_other_average(build: Callable[[nn.Module], Optimizer], name: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=rf"got average = Ema\(...\) with {name}, which averages the weights"):
        average_of(model, build(model), Ema())
    assert average_of(
        model, AdamWConfig(groups=(GroupConfig(of="vectors", optimizer=SGDConfig()),)).build(model), Ema()
    )


def test_evaluations_and_exports_of_a_job_use_the_average(tmp_path: Path) -> None:
    config = {
        "steps": 4,
        "batch": {"global_size": 4},
        "run": {"folder": tmp_path},
        "average": {"decay": DECAY},
        "optimizer": {"kind": "sgd", "learning_rate": 0.3, "momentum": 0.5},
        "lr_schedule": {"kind": "warmup_cosine", "warmup_steps": 0, "final_fraction": 1.0},
        "data": {"shuffle": False},
        "trackers": (),
        "resilience": {"health": {"enabled": False}, "watchdog": {"enabled": False}},
    }
    rows = [{"x": row} for step in range(1, 5) for row in _x(step)]
    evaluation = [{"x": row} for row in _x(4)]
    trainer = Trainer(
        TrainerConfig.model_validate(config), model=_Provider(), data=rows, task=TASK, evaluation_data=evaluation
    )
    result = trainer.train()
    averaged = _expected(warmup=False)[4][0]
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    _check({name: each for name, each in exported.items() if name != "calls"}, averaged)
    model = _Layers([0, 1])
    model.load_state_dict(averaged)
    loss = (model(_x(4)) - 0.5).square().sum().item() / 4
    assert result.evaluation["loss"] == pytest.approx(loss, rel=1e-12)


def test_averages_of_bfloat16_weights_are_float32() -> None:
    model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    average = WeightAverage(model, Ema(0.999))
    for weight in (1.0, 2.0):
        nn.init.constant_(model.weight, weight)
        average.update(torch.tensor(True))
    torch.testing.assert_close(average.tensors()["weight"], torch.full((1, 2), 1.001))
    with average.evaluation_weights():
        assert model.weight.dtype == torch.bfloat16
        assert torch.equal(model.weight, torch.ones_like(model.weight))
