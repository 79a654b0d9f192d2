"""Rows of the engine: a driven step with uneven microbatches, scores, a reference and weights, in float64.

A row returns what a caller of the engine gets in a layout. `by_hand` computes the same in one process with plain
PyTorch: all rows of the batch at once, all logits in memory, no engine.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from oracle_models import MaskedNextToken, decoder, samples
from own_decoder import Decoder
from test_peft_rows import METHODS, Adapted
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import default_collate

import d9d_peft
from d9d_dist import ContextMethod, DistributedContext, MeshConfig, StageInfo, local_tensor, materialize
from d9d_dist.testing import full_gradients, full_parameters
from d9d_loop import AdamWConfig, Engine, GradientsReady, Loss, ModelProvider, ScheduleConfig
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.testing import Around
from d9d_moe import TopKRouter, record_experts
from d9d_pipeline import Schedule
from d9d_pipeline.schedule import ranks_of_stages
from d9d_pipeline.shared_parameters import shared_names
from d9d_state import gathered_weights

Batch = dict[str, Tensor]

NUM_LAYERS = 4
RATE = 1e-2
TASK = MaskedNextToken()

SPLITS: dict[int, list[list[list[int]]]] = {
    1: [[[3, 1], [1, 1, 2]]],
    2: [[[1, 1], [2]], [[4], []]],
    4: [[[1], [1]], [[2], []], [[], [2]], [[1], [1]]],
}
"""Batch sizes of each data-parallel rank, in two calls of a step, by the number of data-parallel ranks."""


class Row(NamedTuple):
    """Model, pipeline schedule and method of context parallelism."""

    model: str = "dense"
    schedule: str = "1f1b"
    method: ContextMethod = "all_gather"


def build_pipeline(provider: ModelProvider, schedule: Schedule, ctx: DistributedContext) -> Pipeline:
    """Build this rank's stages in float64."""
    num_stages = ctx.size("regular", "pp") * schedule.stages_per_rank
    with torch.device("meta"):
        everywhere = [provider.build(StageInfo(index, num_stages)).double() for index in range(num_stages)]
    shared = shared_names([dict(stage.named_parameters()) for stage in everywhere])
    holders = ranks_of_stages(
        schedule.placement, num_ranks=ctx.size("regular", "pp"), stages_per_rank=schedule.stages_per_rank
    )
    own = [index for index, holder in enumerate(holders) if holder == ctx.coordinate("regular", "pp")]
    for index in own:
        provider.parallelize(everywhere[index], ctx)
        materialize(everywhere[index], device=ctx.device, seed=0)
    return Pipeline({index: everywhere[index] for index in own}, ctx=ctx, schedule=schedule, shared_names=shared)


def run_rows(degrees: dict[str, int], rows: Sequence[Row], around: Around | None = None) -> list[dict[str, Any]]:
    """Run rows on this rank."""
    traces = []
    with MeshConfig(**degrees).build() as ctx:
        for row in rows:
            try:
                if around is None:
                    traces.append(_run(row, ctx))
                else:
                    with around():
                        traces.append(_run(row, ctx))
            except Exception as error:
                error.add_note(str(row))
                raise
    return traces


def _loss(outputs: Tensor, batch: Batch) -> Loss:
    loss = TASK.loss(outputs, batch)
    return Loss(loss.total, loss.weight, tokens={"losses": outputs})


def _run(row: Row, ctx: DistributedContext) -> dict[str, Any]:
    provider = _provider(row)
    pipeline = build_pipeline(provider, ScheduleConfig.model_validate({"kind": row.schedule}).build(), ctx)
    engine = Engine(
        pipeline,
        AdamWConfig(learning_rate=RATE).build(pipeline.model),
        ctx=ctx,
        task=TASK,
        max_norm=1.0,
        num_microbatches=2 * pipeline.num_stages if pipeline.num_stages > 1 else 1,
        state_mapper=provider.state_mapper(pipeline.model),
        reference="initial",
    )
    trace: dict[str, Any] = {}
    engine.events.on(GradientsReady, lambda ready: trace.update({"gradients": full_gradients(ready.model)}))
    calls = _calls(ctx.coordinate("batch", "dp"), ctx.size("batch", "dp"))
    everything = [each for call in calls for each in call]
    trace["scores before"] = _by_row(everything, engine.score([batch for _, batch in everything]))
    if row.model == "moe":
        found = engine.score([batch for _, batch in everything], experts=record_experts)
        trace["experts"] = _by_row(everything, [{"experts": each["expert_indices"].double()} for each in found])
    trace["losses"] = {}
    for call in calls:
        trace["losses"] |= _by_row(call, engine.forward_backward([batch for _, batch in call], _loss))
    result = engine.step()
    trace["step"] = {"loss": result.loss.item(), "grad_norm": result.grad_norm.item()}
    trace["scores after"] = _by_row(everything, engine.score([batch for _, batch in everything]))
    with engine.reference():
        trace["reference"] = _by_row(everything, engine.score([batch for _, batch in everything]))
    trace["parameters"] = full_parameters(engine.model)
    trace["weights"] = {name: tensor.clone() for name, tensor in engine.weights()}
    trace["shards"] = [(name, shard.clone(), region) for name, shard, region in engine.weights(shards=True)]
    return trace


def _calls(dp_rank: int, dp_size: int) -> list[list[tuple[list[int], Batch]]]:
    """Return this rank's batches in each call of a step, with the numbers of their rows in the global batch."""
    numbers = iter(range(dp_rank, 8, dp_size))
    return [[_batch([next(numbers) for _ in range(size)]) for size in sizes] for sizes in SPLITS[dp_size][dp_rank]]


