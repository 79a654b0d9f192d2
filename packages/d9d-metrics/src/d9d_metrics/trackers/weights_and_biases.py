"""Weights & Biases tracker, online or to a folder that `wandb sync` uploads later."""

import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import Field, JsonValue

from d9d_metrics.trackers._extras import ExtraTrackerConfig, require_package
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Histogram, Html, Image, Text, Tracked

if TYPE_CHECKING:
    import wandb

_ID = "wandb_run_id"


@final
class WandbTracker(Tracker):
    """Tracker that logs to a Weights & Biases run, which is opened when first needed.

    W&B writes values in its own process, which survives this one. Its steps never decrease, so steps that run again
    after a resume keep their first values. W&B reads the API key from `WANDB_API_KEY` or `wandb login`.
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
        """Configure a new run, with files in `run_dir/wandb`; see `WandbTrackerConfig` for the other arguments.

        Raises `UserError` if the package wandb is missing.
        """
        require_package("wandb")
        self._run_dir, self._mode = run_dir, mode
        self._options: dict[str, Any] = {"project": project, "entity": entity, "name": name, "group": group}
        self._options["tags"] = list(tags)
        self._run_id = secrets.token_hex(6)
        self._run: wandb.Run | None = None

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Use the run id of the state, if it has one."""
        self._run_id = str(state.get(_ID, self._run_id))

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Set the configuration of the run, with secrets redacted."""
        self._get_run().config.update(redact_secrets(config), allow_val_change=True)

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Log the values of a step; text is logged as a string."""
        with tempfile.TemporaryDirectory() as folder:
            logged = {name: _converted(value, Path(folder)) for name, value in values.items()}
            self._get_run().log(logged, step=step)

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the run id."""
        return {_ID: self._run_id}

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _get_run(self) -> "wandb.Run":
        if self._run is None:
            import wandb

            self._run_dir.mkdir(parents=True, exist_ok=True)
            # Disable W&B's own logging of console output, code and git state.
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
    import wandb

    match value:
        case Histogram():
            import numpy as np  # noqa: PLC0415 - an extra

            return wandb.Histogram(np_histogram=(np.asarray(value.counts), np.asarray(value.edges)))
        case Text():
            return value.text
        case Image():
            file = folder / f"{secrets.token_hex(4)}.png"
            file.write_bytes(value.png)
            return wandb.Image(str(file))
        case Html():
            return wandb.Html(value.html, inject=False, data_is_not_path=True)
    return value


@final
class WandbTrackerConfig(ExtraTrackerConfig):
    """Configuration of Weights & Biases; needs the extra `wandb`.

    Attributes:
        entity: User or team; the account's default if null.
        name: Display name of the run; the name of the run folder if null.
        mode: `"offline"` writes files that `wandb sync` uploads later.
    """

    kind: Literal["wandb"] = "wandb"
    project: str = Field(min_length=1)
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"

    def _opener(self, run_dir: Path) -> Callable[[], WandbTracker]:
        options = self.model_dump(exclude={"kind", "name"})
        return lambda: WandbTracker(run_dir, name=self.name or run_dir.resolve().name, **options)
