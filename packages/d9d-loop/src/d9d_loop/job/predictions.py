"""Predictions of a whole evaluation in the order of the data, and the values that a function computes from all of them.

Rows of all data-parallel ranks are appended to temporary files of one rank, so memory is bounded by a batch.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from tempfile import NamedTemporaryFile
from typing import IO, Any, TypeAlias, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from d9d_dist import DistributedContext, UserError, agree, gather_json
from d9d_dist.collectives.tree_gather import gather_variadic
from d9d_loop.task import Task

ComputeMetrics: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, float]]
"""Function of the predictions of an evaluation, numpy arrays by name, that returns values by name."""


@final
class Predictions(ExitStack):
    """Rows of `Task.predictions` of one evaluation. The body of the context must add all batches and compute.

    Args:
        has_outputs: True on the ranks of the last pipeline stage, which add rows.
    """

    def __init__(self, task: Task, ctx: DistributedContext, *, has_outputs: bool) -> None:
        super().__init__()
        self._task, self._name, self._group = task, type(task).__name__, ctx.group_for("batch", "dp")
        self._gathers = has_outputs and ctx.coordinate("batch", "tp") == 0
        self._writes = self._gathers and ctx.coordinate("batch", "dp") == 0
        self._alone = ctx.world_size == 1
        self._files: dict[str, IO[bytes]] = {}
        self._rows: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._problem: UserError | None = None

    def add(self, outputs: Any, batch: Any, *, is_padding: bool) -> None:
        """Append the rows of a batch of each data-parallel rank, in rank order. Collective over these ranks."""
        for name, value in checked_predictions(self._task, outputs, batch).items():
            whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            if not self._gathers:
                continue
            rows = whole.to(_stored_dtype(whole.dtype))[: 0 if is_padding else None]
            parts = [rows] if self._alone else gather_variadic(rows, self._group)
            for part in parts or ():
                self._append(name, part.cpu())

    def compute(self, compute: ComputeMetrics) -> dict[str, float]:
        """Return the values that `compute` returns for all rows on one rank, equal on every rank. Collective."""
        agree(self._problem)
        values = None
        if self._writes:
            values = _as_text(compute({name: self._read(name) for name in self._files}))
        # Text, because JSON has no NaN.
        found = [each for each in gather_json(values) if each is not None]
        return {name: float(value) for name, value in found[0].items()}

    def _append(self, name: str, rows: Tensor) -> None:
        if name not in self._files:
            self._files[name] = self.enter_context(NamedTemporaryFile(prefix="d9d-predictions-"))  # noqa: SIM115 - closed with self
        if not len(rows):
            return
        dtype, shape = self._rows.get(name, (rows.dtype, torch.Size(rows.shape[1:])))
        self._rows[name] = dtype, shape
        if (dtype, shape) != (rows.dtype, rows.shape[1:]):
            self._problem = self._problem or UserError(
                f"{self._name}.predictions returned {name!r} with rows of shape {tuple(shape)} and then "
                f"{tuple(rows.shape[1:])}; expected rows of one shape. Pad them, or select the values that count, such "
                "as logits.argmax(-1)[labels != -100]."
            )
            return
        self._files[name].write(rows.contiguous().numpy().data)

    def _read(self, name: str) -> Any:
        """Return all rows as an array, memory-mapped from the file."""
        file = self._files[name]
        file.flush()
        dtype, shape = self._rows.get(name, (torch.float32, torch.Size()))
        size = file.tell() // dtype.itemsize
        return torch.from_file(file.name, shared=False, size=size, dtype=dtype).view(-1, *shape).numpy()


def checked_predictions(task: Task, outputs: Any, batch: Any) -> dict[str, Tensor]:
    """Return the predictions of a batch; raise `UserError` unless they are tensors with rows."""
    name = type(task).__name__
    found: Any = task.predictions(outputs, batch)
    if not isinstance(found, Mapping) or not all(isinstance(each, Tensor) and each.ndim for each in found.values()):
        raise UserError(
            f"{name}.predictions returned {found!r:.90}; expected tensors by name with a row for each sample or token, "
            'such as {"logits": outputs, "labels": batch["labels"]}.'
        )
    return dict(found)


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which predictions are sent and stored: NumPy has no bfloat16, and gloo sends no bool."""
    if dtype.is_complex:
        raise UserError("got complex predictions; expected real ones. Use torch.view_as_real.")
    return (torch.float64 if dtype == torch.float64 else torch.float32) if dtype.is_floating_point else torch.int64


def _as_text(values: Any) -> dict[str, str]:
    try:
        return {str(name): repr(float(value)) for name, value in values.items()}
    except (AttributeError, TypeError, ValueError):
        raise UserError(
            f"compute_metrics returned {values!r:.90}; expected a dict of numbers by name, such as {{'f1': 0.5}}."
        ) from None
