"""Retention policy: the checkpoints to keep after a save."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from d9d_dist import UserError


@final
@dataclass(frozen=True, slots=True)
class Retention:
    """Retention policy. A checkpoint is kept if any of the rules applies; the newest is always kept.

    Attributes:
        last: Keep this many of the newest checkpoints; `None` keeps all.
        every: Keep checkpoints whose step is a multiple of this number; `None` disables the rule.
        best: Keep this many checkpoints with the best metric; of equal metrics the newer checkpoint counts as better.
            Checkpoints without a metric, or with a NaN or infinite one, do not count.
        higher_is_better: True if a larger metric is better.

    Raises:
        UserError: If `last` or `every` is less than 1, `best` is negative, or one of them is not an int.
    """

    last: int | None = None
    every: int | None = None
    best: int = 0
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None and not (_is_integer(value) and value >= 1):
                raise UserError(f"got {name} = {value!r}; expected an int, at least 1, or None.")
        if not (_is_integer(self.best) and self.best >= 0):
            raise UserError(f"got best = {self.best!r}; expected an int, 0 or more.")

    def kept(self, metrics: Mapping[int, float | None]) -> set[int]:
        """Return the steps of the checkpoints to keep.

        `metrics` has the metric of each checkpoint by step, newest first. Its first checkpoint is always kept.
        """
        kept = set(list(metrics)[: self.last])
        if self.every is not None:
            kept |= {step for step in metrics if step % self.every == 0}
        return kept | set(self.ranked(metrics)[: self.best])

    def ranked(self, metrics: Mapping[int, float | None]) -> list[int]:
        """Return the steps of the checkpoints that have a finite metric, the best one first."""
        measured = [(metric, step) for step, metric in metrics.items() if metric is not None and math.isfinite(metric)]
        sign = -1 if self.higher_is_better else 1
        return [step for _, step in sorted(measured, key=lambda pair: (sign * pair[0], -pair[1]))]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
