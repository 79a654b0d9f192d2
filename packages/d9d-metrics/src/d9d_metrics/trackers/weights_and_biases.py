"""Keeps a run's values in Weights & Biases, online or in a folder that `wandb sync` uploads later."""

import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from d9d_metrics.trackers._extras import check_extra
from d9d_metrics.trackers.background import BackgroundTracker
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.values import Histogram, Picture, Text, Tracked

if TYPE_CHECKING:
    import wandb

_ID = "wandb_run_id"


@final
class WandbTracker:
    """Logs to a run of Weights & Biases, which is opened by the first call that needs it.

    Its steps never go back: values of steps that a resumed job takes again are those of the first time. The account's
    key comes from where W&B looks for it (`WANDB_API_KEY`, `wandb login`), never from a configuration.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        project: str,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: tuple[str, ...] = (),
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        """Choose a new run.

        Args:
            run_dir: Where W&B keeps its files, in a folder `wandb`.
            project: Name of the project.
            entity: User or team; the account's default if not given.
            name: Shown for the run; W&B invents one if not given.
            group: Runs of the same group are shown together.
            tags: Words to find the run by.
            mode: `"offline"` writes files alone.
        """
        self._run_dir, self._mode = run_dir, mode
        self._options: dict[str, Any] = {"project": project, "entity": entity, "name": name, "group": group}
        self._options["tags"] = list(tags)
        self._run_id = secrets.token_hex(6)
        self._run: wandb.Run | None = None

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Choose the run that the state names, instead of a new one."""
        self._run_id = str(state.get(_ID, self._run_id))

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Make the configuration that of the run."""
        self._opened().config.update(redact_secrets(config), allow_val_change=True)

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Log the values; text is logged as it is."""
        with tempfile.TemporaryDirectory() as folder:
            logged = {name: _converted(value, Path(folder)) for name, value in values.items()}
            self._opened().log(logged, step=step)

    def flush(self) -> None:
        """Do nothing: W&B has a process of its own that writes, which survives this one."""

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the run's id."""
        return {_ID: self._run_id}

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _opened(self) -> "wandb.Run":
        if self._run is None:
            import wandb  # noqa: PLC0415 - an extra

            self._run_dir.mkdir(parents=True, exist_ok=True)
            # Output of the process, code and the machine are not what was asked to be tracked.
            settings = wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True)
            self._run = wandb.init(
                id=self._run_id,
                resume="allow" if self._mode == "online" else None,
                dir=str(self._run_dir),
                mode=self._mode,
                reinit="create_new",
                settings=settings,
                **self._options,
            )
        return self._run


def _converted(value: Tracked, folder: Path) -> Any:
    import wandb  # noqa: PLC0415 - an extra

    match value:
        case Histogram():
            import numpy as np  # noqa: PLC0415 - an extra

            return wandb.Histogram(np_histogram=(np.asarray(value.counts), np.asarray(value.edges)))
        case Text():
            return value.text
        case Picture():
            file = folder / f"{secrets.token_hex(4)}.png"
            file.write_bytes(value.png)
            return wandb.Image(str(file))
    return value


@final
class WandbTrackerConfig(BaseModel):
    """Chooses Weights & Biases; needs the extra `wandb`.

    Attributes:
        kind: The word that chooses this tracker.
        project: Name of the project.
        entity: User or team; the account's default if null.
        name: Shown for the run; W&B invents one if null.
        group: Runs of the same group are shown together.
        tags: Words to find the run by.
        mode: `"offline"` writes files that `wandb sync` uploads later.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["wandb"] = "wandb"
    project: str = Field(min_length=1)
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"

    def check(self) -> None:
        """Refuse it if the package is missing.

        Raises:
            UserError: With the command that installs it.
        """
        check_extra("wandb", extra=self.kind)

    def build(self, run_dir: Path) -> BackgroundTracker:
        """Make the tracker.

        Raises:
            UserError: If the package is missing.
        """
        self.check()
        options = self.model_dump(exclude={"kind"})
        return BackgroundTracker(
            lambda: WandbTracker(run_dir, **options), name=self.kind, spool=run_dir / "trackers" / self.kind
        )
