"""Configuration of fault handling. Every check can be disabled."""

from datetime import timedelta
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from d9d_dist import Timeouts, UserError
from d9d_loop.section import Section

BadStepAction = Literal["skip", "roll_back", "stop"]


class HealthConfig(Section):
    """Configuration of the health check of devices and links, before the model is built and while a job trains."""

    enabled: bool = Field(default=True, description="Check every rank's device and links at the start.")
    matrix_size: PositiveInt = Field(default=512, description="Rows of the square matrices in the matmul test.")
    memory_mib: PositiveInt = Field(
        default=64, description="MiB of device memory to write and read back; on a CPU at most 4."
    )
    message_mib: PositiveInt = Field(default=4, description="MiB to send over each link.")
    slow_factor: float = Field(
        default=3.0, gt=1, description="Report a time as slow if it exceeds this factor times the median of the ranks."
    )
    every: PositiveInt | None = Field(
        default=None, description="Steps between repetitions of the check in a training job; null: only at the start."
    )
    window: PositiveInt = Field(
        default=3, description="Number of consecutive checks in which a component must be slow to be reported."
    )
    replace: bool = Field(
        default=False,
        description="Save and restart with a spare host if the compute, memory or data loading of a host stays slow "
        "and d9d-torchrun has a spare host. Needs `every`.",
    )

    @model_validator(mode="after")
    def _check_replace(self) -> Self:
        if self.replace and (self.every is None or not self.enabled):
            raise UserError("replace = true needs repeated checks; set enabled = true, and a number of steps in every.")
        return self


class StopConfig(Section):
    """Configuration of the signals on which a job saves a checkpoint and exits."""

    signals: tuple[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT"], ...] = Field(
        default=("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"), description="Signals that stop the job; empty: none."
    )
    every: PositiveInt = Field(default=1, description="Steps between exchanges of received signals among ranks.")
    grace_seconds: PositiveFloat | None = Field(
        default=None,
        description="Seconds from the first signal until the process exits, even if nothing was saved; null: no limit.",
    )
    repeat_seconds: PositiveFloat = Field(
        default=2.0,
        description="A signal at least this many seconds after the first one ends the process immediately.",
    )


class BadStepConfig(Section):
    """Configuration of bad steps: a non-finite loss or gradient norm, or a loss far above the recent losses.

    Steps of weight 0, whose labels are all masked, are bad too, and always skipped.
    """

    non_finite: BadStepAction = Field(
        default="skip",
        description="Reaction to a non-finite loss or gradient: skip the update, roll back to the last "
        "checkpoint, or stop.",
    )
    spike: BadStepAction | Literal["report", "ignore"] = Field(
        default="report",
        description="Reaction to a loss spike: skip, roll back or stop as in `non_finite`, or report it, or ignore it.",
    )
    max_in_a_row: PositiveInt = Field(default=5, description="Number of consecutive skipped steps that stops the job.")
    max_rollbacks: PositiveInt = Field(
        default=3, description="Maximum number of rollbacks; instead of a further rollback, the job stops."
    )
    spike_window: PositiveInt = Field(
        default=100, description="Number of previous losses with which the loss of a step is compared."
    )
    spike_after: PositiveInt = Field(default=20, description="Minimum number of previous losses for spike detection.")
    spike_deviations: PositiveFloat = Field(
        default=6.0, description="Threshold of a spike, in robust standard deviations above the median."
    )
    spike_skip_before: int = Field(
        default=1, ge=0, description="Number of steps before a spike that are also skipped after a rollback."
    )


class WatchdogConfig(Section):
    """Configuration of the watchdog, which ends a job without progress. It uses the timeouts of `TimeoutConfig`."""

    enabled: bool = Field(
        default=True,
        description="Run the watchdog; without it, the error of a timed-out collective does not name the missing rank.",
    )


class ReplicaConfig(Section):
    """Configuration of the check that replicas of parameters and optimizer states are equal."""

    every: PositiveInt | None = Field(default=1000, description="Steps between checks; null disables them.")


class TimeoutConfig(Section):
    """Timeouts of start-up and of steps, for collectives and the watchdog."""

    startup_seconds: PositiveFloat = Field(
        default=1800.0,
        description="Timeout in seconds for the start-up and the first step together, for the export, and for the "
        "handlers of Finished.",
    )
    step_seconds: PositiveFloat = Field(
        default=600.0,
        description="Timeout in seconds for each later step, each save, each evaluation, each inference batch, and the "
        "handlers of each event.",
    )

    lock_seconds: NonNegativeFloat = Field(
        default=30.0,
        description="Time in seconds to wait for the lock of the run folder, which a job that is ending may hold.",
    )

    @property
    def timeouts(self) -> Timeouts:
        """The timeouts in the form that `DistributedContext` accepts."""
        return Timeouts(timedelta(seconds=self.startup_seconds), timedelta(seconds=self.step_seconds))


class HangConfig(Section):
    """Configuration of hang detection: timeouts and the watchdog."""

    timeouts: TimeoutConfig = TimeoutConfig.model_validate({})
    watchdog: WatchdogConfig = WatchdogConfig.model_validate({})


class ResilienceConfig(HangConfig):
    """Configuration of fault handling in a training job."""

    health: HealthConfig = HealthConfig.model_validate({})
    stop: StopConfig = StopConfig.model_validate({})
    bad_steps: BadStepConfig = BadStepConfig.model_validate({})
    replicas: ReplicaConfig = ReplicaConfig.model_validate({})
