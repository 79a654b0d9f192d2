"""Derivation of a `StateMapper` from code that moves tensor values, by running it on tensors without values."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from d9d_dist import UserError
from d9d_state import (
    StateMapper,
    TensorInfo,
    concat,
    drop,
    identity,
    narrow,
    parallel,
    permute,
    rename,
    reshape,
    select,
    sequential,
    split,
    stack,
    transpose,
    unstack,
)

_aten = torch.ops.aten
_numbers = count()


@final
@dataclass(frozen=True, eq=False, slots=True)
class _Move:
    """Recorded operation.

    Attributes:
        mapper: The operation as a mapper between unique value names; for an operation that computes new values, its
            name.
        is_view: True if the outputs share memory with the inputs.
        depth: Depth in the graph of operations: 1 without parents, otherwise one more than the deepest parent.
    """

    mapper: StateMapper | str
    is_view: bool
    parents: tuple["_Move", ...]
    depth: int


@final
class RecordedTensor(Tensor):
    """Tensor without values that records the operations by which it is derived from named tensors.

    Conversions between floating-point dtypes are not recorded, because `load_model_state` converts dtypes.

    Attributes:
        move: Operation that produced the tensor; `None` for a tensor created by `named`.
    """

    value_name: str
    move: _Move | None

    @classmethod
    def named(cls, name: str, info: TensorInfo) -> Self:
        """Create the tensor for a named tensor with the given shape and dtype."""
        return cls._of(info.to_meta(), name, None)

    @property
    def is_computed(self) -> bool:
        """True if an operation computed the tensor into new memory, so that in-place writes change no other tensor."""
        return self.move is not None and isinstance(self.move.mapper, str) and not self.move.is_view

    @classmethod
    def _of(cls, meta: Tensor, name: str, move: _Move | None) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype, device=meta.device)
        made.value_name, made.move = name, move
        return made

    @classmethod
    def __torch_dispatch__(  # ty: ignore[incompatible-method-override]  (torch calls it on the class)
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key not in ("device", "pin_memory")}
        recorded = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, RecordedTensor)]
        if func._schema.is_mutable:
            if not recorded[0].is_computed:
                raise _no_mapper(str(func), recorded[0].value_name)
            return recorded[0]
        meta_args, meta_kwargs = pytree.tree_map_only(RecordedTensor, TensorInfo.of, (args, kwargs))
        meta_args, meta_kwargs = pytree.tree_map_only(TensorInfo, TensorInfo.to_meta, (meta_args, meta_kwargs))
        result = func(*meta_args, **meta_kwargs)
        leaves, structure = pytree.tree_flatten(result)
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(results) < len(leaves):
            return result
        if _keeps_values(func, recorded, results):
            same = cls._of(results[0], recorded[0].value_name, recorded[0].move)
            return pytree.tree_unflatten([same], structure)
        outputs = [f"#{next(_numbers)}" for _ in results]
        call = _Call([value.value_name for value in recorded], outputs, recorded, results, args[1:])
        mapper = _MOVES[func](call) if func in _MOVES else str(func)
        parents = tuple(value.move for value in recorded if value.move is not None)
        is_view = any(returned.alias_info is not None for returned in func._schema.returns)
        move = _Move(mapper, is_view, parents, 1 + max((parent.depth for parent in parents), default=0))
        made = [cls._of(meta, name, move) for meta, name in zip(results, outputs, strict=True)]
        return pytree.tree_unflatten(made, structure)


def recorded_mapper(sources: Iterable[str], targets: Mapping[str, Tensor]) -> StateMapper:
    """Return the mapper from named tensors to recorded tensors by output name; it drops names that no target uses.

    Raises:
        UserError: If an operation that produced a target computes values instead of moving them, or a value is used
            twice, because mappers cannot copy values.
    """
    recorded = {name: tensor for name, tensor in targets.items() if isinstance(tensor, RecordedTensor)}
    assert len(recorded) == len(targets), "every tensor must be derived from named tensors"
    for name, tensor in recorded.items():
        for move in (move for level in _levels([tensor]) for move in level):
            if isinstance(move.mapper, str):
                raise _no_mapper(move.mapper, name)
    try:
        mapper = identity(*sources)
        for level in _levels(recorded.values()):
            moves = [move.mapper for move in level if isinstance(move.mapper, StateMapper)]
            taken = {name for move in moves for name in move.inputs}
            others = (name for name in mapper.outputs if name not in taken)
            mapper = sequential(mapper, parallel(*moves, identity(*others)))
        made = {tensor.value_name for tensor in recorded.values()}
        unused = (name for name in mapper.outputs if name not in made)
        renamed = (rename(tensor.value_name, name) for name, tensor in recorded.items())
        return sequential(mapper, parallel(*renamed, drop(*unused)))
    except ValueError as error:
        raise UserError(f"the conversion of the weights cannot be written as a state mapper: {error}") from None


def _levels(tensors: Iterable[RecordedTensor]) -> Iterator[list[_Move]]:
    """Yield the operations that produced tensors, grouped by depth in ascending order."""
    found: dict[_Move, None] = {}
    waiting = [tensor.move for tensor in tensors if tensor.move is not None]
    while waiting:
        move = waiting.pop()
        if move not in found:
            found[move] = None
            waiting += move.parents
    for depth in sorted({move.depth for move in found}):
        yield [move for move in reversed(found) if move.depth == depth]


def _keeps_values(func: Any, recorded: Sequence[RecordedTensor], results: Sequence[Tensor]) -> bool:
    """Return True if an operation returns the values of its only input in the same order and shape."""
    if len(recorded) != 1 or len(results) != 1 or recorded[0].shape != results[0].shape:
        return False
    if func in _COPIES:
        return recorded[0].dtype == results[0].dtype or (
            recorded[0].is_floating_point() and results[0].is_floating_point()
        )
    return func in _MOVES and func not in (_aten.transpose.int, _aten.permute.default, _aten.t.default)


def _no_mapper(operation: str, name: str) -> UserError:
    return UserError(
        f"the weights are converted by {operation} ({name}); expected operations that only move values. Load the model "
        "in a function, which holds a whole copy: model=lambda stage: AutoModel.from_pretrained(folder)."
    )


_COPIES = {
    _aten.clone.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten._to_copy.default,
    _aten.constant_pad_nd.default,  # keeps the values only if the shape is unchanged
}


@final
@dataclass(frozen=True, slots=True)
class _Call:
    """Call of an operation: names and tensors of its inputs and outputs, and the arguments after the first one."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    sources: Sequence[Tensor]
    results: Sequence[Tensor]
    rest: tuple[Any, ...]

    def dim(self, position: int = 0) -> int:
        """Return the dim argument, which is 0 by default."""
        return self.rest[position] if len(self.rest) > position else 0


