"""Run of a model on `meta` that keeps the values of tensors that do not depend on parameters.

Models read such values: sizes of images, positions, masks. Tensors of a batch stay on the CPU with their values, and so
do results of operations on them alone. A result of an operation with a tensor on `meta` is on `meta`. An integer tensor
to which such a result is written counts as one on `meta` from then on, with all its views.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_META = torch.device("meta")


@contextmanager
def known_values() -> Generator[None]:
    """Create tensors on `meta` in the body, except those whose values are known: see the module docstring."""
    with _META, _FromLists(), _KnownValues():
        yield


@final
class _FromLists(TorchFunctionMode):
    """Function mode in which tensors created from lists and numbers keep their values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in {Tensor.tolist, Tensor.numpy}:  # they read memory; `_KnownValues` sees the copy
            args = (args[0].clone(), *args[1:])
        if func == torch.take_along_dim and args[0].is_meta:  # it compares the devices before its operators run
            args = (args[0], args[0].new_empty(args[1].shape, dtype=torch.int64), *args[2:])
        is_from_list = func in {torch.tensor, torch.as_tensor} and not isinstance(args[:1] and args[0], Tensor)
        return func(*args, **({**kwargs, "device": "cpu"} if is_from_list else kwargs))


@final
class _KnownValues(TorchDispatchMode):
    """Dispatch mode in which operators accept tensors on the CPU and on `meta` together."""

    def __init__(self) -> None:
        super().__init__()
        self._unknown: dict[int, Any] = {}  # storages on the CPU without known values

    def _is_known(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and tensor.untyped_storage()._cdata not in self._unknown

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not all(map(self._is_known, tensors)):
            written = [
                each
                for argument, each in zip(func._schema.arguments, args, strict=False)
                if argument.is_write and isinstance(each, Tensor) and not each.is_meta
            ]
            if any(each.is_floating_point() for each in written):
                raise NotImplementedError(f"{func} writes values that depend on parameters to a tensor that does not")
            self._unknown |= {each.untyped_storage()._cdata: each.untyped_storage() for each in written}
            args, kwargs = pytree.tree_map_only(Tensor, lambda x: x if self._is_known(x) else _moved(x), (args, kwargs))
            result = _on_meta(func, args, kwargs)
            return written[0] if written else result
        if kwargs.get("device") != _META:
            return func(*args, **kwargs)
        if not tensors:
            found = func(*args, **kwargs)
            # Tensors such as empty ones are written to later, usually with values that depend on parameters.
            if found.is_floating_point() and func.overloadpacket not in {
                torch.ops.aten.arange,
                torch.ops.aten.linspace,
            }:
                return found
        return func(*args, **{**kwargs, "device": torch.device("cpu")})


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator on `meta`. The size of a selection depends on known values."""
    aten = torch.ops.aten
    if func.overloadpacket is aten.masked_select and not args[1].is_meta:
        return args[0].new_empty(int(args[1].expand(args[0].shape).sum()))
    if func.overloadpacket in {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}:
        indices: list[Any] = []
        for each in args[1]:
            is_mask = each is not None and not each.is_meta and each.dtype in {torch.bool, torch.uint8}
            indices.extend(each.nonzero().unbind(1) if is_mask else [each])
        args = (args[0], indices, *args[2:])
    args, kwargs = pytree.tree_map_only(Tensor, _moved, (args, kwargs))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": _META}
    return func(*args, **kwargs)


def _moved(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
