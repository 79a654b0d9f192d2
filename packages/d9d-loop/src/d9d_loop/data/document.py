"""Documents as training data, and the split of long documents into parts."""

from typing import NotRequired, TypedDict, cast

from torch import Tensor


class Document(TypedDict):
    """Document, or a part of one.

    Attributes:
        tokens: int64 [n + 1]. The first n are inputs, the last n are labels.
        mask: bool [n + 1], True for each token that contributes to the loss as a label; absent if all do.
        source: Index of the document's source in a mixture; absent without a mixture.
        margin: Margin of the document's pair; absent except for reward models.
    """

    tokens: Tensor
    mask: NotRequired[Tensor]
    source: NotRequired[int]
    margin: NotRequired[float]


class Pair(TypedDict):
    """Preferred and rejected document, which are packed into one row.

    Attributes:
        source: Index of the pair's source in a mixture; absent without a mixture.
        margin: See `read_margin`; absent except for reward models.
    """

    chosen: Document
    rejected: Document
    source: NotRequired[int]
    margin: NotRequired[float]


def documents_of(sample: Document | Pair) -> list[Document]:
    """Return the documents of a sample: the sample itself, or both documents of a pair, chosen before rejected."""
    match sample:
        case {"chosen": chosen, "rejected": rejected, **common}:
            return [{**cast(Document, document), **common} for document in (chosen, rejected)]
        case _:
            return [cast(Document, sample)]


def cut(num_tokens: int, max_length: int) -> list[tuple[int, int]]:
    """Split a document into parts; return the indices of the first and last token of each part, both inclusive.

    A part has at most `max_length` positions and starts at the last token of the previous part. So each token except
    the first is a label exactly once. A document of fewer than two tokens has no parts, since there is no label.
    """
    last = num_tokens - 1
    return [(start, min(start + max_length, last)) for start in range(0, last, max_length)]
