"""Phases, one after the other, as a pure function of the step."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from d9d_dist import UserError
from d9d_loop.schedules.phase import PhaseSettings


def piecewise(phases: Sequence[PhaseSettings], *, num_steps: int, start: float = 0.0) -> Callable[[int], float]:
    """Put phases together.

    Each phase starts at the value to which the one before leads, on its first step; the last one gets to its end on
    the last step of the job, if it has more than one, and stays there where a job goes on. From a start of 0 the first
    phase counts from one step before the job, since a step at a learning rate of 0 would be lost.

    Args:
        phases: One or more. Lengths in percent are rounded so that their sum is not off by more than half a step.
        num_steps: Steps of the whole job.
        start: Factor of the peak learning rate on the first step.

    Returns:
        The factor of the peak learning rate for a step, counted from 0.

    Raises:
        UserError: If the phases leave steps without a phase, or take more steps than there are.
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
    """The step after the last one of each phase."""
    _check_percents(phases)
    open_phases = [index for index, phase in enumerate(phases) if phase.steps is None and phase.percent is None]
    if not phases or len(open_phases) > 1:
        raise UserError(
            f"the schedule has {len(phases)} phases, {len(open_phases)} of them with neither steps nor percent; "
            "expected one or more, of which one at most takes what the others leave. Give the others a length."
        )
    lengths = _lengths(phases, num_steps)
    left = num_steps - sum(lengths)
    if left < 0 or (left == 0 and open_phases):
        raise UserError(
            f"the phases of the schedule take {sum(lengths)} steps{' and what is left' if open_phases else ''}, but "
            f"the job has {num_steps}: they reach beyond its end; expected {'fewer' if open_phases else num_steps}. "
            "Shorten one."
        )
    if left > 0 and not open_phases:
        raise UserError(
            f"the phases of the schedule take {sum(lengths)} steps, but the job has {num_steps}, which leaves a gap of "
            f"{left}; expected none. Leave the length of one phase out: it takes what is left."
        )
    for index in open_phases:
        lengths[index] = left
    return list(accumulate(lengths))


def _check_percents(phases: Sequence[PhaseSettings]) -> None:
    total = math.fsum(phase.percent for phase in phases if phase.percent is not None)
    if total > 100 * (1 + 1e-9):
        raise UserError(
            f"the phases of the schedule take {total:g} percent of the job; expected at most 100. Shorten one."
        )


def _lengths(phases: Sequence[PhaseSettings], num_steps: int) -> list[int]:
    """Lengths in steps, 0 for what is left; parts of a job are rounded where they end, counted together."""
    lengths: list[int] = []
    percent = 0.0
    for phase in phases:
        if phase.percent is not None:
            before, percent = percent, percent + phase.percent
            lengths.append(round(num_steps * percent / 100) - round(num_steps * before / 100))
        else:
            lengths.append(phase.steps or 0)
    return lengths
