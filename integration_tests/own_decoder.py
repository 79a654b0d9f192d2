"""Decoder and task of a user who writes `parallelize` and the task line by line, dense or with experts, on packed rows.

`d9d_modules.parallelize_decoder` and `d9d_loop.tasks.NextTokenTask` replace these lines in a job.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from d9d_dist import (
    ContextMethod,
    ContextSplit,
    DistributedContext,
    StageInfo,
    parallelize_context,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_loop import Loss, ModelProvider, Section, Task, TrainerConfig
from d9d_metrics import BitsPerByte
from d9d_modules import (
    IGNORED_LABEL,
    QWEN3,
    CheckpointPolicy,
    Qwen3ForCausalLM,
    Qwen3Params,
    checkpoint_layers,
    decoder_from_hugging_face,
    decoder_tensor_plan,
)
from d9d_moe import (
    QWEN3_MOE,
    Qwen3MoeForCausalLM,
    Qwen3MoeParams,
    RouterLosses,
    parallelize_moe,
    sparse_from_hugging_face,
)
from d9d_pipeline import Inputs
from d9d_state import JsonValue, StateMapper

Batch = dict[str, torch.Tensor]


class Experts(Section):
    num_experts: int
    top_k: int
    intermediate_size: int
    router_losses: RouterLosses = RouterLosses()


class Parallelism(Section):
    context_method: ContextMethod = "all_gather"
    activation_checkpointing: CheckpointPolicy = "none"


class DecoderConfig(TrainerConfig):
    parallelism: Parallelism = Parallelism()
    model: Qwen3Params
    experts: Experts | None = None

    @property
    def moe(self) -> Qwen3MoeParams | None:
        if self.experts is None:
            return None
        return Qwen3MoeParams.like(
            self.model,
            num_experts=self.experts.num_experts,
            top_k=self.experts.top_k,
            expert_intermediate_size=self.experts.intermediate_size,
            router_losses=self.experts.router_losses,
        )


class Decoder(ModelProvider):
    def __init__(
        self, dense: Qwen3Params, moe: Qwen3MoeParams | None = None, parallelism: Parallelism | None = None
    ) -> None:
        self.dense, self.moe, self.parallelism = dense, moe, parallelism or Parallelism()

    def build(self, stage: StageInfo) -> nn.Module:
        return Qwen3ForCausalLM(self.dense, stage) if self.moe is None else Qwen3MoeForCausalLM(self.moe, stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        dense, cp = ctx.mesh_for("dense"), ctx.mesh_for("batch")["cp"]
        precision = ctx.precision  # bfloat16 on accelerators; router losses stay in float32
        if precision is not None and self.moe is not None:
            precision = replace(precision, cast_inputs=False)
        blocks = cast("nn.ModuleDict", model.get_submodule("backbone.layers"))
        parallelize_tensor(model, dense["tp"], decoder_tensor_plan(model))
        parallelize_context(model, cp, method=self.parallelism.context_method)
        parallelize_moe(model, ctx, precision=precision)
        dp = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
        checkpoint_layers(blocks, policy=self.parallelism.activation_checkpointing)
        for block in blocks.children():
            parallelize_hsdp(block, dp, shard_axis="dp_cp_shard", precision=precision)
        parallelize_hsdp(model, dp, shard_axis="dp_cp_shard", precision=precision)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        return decoder_from_hugging_face(self.dense) if self.moe is None else sparse_from_hugging_face(self.moe)

    def export_files(self) -> Mapping[str, JsonValue]:
        dense, moe = self.dense, self.moe
        return {"config.json": QWEN3.write(dense) if moe is None else QWEN3_MOE.write(moe)}


class NextByte(Task):
    weight_unit = "tokens"

    def inputs(self, batch: Batch) -> Inputs:
        return Inputs(
            batch["input_ids"],
            labels=batch["labels"],
            position_ids=batch["position_ids"],
            document_ids_BL=batch["documents"],
        )

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        return Loss.sum(outputs, (batch["labels"] != IGNORED_LABEL).sum())

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        return split.split(batch)

    def metrics(self) -> dict[str, BitsPerByte]:
        return {"bits_per_byte": BitsPerByte()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Any, loss: Loss) -> None:
        metrics["bits_per_byte"].update(loss.total.detach(), loss.weight)
