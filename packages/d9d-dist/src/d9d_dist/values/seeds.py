"""Seeding of each rank from the job's seed, so that dropout differs only if ranks compute different activations."""

import hashlib
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from d9d_dist.groups.context import DistributedContext

# Axes of the "batch" mesh. Ranks that differ on one of them compute different activations.
_AXES = ("pp", "dp", "cp")


def stream_key(*parts: str | int) -> int:
    """Return a 63-bit key that depends only on its parts, equal on every machine and in every run."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int, ctx: DistributedContext, *, step: int = 0) -> None:
    """Seed Python, NumPy (if imported) and torch on every device.

    Ranks with different samples, tokens or layers get different seeds; tensor-parallel ranks get equal seeds. `step` is
    mixed into the seed so that a resumed job does not repeat random numbers.
    """
    seed_generators(stream_key(seed, step, *(ctx.coordinate("batch", axis) for axis in _AXES)))


def rank_role(ctx: DistributedContext) -> dict[str, list[int]]:
    """Return this rank's part in the computation: its coordinate and the axis size, for each of pp, dp, cp and tp.

    Save it with the state of a rank, such as its random states. Restore this state only on the rank with the same role:
    on another mesh, the same rank number may have other samples, tokens or layers.
    """
    return {axis: [ctx.coordinate("batch", axis), ctx.size("batch", axis)] for axis in (*_AXES, "tp")}


def seed_generators(seed: int, *, device: bool = True) -> None:
    """Seed the generators of Python, NumPy (if imported) and torch, on every device or only on the CPU."""
    # Without an accelerator `torch.manual_seed` formats a stack trace per device type: milliseconds.
    has_device = device and torch.accelerator.is_available()
    (torch.manual_seed if has_device else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


class HostRandom(NamedTuple):
    """Random states of Python and, if it is imported, of NumPy."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Self:
        """Return the current states."""
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), numpy.random.get_state() if numpy else None)

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def reset_of(value: Any) -> Callable[[], object] | None:
    """Return a function that sets a random generator to its current state; None for another value."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator) or (numpy and isinstance(value, numpy.random.RandomState)):
        return partial(value.set_state, value.get_state())
    if numpy and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None
