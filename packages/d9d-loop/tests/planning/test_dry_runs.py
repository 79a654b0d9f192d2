"""Costs of a step from a run with few layers equal those of a dry run with all layers."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.nn import functional as F

from d9d_dist import DistributedContext, Launch, StageInfo, parallelize_hsdp
from d9d_loop import Loss, ModelProvider, Task, Trainer, TrainerConfig
from d9d_loop.events import BackwardDone, OptimizerDone, StepStarted
from d9d_loop.planning.dry_runs import dry_run
from d9d_loop.planning.job_plan import shown_microbatches
from d9d_loop.planning.layer_repeats import Repeats, repeats_of, without_repeats
from d9d_loop.planning.rank_run import _Chunks, optimizer_bytes, representatives
from d9d_loop.planning.step_record import recorded
from d9d_pipeline import Inputs

WIDTH = 64
KEYS = ("flops", "num_bytes")


class Layer(nn.Module):
    def __init__(self, index: int, inner: int) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, stage: StageInfo, inner: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Layer(i, inner[i]) for i in stage.layers(len(inner))})
        self.head = nn.Linear(WIDTH, 1000) if stage.is_last else None
        self.unused = nn.Linear(WIDTH, 1) if stage.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


class Provider(ModelProvider):
    def __init__(self, inner: list[int]) -> None:
        self.inner = inner

    def build(self, stage: StageInfo) -> nn.Module:
        return Stack(stage, self.inner)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        assert isinstance(model, Stack)
        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        for layer in (*model.layers.values(), model):
            parallelize_hsdp(layer, dense, shard_axis="dp_cp_shard", precision=ctx.precision)


class Regression(Task):
    def inputs(self, batch: Any) -> Any:
        return Inputs(batch["x"])

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss(F.cross_entropy(outputs, batch["y"], reduction="sum"), weight=batch["y"].numel())


def _trainer(
    inner: list[int], folder: Any, gradients: dict[str, bool] | None, *, microbatch_size: int = 2, **mesh: int
) -> Trainer:
    config = TrainerConfig.model_validate(
        {
            "steps": 2,
            "run": {"folder": folder},
            "batch": {"global_size": 32, "microbatch_size": microbatch_size},
            "mesh": mesh,
            "gradients": gradients or {},
            "rehearsal": False,
            "trackers": (),
        }
    )
    data = [{"x": torch.zeros(WIDTH), "y": torch.zeros((), dtype=torch.int64)}] * 32
    return Trainer(config, model=Provider(inner), data=data, task=Regression())


@pytest.mark.full
@pytest.mark.parametrize(
    ("inner", "mesh"),
    [
        ([128] * 7, {"data_parallel_shard": 4}),
        ([32, *[256, 96] * 6, 32], {"data_parallel_shard": 2, "data_parallel_replicate": 2}),
        ([128] * 14, {"pipeline_parallel": 2, "data_parallel_shard": 2}),
    ],
    ids=["one kind", "a period of two", "pipeline"],
)
def test_costs_extrapolated_from_few_layers_equal_a_dry_run_of_all_layers(
    inner: list[int], mesh: dict[str, int], tmp_path: Any
) -> None:
    trainer = _trainer(inner, tmp_path, None, **mesh)
    plan = trainer.plan_for(Launch(world_size=4, device="cpu"))
    ranks = representatives(plan, 4)
    whole = dry_run(plan, ranks=ranks, world_size=4, precision="bfloat16")
    found = dry_run(
        plan, ranks=ranks, world_size=4, precision="bfloat16", num_microbatches=(1, plan.num_microbatches), kept=4
    )
    for short, run in zip(found, whole, strict=True):
        for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"):
            assert getattr(short, name) == getattr(run, name), name
        assert short.attention_calls() == run.attention_calls()
        for name in ("first", "forward_backward", "update"):
            one, other = getattr(short, name), getattr(run, name)
            flops, moved = ([sum(getattr(op, key) for op in each.operations) for each in (one, other)] for key in KEYS)
            assert flops[0] == flops[1]
            assert one.peak_bytes == other.peak_bytes
            # Short runs read the norms of the layers that run.
            assert moved[0] == pytest.approx(moved[1], rel=1e-4 if name == "update" else 0)
            if name == "update":  # flags of unused parameters are those of the layers that run
                assert one.collective_bytes().keys() == other.collective_bytes().keys()
            else:
                assert one.collective_bytes() == other.collective_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data_parallel_shard": 4}, {"pipeline_parallel": 2, "data_parallel_shard": 2}])
@pytest.mark.parametrize("reduces", [False, True], ids=["once", "each microbatch"])
@pytest.mark.sample("each microbatch-mesh1")
def test_memory_and_collectives_of_few_microbatches_predict_those_of_all(
    mesh: dict[str, int], reduces: bool, tmp_path: Any
) -> None:
    trainer = _trainer([64] * 3, tmp_path, {"reduce_each_microbatch": reduces}, **mesh)
    plan = trainer.plan_for(Launch(world_size=4, device="cpu"))
    fewer, few = shown_microbatches(plan)
    assert fewer < few < plan.num_microbatches
    (whole,) = dry_run(plan, ranks=[0], world_size=4, precision="bfloat16")
    (short,) = dry_run(plan, ranks=[0], world_size=4, precision="bfloat16", num_microbatches=(fewer, few), kept=4)
    assert short.activation_bytes == whole.activation_bytes
    assert short.collective_bytes(plan.num_microbatches) == whole.collective_bytes(plan.num_microbatches)
    scaled = {name: size * plan.num_microbatches // few for name, size in short.collective_bytes(few).items()}
    assert scaled != whole.collective_bytes(plan.num_microbatches)  # some collectives run once for each step


def test_a_dry_run_of_one_microbatch_is_the_second_step_of_a_real_job(tmp_path: Any) -> None:
    """The unused parameter has no optimizer state; the peak excludes the state that the first step creates."""
    trainer = _trainer([256] * 3, tmp_path, None, microbatch_size=32)
    (run,) = dry_run(trainer.plan_for(Launch(device="cpu")), ranks=[0], world_size=1)
    records, sizes = {}, {}

    with ExitStack() as stack:

        def start(step: int, name: str) -> None:
            if step == 2:
                stack.close()
                records[name] = stack.enter_context(recorded())

        def on_done(event: OptimizerDone) -> None:
            if event.step == 2:
                stack.close()
                sizes["optimizer"] = optimizer_bytes(event.optimizer)

        trainer.events.on(StepStarted, lambda event: start(event.step, "forward_backward"))
        trainer.events.on(BackwardDone, lambda event: start(event.step, "update"))
        trainer.events.on(OptimizerDone, on_done)
        trainer.train()
    assert run.optimizer_bytes == sizes["optimizer"]
    for name, real in records.items():
        record = getattr(run, name)
        assert sum(each.flops for each in record.operations) == sum(each.flops for each in real.operations)
        assert record.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)


def test_the_longest_repeated_part_is_found_and_shortened() -> None:
    layers = Stack(StageInfo(), [32, 32, *[256, 96] * 4, 64]).layers
    assert repeats_of(layers) == Repeats(start=2, period=2, count=4)
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(layers.values()))
    shorter, kept, third = without_repeats(model, 1)
    inner = [next(layer.parameters()).shape[0] for layer in kept]
    assert inner == [32, 32, 256, 96, 256, 96, 256, 96, 64]
    assert third == kept[6:8]
    assert len(list(shorter.get_submodule("1").children())) == 9
    assert len(layers) == 11


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_are_those_of_fsdp(num_chunks: int, dim: int) -> None:
    tensor = torch.arange(35.0).view(7, 5)
    expected = _fsdp_common._chunk_with_empty(tensor, num_chunks, dim)
    chunks = _Chunks(tensor, num_chunks, dim)
    for rank, chunk in enumerate(expected):
        assert chunks[rank].shape == chunk.shape
        assert torch.equal(chunks[rank], chunk)
