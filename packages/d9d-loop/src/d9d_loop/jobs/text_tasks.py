"""Tasks of jobs on text, for models of `transformers`.

B: samples, L: length, K: positions with logits, V: vocabulary size, C: number of classes. For embeddings, G: groups, K:
pairs of a group, C: documents of a group, R = K + C: texts of a group, D: width. P: pairs of answers.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, assert_never, final

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import ContextSplit
from d9d_loop.data.image_processor import IMAGE_BYTES, pixels_of
from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.losses import PreferenceLoss, RewardLoss
from d9d_loop.task import InferenceTask, Loss, Task
from d9d_loop.tasks import PreferenceTask
from d9d_metrics import Metric, Sum, WeightedMean

Batch = dict[str, Tensor]


def _wide(values: Tensor) -> Tensor:
    """Return values in at least float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


PER_TOKEN = frozenset(("input_ids", "attention_mask", "position_ids", "labels", "token_type_ids", "mm_token_type_ids"))
"""Entries of a batch that have a value for each token [..., B, L]; others belong to the images of all rows."""

POSITIONS = "label_positions"
"""Entry of a batch with the positions [..., B, K] at which the model computes logits; see `label_positions`."""

_OF_TASKS = ("labels", POSITIONS, "num_skipped", "kept", "reference_log_probs", "cp", "margins")
_NOT_INPUTS = {*_OF_TASKS, IMAGE_BYTES, "image_scale"}


