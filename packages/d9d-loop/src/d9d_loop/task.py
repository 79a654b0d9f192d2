"""Tasks: conversion of a batch to the model's inputs, and of the model's outputs to a loss or to results.

`BatchPlacement` calls the hooks of a task that pad and split a batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from pydantic import JsonValue
from torch.utils import _pytree as pytree

from d9d_dist import UserError
from d9d_metrics import Metric
from d9d_pipeline import Inputs

if TYPE_CHECKING:
    from d9d_dist import ContextSplit, DistributedContext  # imports DTensor


@dataclass(frozen=True, slots=True)
class Loss:
    """Sum of the loss over a microbatch, and its weight. Build it by `Loss.sum` or `Loss.mean`.

    The loss of a step is the sum of all totals divided by the sum of all weights, over all microbatches and ranks. The
    split of the batch therefore does not affect the loss. Gradients are divided once, by the sum of all weights.

    Attributes:
        total: 0-dim tensor: the loss *summed* over the samples, elements or unmasked tokens of the microbatch.
        weight: Number of the summed items, or their total weight. Must not be negative, and no truth value.
        tokens: Values per token [B, L] by name, such as log-probabilities, that `Engine.forward_backward` returns in
            the order of its inputs. Gradients do not flow through them.
    """

    total: torch.Tensor
    weight: torch.Tensor | float
    tokens: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weight = self.weight
        is_flag = weight.dtype == torch.bool if isinstance(weight, torch.Tensor) else isinstance(weight, bool)
        if is_flag:
            shown = weight if isinstance(weight, bool) else "a bool tensor"
            raise UserError(
                f"got weight = {shown} of a Loss; expected the number of the summed items. Use labels.numel(), or "
                "mask.sum()."
            )

    @classmethod
    def sum(
        cls, values: torch.Tensor, count: torch.Tensor | float, tokens: Mapping[str, torch.Tensor] | None = None
    ) -> "Loss":
        """Return the loss of values of any shape, which are summed: of each sample, element or token.

        `count` is the number of values that count, such as the number of labels: ignored ones are 0.
        """
        return cls(values.sum(), count, {} if tokens is None else tokens)

    @classmethod
    def mean(
        cls, mean: torch.Tensor, count: torch.Tensor | float, tokens: Mapping[str, torch.Tensor] | None = None
    ) -> "Loss":
        """Return the loss of a 0-dim mean over `count` items of the microbatch, as most loss functions return it."""
        return cls(mean * count, count, {} if tokens is None else tokens)


LossFunction: TypeAlias = Callable[[Any, Any], Loss]
"""Function of the model's outputs for a microbatch and the microbatch; `Task.loss` is one."""


class BatchTask(ABC):
    """Base class of training and inference tasks: prepares the model's inputs from a batch."""

    @abstractmethod
    def inputs(self, batch: Any) -> Inputs | Mapping[str, Any]:
        """Return the arguments of the model's forward for a microbatch: keyword arguments, or `Inputs`.

        `batch` is the output of the collate function, on the job's device; under context parallelism, of
        `split_sequence`.
        """

    def token_mask(self, batch: Any) -> torch.Tensor | None:
        """Return a mask [B, L], False at padding, or None (the default) if the batch has no padding.

        A model whose forward has an argument `mask_BL` gets the mask, unless `inputs` passes one: padding must change
        neither router losses nor tokens per expert. A stand-in has no tokens: its mask is False everywhere.
        """
        return None

    def stand_in(self, batch: Any) -> Any:
        """Return a batch with the shapes of `batch` as a stand-in, for a rank with fewer microbatches than others.

        All ranks run the same number of microbatches, because their collectives must match. The loss of a stand-in is
        0, its outputs are dropped, and its token mask is False. The default is the batch itself. Called with a batch
        before its split for context parallelism.
        """
        return batch

    def pad_sequence(self, batch: Any, multiple: int) -> tuple[Any, int]:
        """Return a batch whose rows are padded on the right to a multiple of columns, and the number of added columns.

        Called if rows are split over context- or tensor-parallel ranks, before `split_sequence`. Added columns must not
        count: see `token_mask`. The engine removes them from the values per token that it returns. The default adds
        none. The tasks of `d9d_loop.tasks` override it.
        """
        return batch, 0

    def split_sequence(self, batch: Any, split: "ContextSplit") -> Any:
        """Return this context-parallel rank's shard of a batch. Called only with several context-parallel ranks.

        The task's other methods receive the shard as their batch. Split every tensor that has a value per token,
        including the labels, which must already be shifted. Also pass the positions of this rank's tokens to the model:

            return {**split.split(batch), "position_ids": split.positions(batch["input_ids"].shape[1])}

        `split` splits trees of tensors along the sequence dim, load-balanced over the context-parallel ranks. Raises
        `UserError` if the task does not override this method.
        """
        raise UserError(
            f"{type(self).__name__} cannot split a batch for context parallelism; expected a method "
            "split_sequence(batch, split). Implement it, or set the mesh's context-parallel degrees to 1."
        )


