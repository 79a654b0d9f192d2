"""Learning rates of an optimizer's parameter groups."""

import math
from typing import final

from torch.optim import Optimizer

from d9d_dist import UserError


@final
class LearningRates:
    """Learning rates of an optimizer: multiples of the initial ones, or one value for all parameter groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._built = [group["lr"] for group in self._groups]

    def set_all(self, learning_rate: float) -> None:
        """Set one learning rate for all groups; raise `UserError` if it is negative or not finite."""
        _check("learning_rate", learning_rate)
        for group in self._groups:
            group["lr"] = learning_rate

    def scale(self, factor: float) -> None:
        """Multiply the initial learning rates by `factor`; raise `UserError` if `factor` is negative or not finite."""
        _check("factor", factor)
        for group, built in zip(self._groups, self._built, strict=True):
            group["lr"] = built * factor


def _check(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise UserError(f"{name} = {value}; expected a finite number, 0 or more.")
