"""Learning-rate schedules composed of phases, and plots of them."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.lr.lr_schedule import LrSchedule as LrSchedule
    from d9d_loop.lr.lr_schedule import LrScheduleConfig as LrScheduleConfig
    from d9d_loop.lr.lr_schedule import PiecewiseConfig as PiecewiseConfig
    from d9d_loop.lr.lr_schedule import WarmupCosineConfig as WarmupCosineConfig
    from d9d_loop.lr.lr_schedule import WsdConfig as WsdConfig
    from d9d_loop.lr.phase import ConstantPhase as ConstantPhase
    from d9d_loop.lr.phase import CosinePhase as CosinePhase
    from d9d_loop.lr.phase import ExponentialPhase as ExponentialPhase
    from d9d_loop.lr.phase import LinearPhase as LinearPhase
    from d9d_loop.lr.phase import Phase as Phase
    from d9d_loop.lr.phase import PolynomialPhase as PolynomialPhase
    from d9d_loop.lr.phase import RexPhase as RexPhase
    from d9d_loop.lr.phase import SqrtPhase as SqrtPhase
    from d9d_loop.lr.phase import piecewise as piecewise
    from d9d_loop.lr.picture import draw_lr_schedule as draw_lr_schedule
    from d9d_loop.lr.picture import plot_lr_schedule as plot_lr_schedule
    from d9d_loop.lr.transformers_schedule import TransformersScheduleConfig as TransformersScheduleConfig
else:
    __getattr__, __dir__ = lazy_exports(__name__)
