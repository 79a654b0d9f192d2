"""One seed for a job; each rank derives its own, so that dropout differs only where ranks see different data."""

import hashlib
import random
import sys

import torch

from d9d_dist.context import DistributedContext

# Ranks that differ on one of these axes compute different activations; ranks that differ on tp compute the same ones.
_AXES = ("pp", "dp_replicate", "dp_shard", "cp_shard", "cp_replicate")


def stream_key(*parts: str | int) -> int:
    """A 63-bit key that is a function of its parts, equal on every machine and in every run."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int, ctx: DistributedContext, *, step: int = 0) -> None:
    """Seed Python, NumPy (where it is in use) and torch on every device.

    Ranks that hold different samples, tokens or layers get different seeds; tensor-parallel ranks get equal ones.

    Args:
        seed: The seed of the job.
        ctx: Tells this rank's coordinates.
        step: A position in the job, mixed in, so that a job that resumes on another mesh does not repeat old numbers.
    """
    rank_seed = stream_key(seed, step, *(ctx.coordinate("regular", axis) for axis in _AXES))
    random.seed(rank_seed)
    torch.manual_seed(rank_seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(rank_seed % 2**32)
