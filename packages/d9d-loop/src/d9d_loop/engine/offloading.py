"""Offloading of an engine's training state to host memory."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from d9d_dist import ModuleOffloader
from d9d_loop.event_bus import Events
from d9d_loop.events import StateOffloaded, StateOnloaded


@final
class StateOffloading:
    """Offloading of parameters, buffers, gradients and optimizer state, with its events. No collectives.

    Attributes:
        is_offloaded: True between `offload` and `onload`.

    Args:
        model: This rank's part of the model, including copies of shared parameters.
        optimizer: Optimizer of the model's parameters.
        events: Event bus for `StateOffloaded` and `StateOnloaded`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, events: Events) -> None:
        self._offloader, self._events = ModuleOffloader(model, optimizer), events
        self.is_offloaded = False

    @contextmanager
    def offloaded(self, step: int) -> Generator[None]:
        """Offload the state for the body. Emits `StateOnloaded` afterwards unless the body raises."""
        self._offloader.offload()
        self.is_offloaded = True
        try:
            self._after_offload(step)
            yield
        finally:
            self._offloader.onload()
            self.is_offloaded = False
        self._events.emit(StateOnloaded(step))

    def offload(self, step: int) -> None:
        """Offload the state until `onload`."""
        self._offloader.offload()
        self.is_offloaded = True
        self._after_offload(step)

    def onload(self, step: int) -> None:
        """Restore the state on the device: the same tensors, with bitwise equal values."""
        self._offloader.onload()
        self.is_offloaded = False
        self._events.emit(StateOnloaded(step))

    def _after_offload(self, step: int) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()
        self._events.emit(StateOffloaded(step))
