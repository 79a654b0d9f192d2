"""Composition of phases into a learning-rate schedule."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from d9d_dist import UserError
from d9d_loop.lr.phase import PhaseSettings


def piecewise(phases: Sequence[PhaseSettings], *, num_steps: int, start: float = 0.0) -> Callable[[int], float]:
    """Compose phases into a function of the step, counted from 0, that returns the learning rate relative to the peak.

    On its first step, each phase has the final factor of the previous phase. A last phase of several steps reaches its
    final factor on the last step of the job, and keeps it afterwards. If `start` is 0, the first phase begins one step
    before the job, because a step with learning rate 0 would have no effect.

    Args:
        phases: One or more phases. Lengths in percent are rounded such that their sum is off by at most half a step.
        num_steps: Number of steps of the whole job.
        start: Learning rate at the start of the first phase, relative to the peak.

    Raises:
        UserError: If the phases cover fewer or more than `num_steps` steps, several have no length, or an exponential
            phase starts at 0.
    """
    ends = _ends(phases, num_steps)
    begins = [0, *ends[:-1]]
    values = list(accumulate(phases, lambda value, phase: phase.end(value), initial=start))
    early = 1 if start == 0 else 0

    def factor(step: int) -> float:
        index = min(bisect_right(ends, step), len(phases) - 1)
        is_first, is_last = index == 0, index == len(phases) - 1
        done = step - begins[index] + early * is_first
        length = max(ends[index] - begins[index] + early * is_first - is_last, 1)
        return phases[index].value(values[index], min(done / length, 1.0))

    return factor


def _ends(phases: Sequence[PhaseSettings], num_steps: int) -> list[int]:
    """Return the end of each phase: one more than the index of its last step."""
    _check_percents(phases)
    open_phases = [index for index, phase in enumerate(phases) if phase.steps is None and phase.percent is None]
    if not phases or len(open_phases) > 1:
        raise UserError(
            f"the schedule has {len(phases)} phases, {len(open_phases)} of them with neither steps nor percent; "
            "expected at least one phase, and at most one without a length. Set a length for the others."
        )
    lengths = _lengths(phases, num_steps)
    left = num_steps - sum(lengths)
    if left < 0 or (left == 0 and open_phases):
        expected = "fewer, because one phase takes the remaining steps" if open_phases else str(num_steps)
        raise UserError(
            f"the phases of the schedule take {sum(lengths)} steps, but the job has {num_steps}; expected {expected}. "
            "Shorten a phase."
        )
    if left > 0 and not open_phases:
        raise UserError(
            f"the phases of the schedule take {sum(lengths)} steps, but the job has {num_steps}; expected {num_steps}. "
            "Omit the length of one phase, which then takes the remaining steps."
        )
    for index in open_phases:
        lengths[index] = left
    return list(accumulate(lengths))


def _check_percents(phases: Sequence[PhaseSettings]) -> None:
    total = math.fsum(phase.percent for phase in phases if phase.percent is not None)
    if total > 100 * (1 + 1e-9):
        raise UserError(
            f"the phases of the schedule take {total:g} percent of the job; expected at most 100. Shorten a phase."
        )


def _lengths(phases: Sequence[PhaseSettings], num_steps: int) -> list[int]:
    """Return the length of each phase in steps; 0 for a phase without a length.

    The cumulative percentages are rounded to steps, so that rounding errors do not add up.
    """
    lengths: list[int] = []
    percent = 0.0
    for phase in phases:
        if phase.percent is not None:
            before, percent = percent, percent + phase.percent
            lengths.append(round(num_steps * percent / 100) - round(num_steps * before / 100))
        else:
            lengths.append(phase.steps or 0)
    return lengths
