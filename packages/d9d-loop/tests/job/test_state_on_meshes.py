"""State of a job that is saved on a mesh and restored on every other mesh with as many ranks."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d_dist import DistributedContext, MeshConfig, rank_role, stream_key
from d9d_dist.testing import run_ranks
from d9d_loop import Events
from d9d_loop.data import IndexedStream, Share, StreamLoader
from d9d_loop.engine.job_state import JobState, Record
from d9d_loop.resilience import BadStepConfig, StepGuard
from d9d_metrics import Sum
from d9d_state import CheckpointStore

MESHES: dict[int, dict[str, dict[str, int]]] = {
    2: {
        "dp_replicate": {"data_parallel_replicate": 2},
        "ep": {"data_parallel_shard": 2, "expert_parallel": 2},
        "tp": {"tensor_parallel": 2},
        "cp": {"context_parallel_shard": 2},
        "pp": {"pipeline_parallel": 2},
    },
    4: {
        "dp": {"data_parallel_shard": 4},
        "tp": {"tensor_parallel": 4},
        "cp": {"context_parallel_replicate": 4},
        "dp+tp": {"data_parallel_shard": 2, "tensor_parallel": 2},
        "cp+tp": {"context_parallel_shard": 2, "tensor_parallel": 2},
        "pp+tp": {"pipeline_parallel": 2, "tensor_parallel": 2},
    },
}
Role: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """State of a rank: its role, its next random number, the sum of the metric over all ranks, the state of the guard,
    and its samples of the next step.
    """

    role: Role
    random: float
    metric: float
    guard: Any
    samples: list[int]


class _Job:
    def __init__(self, folder: Path, ctx: DistributedContext) -> None:
        self.ctx, self.metric, model = ctx, Sum(), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        self.guard = StepGuard(optimizer, config=BadStepConfig.model_validate({}), ctx=ctx)
        size = ctx.size("batch", "dp")
        share = Share(1, 8 // size, dp_rank=ctx.coordinate("batch", "dp"), dp_size=size)
        self.loader = StreamLoader(IndexedStream(range(40), seed=0), share, seed=0)
        self.state = JobState(
            CheckpointStore(folder),
            model=model,
            optimizer=optimizer,
            metrics={"sum": self.metric},
            config={},
            parts={"data": self.loader, "bad_steps": self.guard},
            data_identity=None,
            seed=5,
            ctx=ctx,
            events=Events(),
        )

    def work(self) -> None:
        """Run two steps: each data sample counts once over the pipeline-, data- and context-parallel ranks."""
        role = rank_role(self.ctx)
        torch.manual_seed(
            stream_key(str([role[axis] for axis in ("pp", "dp", "cp")]))
        )  # equal on tensor-parallel ranks only
        for step in (1, 2):
            next(self.loader)
            self.guard.step(step, loss=torch.tensor(1.0 / step), grad_norm=torch.tensor(1.0))
            assert self.guard.poll(settle=True) is None
        ranks = self.ctx.size("batch", "pp") * self.ctx.size("batch", "cp") * self.ctx.size("batch", "dp")
        self.metric.update(torch.tensor(16.0 / ranks))

    def seen(self) -> _Seen:
        total = torch.tensor(self.metric.compute().item())
        group = self.ctx.group_for("batch", "pp", "dp", "cp")
        dist.all_reduce(total, group=group)
        samples = [int(sample) for batch in next(self.loader) for sample in batch]
        role = tuple((coordinate, size) for coordinate, size in rank_role(self.ctx).values())
        return _Seen(role, torch.rand(()).item(), total.item(), self.guard.state_dict(), samples)


def _save_and_restore(folder: Path, meshes: dict[str, dict[str, int]]) -> tuple[dict[str, _Seen], dict[str, _Seen]]:
    """Return what this rank sees after a save on each mesh, and after a restore on each pair of meshes."""
    with MeshConfig(data_parallel_shard=-1).build():
        contexts = {name: MeshConfig(**degrees).build() for name, degrees in meshes.items()}
        saved: dict[str, _Seen] = {}
        for name, ctx in contexts.items():
            job = _Job(folder / name, ctx)
            job.work()
            job.state.save(Record(2))
            saved[name] = job.seen()
        restored: dict[str, _Seen] = {}
        for source, target in product(meshes, meshes):
            job = _Job(folder / source, contexts[target])
            torch.manual_seed(0)
            assert job.state.restore().step == 2
            restored[f"{source} to {target}"] = job.seen()
        return saved, restored


@pytest.mark.slow("4")
@pytest.mark.parametrize("world_size", [2, 4])
def test_state_belongs_to_roles_and_not_to_rank_numbers(tmp_path: Path, world_size: int) -> None:
    ranks = run_ranks(_save_and_restore, tmp_path, MESHES[world_size], world_size=world_size)
    for source, target in product(MESHES[world_size], MESHES[world_size]):
        found = [restored[f"{source} to {target}"] for _, restored in ranks]
        _check([saved[source] for saved, _ in ranks], found, f"from {source} to {target}")


def _check(saved: list[_Seen], found: list[_Seen], what: str) -> None:
    assert {each.metric for each in found} == {16.0}, what
    assert all(each.guard == saved[0].guard for each in found), what
    samples: dict[int, list[int]] = {}
    numbers: dict[Role, set[float]] = {}
    for each in found:
        assert samples.setdefault(each.role[1][0], each.samples) == each.samples, what
        numbers.setdefault(each.role[:3], set()).add(each.random)
    order = IndexedStream(range(40), seed=0).cursor()
    order.take(16)
    assert sorted(sample for read in samples.values() for sample in read) == sorted(order.take(8)), what
    assert all(len(drawn) == 1 for drawn in numbers.values()), f"{what}: tensor-parallel ranks draw equal numbers"
    assert len(set.union(*numbers.values())) == len(numbers), f"{what}: other ranks draw different numbers"
    before = {each.role: each.random for each in saved}
    if all(each.role in before for each in found):  # the random states continue
        assert [each.random for each in found] == [before[each.role] for each in found], what
    else:
        assert {each.random for each in found}.isdisjoint(before.values()), what
