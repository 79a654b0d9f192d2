"""Local tiers of a job's checkpoints: memory and local disks of the hosts."""

import hashlib
import os
from pathlib import Path

from d9d_dist import UserError
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_state import LocalTier

MEMORY = Path("/dev/shm")  # noqa: S108 - Linux' file system for shared memory


def local_tiers(config: TrainerConfig) -> list[LocalTier]:
    """Return the configured tiers, memory first. Each run has folders of its own in them."""
    checkpoint, run = config.checkpoint, os.fsencode(config.run.dir.absolute())
    name = f"d9d-{os.getuid()}-{hashlib.sha256(run).hexdigest()[:16]}"
    tiers: list[LocalTier] = []
    if checkpoint.memory_every is not None:
        tiers.append(LocalTier(MEMORY / name, every=checkpoint.memory_every, replicas=checkpoint.replicas))
    if checkpoint.local_every is not None and checkpoint.local_folder is not None:
        folder = checkpoint.local_folder / name
        tiers.append(LocalTier(folder, every=checkpoint.local_every, replicas=checkpoint.replicas))
    return tiers


def check_local_tiers(config: TrainerConfig) -> None:
    """Raise `UserError` if a setting of the local tiers has no effect."""
    checkpoint = config.checkpoint
    if (checkpoint.local_every is None) != (checkpoint.local_folder is None):
        given, missing = ("local_folder", "local_every")[:: 1 if checkpoint.local_every is None else -1]
        raise UserError(
            f"got checkpoint.{given} without checkpoint.{missing}; expected both or neither. Set {missing}, or remove "
            f"{given}."
        )
    for key, every in (("memory_every", checkpoint.memory_every), ("local_every", checkpoint.local_every)):
        if every is not None and every >= checkpoint.every:
            raise UserError(
                f"checkpoint.{key} = {every} is not less than checkpoint.every = {checkpoint.every}, so the local "
                "saves are never newer; expected fewer steps. Change one of the two."
            )
    if checkpoint.memory_every is None and checkpoint.local_every is None and checkpoint.replicas != 1:
        raise UserError(
            f"checkpoint.replicas = {checkpoint.replicas} has no effect; expected memory_every or local_every beside "
            "it. Set one of them, or remove replicas."
        )
