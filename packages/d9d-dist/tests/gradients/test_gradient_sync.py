import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from d9d_dist import MeshConfig, Precision, UserError, parallelize_fsdp, parallelize_replicate
from d9d_dist.gradients._local_parameters import compute_locally, distribute_parameters
from d9d_dist.gradients.gradient_sync import GradientSync, sync_gradients
from d9d_dist.testing import run_ranks

Gradients = dict[str, torch.Tensor | None]


class _Model(nn.Module):
    """Has a tied matrix, a layer that only some calls use, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, bias=False)
        self.maybe = nn.Linear(6, 6)
        self.idle = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.shape[0] % 2:
            x = x + self.maybe(x)
        return self.last(self.norm(x).tanh())


def _microbatches(rank: int, num_microbatches: int) -> list[torch.Tensor]:
    """Return microbatches of odd and even sizes; only some of them use the layer `maybe`."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [2 + (rank * index) % 4 for index in range(num_microbatches)]
    return [torch.randn(size, 6, dtype=torch.float64, generator=generator) for size in sizes]


def _backward(model: nn.Module, microbatches: list[torch.Tensor]) -> None:
    for x in microbatches:
        model(x).square().sum().backward()


def _full(model: nn.Module) -> Gradients:
    """Return the gradients, which must be reduced already. No collectives."""
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            assert all(placement.is_replicate() for placement in gradient.placements), (name, gradient.placements)
            assert gradient.shape == parameter.shape
        found[name] = gradient.to_local().clone() if isinstance(gradient, DTensor) else gradient
    return found


def _same(ours: Gradients, theirs: Gradients) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        expected = theirs[name]
        assert (gradient is None) == (expected is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)


CASES = [
    (bucket_bytes, num_microbatches, none)
    for bucket_bytes in (1, 300, 1 << 20)
    for num_microbatches in (1, 3)
    for none in (True, False)
]


def _accumulate() -> list[list[Gradients]]:
    """Run two steps of each case, and return the gradients of each step."""
    with MeshConfig(data_parallel_replicate=-1).build() as ctx:
        mesh, found = ctx.mesh_for("dense")["dp_replicate"], []
        for bucket_bytes, num_microbatches, to_none in CASES:
            model = _Model()
            parallelize_replicate(model, mesh)
            sync = GradientSync(model, num_microbatches=num_microbatches, bucket_bytes=bucket_bytes)
            steps = []
            for _ in range(2):
                model.zero_grad(set_to_none=to_none)
                _backward(model, _microbatches(ctx.rank, num_microbatches))
                sync.finish()
                steps.append(_full(model))
            found.append(steps)
        return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.sample("2")
def test_microbatches_on_ranks_equal_one_process(world_size: int) -> None:
    ranks = run_ranks(_accumulate, world_size=world_size)
    for index, (_, num_microbatches, _) in enumerate(CASES):
        model = _Model()
        for rank in range(world_size):
            _backward(model, _microbatches(rank, num_microbatches))
        expected = _full(model)
        assert expected["idle.weight"] is None
        for found in ranks:
            for step in found[index]:
                _same(step, expected)


def _accumulate_onto() -> Gradients:
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        model = _Model()
        parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])
        sync = GradientSync(model, num_microbatches=2)
        for step in range(2):
            _backward(model, _microbatches(ctx.rank + 2 * step, 2))
            sync.finish()
        return _full(model)


def test_gradients_accumulate_over_steps() -> None:
    model = _Model()
    for rank in range(4):
        _backward(model, _microbatches(rank, 2))
    for found in run_ranks(_accumulate_onto):
        _same(found, _full(model))


def _fewer_and_by_hand() -> list[Gradients]:
    """Return the gradients of a step with fewer microbatches than declared, and of a loop without hooks."""
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        found = []
        for by_hand in (False, True):
            model = _Model()
            parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])
            sync = None if by_hand else GradientSync(model, num_microbatches=7)
            _backward(model, _microbatches(ctx.rank, 3))
            sync_gradients(model) if sync is None else sync.finish()
            found.append(_full(model))
        return found


def test_finish_reduces_existing_gradients() -> None:
    model = _Model()
    for rank in range(2):
        _backward(model, _microbatches(rank, 3))
    for found in run_ranks(_fewer_and_by_hand):
        for gradients in found:
            _same(gradients, _full(model))


