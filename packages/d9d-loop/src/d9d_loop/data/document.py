"""Documents as training data, and the split of long documents into parts."""

from typing import NotRequired, TypedDict

from torch import Tensor


class Document(TypedDict):
    """Document, or a part of one.

    Attributes:
        tokens: int64 [n + 1]. The first n are inputs, the last n are labels.
        source: Index of the document's source in a mixture; absent without a mixture.
    """

    tokens: Tensor
    source: NotRequired[int]


def cut(num_tokens: int, max_length: int) -> list[tuple[int, int]]:
    """Split a document into parts; return the first and last token of each part, both inclusive.

    A part has at most `max_length` positions and starts at the last token of the previous part. So each token but the
    first is a label exactly once. A document of fewer than two tokens has no parts, since there is no label.
    """
    last = num_tokens - 1
    return [(start, min(start + max_length, last)) for start in range(0, last, max_length)]
