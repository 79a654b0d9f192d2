"""Start and end time of each action of a step, simulated or measured, and the resulting bubble."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from d9d_pipeline.actions import Action, parts


@final
@dataclass(frozen=True, slots=True)
class TimedAction:
    """Action with its start and end time, on a clock that all ranks share."""

    action: Action
    start: float
    end: float


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of the actions of all ranks in one step, from `simulate` or `Executor.measured_step`.

    Attributes:
        ranks: The timed actions of each rank, in order. Transfers are optional and may overlap with computations.
        unit: Unit of the times: `"s"` if measured; empty if simulated, where the costs define the unit.
    """

    ranks: tuple[tuple[TimedAction, ...], ...]
    unit: str = ""

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end of all computations; 0 if there are none."""
        computed = [timed for rank in range(len(self.ranks)) for timed in self.computed(rank)]
        if not computed:
            return 0.0
        return max(timed.end for timed in computed) - min(timed.start for timed in computed)

    @property
    def waiting(self) -> tuple[float, ...]:
        """Idle time of each rank within the makespan: the bubble of GPipe and 1F1B."""
        makespan = self.makespan
        return tuple(makespan - _busy(self.computed(rank)) for rank in range(len(self.ranks)))

    @property
    def waiting_between(self) -> tuple[float, ...]:
        """Idle time of each rank between its first and its last computation, which ZB-V minimizes.

        If steps overlap, adjacent steps can use the idle time before and after.
        """
        each = [self.computed(rank) for rank in range(len(self.ranks))]
        return tuple(timed[-1].end - timed[0].start - _busy(timed) if timed else 0.0 for timed in each)

    @property
    def bubble(self) -> float:
        """Fraction of the makespan in which ranks are idle, averaged over ranks: from 0 to 1."""
        makespan = self.makespan
        return sum(self.waiting) / (len(self.ranks) * makespan) if makespan > 0 else 0.0

    def computed(self, rank: int) -> tuple[TimedAction, ...]:
        """Return a rank's computations in order, without the loss and transfers."""
        return tuple(timed for timed in self.ranks[rank] if parts(timed.action))

    def __str__(self) -> str:
        """Return the text of `format_simulation`."""
        return format_simulation(self)


def format_simulation(timeline: Timeline, *, width: int = 100) -> str:
    """Draw a timeline as text of `width` characters, one line per rank, for terminals and logs.

    Time runs to the right, and dots are idle time. An action is labeled as in a program if the label fits, otherwise
    only by its type. Each line ends with the percentage of the makespan in which the rank is idle.
    """
    makespan = timeline.makespan
    begin = min((timed.start for rank in range(len(timeline.ranks)) for timed in timeline.computed(rank)), default=0.0)
    scale = width / makespan if makespan > 0 else 0.0
    digits = len(str(len(timeline.ranks) - 1))
    lines = []
    for rank, idle in enumerate(timeline.waiting):
        line = ["."] * width
        for timed in timeline.computed(rank):
            first, last = (round((time - begin) * scale) for time in (timed.start, timed.end))
            line[first:last] = _fitted(timed.action, last - first)
        percentage = 100 * idle / makespan if makespan > 0 else 0.0
        lines.append(f"rank {rank:>{digits}}: {''.join(line)} {percentage:.0f} %")
    return "\n".join(lines)


def stages_in_order(timed: Sequence[TimedAction]) -> list[int]:
    """Return the global indices of a rank's stages, in increasing order."""
    return sorted({part.stage for each in timed for part in parts(each.action)})


def _fitted(action: Action, room: int) -> str:
    """Return the label of an action, padded or shortened to exactly `room` characters."""
    text = str(action)
    if len(text) >= room:  # labels of adjacent actions must not run together
        text = "".join(str(part)[0] for part in parts(action))
    return text[:room].ljust(room, "-")


def _busy(timed: Sequence[TimedAction]) -> float:
    return sum(each.end - each.start for each in timed)
