"""Planning of jobs: what a job allocates, sends and computes, and how long it takes on a cluster."""

from d9d_loop.planning.collective_log import Collective, CollectiveLog
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.hardware_spec import Device, Fitted, Hardware, Links, Network, hardware_names
from d9d_loop.planning.plan_layout import PlanLayout
from d9d_loop.planning.rehearsal import (
    Rehearsal,
    fake_ranks,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    rehearse,
    representatives,
)
from d9d_loop.planning.step_model import StepTime, step_time
from d9d_loop.planning.step_record import Operation, StepRecord, recorded

__all__ = [
    "Collective",
    "CollectiveLog",
    "DecoderShape",
    "Device",
    "Fitted",
    "Hardware",
    "Links",
    "Network",
    "Operation",
    "PlanLayout",
    "Rehearsal",
    "StepRecord",
    "StepTime",
    "fake_ranks",
    "gradient_bytes",
    "hardware_names",
    "optimizer_bytes",
    "parameter_bytes",
    "recorded",
    "rehearse",
    "representatives",
    "step_time",
]
