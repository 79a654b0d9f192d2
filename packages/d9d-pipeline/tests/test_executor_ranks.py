"""Every schedule on several ranks: gradients equal those of one process, and transfers match the program."""

import os
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import RankError, run_ranks
from d9d_pipeline import (
    DualPipeV,
    Executor,
    ForwardOnly,
    GPipe,
    Inputs,
    Interleaved,
    LoopedBreadthFirst,
    OneForwardOneBackward,
    Program,
    Schedule,
    Timeline,
    ZeroBubble1P,
    ZeroBubbleV,
    build,
    verify,
)
from d9d_pipeline.actions import ReceiveInput, ReceiveOutputGradient, SendInputGradient, SendOutput
from d9d_pipeline.channel import Messages, stage_output

SIZE = 6


class _Block(nn.Module):
    """A stage with two types of input, a weight used twice, one under activation checkpointing, and one unused.

    It passes on a tree with an entry that the next stage ignores, one that needs no gradient, an empty one, and None.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(index)
        self.index = index
        self.twice = nn.Linear(SIZE, SIZE, dtype=torch.float64)
        self.recomputed = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64)
        self.scale = nn.Parameter(torch.empty(SIZE, dtype=torch.float64))
        self.unused = nn.Parameter(torch.empty(SIZE, dtype=torch.float64))
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.float64) / 2)

    def forward(self, received: Any, *, gain: Tensor) -> dict[str, Any]:
        x, total, positions = received, torch.zeros((), dtype=torch.float64), torch.arange(3)
        if isinstance(received, dict):
            x, (total, positions) = received["x"], received["rest"]
        x = x + torch.tanh(self.twice(x)) * gain
        x = x + checkpoint(lambda y: F.silu(self.recomputed(y)), x, use_reentrant=False)
        x = self.twice(x) * self.scale
        total = total + x.square().mean() + positions.sum()
        return {"x": x, "rest": (total, positions + 1), "ignored": x * self.unused, "none": None, "empty": x[:0]}


def _batch(num_microbatches: int) -> list[Inputs]:
    """Microbatches of different lengths: shapes change within a step."""
    draws = torch.Generator().manual_seed(9)

    def rows(index: int) -> Tensor:
        return torch.randn(2 + index % 2, SIZE, generator=draws, dtype=torch.float64)

    return [Inputs(rows(index), gain=torch.tensor(0.5 + index)) for index in range(num_microbatches)]


def _loss(outputs: Any, microbatch: int) -> Tensor:
    return outputs["x"].square().sum() * (1 + microbatch) + outputs["rest"][0]


def _gradients(stages: list[_Block]) -> dict[str, Tensor | None]:
    return {f"{stage.index}.{name}": p.grad for stage in stages for name, p in stage.named_parameters()}


def _expected(num_stages: int, num_microbatches: int) -> dict[str, Tensor | None]:
    stages = [_Block(index) for index in range(num_stages)]
    for microbatch, inputs in enumerate(_batch(num_microbatches)):
        payload: Any = inputs.first[0]
        for stage in stages:
            payload = stage(payload, **inputs.shared)
        _loss(payload, microbatch).backward()
    return _gradients(stages)


def _executor(program: Program, group: dist.ProcessGroup) -> tuple[Executor, list[_Block]]:
    stages = {index: _Block(index) for index in program.stages_of(group.rank())}
    return Executor(program, stages, group=group), list(stages.values())


def _train_with_messages() -> dict[str, Tensor | None]:
    (inputs,) = _batch(1)
    messages = Messages({0: stage_output(_Block(0)(*inputs.first, **inputs.shared))})
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        stages = {ctx.rank: _Block(ctx.rank)}
        program = build(GPipe(), num_ranks=2, num_microbatches=1)
        group = ctx.group_for("regular", "pp")
        Executor(program, stages, group=group, messages=messages).step([inputs], _loss)
        return _gradients(list(stages.values()))


def test_a_step_with_known_metadata_has_the_same_gradients() -> None:
    first, last = run_ranks(_train_with_messages)
    expected = _expected(2, 1)
    # Gradients of outputs that the next stage does not use are sent as zeros.
    assert expected["0.unused"] is None
    expected["0.unused"] = torch.zeros(SIZE, dtype=torch.float64)
    torch.testing.assert_close({**first, **last}, expected, rtol=1e-9, atol=1e-12)


def _train(schedules: list[tuple[Schedule, int]]) -> list[tuple[dict[str, Tensor | None], list[int]]]:
    """Return, for each schedule, the gradients of this rank's stages after two steps, and the loss microbatches."""
    results = []
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        for schedule, num_microbatches in schedules:
            program = build(schedule, num_ranks=ctx.world_size, num_microbatches=num_microbatches)
            executor, stages = _executor(program, ctx.group_for("regular", "pp"))
            seen: list[int] = []

            def loss(outputs: Any, microbatch: int, seen: list[int] = seen) -> Tensor:
                seen.append(microbatch)
                return _loss(outputs, microbatch)

            executor.step(_batch(num_microbatches), loss)
            for stage in stages:
                stage.zero_grad()
            seen.clear()
            executor.step(_batch(num_microbatches), loss)
            results.append((_gradients(stages), seen))
    return results


