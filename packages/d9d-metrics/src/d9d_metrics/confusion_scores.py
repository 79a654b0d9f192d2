"""Classification scores as pure functions of the confusion counts: accuracy, precision, recall, F-beta.

Legend: C classes (or labels).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never, final

import torch
from torch import Tensor

Average = Literal["micro", "macro", "weighted"] | None
"""Average of per-class scores.

`"micro"` sums the counts of all classes and computes one score. `"macro"` is the mean over all classes. Classes without
samples have the score 0, as in scikit-learn with `labels=range(num_classes)` and `zero_division=0`; only `accuracy`
excludes them. `"weighted"` is the mean weighted by the number of samples of each class. `None` returns one score per
class.
"""


@final
@dataclass(frozen=True, slots=True)
class ConfusionCounts:
    """Confusion counts of each class, one versus the rest; float64 tensors of shape [C].

    Attributes:
        is_exclusive: True if each sample has exactly one true and one predicted class.
    """

    true_positive: Tensor
    false_positive: Tensor
    false_negative: Tensor
    true_negative: Tensor
    is_exclusive: bool

    @property
    def support(self) -> Tensor:
        """Number of samples of each class."""
        return self.true_positive + self.false_negative


Score: TypeAlias = Callable[[ConfusionCounts], Tensor]
"""Function of counts that returns a float64 scalar, or one value per class. No host-device synchronization."""


def accuracy(average: Average = "micro") -> Score:
    """Return a `Score` that computes the accuracy: (TP + TN) / all samples, for each class or label.

    If classes are exclusive, the accuracy of a class is TP / (TP + FN), the fraction of its samples that were predicted
    correctly. Then `"micro"` is the fraction of all samples. `"macro"` is the balanced accuracy: the mean over classes
    with at least one sample, as in scikit-learn's `balanced_accuracy_score`.
    """

    def score(counts: ConfusionCounts) -> Tensor:
        correct_C, all_C = counts.true_positive, counts.support
        if counts.is_exclusive and average == "macro":
            return _ratio(_ratio(correct_C, all_C).sum(), (all_C > 0).sum())
        if not counts.is_exclusive:
            correct_C, all_C = correct_C + counts.true_negative, all_C + counts.false_positive + counts.true_negative
        return _average(correct_C, all_C, counts, average)

    return score


def precision(average: Average = "micro") -> Score:
    """Return a `Score` that computes the precision: TP / (TP + FP)."""

    def score(counts: ConfusionCounts) -> Tensor:
        return _average(counts.true_positive, counts.true_positive + counts.false_positive, counts, average)

    return score


def recall(average: Average = "micro") -> Score:
    """Return a `Score` that computes the recall: TP / (TP + FN)."""

    def score(counts: ConfusionCounts) -> Tensor:
        return _average(counts.true_positive, counts.support, counts, average)

    return score


def f_beta(beta: float = 1.0, average: Average = "micro") -> Score:
    """Return a `Score` that computes F-beta, the weighted harmonic mean of precision and recall.

    F-beta is (1 + b^2) TP / ((1 + b^2) TP + b^2 FN + FP), where b = beta is the weight of recall.
    """

    def score(counts: ConfusionCounts) -> Tensor:
        correct_C = (1 + beta**2) * counts.true_positive
        wrong_C = beta**2 * counts.false_negative + counts.false_positive
        return _average(correct_C, correct_C + wrong_C, counts, average)

    return score


def _average(part_C: Tensor, whole_C: Tensor, counts: ConfusionCounts, average: Average) -> Tensor:
    match average:
        case "micro":
            return _ratio(part_C.sum(), whole_C.sum())
        case "macro":
            return _ratio(part_C, whole_C).mean()
        case "weighted":
            return _ratio((_ratio(part_C, whole_C) * counts.support).sum(), counts.support.sum())
        case None:
            return _ratio(part_C, whole_C)
        case _:
            assert_never(average)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, and 0 where the whole is 0."""
    return part / torch.where(whole == 0, 1.0, whole)
