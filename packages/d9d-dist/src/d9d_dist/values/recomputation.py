"""Activation checkpointing that repeats a forward exactly, while torch's repeats its default random numbers only."""

import random
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from d9d_dist.values._model_tensors import Slot
from d9d_dist.values.buffer_values import BufferValues
from d9d_dist.values.seeds import HostRandom

_PLAIN = (bool, int, float, str, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))
_OTHER = object()  # the value of an attribute that is left alone


def recompute(module: nn.Module, contexts: Callable[[], Any] = noop_context_fn) -> None:
    """Make a module recompute its activations in backward, in place, with the buffers that its forward had.

    It draws the same numbers of Python, NumPy, torch and of generators of these in an attribute. Attributes that are
    numbers, flags or texts, such as the mode or the active adapter, have the values of forward. Buffers are copied
    before each forward; copies of large ones that it does not write are dropped after it. Module hooks, including
    FSDP's, do not run in the recomputation. `contexts` is the `context_fn` of torch's `checkpoint`.
    """
    module.forward = partial(_checkpointed, module, module.forward, contexts)


# torch.compile skips modules whose forward is torch.utils.checkpoint.checkpoint itself.
def _checkpointed(module: nn.Module, forward: Any, contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        options: Any = {} if contexts is noop_context_fn else {"context_fn": contexts}
        eager: list[Callable[..., Any]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # compiled code writes buffers once
                return forward(*args, **kwargs)
            eager[:] = eager or [_repeatable(module, forward, *noop_context_fn())]  # forward breaks the graph
            return eager[0](*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)
    return checkpoint(_repeatable(module, forward, *contexts()), *args, use_reentrant=False, **kwargs)


def _repeatable(
    module: nn.Module, forward: Any, first: AbstractContextManager[Any], again: AbstractContextManager[Any]
) -> Callable[..., Any]:
    """Return a function that runs a forward, and in later calls repeats it without effect on the state of the module.

    The copies of buffers are made outside of the contexts of the first call and of the later calls.
    """
    start: _State | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal start
        if start is None:
            start = _State(module)
            with first:
                outputs = forward(*args, **kwargs)
            start.end_forward()
            return outputs
        with start.restored(), again:
            return forward(*args, **kwargs)

    return run


@final
class _State:
    """Buffers, random states, modes and attributes of a module and its parts, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._buffers, self._host = module, BufferValues(module), HostRandom.now()
        self._written: list[Slot] = []
        self._modes = [(each, each.training) for each in module.modules()]
        self._attributes = [
            (vars(each), {key: value for key, value in vars(each).items() if key not in _OF_MODULES})
            for each, _ in self._modes
        ]
        self._generators = [reset for _, held in self._attributes for reset in map(_reset_of, held.values()) if reset]

    def end_forward(self) -> None:
        """Drop what a graph must not keep: copies of large buffers that were not written, and attributes not plain."""
        self._written = self._buffers.end_forward()
        for _, held in self._attributes:
            held.update((key, _OTHER) for key, value in held.items() if not isinstance(value, _PLAIN))

    @contextmanager
    def restored(self) -> Generator[None]:
        """Set this state for the body, and then the current one. Tensors of the graph keep the values of the body."""
        now, own = _State(self._module), [(slot, slot.get()) for slot in self._written]
        self._set()
        for slot in self._written:
            slot.put(getattr(slot.module, slot.name).clone())
        try:
            yield
        finally:
            for slot, tensor in own:
                slot.module._buffers[slot.name] = tensor
            now._set()

    def _set(self) -> None:
        self._buffers.restore()
        self._host.restore()
        for reset in self._generators:
            reset()
        for module, mode in self._modes:
            if module.training is not mode:
                module.training = mode
        for attributes, held in self._attributes:
            for key in attributes.keys() - _OF_MODULES - held.keys():
                del attributes[key]
            for key, value in held.items():
                if value is not _OTHER and attributes.get(key, _OTHER) is not value:
                    attributes[key] = value


def _reset_of(value: Any) -> Callable[[], object] | None:
    """Return a function that sets a random generator to its current state; None for another value."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator) or (numpy and isinstance(value, numpy.random.RandomState)):
        return partial(value.set_state, value.get_state())
    if numpy and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None
