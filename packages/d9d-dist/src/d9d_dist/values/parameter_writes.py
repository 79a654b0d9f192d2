"""Detection of parameter writes in forward, which sharding would lose: each forward gathers the parameters again."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from d9d_dist.errors import UserError
from d9d_dist.gradients._owned_gradient import refuse_sparse
from d9d_dist.values._model_tensors import canonical_name
from d9d_dist.values.checksum import checksum


@contextmanager
def refuse_writes(module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Generator[None]:
    """Return a context manager that raises `UserError` if its body replaces or writes to a parameter.

    Writes through an alias are detected too. Run the forward on fake tensors: in-place operators are detected even if
    they do not change the values.
    """
    before = {name: (each, each.untyped_storage()) for name, each in parameters.items()}
    with _Writes() as writes:
        yield
    now = dict(module.named_parameters(remove_duplicate=False))
    raise_if_written(
        name
        for name, (each, storage) in before.items()
        if now.get(name) is not each
        or each.untyped_storage()._cdata != storage._cdata
        or storage._cdata in writes.storages
    )


class MarkedParameter(NamedTuple):
    """Parameter, or a tensor in place of one, whose storage is not read, with its storage and version at a time."""

    name: str
    parameter: torch.Tensor
    storage: int
    version: int

    @classmethod
    def now(cls, name: str, parameter: torch.Tensor) -> "MarkedParameter":
        """Return a parameter with its current storage and version."""
        storage = parameter.untyped_storage()._cdata if isinstance(parameter, nn.Parameter) else 0
        return cls(name, parameter, storage, parameter._version)

    @property
    def is_written(self) -> bool:
        """True if the parameter was written in place, or its storage replaced, since the time."""
        return self[2:] != MarkedParameter.now(self.name, self.parameter)[2:]


_GATHERED = WeakKeyDictionary[nn.Module, list[MarkedParameter]]()
"""Parameters of sharded modules whose first forward was compared. FSDP gathers into the same objects again."""


def refuse_writes_in_first_forward(module: nn.Module) -> None:
    """Make the first forward raise `UserError` if it changes parameters: FSDP would lose the writes.

    Call it before `fully_shard`: the check must run after the hooks of tensor parallelism restore the parameters and
    before FSDP frees them.
    """
    _compare_next_forward(module, prepend=False)


def refuse_later_writes(model: nn.Module, *, compare_next: bool = False) -> None:
    """Raise `UserError` if a forward wrote to sharded parameters after the first forward. No collectives.

    Version counters detect in-place writes in any forward since the first, and storage addresses detect `.data = ...`.
    In-place writes to `.data` change neither. With `compare_next`, the next forward is therefore compared again by
    checksums. A comparison reads the parameters twice and synchronizes host and device: too slow for every step.
    """
    for module in model.modules():
        if (gathered := _GATHERED.get(module)) is not None:
            raise_if_written(each.name for each in gathered if each.is_written)
            if compare_next:
                _compare_next_forward(module, prepend=True)


def _compare_next_forward(module: nn.Module, *, prepend: bool) -> None:
    """Make the next forward raise `UserError` if it changes parameters.

    Checksums are compared, because in-place writes to `.data` do not change version counters. With `prepend`, the
    comparison runs before the hooks that were registered earlier.
    """
    before: dict[str, tuple[torch.Tensor, tuple[int, int, bool], torch.Tensor | None]] = {}
    refusals: list[RemovableHandle] = []

    def note(_module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # Traced tensors have no version counters.
        refusals.extend(_refuse_state_dict(module))
        for name, each in _gathered(module):
            if each.requires_grad:
                refuse_sparse_gradient(name, each)
            has_values = not (each.is_meta or isinstance(each, FakeTensor))
            before[name] = each, _state(each), checksum(each) if has_values else None

    def compare(_module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for handle in (*handles, *refusals):
            handle.remove()
        now = dict(_gathered(module))
        # Replicated parameters, which their module's own hooks swap for DTensors again, are not compared.
        kept = {name: found for name, found in before.items() if name in now}
        names = [name for name, (each, state, _) in kept.items() if now[name] is not each or _state(each) != state]
        pairs = {
            name: torch.stack([total, checksum(each)])
            for name, (each, _, total) in kept.items()
            if name not in names and total is not None
        }
        if pairs:  # one host-device synchronization for all parameters
            found = torch.stack(list(pairs.values())).tolist()
            names += [name for name, (first, second) in zip(pairs, found, strict=True) if first != second]
        before.clear()
        raise_if_written(names)
        if module not in _GATHERED:
            _GATHERED[module] = [MarkedParameter.now(name, each) for name, each in now.items()]

    handles = [module.register_forward_pre_hook(note), module.register_forward_hook(compare, prepend=prepend)]


def _refuse_state_dict(module: nn.Module) -> list[RemovableHandle]:
    """Make calls of `state_dict` on a module and its submodules raise `UserError`; return the hooks."""

    def refuse(owner: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        raise UserError(
            f"forward calls state_dict() of a {type(owner).__name__}, whose parameters are sharded; expected no such "
            "call, because it would return shards. Use dict(module.named_parameters())."
        )

    return [each.register_state_dict_pre_hook(refuse) for each in module.modules()]


def refuse_sparse_gradient(name: str, parameter: torch.Tensor) -> None:
    """Make the next backward raise `UserError` if the gradient of a parameter is sparse."""

    def check(gradient: torch.Tensor) -> None:
        handle.remove()
        refuse_sparse(gradient, canonical_name(name))

    handle = parameter.register_hook(check)


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments that an operator writes to, by its schema."""
    for place, name in _written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write]


@final
class _Writes(TorchDispatchMode):
    """Dispatch mode that records the storages to which operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.storages |= {each.untyped_storage()._cdata for each in written_tensors(func, args, kwargs or {})}
        return func(*args, **(kwargs or {}))


def raise_if_written(names: Iterable[str]) -> None:
    """Raise `UserError` if there are names, of parameters that a forward has replaced or written."""
    if found := [*map(canonical_name, names)]:
        raise UserError(
            f"forward replaces or writes to {', '.join(found)}, for example by .to(dtype), requires_grad_ or "
            "under no_grad; expected only reads, because forward gathers sharded parameters again, and a recomputed "
            "one runs twice. Set their dtype and requires_grad in build, compute new tensors, or register buffers."
        )


def _gathered(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that FSDP gathered.

    In later forwards, replicated parameters may also be plain local tensors, because the module's own hooks ran
    before. Forward may write to replicated parameters, so they are excluded.
    """
    parameters = [(name, each) for name, each in module.named_parameters() if not isinstance(each, DTensor)]
    if (first := _GATHERED.get(module)) is None:
        return parameters
    names = {each.name for each in first}
    return [(name, each) for name, each in parameters if name in names]


def _state(parameter: torch.Tensor) -> tuple[int, int, bool]:
    return parameter.data_ptr(), parameter._version, parameter.requires_grad
