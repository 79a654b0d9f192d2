"""Documents as training data, and the parts that long ones are split into."""

from typing import NotRequired, TypedDict

from torch import Tensor


class Document(TypedDict):
    """A document, or a part of one.

    Attributes:
        tokens: int64 [n + 1]. The first n are inputs, the last n are labels.
        source: Index of its source in a mixture; absent without a mixture.
    """

    tokens: Tensor
    source: NotRequired[int]


def cut(num_tokens: int, max_length: int) -> list[tuple[int, int]]:
    """Split a document into parts so that each token but the first is the label of exactly one position.

    Args:
        num_tokens: Number of tokens of the document.
        max_length: Largest number of positions of a part.

    Returns:
        The indices of the first and last token of each part, both inclusive. A part starts at the last token of the
        previous part. A document of fewer than two tokens has no parts, since there is no label.
    """
    last = num_tokens - 1
    return [(start, min(start + max_length, last)) for start in range(0, last, max_length)]
