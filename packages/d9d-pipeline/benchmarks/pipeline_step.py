"""Time of a pipeline step relative to torch's schedules and to its simulation, and the overhead per action.

    uv run python packages/d9d-pipeline/benchmarks/pipeline_step.py

Prints JSON. `ratio_to_torch`: step time divided by the step time of `torch.distributed.pipelining` with equal stages,
measured in alternating pairs of steps. `ratio_to_simulation`: makespan of a measured step divided by the makespan of a
simulation with the median times of its actions; forwards and backward halves only sleep. `microseconds_per_action`:
time of a step with a tiny stage minus the time of a loop that calls the stage, per action.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from d9d_dist import MeshConfig, defer_weight_grad
from d9d_dist.split_backward import WeightGradHandle
from d9d_dist.testing import run_ranks
from d9d_pipeline import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Costs,
    DualPipeV,
    Executor,
    Forward,
    GPipe,
    Inputs,
    Interleaved,
    OneForwardOneBackward,
    Overlap,
    Schedule,
    Timeline,
    ZeroBubble1P,
    ZeroBubbleV,
    build,
    simulate,
)

OURS: dict[str, Schedule] = {
    "GPipe": GPipe(),
    "1F1B": OneForwardOneBackward(),
    "Interleaved1F1B": Interleaved(2),
    "ZBVZeroBubble": ZeroBubbleV(),
    "DualPipeV": DualPipeV(),
}
SIZE, LAYERS, ROWS = 256, 4, 128


def make_stage() -> nn.Module:
    """Return linear layers, the same on each stage."""
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(SIZE, SIZE), nn.ReLU())))


def ours(schedule: Schedule, num_microbatches: int, stages: dict[int, nn.Module], group: Any) -> Callable[[], None]:
    """Return a step of this package."""
    executor = Executor(build(schedule, num_ranks=group.size(), num_microbatches=num_microbatches), stages, group=group)
    inputs = [Inputs(torch.ones(ROWS, SIZE)) for _ in range(num_microbatches)]
    return lambda: executor.step(inputs, lambda output, _: output.square().sum())


def torchs(name: str, num_microbatches: int, stages: dict[int, nn.Module], group: Any) -> Callable[[], None]:
    """Return a step of the torch schedule with this name."""
    count = group.size() * len(stages)
    wrapped = [
        PipelineStage(module, index, count, torch.device("cpu"), group=group) for index, module in stages.items()
    ]
    kind = getattr(schedules, f"Schedule{name}")
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(
        wrapped[0] if single else wrapped,
        n_microbatches=num_microbatches,
        loss_fn=lambda output, _: output.square().sum(),
        scale_grads=False,
    )
    x = torch.ones(ROWS * num_microbatches, SIZE)
    is_first, is_last = 0 in stages, count - 1 in stages
    return lambda: schedule.step(*([x] if is_first else []), **({"target": x} if is_last else {}))


def alternate(steps: list[Callable[[], None]], pairs: int) -> list[list[float]]:
    """Return the seconds of each step; the steps alternate, with a barrier before and after each."""
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(pairs):
        for step, taken in zip(steps, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            taken.append(time.perf_counter() - start)
    return seconds


def race(pairs: int, factor: int) -> dict[str, list[list[float]]]:
    """Return the seconds of this package's and torch's step for each schedule."""
    found = {}
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        group = ctx.group_for("regular", "pp")
        for name, schedule in OURS.items():
            number = factor * group.size()
            program = build(schedule, num_ranks=group.size(), num_microbatches=number)
            stages = {index: make_stage() for index in program.stages_of(group.rank())}
            steps = [ours(schedule, number, stages, group), torchs(name, number, stages, group)]
            for step in steps * 2:
                step()
            found[name] = alternate(steps, pairs)
    return found


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, slot: WeightGradHandle, seconds: float) -> Tensor:
        ctx.slot, ctx.seconds, ctx.shape = slot, seconds, weight.shape
        time.sleep(seconds)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        time.sleep(ctx.seconds)

        def later() -> Tensor:
            time.sleep(ctx.seconds)
            return torch.zeros(ctx.shape)

        return gradients[0] * 1, ctx.slot.give(later), None, None


class SleepingStage(nn.Module):
    """Stage that sleeps for the same time in forward and in each half of backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and return the input."""
        weight, slot = defer_weight_grad(self.weight, x.requires_grad_())
        return _Sleep.apply(x, weight, slot, self.seconds)


def sleep(pairs: int, seconds: float) -> dict[str, list[float]]:
    """Return, for each schedule, measured makespans divided by the makespan simulated from median action times."""
    found = {}
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        group = ctx.group_for("regular", "pp")
        for name, schedule in {**OURS, "ZB1P": ZeroBubble1P()}.items():
            number = 2 * group.size()
            program = build(schedule, num_ranks=group.size(), num_microbatches=number)
            stages = {index: SleepingStage(seconds) for index in program.stages_of(group.rank())}
            executor = Executor(program, stages, group=group)
            inputs = [Inputs(torch.ones(4)) for _ in range(number)]
            executor.step(inputs, lambda output, _: output.sum())
            timelines = [executor.measured_step(inputs, lambda output, _: output.sum()) for _ in range(pairs)]
            found[name] = [each.makespan / simulate(program, costs_of(each)).makespan for each in timelines]
    return found


def costs_of(timeline: Timeline) -> Costs:
    """Return the median durations of a timeline's actions."""
    taken: dict[type, list[float]] = {}
    for rank in range(len(timeline.ranks)):
        for each in timeline.computed(rank):
            if not isinstance(each.action, Overlap):
                taken.setdefault(type(each.action), []).append(each.end - each.start)
    medians = {kind: statistics.median(values) for kind, values in taken.items()}
    half = medians.get(Backward, 0.0) / 2
    return Costs(medians[Forward], medians.get(BackwardInput, half), medians.get(BackwardWeight, half))


