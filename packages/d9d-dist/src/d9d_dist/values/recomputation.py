"""Activation checkpointing that repeats a forward exactly: with its buffers, which change once, and its random numbers.

torch's `checkpoint` restores torch's default generators alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from d9d_dist.values._model_tensors import Slot
from d9d_dist.values.buffer_values import BufferValues
from d9d_dist.values.seeds import HostRandom


def recompute(module: nn.Module, contexts: Callable[[], Any] = noop_context_fn) -> None:
    """Make a module recompute its activations in backward, in place, with the buffers that its forward had.

    It draws the same numbers of Python, NumPy, torch and of each `torch.Generator` in an attribute. Buffers are copied
    before each forward; copies of large ones that it does not write are dropped after it. Module hooks, including
    FSDP's, do not run in the recomputation. `contexts` is the `context_fn` of torch's `checkpoint`.
    """
    attributes = (each for part in module.modules() for each in vars(part).values())
    generators = [each for each in attributes if isinstance(each, torch.Generator)]
    module.forward = partial(_checkpointed, module, module.forward, contexts, partial(_RandomStates, generators))


# torch.compile skips modules whose forward is torch.utils.checkpoint.checkpoint itself.
def _checkpointed(module: nn.Module, forward: Any, contexts: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():  # compiled code writes buffers once
        options: Any = {} if contexts is noop_context_fn else {"context_fn": contexts}
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
    return checkpoint(_repeatable(module, forward, states, *contexts()), *args, use_reentrant=False, **kwargs)


def _repeatable(
    module: nn.Module,
    forward: Any,
    states: Callable[[], "_RandomStates"],
    first: AbstractContextManager[Any],
    again: AbstractContextManager[Any],
) -> Callable[..., Any]:
    """Return a function that runs a forward, and in later calls repeats it without effect on buffers and generators.

    The copies of buffers are made outside of the contexts of the first call and of the later calls.
    """
    start: BufferValues | None = None
    written: list[Slot] = []
    random = states()

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal start, written
        if start is None:
            start = BufferValues(module)
            with first:
                outputs = forward(*args, **kwargs)
            written = start.end_forward()
            return outputs
        now, buffers, random_now = BufferValues(module), [slot.get() for slot in written], states()
        start.restore()
        random.restore()
        for slot in written:  # the graph keeps the values of this forward
            slot.put(getattr(slot.module, slot.name).clone())
        try:
            with again:
                return forward(*args, **kwargs)
        finally:
            for slot, buffer in zip(written, buffers, strict=True):
                slot.module._buffers[slot.name] = buffer
            now.restore()
            random_now.restore()

    return run


@final
class _RandomStates:
    """States of the generators that torch's `checkpoint` does not restore."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._host = HostRandom.now()
        self._own = [(each, each.get_state()) for each in generators]

    def restore(self) -> None:
        """Set the generators to these states."""
        self._host.restore()
        for generator, state in self._own:
            generator.set_state(state)
