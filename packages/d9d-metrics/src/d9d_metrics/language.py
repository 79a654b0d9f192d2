"""What a language model is judged by: bits per byte, which no tokenizer can flatter, and perplexity per token."""

import math
from collections.abc import Mapping
from typing import final

from torch import Tensor

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.aggregates import WeightedMean
from d9d_metrics.metric import Metric


@final
class BitsPerByte(Metric):
    r"""Cross-entropy of text per byte of its UTF-8 form, in bits: $\sum_i -\ln p_i / (\text{bytes} \cdot \ln 2)$.

    It compares models of different vocabularies, since bytes are not a choice of the tokenizer. 0 if nothing was seen,
    NaN if a cross-entropy was NaN.
    """

    def __init__(self) -> None:
        self._nats_per_byte = WeightedMean()

    def accumulators(self) -> Mapping[str, Accumulator]:
        """Return the sum of cross-entropies in nats (`total`) and the number of bytes (`weight`)."""
        return self._nats_per_byte.accumulators()

    def update(self, nats: Tensor | float, num_bytes: Tensor | float) -> None:
        """Take in some text.

        Args:
            nats: The cross-entropy summed over its predicted tokens, in nats; a number or a scalar tensor.
            num_bytes: How many bytes these tokens stand for; a number or a scalar tensor.
        """
        self._nats_per_byte.update(nats, num_bytes)

    def compute(self) -> Tensor:
        """Return the bits per byte: a float64 scalar."""
        return self._nats_per_byte.compute() / math.log(2)


@final
class Perplexity(Metric):
    r"""The exponential of the mean cross-entropy over all tokens: $\exp(\sum_i -\ln p_i / \text{tokens})$; 1 of none.

    The mean is taken over the tokens of all ranks before the exponential, so it is not a mean of perplexities. It is
    NaN if a cross-entropy was NaN or minus infinity, which would be a perplexity of 0, better than any other.
    """

    def __init__(self) -> None:
        self._nats_per_token = WeightedMean()

    def accumulators(self) -> Mapping[str, Accumulator]:
        """Return the sum of cross-entropies in nats (`total`) and the number of tokens (`weight`)."""
        return self._nats_per_token.accumulators()

    def update(self, nats: Tensor | float, num_tokens: Tensor | float) -> None:
        """Take in some text.

        Args:
            nats: The cross-entropy summed over its predicted tokens, in nats; a number or a scalar tensor.
            num_tokens: How many tokens were predicted; a number or a scalar tensor.
        """
        self._nats_per_token.update(nats, num_tokens)

    def compute(self) -> Tensor:
        """Return the perplexity: a float64 scalar."""
        nats = self._nats_per_token.compute()
        return nats.where(nats != -math.inf, math.nan).exp()
