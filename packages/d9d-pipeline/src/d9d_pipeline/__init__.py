"""Pipeline schedules as programs that are verified, simulated, plotted and executed."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports
from d9d_pipeline.build import build as build
from d9d_pipeline.simulate import Costs as Costs
from d9d_pipeline.simulate import simulate as simulate
from d9d_pipeline.verify import ProgramError as ProgramError
from d9d_pipeline.verify import Verified as Verified
from d9d_pipeline.verify import verify as verify

if TYPE_CHECKING:
    from d9d_pipeline.actions import Backward as Backward
    from d9d_pipeline.actions import BackwardInput as BackwardInput
    from d9d_pipeline.actions import BackwardWeight as BackwardWeight
    from d9d_pipeline.actions import Forward as Forward
    from d9d_pipeline.actions import Overlap as Overlap
    from d9d_pipeline.executor import Executor as Executor
    from d9d_pipeline.inputs import Inputs as Inputs
    from d9d_pipeline.pipelined_model import PipelinedModel as PipelinedModel
    from d9d_pipeline.pipelined_model import broadcast_tree as broadcast_tree
    from d9d_pipeline.plot import plot_program as plot_program
    from d9d_pipeline.plot import plot_simulation as plot_simulation
    from d9d_pipeline.program import Program as Program
    from d9d_pipeline.rank_stages import RankStages as RankStages
    from d9d_pipeline.schedule import Schedule as Schedule
    from d9d_pipeline.schedules.fill_drain import ForwardOnly as ForwardOnly
    from d9d_pipeline.schedules.fill_drain import GPipe as GPipe
    from d9d_pipeline.schedules.fill_drain import LoopedBreadthFirst as LoopedBreadthFirst
    from d9d_pipeline.schedules.one_forward_one_backward import Interleaved as Interleaved
    from d9d_pipeline.schedules.one_forward_one_backward import OneForwardOneBackward as OneForwardOneBackward
    from d9d_pipeline.schedules.v_shaped import DualPipeV as DualPipeV
    from d9d_pipeline.schedules.v_shaped import ZeroBubbleV as ZeroBubbleV
    from d9d_pipeline.schedules.zero_bubble import ZeroBubble1P as ZeroBubble1P
    from d9d_pipeline.shared_parameters import SharedParameters as SharedParameters
    from d9d_pipeline.timeline import TimedAction as TimedAction
    from d9d_pipeline.timeline import Timeline as Timeline
    from d9d_pipeline.timeline import format_simulation as format_simulation
else:
    __getattr__, __dir__ = lazy_exports(__name__)
