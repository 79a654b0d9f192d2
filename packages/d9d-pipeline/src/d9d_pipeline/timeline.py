"""A step in time: when each rank did what, as it was simulated or as it was measured, and what that says about it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from d9d_pipeline.actions import Action, Backward, BackwardWeight, Forward, Part, parts


@final
@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its place in time.

    Attributes:
        action: What was done.
        start: When it started, on a clock that all ranks share.
        end: When it was done.
    """

    action: Action
    start: float
    end: float


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """When each rank did what in a step.

    `simulate` makes one; a real step gives one with measured times.

    Attributes:
        ranks: For each rank what it did, in order. Transfers may run while something is computed; they may be left out.
        unit: Of the times: `"s"` if they were measured, empty if they are in units of a simulation's costs.
    """

    ranks: tuple[tuple[TimedAction, ...], ...]
    unit: str = ""

    @property
    def makespan(self) -> float:
        """From the first start to the last end of all that is computed; 0 if nothing is."""
        computed = [timed for rank in range(len(self.ranks)) for timed in self.computed(rank)]
        if not computed:
            return 0.0
        return max(timed.end for timed in computed) - min(timed.start for timed in computed)

    @property
    def waiting(self) -> tuple[float, ...]:
        """For each rank how much of the makespan it computes nothing: how GPipe and 1F1B count their bubble."""
        makespan = self.makespan
        return tuple(makespan - _busy(self.computed(rank)) for rank in range(len(self.ranks)))

    @property
    def waiting_between(self) -> tuple[float, ...]:
        """For each rank how much it waits between its first and its last action: how ZB-V counts, where it is zero.

        What a rank waits before and after can be used by the steps around, if they overlap.
        """
        each = [self.computed(rank) for rank in range(len(self.ranks))]
        return tuple(timed[-1].end - timed[0].start - _busy(timed) if timed else 0.0 for timed in each)

    @property
    def bubble(self) -> float:
        """The share of the makespan that ranks wait, in the mean over ranks: from 0 to 1."""
        makespan = self.makespan
        return sum(self.waiting) / (len(self.ranks) * makespan) if makespan > 0 else 0.0

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank the largest number of (stage, microbatch) pairs held at a time, as `verify` counts them."""
        return tuple(_peak(self.computed(rank)) for rank in range(len(self.ranks)))

    def computed(self, rank: int) -> tuple[TimedAction, ...]:
        """What a rank computed, in order: without loss and transfers."""
        return tuple(timed for timed in self.ranks[rank] if parts(timed.action))

    def __str__(self) -> str:
        """As `format_simulation` draws it."""
        return format_simulation(self)


def format_simulation(timeline: Timeline, *, width: int = 100) -> str:
    """Draw a timeline with characters, one line for each rank, for terminals and logs.

    Times run to the right. Where there is room an action reads as in a program, otherwise only its kind is shown; dots
    are waiting. Each line ends with the share of the step that the rank waits.

    Args:
        timeline: What to draw.
        width: Number of characters that the step takes.
    """
    makespan = timeline.makespan
    begin = min((timed.start for rank in range(len(timeline.ranks)) for timed in timeline.computed(rank)), default=0.0)
    scale = width / makespan if makespan > 0 else 0.0
    digits = len(str(len(timeline.ranks) - 1))
    lines = []
    for rank, waits in enumerate(timeline.waiting):
        line = ["."] * width
        for timed in timeline.computed(rank):
            first, last = (round((time - begin) * scale) for time in (timed.start, timed.end))
            line[first:last] = _fitted(timed.action, last - first)
        share = 100 * waits / makespan if makespan > 0 else 0.0
        lines.append(f"rank {rank:>{digits}}: {''.join(line)} {share:.0f} %")
    return "\n".join(lines)


def stages_in_order(timed: Sequence[TimedAction]) -> list[int]:
    """The stages of a rank, from the first."""
    return sorted({part.stage for part in _parts(timed)})


def _fitted(action: Action, room: int) -> str:
    """What an action is called, in exactly the room that there is."""
    text = str(action)
    if len(text) >= room:  # the names of neighbours must not run together
        text = "".join(str(part)[0] for part in parts(action))
    return text[:room].ljust(room, "-")


def _busy(timed: Sequence[TimedAction]) -> float:
    return sum(each.end - each.start for each in timed)


def _peak(timed: Sequence[TimedAction]) -> int:
    held = peak = 0
    trains = False
    for part in _parts(timed):
        if isinstance(part, Forward):
            held += 1
            peak = max(peak, held)
        elif isinstance(part, Backward | BackwardWeight):
            held -= 1
            trains = True
    return peak if trains else 0


def _parts(timed: Sequence[TimedAction]) -> Iterator[Part]:
    return (part for each in timed for part in parts(each.action))
