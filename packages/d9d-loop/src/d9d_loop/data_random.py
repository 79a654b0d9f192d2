"""Random numbers that samples are made with: a function of where they are, so that ranks with equal samples agree."""

import pickle
import random
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from d9d_dist import UserError, stream_key


@contextmanager
def position_random(seed: int, *, position: int) -> Generator[None]:
    """Let Python, NumPy (where it is in use) and torch on the CPU draw from a stream of their own in here.

    The ranks of a pipeline, and of tensor and context parallelism, each read the same samples; what datasets and
    collate functions draw has to be the same too, on whichever rank they are read. What the model draws from is left
    as it was.

    Args:
        seed: The seed of the job.
        position: Position in the global order of the first of the samples.
    """
    before = _states()
    seed_data_random(seed, position=position)
    try:
        yield
    finally:
        random.setstate(before.python)
        torch.default_generator.set_state(before.torch)
        if before.numpy is not None:
            sys.modules["numpy"].random.set_state(before.numpy)


def seed_data_random(seed: int, *, position: int) -> None:
    """Let a process that only reads samples draw what `position_random` would let it draw."""
    key = stream_key(seed, "data at", position)
    random.seed(key)
    torch.default_generator.manual_seed(key)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(key % 2**32)


def check_draws_nothing(read: Callable[[], object]) -> None:
    """Check that no random numbers are drawn by reading data that are said to need none.

    They are read twice if some were: another thread, such as a tracker's, may have drawn them the first time.

    Raises:
        UserError: If some were drawn both times.
    """
    drawn = _drawn_by(read) and _drawn_by(read)
    if drawn:
        raise UserError(
            f"reading a batch drew random numbers from {' and '.join(drawn)}; expected none, since the data provider "
            "has draws = False. Set it to True, so that what samples draw follows from their position."
        )


def _drawn_by(read: Callable[[], object]) -> list[str]:
    before = _states()
    read()
    after = _states()
    drawn = {
        "NumPy": before.numpy is not None and pickle.dumps(before.numpy) != pickle.dumps(after.numpy),
        "Python": before.python != after.python,
        "torch": not torch.equal(before.torch, after.torch),
    }
    return [name for name, is_drawn in drawn.items() if is_drawn]


class _States(NamedTuple):
    numpy: Any
    python: Any
    torch: torch.Tensor


def _states() -> _States:
    numpy = sys.modules.get("numpy")
    return _States(numpy and numpy.random.get_state(), random.getstate(), torch.default_generator.get_state())
