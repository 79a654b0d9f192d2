"""Inputs of a decoder from packed rows, and the base class of tasks on packed rows."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import ContextSplit
from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.task import Task
from d9d_pipeline import Inputs

PackedBatch: TypeAlias = dict[str, Any]
"""Collated rows of a `PackedStream`: tensors [B, L]. Under context parallelism, `cp` is the mesh of the split."""


def packed_inputs(batch: PackedBatch, *, labels: Tensor | None = None, scores: bool = False) -> Inputs:
    """Return the arguments of d9d's decoders: token ids, labels, position ids and document ids.

    `labels` replaces the labels of the batch; without labels, the decoder returns logits. With `scores`, it returns the
    log-probabilities of the labels, and auxiliary losses separately; see `score_arguments`. If the batch has
    `expert_indices` [B, L, layers, A], the routers of a sparse decoder replay them.
    """
    optional: dict[str, Any] = {"expert_indices": batch["expert_indices"]} if "expert_indices" in batch else {}
    if scores:
        optional["scores"] = "log_probs"
    return Inputs(
        batch["input_ids"],
        labels=batch.get("labels") if labels is None else labels,
        position_ids=batch["position_ids"],
        document_ids_BL=batch["documents"],
        **optional,
    )


def score_arguments(outputs: Mapping[str, Tensor], batch: PackedBatch) -> dict[str, Any]:
    """Return the arguments that preference and policy losses share, for a decoder called with `scores`."""
    return {
        "log_probs_BL": outputs["log_probs"],
        "auxiliary_losses_BL": outputs.get("auxiliary_losses"),
        "reference_log_probs_BL": batch.get("reference_log_probs"),
        "mask_BL": trained(batch),
        "document_ids_BL": batch["documents"],
        "cp": mesh_of(batch),
    }


class PackedTask(Task):
    """Base class of tasks on packed rows; context parallelism can split the rows."""

    def split_sequence(self, batch: PackedBatch, split: ContextSplit) -> PackedBatch:
        """Return this context-parallel rank's part of the rows, with the mesh of the split as `cp`."""
        return {**split.split(batch), "cp": split.mesh}


def mesh_of(batch: PackedBatch) -> DeviceMesh | None:
    """Return the mesh over which the rows of a batch are split; None for whole rows."""
    return batch.get("cp")


def trained(batch: PackedBatch) -> Tensor:
    """Return a mask [B, L] of the positions that contribute to the loss."""
    return batch["labels"] != IGNORED_LABEL