class _Recorder:
    """Records bytes and group sizes of all-reduces, in order with other events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        all_reduce = dist.all_reduce

        def record(tensor: torch.Tensor, *args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            self.events.append((tensor.dtype, tensor.nbytes, group.size()))
            return all_reduce(tensor, *args, group=group, **kwargs)

        monkeypatch.setattr(dist, "all_reduce", record)


def _overlap() -> list[Any]:
    with MeshConfig(data_parallel_replicate=2).build() as ctx, pytest.MonkeyPatch.context() as patch:
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])
        sync = GradientSync(model, num_microbatches=2, bucket_bytes=256)
        log = _Recorder(patch).events
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda _, name=name: log.append(name))
        for index in range(2):
            log.append(f"microbatch {index}")
            model(torch.ones(2, 8)).sum().backward()
        log.append("finish")
        sync.finish()
        log.append("closed")
        sync.close()
        sync.close()
        model.zero_grad()
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        return log


def test_buckets_start_within_the_last_backward() -> None:
    bucket = (torch.float32, 256, 2)
    backward = ["2.weight", "1.weight", "0.weight"]
    for log in run_ranks(_overlap):
        assert log == [
            "microbatch 0",
            *backward,
            "microbatch 1",
            "2.weight",
            bucket,
            "1.weight",
            bucket,
            "0.weight",
            bucket,
            "finish",
            (torch.int32, 12, 2),
            "closed",
            *backward * 3,
        ]


def _memory() -> tuple[int, int, bool]:
    with MeshConfig(data_parallel_replicate=2).build() as ctx, pytest.MonkeyPatch.context() as patch:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4), nn.Linear(4, 4))
        parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])
        model(torch.ones(2, 64)).sum().backward()
        before, log = _locals(model), _Recorder(patch).events
        sync_gradients(model, bucket_bytes=64 * 64 * 4)
        after = _locals(model)
        reduced = sum(num_bytes for dtype, num_bytes, _ in log if dtype == torch.float32)
        storages = {local.untyped_storage().data_ptr() for local in after}
        return len(storages), reduced, after[0].data_ptr() == before[0].data_ptr()


def _locals(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local() for parameter in model.parameters() if isinstance(parameter.grad, DTensor)]


def test_small_gradients_share_a_bucket_and_a_large_one_is_reduced_in_place() -> None:
    num_parameters = 64 * 64 + 64 * 4 + 4 + 4 * 4 + 4
    for num_storages, reduced_bytes, in_place in run_ranks(_memory):
        assert num_storages == 2, "one bucket of small gradients, and a large one alone"
        assert reduced_bytes == 4 * num_parameters, "each gradient is to be reduced once"
        assert in_place


def _reduced_in(dtype: torch.dtype | None, precision: Precision | None) -> tuple[torch.Tensor, list[Any]]:
    with MeshConfig(data_parallel_replicate=4).build() as ctx, pytest.MonkeyPatch.context() as patch:
        model = nn.Sequential(nn.Linear(1, 8, bias=False), nn.Linear(8, 1, bias=False))
        parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"], precision=precision)
        log = _Recorder(patch).events
        sync = GradientSync(model, dtype=dtype)
        gradient = _rank_gradient(ctx.rank)
        F.linear(model[0](torch.ones(1, 1)), gradient.T.contiguous()).sum().backward()
        sync.finish()
        found = model[0].weight.grad
        assert isinstance(found, DTensor)
        assert found.dtype == torch.float32
        return found.to_local().clone(), log


def _rank_gradient(rank: int) -> torch.Tensor:
    return torch.randn(8, 1, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.bfloat16, None),
        (None, Precision(reduce=torch.bfloat16)),
        (torch.bfloat16, Precision(reduce=torch.float64)),
    ],
)
def test_reduction_in_bfloat16(dtype: torch.dtype | None, precision: Precision | None) -> None:
    exact = torch.stack([_rank_gradient(rank) for rank in range(4)]).double().sum(dim=0)
    for found, log in run_ranks(_reduced_in, dtype, precision, world_size=4):
        assert log[0] == (torch.bfloat16, 2 * 16, 4)
        assert torch.equal(found, found.bfloat16().float()), "the sum is representable on the wire"
        torch.testing.assert_close(found.double(), exact, rtol=0.05, atol=0.05)
        assert not torch.allclose(found.double(), exact, rtol=1e-6, atol=0)


def _two_axes() -> tuple[Gradients, list[Any], int]:
    """Train norms inside a sequence-parallel region with replicas: each rank has its own samples and tokens."""
    with MeshConfig(data_parallel_replicate=2, tensor_parallel=2).build() as ctx, pytest.MonkeyPatch.context() as patch:
        model, dense = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6)).double(), ctx.mesh_for("dense")
        distribute_parameters(model, dense["tp"], {}, default=Replicate())
        compute_locally(model[0], partial_axes=("tp",))
        compute_locally(model[1])
        parallelize_replicate(model, dense["dp_replicate"])
        num_groups = []
        for _ in range(2):
            model.zero_grad()
            log = _Recorder(patch).events
            replica = ctx.coordinate("dense", "dp_replicate")
            normed = model[0](_samples(ctx.rank))
            model[1](normed.detach() * 0 + _samples(replica)).square().sum().backward()
            normed.square().sum().backward()
            sync_gradients(model)
            num_groups.append(len(dist.distributed_c10d._world.pg_map))
        assert num_groups[0] == num_groups[1], "the groups are made once"
        return _full(model), log, num_groups[0]


def _samples(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_gradients_of_two_axes_are_reduced_by_one_collective() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6)).double()
    for rank in range(4):
        model[0](_samples(rank)).square().sum().backward()
    for replica in range(2):
        model[1](_samples(replica)).square().sum().backward()
    for found, log, _ in run_ranks(_two_axes, world_size=4):
        _same(found, _full(model))
        buckets = [event for event in log if event[0] == torch.float64]
        assert sorted(buckets, key=lambda event: event[2]) == [(torch.float64, 96, 2), (torch.float64, 96, 4)]


def _unplanned() -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce a partial gradient of a module without local-parameter hooks."""
    with MeshConfig(tensor_parallel=2).build() as ctx:
        mesh, model = ctx.mesh_for("dense")["tp"], nn.Linear(3, 2)
        distribute_parameters(model, mesh, {}, default=Replicate())
        part = torch.full((2, 3), float(ctx.rank + 1))
        model.weight.grad = DTensor.from_local(part, mesh, (Partial(),), run_check=False)
        model.bias.grad = DTensor.from_local(torch.ones(2), mesh, (Replicate(),), run_check=False)
        GradientSync(model).finish()
        found = _full(model)
        assert found["weight"] is not None
        assert found["bias"] is not None
        return found["weight"], found["bias"]


