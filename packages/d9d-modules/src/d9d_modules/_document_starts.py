"""Document boundaries in packed sequences, for recurrent and convolutional layers.

Shape legend: B batch, L length.
"""

from torch import Tensor
from torch.nn import functional as F


def document_starts(document_ids_BL: Tensor) -> Tensor:
    """Return a boolean mask [B, L]: True where the document id differs from that of the previous position.

    The first position of a row is False. A document id that reappears after another id starts a new document.
    """
    return F.pad(document_ids_BL[:, 1:] != document_ids_BL[:, :-1], (1, 0), value=False)[:, : document_ids_BL.shape[1]]
