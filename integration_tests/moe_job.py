"""Job that trains a tiny DeepSeek-V3 in float64, balances its experts in each step, and reports their load."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from d9d_dist import ContextSplit, DistributedContext, StageInfo
from d9d_loop import Loss, ModelProvider, ModelReady, OptimizerDone, Task, Trainer, TrainerConfig, on_event
from d9d_loop.testing import parse_layout
from d9d_metrics import Accumulator, Metric
from d9d_metrics.metric import MetricValue
from d9d_modules import parallelize_decoder
from d9d_moe import (
    DeepseekV3ForCausalLM,
    DeepseekV3Params,
    RouterLosses,
    balance_experts,
    load_statistics,
    parallelize_moe,
)
from d9d_pipeline import Inputs

NUM_ROWS, LENGTH, VOCAB = 8, 16, 32

PARAMS = DeepseekV3Params(
    vocab_size=VOCAB,
    hidden_size=12,
    num_layers=3,
    num_heads=4,
    kv_rank=6,
    q_rank=10,
    head_dim=4,
    rotary_dim=2,
    value_dim=5,
    intermediate_size=20,
    num_dense_layers=1,
    num_experts=8,
    top_k=2,
    expert_intermediate_size=8,
    num_groups=4,
    top_groups=2,
    router_losses=RouterLosses(balance=0.01, scope="global_batch", z=0.001),
    initializer_range=0.3,
)
SPARSE_LAYERS = [f"backbone.layers.{index}.feed_forward" for index in range(1, PARAMS.num_layers)]


@final
class TinyDeepseek(ModelProvider):
    """Builds and parallelizes the model as a user does."""

    def build(self, stage: StageInfo) -> nn.Module:
        return DeepseekV3ForCausalLM(PARAMS, stage).double()

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        parallelize_decoder(model, ctx, experts=parallelize_moe)


@final
class ExpertLoad(Metric):
    """Balance of the expert load in some layers."""

    def __init__(self, layers: Sequence[str], num_experts: int) -> None:
        self.layers = list(layers)
        self.counts = Accumulator("sum", shape=(len(layers), num_experts))

    def update(self, counts: Mapping[str, Tensor]) -> None:
        for layer, seen in counts.items():
            self.counts.value[self.layers.index(layer)] += seen

    def compute(self) -> MetricValue:
        each = load_statistics(self.counts.value)
        return {
            "max_over_mean": each.max_over_mean.max(),
            "entropy": each.entropy.mean(),
            "idle": each.idle.sum(),
            "dropped": each.dropped.sum(),
        }


@final
class BalancedNextToken(Task):
    """Predicts tokens; as an event subscriber, balances experts and adds their counts to a metric."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.newest = self.load = ExpertLoad(SPARSE_LAYERS, PARAMS.num_experts)
        self.is_counting = False

    def inputs(self, batch: Any) -> Inputs:
        positions = batch["position_ids"] if "position_ids" in batch else torch.arange(LENGTH).unsqueeze(0)
        return Inputs(batch["input_ids"], labels=batch["labels"], position_ids=positions)

    def split_sequence(self, batch: Any, split: ContextSplit) -> Any:
        return {**split.split(batch), "position_ids": split.positions(LENGTH)}

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss(outputs.sum(), weight=outputs.numel())

    def metrics(self) -> dict[str, Metric]:
        self.newest = ExpertLoad(SPARSE_LAYERS, PARAMS.num_experts)
        return {"experts": self.newest}

    @on_event(ModelReady)
    def start(self, ready: ModelReady) -> None:
        """Keep the training metric, because evaluations create others; counts are equal on all ranks of a stage."""
        self.load = self.newest
        self.is_counting = ready.ctx.coordinate("batch", "dp") == ready.ctx.coordinate("batch", "cp") == 0

    @on_event(OptimizerDone)
    def balance(self, done: OptimizerDone) -> None:
        """Balance the experts once per step."""
        counts = balance_experts(done.model, rate=self.rate, taken=done.taken)
        if self.is_counting:
            self.load.update(counts)


def train(layout: str, folder: str, steps: int, rate: float) -> None:
    """Train up to a step, resuming the folder's last job; metrics are written to its metrics.jsonl."""
    where = parse_layout(layout)
    config = TrainerConfig.model_validate(
        {
            "steps": steps,
            "batch": {"global_size": NUM_ROWS, "microbatch_size": where.microbatch_size},
            "run": {"folder": Path(folder).parent, "name": Path(folder).name},
            "mesh": where.mesh,
            "pipeline": {"schedule": where.schedule, "draw": False},
            "optimizer": {"learning_rate": 3e-3},
            "logging": {"progress": False, "every": 1},
            "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},  # takes milliseconds
            "evaluation": {"every": max(steps // 2, 1)},
            "export": False,
        }
    )
    task = BalancedNextToken(rate)
    trainer = Trainer(
        config,
        model=TinyDeepseek(),
        data=samples(),
        task=task,
        evaluation_data=samples()[:5],
        lr_schedule=lambda step: 1.0,  # otherwise it would depend on the number of steps
    )
    trainer.events.subscribe(task)
    trainer.train()


def samples(num_rows: int = NUM_ROWS) -> list[dict[str, Tensor]]:
    windows = torch.randint(0, VOCAB, (num_rows, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": window[:-1], "labels": window[1:]} for window in windows]