def test_partial_gradients_without_local_parameter_hooks_are_reduced() -> None:
    for weight, bias in run_ranks(_unplanned):
        assert torch.equal(weight, torch.full((2, 3), 3.0))
        assert torch.equal(bias, torch.ones(2))


def _beside_fsdp() -> tuple[bool, bool, int]:
    with MeshConfig(data_parallel_shard=2).build() as ctx, pytest.MonkeyPatch.context() as patch:
        mesh = ctx.mesh_for("dense")["dp_cp_shard"]
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        parallelize_fsdp(model[0], mesh)
        parallelize_replicate(model[1], mesh)
        sync = GradientSync(model)
        log = _Recorder(patch).events
        model(torch.ones(2, 4)).sum().backward()
        sync.finish()
        first, second = (parameter.grad for parameter in model.parameters())
        assert isinstance(first, DTensor)
        assert isinstance(second, DTensor)
        return first.placements[0].is_shard(), second.placements[0].is_replicate(), len(log)


def test_parameters_managed_by_fsdp_are_skipped() -> None:
    for is_shard, is_replicate, num_collectives in run_ranks(_beside_fsdp):
        assert is_shard
        assert is_replicate
        assert num_collectives == 3  # one bucket, and the used parameters of replicas and of FSDP


def _too_many() -> str:
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        model = nn.Linear(2, 2)
        parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])
        sync = GradientSync(model, num_microbatches=2)
        with pytest.raises(UserError) as error:
            _backward(model, [torch.ones(1, 2)] * 3)
        del sync
        return str(error.value)


def test_refuses_a_step_without_finish() -> None:
    for message in run_ranks(_too_many):
        assert "received gradient number 3 of a step of num_microbatches = 2; expected GradientSync.finish()" in message


@pytest.mark.parametrize(("num_microbatches", "bucket_bytes"), [(0, 1), (1, 0)])
def test_refuses_arguments_that_are_not_positive(num_microbatches: int, bucket_bytes: int) -> None:
    with pytest.raises(UserError, match=r"got num_microbatches = \d and bucket_bytes = \d; expected both to be at"):
        GradientSync(nn.Linear(2, 2), num_microbatches=num_microbatches, bucket_bytes=bucket_bytes)


def test_a_model_of_one_rank_is_unchanged() -> None:
    model = nn.Linear(2, 2)
    sync = GradientSync(model)
    _backward(model, [torch.ones(1, 2)] * 2)
    before = model.weight.grad
    sync.finish()
    assert model.weight.grad is before


def _dropped() -> tuple[bool, bool]:
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        model = _Model()
        parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])
        sync = weakref.ref(kept := GradientSync(model))
        was_alive = sync() is kept
        del kept
        _backward(model, _microbatches(0, 1))  # the hooks remain but do nothing
        return was_alive, sync() is None


def test_a_model_does_not_keep_its_gradient_sync_alive() -> None:
    assert run_ranks(_dropped) == [(True, True)] * 2
