"""Tasks of decoders on packed rows: pretraining, chats, preference pairs, sampled answers, rewards, distillation.

B: rows, L: positions of this rank, K: candidates of a position.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import ContextSplit, UserError
from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.losses import DistillationLoss, PolicyLoss, PreferenceLoss, RewardLoss, next_token_loss
from d9d_loop.task import Loss, Task
from d9d_metrics import Metric, Perplexity, WeightedMean
from d9d_pipeline import Inputs

DPO = PreferenceLoss()
GRPO = PolicyLoss()
BRADLEY_TERRY = RewardLoss()
KL_DIVERGENCE = DistillationLoss()

PackedBatch: TypeAlias = dict[str, Any]
"""Collated rows of a `PackedStream`: tensors [B, L]. Under context parallelism, `cp` is the mesh of the split."""


class PackedTask(Task):
    """Base class of tasks on packed rows; context parallelism can split the rows."""

    def token_mask(self, batch: PackedBatch) -> Tensor:
        """Return the mask of tokens [B, L]; see `is_token`. A key `token_mask` of the batch replaces it."""
        _check_rows(batch, "labels", "documents")
        return batch["token_mask"] if "token_mask" in batch else is_token(batch["labels"], batch["documents"])

    def pad_sequence(self, batch: PackedBatch, multiple: int) -> tuple[PackedBatch, int]:
        """Return rows padded by a document without labels; other values per token, such as advantages, become 0."""
        length = batch["input_ids"].shape[1]
        num_added = -length % multiple
        if not num_added:
            return batch, 0
        rows = {**batch, "token_mask": self.token_mask(batch)}
        return {key: _padded(key, each, length, num_added) for key, each in rows.items()}, num_added

    def split_sequence(self, batch: PackedBatch, split: ContextSplit) -> PackedBatch:
        """Return this context-parallel rank's part of the rows, with the mesh of the split as `cp`."""
        # The mask of a document needs the whole document, which may span several ranks.
        return {**split.split({**batch, "token_mask": self.token_mask(batch)}), "cp": split.mesh}


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
        """Return the summed losses of all labels. Raise `UserError` if the outputs are not the losses of tokens."""
        if not isinstance(outputs, Tensor) or outputs.numel() != batch["labels"].numel():
            raise UserError(
                f"the model returned {_describe(outputs)}; expected a tensor of shape {tuple(batch['labels'].shape)}, "
                f"the loss of each token. {_REMEDY}"
            )
        return next_token_loss(outputs, batch["labels"])

    def metrics(self) -> Mapping[str, Metric]:
        """Return the perplexity of the labels."""
        return {"perplexity": Perplexity()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Any, loss: Loss) -> None:
        """Add the losses of a microbatch."""
        metrics["perplexity"].update(loss.total.detach(), loss.weight)


@final
class PreferenceTask(PackedTask):
    """Preference loss of packed pairs, for a decoder whose forward takes `scores`.

    A batch has the rows of a packed `PairStream`, and `reference_log_probs` [B, L], which a Trainer with a `reference`
    adds, and `Engine.score` returns in `Engine.reference`.

    The metrics are `reward_margin`, the mean of `beta * h` with the margin h of `PreferenceLoss.margins`, and
    `reward_accuracy`, the share of pairs with a positive margin. Router losses of the model are added, and do not
    change the margins.

    Args:
        has_reference: False for a loss without a reference, such as SimPO: batches then have no `reference_log_probs`.

    Raises:
        UserError: In `loss`, if the batch does not match `has_reference`.
    """

    weight_unit = "pairs"

    def __init__(self, loss: PreferenceLoss = DPO, *, has_reference: bool = True) -> None:
        self._loss, self._has_reference = loss, has_reference

    def inputs(self, batch: PackedBatch) -> Inputs:
        """Return the arguments of d9d's decoders, for scores."""
        return packed_inputs(batch, scores=True)

    def loss(self, outputs: Mapping[str, Tensor], batch: PackedBatch) -> Loss:
        """Return the summed losses of the pairs."""
        if self._has_reference != (batch.get("reference_log_probs") is not None):
            raise UserError(
                f"the batch has {'no' if self._has_reference else 'the key'} reference_log_probs; expected it if and "
                "only if has_reference is True. Pass a reference to the Trainer, or score the batch inside "
                "Engine.reference() and add the key. Pass PreferenceTask(has_reference=False) for a loss without a "
                "reference, such as SimPO."
            )
        return self._loss(**score_arguments(outputs, batch))

    def reference_values(self, outputs: Mapping[str, Tensor], batch: PackedBatch) -> Mapping[str, Tensor]:
        """Return the log-probabilities of the reference as `reference_log_probs`."""
        return {"reference_log_probs": checked_scores(outputs)["log_probs"]}

    def metrics(self) -> Mapping[str, Metric]:
        """Return the reward margin and accuracy."""
        return {"reward_margin": WeightedMean(), "reward_accuracy": WeightedMean()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Any, loss: Loss) -> None:
        """Add the margins of a microbatch. Issues the collectives of the margins."""
        arguments = score_arguments(outputs, batch)
        del arguments["auxiliary_losses_BL"]  # the margins do not include the auxiliary losses
        with torch.no_grad():
            margins_BP, is_pair_BP = self._loss.margins(**arguments)
        mesh = batch.get("cp")
        count = is_pair_BP.sum() / (1 if mesh is None else mesh.size())
        share = count / is_pair_BP.sum().clamp(min=1)  # every context-parallel rank has all pairs
        metrics["reward_margin"].update((self._loss.beta * margins_BP * is_pair_BP).sum() * share, count)
        metrics["reward_accuracy"].update(((margins_BP > 0) & is_pair_BP).sum() * share, count)


