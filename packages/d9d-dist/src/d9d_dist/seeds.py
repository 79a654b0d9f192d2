"""Seeding of each rank from the job's seed, so that dropout differs only if ranks compute different activations."""

import hashlib
import random
import sys

import torch

from d9d_dist.context import DistributedContext

# Ranks that differ on one of these axes compute different activations. Ranks that differ only on tp do not.
_AXES = ("pp", "dp_replicate", "dp_shard", "cp_shard", "cp_replicate")


def stream_key(*parts: str | int) -> int:
    """Return a 63-bit key that depends only on its parts, equal on every machine and in every run."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int, ctx: DistributedContext, *, step: int = 0) -> None:
    """Seed Python, NumPy (if imported) and torch on every device.

    Ranks with different samples, tokens or layers get different seeds; tensor-parallel ranks get equal seeds. `step` is
    mixed into the seed so that a resumed job does not repeat random numbers.
    """
    seed_generators(stream_key(seed, step, *(ctx.coordinate("regular", axis) for axis in _AXES)))


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy (if imported) and torch on every device."""
    # Without an accelerator `torch.manual_seed` formats a stack trace per device type: milliseconds.
    seed_torch = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed_torch(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
