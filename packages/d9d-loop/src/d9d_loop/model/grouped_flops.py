"""FLOPs of grouped matrix products, for which torch has no formula."""

from torch import Tensor


def grouped_flops(left: Tensor, right: Tensor) -> int:
    """Return the FLOPs of a grouped product; each row, or column, of a 2-dim operand belongs to one group."""
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    return 2 * rows * inner * columns * (len(left) if left.dim() == right.dim() == 3 else 1)
