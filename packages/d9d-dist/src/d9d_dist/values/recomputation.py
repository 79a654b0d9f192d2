"""Activation checkpointing in which buffers, such as running statistics and counters, change once per forward."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from d9d_dist.values._model_tensors import Slot
from d9d_dist.values.buffer_values import BufferValues


def recompute(module: nn.Module, contexts: Callable[[], Any] = noop_context_fn) -> None:
    """Make a module recompute its activations in backward, in place, with the buffers that its forward had.

    Buffers are copied before each forward; copies of large ones that it does not write are dropped after it. Module
    hooks, including FSDP's, do not run in the recomputation. `contexts` is the `context_fn` of torch's `checkpoint`.
    """
    module.forward = partial(_checkpointed, module, module.forward, contexts)


# torch.compile skips modules whose forward is torch.utils.checkpoint.checkpoint itself.
def _checkpointed(module: nn.Module, forward: Any, contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():  # compiled code writes buffers once
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    return checkpoint(_repeatable(module, forward, *contexts()), *args, use_reentrant=False, **kwargs)


def _repeatable(
    module: nn.Module, forward: Any, first: AbstractContextManager[Any], again: AbstractContextManager[Any]
) -> Callable[..., Any]:
    """Return a function that runs a forward, and in later calls repeats it without effect on the buffers.

    The copies of buffers are made outside of the contexts of the first call and of the later calls.
    """
    start: BufferValues | None = None
    written: list[Slot] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal start, written
        if start is None:
            start = BufferValues(module)
            with first:
                outputs = forward(*args, **kwargs)
            written = start.end_forward()
            return outputs
        now, buffers = BufferValues(module), [slot.get() for slot in written]
        start.restore()
        for slot in written:  # the graph keeps the values of this forward
            slot.put(getattr(slot.module, slot.name).clone())
        try:
            with again:
                return forward(*args, **kwargs)
        finally:
            for slot, buffer in zip(written, buffers, strict=True):
                slot.module._buffers[slot.name] = buffer
            now.restore()

    return run
