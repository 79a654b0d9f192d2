"""Frozen reference of a model: a second set of weights, in host memory between its uses."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from d9d_dist import local_tensor
from d9d_loop.optimizers.averaging import free_gathered_parameters


@final
class ReferenceWeights:
    """Copies of this rank's trainable parameters in host memory, pinned on accelerators. No collectives.

    Frozen parameters have no copies: the reference shares them.

    Args:
        model: This rank's part of the model, which has the values of the reference now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies = [
            (parameter, _host_copy(parameter)) for parameter in model.parameters() if parameter.requires_grad
        ]

    @contextmanager
    def swapped_in(self) -> Generator[None]:
        """Copy the reference's values into the model for the body; then restore the model's own values bit for bit."""
        own = [_host_copy(parameter) for parameter, _ in self._copies]
        try:
            self._set([copy for _, copy in self._copies])
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        free_gathered_parameters(self._model)
        for (parameter, _), value in zip(self._copies, values, strict=True):
            local_tensor(parameter).copy_(value, non_blocking=True)
        if torch.accelerator.is_available():  # the copies may be freed after this
            torch.accelerator.synchronize()


def _host_copy(parameter: nn.Parameter) -> Tensor:
    local = local_tensor(parameter.detach())
    copy = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.device.type != "cpu")
    return copy.copy_(local)
