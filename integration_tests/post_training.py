"""Post-training of the oracle's decoders: packed rows, tasks, layouts, and deliberate bugs that must be noticed."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, final
from unittest import mock

import torch
from oracle_models import BATCH_SIZE, VOCAB, decoder
from test_peft_rows import METHODS, Adapted
from torch import Tensor, nn

import d9d_loop.losses.document_sums
import d9d_loop.losses.policy
import d9d_loop.losses.preference
from d9d_dist import (
    ContextMethod,
    ContextSplit,
    DistributedContext,
    StageInfo,
    parallelize_context,
    parallelize_hsdp,
)
from d9d_loop import Loss, ModelProvider, Task
from d9d_loop.data import pack_row
from d9d_loop.losses import PolicyLoss, PreferenceLoss, RewardLoss, sum_per_document
from d9d_loop.tasks import DistillationTask, NextTokenTask, PolicyTask, PreferenceTask, RewardTask
from d9d_loop.testing import Around, Experiment, parse_layout, trace_layout
from d9d_modules import DecoderModel
from d9d_moe import TopKRouter
from d9d_moe.router import Routing

LENGTH, NUM_CANDIDATES, NUM_EXPERTS, TOP_K = 32, 3, 6, 2


def rows(*, num_layers: int | None = None) -> list[dict[str, Tensor]]:
    """Return packed pairs, with documents that span context-parallel ranks, and all arguments of the losses.

    With `num_layers`, tokens have recorded experts, except every fourth token.
    """
    draws = torch.Generator().manual_seed(0)
    samples = []
    for number in range(BATCH_SIZE):
        sizes = [(9, 12), (7, 3, 8, 9), (20, 5), (13, 14)][
            number % 4
        ]  # positions of the documents; the rest is padding
        documents: list[Any] = []
        for size in sizes:
            mask = torch.rand(size + 1, generator=draws) < 0.6
            mask[-1] = True
            documents.append({"tokens": torch.randint(0, VOCAB, (size + 1,), generator=draws), "mask": mask})
        row = pack_row(documents, LENGTH)
        values = [-3 * torch.rand(LENGTH, generator=draws, dtype=torch.float64) for _ in range(3)]
        of_document = torch.randn(LENGTH, generator=draws, dtype=torch.float64)
        row |= {
            "reference_log_probs": values[0],
            "old_log_probs": values[1],
            "importance": values[2].exp(),
            "advantages": of_document[row["documents"]],
            "teacher_ids": torch.stack(
                [torch.randperm(VOCAB, generator=draws)[:NUM_CANDIDATES] for _ in range(LENGTH)]
            ),
            "teacher_log_probs": torch.randn(LENGTH, VOCAB, generator=draws, dtype=torch.float64).log_softmax(-1)[
                :, :NUM_CANDIDATES
            ],
        }
        if num_layers is not None:
            scores = torch.rand(LENGTH, num_layers, NUM_EXPERTS, generator=draws)
            row["expert_indices"] = scores.topk(TOP_K, dim=-1).indices
            row["expert_indices"][::4] = -1
        samples.append(row)
    return samples


class ScoreModel(nn.Module):
    """Decoder backbone with a score for each position."""

    def __init__(self, params: Any, stage: StageInfo) -> None:
        super().__init__()
        self.backbone = DecoderModel(params, stage)
        self.stage = stage
        self.score = nn.Linear(params.hidden_size, 1) if stage.is_last else None

    def forward(self, hidden: Any, *, position_ids: Tensor, document_ids_BL: Tensor) -> Any:
        x = self.backbone(hidden, position_ids=position_ids, document_ids_BL=document_ids_BL)
        return x if self.score is None else self.score(x)


@final
@dataclass(frozen=True)
class ScoreProvider(ModelProvider):
    method: ContextMethod
    num_layers: int

    def build(self, stage: StageInfo) -> nn.Module:
        params = decoder("dense", method=self.method, checkpointing="none", num_layers=self.num_layers).dense
        return ScoreModel(params, stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        dense = ctx.mesh_for("dense")
        parallelize_context(model, ctx.mesh_for("batch")["cp"], method=self.method)
        parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")


DPO = PreferenceLoss(beta=0.5, length_normalized=True, label_smoothing=0.1, answer_weight=0.2)
GRPO = PolicyLoss(average="sequences", kl_weight=0.1, clip_low=0.5)
GSPO = PolicyLoss(average="sequences", ratio_level="sequence", clip_low=0.5, kl_weight=0.1)
DAPO = PolicyLoss(average="tokens", clip_high=0.6, clip_low=0.5, kl_weight=0.1)
TASKS: dict[str, Task] = {
    "sft": NextTokenTask(),
    "dpo": PreferenceTask(DPO),
    "grpo": PolicyTask(GRPO),
    "gspo": PolicyTask(GSPO),
    "dapo": PolicyTask(DAPO),
    "reward": RewardTask(RewardLoss(centering=0.1)),
    "distill": DistillationTask(),
    "replay": NextTokenTask(),
}


def experiment(
    task: str, *, model: str = "dense", method: ContextMethod = "all_gather", num_layers: int = 4
) -> Experiment:
    provider: ModelProvider
    match model:
        case _ if task == "reward":
            provider = ScoreProvider(method, num_layers)
        case "lora":
            base = decoder("dense", method=method, checkpointing="full", num_layers=num_layers)
            provider = Adapted(base, METHODS["lora"])
        case _:
            provider = decoder(model, method=method, checkpointing="none", num_layers=num_layers)
    batch = rows(num_layers=num_layers if task == "replay" else None)
    return Experiment(model=provider, batch=batch, task=TASKS[task], num_steps=2)


@cache
def one_process(task: str, model: str = "dense") -> dict[str, Any]:
    return trace_layout(experiment(task, model=model), parse_layout(""))


def in_layout(
    task: str, layout: str, *, model: str = "dense", method: ContextMethod = "all_gather", mutant: str | None = None
) -> dict[str, Any]:
    chosen = experiment(task, model=model, method=method)
    around: Around = nullcontext if mutant is None else partial(apply_mutant, mutant)
    return trace_layout(chosen, parse_layout(layout), around=around)


def apply_mutant(name: str) -> AbstractContextManager[object]:
    """Apply a bug on a rank: the name travels to the rank, since functions in the table cannot be pickled."""
    return MUTANTS[name].bug()


@dataclass(frozen=True)
class PostTrainingMutant:
    """A bug, and the task and layout that must notice it."""

    bug: Callable[[], AbstractContextManager[object]]
    task: str
    layout: str
    model: str = "dense"


def _attribute(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[object]]:
    return lambda: mock.patch.object(owner, name, value)


REAL_SUM = sum_per_document


def _local_sum(values: Tensor, ids: Tensor, *, cp: Any = None, num_documents: int | None = None) -> Tensor:
    size = 1 if cp is None else cp.size()
    return REAL_SUM(values, ids, num_documents=num_documents or size * values.shape[1])


def _sum_without_gradient_of_others(
    values: Tensor, ids: Tensor, *, cp: Any = None, num_documents: int | None = None
) -> Tensor:
    with mock.patch.object(d9d_loop.losses.document_sums, "copy_to_axis", lambda x, mesh: x):
        return REAL_SUM(values, ids, cp=cp, num_documents=num_documents)


def _changed_loss(task: type[Any], change: Callable[[Any, Loss], Loss]) -> Callable[[], AbstractContextManager[object]]:
    real = task.loss
    return _attribute(task, "loss", lambda self, outputs, batch: change(batch, real(self, outputs, batch)))


def _changed_batch(
    task: type[Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[[], AbstractContextManager[object]]:
    real = task.loss
    return _attribute(task, "loss", lambda self, outputs, batch: real(self, outputs, change(batch)))


def _changed_outputs(
    task: type[Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[[], AbstractContextManager[object]]:
    real = task.loss
    return _attribute(task, "loss", lambda self, outputs, batch: real(self, change(outputs), batch))


def _log_probs_with_router_losses(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"log_probs": outputs["log_probs"] - outputs["auxiliary_losses"]}


def _own_weight(batch: Any, loss: Loss) -> Loss:
    """Average on the rank, then over ranks."""
    return Loss(loss.total / torch.as_tensor(loss.weight).clamp(min=1), weight=1.0)


def _shifted_labels(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "labels": batch["labels"].roll(1, 1)}


def _normalized_per_rank(batch: dict[str, Any]) -> dict[str, Any]:
    advantages = batch["advantages"]
    return {**batch, "advantages": (advantages - advantages.mean()) / advantages.std()}


def _without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda batch: {name: value for name, value in batch.items() if name != key}


def _zero_reference(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"reference_log_probs": torch.zeros_like(batch["reference_log_probs"])}


def _local_mesh(batch: dict[str, Any]) -> dict[str, Any]:
    return _without("cp")(batch)


@contextmanager
def _unsplit_reference() -> Generator[None]:
    """Every context-parallel rank uses the first part of the reference log-probabilities."""
    real = ContextSplit.split

    def split(self: ContextSplit, tree: Any, *, dim: int = 1) -> Any:
        found = real(self, tree, dim=dim)
        if isinstance(tree, dict) and "reference_log_probs" in tree:
            length = found["reference_log_probs"].shape[dim]
            found["reference_log_probs"] = tree["reference_log_probs"][:, :length]
        return found

    with mock.patch.object(ContextSplit, "split", split):
        yield


def _pairs_of_each_rank(batch: dict[str, Any], loss: Loss) -> Loss:
    """Count each pair once for every context-parallel rank."""
    return Loss(loss.total, weight=loss.weight * batch["cp"].size() if "cp" in batch else loss.weight)


def _experts_of_the_stage(self: DecoderModel, expert_indices: Tensor) -> Any:
    """Give each layer the records of its index within the stage."""
    first = min(map(int, self.layers))
    return self.token_mask(expert_indices.roll(first, 2)).unbind(2)


def _experts_of_all_tokens(self: DecoderModel, expert_indices: Tensor) -> Any:
    """Give each tensor-parallel rank the records of the first tokens."""
    length = self.token_mask(expert_indices).shape[1]
    return expert_indices[:, :length].unbind(2)


REAL_ROUTER = TopKRouter.forward


def _recorded_probabilities(self: TopKRouter, x: Tensor, recorded: Tensor | None = None) -> Routing:
    """Keep the weights of the experts that the router would choose."""
    return REAL_ROUTER(self, x, recorded)._replace(probabilities=REAL_ROUTER(self, x).probabilities)


MUTANTS = {
    "experts_of_the_layer_of_the_stage": PostTrainingMutant(
        _attribute(DecoderModel, "_of_layers", _experts_of_the_stage), "replay", "pp=2,microbatch=4", "moe"
    ),
    "experts_of_the_first_tokens": PostTrainingMutant(
        _attribute(DecoderModel, "_of_layers", _experts_of_all_tokens), "replay", "tp=2", "moe"
    ),
    "probabilities_of_other_experts": PostTrainingMutant(
        _attribute(TopKRouter, "forward", _recorded_probabilities), "replay", "dp_shard=2", "moe"
    ),
    "router_losses_are_left_to_the_model": PostTrainingMutant(
        _changed_outputs(PreferenceTask, _without("auxiliary_losses")), "dpo", "dp_shard=2", "moe with losses"
    ),
    "ratios_include_router_losses": PostTrainingMutant(
        _changed_outputs(PolicyTask, _log_probs_with_router_losses), "grpo", "dp_shard=2", "moe with losses"
    ),
    "mask_shifted_by_one": PostTrainingMutant(_changed_batch(PolicyTask, _shifted_labels), "dapo", "dp_shard=2"),
    "document_sums_are_not_reduced_over_cp": PostTrainingMutant(
        _attribute(d9d_loop.losses.preference, "sum_per_document", _local_sum), "dpo", "cp_shard=2"
    ),
    "sequence_ratios_are_not_reduced_over_cp": PostTrainingMutant(
        _attribute(d9d_loop.losses.policy, "sum_per_document", _local_sum), "gspo", "cp_shard=2"
    ),
    "gradients_of_document_sums_are_local": PostTrainingMutant(
        _attribute(d9d_loop.losses.policy, "sum_per_document", _sum_without_gradient_of_others), "gspo", "cp_shard=2"
    ),
    "weight_averaged_per_rank": PostTrainingMutant(_changed_loss(NextTokenTask, _own_weight), "sft", "dp_shard=2"),
    "answers_averaged_per_rank": PostTrainingMutant(
        _changed_loss(PolicyTask, _own_weight), "dapo", "dp_shard=2,microbatch=1"
    ),
    "advantages_normalized_per_rank": PostTrainingMutant(
        _changed_batch(PolicyTask, _normalized_per_rank), "grpo", "dp_shard=2,microbatch=2"
    ),
    "reference_of_zeros": PostTrainingMutant(_changed_batch(PreferenceTask, _zero_reference), "dpo", "dp_shard=2"),
    "reference_of_other_tokens": PostTrainingMutant(_unsplit_reference, "dpo", "cp_shard=2"),
    "no_importance": PostTrainingMutant(_changed_batch(PolicyTask, _without("importance")), "grpo", "dp_shard=2"),
    "context_parallel_ranks_are_forgotten": PostTrainingMutant(
        _changed_batch(PreferenceTask, _local_mesh), "dpo", "cp_shard=2"
    ),
    "pairs_are_counted_on_each_rank": PostTrainingMutant(
        _changed_loss(PreferenceTask, _pairs_of_each_rank), "dpo", "cp_shard=2"
    ),
    "pairs_are_split": PostTrainingMutant(
        _attribute(d9d_loop.losses.preference, "take_pairs", lambda sums: (sums[:, 1:-1:2], sums[:, 2::2])),
        "dpo",
        "dp_shard=2",
    ),
}
