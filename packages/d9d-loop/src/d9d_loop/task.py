"""What a user's job computes: how a batch becomes the model's input, and the model's output a loss or a result."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import JsonValue

from d9d_dist import ContextSplit, UserError
from d9d_metrics import Metric
from d9d_pipeline import Inputs


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a sum and its weight, which stay exact however a batch is split.

    Gradients are those of the sum over all microbatches and ranks, divided once by the sum of all weights.

    Attributes:
        total: Scalar: the *sum* of the loss over what the microbatch holds.
        weight: What the sum is a sum over: the number of samples, elements or unmasked tokens; must not be negative.
    """

    total: torch.Tensor
    weight: torch.Tensor | float


class BatchTask(ABC):
    """Connects batches and the model: what training and inference tasks have in common."""

    @abstractmethod
    def inputs(self, batch: Any) -> Inputs | Mapping[str, Any]:
        """What the model's forward receives for a microbatch.

        Args:
            batch: What the collate function made of the samples, on the job's device.

        Returns:
            Keyword arguments of forward; or `Inputs`, where there are positional ones.
        """

    def split_sequence(self, batch: Any, split: ContextSplit) -> Any:
        """Cut a batch to this rank's share of its sequences; called only under context parallelism.

        What follows sees the cut batch: `inputs`, `loss` and `update_metrics`, or `results`. Cut everything that has a
        value for each token, labels included, after they were shifted; and give the model the positions of the rest:

            return {**split.split(batch), "position_ids": split.positions(batch["input_ids"].shape[1])}

        Args:
            batch: What the collate function made of the samples, on the job's device.
            split: Cuts trees of tensors along their sequences, load balanced.

        Raises:
            UserError: Unless the task says how.
        """
        raise UserError(
            f"{type(self).__name__} does not say how a batch is cut for context parallelism; expected a method "
            "split_sequence(batch, split). Write one, or set the mesh's context-parallel degrees to 1."
        )


class Task(BatchTask):
    """Connects batches, the model and the loss.

    Attributes:
        weight_unit: What the weight of a loss counts, as a plural noun; names the throughput, e.g. tokens_per_second.
    """

    weight_unit: str = "items"

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Loss:
        """The loss of a microbatch.

        Args:
            outputs: What the model's forward returned.
            batch: The batch that its inputs were made of.
        """

    def metrics(self) -> Mapping[str, Metric]:
        """Metrics to measure besides the loss, newly made; they are reset after each report."""
        return {}

    def update_metrics(self, metrics: Mapping[str, Metric], *, outputs: Any, batch: Any, loss: Loss) -> None:
        """Take a microbatch into the metrics, without waiting for the device."""
        return  # a task without metrics has nothing to do


class InferenceTask(BatchTask):
    """Connects batches, the model and what is kept of its outputs."""

    @abstractmethod
    def results(self, outputs: Any, batch: Any) -> Sequence[JsonValue]:
        """What to write for each sample of a microbatch, in their order.

        Called on all ranks that have the model's outputs; those of one of them are written.

        Args:
            outputs: What the model's forward returned for the whole batch.
            batch: The batch that its inputs were made of; under context parallelism, this rank's share of it.
        """

    def join_sequence(self, outputs: Any, split: ContextSplit) -> Any:
        """Put outputs together of which each rank has a share of the sequences; only under context parallelism.

        Collective over those ranks; `split.join(outputs)` does it for a tensor of tokens.

        Raises:
            UserError: Unless the task says how.
        """
        raise UserError(
            f"{type(self).__name__} does not say how outputs are put together under context parallelism; expected a "
            "method join_sequence(outputs, split). Write one, or set the mesh's context-parallel degrees to 1."
        )


def to_inputs(inputs: Inputs | Mapping[str, Any]) -> Inputs:
    """Give what a task returned the form that the pipeline takes."""
    return inputs if isinstance(inputs, Inputs) else Inputs(**inputs)
