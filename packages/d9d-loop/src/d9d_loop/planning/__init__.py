"""Planning of jobs: what a job allocates, sends and computes, and how long it takes on a cluster."""

from d9d_loop.planning.collective_log import Collective, CollectiveLog
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.dry_run import (
    DryRun,
    dry_run,
    fake_ranks,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    representatives,
)
from d9d_loop.planning.goodput import Goodput, goodput
from d9d_loop.planning.hardware_spec import Device, Fitted, Hardware, Links, Network, hardware_names
from d9d_loop.planning.job_plan import ClusterPlan, PlanWith, RankMemory, describe, plan_cluster
from d9d_loop.planning.layout_search import Candidate, SearchResult, legal_layouts, nearest_layouts, search_layouts
from d9d_loop.planning.memory_size import Memory, memory_of
from d9d_loop.planning.plan_layout import PlanLayout
from d9d_loop.planning.plan_report import fit_message, report, verdict
from d9d_loop.planning.step_model import StepTime, step_time
from d9d_loop.planning.step_record import Operation, StepRecord, recorded

__all__ = [
    "Candidate",
    "ClusterPlan",
    "Collective",
    "CollectiveLog",
    "DecoderShape",
    "Device",
    "DryRun",
    "Fitted",
    "Goodput",
    "Hardware",
    "Links",
    "Memory",
    "Network",
    "Operation",
    "PlanLayout",
    "PlanWith",
    "RankMemory",
    "SearchResult",
    "StepRecord",
    "StepTime",
    "describe",
    "dry_run",
    "fake_ranks",
    "fit_message",
    "goodput",
    "gradient_bytes",
    "hardware_names",
    "legal_layouts",
    "memory_of",
    "nearest_layouts",
    "optimizer_bytes",
    "parameter_bytes",
    "plan_cluster",
    "recorded",
    "report",
    "representatives",
    "search_layouts",
    "step_time",
    "verdict",
]
