"""Check of a job against the newest checkpoint of its run, before a process group starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from pydantic import TypeAdapter
from torch import nn

from d9d_dist import UserError
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.data.sample_stream import SampleStream
from d9d_loop.engine.code_digest import BASE
from d9d_loop.engine.job_state import omits_frozen
from d9d_loop.job.earlier_run import check_owner, check_progress
from d9d_loop.job.job_check import checkpoint_folder
from d9d_loop.job.resume_settings import changes, describe, effect_of
from d9d_loop.optimizers.optimizer import OptimizerConfig, OptimizerSettings, optimizer_kinds
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_state import CheckpointStore, JsonValue, StateError, check_same_model
from d9d_state.checkpoint.info import CheckpointInfo

NEW_RUN = "or --run.name for a new run"


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """Completed part of a run: its optimizer steps, and the state of the data after them."""

    step: int = 0
    num_samples: int = 0
    cursor: Any = None


def find_checkpoint(config: TrainerConfig) -> CheckpointInfo | None:
    """Return the run's newest checkpoint with readable metadata. Damaged checkpoints are skipped on resume.

    Raises:
        UserError: If it is of another run, or there is no checkpoint, but the run folder has saved progress.
    """
    info = next(filter(_is_readable, CheckpointStore(checkpoint_folder(config)).complete()), None)
    if info is not None:
        check_owner(config, info)
        return info
    has_tiers = config.checkpoint.memory_every is not None or config.checkpoint.local_every is not None
    if not has_tiers and not _has_damaged(config):  # else the check is repeated after the search for a checkpoint
        check_progress(config, checkpoint_folder(config))
    return None


def _has_damaged(config: TrainerConfig) -> bool:
    """Return True if the folder of checkpoints is not empty: a damaged checkpoint is an error of the start."""
    folder = Path(checkpoint_folder(config))
    return folder.is_dir() and any(path.name.startswith("step-") for path in folder.iterdir())


def _is_readable(info: CheckpointInfo) -> bool:
    """Return True if the metadata of a checkpoint is readable."""
    try:
        return info.state is not None
    except StateError:
        return False


def progress_of(info: CheckpointInfo | None) -> Progress:
    """Return the progress of a run at a checkpoint; no progress without one."""
    if info is None:
        return Progress()
    state: Any = info.state
    data = state["parts"]["data"]
    return Progress(info.step, data["position"], data["stream"])


def check_data(info: CheckpointInfo, data_identity: JsonValue, config: TrainerConfig) -> None:
    """Raise `UserError` if the training data or their order differ from the checkpoint's, unless `run.adopt` is set."""
    state: Any = info.state
    lines = [describe(change) for change in changes(state["data_identity"], data_identity, "data")]
    if lines and not config.run.adopt:
        # Some samples would be skipped and others repeated.
        raise UserError(
            f"the run in {config.run.dir} was started with other training data, or with another order of the data:\n"
            + "\n".join(lines)
            + "\nA resumed run must continue the same stream. Use the same data and seed, --run.name for a new run, or "
            "--run.adopt true to continue at the same position of these data."
        )


def num_steps_of(config: TrainerConfig, stream: SampleStream, progress: Progress) -> int:
    """Return the number of steps of a job, of which the steps of `progress` are complete.

    Progress over finite data is counted in samples, so that a resumed job with another global batch size reads each
    remaining sample once.

    Raises:
        UserError: If the number of steps is unknown, or less than the number of completed steps. Also if the data have
            too few samples, or fewer than the job has already read.
    """
    steps = config.steps
    if stream.is_endless:
        if steps is None:
            raise UserError(
                "steps is missing, and the training data have no end; expected a number of steps or finite data. Set "
                "--steps, or --epochs 1 for one pass over a dataset, or pass epochs=1 to the stream."
            )
        available = steps
    else:
        available = _available_steps(config, stream, progress)
    steps = available if steps is None else steps
    if steps < progress.step and not config.evaluation.only:
        raise UserError(
            f"steps = {steps}, but the run in {config.run.dir} has already completed {progress.step}. "
            f"Use --steps {progress.step} or more to continue it, {NEW_RUN}."
        )
    return steps


