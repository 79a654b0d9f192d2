from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import MeshConfig, UserError, parallelize_fsdp
from d9d_dist.testing import run_ranks
from d9d_pipeline import Backward, Executor, Forward, ForwardOnly, GPipe, Inputs, OneForwardOneBackward, Schedule, build
from d9d_pipeline.actions import Compute


class _Block(nn.Module):
    """A stage that returns a dict: one entry is used, one is ignored by the next stage, one has no gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, dtype=torch.float64)
        self.unused = nn.Linear(size, size, dtype=torch.float64)

    def forward(self, x: Any, *, gain: float) -> dict[str, torch.Tensor]:
        x = x["x"] if isinstance(x, dict) else x
        return {"x": torch.tanh(self.linear(x)) * gain, "unused": self.unused(x), "ids": torch.arange(3)}


class _AllStagesHere(Schedule):
    """GPipe's order with all stages on one rank."""

    def __init__(self, stages_per_rank: int) -> None:
        self.stages_per_rank = stages_per_rank

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Compute]:
        for microbatch in range(num_microbatches):
            yield from (Forward(stage, microbatch) for stage in range(self.stages_per_rank))
        for microbatch in range(num_microbatches):
            yield from (Backward(stage, microbatch) for stage in reversed(range(self.stages_per_rank)))


def _stages(count: int) -> list[_Block]:
    torch.manual_seed(0)
    return [_Block(5) for _ in range(count)]


def _gradients(stages: list[_Block]) -> list[torch.Tensor]:
    return [block.linear.weight.grad.clone() for block in stages if block.linear.weight.grad is not None]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_gradients_equal_those_of_the_whole_batch(num_stages: int, num_microbatches: int) -> None:
    x = torch.randn(8, 5, dtype=torch.float64)
    stages = _stages(num_stages)
    payload: Any = x
    for stage in stages:
        payload = stage(payload, gain=2.0)
    payload["x"].square().sum().backward()
    expected = _gradients(stages)
    for stage in stages:
        stage.zero_grad()
    schedule = _AllStagesHere(num_stages) if num_stages > 1 else OneForwardOneBackward()
    executor = Executor(build(schedule, num_ranks=1, num_microbatches=num_microbatches), dict(enumerate(stages)))
    inputs = [Inputs(part, gain=2.0) for part in x.chunk(num_microbatches)]
    executor.step(inputs, lambda outputs, microbatch: outputs["x"].square().sum())
    assert len(expected) == num_stages
    torch.testing.assert_close(_gradients(stages), expected, rtol=1e-12, atol=1e-14)


class _Counts(nn.Module):
    """Stage with buffers that forward changes, and one that its graph needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls: torch.Tensor
        self.mean: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.large: torch.Tensor
        self.register_buffer("large", torch.ones(1 << 15, 3))  # its writes are found by its version

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale
        self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        self.calls += 1
        self.large.mul_(0.5)
        return y * self.large[:2]


def test_forwards_of_stand_ins_change_no_buffer() -> None:
    inputs = [Inputs(torch.full((2, 3), float(index + 1))) for index in range(3)]
    found = []
    for num_own, taken in ((None, inputs[:1]), (1, inputs)):
        torch.manual_seed(0)
        stages = {index: _Counts() for index in range(2)}
        executor = Executor(build(_AllStagesHere(2), num_ranks=1, num_microbatches=len(taken)), stages)
        executor.step(taken, lambda outputs, index: outputs.sum() * float(index < 1), num_own=num_own)
        found.append([[*stage.buffers(), *(each.grad for each in stage.parameters())] for stage in stages.values()])
    assert found[0][0][0] == 1
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_without_backwards_outputs_are_in_order_and_freed() -> None:
    seen: list[tuple[int, float]] = []
    executor = Executor(build(ForwardOnly(), num_ranks=1, num_microbatches=3), {0: nn.Identity()})

    def note(outputs: torch.Tensor, microbatch: int) -> None:
        seen.append((microbatch, outputs.item()))

    executor.step([Inputs(torch.tensor(float(i))) for i in range(3)], note)
    assert seen == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_rejects_a_loss_without_a_gradient() -> None:
    executor = Executor(build(GPipe(), num_ranks=1, num_microbatches=1), {0: nn.Linear(2, 2)})
    with pytest.raises(
        ValueError, match=r"got a loss of microbatch 0 that does not require a gradient; expected a loss computed"
    ):
        executor.step([Inputs(torch.ones(2))], lambda outputs, microbatch: torch.zeros(()))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_rejects_a_loss_that_is_a_vector(num_stages: int) -> None:
    schedule = _AllStagesHere(num_stages) if num_stages > 1 else OneForwardOneBackward()
    stages = {index: nn.Linear(2, 2) for index in range(num_stages)}
    executor = Executor(build(schedule, num_ranks=1, num_microbatches=2), stages)
    for shape, loss in (((3, 2), lambda outputs, _: outputs), ((1,), lambda outputs, _: outputs.sum().view(1))):
        with pytest.raises(UserError) as error:
            executor.step([Inputs(torch.ones(3, 2))] * 2, loss)
        assert str(error.value) == f"got a loss of microbatch 0 of shape {shape}; expected a 0-dim tensor. Sum it."
        assert all(parameter.grad is None for stage in stages.values() for parameter in stage.parameters())


class _ReductionCounter(TorchDispatchMode):
    """Counts collectives by name; torch's own `CommDebugMode` does not work with FSDP before torch 2.15."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def _count_reductions() -> tuple[int, torch.Tensor]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        parallelize_fsdp(model, ctx.mesh_for("flat"))
        executor = Executor(build(OneForwardOneBackward(), num_ranks=1, num_microbatches=4), {0: model})
        inputs = [Inputs(torch.full((1, 4), float(ctx.rank + 1))) for _ in range(4)]
        with _ReductionCounter() as counter:
            executor.step(inputs, lambda outputs, _: outputs.sum())
        assert isinstance(model.weight.grad, DTensor)
        return counter.count, model.weight.grad.full_tensor()


def test_gradients_are_reduced_once_per_step() -> None:
    for reductions, gradient in run_ranks(_count_reductions):
        assert reductions == 1
        assert torch.equal(gradient, torch.full((4, 4), 4 * (1.0 + 2.0)))


def test_rejects_a_program_for_another_number_of_ranks() -> None:
    with pytest.raises(UserError, match=r"got a program for 2 ranks and a group of 1; expected equal sizes. Build"):
        Executor(build(GPipe(), num_ranks=2, num_microbatches=2), {0: nn.Identity()})


def test_rejects_stages_of_another_rank() -> None:
    with pytest.raises(
        UserError, match=r"got the stages \[1\] on pipeline rank 0; expected \[0\], the stages that the program"
    ):
        Executor(build(GPipe(), num_ranks=1, num_microbatches=2), {1: nn.Identity()})


def test_rejects_a_wrong_number_of_microbatches() -> None:
    executor = Executor(build(GPipe(), num_ranks=1, num_microbatches=2), {0: nn.Identity()})
    with pytest.raises(ValueError, match=r"got inputs for 1 microbatches; expected 2"):
        executor.step([Inputs(torch.ones(1))], lambda outputs, _: outputs.sum())


def test_a_loss_that_is_no_tensor_is_an_error() -> None:
    executor = Executor(build(OneForwardOneBackward(), num_ranks=1, num_microbatches=1), {0: nn.Linear(4, 1)})
    with pytest.raises(UserError, match=r"got a loss of microbatch 0 of type float; expected a 0-dim tensor"):
        executor.step([Inputs(torch.ones(2, 4))], lambda output, _: output.sum().item())
