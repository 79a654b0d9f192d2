"""Keeps a run's values in a repository of Aim, a folder or a server."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import BaseModel, ConfigDict, JsonValue

from d9d_metrics.trackers._extras import check_extra
from d9d_metrics.trackers.background import BackgroundTracker
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.values import Histogram, Picture, Text, Tracked

if TYPE_CHECKING:
    import aim

_HASH = "aim_run_hash"
_MOST_BINS = 512


@final
class AimTracker:
    """Tracks to a run of Aim, which is opened by the first call that needs it.

    A step that is tracked again replaces what was there: after an interruption the values of steps that are taken again
    are those of the last time. What Aim cannot hold is left out: a histogram of more than 512 bins.
    """

    def __init__(self, repository: str, *, experiment: str | None = None) -> None:
        """Choose a new run.

        Args:
            repository: Folder that has, or gets, the repository; or the address of a server, `aim://host:port`.
            experiment: Runs of the same experiment are shown together.
        """
        self._repository, self._experiment = repository, experiment
        self._hash: str | None = None
        self._run: aim.Run | None = None

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Choose the run that the state names, instead of a new one."""
        if _HASH in state:
            self._hash = str(state[_HASH])
        self._opened()

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Keep the configuration as the run's parameters."""
        self._opened()["config"] = redact_secrets(config)

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Track the values."""
        run = self._opened()
        for name, value in values.items():
            converted = _converted(value)
            if converted is not None:
                run.track(converted, name=name, step=step)

    def flush(self) -> None:
        """Do nothing: what was tracked is in the repository."""

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the run's hash, once it has one."""
        return {} if self._hash is None else {_HASH: self._hash}

    def close(self) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def _opened(self) -> "aim.Run":
        if self._run is None:
            import aim  # noqa: PLC0415 - an extra

            if "://" not in self._repository:
                Path(self._repository).mkdir(parents=True, exist_ok=True)
            # The machine and the output of the process are not what was asked to be tracked.
            self._run = aim.Run(
                run_hash=self._hash,
                repo=self._repository,
                experiment=self._experiment,
                force_resume=True,
                system_tracking_interval=None,
                log_system_params=False,
                capture_terminal_logs=False,
            )
            self._hash = self._run.hash
        return self._run


def _converted(value: Tracked) -> Any:
    import aim  # noqa: PLC0415 - an extra

    match value:
        case Histogram():
            fits = len(value.counts) <= _MOST_BINS
            return aim.Distribution(hist=list(value.counts), bin_range=(value.low, value.high)) if fits else None
        case Text():
            return aim.Text(value.text)
        case Picture():
            from PIL import Image  # noqa: PLC0415 - an extra

            return aim.Image(Image.open(io.BytesIO(value.png)), format="png")
    return value


@final
class AimTrackerConfig(BaseModel):
    """Chooses Aim; needs the extra `aim`.

    Attributes:
        kind: The word that chooses this tracker.
        repository: Folder of the repository, relative to the run's folder, or the address of a server
            (`aim://host:port`).
        experiment: Runs of the same experiment are shown together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["aim"] = "aim"
    repository: str = "."
    experiment: str | None = None

    def check(self) -> None:
        """Refuse it if the package is missing.

        Raises:
            UserError: With the command that installs it.
        """
        check_extra("aim", extra=self.kind)

    def build(self, run_dir: Path) -> BackgroundTracker:
        """Make the tracker.

        Raises:
            UserError: If the package is missing.
        """
        self.check()
        place = self.repository if "://" in self.repository else str(run_dir / self.repository)
        return BackgroundTracker(
            lambda: AimTracker(place, experiment=self.experiment),
            name=self.kind,
            spool=run_dir / "trackers" / self.kind,
        )
