"""Activation checkpointing that repeats a forward exactly, while torch's repeats its default random numbers only."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from d9d_dist.errors import UserError
from d9d_dist.shards import local_tensor
from d9d_dist.values._model_tensors import Slot
from d9d_dist.values.buffer_values import PLAIN, BufferValues
from d9d_dist.values.parameter_writes import MarkedParameter, raise_if_written
from d9d_dist.values.seeds import HostRandom, reset_of

_OF_MODULES = vars(nn.Module()).keys() - {"training"}
_OTHER = object()  # the value of an attribute that is left alone


def recompute(module: nn.Module, contexts: Callable[[], Any] = noop_context_fn) -> None:
    """Make a module recompute its activations in backward, in place, with the tensors that its forward had.

    It draws the same numbers of Python, NumPy, torch and of generators of these in an attribute or argument. Attributes
    that are numbers, flags or texts, such as the mode or the active adapter, have the values of forward, and so have
    tensors that still exist. A forward that writes to a parameter is an error. So is a recomputation with other
    outputs; some values of the calls 1, 2, 4, 8 and so on are compared. Buffers are copied before each forward; copies
    of large ones that it does not write are dropped after it. Module hooks, including FSDP's, do not run in the
    recomputation. `contexts` is the `context_fn` of torch's `checkpoint`.
    """
    module.forward = partial(_checkpointed, module, module.forward, contexts, count(1))


# torch.compile skips modules whose forward is torch.utils.checkpoint.checkpoint itself.
def _checkpointed(
    module: nn.Module, forward: Any, contexts: Callable[[], Any], calls: Iterator[int], *args: Any, **kwargs: Any
) -> Any:
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
    tensors = [local_tensor(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    have_values = all(type(each) in {Tensor, nn.Parameter} and not each.is_meta for each in tensors)  # not fake
    is_compared = next(calls).bit_count() == 1 and have_values
    run = _repeatable(module, forward, *contexts(), is_compared=is_compared)
    with set_checkpoint_early_stop(False) if is_compared else nullcontext():  # outputs are needed
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _repeatable(
    module: nn.Module,
    forward: Any,
    first: AbstractContextManager[Any],
    again: AbstractContextManager[Any],
    *,
    is_compared: bool = False,
) -> Callable[..., Any]:
    """Return a function that runs a forward, and in later calls repeats it without effect on the state of the module.

    The copies of buffers are made outside of the contexts of the first call and of the later calls.
    """
    start: _State | None = None
    values: list[Tensor] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal start, values
        if start is None:
            start = _State(module, (args, kwargs))
            with first:
                outputs = forward(*args, **kwargs)
            start.end_forward()
            values = _some_values(outputs) if is_compared else []
            return outputs
        with start.restored(), again:
            outputs = forward(*args, **kwargs)
        if is_compared and not all(map(_are_close, values, _some_values(outputs))):
            raise UserError(
                f"the recomputation of a {type(module).__name__} in backward has other outputs than its forward; "
                "expected equal ones. Its forward depends on state that has changed since, such as a tensor or a "
                "generator outside of the module: pass it as an argument, or leave the module out of activation "
                "checkpointing."
            )
        return outputs

    return run


@torch.no_grad()
def _some_values(outputs: Any) -> list[Tensor]:
    """Return copies of up to about 4,096 values of each tensor."""
    locals_ = [local_tensor(leaf) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    plain = [leaf for leaf in locals_ if leaf.layout == torch.strided and not leaf.is_nested]
    return [leaf.flatten()[:: leaf.numel() // 4096 + 1].clone() for leaf in plain]


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors differ by no more than sums in another order, which some kernels compute."""
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    bound = torch.finfo(one.dtype).eps ** 0.5 / 4
    if one.dtype.itemsize == 1:  # few operators support float8
        one, other = one.float(), other.float()
    scale = one.abs()[one.isfinite()].sum(dtype=torch.float32) / max(1, one.numel())
    return torch.allclose(one, other, rtol=bound, atol=float(bound * scale), equal_nan=True)


class _Weak(NamedTuple):
    """Tensor of an attribute that a graph must not keep."""

    tensor: "ref[Tensor]"


@final
class _State:
    """Tensors, random states, modes and attributes of a module and its parts, as they are now."""

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        self._module, self._buffers, self._host = module, BufferValues(module), HostRandom.now()
        self._arguments = [each for each in pytree.tree_leaves(arguments) if reset_of(each)]
        self._written: list[Slot] = []
        named = module.named_parameters(remove_duplicate=False)
        self._parameters = [MarkedParameter.now(name, each) for name, each in named if not is_lazy(each)]
        self._attributes = [
            (vars(each), {key: value for key, value in vars(each).items() if key not in _OF_MODULES})
            for each in module.modules()
        ]
        held_values = (each for _, held in self._attributes for each in held.values())
        self._generators = [reset for each in (*held_values, *self._arguments) if (reset := reset_of(each))]

    def end_forward(self) -> None:
        """Drop what a graph must not keep: copies of large buffers that were not written, tensors, other objects."""
        raise_if_written(each.name for each in self._parameters if each.is_written)
        self._written = self._buffers.end_forward()
        for _, held in self._attributes:
            held.update((key, _weak(value)) for key, value in held.items() if not isinstance(value, PLAIN))

    @contextmanager
    def restored(self) -> Generator[None]:
        """Set this state for the body, and then the current one. Tensors of the graph keep the values of the body."""
        now = _State(self._module, self._arguments)
        self._set()
        for slot in self._written:
            slot.put(getattr(slot.module, slot.name).clone())
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        now = dict(self._module.named_parameters(remove_duplicate=False))
        for name, each, *_ in self._parameters:
            both, (owner, _, key) = (now.get(name), each), name.rpartition(".")
            is_of_fsdp = DTensor in map(type, both) and all(isinstance(one, nn.Parameter) for one in both)
            if both[0] is not each and not is_of_fsdp:  # FSDP shards and gathers parameters itself
                Slot(self._module.get_submodule(owner), key).put(each)
        self._host.restore()
        for reset in self._generators:
            reset()
        for attributes, held in self._attributes:
            for key in attributes.keys() - _OF_MODULES - held.keys():
                del attributes[key]
            for key, value in held.items():
                now = value.tensor() if isinstance(value, _Weak) else value
                if now is not _OTHER and not (now is None and isinstance(value, _Weak)):
                    attributes[key] = now
        self._buffers.restore()  # after the attributes that describe caches


def _weak(value: Any) -> Any:
    return _Weak(ref(value)) if isinstance(value, Tensor) else _OTHER
