"""Random numbers of their own for what runs beside the training, which then draws the same ones with it and without."""

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch

from d9d_dist import stream_key


@contextmanager
def own_random(*parts: str | int, device: bool = False) -> Generator[None]:
    """Let Python, NumPy (where it is in use) and torch draw from a stream of their own.

    Args:
        parts: What the stream is a function of; equal ones give equal numbers, on every rank and in every run.
        device: Whether that holds for the accelerator, too; by default, it is left as it was.
    """
    key = stream_key(*parts)
    numpy = sys.modules.get("numpy")
    has_accelerator = device and torch.accelerator.is_available()
    numpy_state = numpy.random.get_state() if numpy else None
    device_state = torch.get_device_module().get_rng_state() if has_accelerator else None
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    random.seed(key)
    torch.default_generator.manual_seed(key)
    if numpy:
        numpy.random.seed(key % 2**32)
    if has_accelerator:
        torch.get_device_module().manual_seed(key)
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        if has_accelerator:
            torch.get_device_module().set_rng_state(device_state)
