"""Fault handling: health check, watchdog, bad steps, replica check, stop signals. Each also works without `Trainer`."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.resilience.bad_steps import BadStep as BadStep
    from d9d_loop.resilience.bad_steps import StepGuard as StepGuard
    from d9d_loop.resilience.exit_codes import ExitCode as ExitCode
    from d9d_loop.resilience.exit_codes import Stopped as Stopped
    from d9d_loop.resilience.finite_check import check_finite as check_finite
    from d9d_loop.resilience.hang_watchdog import HangWatchdog as HangWatchdog
    from d9d_loop.resilience.health_check import HealthError as HealthError
    from d9d_loop.resilience.health_check import HealthReport as HealthReport
    from d9d_loop.resilience.health_check import check_health as check_health
    from d9d_loop.resilience.non_finite import NonFinite as NonFinite
    from d9d_loop.resilience.non_finite import Watch as Watch
    from d9d_loop.resilience.non_finite import find_non_finite as find_non_finite
    from d9d_loop.resilience.replica_check import ReplicaError as ReplicaError
    from d9d_loop.resilience.replica_check import check_buffers as check_buffers
    from d9d_loop.resilience.replica_check import check_replicas as check_replicas
    from d9d_loop.resilience.resilience_config import BadStepConfig as BadStepConfig
    from d9d_loop.resilience.resilience_config import HangConfig as HangConfig
    from d9d_loop.resilience.resilience_config import HealthConfig as HealthConfig
    from d9d_loop.resilience.resilience_config import ReplicaConfig as ReplicaConfig
    from d9d_loop.resilience.resilience_config import ResilienceConfig as ResilienceConfig
    from d9d_loop.resilience.resilience_config import StopConfig as StopConfig
    from d9d_loop.resilience.resilience_config import TimeoutConfig as TimeoutConfig
    from d9d_loop.resilience.resilience_config import WatchdogConfig as WatchdogConfig
    from d9d_loop.resilience.stop_signals import StopSignals as StopSignals
    from d9d_loop.resilience.straggler_watch import StragglerWatch as StragglerWatch
else:
    __getattr__, __dir__ = lazy_exports(__name__)
