"""Tasks of jobs on text, for models of `transformers`.

B: samples, L: length, V: vocabulary size, C: number of classes.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.task import Loss, Task
from d9d_metrics import WeightedMean

Batch = dict[str, Tensor]


@final
class NextToken(Task):
    """Prediction of the next token: the sum of the cross entropies of all labels, in nats.

    The batch has `input_ids` and `labels` [B, L], which are already shifted; -100 for positions without a loss.
    """

    weight_unit = "tokens"

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model."""
        return {**{key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}, "use_cache": False}

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the summed cross entropy and the number of labels."""
        logits_BLV, labels_BL = outputs.logits, batch["labels"]
        total = F.cross_entropy(
            logits_BLV.float().flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return Loss(total, weight=(labels_BL != IGNORED_LABEL).sum())


@final
class Classify(Task):
    """Classification of whole texts: the sum of the cross entropies of all samples, and their accuracy.

    The batch has `input_ids` [B, L] and `labels` [B].
    """

    weight_unit = "samples"

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model."""
        return {key: batch[key] for key in ("input_ids", "attention_mask")}

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the summed cross entropy and the number of labels."""
        return Loss(
            F.cross_entropy(outputs.logits.float(), batch["labels"], reduction="sum"), weight=len(batch["labels"])
        )

    def metrics(self) -> dict[str, WeightedMean]:
        """Return the accuracy."""
        return {"accuracy": WeightedMean()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Batch, loss: Loss) -> None:
        """Add the predictions of a microbatch."""
        is_right = outputs.logits.detach().argmax(-1) == batch["labels"]
        metrics["accuracy"].update(is_right.sum(), torch.tensor(float(len(is_right))))
