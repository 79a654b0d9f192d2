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


def check_reference(reference: object) -> None:
    """Raise `UserError` unless a reference is None, "initial", or a function."""
    if reference not in (None, "initial") and not callable(reference):
        raise UserError(
            f'reference = {reference!r}; expected None, "initial", or a function such as d9d_peft.adapters_off.'
        )


@final
class FrozenReference:
    """Context manager factory: inside the context, the model acts as its reference. No collectives.

    The reference has the current buffers of `whole`, the model with the copies of shared parameters; with "initial",
    also its current parameters.

    Raises:
        UserError: See `check_reference`.
    """

    def __init__(self, reference: Reference, model: nn.Module, *, whole: nn.Module) -> None:
        check_reference(reference)
        self._whole, self._buffers = whole, BufferValues(whole, device=torch.device("cpu"))
        self._enter: Callable[[], AbstractContextManager[object]] = (
            ReferenceWeights(whole).swapped_in if reference == "initial" else partial(reference, model)
        )

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Return the context."""
        own = BufferValues(self._whole)
        self._buffers.restore()
        try:
            with self._enter():
                yield
        finally:
            own.restore()


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
        if torch.accelerator.is_available():  # the copies may be freed afterwards
            torch.accelerator.synchronize()


def _host_copy(parameter: nn.Parameter) -> Tensor:
    local = local_tensor(parameter.detach())
    copy = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.device.type != "cpu")
    return copy.copy_(local)
