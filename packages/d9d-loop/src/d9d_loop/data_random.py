"""Random numbers that samples are made with: a function of where they are, so that ranks with equal samples agree."""

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch

from d9d_dist import stream_key


@contextmanager
def data_random(seed: int, *, step: int, dp_rank: int) -> Generator[None]:
    """Let Python, NumPy (where it is in use) and torch on the CPU draw from a stream of their own in here.

    The ranks of a pipeline, and of tensor and context parallelism, each read the same samples; what datasets and
    collate functions draw has to be the same too. What the model draws from is left as it was.

    Args:
        seed: The seed of the job.
        step: Steps done before the one that the samples are for.
        dp_rank: Which data-parallel rank they are for.
    """
    with _drawing_from(stream_key(seed, "data", step, dp_rank)):
        yield


@contextmanager
def position_random(seed: int, *, position: int) -> Generator[None]:
    """The same for the samples from a position of the global order on, on whichever rank they are read.

    Args:
        seed: The seed of the job.
        position: Position of the first sample.
    """
    with _drawing_from(_position_key(seed, position)):
        yield


def seed_data_random(seed: int, *, position: int) -> None:
    """Let a process that only reads samples draw what `position_random` would let it draw."""
    _seed_all(_position_key(seed, position))


def _position_key(seed: int, position: int) -> int:
    return stream_key(seed, "data at", position)


@contextmanager
def _drawing_from(key: int) -> Generator[None]:
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    _seed_all(key)
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy and numpy_state is not None:
            numpy.random.set_state(numpy_state)


def _seed_all(key: int) -> None:
    random.seed(key)
    torch.default_generator.manual_seed(key)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(key % 2**32)
