"""Where packed documents start, for layers that go through a row position by position.

Shape legend: B batch, L length.
"""

from torch import Tensor
from torch.nn import functional as F


def document_starts(documents_BL: Tensor) -> Tensor:
    """Which positions belong to another document than the one before them [B, L], boolean; not the first of a row.

    An id that comes again after another one starts a document anew: what was remembered of it is gone.
    """
    return F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=False)[:, : documents_BL.shape[1]]
