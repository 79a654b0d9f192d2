"""Learning-rate schedules composed of phases, and plots of them."""

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
from d9d_loop.lr.piecewise import piecewise

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