def _split(call: _Call) -> StateMapper:
    dim = call.dim(1)
    return split(call.inputs[0], call.outputs, [result.shape[dim] for result in call.results], dim=dim)


def _concat(call: _Call) -> StateMapper:
    dim = call.dim()
    return concat(call.inputs, call.outputs[0], dim=dim, sizes=[source.shape[dim] for source in call.sources])


def _reshape(call: _Call) -> StateMapper:
    shape, source_shape = list(call.results[0].shape), list(call.sources[0].shape)
    return reshape(call.inputs[0], call.outputs[0], shape, source_shape=source_shape)


def _narrow(call: _Call) -> StateMapper | str:
    dim = call.dim()
    start, stop, step = slice(*call.rest[1:]).indices(call.sources[0].shape[dim])
    if step != 1:
        return f"a slice of step {step}"
    return narrow(call.inputs[0], call.outputs[0], dim=dim, start=start, length=max(stop - start, 0))


_MOVES: Mapping[Any, Callable[[_Call], StateMapper | str]] = {
    _aten.stack.default: lambda call: stack(call.inputs, call.outputs[0], dim=call.dim()),
    _aten.unbind.int: lambda call: unstack(call.inputs[0], call.outputs, dim=call.dim()),
    _aten.cat.default: _concat,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.transpose.int: lambda call: transpose(call.inputs[0], call.outputs[0], dim0=call.rest[0], dim1=call.rest[1]),
    _aten.t.default: lambda call: transpose(call.inputs[0], call.outputs[0], dim0=0, dim1=1),
    _aten.permute.default: lambda call: permute(call.inputs[0], call.outputs[0], dims=call.rest[0]),
    _aten.view.default: _reshape,
    _aten._unsafe_view.default: _reshape,
    _aten.unsqueeze.default: _reshape,
    _aten.squeeze.dim: _reshape,
    _aten.slice.Tensor: _narrow,
    _aten.select.int: lambda call: select(call.inputs[0], call.outputs[0], dim=call.rest[0], index=call.rest[1]),
}
