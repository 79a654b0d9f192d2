"""Build of a model's structure without large random draws, for ranks that receive the values from another rank.

Random draws take most of the time of a build. Inside `SkippedDraws` and `RefusedReads`, the first large draw, all later
draws and the operators on their results are skipped. The memory of skipped tensors is never touched. An operation that
needs their values, such as `torch.equal` or `tolist`, raises and sets `failed`; the caller then builds without modes.
"""

import gc
import zlib
from collections.abc import Iterable
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist.values.model_values import digest_values
from d9d_dist.values.parameter_writes import written_tensors

_LARGE_BYTES = 1 << 20
# Methods that read memory without dispatching an operator.
_READS = {getattr(Tensor, name) for name in ("numpy", "tolist", "__array__", "__dlpack__", "__reduce_ex__")}


class _ValuesNeededError(RuntimeError):
    """Error of an operation that needs values that were not drawn."""


@final
class SkippedDraws(TorchDispatchMode):
    """Dispatch mode that leaves large random tensors uninitialized.

    Attributes:
        failed: True if the code needed the values of a skipped tensor. The built model must then be discarded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed = False
        # By storage address: a weak reference and the digest of the skipped operators.
        self._unset: dict[int, tuple[StorageWeakRef, int]] = {}

    def digest(self, tensor: Tensor) -> int | None:
        """Return a digest of the skipped operators that write a tensor's storage, and of their seeds.

        `None` if the tensor has its values.
        """
        if tensor.layout != torch.strided:
            return None
        found = self._unset.get(tensor.untyped_storage()._cdata)
        return None if found is None or found[0].expired() else found[1]

    def has_others(self, registered: Iterable[Tensor]) -> bool:
        """Return True if a skipped tensor is alive that shares no storage with a `registered` tensor."""
        known = {tensor.untyped_storage()._cdata for tensor in registered if tensor.layout == torch.strided}
        others = [storage for address, (storage, _) in self._unset.items() if address not in known]
        if any(not storage.expired() for storage in others):
            gc.collect()  # takes half a second
        return any(not storage.expired() for storage in others)

    def refuse_read(self) -> NoReturn:
        """Set `failed` and raise; `failed` stays true if the model's code catches the error."""
        self.failed = True
        raise _ValuesNeededError("the model's code reads values that were not drawn")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_draw = torch.Tag.nondeterministic_seeded in func.tags
        if not any(map(self._is_unset, inputs)) and not (is_draw and self._is_skipped(func, args, kwargs, inputs)):
            return func(*args, **kwargs)
        aliases = (each.alias_info for each in func._schema.returns)
        if torch.Tag.inplace_view in func.tags or any(each is not None and not each.is_write for each in aliases):
            return func(*args, **kwargs)
        written = list(written_tensors(func, args, kwargs))
        # A written tensor that was not skipped may hold arbitrary memory, so its contents are not digested.
        history = self._history(
            func, args, kwargs, [x for x in inputs if self._is_unset(x) or not any(x is w for w in written)]
        )
        if func._schema.is_mutable:
            return self._skip_write(func, written, history)
        return self._skip_result(func, args, kwargs, history)

    def _is_unset(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and self.digest(tensor) is not None

    def _is_skipped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]) -> bool:
        """Return True if a draw is large, or follows a skipped draw, which did not advance the generator."""
        if inputs and all(each.is_meta for each in inputs):
            return False
        if self._unset:
            return True
        drawn = inputs or pytree.tree_leaves(_on_meta(func, args, kwargs))
        return any(tensor.nbytes >= _LARGE_BYTES for tensor in drawn)

    def _history(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]) -> int:
        plain = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)]
        generator = next((leaf for leaf in plain if isinstance(leaf, torch.Generator)), torch.default_generator)
        rest = [leaf for leaf in plain if not isinstance(leaf, torch.Generator)]
        text = repr((str(func), rest, generator.initial_seed(), [self._input_digest(tensor) for tensor in inputs]))
        return zlib.crc32(text.encode())

    def _input_digest(self, tensor: Tensor) -> object:
        unset = self.digest(tensor)
        return digest_values({"input": tensor}) if unset is None and not tensor.is_meta else unset

    def _skip_write(self, func: Any, written: list[Tensor], history: int) -> Any:
        if len(written) != 1 or len(func._schema.returns) > 1:
            self.refuse_read()
        self._leave_unset(written[0], history)
        return written[0] if func._schema.returns else None

    def _skip_result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], history: int) -> Any:
        try:
            result = _on_meta(func, args, kwargs)
        except (NotImplementedError, RuntimeError, TypeError):
            self.refuse_read()
        if not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            self.refuse_read()
        return pytree.tree_map_only(Tensor, lambda tensor: self._unset_like(tensor, history), result)

    def _unset_like(self, tensor: Tensor, history: int) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        self._leave_unset(made, history)
        return made

    def _leave_unset(self, tensor: Tensor, history: int) -> None:
        storage = tensor.untyped_storage()
        before = self.digest(tensor) or 0
        # Digest the region of the view, too: equal writes to different rows must differ.
        place = repr((before, history, tensor.storage_offset(), tensor.shape, tensor.stride()))
        self._unset[storage._cdata] = StorageWeakRef(storage), zlib.crc32(place.encode())


@final
class RefusedReads(TorchFunctionMode):
    """Function mode beside `SkippedDraws`, for tensor methods that read memory without dispatching an operator."""

    def __init__(self, draws: SkippedDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS and self._draws.digest(args[0]) is not None:
            self._draws.refuse_read()
        return func(*args, **(kwargs or {}))


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on `meta` to get the shapes, strides and dtypes of its results."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return None
        return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

    meta_args, meta_kwargs = pytree.tree_map(convert, (args, kwargs))
    if any(argument.name == "device" for argument in func._schema.arguments):
        meta_kwargs["device"] = torch.device("meta")
    return func(*meta_args, **meta_kwargs)
