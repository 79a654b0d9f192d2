"""Area under the ROC curve in bounded memory, with an error bound; exact for up to a given number of samples."""

from typing import final

import torch
from torch import Tensor

from d9d_metrics._samples import check_samples, mask_of, not_binary, not_probability
from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric


@final
class BinaryAUROC(Metric):
    r"""AUROC: probability that a positive sample has a larger score than a negative one; a tie counts one half.

    With the counts $p_b, n_b$ of positive and negative scores in bin $b$, and their totals $P, N$,

    $$A = \frac{1}{PN} \sum_b p_b \Big( \sum_{a < b} n_a + \tfrac12 n_b \Big), \qquad
      |A - \mathrm{AUROC}| \le \frac{1}{2PN} \sum_b p_b n_b,$$

    because only the order of pairs within one bin is unknown. The metric's value is a dict with `value` and
    `error_bound`. Both are NaN if a class has no samples. They are also NaN if a counted sample had a NaN, a target
    other than 0 and 1, or a score outside [0, 1] that is not a logit.

    Bins have equal width in $x / (1 + |x|)$ of the logit $x$. Bins need no range and resolve extreme probabilities.
    Counts are float64, exact up to 2^53, because int64 counts would double the message between ranks.

    A rank keeps up to `exact_samples` samples per class. While no rank has seen more samples, the value is exact
    and the bound is 0. Memory: 16 bytes per bin, and 16 bytes per kept sample; the message has the kept samples of
    every rank.

    Args:
        num_bins: Number of bins. For scores spread evenly over the bins the bound is 1 / (2 num_bins).
        exact_samples: Largest number of samples per class that a rank keeps between two resets; 0 keeps none.
        logits: True if scores are logits, False if they are probabilities.
    """

    def __init__(self, *, num_bins: int = 16384, exact_samples: int = 1024, logits: bool = False) -> None:
        self._num_bins, self._logits = num_bins, logits
        self._binned = {name: Accumulator("sum", shape=[num_bins]) for name in ("positive", "negative")}
        self._kept = {name: Accumulator("concat", shape=[exact_samples]) for name in ("positive", "negative")}
        self._invalid = Accumulator("sum")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the accumulators: samples per class and bin, scores kept for the exact value, invalid samples."""
        kept = {f"{name}_samples": accumulator for name, accumulator in self._kept.items()}
        return {**self._binned, **kept, "invalid": self._invalid}

    def update(self, scores_N: Tensor, targets_N: Tensor, mask_N: Tensor | None = None) -> None:
        """Add samples of any shape: scores (larger means more likely positive), and targets (0 or 1, or bool).

        `mask_N` is True for samples to count; None counts all. For labels that mean "ignore", pass
        `mask_N=targets_N != -100`. Raises `UserError` unless all shapes are equal.
        """
        check_samples(type(self).__name__, scores_N, targets_N, mask_N)
        scores = scores_N.detach().reshape(-1).double()
        counts, is_no_mask = mask_of(None if mask_N is None else mask_N.reshape(-1), scores)
        targets = targets_N.reshape(-1)
        is_positive = targets.bool()
        is_no_score = scores.isnan() if self._logits else not_probability(scores)
        self._invalid.update(((is_no_score | not_binary(targets) | is_no_mask) & counts).sum())
        bins = self._bins(scores)
        for name, is_counted in (("positive", is_positive & counts), ("negative", ~is_positive & counts)):
            empty = torch.zeros(self._num_bins, dtype=torch.float64, device=scores.device)
            self._binned[name].update(empty.scatter_add_(0, bins, is_counted.double()))
            if self._kept[name].value.numel() > 0:
                self._kept[name].update(scores.where(is_counted, torch.nan))

    def compute(self) -> dict[str, Tensor]:
        """Return `value` and `error_bound`: float64 scalars."""
        positive, negative = self._binned["positive"].value, self._binned["negative"].value
        num_pairs = positive.sum() * negative.sum()
        num_pairs = num_pairs.where((num_pairs > 0) & (self._invalid.value == 0), torch.nan)
        num_before = negative.cumsum(0) - negative
        binned = (positive * (num_before + negative / 2)).sum() / num_pairs
        bound = (positive * negative).sum() / (2 * num_pairs)
        above, below = self._kept["positive"].value, self._kept["negative"].value
        is_exact = (_num_kept(above) == positive.sum()) & (_num_kept(below) == negative.sum())
        exact = _num_ordered_pairs(above, below) / num_pairs
        return {
            "value": exact.where(is_exact, binned),
            "error_bound": (0 * num_pairs).where(is_exact, bound),
        }

    def _bins(self, scores: Tensor) -> Tensor:
        """Return the bin of each score; 0 for NaN. Rounding errors of probabilities are clamped."""
        logits = scores if self._logits else scores.clamp(0, 1).logit()
        # sign * (1 - 1 / (1 + |x|)) equals x / (1 + |x|), and is finite for infinite x.
        position = logits.sign() * (1 - 1 / (1 + logits.abs()))
        return ((position + 1) * (self._num_bins / 2)).nan_to_num(0).long().clamp_(0, self._num_bins - 1)


def _num_kept(samples: Tensor) -> Tensor:
    return (~samples.isnan()).sum()


def _num_ordered_pairs(above: Tensor, below: Tensor) -> Tensor:
    """Return the number of pairs with above > below, where each tie counts one half; NaNs are ignored."""
    # NaNs become +inf and sort last. The minimum below excludes them from the ties of a score of +inf.
    ordered = below.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).sort().values
    smaller = torch.searchsorted(ordered, above, right=False)
    not_larger = torch.searchsorted(ordered, above, right=True).minimum(_num_kept(below))
    return ((smaller + not_larger).double() / 2).where(~above.isnan(), 0.0).sum()
