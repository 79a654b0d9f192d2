"""One rule for all metrics: a NaN that the mask does not exclude makes the value NaN."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import d9d_metrics
from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_metrics import (
    BinaryAUROC,
    BinaryClassification,
    BitsPerByte,
    Compose,
    ConfusionMatrix,
    Max,
    Metric,
    Min,
    ModelFlops,
    MulticlassClassification,
    MultilabelClassification,
    Perplexity,
    StepTime,
    Sum,
    Throughput,
    WeightedMean,
    accuracy,
    compute_metrics,
    f_beta,
    precision,
    recall,
)
from d9d_metrics.confusion_scores import Score
from d9d_metrics.step_clock import StepSeconds

NAN = math.nan
SCORES: dict[str, Score] = {
    f"{kind}-{average}": make(average)
    for average in ("micro", "macro", "weighted", None)
    for kind, make in {"a": accuracy, "p": precision, "r": recall, "f": lambda average: f_beta(2.0, average)}.items()
} | {"own": lambda counts: (counts.true_positive > 0).double()}
TARGETS = torch.tensor([0, 1, 2, 1])
RIGHT = torch.eye(3)[TARGETS]
YES = torch.tensor([1.0, 0.0, 1.0, 0.0])
STEP = {"total": 1.0, "data_wait": 0.1, "communication": 0.1}


def spoilt(values: Tensor, *place: int) -> Tensor:
    """Return a copy with one NaN."""
    values = values.double()
    values[place] = NAN
    return values


Case = tuple[Callable[[], Metric], tuple[Any, ...], tuple[Any, ...]]
"""Creates a metric; arguments of `update` without a NaN, and with one."""

CASES: dict[str, Case] = {
    "Sum": (Sum, (YES,), (spoilt(YES, 1),)),
    "Max": (Max, (YES,), (spoilt(YES, 1),)),
    "Min": (Min, (YES,), (spoilt(YES, 1),)),
    "WeightedMean": (WeightedMean, (1.0, 2.0), (NAN, 2.0)),
    "WeightedMean, weight": (WeightedMean, (1.0, 2.0), (1.0, torch.tensor(NAN))),
    "BitsPerByte": (BitsPerByte, (1.0, 2.0), (torch.tensor(NAN), 2.0)),
    "Perplexity": (Perplexity, (1.0, 2.0), (NAN, 2.0)),
    "Perplexity, -inf": (Perplexity, (1.0, 2.0), (-math.inf, 2.0)),
    "Throughput": (Throughput, (1.0, 2.0), (NAN, 2.0)),
    "Throughput, seconds": (Throughput, (1.0, 2.0), (1.0, NAN)),
    "ModelFlops": (lambda: ModelFlops(1e9), (1.0, 2.0), (NAN, 2.0)),
    "ModelFlops, seconds": (lambda: ModelFlops(1e9), (1.0, 2.0), (1.0, NAN)),
    "StepTime": (StepTime, (StepSeconds(**STEP),), (StepSeconds(**dict.fromkeys(STEP, NAN)),)),
    "BinaryClassification": (lambda: BinaryClassification(SCORES), (YES, YES), (spoilt(YES, 1), YES)),
    "BinaryClassification, target": (lambda: BinaryClassification(SCORES), (YES, YES), (YES, spoilt(YES, 2))),
    "MultilabelClassification": (
        lambda: MultilabelClassification(3, SCORES),
        (RIGHT, RIGHT.bool()),
        (spoilt(RIGHT, 1, 0), RIGHT.bool()),
    ),
    "MultilabelClassification, target": (
        lambda: MultilabelClassification(3, SCORES),
        (RIGHT, RIGHT),
        (RIGHT, spoilt(RIGHT, 1, 0)),
    ),
    "MulticlassClassification": (
        lambda: MulticlassClassification(3, SCORES),
        (RIGHT, TARGETS),
        (torch.full((4, 3), NAN), TARGETS),
    ),
    "MulticlassClassification, true class": (
        lambda: MulticlassClassification(3, SCORES),
        (RIGHT, TARGETS),
        (spoilt(RIGHT, 0, 0), TARGETS),
    ),
    "MulticlassClassification, another class": (
        lambda: MulticlassClassification(3, SCORES),
        (RIGHT, TARGETS),
        (spoilt(RIGHT, 0, 1).bfloat16(), TARGETS),
    ),
    "MulticlassClassification, top 2": (
        lambda: MulticlassClassification(3, SCORES, top_k=2),
        (RIGHT, TARGETS),
        (spoilt(RIGHT, 0, 2), TARGETS),
    ),
    "ConfusionMatrix": (lambda: ConfusionMatrix(3), (RIGHT, TARGETS), (torch.full((4, 3), NAN), TARGETS)),
    "BinaryAUROC": (BinaryAUROC, (YES, YES), (spoilt(YES, 0), YES)),
    "BinaryAUROC, samples": (lambda: BinaryAUROC(exact_samples=8), (YES, YES), (spoilt(YES, 0), YES)),
    "BinaryAUROC, target": (BinaryAUROC, (YES, YES), (YES, spoilt(YES, 0))),
    "Compose": (lambda: Compose({"a": Sum(), "b": Max()}), (YES,), (spoilt(YES, 1),)),
}
WITHOUT_INPUT = {"PeakMemory"}


def test_every_metric_has_a_case() -> None:
    exported = {
        name
        for name in dir(d9d_metrics)
        if inspect.isclass(value := getattr(d9d_metrics, name)) and issubclass(value, Metric) and value is not Metric
    }
    assert {name.partition(",")[0] for name in CASES} | WITHOUT_INPUT == exported


def updated(metric: Metric, *arguments: Any) -> Metric:
    metric.update(*arguments)  # ty: ignore[missing-attribute] - each kind has a signature of its own
    return metric


def values_of(metric: Metric) -> Mapping[str, float]:
    return compute_metrics({"m": metric}, None)


@pytest.mark.parametrize("name", CASES)
def test_one_nan_makes_all_values_nan(name: str) -> None:
    make, right, broken = CASES[name]
    assert not any(map(math.isnan, values_of(updated(make(), *right)).values()))
    metric = updated(updated(make(), *right), *broken)
    updated(metric, *right)
    values = values_of(metric)
    not_measured = {"m/flops_per_second"} if name == "ModelFlops, seconds" else set()
    assert {key for key, value in values.items() if not math.isnan(value)} <= not_measured
    metric.reset()
    assert values_of(updated(metric, *right)) == values_of(updated(make(), *right))


def _of_both_ranks(names: list[str]) -> dict[str, float]:
    """Return the values on this rank; only rank 1 gets NaNs."""
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        cases = {name: CASES[name] for name in names}
        metrics = {
            name: updated(make(), *(broken if ctx.rank else right)) for name, (make, right, broken) in cases.items()
        }
        return compute_metrics(metrics, ctx.group_for("batch", "dp"))


def test_a_nan_on_one_rank_makes_the_value_nan_on_all() -> None:
    for values in run_ranks(_of_both_ranks, list(CASES), world_size=2):
        assert values
        assert {name for name, value in values.items() if not math.isnan(value)} == set()


@pytest.mark.parametrize("name", [name for name in CASES if "Class" in name or "AUROC" in name or "Matrix" in name])
def test_a_masked_nan_does_not_count(name: str) -> None:
    make, right, broken = CASES[name]
    mask = torch.ones(4, dtype=torch.bool)
    for argument in broken:
        mask &= ~argument.isnan().reshape(4, -1).any(-1)
    assert values_of(updated(make(), *broken, mask)) == pytest.approx(
        values_of(updated(make(), *right, mask)), nan_ok=True
    )


@pytest.mark.parametrize("name", [name for name in CASES if "Class" in name or "AUROC" in name or "Matrix" in name])
def test_update_and_compute_do_not_synchronize_with_the_device(name: str) -> None:
    """Tensors on the meta device have no data, so reading one would raise."""
    make, right, _ = CASES[name]
    metric = make().to("meta")
    updated(metric, *(argument.to("meta") for argument in right))
    metric.compute()


def test_infinite_predictions_are_compared_like_numbers() -> None:
    metric = MulticlassClassification(3, {"a": accuracy()})
    metric.update(torch.tensor([[-math.inf, 0.0, -math.inf], [0.0, 1.0, math.inf]]), torch.tensor([1, 2]))
    assert metric.compute()["a"].item() == 1.0
