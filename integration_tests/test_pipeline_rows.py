"""Every pipeline schedule with every other kind of parallelism: losses, gradients and updates equal one process.

Each layout is one job that runs all schedules in sequence: the engine's step over the stages of the oracle's
models. The oracle's grid runs whole jobs of the Trainer, but not every schedule in every layout.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_rows import build_pipeline
from oracle_models import BATCH_SIZE, MaskedNextToken, PackedNextToken, PlainProvider, decoder, samples
from torch import Tensor
from torch.utils.data import default_collate

from d9d_dist import DistributedContext, MeshConfig
from d9d_dist.testing import differences, full_gradients, full_parameters, run_ranks
from d9d_loop import AdamWConfig, Engine, GradientsReady, ModelProvider, ScheduleConfig, Task
from d9d_loop.config.schedule_config import KINDS
from d9d_loop.task import BatchPlacement
from d9d_pipeline import Schedule

NUM_LAYERS = 4
MODELS = ("dense", "tied", "plain")
LAYOUTS: dict[str, dict[str, int]] = {
    "two ranks": {},
    "sharded": {"data_parallel_shard": 2},
    "replicated": {"data_parallel_replicate": 2},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel_shard": 2},
    "hybrid and tensor": {"data_parallel_replicate": 2, "tensor_parallel": 2},
}

Row = tuple[str, str, int]
"""A model, a schedule, and a number of microbatches on each rank."""


def _provider(model: str) -> tuple[ModelProvider, Task]:
    options: Any = {"method": "ring", "checkpointing": "full", "num_layers": NUM_LAYERS}
    return (
        (PlainProvider(**options), PackedNextToken())
        if model == "plain"
        else (decoder(model, **options), MaskedNextToken())
    )


def _rows(dp_size: int) -> Iterator[Row]:
    """Yield two numbers of microbatches per schedule, from fewer than ranks to more, if the schedule supports them."""
    for index, kind in enumerate(KINDS):
        numbers = (1 + index % 2, BATCH_SIZE // dp_size) if kind != "dualpipev" else (4, BATCH_SIZE // dp_size)
        for number in sorted(set(numbers)):
            yield MODELS[(index + number) % len(MODELS)], kind, number


def _train(model: str, schedule: Schedule, num_microbatches: int, ctx: DistributedContext) -> dict[str, Any]:
    """Return the trace of a step, with the tensors of this rank's stages."""
    provider, task = _provider(model)
    pipeline = build_pipeline(provider, schedule, ctx)
    optimizer = AdamWConfig(learning_rate=1e-2).build(pipeline.model)
    engine = Engine(pipeline, optimizer, ctx=ctx, task=task, max_norm=1.0, num_microbatches=num_microbatches)
    trace: dict[str, Any] = {}
    engine.events.on(GradientsReady, lambda ready: trace.update({"gradients": full_gradients(ready.model)}))
    place = BatchPlacement(task, ctx)
    mine = samples(ragged=True)[ctx.coordinate("batch", "dp") :: ctx.size("batch", "dp")]
    size = len(mine) // num_microbatches
    batches = [default_collate(mine[start : start + size]) for start in range(0, len(mine), size)]
    batches = [{k: v.double() if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    engine.accumulate([place(batch) for batch in batches], task.loss)
    result = engine.step()
    trace["step"] = {"loss": result.loss.item(), "grad_norm": result.grad_norm.item()}
    trace["parameters"] = full_parameters(pipeline.model)
    return trace


def _train_rows(mesh: dict[str, int], rows: list[Row]) -> list[dict[str, Any]]:
    traces = []
    with MeshConfig(**mesh).build() as ctx:
        for model, kind, num_microbatches in rows:
            schedule = ScheduleConfig.model_validate({"kind": kind}).build()
            try:
                traces.append(_train(model, schedule, num_microbatches, ctx))
            except Exception as error:
                error.add_note(f"{model}, {kind}, {num_microbatches} microbatches")
                raise
    return traces


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, Any]]:
    rows = [(model, "1f1b", 1) for model in MODELS]
    return dict(zip(MODELS, run_ranks(_train_rows, {}, rows, world_size=1)[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample("two ranks")
def test_every_schedule_equals_one_process(
    layout: str, one_process: dict[str, dict[str, Any]], exhaustive: bool
) -> None:
    beside = LAYOUTS[layout]
    ranks_of_a_stage, dp_size = 1, 1
    for name, degree in beside.items():
        ranks_of_a_stage *= degree
        dp_size *= degree if name.startswith("data") else 1
    rows = list(_rows(dp_size))
    if not exhaustive or ranks_of_a_stage > 2:  # eight ranks are slow on two cores
        rows = rows[list(LAYOUTS).index(layout) % 2 :: 2]  # each row is in every second layout
    by_rank = run_ranks(_train_rows, {"pipeline_parallel": 2, **beside}, rows, world_size=2 * ranks_of_a_stage)
    for index, row in enumerate(rows):
        found = list(differences(_joined([traces[index] for traces in by_rank]), one_process[row[0]], rtol=1e-9))
        assert not found, f"{row}: {len(found)} differences. First: {found[0]}"


def _joined(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the traces of all ranks; tensors on several ranks must be equal."""
    joined: dict[str, Any] = {}
    for trace in traces:
        for key, values in trace.items():
            there = joined.setdefault(key, dict(values))
            for name in there.keys() & values.keys():
                same = (
                    torch.equal(there[name], values[name])
                    if isinstance(values[name], Tensor)
                    else there[name] == values[name]
                )
                assert same, f"ranks disagree on {name} of {key}"
            there.update(values)
    return joined
