"""Sends a training to sleep, so that something else may use the device for a while: rollouts, for instance."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from d9d_dist import ModuleOffloader
from d9d_loop.event_bus import Events
from d9d_loop.events import Slept, Woken


@final
class Sleep:
    """Keeps parameters, buffers, gradients and the optimizer's state in host memory while the training sleeps.

    Args:
        model: The model under training: of a pipeline, all stages of this rank, with what they have of one another's.
        optimizer: Over its parameters.
        events: Told of `Slept` and `Woken`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, events: Events) -> None:
        self._offloader = ModuleOffloader(model, optimizer)
        self._events = events

    @contextmanager
    def __call__(self, step: int) -> Generator[None]:
        """Sleep for the body of a `with` statement, between two steps. No collectives.

        Args:
            step: Steps done.

        Raises:
            UserError: If the training sleeps already.
        """
        self._offloader.offload()
        try:
            if torch.accelerator.is_available():
                torch.accelerator.memory.empty_cache()
            self._events.emit(Slept(step))
            yield
        finally:
            self._offloader.onload()
        self._events.emit(Woken(step))