def label_positions(labels: Tensor, count: int | None = None) -> Tensor:
    """Return the positions [..., B, K] of the labels [..., B, L] of each row in ascending order, int64.

    K is at most `count`, by default the largest number of labels of a row, rounded up to a multiple of a 16th of L:
    stages exchange shapes anew for each K. Rows with fewer labels have positions without a label, too. With `count`, no
    host-device synchronization.
    """
    is_label, step = labels != IGNORED_LABEL, -(-labels.shape[-1] // 16)
    count = max(1, -(-int(is_label.sum(-1).max()) // step)) * step if count is None else count
    return is_label.byte().argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values


def _inputs(batch: Batch, *, label_logits: bool = False) -> dict[str, Any]:
    """Return the entries of a batch that the model gets, with pixels if it has their bytes; pairs become rows."""
    inputs: dict[str, Any] = {key: each for key, each in batch.items() if key not in _NOT_INPUTS}
    if IMAGE_BYTES in batch:
        inputs["pixel_values"] = pixels_of(batch[IMAGE_BYTES], batch["image_scale"])
    if label_logits and POSITIONS in batch:
        inputs["logits_to_keep"] = batch[POSITIONS]
    if batch["input_ids"].dim() == 2:
        return inputs
    of_rows = {*PER_TOKEN, "logits_to_keep"}
    return {key: each.flatten(0, 1) if key in of_rows else each for key, each in inputs.items()}


def _labels_of(logits: Tensor, batch: Batch) -> Tensor:
    """Return the labels [B, K] of logits [B, K, V] of all tokens, or of the positions of the batch."""
    labels = batch["labels"].flatten(0, -2)
    return labels if logits.shape[1] == labels.shape[1] else labels.gather(1, batch[POSITIONS].flatten(0, -2))


def _of_all_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Return values [B, K] at the positions of logits in the shape of the labels, 0 at other positions."""
    labels = batch["labels"]
    if values.shape[1] != labels.shape[-1]:
        values = values.new_zeros(len(values), labels.shape[-1]).scatter(1, batch[POSITIONS].flatten(0, -2), values)
    return values.view_as(labels)


def _split(batch: Batch, split: ContextSplit) -> Batch:
    """Return the batch with this rank's part of per-token entries. Only the first rank counts skipped samples."""
    own = {key: split.split(each, dim=-1) for key, each in batch.items() if key in PER_TOKEN}
    if POSITIONS in batch:
        own[POSITIONS] = label_positions(own["labels"], batch[POSITIONS].shape[-1])
    if split.mesh.get_local_rank() and "num_skipped" in batch:
        own["num_skipped"] = torch.zeros_like(batch["num_skipped"])
    return {**batch, **own}


class _LabelTask(Task):
    """Base class of tasks whose labels are tokens, for a model that returns logits; see `NextToken`."""

    def __init__(self, *, router_loss: float = 0.0, counts_skipped: bool = False, label_logits: bool = False) -> None:
        self._router_loss, self._counts_skipped = router_loss, counts_skipped
        self.label_logits = label_logits

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model: all samples, or all answers of pairs, as rows."""
        return {**_inputs(batch, label_logits=self.label_logits), "use_cache": False}

    def pad_sequence(self, batch: Batch, multiple: int) -> tuple[Batch, int]:
        """Pad the ends of rows with token id 0 and without labels; earlier positions do not attend to the padding."""
        num_added = -batch["input_ids"].shape[-1] % multiple
        values = {key: IGNORED_LABEL if key == "labels" else 0 for key in batch if key in PER_TOKEN}
        return {**batch, **{key: F.pad(batch[key], (0, num_added), value=values[key]) for key in values}}, num_added

    def metrics(self) -> Mapping[str, Metric]:
        """Return the number of skipped samples, if it is counted."""
        return {"skipped_samples": Sum()} if self._counts_skipped else {}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Batch, loss: Loss) -> None:
        """Add the skipped samples of a microbatch."""
        if self._counts_skipped:
            metrics["skipped_samples"].update(batch["num_skipped"])

    def _with_router_loss(self, loss: Loss, outputs: Any) -> Loss:
        if self._router_loss and outputs.logits.requires_grad and getattr(outputs, "aux_loss", None) is not None:
            return Loss(loss.total + self._router_loss * loss.weight * outputs.aux_loss, weight=loss.weight)
        return loss


@final
class NextToken(_LabelTask):
    """Prediction of the next token: the sum of the cross entropies of all labels, in nats.

    The batch has `input_ids` and `labels` [B, L], which are already shifted; -100 for positions without a loss. A batch
    with images also has their pixels, which the model gets too, `num_skipped` and `kept`, see `image_chats`.

    Args:
        router_loss: Factor of the balance loss of experts, which `transformers` computes for each microbatch and adds
            to the mean loss of its labels; not in evaluations.
        counts_skipped: If True, the metric `skipped_samples` is the number of samples that the data skipped.
        label_logits: If True, the model computes no logits but those at `label_positions` [B, K], if the batch has
            them. Losses and gradients are equal. `transformers` calls the argument `logits_to_keep`.
    """

    weight_unit = "tokens"

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        """Return this context-parallel rank's part of the rows, and all images; the model finds the positions."""
        return _split(batch, split)

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the summed cross entropy and the number of labels."""
        logits_BKV, labels_BK = outputs.logits, _labels_of(outputs.logits, batch)
        total = F.cross_entropy(
            _wide(logits_BKV).flatten(0, 1), labels_BK.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return self._with_router_loss(Loss(total, weight=(labels_BK != IGNORED_LABEL).sum()), outputs)

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the most probable token at each label, and the labels, without ignored ones."""
        labels = _labels_of(outputs.logits, batch)
        is_label = labels != IGNORED_LABEL
        return {"predictions": outputs.logits.argmax(-1)[is_label], "labels": labels[is_label]}

    def scores(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return `log_probs` and `entropy` [B, L] in nats, 0 without a label; no row without a sample."""
        num_rows = len(batch["kept"]) if "kept" in batch else len(batch["labels"])
        log_probs_BKV, labels_BK = _wide(outputs.logits).log_softmax(-1), _labels_of(outputs.logits, batch)
        of_labels_BK = log_probs_BKV.gather(-1, labels_BK.clamp(min=0)[..., None])[..., 0]
        found = {"log_probs": of_labels_BK, "entropy": torch.special.entr(log_probs_BKV.exp()).sum(-1)}
        is_label_BK = labels_BK != IGNORED_LABEL
        return {name: _of_all_tokens(each * is_label_BK, batch)[:num_rows] for name, each in found.items()}


@final
class LabelScores(InferenceTask):
    """Log-probabilities of the labels of each sample in nats, for batches of `NextToken`; None for a skipped sample."""

    def __init__(self) -> None:
        self._task = NextToken()

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model."""
        return self._task.inputs(batch)

    def pad_sequence(self, batch: Batch, multiple: int) -> tuple[Batch, int]:
        """Return rows with more padding."""
        return self._task.pad_sequence(batch, multiple)

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Any:
        """Return this context-parallel rank's part of the rows, with the split."""
        of_images = {key: each for key, each in batch.items() if key not in PER_TOKEN | {POSITIONS}}
        return {**self._task.split_sequence(batch, split), **of_images, "cp": split}

    def join_sequence(self, outputs: Any, split: ContextSplit) -> Any:
        """Return this rank's outputs unchanged: `results` joins only the log-probabilities, which are smaller."""
        return outputs

    def results(self, outputs: Any, batch: Any) -> list[JsonValue]:
        """Return the log-probabilities of the labels of each sample. Collective over context-parallel ranks."""
        log_probs, labels = self._task.scores(outputs, batch)["log_probs"], batch["labels"]
        if "cp" in batch:
            log_probs, labels = batch["cp"].join((log_probs, labels))
        rows = [row[label != IGNORED_LABEL].tolist() for row, label in zip(log_probs, labels, strict=False)]
        kept = batch["kept"].tolist() if "kept" in batch else range(len(rows))
        of_samples = dict(zip(kept, rows, strict=True))
        num_samples = len(rows) + int(batch.get("num_skipped", 0))
        return [of_samples.get(index) for index in range(num_samples)]


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
            F.cross_entropy(_wide(outputs.logits), batch["labels"], reduction="sum"), weight=len(batch["labels"])
        )

    def metrics(self) -> dict[str, WeightedMean]:
        """Return the accuracy."""
        return {"accuracy": WeightedMean()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Batch, loss: Loss) -> None:
        """Add the predictions of a microbatch."""
        is_right = outputs.logits.detach().argmax(-1) == batch["labels"]
        metrics["accuracy"].update(is_right.sum(), torch.tensor(float(len(is_right))))

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the logits and labels of the samples."""
        return {"logits": outputs.logits, "labels": batch["labels"]}


@final
class Prefer(_LabelTask):
    """Preference optimization: the loss, metrics and reference of `PreferenceTask`, for a model that returns logits.

    The batch has `input_ids`, `attention_mask` and `labels` [P, 2, L]: the chosen and the rejected answer of each pair.
    A batch with images is as for `NextToken`; label positions are [P, 2, K].

    Args:
        loss: Loss of pairs.
        has_reference: See `PreferenceTask`.
        router_loss: As for `NextToken`; it multiplies the number of pairs.
        options: `counts_skipped` and `label_logits` of `NextToken`.
    """

    weight_unit = "pairs"

    def __init__(self, loss: PreferenceLoss, *, has_reference: bool, router_loss: float = 0.0, **options: bool) -> None:
        super().__init__(router_loss=router_loss, **options)
        self._packed = PreferenceTask(loss, has_reference=has_reference)

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Any:
        """Return this context-parallel rank's part of the answers, with the mesh of the split as `cp`."""
        return {**_split(batch, split), "cp": split.mesh}

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the summed losses of the pairs."""
        return self._with_router_loss(self._packed.loss(*self._as_packed(outputs, batch)), outputs)

    def metrics(self) -> Mapping[str, Metric]:
        """Return the reward margin and accuracy, and the number of skipped samples, if it is counted."""
        return {**self._packed.metrics(), **super().metrics()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Batch, loss: Loss) -> None:
        """Add the margins of a microbatch, and its skipped samples."""
        super().update_metrics(metrics, outputs=outputs, batch=batch, loss=loss)
        packed, rows = self._as_packed(outputs, batch)
        self._packed.update_metrics(metrics, outputs=packed, batch=rows, loss=loss)

    def reference_values(self, outputs: Any, batch: Batch) -> Mapping[str, Tensor]:
        """Return the log-probabilities of the reference as `reference_log_probs` [P, 2, L]."""
        return {"reference_log_probs": self._log_probs(outputs, batch)}

    def _log_probs(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the log-probability of each label [P, 2, L], 0 without a label."""
        logits, labels = _wide(outputs.logits).flatten(0, 1), _labels_of(outputs.logits, batch)
        losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
        return _of_all_tokens(-losses.view_as(labels), batch)

    def _as_packed(self, outputs: Any, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the outputs and the batch as one row for each pair [P, 2 L], with an answer as a document."""
        rows = {name: batch[name].flatten(1) for name in ("labels", "reference_log_probs") if name in batch}
        number = torch.arange(2, device=batch["labels"].device)[None, :, None]
        rows["documents"] = number.expand_as(batch["labels"]).flatten(1)
        return {"log_probs": self._log_probs(outputs, batch).flatten(1)}, {**rows, "cp": batch.get("cp")}


@final
class Reward(Task):
    """Reward model: the Bradley-Terry loss of pairs, for a classifier of one class.

    The batch has `input_ids`, `attention_mask` and `labels` [P, 2, L], the chosen answer first, and may have `margins`
    [P], by which the loss expects the reward of the chosen answer to be higher. The metrics are
    `reward_margin`, the mean difference of the rewards, and `reward_accuracy`, the share of pairs in which it is
    positive.
    """

    weight_unit = "pairs"

    def __init__(self, loss: RewardLoss) -> None:
        self._loss = loss

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model: all answers as rows."""
        return _inputs(batch)

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the summed losses of the pairs."""
        rewards_P2 = _rewards(outputs, batch)
        documents = torch.arange(2, device=rewards_P2.device).expand_as(rewards_P2)
        margins = batch["margins"][:, None].expand_as(rewards_P2) if "margins" in batch else None
        positions = torch.zeros_like(documents)
        return self._loss(rewards_P2, position_ids_BL=positions, document_ids_BL=documents, margins_BL=margins)

    def metrics(self) -> Mapping[str, Metric]:
        """Return the reward margin and accuracy."""
        return {"reward_margin": WeightedMean(), "reward_accuracy": WeightedMean()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Batch, loss: Loss) -> None:
        """Add the rewards of a microbatch."""
        chosen_P, rejected_P = _rewards(outputs, batch).detach().unbind(1)
        count = torch.tensor(float(len(chosen_P)))
        metrics["reward_margin"].update((chosen_P - rejected_P).sum(), count)
        metrics["reward_accuracy"].update((chosen_P > rejected_P).sum(), count)

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the rewards of both answers [P, 2]."""
        return {"rewards": _rewards(outputs, batch)}


def _rewards(outputs: Any, batch: Batch) -> Tensor:
    return _wide(outputs.logits).view(batch["labels"].shape[:2])


Pooling: TypeAlias = Literal["mean", "last", "first"]
"""Token outputs that become the embedding: their mean, or the output of the last or first token."""


@final
class Embed(Task):
    """Classification of each query's own document among the documents of its group, with summed cross entropy.

    The similarity is the cosine divided by the temperature. A copy of the query's own document is not a negative. The
    batch has `input_ids` and `attention_mask` [G, R, L], padded on the right, and `num_pairs` [G]: pairs after the
    first `num_pairs` of a group are padding.

    Args:
        num_pairs: Number of pairs K, with padding. The first K texts of a group are queries, the next K are the
            documents of these queries, and the remaining texts are negatives, those of the first query first.
        pooling: Token outputs that become the embedding.
        temperature: Divisor of the cosine similarity.
    """

    weight_unit = "pairs"

    def __init__(self, *, num_pairs: int, pooling: Pooling, temperature: float) -> None:
        self._num_pairs, self._pooling, self._temperature = num_pairs, pooling, temperature

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model: all texts of all groups as rows."""
        return {key: batch[key].flatten(0, 1) for key in ("input_ids", "attention_mask")}

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the summed cross entropy and the number of pairs."""
        logits_GKC, own_GK = self._similarities(outputs, batch)
        total = F.cross_entropy(logits_GKC.flatten(0, 1), own_GK.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)
        return Loss(total, weight=batch["num_pairs"].sum())

    def metrics(self) -> dict[str, WeightedMean]:
        """Return the accuracy: the fraction of queries that are closest to their own document."""
        return {"accuracy": WeightedMean()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Batch, loss: Loss) -> None:
        """Add the results of a microbatch to the accuracy."""
        logits_GKC, own_GK = self._similarities(outputs, batch)
        metrics["accuracy"].update((logits_GKC.detach().argmax(-1) == own_GK).sum(), batch["num_pairs"].sum())

    def _similarities(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the similarities [G, K, C] in float32, and the index of each query's document [G, K].

        Similarities are -inf for copies of the document and for padding. The index is `IGNORED_LABEL` for padding.
        """
        ids_GRL, mask_GRL = batch["input_ids"], batch["attention_mask"]
        states = outputs.last_hidden_state.unflatten(0, ids_GRL.shape[:2])
        embeddings_GRD = F.normalize(pool(states.float(), mask_GRL, self._pooling), dim=-1)
        queries, documents = embeddings_GRD[:, : self._num_pairs], embeddings_GRD[:, self._num_pairs :]
        logits_GKC = queries @ documents.mT / self._temperature
        texts_GCL = torch.where(mask_GRL.bool(), ids_GRL, -1)[:, self._num_pairs :]
        is_copy_GKC = (texts_GCL[:, : self._num_pairs, None] == texts_GCL[:, None]).all(-1)
        pairs_K = torch.arange(self._num_pairs, device=logits_GKC.device)
        is_pair_GK = pairs_K < batch["num_pairs"][:, None]
        num_negatives = documents.shape[1] // self._num_pairs - 1
        is_text_GC = torch.cat([is_pair_GK, is_pair_GK.repeat_interleave(num_negatives, dim=1)], dim=1)
        is_own_KC = torch.eye(*logits_GKC.shape[1:], dtype=torch.bool, device=logits_GKC.device)
        is_left_out = (is_copy_GKC & ~is_own_KC) | ~is_text_GC[:, None]
        # Queries of padding keep all documents: a row of -inf alone would have no gradient.
        logits_GKC = logits_GKC.masked_fill(is_left_out & is_pair_GK[:, :, None], float("-inf"))
        return logits_GKC, torch.where(is_pair_GK, pairs_K, IGNORED_LABEL)


def pool(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return the embeddings [..., D] of token outputs [..., L, D]; `mask` [..., L] is 0 for padding on the right."""
    match pooling:
        case "first":
            return states[..., 0, :]
        case "mean":
            weights = (mask / mask.sum(-1, keepdim=True)).to(states.dtype)
            return (states * weights[..., None]).sum(-2)
        case "last":
            last = (mask.sum(-1) - 1)[..., None, None].expand(*mask.shape[:-1], 1, states.shape[-1])
            return states.gather(-2, last)[..., 0, :]
        case _:
            assert_never(pooling)
