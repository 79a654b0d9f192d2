"""Learning rates of an optimizer's parameter groups."""

import math
from typing import final

from torch.optim import Optimizer

from d9d_dist import UserError


@final
class LearningRates:
    """Learning rates of an optimizer, relative to those it was built with, or one for all parameter groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._built = [group["lr"] for group in self._groups]

    def set_all(self, learning_rate: float) -> None:
        """Set one learning rate; raise `UserError` if it is negative or not finite."""
        _check("learning_rate", learning_rate)
        for group in self._groups:
            group["lr"] = learning_rate

    def scale(self, factor: float) -> None:
        """Set `factor` times the first learning rates; raise `UserError` if it is negative or not finite."""
        _check("factor", factor)
        for group, built in zip(self._groups, self._built, strict=True):
            group["lr"] = built * factor


def _check(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise UserError(f"{name} = {value}; expected a finite number, 0 or more.")