def _cases(num_ranks: int) -> list[tuple[Schedule, int]]:
    """Return schedules with numbers of microbatches below, equal to and above the number of ranks, if supported."""
    numbers = (1, num_ranks, 2 * num_ranks + 1)
    anywhere: list[Schedule] = [
        GPipe(),
        LoopedBreadthFirst(2),
        OneForwardOneBackward(),
        ZeroBubble1P(),
        ZeroBubbleV(),
    ]
    multiples: list[Schedule] = [Interleaved(2), Interleaved(3), ZeroBubble1P(2)]
    cases = [(schedule, number) for schedule in anywhere for number in numbers]
    cases += [(schedule, number * num_ranks) for schedule in multiples for number in (1, 2)]
    return [*cases, (DualPipeV(), 2 * num_ranks), (DualPipeV(), 2 * num_ranks + 3)]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.sample("2")
def test_gradients_of_every_schedule_equal_one_process(num_ranks: int) -> None:
    cases = _cases(num_ranks)
    by_rank = run_ranks(_train, cases, world_size=num_ranks)
    for index, (schedule, num_microbatches) in enumerate(cases):
        found = {name: gradient for rank in by_rank for name, gradient in rank[index][0].items()}
        num_stages = num_ranks * schedule.stages_per_rank
        expected = _expected(num_stages, num_microbatches)
        torch.testing.assert_close(
            found,
            expected,
            rtol=1e-9,
            atol=1e-12,
            msg=lambda text, case=(schedule, num_microbatches): f"{case}: {text}",
        )
        last_stage_rank = 0 if schedule.placement == "v" else num_ranks - 1
        for rank, results in enumerate(by_rank):
            losses = list(range(num_microbatches)) if rank == last_stage_rank else []
            assert results[index][1] == losses, schedule


