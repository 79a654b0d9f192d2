"""Check that a task returns a sum: the most natural mistake is `Loss(mean, weight=n)`, whose result is wrong.

The loss of a microbatch must be the sum of the losses of its parts. The check calls the task with random outputs of the
model's shapes, for two rows and for each of them. It runs neither the model nor collectives. Likewise, the weights of
the parts of rows on context-parallel ranks must add up to that of the rows.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from d9d_dist import ContextSplit, UserError
from d9d_loop.isolation import isolated_random
from d9d_loop.task import Loss, Task, with_reference

_MAX_NUMBERS = 1 << 24  # of the outputs of two rows; larger ones are not checked


def check_sum(task: Task, outputs: Any, batch: Any, *, has_reference: bool = False) -> None:
    """Raise `UserError` if a task returns a mean for a sum.

    Args:
        task: Task of the job.
        outputs: Outputs of the model for the batch, of which only shapes and dtypes are read.
        batch: Batch on the CPU. Nothing is checked unless the first dim of all tensors is the number of rows.
        has_reference: True if the job adds values of a reference model to its batches, here those of `outputs`.
    """
    found: list[Loss] = []
    with suppress(Exception), isolated_random("sum check"), torch.no_grad():
        tensors = [leaf for leaf in pytree.tree_leaves((outputs, batch)) if isinstance(leaf, Tensor)]
        (num_rows,) = {leaf.shape[0] if leaf.dim() else 0 for leaf in tensors}
        numbers = sum(2 * leaf.numel() // num_rows for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))
        if numbers <= _MAX_NUMBERS:
            drawn = pytree.tree_map_only(Tensor, _random_rows, outputs)
            rows = pytree.tree_map_only(Tensor, lambda x: torch.cat((x, x))[:2], batch)
            rows = with_reference(task, drawn, rows) if has_reference else rows
            for part in (slice(None), slice(1), slice(1, None)):
                of_part = (pytree.tree_map_only(Tensor, lambda x, part=part: x[part], tree) for tree in (drawn, rows))
                found.append(task.loss(*of_part))
    if len(found) == 3 and _is_mean(*((float(each.total), float(each.weight)) for each in found)):
        raise UserError(
            f"{type(task).__name__}.loss returned the total {float(found[0].total):.4g} for two rows, and "
            f"{float(found[1].total):.4g} and {float(found[2].total):.4g} for each of them: a mean with the number of "
            "its items as the weight. Expected a sum, or the result would depend on the number of microbatches and "
            "ranks. Return Loss.mean(mean, count) or Loss.sum(values, count)."
        )


def check_parts(task: Task, outputs: Any, batch: Any, splits: Sequence[ContextSplit]) -> None:
    """Raise `UserError` if a task sums over positions, but counts whole rows on each context-parallel rank.

    Args:
        task: Task of the job.
        outputs: Outputs of the model for the part of a rank, of which only shapes and dtypes are read.
        batch: Whole rows on the CPU. Nothing is checked unless the first dim of all tensors is the number of rows.
        splits: Split of each rank.
    """
    found: list[tuple[float, float]] = []
    with suppress(Exception), isolated_random("sum check"), torch.no_grad():
        rows = pytree.tree_map_only(Tensor, lambda x: torch.cat((x, x))[:2], batch)
        drawn = pytree.tree_map_only(Tensor, partial(_random_rows, num_parts=len(splits)), outputs)
        tensors = [leaf for leaf in pytree.tree_leaves((drawn, rows)) if isinstance(leaf, Tensor)]
        if {len(leaf) for leaf in tensors} == {2} and sum(leaf.numel() for leaf in tensors) <= _MAX_NUMBERS:
            parts = [(split.split(drawn), task.split_sequence(rows, split)) for split in splits]
            losses = [task.loss(*each) for each in ((drawn, rows), *parts)]
            found = [(float(each.total), float(each.weight)) for each in losses]
    if not found:
        return
    (total, _), *of_parts = found
    is_sum = abs(sum(each for each, _ in of_parts) - total) <= 1e-2 * max(abs(each) for each, _ in found)
    if is_sum and all(weight == 2.0 for _, weight in found):
        raise UserError(
            f"{type(task).__name__}.loss returned the weight 2 for the part of two rows on each of {len(splits)} "
            "context-parallel ranks, whose totals add up; expected weights that add up, too. Count tokens, such as "
            "values.numel() or mask.sum(), or divide the number of rows by the number of parts, "
            'ctx.size("batch", "cp").'
        )


def _random_rows(output: Tensor, num_parts: int = 1) -> Tensor:
    """Return two rows; of several parts of positions, if there are dims of them."""
    shape = (2, *(size * num_parts if dim == 0 else size for dim, size in enumerate(output.shape[1:])))
    if output.is_floating_point():
        return torch.rand(shape, dtype=torch.float64).to(output.dtype)
    return torch.zeros(shape, dtype=output.dtype)


def _is_mean(whole: tuple[float, float], first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Return True if weights add up, but the whole total is the weighted mean of both totals, not their sum."""
    (total, weight), (total_1, weight_1), (total_2, weight_2) = whole, first, second
    scale = max(abs(total), abs(total_1), abs(total_2))
    if not 0.0 < scale < float("inf") or abs(weight_1 + weight_2 - weight) > 1e-6 * weight or weight <= 0:
        return False
    is_sum = abs(total_1 + total_2 - total) <= 1e-2 * scale
    mean = (total_1 * weight_1 + total_2 * weight_2) / weight
    return not is_sum and abs(mean - total) <= 1e-3 * scale
