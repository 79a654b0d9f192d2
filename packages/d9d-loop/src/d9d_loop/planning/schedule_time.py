"""Time of a pipeline whose schedule has no closed form, from the simulation of the job's own program.

    t = m T_max (M / B),  T_max: seconds of one microbatch on the slowest rank

m: microbatches, M: makespan of the simulated program, B: busy time of its busiest rank, both with each stage's own
seconds. The backward pass of zero-bubble schedules has two halves: input gradients with recomputation, and weight
gradients, which are half of the backward pass's matrix products. Overlapped forward and backward passes take the sum of
their times.
"""

from dataclasses import dataclass, replace
from typing import final

from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.layer_time import PassTime, embedding_time, head_time
from d9d_loop.planning.plan_layout import PlanLayout
from d9d_loop.planning.step_model import StepTime, layer_times, stage_layers, step_time, transfer_seconds
from d9d_pipeline import (
    Backward,
    BackwardInput,
    Compute,
    Costs,
    Forward,
    GPipe,
    Interleaved,
    OneForwardOneBackward,
    Overlap,
    Program,
    Schedule,
    Timeline,
    simulate,
)


@final
@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one microbatch on a stage, without sends. A whole backward pass takes the sum of its two halves."""

    forward: float
    backward_input: float
    backward_weight: float


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
    timeline = simulated_step(shape, layout, hardware, program)
    makespan = timeline.makespan
    busy = makespan - min(timeline.waiting)
    slowest = time.total - time.data - time.optimizer - time.bubble
    bubble = slowest * (makespan / busy - 1)
    return replace(time, bubble=bubble, total=time.total - time.bubble + bubble)


def simulated_step(shape: DecoderShape, layout: PlanLayout, hardware: Hardware, program: Program) -> Timeline:
    """Return the simulation of a program with the seconds of each stage."""
    stages = stage_times(shape, layout, hardware)

    def duration(action: Compute) -> float:
        if isinstance(action, Overlap):
            return duration(action.forward) + duration(action.backward)
        stage = stages[action.stage]
        if isinstance(action, Forward):
            return stage.forward
        if isinstance(action, Backward):
            return stage.backward_input + stage.backward_weight
        return stage.backward_input if isinstance(action, BackwardInput) else stage.backward_weight

    return simulate(program, Costs(transfer=transfer_seconds(shape, layout, hardware)), duration=duration)


def stage_times(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> list[StageTime]:
    """Return the times of one microbatch on each stage."""
    layers, found = layer_times(shape, layout, hardware), []
    for index in range(layout.num_stages):
        forward = backward = again = PassTime()
        for layer, count in zip(layers, stage_layers(shape, layout, index), strict=True):
            forward += layer.forward.times(count)
            backward += layer.backward.times(count)
            again += layer.recompute.times(count)
        if index == 0:
            forward += embedding_time(shape, layout, hardware)
        if index == layout.num_stages - 1:
            head = head_time(shape, layout, hardware)
            forward, backward = forward + head[0], backward + head[1]
        weight = backward.matmul / 2
        found.append(StageTime(forward.device, backward.device - weight + again.device, weight))
    return found
