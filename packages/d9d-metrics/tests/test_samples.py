"""One rule for all classification metrics: shapes are not broadcast, and values outside their range give NaN."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_metrics import (
    BinaryAUROC,
    BinaryClassification,
    ConfusionMatrix,
    MulticlassClassification,
    MultilabelClassification,
    accuracy,
    compute_metrics,
    precision,
)
from d9d_metrics.metric import Metric

SCORES = {"a": accuracy(), "p": precision()}
METRICS: dict[str, Callable[[], Metric]] = {
    "binary": lambda: BinaryClassification(SCORES),
    "auroc": BinaryAUROC,
    "bins": lambda: BinaryAUROC(exact_samples=0),
    "logits": lambda: BinaryAUROC(logits=True),
    "multilabel": lambda: MultilabelClassification(3, SCORES),
    "multiclass": lambda: MulticlassClassification(3, SCORES),
    "top": lambda: MulticlassClassification(3, SCORES, top_k=2),
    "matrix": lambda: ConfusionMatrix(3),
}
Shape = tuple[int, ...]


def updated(kind: str, predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> Metric:
    metric = METRICS[kind]()
    metric.update(predictions, targets, mask)  # ty: ignore[missing-attribute] - all of them have this update
    return metric


def values(metric: Metric) -> Mapping[str, float]:
    return compute_metrics({"m": metric}, over=None)


@pytest.mark.parametrize(
    ("kind", "predictions", "targets", "mask"),
    [
        (kind, *shapes)
        for kinds, several in {
            ("binary", "auroc", "bins", "logits"): [
                ((6, 1), (6,), None),
                ((6,), (6, 1), None),
                ((3,), (1,), None),
                ((1,), (3,), None),
                ((3,), (), None),
                ((2, 3), (3,), None),
                ((6,), (6,), (6, 1)),
                ((6,), (6,), (1,)),
                ((2, 3), (2, 3), (2,)),
            ],
            ("multilabel",): [
                ((4, 3), (3,), None),
                ((4, 3), (1, 3), None),
                ((4, 3), (4, 1), None),
                ((4, 1), (4, 3), None),
                ((4, 1), (4, 1), None),
                ((4, 4), (4, 4), None),
                ((4, 3), (4,), None),
                ((4, 3), (4, 3), (4, 3)),
                ((4, 3), (4, 3), (1,)),
            ],
            ("multiclass", "top", "matrix"): [
                ((2, 4), (2,), None),
                ((2, 2), (2,), None),
                ((2,), (2,), None),
                ((), (), None),
                ((4, 3), (1,), None),
                ((1, 3), (4,), None),
                ((4, 3), (4, 1), None),
                ((4, 3), (4, 3), None),
                ((4, 3), (4,), (4, 1)),
                ((4, 3), (4,), (1,)),
            ],
        }.items()
        for kind in kinds
        for shapes in several
    ],
)
def test_shapes_that_differ_are_an_error(kind: str, predictions: Shape, targets: Shape, mask: Shape | None) -> None:
    with pytest.raises(
        UserError, match=r"^[BMC]\w+ got predictions of shape \(.*expected (predictions|targets|a mask) of"
    ):
        updated(
            kind,
            torch.zeros(predictions),
            torch.zeros(targets, dtype=torch.int64),
            None if mask is None else torch.ones(mask, dtype=torch.bool),
        )


GOOD = torch.tensor([0.9, 0.2, 0.8, 0.1])
YES = torch.tensor([1, 0, 1, 0])
CLASSES = torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize("wrong", [-1, -100, 2, 0.5, math.inf])
@pytest.mark.parametrize("kind", ["binary", "auroc", "bins", "logits", "multilabel"])
def test_a_target_other_than_zero_and_one_gives_nan_unless_masked(kind: str, wrong: float) -> None:
    targets = torch.tensor([1, wrong, 1, 0])
    predictions, mask = GOOD, targets != wrong
    if kind == "multilabel":
        predictions, targets = GOOD.unsqueeze(-1).repeat(1, 3), targets.unsqueeze(-1).repeat(1, 3)
    assert all(map(math.isnan, values(updated(kind, predictions, targets)).values()))
    assert set(values(updated(kind, predictions, targets, mask)).values()) <= {1.0, 0.0}
    assert set(values(updated(kind, predictions, targets, mask.int())).values()) <= {1.0, 0.0}


@pytest.mark.parametrize("wrong", [-1, -100, 3, 2**40])
@pytest.mark.parametrize("kind", ["multiclass", "top", "matrix"])
def test_a_target_that_is_no_class_gives_nan_unless_masked(kind: str, wrong: int) -> None:
    targets = torch.tensor([0, wrong, 2, 1])
    assert all(map(math.isnan, values(updated(kind, torch.eye(3)[CLASSES], targets)).values()))
    assert not any(map(math.isnan, values(updated(kind, torch.eye(3)[CLASSES], targets, targets != wrong)).values()))


@pytest.mark.parametrize("kind", ["multiclass", "matrix"])
def test_targets_of_other_integer_types_are_classes_and_floats_are_not(kind: str) -> None:
    right = values(updated(kind, torch.eye(3)[CLASSES], CLASSES))
    assert values(updated(kind, torch.eye(3)[CLASSES], CLASSES.to(torch.uint8))) == right
    with pytest.raises(UserError, match=r"got targets of torch\.float32; expected integers, the indices"):
        updated(kind, torch.eye(3)[CLASSES], CLASSES.float())


@pytest.mark.parametrize("kind", ["auroc", "bins"])
@pytest.mark.parametrize("wrong", [-5.0, 5.0, 1.01, math.inf, -math.inf])
def test_logits_as_probabilities_give_nan(kind: str, wrong: float) -> None:
    scores = torch.tensor([0.9, wrong, 0.8, 0.1])
    assert all(map(math.isnan, values(updated(kind, scores, YES)).values()))
    assert not any(map(math.isnan, values(updated("logits", scores, YES)).values()))


@pytest.mark.parametrize("kind", ["binary", "auroc", "matrix"])
@pytest.mark.parametrize("wrong", [0.5, -math.inf, math.nan, 2.0])
def test_a_mask_of_other_numbers_than_zero_and_one_gives_nan(kind: str, wrong: float) -> None:
    predictions, targets = (torch.eye(3)[CLASSES], CLASSES) if kind == "matrix" else (GOOD, YES)
    metric = updated(kind, predictions, targets, torch.tensor([1, 0, wrong, 1]))
    assert all(map(math.isnan, values(metric).values()))


def test_as_many_highest_predictions_as_classes_at_most() -> None:
    with pytest.raises(UserError, match=r"got top_k = 4; expected 1 to 3, the number of classes\."):
        MulticlassClassification(3, SCORES, top_k=4)
