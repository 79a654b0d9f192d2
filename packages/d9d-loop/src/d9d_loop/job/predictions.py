"""Predictions of a whole evaluation in the order of the data, and the values that a function computes from all of them.

Rows of all data-parallel ranks are appended to temporary files of one rank, so memory is bounded by a batch.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Self, TypeAlias, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from d9d_dist import DistributedContext, UserError, agree, gather_json
from d9d_dist.collectives.tensors import gather_variadic
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

    def __enter__(self) -> Self:
        self._folder = Path(self.enter_context(TemporaryDirectory(prefix="d9d-predictions-")))
        return self

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
        agree(self._problem, alone=self._alone)
        values = None
        if self._writes:
            values = _checked_values(compute({name: self._read(name) for name in self._files}))
        # Text, because JSON has no NaN.
        found = [each for each in gather_json(values, alone=self._alone) if each is not None]
        return {name: float(value) for name, value in found[0].items()}

    def _append(self, name: str, rows: Tensor) -> None:
        if name not in self._files:
            self._files[name] = self.enter_context((self._folder / str(len(self._files))).open("w+b"))
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
        """Return all rows as an array that the system reads from the file as needed."""
        file = self._files[name]
        file.flush()
        dtype, shape = self._rows.get(name, (torch.float32, torch.Size()))
        size = file.tell() // dtype.itemsize
        return torch.from_file(file.name, shared=False, size=size, dtype=dtype).view(-1, *shape).numpy()


def checked_predictions(task: Task, outputs: Any, batch: Any) -> dict[str, Tensor]:
    """Return the predictions of a batch; raise `UserError` if they are no tensors with rows."""
    name = type(task).__name__
    found: Any = task.predictions(outputs, batch)
    if not isinstance(found, Mapping) or not found:
        raise UserError(
            f"{name}.predictions returned {found!r:.60}; expected tensors by name, because there is compute_metrics. "
            'Return a dict, such as {"logits": outputs, "labels": batch["labels"]}.'
        )
    for key, each in found.items():
        if not isinstance(each, Tensor) or each.ndim == 0:
            got = "a tensor without dims" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            raise UserError(
                f"{name}.predictions returned {got} as {key!r}; expected a tensor with a row for each sample or token."
            )
    return dict(found)


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an array: numpy has no bfloat16, and gloo sends no bool."""
    if dtype.is_complex:
        raise UserError("got complex predictions; expected real ones. Use torch.view_as_real.")
    if dtype.is_floating_point:
        return dtype if dtype == torch.float64 else torch.float32
    return torch.int64


def _checked_values(values: Any) -> dict[str, str]:
    """Return the values as text."""
    if not isinstance(values, Mapping):
        raise UserError(
            f"compute_metrics returned a {type(values).__name__}; expected numbers by name, such as a dict."
        )
    found: dict[str, str] = {}
    for name, value in values.items():
        try:
            found[str(name)] = repr(float(value))
        except (TypeError, ValueError):
            raise UserError(
                f"compute_metrics returned {value!r:.60} as {name}; expected a number. Return a name for each number."
            ) from None
    return found
