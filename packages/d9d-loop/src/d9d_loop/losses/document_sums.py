"""Sums over the documents of packed rows, which losses need before a non-linearity.

Shape legend: B rows, L positions of this rank, N documents of a row, P = N // 2 pairs of a row.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import UserError, copy_to_axis, reduce_from_axis


def sum_per_document(
    values_BL: Tensor, document_ids_BL: Tensor, *, cp: DeviceMesh | None = None, num_documents: int | None = None
) -> Tensor:
    """Sum the values of each document of each row. Differentiable, even across context-parallel ranks.

    A loss that is not linear in the values of a document, such as DPO, needs the sum over the whole document, which may
    span several context-parallel ranks. With `cp`, forward and backward issue one all-reduce each.

    All ranks of `cp` get equal sums. The loss of a step is the sum of the losses of all ranks. If every rank of `cp`
    computes the same loss from these sums, divide the loss and its weight by the size of `cp`. Do not divide a loss
    that each rank computes only for its own tokens.

    Args:
        values_BL: Values [B, L] of this rank's positions, floating point.
        document_ids_BL: Document id of each position [B, L], int64, from 0 to N - 1, as in `PackedStream`.
        cp: Mesh of the context-parallel ranks that share the rows; None for whole rows.
        num_documents: N; by default, the length of the whole rows, which is always enough.

    Returns:
        Sums [B, N] in at least float32; 0 for documents without positions.

    Raises:
        UserError: If the shapes differ, or, on the CPU, if an id is outside the range.
    """
    if values_BL.shape != document_ids_BL.shape:
        raise UserError(
            f"the values have shape {tuple(values_BL.shape)}, and the document ids {tuple(document_ids_BL.shape)}; "
            "expected equal shapes [B, L]."
        )
    has_parts = cp is not None and cp.size() > 1
    if num_documents is None:
        num_documents = values_BL.shape[1] * (cp.size() if cp is not None else 1)
    check_ids(document_ids_BL, num_documents)
    wide_BL = values_BL.to(torch.promote_types(values_BL.dtype, torch.float32))
    sums_BN = wide_BL.new_zeros((len(values_BL), num_documents)).scatter_add(1, document_ids_BL, wide_BL)
    if not has_parts:
        return sums_BN
    # Forward all-reduces the sums. Backward all-reduces their gradient, because every rank uses them in its own loss.
    return copy_to_axis(reduce_from_axis(sums_BN, cp), cp)


def take_pairs(sums_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of chosen and rejected documents, [B, P] each: documents 2p and 2p + 1 are pair p."""
    return sums_BN[:, 0 : sums_BN.shape[1] // 2 * 2 : 2], sums_BN[:, 1::2]


def num_replicas(cp: DeviceMesh | None) -> int:
    """Return the number of ranks that compute the same loss from the sums of documents."""
    return 1 if cp is None else cp.size()


def check_ids(ids_BL: Tensor, num_documents: int) -> None:
    """Raise `UserError` if a document id on the CPU is out of range."""
    if ids_BL.device.type != "cpu" or not ids_BL.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids_BL))
    if low < 0 or high >= num_documents:
        raise UserError(
            f"document ids are {low} to {high}; expected 0 to {num_documents - 1}. Number the documents of each row "
            "from 0, as PackedStream does, and pass `cp` if each rank has a part of the rows."
        )
