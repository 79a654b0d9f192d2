"""Offloads training state to host memory, to free device memory for other work such as rollouts."""

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
class Sleep:
    """Offloads parameters, buffers, gradients and optimizer state to host memory for the body of a `with` statement.

    Args:
        model: The trained model. For a pipeline, all stages of this rank, including their copies of shared parameters.
        optimizer: Optimizer of the model's parameters.
        events: Event bus that emits `StateOffloaded` after offloading and `StateOnloaded` after onloading.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, events: Events) -> None:
        self._offloader = ModuleOffloader(model, optimizer)
        self._events = events

    @contextmanager
    def __call__(self, step: int) -> Generator[None]:
        """Offload the state for the body of a `with` statement, and onload it afterwards. No collectives.

        Use it between two steps. `StateOnloaded` is not emitted if the body raises.

        Args:
            step: Number of completed steps, for the events.

        Raises:
            UserError: If the state is already offloaded.
        """
        self._offloader.offload()
        try:
            if torch.accelerator.is_available():
                torch.accelerator.memory.empty_cache()
            self._events.emit(StateOffloaded(step))
            yield
        finally:
            self._offloader.onload()
        self._events.emit(StateOnloaded(step))
