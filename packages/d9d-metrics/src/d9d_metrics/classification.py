"""Measures classifiers: binary, with several classes, with several labels; any scores of the same counts together.

A counted sample with a NaN among its predictions or targets has no answer, right or wrong. Every metric here counts
such samples apart, and its value is NaN as long as it has one.

Legend: N samples (any leading dims), C classes or labels.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.confusion_scores import ConfusionCounts, Score
from d9d_metrics.metric import Metric


@final
class BinaryClassification(Metric):
    """Scores of a classifier that says yes or no; yes is the one class that is counted.

    All scores are NaN if a prediction or a target of a counted sample was NaN.

    Args:
        scores: What to compute, by name: `{"precision": precision(), "f1": f_beta(1.0)}`.
        threshold: Beyond it a prediction is a yes: 0.5 for probabilities, 0.0 for logits.
    """

    def __init__(self, scores: Mapping[str, Score], *, threshold: float = 0.5) -> None:
        self._counts, self._threshold = _Counts(1, scores, is_exclusive=False), threshold

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the counts."""
        return self._counts.accumulators()

    def update(self, predictions_N: Tensor, targets_N: Tensor, mask_N: Tensor | None = None) -> None:
        """Take in some samples.

        Args:
            predictions_N: Probabilities or logits; of any shape.
            targets_N: The truth, 0 or 1, or bool.
            mask_N: Which samples count; all of them by default.
        """
        predictions_NC, targets_NC = predictions_N.unsqueeze(-1), targets_N.unsqueeze(-1)
        is_nan_N = _is_nan(predictions_NC) | _is_nan(targets_NC)
        self._counts.update(predictions_NC > self._threshold, targets_NC.bool(), is_nan_N, mask_N)

    def compute(self) -> dict[str, Tensor]:
        """Return each score: float64."""
        return self._counts.compute()


@final
class MultilabelClassification(Metric):
    """Scores of a classifier that says yes or no to each of several labels.

    All scores, of every label, are NaN if a prediction or a target of a counted sample was NaN.

    Args:
        num_labels: Number of labels.
        scores: What to compute, by name.
        threshold: Beyond it a prediction is a yes: 0.5 for probabilities, 0.0 for logits.
    """

    def __init__(self, num_labels: int, scores: Mapping[str, Score], *, threshold: float = 0.5) -> None:
        self._counts, self._threshold = _Counts(num_labels, scores, is_exclusive=False), threshold

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the counts."""
        return self._counts.accumulators()

    def update(self, predictions_NC: Tensor, targets_NC: Tensor, mask_N: Tensor | None = None) -> None:
        """Take in some samples.

        Args:
            predictions_NC: Probabilities or logits; labels in the last dim.
            targets_NC: The truth, 0 or 1, or bool.
            mask_N: Which samples count; all of them by default.
        """
        is_nan_N = _is_nan(predictions_NC) | _is_nan(targets_NC)
        self._counts.update(predictions_NC > self._threshold, targets_NC.bool(), is_nan_N, mask_N)

    def compute(self) -> dict[str, Tensor]:
        """Return each score: float64."""
        return self._counts.compute()


@final
class MulticlassClassification(Metric):
    """Scores of a classifier that chooses one of several classes.

    With `top_k` it is given credit for any of its k best: if the true class is among them, that is taken for its
    answer, otherwise the best one is. So every sample has one answer, and all scores are those of these answers. Among
    equal predictions the first class is the better one. Infinite predictions are compared like all numbers.

    All scores are NaN if a prediction of a counted sample was NaN, for whichever class.

    Args:
        num_classes: Number of classes.
        scores: What to compute, by name.
        top_k: How many of the best count.
    """

    def __init__(self, num_classes: int, scores: Mapping[str, Score], *, top_k: int = 1) -> None:
        assert 1 <= top_k <= num_classes
        self._counts, self._num_classes, self._top_k = (
            _Counts(num_classes, scores, is_exclusive=True),
            num_classes,
            top_k,
        )

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the counts."""
        return self._counts.accumulators()

    def update(self, predictions_NC: Tensor, targets_N: Tensor, mask_N: Tensor | None = None) -> None:
        """Take in some samples.

        Args:
            predictions_NC: Probabilities or logits; classes in the last dim.
            targets_N: The index of the true class; int64. Where the mask is false it may be anything.
            mask_N: Which samples count; all of them by default.
        """
        targets_N = targets_N if mask_N is None else targets_N.where(mask_N, 0)
        answers_N = _answers(predictions_NC, targets_N, self._top_k)
        yes_NC, true_NC = (F.one_hot(classes_N, self._num_classes).bool() for classes_N in (answers_N, targets_N))
        self._counts.update(yes_NC, true_NC, _is_nan(predictions_NC), mask_N)

    def compute(self) -> dict[str, Tensor]:
        """Return each score: float64."""
        return self._counts.compute()


