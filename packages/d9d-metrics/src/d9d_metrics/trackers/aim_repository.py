"""Aim tracker, for a repository in a folder or on a server."""

import io
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import JsonValue

from d9d_metrics.trackers._extras import ExtraTrackerConfig, require_package
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Histogram, Html, Image, Text, Tracked

if TYPE_CHECKING:
    import aim

_HASH = "aim_run_hash"
_MAX_BINS = 512


@final
class AimTracker(Tracker):
    """Tracker that logs to an Aim run, which is opened when first needed. Aim writes values when they are logged.

    Logging a step again replaces its values. Aim does not support histograms of more than 512 bins: they are skipped.
    Pages are artifacts of the run, `NAME/STEP.html`, in the folder `artifacts` of the repository, not of a server.
    """

    def __init__(self, repository: str, *, experiment: str | None = None, name: str | None = None) -> None:
        """Configure a new run; it is not opened yet.

        `repository` is a folder, created if needed, or the address of a server, `aim://host:port`. Raises `UserError`
        if the package aim is missing.
        """
        require_package("aim")
        self._repository, self._experiment, self._name = repository, experiment, name
        self._hash: str | None = None
        self._run: aim.Run | None = None

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Open the run of the state's hash, or a new run if the state has none."""
        if _HASH in state:
            self._hash = str(state[_HASH])
        self._get_run()

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Set the configuration as the run's parameters, with secrets redacted."""
        self._get_run()["config"] = redact_secrets(config)

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Log the values of a step."""
        run = self._get_run()
        for name, value in values.items():
            if isinstance(value, Html):
                self._log_page(run, f"{name}/{step}.html", value.html)
            elif (converted := _converted(value)) is not None:
                run.track(converted, name=name, step=step)

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the run's hash; empty if the run was not opened yet."""
        return {} if self._hash is None else {_HASH: self._hash}

    def close(self) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def _log_page(self, run: "aim.Run", name: str, html: str) -> None:
        if "://" in self._repository:
            return
        run.set_artifacts_uri(Path(self._repository, "artifacts").resolve().as_uri())
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder, "page.html")).write_text(html, encoding="utf-8")
            run.log_artifact(str(path), name, block=True)

    def _get_run(self) -> "aim.Run":
        if self._run is None:
            import aim

            if "://" not in self._repository:
                Path(self._repository).mkdir(parents=True, exist_ok=True)
            # Aim measures the host every ten seconds; disable its own logging of system parameters and terminal output.
            self._run = aim.Run(
                run_hash=self._hash,
                repo=self._repository,
                experiment=self._experiment,
                force_resume=True,
                log_system_params=False,
                capture_terminal_logs=False,
            )
            self._hash = self._run.hash
            if self._name is not None:
                self._run.name = self._name
        return self._run


def _converted(value: Tracked) -> Any:
    import aim

    match value:
        case Histogram():
            fits = len(value.counts) <= _MAX_BINS
            return aim.Distribution(hist=list(value.counts), bin_range=(value.low, value.high)) if fits else None
        case Text():
            return aim.Text(value.text)
        case Image():
            from PIL import Image as PilImage  # noqa: PLC0415 - an extra

            return aim.Image(PilImage.open(io.BytesIO(value.png)), format="png")
    return value


@final
class AimTrackerConfig(ExtraTrackerConfig):
    """Configuration of Aim; needs the extra `aim`.

    Attributes:
        repository: Folder of the repository, relative to the run folder, or the address of a server
            (`aim://host:port`). By default, the parent folder of the run folders has one repository for all runs.
        name: Display name of the run; the name of the run folder if null.
    """

    kind: Literal["aim"] = "aim"
    repository: str = ".."
    experiment: str | None = None
    name: str | None = None

    def _opener(self, run_dir: Path) -> Callable[[], AimTracker]:
        place = self.repository if "://" in self.repository else str((run_dir / self.repository).resolve())
        name = self.name or run_dir.resolve().name
        return lambda: AimTracker(place, experiment=self.experiment, name=name)
