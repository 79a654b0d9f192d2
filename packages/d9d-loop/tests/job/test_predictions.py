from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d9d_dist import DistributedContext, StageInfo, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, Task, Trainer, TrainerConfig, validate_config
from d9d_loop.job.predictions import Predictions
from d9d_pipeline import Inputs

REHEARSES = True  # see quick_jobs.py

QUICK = {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}}


class _Classify(Task):
    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(outputs, batch["y"], reduction="none"), len(outputs))

    def predictions(self, outputs: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
        odd = batch["number"] % 2 == 1  # rows of some samples only, as of the tokens with labels
        scores = outputs.softmax(1)[:, 1].bfloat16()
        return {"logits": outputs, "labels": batch["y"], "odd": batch["number"][odd], "is_odd": odd, "scores": scores}


def _samples(count: int) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": each, "y": (each[0] > 0).long(), "number": torch.tensor(n)} for n, each in enumerate(x)]


def _net(stage: object = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def _compute(found: Mapping[str, Any]) -> dict[str, float]:
    """Return values that depend on the order of all rows."""
    weights = np.arange(len(found["labels"]))
    assert found["odd"].tolist() == [n for n in weights.tolist() if n % 2]
    assert found["is_odd"].tolist() == [n % 2 for n in weights.tolist()]
    assert found["scores"].dtype == np.float32
    return {
        "median": np.median(found["logits"]),
        "in_order": float((found["logits"][:, 0] * weights).sum()),
        "right": (found["logits"].argmax(-1) == found["labels"]).mean(),
        "count": len(weights),
        "undefined": float("nan"),
    }


def _config(folder: Path, **sections: Any) -> TrainerConfig:
    values = {
        "steps": 1,
        "batch": {"global_size": 12, "microbatch_size": 2},
        "run": {"folder": folder},
        "mesh": {"data_parallel_shard": -1},
        "optimizer": {"learning_rate": 1e-9},
        "logging": {"progress": False, "report": False},
        "resilience": QUICK,
        "export": False,
    }
    return validate_config(TrainerConfig, {**values, **sections})


def _evaluation(folder: Path, count: int) -> Mapping[str, float]:
    samples = _samples(count)
    trainer = Trainer(
        _config(folder),
        model=_net,
        data=_samples(12),
        evaluation_data=samples,
        task=_Classify(),
        compute_metrics=_compute,
    )
    return trainer.train().evaluation


@pytest.mark.slow("1")
@pytest.mark.parametrize("count", [1, 9])
def test_all_predictions_are_gathered_in_order_on_any_number_of_ranks(tmp_path: Path, count: int) -> None:
    samples, model = _samples(count), _net()
    with torch.no_grad():
        logits = model(torch.stack([each["x"] for each in samples]))
    labels, numbers = torch.stack([each["y"] for each in samples]), torch.arange(count)
    rows = {
        "logits": logits.numpy(),
        "labels": labels.numpy(),
        "odd": numbers[1::2].numpy(),
        "is_odd": (numbers % 2).numpy(),
        "scores": np.zeros(count, np.float32),
    }
    expected = {**_compute(rows), "loss": F.cross_entropy(logits, labels).item()}
    one = _evaluation(tmp_path / "one", count)
    assert one == pytest.approx(expected, rel=1e-5, nan_ok=True)
    for ranks in {1: [3], 9: [2, 3]}[count]:
        for found in run_ranks(_evaluation, tmp_path / str(ranks), count, world_size=ranks):
            assert found == pytest.approx(one, rel=1e-6, nan_ok=True)


class _Stage(nn.Module):
    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for layer in stage.layers(2):
            torch.manual_seed(layer)
            self.layers[str(layer)] = nn.Linear(4, 4 - 2 * layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def _on_two_stages(folder: Path) -> Mapping[str, float]:
    class Staged(_Classify):
        def inputs(self, batch: Any) -> Any:
            return Inputs(batch["x"])

    config = _config(folder, mesh={"pipeline_parallel": 2})
    options: dict[str, Any] = {"data": _samples(12), "evaluation_data": _samples(9), "compute_metrics": _compute}
    return Trainer(config, model=_Stage, task=Staged(), **options).train().evaluation


def test_predictions_come_from_the_last_stage(tmp_path: Path) -> None:
    with torch.no_grad():
        logits = _Stage(StageInfo())(torch.stack([each["x"] for each in _samples(9)]))
    for found in run_ranks(_on_two_stages, tmp_path, world_size=2):
        assert found["median"] == pytest.approx(np.median(logits.numpy()), rel=1e-5)
        assert found["count"] == 9


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(()), r"Wrong.predictions returned \{'x': tensor\(0.\)\}; expected tensors by name with a row for"),
        ([1], r"Wrong.predictions returned \{'x': \[1\]\}; expected tensors by name"),
        (torch.zeros(2, dtype=torch.complex64), "complex predictions"),
    ],
)
def test_predictions_must_be_tensors_with_rows(ctx: DistributedContext, returned: Any, message: str) -> None:
    class Wrong(_Classify):
        def predictions(self, outputs: Any, batch: Any) -> dict[str, Any]:
            return {"x": returned}

    with (
        Predictions(Wrong(), ctx, has_outputs=True) as predictions,
        pytest.raises(UserError, match=message),
    ):
        predictions.add(None, None, is_padding=False)


