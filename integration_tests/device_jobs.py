"""Training steps of Qwen3 decoders on the fake accelerator, for one rank of any number, in this process.

`trained` runs the whole Trainer on one rank. `stepped` runs the parts of a job that other ranks take part in: its
model, loader and engine. Both return the log of one step. `rehearsed` runs them in another process.
"""

import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast
from unittest import mock

import own_decoder
import torch
from fake_accelerator import DeviceLog, FakeAccelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from d9d_dist import DistributedContext, Launch, MeshConfig
from d9d_dist.testing import RankPool
from d9d_loop import Trainer, events
from d9d_loop.data import batch_reader
from d9d_loop.data.worker_pool import ReadJob
from d9d_loop.engine.engine import Engine
from d9d_loop.engine.model_build import build_pipeline
from d9d_loop.engine.start import Training
from d9d_loop.job.job import build_engine
from d9d_loop.planning.dry_run_mode import DryRunMode
from d9d_loop.planning.rank_run import stage_messages
from d9d_loop.resilience import StepGuard
from d9d_modules import parallelize_decoder
from d9d_modules.attention_backends import flex
from d9d_modules.attention_backends.choice import ATTENTION_VARIABLE
from d9d_moe import parallelize_moe

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
TINY_EXPERTS = {"num_experts": 8, "top_k": 2, "intermediate_size": 32, "router_losses": {"balance": 0.001}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and the rank of it to play.

    Attributes:
        settings: Other settings of the job's configuration.
        documents: True to mask attention between packed documents.
        attention: Name of the attention backend; None for the default.
        recipe: True to parallelize with `parallelize_decoder`; False for the lines of `own_decoder`.
        mutant: Called with the engine before the recorded step, to plant a fault.
    """

    mesh: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 1
    rank: int = 0
    model: Mapping[str, Any] = field(default_factory=lambda: TINY)
    experts: Mapping[str, Any] | None = None
    length: int = 64
    microbatch_size: int = 1
    num_microbatches: int = 1
    documents: bool = False
    attention: str | None = None
    recipe: bool = False
    num_workers: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    mutant: Callable[[Engine], object] | None = None


@cache
def accelerator() -> FakeAccelerator:
    """Install the fake accelerator.

    FlexAttention, whose kernel only inductor can write, is recorded as SDPA. The thread that prefetches batches reads
    them itself, without worker processes.
    """
    installed = FakeAccelerator.install()
    batch_reader.WorkerPool = cast("Any", _NoWorkers)
    flex._compiled = cast("Any", lambda: _flex_as_sdpa)
    return installed


def _flex_as_sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_: Any) -> tuple[Tensor, None]:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=scale), None


@dataclass
class _NoWorkers:
    """`WorkerPool` that reads each batch in the thread that wants it."""

    read: Any
    num_workers: int
    timeout: float | None

    def batches(self, jobs: Iterable[ReadJob]) -> Iterator[Any]:
        return map(partial(self.read, seed=None), jobs)

    def close(self) -> None:
        pass


class _Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, places = torch.zeros(self.length, dtype=torch.int64), torch.arange(self.length)
        return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": places, "documents": tokens.clone()}


class _Recipe(own_decoder.Decoder):
    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        experts = None if self.moe is None else parallelize_moe
        parallelize_decoder(model, ctx, experts=experts, checkpointing=self.parallelism.activation_checkpointing)


class _Task(own_decoder.NextByte):
    def __init__(self, *, documents: bool) -> None:
        self.documents = documents

    def inputs(self, batch: own_decoder.Batch) -> Any:
        inputs = super().inputs(batch)
        if not self.documents:
            inputs.shared.pop("document_ids_BL")
        return inputs


def _trainer(case: Case, folder: str) -> Trainer:
    mesh = MeshConfig.model_validate(case.mesh).resolve(case.world_size)
    replicas = mesh.data_parallel_replicate * mesh.data_parallel_shard
    values = {
        "steps": 5,
        "run": {"folder": folder},
        "model": case.model,
        "experts": case.experts,
        "mesh": case.mesh,
        "batch": {
            "global_size": replicas * case.microbatch_size * case.num_microbatches,
            "microbatch_size": case.microbatch_size,
        },
        "logging": {"progress": False, "every": 100},
        "checkpoint": {"every": 3},
        "export": False,
        "trackers": [],
        "resilience": {"health": {"enabled": False}, "watchdog": {"enabled": False}},
        "data": {"num_workers": case.num_workers},
        "precision": "bfloat16",
    }
    config = own_decoder.DecoderConfig.model_validate(values | dict(case.settings))
    provider = _Recipe if case.recipe else own_decoder.Decoder
    model = provider(config.model, config.moe, config.parallelism)
    _answer_reads(case)
    return Trainer(config, model=model, data=_Rows(case.length), task=_Task(documents=case.documents))


def _answer_reads(case: Case) -> None:
    """Set what the host reads: the loss has a weight, and tokens are balanced over experts and ranks."""
    tokens, top_k = case.microbatch_size * case.length, 0 if case.experts is None else case.experts["top_k"]
    device = accelerator()
    device.answer("_end_startup", lambda shape: 1)
    device.answer("_counts_on_host", lambda shape: [tokens * top_k // shape[0]] * shape[0])
    device.answer("_sizes", lambda shape: [[tokens * top_k // shape[1]] * shape[1]] * 3)


def trained(case: Case) -> DeviceLog:
    """Run the Trainer on one rank; return the log of the fourth step, and of the checkpoint of the third before it."""
    recording = ExitStack()
    logs: list[DeviceLog] = []

    def on_done(event: events.StepDone) -> None:
        if event.step == 3:
            logs.append(recording.enter_context(accelerator().record()))
        elif event.step == 4:
            recording.close()

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(case, folder)
        trainer.events.on(events.StepDone, on_done)
        trainer.train()
    return logs[0]


def stepped(case: Case) -> DeviceLog:
    """Run four steps of the engine of a rank; return the log of the fourth, from reading the batch to the update.

    After the steps 1, 2, 4, 8 and so on, the next forward compares checksums of the parameters, which the host reads.
    """
    device = accelerator()
    gc.collect()
    other_bytes = device.allocated_bytes
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if case.attention is not None:
            stack.enter_context(mock.patch.dict(os.environ, {ATTENTION_VARIABLE: case.attention}))
        trainer = _trainer(case, folder)
        fake = DryRunMode()
        plan = trainer.plan_for(Launch(world_size=case.world_size, device="cpu"))
        messages = stage_messages(plan, case.world_size, fake, "bfloat16")
        stack.enter_context(device.ranks(rank=case.rank, world_size=case.world_size))
        plan = trainer.plan_for(Launch(rank=case.rank, world_size=case.world_size))
        launch = Launch(rank=case.rank, world_size=case.world_size)
        ctx = stack.enter_context(plan.model.mesh.build(launch=launch, precision="bfloat16"))
        pipeline = build_pipeline(plan.model, ctx, progress=False, messages=messages)
        optimizer = plan.optimizer(pipeline.model)
        guard = StepGuard(optimizer, config=plan.config.resilience.bad_steps, ctx=ctx)
        training = Training(pipeline=pipeline, optimizer=optimizer, average=None, guard=guard)
        engine = build_engine(plan, training, ctx=ctx)
        loader = stack.enter_context(plan.loader(ctx))
        for _ in range(3):
            _step(engine, next(loader), plan.task.loss)
        if case.mutant is not None:
            case.mutant(engine)
        with device.record() as log:
            _step(engine, next(loader), plan.task.loss)
    log.start_bytes -= other_bytes
    log.peak_bytes -= other_bytes
    return log


def _step(engine: Engine, batch: Any, loss: Any) -> None:
    """Run a step, and poll for bad steps as the job's loop does."""
    engine.accumulate(batch, loss)
    engine.step()
    assert engine.guard.poll() is None


def rehearsed(cases: Mapping[str, Case], *, whole_jobs: bool = False) -> dict[str, DeviceLog]:
    """Return the logs of cases, run one after another in a process that has the fake accelerator."""
    return _pool().run(_rehearse, cases, whole_jobs, world_size=1, timeout=600)[0]


@cache
def _pool() -> RankPool:
    """Return a process of this file only: the fake accelerator stays for the rest of a process."""
    return RankPool()


def _rehearse(cases: Mapping[str, Case], whole_jobs: bool) -> dict[str, DeviceLog]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return {name: trained(case) if whole_jobs else stepped(case) for name, case in cases.items()}
