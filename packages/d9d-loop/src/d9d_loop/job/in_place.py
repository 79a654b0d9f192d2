"""Detection of in-place operations on values that backward needs: where the value is saved, and where it is changed."""

import sys
from functools import cache
from types import CodeType
from typing import Any, final

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_loop.user_frames import describe_place, is_users

_is_users = cache(is_users)
_Place = tuple[str, CodeType | None, int]
"""Name of the module, and code and line of the user, if any."""


@final
class InPlaceCheck(TorchDispatchMode):
    """Context that records saved tensors and in-place writes of a forward. `message` runs the backward, if necessary.

    Enter it after a fake mode. Fake tensors have version counters as other tensors do.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._saved: list[tuple[Tensor, int, _Place]] = []
        self._writes: dict[int, _Place] = {}
        self._found: tuple[Tensor, int, _Place] | None = None

    def __enter__(self) -> "InPlaceCheck":
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._hooks.__exit__(exc_type, exc_val, exc_tb)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            place = self._place()
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]
                    self._writes.update((_storage(each), place) for each in written)
        return func(*args, **(kwargs or {}))

    def message(self, loss: Tensor) -> str:
        """Return the message about a changed value that the backward of the loss reads; empty if there is none."""
        if not loss.requires_grad or all(tensor._version == version for tensor, version, _ in self._saved):
            return ""
        try:
            loss.backward()
        except Exception:
            if self._found is None:
                return ""
        if self._found is None:
            return ""
        tensor, _, saved = self._found
        written = self._writes.get(_storage(tensor))
        places = [("changed in", written), ("needed by", saved)] if written else [("needed by", saved)]
        return "\n".join(
            [
                f"the backward of the first batch fails: an in-place operation{_of(written)} changes a value of shape "
                f"{list(tensor.shape)} that the backward{_of(saved)} needs.",
                *(f"  {word} {describe_place(code, line)}" for word, (_, code, line) in places if code),
                "Use an operation that returns a new tensor, such as x = x + y for x += y, or inplace=False.",
            ]
        )

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int, _Place]:
        saved = (tensor, tensor._version, self._place())
        self._saved.append(saved)
        return saved

    def _unpack(self, saved: tuple[Tensor, int, _Place]) -> Tensor:
        if saved[0]._version != saved[1] and self._found is None:
            self._found = saved
        return saved[0]

    def _place(self) -> _Place:
        """Return the innermost module that runs, and the innermost line of the user's code."""
        frame: Any = sys._getframe(2)
        name, code, line = "", None, 0
        while frame is not None and not (name and code):
            if not name:
                name = self._names.get(id(frame.f_locals.get("self")), "")
            if code is None and _is_users(frame.f_code.co_filename):
                code, line = frame.f_code, frame.f_lineno
            frame = frame.f_back
        return name, code, line


def _storage(tensor: Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def _of(place: _Place | None) -> str:
    return f" in {place[0]}" if place is not None and place[0] else ""
