"""Timeouts of collectives during start-up and during steps."""

from dataclasses import dataclass
from datetime import timedelta

from d9d_dist.errors import UserError


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of collectives.

    Attributes:
        startup: Timeout from `MeshConfig.build` on, while ranks import, load and compile at different speeds.
        step: Timeout while the job runs steps. Set it by `ctx.set_timeout(ctx.timeouts.step)`.
    """

    startup: timedelta = timedelta(minutes=30)
    step: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        """Raise `UserError` if a timeout is not positive."""
        for name, timeout in (("startup", self.startup), ("step", self.step)):
            check_timeout(f"timeouts.{name}", timeout)


def check_timeout(name: str, timeout: timedelta) -> None:
    """Raise `UserError` if a timeout is not positive."""
    if timeout <= timedelta(0):
        raise UserError(f"{name} = {timeout}; expected a positive time.")
