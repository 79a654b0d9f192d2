"""Local tiers of a job's or an engine's checkpoints: memory and local disks of the hosts."""

import hashlib
import os
from pathlib import Path

from d9d_dist import UserError
from d9d_loop.config.trainer_config import LocalTierConfig
from d9d_state import LocalTier

MEMORY = Path("/dev/shm")  # noqa: S108 - Linux' file system for shared memory


def local_tiers(config: LocalTierConfig, run: Path) -> list[LocalTier]:
    """Return the configured local tiers of a run, memory first. Each run has its own folder in each tier."""
    name = f"d9d-{os.getuid()}-{hashlib.sha256(os.fsencode(run.absolute())).hexdigest()[:16]}"
    return [
        LocalTier(folder / name, every=every, replicas=config.replicas)
        for folder, every in ((MEMORY, config.memory_every), (config.local_folder, config.local_every))
        if folder is not None and every is not None
    ]


def check_local_tiers(config: LocalTierConfig, *, section: str, every: int | None = None) -> None:
    """Raise `UserError` if a setting of the local tiers in a section of the configuration has no effect.

    `every` is the number of steps between checkpoints; `None` if the caller decides when to save.
    """
    if (config.local_every is None) != (config.local_folder is None):
        given, missing = ("local_folder", "local_every")[:: 1 if config.local_every is None else -1]
        raise UserError(
            f"got {section}.{given} without {section}.{missing}; expected both or neither. Set {missing}, or remove "
            f"{given}."
        )
    for key, steps in (("memory_every", config.memory_every), ("local_every", config.local_every)):
        if steps is not None and every is not None and steps >= every:
            raise UserError(
                f"{section}.{key} = {steps} is not less than {section}.every = {every}, so these "
                "saves are never newer than a checkpoint; expected fewer steps. Change one of the two."
            )
    if config.memory_every is None and config.local_every is None and config.replicas != 1:
        raise UserError(
            f"{section}.replicas = {config.replicas} has no effect without memory_every or local_every. Set one of "
            "them, or remove replicas."
        )
