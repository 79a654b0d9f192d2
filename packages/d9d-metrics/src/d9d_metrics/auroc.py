"""The area under the ROC curve in bounded memory, with a bound of its error; exact as long as the samples fit."""

from typing import final

import torch
from torch import Tensor

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric


@final
class BinaryAUROC(Metric):
    r"""How likely a positive sample has a larger score than a negative one, a tie counting one half.

    With the counts $p_b, n_b$ of positive and negative scores in bin $b$, and $P, N$ of all,

    $$A = \frac{1}{PN} \sum_b p_b \Big( \sum_{a < b} n_a + \tfrac12 n_b \Big), \qquad
      |A - \mathrm{AUROC}| \le \frac{1}{2PN} \sum_b p_b n_b,$$

    because bins keep the order of scores, and only pairs within one bin are unknown. The value has both, as `value` and
    `error_bound`. Both are NaN as long as one of the two classes was not seen, or if a score or a target was NaN.

    Bins are of equal width in $x / (1 + |x|)$ of the logit $x$, so that they are fine where scores are many, and fine
    near the probabilities 0 and 1; no range needs to be known.

    Counts are of float64: exact up to 2^53, and half as long as whole numbers in the message between ranks.

    Until a rank has seen more samples of a class than `exact_samples`, its samples themselves are kept, and if that
    holds for every rank, the value is exact and the bound is 0. Memory: 16 bytes for each bin, and 16 for each sample
    that may be kept; in a collective the latter for each rank.

    Args:
        num_bins: Number of bins. For scores spread evenly over the bins the bound is 1 / (2 num_bins).
        exact_samples: How many samples of each class a rank keeps between two resets.
        logits: Whether scores are logits, any real number; otherwise they are probabilities.
    """

    def __init__(self, *, num_bins: int = 16384, exact_samples: int = 0, logits: bool = False) -> None:
        self._num_bins, self._logits = num_bins, logits
        self._binned = {name: Accumulator("sum", shape=[num_bins]) for name in ("positive", "negative")}
        self._kept = {name: Accumulator("concat", shape=[exact_samples]) for name in ("positive", "negative")}
        self._num_nan = Accumulator("sum")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the number of samples of each class in each bin, and the samples that are kept."""
        kept = {f"{name}_samples": accumulator for name, accumulator in self._kept.items()}
        return {**self._binned, **kept, "nan": self._num_nan}

    def update(self, scores_N: Tensor, targets_N: Tensor, mask_N: Tensor | None = None) -> None:
        """Take in some samples.

        Args:
            scores_N: The larger, the more likely positive; of any shape.
            targets_N: The truth, 0 or 1, or bool.
            mask_N: Which samples count; all of them by default.
        """
        scores = scores_N.detach().reshape(-1).double()
        counts = torch.ones_like(scores, dtype=torch.bool) if mask_N is None else mask_N.reshape(-1).bool()
        is_positive = targets_N.reshape(-1).bool()
        is_nan = scores.isnan() | targets_N.reshape(-1).isnan()
        self._num_nan.update((is_nan & counts).sum())
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
        num_pairs = num_pairs.where((num_pairs > 0) & (self._num_nan.value == 0), torch.nan)
        num_before = negative.cumsum(0) - negative
        binned = (positive * (num_before + negative / 2)).sum() / num_pairs
        bound = (positive * negative).sum() / (2 * num_pairs)
        above, below = self._kept["positive"].value, self._kept["negative"].value
        is_complete = (_num_kept(above) == positive.sum()) & (_num_kept(below) == negative.sum())
        exact = _num_ordered_pairs(above, below) / num_pairs
        return {
            "value": exact.where(is_complete, binned),
            "error_bound": (0 * num_pairs).where(is_complete, bound),
        }

    def _bins(self, scores: Tensor) -> Tensor:
        """The bin of each score; of the first one for NaN. Beyond 0 and 1 there are no probabilities, but an order."""
        logits = scores if self._logits else scores.clamp(0, 1).logit()
        # sign - sign / (1 + |x|) is x / (1 + |x|) that has a value for infinite x.
        place = logits.sign() * (1 - 1 / (1 + logits.abs()))
        return ((place + 1) * (self._num_bins / 2)).nan_to_num(0).long().clamp_(0, self._num_bins - 1)


def _num_kept(samples: Tensor) -> Tensor:
    return (~samples.isnan()).sum()


def _num_ordered_pairs(above: Tensor, below: Tensor) -> Tensor:
    """The number of pairs in which the first is larger, equal ones counting one half; NaN is left out."""
    # What is left out is put behind everything: nothing is larger, and it is not among the equal ones of an infinity.
    ordered = below.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).sort().values
    smaller = torch.searchsorted(ordered, above, right=False)
    not_larger = torch.searchsorted(ordered, above, right=True).minimum(_num_kept(below))
    return ((smaller + not_larger).double() / 2).where(~above.isnan(), 0.0).sum()