@final
class PolicyTask(PackedTask):
    """Policy-gradient loss of packed answers, for a decoder whose forward takes `scores`.

    A batch has packed rows whose labels are the sampled tokens, -100 elsewhere, and `advantages` [B, L]. Optional keys,
    [B, L] each: `old_log_probs`, `reference_log_probs` and `importance`; see `PolicyLoss`. Router losses of the model
    are added, and do not change the ratios.

    Raises:
        UserError: In `loss`, if the batch has no `advantages`.
    """

    weight_unit = "tokens"

    def __init__(self, loss: PolicyLoss = GRPO) -> None:
        self._loss = loss
        if loss.average != "tokens":
            self.weight_unit = "answers"

    def inputs(self, batch: PackedBatch) -> Inputs:
        """Return the arguments of d9d's decoders, for scores."""
        return packed_inputs(batch, scores=True)

    def loss(self, outputs: Mapping[str, Tensor], batch: PackedBatch) -> Loss:
        """Return the summed losses of the sampled tokens."""
        if "advantages" not in batch:
            raise UserError(
                f"the batch has no advantages, only {', '.join(sorted(batch))}; expected an advantage for each "
                "position, [B, L]. Add the key."
            )
        return self._loss(
            **score_arguments(outputs, batch),
            advantages_BL=batch["advantages"],
            old_log_probs_BL=batch.get("old_log_probs"),
            importance_BL=batch.get("importance"),
        )


@final
class RewardTask(PackedTask):
    """Bradley-Terry loss of packed pairs, for a model that returns a score of each position, [B, L] or [B, L, 1].

    A batch has the rows of a packed `PairStream` with `with_last_token`. The reward of an answer is the score of its
    last position. `margins` [B, L] have the margin of the pair of each position; without them, it is that of the loss.
    """

    weight_unit = "pairs"

    def __init__(self, loss: RewardLoss = BRADLEY_TERRY) -> None:
        self._loss = loss

    def token_mask(self, batch: PackedBatch) -> Tensor:
        """Return the mask [B, L] of tokens in documents of pairs. A key `token_mask` of the batch replaces it."""
        _check_rows(batch, "documents")
        return batch["token_mask"] if "token_mask" in batch else is_in_pair(batch["documents"])

    def inputs(self, batch: PackedBatch) -> Inputs:
        """Return the arguments of d9d's decoders, without labels."""
        _check_rows(batch, "input_ids", "position_ids", "documents")
        return Inputs(batch["input_ids"], position_ids=batch["position_ids"], document_ids_BL=batch["documents"])

    def loss(self, outputs: Tensor, batch: PackedBatch) -> Loss:
        """Return the summed losses of the pairs. Raise `UserError` if the outputs are not scores of positions."""
        expected = batch["input_ids"].shape
        if not isinstance(outputs, Tensor):
            raise UserError(
                f"the model returned {_describe(outputs)}; expected a tensor of shape {tuple(expected)}, one score for "
                "each position. Return the scores from the forward of a module that contains the model."
            )
        if outputs.shape not in {expected, (*expected, 1)}:
            raise UserError(
                f"the model returned scores of shape {tuple(outputs.shape)}; expected {tuple(expected)}, one score "
                "for each position."
            )
        return self._loss(
            outputs.view(expected),
            position_ids_BL=batch["position_ids"],
            document_ids_BL=batch["documents"],
            margins_BL=batch.get("margins"),
            cp=batch.get("cp"),
        )


@final
class DistillationTask(PackedTask):
    """Distillation loss of packed rows, for a decoder whose forward takes `scores`.

    A batch has packed rows, `teacher_ids` [B, L, K], int64, the teacher's most probable next tokens, and
    `teacher_log_probs` [B, L, K]. Positions whose label is -100 do not contribute to the loss. The model gets
    `teacher_ids` as its labels, and returns their log-probabilities [B, L, K]. Router losses of the model are added.
    """

    weight_unit = "tokens"

    def __init__(self, loss: DistillationLoss = KL_DIVERGENCE) -> None:
        self._loss = loss

    def inputs(self, batch: PackedBatch) -> Inputs:
        """Return the arguments of d9d's decoders, with the teacher's tokens as labels."""
        return packed_inputs(batch, labels=batch["teacher_ids"], scores=True)

    def loss(self, outputs: Mapping[str, Tensor], batch: PackedBatch) -> Loss:
        """Return the summed losses of all positions with a label."""
        return self._loss(
            checked_scores(outputs)["log_probs"],
            teacher_log_probs_BLK=batch["teacher_log_probs"],
            mask_BL=trained(batch),
            auxiliary_losses_BL=outputs.get("auxiliary_losses"),
        )