def _batch(rows: list[int]) -> tuple[list[int], Batch]:
    data = samples(ragged=True)
    batch: Batch = default_collate([data[row] for row in rows])
    return rows, {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def _by_row(batches: Iterable[tuple[list[int], Batch]], values: Sequence[Any]) -> dict[str, Tensor]:
    """Return the values [L] of each row of the global batch, by name and row."""
    return {
        f"{name} of row {row}": tensor[index]
        for (rows, _), each in zip(batches, values, strict=True)
        for name, tensor in each.items()
        for index, row in enumerate(rows)
    }


def _provider(row: Row) -> Decoder:
    return decoder(row.model, method=row.method, checkpointing="full", num_layers=NUM_LAYERS)


def by_hand(model_name: str) -> dict[str, Any]:
    """Compute the values of a row in one process, without an engine."""
    provider = decoder(model_name, method="all_gather", checkpointing="none", num_layers=NUM_LAYERS)
    with torch.device("meta"):
        model = provider.build(StageInfo()).double()
    materialize(model, device=torch.device("cpu"), seed=0)
    batch = _batch(list(range(8)))
    optimizer = AdamWConfig(learning_rate=RATE).build(model)
    trace: dict[str, Any] = {"scores before": _scores(model, batch)}
    if model_name == "moe":
        trace["experts"] = _by_row([batch], [{"experts": _experts(model, batch[1]).double()}])
    losses = _forward(model, batch[1], labels=batch[1]["labels"])
    trace["losses"] = _by_row([batch], [{"losses": losses.detach()}])
    total = (losses * batch[1]["mask"]).sum() / batch[1]["mask"].sum()
    total.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    trace["gradients"] = full_gradients(model)
    optimizer.step()
    trace["step"] = {"loss": total.item(), "grad_norm": norm.item()}
    trace["scores after"] = _scores(model, batch)
    trace["reference"] = trace["scores before"]
    trace["parameters"] = full_parameters(model)
    trace["weights"] = dict(gathered_weights(model, provider.state_mapper(model).inverse()))
    return trace


def _forward(model: nn.Module, batch: Batch, labels: Tensor | None) -> Tensor:
    outputs: Tensor = model(
        batch["input_ids"], labels=labels, position_ids=batch["position_ids"], document_ids_BL=batch["documents"]
    )
    return outputs


@torch.no_grad()
def _scores(model: nn.Module, batch: tuple[list[int], Batch]) -> dict[str, Tensor]:
    predicted = Categorical(logits=_forward(model, batch[1], labels=None))
    scores = {"log_probs": predicted.log_prob(batch[1]["labels"]), "entropy": predicted.entropy()}
    return _by_row([batch], [scores])


@torch.no_grad()
def _experts(model: nn.Module, batch: Batch) -> Tensor:
    """Return the experts that the routers choose [B, L, layers, A], by hooks on the routers."""
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    found: list[Tensor] = []
    hooks = [
        each.register_forward_hook(lambda module, args, routing: found.append(routing.indices)) for each in routers
    ]
    _forward(model, batch, labels=None)
    for hook in hooks:
        hook.remove()
    return torch.stack([each.unflatten(0, batch["labels"].shape) for each in found], dim=2)


@final
@dataclass(frozen=True)
class TwoAdapters(ModelProvider):
    """Decoder with the adapters that are trained, and frozen ones named `frozen`."""

    def build(self, stage: StageInfo) -> nn.Module:
        model = _provider(Row()).build(stage)
        d9d_peft.inject(METHODS["lora"], model, is_part=stage.count > 1)
        frozen = d9d_peft.LoRA(r"attention|ffn", rank=2, alpha=4)
        d9d_peft.inject(frozen, model, is_part=stage.count > 1, adapter="frozen", trainable=False)
        return model

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        _provider(Row()).parallelize(model, ctx)


def _entering(reference: str | None) -> Callable[[Any], AbstractContextManager[Any]]:
    return d9d_peft.adapters_off if reference is None else partial(d9d_peft.use_adapter, adapter=reference)


def adapter_rows(
    degrees: dict[str, int], around: Around | None = None, reference: str | None = None
) -> list[dict[str, Any]]:
    """Train adapters for a step; return scores with them, with the reference, and with them again.

    The reference has no adapters, or those named `reference`.
    """
    provider = Adapted(_provider(Row()), METHODS["lora"]) if reference is None else TwoAdapters()
    enter = _entering(reference)
    with MeshConfig(**degrees).build() as ctx, nullcontext() if around is None else around():
        pipeline = build_pipeline(provider, ScheduleConfig.model_validate({"kind": "1f1b"}).build(), ctx)
        for name, parameter in pipeline.model.named_parameters():
            if name.endswith(f"adapter_{reference}.lora_b"):
                torch.nn.init.constant_(local_tensor(parameter.detach()), 0.1)  # equal in any layout
        optimizer = AdamWConfig(learning_rate=RATE).build(pipeline.model)
        engine = Engine(
            pipeline, optimizer, ctx=ctx, task=TASK, reference=_entering(reference)
        )  # as `around` replaced it
        calls = _calls(ctx.coordinate("batch", "dp"), ctx.size("batch", "dp"))
        everything = [each for call in calls for each in call]
        batches = [batch for _, batch in everything]
        with enter(engine.model):
            before = _by_row(everything, engine.score(batches))
        for call in calls:
            engine.forward_backward([batch for _, batch in call], _loss)
        result = engine.step()
        trained = _by_row(everything, engine.score(batches))
        with engine.reference():
            found = _by_row(everything, engine.score(batches))
        again = _by_row(everything, engine.score(batches))
        step = {"loss": result.loss.item(), "grad_norm": result.grad_norm.item()}
        return [{"step": step, "before": before, "trained": trained, "reference": found, "again": again}]
