import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import ColumnParallel, DistributedContext, MeshConfig, parallelize_hsdp, parallelize_tensor
from d9d_dist.testing import run_ranks
from d9d_loop import Engine, EngineConfig, FunctionProvider, Loss, Task
from d9d_loop.resilience import ReplicaConfig, ReplicaError, ResilienceConfig, check_buffers, check_replicas
from d9d_loop.resilience.replica_check import _describe_minority


def test_the_minority_is_described() -> None:
    assert _describe_minority({0: 5, 2: 5, 4: 7}) == "rank 4 differs from rank 0"
    assert _describe_minority({0: 5, 2: 7, 4: 7, 6: 7, 8: 6}) == "ranks 0, 8 differ from rank 2"
    assert _describe_minority({1: 5, 3: 7}) == "ranks 1, 3 have 2 different values"


def test_one_process_has_no_replicas(ctx: DistributedContext) -> None:
    model = nn.Linear(2, 2)
    check_replicas(model, torch.optim.SGD(model.parameters()), step=1, ctx=ctx)


def _flipped(where: str, culprit: int, replicate: int) -> str:
    """Train a step, flip one bit of one replica, and check."""
    mesh = MeshConfig(data_parallel_replicate=replicate, data_parallel_shard=-1)
    with mesh.build() as ctx:
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        if where != "plain":
            dense = ctx.mesh_for("dense")
            parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        check_replicas(model, optimizer, step=1, ctx=ctx)
        parameter = dict(model.named_parameters())["1.weight"]
        tensor = optimizer.state[parameter]["exp_avg"] if where == "moment" else parameter.detach()
        if ctx.rank == culprit and where != "nowhere":
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.view(-1).view(torch.int32)[1] ^= 1
        try:
            check_replicas(model, optimizer, step=2, ctx=ctx)
        except ReplicaError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("where", "culprit", "replicate", "expected"),
    [
        pytest.param("parameter", 1, 4, "- 1.weight: rank 1 differs from rank 0\n", marks=pytest.mark.slow),
        ("moment", 3, 2, "- exp_avg of 1.weight: ranks 1, 3 have 2 different values\n"),
        ("plain", 2, 1, "- 1.weight: rank 2 differs from rank 0\n"),
    ],
)
def test_the_error_on_every_rank_names_the_replica_with_a_flipped_bit(
    where: str, culprit: int, replicate: int, expected: str
) -> None:
    messages = run_ranks(_flipped, where, culprit, replicate, world_size=4)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"replicas differ after step 2:\n{expected}Resume from")
    assert len(re.findall("^- ", messages[0], re.MULTILINE)) == 1


def test_equal_replicas_and_different_shards_pass() -> None:
    assert run_ranks(_flipped, "nowhere", 0, 2, world_size=4) == [""] * 4


class Counts(nn.Module):
    """Buffers updated by forward: one from the data, one equal on all ranks, and a cache."""

    num_calls: torch.Tensor
    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("num_calls", torch.tensor(0))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.num_calls += 1
        self.cache = x.detach()
        return x


def _ran_on(same_data: bool) -> str:
    with MeshConfig(data_parallel_shard=2, tensor_parallel=2).build() as ctx:
        model = nn.Sequential(Counts())
        model(torch.full((2, 3), 1.0 if same_data else 1.0 + ctx.coordinate("batch", "dp")))
        try:
            check_buffers(model, step=1, ctx=ctx)
        except ReplicaError as error:
            return str(error)
        return ""


def test_the_error_names_a_buffer_that_forward_updates_from_the_microbatch_of_its_rank() -> None:
    assert run_ranks(_ran_on, True, world_size=4) == [""] * 4
    for message in run_ranks(_ran_on, False, world_size=4):
        assert message.startswith("buffers differ between ranks after step 1, because forward updates them from")
        assert "- 0.average: ranks 0, 1, 2, 3 have 2 different values\n" in message
        assert "num_calls" not in message
        assert "cache" not in message


class _Range(nn.Module):
    """Tensor-parallel layer and an observer of its outputs."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(3, 4)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        y = self.up(input)
        self.largest.copy_(torch.maximum(self.largest, y.detach().amax()))
        return y


def _tensor_parallel() -> str:
    with MeshConfig(tensor_parallel=2).build() as ctx:
        model = _Range()
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"up": ColumnParallel()})
        model(torch.ones(1, 3))
        try:
            check_buffers(model, step=1, ctx=ctx)
        except ReplicaError as error:
            return str(error)
        return ""


def test_the_error_names_a_buffer_that_depends_on_the_outputs_of_a_tensor_parallel_layer() -> None:
    for message in run_ranks(_tensor_parallel, world_size=2):
        assert "- largest: ranks 0, 1 have 2 different values\n" in message


class _Difference(nn.Module):
    """Normalization by a running mean of the rank's own batch."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        y = self.linear(input)
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean


class _Squares(Task):
    def inputs(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input": batch}

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        return Loss.sum(outputs.square(), len(batch))


def _engine_messages(folder: Path) -> list[str]:
    """Return the errors after the first step, and of a save after a change of a buffer on one rank."""
    found = []
    for is_later in (False, True):
        config = EngineConfig.model_validate({"mesh": {"data_parallel_shard": 2}, "run": {"folder": folder}})
        model = FunctionProvider(lambda stage: _Difference(), late_init=False)
        with Engine.open(config, model=model, task=_Squares()) as engine:
            rank = engine.ctx.rank
            batch = torch.ones(2, 3) * (1 if is_later else rank + 1)
            try:
                engine.forward_backward([batch], _Squares().loss)
                engine.step()
                engine.model.get_buffer("mean").add_(rank)
                engine.save()
            except ReplicaError as error:
                found.append(f"{engine.num_steps} {error}")
    return found


def test_an_engine_compares_buffers_after_the_first_step_and_before_a_save(tmp_path: Path) -> None:
    for first, later in run_ranks(_engine_messages, tmp_path, world_size=2):
        for message in (first, later):
            assert message.startswith("1 buffers differ between ranks after step 1")
            assert "- mean: ranks 0, 1 have 2 different values\n" in message
    assert not list(tmp_path.rglob("step-*")), "nothing is saved"


def test_the_interval_is_a_number_of_steps() -> None:
    assert ResilienceConfig.model_validate({"replicas": {"every": 20}}).replicas == ReplicaConfig(every=20)
    with pytest.raises(ValueError, match="every"):
        ReplicaConfig(every=-1)
