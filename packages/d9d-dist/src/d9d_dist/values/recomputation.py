"""Activation checkpointing that repeats a forward exactly: with its buffers, attributes and random numbers.

torch's `checkpoint` restores torch's default generators alone. Buffers and attributes change once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from d9d_dist.values._model_tensors import Slot
from d9d_dist.values.buffer_values import BufferValues
from d9d_dist.values.seeds import HostRandom

_PLAIN = (bool, int, float, str, type(None))


def recompute(module: nn.Module, contexts: Callable[[], Any] = noop_context_fn) -> None:
    """Make a module recompute its activations in backward, in place, with the buffers that its forward had.

    It draws the same numbers of Python, NumPy, torch and of each `torch.Generator` in an attribute. Attributes that are
    numbers, flags or texts, such as the mode or the active adapter, have the values of forward. Buffers are copied
    before each forward; copies of large ones that it does not write are dropped after it. Module hooks, including
    FSDP's, do not run in the recomputation. `contexts` is the `context_fn` of torch's `checkpoint`.
    """
    module.forward = partial(_checkpointed, module, module.forward, contexts, _States(module))


# torch.compile skips modules whose forward is torch.utils.checkpoint.checkpoint itself.
def _checkpointed(
    module: nn.Module, forward: Any, contexts: Callable[[], Any], states: "_States", *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():  # compiled code writes buffers once
        options: Any = {} if contexts is noop_context_fn else {"context_fn": contexts}
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
    return checkpoint(_repeatable(module, forward, states, *contexts()), *args, use_reentrant=False, **kwargs)


def _repeatable(
    module: nn.Module,
    forward: Any,
    states: "_States",
    first: AbstractContextManager[Any],
    again: AbstractContextManager[Any],
) -> Callable[..., Any]:
    """Return a function that runs a forward, and in later calls repeats it without effect on the state of the module.

    The copies of buffers are made outside of the contexts of the first call and of the later calls.
    """
    start: BufferValues | None = None
    written: list[Slot] = []
    begin = states.now()

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal start, written
        if start is None:
            start = BufferValues(module)
            with first:
                outputs = forward(*args, **kwargs)
            written = start.end_forward()
            return outputs
        now, buffers, other = BufferValues(module), [slot.get() for slot in written], states.now()
        start.restore()
        states.restore(begin)
        for slot in written:  # the graph keeps the values of this forward
            slot.put(getattr(slot.module, slot.name).clone())
        try:
            with again:
                return forward(*args, **kwargs)
        finally:
            for slot, buffer in zip(written, buffers, strict=True):
                slot.module._buffers[slot.name] = buffer
            now.restore()
            states.restore(other)

    return run


@final
class _States:
    """Generators and plain attributes of a module and its parts, as they are at the first forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @cached_property
    def _generators(self) -> list[torch.Generator]:
        held = (each for part in self._module.modules() for each in vars(part).values())
        return [each for each in held if isinstance(each, torch.Generator)]

    @cached_property
    def _attributes(self) -> list[tuple[dict[str, Any], str]]:
        held = ((vars(part), key) for part in self._module.modules() for key in vars(part))
        return [(attributes, key) for attributes, key in held if isinstance(attributes[key], _PLAIN)]

    def now(self) -> tuple[HostRandom, list[Tensor], list[Any]]:
        """Return the current states, also of Python's and NumPy's generators."""
        own = [each.get_state() for each in self._generators]
        return HostRandom.now(), own, [attributes.get(key) for attributes, key in self._attributes]

    def restore(self, states: tuple[HostRandom, list[Tensor], list[Any]]) -> None:
        """Set generators and attributes to earlier states."""
        states[0].restore()
        for generator, state in zip(self._generators, states[1], strict=True):
            generator.set_state(state)
        for (attributes, key), value in zip(self._attributes, states[2], strict=True):
            if attributes.get(key) is not value:
                attributes[key] = value
