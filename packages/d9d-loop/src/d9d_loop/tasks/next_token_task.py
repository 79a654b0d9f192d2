"""Task of pretraining and of supervised fine-tuning on chats."""

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from d9d_loop.losses.next_token import next_token_loss
from d9d_loop.task import Loss
from d9d_loop.tasks.packed_inputs import PackedBatch, PackedTask, packed_inputs
from d9d_metrics import Metric, Perplexity
from d9d_pipeline import Inputs


@final
class NextTokenTask(PackedTask):
    """Cross entropy of the labels of packed rows, for a decoder that returns the loss of each token.

    Rows packed from a `ChatStream` have labels only in answers. The metric `perplexity` is the perplexity of the
    labels. The model's outputs include its router losses, so the loss and the metric include them too.
    """

    weight_unit = "tokens"

    def inputs(self, batch: PackedBatch) -> Inputs:
        """Return the arguments of d9d's decoders."""
        return packed_inputs(batch)

    def loss(self, outputs: Tensor, batch: PackedBatch) -> Loss:
        """Return the summed losses of all labels."""
        return next_token_loss(outputs, batch["labels"])

    def metrics(self) -> Mapping[str, Metric]:
        """Return the perplexity of the labels."""
        return {"perplexity": Perplexity()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Any, loss: Loss) -> None:
        """Add the losses of a microbatch."""
        metrics["perplexity"].update(loss.total.detach(), loss.weight)
