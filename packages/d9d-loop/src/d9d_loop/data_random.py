"""Random numbers that samples are made with: a function of the step, so that ranks with the same samples agree."""

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
    key = stream_key(seed, "data", step, dp_rank)
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    random.seed(key)
    torch.default_generator.manual_seed(key)
    if numpy:
        numpy.random.seed(key % 2**32)
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy:
            numpy.random.set_state(numpy_state)