def packed_inputs(batch: PackedBatch, *, labels: Tensor | None = None, scores: bool = False) -> Inputs:
    """Return the arguments of d9d's decoders: token ids, labels, position ids and document ids.

    `labels` replaces the labels of the batch; without labels, the decoder returns logits. With `scores`, it returns the
    log-probabilities of the labels, and auxiliary losses separately; see `score_arguments`. If the batch has
    `expert_indices` [B, L, layers, A], the routers of an MoE decoder replay them.
    """
    _check_rows(batch, "input_ids", "position_ids", "documents")
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
        "log_probs_BL": checked_scores(outputs)["log_probs"],
        "auxiliary_losses_BL": outputs.get("auxiliary_losses"),
        "reference_log_probs_BL": batch.get("reference_log_probs"),
        "mask_BL": trained(batch),
        "document_ids_BL": batch["documents"],
        "cp": batch.get("cp"),
    }


def _check_rows(batch: PackedBatch, *keys: str) -> None:
    """Raise `UserError` if packed rows lack a key, or if labels, documents or tokens differ in shape."""
    missing = [key for key in keys if key not in batch]
    if missing:
        raise UserError(
            f"the batch has no {' and no '.join(missing)}, only {', '.join(sorted(batch))}; expected packed rows, "
            "[B, L] each, as PackedStream builds them. Add the key."
        )
    shapes = {key: tuple(batch[key].shape) for key in ("input_ids", "labels", "documents") if key in batch}
    if len(set(shapes.values())) > 1:
        raise UserError(f"the rows of the batch have the shapes {shapes}; expected equal shapes [B, L].")


_REMEDY = (
    "Use a d9d decoder, such as pretrained_model(folder) for a transformers folder, or a module that computes "
    "them and whose forward names the arguments of packed_inputs."
)


def checked_scores(outputs: Any) -> Mapping[str, Tensor]:
    """Return the outputs of a model that was called with `scores`; raise `UserError` if it ignored the argument."""
    if not isinstance(outputs, Mapping) or "log_probs" not in outputs:
        raise UserError(
            f"the model was called with scores='log_probs', and returned {_describe(outputs)}; expected a mapping with "
            f"log_probs [B, L], the log-probability of each label. {_REMEDY}"
        )
    return outputs


def _describe(outputs: Any) -> str:
    if isinstance(outputs, Tensor):
        return f"a tensor of shape {tuple(outputs.shape)}"
    keys = f" with the keys {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
    return f"a {type(outputs).__name__}{keys}"


def trained(batch: PackedBatch) -> Tensor:
    """Return a mask [B, L] of the positions that contribute to the loss."""
    return batch["labels"] != IGNORED_LABEL


def is_token(labels_BL: Tensor, document_ids_BL: Tensor) -> Tensor:
    """Return a mask [B, L] of whole packed rows, False in documents without a label: padding is such a document.

    Prompt tokens have no labels, but share a document with an answer. Documents are runs of equal ids.
    """
    is_first_BL = F.pad(document_ids_BL[:, 1:] != document_ids_BL[:, :-1], (1, 0))
    runs_BL = is_first_BL.cumsum(dim=1)
    num_labels_BL = torch.zeros_like(runs_BL).scatter_add_(1, runs_BL, (labels_BL != IGNORED_LABEL).to(runs_BL.dtype))
    return num_labels_BL.gather(1, runs_BL) > 0


def _padded(key: str, values: Any, length: int, num_added: int) -> Any:
    """Return the values of a key of a batch with added columns, if they are values per token [B, L, ...]."""
    if not isinstance(values, Tensor) or values.dim() < 2 or values.shape[1] != length:
        return values
    added = values[:, -1:].expand(-1, num_added, *values.shape[2:])  # for `expert_indices`: valid in each layer
    if key == "documents":  # an even id, so that the padding is not the second answer of a pair
        added = ((values.amax(dim=1, keepdim=True) + 2) // 2 * 2).clamp(max=length + num_added - 1).expand_as(added)
    elif key != "expert_indices":
        added = torch.full_like(added, IGNORED_LABEL if key == "labels" else 0)
    return torch.cat([values, added], dim=1)


def is_in_pair(document_ids_BL: Tensor) -> Tensor:
    """Return a mask [B, L] of whole packed rows, False in documents without a partner, such as padding.

    Documents 2p and 2p + 1 of a row are pair p.
    """
    num_rows, length = document_ids_BL.shape
    document_ids_BL = document_ids_BL.clamp(0, 2 * length - 1)  # the loss reports ids that are out of range
    lengths_BN = document_ids_BL.new_zeros(num_rows, 2 * length).scatter_add_(
        1, document_ids_BL, torch.ones_like(document_ids_BL)
    )
    return lengths_BN.unflatten(1, (length, 2)).all(dim=2).gather(1, document_ids_BL // 2)