def test_rows_must_have_one_shape(ctx: DistributedContext) -> None:
    class Given(_Classify):
        def predictions(self, outputs: Any, batch: Any) -> dict[str, Any]:
            return {"x": batch}

    with Predictions(Given(), ctx, has_outputs=True) as predictions:
        predictions.add(None, torch.zeros(2, 3), is_padding=False)
        predictions.add(None, torch.zeros(2, 4), is_padding=False)
        with pytest.raises(UserError, match=r"rows of shape \(3,\) and then \(4,\); expected rows of one shape"):
            predictions.compute(lambda found: {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "compute_metrics returned None; expected a dict of numbers by name"),
        ({"f1": [1.0, 2.0]}, r"compute_metrics returned \{'f1': \[1.0, 2.0\]\}; expected a dict of numbers"),
        ({"loss": 1.0}, "compute_metrics returned loss, which the evaluation measures itself"),
    ],
)
def test_compute_metrics_must_return_numbers(tmp_path: Path, values: Any, message: str) -> None:
    trainer = Trainer(
        _config(tmp_path),
        model=_net,
        data=_samples(12),
        evaluation_data=_samples(2),
        task=_Classify(),
        compute_metrics=lambda found: values,
    )
    with pytest.raises(UserError, match=message):
        trainer.train()


def test_what_compute_metrics_needs_is_checked_before_the_start(tmp_path: Path) -> None:
    class Without(Task):
        inputs, loss = _Classify.inputs, _Classify.loss

    options: dict[str, Any] = {"model": _net, "data": _samples(12), "compute_metrics": _compute}
    with pytest.raises(
        UserError, match=r"compute_metrics, but Without has no predictions; .* remove .*dataset\.packing"
    ):
        Trainer(_config(tmp_path), evaluation_data=_samples(2), task=Without(), **options).train()
    with pytest.raises(UserError, match="got compute_metrics without evaluation data"):
        Trainer(_config(tmp_path), task=_Classify(), **options).train()
    wrong = {"keep_best": 1, "best_by": "f1"}
    trainer = Trainer(_config(tmp_path, checkpoint=wrong), evaluation_data=_samples(2), task=_Classify(), **options)
    with pytest.raises(UserError, match=r"checkpoint\.best_by = 'f1', but evaluations measure count, in_order, loss"):
        trainer.train()


def test_the_rehearsal_runs_the_predictions(tmp_path: Path) -> None:
    class Wrong(_Classify):
        def predictions(self, outputs: Any, batch: Any) -> dict[str, Any]:
            return {"labels": batch["label"]}

    trainer = Trainer(
        _config(tmp_path),
        model=_net,
        data=_samples(12),
        evaluation_data=_samples(2),
        task=Wrong(),
        compute_metrics=_compute,
    )
    with pytest.raises(UserError, match=r"the first evaluation batch fails in Wrong.predictions: KeyError: 'label'"):
        trainer.train()
