"""Pipeline schedules as programs that are verified, simulated, plotted and executed."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports
from d9d_pipeline.build import build
from d9d_pipeline.simulate import Costs, simulate
from d9d_pipeline.verify import ProgramError, Verified, verify

if TYPE_CHECKING:
    from d9d_pipeline._channel import Messages, stage_output
    from d9d_pipeline._message import check_can_be_sent
    from d9d_pipeline.actions import (
        Action,
        Backward,
        BackwardInput,
        BackwardWeight,
        Compute,
        ComputeLoss,
        Forward,
        Overlap,
        ReceiveInput,
        ReceiveOutputGradient,
        SendInputGradient,
        SendOutput,
    )
    from d9d_pipeline.executor import Executor, OutputHandler, Outputs
    from d9d_pipeline.inputs import Inputs
    from d9d_pipeline.pipelined_model import PipelinedModel
    from d9d_pipeline.plot import plot_program, plot_simulation
    from d9d_pipeline.program import Program
    from d9d_pipeline.rank_stages import RankStages
    from d9d_pipeline.schedule import Schedule, StagePlacement, ranks_of_stages
    from d9d_pipeline.schedules.fill_drain import ForwardOnly, GPipe, LoopedBreadthFirst
    from d9d_pipeline.schedules.one_forward_one_backward import Interleaved, OneForwardOneBackward
    from d9d_pipeline.schedules.v_shaped import DualPipeV, ZeroBubbleV
    from d9d_pipeline.schedules.zero_bubble import ZeroBubble1P
    from d9d_pipeline.shared_parameters import SharedParameters, shared_names
    from d9d_pipeline.timeline import TimedAction, Timeline, format_simulation
    from d9d_pipeline.tree_broadcast import broadcast_tree
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Compute",
    "ComputeLoss",
    "Costs",
    "DualPipeV",
    "Executor",
    "Forward",
    "ForwardOnly",
    "GPipe",
    "Inputs",
    "Interleaved",
    "LoopedBreadthFirst",
    "Messages",
    "OneForwardOneBackward",
    "OutputHandler",
    "Outputs",
    "Overlap",
    "PipelinedModel",
    "Program",
    "ProgramError",
    "RankStages",
    "ReceiveInput",
    "ReceiveOutputGradient",
    "Schedule",
    "SendInputGradient",
    "SendOutput",
    "SharedParameters",
    "StagePlacement",
    "TimedAction",
    "Timeline",
    "Verified",
    "ZeroBubble1P",
    "ZeroBubbleV",
    "broadcast_tree",
    "build",
    "check_can_be_sent",
    "format_simulation",
    "plot_program",
    "plot_simulation",
    "ranks_of_stages",
    "shared_names",
    "simulate",
    "stage_output",
    "verify",
]
