"""Offloading of training state to host memory, to free device memory for other work such as rollouts."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from d9d_dist import ModuleOffloader
from d9d_loop.event_bus import Events
from d9d_loop.events import StateOffloaded, StateOnloaded


@contextmanager
def offloaded(offloader: ModuleOffloader, events: Events, *, step: int) -> Generator[None]:
    """Offload parameters, buffers, gradients and optimizer state for the body, between two steps. No collectives.

    `StateOffloaded` is emitted after offloading, and `StateOnloaded` after onloading unless the body raises. Raises
    `UserError` if the state is already offloaded.
    """
    offloader.offload()
    try:
        if torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()
        events.emit(StateOffloaded(step))
        yield
    finally:
        offloader.onload()
    events.emit(StateOnloaded(step))
