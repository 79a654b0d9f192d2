"""Base of the configurations of trackers that need an optional package."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_metrics.trackers.background import BackgroundTracker
from d9d_metrics.trackers.tracker import Tracker


class ExtraTrackerConfig(BaseModel, ABC):
    """Configuration of a tracker whose `kind` names its package, and the extra that installs it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str

    def check(self) -> None:
        """Raise a `UserError` with the command that installs the package if it is missing; do not import it."""
        require_package(self.kind)

    def build(self, run_dir: Path) -> Tracker:
        """Create the tracker, with a spool in the run folder; raise a `UserError` if the package is missing."""
        self.check()
        return BackgroundTracker(self._opener(run_dir), name=self.kind, spool=run_dir / "trackers" / self.kind)

    @abstractmethod
    def _opener(self, run_dir: Path) -> Callable[[], Tracker]:
        """Return a function that opens the tracker."""


def require_package(kind: str) -> None:
    """Raise a `UserError` with the command that installs a tracker's package if it is missing; do not import it."""
    package = "prometheus_client" if kind == "prometheus" else kind
    if find_spec(package) is None:
        # Trackio is not an extra: its client limits versions of packages that other packages of the lock need.
        command = "pip install 'trackio>=0.43'" if kind == "trackio" else install_hint("d9d-metrics", kind)
        raise UserError(
            f"the {kind} tracker needs the package {package}, which is not installed. Install it: {command}"
        )
