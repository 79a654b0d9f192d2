"""Activation checkpointing that repeats a forward exactly, while torch's repeats its default random numbers only."""

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
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
_OTHER = object()  # the value of an attribute that is not plain, which is left alone


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
    start: BufferValues | None = None
    written: list[Slot] = []
    begin = _State(module, plain=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal start, written
        if start is None:
            start = BufferValues(module)
            with first:
                outputs = forward(*args, **kwargs)
            written = start.end_forward()
            return outputs
        now, buffers, other = BufferValues(module), [slot.get() for slot in written], _State(module, plain=False)
        start.restore()
        begin.restore()
        for slot in written:  # the graph keeps the values of this forward
            slot.put(getattr(slot.module, slot.name).clone())
        try:
            with again:
                return forward(*args, **kwargs)
        finally:
            for slot, buffer in zip(written, buffers, strict=True):
                slot.module._buffers[slot.name] = buffer
            now.restore()
            other.restore()

    return run


@final
class _State:
    """Copy of the random states, modes and attributes of a module and its parts; of torch's layers, only of floats.

    Args:
        plain: True to hold only numbers, flags and texts. A graph that holds the copy must not keep other attributes.
    """

    def __init__(self, module: nn.Module, *, plain: bool) -> None:
        modules = list(module.modules())
        self._plain, self._host, self._modes = plain, HostRandom.now(), [(each, each.training) for each in modules]
        self._generators: list[Callable[[], object]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for each in modules:
            held = {key: value for key, value in vars(each).items() if key not in _OF_MODULES}
            kinds = float if type(each).__module__.startswith("torch.nn.modules.") else _PLAIN
            self._generators += filter(None, map(_reset_of, held.values()))
            if plain or kinds is float:
                held = {key: value if isinstance(value, kinds) else _OTHER for key, value in held.items()}
            self._attributes.append((vars(each), held))

    def restore(self) -> None:
        """Set generators, modes and attributes to the values of the copy, and delete new attributes."""
        self._host.restore()
        for reset in self._generators:
            reset()
        for module, mode in self._modes:
            if module.training is not mode:
                module.training = mode
        for attributes, held in self._attributes:
            for key in attributes.keys() - _OF_MODULES - held.keys():
                if not self._plain or isinstance(attributes[key], _PLAIN):
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
