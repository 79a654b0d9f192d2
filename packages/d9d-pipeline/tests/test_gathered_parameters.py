"""FSDP parameters of a pipeline stage are gathered once per step, and freed at its end and after a forward alone."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import MeshConfig, full_tensor, local_tensor, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_pipeline import Executor, ForwardOnly, Inputs, OneForwardOneBackward, build

SIZE, MICROBATCHES = 4, 3


class _Gathers(TorchDispatchMode):
    """Count the all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


def _is_sharded(stage: nn.Module) -> bool:
    return all(local_tensor(parameter).numel() < parameter.numel() for parameter in stage.parameters())


def _train(reshard_after_forward: bool) -> tuple[list[int], list[bool], list[Tensor]]:
    """Return the all-gathers of two steps and an evaluation, whether parameters were sharded after each, and values."""
    with MeshConfig(pipeline_parallel=2, data_parallel_shard=2).build() as ctx:
        rank = ctx.coordinate("regular", "pp")
        draws = torch.Generator().manual_seed(rank)
        stage = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64) for _ in range(2)))
        for parameter in stage.parameters():
            parameter.data.copy_(torch.randn(SIZE, SIZE, generator=draws, dtype=torch.float64))
        mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        for module in (*stage, stage):
            parallelize_hsdp(module, mesh, shard_axis="dp_cp_shard", reshard_after_forward=reshard_after_forward)
        group = ctx.group_for("regular", "pp")

        def executor(schedule: ForwardOnly | OneForwardOneBackward) -> Executor:
            return Executor(build(schedule, num_ranks=2, num_microbatches=MICROBATCHES), {rank: stage}, group=group)

        training, evaluation = executor(OneForwardOneBackward()), executor(ForwardOnly())
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        inputs = [Inputs(torch.full((2, SIZE), 0.1 * index, dtype=torch.float64)) for index in range(MICROBATCHES)]
        counts, sharded = [], []
        for step in (training, evaluation, training):
            with _Gathers() as gathers:
                step.step(inputs, lambda output, _: output.square().sum())
            counts.append(gathers.count)
            sharded.append(_is_sharded(stage))
            optimizer.step()
            optimizer.zero_grad()
        return counts, sharded, [full_tensor(parameter).detach() for parameter in stage.parameters()]


def test_a_stage_gathers_its_parameters_once_per_step() -> None:
    kept, freed = (run_ranks(_train, flag, world_size=4) for flag in (False, True))
    for (counts, sharded, values), (counts_freed, _, values_freed) in zip(kept, freed, strict=True):
        assert counts == [2, 2 * MICROBATCHES, 2]  # two layers
        assert counts_freed[0] > 2 * MICROBATCHES
        assert sharded == [True] * 3
        torch.testing.assert_close(values, values_freed, rtol=0, atol=0)
