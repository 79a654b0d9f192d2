"""Earlier starts of a run, from its folder: guards against a start at step 0 that loses work.

The journal records the steps that were saved and the id of the run. Checkpoints that are missing, because their folder
is not mounted or another one is configured, must not restart a run silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from d9d_dist import UserError
from d9d_dist.errors import may_pass
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.report.run_history import JOURNAL, read_journal
from d9d_metrics import read_metrics
from d9d_state import StateError
from d9d_state.checkpoint.info import CheckpointInfo

_METRICS = "metrics.jsonl"


@final
@dataclass(frozen=True, slots=True)
class EarlierRun:
    """Progress of a run since its last start at step 0, from its journal.

    Attributes:
        completed: Last recorded completed step.
        saved: Last step whose checkpoint was complete; 0 if there was none.
        run_id: Id of the run in its checkpoints; `None` if unknown.
    """

    completed: int = 0
    saved: int = 0
    run_id: str | None = None


def read_earlier_run(folder: Path) -> EarlierRun:
    """Return the progress that the journal of a run folder records.

    Raises:
        UserError: If the journal exists, but cannot be read; `StateError` if that may pass.
    """
    completed = saved = 0
    run_id: str | None = None
    for record in _read_journal(folder):
        if record["event"] == "started":
            run_id = record.get("run_id", run_id)
            if not record["step"]:
                completed = saved = 0
            saved = max(saved, record["step"])
        saved = max(saved, record.get("saved", 0))
        completed = max(completed, record.get("step", 0))
    return EarlierRun(completed, saved, run_id)


def _read_journal(folder: Path) -> list[Mapping[str, Any]]:
    try:
        return read_journal(folder)
    except OSError as error:
        kind = StateError if may_pass(error) else UserError
        raise kind(
            f"{folder / JOURNAL} cannot be read: {error.strerror}; expected the journal of the run, or none. Check its "
            "permissions, or rename it."
        ) from None


def check_progress(config: TrainerConfig, checkpoints: object) -> None:
    """Raise `UserError` if a run has saved progress, but no checkpoint was found in the folder `checkpoints`."""
    found = None if config.run.from_scratch else _progress(config)
    if found is None:
        return
    raise UserError(
        f"the run in {config.run.dir} has progress ({found}), but {checkpoints} has no checkpoint; expected the run's "
        "checkpoints. Check that the folder is mounted, and --checkpoint.folder. Use --run.name for a new run, or "
        "--run.from_scratch true to train this run again from step 0; its figures and export are then renamed."
    )


def _progress(config: TrainerConfig) -> str | None:
    """Describe the evidence that a checkpoint was complete; `None` if there is none."""
    folder = config.run.dir
    if saved := read_earlier_run(folder).saved:
        return f"{JOURNAL}: step {saved} was saved"
    if (folder / "export").is_dir():
        return "export/ has a trained model"
    if not (folder / JOURNAL).is_file():
        last = _last_step(folder / _METRICS)
        if last >= config.checkpoint.every:
            return f"{_METRICS}: {last} steps"
    return None


def _last_step(metrics: Path) -> int:
    try:
        return max((int(record["step"]) for record in read_metrics(metrics)), default=0)
    except (OSError, ValueError):  # a missing or damaged file proves nothing
        return 0


def check_owner(config: TrainerConfig, info: CheckpointInfo) -> None:
    """Raise `UserError` if a checkpoint belongs to another run.

    The journal has the run id. Without a journal, the checkpoint's configuration must name the same run folder.
    """
    if config.run.adopt:
        return
    run_id = read_earlier_run(config.run.dir).run_id
    if run_id is not None:
        if info.run_id == run_id:
            return
        reason = f"of run {info.run_id}, but the run in {config.run.dir} is {run_id}"
    else:
        state: Any = info.state
        saved = state["config"]["run"]
        folder = Path(saved["folder"]) / saved["name"]
        if folder == config.run.dir:
            return
        reason = f"of the run in {folder}, but this run's folder is {config.run.dir}"
    raise UserError(
        f"{info.root} is a checkpoint {reason}; expected this run's checkpoints. Use another --checkpoint.folder or "
        "--run.name; or --run.adopt true to continue from this checkpoint."
    )


def keep_earlier_files(config: TrainerConfig) -> None:
    """Rename the figures and the export of a run that is trained again from step 0."""
    if _progress(config) is None:
        return
    for path in (config.run.dir / _METRICS, config.run.dir / "export"):
        if path.exists():
            number = 1
            while (aside := path.with_name(f"{path.stem}-earlier-{number}{path.suffix}")).exists():
                number += 1
            path.rename(aside)