def overhead(repeats: int) -> float:
    """Return the executor's overhead per action on one rank, in microseconds."""
    number = 64
    stage = nn.Linear(1, 1)
    x = torch.ones(1)
    executor = Executor(build(OneForwardOneBackward(), num_ranks=1, num_microbatches=number), {0: stage})
    inputs = [Inputs(x) for _ in range(number)]

    def by_hand() -> None:
        for each in inputs:
            stage(*each.first).sum().backward()

    def by_program() -> None:
        executor.step(inputs, lambda output, _: output.sum())

    differences = []
    for _ in range(repeats):
        start = time.perf_counter()
        by_hand()
        middle = time.perf_counter()
        by_program()
        differences.append(time.perf_counter() - middle - (middle - start))
    return 1e6 * statistics.median(differences) / (3 * number)  # forward, loss, backward


def ratio(numerators: list[float], denominators: list[float]) -> dict[str, Any]:
    """Return the median ratio of pairs with its bootstrapped 95 % confidence interval."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    draws = random.Random(0)  # noqa: S311
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "median": round(statistics.median(ratios), 3),
        "low": round(medians[50], 3),
        "high": round(medians[-50], 3),
        "pairs": len(ratios),
    }


def main() -> None:
    """Run the benchmark and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--milliseconds", type=float, default=25.0, help="duration of a sleeping action")
    arguments = parser.parse_args()
    seconds = arguments.milliseconds / 1e3
    result: dict[str, Any] = {"microseconds_per_action": round(overhead(200), 1)}
    for ranks in arguments.ranks:
        slept = run_ranks(sleep, arguments.pairs, seconds, world_size=ranks)[0]
        raced = run_ranks(race, arguments.pairs, 2, world_size=ranks)[0]
        result[f"{ranks} ranks"] = {
            "ratio_to_simulation": {name: ratio(taken, [1.0] * len(taken)) for name, taken in slept.items()},
            "ratio_to_torch": {name: ratio(*taken) for name, taken in raced.items()},
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
