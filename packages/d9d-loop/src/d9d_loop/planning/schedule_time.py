"""Time of a pipeline whose schedule has no closed form, from the simulation of its program.

    t = m T_max (M / B),  T_max: seconds of one microbatch on the slowest rank

m: microbatches, M: makespan of the simulated program, B: busy time of its busiest rank, both with each stage's own
seconds. A search rounds them: `ScheduleBubbles`. The backward pass of zero-bubble schedules has two halves: input
gradients with recomputation, and weight gradients, which are half of the backward pass's matrix products. Overlapped
forward and backward passes take the sum of their times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from d9d_dist import UserError
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.layer_time import LayerTime, PassTime, embedding_time, head_time
from d9d_loop.planning.plan_layout import PlanLayout
from d9d_loop.planning.step_model import StepTime, layer_times, stage_layers, step_time, transfer_seconds
from d9d_loop.planning.vision_tower import tower_time
from d9d_pipeline import (
    Costs,
    GPipe,
    Interleaved,
    OneForwardOneBackward,
    Overlap,
    Program,
    Schedule,
    Timeline,
    build,
    simulate,
)
from d9d_pipeline.actions import Compute


@final
@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one microbatch on a stage, without sends. A whole backward pass takes the sum of its two halves."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """Seconds of forward and backward pass."""
        return self.forward + self.backward_input + self.backward_weight

    def rounded(self, unit: float) -> "StageTime":
        """Return the times as multiples of `unit`, rounded to integers."""
        return StageTime(
            round(self.forward / unit), round(self.backward_input / unit), round(self.backward_weight / unit)
        )


def has_closed_form(schedule: Schedule) -> bool:
    """Return True for the schedules whose time `pipeline_time.py` computes: GPipe, and (interleaved) 1F1B."""
    return isinstance(schedule, GPipe | OneForwardOneBackward | Interleaved) and schedule.max_activations is None


def scheduled_step_time(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, *, schedule: Schedule, program: Program
) -> StepTime:
    """Return the time of a step whose pipeline runs the program of a schedule."""
    time = step_time(shape, layout, hardware)
    if layout.pp == 1 or has_closed_form(schedule):
        return time
    busy = time.total - time.data - time.optimizer - time.bubble
    return _with_bubble(time, busy * relative_bubble(simulated_step(shape, layout, hardware, program)))


def relative_bubble(timeline: Timeline) -> float:
    """Return the waiting time of the busiest rank, divided by its busy time."""
    waiting = min(timeline.waiting)
    return waiting / (timeline.makespan - waiting)


def _with_bubble(time: StepTime, bubble: float) -> StepTime:
    return replace(time, bubble=bubble, total=time.total - time.bubble + bubble)


@final
class ScheduleBubbles:
    """Bubbles of a schedule without a closed form in many layouts of a decoder on a cluster.

    Simulations are shared by layouts whose stages have the same relative durations, rounded to 1 / 40 of a stage. Once
    the pipeline is full, the bubble grows linearly with rounds of p microbatches on p ranks, so at most 4 p of them are
    simulated.
    """

    def __init__(self, schedule: Schedule, shape: DecoderShape, hardware: Hardware) -> None:
        self._schedule, self._shape, self._hardware = schedule, shape, hardware
        self._known: dict[tuple[object, ...], float] = {}

    def apply(self, time: StepTime, layout: PlanLayout, layers: tuple[LayerTime, LayerTime]) -> StepTime:
        """Return the step time of a layout with the schedule's bubble instead of 1F1B's.

        Args:
            time: Step time of the layout with (interleaved) 1F1B.
            layout: The layout, with several pipeline ranks. The schedule supports its ranks and microbatches.
            layers: Times of the layout's layers, from `layer_times`.
        """
        stages = stage_times(self._shape, layout, self._hardware, layers)
        unit = sum(each.total for each in stages) / len(stages) / 40
        rounded = tuple(each.rounded(unit) for each in stages)
        transfer = round(transfer_seconds(self._shape, layout, self._hardware) / unit)
        busy = time.total - time.data - time.optimizer - time.bubble
        m = layout.num_microbatches
        return _with_bubble(time, busy / m * self.bubble(layout.pp, m, rounded, transfer))

    def bubble(self, num_ranks: int, num_microbatches: int, stages: tuple[StageTime, ...], transfer: float) -> float:
        """Return the bubble in units of the time of one microbatch on the busiest rank."""
        rounds = max(0, num_microbatches - 2 * num_ranks - 1) // num_ranks
        few = num_microbatches - rounds * num_ranks
        bubble = self._simulated(num_ranks, few, stages, transfer)
        if not rounds:
            return bubble
        return bubble + rounds * (self._simulated(num_ranks, few + num_ranks, stages, transfer) - bubble)

    def _simulated(
        self, num_ranks: int, num_microbatches: int, stages: tuple[StageTime, ...], transfer: float
    ) -> float:
        key = (num_ranks, num_microbatches, stages, transfer)
        if key not in self._known:
            program = build(self._schedule, num_ranks=num_ranks, num_microbatches=num_microbatches)
            self._known[key] = num_microbatches * relative_bubble(simulated(program, stages, transfer))
        return self._known[key]


def supports(schedule: Schedule, *, num_ranks: int, num_microbatches: int) -> bool:
    """Return True if a schedule supports the numbers of ranks and microbatches."""
    try:
        next(iter(schedule.actions(0, num_ranks, num_microbatches)), None)
    except UserError:
        return False
    return True


def simulated_step(shape: DecoderShape, layout: PlanLayout, hardware: Hardware, program: Program) -> Timeline:
    """Simulate a program with the seconds that a layout's stages take."""
    stages = stage_times(shape, layout, hardware, layer_times(shape, layout, hardware))
    return simulated(program, stages, transfer_seconds(shape, layout, hardware))


def simulated(program: Program, stages: Sequence[StageTime], transfer: float) -> Timeline:
    """Simulate a program with the given times of each stage and of a send."""
    costs = [Costs(each.forward, each.backward_input, each.backward_weight) for each in stages]

    def duration(action: Compute) -> float:
        if isinstance(action, Overlap):
            return duration(action.forward) + duration(action.backward)
        return costs[action.stage].of(action)

    return simulate(program, Costs(transfer=transfer), duration=duration)


def stage_times(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, layers: tuple[LayerTime, LayerTime]
) -> list[StageTime]:
    """Return the times of one microbatch on each stage. `layers` is the result of `layer_times`."""
    found = []
    for index in range(layout.num_stages):
        forward = backward = again = PassTime()
        for layer, count in zip(layers, stage_layers(shape, layout, index), strict=True):
            forward += layer.forward.times(count)
            backward += layer.backward.times(count)
            again += layer.recompute.times(count)
        if index == 0:
            tower = tower_time(shape, layout, hardware)
            forward, backward = forward + embedding_time(shape, layout, hardware) + tower[0], backward + tower[1]
        if index == layout.num_stages - 1:
            head = head_time(shape, layout, hardware)
            forward, backward = forward + head[0], backward + head[1]
        weight = backward.matmul / 2
        found.append(StageTime(forward.device, backward.device - weight + again.device, weight))
    return found
