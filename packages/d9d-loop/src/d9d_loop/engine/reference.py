"""Frozen reference of a model: the model without its adapters, or a second set of weights in host memory.

Its buffers, such as expert biases, are the initial ones in both cases.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from d9d_dist import UserError, local_tensor
from d9d_dist.data_parallel.gathered_parameters import free_all_gathered
from d9d_dist.values.buffer_values import BufferValues

Reference: TypeAlias = Callable[[nn.Module], AbstractContextManager[object]] | Literal["initial"]
"""Reference of an engine: a function such as `d9d_peft.adapters_off`, or "initial" to copy the initial weights."""


def reference_context(
    reference: Reference | None, model: nn.Module, *, whole: nn.Module
) -> Callable[[], AbstractContextManager[object]] | None:
    """Return a function that makes the model act as its reference in a context; `None` without a reference.

    The reference has the current buffers of `whole`, the model with the copies of shared parameters; with "initial",
    also its current parameters. Raises `UserError` for an unknown reference.
    """
    if reference is None:
        return None
    if reference != "initial" and not callable(reference):
        raise UserError(
            f'reference = {reference!r}; expected None, "initial", or a function such as d9d_peft.adapters_off.'
        )
    buffers = BufferValues(whole, device=torch.device("cpu"))
    enter = ReferenceWeights(whole).swapped_in if reference == "initial" else partial(reference, model)

    @contextmanager
    def acting() -> Generator[None]:
        own = BufferValues(whole)
        buffers.restore()
        try:
            with enter():
                yield
        finally:
            own.restore()

    return acting


@final
class ReferenceWeights:
    """Copies of this rank's trainable parameters in host memory, pinned on accelerators. No collectives.

    Frozen parameters have no copies: the reference shares them.

    Args:
        model: This rank's part of the model. The reference gets a copy of its current values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies = [
            (parameter, _host_copy(parameter)) for parameter in model.parameters() if parameter.requires_grad
        ]

    @contextmanager
    def swapped_in(self) -> Generator[None]:
        """Copy the reference's values into the model for the body, and restore the model's own values on exit."""
        own = [_host_copy(parameter) for parameter, _ in self._copies]
        try:
            self._set([copy for _, copy in self._copies])
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        free_all_gathered(self._model)
        for (parameter, _), value in zip(self._copies, values, strict=True):
            local_tensor(parameter).copy_(value, non_blocking=True)
        if torch.accelerator.is_available():  # the copies may be freed after this
            torch.accelerator.synchronize()


def _host_copy(parameter: nn.Parameter) -> Tensor:
    local = local_tensor(parameter.detach())
    copy = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.device.type != "cpu")
    return copy.copy_(local)
