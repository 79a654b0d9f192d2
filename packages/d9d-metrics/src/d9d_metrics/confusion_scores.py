"""Scores of a classifier as pure functions of how often it was right and wrong: accuracy, precision, recall, F-beta.

Legend: C classes (or labels).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

Average = Literal["micro", "macro", "weighted"] | None
"""How the scores of several classes become one.

`"micro"` adds the counts of all classes and takes the score of the sums. `"macro"` is the mean over all classes. A
class that never occurs has the score 0, as in scikit-learn with `labels=range(num_classes)` and `zero_division=0`. Only
`accuracy` leaves such a class out. `"weighted"` is the mean weighted by how often each class is true. `None` keeps a
score for each class.
"""


@final
@dataclass(frozen=True, slots=True)
class ConfusionCounts:
    """How often a classifier was right and wrong about each class, seen as a question of yes or no.

    Attributes:
        true_positive: Said yes, and was right; all four are float64, of shape [C].
        false_positive: Said yes, and was wrong.
        false_negative: Said no, and was wrong.
        true_negative: Said no, and was right.
        is_exclusive: Whether each sample is of exactly one class, and the classifier names exactly one.
    """

    true_positive: Tensor
    false_positive: Tensor
    false_negative: Tensor
    true_negative: Tensor
    is_exclusive: bool

    @property
    def support(self) -> Tensor:
        """How often each class is true."""
        return self.true_positive + self.false_negative


Score: TypeAlias = Callable[[ConfusionCounts], Tensor]
"""Computes a float64 tensor, a scalar or one for each class, from counts; without waiting for the device."""


def accuracy(average: Average = "micro") -> Score:
    """How often the classifier is right: (TP + TN) / all, for each class or label.

    For classes that exclude each other, of which each sample has one, it is TP / (TP + FN): the share of the samples of
    a class that were recognised. Then `"micro"` is the share of all samples. `"macro"` is the balanced accuracy: the
    mean over the classes that are true at least once, as in scikit-learn's `balanced_accuracy_score`.

    Args:
        average: How classes are averaged.
    """

    def score(counts: ConfusionCounts) -> Tensor:
        right_C, all_C = counts.true_positive, counts.support
        if counts.is_exclusive and average == "macro":
            return _ratio(_ratio(right_C, all_C).sum(), (all_C > 0).sum())
        if not counts.is_exclusive:
            right_C, all_C = right_C + counts.true_negative, all_C + counts.false_positive + counts.true_negative
        return _average(right_C, all_C, counts, average)

    return score


def precision(average: Average = "micro") -> Score:
    """How often a yes is right: TP / (TP + FP).

    Args:
        average: How classes are averaged.
    """

    def score(counts: ConfusionCounts) -> Tensor:
        return _average(counts.true_positive, counts.true_positive + counts.false_positive, counts, average)

    return score


def recall(average: Average = "micro") -> Score:
    """How much of what is true is found: TP / (TP + FN).

    Args:
        average: How classes are averaged.
    """

    def score(counts: ConfusionCounts) -> Tensor:
        return _average(counts.true_positive, counts.support, counts, average)

    return score


def f_beta(beta: float = 1.0, average: Average = "micro") -> Score:
    """The harmonic mean of precision and recall: (1 + b^2) TP / ((1 + b^2) TP + b^2 FN + FP), with b = beta.

    Args:
        beta: How many times as much recall counts as precision.
        average: How classes are averaged.
    """

    def score(counts: ConfusionCounts) -> Tensor:
        good_C = (1 + beta**2) * counts.true_positive
        bad_C = beta**2 * counts.false_negative + counts.false_positive
        return _average(good_C, good_C + bad_C, counts, average)

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


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Part / whole, and 0 where the whole is 0."""
    return part / torch.where(whole == 0, 1.0, whole)