def _available_steps(config: TrainerConfig, stream: SampleStream, progress: Progress) -> int:
    """Return the number of completed steps plus those for which finite data have samples left."""
    size = config.batch.global_size
    left = stream.num_batches(size, progress.cursor)
    available = progress.step + left
    if available == 0:
        raise UserError("the training data are empty; expected at least one sample. Check the path of the data.")
    if left == 0 and (count := stream.count()) < progress.num_samples and not config.evaluation.only:
        what = "the training data have" if config.epochs is None else f"epochs = {config.epochs} has"
        raise UserError(
            f"{what} {count} samples, but the run in {config.run.dir} has already read {progress.num_samples}; "
            f"expected at least as many. Use more epochs to continue it, {NEW_RUN}."
        )
    if config.steps is not None and config.steps > available:
        done = f"the {progress.step} completed steps and " if progress.step else ""
        raise UserError(
            f"steps = {config.steps}, but the finite training data have samples for {available} steps: "
            f"{done}{left} of batch.global_size = {size}; expected no more. Remove steps, or add "
            "epochs."
        )
    return available


def check_checkpoint(
    info: CheckpointInfo | None,
    config: TrainerConfig,
    model: nn.Module,
    *,
    has_optimizer: bool,
    code: Mapping[str, str],
) -> tuple[bool, list[str]]:
    """Check the newest readable checkpoint against the job.

    With `has_optimizer`, the caller passed an optimizer, which replaces the configured one. `code` has the digests of
    `source_digests`.

    Returns:
        True if the job needs its initial weights: if no checkpoint is readable, or if checkpoints contain only
        trainable parameters. And a line for each change since the checkpoint that affects the rest of the run.

    Raises:
        UserError: If the checkpoint is of another model, or a setting differs that must be the same.
    """
    if info is None:
        return True, []
    trainable_only = omits_frozen(info)
    check_same_model(info, model, trainable_only=trainable_only)
    state: Any = info.state
    before, now = state["config"], redact_secrets(config.model_dump(mode="json"))
    if has_optimizer:
        before, now = ({key: each[key] for key in each if key != "optimizer"} for each in (before, now))
    found = list(changes(before, now, known_only=True))
    if wrong := [change for change in found if effect_of(change[0]) == "error"]:
        names = " and ".join(name for name, _, _ in wrong)
        raise UserError(
            f"the run in {config.run.dir} has completed {info.step} steps with other settings:\n"
            + "\n".join(map(describe, wrong))
            + f"\nA resumed run must have the same {names}. Restore the values, {NEW_RUN}, which may start from the "
            "exported weights (--initial_weights)."
        )
    if not has_optimizer and any(name.startswith("optimizer.") for name, _, _ in found):
        _check_optimizers(before["optimizer"], config.optimizer, model)
    lines = [describe(change) for change in found if effect_of(change[0]) == "reported"]
    changed = [name for name, _, _ in changes(state["code"], dict(code), known_only=True)]
    if BASE in changed:
        raise UserError(
            f"{BASE} have changed since {info.root} was saved; expected those of adapters/. Restore them, {NEW_RUN}."
        )
    lines += [f"  {name} has changed" for name in changed]
    return trainable_only or config.checkpoint.trainable_only, lines


def _check_optimizers(before: JsonValue, now: OptimizerSettings, model: nn.Module) -> None:
    """Raise `UserError` if changed groups give a parameter another kind of optimizer, for which there is no state."""
    saved: OptimizerSettings = TypeAdapter(OptimizerConfig).validate_python(before)
    kinds = [optimizer_kinds(each, model) for each in (saved, now)]
    if wrong := [
        f"  {name} was updated by {kind}, and now by {kinds[1][name]}"
        for name, kind in kinds[0].items()
        if kind != kinds[1][name]
    ]:
        raise UserError(
            "optimizer.groups give parameters another optimizer than the checkpoint has state for:\n"
            + "\n".join(wrong[:8])
            + f"\nA resumed run must have the same optimizer for each parameter. Restore the groups, {NEW_RUN}."
        )
