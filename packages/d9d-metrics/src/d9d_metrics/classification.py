"""Binary, multiclass and multilabel classification metrics; any number of scores share one set of counts.

Values are NaN if a counted sample had a NaN or a target that is not a label. Samples outside the mask have no effect.

Legend: N samples (any leading dims), C classes or labels.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_metrics._samples import check_samples, mask_of, not_binary, not_probability
from d9d_metrics.accumulator import Accumulator
from d9d_metrics.confusion_scores import ConfusionCounts, Score
from d9d_metrics.metric import Metric


class _Classification(Metric):
    """Scores that are computed from per-class counts of true positives, predicted and actual positives."""

    def __init__(self, num_classes: int, scores: Mapping[str, Score], *, is_exclusive: bool) -> None:
        self._scores, self._is_exclusive, self._num_classes = dict(scores), is_exclusive, num_classes
        self._true_positive, self._positive, self._true = (Accumulator("count", shape=[num_classes]) for _ in range(3))
        self._total, self._invalid = Accumulator("count"), Accumulator("count")

    def _count_above(self, threshold: float, predictions_NC: Tensor, targets_NC: Tensor, mask_N: Tensor | None) -> None:
        are_probabilities = 0 < threshold < 1
        is_no_score_NC = not_probability(predictions_NC) if are_probabilities else predictions_NC.isnan()
        is_invalid_N = is_no_score_NC.any(-1) | not_binary(targets_NC).any(-1)
        self._count(predictions_NC > threshold, targets_NC.bool(), is_invalid_N, mask_N)

    def _count(self, predicted_NC: Tensor, true_NC: Tensor, is_invalid_N: Tensor, mask_N: Tensor | None) -> None:
        mask_N, is_no_mask_N = mask_of(mask_N, predicted_NC[..., 0])
        predicted_NC, true_NC = predicted_NC & mask_N.unsqueeze(-1), true_NC & mask_N.unsqueeze(-1)
        for accumulator, is_counted_NC in (
            (self._true_positive, predicted_NC & true_NC),
            (self._positive, predicted_NC),
            (self._true, true_NC),
        ):
            accumulator.update(is_counted_NC.reshape(-1, is_counted_NC.shape[-1]).sum(0))
        self._total.update(mask_N.sum())
        self._invalid.update(((is_invalid_N | is_no_mask_N) & mask_N).sum())

    def compute(self) -> dict[str, Tensor]:
        """Return each score by name: a float64 scalar, or one value per class or label, of shape [C]."""
        true_positive_C, predicted_C, true_C = self._true_positive.value, self._positive.value, self._true.value
        # The differences are exact in int64; each result is rounded to float64 once.
        counts = ConfusionCounts(
            true_positive=true_positive_C.double(),
            false_positive=(predicted_C - true_positive_C).double(),
            false_negative=(true_C - true_positive_C).double(),
            true_negative=(self._total.value - predicted_C - true_C + true_positive_C).double(),
            is_exclusive=self._is_exclusive,
        )
        return {name: _unless(self._invalid, score(counts)) for name, score in self._scores.items()}


@final
class BinaryClassification(_Classification):
    """Scores of a binary classifier; class 1 is the positive class.

    A NaN, or a target other than 0 and 1, in a counted sample makes all scores NaN. So does a prediction outside
    [0, 1], such as a logit, if the threshold is between 0 and 1, that of a probability.

    Args:
        scores: Scores to compute, by name, e.g. `{"precision": precision(), "f1": f_beta(1.0)}`.
        threshold: Predictions above the threshold are positive; use 0.5 for probabilities and 0.0 for logits.
    """

    def __init__(self, scores: Mapping[str, Score], *, threshold: float = 0.5) -> None:
        super().__init__(1, scores, is_exclusive=False)
        self._threshold = threshold

    def update(self, predictions_N: Tensor, targets_N: Tensor, mask_N: Tensor | None = None) -> None:
        """Add samples of any shape: probabilities or logits, and targets (0 or 1, or bool) of the same shape.

        `mask_N`, of the same shape, is True for samples to count; None counts all. For labels that mean "ignore", pass
        `mask_N=targets_N != -100`. Raises `UserError` if the shapes differ.
        """
        check_samples(type(self).__name__, predictions_N, targets_N, mask_N)
        self._count_above(self._threshold, predictions_N.unsqueeze(-1), targets_N.unsqueeze(-1), mask_N)


@final
class MultilabelClassification(_Classification):
    """Scores of a classifier with several independent binary labels.

    A NaN, or a target other than 0 and 1, in a counted sample makes the scores of all labels NaN, as does a logit where
    the threshold is that of a probability. See `BinaryClassification` for the arguments.
    """

    def __init__(self, num_labels: int, scores: Mapping[str, Score], *, threshold: float = 0.5) -> None:
        super().__init__(num_labels, scores, is_exclusive=False)
        self._threshold = threshold

    def update(self, predictions_NC: Tensor, targets_NC: Tensor, mask_N: Tensor | None = None) -> None:
        """Add samples as in `BinaryClassification.update`; the last dim of predictions and targets is the label."""
        check_samples(type(self).__name__, predictions_NC, targets_NC, mask_N, num_columns=self._num_classes)
        self._count_above(self._threshold, predictions_NC, targets_NC, mask_N)


@final
class MulticlassClassification(_Classification):
    """Scores of a classifier over several exclusive classes.

    A NaN, or a target outside [0, C), in a counted sample makes all scores NaN.

    With `top_k` > 1, the predicted class of a sample is the true class if it is among the k highest predictions.
    Otherwise it is the class with the highest prediction. All scores are computed from these predicted classes.
    Among equal predictions the class with the smaller index ranks higher.

    Args:
        top_k: Number of highest predictions that may contain the true class.

    Raises:
        UserError: If `top_k` is less than 1, or greater than the number of classes.
    """

    def __init__(self, num_classes: int, scores: Mapping[str, Score], *, top_k: int = 1) -> None:
        if not 1 <= top_k <= num_classes:
            raise UserError(f"got top_k = {top_k}; expected 1 to {num_classes}, the number of classes.")
        super().__init__(num_classes, scores, is_exclusive=True)
        self._top_k = top_k

    def update(self, predictions_NC: Tensor, targets_N: Tensor, mask_N: Tensor | None = None) -> None:
        """Add probabilities or logits, whose last dim is the class, and integer indices of the true classes.

        `mask_N`, of the targets' shape, is True for samples to count, None counts all; targets of other samples are
        ignored. Raises `UserError` if a shape differs, or if targets are not integers.
        """
        C = self._num_classes
        check_samples(type(self).__name__, predictions_NC, targets_N, mask_N, num_columns=C, is_exclusive=True)
        targets_N, is_invalid_N = _valid_classes(targets_N, predictions_NC)
        predicted_N = _predicted_classes(predictions_NC, targets_N, self._top_k)
        predicted_NC, true_NC = (F.one_hot(classes_N, C).bool() for classes_N in (predicted_N, targets_N))
        self._count(predicted_NC, true_NC, is_invalid_N, mask_N)


@final
class ConfusionMatrix(Metric):
    """Number of samples of each true class that were predicted as each class.

    The value is NaN if a counted sample had a NaN prediction, or a target outside [0, C).
    """

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._counts = Accumulator("count", shape=[num_classes, num_classes])
        self._invalid = Accumulator("count")

    def update(self, predictions_NC: Tensor, targets_N: Tensor, mask_N: Tensor | None = None) -> None:
        """Add a batch of samples; see `MulticlassClassification.update` for the arguments."""
        C = self._num_classes
        check_samples(type(self).__name__, predictions_NC, targets_N, mask_N, num_columns=C, is_exclusive=True)
        targets_N, is_invalid_N = _valid_classes(targets_N, predictions_NC)
        mask_N, is_no_mask_N = mask_of(mask_N, targets_N)
        pairs_N = targets_N * C + _predicted_classes(predictions_NC, targets_N, 1)
        counts = torch.zeros(C**2, dtype=torch.int64, device=targets_N.device)
        counts.scatter_add_(0, pairs_N.reshape(-1), mask_N.long().reshape(-1))
        self._counts.update(counts.view(C, C))
        self._invalid.update(((is_invalid_N | is_no_mask_N) & mask_N).sum())

    def compute(self) -> Tensor:
        """Return the counts, of shape [true class, predicted class]; float64, because int64 has no NaN."""
        return _unless(self._invalid, self._counts.value.double())


def _unless(invalid: Accumulator, value: Tensor) -> Tensor:
    """Return the value, or NaN if any counted sample was invalid. No host-device synchronization."""
    return value.where(invalid.value == 0, torch.nan)


def _valid_classes(targets_N: Tensor, predictions_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Return int64 targets, 0 for those outside [0, C), and True for these samples and those with a NaN."""
    targets_N = targets_N.long()  # a narrow dtype may not hold the number of classes
    is_class_N = (targets_N >= 0) & (targets_N < predictions_NC.shape[-1])
    return targets_N.where(is_class_N, 0), ~is_class_N | predictions_NC.isnan().any(-1)


def _predicted_classes(predictions_NC: Tensor, targets_N: Tensor, top_k: int) -> Tensor:
    """Return the predicted class of each sample; see `MulticlassClassification` for `top_k`."""
    prediction_of_target_N1 = predictions_NC.gather(-1, targets_N.unsqueeze(-1))
    is_earlier_NC = torch.arange(predictions_NC.shape[-1], device=targets_N.device) < targets_N.unsqueeze(-1)
    ranks_higher_NC = (predictions_NC > prediction_of_target_N1) | (
        predictions_NC == prediction_of_target_N1
    ) & is_earlier_NC
    return torch.where(ranks_higher_NC.sum(-1) < top_k, targets_N, predictions_NC.argmax(-1))
