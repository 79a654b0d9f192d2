"""Which checkpoints are kept, and which are deleted after a save."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

from d9d_dist import UserError


class Ranked(Protocol):
    """What decides whether a checkpoint is kept."""

    @property
    def step(self) -> int:
        """Number of optimizer steps that were done."""
        ...

    @property
    def metric(self) -> float | None:
        """How good it is, if somebody said."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Retention:
    """A checkpoint is kept if any of these reasons holds for it; the one that was just saved always is.

    Attributes:
        last: It is among so many newest ones. `None` keeps all.
        every: Its step is a multiple of this number.
        best: It is among so many with the best metric; of equal ones the newer is better. Those saved without a metric,
            or with one that is NaN or infinite, are not.
        higher_is_better: Whether a larger metric is a better one.

    Raises:
        UserError: If a number is too small.
    """

    last: int | None = None
    every: int | None = None
    best: int = 0
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that would delete everything."""
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None and value < 1:
                raise UserError(f"got {name} = {value}; expected at least 1, or None.")
        if self.best < 0:
            raise UserError(f"got best = {self.best}; expected 0 or more.")

    def kept(self, newest_first: Sequence[Ranked]) -> set[int]:
        """The steps of those checkpoints of one run that are kept.

        Args:
            newest_first: All of them. The first is kept whatever else is asked for.
        """
        kept = {each.step for each in newest_first[: self.last]}
        if self.every is not None:
            kept |= {each.step for each in newest_first if each.step % self.every == 0}
        measured = [
            (each.metric, each.step) for each in newest_first if each.metric is not None and math.isfinite(each.metric)
        ]
        sign = -1 if self.higher_is_better else 1
        best_first = sorted(measured, key=lambda pair: (sign * pair[0], -pair[1]))
        return kept | {step for _, step in best_first[: self.best]}
