"""How often a step of a pipeline stage gathers FSDP parameters and reduces their gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import MeshConfig, UserError, full_tensor, local_tensor, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_pipeline import Executor, ForwardOnly, Inputs, OneForwardOneBackward, ZeroBubble1P, build

SIZE, MICROBATCHES = 4, 3


class _Calls(TorchDispatchMode):
    """Count the calls of an operator."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.count = 0
        self._operator = operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is self._operator
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
            with _Calls(torch.ops.c10d._allgather_base_.default) as gathers:
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


def _accumulate(reduce_each_microbatch: bool) -> tuple[int, Tensor]:
    """Return the reduce-scatters of a step, and the gradient."""
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        draws = torch.Generator().manual_seed(0)
        stage = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64)
        stage.weight.data.copy_(torch.randn(SIZE, SIZE, generator=draws, dtype=torch.float64))
        mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        parallelize_hsdp(stage, mesh, shard_axis="dp_cp_shard")
        program = build(OneForwardOneBackward(), num_ranks=1, num_microbatches=MICROBATCHES)
        executor = Executor(program, {0: stage}, reduce_each_microbatch=reduce_each_microbatch)
        x = torch.randn(2, MICROBATCHES, 2, SIZE, generator=draws, dtype=torch.float64)[ctx.rank]
        with _Calls(torch.ops.c10d._reduce_scatter_base_.default) as reductions:
            executor.step([Inputs(part) for part in x], lambda output, _: output.square().sum())
        assert stage.weight.grad is not None
        return reductions.count, full_tensor(stage.weight.grad)


def test_gradients_are_reduced_once_or_in_each_microbatch() -> None:
    (once, expected), _ = run_ranks(_accumulate, False)
    (each, found), _ = run_ranks(_accumulate, True)
    assert (once, each) == (1, MICROBATCHES)
    # The sums of 3 microbatches, 2 ranks and 2 rows are the same, in another order.
    torch.testing.assert_close(found, expected, rtol=12 * torch.finfo(torch.float64).eps, atol=1e-14)


def test_split_backwards_cannot_be_reduced_in_each_microbatch() -> None:
    program = build(ZeroBubble1P(), num_ranks=1, num_microbatches=MICROBATCHES)
    with pytest.raises(UserError, match="a schedule with split backward passes; expected a schedule"):
        Executor(program, {0: nn.Linear(1, 1)}, reduce_each_microbatch=True)
