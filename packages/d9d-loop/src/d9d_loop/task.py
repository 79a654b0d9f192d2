"""What a user's job computes: how a batch becomes the model's input, and the model's output a loss."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

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


class Task(ABC):
    """Connects batches, the model and the loss.

    Attributes:
        weight_unit: What the weight of a loss counts, as a plural noun; names the throughput, e.g. tokens_per_second.
    """

    weight_unit: str = "items"

    @abstractmethod
    def inputs(self, batch: Any) -> Inputs | Mapping[str, Any]:
        """What the model's forward receives for a microbatch.

        Args:
            batch: What the collate function made of the samples, on the job's device.

        Returns:
            Keyword arguments of forward; or `Inputs`, where there are positional ones.
        """

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Loss:
        """The loss of a microbatch.

        Args:
            outputs: What the model's forward returned.
            batch: The batch that its inputs were made of.
        """

    def split_sequence(self, batch: Any, split: ContextSplit) -> Any:
        """Cut a batch to this rank's share of its sequences; called only under context parallelism.

        What follows sees the cut batch: `inputs`, `loss` and `update_metrics`. Cut everything that has a value for each
        token, labels included, after they were shifted; and give the model the positions of what is left:

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

    def metrics(self) -> Mapping[str, Metric]:
        """Metrics to measure besides the loss, newly made; they are reset after each report."""
        return {}

    def update_metrics(self, metrics: Mapping[str, Metric], *, outputs: Any, batch: Any, loss: Loss) -> None:
        """Take a microbatch into the metrics, without waiting for the device."""
        return  # a task without metrics has nothing to do


def to_inputs(inputs: Inputs | Mapping[str, Any]) -> Inputs:
    """Give what a task returned the form that the pipeline takes."""
    return inputs if isinstance(inputs, Inputs) else Inputs(**inputs)
