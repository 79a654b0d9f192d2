"""Reactions of a job to its evaluations: early stopping, and learning rates that fall on a plateau.

Both are functions of the evaluations so far; their state is part of the job's `Record`.
"""

from d9d_loop.config.trainer_config import PlateauConfig, TrainerConfig, WatchedConfig
from d9d_loop.engine.job_state import Patience, Record


def react(record: Record, config: TrainerConfig) -> str | None:
    """Update a record after its evaluation; return why the job ends now, or `None`."""
    if (plateau := config.plateau) is not None and _is_plateau(record, plateau):
        record.rate_factor = max(record.rate_factor * plateau.factor, plateau.min_factor)
    if (stopping := config.early_stopping) is None:
        return None
    count = record.early_stopping
    _count(count, record, stopping)
    if count.waited < stopping.patience:
        return None
    best = "none" if count.best is None else f"{count.best:g}"
    return f"{stopping.by} has not improved in {count.waited} evaluations; the best value is {best}."


def _is_plateau(record: Record, plateau: PlateauConfig) -> bool:
    """Count an evaluation as torch's `ReduceLROnPlateau` does; return True if the learning rate is reduced now."""
    count = record.plateau
    _count(count, record, plateau)
    if count.cooldown > 0:
        count.cooldown, count.waited = count.cooldown - 1, 0
    if count.waited <= plateau.patience:
        return False
    count.cooldown, count.waited = plateau.cooldown, 0
    return True


def _count(count: Patience, record: Record, watched: WatchedConfig) -> None:
    """Count an evaluation: its value is the best one so far or, such as NaN, one more without improvement."""
    value, sign = record.evaluation[watched.by], -1 if watched.higher_is_better else 1
    is_first = count.best is None and value == value  # noqa: PLR0124 - no NaN
    if is_first or (count.best is not None and sign * value < sign * count.best - watched.min_delta):
        count.best, count.waited = value, 0
    else:
        count.waited += 1
