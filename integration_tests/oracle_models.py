"""Models of the oracle's grid: a decoder, dense and sparse, and a model as a user might write it."""

from dataclasses import dataclass
from typing import Any, final

import torch
from own_decoder import Batch, Decoder, NextByte, Parallelism
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.nn import functional as F

from d9d_dist import (
    Attention,
    ColumnParallel,
    ContextMethod,
    ContextSplit,
    DistributedContext,
    RowParallel,
    StageInfo,
    TensorRegion,
    VocabParallelEmbedding,
    parallelize_context,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
    sdpa_attention,
)
from d9d_loop import Loss, ModelProvider, Task
from d9d_modules import CheckpointPolicy, Qwen3Params, checkpoint_activations
from d9d_moe import Qwen3MoeParams, RouterLosses
from d9d_pipeline import Inputs

LENGTH = 16
BATCH_SIZE = 8
VOCAB = 32


def decoder(kind: str, *, method: ContextMethod, checkpointing: CheckpointPolicy, num_layers: int = 2) -> Decoder:
    """Return the provider of a small model: dense, tied, moe, or moe with router losses."""
    dense = Qwen3Params(
        vocab_size=VOCAB,
        hidden_size=24,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=4,
        intermediate_size=36,
        tie_word_embeddings=kind == "tied",
        initializer_range=0.2,
    )
    moe = Qwen3MoeParams.like(
        dense,
        num_experts=6,
        top_k=2,
        expert_intermediate_size=20,
        router_losses=RouterLosses(balance=0.1, z=0.01) if kind == "moe with losses" else RouterLosses(),
    )
    parallelism = Parallelism(context_method=method, activation_checkpointing=checkpointing)
    return Decoder(dense, moe if kind.startswith("moe") else None, parallelism)


class MaskedNextToken(NextByte):
    """Next-token task with a loss mask."""

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        return Loss((outputs * batch["mask"]).sum(), weight=batch["mask"].sum())


class PackedNextToken(Task):
    """Task of the plain model: packed documents, which do not attend to each other."""

    def inputs(self, batch: Batch) -> Inputs:
        return Inputs(batch["input_ids"], position_ids=batch.get("position_ids"), documents=batch["documents"])

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        losses = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
        return Loss((losses * batch["mask"]).sum(), weight=batch["mask"].sum())

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        return {**split.split(batch), "position_ids": split.positions(LENGTH)}


def samples(*, ragged: bool) -> list[Batch]:
    """Return one batch; a ragged batch has rows of every length, one without tokens, and masked tokens."""
    draws = torch.Generator().manual_seed(0)
    rows = []
    for row in range(BATCH_SIZE):
        window = torch.randint(0, VOCAB, (LENGTH + 1,), generator=draws)
        documents = (torch.rand(LENGTH, generator=draws) < 0.2).long().cumsum(0)
        mask = (torch.rand(LENGTH, generator=draws) < 0.8) & (torch.arange(LENGTH) < row * LENGTH // (BATCH_SIZE - 1))
        full = torch.ones(LENGTH)
        rows.append(
            {
                "input_ids": window[:-1],
                "labels": window[1:],
                "documents": documents,
                "position_ids": torch.arange(LENGTH),
                "mask": mask.float() if ragged else full,
            }
        )
    return rows


class PlainAttention(nn.Module):
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = size // num_heads
        self.attention_function: Attention = sdpa_attention
        self.query, self.key, self.value = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)
        self.query_norm = nn.LayerNorm(self.head_dim)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.query, self.key, self.value))
        return self.out(self.attention_function(self.query_norm(q), k, v, documents_BS=documents).flatten(2))


class PlainBlock(nn.Module):
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(size), PlainAttention(size, num_heads)
        self.mlp_norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(3 * size, size)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), documents)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class PlainModel(nn.Module):
    """Biases, layer norms, learned positions, and a parameter owned and used by the root module.

    Stages exchange a dict, which has an entry without a gradient.
    """

    def __init__(self, stage: StageInfo, num_layers: int) -> None:
        super().__init__()
        self.stage = stage
        if stage.is_first:
            self.tokens, self.positions = nn.Embedding(VOCAB, 16), nn.Embedding(LENGTH, 16)
        self.blocks = nn.ModuleDict({str(index): PlainBlock(16, 4) for index in stage.layers(num_layers)})
        if stage.is_last:
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCAB)
            self.temperature = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        if self.stage.is_last:
            nn.init.constant_(self.temperature, 0.7)

    def forward(self, received: Any, *, position_ids: Tensor | None, documents: Tensor) -> Any:
        x = self._embed(received, position_ids) if self.stage.is_first else received["x"] * received["ones"]
        for block in self.blocks.values():
            x = block(x, documents)
        if not self.stage.is_last:
            return {"ones": torch.ones_like(x[:, :, :1]), "x": x}
        return self.head(self.norm(x)) * self.temperature

    def _embed(self, ids: Tensor, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        return self.tokens(ids) + self.positions(position_ids)


@final
@dataclass(frozen=True)
class PlainProvider(ModelProvider):
    """Replicates the model if nothing is sharded, so that the grid covers both kinds of data parallelism."""

    method: ContextMethod
    checkpointing: CheckpointPolicy
    num_layers: int = 2

    def build(self, stage: StageInfo) -> nn.Module:
        return PlainModel(stage, self.num_layers)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        dense = ctx.mesh_for("dense")
        attention = "blocks.*.attention"
        heads = ColumnParallel(input=None, head_dim=4)
        ends = {"tokens": VocabParallelEmbedding(), "head": ColumnParallel(output=Replicate())}
        plan = {
            **{name: style for name, style in ends.items() if hasattr(model, name)},
            attention: TensorRegion(),
            f"{attention}.query": heads,
            f"{attention}.key": heads,
            f"{attention}.value": heads,
            f"{attention}.out": RowParallel(),
            "blocks.*.up": ColumnParallel(),
            "blocks.*.down": RowParallel(),
        }
        parallelize_tensor(model, dense["tp"], plan)
        parallelize_context(model, ctx.mesh_for("batch")["cp"], method=self.method)
        for block in model.get_submodule("blocks").children():
            checkpoint_activations(block, policy=self.checkpointing)
        if dense["dp_cp_shard"].size() > 1:
            parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")
            return
        parallelize_replicate(model, dense["cp_replicate"])
        parallelize_replicate(model, dense["dp_replicate"])
