"""Fault handling: health check, watchdog, bad steps, replica check, stop signals. Each also works without `Trainer`."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.resilience.bad_steps import BadStep, StepGuard
    from d9d_loop.resilience.exit_codes import ExitCode, Stopped
    from d9d_loop.resilience.hang_watchdog import HangWatchdog
    from d9d_loop.resilience.health_check import HealthError, HealthReport, check_health
    from d9d_loop.resilience.non_finite import NonFinite, Watch, find_non_finite
    from d9d_loop.resilience.replica_check import ReplicaError, check_buffers, check_replicas
    from d9d_loop.resilience.resilience_config import (
        BadStepConfig,
        HangConfig,
        HealthConfig,
        ReplicaConfig,
        ResilienceConfig,
        StopConfig,
        TimeoutConfig,
        WatchdogConfig,
    )
    from d9d_loop.resilience.stop_signals import StopSignals
    from d9d_loop.resilience.straggler_watch import StragglerWatch
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "BadStep",
    "BadStepConfig",
    "ExitCode",
    "HangConfig",
    "HangWatchdog",
    "HealthConfig",
    "HealthError",
    "HealthReport",
    "NonFinite",
    "ReplicaConfig",
    "ReplicaError",
    "ResilienceConfig",
    "StepGuard",
    "StopConfig",
    "StopSignals",
    "Stopped",
    "StragglerWatch",
    "TimeoutConfig",
    "Watch",
    "WatchdogConfig",
    "check_buffers",
    "check_health",
    "check_replicas",
    "find_non_finite",
]
