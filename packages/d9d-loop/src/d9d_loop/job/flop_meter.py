"""Model FLOPs of the microbatches of a job, from a formula and the rows and documents of each microbatch.

B: rows, L: positions of this rank.
"""

from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import ContextSplit
from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.job.flop_formula import FlopFormula
from d9d_loop.job.flop_measurement import rows_of
from d9d_loop.task import BatchTask
from d9d_pipeline import Inputs


@final
class FlopMeter:
    """Sum of the model FLOPs of microbatches. No host-device synchronization, no collectives.

    Args:
        formula: FLOPs of rows and pairs of positions; `None` if they are not known: the meter then counts nothing.
        task: Task of the job, which knows the mask of tokens.
        split: Split of each row over context-parallel ranks, which all have all images; `None` for whole rows.
    """

    def __init__(self, formula: FlopFormula | None, task: BatchTask, *, split: ContextSplit | None = None) -> None:
        self.formula = formula
        self._task, self._num_parts = task, 1 if split is None else split.mesh.size()
        self._positions = None if self._num_parts == 1 or split is None else cache(split.positions)
        self._whole: dict[torch.Size, float] = {}
        self._total: Tensor | float = 0.0

    def add(self, inputs: Inputs, batch: Any) -> None:
        """Add a microbatch: the model's inputs, and the batch that they were made of."""
        if self.formula is None:
            return
        if self.formula.images is not None:
            self._total = self._total + self.formula.images.of(inputs.shared) / self._num_parts
        rows, are_tokens = rows_of(inputs)
        if self.formula.per_label:  # positions also fill rows with fewer labels
            labels = batch.get("labels") if isinstance(batch, dict) else None
            num_labels = inputs.shared["logits_to_keep"].numel() if labels is None else (labels != IGNORED_LABEL).sum()
            self._total = self._total + self.formula.per_label * num_labels
        positions = None
        if self._positions is not None and are_tokens and rows.shape[1] % 2 == 0:  # a rank has two chunks of each row
            positions = self._positions(rows.shape[1] * self._num_parts)
        numbers_BL = document_numbers(inputs, rows, positions) if are_tokens else None
        mask_BL = self._task.token_mask(batch) if are_tokens else None
        if mask_BL is not None and mask_BL.shape == rows.shape:
            if numbers_BL is None:
                numbers_BL = torch.arange(1, rows.shape[1] + 1, device=rows.device)
            numbers_BL = numbers_BL * mask_BL
        if numbers_BL is not None:
            self._total = self._total + self.formula.at(numbers_BL)
            return
        if rows.shape not in self._whole:
            lengths = [rows.shape[1]] * rows.shape[0] if are_tokens else [1] * rows.numel()
            self._whole[rows.shape] = self.formula.of_lengths(lengths)
        self._total = self._total + self._whole[rows.shape]

    def take(self) -> Tensor | float:
        """Return the sum since the last call."""
        total, self._total = self._total, 0.0
        return total


def document_numbers(inputs: Inputs, rows_BL: Tensor, positions_1L: Tensor | None = None) -> Tensor | None:
    """Return each position's number in its document [B, L], from 1, and 0 at padding; `None` if each row is one.

    They follow from `document_ids_BL`, else from `position_ids`, `attention_mask` or `cu_seq_lens_q`. `positions_1L`
    are the positions of a part of rows. The ids of a part do not show where its documents start, so parts need position
    ids, and their padding is on the right.
    """
    shared, shape = inputs.shared, rows_BL.shape
    ids_BL = shared.get("document_ids_BL")
    if isinstance(ids_BL, Tensor) and positions_1L is None:
        is_first_BL = F.pad(ids_BL[:, 1:] != ids_BL[:, :-1], (1, 0))
        positions_L = torch.arange(shape[1], device=ids_BL.device)
        return positions_L - (positions_L * is_first_BL).cummax(dim=1).values + 1
    positions = shared.get("position_ids")
    if isinstance(positions, Tensor):
        if positions.shape == (4, *shape):  # in transformers: those of texts, and of three rotary dimensions
            positions = positions[0]
        if positions.shape in {shape, (1, shape[1]), shape[1:]}:
            return (positions + 1).expand(shape)
    mask_BL = shared.get("attention_mask")
    if isinstance(mask_BL, Tensor) and mask_BL.shape == shape:
        return (mask_BL.cumsum(dim=1) if positions_1L is None else positions_1L + 1) * mask_BL
    if positions_1L is None and isinstance(ends_N := shared.get("cu_seq_lens_q"), Tensor):
        positions_L = torch.arange(shape[1], device=ends_N.device)
        starts_L = ends_N[torch.searchsorted(ends_N, positions_L, right=True) - 1]
        return (positions_L - starts_L + 1).expand(shape)
    return None if positions_1L is None else (positions_1L + 1).expand(shape)
