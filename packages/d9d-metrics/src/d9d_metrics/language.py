"""Language-model metrics: bits per byte, which is independent of the tokenizer, and perplexity per token."""

import math
from collections.abc import Mapping
from typing import final

from torch import Tensor

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.aggregates import WeightedMean
from d9d_metrics.metric import Metric


class _MeanCrossEntropy(Metric):
    """Mean cross-entropy in nats per unit, such as a byte or a token."""

    def __init__(self) -> None:
        self._mean = WeightedMean()

    def accumulators(self) -> Mapping[str, Accumulator]:
        """Return the accumulators of the cross-entropies in nats (`total`) and the number of units (`weight`)."""
        return self._mean.accumulators()


@final
class BitsPerByte(_MeanCrossEntropy):
    r"""Cross-entropy per byte of UTF-8 text, in bits: $\sum_i -\ln p_i / (\text{bytes} \cdot \ln 2)$.

    Comparable between tokenizers, because the number of bytes does not depend on them. The value is 0 without data, and
    NaN if a cross-entropy was NaN.
    """

    def update(self, nats: Tensor | float, num_bytes: Tensor | float) -> None:
        """Add the sum of tokens' cross-entropies in nats, and the number of UTF-8 bytes; numbers or scalar tensors."""
        self._mean.update(nats, num_bytes)

    def compute(self) -> Tensor:
        """Return the bits per byte: a float64 scalar."""
        return self._mean.compute() / math.log(2)


@final
class Perplexity(_MeanCrossEntropy):
    r"""Exponential of the mean cross-entropy over all tokens, $\exp(\sum_i -\ln p_i / \text{tokens})$; 1 without data.

    The mean is taken over the tokens of all ranks before the exponential, so the value is not a mean of perplexities.
    The value is NaN if a cross-entropy was NaN or minus infinity.
    """

    def update(self, nats: Tensor | float, num_tokens: Tensor | float) -> None:
        """Add the sum of tokens' cross-entropies in nats, and the number of tokens; numbers or scalar tensors."""
        self._mean.update(nats, num_tokens)

    def compute(self) -> Tensor:
        """Return the perplexity: a float64 scalar."""
        nats = self._mean.compute()
        return nats.where(nats != -math.inf, math.nan).exp()