def _record(schedule: Schedule, num_microbatches: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the transfers of this rank in a real step, and those of its program, in order."""
    recorded: list[tuple[str, int]] = []

    def note(name: str, peer: str) -> Callable[..., Any]:
        real = getattr(dist, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            recorded.append((name, kwargs[peer]))
            return real(*args, **kwargs)

        return noting

    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        program = build(schedule, num_ranks=ctx.world_size, num_microbatches=num_microbatches)
        executor, _ = _executor(program, ctx.group_for("regular", "pp"))
        executor.step(_batch(num_microbatches), _loss)
        with (
            mock.patch.object(dist, "isend", note("isend", "group_dst")),
            mock.patch.object(dist, "irecv", note("irecv", "group_src")),
        ):
            executor.step(_batch(num_microbatches), _loss)
        return recorded, list(_transfers(program, ctx.rank))


def _transfers(program: Program, rank: int) -> Iterator[tuple[str, int]]:
    """Four tensors of each output are nonempty; two of them are used by the next stage and require gradients."""
    for action in program.ranks[rank]:
        match action:
            case SendOutput(_, _, peer):
                yield from [("isend", peer)] * 4
            case ReceiveInput(_, _, peer):
                yield from [("irecv", peer)] * 4
            case SendInputGradient(_, _, peer):
                yield from [("isend", peer)] * 2
            case ReceiveOutputGradient(_, _, peer):
                yield from [("irecv", peer)] * 2


@pytest.mark.parametrize(
    "schedule", [OneForwardOneBackward(), ZeroBubbleV()], ids=lambda schedule: type(schedule).__name__
)
def test_sends_and_receives_match_the_program(schedule: Schedule) -> None:
    for recorded, expected in run_ranks(_record, schedule, 5, world_size=3):
        assert recorded == expected
        assert len(expected) > 20


class _Alive:
    """An object that lives as long as the activations of one forward."""

    count = 0
    most = 0

    def __init__(self) -> None:
        _Alive.count += 1
        _Alive.most = max(_Alive.most, _Alive.count)

    def __del__(self) -> None:
        _Alive.count -= 1


class _Noticed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.alive = _Alive()
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1


class _NoticedStage(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's own name)
        """The layer saves its input, which is a view of the tracked tensor."""
        return super().forward(_Noticed.apply(input.requires_grad_()))


def _peaks(cases: list[tuple[Schedule, int]]) -> list[int]:
    """Return, for each schedule, the largest number of forwards whose activations this rank held."""
    peaks = []
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        for schedule, num_microbatches in cases:
            program = build(schedule, num_ranks=ctx.world_size, num_microbatches=num_microbatches)
            stages = {index: _NoticedStage(4, 4) for index in program.stages_of(ctx.rank)}
            executor = Executor(program, stages, group=ctx.group_for("regular", "pp"))
            for _ in range(2):
                _Alive.most = _Alive.count = 0
                executor.step([Inputs(torch.ones(2, 4)) for _ in range(num_microbatches)], lambda y, _: y.sum())
            peaks.append(_Alive.most)
    return peaks


def test_held_activations_match_the_verifier() -> None:
    cases: list[tuple[Schedule, int]] = [(GPipe(), 5), (OneForwardOneBackward(), 7), (Interleaved(2), 8)]
    by_rank = run_ranks(_peaks, cases, world_size=4)
    for index, (schedule, num_microbatches) in enumerate(cases):
        expected = verify(build(schedule, num_ranks=4, num_microbatches=num_microbatches)).peak_activations
        assert tuple(peaks[index] for peaks in by_rank) == expected, schedule


def _forward_only() -> list[Tensor]:
    """Return the last rank's outputs of a program without backwards, run with gradients enabled."""
    outputs: list[Tensor] = []
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        program = build(ForwardOnly(2, "v"), num_ranks=ctx.world_size, num_microbatches=3)
        executor, _ = _executor(program, ctx.group_for("regular", "pp"))
        executor.step(_batch(3), lambda output, _: outputs.append(output["x"]))
    return outputs


def test_forward_only_builds_no_graph_with_v_placement() -> None:
    first, second = run_ranks(_forward_only)
    assert not second
    stages = [_Block(index) for index in range(4)]
    for output, inputs in zip(first, _batch(3), strict=True):
        payload: Any = inputs.first[0]
        for stage in stages:
            payload = stage(payload, **inputs.shared)
        assert not output.requires_grad
        torch.testing.assert_close(output, payload["x"], rtol=1e-12, atol=1e-12, check_stride=False)


class _Faulty(nn.Module):
    """A stage with a fault on one rank."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.linear(x)
        match self.fault:
            case "raises" if self.calls == 3:
                raise RuntimeError("a stage failed")
            case "dies" if self.calls == 3:
                os._exit(3)
            case "raises in backward":
                y.register_hook(_raise)
            case "returns a number":
                return y, 1.0
            case "changes":
                return y[: self.calls]
            case "starts to use it":
                return y if self.calls > 2 else y.detach() + self.linear.bias
            case "leaves a gradient out" if self.calls == 2:
                return y.detach() + 0 * self.linear.bias
        return y


def _raise(_gradient: Tensor) -> None:
    raise RuntimeError("a backward failed")


def _fail(faulty_rank: int, fault: str) -> None:
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        program = build(OneForwardOneBackward(), num_ranks=ctx.world_size, num_microbatches=4)
        stage = _Faulty(fault if ctx.rank == faulty_rank else "")
        executor = Executor(program, {ctx.rank: stage}, group=ctx.group_for("regular", "pp"))
        executor.step([Inputs(torch.ones(3, 2)) for _ in range(4)], lambda y, _: y.sum())


@pytest.mark.parametrize(
    ("faulty_rank", "fault", "message"),
    [
        (1, "raises", r"a stage failed\nin Forward of stage 1, microbatch 2, on pipeline rank 1"),
        (1, "raises in backward", r"a backward failed\nin Backward of stage 1, microbatch 0, on pipeline rank 1"),
        (
            0,
            "returns a number",
            r"got float in a stage's output that is sent to another rank; expected tensors and None(.|\n)*"
            r"in SendOutput of stage 0, microbatch 0, on pipeline rank 0",
        ),
        (
            0,
            "changes",
            r"got a message of float32\[2, 2\] with requires_grad, but float32\[1, 2\] with requires_grad earlier for "
            r"inputs of the same shapes; expected",
        ),
    ],
)
def test_a_failure_ends_every_rank_and_names_its_place(faulty_rank: int, fault: str, message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(_fail, faulty_rank, fault, world_size=3)
    assert caught.value.rank == faulty_rank
    assert "3 of 3 ranks failed" in str(caught.value)
    assert str(caught.value).count("on pipeline rank") >= 3


def test_a_dead_rank_ends_the_ranks_that_wait_for_it() -> None:
    with pytest.raises(RankError, match="The process died with exit code 3") as caught:
        run_ranks(_fail, 1, "dies", world_size=3)
    for rank in (0, 2):
        place = rf"in \w+ of stage {rank}, microbatch \d, on pipeline rank {rank}"
        assert re.search(place, str(caught.value)), str(caught.value)


def test_rejects_an_input_that_is_unused_in_the_first_microbatch_only() -> None:
    with pytest.raises(RankError, match=r"did not use in the first microbatch; expected the stage to use the same"):
        run_ranks(_fail, 1, "starts to use it", world_size=3)


def test_rejects_shared_inputs_that_require_a_gradient() -> None:
    stages = {index: nn.Linear(2, 2) for index in range(2)}
    executor = Executor(build(LoopedBreadthFirst(2), num_ranks=1, num_microbatches=1), stages)
    with pytest.raises(UserError, match="got a tensor with requires_grad among the shared keyword arguments"):
        executor.step([Inputs(torch.ones(2), prompt=torch.ones(2, requires_grad=True))], lambda y, _: y.sum())


def test_a_gradient_missing_after_the_first_microbatch_is_zero() -> None:
    run_ranks(_fail, 1, "leaves a gradient out", world_size=3)


def _measure() -> tuple[Timeline, dict[str, Tensor | None], Program]:
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        program = build(ZeroBubbleV(), num_ranks=ctx.world_size, num_microbatches=4)
        executor, stages = _executor(program, ctx.group_for("regular", "pp"))
        timeline = executor.measured_step(_batch(4), _loss)
        return timeline, _gradients(stages), program


def test_a_measured_step_computes_the_same_and_returns_times_of_all_ranks() -> None:
    found = run_ranks(_measure)
    expected = _expected(4, 4)
    gradients = {name: gradient for _, each, _ in found for name, gradient in each.items()}
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
    (timeline, _, program), (other, _, _) = found
    assert timeline == other
    assert timeline.unit == "s"
    for rank, timed in enumerate(timeline.ranks):
        assert tuple(each.action for each in timed) == program.ranks[rank]
        assert all(each.start <= each.end for each in timed)
        computed = timeline.computed(rank)
        assert all(first.end <= second.start for first, second in pairwise(computed))