@final
class ConfusionMatrix(Metric):
    """How often each class was taken for each other one. The value has the true class in its first dim.

    All elements of the value are NaN if a prediction of a counted sample was NaN.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._counts = Accumulator("count", shape=[num_classes, num_classes])
        self._num_nan = Accumulator("count")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the counts, and the number of samples with a NaN."""
        return {"counts": self._counts, "nan": self._num_nan}

    def update(self, predictions_NC: Tensor, targets_N: Tensor, mask_N: Tensor | None = None) -> None:
        """Take in some samples; arguments as for `MulticlassClassification`."""
        targets_N = targets_N if mask_N is None else targets_N.where(mask_N, 0)
        counted_N = torch.ones_like(targets_N) if mask_N is None else mask_N.bool().long()
        pairs_N = targets_N * self._num_classes + _answers(predictions_NC, targets_N, 1)
        counts = torch.zeros(self._num_classes**2, dtype=torch.int64, device=targets_N.device)
        counts.scatter_add_(0, pairs_N.reshape(-1), counted_N.reshape(-1))
        self._counts.update(counts.view(self._num_classes, self._num_classes))
        self._num_nan.update((_is_nan(predictions_NC) & counted_N.bool()).sum())

    def compute(self) -> Tensor:
        """Return the counts: float64, since int64 has no NaN, of shape [true class, answer]."""
        return _unless_nan(self._counts.value.double(), self._num_nan)


@final
class _Counts:
    """The counts that all classifiers share, and what is computed from them."""

    def __init__(self, num_classes: int, scores: Mapping[str, Score], *, is_exclusive: bool) -> None:
        self._scores, self._is_exclusive = dict(scores), is_exclusive
        self._true_positive, self._positive, self._true = (Accumulator("count", shape=[num_classes]) for _ in range(3))
        self._total, self._num_nan = Accumulator("count"), Accumulator("count")

    def accumulators(self) -> dict[str, Accumulator]:
        return {
            "true_positive": self._true_positive,
            "positive": self._positive,
            "true": self._true,
            "total": self._total,
            "nan": self._num_nan,
        }

    def update(self, yes_NC: Tensor, true_NC: Tensor, is_nan_N: Tensor, mask_N: Tensor | None) -> None:
        mask_N = torch.ones_like(yes_NC[..., 0]) if mask_N is None else mask_N.bool()
        yes_NC, true_NC = yes_NC & mask_N.unsqueeze(-1), true_NC & mask_N.unsqueeze(-1)
        for accumulator, what_NC in (
            (self._true_positive, yes_NC & true_NC),
            (self._positive, yes_NC),
            (self._true, true_NC),
        ):
            accumulator.update(what_NC.reshape(-1, what_NC.shape[-1]).sum(0))
        self._total.update(mask_N.sum())
        self._num_nan.update((is_nan_N & mask_N).sum())

    def compute(self) -> dict[str, Tensor]:
        right_C, yes_C, true_C = self._true_positive.value, self._positive.value, self._true.value
        # Whole numbers until here: differences of large counts are exact, and each is rounded once.
        counts = ConfusionCounts(
            true_positive=right_C.double(),
            false_positive=(yes_C - right_C).double(),
            false_negative=(true_C - right_C).double(),
            true_negative=(self._total.value - yes_C - true_C + right_C).double(),
            is_exclusive=self._is_exclusive,
        )
        return {name: _unless_nan(score(counts), self._num_nan) for name, score in self._scores.items()}


def _is_nan(values_NC: Tensor) -> Tensor:
    """Samples with a NaN in the last dim, bool of shape [N]."""
    return values_NC.isnan().any(-1)


def _unless_nan(value: Tensor, num_nan: Accumulator) -> Tensor:
    """Return the value, or NaN if a sample had one; no host-device synchronisation."""
    return value.where(num_nan.value == 0, torch.nan)


def _answers(predictions_NC: Tensor, targets_N: Tensor, top_k: int) -> Tensor:
    """The class that a classifier is taken to answer with."""
    of_target_N1 = predictions_NC.gather(-1, targets_N.unsqueeze(-1))
    is_earlier_NC = torch.arange(predictions_NC.shape[-1], device=targets_N.device) < targets_N.unsqueeze(-1)
    is_better_NC = (predictions_NC > of_target_N1) | (predictions_NC == of_target_N1) & is_earlier_NC
    return torch.where(is_better_NC.sum(-1) < top_k, targets_N, predictions_NC.argmax(-1))
