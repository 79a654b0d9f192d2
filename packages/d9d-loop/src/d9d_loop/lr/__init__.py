"""Learning-rate schedules composed of phases, and plots of them."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports
from d9d_loop.lr.piecewise import piecewise

if TYPE_CHECKING:
    from d9d_loop.lr.phase import (
        ConstantPhase,
        CosinePhase,
        ExponentialPhase,
        LinearPhase,
        Phase,
        PolynomialPhase,
        RexPhase,
        SqrtPhase,
    )
    from d9d_loop.lr.picture import draw_lr_schedule, plot_lr_schedule
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "ConstantPhase",
    "CosinePhase",
    "ExponentialPhase",
    "LinearPhase",
    "Phase",
    "PolynomialPhase",
    "RexPhase",
    "SqrtPhase",
    "draw_lr_schedule",
    "piecewise",
    "plot_lr_schedule",
]