class Task(BatchTask):
    """Training task: prepares the model's inputs and computes the loss and metrics from its outputs.

    Attributes:
        weight_unit: Unit of the loss weight as a plural noun. The throughput is named after it, e.g. tokens_per_second.
    """

    weight_unit: str = "items"

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Loss:
        """Compute the loss of a microbatch from the output of the model's forward."""

    def metrics(self) -> Mapping[str, Metric]:
        """Return new metrics to measure besides the loss, by name. Each report resets them."""
        return {}

    def update_metrics(self, metrics: Mapping[str, Metric], *, outputs: Any, batch: Any, loss: Loss) -> None:
        """Update the metrics with a microbatch. Avoid host-device synchronization here."""
        return  # by default there are no metrics

    def reference_values(self, outputs: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return the entries that a batch gets from the outputs of the reference, such as its log-probabilities.

        Called before the step of the batch if the Trainer has a `reference`, on every rank that has outputs. Under
        context parallelism, outputs and batch are the part of this rank. The default raises `UserError`.
        """
        raise UserError(
            f"the Trainer has a reference, but {type(self).__name__} does not use one; expected a method "
            "reference_values(outputs, batch). Implement it, or remove the reference."
        )

    def predictions(self, outputs: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a microbatch that `compute_metrics` of the Trainer gets for the whole evaluation.

        Each tensor has a row for each sample, or for each token that counts; other dims must not differ.
        """
        return {}


class InferenceTask(BatchTask):
    """Inference task: prepares the model's inputs and converts its outputs to one result per sample."""

    @abstractmethod
    def results(self, outputs: Any, batch: Any) -> Sequence[JsonValue]:
        """Return one JSON result per sample of a microbatch, in the order of the samples.

        Called on every rank that has the model's outputs; the results of one of these ranks are written.

        Args:
            outputs: Return value of the model's forward; under context parallelism, of `join_sequence`.
            batch: The batch that was passed to `inputs`; under context parallelism, this rank's shard.
        """

    def join_sequence(self, outputs: Any, split: "ContextSplit") -> Any:
        """Gather outputs along the sequence dim from all context-parallel ranks. Collective over them.

        Called only with several context-parallel ranks. For a tensor with a value per token, return
        `split.join(outputs)`. Raises `UserError` if the task does not override this method.
        """
        raise UserError(
            f"{type(self).__name__} cannot join outputs under context parallelism; expected a "
            "method join_sequence(outputs, split). Implement it, or set the mesh's context-parallel degrees to 1."
        )


class BatchPlacement:
    """Copy of batches to this rank's device, and split of their sequences over context-parallel ranks.

    Rows are padded to the length that context and tensor parallelism need.

    All context- and tensor-parallel ranks of one data-parallel rank read the same batch.
    """

    def __init__(self, task: BatchTask, ctx: "DistributedContext") -> None:
        self._task, self._device = task, ctx.device
        cp_size, tp_size = ctx.size("batch", "cp"), ctx.size("batch", "tp")
        self._split = None
        if cp_size > 1:
            from d9d_dist import ContextSplit  # noqa: PLC0415 - imports DTensor, which configurations and tasks do not need

            self._split = ContextSplit(ctx.mesh_for("batch")["cp"])
        self._multiple = row_multiple(cp_size, tp_size)

    def __call__(self, batch: Any) -> Any:
        """Return this rank's part of a batch on its device. Issues no collectives."""
        return self.padded(batch)[0]

    def padded(self, batch: Any) -> tuple[Any, int]:
        """Return this rank's part of a batch on its device, and the number of columns added to whole rows."""
        num_added = 0
        if self._multiple > 1:
            batch, num_added = self._task.pad_sequence(batch, self._multiple)
        on_device = to_device(batch, self._device)
        return on_device if self._split is None else self._task.split_sequence(on_device, self._split), num_added


def row_multiple(cp_size: int, tp_size: int) -> int:
    """Return the number whose multiples are lengths of rows; each context-parallel rank has two chunks."""
    return tp_size if cp_size == 1 else 2 * cp_size * tp_size


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a pytree to a device with `non_blocking=True`. On CPU, return the batch unchanged."""
    if device.type == "cpu":
        return batch
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


@torch.no_grad()
def with_reference(task: Task, outputs: Any, batch: Any) -> dict[str, Any]:
    """Return a batch with the model itself as reference: the reference values come from its own `outputs`."""
    own = {name: value.detach() for name, value in task.reference_values(outputs, batch).items()}
    return {**batch, **own}


def measured_loss(task: Task, metrics: Mapping[str, Metric], outputs: Any, batch: Any) -> Loss:
    """Compute the loss of a microbatch, and update the task's metrics."""
    loss = task.loss(outputs, batch)
    task.update_metrics(metrics, outputs=outputs, batch=batch, loss=loss)
    return loss


def to_inputs(inputs: Inputs | Mapping[str, Any]) -> Inputs:
    """Convert the return value of `BatchTask.inputs` to `Inputs`."""
    return inputs if isinstance(inputs, Inputs) else Inputs(**inputs)
