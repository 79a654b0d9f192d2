"""Pipeline schedules as programs that run."""

from d9d_pipeline.actions import Action, Backward, Forward
from d9d_pipeline.executor import Executor, Inputs, OutputHandler, Outputs
from d9d_pipeline.program import Program, build
from d9d_pipeline.schedule import ForwardOnly, GPipe, OneForwardOneBackward, Schedule

__all__ = [
    "Action",
    "Backward",
    "Executor",
    "Forward",
    "ForwardOnly",
    "GPipe",
    "Inputs",
    "OneForwardOneBackward",
    "OutputHandler",
    "Outputs",
    "Program",
    "Schedule",
    "build",
]
